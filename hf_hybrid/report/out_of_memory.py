"""Hears of CUDA's out-of-memory errors before they are raised, while what filled the memory is still there."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable

import torch

logger = logging.getLogger(__name__)

HISTORY_ENTRIES = 100_000
"""Allocations and frees that the history goes back."""

_listener: weakref.WeakMethod | None = None
_attached = False


def listen(report: Callable[[int], None]) -> bool:
    """
    Call a method with the bytes that were asked for, whenever torch's CUDA allocator is about to raise.

    Torch has no way to take an observer back, so there is one for the whole process, which calls whoever listened
    last and still lives.

    Args:
        report (`Callable[[int], None]`): A bound method. Kept by a weak reference.

    Returns:
        `bool`: Whether this build of torch can tell.
    """
    global _listener, _attached
    attach = getattr(torch._C, "_cuda_attach_out_of_memory_observer", None)
    if attach is None:
        return False
    _listener = weakref.WeakMethod(report)
    if not _attached:
        attach(_observe)
        _attached = True
    return True


def stop_listening() -> None:
    """Nobody is called any more."""
    global _listener
    _listener = None


def _observe(device: int, requested: int, device_total: int, device_free: int) -> None:
    report = None if _listener is None else _listener()
    if report is None:
        return
    try:
        report(requested)
    except Exception:  # called from within the allocator: the error that matters is the one it raises
        logger.exception("The out-of-memory record was not written.")


def record_history(on: bool) -> None:
    """Have torch keep the last allocations with their Python stacks, or stop it."""
    if on:
        torch.cuda.memory._record_memory_history(max_entries=HISTORY_ENTRIES, stacks="python")
    else:
        torch.cuda.memory._record_memory_history(enabled=None)
