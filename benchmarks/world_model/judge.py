"""
Who notices a bad leap soonest, and undoes the fewest good ones?

    python -m benchmarks.world_model.judge --runs 40        # a quarter of an hour on one core; keeps its cases

In Correct a leap is judged by the training losses of the few real steps after it, because they cost nothing more. This
makes cases of which the truth is known, on small runs that the world model was not trained on, and puts the judges
beside each other.

A case is a moment of a run, and one of five ways to go on from there: a leap along the default direction with the
largest of some gains that does not raise the held-out loss (it has to be kept), or a leap the other way that raises the
held-out loss by 1, 2, 5 or 10 % (to be undone). Then come 16 real steps, on the batches that the run has next.

A judge forecasts the mean of the next losses, with a scale, from what the run has seen so far. The score of a leap
after `n` steps is how far the mean of its losses lies above the forecast, in scales. Judges differ in how wide they
think that their errors are, so all are given the threshold at which they undo 5 % of the good leaps. `package` is what
the package does with its own threshold.
"""

from __future__ import annotations

import json
import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from hf_hybrid.world_model.dynamics import DynamicsModel
from hf_hybrid.world_model.imagination import START_WEIGHTS
from hf_hybrid.world_model.rssm import RSSM

from benchmarks.results import Results, command_line, provenance
from benchmarks.world_model.record import draw_settings
from benchmarks.world_model.small_run import STRIDE, DivergedError, Stretches, Training
from hf_hybrid.part import Phase
from hf_hybrid.run.monitor import FORECAST_WINDOW, DivergenceMonitor, linear_trend
from hf_hybrid.run.record import Leap

FIRST_INDEX = 1000
"""The world model's start weights were trained on runs 0 to 219."""
MOMENTS = (0.25, 0.45, 0.65, 0.85)
"""Shares of a run at which leaps are made."""
RISES = (0.01, 0.02, 0.05, 0.10)
"""How much bad leaps raise the held-out loss, as a share of it."""
GAINS = (8.0, 4.0, 2.0, 1.0, 0.5, 0.25)
"""Of good leaps, in real steps of the run; the largest is taken that does not raise the held-out loss."""
AFTER = 16
"""Real steps after a leap."""
COUNTED = (1, 2, 4, 8, 16)
FALSE_SHARE = 0.05
"""Share of the good leaps that each judge may undo."""
PACKAGE_THRESHOLD = 5.0
"""`divergence_threshold` of the default preset."""
DRAWS = 1000


# Cases.


def cases_of(index: int) -> list[dict]:
    """Train one run, and branch off its cases; each is plain values."""
    settings = replace(draw_settings(index), base=None)
    training, stretches, losses, found = Training.start(settings), Stretches(), [], []
    due = [max(round(share * settings.steps), FORECAST_WINDOW + 1) for share in MOMENTS]
    try:
        while not training.ended:
            real = training.now.losses
            closed = training.advance(None, stretches)
            losses.append(training.now.losses[-1] if not closed else stretches.losses[-1] * STRIDE - sum(real))
            if closed and due and training.now.step >= due[0] and training.now.step + AFTER < settings.steps:
                due.pop(0)
                past = {
                    "index": index,
                    "step": training.now.step,
                    "losses": list(losses),
                    "rates": list(training.schedule),
                    "stretches": [list(values) for values in (stretches.features, stretches.actions, stretches.losses)],
                }
                found += [{**past, **leapt} for rise in (None, *RISES) if (leapt := leap_of(training.copy(), rise))]
    except DivergedError:
        pass
    return found


def leap_of(training: Training, rise: float | None) -> dict | None:
    """Leap, and go on for some steps. `None` if there is no such leap here."""
    trajectory, before = training.trajectory, training.held_out_loss()
    leap = Leap(step=training.now.step, real_steps=trajectory.clock.steps_in_block)
    with trajectory.trial(leap):

        def risen(gain: float) -> float:
            trajectory.leap(gain / leap.real_steps)  # a gain is in blocks, and here one block is the run so far
            return training.held_out_loss() / before - 1.0

        gain = next((gain for gain in GAINS if risen(gain) <= 0), None) if rise is None else uphill(risen, rise)
        if gain is None:
            return None
        share = risen(gain)
        trajectory.keep()
    trajectory.accept()
    training._enter(Phase.CORRECT)
    after = []
    try:
        for _ in range(AFTER):
            rate = training.settings.rate * training.schedule[training.now.step]
            after.append(training._real_step(rate)["loss"])
            training.now.step += 1
    except DivergedError:
        return None
    return {"rise": rise, "share": share, "gain": gain, "after": after}


def uphill(risen, rise: float) -> float | None:
    """The gain, below 0, whose leap raises the held-out loss by this share, to a tenth of it; by bisection."""
    low, high = 0.0, -1.0
    while risen(high) < rise:
        low, high = high, 2 * high
        if high < -1e4:
            return None
    for _ in range(12):
        middle = (low + high) / 2
        found = risen(middle)
        if abs(found - rise) <= 0.1 * rise:
            return middle
        low, high = (middle, high) if found < rise else (low, middle)
    return None


# Judges. Each returns the mean and the scale of the mean of the next `count` losses for every count of `COUNTED`.

Forecasts = list[tuple[float, float]]


def trend(case: dict) -> Forecasts:
    """The line through the last 32 losses, continued: what the package does."""
    forecast, deviation = linear_trend(case["losses"][-FORECAST_WINDOW:])
    deviation = max(deviation, 1e-3 * abs(forecast))
    return [(forecast, deviation * math.sqrt(1 / count + 4 / FORECAST_WINDOW)) for count in COUNTED]


def level(case: dict) -> Forecasts:
    """The mean of the last 32 losses, as if they no longer fell."""
    losses = case["losses"][-FORECAST_WINDOW:]
    _, deviation = linear_trend(losses)
    return [(statistics.fmean(losses), deviation * math.sqrt(1 / count + 1 / FORECAST_WINDOW)) for count in COUNTED]


def long_trend(case: dict) -> Forecasts:
    """A line through the last 64 losses."""
    losses = case["losses"][-2 * FORECAST_WINDOW :]
    forecast, deviation = linear_trend(losses)
    return [(forecast, deviation * math.sqrt(1 / count + 4 / len(losses))) for count in COUNTED]


def world_model(case: dict) -> Forecasts:
    """The RSSM's forecast of the next two stretches, calibrated on this run, with the noise of fewer losses added."""
    features, actions, means = case["stretches"]
    dynamics, steps, ahead = DynamicsModel(RSSM.load(START_WEIGHTS)), len(case["rates"]), 2
    for number, stretch in enumerate(zip(features, actions, means), 1):
        dynamics.observe_stretch(*stretch)
        ends = [min((number + k) * STRIDE, steps) for k in range(1, ahead + 1)]
        coming = [[0.0, 0.0, end / steps, case["rates"][end - 1]] for end in ends]
        if number == len(means):
            coming[0][0] = max(case["gain"], 0.0) / STRIDE  # the leap, as it was meant
        forecast = dynamics.forecast(coming)
    _, deviation = linear_trend(case["losses"][-FORECAST_WINDOW:])
    found = []
    for count in COUNTED:
        stretch = 0 if count <= STRIDE else 1
        mean = means[-1] * math.exp(forecast.mean[stretch])
        noise = deviation**2 * max(1 / count - 1 / STRIDE, 0.0)
        found.append((mean, math.sqrt((mean * forecast.scale[stretch]) ** 2 + noise)))
    return found


JUDGES = {
    "linear trend of 32 losses": trend,
    "level of 32 losses": level,
    "linear trend of 64 losses": long_trend,
    "world model": world_model,
}


def scores(case: dict, forecasts: Forecasts) -> list[float]:
    """How far the losses after a leap lie above what was expected, after each count of steps."""
    means = [statistics.fmean(case["after"][:count]) for count in COUNTED]
    return [(mean - forecast) / max(scale, 1e-9) for mean, (forecast, scale) in zip(means, forecasts)]


def table_of(cases: Sequence[dict], scored: np.ndarray, standard: np.ndarray) -> dict:
    """
    What a judge catches if it undoes `FALSE_SHARE` of the good leaps: by the size of the bad ones, after each count of
    steps, and how much more that is than what the standard judge catches, both with 95 % intervals by bootstrap over
    runs (thresholds included). `until` has the median of the counts after which bad leaps are first caught by a judge
    that looks after every count, and undoes the same share of the good ones in all; infinity, where half are not.

    Args:
        cases (`list[dict]`): N cases.
        scored, standard (`np.ndarray`): Their scores by this judge and the standard one, `[N, len(COUNTED)]`.
    """
    rises = np.array([case["rise"] or 0.0 for case in cases])
    runs = np.array([case["index"] for case in cases])
    members = [np.flatnonzero(runs == run) for run in np.unique(runs)]
    rng = np.random.default_rng(0)
    draws = [np.concatenate([members[i] for i in rng.integers(len(members), size=len(members))]) for _ in range(DRAWS)]
    draws = [np.arange(len(cases)), *draws]  # the first is what was found
    mine, other = (np.array([caught(rises[draw], judge[draw]) for draw in draws]) for judge in (scored, standard))
    found = {}
    for column, count in enumerate(COUNTED):
        found[str(count)] = {
            f"{rise:.0%}": {"caught": interval(mine[:, column, row]), "more": interval((mine - other)[:, column, row])}
            for row, rise in enumerate(RISES)
        }
    late = scored > np.quantile(scored[rises == 0].max(axis=1), 1 - FALSE_SHARE)
    first = np.where(late.any(1), np.array(COUNTED)[late.argmax(1)], np.inf)
    return {
        **found,
        "until": {f"{rise:.0%}": float(np.quantile(first[rises == rise], 0.5, method="higher")) for rise in RISES},
    }


def caught(rises: np.ndarray, scored: np.ndarray) -> np.ndarray:
    """Share of the bad leaps above the threshold, `[len(COUNTED), len(RISES)]`."""
    high = scored > np.quantile(scored[rises == 0], 1 - FALSE_SHARE, axis=0)
    return np.array([high[rises == rise].mean(axis=0) for rise in RISES]).T


def interval(values: np.ndarray) -> list[float]:
    """The first value, and the 95 % interval of the others."""
    return [round(float(value), 3) for value in (values[0], *np.quantile(values[1:], (0.025, 0.975)))]


def package(cases: Sequence[dict]) -> dict:
    """What `DivergenceMonitor.judge_leap` does with the default threshold, by size of the rise (0: a good leap)."""
    found: dict[str, dict[str, float]] = {}
    for rise in (None, *RISES):
        chosen = [case for case in cases if case["rise"] == rise]
        undone = {}
        for count in COUNTED:
            monitor = DivergenceMonitor(PACKAGE_THRESHOLD)
            verdicts = (
                monitor.judge_leap(case["after"][:count], *linear_trend(case["losses"][-FORECAST_WINDOW:]))
                for case in chosen
            )
            undone[str(count)] = round(statistics.fmean(verdict.level > 0 for verdict in verdicts), 4)
        found[f"{rise or 0:.0%}"] = undone
    return found


def main() -> None:
    parser = command_line(__doc__, Path(__file__).resolve().parent)
    parser.add_argument("--runs", type=int, default=40)
    parser.add_argument("--cases", type=Path, default=Path("out/judge_cases.jsonl"), help="Where the cases are kept.")
    args = parser.parse_args()
    torch.set_num_threads(1)
    args.cases.parent.mkdir(parents=True, exist_ok=True)
    cases = [json.loads(line) for line in args.cases.read_text().splitlines()] if args.cases.exists() else []
    there = {case["index"] for case in cases}
    with args.cases.open("a") as file:
        for index in range(FIRST_INDEX, FIRST_INDEX + args.runs):
            if index not in there:
                made = cases_of(index)
                cases += made
                file.write("".join(json.dumps(case) + "\n" for case in made))
                file.flush()
                print(index, [(case["rise"], round(case["gain"], 2)) for case in made][:5], flush=True)
    stored = Results(args.results, "judge", ("judge",))
    origin = {"cases": len(cases), "runs": len({case["index"] for case in cases}), **provenance(1)}
    standard = None
    for name, judge in JUDGES.items():  # the first is the standard
        started = time.process_time()
        scored = np.array([scores(case, judge(case)) for case in cases])
        seconds = (time.process_time() - started) / len(cases)
        standard = scored if standard is None else standard
        row = {"judge": name, **table_of(cases, scored, standard), "ms_per_case": round(1e3 * seconds, 2), **origin}
        found = stored.add(row)
        print(name, {rise: values["caught"] for rise, values in found["2"].items()}, found["until"])
    print(json.dumps(stored.add({"judge": "package", "undone": package(cases), **origin})["undone"]))


if __name__ == "__main__":
    main()
