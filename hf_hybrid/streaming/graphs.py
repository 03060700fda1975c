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
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hf_hybrid.streaming.units import Unit


class _Place(NamedTuple):
    """Where a weight lies that autograd saved."""

    buffer: int
    """0: that into which int8 weights are expanded; 1: the slot."""
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    """In elements."""


class KeptGraph:
    """
    The graph of one pass through a unit, built inside [`saving`], with places instead of weights.

    `begin` is called before a tensor of it is read while the unit does not lie on the device, and is told whether the
    graph was read before. The unit lies in its slot when this is made.
    """

    def __init__(self, unit: Unit, expanded: Tensor, begin: Callable[[Unit, bool], object] | None):
        self.unit, self.expanded, self.begin = unit, expanded, begin
        self._begun, self._updates = False, unit.updates
        # By the address of their storage, which all views share: asked once, and not for each tensor that is saved.
        self._memory = {buffer.untyped_storage()._cdata: place for place, buffer in enumerate(self._buffers())}
        unit.open_graphs += 1

    def saving(self) -> torch.autograd.graph.saved_tensors_hooks:
        """Context of the forward pass."""
        return torch.autograd.graph.saved_tensors_hooks(self._save, self._read)

    def _buffers(self) -> list[Tensor]:
        """Return where weights lie: int8 ones that are expanded, and all others in the slot, if there is one now."""
        return [self.expanded] if self.unit.slot is None else [self.expanded, self.unit.slot.buffer]

    def _save(self, tensor: Tensor) -> Tensor | _Place:
        if tensor.layout is torch.strided and (buffer := self._memory.get(tensor.untyped_storage()._cdata)) is not None:
            return _Place(buffer, tensor.dtype, tensor.size(), tensor.stride(), int(tensor.storage_offset()))
        # Without its node, which would otherwise keep itself if it saved its own output and no backward pass comes.
        return tensor.detach()

    def _read(self, saved: Tensor | _Place) -> Tensor:
        if not (self._begun and self.unit.bound):
            if self._updates != self.unit.updates:
                raise updated_since(self.unit)
            self.unit.open_graphs -= not self._begun
            if self.begin is not None:
                self.begin(self.unit, self._begun)
            self._begun = True
        if torch.is_grad_enabled():
            refuse_second_derivative(self.unit)
        if isinstance(saved, Tensor):
            return saved
        if not self.unit.bound:
            raise RuntimeError(
                f"`{self.unit.name}` is differentiated when it does not lie on the device (`memory=stream`): code of "
                "yours computes gradients of it at another time than its layers do. Set "
                "`accumulation_walk=micro_batch`, or train with `memory=off`."
            )
        return self._buffers()[saved.buffer].view(saved.dtype).as_strided(saved.size, saved.stride, saved.offset)


# What streamed layers cannot differentiate.


def computed_otherwise(name: str = "A streamed layer") -> RuntimeError:
    """Return the error for a layer that computes something else when it is recomputed."""
    return RuntimeError(
        f"{name} computed something else in the backward pass than in the forward pass. With `memory=stream` layers "
        "are computed again there, so what code of yours does in them must be the same both times. Draw random numbers "
        "from torch's global generator, keep modes, scales and adapters of layers as they are for all passes of a "
        "step, or train with `memory=off`."
    )


def kept_twice(error: Exception) -> RuntimeError:
    """Return the error for a graph that is differentiated again, where torch says that its values are gone."""
    return RuntimeError(
        f"{str(error).partition('(')[0].strip()}. With `memory=stream` layers are computed again in the backward pass: "
        "what code of yours keeps of them, in a list for example, is kept twice. Clear it before each forward pass, "
        "pass `retain_graph=True` where a loss is differentiated twice, or train with `memory=off`."
    )


def updated_since(unit: Unit) -> RuntimeError:
    """Return the error for a graph that outlives an update of its weights."""
    return RuntimeError(
        f"`{unit.name}` is differentiated after its weights were updated. With `memory=stream` and `max_grad_norm=0` a "
        "layer is updated in the first backward pass that reaches it in the last micro-batch of a step. Call "
        "`backward` once there, set `max_grad_norm`, or train with `memory=off`."
    )


def refuse_second_derivative(unit: Unit, _: Any = None) -> None:
    """Raise `RuntimeError` while a backward pass makes a graph: its tensors would be places in a slot."""
    if torch.is_grad_enabled():
        raise RuntimeError(
            f"`create_graph=True` differentiates through `{unit.name}`, whose weights are on the device only while it "
            "computes (`memory=stream`), so its gradient cannot be differentiated again. Train with `memory=off`."
        )
