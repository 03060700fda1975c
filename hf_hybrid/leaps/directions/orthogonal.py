"""`orthogonal`: a short average of the gradients, each hidden matrix of it orthogonalised."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any

import torch

from hf_hybrid.leaps.directions.base import DirectionContext
from hf_hybrid.leaps.directions.gradient_memory import GradientMemory
from hf_hybrid.leaps.directions.preconditioners import (
    Preconditioner,
    orthogonalisation_flops,
    orthogonalise,
)

Tensor = torch.Tensor


class Orthogonal(GradientMemory):
    """
    Leaps by Muon's rule (Jordan et al., 2024) whatever the optimizer is: a gradient is large in few directions, and the
    many others count as much here.

    Hidden matrices go along the orthogonalised memory, its root mean square matched to that of an Adam step (Liu et
    al., 2025, arXiv 2502.16982), so that the learning rate means the same; everything else along
    [`GradientMemory`]. So do all parameters under optimizers whose learning rates are of another scale than Adam's.

    Args:
        context (`DirectionContext`): Parameters, optimizer and where buffers belong.
        matrices (`Collection[str]`): Names of the hidden matrices.
    """

    name = "orthogonal"

    def __init__(self, context: DirectionContext, matrices: Collection[str]):
        super().__init__(context)
        self._matrices = {index for index, name in enumerate(context.names) if name in matrices}

    def flops(self) -> float:
        chosen = [p.shape for i, p in enumerate(self.context.parameters) if self._preconditioner(i) == self._rule]
        return super().flops() + sum(orthogonalisation_flops(shape) for shape in chosen)

    def _preconditioner(self, index: int) -> Preconditioner | None:
        group = self.context.group(index)
        if index in self._matrices and ("betas" in group or group.get("algorithm") == "muon"):
            self._device = self.context.parameters[index].device
            return self._rule
        return super()._preconditioner(index)

    def _rule(self, memory: Tensor, state: Mapping[str, Any], group: Mapping[str, Any], out: Tensor) -> Tensor:
        """See `Preconditioner`."""
        return out.copy_(orthogonalise(memory.to(self._device))).mul_(-0.2 * math.sqrt(max(memory.shape)))
