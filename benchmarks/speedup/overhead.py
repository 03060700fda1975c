"""
What hybrid training costs when it gains nothing, on the quickstart's model. About five minutes; one thread.

    python -m benchmarks.speedup.overhead          # on an otherwise idle machine
    python -m benchmarks.speedup.overhead --pretrained --steps 10        # on SmolLM2; pretrained.py says how to get it

- `disabled` (`enable_predict=False`) against plain Trainer: median CPU seconds of a step, in short runs in turn.
- `rejected`: a run whose leaps are all turned uphill, so that probes refuse them. What memory, signals, probes,
  snapshots and roll-backs take is clocked where it happens and put over the rest of the same run, which is what plain
  Trainer does too. A machine whose speed drifts between runs does not blur that.
- `hybrid`: the same for a default run. Predicted steps are not subtracted.
- `pretrained`: the same for a default run on a pretrained model, in which no leaps are made.

The bytes of the buffers are exact.
"""

from __future__ import annotations

import json
import tempfile
import time
from pathlib import Path

import torch
from transformers import Trainer, TrainingArguments
from transformers.utils import logging

import hf_hybrid
from benchmarks.results import Results, command_line, provenance
from benchmarks.speedup.tasks import QUIET, TASKS, TextAndModels, training_arguments
from benchmarks.timing import StepClock, Stopwatch, paired_ratio
from hf_hybrid.leaps.directions import Orthogonal
from hf_hybrid.run.run import Run

DISABLED_STEPS = 30


class OwnTime(Stopwatch):
    """Adds up the CPU seconds of the package's own work in a run."""

    def __init__(self, trainer):
        super().__init__()
        for name in ("_before_update", "_after_update", "_end_step"):
            setattr(trainer, name, self.around(getattr(trainer, name)))
        self.begin_step = Run.begin_step

    def __enter__(self):
        Run.begin_step = self.around(self.begin_step)
        return self

    def __exit__(self, *_):
        Run.begin_step = self.begin_step


class Uphill(Orthogonal):
    """The default direction turned around, so far that the cap on a leap's norm decides how far it goes."""

    def displacement(self, index: int, out: torch.Tensor) -> torch.Tensor | None:
        own = super().displacement(index, out)
        return None if own is None else own.mul_(-1e6)


def build(arm: str, sources, steps: int, folder: str, clock: StepClock):
    if arm == "pretrained":
        task = TASKS["smol-full"]
        trainer, config, common = sources.trainer(task, hybrid=True)
        values = training_arguments(task, steps=steps, rate=1e-4, seed=0, folder=folder) | {"auto_lr": "off"}
        common |= {"train_dataset": sources.split(task.text)["train"], "callbacks": [clock]}
        return trainer(sources.model(task, 0), config(**values), **common)
    data = sources.split("code")
    values = {
        "output_dir": folder, "max_steps": steps, "learning_rate": 2e-3, "per_device_train_batch_size": 8,
        **QUIET,
    }  # fmt: skip
    model = sources.model(TASKS["code"], 0)
    common = {"train_dataset": data["train"], "callbacks": [clock]}
    if arm == "plain":
        return Trainer(model, TrainingArguments(**values), **common)
    config = hf_hybrid.HybridConfig(**values, enable_predict=arm != "disabled")
    direction = Uphill if arm == "rejected" else None
    return hf_hybrid.HybridTrainer(model, config, probe_dataset=data["probe"], direction=direction, **common)


def disabled_against_plain(sources: TextAndModels, rounds: int, folder: str) -> dict:
    def train(arm: str, clock: StepClock) -> None:
        build(arm, sources, DISABLED_STEPS, folder, clock).train()

    return {"steps": DISABLED_STEPS, **paired_ratio(train, "plain", "disabled", rounds)}


def own_share(arm: str, sources, steps: int, folder: str) -> dict:
    """Seconds of the package's own work over those of the rest of the run."""
    clock = StepClock()
    trainer = build(arm, sources, steps, folder, clock)
    with OwnTime(trainer) as own:
        start = time.process_time()
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
    parser = command_line(__doc__, Path(__file__).resolve().parent)
    parser.add_argument("--rounds", type=int, default=15, help="Pairs of a disabled and a plain run.")
    parser.add_argument("--steps", type=int, default=300, help="Of the runs but for the disabled ones.")
    parser.add_argument("--pretrained", action="store_true", help="Only the run on SmolLM2.")
    args = parser.parse_args()
    logging.disable_progress_bar()
    torch.set_num_threads(1)
    results = Results(args.results, "overhead", ("arm",))
    if args.pretrained:
        from benchmarks.speedup.pretrained import DocstringsAndSmolLM2

    sources = DocstringsAndSmolLM2() if args.pretrained else TextAndModels()
    with tempfile.TemporaryDirectory() as folder:
        for arm in ("pretrained",) if args.pretrained else ("rejected", "hybrid"):
            row = {"arm": arm, **own_share(arm, sources, args.steps, folder)}
            print(json.dumps(results.add({**row, **provenance(1)})), flush=True)
        if args.pretrained:
            return
        row = {"arm": "disabled", **disabled_against_plain(sources, args.rounds, folder)}
        print(json.dumps(results.add({**row, **provenance(1)})))


if __name__ == "__main__":
    main()
