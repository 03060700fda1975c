"""
What 8-bit optimizer states and bf16 weights cost in held-out loss, on the quickstart's task. Plain Trainer, one thread.

    python -m benchmarks.memory.low_bit                       # four arms, three seeds, half an hour
    python -m benchmarks.memory.low_bit --seeds 0 --steps 100

- `adamw`: fp32 weights, torch's AdamW (the default of Trainer): 12 bytes per weight.
- `bf16-8bit-stochastic`: bf16 weights, `AdamW8bit`, stochastic rounding: 4 bytes per weight.
- `fp32-8bit`: fp32 weights, `AdamW8bit`: 6 bytes per weight, what the 8-bit states do by themselves.
- `bf16-8bit-nearest`: the control, `AdamW8bit` without stochastic rounding.

Each arm trains the quickstart's Llama from scratch at the learning rate that is best for plain Trainer with fp32
weights and the other options at their defaults, on the same batches, and is compared with `adamw` of the same seed.
bf16 arms compute and are evaluated in bf16. Runs that are there are not repeated. The speed of the updates by
themselves is measured too.
"""

from __future__ import annotations

import math
import statistics
import tempfile
import time
from pathlib import Path

import torch
from transformers import Trainer, TrainingArguments

from benchmarks.results import Results, command_line, provenance
from benchmarks.speedup.tasks import BATCH, QUIET, TASKS, TextAndModels
from hf_hybrid.streaming.low_bit import AdamW8bit

BASELINE = "adamw"
ARMS = {
    BASELINE: (torch.float32, None),
    "bf16-8bit-stochastic": (torch.bfloat16, {}),
    "fp32-8bit": (torch.float32, {}),
    "bf16-8bit-nearest": (torch.bfloat16, {"stochastic_rounding": False}),
}


def train(sources: TextAndModels, arm: str, seed: int, steps: int, rate: float) -> dict:
    dtype, options = ARMS[arm]
    data, model = sources.split("code"), sources.model(TASKS["code"], seed).to(dtype)
    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(
            folder, max_steps=steps, learning_rate=rate, seed=seed, per_device_train_batch_size=BATCH,
            per_device_eval_batch_size=16, **QUIET,
        )  # fmt: skip
        own = None if options is None else (AdamW8bit, {"lr": rate, "seed": seed, **options})
        trainer = Trainer(
            model, args, train_dataset=data["train"], eval_dataset=data["test"], optimizer_cls_and_kwargs=own
        )
        seconds = trainer.train().metrics["train_runtime"]
        loss = trainer.evaluate()["eval_loss"]
    parameters = list(model.parameters())
    states = trainer.optimizer.state_dict()["state"].values()
    count = sum(p.numel() for p in parameters)
    return {
        "eval_loss": loss,
        "seconds": seconds,
        "weight_bytes": sum(p.nbytes for p in parameters) / count,
        "state_bytes": sum(t.nbytes for state in states for t in state.values()) / count,
    }


def summarise(rows: list[dict]) -> dict:
    """For each arm, the mean loss and its excess over the baseline of the same seed."""
    baseline = {row["seed"]: row["eval_loss"] for row in rows if row["arm"] == BASELINE}
    arms = {}
    for arm in ARMS:
        own = [row for row in rows if row["arm"] == arm and row["seed"] in baseline]
        if not own:
            continue
        excess = [row["eval_loss"] / baseline[row["seed"]] - 1 for row in own]
        arms[arm] = {
            "eval_loss": statistics.mean(row["eval_loss"] for row in own),
            "excess": statistics.mean(excess),
            "excess_by_seed": excess,
            "excess_standard_error": statistics.stdev(excess) / math.sqrt(len(excess)) if len(excess) > 1 else None,
            "bytes_per_weight": own[0]["weight_bytes"] + own[0]["state_bytes"],
        }
    return arms


def update_speed(count: int = 2**22, repeats: int = 5) -> dict[str, float]:
    """Measure the millions of weights updated per second, in the best of a few steps."""
    speeds = {}
    for name, dtype, make in (
        ("torch AdamW fused, fp32", torch.float32, lambda p: torch.optim.AdamW(p, fused=True)),
        ("AdamW8bit, fp32", torch.float32, AdamW8bit),
        ("AdamW8bit, bf16 stochastic", torch.bfloat16, AdamW8bit),
    ):
        parameter = torch.nn.Parameter(torch.randn(count).to(dtype))
        parameter.grad = torch.randn(count).to(dtype)
        optimizer = make([parameter])
        seconds = []
        for _ in range(repeats):
            start = time.perf_counter()
            optimizer.step()
            seconds.append(time.perf_counter() - start)
        speeds[name] = count / min(seconds) / 1e6
    return speeds


def main() -> None:
    parser = command_line(__doc__, Path(__file__).resolve().parent)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--rate", type=float, default=2e-3, help="Learning rate.")
    args = parser.parse_args()
    torch.set_num_threads(1)
    results = Results(args.results, "low_bit", ("arm", "seed", "steps", "rate"))
    updates, sources = Results(args.results, "low_bit_update", ("optimizer",)), TextAndModels()
    for seed in args.seeds:
        for arm in ARMS:
            key = {"arm": arm, "seed": seed, "steps": args.steps, "rate": args.rate}
            if results.get(**key) is None:
                results.add({**key, **train(sources, **key), **provenance(1)})
            row = results.get(**key)
            print(f"seed {seed}  {arm:22s} {row['eval_loss']:.4f}  {row['seconds']:.0f} s", flush=True)
    if not updates.rows():
        for name, speed in update_speed().items():
            updates.add({"optimizer": name, "million_weights_per_second": speed, **provenance(1)})
    arms = summarise([row for row in results.rows(steps=args.steps, rate=args.rate) if row["seed"] in args.seeds])
    print(f"\n{'arm':22s}  held-out loss  above adamw     by seed                    bytes per weight")
    for arm, numbers in arms.items():
        by_seed = "  ".join(f"{excess:+.2%}" for excess in numbers["excess_by_seed"])
        print(
            f"{arm:22s}  {numbers['eval_loss']:13.4f}  {numbers['excess']:+11.2%}     {by_seed:25s}  "
            f"{numbers['bytes_per_weight']:.2f}"
        )
    for row in updates.rows():
        print(f"{row['optimizer']:28s} {row['million_weights_per_second']:6.0f} M weights/s")


if __name__ == "__main__":
    main()
