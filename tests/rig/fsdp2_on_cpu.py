"""
FSDP2 on CPU processes. Call [`enable`] before a trainer is built, in a process that does nothing else.

accelerate knows FSDP for accelerators alone and trains with DDP on the CPU without a word, so the package refuses it
there. Torch's `fully_shard` itself works over gloo. This module leads the CPU through accelerate's own path.
"""

import functools

from accelerate.state import AcceleratorState, DistributedType, PartialState
from torch.distributed.fsdp import CPUOffloadPolicy

from hf_hybrid import config

_init = AcceleratorState.__init__


def _init_with_fsdp(self, *args, fsdp_plugin=None, **kwargs):
    _init(self, *args, fsdp_plugin=fsdp_plugin, **kwargs)
    if fsdp_plugin is not None and self.distributed_type == DistributedType.MULTI_CPU:
        if self._mixed_precision != "no":
            fsdp_plugin.set_mixed_precision(self._mixed_precision)
        if isinstance(fsdp_plugin.cpu_offload, CPUOffloadPolicy):
            fsdp_plugin.cpu_offload = CPUOffloadPolicy(pin_memory=False)  # no accelerator reads page-locked memory
        self.fsdp_plugin = fsdp_plugin
        self.distributed_type = PartialState._shared_state["distributed_type"] = DistributedType.FSDP


def enable() -> None:
    """Patch accelerate, and the check of this package that refuses FSDP on the CPU."""
    AcceleratorState.__init__ = functools.wraps(_init)(_init_with_fsdp)
    config.computes_on_cpu = lambda args: False
