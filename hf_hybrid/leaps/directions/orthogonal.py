"""
`orthogonal`, the default: a short average of the gradients whose hidden matrices are orthogonalised.

The gradient of a weight matrix has a few large singular values and many small ones. A step along it moves the weights
in a few directions of their space and hardly in the others, although the others matter as much for what the layer can
learn. So Muon (Jordan et al., 2024) replaces the averaged gradient `M = U S V^T` by `U V^T`, the nearest orthogonal
matrix: all singular values become 1, and the step is equally long along every singular direction. A Newton-Schulz
iteration of matrix products computes `U V^T` without an SVD (optimizers.py). Each expert of a mixture has its own
matrices.

Muon is an optimizer, and changing the optimizer of a run is the user's choice. This direction applies Muon's rule only
in the leaps and leaves the optimizer and its state untouched. This gives an AdamW run part of Muon's benefit. Each
orthogonalised matrix is scaled by `0.2 sqrt(max(rows, columns))`, which gives its entries the root mean square of an
Adam step (Liu et al., 2025, arXiv 2502.16982), so that a learning rate tuned for Adam fits it too.

The average is short (10 steps, and a sixth of the run in `gradient_memory`), and the gain is constant, for a reason.
The leap does not extrapolate a lasting direction. It applies the gradients of the last few steps once more by a better
rule, and a longer average would only make them older. For the same reason leaps work early in the run, and the gain is
3 from the first leap to the last.

Embeddings, the output head, biases and norms have no useful spectrum; they go along [`GradientMemory`], with the short
average. If no hidden matrices are trained, the run uses `gradient_memory` itself.

If FSDP2 shards the weights, matrices are orthogonalised when a leap is prepared, in rounds (run/weights.py), and kept
until the leap is over: a leap that is shortened sends nothing again. Stacks of experts are sharded between experts, so
the matrices that a process holds are whole.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from hf_hybrid.leaps.directions.base import DirectionContext
from hf_hybrid.leaps.directions.gradient_memory import GradientMemory, Preconditioner
from hf_hybrid.optimizers import at_once, muon_scale, orthogonalisation_flops, orthogonalise
from hf_hybrid.run.weights import Shards


class Orthogonal(GradientMemory):
    """
    Leaps by Muon's rule (Jordan et al., 2024).

    Hidden matrices (`context.matrices`) go along the orthogonalised average of the gradients, everything else as
    [`GradientMemory`] does.
    """

    name = "orthogonal"
    gain, gain_power, memory_steps = 3.0, 0.0, 10
    most_per_step = 0.04
    papers = (
        ("Muon: An optimizer for hidden layers in neural networks", "https://kellerjordan.github.io/posts/muon/"),
        ("Muon is Scalable for LLM Training", "https://arxiv.org/abs/2502.16982"),
    )

    def __init__(self, context: DirectionContext):
        super().__init__(context)
        self._matrices = {index for index, name in enumerate(context.names) if name in context.matrices}
        self._orthogonalised: dict[int, Tensor] = {}
        """By index, displacements that were computed together with other processes."""

    def _preconditioner(self, index: int) -> Preconditioner | None:
        if index in self._matrices:
            self._device = self.context.parameters[index].device
            return self._rule
        return super()._preconditioner(index)

    def _rule(self, memory: Tensor, state: Mapping[str, Any], group: Mapping[str, Any], out: Tensor) -> Tensor:
        """See `Preconditioner`."""
        for memories, displacements in at_once(memory, out):
            # Memories on the host are orthogonalised where it is fastest.
            matrices = memories.to(self._device) if memories.device.type == "cpu" else memories
            displacements.copy_(orthogonalise(matrices))
        return out.mul_(-muon_scale(memory.shape, "match_rms_adamw"))

    @torch.no_grad()
    def prepare(self) -> None:
        super().prepare()
        shards, memories = self.context.shards, self.buffers["memory"]
        if isinstance(shards, Shards) and shards.processes > 1:
            matrices = sorted(index for index in self._matrices if memories[index].ndim == 2)
            tasks = [(index, shards.shape(index), memories[index]) for index in matrices]
            self._orthogonalised = dict(shards.in_rounds(tasks, self._displacement_of_whole))

    def _displacement_of_whole(self, index: int, memory: Tensor) -> Tensor:
        self._device = self.context.parameters[index].device
        return self._rule(memory, {}, self.context.group(index), torch.empty_like(memory))

    def displacement(self, index: int, out: Tensor) -> Tensor | None:
        if index in self._orthogonalised:
            return out.copy_(self._orthogonalised[index])
        return super().displacement(index, out)

    def block_begins(self, *, undoable: bool) -> None:
        self._orthogonalised = {}
        super().block_begins(undoable=undoable)

    def flops(self) -> float:
        shapes = map(self.context.shards.shape, sorted(self._matrices))
        return sum(map(orthogonalisation_flops, shapes)) / self.context.shards.processes

    def bytes_sent(self) -> float:
        shapes = [self.context.shards.shape(index) for index in self._matrices]
        return self.context.shards.bytes_in_rounds(sum(shape.numel() for shape in shapes if len(shape) == 2))
