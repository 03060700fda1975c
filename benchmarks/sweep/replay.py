"""
Pruners on recorded grids of learning rates: how many steps does a sweep make, and how good is the rate that it finds?

    python -m benchmarks.sweep.replay            # the table, from the curves in results.jsonl; a minute
    python -m benchmarks.sweep.replay --add      # appends its lines to results.jsonl, too

A sweep is replayed trial by trial: the losses of a trial are reported to the study a hundred times in a run, as means
over the steps since the last report, until the pruner ends it. `order` says in which order the rates come. `search` is
that of `hf-hybrid sweep`, which leaves rates out that lie beyond a worse one; the others try all.
"""

from __future__ import annotations

import functools
import random
import statistics

import optuna
from transformers import TrainingArguments

from benchmarks.results import Results, command_line, provenance
from benchmarks.speedup.tasks import TASKS, training_arguments
from benchmarks.sweep.record import GRID, HERE, LENGTHS
from benchmarks.sweep.record import KEY as CURVE_KEY
from hf_hybrid.cli.sweep import Range
from hf_hybrid.integrations.optuna import ForecastPruner

KEY = ("task", "seed", "pruner", "order")
SEARCHED = Range("learning_rate", GRID[0], GRID[-1])
REPORTS = 100
"""Reports of a whole run."""
ORDERS = {
    "search": [],
    "descending": list(reversed(range(len(GRID)))),
    "shuffled": random.Random(0).sample(range(len(GRID)), len(GRID)),
}
PRUNERS = {
    "none": lambda args: optuna.pruners.NopPruner(),
    "forecast": ForecastPruner,
    "median": lambda args: optuna.pruners.MedianPruner(),
    "successive halving": lambda args: optuna.pruners.SuccessiveHalvingPruner(),
}
"""Optuna's with their defaults."""


@functools.cache
def arguments(task: str) -> TrainingArguments:
    """Those of a task's recorded runs, but for the learning rate."""
    values = training_arguments(TASKS[task], steps=LENGTHS[task], rate=1.0, seed=0, folder="unused")
    return TrainingArguments(**values)


def replay(rows: list[dict], pruner: str, order: str) -> dict:
    """Run a sweep over the recorded runs `rows` of a task and seed, one per rate."""
    by_rate = {row["rate"]: row for row in rows}
    args = arguments(rows[0]["task"])
    study = optuna.create_study(pruner=PRUNERS[pruner](args))
    judge = ForecastPruner(args)
    made, ended = 0, {}
    while (rate := next_rate(order, ended)) is not None:
        study.enqueue_trial({"learning_rate": rate})
        trial = study.ask({"learning_rate": optuna.distributions.FloatDistribution(GRID[0], GRID[-1], log=True)})
        row = by_rate[rate]
        step = reports(trial, row["losses"], row["steps"])
        made += step
        whole = step == row["steps"] and row["eval_loss"] is not None
        state = optuna.trial.TrialState.COMPLETE if whole else optuna.trial.TrialState.PRUNED
        ended[rate] = judge.standing(study.tell(trial, row["eval_loss"] if whole else None, state))
    best, found = min(row["eval_loss"] for row in rows if row["eval_loss"] is not None), study.best_value
    return {
        "rate": study.best_params["learning_rate"],
        "eval_loss": found,
        "worse_percent": 100 * (found / best - 1),
        "steps_percent": 100 * made / (len(rows) * rows[0]["steps"]),
        "whole_trials": sum(trial.state == optuna.trial.TrialState.COMPLETE for trial in study.trials),
    }


def next_rate(order: str, ended: dict[float, tuple]) -> float | None:
    """The rate to try next: as `hf-hybrid sweep` searches a grid, or the next one of a grid that is walked through."""
    if order == "search":
        return SEARCHED.next_value(len(GRID), ended, ())
    return next((GRID[index] for index in ORDERS[order] if GRID[index] not in ended), None)


def reports(trial: optuna.Trial, losses: list[float | None], steps: int) -> int:
    """Report the losses of a run until the pruner ends it. Returns the steps that were made."""
    every, since = -(-steps // REPORTS), []
    for step, loss in enumerate(losses, start=1):
        since += [] if loss is None else [loss]  # a step that a leap replaced has none
        if step % every == 0 and since and step < steps:
            trial.report(statistics.fmean(since), step)
            since = []
            if trial.should_prune():
                return step
    if since:
        trial.report(statistics.fmean(since), steps)
    return steps


def main() -> None:
    parser = command_line(__doc__, HERE)
    parser.add_argument("--add", action="store_true", help="Append what was found to the file of results.")
    args = parser.parse_args()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    curves, results = Results(args.results, "curve", CURVE_KEY), Results(args.results, "replay", KEY)
    print("task       seed  pruner              order       steps   worse   rate      whole")
    for task in LENGTHS:
        for seed in sorted({row["seed"] for row in curves.rows(task=task)}):
            rows = [row for row in curves.rows(task=task, seed=seed) if row["steps"] == LENGTHS[task]]
            if len(rows) < len(GRID):
                continue
            for pruner in PRUNERS:
                for order in ORDERS:
                    found = replay(rows, pruner, order)
                    print(
                        f"{task:9}  {seed:4}  {pruner:18}  {order:10}  {found['steps_percent']:4.0f} %  "
                        f"{found['worse_percent']:4.1f} %  {found['rate']:<8g}  {found['whole_trials']}",
                        flush=True,
                    )
                    if args.add:
                        results.add({"task": task, "seed": seed, "pruner": pruner, "order": order, **found,
                                     **provenance(1)})  # fmt: skip


if __name__ == "__main__":
    main()
