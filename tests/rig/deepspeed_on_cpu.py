"""
DeepSpeed on CPU processes. Call [`enable`] before a trainer is built, in a process that does nothing else.

DeepSpeed itself works over gloo, and accelerate trains on the CPU with DDP, or with one process. This module leads the
CPU through accelerate's own path for DeepSpeed.
"""

import os

from accelerate.state import DistributedType, PartialState


def enable() -> None:
    """Patch accelerate's choice of a backend, and say to it and to DeepSpeed what is asked for."""
    os.environ.pop("ACCELERATE_USE_CPU", None)
    os.environ.update(ACCELERATE_USE_DEEPSPEED="true", DS_ACCELERATOR="cpu")
    init = PartialState.__init__
    PartialState.__init__ = lambda self, cpu=False, **options: init(self, cpu=False, **options)
    PartialState._prepare_backend = lambda self, *args: ("gloo", DistributedType.MULTI_CPU)


def options(stage: int) -> dict:
    """Return the `deepspeed` option of a run whose optimizer is torch's."""
    batches = dict.fromkeys(
        ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping"), "auto"
    )
    zero = {"stage": stage, "stage3_gather_16bit_weights_on_model_save": True}
    return {**batches, "zero_optimization": zero, "zero_allow_untested_optimizer": True}
