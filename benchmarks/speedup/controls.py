"""Directions that know less than they should: a gain that is left with them is not due to prediction."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from benchmarks.directions.extrapolation import Linear
from hf_hybrid.leaps.directions import DirectionContext, Orthogonal


class RandomDirection(Orthogonal):
    """The default direction, each parameter's displacement replaced by a random one of the same norm."""

    name = "random"

    def __init__(self, context: DirectionContext):
        super().__init__(context)
        self._leap = 0

    def prepare(self) -> None:
        super().prepare()
        self._leap += 1

    def displacement(self, index: int, out: torch.Tensor) -> torch.Tensor | None:
        own = super().displacement(index, out)
        if own is None:
            return None
        norm = own.norm()
        generator = torch.Generator().manual_seed(1_000_003 * self._leap + index)
        noise = torch.randn(own.shape, generator=generator)
        return out.copy_(noise).mul_(norm / noise.norm().to(norm.device))

    def predicted_gradient(self, index: int) -> torch.Tensor | None:
        return None

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "leap": self._leap}

    def load_state_dict(self, buffers: dict[str, list[torch.Tensor]], values: dict[str, Any]) -> None:
        super().load_state_dict(buffers, values)
        self._leap = values["leap"]


class ShuffledHistory(Linear):
    """Lines as `linear` fits them, to the same states in an order drawn anew for every leap; of the same norm."""

    name = "shuffled"

    def __init__(self, context: DirectionContext):
        super().__init__(context)
        self._generator = torch.Generator().manual_seed(0)
        self._shuffled: list[list[float] | None] = []

    def prepare(self) -> None:
        super().prepare()
        order = torch.randperm(len(self.increments) + 1, generator=self._generator).tolist()
        groups = range(len(self.context.optimizer.param_groups))
        self._shuffled = [shuffled_slope(self.rates(group), order) for group in groups]

    def displacement(self, index: int, out: torch.Tensor) -> torch.Tensor | None:
        coefficients = self._shuffled[self.context.groups[index]]
        if coefficients is None or super().displacement(index, out) is None:
            return None
        norm = out.norm()
        self.combine(index, coefficients, out)
        return out.mul_(norm / out.norm().clamp(min=torch.finfo(out.dtype).tiny))


def shuffled_slope(lengths: Sequence[float], order: Sequence[int]) -> list[float] | None:
    """As `slope_coefficients`, every state taken to be where the state at its place in `order` was."""
    places = [sum(lengths[:i]) for i in range(len(lengths) + 1)]
    mean = sum(places) / len(places)
    spread = sum((place - mean) ** 2 for place in places)
    if not spread > 0:
        return None
    return [sum(places[state] - mean for state in order[i + 1 :]) / spread for i in range(len(lengths))]
