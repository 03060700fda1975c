"""
`linear` and `rre`: published extrapolations of a sequence of states of the weights.

`linear` fits a line to the last states of each weight, over the sum of the learning rates, and goes on along it
(Kamarthi and Pittner, 1999, "Accelerating neural network training using weight extrapolations"; "Linefit" among the
baselines of NiNo). `rre`, reduced rank extrapolation (Eddy, 1979; Mesina, 1977), looks for the limit of the sequence:
of all affine combinations of the states it takes the one whose residual, the same combination of the increments, is
smallest over all weights together. For a linear iteration with few modes that is the fixed point.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from benchmarks.directions.history import STATES, HistoryDirection
from hf_hybrid.leaps.directions import DirectionContext
from hf_hybrid.run.weights import inner_product

Tensor = torch.Tensor

RRE_REGULARIZATION = 0.1


class Linear(HistoryDirection):
    """Linefit: each weight's least-squares slope over the sum of the learning rates."""

    name = "linear"
    _coefficients: Sequence[Sequence[float] | None] = ()

    def prepare(self) -> None:
        super().prepare()
        groups = range(len(self.context.optimizer.param_groups))
        self._coefficients = [slope_coefficients(self.rates(group)) for group in groups]

    def displacement(self, index: int, out: Tensor) -> Tensor | None:
        coefficients = self._coefficients[self.context.groups[index]]
        return None if coefficients is None else self.combine(index, coefficients, out)


class ReducedRank(HistoryDirection):
    """
    Reduced rank extrapolation of all weights together.

    Args:
        context (`DirectionContext`): Parameters, optimizer and the place of buffers.
        states (`int`): States to look back on, one more than increments; at least 3.
        spacing (`int`, *optional*): Real steps between them.
        regularization (`float`): Tikhonov regularization relative to the mean square norm of the increments; noisy
            increments need more.

    Raises:
        ValueError: If a number is out of its range.
    """

    name = "rre"
    gain, gain_power = 1.0, 0.0
    least_increments = 2

    def __init__(
        self,
        context: DirectionContext,
        states: int = STATES,
        spacing: int | None = None,
        regularization: float = RRE_REGULARIZATION,
    ):
        super().__init__(context, states, spacing)
        if not regularization >= 0:
            raise ValueError(f"`regularization` must be at least 0, got {regularization}.")
        self.regularization = regularization
        self._coefficients: list[float] | None = None

    @torch.no_grad()
    def prepare(self) -> None:
        super().prepare()
        slots = self.increments
        self._coefficients = rre_coefficients(self._gram(slots), self.regularization) if self.ready else None

    def _gram(self, slots: list[int]) -> Tensor:
        count = len(slots)
        pairs = [(i, j) for i in range(count) for j in range(i + 1)]
        dots = [
            torch.stack([inner_product(history[slots[i]], history[slots[j]]) for i, j in pairs]).double()
            for history in self.buffers["history"]
        ]
        total = torch.stack([dot.to(dots[0].device) for dot in dots]).sum(0).tolist()
        gram = torch.empty(count, count, dtype=torch.float64)
        for (i, j), value in zip(pairs, total):
            gram[i, j] = gram[j, i] = value
        return gram

    def displacement(self, index: int, out: Tensor) -> Tensor | None:
        lr_sum = self.context.lr_sum(index)
        if self._coefficients is None or lr_sum <= 0:
            return None
        return self.combine(index, [coefficient / lr_sum for coefficient in self._coefficients], out)


def slope_coefficients(lengths: Sequence[float]) -> list[float] | None:
    """
    Coefficients that make the sum of a sequence's increments its least-squares slope.

    Args:
        lengths (`Sequence[float]`): Length of each increment along the axis of the slope.

    Returns:
        `list[float]`: One coefficient per increment; `None` if all lengths are 0.
    """
    places = [sum(lengths[:i]) for i in range(len(lengths) + 1)]
    mean = sum(places) / len(places)
    spread = sum((place - mean) ** 2 for place in places)
    if not spread > 0:
        return None
    # An increment is part of every later state.
    return [sum(place - mean for place in places[i + 1 :]) / spread for i in range(len(lengths))]


def rre_coefficients(gram: Tensor, regularization: float) -> list[float] | None:
    """
    Coefficients of `k` increments, oldest first, that lead from the last state to the extrapolated one.

    Args:
        gram (`torch.Tensor`): Their inner products, `[k, k]`, fp64.
        regularization (`float`): Added to the diagonal, times `trace / k`.

    Returns:
        `list[float]`: The coefficients; `None` if nothing moved or a product is not finite.
    """
    count, trace = len(gram), gram.trace()
    if not (torch.isfinite(gram).all() and trace > 0):
        return None
    identity = torch.eye(count, dtype=gram.dtype)
    damped = gram + identity * trace * max(regularization / count, torch.finfo(gram.dtype).eps)
    shares = torch.linalg.solve(damped, torch.ones(count, dtype=gram.dtype))
    # Shares of the states at which increments start. Going back from the last state to a state takes back all
    # increments from there on, so an increment is taken back by the shares of all states up to its start.
    return (-(shares / shares.sum()).cumsum(0)).tolist()
