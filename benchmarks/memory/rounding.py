"""
Which rounding to 16 bits keeps what fp32 weights have learned at the rates of fine-tuning? SmolLM2-135M.

    python -m benchmarks.speedup.pretrained             # once: the model
    python -m benchmarks.memory.rounding                # every training, rate, seed and rounding; hours on one thread
    python -m benchmarks.memory.rounding --trained weights --rates 1e-5 --seeds 0

`correction.py` found that fp32 weights rounded to the nearest bf16 lose most of what they learned at 1e-6 to 1e-5. Two
things meet. The weights start on the grid of bf16, as published models do, so the nearest number of a weight that moves
by less than half a step is where it started. And most of them move by less. So the expectation is wrong, and
`stochastic` rounding puts it right: up or down at random, with the probabilities that make the expectation of each
weight exact, measured with three draws.

It leaves weights as they are that bf16 holds. `fp32` is the trained model, and `nearest` the usual rounding. `fp16`
and `fp16-stochastic` are the same in fp16. Weights are trained whole, or as adapters of rank 16 that are merged in fp32
(`adapters`). Every model is evaluated in fp32 on held-out blocks that `correction.py` does not use. The rates are those
of `correction.py` and 1e-4; none was chosen on any held-out text.

All start from the copy of SmolLM2 that `pretrained.py` writes, rounded to bf16. `results.jsonl` also has rows of what
was not better: `matrices` alone, `diffusion` of what is cut off along a row, and the model before its rounding.
"""

from __future__ import annotations

import copy
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import PreTrainedModel, Trainer, TrainingArguments

from benchmarks.memory.correction import TEST, blocks, held_out, load
from benchmarks.results import Results, command_line, provenance
from benchmarks.speedup.tasks import QUIET
from hf_hybrid.export.rounding import round_

KEY = ("trained", "rate", "seed", "steps", "rounding", "draw")
RATES = {"weights": (1e-6, 3e-6, 1e-5, 1e-4), "adapters": (1e-4,)}
HELD_OUT = 32
"""Blocks, 2,048 tokens."""
UPPER = -(1 << 16)
"""The bits of an fp32 number that bf16 keeps."""


def carried(exact: Tensor, noise: Tensor) -> Tensor:
    """fp32 rounded to bf16: integers in [0, 65536) are added to its bits, and their lower half is cut off."""
    return (exact.view(torch.int32) + noise).bitwise_and_(UPPER).view(torch.float32).bfloat16()


def stochastic(exact: Tensor, draw: int) -> Tensor:
    return carried(exact, torch.randint(1 << 16, exact.shape, dtype=torch.int32, generator=GENERATORS[draw]))


def fp16_stochastic(exact: Tensor, draw: int) -> Tensor:
    """By the code of the export."""
    noise = int(torch.randint(1 << 31, (), generator=GENERATORS[draw]))
    return round_(torch.empty_like(exact, dtype=torch.half), exact, str(noise))


GENERATORS = [torch.Generator() for _ in range(3)]
ROUNDINGS: dict[str, tuple[int, Callable[[Tensor, int], Tensor]]] = {
    # draws, rounding
    "fp32": (1, lambda exact, draw: exact),
    "nearest": (1, lambda exact, draw: exact.bfloat16()),
    "stochastic": (3, stochastic),
    "fp16": (1, lambda exact, draw: exact.half()),
    "fp16-stochastic": (1, fp16_stochastic),
}


def rounded(model: PreTrainedModel, rounding: str, draw: int) -> PreTrainedModel:
    """A copy whose weights are rounded, in fp32."""
    copied = copy.deepcopy(model)
    GENERATORS[draw].manual_seed(draw)
    for parameter in copied.parameters():
        parameter.data = ROUNDINGS[rounding][1](parameter.data, draw).float()
    return copied


def train(trained: str, rate: float, seed: int, steps: int, rows: list[dict]) -> PreTrainedModel:
    """SmolLM2 in fp32 after so many steps of one block each, with adapters merged."""
    torch.manual_seed(seed)
    model: Any = load(torch.float32)
    if trained == "adapters":
        model = get_peft_model(model, LoraConfig(r=16, lora_alpha=32, target_modules="all-linear"))
    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(
            folder, max_steps=steps, learning_rate=rate, seed=seed, per_device_train_batch_size=1, weight_decay=0.0,
            lr_scheduler_type="constant", use_cpu=True, optim="adamw_torch_fused", **QUIET,
        )  # fmt: skip
        Trainer(model, args, train_dataset=rows).train()
    return model.merge_and_unload() if trained == "adapters" else model


def summarise(rows: list[dict]) -> list[dict]:
    """
    For each rounding of each training, what it keeps of the fall of the loss that fp32 has: a share per seed and draw.
    """
    losses = {tuple(row[name] for name in KEY): row["eval_loss"] for row in rows}
    start = losses["start", None, None, 0, "fp32", 0]
    groups: dict[tuple, list[dict]] = {}
    order = [*ROUNDINGS]
    known = [row for row in rows if row["rounding"] in ROUNDINGS]
    for row in sorted(known, key=lambda row: (order.index(row["rounding"]), row["seed"] or 0, row["draw"])):
        if row["steps"]:
            groups.setdefault((row["trained"], row["steps"], row["rate"], row["rounding"]), []).append(row)
    told = []
    for (trained, steps, rate, rounding), own in sorted(
        groups.items(), key=lambda item: (item[0][0] != "weights", *item[0][1:3], order.index(item[0][3]))
    ):
        reached = [losses[trained, rate, row["seed"], steps, "fp32", 0] for row in own]
        told.append({
            "trained": trained, "steps": steps, "rate": rate, "rounding": rounding,
            "loss": statistics.mean(row["eval_loss"] for row in own),
            "seeds": [row["seed"] for row in own],
            "kept": [(start - row["eval_loss"]) / (start - fp32) for row, fp32 in zip(own, reached)],
            "changed": statistics.mean(row["changed"] for row in own),
        })  # fmt: skip
    return told


def main() -> None:
    parser = command_line(__doc__, Path(__file__).resolve().parent)
    parser.add_argument("--trained", nargs="+", choices=RATES, default=list(RATES))
    parser.add_argument("--rates", nargs="+", type=float, help="Default: 1e-6 to 1e-4; of adapters 1e-4.")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1], help="Of the order of the blocks.")
    parser.add_argument("--roundings", nargs="+", choices=ROUNDINGS, default=list(ROUNDINGS))
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    results = Results(args.results, "rounding", KEY)
    start, data = load(torch.float32), blocks(slice(TEST, TEST + HELD_OUT))

    def measure(model: Callable[[], PreTrainedModel], roundings: list[str] = args.roundings, **run) -> None:
        """Measure what is missing of a model, which is made if something is."""
        draws = [(name, draw) for name in roundings for draw in range(ROUNDINGS[name][0])]
        missing = [draw for draw in draws if results.get(**run, rounding=draw[0], draw=draw[1]) is None]
        made = model() if missing else None
        for rounding, draw in missing:
            found = rounded(made, rounding, draw)
            changed = sum(int((a != b).sum()) for a, b in zip(found.parameters(), start.parameters()))
            row = {**run, "rounding": rounding, "draw": draw, "eval_loss": held_out(found, data[1])}
            row["changed"] = changed / sum(p.numel() for p in start.parameters())
            results.add({**row, **provenance(args.threads)})
            print(*run.values(), rounding, draw, f"{row['eval_loss']:.5f}", flush=True)

    measure(lambda: start, ["fp32"], trained="start", rate=None, seed=None, steps=0)
    for trained in args.trained:
        for rate in args.rates or RATES[trained]:
            for seed in args.seeds:
                run = {"trained": trained, "rate": rate, "seed": seed, "steps": args.steps}
                measure(lambda run=run: train(**run, rows=data[0]), **run)


if __name__ == "__main__":
    main()
