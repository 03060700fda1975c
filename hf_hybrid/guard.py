"""What counts as out-of-memory, how to clean up after it, and the watch that warns before it happens."""

from __future__ import annotations

import gc
import logging
import traceback
from collections.abc import Callable

import torch

from hf_hybrid.phases import Phase, PhasePlugin

logger = logging.getLogger(__name__)

MemoryProbe = Callable[[], tuple[int, int]]
"""Returns bytes in use on the device and bytes that it has."""

GIB = 2**30
_MESSAGES = (
    *(f"{device} out of memory" for device in ("cuda", "hip", "xpu", "npu", "mps backend")),
    "error: out of memory",  # of the CUDA runtime
    "defaultcpuallocator: not enough memory",
    "defaultcpuallocator: can't allocate memory",
    "cublas_status_alloc_failed",
    "cudnn_status_alloc_failed",
)


def is_out_of_memory(error: BaseException | None) -> bool:
    """
    Whether an exception, or what it was raised from, says that memory could not be allocated, on device or host.

    `torch.OutOfMemoryError` and `MemoryError` do; a `RuntimeError` if its text is one that allocators write.
    """
    while error is not None:
        if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
            return True
        if isinstance(error, RuntimeError) and any(text in str(error).lower() for text in _MESSAGES):
            return True
        error = error.__cause__
    return False


def drop_tensors_of(error: BaseException | None) -> None:
    """Let go of the local variables of every frame that the exception passed: they hold the tensors of the attempt."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error.__traceback__ = None
        error = error.__cause__ or error.__context__


def free_memory() -> None:
    """Collect what hangs in reference cycles, and give back what the device's allocator keeps for later."""
    gc.collect()
    if torch.accelerator.is_available():
        module = torch.get_device_module(torch.accelerator.current_accelerator())
        if hasattr(module, "empty_cache"):
            module.empty_cache()


def device_probe(device: torch.device) -> MemoryProbe | None:
    """
    What reads the memory of a device: all that is in use on it, by any process, out of what it has.

    Where this process may use a part of the device only (`torch.cuda.set_per_process_memory_fraction`), what its
    allocator holds out of that part, if that is the tighter limit. `None` for a CPU and for devices that cannot tell.
    """
    module = None if device.type == "cpu" else torch.get_device_module(device)
    if not hasattr(module, "mem_get_info"):
        return None

    def read() -> tuple[int, int]:
        free, total = module.mem_get_info(device)
        fraction = getattr(module, "get_per_process_memory_fraction", lambda _: 1.0)(device)
        mine = (module.memory_reserved(device), int(total * fraction)) if fraction < 1 else (0, total)
        return max((total - free, total), mine, key=lambda pair: pair[0] / pair[1])

    return read


class MemoryGuard(PhasePlugin):
    """
    Watches device memory at the end of every step: warns early, cleans up, asks for one checkpoint before the limit.

    What the allocator keeps for later counts as in use, so that a reading at the end of a step stands for its peak.
    After a warning, or after it asked for a checkpoint, the guard keeps quiet until a step ends below `warn_at`.

    Args:
        probe (`Callable[[], tuple[int, int]]`, *optional*): Returns bytes in use and bytes that there are, see
            [`device_probe`]. `None` watches nothing.
        warn_at (`float`): Share of the device in use above which it warns and cleans up; 1 for never.
        checkpoint_at (`float`): Share above which it asks for a checkpoint; 1 for never.
        cleanup_steps (`int`): Clean up after every so many steps; 0 for only with a warning.

    Raises:
        ValueError: If `warn_at` is above `checkpoint_at`.
    """

    name = "memory_guard"

    def __init__(
        self, probe: MemoryProbe | None, *, warn_at: float = 0.90, checkpoint_at: float = 0.97, cleanup_steps: int = 0
    ):
        if warn_at > checkpoint_at:
            raise ValueError(
                f"`warn_at` must not be above `checkpoint_at`, got {warn_at} and {checkpoint_at}: the warning comes "
                "first. Lower `warn_at` or raise `checkpoint_at`."
            )
        self.probe = probe
        self.warn_at, self.checkpoint_at, self.cleanup_steps = warn_at, checkpoint_at, cleanup_steps
        self.warned = self.asked = False

    def on_phase_change(self, old: Phase, new: Phase) -> None:
        if self.probe is not None:
            logger.info("Phase `%s` ends and `%s` begins with %s.", old.value, new.value, self._describe(*self.probe()))

    def after_step(self, step: int) -> bool:
        """
        Look after step `step` (1-based: steps that are done).

        Returns:
            `bool`: Whether a checkpoint should be written now.
        """
        save = False
        due = self.cleanup_steps > 0 and step % self.cleanup_steps == 0
        if self.probe is not None:
            used, total = self.probe()
            share = used / total
            logger.debug("Step %d ends with %s.", step, self._describe(used, total))
            if share <= self.warn_at:
                self.warned = self.asked = False
            elif not self.warned:
                self.warned = due = True
                logger.warning(
                    "Step %d ends with %s, above `guard_warn_at=%g`. Lower `per_device_train_batch_size` and raise "
                    "`gradient_accumulation_steps`, or see docs/memory.md for what takes less.",
                    step,
                    self._describe(used, total),
                    self.warn_at,
                )
            if share > self.checkpoint_at and not self.asked:
                self.asked = save = True
                logger.warning(
                    "Step %d ends with %s, above `guard_checkpoint_at=%g`: a checkpoint is written now, once.",
                    step,
                    self._describe(used, total),
                    self.checkpoint_at,
                )
        if due:
            free_memory()
        return save

    @staticmethod
    def _describe(used: int, total: int) -> str:
        return f"{used / GIB:.2f} of {total / GIB:.2f} GiB in use ({used / total:.1%})"
