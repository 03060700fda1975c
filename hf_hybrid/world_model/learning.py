"""
How the world model learns: its loss, and the replay of past stretches that it learns from during a run.

The loss is that of Dreamer (Hafner et al., 2023, arXiv 2301.04104) with forecasts of the loss in place of rewards. The
model observes a chunk of consecutive stretches with sampled states, and pays for three things:

- **reconstruction**: the features must be readable from the state, so that the state keeps what was observed;
- **divergence**: the prior and the posterior must agree, so that imagination, which only has the prior, ends up in
  states that observation would reach. Mostly the prior is pulled to the posterior (`BALANCE`), and the first nat is
  free (`FREE_NATS`): some surprise is noise, and a model that pays for it forgets how to observe;
- **forecast**: from a few stretches of the chunk the model imagines the next ones with the actions that were taken. It
  pays the negative log-likelihood of the losses that came, under a Student-t, which forgives outliers.

Each member of the ensemble weighs the chunks with random exponential weights of its own (a Bayesian bootstrap; Rubin,
1981). Where the data decide, all members learn the same; where they do not, members come to disagree.

During a run there are few stretches and each is seen once, so stretches are kept in a [`Replay`] together with the
latent state before them: a chunk may begin anywhere. `benchmarks/world_model/records.py` learns from recorded runs.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from hf_hybrid.world_model.rssm import FEATURES, RSSM, State

FREE_NATS = 1.0
BALANCE = 0.2
"""Share of the divergence that pulls the posterior to the prior; the rest pulls the prior to the posterior."""
CHANGE_LIMIT = 3.0
"""Bound of changes of the log loss as targets: a diverged run is bad, not infinitely bad."""
CLIP = 1.0
"""Bound of the global gradient norm."""
FREEDOM = 5
"""Degrees of freedom of every predictive Student-t: losses of stretches have heavy tails, but a variance."""
_LOG_NORMALISER = math.lgamma((FREEDOM + 1) / 2) - math.lgamma(FREEDOM / 2) - 0.5 * math.log(FREEDOM * math.pi)


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
    state: State | None = None  # before the first stretch; zeros by default

    def to(self, device: torch.device) -> StretchBatch:
        """The batch with all its tensors on this device."""
        moved = {name: value.to(device) for name, value in vars(self).items() if isinstance(value, Tensor)}
        state = None if self.state is None else State(*(part.to(device) for part in self.state))
        return replace(self, **moved, state=state)


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
    state = batch.state if batch.state is not None else model.initial(len(actions))
    states, posterior = model.unroll(state, observations, actions, generator)
    flat = State(*(part.flatten(1, 2) for part in states))
    real = (torch.arange(stretches, device=actions.device) < batch.lengths[:, None]).float() * batch.weights[..., None]
    target = model.normalised(observations[..., :FEATURES])
    error = (model.reconstruct(flat).unflatten(1, (-1, stretches)) - target).square().mean(-1)
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
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
    if math.isfinite(norm.item()):
        optimizer.step()


class Replay:
    """The last `capacity` stretches of a run, on the host, with the latent states of the model."""

    _COLUMNS = ("observations", "actions", "log_losses", "weights", "latents")

    def __init__(self, model: RSSM, capacity: int):
        self._split = (model.deterministic, model.stochastic)
        self.rows: deque[tuple[Tensor, ...]] = deque(maxlen=capacity)

    def append(self, before: State, observation: Tensor, action: Tensor, log_loss: float, weights: Tensor) -> None:
        """Keep a stretch, the state `[M, 1, ...]` before it, and the members' weights `[M]` of chunks from here."""
        latents = torch.cat([part[:, 0].cpu() for part in before], -1)
        self.rows.append((observation.cpu(), action.cpu(), torch.tensor(log_loss), weights, latents))

    def chunks(self, count: int, observed: int, starts: int, horizon: int, generator: torch.Generator) -> StretchBatch:
        """
        Draw `count` stretches of the run that begin anywhere: `observed` stretches (fewer than there are in the replay)
        to observe, `starts` of them to imagine `horizon` stretches from.
        """
        total = len(self.rows)
        begins = torch.randint(total - observed, (count,), generator=generator)
        index = (begins[:, None] + torch.arange(observed + horizon)).clamp_max(total - 1).tolist()
        stretches = [[torch.stack(column) for column in zip(*(self.rows[i][:3] for i in row))] for row in index]
        observations, actions, log_losses = map(torch.stack, zip(*stretches))
        weights, latents = (torch.stack([self.rows[row[0]][column] for row in index], 1) for column in (3, 4))
        lengths = (total - begins).clamp_max(observed + horizon)
        start = torch.randint(observed, (count, starts), generator=generator)
        state = State(*latents.split(self._split, -1))
        return StretchBatch(observations, actions, log_losses, lengths, weights, start, observed, horizon, state)

    def tensors(self) -> dict[str, Tensor]:
        """Everything, by column; empty before the first stretch."""
        return {name: torch.stack(column) for name, column in zip(self._COLUMNS, zip(*self.rows))}

    def load(self, tensors: dict[str, Tensor]) -> None:
        """Restore what [`tensors`] returned."""
        self.rows.clear()
        self.rows.extend(zip(*(tensors[name].clone() for name in self._COLUMNS if name in tensors)))
