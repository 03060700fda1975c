"""What the world model is trained on: reconstruction, divergence, imagined losses, differences between futures."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch

from hf_hybrid.world_model.forecasts import student_t_nll
from hf_hybrid.world_model.rssm import FEATURES, RSSM, State

Tensor = torch.Tensor

FREE_NATS = 1.0
BALANCE = 0.2
"""Share of the divergence that pulls the posterior to the prior; the rest pulls the prior to the posterior."""
CHANGE_LIMIT = 3.0
"""Changes of the log loss are bounded by this as targets: a diverged run is bad, not infinitely bad."""
CLIP = 1.0
"""Bound of the global gradient norm."""


@dataclass(frozen=True)
class Pairs:
    """
    P pairs of futures of the same state, each `K` windows long.

    Args:
        sequence (`Tensor`), window (`Tensor`): `[P]`, the start: which sequence of the batch, which window of it.
        first (`Tensor`), second (`Tensor`): `[P, K, 4]`, actions of both futures.
        difference (`Tensor`): `[P, K]`, log loss of the first minus that of the second.
        valid (`Tensor`): `[P, K]`, 1 where both were recorded.
    """

    sequence: Tensor
    window: Tensor
    first: Tensor
    second: Tensor
    difference: Tensor
    valid: Tensor


@dataclass(frozen=True)
class Batch:
    """
    N sequences of W windows, padded at the end.

    Args:
        observations (`Tensor`): `[N, W, 69]`: features and what `LossHistory` knew.
        actions (`Tensor`), log_losses (`Tensor`): `[N, W, 4]`, `[N, W]`.
        lengths (`Tensor`): `[N]`, windows that are no padding.
        weights (`Tensor`): `[M, N]`, how much each member of the ensemble learns from each sequence.
        starts (`Tensor`): `[N, S]`, windows from which the loss is imagined.
        observed (`int`): Windows to observe; those after are only imagined.
        horizon (`int`): Windows to imagine, `K`.
        state (`State`, *optional*): Before the first window; zeros by default.
        pairs (`Pairs`, *optional*): Branches.
    """

    observations: Tensor
    actions: Tensor
    log_losses: Tensor
    lengths: Tensor
    weights: Tensor
    starts: Tensor
    observed: int
    horizon: int
    state: State | None = None
    pairs: Pairs | None = None


def kl_loss(posterior: Tensor, prior: Tensor) -> Tensor:
    """
    Divergence of the posterior from the prior with balancing and free nats, in nats.

    Args:
        posterior (`Tensor`), prior (`Tensor`): Probabilities `[..., groups, classes]`.

    Returns:
        `Tensor`: `[...]`. Never below `FREE_NATS`, and without gradient where it would be.
    """

    def divergence(p: Tensor, q: Tensor) -> Tensor:
        return (p * (p.log() - q.log())).sum((-1, -2)).clamp_min(FREE_NATS)

    return BALANCE * divergence(posterior, prior.detach()) + (1 - BALANCE) * divergence(posterior.detach(), prior)


def rssm_loss(model: RSSM, batch: Batch, generator: torch.Generator) -> dict[str, Tensor]:
    """
    What the world model is trained on; every term is a weighted mean.

    Args:
        generator (`torch.Generator`): Samples the stochastic states that are observed.

    Returns:
        `dict[str, Tensor]`: Scalars: `reconstruction` (squared error of normalised features), `kl`, `loss` (negative
        log-likelihood of the change of the log loss, imagined through the prior from every start window to every
        horizon), `paired` (the same of differences between branches, 0 without any), and their sum `total`.
    """
    windows = batch.observed
    observations, actions = batch.observations[:, :windows], batch.actions[:, :windows]
    state = batch.state if batch.state is not None else model.initial(len(actions))
    states, posterior = model.unroll(state, observations, actions, generator)
    flat = State(*(part.flatten(1, 2) for part in states))
    real = (torch.arange(windows, device=actions.device) < batch.lengths[:, None]).float() * batch.weights[..., None]
    target = model.normalised(observations[..., :FEATURES])
    error = (model.reconstruct(flat).unflatten(1, (-1, windows)) - target).square().mean(-1)
    prior = model.prior(flat.deterministic).unflatten(1, (-1, windows))
    losses = {
        "reconstruction": _mean(error, real),
        "kl": _mean(kl_loss(posterior, prior), real),
        "loss": _forecast_loss(model, batch, states),
        "paired": paired_loss(model, batch, states) if batch.pairs is not None else error.new_zeros(()),
    }
    return {**losses, "total": 0.5 * losses["reconstruction"] + 0.2 * losses["kl"] + losses["loss"] + losses["paired"]}


def _mean(values: Tensor, weights: Tensor) -> Tensor:
    return (values * weights).sum() / weights.sum().clamp_min(1e-6)


def futures(batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
    """Actions `[N * S, K, 4]`, changes of the log loss `[N * S, K]` and validity of both after every start window."""
    rows = torch.arange(len(batch.starts), device=batch.starts.device)[:, None, None]
    ahead = batch.starts[..., None] + torch.arange(1, batch.horizon + 1, device=batch.starts.device)
    valid = (ahead < batch.lengths[:, None, None]).float()
    index = ahead.clamp_max(batch.actions.shape[1] - 1)
    change = batch.log_losses[rows, index] - batch.log_losses[rows, batch.starts[..., None]]
    change = change.clamp(-CHANGE_LIMIT, CHANGE_LIMIT)
    return batch.actions[rows, index].flatten(0, 1), change.flatten(0, 1), valid.flatten(0, 1)


def starts_of(batch: Batch, states: State, rows: Tensor, windows: Tensor) -> tuple[State, Tensor]:
    """States `[M, P, ...]` and observations `[P, 69]` at these windows of these sequences."""
    at = State(*(part[:, rows, windows] for part in states))
    return at, batch.observations[rows, windows]


def _forecast_loss(model: RSSM, batch: Batch, states: State) -> Tensor:
    actions, change, valid = futures(batch)
    count = batch.starts.shape[1]
    rows = torch.arange(len(batch.starts), device=actions.device).repeat_interleave(count)
    start, observation = starts_of(batch, states, rows, batch.starts.flatten())
    head = model.forecast(start, observation, actions)
    nll = student_t_nll((change - head.mean) * (-head.log_scale).exp(), head.log_scale)
    return _mean(nll, valid * batch.weights.repeat_interleave(count, 1)[..., None])


def paired_loss(model: RSSM, batch: Batch, states: State) -> Tensor:
    """
    Negative log-likelihood of the difference between two futures of one state, in nats: a robust regression.

    Args:
        states (`State`): `[M, N, W, ...]`, observed states of the batch's sequences.
    """
    pairs = batch.pairs
    difference = pair_difference(model, batch, states)
    log_scale = model.pair_log_scale(pairs.first, pairs.second)
    target = pairs.difference.clamp(-CHANGE_LIMIT, CHANGE_LIMIT)
    nll = student_t_nll((target - difference) * (-log_scale).exp(), log_scale)
    return _mean(nll, pairs.valid * batch.weights[:, pairs.sequence][..., None])


def pair_difference(model: RSSM, batch: Batch, states: State) -> Tensor:
    """Imagined log loss of the first future minus that of the second, `[M, P, K]`."""
    pairs = batch.pairs
    start, observation = starts_of(batch, states, pairs.sequence.repeat(2), pairs.window.repeat(2))
    first, second = model.forecast(start, observation, torch.cat((pairs.first, pairs.second))).mean.chunk(2, 1)
    return first - second


def to_device(part, device: torch.device):
    """A `Batch` or `Pairs` with its tensors on another device."""
    moved = {name: value.to(device) for name, value in vars(part).items() if isinstance(value, Tensor)}
    if getattr(part, "pairs", None) is not None:
        moved["pairs"] = to_device(part.pairs, device)
    return replace(part, **moved)


def update(model: RSSM, optimizer: torch.optim.Optimizer, batch: Batch, generator: torch.Generator) -> dict[str, float]:
    """One gradient step with clipping; returns the terms of [`rssm_loss`]. Steps that are not finite are left out."""
    with torch.enable_grad():
        losses = rssm_loss(model, batch, generator)
        optimizer.zero_grad()
        losses["total"].backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
    if math.isfinite(norm.item()):
        optimizer.step()
    return {name: value.item() for name, value in losses.items()}
