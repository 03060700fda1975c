"""How many bytes of tensors are alive, on any machine: a CPU has no allocator that keeps a peak."""

from __future__ import annotations

import gc
import weakref

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """
    Bytes of the storages that operations return while it is active and that are still alive, and their peak.

    With `made_only`, those that an operation was given (weights, views of them, buffers) do not count.
    """

    def __init__(self, *, made_only=False):
        super().__init__()
        self.made_only, self.sizes, self.now, self.peak = made_only, {}, 0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        output = func(*args, **(kwargs or {}))
        given = {storage._cdata for storage in storages((args, kwargs))} if self.made_only else ()
        for storage in storages(output):
            if storage._cdata not in self.sizes and storage._cdata not in given:
                self.sizes[storage._cdata] = storage.nbytes()
                self.now += storage.nbytes()
                self.peak = max(self.peak, self.now)
                weakref.finalize(storage, self._remove, storage._cdata)
        return output

    def _remove(self, key):
        self.now -= self.sizes.pop(key)


class TouchedBytes(TorchDispatchMode):
    """
    Bytes of the storages that operations touch while it is active, and of `tensors`, as long as they live: their peak.
    A storage counts with the size that it has at the time, as FSDP2 frees what it gathered by resizing it to nothing.
    """

    def __init__(self, tensors):
        super().__init__()
        self.alive, self.peak = {}, 0
        self._watch(tensors)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        output = func(*args, **(kwargs or {}))
        self._watch((args, kwargs, output))
        living = {key: storage for key, watched in self.alive.items() if (storage := watched()) is not None}
        self.alive = {key: self.alive[key] for key in living}
        self.peak = max(self.peak, sum(storage.nbytes() for storage in living.values()))
        return output

    def _watch(self, values):
        for storage in storages(values):
            self.alive.setdefault(storage._cdata, weakref.ref(storage))


def storages(values):
    """The storages behind the tensors in `values`."""
    return [leaf.untyped_storage() for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]


def saved_for_backward(model, forward):
    """
    Bytes that the forward pass made and the backward pass still needs.

    They live on when only the autograd graph of the result is left: what operations saved, what checkpointing keeps
    (also beside autograd, such as keyword arguments of a layer), and new copies on the host. Parameters and buffers,
    and what existed before (the batch), do not count.
    """
    with LiveBytes(made_only=True) as live:
        graph = [leaf.grad_fn for leaf in tree_leaves(forward()) if isinstance(leaf, torch.Tensor)]
    gc.collect(1)  # what hangs in young reference cycles is not needed; a full collection takes too long
    own = {storage._cdata for storage in storages((*model.parameters(), *model.buffers()))}
    held = live.now - sum(size for key, size in live.sizes.items() if key in own)
    del graph  # not before everything is counted
    return held
