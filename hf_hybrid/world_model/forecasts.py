"""
Forecasts of the loss as distributions: Student-t arithmetic, the power law of the past, calibration by errors.

All forecasts are of the log loss relative to the last stretch, so that they mean the same at any level of the loss.
Each is a Student-t of 5 degrees of freedom: losses of stretches have outliers, and the heavy tails keep a single one
from deciding a fit.

[`LossHistory`] fits the baseline, `loss = a * stretch ** -exponent`: over a run the loss falls roughly as a power of
time. The world model starts from this law, and has to beat it.

[`Calibration`] makes the intervals honest. A model may be right about the mean and wrong about its own errors,
because the run is noisier or calmer than the runs that it was trained on. Each kept forecast is scored when its stretch
comes, 1, 5 and 20 stretches later. If errors are larger than the scale said, later scales grow by the same ratio, and
the other way round. The fraction of losses inside the 90 % interval then approaches 90 % whatever the model does; this
is conformal prediction in spirit (Gibbs and Candes, 2021, arXiv 2106.00170), with a parametric tail.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

FREEDOM = 5
"""Degrees of freedom of every predictive Student-t: losses of stretches have heavy tails, but a variance."""
_LOG_NORMALISER = math.lgamma((FREEDOM + 1) / 2) - math.lgamma(FREEDOM / 2) - 0.5 * math.log(FREEDOM * math.pi)
VARIANCE = FREEDOM / (FREEDOM - 2)
"""Variance of the Student-t of scale 1."""
HISTORY = ("change", "residual", "exponent", "stretch", "noise")
"""The numbers that [`LossHistory`] returns after every stretch."""
SCORED = (1, 5, 20)
"""Stretches ahead at which forecasts are scored."""

TOLERANCE, CONFIDENCE_HORIZON = 0.02, 5
"""The confidence is the probability that the loss rises at most by this share, so many stretches later."""


def student_t_nll(z: Tensor, log_scale: Tensor) -> Tensor:
    """Negative log density of `z * exp(log_scale)` under a Student-t of 5 degrees of freedom, in nats."""
    return 0.5 * (FREEDOM + 1) * torch.log1p(z.square() / FREEDOM) + log_scale - _LOG_NORMALISER


def student_t_cdf(z: float) -> float:
    """Distribution function of the Student-t of 5 degrees of freedom, in closed form."""
    angle = math.atan(z / math.sqrt(FREEDOM))
    sine, cosine = math.sin(angle), math.cos(angle)
    return 0.5 + (angle + sine * cosine + 2 / 3 * sine * cosine**3) / math.pi


def platt_scaled(probability: float, offset: float, slope: float) -> float:
    """The probability with the logit `offset + slope * logit(probability)` (Platt, 1999), bounded away from 0 and 1."""
    inside = min(max(probability, 1e-6), 1 - 1e-6)
    return 1.0 / (1.0 + math.exp(-offset - slope * math.log(inside / (1 - inside))))


@dataclass(frozen=True)
class Forecast:
    """Log loss of each of the next stretches minus that of the last one: Student-t, 5 degrees of freedom."""

    mean: list[float]
    scale: list[float]  # calibrated
    disagreement: list[float]  # standard deviation between the means of the ensemble's members

    def probability_below(self, change: float, k: int) -> float:
        """Probability that the log loss `k` stretches ahead has changed by less than `change`."""
        return student_t_cdf((change - self.mean[k - 1]) / self.scale[k - 1])


class LossHistory:
    """
    The power law `loss = a * stretch ** -exponent` through the losses of past stretches, by least squares in
    logarithms.

    A stretch's weight falls with the square of its age relative to the run's, so that the fit follows at the pace at
    which training slows down. It is the baseline of forecasts and part of the observation of the world model.
    """

    _RIDGE = 0.05
    """Pulls the exponent to 0 while there is little evidence."""

    def __init__(self):
        self.stretches = 0
        self.weight = self.u = self.v = self.uu = self.uv = 0.0
        self.last: float | None = None
        self.noise = 0.05

    def observe(self, log_loss: float) -> list[float]:
        """
        Take in a stretch. Returns, in the order of `HISTORY`: change of the log loss since the stretch before; log loss
        minus its fit; exponent; number of stretches so far; usual size of the residual.
        """
        change = log_loss - self.last if self.last is not None else 0.0
        self.last = log_loss
        keep = (self.stretches / (self.stretches + 1)) ** 2
        self.stretches += 1
        u = math.log(self.stretches)
        sums = (1.0, u, log_loss, u * u, u * log_loss)
        before = (self.weight, self.u, self.v, self.uu, self.uv)
        self.weight, self.u, self.v, self.uu, self.uv = (keep * old + new for old, new in zip(before, sums))
        mean_u, mean_v = self.u / self.weight, self.v / self.weight
        variance = max(self.uu / self.weight - mean_u**2, 0.0)
        slope = (self.uv / self.weight - mean_u * mean_v) / (variance + self._RIDGE / self.weight)
        residual = log_loss - (mean_v + slope * (u - mean_u))
        self.noise += 0.1 * (abs(residual) - self.noise)
        return [change, residual, -slope, float(self.stretches), self.noise]

    def state_dict(self) -> dict:
        return dict(vars(self))

    def load_state_dict(self, state: dict) -> None:
        vars(self).update(state)


def history_of(losses: Sequence[float]) -> Tensor:
    """The output of [`LossHistory`] after each of these stretches, `[W, 5]`."""
    history = LossHistory()
    return torch.tensor([history.observe(log_loss(loss)) for loss in losses]).reshape(-1, len(HISTORY))


def log_loss(loss: float) -> float:
    """Logarithm of a stretch's mean loss, which counts as at least 1e-6."""
    return math.log(max(float(loss), 1e-6))


def power_law(history: Tensor, horizon: int) -> tuple[Tensor, Tensor]:
    """
    The forecast of the power law from histories `[N, 5]`, in two parts that a model can trust to different degrees:
    return of the last stretch to the fitted curve `[N, 1]`, and change of the curve in each of the next stretches
    `[N, K]`. The forecast of the log loss is the first plus the running sum of the second.
    """
    stretch = history[:, 3:4] + torch.arange(horizon, device=history.device, dtype=history.dtype)
    return -history[:, 1:2], -history[:, 2:3] * torch.log1p(1.0 / stretch)


def interpolated(values: Tensor, horizon: int) -> Tensor:
    """Values `[3]` at `SCORED` stretches ahead to all of the next, `[K]`: linear in log k, flat behind the last."""
    ahead = torch.arange(1, horizon + 1, device=values.device, dtype=values.dtype).log()
    found = values[0].expand(horizon)
    for index, (below, above) in enumerate(zip(SCORED, SCORED[1:])):
        share = ((ahead - math.log(below)) / math.log(above / below)).clamp(0, 1)
        found = found + share * (values[index + 1] - values[index])
    return found


class Calibration:
    """
    Widens or narrows predictive scales until past forecasts are as often wrong as they said.

    For every scored horizon the squared scale is multiplied by a ratio: a fading average of squared standardised
    errors. Each is weighted as in the maximum-likelihood scale of a Student-t, so that one outlier counts for little.
    The ratio starts at 1, which counts as `PRIOR + k` errors: forecasts of neighbouring stretches are judged by largely
    the same losses, so a few of them say little.
    """

    PRIOR = 8.0
    HALF_LIFE = 100.0

    def __init__(self):
        self.ratios = dict.fromkeys(SCORED, 1.0)
        self.counts = {k: self.PRIOR + k for k in SCORED}
        self.sums = dict(self.counts)
        self.errors = {k: [0.0, 0.0, 0.0] for k in SCORED}
        """Sums of absolute errors of the forecasts, of persistence and of the power law."""
        self.scored = dict.fromkeys(SCORED, 0)

    def factor(self, k: int) -> float:
        """Factor on the scale of a forecast `k` stretches ahead; geometric between scored horizons."""
        below = max((s for s in SCORED if s <= k), default=SCORED[0])
        above = min((s for s in SCORED if s >= k), default=SCORED[-1])
        share = math.log(k / below) / math.log(above / below) if above > below else 0.0
        return math.exp(0.5 * ((1 - share) * math.log(self.ratios[below]) + share * math.log(self.ratios[above])))

    def score(self, k: int, realised: float, mean: float, raw_scale: float, law: float) -> None:
        """
        Score a forecast that was made `k` stretches ago: the change of the log loss, its forecast with the scale before
        calibration, and the forecast of the power law.
        """
        z2 = ((realised - mean) / raw_scale) ** 2
        weight = (FREEDOM + 1) / (FREEDOM + z2 / self.ratios[k])
        keep = 0.5 ** (1.0 / self.HALF_LIFE)
        self.sums[k] = keep * self.sums[k] + weight * z2
        self.counts[k] = keep * self.counts[k] + 1.0
        self.ratios[k] = min(max(self.sums[k] / self.counts[k], 1e-3), 1e4)
        for index, expected in enumerate((mean, 0.0, law)):
            self.errors[k][index] += abs(realised - expected)
        self.scored[k] += 1

    def mean_errors(self, k: int) -> tuple[float, float, float] | None:
        """Mean absolute error in log loss of forecasts, persistence and power law; `None` before the first."""
        if not self.scored[k]:
            return None
        forecast, persistence, law = (error / self.scored[k] for error in self.errors[k])
        return forecast, persistence, law

    def state_dict(self) -> dict:
        """One list by scored horizon; JSON has no integer keys."""
        parts = (self.ratios, self.counts, self.sums, self.scored)
        return {str(k): [*(part[k] for part in parts), *self.errors[k]] for k in SCORED}

    def load_state_dict(self, state: dict) -> None:
        for k in SCORED:
            self.ratios[k], self.counts[k], self.sums[k], self.scored[k], *self.errors[k] = state[str(k)]
