"""
Loss-matched speed-up of HybridTrainer over plain Trainer.

S is the number of backward passes that plain `Trainer` needs, with a complete schedule of its own, for the final
held-out loss of a hybrid run, over the backward passes of that run. Plain `Trainer` is run at several budgets and
interpolated in log steps. Train, probe and evaluation sequences are disjoint; all arms see the same training sequences
in the same order.

    python benchmarks/acceleration.py --workers 2            # all tasks; finished runs are kept and not repeated
    python benchmarks/acceleration.py --task code-best --seeds 0
    python benchmarks/acceleration.py --report               # tables from what is there

Tasks: `code-*` trains the quickstart's Llama from scratch on Python's source, `docs-*` fine-tunes the result to the
language reference (`pydoc_data.topics`). `*-default` uses the default learning rate, 5e-5 with linear decay; `*-best`
the rate that is best for plain `Trainer`, found on a grid with an interior optimum. One JSON per run is written to
`benchmarks/results/acceleration/`, the summary beside it. Everything runs on one CPU thread per worker.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import json
import math
import multiprocessing
import os
import platform
import statistics
import sys
import tempfile
from dataclasses import asdict, dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent
RESULTS = ROOT / "results" / "acceleration"
SEQUENCE, BATCH = 128, 8
BASE_STEPS, BASE_RATE = 900, 2e-3
"""The model that `docs` starts from: plain Trainer on `code`."""
GRID = (1e-3, 2e-3, 4e-3, 8e-3)
DEFAULT_RATE = 5e-5


@dataclass(frozen=True)
class Run:
    """One training run; its name is the name of its file."""

    text: str
    arm: str
    steps: int
    rate: float
    seed: int
    options: dict = field(default_factory=dict, hash=False)

    @property
    def name(self) -> str:
        return f"{self.text}-{self.arm}-{self.steps}-{self.rate:g}-{self.seed}"


ARMS = {
    "plain": None,
    "hybrid": {},
    "none": {"direction": "none", "lr_rescue": "off"},
    "disabled": {"enable_predict": False},
}
STEPS = {"code": 300, "docs": 150}
BUDGETS = {"code": (300, 345, 400, 500), "docs": (150, 175, 200, 250)}


def grid_runs(text: str) -> list[Run]:
    return [Run(text, "plain", STEPS[text], rate, 0) for rate in GRID]


def best_rate(text: str) -> float:
    """
    Of the grid on seed 0.

    Raises:
        RuntimeError: If the optimum lies at an end of the grid.
    """
    losses = {rate: load(run)["eval_loss"] for rate, run in zip(GRID, grid_runs(text))}
    best = min(losses, key=losses.get)
    if best in (GRID[0], GRID[-1]):
        raise RuntimeError(f"The best learning rate of `{text}`, {best:g}, is at an end of the grid. Widen `GRID`.")
    return best


def task_runs(task: str, seeds: list[int]) -> list[Run]:
    """Runs of a task, those that decide its number first."""
    text, kind = task.split("-")
    rate = DEFAULT_RATE if kind == "default" else best_rate(text)
    steps = STEPS[text]
    runs = [Run(text, "hybrid", steps, rate, seed) for seed in seeds]
    budgets = BUDGETS[text] if kind == "best" else (steps, 4 * steps)
    runs += [Run(text, "plain", budget, rate, seed) for budget in budgets for seed in seeds]
    runs += [Run(text, "none", steps, rate, seed) for seed in seeds]
    # Equal to plain bit for bit, which the tests prove: one run shows it here too.
    return [*runs, Run(text, "disabled", steps, rate, seeds[0])]


def path_of(run: Run) -> Path:
    return RESULTS / f"{run.name}.json"


def load(run: Run) -> dict:
    return json.loads(path_of(run).read_text(encoding="utf-8"))


def quickstart():
    """The functions of examples/01_quickstart.py: the benchmark trains what a new user sees."""
    spec = importlib.util.spec_from_file_location("quickstart", ROOT.parent / "examples" / "01_quickstart.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["quickstart"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


class Worker:
    """Loads text, tokenizer and model once per process."""

    def __init__(self, threads: int):
        import datasets
        import torch
        from transformers.utils import logging

        datasets.disable_progress_bars()
        logging.disable_progress_bar()
        torch.set_num_threads(threads)
        self.quickstart = quickstart()
        self.tokenizer = self.quickstart.train_tokenizer(self.quickstart.python_source())
        self.data: dict = {}

    def split(self, text: str) -> dict:
        """Train, probe (64 sequences) and evaluation (up to 480) sets, disjoint and the same for every run."""
        from pydoc_data import topics

        from datasets import Dataset

        if text not in self.data:
            source = self.quickstart.python_source()
            texts = source if text == "code" else [topics.topics[name] for name in sorted(topics.topics)]
            rows = self.quickstart.blocks(Dataset.from_dict({"text": texts}), self.tokenizer, SEQUENCE)
            whole = rows.train_test_split(0.05, seed=0)
            inner = whole["train"].train_test_split(64, seed=0)
            test = whole["test"].select(range(min(480, len(whole["test"]))))
            self.data[text] = {"train": inner["train"], "probe": inner["test"], "test": test}
        return self.data[text]

    def model(self, run: Run):
        from transformers import AutoModelForCausalLM, set_seed

        if run.text == "code":
            set_seed(run.seed)
            return self.quickstart.small_llama(self.tokenizer)
        return AutoModelForCausalLM.from_pretrained(RESULTS.parent / "base")

    def train(self, run: Run, save_to: Path | None = None) -> dict:
        import torch
        import transformers
        from transformers import Trainer, TrainingArguments

        import hf_hybrid

        data = self.split(run.text)
        with tempfile.TemporaryDirectory() as folder:
            values = {
                "output_dir": folder, "max_steps": run.steps, "learning_rate": run.rate, "seed": run.seed,
                "per_device_train_batch_size": BATCH, "per_device_eval_batch_size": 16, "save_strategy": "no",
                "report_to": "none", "disable_tqdm": True, "logging_steps": 10**9, "dataloader_pin_memory": False,
            }  # fmt: skip
            common = {"train_dataset": data["train"], "eval_dataset": data["test"]}
            if ARMS[run.arm] is None:
                trainer = Trainer(self.model(run), TrainingArguments(**values), **common)
            else:
                config = hf_hybrid.HybridConfig(**values, **ARMS[run.arm], **run.options)
                trainer = hf_hybrid.HybridTrainer(self.model(run), config, probe_dataset=data["probe"], **common)
            seconds = trainer.train().metrics["train_runtime"]
            loss = trainer.evaluate()["eval_loss"]
            if save_to is not None:
                trainer.save_model(str(save_to))
        summary = trainer.hybrid_summary() if hasattr(trainer, "hybrid_summary") else {}
        if not summary.get("steps"):
            summary = {"backward_passes": run.steps, "probe_cost_steps": 0.0}
        for long_list in ("leaps", "learning_rate_scales"):
            summary.pop(long_list, None)
        return {
            **asdict(run),
            "eval_loss": loss,
            "seconds": seconds,
            "summary": summary,
            "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
            "machine": f"{platform.machine()}, {torch.get_num_threads()} thread(s)",
        }


@functools.cache
def worker() -> Worker:
    return Worker(int(os.environ["HYBRID_BENCHMARK_THREADS"]))


def _do(run: Run) -> tuple[Run, float]:
    result = worker().train(run)
    path_of(run).write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return run, result["eval_loss"]


def run_all(pool, runs: list[Run]) -> None:
    """Those that have no file yet; one line each."""
    missing = [run for run in dict.fromkeys(runs) if not path_of(run).exists()]
    for run, loss in pool.imap_unordered(_do, missing):
        print(f"{run.name:40s} {loss:.4f}", flush=True)


def _make_base(_) -> None:
    worker().train(Run("code", "plain", BASE_STEPS, BASE_RATE, 0), save_to=RESULTS.parent / "base")


def matched_steps(loss: float, curve: list[tuple[int, float]]) -> tuple[float, str]:
    """
    Steps at which a plain curve of `(steps, final loss)` reaches `loss`: straight lines in log steps.

    Returns:
        The steps, and `"interpolated"`, `"extrapolated"`, or `"beyond"` (the longest run does not get there: a bound).
    """
    points = sorted(curve)
    for (t0, l0), (t1, l1) in zip(points, points[1:]):
        if l1 <= loss <= l0:
            share = (l0 - loss) / (l0 - l1) if l0 > l1 else 0.0
            return math.exp(math.log(t0) + share * math.log(t1 / t0)), "interpolated"
    if loss < points[-1][1]:
        return float(points[-1][0]), "beyond"
    (t0, l0), (t1, l1) = points[:2]
    return math.exp(math.log(t0) - (loss - l0) * math.log(t1 / t0) / (l0 - l1)), "extrapolated"


def report(task: str, seeds: list[int]) -> dict | None:
    """S of every arm, each seed against its own plain curve; `None` while the task has no results."""
    runs = [run for run in task_runs(task, seeds) if path_of(run).exists()]
    results = [load(run) for run in runs]
    plain: dict[int, dict[int, float]] = {}
    for result in results:
        if result["arm"] == "plain":
            plain.setdefault(result["seed"], {})[result["steps"]] = result["eval_loss"]
    arms = {}
    for arm in ("hybrid", "none", "disabled"):
        rows = [row(result, plain[result["seed"]]) for result in results if result["arm"] == arm]
        if rows:
            values = [r["S"] for r in rows]
            arms[arm] = {"S": statistics.mean(values), "runs": rows}
            arms[arm]["loss_over_plain_at_equal_max_steps"] = statistics.mean(
                r["eval_loss"] / plain[r["seed"]][STEPS[task.split("-")[0]]] - 1 for r in rows
            )
            if len(rows) > 1:
                arms[arm]["S_standard_error"] = statistics.stdev(values) / math.sqrt(len(rows))
    return {"task": task, "learning_rate": runs[0].rate, "plain": plain, "arms": arms} if arms else None


def row(result: dict, curve: dict[int, float]) -> dict:
    """One run against the plain curve of its seed."""
    steps, how = matched_steps(result["eval_loss"], list(curve.items()))
    passes, probes = result["summary"]["backward_passes"], result["summary"]["probe_cost_steps"]
    kept = ("eval_loss", "seed", "seconds")
    return {
        **{name: result[name] for name in kept},
        "backward_passes": passes,
        "S": steps / passes,
        "S_with_probes": steps / (passes + probes),
        "how": how,
    }


def print_report(table: dict) -> None:
    print(f"\n{table['task']}, learning rate {table['learning_rate']:g}")
    for seed, curve in table["plain"].items():
        print(
            f"  plain, seed {seed}: " + "  ".join(f"{steps} steps {loss:.4f}" for steps, loss in sorted(curve.items()))
        )
    for arm, numbers in table["arms"].items():
        bound = ">= " if any(r["how"] == "beyond" for r in numbers["runs"]) else ""
        print(
            f"  {arm:8s} S {bound}{numbers['S']:.3f} +- {numbers.get('S_standard_error', math.nan):.3f}, loss against "
            f"plain at equal max_steps {numbers['loss_over_plain_at_equal_max_steps']:+.2%}"
        )
        for r in numbers["runs"]:
            print(
                f"      seed {r['seed']}: {r['eval_loss']:.4f} after {r['backward_passes']} backward passes, "
                f"S {r['S']:.3f} ({r['how']}), with probes {r['S_with_probes']:.3f}, {r['seconds']:.0f} s"
            )


def main() -> None:
    tasks = ["code-best", "docs-best", "code-default", "docs-default"]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", nargs="+", choices=tasks, default=tasks)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1, help="Threads per worker.")
    parser.add_argument("--report", action="store_true", help="Only print what is there.")
    args = parser.parse_args()
    RESULTS.mkdir(parents=True, exist_ok=True)
    if not args.report:
        context = multiprocessing.get_context("spawn")
        os.environ["HYBRID_BENCHMARK_THREADS"] = str(args.threads)
        with context.Pool(args.workers) as pool:
            texts = {task.split("-")[0] for task in args.task}
            if "docs" in texts and not (RESULTS.parent / "base").is_dir():
                pool.map(_make_base, [None])
            run_all(pool, [run for text in sorted(texts) for run in grid_runs(text)])
            run_all(pool, [run for task in args.task for run in task_runs(task, args.seeds)])
    tables = [table for task in args.task if (table := report(task, args.seeds))]
    for table in tables:
        print_report(table)
    (RESULTS.parent / "acceleration.json").write_text(json.dumps(tables, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
