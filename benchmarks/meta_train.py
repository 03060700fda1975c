"""
Many small training runs with branches: data from which a dynamics model learns how training goes and what leaps earn.

    nice -n 10 python benchmarks/meta_train.py record --runs 220 --workers 2     # runs that are there are kept
    python benchmarks/meta_train.py pack                                        # single files into a few shards
    python benchmarks/meta_train.py train --threads 2                           # start weights of the package

A run trains a tiny Llama, GPT-2, Qwen2, Qwen3 or Gemma on bytes that ship with Python; model, data, learning rate,
schedule, optimizer and leaps follow from its index. Even runs make no leaps of their own, odd ones for a part of the
run. At three moments the state is copied and continued with another policy for 50 to 200 steps, then like the run
itself to the end, on the same data in the same order: the difference is what the policy was worth, in training losses
of every window (10 real steps) and in held-out loss 10, 50 and 200 steps later and at the end.

Files lie in `benchmarks/results/meta/`; [`load_records`] reads them. One CPU thread per worker.
"""

from __future__ import annotations

import argparse
import io
import json
import math
import multiprocessing
import os
import random
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
import torch
from dynamics_training import train
from meta_runs import (
    HELD_OUT,
    PROBE,
    DivergedError,
    Plan,
    Policy,
    Settings,
    Training,
    Windows,
    reference_rate,
    text_bytes,
)
from transformers.utils import logging

from hf_hybrid.world_model.rssm_records import Branch, Continuation, Record

RESULTS = Path(__file__).resolve().parent / "results" / "meta"
AFTER = (10, 50, 200)
"""Steps after the start of a branch at which the held-out loss is measured; and at the end."""
BRANCHES = 3
SECONDS = 13.0
"""Largest expected cost of a run; sizes are drawn again until they fit."""
HELD_OUT_EVERY = 5
"""Of the runs, for whoever learns from them."""
RUNS_PER_SHARD = 64
FEATURE_STEP = 5.0 / 127
"""Features lie in [-5, 5] and are stored in 8 bits."""


def draw_policy(rng: random.Random, direction: str, first: int, last: int) -> Policy:
    worth = rng.uniform(0.05, 0.4) if rng.random() < 0.3 else 0.0
    gain = math.exp(rng.uniform(math.log(0.25), math.log(8.0)))
    power = rng.choice((0, 1, 2)) if direction == "gradient_memory" else rng.choice((0, 0, 0, 1))
    return Policy(rng.randint(2, 8), gain, power, worth, first, last)


def draw_settings(index: int) -> Settings:
    """The run of this index."""
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
    """Architecture and batch, small enough for a run of `steps` steps to cost at most `SECONDS`."""
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
    """A copy of the run that goes another way from the end of window `start` on."""

    start: int
    plan: Plan
    training: Training
    windows: Windows = field(default_factory=Windows)
    base_held_out: list[float] = field(default_factory=lambda: [math.nan] * (len(AFTER) + 1))
    held_out: list[float] = field(default_factory=lambda: [math.nan] * (len(AFTER) + 1))
    diverged: int | None = None


def branch_plan(settings: Settings, number: int, step: int) -> Plan:
    """For 50 to 200 steps leaps where the run has none; where it has some, none or others."""
    rng = random.Random(f"branch {settings.index} {number}")
    last = min(step + 10 * rng.randint(5, 20), settings.steps)
    other = draw_policy(rng, settings.direction, step, last)
    base = settings.base
    leaps_anyway = base is not None and min(base.last, last) - max(base.first, step) >= (last - step) / 2
    return Plan(base, None if leaps_anyway and rng.random() < 0.6 else other, step, last)


def branch_steps(settings: Settings) -> list[int]:
    """One in each third of the run, at least 50 steps before its end; a branch starts at the end of its window."""
    rng = random.Random(f"branches {settings.index}")
    last = min(0.9, 1.0 - 60 / settings.steps)
    return [
        round(settings.steps * (0.12 + (number + rng.random()) / BRANCHES * (last - 0.12)))
        for number in range(BRANCHES)
    ]


def run(settings: Settings) -> dict:
    """Train with branches; returns `settings`, `windows`, `diverged` (step or `None`) and `branches`."""
    training, windows, branches = Training.start(settings), Windows(), []
    due = branch_steps(settings)
    plan = Plan(settings.base)
    diverged = None
    try:
        while not training.ended:
            closed = training.advance(plan.at(training.now.step), windows)
            for branch in branches:
                _measure(training, branch.plan.first, branch.base_held_out)
            if closed and due and training.now.step >= due[0]:
                due.pop(0)
                step = training.now.step
                branches.append(
                    BranchUnderWay(len(windows.losses), branch_plan(settings, len(branches), step), training.copy())
                )
    except DivergedError:
        diverged = training.now.step
    for branch in branches:
        continue_branch(branch)
    return {"settings": asdict(settings), "windows": windows, "diverged": diverged, "branches": branches}


def continue_branch(branch: BranchUnderWay) -> None:
    """To the end of the run."""
    training = branch.training
    try:
        while not training.ended:
            training.advance(branch.plan.at(training.now.step), branch.windows)
            _measure(training, branch.plan.first, branch.held_out)
    except DivergedError:
        branch.diverged = training.now.step


def _measure(training: Training, start: int, into: list[float]) -> None:
    passed = training.now.step - start
    if passed in AFTER or training.ended:
        loss = training.held_out_loss()
        if passed in AFTER:
            into[AFTER.index(passed)] = loss
        if training.ended:
            into[-1] = loss


@dataclass(frozen=True, kw_only=True)
class MeasuredContinuation(Continuation):
    """
    With the steps done at the end of each window, and held-out losses `[4]` at `AFTER` and at the end (NaN: not
    reached).
    """

    steps: np.ndarray
    held_out: np.ndarray


@dataclass(frozen=True, kw_only=True)
class RecordedRun(Record):
    """
    A run of `W` windows, as arrays, with up to three branches: as it went on, and another way.

    Args:
        settings (`dict`): What made it (`Settings`), with `diverged` and, per branch, plan and `diverged`.
        steps (`np.ndarray`): int32 `[W]`, steps done at the end of each window.
    """

    settings: dict
    steps: np.ndarray


def as_arrays(result: dict) -> dict[str, np.ndarray]:
    """A run as what is stored: a JSON header and the windows of run and branches one after the other."""
    branches = result["branches"]
    header = {
        **result["settings"],
        "diverged": result["diverged"],
        "windows": len(result["windows"].losses),
        "branches": [
            {"start": b.start, "windows": len(b.windows.losses), "diverged": b.diverged, **asdict(b.plan)}
            for b in branches
        ],
    }
    everything = [result["windows"], *[b.windows for b in branches]]
    features = np.array([row for w in everything for row in w.features], dtype=np.float64).reshape(-1, 64)
    held_out = [loss for b in branches for loss in (*b.base_held_out, *b.held_out)]
    return {
        "headers": np.frombuffer(json.dumps([header]).encode(), dtype=np.uint8),
        "features": np.rint(features / FEATURE_STEP).astype(np.int8),
        "actions": np.array([row for w in everything for row in w.actions], dtype=np.float32).reshape(-1, 4),
        "losses": np.array([loss for w in everything for loss in w.losses], dtype=np.float32),
        "steps": np.array([step for w in everything for step in w.steps], dtype=np.int32),
        "held_out": np.array(held_out, dtype=np.float32).reshape(-1, 2, len(AFTER) + 1),
    }


def write(path: Path, arrays: dict[str, np.ndarray]) -> None:
    """All or nothing; the same arrays give the same bytes."""
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **arrays)
    partial = path.with_suffix(".partial")
    partial.write_bytes(buffer.getvalue())
    partial.replace(path)


def headers_of(arrays) -> list[dict]:
    return json.loads(bytes(arrays["headers"]).decode())


def runs_in(path: Path) -> list[RecordedRun]:
    """All runs of a file, single or packed."""
    with np.load(path) as file:
        arrays = {name: file[name] for name in file.files}
    features = arrays["features"].astype(np.float32) * np.float32(FEATURE_STEP)
    columns = {**{name: arrays[name] for name in ("actions", "losses", "steps")}, "features": features}
    held_out = iter(arrays["held_out"])
    row, runs = 0, []
    for header in headers_of(arrays):
        parts = []
        for count in (header["windows"], *[b["windows"] for b in header["branches"]]):
            parts.append({name: column[row : row + count] for name, column in columns.items()})
            row += count
        branches = []
        for branch, part in zip(header["branches"], parts[1:]):
            base, other = next(held_out)
            rest = {name: column[branch["start"] :] for name, column in parts[0].items()}
            futures = (MeasuredContinuation(**rest, held_out=base), MeasuredContinuation(**part, held_out=other))
            branches.append(Branch(branch["start"], *futures))
        runs.append(RecordedRun(settings=header, branches=branches, **parts[0]))
    return runs


def load_records(folder: Path = RESULTS) -> tuple[list[RecordedRun], list[RecordedRun]]:
    """Runs to learn from and runs held out (every fifth), in the order of their indices."""
    runs = sorted((run for path in folder.glob("*.npz") for run in runs_in(path)), key=lambda r: r.settings["index"])
    held_out = [run for run in runs if run.settings["index"] % HELD_OUT_EVERY == HELD_OUT_EVERY - 1]
    return [run for run in runs if run.settings["index"] % HELD_OUT_EVERY != HELD_OUT_EVERY - 1], held_out


def recorded_indices(folder: Path) -> set[int]:
    return {header["index"] for path in folder.glob("*.npz") for header in headers_of(np.load(path))}


def pack(folder: Path) -> list[Path]:
    """All files into shards of `RUNS_PER_SHARD` runs."""
    stored = []
    paths = sorted(folder.glob("*.npz"))
    for path in paths:
        with np.load(path) as file:
            stored += split_by_run({name: file[name] for name in file.files})
    stored.sort(key=lambda arrays: headers_of(arrays)[0]["index"])
    shards = {}
    for first in range(0, len(stored), RUNS_PER_SHARD):
        some = stored[first : first + RUNS_PER_SHARD]
        arrays = {name: np.concatenate([one[name] for one in some]) for name in some[0] if name != "headers"}
        headers = json.dumps([headers_of(one)[0] for one in some]).encode()
        arrays["headers"] = np.frombuffer(headers, dtype=np.uint8)
        shards[folder / f"runs-{first // RUNS_PER_SHARD:02d}.npz"] = arrays
    for path, arrays in shards.items():
        write(path, arrays)
    for path in set(paths) - set(shards):
        path.unlink()
    return list(shards)


def split_by_run(arrays: dict[str, np.ndarray]) -> list[dict[str, np.ndarray]]:
    """The stored form of every run of a file."""
    row, branch, runs = 0, 0, []
    for header in headers_of(arrays):
        rows = slice(row, row + header["windows"] + sum(b["windows"] for b in header["branches"]))
        branches = slice(branch, branch + len(header["branches"]))
        row, branch = rows.stop, branches.stop
        one = {name: arrays[name][rows] for name in ("features", "actions", "losses", "steps")}
        one["headers"] = np.frombuffer(json.dumps([header]).encode(), dtype=np.uint8)
        runs.append({**one, "held_out": arrays["held_out"][branches]})
    return runs


def set_up_worker() -> None:
    torch.set_num_threads(1)
    logging.set_verbosity_error()


def record_run(job: tuple[int, Path]) -> str:
    """Make a run and write its file; returns a line for the log, with the seconds of one core that it took."""
    index, folder = job
    started = time.process_time()
    settings = draw_settings(index)
    result = run(settings)
    write(folder / f"run-{index:04d}.npz", as_arrays(result))
    seconds = time.process_time() - started
    losses = result["windows"].losses
    worth = " ".join(f"{b.held_out[-1] - b.base_held_out[-1]:+.3f}" for b in result["branches"])
    what = f"{settings.architecture} {settings.layers}x{settings.hidden} {settings.optimizer} {settings.schedule}"
    span = f"{losses[0]:.2f} -> {losses[-1]:.2f}" if losses else "no window"
    return (
        f"{index:4d}  {seconds:5.1f} s  {what:38s} {settings.steps} steps  rate x{settings.rate_over_reference:.2f}  "
        f"{'leaps' if settings.base else 'plain'}  {span}  branches {worth}"
        + (f"  diverged at {result['diverged']}" if result["diverged"] is not None else "")
    )


def record(indices: Iterable[int], workers: int, folder: Path) -> None:
    """Those that are not there yet; one line each."""
    folder.mkdir(parents=True, exist_ok=True)
    there = recorded_indices(folder)
    jobs = [(index, folder) for index in indices if index not in there]
    os.environ["OMP_NUM_THREADS"] = "1"
    with multiprocessing.get_context("spawn").Pool(workers, set_up_worker) as pool:
        for line in pool.imap_unordered(record_run, jobs):
            print(line, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    texts = {
        "record": "Make the runs that are not there yet.",
        "pack": "Single files into shards.",
        "train": "Start weights of the world model, from the runs that are there.",
    }
    for name, text in texts.items():
        command = commands.add_parser(name, help=text, description=text)
        command.add_argument("--folder", type=Path, default=RESULTS)
        if name == "record":
            command.add_argument("--runs", type=int, default=220, help="Indices 0 to RUNS - 1.")
            command.add_argument("--workers", type=int, default=2)
        if name == "train":
            command.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    if args.command == "train":
        train(*load_records(args.folder), args.threads)
        return
    if args.command == "record":
        record(range(args.runs), args.workers, args.folder)
        return
    for path in pack(args.folder):
        print(f"{path.name}: {path.stat().st_size} bytes")


if __name__ == "__main__":
    main()
