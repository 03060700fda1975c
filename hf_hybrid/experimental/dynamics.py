"""
The world model of one run. It observes the run in stretches, forecasts the loss and calibrates itself.

Time is counted in stretches of some real steps. After each stretch [`DynamicsModel.observe_stretch`] scores the
forecasts that were made earlier for this stretch, which recalibrates the width of later intervals. Then the ensemble
observes the stretch, which moves its latent state on. [`DynamicsModel.compare`] tells how futures differ, and
[`DynamicsModel.forecast`] what the loss will do.

All forecasts are of the log loss relative to the last stretch, so that they mean the same at any level of the loss. A
forecast combines the members into one Student-t, whose heavy tails keep an outlier from deciding a fit. Its variance is
the mean of their variances (noise that no model could predict) plus the variance of their means (disagreement: what
the ensemble does not know), times a factor by which past forecasts turned out too narrow or too wide. The fraction of
losses inside the 90 % interval then approaches 90 % whatever the model does; this is conformal prediction in spirit
(Gibbs and Candes, 2021, arXiv 2106.00170), with a parametric tail.

The weights stay those that recorded runs taught: learning on during a run improved forecasts by 0.1 to 3 %
(benchmarks/world_model/forecast.md). Processes that observe the same numbers stay identical.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from hf_hybrid.experimental.rssm import FEATURES, HISTORY, RSSM, SCORED, LossHead, State

FREEDOM = 5
"""Degrees of freedom of every predictive Student-t: losses of stretches have heavy tails, but a variance."""
VARIANCE = FREEDOM / (FREEDOM - 2)
"""Variance of the Student-t of scale 1."""


def student_t_cdf(z: float) -> float:
    """Distribution function of the Student-t of 5 degrees of freedom, in closed form."""
    angle = math.atan(z / math.sqrt(FREEDOM))
    sine, cosine = math.sin(angle), math.cos(angle)
    return 0.5 + (angle + sine * cosine + 2 / 3 * sine * cosine**3) / math.pi


class Forecast(NamedTuple):
    """Log loss of each of the next stretches minus that of the last one: Student-t, 5 degrees of freedom."""

    mean: list[float]
    scale: list[float]  # calibrated


def log_loss(loss: float) -> float:
    """Logarithm of a stretch's mean loss, which counts as at least 1e-6."""
    return math.log(max(float(loss), 1e-6))


class LossHistory:
    """
    The power law `loss = a * stretch ** -exponent` through the losses of past stretches, from which the world model
    starts: least squares in logarithms. A stretch's weight falls with the square of its age relative to the run's, so
    that the fit follows at the pace at which training slows down.
    """

    RIDGE = 0.05
    """Pulls the exponent to 0 while there is little evidence."""

    def __init__(self):
        self.log_losses: list[float] = []
        self.noise = 0.05

    def observe(self, log_loss: float) -> list[float]:
        """
        Take in a stretch. Returns, in the order of `HISTORY`: change of the log loss since the stretch before; log loss
        minus its fit; exponent; number of stretches so far; usual size of the residual.
        """
        change = log_loss - self.log_losses[-1] if self.log_losses else 0.0
        self.log_losses.append(log_loss)
        stretches = len(self.log_losses)
        age = np.arange(1, stretches + 1)
        weights, u, v = (age / stretches) ** 2, np.log(age), np.array(self.log_losses)
        mean_u, mean_v = np.average(u, weights=weights), np.average(v, weights=weights)
        variance = np.average((u - mean_u) ** 2, weights=weights) + self.RIDGE / weights.sum()
        slope = float(np.average((u - mean_u) * (v - mean_v), weights=weights) / variance)
        residual = float(log_loss - (mean_v + slope * (u[-1] - mean_u)))
        self.noise += 0.1 * (abs(residual) - self.noise)
        return [change, residual, -slope, float(stretches), self.noise]


class Calibration:
    """
    Widens or narrows predictive scales until past forecasts are as often wrong as they said.

    Each forecast is scored when its stretch comes, 1, 5 and 20 stretches later. For each of these horizons the squared
    scale is multiplied by a ratio: a fading average of squared standardised errors. Each is weighted as in the
    maximum-likelihood scale of a Student-t, so that one outlier counts for little. The ratio starts at 1, which counts
    as `PRIOR + k` errors: forecasts of neighbouring stretches are judged by largely the same losses, so a few of them
    say little.
    """

    PRIOR, HALF_LIFE = 8.0, 100.0

    def __init__(self):
        # By scored horizon, as text: JSON has no integer keys.
        self.sums = {str(k): self.PRIOR + k for k in SCORED}
        self.counts = dict(self.sums)

    def _ratio(self, horizon: str) -> float:
        return min(max(self.sums[horizon] / self.counts[horizon], 1e-3), 1e4)

    def factor(self, k: int) -> float:
        """Factor on the scale of a forecast `k` stretches ahead; geometric between scored horizons."""
        logs = [math.log(self._ratio(horizon)) for horizon in self.sums]
        return math.exp(0.5 * float(np.interp(math.log(k), np.log(SCORED), logs)))

    def score(self, k: int, error: float, raw_scale: float) -> None:
        """Score a forecast that was made `k` stretches ago by its error and its scale before calibration."""
        horizon, keep = str(k), 0.5 ** (1.0 / self.HALF_LIFE)
        z2 = (error / raw_scale) ** 2
        weight = (FREEDOM + 1) / (FREEDOM + z2 / self._ratio(horizon))
        self.sums[horizon] = keep * self.sums[horizon] + weight * z2
        self.counts[horizon] = keep * self.counts[horizon] + 1.0


class DynamicsModel:
    """A world model of one run and its state."""

    def __init__(self, model: RSSM):
        self.model = model
        self.history, self.calibration = LossHistory(), Calibration()
        self.state = self.model.initial(1)
        self.observation = self.model.weights["feature_mean"].new_zeros(FEATURES + len(HISTORY))
        self._pending: list[dict] = []
        """Forecasts, one per scored horizon, whose stretches are still to come."""

    def observe_stretch(self, features: Sequence[float], action: Sequence[float], mean_loss: float) -> None:
        """Take in the 64 features after a stretch, its `ACTIONS` and the mean loss of its real steps, a finite one."""
        value, device, current = log_loss(mean_loss), self.observation.device, len(self.history.log_losses) + 1
        for entry in self._pending:
            if entry["stretch"] == current:
                self.calibration.score(entry["ahead"], value - entry["log_loss"], entry["raw_scale"])
        self._pending = [entry for entry in self._pending if entry["stretch"] > current]
        self.observation = torch.tensor([*features, *self.history.observe(value)], dtype=torch.float32, device=device)
        done = torch.tensor(action, dtype=torch.float32, device=device)
        self.state = self.model.observe(self.state, self.observation[None], done[None])

    def _imagine(self, actions: Tensor) -> LossHead:
        state = State(*(part.expand(-1, len(actions), -1) for part in self.state))
        observation = self.observation.expand(len(actions), -1)
        head = self.model.forecast(state, observation, actions.to(observation.device))
        return LossHead(*(part.cpu() for part in head))

    def forecast(self, actions: Any) -> Forecast:
        """
        Forecast the loss under the `ACTIONS` that will be taken in the next stretches, `[K, 4]`. The losses that come
        calibrate later forecasts. Of several forecasts after one stretch the last counts.
        """
        head = self._imagine(torch.as_tensor(actions, dtype=torch.float32)[None])
        variance = VARIANCE * (2 * head.log_scale[:, 0]).exp().mean(0) + head.mean[:, 0].var(0, unbiased=False)
        mean, raw = head.mean[:, 0].mean(0).tolist(), (variance / VARIANCE).sqrt().tolist()
        last, level = len(self.history.log_losses), self.history.log_losses[-1]
        self._pending = [entry for entry in self._pending if entry["stretch"] - entry["ahead"] != last]
        self._pending += [
            {"stretch": last + k, "ahead": k, "log_loss": level + mean[k - 1], "raw_scale": raw[k - 1]}
            for k in SCORED
            if k <= len(raw)
        ]
        return Forecast(mean, [value * self.calibration.factor(k) for k, value in enumerate(raw, 1)])

    def compare(self, first: Any, second: Any) -> tuple[Tensor, Tensor]:
        """
        Imagined log loss of the first futures minus that of the second, whose actions `[..., K, 4]` are broadcast
        against each other: the mean of the ensemble and the standard deviation between its members, `[..., K]`.
        """
        both = torch.stack(torch.broadcast_tensors(*(torch.as_tensor(side).float() for side in (first, second))))
        of_first, of_second = self._imagine(both.flatten(0, -3)).mean.chunk(2, 1)
        difference = (of_first - of_second).view(-1, *both.shape[1:-1])
        return difference.mean(0), difference.std(0, unbiased=False)

    def probability_better(self, first: Tensor, second: Tensor) -> float:
        """
        Probability that the loss after the last stretch is lower with the first future `[K, 4]` than with the second.

        The difference is a Student-t around the mean of the ensemble. Its variance is that between members plus that
        of the ensemble's errors on recorded pairs of futures, rescaled like the forecasts of this run.
        """
        mean, disagreement = (part[-1].item() for part in self.compare(first, second))
        sides = (side[None].to(self.observation.device) for side in (first, second))
        error = self.model.pair_log_scale(*sides)[:, 0, -1].exp().mean().item() * self.calibration.factor(len(first))
        return student_t_cdf(-mean / math.sqrt(disagreement**2 / VARIANCE + error**2))

    def state_dict(self) -> dict[str, Any]:
        """Return the tensors and plain values from which a resumed run continues bit for bit."""
        return {
            "history": copy.deepcopy(vars(self.history)),
            "calibration": copy.deepcopy(vars(self.calibration)),
            "pending": list(self._pending),
            "tensors": {**self.state._asdict(), "observation": self.observation},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what [`state_dict`] returned."""
        vars(self.history).update(state["history"])
        vars(self.calibration).update(state["calibration"])
        self._pending = list(state["pending"])
        device = self.observation.device
        tensors = {name: tensor.to(device, copy=True) for name, tensor in state["tensors"].items()}
        self.observation, self.state = tensors.pop("observation"), State(**tensors)
