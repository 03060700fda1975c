"""
What a GPU says: one command per use, beside what users have without this package.

    python -m benchmarks.gpu sft --shape 1b --minutes 9
    python -m benchmarks.gpu sft --shape 8b --arms free_liger hybrid --kinds system agent
    python -m benchmarks.gpu dpo
    python -m benchmarks.gpu grpo --shape 0.5b
    python -m benchmarks.gpu stream --shape 8b
    python -m benchmarks.gpu scratch --rates 6e-4 1.2e-3
    python -m benchmarks.gpu all --shape tiny          # on a CPU: shows that everything runs, and no speed

Models have the shapes of `models.py` and random weights. The arms of a case run one after the other, then once more in
the opposite order, so that what the first arm of a process pays (plans of attention and products for each new shape) is
seen: a row has `order` 0 or 1. With `--profile`, one more step counts kernels. An arm that fails is a row with its
error. After `--minutes` no further arm begins.
"""

from __future__ import annotations

import importlib
import os
import time
import traceback
from pathlib import Path

FOLDER = Path(__file__).parent
USES = {"sft": "1b", "dpo": "1b", "grpo": "0.5b", "stream": "8b", "scratch": "124m"}
"""Each with the shape that it runs if none is named."""
TINY = {
    "sft": ["--scale", "0.05"],
    "dpo": ["--scale", "0.05"],
    "grpo": ["--length", "16", "--tokens", "8", "--mean", "8"],
    "stream": ["--tokens", "64", "128", "--length", "64"],
    "scratch": ["--run_steps", "8", "--length", "32", "--rows", "4", "--files", "60"],
}
"""Options of a shape with which nothing takes long."""


def main() -> None:
    from benchmarks.gpu.models import DEVICE, SHAPES, forget
    from benchmarks.results import Results, command_line, provenance

    parser = command_line(__doc__, FOLDER)
    uses = parser.add_subparsers(dest="use", required=True)
    for use in (*USES, "all"):
        one = uses.add_parser(use)
        one.add_argument("--shape", choices=SHAPES, default=USES.get(use))
        one.add_argument("--steps", type=int, default=6, help="Timed steps, or rounds.")
        one.add_argument("--warm_up", type=int, default=2, help="Steps before them.")
        one.add_argument("--minutes", type=float, default=60.0, help="After these no further arm begins.")
        one.add_argument("--profile", action="store_true", help="Count kernels in one more step.")
        if use != "all":
            module = importlib.import_module(f"benchmarks.gpu.{use}")
            one.add_argument("--arms", nargs="+", choices=module.ARMS, default=list(module.ARMS))
            module.options(one)
    args = parser.parse_args()
    end = time.monotonic() + 60 * args.minutes
    if args.use == "all":
        more = ["--steps", str(args.steps), "--warm_up", str(args.warm_up)]
        words = {use: ["--shape", args.shape or shape, *more] for use, shape in USES.items()}
        runs = [parser.parse_args([use, *w, *(TINY[use] * (args.shape == "tiny"))]) for use, w in words.items()]
    else:
        runs = [args]
    for run in runs:
        module = importlib.import_module(f"benchmarks.gpu.{run.use}")
        results = Results(args.results, run.use, ("shape", "kind", "arm", "order", "hardware"))
        for case in module.cases(run):
            for order, arms in enumerate((run.arms, run.arms[::-1])):
                for arm in arms:
                    if time.monotonic() > end:
                        print("the time is over", flush=True)
                        return
                    row = {**provenance(device=DEVICE), **case, "arm": arm, "order": order}
                    try:
                        row |= module.run(case, arm, run)
                    except Exception as error:  # an arm that runs out of memory is a result too
                        traceback.print_exc(limit=-4)
                        row["error"] = f"{type(error).__name__}: {str(error)[:300]}"
                    forget()
                    results.add(row)
                    print(line(run.use, row), flush=True)


def line(use: str, row: dict) -> str:
    """A row in 80 columns."""
    where = f"{use:6} {row['shape']:5} {row['kind']!s:13} {row['arm']:12} {row['order']}"
    if "error" in row:
        return f"{where}  {row['error'][:40]}"
    speed = f"{row['seconds']:8.3f} s {row['peak_gib']:6.1f} GiB"
    kernels = f"  {row['busy_seconds']:.3f} s of {row['kernels']:,} kernels" if row.get("kernels") else ""
    loss = f"  loss {row['eval_loss']:.4f}" if "eval_loss" in row else ""
    return f"{where} {speed}{loss}{kernels}"


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    main()
