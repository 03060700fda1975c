"""
Record loss curves of many runs: what forecasts of the final loss are fitted on and scored on.

    nice -n 10 python -m benchmarks.world_model.curves                     # all kinds; runs that are there are kept
    nice -n 10 python -m benchmarks.world_model.curves --kinds small wsd   # these alone

A line of `curves.jsonl` is one run: its kind and index, the training loss and the learning rate of every step, and the
held-out loss twenty times in the run. Everything follows from kind and index. The tiny models of small_run.py train on
bytes in a plain loop. `code`, `docs` and `lora` are tasks of the speed-up benchmark in `Trainer`; `smol-full` and
`smol-lora` start from SmolLM2 (`python -m benchmarks.speedup.pretrained` makes it). One process, one thread.

Only runs of the kind `small` whose index does not end in 4 or 9 are for fitting. The others are held out, and the other
kinds are never seen in kind while fitting: other schedules, optimizers, lengths, batch sizes, models, and adapters.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import torch
from transformers import TrainerCallback
from transformers.utils import logging

from benchmarks.world_model.record import draw_settings
from benchmarks.world_model.small_run import (
    HELD_OUT,
    PROBE,
    Settings,
    evaluate,
    make_material,
    make_model,
    make_optimizer,
    pretrain,
    reference_rate,
    schedule_of,
    sequence_losses,
    text_bytes,
)

CURVES = Path(__file__).resolve().parent / "curves.jsonl"
EVALUATIONS = 20
"""Of the held-out loss, evenly over the run."""
FIRST_INDEX = 10_000
"""Added to an index before settings are drawn, so that no run is one of those that record.py makes."""


@dataclass(frozen=True)
class Curve:
    """A recorded run: `losses` and `rates` of its steps, which end where it diverged; `steps` were planned."""

    kind: str
    index: int
    steps: int
    losses: list[float]
    rates: list[float]
    """Of all planned steps."""
    about: dict
    held_out: list[tuple[int, float]] = field(default_factory=list)
    """Steps that were done, and the loss of sequences that are not trained on."""

    @property
    def fits(self) -> bool:
        """Whether forecasts may be fitted on this run."""
        return self.kind == "small" and self.index % 5 != 4


def small_settings(kind: str, index: int) -> Settings:
    """Settings of a tiny run of this kind."""
    rng = random.Random(f"{kind} {index}")
    drawn = draw_settings(FIRST_INDEX + index)
    optimizer = "muon" if kind == "muon" else rng.choice(("adamw",) * 5 + ("sgd",))
    betas = drawn.betas if optimizer != "sgd" else (0.9, 0.0)
    schedule = rng.choice(("linear", "linear", "cosine", "cosine", "constant_with_warmup"))
    steps, batch = drawn.steps, drawn.batch
    if kind == "wsd":
        schedule = "warmup_stable_decay"
    if kind == "long":
        steps = rng.randint(1000, 1800)
    if kind == "short":
        steps = rng.randint(40, 80)
    if kind == "batch":
        batch = rng.choice((1, 2, 32, 48))
    factor = 10 ** rng.uniform(-2.0, math.log10(3.0))
    rate = factor * reference_rate(optimizer, betas, drawn.hidden, drawn.text_before is not None)
    rows = drawn.rows if drawn.rows <= 256 else steps * batch
    return replace(
        drawn,
        steps=steps,
        batch=batch,
        optimizer=optimizer,
        betas=betas,
        schedule=schedule,
        warmup=round(rng.choice((0.0, 0.0, 0.03, 0.1)) * steps),
        rate=rate,
        rate_over_reference=factor,
        rows=min(rows, len(text_bytes(drawn.text)) // drawn.length - HELD_OUT - PROBE),
        base=None,
    )


def evaluation_steps(steps: int) -> list[int]:
    return [round(steps * (number + 1) / EVALUATIONS) for number in range(EVALUATIONS)]


class Evaluation(TrainerCallback):
    """Evaluates a `Trainer` at the same shares of its run."""

    def on_step_end(self, args, state, control, **kwargs):
        control.should_evaluate = state.global_step in evaluation_steps(state.max_steps)


def small_curve(kind: str, index: int) -> Curve:
    """Train a tiny model in a plain loop, up to the end or to the first loss that is not finite."""
    settings = small_settings(kind, index)
    model = make_model(settings)
    model.train()
    if settings.text_before is not None:
        pretrain(settings, model)
    material = make_material(settings, settings.text, settings.rows, settings.steps)
    optimizer = make_optimizer(settings, model)
    evaluated = evaluation_steps(settings.steps)
    rates = [settings.rate * factor for factor in schedule_of(settings.schedule, settings.warmup, settings.steps)]
    losses: list[float] = []
    held_out: list[tuple[int, float]] = []
    for rate, rows in zip(rates, material.order):
        loss = sequence_losses(model, material.train[rows]).mean()
        losses.append(loss.item())
        if not math.isfinite(losses[-1]):
            break
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), settings.clip or math.inf)
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
        optimizer.zero_grad()
        if len(losses) in evaluated:
            held_out.append((len(losses), evaluate(model, material.held_out).mean().item()))
    return Curve(kind, index, settings.steps, losses, rates, asdict(settings), held_out)


SCHEDULES = ("linear", "cosine", "warmup_stable_decay", "constant")
STEPS = {"code": 250, "docs": 150, "lora": 200, "smol-full": 60, "smol-lora": 60}
TEST_ROWS = 32
FACTORS = (1.0, 0.3, 2.0, 0.1)
"""Learning rates over the task's own."""


def trainer_curve(kind: str, index: int) -> Curve:
    """Train a task of the speed-up benchmark, with another schedule, rate and length from index to index."""
    from benchmarks.speedup.run import make_base, sources_of
    from benchmarks.speedup.tasks import BASE, TASKS, training_arguments

    task, schedule = TASKS[kind], SCHEDULES[index % len(SCHEDULES)]
    steps = round(STEPS[kind] * (1.0, 0.8, 1.3)[index % 3])
    rate = task.grid[1] * FACTORS[(index + index // 4) % len(FACTORS)]
    if task.pretrained:
        task = replace(task, batch=2)
    elif not task.scratch and not BASE.is_dir():
        make_base()
    sources = sources_of(task)
    model, data = sources.model(task, index), sources.split(task.text)
    trainer_kind, config_kind, more = sources.trainer(task, hybrid=False)
    with tempfile.TemporaryDirectory() as folder:
        values = training_arguments(task, steps=steps, rate=rate, seed=index, folder=folder)
        values |= {"logging_steps": 1, "lr_scheduler_type": schedule}
        if schedule == "warmup_stable_decay":
            values["lr_scheduler_kwargs"] = {"num_decay_steps": steps // 5}
        more |= {"train_dataset": data["train"], "eval_dataset": data["test"].select(range(TEST_ROWS))}
        trainer = trainer_kind(model, args=config_kind(**values), callbacks=[Evaluation()], **more)
        trainer.train()
    held_out = [(entry["step"], entry["eval_loss"]) for entry in trainer.state.log_history if "eval_loss" in entry]
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    about = {"schedule": schedule, "rate": rate, "batch": task.batch}
    losses, rates = [entry["loss"] for entry in logs], [entry["learning_rate"] for entry in logs]
    return Curve(kind, index, steps, losses, rates, about, held_out)


KINDS: dict[str, tuple[int, Callable[[str, int], Curve]]] = {
    "small": (360, small_curve),
    "smol-lora": (4, trainer_curve),
    "smol-full": (4, trainer_curve),
    "wsd": (8, small_curve),
    "muon": (8, small_curve),
    "short": (8, small_curve),
    "batch": (8, small_curve),
    "long": (4, small_curve),
    "lora": (4, trainer_curve),
    "docs": (3, trainer_curve),
    "code": (1, trainer_curve),
}
"""Kinds of runs: how many there are by default, and what makes one."""


def load_curves(path: Path = CURVES) -> list[Curve]:
    """All recorded runs; where a run was recorded twice the last counts."""
    found = {}
    if path.exists():
        for line in path.read_text(encoding="utf-8").splitlines():
            curve = Curve(**json.loads(line))
            found[curve.kind, curve.index] = curve
    return list(found.values())


def write_curve(curve: Curve, path: Path) -> None:
    """Append a run in one write."""
    row = asdict(curve)
    row |= {name: [float(f"{value:.5g}") for value in row[name]] for name in ("losses", "rates")}
    row["held_out"] = [(step, float(f"{loss:.5g}")) for step, loss in curve.held_out]
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", nargs="+", choices=list(KINDS), default=list(KINDS))
    parser.add_argument(
        "--runs", type=int, help="Of each kind; by default as many as the table in benchmarks/world_model/forecast.md."
    )
    parser.add_argument("--file", type=Path, default=CURVES)
    args = parser.parse_args()
    torch.set_num_threads(1)
    os.environ["HYBRID_BENCHMARK_THREADS"] = "1"
    logging.set_verbosity_error()
    there = {(curve.kind, curve.index) for curve in load_curves(args.file)}
    for kind in args.kinds:
        count, make = KINDS[kind]
        for index in range(count if args.runs is None else args.runs):
            if (kind, index) in there:
                continue
            started = time.process_time()
            curve = make(kind, index)
            write_curve(curve, args.file)
            seconds, tail = time.process_time() - started, curve.losses[-10:]
            end = sum(tail) / len(tail)
            print(
                f"{kind} {index}: {seconds:.1f} s  {curve.steps} steps  {curve.losses[0]:.2f} -> {end:.3f}", flush=True
            )


if __name__ == "__main__":
    main()
