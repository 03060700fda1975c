"""
What do 8-bit states and bf16 weights cost at small rates? SmolLM2-135M.

    python -m benchmarks.speedup.pretrained             # once: the model
    python -m benchmarks.memory.correction              # every arm, rate and seed; hours on one thread of a CPU
    python -m benchmarks.memory.correction --arms fp32 8bit --rates 1e-5 --seeds 0
    python -m benchmarks.memory.correction --report     # the table

At the rates of fine-tuning, 1e-6 to 1e-5, an update is far below half a unit in the last place of a bf16 weight. All
arms start from the same weights, those of SmolLM2 rounded to bf16, see the same rows in the same order at a constant
rate, and are evaluated in fp32 on the same held-out rows.

- `fp32`: fp32 weights, computation in fp32, torch's AdamW. `eval_loss_in_bf16` is that of the weights rounded to the
  nearest bf16 once, after training.
- `8bit`: `optimizer_states="8bit"` with a bf16 model: 8-bit states, stochastic rounding.
- `nearest`: fp32 states and bf16 weights, rounded to nearest, which loses updates.

`results.jsonl` also has rows of arms that are no longer here: `fp32-autocast`, `stochastic` (fp32 states), those with a
correction byte beside each weight (`24bit`, after FlashOptim, arXiv 2602.23349), which gained nothing once the weights
were saved without it, and the noise of long paths (`correction_walk`).
"""

from __future__ import annotations

import random
import statistics
import tempfile
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, Trainer, TrainingArguments

from benchmarks.results import Results, command_line, provenance
from benchmarks.speedup.pretrained import FOLDER
from benchmarks.speedup.tasks import QUIET
from benchmarks.texts import standard_library
from hf_hybrid.streaming.low_bit import AdamW8bit

KEY = ("arm", "rate", "seed", "steps")
BASELINE = "fp32"
ARMS = (BASELINE, "8bit", "nearest")
RATES = (1e-6, 3e-6, 1e-5)
SEQUENCE, TEST = 64, 64


class Nearest(AdamW8bit):
    """`AdamW8bit` with states in fp32, and weights that are rounded to nearest."""

    def _begin(self, parameter: Tensor, state: dict) -> None:
        super()._begin(parameter, state)
        for name in [name for name in state if name.startswith("exp_avg")]:
            del state[name]
        for name in ("exp_avg", "exp_avg_sq"):
            state[name] = torch.zeros(parameter.shape, dtype=torch.float32)

    def _update(self, parameter: Tensor, gradient: Tensor, group: dict) -> None:
        """Update the weights in fp32, by the inherited code, and round them."""
        state = self.state[parameter]
        if "step" not in state:
            self._begin(parameter, state)
        exact = parameter.detach().float()
        self.state[exact] = state
        super()._update(exact, gradient, group)
        del self.state[exact]
        parameter.copy_(exact)


def load(dtype: torch.dtype) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.bfloat16).to(dtype)


def blocks(test: slice = slice(TEST)) -> tuple[list[dict], list[dict]]:
    """
    Blocks of `SEQUENCE` tokens of Python's standard library, to train on and, some of them, held out: every eighth
    module is.
    """
    tokenizer = AutoTokenizer.from_pretrained(FOLDER)
    parts: tuple[list[dict], list[dict]] = ([], [])
    for place, (_, text) in enumerate(standard_library()):
        ids = tokenizer(text[:20_000])["input_ids"]
        starts = range(0, len(ids) - SEQUENCE + 1, SEQUENCE)
        found = [ids[start : start + SEQUENCE] for start in starts]
        parts[place % 8 == 7].extend({"input_ids": block, "labels": list(block)} for block in found)
    random.Random(0).shuffle(parts[1])
    return parts[0], parts[1][test]


def held_out(model: PreTrainedModel, rows: list[dict]) -> float:
    """The mean loss of a token, computed in fp32."""
    model = model.float().eval()
    losses = []
    with torch.no_grad():
        for start in range(0, len(rows), 8):
            ids = torch.tensor([row["input_ids"] for row in rows[start : start + 8]])
            losses.append(model(input_ids=ids, labels=ids).loss.item())
    return statistics.mean(losses)


def train(arm: str, rate: float, seed: int, steps: int, data: tuple[list[dict], list[dict]]) -> dict:
    torch.manual_seed(seed)
    model = load(torch.float32 if arm == BASELINE else torch.bfloat16)
    kind = {"8bit": AdamW8bit, BASELINE: torch.optim.AdamW, "nearest": Nearest}[arm]
    options = {"lr": rate, "weight_decay": 0.0, **({"seed": seed} if arm == "8bit" else {})}
    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(
            folder, max_steps=steps, learning_rate=rate, seed=seed, per_device_train_batch_size=1,
            lr_scheduler_type="constant", use_cpu=True, **QUIET,
        )  # fmt: skip
        trainer = Trainer(model, args, train_dataset=data[0], optimizer_cls_and_kwargs=(kind, options))
        metrics = trainer.train().metrics
    row = {"train_loss": metrics["train_loss"], "seconds": metrics["train_runtime"]}
    start = load(torch.bfloat16)
    changed = sum(int((a.bfloat16() != b).sum()) for a, b in zip(model.parameters(), start.parameters()))
    row["changed"] = changed / sum(p.numel() for p in start.parameters())
    row["eval_loss"] = held_out(model, data[1])
    if arm == BASELINE:
        row["eval_loss_in_bf16"] = held_out(model.bfloat16(), data[1])
    return row


def saved(row: dict) -> float:
    """The loss of the weights in bf16, as they are saved."""
    return row.get("eval_loss_in_bf16", row["eval_loss"])


def summarise(rows: list[dict], start: float) -> list[dict]:
    """
    For each rate, length and arm the losses, and what is lost of the fall that fp32 AdamW reached from the same seed.

    `start` is the loss before training. Shares are lists with a number for each seed.
    """
    baseline = {(row["rate"], row["steps"], row["seed"]): row["eval_loss"] for row in rows if row["arm"] == BASELINE}
    groups: dict[tuple, list[dict]] = {}
    known = [row for row in rows if row["arm"] in ARMS]
    for row in sorted(known, key=lambda row: (row["steps"], row["rate"], ARMS.index(row["arm"]), row["seed"])):
        if (row["rate"], row["steps"], row["seed"]) in baseline:
            groups.setdefault((row["rate"], row["steps"], row["arm"]), []).append(row)
    told = []
    for (rate, steps, arm), own in groups.items():
        reached = [baseline[rate, steps, row["seed"]] for row in own]
        summary = {"rate": rate, "steps": steps, "arm": arm, "changed": statistics.mean(row["changed"] for row in own)}
        for name, loss in (("exact", lambda row: row["eval_loss"]), ("saved", saved)):
            summary[name] = statistics.mean(loss(row) for row in own)
            summary[f"{name}_above"] = [loss(row) - fp32 for row, fp32 in zip(own, reached)]
            summary[f"{name}_lost"] = [(loss(row) - fp32) / (start - fp32) for row, fp32 in zip(own, reached)]
        told.append(summary)
    return told


def main() -> None:
    parser = command_line(__doc__, Path(__file__).resolve().parent)
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--rates", nargs="+", type=float, default=list(RATES))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--report", action="store_true", help="Only the table of what is there.")
    args = parser.parse_args()
    torch.set_num_threads(1)
    runs = Results(args.results, "correction", KEY)
    starts = Results(args.results, "correction_start", ())
    data = None if args.report else blocks()
    if data and starts.get() is None:
        starts.add({"eval_loss": held_out(load(torch.float32), data[1]), **provenance(1)})
    if data:
        for rate in args.rates:
            for seed in args.seeds:
                for arm in args.arms:
                    key = {"arm": arm, "rate": rate, "seed": seed, "steps": args.steps}
                    if runs.get(**key) is None:
                        row = runs.add({**key, **train(arm, rate, seed, args.steps, data), **provenance(1)})
                        print(
                            f"{rate:g}  seed {seed}  {arm:22s} {row['eval_loss']:.5f}  {row['seconds']:.0f} s",
                            flush=True,
                        )
    start = starts.get()["eval_loss"]
    print(f"before training {start:.5f}")
    for row in summarise(runs.rows(), start):
        lost = (" ".join(f"{value:+.2%}" for value in row[f"{name}_lost"]) for name in ("exact", "saved"))
        print(
            f"{row['rate']:g}  {row['steps']:4d} steps  {row['arm']:22s} {row['exact']:.5f} lost {next(lost)};  "
            f"in bf16 {row['saved']:.5f} lost {next(lost)}  {row['changed']:.1%} changed"
        )


if __name__ == "__main__":
    main()
