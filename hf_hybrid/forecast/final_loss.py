"""
Forecasts of the final training and held-out loss of a run as distributions, from the losses logged so far.

The forecast is a mixture of two forecasters in equal parts. Where they disagree it is wide, and each makes up for what
the other does not know.

**Laws.** The learning-rate schedule is known in advance, and most of what a run still gains follows from it. The loss
falls as a power of the *sum* of the learning rates so far, S, and it stands higher the higher the rate is now, because
large steps keep the weights from settling (the annealing law, Tissue et al., 2024, arXiv 2408.11029; the multi-power
law, Luo et al., 2025, arXiv 2503.12811):

    loss(t) = floor + fall * (S(t) + offset) ** -exponent + noise_floor * rate(t) / peak rate

Early in a run these numbers are not determined: many curves fit what came, and they end far apart. So no single curve
is fitted. For each of a grid of shapes (`exponent`, `offset`) the law is linear in the other three numbers; with a
Gaussian prior on them the posterior is exact, and so is the evidence, the probability of the losses that came. The
forecast is the mixture of the shapes by their evidence, sharpened by a power (`Prior.temper`): two to four of the 20
shapes have a weight that counts. No run follows the law exactly. Two kinds of error remain: the noise of single
batches, which the losses themselves tell, and a drift of the curve, a random walk in log S. The drift lets the curve
forget its beginning, and widens the interval with the distance to the end.

**Past curves.** Runs with a similar curve after the same share of their steps show where such runs end. A Gaussian
process maps nine numbers (the shape of the curve so far, its slope, the rest of the schedule, the noise) to the
logarithm of the final loss over the present one. Learning-curve networks learn this from many curves (LC-PFN,
Adriaensen et al., 2023, arXiv 2310.20447); the Gaussian process uses 259. They are in `past_curves.npz`, cut after
several shares of the run; between two of these the forecast blends both.

**Held-out loss.** An evaluation gives the ratio of the held-out loss to the present training loss. If this ratio stays,
the forecast of the training loss times the ratio is a forecast of the held-out loss. But the ratio changes when a run
memorises its rows. So another Gaussian process maps the same nine numbers and the ratio to the logarithm of the final
held-out loss over the present one. The forecast is the mixture of both in equal parts.

The prior of the laws and the past curves come from recorded runs of tiny models (benchmarks/world_model/forecast.md).
`python -m benchmarks.world_model.verdict` scores the forecast on new ones.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import numpy as np

FEWEST = 5
"""Finite losses before the first forecast."""
MOST_WINDOWS, POINTS = 48, 4
"""Logged losses are averaged into at most so many windows; points of a window at which the law is averaged."""
FINAL_SHARE, FINAL_STEPS = 0.05, 5
"""The final loss is the mean over this last share of the run, and at least over so many steps."""
EXPONENTS = np.array([0.05, 0.3, 0.6, 1.0, 1.6])
OFFSETS = np.array([0.003, 0.02, 0.1, 0.4])
"""As shares of the summed rate of the whole run."""
PAST_CURVES = Path(__file__).parent / "past_curves.npz"
Parts = list[np.ndarray]
"""Weights, means and deviations of a mixture of Gaussians."""


@dataclass(frozen=True)
class Prior:
    """What past runs say of a run before it begins. Shares are of the loss level so far; spreads are deviations."""

    fall: float = 0.267  # share by which the loss falls from start to end of the law
    fall_spread: float = 0.323
    annealing: float = 0.0728  # share by which it falls as the rate goes from its peak to zero
    annealing_spread: float = 0.0119
    drift: float = 0.0749  # deviation of the drift per e-fold of the summed rate, as a share
    drift_from: float = 0.0139  # share of the summed rate below which the drift is linear, not logarithmic
    noise: float = 0.705  # factor on the noise that is seen between neighbouring losses
    temper: float = 13.2  # power to which the evidence is raised; below 1 the shapes stay more equal


PRIOR = Prior()


@dataclass(frozen=True)
class FinalLoss:
    """The loss at the end of a run as a distribution, a mixture of Gaussians."""

    median: float
    low: float  # this and `high` are the ends of the 90 % interval
    high: float
    weights: tuple[float, ...]
    means: tuple[float, ...]
    deviations: tuple[float, ...]

    def probability_below(self, loss: float) -> float:
        """Probability that the run ends with a loss below `loss`."""
        parts = zip(self.weights, self.means, self.deviations)
        return sum(w * 0.5 * math.erfc((m - loss) / (d * math.sqrt(2.0))) for w, m, d in parts)


def final_steps(max_steps: int) -> int:
    """Number of last steps whose mean loss counts as the final loss of a run."""
    return min(max(round(FINAL_SHARE * max_steps), FINAL_STEPS), max_steps)


def forecast_final_loss(
    steps: Sequence[int],
    losses: Sequence[float],
    learning_rates: Sequence[float] | np.ndarray,
    max_steps: int,
    held_out: float | None = None,
) -> FinalLoss | None:
    """
    Forecast the mean training loss of the last steps of a run (`final_steps`), or the held-out loss after its last.

    Args:
        steps (`Sequence[int]`): Optimizer steps at which `losses` were logged, from 1, ascending.
        losses (`Sequence[float]`): Mean training loss since the logged step before, as `Trainer` logs it.
        learning_rates (`Sequence[float]` or `np.ndarray`): Rate of each of the steps 1 to `max_steps`, in any unit.
        max_steps (`int`): Steps of the run.
        held_out (`float`, *optional*): Held-out loss after the last of `steps`, of which the forecast is then.

    Returns:
        `FinalLoss` or `None`: `None` with fewer than `FEWEST` finite losses, if the last loss is not finite, and of the
        held-out loss if any loss is not positive.

    Raises:
        ValueError: If lengths differ, steps are out of order or beyond `max_steps`.
    """
    seen = observed(steps, losses, learning_rates, max_steps)
    if seen is None:
        return None
    look, parts = looks(seen), training_parts(seen)
    if held_out is not None:
        if look is None or not 0 < held_out < math.inf:
            return None
        ratio = held_out / seen.present
        past = forecast_of_past_curves("held_out", seen.share, np.append(look, math.log(ratio)), held_out)
        weights, means, deviations = parts
        parts = in_equal_parts([weights, ratio * means, ratio * deviations], past)
    return mixture(final_steps_counted(seen, parts, held_out), positive=look is not None)


def training_parts(seen: Observed) -> Parts:
    """The forecast of the final training loss from what it has been so far: laws and, where they apply, past curves."""
    laws, look = forecast_of_laws(seen, PRIOR), looks(seen)
    if look is None:
        return laws
    return in_equal_parts(laws, forecast_of_past_curves("training", seen.share, look, seen.level))


def in_equal_parts(one: Parts, other: Parts) -> Parts:
    """Mix two forecasts; the weights of `other` sum to 1."""
    return [np.concatenate(parts) for parts in zip((one[0] / one[0].sum(), *one[1:]), (other[0], *other[1:]))]


def final_steps_counted(seen: Observed, parts: Parts, held_out: float | None = None) -> Parts:
    """As far as the final steps are over, replace the forecast by what came: their mean loss or `held_out`."""
    max_steps, last = len(seen.rates), final_steps(len(seen.rates))
    inside = np.clip(seen.ends - np.maximum(seen.begins, max_steps - last), 0, None)
    if not inside.any():
        return parts
    done = min(inside.sum() / last, 1.0)
    came = float((inside * seen.losses).sum() / inside.sum()) if held_out is None else held_out
    weights, means, deviations = parts
    return [weights, (1 - done) * means + done * came, (1 - done) * deviations]


@dataclass(frozen=True)
class Observed:
    """What a forecast is made from: a run of `max_steps` steps and its finite losses."""

    begins: np.ndarray  # [logs]
    ends: np.ndarray  # [logs]; a loss is the mean of the steps `begins + 1` to `ends`
    losses: np.ndarray  # [logs]
    rates: np.ndarray  # [max_steps], over their peak; all 1 if the schedule is zero throughout

    @property
    def level(self) -> float:
        """Mean of the last fifth of the logged losses."""
        return float(self.losses[-max(1, len(self.losses) // 5) :].mean())

    @property
    def present(self) -> float:
        """Mean of the last tenth of the logged losses: less than `level` while the loss falls, and noisier."""
        return float(self.losses[-max(1, len(self.losses) // 10) :].mean())

    @property
    def share(self) -> float:
        """Share of the steps that is done."""
        return self.ends[-1] / len(self.rates)


def observed(steps, losses, learning_rates, max_steps: int) -> Observed | None:
    """Check the arguments of [`forecast_final_loss`]; `None` where there is too little to say."""
    ends, seen = np.asarray(steps, dtype=np.int64), np.asarray(losses, dtype=np.float64)
    rates = np.asarray(learning_rates, dtype=np.float64)
    if len(ends) != len(seen):
        raise ValueError(f"`steps` has {len(ends)} entries and `losses` {len(seen)}, but each loss has one step.")
    if len(rates) != max_steps:
        raise ValueError(f"`learning_rates` has {len(rates)} entries, but needs one for each of {max_steps} steps.")
    if len(ends) and (ends[0] < 1 or ends[-1] > max_steps or (np.diff(ends) <= 0).any()):
        raise ValueError(f"`steps` must ascend from 1 to at most `max_steps`={max_steps}.")
    finite = np.isfinite(seen)
    if finite.sum() < FEWEST or not finite[-1]:
        return None
    begins, rates = np.concatenate([[0], ends[:-1]]), np.maximum(rates, 0.0)
    rates = rates / rates.max() if rates.max() > 0 else np.ones(max_steps)
    return Observed(begins[finite], ends[finite], seen[finite], rates)


def _windows(begins: np.ndarray, ends: np.ndarray, losses: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Average neighbouring losses, so that at most `MOST_WINDOWS` are left."""
    if len(ends) <= MOST_WINDOWS:
        return begins, ends, losses
    edges = np.linspace(0, len(ends), MOST_WINDOWS + 1).round().astype(int)
    counts = (ends - begins).astype(np.float64)
    sums, totals = np.add.reduceat(losses * counts, edges[:-1]), np.add.reduceat(counts, edges[:-1])
    return begins[edges[:-1]], ends[edges[1:] - 1], sums / totals


def _noise_per_step(losses: np.ndarray, counts: np.ndarray) -> float:
    """Variance of the loss of one step: a median over differences of neighbouring windows, which spikes do not move."""
    difference = np.diff(losses, 2) if len(losses) > 6 else np.diff(losses)
    parts = 1.0 / counts
    variance = parts[:-2] + 4 * parts[1:-1] + parts[2:] if len(losses) > 6 else parts[:-1] + parts[1:]
    return (1.4826 * float(np.median(np.abs(difference) / np.sqrt(variance)))) ** 2


def forecast_of_laws(seen: Observed, prior: Prior) -> Parts:
    """Weights, means and deviations of a mixture over the shapes of the law, `[shapes]` each."""
    begins, ends, losses = _windows(seen.begins, seen.ends, seen.losses)
    rates, max_steps, last = seen.rates, len(seen.rates), final_steps(len(seen.rates))
    summed = np.concatenate([[0.0], np.cumsum(rates)]) / rates.sum()
    # One row per window, the end of the run as the last; `POINTS` columns.
    begins, ends = np.append(begins, max_steps - last), np.append(ends, max_steps)
    counts = (ends - begins).astype(np.float64)
    at = begins[:, None] + counts[:, None] * (np.arange(POINTS) + 0.5) / POINTS
    s, rate = np.interp(at, np.arange(max_steps + 1), summed), rates[np.minimum(at.astype(int), max_steps - 1)]
    level = float(np.median(losses[len(losses) // 2 :]))
    scale = max(abs(level), 1e-6)
    y = (losses - level) / scale
    # The laws: [shapes, rows]. Each falls from 0 now to -1 at the end of the run if `fall` is 1.
    current = s[-2, -1]
    a, o = (grid.ravel()[:, None, None] for grid in np.meshgrid(EXPONENTS, OFFSETS, indexing="ij"))
    law = ((s + o) ** -a).mean(-1)
    law = (law - law[:, -2:-1]) / ((o**-a) - (1 + o) ** -a)[:, :, 0]
    annealing = np.broadcast_to(rate.mean(-1) - rate[-2].mean(), law.shape)
    # Prior covariance of all rows under level, law, annealing, drift and noise.
    x = np.log(s.mean(-1) + prior.drift_from)
    x_now = math.log(current + prior.drift_from)
    ahead = np.maximum(x - x_now, 0.0)
    behind = np.maximum(x_now - x, 0.0)
    drift = prior.drift**2 * (np.minimum.outer(ahead, ahead) + np.minimum.outer(behind, behind))
    noise = prior.noise * _noise_per_step(y, counts[:-1]) / counts + 1e-8
    mean = prior.fall * law + prior.annealing * annealing
    covariance = (
        1.0
        + prior.fall_spread**2 * law[:, :, None] * law[:, None, :]
        + prior.annealing_spread**2 * annealing[:, :, None] * annealing[:, None, :]
        + drift
        + np.diag(noise)
    )
    factor = np.linalg.cholesky(covariance[:, :-1, :-1])
    solved = np.linalg.solve(factor, np.stack([y - mean[:, :-1], covariance[:, :-1, -1]], -1))
    z, gain = solved[..., 0], solved[..., 1]
    evidence = -0.5 * (z**2).sum(-1) - np.log(np.diagonal(factor, axis1=1, axis2=2)).sum(-1)
    weights = np.exp(prior.temper * (evidence - evidence.max()))
    weights /= weights.sum()
    means = level + scale * (mean[:, -1] + (z * gain).sum(-1))
    variance = covariance[:, -1, -1] - (gain**2).sum(-1)
    deviations = scale * np.sqrt(np.maximum(variance, 1e-12))
    return [weights, means, deviations]


def looks(seen: Observed) -> np.ndarray | None:
    """
    What a run looks like, `[9]`: four times the logarithm of an earlier loss over the present one, the last slope, the
    share of the summed rate that is done, the rate now and at the end, the noise. `None` where a loss is not positive.
    """
    count, level = len(seen.losses), seen.level

    def mean(first: float, last: float) -> float:
        begin = min(int(first * count), count - 1)
        return float(seen.losses[begin : max(int(last * count), begin + 1)].mean())

    parts = [mean(*part) for part in ((0, 0.1), (0.1, 0.25), (0.25, 0.5), (0.5, 0.8), (0.5, 0.75), (0.75, 1.0))]
    if min(level, *parts) <= 0:
        return None
    current = int(seen.ends[-1])
    done = math.log(seen.rates[:current].sum() / seen.rates.sum() + 0.01)
    noise = np.median(np.abs(np.diff(seen.losses))) / level * math.sqrt(np.median(seen.ends - seen.begins))
    shape, slope = [math.log(part / level) for part in parts[:4]], math.log(parts[4] / parts[5])
    return np.array([*shape, slope, -done, seen.rates[current - 1], seen.rates[-1], math.log(noise + 1e-3)])


class PastCurves:
    """
    A Gaussian process from the looks of runs after some share of their steps to `log(final loss / present loss)`.

    `known` are the looks `[runs, 9]` of past runs, or 10 with the ratio of the held-out to the training loss, `targets`
    their logarithms `[runs]`; `scales`: length of the smooth part, its amplitude, amplitude of the linear part, noise.
    """

    def __init__(self, known: np.ndarray, targets: np.ndarray, scales: Sequence[float]):
        self.length, self.smooth, self.linear, self.noise = scales
        self.centre, self.scale = known.mean(0), known.std(0) + 1e-6
        self.known = (known - self.centre) / self.scale
        self.inverse = np.linalg.inv(self._kernel(self.known, self.known) + self.noise**2 * np.eye(len(known)))
        self.weights = self.inverse @ targets

    def _kernel(self, a: np.ndarray, b: np.ndarray) -> np.ndarray:
        distance = ((a[:, None] - b) ** 2).sum(-1)
        return self.smooth**2 * np.exp(-0.5 * distance / self.length**2) + self.linear**2 * (a @ b.T + 1)

    def forecast(self, look: np.ndarray, level: float) -> tuple[float, float]:
        """Mean and deviation of the final loss of a run that looks like `look` and has the loss `level` now."""
        asked = ((look - self.centre) / self.scale)[None]
        across = self._kernel(asked, self.known)
        mean = level * math.exp(np.clip(across[0] @ self.weights, -3.0, 1.0))
        unknown = self._kernel(asked, asked)[0, 0] - across[0] @ self.inverse @ across[0]
        return mean, mean * math.sqrt(max(float(unknown), 0.0) + self.noise**2)


@cache
def _stored() -> dict[str, np.ndarray]:
    with np.load(PAST_CURVES) as file:
        return dict(file)


@cache
def past_curves(loss: str, cut: int) -> PastCurves:
    """What the past curves of the package say of the `"training"` or `"held_out"` loss after a cut."""
    parts = (_stored()[f"{loss}_{name}"][cut] for name in ("looks", "targets", "scales"))
    return PastCurves(*(part.astype(np.float64) for part in parts))


def forecast_of_past_curves(loss: str, share: float, look: np.ndarray, level: float) -> Parts:
    """Weights, means and deviations `[2]` after the two cuts nearest to `share`, for a run with the loss `level`."""
    shares = _stored()["shares"]  # of the run, after which curves were cut
    place = float(np.interp(math.log(share), np.log(shares), np.arange(len(shares))))
    below = min(int(place), len(shares) - 2)
    forecasts = np.array([past_curves(loss, below + k).forecast(look, level) for k in (0, 1)])
    return [np.array([1 - (place - below), place - below]), *forecasts.T]


def mixture(parts: Parts, positive: bool = False) -> FinalLoss:
    """
    The mixture of Gaussians with these weights, which need not sum to 1, means and deviations. The quantiles of a
    `positive` loss are not below zero.
    """
    heavy = parts[0] > 1e-6 * parts[0].max()  # most shapes of the law have no weight, and cost time
    weights, means, deviations = (part[heavy] for part in parts)
    weights, deviations = weights / weights.sum(), np.maximum(deviations, 1e-12)
    low, high = (float(bound) for bound in ((means - 8 * deviations).min(), (means + 8 * deviations).max()))
    mixed = FinalLoss(0.0, low, high, *(tuple(part.tolist()) for part in (weights, means, deviations)))
    lowest = 0.0 if positive else -math.inf
    median, five, ninety_five = (max(_quantile(mixed, share), lowest) for share in (0.5, 0.05, 0.95))
    return replace(mixed, median=median, low=five, high=ninety_five)


def _quantile(mixed: FinalLoss, share: float) -> float:
    """By bisection between the bounds `low` and `high`."""
    low, high = mixed.low, mixed.high
    for _ in range(40):
        middle = 0.5 * (low + high)
        low, high = (middle, high) if mixed.probability_below(middle) < share else (low, middle)
    return 0.5 * (low + high)
