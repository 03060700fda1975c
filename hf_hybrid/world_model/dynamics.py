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

A forecast combines the members into one Student-t. Its variance is the mean of their variances (noise that no model
could predict) plus the variance of their means (disagreement: what the ensemble does not know), times a factor by
which past forecasts turned out too narrow or too wide (forecasts.py).

A run begins from start weights that were trained on recorded small runs (`benchmarks/world_model/train.py`); the
feature normalisation comes with them. Everything follows from saved state and generators of its own, so processes that
observe the same numbers stay identical, and a resumed run continues bit for bit.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from hf_hybrid.world_model.forecasts import (
    CONFIDENCE_HORIZON,
    HISTORY,
    SCORED,
    TOLERANCE,
    VARIANCE,
    Calibration,
    Forecast,
    LossHistory,
    log_loss,
    platt_scaled,
    power_law,
    student_t_cdf,
)
from hf_hybrid.world_model.learning import Replay, descend, rssm_loss
from hf_hybrid.world_model.rssm import ACTIONS, FEATURES, MIN_SCALE, RSSM, LossHead, State, load_weights

BATCH_SIZE, STARTS = 4, 2
"""Chunks of an online gradient step, and stretches of each chunk to imagine from."""
LEARNING_RATE = 3e-4
"""Of Adam, for online gradient steps."""
_VALUES = ("stretches", "updates", "seconds", "confidence", "learns_normalisation")
"""Attributes that are saved as they are."""


class DynamicsModel:
    """
    A world model of one run and the state that it learns with.

    Args:
        start (`Path`, *optional*): Start weights, see `rssm.load_weights`. They include the normalisation of the
            features; without start weights it is learned from the run.
        model (`RSSM`, *optional*): The ensemble; by default one of the standard size.
        device (`str` or `torch.device`): Device of the ensemble.
        learn_every (`int`): Stretches from one call of [`learn`] to the next; 0: never.
        chunk (`int`), horizon (`int`): Stretches of a chunk to observe, and stretches to imagine.
        capacity (`int`): Stretches to keep in the replay.
        seed (`int`): Seed of the generators.

    Raises:
        ValueError: If `start` cannot be read or does not fit, or a number is out of range.
    """

    def __init__(
        self,
        start: Path | None = None,
        *,
        model: RSSM | None = None,
        device: str | torch.device = "cpu",
        learn_every: int = 5,
        chunk: int = 8,
        horizon: int = 20,
        capacity: int = 2048,
        seed: int = 0,
    ):
        for name, value in {"chunk": chunk, "horizon": horizon, "capacity": capacity}.items():
            if value < 1:
                raise ValueError(f"`{name}` must be at least 1, got {value}.")
        self.model = (RSSM(seed=seed) if model is None else model).to(device)
        if start is not None:
            load_weights(self.model, start)
        self.learn_every, self.chunk, self.horizon = learn_every, chunk, horizon
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=LEARNING_RATE, fused=True)
        self.generator = torch.Generator().manual_seed(seed)
        self.sampler = torch.Generator(device).manual_seed(seed)
        self.replay = Replay(self.model, capacity)
        self.history, self.calibration = LossHistory(), Calibration()
        self.state = self.model.initial(1)
        self.observation = self.model.feature_mean.new_zeros(FEATURES + len(HISTORY))
        self.learns_normalisation = start is None
        self.stretches = 0
        self.updates = 0
        """Gradient steps made."""
        self.seconds = 0.0
        """Time spent in this object."""
        self.confidence = 0.0
        """
        Calibrated probability that the loss `CONFIDENCE_HORIZON` stretches ahead is at most `TOLERANCE` (relative)
        above that of the last stretch, by the last forecast that was kept; 0 before there is one. Its logit is rescaled
        by the map that was right on recorded runs.
        """
        self._pending: list[dict] = []

    # Observing and learning.

    @torch.no_grad()
    def observe_stretch(self, features: Sequence[float], action: Sequence[float], mean_loss: float) -> None:
        """
        Take in a stretch of the run: the 64 features after its last step, its `ACTIONS` and the mean training loss of
        its real steps. Every `learn_every` stretches, learn.

        Raises:
            ValueError: If the loss is not finite.
        """
        if not math.isfinite(mean_loss):
            raise ValueError(f"`mean_loss` must be finite, got {mean_loss}. Leave such stretches out.")
        began = time.perf_counter()
        value = log_loss(mean_loss)
        self._score(value)
        observation = torch.tensor([*features, *self.history.observe(value)], dtype=torch.float32)
        done = torch.tensor(action, dtype=torch.float32)
        weights = -torch.rand(self.model.members, generator=self.generator).clamp_min(1e-6).log()
        self.replay.append(self.state, observation, done, value, weights)
        self.observation = observation.to(self.observation.device)
        if self.learns_normalisation:
            self._update_normalisation()
        self.state = self.model.observe(self.state, self.observation[None], done[None].to(self.observation.device))
        self.stretches += 1
        if self.learn_every and self.stretches % self.learn_every == 0:
            self.learn()
        self.seconds += time.perf_counter() - began

    def _update_normalisation(self) -> None:
        """Running mean and deviation, from a prior of mean 0 and deviation 1 that counts as ten stretches."""
        count = self.stretches + 11
        mean, scale = self.model.feature_mean, self.model.feature_scale
        difference = self.observation[:FEATURES] - mean
        mean += difference / count
        variance = scale.square()
        variance += (difference * (self.observation[:FEATURES] - mean) - variance) / count
        scale.copy_(variance.sqrt().clamp_min(MIN_SCALE))

    def learn(self) -> None:
        """Make a gradient step on chunks of the replay, if it holds two stretches."""
        observed = min(self.chunk, len(self.replay) - 1)
        if observed > 0:
            batch = self.replay.chunks(BATCH_SIZE, observed, STARTS, self.horizon, self.generator)
            with torch.enable_grad():
                losses, _ = rssm_loss(self.model, batch.to(self.observation.device), self.sampler)
                descend(self.model, self.optimizer, losses["total"])
            self.updates += 1

    # Imagining.

    @torch.no_grad()
    def _imagine(self, actions: Tensor) -> LossHead:
        if not self.stretches:
            raise ValueError("No future can be imagined before the first stretch. Call `observe_stretch` first.")
        began = time.perf_counter()
        count = len(actions)
        state = State(*(part.expand(-1, count, -1) for part in self.state))
        observation = self.observation.expand(count, -1)
        head = self.model.forecast(state, observation, actions.to(observation.device))
        head = LossHead(*(part.cpu() for part in head))
        self.seconds += time.perf_counter() - began
        return head

    def forecast(self, actions, *, keep: bool = False) -> Forecast:
        """
        Forecast the loss under given actions.

        `actions` are `[K, 4]`: `ACTIONS` of the next stretches. With `keep` they are those that will be taken: this
        updates the confidence, and the losses that come will calibrate later forecasts. Of several forecasts after one
        stretch the last counts.

        Raises:
            ValueError: If the actions are not `[K, 4]`, or no stretch has been observed.
        """
        actions = _as_actions(actions)
        if actions.ndim != 2:
            raise ValueError(f"`actions` must have the shape [K, {len(ACTIONS)}], got {list(actions.shape)}.")
        head = self._imagine(actions[None])
        mean, disagreement = head.mean[:, 0].mean(0), head.mean[:, 0].std(0, unbiased=False)
        variance = VARIANCE * (2 * head.log_scale[:, 0]).exp().mean(0) + disagreement.square()
        raw = (variance / VARIANCE).sqrt().tolist()
        scale = [value * self.calibration.factor(k) for k, value in enumerate(raw, 1)]
        forecast = Forecast(mean.tolist(), scale, disagreement.tolist())
        if keep:
            probability = forecast.probability_below(math.log1p(TOLERANCE), min(CONFIDENCE_HORIZON, len(scale)))
            self.confidence = platt_scaled(probability, *self.model.confidence_map.tolist())
            self._keep(forecast, raw)
        return forecast

    def compare(self, actions_a, actions_b) -> tuple[Tensor, Tensor]:
        """
        Imagined log loss of future `a` minus that of future `b`: negative where `a` is better.

        Actions `[..., K, 4]` are broadcast against each other, to compare several candidates at once. Returns the mean
        of the ensemble and the standard deviation between its members, `[..., K]`.

        Raises:
            ValueError: If the actions are not `[..., K, 4]` with the same `K`, or no stretch has been observed.
        """
        a, b = _as_actions(actions_a), _as_actions(actions_b)
        if a.shape[-2] != b.shape[-2]:
            raise ValueError(
                f"`actions_a` is {a.shape[-2]} stretches long and `actions_b` {b.shape[-2]}, but only futures of equal "
                "length can be compared. Cut the longer one."
            )
        rows = [part.reshape(-1, *part.shape[-2:]) for part in (a, b)]
        means = self._imagine(torch.cat(rows)).mean.movedim(0, -1).split([len(part) for part in rows])
        mean_a, mean_b = (mean.reshape(*part.shape[:-1], -1) for mean, part in zip(means, (a, b)))
        difference = mean_a - mean_b
        return difference.mean(-1), difference.std(-1, unbiased=False)

    def probability_better(self, actions_with, actions_without, horizon: int) -> Tensor:
        """
        Probability that the loss `horizon` stretches ahead is lower with one future than with another.

        The difference is a Student-t around the mean of the ensemble. Its variance is that between members plus that
        of the ensemble's errors on recorded pairs of futures, rescaled like the forecasts of this run.

        Raises:
            ValueError: If `horizon` is not between 1 and `K`, and as [`compare`].
        """
        mean, disagreement = self.compare(actions_with, actions_without)
        if not 1 <= horizon <= mean.shape[-1]:
            raise ValueError(
                f"`horizon` must be 1 to {mean.shape[-1]}, got {horizon}: the actions have no more stretches."
            )
        both = torch.broadcast_tensors(_as_actions(actions_with), _as_actions(actions_without))
        first, second = (part.reshape(-1, *part.shape[-2:])[:, :horizon].to(self.observation.device) for part in both)
        error = self.model.pair_log_scale(first, second)[..., -1].exp().mean(0).cpu() * self.calibration.factor(horizon)
        mean, disagreement = (part[..., horizon - 1].flatten() for part in (mean, disagreement))
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
        now = self.stretches + 1
        for entry in self._pending:
            k = now - entry["stretch"]
            if str(k) in entry["kept"]:
                self.calibration.score(k, value - entry["log_loss"], *entry["kept"][str(k)])
        self._pending = [entry for entry in self._pending if now - entry["stretch"] < max(SCORED)]

    # Saving.

    def state_dict(self) -> tuple[dict[str, Tensor], dict]:
        """Return the tensors and plain values from which a resumed run continues bit for bit."""
        tensors = {f"model.{name}": tensor for name, tensor in self.model.state_dict().items()}
        for name, parameter in self.model.named_parameters():
            for key, value in self.optimizer.state.get(parameter, {}).items():
                tensors[f"optimizer.{key}.{name}"] = value
        tensors.update({f"replay.{name}": tensor for name, tensor in self.replay.tensors().items()})
        tensors.update({"state.deterministic": self.state.deterministic, "state.stochastic": self.state.stochastic})
        tensors["observation"] = self.observation
        tensors["generator"], tensors["sampler"] = self.generator.get_state(), self.sampler.get_state()
        values = {
            **{name: getattr(self, name) for name in _VALUES},
            "history": self.history.state_dict(),
            "calibration": self.calibration.state_dict(),
            "pending": [dict(entry) for entry in self._pending],
        }
        return {name: tensor.detach().clone().contiguous() for name, tensor in tensors.items()}, values

    @torch.no_grad()
    def load_state_dict(self, tensors: dict[str, Tensor], values: dict) -> None:
        """
        Restore what [`state_dict`] returned.

        Raises:
            ValueError: If it belongs to an ensemble of other sizes.
        """
        groups: dict[str, dict[str, Tensor]] = {}
        for name, tensor in tensors.items():
            group, _, rest = name.partition(".")
            groups.setdefault(group, {})[rest] = tensor
        try:
            self.model.load_state_dict(groups["model"])
        except RuntimeError as error:
            raise ValueError(
                "The saved world model is an ensemble of other sizes. Resume with the version that wrote it."
            ) from error
        device = self.observation.device
        parameters = dict(self.model.named_parameters())
        self.optimizer.state.clear()
        for name, value in groups.get("optimizer", {}).items():
            key, _, parameter = name.partition(".")
            self.optimizer.state[parameters[parameter]][key] = value.to(device, copy=True)
        self.replay.load(groups.get("replay", {}))
        self.state = State(*(groups["state"][name].to(device, copy=True) for name in State._fields))
        self.observation = tensors["observation"].to(device, copy=True)
        self.generator.set_state(tensors["generator"].cpu())
        self.sampler.set_state(tensors["sampler"].cpu())
        for name in _VALUES:
            setattr(self, name, values[name])
        self.history.load_state_dict(values["history"])
        self.calibration.load_state_dict(values["calibration"])
        self._pending = [dict(entry) for entry in values["pending"]]


def _as_actions(values) -> Tensor:
    actions = torch.as_tensor(values, dtype=torch.float32)
    if actions.ndim < 2 or actions.shape[-1] != len(ACTIONS) or not actions.shape[-2]:
        raise ValueError(
            f"Actions must have the shape [..., K, {len(ACTIONS)}], with {', '.join(ACTIONS)} of each stretch, got "
            f"{list(actions.shape)}."
        )
    return actions
