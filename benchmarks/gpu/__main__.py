"""
What a GPU says, beside what users have without this package.

    python -m benchmarks.gpu first                     # all that matters most, in 8 minutes
    python -m benchmarks.gpu second                    # checks, in 4 minutes
    python -m benchmarks.gpu sft --shape 8b --arms free_liger hybrid --kinds system agent
    python -m benchmarks.gpu dpo
    python -m benchmarks.gpu grpo --shape 0.5b
    python -m benchmarks.gpu stream --shape 8b
    python -m benchmarks.gpu scratch --rates 6e-4 1.2e-3
    python -m benchmarks.gpu checks --arms flex_gemma2
    python -m benchmarks.gpu first --shape tiny        # on a CPU: shows that everything runs, and no speed

Models have the shapes of `models.py` and random weights. Each arm runs in a process of its own (`process.py`), and its
row is in the file before the next arm begins. An arm that fails, is killed or exceeds its limit is a row with its
`error`. With `--profile`, one more step counts kernels. The first row says how many kernels this host launches in a
second. When `--minutes` are over, the arm that runs is stopped, and no other begins.
"""

from __future__ import annotations

import functools
import importlib
import math
import os
import signal
import sys
import time
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import Any

from benchmarks.gpu.calls import CALLS, MINUTES, TINY, Line
from benchmarks.gpu.process import answered, card, measured, outcome, way_to_begin
from benchmarks.results import Results, command_line, provenance

FOLDER = Path(__file__).parent
USES = {
    "sft": ("1b", 3.0), "dpo": ("1b", 3.0), "grpo": ("0.5b", 5.0), "stream": ("8b", 5.0), "checks": ("8b", 5.0),
    "scratch": ("124m", 1440.0),
}  # fmt: skip
"""Each with the shape that it runs if none is named, and the minutes that an arm may take."""
KEY = ("shape", "kind", "arm", "order", "hardware")
LEAST = 5.0
"""Seconds that have to be left when an arm begins."""


def main(words: list[str] | None = None) -> None:
    begin = time.monotonic()
    device = outcome(card, limit=60.0)
    if "error" in device:
        sys.exit(f"The device does not answer: {device['error']}")
    with answered(device):
        parser = _parser()
    args = parser.parse_args(words)
    bench = Bench(args.results, device, begin + 60 * args.minutes)
    if args.use not in CALLS:
        bench.run(args, math.inf, 60 * args.arm_minutes)
        return
    for line in CALLS[args.use]:
        bench.run(parser.parse_args(_words_of(line, args)), line.seconds, line.arm_seconds)


def _parser() -> ArgumentParser:
    from benchmarks.gpu.models import SHAPES

    parser = command_line(__doc__ or "", FOLDER)
    uses = parser.add_subparsers(dest="use", required=True)
    for use, (shape, minutes) in USES.items():
        module, one = importlib.import_module(f"benchmarks.gpu.{use}"), uses.add_parser(use)
        one.add_argument("--shape", choices=SHAPES, default=shape)
        one.add_argument("--arms", nargs="+", choices=module.ARMS, default=list(module.ARMS))
        one.add_argument("--steps", type=int, default=6, help="Timed steps, or rounds.")
        one.add_argument("--warm_up", type=int, default=2, help="Steps before them.")
        one.add_argument("--minutes", type=float, default=math.inf, help="Limit of all arms together.")
        one.add_argument("--arm_minutes", type=float, default=minutes, help="Limit of each arm.")
        one.add_argument("--profile", action="store_true", help="Count kernels in one more step.")
        module.options(one)
    for call, minutes in MINUTES.items():
        one = uses.add_parser(call)
        one.add_argument("--shape", choices=["tiny"], help="Show on a CPU that everything runs.")
        one.add_argument("--minutes", type=float, default=minutes, help="Limit of the call.")
    return parser


def _words_of(line: Line, args: Namespace) -> list[str]:
    return line.words.split() + (TINY.split() if args.shape else [])


class Bench:
    """Runs arms one after the other until a time, and writes their rows."""

    def __init__(self, path: Path, device: dict[str, Any], end: float):
        self.path, self.end, self.way = path, end, way_to_begin()
        self.on = f", {device['device']}" if device["device"] else ""
        if self.way != "fork":
            print("CUDA is initialised here, so each arm imports everything anew", flush=True)
        if device["device"]:
            self.add("host", {"shape": None, "kind": None, "arm": "launches", **device})

    def run(self, args: Namespace, seconds: float, arm_seconds: float) -> None:
        """Run the cases and arms of one use, each for so long, and all of them for so long, at most."""
        end = min(self.end, time.monotonic() + seconds)
        for case in importlib.import_module(f"benchmarks.gpu.{args.use}").cases(args):
            for arm in args.arms:
                limit = min(arm_seconds, end - time.monotonic())
                if limit < LEAST:
                    print(f"no time is left for {args.use} {case['kind']} {arm}", flush=True)
                    continue
                work = functools.partial(measured, args.use, case, arm, args)
                self.add(args.use, {**case, "arm": arm, **outcome(work, limit, self.way)})

    def add(self, use: str, row: dict[str, Any]) -> None:
        """Write a row. Its `order` is `None`: rows of processes that ran several arms have a number there."""
        whence = provenance()
        whence["hardware"] += self.on
        row = Results(self.path, use, KEY).add({**whence, "order": None, **row})
        print(text_of(row), flush=True)


def text_of(row: dict[str, Any]) -> str:
    """A row in 80 columns, if it says little."""
    where = f"{row['benchmark']:6} {row['shape'] or '':5} {row['kind'] or ''!s:13} {row['arm']:15}"
    if "error" in row:
        return f"{where} {row['error']}"
    says = {
        "seconds": "{:.3f} s", "peak_gib": "{:.1f} GiB", "kernels": "{:,} kernels", "busy_seconds": "{:.3f} s busy",
        "eval_loss": "loss {:.4f}", "launches_per_second": "{:,} launches a second", "said": "{}",
        "failed": "failed: {}", "plain_rollouts_because": "plain rollouts: {}", "plain_rows_because": "plain rows: {}",
    }  # fmt: skip
    return " ".join([where, *(text.format(row[name]) for name, text in says.items() if row.get(name))])


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))  # and the arm that runs is killed on the way out
    main()
