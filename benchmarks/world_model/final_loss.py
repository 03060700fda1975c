"""
How well the final loss of a run is forecast at 10, 20 and 50 % of it, beside laws and past curves.

    python -m benchmarks.world_model.curves                  # records the runs first; an hour on one core
    python -m benchmarks.world_model.final_loss              # scores all methods on the held-out runs; a minute
    python -m benchmarks.world_model.final_loss --fit 600    # past_curves.npz, and `Prior` by a search of 600 seconds
    python -m benchmarks.world_model.final_loss --rssm       # beside the RSSM, on the runs of followed.py; two minutes
    python -m benchmarks.world_model.final_loss --cost       # milliseconds of a forecast

Losses are logged a hundred times in a run, as means, and the final loss is the mean of the last 5 % of the steps. A run
is left out where fewer than five losses were logged. Scores are the CRPS in nats (of a point it is the absolute error)
and the share of final losses inside the 90 % interval. A baseline that gives a point gets a Gaussian around it, whose
width is a share of the loss level, and a factor on its schedule term; both are chosen for the best CRPS on the fitting
runs, for each share of the run. Ratios of mean CRPS have 95 % intervals by bootstrap over runs.
"""

from __future__ import annotations

import itertools
import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path

import numpy as np
from hf_hybrid.world_model.dynamics import VARIANCE, DynamicsModel
from hf_hybrid.world_model.final_loss import (
    FEWEST,
    PAST_CURVES,
    PRIOR,
    FinalLoss,
    Observed,
    PastCurves,
    Prior,
    final_steps,
    forecast_final_loss,
    forecast_of_laws,
    looks,
    mixture,
    observed,
    past_curves,
    training_parts,
)
from hf_hybrid.world_model.forecast import RunForecast
from hf_hybrid.world_model.imagination import START_WEIGHTS
from hf_hybrid.world_model.rssm import RSSM

from benchmarks.results import Results, command_line, provenance
from benchmarks.world_model.curves import CURVES, Curve, load_curves
from benchmarks.world_model.followed import FollowedRun, load_followed
from benchmarks.world_model.small_run import STRIDE

SHARES = (0.1, 0.2, 0.5)
LOGS = 100
DRAWS = 4000
Z90 = 1.6448536
OURS = "both"
NOT_BASELINES = ("mixture of laws", "training loss times ratio", OURS)
CUTS = (0.05, 0.1, 0.2, 0.35, 0.5, 0.7, 0.85, 0.95)
"""Shares of the run at which past curves are cut for the package, and forecasts are scored."""
BROKEN = 8.0
"""A followed run with such a loss, so far or at the end, is left out; the logarithm of 256 bytes is 5.5."""
LOWEST_RATE = 0.1
"""Of the recorded runs that the RSSM was trained on, over a tiny model's usual rate (`record.draw_settings`)."""
erf = np.vectorize(math.erf)


@dataclass(frozen=True)
class Case:
    """A run seen up to a share of it: what a forecaster gets, and what came."""

    curve: Curve
    share: float
    steps: np.ndarray
    losses: np.ndarray
    came: float

    @property
    def level(self) -> float:
        """Mean of the last fifth of the logged losses."""
        return float(self.losses[-max(1, len(self.losses) // 5) :].mean())

    @property
    def rates(self) -> np.ndarray:
        """Of all steps, over their peak."""
        rates = np.asarray(self.curve.rates)
        return rates / rates.max()

    # What a process over past curves is asked, and learns from.

    @cached_property
    def looks(self) -> np.ndarray:
        return looks(seen_in(self))

    @property
    def now(self) -> float:
        return self.level

    @property
    def target(self) -> float:
        return math.log(max(self.came, 1e-3) / self.now)


@dataclass(frozen=True)
class HeldOutCase(Case):
    """A run that was evaluated at the share of it that is seen; the held-out loss of its end is what came."""

    held_out: float

    @cached_property
    def looks(self) -> np.ndarray:
        return np.append(super().looks, math.log(self.held_out / seen_in(self).present))

    @property
    def now(self) -> float:
        return self.held_out


def case(curve: Curve, share: float) -> Case:
    every = max(1, curve.steps // LOGS)
    steps = np.arange(every, int(share * curve.steps) + 1, every)
    summed = np.concatenate([[0.0], np.cumsum(curve.losses)])
    came = float(np.mean(curve.losses[-final_steps(curve.steps) :]))
    return Case(curve, share, steps, (summed[steps] - summed[steps - every]) / every, came)


def held_out_case(case: Case) -> HeldOutCase | None:
    """The same with the last evaluation and that of the end; `None` without."""
    seen = [loss for step, loss in case.curve.held_out if step <= math.ceil(case.share * case.curve.steps)]
    ends = [loss for step, loss in case.curve.held_out if step == case.curve.steps]
    return HeldOutCase(case.curve, case.share, case.steps, case.losses, ends[0], seen[-1]) if seen and ends else None


def cases_of(curves: list[Curve], share: float) -> list[Case]:
    return [found for curve in curves if len((found := case(curve, share)).steps) >= FEWEST]


def usable(curve: Curve) -> bool:
    """Whether the run ended, with a finite loss."""
    whole = len(curve.losses) == curve.steps == len(curve.rates)
    return whole and bool(np.isfinite(curve.losses).all()) and max(curve.losses[-10:]) < 20


# The baselines. A point forecaster takes a case and the strength of its schedule term, a share of the loss level.


def persistence(case: Case, strength: float) -> float:
    return case.level


def least_squares(falling: np.ndarray, at_end: np.ndarray, losses: np.ndarray, noise: np.ndarray) -> float:
    """
    Fit `floor + fall * falling` with `fall >= 0` for each row of `falling` `[shapes, logs]`, and forecast with the one
    that fits best; later losses weigh more, as their noise is that of fewer changes.
    """
    weight = noise / noise.sum()
    mean, mean_loss = (falling * weight).sum(1, keepdims=True), (losses * weight).sum()
    centred, rest = falling - mean, losses - mean_loss
    fall = np.maximum((weight * centred * rest).sum(1) / ((weight * centred**2).sum(1) + 1e-12), 0.0)
    error = (weight * (rest - fall[:, None] * centred) ** 2).sum(1)
    best = int(error.argmin())
    return float(mean_loss + fall[best] * (at_end[best] - mean[best, 0]))


EXPONENTS = np.array([0.1, 0.3, 0.5, 0.8, 1.2])
OFFSETS = np.array([0.002, 0.02, 0.1, 0.4])


def power_of(case: Case, done: np.ndarray, lowered: np.ndarray, strength: float) -> float:
    """A power law of `done` `[steps]`, from 0 to 1, less `strength` times the level times `lowered` `[steps]`."""
    exponents, offsets = (grid.ravel()[:, None] for grid in np.meshgrid(EXPONENTS, OFFSETS, indexing="ij"))
    ends = slice(-final_steps(case.curve.steps), None)
    known = case.losses + strength * case.level * lowered[case.steps - 1]
    falling = (done[case.steps - 1] + offsets) ** -exponents
    at_end = ((done[ends] + offsets) ** -exponents).mean(1)
    fitted = least_squares(falling, at_end, known, np.linspace(0.3, 1.0, len(known)))
    return fitted - strength * case.level * float(lowered[ends].mean())


def power_law(case: Case, strength: float) -> float:
    """`floor + fall * (step + offset) ** -exponent`, which knows no schedule."""
    return power_of(case, np.arange(1, case.curve.steps + 1) / case.curve.steps, np.zeros(case.curve.steps), 0.0)


def annealing_law(case: Case, strength: float) -> float:
    """`floor + A * S1 ** -exponent - C * S2` (arXiv 2408.11029): S2 sums the falls of the rate, with a memory."""
    rates, memory = case.rates, 0.999
    fallen, momentum, s2 = -np.diff(rates, prepend=rates[:1]), 0.0, np.zeros(len(rates))
    for step, fall in enumerate(fallen):
        momentum = memory * momentum + fall
        s2[step] = momentum
    s1 = np.cumsum(rates)
    s2 = np.cumsum(s2) / s1[-1]
    return power_of(case, s1 / s1[-1], s2, strength)


def multi_power_law(case: Case, strength: float) -> float:
    """`floor + A * (S1 + offset) ** -exponent - B * LD` (arXiv 2503.12811): each fall of the rate saturates."""
    rates = case.rates
    s1 = np.cumsum(rates)
    knots = np.unique(np.linspace(0, len(rates) - 1, 101).round().astype(int))
    fallen = -np.diff(rates[knots])
    beta, gamma, c = 0.6, 0.6, 100.0 / s1[-1]
    lowered = np.zeros(len(rates))
    for knot, fall in zip(knots[1:], fallen):
        since = np.maximum(s1 - s1[max(knot - 1, 0)], 0.0)
        reached = 1 - (1 + c * max(rates[knot], 1e-4) ** -gamma * since) ** -beta
        lowered += fall * np.where(np.arange(len(rates)) >= knot, reached, 0.0)
    return power_of(case, s1 / s1[-1], lowered, strength)


POINTS: dict[str, tuple[Callable[[Case, float], float], tuple[float, ...]]] = {
    "persistence": (persistence, (0.0,)),
    "power law": (power_law, (0.0,)),
    "annealing law": (annealing_law, (0.0, 0.02, 0.05, 0.1, 0.2)),
    "multi-power law": (multi_power_law, (0.0, 0.02, 0.05, 0.1, 0.2)),
}
WIDTHS = tuple(0.01 * 1.3**n for n in range(20))


@dataclass(frozen=True)
class Gaussian:
    mean: float
    deviation: float

    @property
    def parts(self):
        return np.ones(1), np.array([self.mean]), np.array([self.deviation])

    @property
    def interval(self) -> tuple[float, float]:
        return self.mean - Z90 * self.deviation, self.mean + Z90 * self.deviation


@dataclass(frozen=True)
class Mixture:
    found: FinalLoss

    @property
    def parts(self):
        return tuple(np.array(part) for part in (self.found.weights, self.found.means, self.found.deviations))

    @property
    def interval(self) -> tuple[float, float]:
        return self.found.low, self.found.high


def crps(forecast: Gaussian | Mixture, came: float) -> float:
    """Continuous ranked probability score of a mixture of Gaussians, in closed form (Grimit et al., 2006)."""
    weights, means, deviations = forecast.parts

    def spread(mean, deviation):
        return (
            mean * erf(mean / (deviation * 2**0.5))
            + 2 * deviation * np.exp(-0.5 * (mean / deviation) ** 2) / (2 * math.pi) ** 0.5
        )

    pairs = spread(means[:, None] - means, np.hypot(deviations[:, None], deviations))
    return float((weights * spread(came - means, deviations)).sum() - 0.5 * weights @ pairs @ weights)


def point_forecasts(name: str, fitting: list[Case], cases: list[Case]) -> list[Gaussian]:
    forecaster, strengths = POINTS[name]
    came = np.array([case.came for case in fitting])
    best = (math.inf, 0.0, 0.0)
    for strength in strengths:
        points = [forecaster(case, strength) for case in fitting]
        for width in WIDTHS:
            scores = [crps(Gaussian(p, width * c.level), y) for p, c, y in zip(points, fitting, came)]
            best = min(best, (float(np.mean(scores)), strength, width))
    return [Gaussian(forecaster(case, best[1]), best[2] * case.level) for case in cases]


# Our two forecasters.


def seen_in(case: Case) -> Observed:
    return observed(case.steps, case.losses, case.curve.rates, case.curve.steps)


def laws(cases: list[Case], prior: Prior = PRIOR) -> list[Mixture]:
    return [Mixture(mixture(forecast_of_laws(seen_in(case), prior))) for case in cases]


def process_of(fitting: list[Case], scales: tuple[float, ...]) -> PastCurves:
    return PastCurves(np.array([case.looks for case in fitting]), np.array([case.target for case in fitting]), scales)


def best_scales(fitting: list[Case]) -> tuple[float, ...]:
    """Choose the scales of the process by cross-validation over the fitting runs, in four folds."""

    def score(scales: tuple[float, ...]) -> float:
        found = []
        for fold in range(4):
            process = process_of([case for n, case in enumerate(fitting) if n % 4 != fold], scales)
            found += [crps(g, c.came) for g, c in zip(asked(process, fitting[fold::4]), fitting[fold::4])]
        return float(np.mean(found))

    noises = (0.0025, 0.005, 0.01, 0.02, 0.04, 0.08, 0.15)
    return min(itertools.product((2.0, 4.0), (0.01, 0.03, 0.1, 0.3), (0.01, 0.05, 0.2), noises), key=score)


def asked(process: PastCurves, cases: list[Case]) -> list[Gaussian]:
    return [Gaussian(*process.forecast(case.looks, case.now)) for case in cases]


def shipped(cases: list[Case]) -> list[Mixture]:
    """What users get."""
    return [Mixture(forecast_final_loss(*arguments_of(case))) for case in cases]


def shipped_held_out(cases: list[HeldOutCase]) -> list[Mixture]:
    """What users get of the held-out loss."""
    return [Mixture(forecast_final_loss(*arguments_of(case), case.held_out)) for case in cases]


def arguments_of(case: Case) -> tuple:
    return case.steps, case.losses, case.curve.rates, case.curve.steps


def times_ratio(cases: list[HeldOutCase]) -> list[Mixture]:
    """The forecast of the training loss times the ratio of both losses now."""
    found = []
    for case in cases:
        weights, means, deviations = training_parts(seen_in(case))
        now = case.held_out / seen_in(case).present
        found.append(Mixture(mixture([weights, now * means, now * deviations])))
    return found


# Scores.


def training_table(curves: list[Curve], share: float) -> dict:
    """Scores of all methods that forecast the training loss at a share of the run."""
    fitting = cases_of([curve for curve in curves if curve.fits], share)
    cases = cases_of([curve for curve in curves if not curve.fits], share)
    forecasts = {name: point_forecasts(name, fitting, cases) for name in POINTS}
    forecasts["past curves"] = asked(past_curves("training", CUTS.index(share)), cases)
    forecasts["mixture of laws"] = laws(cases)
    forecasts[OURS] = shipped(cases)
    return {"fitting_runs": len(fitting), **table(forecasts, cases)}


def held_out_table(curves: list[Curve], share: float) -> dict:
    """Scores of all methods that forecast the held-out loss, of runs that were evaluated twenty times."""
    both = [held_out_case(case) for case in cases_of(curves, share)]
    fitting = [case for case in both if case is not None and case.curve.fits]
    cases = [case for case in both if case is not None and not case.curve.fits]
    width = min(WIDTHS, key=lambda w: sum(crps(Gaussian(c.held_out, w * c.held_out), c.came) for c in fitting))
    forecasts = {
        "persistence": [Gaussian(case.held_out, width * case.held_out) for case in cases],
        "training loss times ratio": times_ratio(cases),
        "past curves": asked(past_curves("held_out", CUTS.index(share)), cases),
        OURS: shipped_held_out(cases),
    }
    return {"fitting_runs": len(fitting), **table(forecasts, cases)}


def table(forecasts: dict[str, list[Gaussian | Mixture]], cases: list[Case]) -> dict:
    """CRPS and coverage on held-out runs of the kind that was fitted on and of others, and by kind."""
    scores = {name: np.array([crps(f, c.came) for f, c in zip(some, cases)]) for name, some in forecasts.items()}
    inside = {
        name: np.array([f.interval[0] <= c.came <= f.interval[1] for f, c in zip(some, cases)])
        for name, some in forecasts.items()
    }
    seen = np.array([case.curve.kind == "small" for case in cases])
    found = {}
    for group, chosen in (("all", np.ones(len(cases), bool)), ("kind seen", seen), ("kinds never seen", ~seen)):
        means = {name: float(values[chosen].mean()) for name, values in scores.items()}
        best = min((name for name in means if name not in NOT_BASELINES), key=means.get)
        found[group] = {
            "runs": int(chosen.sum()),
            "crps": {name: round(value, 4) for name, value in means.items()},
            "coverage": {name: round(float(values[chosen].mean()), 3) for name, values in inside.items()},
            "best_baseline": best,
            "ratio_to_best": ratio(scores[OURS][chosen], scores[best][chosen]),
        }
    kinds = sorted({case.curve.kind for case in cases})
    found["by_kind"] = {
        kind: {name: round(float(np.mean([v for v, c in zip(values, cases) if c.curve.kind == kind])), 4)
               for name, values in scores.items()}
        for kind in kinds
    }  # fmt: skip
    return found


def ratio(ours: np.ndarray, others: np.ndarray) -> dict:
    """Mean CRPS over that of another method, with a 95 % interval by bootstrap over runs."""
    drawn = np.random.default_rng(0).integers(len(ours), size=(DRAWS, len(ours)))
    low, high = np.quantile(ours[drawn].mean(1) / others[drawn].mean(1), (0.025, 0.975))
    return {
        name: round(float(v), 3) for name, v in (("mean", ours.mean() / others.mean()), ("low", low), ("high", high))
    }


def fit_prior(curves: list[Curve], seconds: float) -> Prior:
    """Random search of the prior for the lowest mean CRPS over that of persistence, on the fitting runs."""
    some = [cases_of([curve for curve in curves if curve.fits], share) for share in SHARES]
    usual = [np.mean([abs(case.level - case.came) for case in cases]) for cases in some]

    def score(prior: Prior) -> float:
        found = [[crps(f, c.came) for f, c in zip(laws(cases, prior), cases)] for cases in some]
        return float(sum(np.mean(values) / u for values, u in zip(found, usual)))

    rng, prior, step, names = np.random.default_rng(0), PRIOR, 0.4, [field.name for field in fields(Prior)]
    best, began = score(prior), time.perf_counter()
    while time.perf_counter() - began < seconds:
        changes = {name: getattr(prior, name) * math.exp(step * rng.normal()) for name in names if rng.random() < 0.4}
        tried = replace(prior, **changes)
        if (value := score(tried)) < best:
            best, prior, step = value, tried, min(1.4 * step, 0.8)
            print(f"{best:.4f} {prior}", flush=True)
        else:
            step = max(0.94 * step, 0.05)
    return prior


def ship_past_curves(curves: list[Curve]) -> None:
    """Write `past_curves.npz` of the package from the fitting runs."""
    columns: dict[str, list] = {"shares": list(CUTS)}
    for share in CUTS:
        fitting = cases_of([curve for curve in curves if curve.fits], share)
        for loss, cases in (("training", fitting), ("held_out", [held_out_case(case) for case in fitting])):
            for name, column in (
                ("looks", [case.looks for case in cases]),
                ("targets", [case.target for case in cases]),
                ("scales", best_scales(cases)),
            ):
                columns.setdefault(f"{loss}_{name}", []).append(column)
    np.savez_compressed(PAST_CURVES, **{name: np.array(column, dtype=np.float32) for name, column in columns.items()})


def cost() -> dict:
    """
    CPU milliseconds of a forecast, from 50 and from 1,000 logged losses of a run of 10,000 steps; and what a run of
    1,000 steps that logs every step pays per step.
    """
    rates, found = np.linspace(1.0, 0.0, 10_000), {}
    for logs in (50, 1000):
        steps = np.arange(1, logs + 1) * (5000 // logs)
        losses = 2.0 + 5.0 / np.sqrt(steps) + 0.05 * np.random.default_rng(0).normal(size=logs)
        seconds = []
        for _ in range(20):
            began = time.process_time()
            forecast_final_loss(steps, losses, rates, 10_000)
            seconds.append(time.process_time() - began)
        found[f"ms_from_{logs}_losses"] = round(1e3 * float(np.median(seconds)), 2)
    forecast = RunForecast(1000, None)
    seconds = 0.0
    for step in range(1, 1001):
        began = time.process_time()
        forecast.log_values(step, {"loss": 2.0 + 3.0 / math.sqrt(step), "learning_rate": 1e-3})
        forecast.make()
        seconds += time.process_time() - began
        time.sleep(5e-3)  # a step, after which the caches are cold
    found["ms_per_step_of_1000"] = round(seconds, 3)
    return found


def followed_case(run: FollowedRun, share: float) -> Case | None:
    """
    A followed run, its losses logged like those of a curve: each the mean of the real steps since the one before.

    `None` if the run broke (`BROKEN`), and where a forecaster cannot begin yet: the RSSM needs one stretch, the others
    five losses.
    """
    steps = len(run.losses)
    every = max(1, steps // LOGS)
    ends = np.arange(every, int(share * steps) + 1, every)
    logged = run.losses[: len(ends) * every].reshape(-1, every)
    known = np.isfinite(logged).any(1)
    if run.about["diverged"] or known.sum() < FEWEST or run.ends[0] > ends[-1]:
        return None
    curve = Curve(run.kind, run.index, steps, [], list(run.rates), run.about)
    came = float(np.nanmean(run.losses[-final_steps(steps) :]))
    case = Case(curve, share, ends[known], np.nanmean(logged[known], 1), came)
    return case if max(case.level, came) < BROKEN else None


def actions_to_come(run: FollowedRun, done: int) -> np.ndarray:
    """Actions `[K, 4]` to the end of the run if leaps go on as in the last three of `done` stretches."""
    steps, now = len(run.losses), int(run.ends[done - 1])
    gain, horizon = run.actions[max(done - 3, 0) : done, :2].mean(0)
    stride = STRIDE * (1 + horizon)
    ends = now + stride * np.arange(1, max(int((steps - now) / stride), 1) + 1)
    rates = run.rates[np.minimum(ends.astype(int), steps) - 1] / run.rates.max()
    return np.stack([np.full(len(ends), gain), np.full(len(ends), horizon), ends / steps, rates], 1)


def forecast_of_rssm(run: FollowedRun, case: Case, *, told: bool) -> Gaussian:
    """It calibrates itself as in a run. It is `told` the leaps that come, or expects more of those that it saw last."""
    model, steps = DynamicsModel(RSSM.load(START_WEIGHTS)), len(run.losses)
    done = int((run.ends <= case.steps[-1]).sum())
    for stretch in range(done):
        model.observe_stretch(run.features[stretch], run.actions[stretch], float(run.stretch_losses[stretch]))
        actions = run.actions[stretch + 1 :] if told else actions_to_come(run, stretch + 1)
        ahead = model.forecast(actions)
    last = max(int((actions[:, 2] * steps > steps - final_steps(steps) + 0.5).sum()), 1)
    now = float(run.stretch_losses[done - 1])
    mean = now * float(np.exp(ahead.mean)[-last:].mean())
    return Gaussian(mean, mean * ahead.scale[-1] * VARIANCE**0.5)


def rssm() -> dict:
    """
    The RSSM beside loss-only forecasts, by share of the run: on held-out runs of the kind that it was trained on, and
    of kinds that it never saw. `past curves` were fitted on the runs that it was trained on, `both` is the shipped
    forecast, `rssm, told` is told which leaps are going to be made, `rssm and both` mixes in equal parts.
    """
    runs = load_followed()
    found = {}
    for share in SHARES:
        fitting = [case for run in runs if run.learned and (case := followed_case(run, share)) is not None]
        others = [run for run in runs if not run.learned]
        pairs = [(run, case) for run in others if (case := followed_case(run, share)) is not None]
        cases = [case for _, case in pairs]
        forecasts = {
            "rssm": [forecast_of_rssm(*pair, told=False) for pair in pairs],
            "rssm, told": [forecast_of_rssm(*pair, told=True) for pair in pairs],
            "persistence": point_forecasts("persistence", fitting, cases),
            "past curves": asked(process_of(fitting, best_scales(fitting)), cases),
            OURS: shipped(cases),
        }
        mixed = [
            [np.concatenate(parts) for parts in zip(a.parts, b.parts)]
            for a, b in zip(forecasts["rssm"], forecasts[OURS])
        ]
        forecasts["rssm and both"] = [Mixture(mixture(parts)) for parts in mixed]
        found[f"{share:.0%}"] = {"fitting_runs": len(fitting), "left_out": left_out(others, share)}
        found[f"{share:.0%}"] |= {
            name: scores_of(forecasts, cases, chosen) for name, chosen in groups_of(cases).items() if chosen.any()
        }
    return found


def left_out(runs: list[FollowedRun], share: float) -> dict[str, int]:
    """Number of runs by kind of which no forecast can be scored."""
    kinds = [run.kind for run in runs if followed_case(run, share) is None]
    return {kind: kinds.count(kind) for kind in sorted(set(kinds))}


def groups_of(cases: list[Case]) -> dict[str, np.ndarray]:
    """Which cases count where."""
    kinds = np.array([case.curve.kind for case in cases])
    leaps = np.array([case.curve.about["leaps"] for case in cases])
    rates = np.array([case.curve.about.get("rate_over_reference", math.nan) for case in cases])  # of tiny models alone
    seen, slow, tiny = kinds == "recorded", rates < LOWEST_RATE, np.isfinite(rates)
    groups = {"all": seen | ~seen, "kind seen": seen, "kinds never seen": ~seen, "with leaps": leaps, "without": ~leaps}
    groups |= {"tiny, with drawn leaps": tiny & leaps, "HybridTrainer, with leaps": ~tiny & leaps}
    groups |= {"tiny, never seen, at rates seen": tiny & ~seen & ~slow, "tiny, slower": slow}
    return groups | {kind: kinds == kind for kind in sorted(set(kinds[~seen]))}


def scores_of(forecasts: dict[str, list], cases: list[Case], chosen: np.ndarray) -> dict:
    """
    CRPS and coverage of the chosen cases, the median share by which the forecast is `too_high`, and ratios to the best
    of those that need no signals.
    """
    pairs = {
        name: [(f, case.came) for f, case, counts in zip(some, cases, chosen) if counts]
        for name, some in forecasts.items()
    }
    scores = {name: np.array([crps(*pair) for pair in some]) for name, some in pairs.items()}
    inside = {name: np.mean([f.interval[0] <= y <= f.interval[1] for f, y in some]) for name, some in pairs.items()}
    best = min((name for name in scores if "rssm" not in name), key=lambda name: scores[name].mean())
    excess = {
        name: [np.average(f.parts[1], weights=f.parts[0]) / y - 1 for f, y in some] for name, some in pairs.items()
    }
    return {
        "runs": int(chosen.sum()),
        "crps": {name: round(float(values.mean()), 4) for name, values in scores.items()},
        "coverage": {name: round(float(value), 3) for name, value in inside.items()},
        "too_high": {name: round(float(np.median(values)), 3) for name, values in excess.items()},
        "best_without_signals": best,
        "ratio_to_best": {name: ratio(scores[name], scores[best]) for name in scores if "rssm" in name},
    }


def main() -> None:
    parser = command_line(__doc__, Path(__file__).resolve().parent)
    parser.add_argument("--curves", type=Path, default=CURVES)
    parser.add_argument(
        "--fit",
        type=float,
        metavar="SECONDS",
        help="Write the past curves of the package, search the prior of the laws, and print it.",
    )
    parser.add_argument("--rssm", action="store_true", help="Compare with the RSSM, on runs with signals.")
    parser.add_argument("--cost", action="store_true", help="Measure what a forecast costs.")
    args = parser.parse_args()
    if args.rssm:
        print(json.dumps(Results(args.results, "final_loss_rssm", ()).add({"at": rssm(), **provenance(1)})))
        return
    if args.cost:
        print(json.dumps(Results(args.results, "final_loss_cost", ()).add({**cost(), **provenance(1)})))
        return
    curves = [curve for curve in load_curves(args.curves) if usable(curve)]
    if args.fit is not None:
        ship_past_curves(curves)
        print(fit_prior(curves, args.fit))
        return
    stored = Results(args.results, "final_loss", ("loss", "share"))
    for loss, scored in (("training", training_table), ("held-out", held_out_table)):
        for share in CUTS:
            row = stored.add({"loss": loss, "share": share, **scored(curves, share), **provenance(1)})
            for group in ("all", "kinds never seen"):
                print(loss, share, group, row[group]["runs"], row[group]["crps"], row[group]["coverage"])
                print("   ", row[group]["best_baseline"], row[group]["ratio_to_best"], flush=True)


if __name__ == "__main__":
    main()
