"""A device with a limit, on the CPU: operations that would go beyond it raise what a GPU's allocator raises."""

import contextlib
import weakref

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from rig.live_bytes import storages

MESSAGE = "CUDA out of memory. Tried to allocate 2.00 GiB (a fake device with {limit} bytes)."


class FakeDevice(TorchDispatchMode):
    """
    Accounts the storages that operations make while it is active, from their making until nobody holds them.

    `limit` is the number of bytes that may live at once (`None`: as many as wanted); `peak` the most that did.
    """

    def __init__(self, limit=None):
        super().__init__()
        self.limit, self.used, self.peak, self.raised = limit, 0, 0, 0
        self._known = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        given = {id(s) for s in storages((args, kwargs))}
        for storage in storages(result):
            if id(storage) not in given and id(storage) not in self._known and storage.nbytes():
                self._take(storage)
        return result

    def _take(self, storage):
        size, key = storage.nbytes(), id(storage)
        if self.limit is not None and self.used + size > self.limit:
            self.raised += 1
            raise torch.OutOfMemoryError(MESSAGE.format(limit=self.limit))
        self._known.add(key)
        self.used += size
        self.peak = max(self.peak, self.used)
        weakref.finalize(storage, self._give_back, key, size)

    def _give_back(self, key, size):
        self._known.discard(key)
        self.used -= size


class RowLimit:
    """
    Stands in for a device that only fits so many sequences at once.

    Raises inside a decoder layer (after the embeddings: the attempt holds tensors by then) when the model computes more
    than `most` sequences, in chosen phases (`None`: any) and from a number of forward passes on. `failed` lists what
    did not fit as `(phase, sequences, training)`.
    """

    def __init__(self, trainer, most, *, phases=None, after=0, training=True, probes=False):
        self.trainer, self.most, self.phases, self.after = trainer, most, phases, after
        self.training, self.probes = training, probes
        self.calls, self.failed = 0, []

    @contextlib.contextmanager
    def active(self):
        layer = self.trainer.model.get_submodule("model.layers.1")
        handle = layer.register_forward_pre_hook(self._check, with_kwargs=True)
        try:
            yield self
        finally:
            handle.remove()

    def _check(self, module, args, kwargs):
        hidden = args[0] if args else kwargs["hidden_states"]
        wanted = self.training if torch.is_grad_enabled() else self.probes
        if not wanted:
            return
        self.calls += 1
        phase = self.trainer.phase_name
        if self.calls > self.after and hidden.shape[0] > self.most and (self.phases is None or phase in self.phases):
            self.failed.append((phase, hidden.shape[0], torch.is_grad_enabled()))
            raise torch.OutOfMemoryError(MESSAGE.format(limit=self.most))
