"""
How the world model learns from recorded runs: its loss. `records.py` says what is learned from.

The loss is that of Dreamer (Hafner et al., 2023, arXiv 2301.04104) with forecasts of the loss in place of rewards. The
model observes a run with sampled states, and pays for three things:

- **reconstruction**: the features must be readable from the state, so that the state keeps what was observed;
- **divergence**: the prior and the posterior must agree, so that imagination, which only has the prior, ends up in
  states that observation would reach. Mostly the prior is pulled to the posterior (`BALANCE`), and the first nat is
  free (`FREE_NATS`): some surprise is noise, and a model that pays for it forgets how to observe;
- **forecast**: from a few stretches of the run the model imagines the next ones with the actions that were taken. It
  pays the negative log-likelihood of the losses that came, under a Student-t, which forgives outliers.

Each member of the ensemble weighs the runs with random exponential weights of its own (a Bayesian bootstrap; Rubin,
1981). Where the data decide, all members learn the same; where they do not, members come to disagree.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from hf_hybrid.world_model.dynamics import FREEDOM, LossHistory, log_loss
from hf_hybrid.world_model.rssm import (
    ACTIONS,
    FEATURES,
    HISTORY,
    LINEAR,
    LINEAR_HORIZON,
    OBSERVATION,
    RSSM,
    SCORED,
    State,
)
from torch import Tensor

FREE_NATS = 1.0
BALANCE = 0.2
"""Share of the divergence that pulls the posterior to the prior; the rest pulls the prior to the posterior."""
CHANGE_LIMIT = 3.0
"""Bound of changes of the log loss as targets: a diverged run is bad, not infinitely bad."""
CLIP = 1.0
"""Bound of the global gradient norm."""
_LOG_NORMALISER = math.lgamma((FREEDOM + 1) / 2) - math.lgamma(FREEDOM / 2) - 0.5 * math.log(FREEDOM * math.pi)


BUFFERS = {
    "feature_mean": lambda members: torch.zeros(FEATURES),
    "feature_scale": lambda members: torch.ones(FEATURES),
    "linear": lambda members: torch.zeros(members, LINEAR, LINEAR_HORIZON),
    "scale_shift": lambda members: torch.zeros(len(SCORED)),
    "confidence_map": lambda members: torch.tensor([0.0, 1.0]),
}
"""What is fitted or calibrated, not trained, by its first value. `confidence_map`: offset and slope of a logit."""


def new_rssm(members: int = 3, deterministic: int = 256, hidden: int = 96, seed: int = 0) -> RSSM:
    """
    An ensemble to train. What depends on leaps starts at exactly zero.

    `deterministic` are the units of the GRU; `hidden` is the width of the hidden layers; `seed` is for the weights.
    """
    generator, weights = torch.Generator().manual_seed(seed), {}

    def linear(name: str, inputs: int, outputs: int, gain: float = 1.0, bias: bool = True) -> None:
        """`gain` is the standard deviation of outputs for inputs of unit variance."""
        weights[f"{name}.weight"] = torch.randn(members, inputs, outputs, generator=generator) * (gain / inputs**0.5)
        if bias:
            weights[f"{name}.bias"] = torch.zeros(members, 1, outputs)

    stochastic = RSSM.GROUPS * RSSM.CLASSES
    latent = deterministic + stochastic
    linear("gates_action", len(ACTIONS), 3 * deterministic)
    linear("gates", latent, 3 * deterministic, bias=False)
    linear("encoder", OBSERVATION, hidden)
    linear("posterior_hidden", deterministic, hidden)
    linear("posterior_out", hidden, stochastic)
    linear("prior_hidden", deterministic, hidden)
    linear("prior_out", hidden, stochastic)
    linear("decoder_hidden", latent, hidden)
    linear("decoder_out", hidden, FEATURES)
    linear("loss_hidden", latent, hidden)
    linear("loss_out", hidden, 4, gain=0.1)
    linear("loss_context", hidden, hidden)
    linear("start_hidden", latent, hidden)
    linear("start_out", hidden, 3, gain=0.1)
    weights["gates_action.weight"][:, :2] = 0.0
    weights["loss_out.weight"][:, :, 1] = 0.0
    weights["loss_out.bias"][:, 0, 2:] = torch.tensor([-3.5, -4.5])
    weights["pair_scale"] = torch.tensor([-4.0, 0.5]).repeat(members, 1)
    return RSSM({**weights, **{name: first(members) for name, first in BUFFERS.items()}})


def parameters(model: RSSM) -> dict[str, Tensor]:
    """The weights that are trained, by name. From now on they get gradients."""
    return {name: weight.requires_grad_() for name, weight in model.weights.items() if name not in BUFFERS}


def student_t_nll(z: Tensor, log_scale: Tensor) -> Tensor:
    """Negative log density of `z * exp(log_scale)` under a Student-t of 5 degrees of freedom, in nats."""
    return 0.5 * (FREEDOM + 1) * torch.log1p(z.square() / FREEDOM) + log_scale - _LOG_NORMALISER


@dataclass(frozen=True)
class StretchBatch:
    """N sequences of W stretches, padded at the end."""

    observations: Tensor  # [N, W, 69]: features and what `LossHistory` knew
    actions: Tensor  # [N, W, 4]
    log_losses: Tensor  # [N, W]
    lengths: Tensor  # [N]: stretches that are no padding
    weights: Tensor  # [M, N]: weight of each sequence for each member of the ensemble
    starts: Tensor  # [N, S]: stretches from which the loss is imagined
    observed: int  # stretches to observe; later ones are only imagined
    horizon: int  # stretches to imagine, K

    def to(self, device: torch.device) -> StretchBatch:
        """The batch with all its tensors on this device."""
        return replace(self, **{n: value.to(device) for n, value in vars(self).items() if isinstance(value, Tensor)})


def history_of(losses: Sequence[float]) -> Tensor:
    """The output of [`LossHistory`] after each of these stretches, `[W, 5]`."""
    history = LossHistory()
    return torch.tensor([history.observe(log_loss(loss)) for loss in losses]).reshape(-1, len(HISTORY))


def sample(probabilities: Tensor, generator: torch.Generator) -> Tensor:
    """One-hot sample with the gradient of its probabilities (straight through), groups flattened."""
    flat = probabilities.detach().flatten(0, -2)
    index = torch.multinomial(flat, 1, generator=generator).view(probabilities.shape[:-1])
    hard = F.one_hot(index, probabilities.shape[-1]).to(probabilities.dtype)
    return (hard + probabilities - probabilities.detach()).flatten(-2)


def unroll(model: RSSM, observations: Tensor, actions: Tensor, generator: torch.Generator) -> tuple[State, Tensor]:
    """
    Observe sequences `[N, W, 69]` and `[N, W, 4]` from their beginning, with sampled states. Returns states
    `[M, N, W, ...]` and posterior probabilities `[M, N, W, groups, classes]`.
    """
    state, states, posteriors = model.initial(len(actions)), [], []
    embedded = model.embed(observations.flatten(0, 1)).unflatten(1, actions.shape[:2])
    for steer, seen in zip(model.steer(actions), embedded.unbind(2)):
        hidden = model.recur(state, steer)
        posteriors.append(model.posterior(hidden, seen))
        state = State(hidden, sample(posteriors[-1], generator))
        states.append(state)
    return State(*(torch.stack(part, 2) for part in zip(*states))), torch.stack(posteriors, 2)


def reconstruct(model: RSSM, states: State) -> Tensor:
    """Normalised features read off states `[M, N, ...]`: `[M, N, 64]`."""
    return model.project("decoder_out", F.silu(model.project("decoder_hidden", torch.cat(states, -1))))


def kl_loss(posterior: Tensor, prior: Tensor) -> Tensor:
    """
    Divergence of the posterior from the prior, both `[..., groups, classes]`, with balancing and free nats: `[...]` in
    nats, at least `FREE_NATS`, and without gradient where it would be less.
    """

    def divergence(p: Tensor, q: Tensor) -> Tensor:
        return (p * (p.log() - q.log())).sum((-1, -2)).clamp_min(FREE_NATS)

    return BALANCE * divergence(posterior, prior.detach()) + (1 - BALANCE) * divergence(posterior.detach(), prior)


def rssm_loss(model: RSSM, batch: StretchBatch, generator: torch.Generator) -> tuple[dict[str, Tensor], State]:
    """
    The training loss of the world model; every term is a weighted mean. `generator` samples the stochastic states.

    Returns the scalars `reconstruction` (squared error of normalised features), `kl`, `loss` (negative log-likelihood
    of the change of the log loss, imagined from every start stretch to every horizon) and their weighted sum `total`;
    and the observed states `[M, N, W, ...]`.
    """
    stretches = batch.observed
    observations, actions = batch.observations[:, :stretches], batch.actions[:, :stretches]
    states, posterior = unroll(model, observations, actions, generator)
    flat = State(*(part.flatten(1, 2) for part in states))
    real = (torch.arange(stretches, device=actions.device) < batch.lengths[:, None]).float() * batch.weights[..., None]
    target = model.normalised(observations[..., :FEATURES])
    error = (reconstruct(model, flat).unflatten(1, (-1, stretches)) - target).square().mean(-1)
    prior = model.prior(flat.deterministic).unflatten(1, (-1, stretches))
    losses = {
        "reconstruction": weighted_mean(error, real),
        "kl": weighted_mean(kl_loss(posterior, prior), real),
        "loss": _forecast_loss(model, batch, states),
    }
    return {**losses, "total": 0.5 * losses["reconstruction"] + 0.2 * losses["kl"] + losses["loss"]}, states


def weighted_mean(values: Tensor, weights: Tensor) -> Tensor:
    """Mean of `values` by `weights` of the same shape; 0 where all weights are 0."""
    return (values * weights).sum() / weights.sum().clamp_min(1e-6)


def futures(batch: StretchBatch) -> tuple[Tensor, Tensor, Tensor]:
    """Actions `[N * S, K, 4]`, changes of the log loss `[N * S, K]` and validity of both after every start stretch."""
    rows = torch.arange(len(batch.starts), device=batch.starts.device)[:, None, None]
    ahead = batch.starts[..., None] + torch.arange(1, batch.horizon + 1, device=batch.starts.device)
    valid = (ahead < batch.lengths[:, None, None]).float()
    index = ahead.clamp_max(batch.actions.shape[1] - 1)
    change = batch.log_losses[rows, index] - batch.log_losses[rows, batch.starts[..., None]]
    change = change.clamp(-CHANGE_LIMIT, CHANGE_LIMIT)
    return batch.actions[rows, index].flatten(0, 1), change.flatten(0, 1), valid.flatten(0, 1)


def _forecast_loss(model: RSSM, batch: StretchBatch, states: State) -> Tensor:
    actions, change, valid = futures(batch)
    count, stretches = batch.starts.shape[1], batch.starts.flatten()
    rows = torch.arange(len(batch.starts), device=actions.device).repeat_interleave(count)
    start = State(*(part[:, rows, stretches] for part in states))
    head = model.forecast(start, batch.observations[rows, stretches], actions)
    nll = student_t_nll((change - head.mean) * (-head.log_scale).exp(), head.log_scale)
    return weighted_mean(nll, valid * batch.weights.repeat_interleave(count, 1)[..., None])


def descend(model: RSSM, optimizer: torch.optim.Optimizer, total: Tensor) -> None:
    """One gradient step with clipping; left out if the gradient is not finite."""
    optimizer.zero_grad()
    total.backward()
    norm = torch.nn.utils.clip_grad_norm_(parameters(model).values(), CLIP)
    if math.isfinite(norm.item()):
        optimizer.step()
