"""Predictive distributions, the baselines of `forecast.py`, and proper scores with errors over runs."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from hf_hybrid.world_model.dynamics import FREEDOM
from hf_hybrid.world_model.rssm import SCORED, power_law

from benchmarks.world_model.learning import history_of, student_t_nll

FIRST = 3
"""Stretches before the first forecast that is scored; planners start to choose there."""
PENALTIES = (1e-3, 1e-2, 3e-2, 1e-1, 3e-1, 1.0)
LEVELS = tuple(np.round(np.arange(0.05, 1.0, 0.1), 2).tolist())
"""Levels of the central intervals."""
RESAMPLES = 2000


def density_and_cdf(z: np.ndarray, gaussian: bool) -> tuple[np.ndarray, np.ndarray]:
    """Density and distribution function of the standard Gaussian, or of the Student-t with 5 degrees of freedom."""
    if gaussian:
        cdf = torch.special.ndtr(torch.from_numpy(z)).numpy()
        return np.exp(-0.5 * z**2) / math.sqrt(2 * math.pi), cdf
    angle = np.arctan(z / math.sqrt(FREEDOM))
    cdf = 0.5 + (angle + np.sin(angle) * np.cos(angle) + 2 / 3 * np.sin(angle) * np.cos(angle) ** 3) / math.pi
    density = np.exp(-student_t_nll(torch.from_numpy(z), torch.zeros(1, dtype=torch.float64)).numpy())
    return density, cdf


def beta_function(a: float, b: float) -> float:
    return math.exp(math.lgamma(a) + math.lgamma(b) - math.lgamma(a + b))


@dataclass(frozen=True)
class Predictive:
    """
    Predictions `[n]` of changes of the log loss, Gaussian or Student-t (5 degrees of freedom), and the real changes.
    """

    gaussian: bool
    mean: np.ndarray
    scale: np.ndarray
    realised: np.ndarray

    @property
    def _z(self) -> np.ndarray:
        return (self.realised - self.mean) / self.scale

    def nll(self) -> np.ndarray:
        """Negative log density of the real changes, in nats."""
        if self.gaussian:
            return np.log(self.scale) + 0.5 * (self._z**2 + math.log(2 * math.pi))
        return np.log(self.scale) - np.log(density_and_cdf(self._z, False)[0])

    def crps(self) -> np.ndarray:
        """Continuous ranked probability score in log-loss units, in closed form (Jordan et al., 2019, 1709.04743)."""
        z = self._z
        density, cdf = density_and_cdf(z, self.gaussian)
        if self.gaussian:
            return self.scale * (z * (2 * cdf - 1) + 2 * density - 1 / math.sqrt(math.pi))
        spread = 2 * density * (FREEDOM + z**2) / (FREEDOM - 1)
        beta = beta_function(0.5, FREEDOM - 0.5) / beta_function(0.5, FREEDOM / 2) ** 2
        return self.scale * (z * (2 * cdf - 1) + spread - 2 * math.sqrt(FREEDOM) / (FREEDOM - 1) * beta)

    def places(self) -> np.ndarray:
        """Predicted probability of a change below the real one (the probability integral transform)."""
        return density_and_cdf(self._z, self.gaussian)[1]


def best_scale(errors: np.ndarray) -> tuple[bool, float]:
    """
    Choose the family under which the errors are more likely, each with its best scale. Returns whether it is Gaussian,
    and the scale.
    """
    tried = math.sqrt(float(np.mean(errors**2))) * np.exp(np.linspace(-3, 0.5, 141))
    zero = np.zeros_like(errors)
    likely = {
        (gaussian, float(scale)): float(Predictive(gaussian, zero, np.full_like(errors, scale), errors).nll().mean())
        for gaussian in (True, False)
        for scale in tried
    }
    return min(likely, key=likely.get)


@dataclass(frozen=True)
class Starts:
    """What is known at `n` stretches of many runs, to forecast the loss `k` stretches later; each field is `[n]`."""

    run: np.ndarray
    inputs: np.ndarray
    """`[n, 66]`: features, and progress and rate `k` stretches later."""
    law: np.ndarray
    change: np.ndarray


def starts_at(runs: list, k: int) -> Starts:
    """Collect the stretches, from the `FIRST` on, of runs that last `k` stretches more."""
    columns: dict[str, list[np.ndarray]] = {"run": [], "inputs": [], "law": [], "change": []}
    for number, run in enumerate(runs):
        count = len(run.losses) - k - (FIRST - 1)
        if count < 1:
            continue
        begin, end = slice(FIRST - 1, FIRST - 1 + count), slice(FIRST - 1 + k, None)
        back, increments = power_law(history_of(run.losses)[begin], k)
        losses = np.log(np.maximum(run.losses, 1e-6))
        columns["run"].append(np.full(count, number))
        columns["inputs"].append(np.concatenate((run.features[begin], run.actions[end, 2:]), 1))
        columns["law"].append((back + increments.cumsum(-1))[:, -1].numpy())
        columns["change"].append(losses[end] - losses[begin])
    return Starts(**{name: np.concatenate(parts) for name, parts in columns.items()})


class Ridge:
    """
    Ridge regression of the change on features and the known future. Cross-validation over runs chooses the penalty.
    """

    FOLDS = 5

    def __init__(self, known: Starts):
        folds = known.run % self.FOLDS
        errors = {}
        for penalty in PENALTIES:
            left_out = np.empty_like(known.change)
            for fold in range(self.FOLDS):
                fitted = self._fit(known.inputs[folds != fold], known.change[folds != fold], penalty)
                left_out[folds == fold] = fitted(known.inputs[folds == fold])
            errors[penalty] = known.change - left_out
        self.penalty = min(PENALTIES, key=lambda penalty: float(np.mean(np.abs(errors[penalty]))))
        self.errors = errors[self.penalty]
        """Errors on training runs that the fit had not seen. The scale of the forecasts is fitted to them."""
        self.predict = self._fit(known.inputs, known.change, self.penalty)

    @staticmethod
    def _fit(inputs: np.ndarray, change: np.ndarray, penalty: float) -> Callable[[np.ndarray], np.ndarray]:
        mean, scale = inputs.mean(0), inputs.std(0) + 1e-6
        z, offset = (inputs - mean) / scale, change.mean()
        weights = np.linalg.solve(z.T @ z + penalty * len(z) * np.eye(z.shape[1]), z.T @ (change - offset))
        return lambda some: (some - mean) / scale @ weights + offset


def baselines(learned: list, held_out: list) -> dict[int, dict[str, Predictive]]:
    """
    For each horizon, forecast by persistence, by the power law of the run so far, and by ridge. Scales are the best
    ones on training runs.
    """
    found = {}
    for k in SCORED:
        known, asked = starts_at(learned, k), starts_at(held_out, k)
        ridge = Ridge(known)
        means = {
            "persistence": np.zeros_like(asked.change),
            "power law": asked.law,
            "ridge": ridge.predict(asked.inputs),
        }
        errors = {"persistence": known.change, "power law": known.change - known.law, "ridge": ridge.errors}
        found[k] = {}
        for name, mean in means.items():
            gaussian, scale = best_scale(errors[name])
            found[k][name] = Predictive(gaussian, mean, np.full_like(mean, scale), asked.change)
    return found


def with_error(values: np.ndarray, run: np.ndarray, seed: int = 0) -> dict[str, float]:
    """Mean over stretches with its standard error and 95 % interval, by bootstrap over runs."""
    runs, index = np.unique(run, return_inverse=True)
    sums, counts = np.bincount(index, values), np.bincount(index)
    chosen = np.random.default_rng(seed).integers(len(runs), size=(RESAMPLES, len(runs)))
    means = sums[chosen].sum(1) / counts[chosen].sum(1)
    low, high = np.quantile(means, (0.025, 0.975))
    return {
        "mean": round(float(values.mean()), 5),
        "se": round(float(means.std()), 5),
        "low": round(float(low), 5),
        "high": round(float(high), 5),
    }


def calibration_error(places: np.ndarray) -> float:
    """Mean absolute gap between the level of central intervals and the share of realised values inside."""
    inside = [float(np.mean(np.abs(places - 0.5) <= level / 2)) for level in LEVELS]
    return round(float(np.mean(np.abs(np.array(inside) - np.array(LEVELS)))), 4)


def reliability(probability: np.ndarray, happened: np.ndarray, bins: int = 10) -> dict[str, float]:
    """Expected calibration error in bins of equal width; Brier score, and that of answering the base rate."""
    index = np.minimum((probability * bins).astype(int), bins - 1)
    chosen = [index == number for number in range(bins) if (index == number).any()]
    gaps = [some.sum() * abs(probability[some].mean() - happened[some].mean()) for some in chosen]
    base = float(happened.mean())
    return {
        "calibration_error": round(float(sum(gaps)) / len(probability), 4),
        "brier": round(float(np.mean((probability - happened) ** 2)), 4),
        "brier_of_base_rate": round(base - base**2, 4),
    }
