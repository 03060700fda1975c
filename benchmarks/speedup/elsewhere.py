"""
Does the default harm where nothing was tuned? Plain Trainer and HybridTrainer on another text, model and batch, at
learning rates around the best one, in short and long runs, and with other optimizers.

    python -m benchmarks.speedup.elsewhere --workers 2      # about an hour on two cores; goes on where it stopped
    python -m benchmarks.speedup.elsewhere --report

The text are the C++ headers that torch installs, the model is a Llama of 0.3M parameters (3 layers, hidden 64,
vocabulary 1,024), a batch has 8 rows of 64 tokens. Every optimizer's learning rate is searched in factors of two with
plain Trainer on seed 0, for each length of run, until the best one is interior; then AdamW is run at half, once, twice
and four times that rate, the other optimizers at it, on all seeds, plain and as HybridTrainer comes. Both arms see the
same sequences in the same order.
"""

from __future__ import annotations

import math
import statistics
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.results import Results, command_line, provenance
from benchmarks.speedup.report import matched_steps
from benchmarks.speedup.tasks import QUIET, quickstart
from benchmarks.workers import keep_busy

HERE = Path(__file__).resolve().parent
STEPS = (40, 100, 400)
BUDGETS = (500, 600, 800)
"""Longer runs of plain AdamW, for the speed-up of the longest ones."""
FACTORS = (0.5, 1.0, 2.0, 4.0)
FIRST_RATES = {"adamw_torch": 6e-3, "muon": 3e-3, "sgd": 0.5, "rmsprop": 3e-3, "adafactor": 1e-2}
"""By optimizer, the rate that its search begins at."""
MOST_RATES = 9


@dataclass(frozen=True)
class Run:
    optim: str
    steps: int
    rate: float
    seed: int
    arm: str

    def __str__(self) -> str:
        return f"{self.optim:12s} {self.arm:7s} {self.steps} steps, rate {self.rate:.3g}, seed {self.seed}"


KEY = tuple(Run.__dataclass_fields__)


# What happens in a worker.

_DATA: dict = {}


def data() -> dict:
    """Training and test rows of 64 tokens; the same in every process."""
    if not _DATA:
        import datasets
        import torch
        from transformers.utils import logging

        torch.set_num_threads(1)
        datasets.disable_progress_bars()
        logging.disable_progress_bar()
        root = Path(torch.__file__).parent / "include" / "torch" / "csrc"
        texts = [path.read_text(encoding="utf-8", errors="ignore") for path in sorted(root.rglob("*.h"))]
        tokenizer = quickstart().train_tokenizer(texts, vocab_size=1024)
        rows = quickstart().blocks(datasets.Dataset.from_dict({"text": texts}), tokenizer, 64)
        parts = rows.train_test_split(256, seed=0)
        _DATA.update(train=parts["train"], test=parts["test"])
    return _DATA


def make(run: Run) -> dict:
    """Train once, and evaluate."""
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed

    from hf_hybrid import HybridConfig, HybridTrainer

    rows = data()
    set_seed(run.seed)
    shape = {"hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 3, "num_attention_heads": 4}
    model = LlamaForCausalLM(
        LlamaConfig(vocab_size=1024, max_position_embeddings=128, bos_token_id=None, eos_token_id=0, **shape)
    )
    # Plain Trainer has no Muon: there it is HybridTrainer with the switch off, which is plain Trainer bit for bit.
    hybrid = run.arm == "hybrid" or run.optim == "muon"
    with tempfile.TemporaryDirectory() as folder:
        values = {
            **{"output_dir": folder, "max_steps": run.steps, "learning_rate": run.rate, "seed": run.seed},
            **{"optim": run.optim, "per_device_train_batch_size": 8, "per_device_eval_batch_size": 32},
            **{"warmup_steps": 0.05, "use_cpu": True, **QUIET},
        }
        if hybrid:
            values |= {"auto_lr": "off", "enable_predict": run.arm == "hybrid"}
        trainer = (HybridTrainer if hybrid else Trainer)(
            model,
            (HybridConfig if hybrid else TrainingArguments)(**values),
            train_dataset=rows["train"],
            eval_dataset=rows["test"],
        )
        started = time.process_time()
        trainer.train()
        found = {"cpu_seconds": time.process_time() - started, "eval_loss": trainer.evaluate()["eval_loss"]}
    if run.arm == "hybrid":
        summary = trainer.hybrid_summary()
        kept = ("no_leaps", "leaps_by_verdict", "roll_backs", "backward_passes", "probe_cost_steps", "leap_cost_steps")
        found["summary"] = {name: summary.get(name) for name in kept}
    return found


# What is wanted, and what it shows.


class Table:
    """What was run, and what is to be run next."""

    def __init__(self, results: Results, seeds: list[int]):
        self.results, self.seeds = results, seeds

    def loss(self, run: Run) -> float | None:
        """The held-out loss: infinite if the run diverged, `None` if it was not made."""
        row = self.results.get(**asdict(run))
        return None if row is None else math.inf if row["eval_loss"] is None else row["eval_loss"]

    def best_rate(self, optim: str, steps: int) -> tuple[float | None, list[Run]]:
        """The best rate of plain training on seed 0, or `None` and the runs that the search needs next."""
        rates = [FIRST_RATES[optim] * factor for factor in (0.5, 1.0, 2.0)]
        while len(rates) <= MOST_RATES:
            runs = [Run(optim, steps, rate, 0, "plain") for rate in rates]
            missing = [run for run in runs if self.loss(run) is None]
            if missing:
                return None, missing
            best = min(rates, key=lambda rate: self.loss(Run(optim, steps, rate, 0, "plain")))
            if best not in (rates[0], rates[-1]):
                return best, []
            rates = [rates[0] / 2, *rates] if best == rates[0] else [*rates, rates[-1] * 2]
        return best, []

    def rates(self, optim: str, best: float) -> list[float]:
        return [best * factor for factor in FACTORS] if optim == "adamw_torch" else [best]

    def wanted(self) -> list[Run]:
        """All runs that can be named now, AdamW's first: its searches, both arms on every seed, longer plain runs."""
        runs = []
        for optim in FIRST_RATES:
            for steps in STEPS:
                best, missing = self.best_rate(optim, steps)
                runs += missing
                if best is None:
                    continue
                for seed in self.seeds:
                    for rate in self.rates(optim, best):
                        runs += [Run(optim, steps, rate, seed, arm) for arm in ("plain", "hybrid")]
                    if optim == "adamw_torch" and steps == STEPS[-1]:
                        runs += [Run(optim, budget, best, seed, "plain") for budget in BUDGETS]
        return [run for run in dict.fromkeys(runs) if self.loss(run) is None]

    def add(self, run: Run, found: dict) -> None:
        self.results.add({**asdict(run), **found, **provenance(1)})
        print(f"{run}: {self.loss(run):.4f}", flush=True)

    def report(self) -> None:
        print(
            "| optimizer | steps | rate, over the best | plain, by seed | hybrid, by seed | mean difference | leaps |"
        )
        print("|---|---|---|---|---|---|---|")
        for optim in FIRST_RATES:
            for steps in STEPS:
                best, _ = self.best_rate(optim, steps)
                for rate in self.rates(optim, best) if best else []:
                    self._row(optim, steps, rate, best)
        best, _ = self.best_rate("adamw_torch", STEPS[-1])
        if best:
            print("\nS of the default after", STEPS[-1], "steps at AdamW's best rate, by seed:")
            print(" / ".join(f"{'> ' * (how == 'beyond')}{value:.2f}" for value, how in self.speed_ups(best)))

    def pairs(self, optim: str, steps: int, rate: float) -> tuple[list[tuple[float, float]], dict[str, int]]:
        """Losses of the plain and the hybrid run, by seed, and how many leaps had which verdict."""
        pairs, verdicts = [], {}
        for seed in self.seeds:
            plain, hybrid = (Run(optim, steps, rate, seed, arm) for arm in ("plain", "hybrid"))
            if None not in (losses := (self.loss(plain), self.loss(hybrid))):
                pairs.append(losses)
                made = self.results.get(**asdict(hybrid))["summary"]["leaps_by_verdict"]
                verdicts = {name: verdicts.get(name, 0) + made.get(name, 0) for name in {**verdicts, **made}}
        return pairs, verdicts

    def speed_ups(self, best: float) -> list[tuple[float, str]]:
        """S: backward passes that plain training needs for the loss of a hybrid run, over those of that run."""
        found = []
        for seed in self.seeds:
            row = self.results.get(**asdict(Run("adamw_torch", STEPS[-1], best, seed, "hybrid")))
            plain = ((n, self.loss(Run("adamw_torch", n, best, seed, "plain"))) for n in (*STEPS[1:], *BUDGETS))
            curve = [(steps, loss) for steps, loss in plain if loss is not None]
            if row is not None and row["eval_loss"] is not None and len(curve) > 1:
                steps, how = matched_steps(row["eval_loss"], curve)
                found.append((steps / row["summary"]["backward_passes"], how))
        return found

    def _row(self, optim: str, steps: int, rate: float, best: float) -> None:
        pairs, verdicts = self.pairs(optim, steps, rate)
        if not pairs:
            return
        over = relative(pairs)
        error = statistics.stdev(over) / math.sqrt(len(over)) if len(over) > 1 else math.nan
        losses = [" / ".join(f"{pair[arm]:.3f}" for pair in pairs) for arm in (0, 1)]
        told = ", ".join(f"{verdict} {count}" for verdict, count in sorted(verdicts.items())) or "none"
        mean = f"{statistics.fmean(over):+.2f} +- {error:.2f} %"
        print(f"| {optim} | {steps} | {rate:.3g}, {rate / best:g} | {losses[0]} | {losses[1]} | {mean} | {told} |")


def relative(pairs: list[tuple[float, float]]) -> list[float]:
    return [100 * (hybrid / plain - 1) for plain, hybrid in pairs]


def main() -> None:
    parser = command_line(__doc__, HERE)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--minutes", type=float, default=math.inf, help="Begin no run after that many.")
    parser.add_argument("--report", action="store_true", help="Only print the table.")
    args = parser.parse_args()
    table = Table(Results(args.results, "elsewhere", KEY), args.seeds)
    if not args.report:
        keep_busy(make, table.wanted, table.add, workers=args.workers, minutes=args.minutes)
    table.report()


if __name__ == "__main__":
    main()
