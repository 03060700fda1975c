"""A real CUDA device, by the names that scenarios have for the simulated one. It cannot count stops or races."""

from __future__ import annotations

import contextlib
from collections import Counter
from types import SimpleNamespace

import torch

from hf_hybrid import machine

# torch 2.11 has no public name for it.
_empty_host_cache = getattr(torch.accelerator, "empty_host_cache", None) or torch._C._host_emptyCache


class RealDevice:
    """The device that torch sees first."""

    HostMode = contextlib.nullcontext

    def __init__(self):
        self.found = SimpleNamespace(
            **{name: Counter() for name in ("stops", "stop_sites", "looks", "races", "conversions")}
        )

    def install(self) -> None:
        """Nothing: the device is there."""

    @staticmethod
    def synchronize() -> None:
        torch.cuda.synchronize()

    @property
    def device_bytes(self) -> int:
        """Bytes of tensors, without the workspaces that torch allocates for cuBLAS and keeps."""
        if not torch.cuda.is_initialized():  # a training on the CPU
            return 0
        torch.cuda.synchronize()
        torch._C._cuda_clearCublasWorkspaces()
        return torch.cuda.memory_allocated()

    @staticmethod
    def page_locked_bytes() -> dict[str, int]:
        """Bytes of torch's allocator that somebody holds. The driver tells nobody what is registered with it."""
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
            _empty_host_cache()
        return {"registered": 0, "pinned": machine.page_locked_bytes()}
