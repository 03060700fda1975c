"""
Many small training runs with branches: data from which a dynamics model learns how training goes and what leaps earn.

    nice -n 10 python -m benchmarks.world_model.record --runs 220 --workers 2     # runs that are there are kept

A run trains a tiny Llama, GPT-2, Qwen2, Qwen3 or Gemma on bytes that ship with Python; model, data, learning rate,
schedule, optimizer and leaps follow from its index. Even runs make no leaps of their own, odd ones for a part of the
run. At three moments the state is copied and continued with another policy for 50 to 200 steps, then like the run
itself to the end, on the same data in the same order: the difference is what the policy was worth, in training losses
of every stretch (10 real steps).

One CPU thread per worker.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import os
import random
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from transformers.utils import logging

from benchmarks.world_model.small_run import (
    HELD_OUT,
    PROBE,
    Course,
    DivergedError,
    Policy,
    Settings,
    Stretches,
    Training,
    reference_rate,
    text_bytes,
)
from benchmarks.world_model.storage import RECORDINGS, as_arrays, path_of, write

RUNS = 220
"""That the start weights of the package are trained and scored on."""
BRANCHES = 3
SECONDS = 13.0
"""Largest expected cost of a run; sizes are drawn again until they fit."""


def draw_policy(rng: random.Random, direction: str, first: int, last: int) -> Policy:
    worth = rng.uniform(0.05, 0.4) if rng.random() < 0.3 else 0.0
    gain = math.exp(rng.uniform(math.log(0.25), math.log(8.0)))
    power = rng.choice((0, 1, 2)) if direction == "gradient_memory" else rng.choice((0, 0, 0, 1))
    return Policy(rng.randint(2, 8), gain, power, worth, first, last)


def draw_settings(index: int) -> Settings:
    """Draw the settings of a run; they follow from its index."""
    rng = random.Random(f"run {index}")
    steps = rng.choices((150, 200, 300, 400, 600), (1.5, 1.5, 3, 1.5, 1))[0]
    size = draw_size(rng, steps)
    text = rng.choices(("code", "docs", "names"), (5, 3, 2))[0]
    before = rng.choice([t for t in ("code", "docs", "names") if t != text]) if rng.random() < 0.3 else None
    few = rng.random() < 0.25
    rows = rng.choice((64, 128, 256)) if few else steps * size["batch"]
    optimizer = rng.choices(("adamw", "muon", "sgd"), (6, 2.5, 1.5))[0]
    # Leaps of the default direction in most runs; it is none of its own under SGD.
    direction = "orthogonal" if optimizer != "sgd" and rng.random() < 0.75 else "gradient_memory"
    memory = rng.choice((5, 10, 10, 20)) if direction == "orthogonal" else steps * rng.choice((1 / 6, 1 / 12, 1 / 3))
    if optimizer == "sgd":
        betas, weight_decay = (rng.choice((0.8, 0.9, 0.95)), 0.0), rng.choice((0.0, 1e-4))
    else:
        betas = (rng.choice((0.8, 0.9, 0.9, 0.95)), rng.choice((0.95, 0.98, 0.99, 0.999, 0.999)))
        weight_decay = rng.choice((0.0, 0.0, 0.01, 0.1, 0.3))
    factor = 10 ** rng.uniform(-1.0, math.log10(3.0))
    base = None
    if index % 2:
        share = rng.uniform(0.25, 1.0)
        first = round(rng.uniform(0.0, 1.0 - share) * steps)
        base = draw_policy(rng, direction, first, first + round(share * steps))
    return Settings(
        index=index,
        **size,
        text=text,
        text_before=before,
        rows=min(rows, len(text_bytes(text)) // size["length"] - HELD_OUT - PROBE),
        steps=steps,
        optimizer=optimizer,
        betas=betas,
        weight_decay=weight_decay,
        rate=factor * reference_rate(optimizer, betas, size["hidden"], before is not None),
        rate_over_reference=factor,
        schedule=rng.choices(("linear", "cosine", "warmup_stable_decay", "constant_with_warmup"), (4, 3, 2, 1.5))[0],
        warmup=round(rng.choice((0.0, 0.0, 0.03, 0.1)) * steps),
        clip=rng.choice((1.0, 1.0, 1.0, 0.5, 0.0)),
        direction=direction,
        memory_steps=max(round(memory), 5),
        max_relative_norm=0.5,
        # Not known here: a number that says nothing, so that whoever learns from it learns to ignore it.
        confidence=rng.random(),
        base=base,
    )


def draw_size(rng: random.Random, steps: int) -> dict:
    """Draw an architecture and a batch with which a run of `steps` steps costs at most `SECONDS`."""
    while True:
        architecture = rng.choices(("llama", "gpt2", "qwen2", "qwen3", "gemma"), (3, 3, 2, 2, 2))[0]
        layers, hidden = rng.choices((1, 2, 3, 4), (4, 3, 2, 2))[0], rng.choice((32, 32, 48, 64, 96))
        batch, length = rng.choice((4, 8, 16)), rng.choice((32, 48, 64, 96))
        operations = 6 * (12 * hidden**2 * layers + 256 * hidden) * batch * length
        per_step = 2e-3 + layers * (5e-3 if architecture == "qwen3" else 3.5e-3) + operations / 14e9
        if 2.7 * steps * per_step <= SECONDS:
            break
    return {
        "architecture": architecture,
        "layers": layers,
        "hidden": hidden,
        "heads": rng.choice((2, 4)),
        "tied": rng.random() < 0.5,
        "dropout": 0.1 if architecture == "gpt2" and rng.random() < 0.3 else 0.0,
        "batch": batch,
        "length": length,
    }


@dataclass
class BranchUnderWay:
    """A copy of the run that takes another course from the end of stretch `start` on."""

    start: int
    course: Course
    training: Training
    stretches: Stretches = field(default_factory=Stretches)
    diverged: int | None = None


def branch_course(settings: Settings, number: int, step: int) -> Course:
    """
    Draw what a branch does differently for 50 to 200 steps: it leaps where the run does not, and else leaps not at all
    or in another way.
    """
    rng = random.Random(f"branch {settings.index} {number}")
    last = min(step + 10 * rng.randint(5, 20), settings.steps)
    other = draw_policy(rng, settings.direction, step, last)
    base = settings.base
    leaps_anyway = base is not None and min(base.last, last) - max(base.first, step) >= (last - step) / 2
    return Course(base, None if leaps_anyway and rng.random() < 0.6 else other, step, last)


def branch_steps(settings: Settings) -> list[int]:
    """Draw the steps at which branches start: one in each third of the run, at least 50 steps before its end."""
    rng = random.Random(f"branches {settings.index}")
    last = min(0.9, 1.0 - 60 / settings.steps)
    return [
        round(settings.steps * (0.12 + (number + rng.random()) / BRANCHES * (last - 0.12)))
        for number in range(BRANCHES)
    ]


def run(settings: Settings) -> dict:
    """Train with branches; returns `settings`, `stretches`, `diverged` (step or `None`) and `branches`."""
    training, stretches, branches = Training.start(settings), Stretches(), []
    due = branch_steps(settings)
    course = Course(settings.base)
    diverged = None
    try:
        while not training.ended:
            closed = training.advance(course.at(training.now.step), stretches)
            if closed and due and training.now.step >= due[0]:
                due.pop(0)
                step = training.now.step
                branches.append(
                    BranchUnderWay(len(stretches.losses), branch_course(settings, len(branches), step), training.copy())
                )
    except DivergedError:
        diverged = training.now.step
    for branch in branches:
        continue_branch(branch)
    return {"settings": asdict(settings), "windows": stretches, "diverged": diverged, "branches": branches}


def continue_branch(branch: BranchUnderWay) -> None:
    """Train a branch to the end of the run."""
    training = branch.training
    try:
        while not training.ended:
            training.advance(branch.course.at(training.now.step), branch.stretches)
    except DivergedError:
        branch.diverged = training.now.step


def set_up_worker() -> None:
    torch.set_num_threads(1)
    logging.set_verbosity_error()


def record_run(job: tuple[int, Path]) -> str:
    """Make a run and write its file. Returns a line for the log, with the seconds of one core that the run took."""
    index, folder = job
    started = time.process_time()
    settings = draw_settings(index)
    result = run(settings)
    write(path_of(index, folder), as_arrays(result))
    seconds = time.process_time() - started
    losses = result["windows"].losses
    what = f"{settings.architecture} {settings.layers}x{settings.hidden} {settings.optimizer} {settings.schedule}"
    span = f"{losses[0]:.2f} -> {losses[-1]:.2f}" if losses else "no window"
    return (
        f"{index:4d}  {seconds:5.1f} s  {what:38s} {settings.steps} steps  rate x{settings.rate_over_reference:.2f}  "
        f"{'leaps' if settings.base else 'plain'}  {span}  {len(result['branches'])} branches"
        + (f"  diverged at {result['diverged']}" if result["diverged"] is not None else "")
    )


def record(indices: Iterable[int], workers: int, folder: Path) -> None:
    """Make the runs that are not there yet, and print a line for each."""
    folder.mkdir(parents=True, exist_ok=True)
    jobs = [(index, folder) for index in indices if not path_of(index, folder).exists()]
    if not jobs:
        return
    os.environ["OMP_NUM_THREADS"] = "1"
    with multiprocessing.get_context("spawn").Pool(workers, set_up_worker) as pool:
        for line in pool.imap_unordered(record_run, jobs):
            print(line, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=RUNS, help="Make the runs 0 to RUNS - 1 that are not there yet.")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--folder", type=Path, default=RECORDINGS)
    args = parser.parse_args()
    record(range(args.runs), args.workers, args.folder)


if __name__ == "__main__":
    main()
