"""
Record whole runs with their signals: what the RSSM's forecast of the final loss is scored on.

    nice -n 10 python -m benchmarks.world_model.followed                      # all kinds; runs that are there are kept
    nice -n 10 python -m benchmarks.world_model.followed --kinds batch code   # these alone

A file of `recordings/followed/` is one run: the loss and the learning rate of every step, from which loss curves are
forecast, and the stretches with their 64 signals, from which the RSSM forecasts. Everything follows from kind and
index. The kind `recorded` are the runs of record.py once more, without branches; the RSSM was trained on those whose
index does not end in 4 or 9. It has seen nothing of the other kinds:

- `batch`, `long`, `short`: tiny models in the loop of small_run.py, with batches of 1, 2, 32 or 48 rows, and with 1,000
  to 1,800 or 40 to 80 steps. Settings are those of curves.py; some learning rates are lower than any that it was
  trained on.
- `code`, `docs`, `lora`, `smol-lora`, `smol-full`: tasks of the speed-up benchmark through `HybridTrainer` with
  `planner="dynamics"`. Stretches are those that its planner observes. Those that start from SmolLM2 train in
  batches of two rows, for 100 or 200 steps, so that a tenth of the run has a stretch.

Runs with an odd index leap, in the tiny models by a policy that is drawn like those of record.py. One process, one
thread; the kinds never seen take half an hour, `recorded` ten minutes.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from pathlib import Path

import numpy as np
import torch
from hf_hybrid.world_model.observer import PlannerObserver, Stretch
from hf_hybrid.world_model.rssm import FEATURES
from transformers import PrinterCallback
from transformers.utils import logging

from benchmarks.world_model.curves import FACTORS, SCHEDULES, small_settings
from benchmarks.world_model.curves import STEPS as CURVE_STEPS
from benchmarks.world_model.record import draw_policy, draw_settings
from benchmarks.world_model.small_run import Course, DivergedError, Settings, Stretches, Training
from benchmarks.world_model.storage import HELD_OUT_EVERY, RECORDINGS, write
from hf_hybrid.part import Part

FOLLOWED = RECORDINGS / "followed"
FIRST_INDEX = 100
"""Of the kinds that curves.py records too, so that no run is recorded twice."""
STEPS = {**CURVE_STEPS, "smol-lora": 200, "smol-full": 100}


@dataclass(frozen=True)
class FollowedRun:
    """
    A run of `T` planned steps and `W` stretches.

    Args:
        kind (`str`), index (`int`): What it follows from.
        about (`dict`): Its settings; `leaps` says whether it could leap, `diverged` whether it ended early.
        losses (`np.ndarray`): `[T]`, training loss of each step, NaN where it was skipped.
        rates (`np.ndarray`): `[T]`, learning rate of each step, in any unit.
        features (`np.ndarray`), actions (`np.ndarray`): `[W, 64]` and `[W, 4]`, as hf_hybrid/world_model/dynamics.py
            explains them.
        stretch_losses (`np.ndarray`), ends (`np.ndarray`): `[W]`, mean loss, and steps done at the end.
    """

    kind: str
    index: int
    about: dict
    losses: np.ndarray
    rates: np.ndarray
    features: np.ndarray
    actions: np.ndarray
    stretch_losses: np.ndarray
    ends: np.ndarray

    @property
    def learned(self) -> bool:
        """Whether the RSSM was trained on this run."""
        return self.kind == "recorded" and self.index % HELD_OUT_EVERY != HELD_OUT_EVERY - 1


class Listening(Training):
    """A tiny run whose losses are kept by step."""

    def __init__(self, *args):
        super().__init__(*args)
        self.losses = np.full(self.settings.steps, math.nan)

    def _real_step(self, rate: float) -> dict:
        measured = super()._real_step(rate)
        self.losses[self.now.step] = measured["loss"]
        return measured


def recorded_run(kind: str, index: int) -> FollowedRun:
    """A run of record.py, without its branches."""
    return tiny_run(kind, index, draw_settings(index))


def unseen_run(kind: str, index: int) -> FollowedRun:
    """A tiny run with the settings of curves.py, and with leaps if the index is odd."""
    settings = small_settings(kind, index)
    if settings.optimizer == "sgd":  # has no direction of its own to orthogonalise
        settings = replace(settings, direction="gradient_memory", memory_steps=max(settings.steps // 6, 5))
    if index % 2:
        rng = random.Random(f"leaps of {kind} {index}")
        first = round(rng.uniform(0.0, 0.5) * settings.steps)
        last = round(rng.uniform(0.75, 1.0) * settings.steps)
        settings = replace(settings, base=draw_policy(rng, settings.direction, first, last))
    return tiny_run(kind, index, settings)


def tiny_run(kind: str, index: int, settings: Settings) -> FollowedRun:
    training, stretches, course = Listening.start(settings), Stretches(), Course(settings.base)
    diverged = False
    try:
        while not training.ended:
            training.advance(course.at(training.now.step), stretches)
    except DivergedError:
        diverged = True
    about = {
        **{
            name: getattr(settings, name) for name in ("steps", "batch", "optimizer", "schedule", "rate_over_reference")
        },
        "leaps": settings.base is not None,
        "diverged": diverged,
    }
    features = np.array(stretches.features, dtype=np.float32).reshape(-1, FEATURES)
    actions = np.array(stretches.actions, dtype=np.float32).reshape(-1, 4)
    losses, ends = np.array(stretches.losses, dtype=np.float32), np.array(stretches.steps, dtype=np.int32)
    return FollowedRun(
        kind, index, about, training.losses, np.array(training.schedule), features, actions, losses, ends
    )


class Watcher(Part):
    """Keeps what the planner of a trainer observes."""

    def __init__(self):
        self.stretches: list[Stretch] = []

    def begin(self, run) -> None:
        planner = run.part(PlannerObserver).planner
        observe = planner.observe

        def watched(stretch: Stretch) -> None:
            self.stretches.append(stretch)
            observe(stretch)

        planner.observe = watched


def trainer_run(kind: str, index: int) -> FollowedRun:
    """A task of the speed-up benchmark, with another schedule, rate and length from index to index."""
    from benchmarks.speedup.run import make_base, sources_of
    from benchmarks.speedup.tasks import BASE, TASKS, training_arguments

    task, schedule = TASKS[kind], SCHEDULES[index // 2 % len(SCHEDULES)]
    steps = STEPS[kind] if task.pretrained else round(STEPS[kind] * (1.0, 0.8, 1.3)[index % 3])
    rate = task.grid[1] * FACTORS[index % len(FACTORS)]
    if task.pretrained:
        task = replace(task, batch=2)
    elif not task.scratch and not BASE.is_dir():
        make_base()
    sources, watcher = sources_of(task), Watcher()
    model, data = sources.model(task, index), sources.split(task.text)
    trainer_kind, config_kind, more = sources.trainer(task, hybrid=True)
    with tempfile.TemporaryDirectory() as folder:
        values = training_arguments(task, steps=steps, rate=rate, seed=index, folder=folder)
        values |= {"logging_steps": 1, "lr_scheduler_type": schedule, "planner": "dynamics", "auto_lr": "off"}
        values |= {"direction": "orthogonal"} if index % 2 else {"leap_gain": 0.0}
        if schedule == "warmup_stable_decay":
            values["lr_scheduler_kwargs"] = {"num_decay_steps": steps // 5}
        config = config_kind(**values)
        trainer = trainer_kind(model, args=config, train_dataset=data["train"], parts=[watcher], **more)
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    losses, rates = np.full(steps, math.nan), np.zeros(steps)
    for entry in trainer.state.log_history:
        if "learning_rate" in entry:
            rates[entry["step"] - 1] = entry["learning_rate"]
            losses[entry["step"] - 1] = entry.get("loss", math.nan)
    seen = [stretch for stretch in watcher.stretches if math.isfinite(stretch.loss)]
    about = {
        **{"steps": steps, "batch": task.batch, "schedule": schedule, "rate": rate},
        "leaps": bool(index % 2),
        "diverged": not np.isfinite(losses[-5:]).any(),
    }
    features = np.array([stretch.features for stretch in seen], dtype=np.float32).reshape(-1, FEATURES)
    actions = [[stretch.gain, stretch.horizon, stretch.progress, stretch.rate] for stretch in seen]
    actions = np.array(actions, dtype=np.float32).reshape(-1, 4)
    stretch_losses = np.array([stretch.loss for stretch in seen], dtype=np.float32)
    ends = np.rint(actions[:, 2] * steps).astype(np.int32)
    return FollowedRun(kind, index, about, losses, rates, features, actions, stretch_losses, ends)


KINDS: dict[str, tuple[range, Callable[[str, int], FollowedRun]]] = {
    name: (range(first, first + count), make)
    for name, first, count, make in (
        ("batch", FIRST_INDEX, 16, unseen_run),
        ("short", FIRST_INDEX, 6, unseen_run),
        ("long", FIRST_INDEX, 10, unseen_run),
        ("docs", FIRST_INDEX, 6, trainer_run),
        ("lora", FIRST_INDEX, 6, trainer_run),
        ("code", FIRST_INDEX, 6, trainer_run),
        ("smol-lora", FIRST_INDEX, 2, trainer_run),
        ("smol-full", FIRST_INDEX, 2, trainer_run),
        ("recorded", 0, 220, recorded_run),
    )
}
"""Indices of each kind, and what makes a run of it."""


def path_of(kind: str, index: int, folder: Path) -> Path:
    return folder / f"{kind}-{index:03d}.npz"


def keep(run: FollowedRun, folder: Path) -> None:
    header = json.dumps({name: getattr(run, name) for name in ("kind", "index", "about")}).encode()
    arrays = {field.name: getattr(run, field.name) for field in fields(run)[3:]}
    arrays |= {"losses": run.losses.astype(np.float32), "header": np.frombuffer(header, dtype=np.uint8)}
    write(path_of(run.kind, run.index, folder), arrays)


def load_followed(folder: Path = FOLLOWED) -> list[FollowedRun]:
    """
    Read all runs, by kind and index.

    Raises:
        FileNotFoundError: If there is none.
    """
    runs = []
    for path in sorted(folder.glob("*.npz")):
        with np.load(path) as file:
            arrays = {name: file[name] for name in file.files}
        runs.append(FollowedRun(**json.loads(bytes(arrays.pop("header")).decode()), **arrays))
    if not runs:
        raise FileNotFoundError(f"No run is in `{folder}`. Run `python -m benchmarks.world_model.followed` first.")
    return runs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", nargs="+", choices=list(KINDS), default=list(KINDS))
    parser.add_argument("--folder", type=Path, default=FOLLOWED)
    args = parser.parse_args()
    torch.set_num_threads(1)
    logging.set_verbosity_error()
    args.folder.mkdir(parents=True, exist_ok=True)
    for kind in args.kinds:
        indices, make = KINDS[kind]
        for index in indices:
            if path_of(kind, index, args.folder).exists():
                continue
            started = time.process_time()
            run = make(kind, index)
            keep(run, args.folder)
            seconds, known = time.process_time() - started, run.losses[np.isfinite(run.losses)]
            span = f"{known[:5].mean():.2f} -> {known[-5:].mean():.3f}" if len(known) else "no loss"
            leaps = f"{int((run.actions[:, 0] > 0).sum())} of {len(run.ends)} stretches with leaps"
            print(f"{kind} {index}: {seconds:.1f} s  {len(run.losses)} steps, {leaps}  {span}", flush=True)


if __name__ == "__main__":
    main()
