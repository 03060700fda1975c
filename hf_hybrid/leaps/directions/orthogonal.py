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
average. If nothing can be orthogonalised (no hidden matrices are trained, or the optimizer's learning rates are of
another scale than Adam's, as SGD's are), the run uses `gradient_memory` itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from hf_hybrid.leaps.directions.base import DirectionContext
from hf_hybrid.leaps.directions.gradient_memory import GradientMemory, Preconditioner
from hf_hybrid.optimizers import at_once, muon_scale, orthogonalise


class Orthogonal(GradientMemory):
    """
    Leaps by Muon's rule (Jordan et al., 2024), under any optimizer whose learning rates are of Adam's scale.

    Hidden matrices (`context.matrices`) go along the orthogonalised average of the gradients, everything else as
    [`GradientMemory`] does. So do all parameters under optimizers whose learning rates are of another scale.
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

    @staticmethod
    def suits(group: Mapping[str, Any]) -> bool:
        """Whether the learning rate of a parameter group is of Adam's scale."""
        return "betas" in group or group.get("algorithm") == "muon"

    def _orthogonalises(self, index: int) -> bool:
        return self._preconditioner(index) == self._rule or super()._orthogonalises(index)

    def _preconditioner(self, index: int) -> Preconditioner | None:
        if index in self._matrices and self.suits(self.context.group(index)):
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
