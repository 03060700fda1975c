"""
Record what every trial of a sweep would see: the curves of a whole grid of learning rates.

    python -m benchmarks.sweep.record                        # 80 runs, an hour on one core; goes on where it stopped
    python -m benchmarks.sweep.record --task docs --seeds 0

The trials of a sweep share data and seeds, so a trial that a pruner ends is the beginning of the same trial to its end.
One recording of the grid is therefore enough to replay any pruner on it (replay.py), step by step and exactly.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from transformers import TrainerCallback

from benchmarks.results import Results, command_line, provenance
from benchmarks.speedup.tasks import TASKS, training_arguments

HERE = Path(__file__).resolve().parent
KEY = ("task", "steps", "rate", "seed")
LENGTHS = {"code": 200, "docs": 120, "lora": 120, "smol-lora": 40}
"""Steps of a run, by task."""
GRID = tuple(float(f"{10 ** (-5 + index / 3):.3g}") for index in range(10))
"""Three learning rates per decade from 1e-5 to 1e-2."""


class Curve(TrainerCallback):
    """Collects the training loss of each step; a step that a leap replaced has none."""

    def __init__(self):
        self.losses: dict[int, float] = {}

    def on_log(self, args, state, control, logs=None, **kwargs):
        if "loss" in logs:
            self.losses[state.global_step] = float(f"{float(logs['loss']):.5g}")


def record(name: str, rate: float, seed: int) -> dict:
    """Train a task with `HybridTrainer` as it comes. Returns the curve and the held-out loss, `None` if it diverged."""
    from benchmarks.speedup.run import sources_of
    from hf_hybrid.run.monitor import TrainingDivergedError

    task, steps, curve = TASKS[name], LENGTHS[name], Curve()
    sources = sources_of(task)
    data, model = sources.split(task.text), sources.model(task, seed)
    with tempfile.TemporaryDirectory() as folder:
        values = training_arguments(task, steps=steps, rate=rate, seed=seed, folder=folder)
        kind, config_kind, common = sources.trainer(task, hybrid=True)
        common |= {"train_dataset": data["train"], "eval_dataset": data["test"], "callbacks": [curve]}
        trainer = kind(model, config_kind(**values | {"logging_steps": 1, "auto_lr": "off"}), **common)
        try:
            trainer.train()
            eval_loss = trainer.evaluate()["eval_loss"]
        except TrainingDivergedError:
            eval_loss = None
    return {"losses": [curve.losses.get(step) for step in range(1, steps + 1)], "eval_loss": eval_loss}


def main() -> None:
    parser = command_line(__doc__, HERE)
    parser.add_argument("--task", nargs="+", choices=list(LENGTHS), default=list(LENGTHS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1])
    args = parser.parse_args()
    os.environ["HYBRID_BENCHMARK_THREADS"] = "1"
    results = Results(args.results, "curve", KEY)
    for seed in args.seeds:
        for task in args.task:
            for rate in GRID:
                run = {"task": task, "steps": LENGTHS[task], "rate": rate, "seed": seed}
                if results.get(**run) is None:
                    row = results.add({**run, **record(task, rate, seed), **provenance(1)})
                    print(run, row["eval_loss"], flush=True)


if __name__ == "__main__":
    main()
