"""Every byte that a computation holds, at every moment, told apart by category and by the layer that made it."""

from __future__ import annotations

import weakref
from dataclasses import dataclass

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

Tensor = torch.Tensor

CATEGORIES = ("weights", "gradients", "states", "activations", "buffers")
_INDEX = {name: index for index, name in enumerate(CATEGORIES)}
_ACTIVATIONS, _WEIGHTS = _INDEX["activations"], _INDEX["weights"]
_IGNORED = (torch.ops.prim.device.default, torch.ops.aten.detach.default)

Held = tuple[int, ...]
"""Bytes held at one moment: by owner, and of each owner by category, one after the other."""


@dataclass
class _Storage:
    size: int
    owner: int
    category: int


@dataclass(frozen=True)
class Moment:
    """What is held just after an operation that allocated something."""

    stage: str  # "forward", "backward" or "update"
    where: int  # the owner that computes
    held: Held


class StorageTracker(TorchDispatchMode):
    """
    Records what live storages hold while operations run, on tensors with or without data.

    A storage belongs to the owner (a layer, or what is outside the layers) that computes when it is made. Copies of
    weights in another dtype count as weights.

    Args:
        owners (`int`): Number of owners; the last is what is outside the layers.
    """

    def __init__(self, owners: int):
        super().__init__()
        self.stage, self.where, self.outside = "forward", owners - 1, owners - 1
        self.moments: list[Moment] = []
        self._held = [0] * (owners * len(CATEGORIES))
        self._storages: dict[int, _Storage] = {}
        self._watches: dict[int, weakref.ref] = {}
        self._weights: set[int] = set()

    def hold(self, tensor: Tensor, category: str, owner: int) -> None:
        """Count a tensor that is there already; a storage that is known keeps its owner."""
        storage = tensor.untyped_storage()
        if storage._cdata not in self._storages:
            self._add(storage, _INDEX[category], owner)
        if category == "weights":
            self._weights.add(storage._cdata)

    def hold_bytes(self, size: int, category: str, owner: int) -> None:
        """Count bytes that no tensor stands for, from now on."""
        self._held[owner * len(CATEGORIES) + _INDEX[category]] += size

    def move(self, tensor: Tensor, category: str, owner: int) -> None:
        """A storage turns out to be something else."""
        storage = self._storages[tensor.untyped_storage()._cdata]
        self._count(storage, -1)
        storage.category, storage.owner = _INDEX[category], owner
        self._count(storage, 1)

    def now(self) -> Held:
        """What is held at this moment."""
        return tuple(self._held)

    def record(self) -> None:
        """Write down this moment."""
        self.moments.append(Moment(self.stage, self.where, self.now()))

    def _count(self, storage: _Storage, sign: int) -> None:
        self._held[storage.owner * len(CATEGORIES) + storage.category] += sign * storage.size

    def _add(self, storage: torch.UntypedStorage, category: int, owner: int) -> None:
        key = storage._cdata
        self._storages[key] = record = _Storage(storage.nbytes(), owner, category)
        self._count(record, 1)
        self._watches[key] = weakref.ref(storage, lambda _: self._forget(key))

    def _forget(self, key: int) -> None:
        self._count(self._storages.pop(key), -1)
        del self._watches[key]
        self._weights.discard(key)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = _run(func, args, kwargs or {})
        if func in _IGNORED:
            return result
        added = False
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in self._storages:
                    self._add(storage, _WEIGHTS if self._casts_weights(func, args) else _ACTIVATIONS, self.where)
                    added = True
        if added:
            self.record()
        return result

    def _casts_weights(self, func, args) -> bool:
        return func is torch.ops.aten._to_copy.default and args[0].untyped_storage()._cdata in self._weights


def _run(func, args, kwargs):
    first = args[0] if args else None
    if func is not torch.ops.aten._grouped_mm.default or first.dtype == torch.bfloat16:
        return func(*args, **kwargs)
    # Its shape function knows bf16 alone, though other types are computed as well.
    like = func(args[0].bfloat16(), args[1].bfloat16(), *args[2:], **kwargs)
    return torch.empty_strided(like.shape, like.stride(), dtype=first.dtype, device=first.device)
