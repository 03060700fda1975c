"""A direction that knows less than it should: a gain that is left with it is not due to prediction."""

from __future__ import annotations

from typing import Any

import torch

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
