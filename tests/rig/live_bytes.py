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
