"""
Passes through layers that are not recomputed, as far as memory allows.

A streamed layer is recomputed in the backward pass for two reasons: autograd would hold its weights from its forward
pass on, and everything else that it saved. Only the first is a reason of streaming. So where there is room for
everything else, a graph is kept and remembers of a weight just its place in the layer's slot. The layer comes in for
its backward pass as a recomputed one does, and the graph then finds the same weights at that place, in whatever slot
the layer lies by then.

The last layers keep theirs. The backward pass comes to them first, so their memory is free again before the first layer
is recomputed. Nothing changes in the numbers: the recomputation would have computed the same ones.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from hf_hybrid.streaming.units import Unit


class _Place(NamedTuple):
    """Where a weight lies that autograd saved."""

    expanded: bool
    """In the buffer into which int8 weights are expanded, not in the slot."""
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    """In elements."""


class KeptGraph:
    """
    The graph of one pass through a unit, built inside [`saving`], with places instead of weights.

    `begin` is called before the first tensor of it is read: the unit must lie on the device from then on.
    """

    def __init__(self, unit: Unit, expanded: Tensor, begin: Callable[[Unit], object]):
        self.unit, self.expanded, self.begin = unit, expanded, begin
        self._begun = False
        unit.open_graphs += 1

    def saving(self) -> torch.autograd.graph.saved_tensors_hooks:
        """Context of the forward pass."""
        return torch.autograd.graph.saved_tensors_hooks(self._save, self._read)

    def _buffers(self) -> tuple[Tensor | None, Tensor]:
        return (None if self.unit.slot is None else self.unit.slot.buffer), self.expanded

    def _save(self, tensor: Tensor) -> Tensor | _Place:
        memory = tensor.untyped_storage()._cdata if tensor.layout is torch.strided else None
        for expanded, buffer in enumerate(self._buffers()):
            if buffer is not None and buffer.untyped_storage()._cdata == memory:
                shape = tensor.size(), tensor.stride(), int(tensor.storage_offset())
                return _Place(bool(expanded), tensor.dtype, *shape)
        # Without its node, which would otherwise keep itself if it saved its own output and no backward pass comes.
        return tensor.detach()

    def _read(self, saved: Tensor | _Place) -> Tensor:
        if not self._begun:
            self._begun = True
            self.unit.open_graphs -= 1
            self.begin(self.unit)
        if isinstance(saved, Tensor):
            return saved
        buffer = self._buffers()[saved.expanded]
        if buffer is None:
            raise RuntimeError(f"`{self.unit.name}` is not on the device in its backward pass.")
        return buffer.view(saved.dtype).as_strided(saved.size, saved.stride, saved.offset)
