"""
Offline training and scoring of the world model, on recorded runs: how the start weights of the package are made.

Beside the loss of single runs (learning.py), records allow three things. Runs were
branched: from one state training continued in two ways, on the same data, so the model can learn *differences* between
futures, in which the noise that both share cancels. A linear part can be fitted to all stretches at once by a robust
ridge regression, before anything is trained. And runs that were left out tell how wide intervals and how high
confidences ought to have been.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from hf_hybrid.world_model.dynamics import FREEDOM, VARIANCE, log_loss, student_t_cdf
from hf_hybrid.world_model.rssm import FEATURES, LINEAR_HORIZON, RSSM, SCORED, State, interpolated, power_law
from safetensors.torch import save_file

from benchmarks.world_model.learning import (
    CHANGE_LIMIT,
    StretchBatch,
    descend,
    futures,
    history_of,
    parameters,
    rssm_loss,
    student_t_nll,
    weighted_mean,
)

Tensor = torch.Tensor
TOLERANCE, CONFIDENCE_HORIZON = 0.02, 5
"""The confidence is the probability that the loss rises at most by this share, so many stretches later."""
MIN_SCALE = 0.05
"""Smallest scale by which features are normalised."""


def platt_scaled(probability: float, offset: float, slope: float) -> float:
    """The probability with the logit `offset + slope * logit(probability)` (Platt, 1999), bounded away from 0 and 1."""
    inside = min(max(probability, 1e-6), 1 - 1e-6)
    return 1.0 / (1.0 + math.exp(-offset - slope * math.log(inside / (1 - inside))))


def starts_of(batch: StretchBatch, states: State, rows: Tensor, stretches: Tensor) -> tuple[State, Tensor]:
    """States `[M, P, ...]` and observations `[P, 69]` at these stretches of these sequences."""
    at = State(*(part[:, rows, stretches] for part in states))
    return at, batch.observations[rows, stretches]


@functools.lru_cache(maxsize=64)
def student_t_quantile(probability: float) -> float:
    """
    Inverse of [`student_t_cdf`], by bisection.

    Raises:
        ValueError: If the probability is not between 0 and 1.
    """
    if not 0.0 < probability < 1.0:
        raise ValueError(f"`probability` must be between 0 and 1, both excluded, got {probability}.")
    low, high = -1e3, 1e3
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if student_t_cdf(middle) < probability else (low, middle)
    return (low + high) / 2


@dataclass(frozen=True)
class Continuation:
    """Stretches after a branching: actions `[W, 4]`, mean losses `[W]`, and features `[W, 64]` where they are known."""

    actions: Tensor
    losses: Tensor
    features: Tensor | None = None


@dataclass(frozen=True)
class Branch:
    """Two futures, `base` and `other`, of the state after the first `start` stretches of a run."""

    start: int
    base: Continuation
    other: Continuation


@dataclass(frozen=True)
class Record:
    """A run of W stretches: features `[W, 64]`, actions `[W, 4]`, mean losses `[W]`; arrays or tensors."""

    features: Tensor
    actions: Tensor
    losses: Tensor
    branches: Sequence[Branch] = ()


@dataclass(frozen=True)
class Pairs:
    """
    P pairs of futures of the same state, each `K` stretches long.

    Args:
        sequence (`Tensor`), stretch (`Tensor`): `[P]`, where they start: the sequence of the batch, and its stretch.
        first (`Tensor`), second (`Tensor`): `[P, K, 4]`, actions of both futures.
        difference (`Tensor`): `[P, K]`, log loss of the first minus that of the second.
        valid (`Tensor`): `[P, K]`, 1 where both were recorded.
    """

    sequence: Tensor
    stretch: Tensor
    first: Tensor
    second: Tensor
    difference: Tensor
    valid: Tensor


@dataclass(frozen=True)
class PairedBatch(StretchBatch):
    """A batch with the branches of its sequences, if they have any."""

    pairs: Pairs | None = None

    def to(self, device: torch.device) -> PairedBatch:
        pairs = self.pairs and Pairs(*(tensor.to(device) for tensor in vars(self.pairs).values()))
        return replace(super().to(device), pairs=pairs)


def paired_rssm_loss(model: RSSM, batch: PairedBatch, generator: torch.Generator) -> dict[str, Tensor]:
    """The terms of [`rssm_loss`], with `paired`, the loss of differences between branches, as part of the total."""
    losses, states = rssm_loss(model, batch, generator)
    paired = losses["loss"].new_zeros(()) if batch.pairs is None else paired_loss(model, batch, states)
    return {**losses, "paired": paired, "total": losses["total"] + paired}


def paired_loss(model: RSSM, batch: PairedBatch, states: State) -> Tensor:
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
    return weighted_mean(nll, pairs.valid * batch.weights[:, pairs.sequence][..., None])


def pair_difference(model: RSSM, batch: PairedBatch, states: State) -> Tensor:
    """Imagined log loss of the first future minus that of the second, `[M, P, K]`."""
    pairs = batch.pairs
    start, observation = starts_of(batch, states, pairs.sequence.repeat(2), pairs.stretch.repeat(2))
    first, second = model.forecast(start, observation, torch.cat((pairs.first, pairs.second))).mean.chunk(2, 1)
    return first - second


def save_weights(model: RSSM, path: str | Path, dtype: torch.dtype = torch.float32) -> None:
    """Write an ensemble as safetensors in this `dtype`, as start weights that `RSSM.load` reads."""
    tensors = {name: tensor.detach().to("cpu", dtype).contiguous() for name, tensor in model.weights.items()}
    save_file(tensors, str(path))


@dataclass(frozen=True)
class _Sequence:
    """A record as tensors; `pairs` are (stretch, actions, actions, difference)."""

    observations: Tensor
    actions: Tensor
    log_losses: Tensor
    pairs: list[tuple[int, Tensor, Tensor, Tensor]]


def _tensor(values) -> Tensor:
    return torch.as_tensor(values, dtype=torch.float32)


def _log_losses(losses) -> Tensor:
    return torch.tensor([log_loss(loss) for loss in losses])


def _sequence(features, actions, losses, branches: Sequence[Branch]) -> _Sequence:
    pairs = []
    for branch in branches:
        shared = min(len(branch.base.losses), len(branch.other.losses))
        if branch.start > 0 and shared > 0:
            difference = _log_losses(branch.other.losses[:shared]) - _log_losses(branch.base.losses[:shared])
            sides = (_tensor(side.actions[:shared]) for side in (branch.other, branch.base))
            pairs.append((branch.start - 1, *sides, difference))
    observations = torch.cat((_tensor(features), history_of(losses)), -1)
    return _Sequence(observations, _tensor(actions), _log_losses(losses), pairs)


def sequences_of(record: Record, *, continuations: bool = True) -> list[_Sequence]:
    """A run as a sequence to learn from, and its branches with known features as further ones."""
    found = [_sequence(record.features, record.actions, record.losses, record.branches)]
    for branch in record.branches if continuations else ():
        if branch.other.features is not None and len(branch.other.losses):
            parts = (
                torch.cat((_tensor(whole[: branch.start]), _tensor(rest)))
                for whole, rest in (
                    (record.features, branch.other.features),
                    (record.actions, branch.other.actions),
                    (record.losses, branch.other.losses),
                )
            )
            found.append(_sequence(*parts, ()))
    return [sequence for sequence in found if len(sequence.log_losses) > 1]


def make_batch(sequences: Sequence[_Sequence], weights: Tensor, horizon: int, starts: Tensor) -> PairedBatch:
    """
    Pad sequences to a batch.

    Args:
        weights (`Tensor`): `[M, N]`.
        horizon (`int`): Stretches to imagine.
        starts (`Tensor`): `[N, S]` in [0, 1]: start stretches as shares of each sequence.
    """
    lengths = torch.tensor([len(s.log_losses) for s in sequences])
    stretches = int(lengths.max())
    padded = {
        name: torch.stack([_pad(getattr(s, name), stretches) for s in sequences])
        for name in ("observations", "actions", "log_losses")
    }
    flat = [(row, *pair) for row, s in enumerate(sequences) for pair in s.pairs]
    pairs = None
    if flat:
        cut = [[_pad(values[:horizon], horizon) for values in pair[2:]] for pair in flat]
        first, second, difference = (torch.stack(column) for column in zip(*cut))
        known = torch.tensor([len(pair[4]) for pair in flat])
        valid = (torch.arange(horizon) < known[:, None]).float()
        sequence, stretch = (torch.tensor([pair[i] for pair in flat]) for i in (0, 1))
        pairs = Pairs(sequence, stretch, first, second, difference, valid)
    starts = (starts * (lengths[:, None] - 1)).long()
    return PairedBatch(
        **padded, lengths=lengths, weights=weights, starts=starts, observed=stretches, horizon=horizon, pairs=pairs
    )


def _pad(values: Tensor, length: int) -> Tensor:
    return F.pad(values, (0, 0) * (values.ndim - 1) + (0, length - len(values)))


def normalise_features(model: RSSM, features: Tensor) -> None:
    """Set the model's normalisation from features `[..., 64]`."""
    flat = features.reshape(-1, FEATURES)
    model.weights["feature_mean"].copy_(flat.mean(0))
    model.weights["feature_scale"].copy_(flat.std(0, unbiased=False).clamp_min(MIN_SCALE))


@torch.no_grad()
def fit_linear(model: RSSM, sequences: Sequence[_Sequence], weights: Tensor, penalty: float = 0.01) -> None:
    """
    Set the linear part of a model: for every member and stretch ahead a ridge regression of what half the power law,
    with which the rest of the model begins, leaves to explain; by reweighted least squares, as errors are Student-t.

    Args:
        weights (`Tensor`): `[M, N]`, of the sequences for each member.
        penalty (`float`): Of squared weights of standardised inputs, per unit of weight.
    """
    batch = make_batch(sequences, weights, LINEAR_HORIZON, torch.zeros(len(sequences), 1))
    starts = torch.arange(batch.observed - 1).expand(len(sequences), -1)
    batch = replace(batch, starts=starts, pairs=None).to(model.weights["feature_mean"].device)
    actions, change, valid = futures(batch)
    shared, own = model.linear_inputs(batch.observations[:, :-1].flatten(0, 1), actions)
    weights = batch.weights.repeat_interleave(starts.shape[1], 1)
    for k in range(LINEAR_HORIZON):
        known = valid[:, k] > 0
        if not known.any():
            continue
        inputs = torch.cat((shared[known], own[known, k]), -1)
        target = change[known, k] - 0.5 * own[known, k, -1]
        for member in range(model.members):
            model.weights["linear"][member, :, k] = _robust_ridge(inputs, target, weights[member, known], penalty)


def _robust_ridge(inputs: Tensor, target: Tensor, weights: Tensor, penalty: float, rounds: int = 6) -> Tensor:
    mean = (inputs * weights[:, None]).sum(0) / weights.sum()
    variance = ((inputs - mean).square() * weights[:, None]).sum(0) / weights.sum()
    # Inputs that never vary, like the constant, are no penalty's business; a little keeps the system regular.
    ridge = torch.diag(penalty * variance + 1e-6) * weights.sum()
    trusted = weights
    for _ in range(rounds):
        weighted = inputs * trusted[:, None]
        solution = torch.linalg.solve(weighted.T @ inputs + ridge, weighted.T @ target)
        squares = (target - inputs @ solution).square()
        scale = (trusted * squares).sum() / weights.sum()
        trusted = weights * (FREEDOM + 1) / (FREEDOM + squares / scale.clamp_min(1e-12))
    return solution


def train_on_records(
    model: RSSM,
    records: Sequence[Record],
    *,
    validation: Sequence[Record] = (),
    epochs: int = 20,
    batch_size: int = 16,
    starts: int = 6,
    horizon: int = 20,
    learning_rate: float = 1e-3,
    weight_decay: float = 1e-2,
    corruption: float = 0.0,
    seed: int = 0,
    progress: Callable[[dict[str, float]], None] | None = None,
) -> None:
    """
    Train an ensemble offline, in place. Each member weighs the runs differently (a Bayesian bootstrap: exponential
    weights), so that members disagree where the runs do not decide.

    Args:
        records (`Sequence[Record]`): Runs; anything with the same attributes.
        validation (`Sequence[Record]`): Other runs: the epoch that forecasts them best is kept, or the last if there
            are none, and scales and confidence are calibrated on them.
        epochs (`int`), batch_size (`int`): Passes over the sequences, sequences per update.
        starts (`int`), horizon (`int`): Stretches per sequence to imagine from, and how far.
        learning_rate (`float`), weight_decay (`float`): Of AdamW, the rate falling to 0 as a cosine.
        corruption (`float`), seed (`int`): Share of the features that means replace in a pass; of all that is random.
        progress (`Callable`, *optional*): Called after every epoch with `epoch`, the means of all terms of
            [`paired_rssm_loss`], and `loss` and `paired` on the other runs as `validation` and `validation_paired`.

    Raises:
        ValueError: If no record has two stretches.
    """
    device, generator = model.weights["feature_mean"].device, torch.Generator().manual_seed(seed)
    sampler = torch.Generator(device).manual_seed(seed)
    sequences, weights = _weighted(model.members, records, generator)
    normalise_features(model, torch.cat([s.observations[:, :FEATURES] for s in sequences]))
    fit_linear(model, sequences, weights)
    trained = list(parameters(model).values())
    optimizer = torch.optim.AdamW(trained, lr=learning_rate, weight_decay=weight_decay)
    updates = max(epochs * math.ceil(len(sequences) / batch_size), 1)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, updates)
    best: tuple[float, dict[str, Tensor]] = (math.inf, {})
    for epoch in range(1, epochs + 1):
        totals: dict[str, float] = {}
        for chosen in torch.randperm(len(sequences), generator=generator).split(batch_size):
            at = torch.rand(len(chosen), starts, generator=generator)
            batch = make_batch([sequences[i] for i in chosen.tolist()], weights[:, chosen], horizon, at)
            _corrupt(model, batch, corruption, generator)
            losses = paired_rssm_loss(model, batch.to(device), sampler)
            descend(model, optimizer, losses["total"])
            for name, value in losses.items():
                totals[name] = totals.get(name, 0.0) + value.item() * len(chosen) / len(sequences)
            schedule.step()
        if validation:
            totals.update(_validate(model, validation, horizon, seed))
            best = min(best, _snapshot(model, totals), key=lambda found: found[0])
        if progress:
            progress({"epoch": epoch, **totals})
    for weight in trained:
        weight.requires_grad_(False)
    if best[1]:
        model.weights.update(best[1])
        calibrate(model, [forecast_errors(model, validation)])


def _snapshot(model: RSSM, totals: dict[str, float]) -> tuple[float, dict[str, Tensor]]:
    score = totals["validation"] + totals["validation_paired"]
    return score, {name: value.detach().clone() for name, value in model.weights.items()}


def _corrupt(model: RSSM, batch: PairedBatch, share: float, generator: torch.Generator) -> None:
    if share:
        gone = torch.rand(len(batch.actions), 1, FEATURES, generator=generator) < share
        features = batch.observations[..., :FEATURES]
        features.copy_(torch.where(gone, model.weights["feature_mean"].cpu(), features))


@torch.no_grad()
def _validate(model: RSSM, records: Sequence[Record], horizon: int, seed: int) -> dict[str, float]:
    sequences = [sequence for record in records for sequence in sequences_of(record, continuations=False)]
    at = torch.linspace(0, 1, 14)[:-1].repeat(len(sequences), 1)
    batch = make_batch(sequences, torch.ones(model.members, len(sequences)), horizon, at)
    device = model.weights["feature_mean"].device
    losses = paired_rssm_loss(model, batch.to(device), torch.Generator(device).manual_seed(seed))
    return {"validation": losses["loss"].item(), "validation_paired": losses["paired"].item()}


@torch.no_grad()
def calibrate(model: RSSM, tables: Sequence[dict[str, Tensor]]) -> None:
    """
    Set the scale of combined forecasts, and then the map of the confidence, to what was right on runs not learned.

    Args:
        tables (`Sequence[dict]`): As from [`forecast_errors`], of this ensemble or several of its kind.
    """
    table = {name: torch.cat([each[name] for each in tables]) for name in tables[0]}
    for index, k in enumerate(SCORED):
        known = table["valid"][:, k - 1] > 0
        if known.any():
            columns = (table[name][known, k - 1] for name in ("error", "log_scale", "spread"))
            model.weights["scale_shift"][index] = _covering_shift(*columns)
    column = CONFIDENCE_HORIZON - 1
    known = table["valid"][:, column] > 0
    if known.any():
        mean, error, log_scale, spread = (
            table[name][known, column] for name in ("mean", "error", "log_scale", "spread")
        )
        scale = _combined(log_scale + interpolated(model.weights["scale_shift"], CONFIDENCE_HORIZON)[-1], spread)
        z = (math.log1p(TOLERANCE) - mean) / scale
        probability = torch.tensor([student_t_cdf(value) for value in z.tolist()], device=z.device)
        happened = (mean + error <= math.log1p(TOLERANCE)).float()
        model.weights["confidence_map"].copy_(_platt(probability.clamp(1e-6, 1 - 1e-6).logit(), happened))


@torch.no_grad()
def forecast_errors(model: RSSM, records: Sequence[Record]) -> dict[str, Tensor]:
    """Forecasts from every stretch of some runs and their errors, `[stretches, 20]`, without calibrated scales."""
    table = _forecasts(model, records, max(SCORED))
    table["log_scale"] = table["log_scale"] - interpolated(model.weights["scale_shift"], max(SCORED))
    return {name: table[name] for name in ("mean", "error", "log_scale", "spread", "valid")}


def _combined(log_scale: Tensor, spread: Tensor) -> Tensor:
    """Scale of an ensemble, as `DynamicsModel` combines those of its members with their disagreement."""
    return ((2 * log_scale).exp() + spread.square() / VARIANCE).sqrt()


def _covering_shift(error: Tensor, log_scale: Tensor, spread: Tensor) -> Tensor:
    """What, added to log scales, makes central intervals hold the share of errors that they say."""
    tried = torch.linspace(-1.0, 1.5, 126, device=error.device)
    sizes = error.abs()[:, None] / _combined(log_scale[:, None] + tried, spread[:, None])
    gaps = torch.zeros_like(tried)
    for level in range(5, 100, 5):
        gaps += ((sizes <= student_t_quantile(0.5 + level / 200)).float().mean(0) - level / 100).abs()
    return tried[gaps.argmin()]


def _platt(logits: Tensor, happened: Tensor, rounds: int = 25, prior: float = 5.0) -> Tensor:
    """Logistic regression on a logit, `[offset, slope]`, by Newton's method; pulled to the logit itself by `prior`."""
    inputs, identity = torch.stack((torch.ones_like(logits), logits), 1), logits.new_tensor([0.0, 1.0])
    found = identity.clone()
    for _ in range(rounds):
        expected = (inputs @ found).sigmoid()
        curvature = (inputs * (expected * (1 - expected))[:, None]).T @ inputs + prior * torch.eye(2).to(logits)
        found = found + torch.linalg.solve(curvature, inputs.T @ (happened - expected) - prior * (found - identity))
    return found


def _weighted(members: int, records: Sequence[Record], generator: torch.Generator) -> tuple[list[_Sequence], Tensor]:
    """All sequences, and the weight of each for each member: that of its run."""
    sequences, weights = [], []
    for record in records:
        found = sequences_of(record)
        sequences += found
        weights += [-torch.rand(members, generator=generator).clamp_min(1e-6).log()] * len(found)
    if not sequences:
        raise ValueError(
            "`records` holds no run of two windows or more: there is nothing to learn from. Record longer ones."
        )
    return sequences, torch.stack(weights, 1)


@torch.no_grad()
def score_records(model: RSSM, records: Sequence[Record], *, horizon: int = 20) -> dict[str, float]:
    """
    How well an ensemble forecasts runs that it has not seen, beside its baselines.

    Returns:
        `dict[str, float]`: For k of 1, 5 and 20 stretches ahead (up to `horizon`), over all start stretches: mean
        absolute error in log loss of the model (`error_k`), of persistence (`persistence_k`) and of the power law
        (`law_k`); mean negative log-likelihood in nats (`nll_k`, `persistence_nll_k`, `law_nll_k`, the baselines with
        the best constant scale in hindsight); and for branches their number (`pairs`), the share of differences whose
        sign is right, weighted with their size (`sign_k`), and their correlation with the realised ones
        (`correlation_k`).
    """
    table = _forecasts(model, records, horizon)
    scores = {"pairs": float(len(table["pair"])) if "pair" in table else 0.0}
    for k in (k for k in SCORED if k <= horizon):
        scores.update(_scores(table, k))
    return scores


def _forecasts(model: RSSM, records: Sequence[Record], horizon: int) -> dict[str, Tensor]:
    """Forecasts from all stretches of all runs, `[stretches, K]` each, and of all branches, `[branches, K]`."""
    columns: dict[str, list[Tensor]] = {}
    for batch in _whole_runs(model, records, horizon):
        start, observation, states = _observed(model, batch)
        actions, change, valid = futures(batch)
        head = model.forecast(start, observation, actions)
        nll = student_t_nll((change - head.mean) * (-head.log_scale).exp(), head.log_scale)
        back, increments = power_law(observation[:, FEATURES:], horizon)
        parts = {
            "mean": head.mean.mean(0),
            "error": change - head.mean.mean(0),
            "spread": head.mean.std(0, unbiased=False),
            "log_scale": 0.5 * (2 * head.log_scale).exp().mean(0).log(),
            "nll": -(torch.logsumexp(-nll, 0) - math.log(model.members)),
            "law": back + increments.cumsum(-1),
            "change": change,
            "valid": valid,
        }
        if batch.pairs is not None:
            parts["pair_mean"] = pair_difference(model, batch, states).mean(0)
            parts["pair"], parts["pair_valid"] = batch.pairs.difference, batch.pairs.valid
        for name, values in parts.items():
            columns.setdefault(name, []).append(values)
    return {name: torch.cat(values) for name, values in columns.items()}


def _whole_runs(model: RSSM, records: Sequence[Record], horizon: int) -> Iterator[PairedBatch]:
    """Each run by itself, every stretch but the last a start stretch."""
    for record in records:
        for sequence in sequences_of(record, continuations=False):
            starts = torch.arange(len(sequence.log_losses) - 1)[None]
            batch = make_batch([sequence], torch.ones(model.members, 1), horizon, torch.zeros(1, 1))
            yield replace(batch, starts=starts).to(model.weights["feature_mean"].device)


def _observed(model: RSSM, batch: PairedBatch) -> tuple[State, Tensor, State]:
    """Start states and observations at the start stretches of a single run, and its states; all without sampling."""
    state, states = model.initial(1), []
    for stretch in range(batch.observed):
        state = model.observe(state, batch.observations[:, stretch], batch.actions[:, stretch])
        states.append(state)
    stacked = State(*(torch.stack(parts, 2) for parts in zip(*states)))
    start, observation = starts_of(batch, stacked, torch.zeros_like(batch.starts[0]), batch.starts[0])
    return start, observation, stacked


def _scores(table: dict[str, Tensor], k: int) -> dict[str, float]:
    found: dict[str, float] = {}
    known = table["valid"][:, k - 1] > 0
    column = {name: table[name][:, k - 1][known] for name in ("mean", "nll", "law", "change")}
    if known.any():
        found[f"nll_{k}"] = column["nll"].mean().item()
        errors = {"": column["change"] - column["mean"], "persistence": column["change"]}
        errors["law"] = column["change"] - column["law"]
        for name, error in errors.items():
            found[f"{name or 'error'}_{k}"] = error.abs().mean().item()
            if name:
                scales = error.abs().mean().clamp_min(1e-6).log() + torch.linspace(-2, 1, 61, device=error.device)
                tried = student_t_nll(error[:, None] * (-scales).exp(), scales.expand(len(error), -1))
                found[f"{name}_nll_{k}"] = tried.mean(0).min().item()
    if "pair" in table:
        known = table["pair_valid"][:, k - 1] > 0
        imagined, realised = table["pair_mean"][:, k - 1][known], table["pair"][:, k - 1][known]
        if known.sum() > 2:
            right = (imagined.sign() == realised.sign()).float()
            found[f"sign_{k}"] = ((right * realised.abs()).sum() / realised.abs().sum().clamp_min(1e-9)).item()
            found[f"correlation_{k}"] = torch.corrcoef(torch.stack((imagined, realised)))[0, 1].item()
    return found
