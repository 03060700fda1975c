"""
What hybrid training costs when it gains nothing, on the quickstart's model. About five minutes; one thread.

    python benchmarks/overhead.py

- `disabled` (`enable_predict=False`) against plain Trainer: median CPU seconds of a step, in short runs in turn.
- `rejected`: a run whose leaps are all turned uphill, so that probes refuse them. What memory, signals, probes,
  snapshots and roll-backs take is clocked where it happens and put over the rest of the same run, which is what plain
  Trainer does too. A machine whose speed drifts between runs does not blur that.
- `hybrid`: the same for a default run. Predicted steps are not subtracted.

Also the bytes of the buffers, exact. Writes `benchmarks/results/overhead.json`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

import torch
from acceleration import BASE
from acceleration_tasks import TASKS, TextAndModels
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.utils import logging

import hf_hybrid
from hf_hybrid.leaps.engine import PredictionEngine
from hf_hybrid.leaps.trajectory import Trajectory

RESULTS = Path(__file__).resolve().parent / "results"


class Clock(TrainerCallback):
    """CPU seconds from the end of a step to the end of the next; the first step, which initialises, is left out."""

    def __init__(self):
        self.ends: list[float] = []

    def on_step_end(self, args, state, control, **kwargs):
        self.ends.append(time.process_time())

    @property
    def steps(self) -> list[float]:
        return [b - a for a, b in zip(self.ends, self.ends[1:])]


class OwnTime:
    """CPU seconds spent in what the package adds to a run."""

    def __init__(self, trainer):
        self.seconds = 0.0
        for name in ("_before_update", "_after_update", "_end_step"):
            setattr(trainer, name, self.clocked(getattr(trainer, name)))
        self.begin_step = PredictionEngine.begin_step

    def clocked(self, function):
        def timed(*args, **kwargs):
            start = time.process_time()
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds += time.process_time() - start

        return timed

    def __enter__(self):
        PredictionEngine.begin_step = self.clocked(self.begin_step)
        return self

    def __exit__(self, *_):
        PredictionEngine.begin_step = self.begin_step


class Uphill:
    """Turns every leap against its direction while it is entered."""

    def __enter__(self):
        self.original = Trajectory.leap
        Trajectory.leap = lambda trajectory, gain: self.original(trajectory, -1e6 * max(gain, 1e-6))

    def __exit__(self, *_):
        Trajectory.leap = self.original


def build(arm: str, sources: TextAndModels, steps: int, folder: str, clock: Clock):
    data = sources.split("code")
    values = {
        "output_dir": folder, "max_steps": steps, "learning_rate": 2e-3, "per_device_train_batch_size": 8,
        "save_strategy": "no", "report_to": "none", "disable_tqdm": True, "logging_steps": 10**9,
        "dataloader_pin_memory": False,
    }  # fmt: skip
    model = sources.model(TASKS["code"], 0)
    common = {"train_dataset": data["train"], "callbacks": [clock]}
    if arm == "plain":
        return Trainer(model, TrainingArguments(**values), **common)
    config = hf_hybrid.HybridConfig(**values, enable_predict=arm != "disabled")
    return hf_hybrid.HybridTrainer(model, config, probe_dataset=data["probe"], **common)


def disabled_against_plain(sources, rounds: int, steps: int, folder: str) -> dict:
    medians: dict[str, list[float]] = {"plain": [], "disabled": []}
    for number in range(rounds + 1):
        for arm in sorted(medians, reverse=bool(number % 2)):
            clock = Clock()
            build(arm, sources, steps, folder, clock).train()
            if number:  # the first round warms caches and allocator
                medians[arm].append(statistics.median(clock.steps))
    ratios = sorted(a / b for a, b in zip(medians["disabled"], medians["plain"]))
    return {
        "steps": steps,
        "seconds_per_step": medians,
        "ratio": {"median": statistics.median(ratios), "least": ratios[0], "most": ratios[-1]},
    }


def own_share(arm: str, sources, steps: int, folder: str) -> dict:
    """Seconds of the package's own work over those of the rest of the run."""
    clock = Clock()
    trainer = build(arm, sources, steps, folder, clock)
    with OwnTime(trainer) as own:
        start = time.process_time()
        if arm == "rejected":
            with Uphill():
                trainer.train()
        else:
            trainer.train()
        total = time.process_time() - start
    summary = trainer.hybrid_summary()
    kept = ("steps_by_phase", "leaps_by_verdict", "roll_backs", "probe_cost_steps", "buffer_bytes")
    return {
        "steps": steps,
        "own_seconds": own.seconds,
        "other_seconds": total - own.seconds,
        "share": own.seconds / (total - own.seconds),
        **{name: summary[name] for name in kept},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--steps", type=int, default=300, help="Of the rejected and hybrid runs.")
    args = parser.parse_args()
    logging.disable_progress_bar()
    torch.set_num_threads(1)
    sources = TextAndModels(BASE)
    result = {"torch": torch.__version__, "threads": 1}
    with tempfile.TemporaryDirectory() as folder:
        for arm in ("rejected", "hybrid"):
            result[arm] = own_share(arm, sources, args.steps, folder)
            print(arm, json.dumps(result[arm]), flush=True)
        result["disabled"] = disabled_against_plain(sources, args.rounds, 30, folder)
        print("disabled", result["disabled"]["ratio"], flush=True)
    (RESULTS / "overhead.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
