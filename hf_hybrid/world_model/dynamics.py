"""
The world model of one run. It observes the run in stretches, learns online, forecasts the loss and calibrates itself.

Time is counted in stretches of some real steps. After each stretch [`DynamicsModel.observe_stretch`] does four things,
in this order:

1. Forecasts that were made earlier for this stretch are scored, which recalibrates the width of later intervals.
2. The stretch goes into the replay, with the latent state before it.
3. The ensemble observes it, which moves the latent state on.
4. Every few stretches the ensemble takes a gradient step on chunks of the replay (learning.py).

Then [`DynamicsModel.compare`] tells how futures differ, and [`DynamicsModel.forecast`] what the loss will do. The
forecast of what is really going to be done is made with `keep=True`, so that step 1 can score it later.

All forecasts are of the log loss relative to the last stretch, so that they mean the same at any level of the loss. A
forecast combines the members into one Student-t, whose heavy tails keep an outlier from deciding a fit. Its variance is
the mean of their variances (noise that no model could predict) plus the variance of their means (disagreement: what
the ensemble does not know), times a factor by which past forecasts turned out too narrow or too wide. The fraction of
losses inside the 90 % interval then approaches 90 % whatever the model does; this is conformal prediction in spirit
(Gibbs and Candes, 2021, arXiv 2106.00170), with a parametric tail.

A run begins from start weights that were trained on recorded small runs (`benchmarks/world_model/train.py`); the
feature normalisation comes with them. Everything follows from saved state and generators of its own, so processes that
observe the same numbers stay identical, and a resumed run continues bit for bit.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hf_hybrid.world_model.learning import FREEDOM, Replay, descend, rssm_loss
from hf_hybrid.world_model.rssm import FEATURES, HISTORY, RSSM, SCORED, LossHead, State, power_law

BATCH_SIZE, STARTS = 4, 2
"""Chunks of an online gradient step, and stretches of each chunk to imagine from."""
LEARNING_RATE = 3e-4
"""Of Adam, for online gradient steps."""
VARIANCE = FREEDOM / (FREEDOM - 2)
"""Variance of the Student-t of scale 1."""
_VALUES = ("stretches", "updates", "seconds")
"""Attributes that are saved as they are."""


def student_t_cdf(z: float) -> float:
    """Distribution function of the Student-t of 5 degrees of freedom, in closed form."""
    angle = math.atan(z / math.sqrt(FREEDOM))
    sine, cosine = math.sin(angle), math.cos(angle)
    return 0.5 + (angle + sine * cosine + 2 / 3 * sine * cosine**3) / math.pi


@dataclass(frozen=True)
class Forecast:
    """Log loss of each of the next stretches minus that of the last one: Student-t, 5 degrees of freedom."""

    mean: list[float]
    scale: list[float]  # calibrated
    disagreement: list[float]  # standard deviation between the means of the ensemble's members

    def probability_below(self, change: float, k: int) -> float:
        """Probability that the log loss `k` stretches ahead has changed by less than `change`."""
        return student_t_cdf((change - self.mean[k - 1]) / self.scale[k - 1])


def log_loss(loss: float) -> float:
    """Logarithm of a stretch's mean loss, which counts as at least 1e-6."""
    return math.log(max(float(loss), 1e-6))


class LossHistory:
    """
    The power law `loss = a * stretch ** -exponent` through the losses of past stretches, by least squares in
    logarithms. The world model starts from this law, and has to beat it.

    A stretch's weight falls with the square of its age relative to the run's, so that the fit follows at the pace at
    which training slows down.
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


def history_of(losses: Sequence[float]) -> Tensor:
    """The output of [`LossHistory`] after each of these stretches, `[W, 5]`."""
    history = LossHistory()
    return torch.tensor([history.observe(log_loss(loss)) for loss in losses]).reshape(-1, len(HISTORY))


class Calibration:
    """
    Widens or narrows predictive scales until past forecasts are as often wrong as they said.

    Each kept forecast is scored when its stretch comes, 1, 5 and 20 stretches later. For each of these horizons the
    squared scale is multiplied by a ratio: a fading average of squared standardised errors. Each is weighted as in the
    maximum-likelihood scale of a Student-t, so that one outlier counts for little. The ratio starts at 1, which counts
    as `PRIOR + k` errors: forecasts of neighbouring stretches are judged by largely the same losses, so a few of them
    say little.
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

    def mean_errors(self, k: int) -> tuple[float, ...] | None:
        """Mean absolute error in log loss of forecasts, persistence and power law; `None` before the first."""
        return tuple(error / self.scored[k] for error in self.errors[k]) if self.scored[k] else None

    def state_dict(self) -> dict:
        """One list by scored horizon; JSON has no integer keys."""
        parts = (self.ratios, self.counts, self.sums, self.scored)
        return {str(k): [*(part[k] for part in parts), *self.errors[k]] for k in SCORED}

    def load_state_dict(self, state: dict) -> None:
        for k in SCORED:
            self.ratios[k], self.counts[k], self.sums[k], self.scored[k], *self.errors[k] = state[str(k)]


class DynamicsModel:
    """A world model of one run and the state that it learns with. Actions may be anything that a tensor is made of."""

    def __init__(
        self,
        model: RSSM,  # with its start weights
        *,
        device: str | torch.device = "cpu",
        learn_every: int = 5,  # stretches from one call of `learn` to the next; 0: never
        chunk: int = 8,  # stretches of a chunk to observe
        horizon: int = 20,  # stretches to imagine
        capacity: int = 2048,  # stretches to keep in the replay
        seed: int = 0,
    ):
        self.model = model.to(device)
        self.learn_every, self.chunk, self.horizon = learn_every, chunk, horizon
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=LEARNING_RATE, fused=True)
        self.generator = torch.Generator().manual_seed(seed)
        self.sampler = torch.Generator(device).manual_seed(seed)
        self.replay = Replay(self.model, capacity)
        self.history, self.calibration = LossHistory(), Calibration()
        self.state = self.model.initial(1)
        self.observation = self.model.feature_mean.new_zeros(FEATURES + len(HISTORY))
        self.stretches = self.updates = 0
        """Stretches observed and gradient steps made."""
        self.seconds = 0.0
        """Time spent in this object."""
        self._pending: list[dict] = []

    @torch.no_grad()
    def observe_stretch(self, features: Sequence[float], action: Sequence[float], mean_loss: float) -> None:
        """
        Take in a stretch of the run: the 64 features after its last step, its `ACTIONS` and the mean training loss of
        its real steps, which is finite. Every `learn_every` stretches, learn.
        """
        began = time.perf_counter()
        value = log_loss(mean_loss)
        self._score(value)
        observation = torch.tensor([*features, *self.history.observe(value)], dtype=torch.float32)
        done = torch.tensor(action, dtype=torch.float32)
        weights = -torch.rand(self.model.members, generator=self.generator).clamp_min(1e-6).log()
        self.replay.append(self.state, observation, done, value, weights)
        self.observation = observation.to(self.observation.device)
        self.state = self.model.observe(self.state, self.observation[None], done[None].to(self.observation.device))
        self.stretches += 1
        if self.learn_every and self.stretches % self.learn_every == 0:
            self.learn()
        self.seconds += time.perf_counter() - began

    def learn(self) -> None:
        """Make a gradient step on chunks of the replay, if it holds two stretches."""
        observed = min(self.chunk, len(self.replay.rows) - 1)
        if observed > 0:
            batch = self.replay.chunks(BATCH_SIZE, observed, STARTS, self.horizon, self.generator)
            with torch.enable_grad():
                losses, _ = rssm_loss(self.model, batch.to(self.observation.device), self.sampler)
                descend(self.model, self.optimizer, losses["total"])
            self.updates += 1

    # Imagining.

    @torch.no_grad()
    def _imagine(self, actions: Tensor) -> LossHead:
        began = time.perf_counter()
        state = State(*(part.expand(-1, len(actions), -1) for part in self.state))
        observation = self.observation.expand(len(actions), -1)
        head = self.model.forecast(state, observation, actions.to(observation.device))
        head = LossHead(*(part.cpu() for part in head))
        self.seconds += time.perf_counter() - began
        return head

    def forecast(self, actions: Any, *, keep: bool = False) -> Forecast:
        """
        Forecast the loss under the `ACTIONS` of the next stretches, `[K, 4]`. With `keep` they are those that will be
        taken, and the losses that come will calibrate later forecasts. Of several forecasts after one stretch the last
        counts.
        """
        head = self._imagine(torch.as_tensor(actions, dtype=torch.float32)[None])
        mean, disagreement = head.mean[:, 0].mean(0), head.mean[:, 0].std(0, unbiased=False)
        variance = VARIANCE * (2 * head.log_scale[:, 0]).exp().mean(0) + disagreement.square()
        raw = (variance / VARIANCE).sqrt().tolist()
        scale = [value * self.calibration.factor(k) for k, value in enumerate(raw, 1)]
        forecast = Forecast(mean.tolist(), scale, disagreement.tolist())
        if keep:
            self._keep(forecast, raw)
        return forecast

    def compare(self, first: Any, second: Any) -> tuple[Tensor, Tensor]:
        """
        Imagined log loss of the first futures minus that of the second: negative where the first are better.

        Actions `[..., K, 4]` are broadcast against each other, to compare several candidates at once. Returns the mean
        of the ensemble and the standard deviation between its members, `[..., K]`.
        """
        first, second = (torch.as_tensor(actions, dtype=torch.float32) for actions in (first, second))
        rows = [part.reshape(-1, *part.shape[-2:]) for part in (first, second)]
        means = self._imagine(torch.cat(rows)).mean.movedim(0, -1).split([len(part) for part in rows])
        of_first, of_second = (mean.reshape(*part.shape[:-1], -1) for mean, part in zip(means, (first, second)))
        difference = of_first - of_second
        return difference.mean(-1), difference.std(-1, unbiased=False)

    def probability_better(self, first: Tensor, second: Tensor) -> Tensor:
        """
        Probability that the loss after the last stretch is lower with the first future than with the second.

        The difference is a Student-t around the mean of the ensemble. Its variance is that between members plus that
        of the ensemble's errors on recorded pairs of futures, rescaled like the forecasts of this run.
        """
        mean, disagreement = (part[..., -1].flatten() for part in self.compare(first, second))
        both = torch.broadcast_tensors(first, second)
        rows = (part.reshape(-1, *part.shape[-2:]).to(self.observation.device) for part in both)
        factor = self.calibration.factor(first.shape[-2])
        error = self.model.pair_log_scale(*rows)[..., -1].exp().mean(0).cpu() * factor
        z = -mean / (disagreement.square() / VARIANCE + error.square()).sqrt()
        return torch.tensor([student_t_cdf(value) for value in z.tolist()]).view(both[0].shape[:-2])

    # Calibrating.

    def _keep(self, forecast: Forecast, raw: list[float]) -> None:
        back, increments = power_law(self.observation[None, FEATURES:].cpu(), len(raw))
        law = (back + increments.cumsum(-1))[0].tolist()
        kept = {str(k): [forecast.mean[k - 1], raw[k - 1], law[k - 1]] for k in SCORED if k <= len(raw)}
        self._pending = [entry for entry in self._pending if entry["stretch"] != self.stretches]
        self._pending.append({"stretch": self.stretches, "log_loss": self.history.last, "kept": kept})

    def _score(self, value: float) -> None:
        """Score the forecasts that were made for the stretch that has just ended."""
        current = self.stretches + 1
        for entry in self._pending:
            k = current - entry["stretch"]
            if str(k) in entry["kept"]:
                self.calibration.score(k, value - entry["log_loss"], *entry["kept"][str(k)])
        self._pending = [entry for entry in self._pending if current - entry["stretch"] < max(SCORED)]

    # Saving.

    def state_dict(self) -> tuple[dict[str, Tensor], dict]:
        """Return the tensors and plain values from which a resumed run continues bit for bit."""
        groups: dict[str, dict[str, Tensor]] = {"model": self.model.state_dict(), "state": self.state._asdict()}
        groups["replay"] = self.replay.tensors()
        for name, parameter in self.model.named_parameters():
            states = self.optimizer.state.get(parameter, {})
            groups.setdefault("optimizer", {}).update({f"{key}.{name}": value for key, value in states.items()})
        tensors = {f"{group}.{name}": tensor for group, named in groups.items() for name, tensor in named.items()}
        tensors |= {"observation": self.observation}
        tensors |= {"generator": self.generator.get_state(), "sampler": self.sampler.get_state()}
        values = {name: getattr(self, name) for name in _VALUES}
        values |= {"history": dict(vars(self.history)), "calibration": self.calibration.state_dict()}
        values["pending"] = [dict(entry) for entry in self._pending]
        return {name: tensor.detach().clone() for name, tensor in tensors.items()}, values

    @torch.no_grad()
    def load_state_dict(self, tensors: dict[str, Tensor], values: dict) -> None:
        """Restore what [`state_dict`] returned."""
        groups: dict[str, dict[str, Tensor]] = {"optimizer": {}, "replay": {}}
        for name, tensor in tensors.items():
            group, _, rest = name.partition(".")
            groups.setdefault(group, {})[rest] = tensor
        self.model.load_state_dict(groups["model"])
        device, parameters = self.observation.device, dict(self.model.named_parameters())
        self.optimizer.state.clear()
        for name, value in groups["optimizer"].items():
            key, _, parameter = name.partition(".")
            self.optimizer.state[parameters[parameter]][key] = value.to(device, copy=True)
        self.replay.load(groups["replay"])
        self.state = State(*(groups["state"][name].to(device, copy=True) for name in State._fields))
        self.observation = tensors["observation"].to(device, copy=True)
        self.generator.set_state(tensors["generator"].cpu())
        self.sampler.set_state(tensors["sampler"].cpu())
        vars(self).update({name: values[name] for name in _VALUES})
        vars(self.history).update(values["history"])
        self.calibration.load_state_dict(values["calibration"])
        self._pending = [dict(entry) for entry in values["pending"]]
