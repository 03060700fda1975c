"""Does a leap pay? Paired losses on held-out sequences, the two acceptance rules, and what past leaps taught."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

Losses = list[float]


@dataclass(frozen=True)
class Paired:
    """Mean fall of the held-out loss over the same sequences (nats, positive is better) and its standard error."""

    decrease: float
    standard_error: float


def paired_decrease(before: Sequence[float], after: Sequence[float]) -> Paired:
    """
    Compare two evaluations of the same sequences.

    Pairing removes the spread between sequences, which is far larger than what a leap changes. A non-finite loss
    after the leap counts as an infinite rise.

    Raises:
        ValueError: If the two do not hold the same number of sequences, or fewer than two.
    """
    if len(before) != len(after) or len(before) < 2:
        raise ValueError(
            f"A paired comparison needs the same two or more sequences, got {len(before)} and {len(after)}."
        )
    differences = [b - a for b, a in zip(before, after)]
    mean = sum(differences) / len(differences)
    if not math.isfinite(mean):
        return Paired(-math.inf, 0.0)
    variance = sum((d - mean) ** 2 for d in differences) / (len(differences) - 1)
    return Paired(mean, math.sqrt(variance / len(differences)))


def keep_scheduled(paired: Paired, *, margin: float, z: float) -> bool:
    """A leap within the schedule stays unless it is clearly worse: its worth shows later, not on an immediate probe."""
    return -paired.decrease <= margin + z * paired.standard_error


def accept_extended(paired: Paired, *, slope: float, cost: float, z: float) -> bool:
    """
    A leap beyond the schedule must earn what it cost.

    Args:
        paired (`Paired`): Against the weights without the leap.
        slope (`float`): Fall of the held-out loss per real step, nats.
        cost (`float`): Price of the probes in real steps.
        z (`float`): Standard errors of the paired difference to ask for on top.
    """
    return paired.decrease >= max(slope, 0.0) * cost + z * paired.standard_error and paired.decrease > 0


def parabola_minimum(points: Sequence[tuple[float, float]]) -> float | None:
    """
    Abscissa of the minimum of the parabola through three `(gain, loss)` points; `None` if it does not open upwards.
    """
    (x0, y0), (x1, y1), (x2, y2) = points
    denominator = (x0 - x1) * (x0 - x2) * (x1 - x2)
    if denominator == 0 or not all(map(math.isfinite, (y0, y1, y2))):
        return None
    curvature = (x2 * (y1 - y0) + x1 * (y0 - y2) + x0 * (y2 - y1)) / denominator
    slope = (x2 * x2 * (y0 - y1) + x1 * x1 * (y2 - y0) + x0 * x0 * (y1 - y2)) / denominator
    return None if curvature <= 0 else -slope / (2 * curvature)


class HeldOutProbe:
    """
    Rotates through held-out batches and counts what looking at them costs.

    Args:
        batches (`Sequence`): Collated batches, in any form that `evaluate` takes.
        evaluate (`Callable`): From a batch to one loss per sequence, without gradients.
        sizes (`Sequence[int]`): Sequences in each batch; what `evaluate` says of more is left out.
        sequences_per_probe (`int`): At least this many sequences are used per probe (as whole batches).
        sequences_per_step (`int`): Sequences of a real step, for the price of a forward pass in real steps.
    """

    def __init__(
        self,
        batches: Sequence,
        evaluate: Callable[[object], Losses],
        *,
        sizes: Sequence[int],
        sequences_per_probe: int,
        sequences_per_step: int,
    ):
        self.batches, self.sizes, self.evaluate = list(batches), list(sizes), evaluate
        self.sequences_per_probe = min(sequences_per_probe, sum(self.sizes))
        self.sequences_per_step = sequences_per_step
        self.next_batch = 0
        self.forward_passes = 0
        self.cost_steps = 0.0
        self._current: list[int] = []

    def choose(self) -> None:
        """Pick the sequences of the next comparison; every [`losses`] until the next call uses the same."""
        self._current, count = [], 0
        while count < self.sequences_per_probe:
            self._current.append(self.next_batch)
            count += self.sizes[self.next_batch]
            self.next_batch = (self.next_batch + 1) % len(self.batches)

    @property
    def price(self) -> float:
        """Price of one evaluation in real steps; a step is a forward and a backward worth two forwards."""
        count = max(self.sequences_per_probe, max(self.sizes))
        return count / (3.0 * self.sequences_per_step)

    def losses(self) -> Losses:
        """One loss per chosen sequence, at the weights of now."""
        return self._evaluate(self._current)

    def all_losses(self) -> Losses:
        """One loss per held-out sequence, at the weights of now."""
        return self._evaluate(range(len(self.batches)))

    def _evaluate(self, indices: Sequence[int]) -> Losses:
        losses: Losses = []
        for index in indices:
            losses += self.evaluate(self.batches[index])[: self.sizes[index]]
            self.forward_passes += 1
            self.cost_steps += self.sizes[index] / (3.0 * self.sequences_per_step)
        return losses

    def state_dict(self) -> dict:
        return {"next_batch": self.next_batch, "forward_passes": self.forward_passes, "cost_steps": self.cost_steps}

    def load_state_dict(self, state: dict) -> None:
        self.next_batch = state["next_batch"] % len(self.batches)
        self.forward_passes = state["forward_passes"]
        self.cost_steps = state["cost_steps"]


@dataclass(frozen=True)
class Residual:
    """
    One lesson: where training stood, and the realised fall of the loss over what was predicted to first order.

    `ratio` is 1 where the loss is linear along the leap, 1/2 at the minimum of a parabola, negative past its zero.
    """

    step: int
    features: list[float]
    ratio: float
    standard_error: float


class ResidualStore:
    """Past residuals; the similar and recent ones correct the next leap's gain."""

    FEWEST = 3
    """Lessons before they count: what one early leap does at once says little about those that follow."""

    def __init__(self, capacity: int = 200, half_life_steps: float = 200.0):
        self.residuals: deque[Residual] = deque(maxlen=capacity)
        self.half_life_steps = half_life_steps

    def add(self, residual: Residual) -> None:
        if math.isfinite(residual.ratio) and math.isfinite(residual.standard_error):
            self.residuals.append(residual)

    def gain_factor(self, step: int, features: Sequence[float], *, z: float, neighbours: int = 10) -> float:
        """
        Factor in `[0.25, 1]` for the next gain.

        Only what is significant counts: a leap that pays later looks neutral at first (short-horizon bias), so the
        factor falls below 1 only where similar leaps were worse than nothing by `z` standard errors.
        """
        weighed = [(self._weight(r, step, features), r) for r in self.residuals]
        weighed = sorted(weighed, key=lambda pair: -pair[0])[:neighbours]
        total = sum(weight for weight, _ in weighed)
        if total <= 0 or len(self.residuals) < self.FEWEST:
            return 1.0
        ratio = sum(weight * r.ratio for weight, r in weighed) / total
        error = math.sqrt(sum((weight * r.standard_error) ** 2 for weight, r in weighed)) / total
        return min(1.0, max(0.25, 1.0 + ratio + z * error))

    def _weight(self, residual: Residual, step: int, features: Sequence[float]) -> float:
        dot = sum(a * b for a, b in zip(residual.features, features))
        norms = math.sqrt(sum(a * a for a in residual.features) * sum(b * b for b in features))
        similarity = max(dot / norms, 0.0) if norms > 0 else 0.0
        return similarity * 0.5 ** ((step - residual.step) / self.half_life_steps)

    def state_dict(self) -> list[dict]:
        return [asdict(residual) for residual in self.residuals]

    def load_state_dict(self, state: list[dict]) -> None:
        self.residuals.clear()
        self.residuals.extend(Residual(**item) for item in state)
