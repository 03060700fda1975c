"""What a trainer can tell a profiler: the phase of the step under way, and the tensors that live."""

from __future__ import annotations

import torch
from torch import nn

from hf_hybrid.plan.accounting import ByteTable, measure_held, storage_address


def phase_of(trainer) -> str | None:
    """Phase of the step under way; `None` for trainers without phases."""
    return getattr(trainer, "phase_name", None)


def held_bytes(trainer, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> ByteTable:
    """
    What lives now, by category and place.

    Args:
        trainer: Whose buffers of leaps and streamed layers are counted too; `None` for a model as it is.
        model (`nn.Module`), optimizer (`torch.optim.Optimizer`, *optional*): As a callback is given them.
    """
    optimizer = getattr(optimizer, "optimizer", optimizer)  # accelerate's wrapper
    engine, streaming = getattr(trainer, "_engine", None), getattr(trainer, "streaming", None)
    drift = [] if engine is None else engine.trajectory.tensors_held()
    if engine is not None and engine.tail is not None:
        drift += engine.tail.tensors().values()
    extra, on_host = {"drift": drift}, None
    if streaming is not None and streaming.optimizer is not None:
        extra = streaming.tensors_held(extra)
        if trainer.args.device.type == "cpu":
            on_host = {storage_address(tensor) for tensor in streaming.host_tensors(drift)}
    return measure_held(model, optimizer, extra=extra, host_storages=on_host)
