"""
The world model of training: a recurrent state-space model (RSSM), as an ensemble.

An RSSM (Hafner et al., 2019, arXiv 1811.04551; DreamerV3: 2023, arXiv 2301.04104) models a process that is only seen
through noisy observations. It keeps a state of two parts. The deterministic part is the memory of a GRU, driven by
what was done. The stochastic part is a few categorical variables, and there are two guesses for it: the *prior* is
made from the memory alone, before the observation; the *posterior* also sees the observation. While a run is watched
the state follows the posterior. To imagine the future the model rolls the prior forward under the actions that might
be taken, without any observation.

Here the process is a training run and time is counted in stretches of some real steps. After each stretch the model
observes 69 numbers: the 64 signals of signals.py and five that `LossHistory` knows of the loss curve. An action is
what was done in a stretch: how far leaps moved the weights, how many steps they replaced, the progress, and the
learning rate.

The loss heads do not forecast the loss from nothing. They start from the power law through the past losses, which
enters with learned trust, and add a linear forecast, a drift per stretch, and the effect of leaps in proportion to
their gain. The forecast is a Student-t whose scale grows with the horizon. Before training, everything that depends on
leaps is exactly zero: a leap of which the model knows nothing is worth nothing.

The three members have weights of their own, with a leading dimension for the member, so that one batched product serves
all. They were trained on recorded runs (benchmarks/world_model/forecast.md), do not change during a run, and nothing
here is random. Shapes: M members, N sequences, W or K stretches.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

from hf_hybrid.experimental.signals import FEATURE_NAMES, LIMIT

FEATURES = len(FEATURE_NAMES)
HISTORY = ("change", "residual", "exponent", "stretch", "noise")
"""The numbers that `LossHistory` returns after every stretch."""
OBSERVATION = FEATURES + len(HISTORY)
ACTIONS = ("gain", "horizon", "progress", "rate")
"""
What was done in a stretch: displacement by leaps in units of that by its real steps; skipped steps per real step;
share of the run that is done at its end; learning rate at its end over the peak of the run.
"""
SCORED = (1, 5, 20)
"""Stretches ahead at which forecasts are scored."""
LINEAR = OBSERVATION + 5
"""Inputs of the linear part: normalised observation and 1; and for each stretch ahead its progress and rate, the mean
rate until then, and the forecast of the power law."""
LINEAR_HORIZON, LINEAR_LIMIT = 20, 3.0
"""Stretches ahead for which the linear part has weights (later ones use the last), and bound of its inputs, so that it
does not extrapolate from one far out of range."""
UNIFORM = 0.01
"""Share of the uniform distribution in every categorical, which keeps every class alive."""


class State(NamedTuple):
    """Deterministic `[M, N, D]` and stochastic `[M, N, groups * classes]` state; stretches add a dimension."""

    deterministic: Tensor
    stochastic: Tensor


class LossHead(NamedTuple):
    """Predictive Student-t of the change of the log loss: location and log scale, `[M, N, K]`."""

    mean: Tensor
    log_scale: Tensor


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
    ahead = np.log(np.arange(1, horizon + 1))
    return torch.from_numpy(np.interp(ahead, np.log(SCORED), values.cpu().numpy())).to(values)


class RSSM:
    """
    Recurrent state-space ensemble over stretches of training.

    `weights` are `NAME.weight` `[M, inputs, outputs]` and `NAME.bias` `[M, 1, outputs]` of linear maps, and beside what
    only training reads: `feature_mean` and `feature_scale`, which normalise features; `linear`, the linear forecast
    `[M, LINEAR, LINEAR_HORIZON]`; `scale_shift`, added to log scales 1, 5 and 20 stretches ahead; and `pair_scale`
    `[M, 2]`, offset and power in [`pair_log_scale`]. Both scales were calibrated on runs not learned from.
    """

    GROUPS, CLASSES = 4, 8
    """Categorical variables of the stochastic state, and classes of each."""
    _DRIFT = 0.05
    """Log-loss units of an output of 1."""
    _EXPOSURE = 0.1
    """Added to the difference in actions of two futures, so that the error of their difference is never 0."""

    def __init__(self, weights: dict[str, Tensor]):
        self.weights = weights
        self.members, self.deterministic, _ = weights["prior_hidden.weight"].shape

    @classmethod
    def load(cls, path: str | Path, device: str | torch.device = "cpu") -> RSSM:
        """Read weights from safetensors of any float dtype."""
        return cls({name: tensor.to(device, torch.float32) for name, tensor in load_file(str(path)).items()})

    def project(self, name: str, x: Tensor, add: Tensor | None = None) -> Tensor:
        """One linear map per member, `[M, N, inputs] -> [M, N, outputs]`, plus its bias or what the caller adds."""
        return torch.baddbmm(self.weights[f"{name}.bias"] if add is None else add, x, self.weights[f"{name}.weight"])

    def initial(self, count: int) -> State:
        """State before the first stretch of `count` sequences."""
        zeros = self.weights["feature_mean"].new_zeros
        stochastic = self.GROUPS * self.CLASSES
        return State(zeros(self.members, count, self.deterministic), zeros(self.members, count, stochastic))

    def normalised(self, features: Tensor) -> Tensor:
        """Features in units of their usual variation, bounded."""
        scaled = (features - self.weights["feature_mean"]) / self.weights["feature_scale"]
        return scaled.clamp(-2 * LIMIT, 2 * LIMIT)

    def scaled(self, observations: Tensor) -> Tensor:
        """Observations in units of their usual variation, bounded."""
        features, history = observations[..., :FEATURES], observations[..., FEATURES:]
        change, residual, exponent, stretch, noise = history.unbind(-1)
        scaled = torch.stack(
            (10 * change, 10 * residual, 5 * exponent, stretch.clamp_min(1).log() - 3, noise.clamp_min(1e-5).log() + 4),
            -1,
        ).clamp(-2 * LIMIT, 2 * LIMIT)
        return torch.cat((self.normalised(features), scaled), -1)

    def embed(self, observations: Tensor) -> Tensor:
        """Raw observations `[N, 69]` to the input of the posterior, `[M, N, hidden]`."""
        inputs = self.scaled(observations)
        return self.project("encoder", inputs.expand(self.members, *inputs.shape))

    def linear_inputs(self, observation: Tensor, actions: Tensor) -> tuple[Tensor, Tensor]:
        """Inputs of the linear part: those shared by all stretches ahead, `[N, 70]`, and of each, `[N, K, 4]`."""
        shared = self.scaled(observation).clamp(-LINEAR_LIMIT, LINEAR_LIMIT)
        back, increments = power_law(observation[:, FEATURES:], actions.shape[1])
        progress, rate = actions[..., 2], actions[..., 3]
        ahead = torch.arange(1, actions.shape[1] + 1, device=actions.device)
        law = (back + increments.cumsum(-1)).clamp(-LINEAR_LIMIT, LINEAR_LIMIT)
        own = torch.stack((progress, rate, rate.cumsum(-1) / ahead, law), -1)
        return torch.cat((shared, torch.ones_like(shared[:, :1])), -1), own

    def steer(self, actions: Tensor) -> tuple[Tensor, ...]:
        """The part of the GRU's gates that comes from actions `[N, W, 4]`: for each stretch `[M, N, 3 * D]`."""
        inputs = torch.cat((torch.asinh(actions[..., :2]), actions[..., 2:]), -1).flatten(0, 1)
        gates = self.project("gates_action", inputs.expand(self.members, *inputs.shape))
        return gates.unflatten(1, actions.shape[:2]).unbind(2)

    def recur(self, state: State, steer: Tensor) -> Tensor:
        reset, update, candidate = self.project("gates", torch.cat(state, -1), steer).chunk(3, -1)
        candidate = torch.tanh(torch.sigmoid(reset) * candidate)
        # The update gate starts nearly closed, so that the state remembers many stretches from the start.
        return torch.lerp(state.deterministic, candidate, torch.sigmoid(update - 1.0))

    def _distribution(self, name: str, hidden: Tensor) -> Tensor:
        probabilities = self.project(name, F.silu(hidden)).unflatten(-1, (self.GROUPS, self.CLASSES)).softmax(-1)
        return (1 - UNIFORM) * probabilities + UNIFORM / self.CLASSES

    def prior(self, deterministic: Tensor) -> Tensor:
        """Probabilities of the stochastic state before the stretch is observed, `[M, N, groups, classes]`."""
        return self._distribution("prior_out", self.project("prior_hidden", deterministic))

    def posterior(self, deterministic: Tensor, embedded: Tensor) -> Tensor:
        """Probabilities of the stochastic state once the stretch is observed, `[M, N, groups, classes]`."""
        return self._distribution("posterior_out", self.project("posterior_hidden", deterministic) + embedded)

    def observe(self, state: State, observation: Tensor, action: Tensor) -> State:
        """
        State after a stretch, from the state before it, the observation `[N, 69]` after it and its action `[N, 4]`. It
        holds mean probabilities instead of samples, so all processes compute the same.
        """
        deterministic = self.recur(state, self.steer(action[:, None])[0])
        return State(deterministic, self.posterior(deterministic, self.embed(observation)).flatten(-2))

    def imagine(self, state: State, actions: Tensor) -> State:
        """
        Roll the prior forward under actions `[N, K, 4]`, without observations: the state after each stretch,
        `[M, N, K, ...]`. It holds mean probabilities.
        """
        states = []
        for steer in self.steer(actions):
            hidden = self.recur(state, steer)
            state = State(hidden, self.prior(hidden).flatten(-2))
            states.append(state)
        return State(*(torch.stack(part, 2) for part in zip(*states)))

    def forecast(self, start: State, observation: Tensor, actions: Tensor) -> LossHead:
        """
        Imagine from a state `[M, N, ...]`, and predict the change of the log loss from there to every stretch.

        The heads also read the last observation `[N, 69]`: a few categoricals hold what matters in the long run, but
        not every feature that tells what a leap will do. The log scale combines two kinds of noise: that of a stretch
        itself, and that of a walk, which adds up over stretches.
        """
        embedded = self.embed(observation)
        latents = torch.cat(self.imagine(start, actions), -1)
        hidden = self.project("loss_hidden", latents.flatten(1, 2)).unflatten(1, latents.shape[1:3])
        hidden = hidden + self.project("loss_context", F.silu(embedded))[:, :, None]
        out = self.project("loss_out", F.silu(hidden).flatten(1, 2)).unflatten(1, latents.shape[1:3])
        at_start = self.project("start_out", F.silu(self.project("start_hidden", torch.cat(start, -1)) + embedded))
        back, increments = power_law(observation[:, FEATURES:], actions.shape[1])
        trust = torch.sigmoid(at_start[..., :2])
        offset = trust[..., :1] * back + self._DRIFT * at_start[..., 2:]
        drift, effect = self._DRIFT * out[..., 0], self._DRIFT * out[..., 1]
        steps = trust[..., 1:] * increments + drift + torch.asinh(actions[..., 0]) * effect
        shared, own = self.linear_inputs(observation, actions)
        columns = torch.arange(actions.shape[1], device=actions.device).clamp_max(LINEAR_HORIZON - 1)
        weights, split = self.weights["linear"][..., columns], shared.shape[-1]
        linear = torch.matmul(shared, weights[:, :split]) + torch.einsum("nki,mik->mnk", own, weights[:, split:])
        mean = offset + steps.cumsum(-1) + linear
        noise, walk = (2 * out[..., 2]).exp(), (2 * out[..., 3]).exp().cumsum(-1)
        return LossHead(
            mean, 0.5 * (noise + walk + 1e-8).log() + interpolated(self.weights["scale_shift"], actions.shape[1])
        )

    def pair_log_scale(self, first: Tensor, second: Tensor) -> Tensor:
        """
        Log scale `[M, P, K]` of the error of a difference between two futures, from the actions `[P, K, 4]` of both. It
        grows as a power of the difference in actions.
        """
        exposure = (torch.asinh(first[..., :2]) - torch.asinh(second[..., :2])).abs().sum(-1).cumsum(-1)
        offset, power = self.weights["pair_scale"][..., None].split(1, 1)
        return offset + power * (exposure + self._EXPOSURE).log()
