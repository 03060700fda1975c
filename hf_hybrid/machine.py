"""
The machine that a run computes on: its processes and its devices.

The options and the environment that a launcher sets decide how a run is spread over processes.

Devices are reached through `torch.get_device_module(device)` and `torch.accelerator`, here and in the whole package, so
that the same code runs on every kind that torch knows. Only this file uses what torch offers for CUDA alone: locking
pages that torch did not allocate, workspaces of cuBLAS, the driver's counters (NVML), the history of allocations, and
whether bf16 is emulated.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import re
import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from transformers import TrainingArguments

logger = logging.getLogger(__name__)


class LeapObstacleError(ValueError):
    """
    Leaps cannot work with something that trains well without them. `reason` says what it is, and why, in whole
    sentences, and `advice` what to do. `leaps_alone` tells whether all other parts of a run work with it.
    """

    def __init__(self, reason: str, advice: str, *, leaps_alone: bool = False):
        self.reason, self.leaps_alone = reason, leaps_alone
        super().__init__(f"{reason} {advice} Or set `enable_predict=False` to train exactly as plain `Trainer` does.")


# Processes.

# If the run asks for several, the first is named.
_LAUNCHED = {
    "deepspeed": "ACCELERATE_USE_DEEPSPEED",
    "fsdp": "ACCELERATE_USE_FSDP",
    "megatron_lm": "ACCELERATE_USE_MEGATRON_LM",
    "parallelism_config": "ACCELERATE_USE_PARALLELISM_CONFIG",
}


def sharding_of(args: TrainingArguments) -> str | None:
    """
    Return the mechanism that shards weights, gradients or states; `None` with one process, or DDP. The options ask for
    it, or the environment that `accelerate launch` sets.
    """
    return next(iter(_sharding(args)), None)


def _sharding(args: TrainingArguments) -> list[str]:
    asked = {"deepspeed": args.deepspeed, "fsdp": args.fsdp, "parallelism_config": args.parallelism_config}
    return [name for name, variable in _LAUNCHED.items() if asked.get(name) or _is_on(variable)]


def shards_by_fsdp2(args: TrainingArguments) -> bool:
    """Whether FSDP2 shards the weights, the only mechanism whose shards leaps take."""
    if sharding_of(args) != "fsdp":
        return False
    if args.fsdp:
        return (args.fsdp_plugin_args or {}).get("fsdp_version") == 2
    return os.environ.get("FSDP_VERSION") == "2"


def windows_may_change(args: TrainingArguments) -> bool:
    """Whether what shards the weights, if anything does, takes other micro-batches on which processes agree."""
    return shards_by_fsdp2(args) or _sharding(args) in ([], ["deepspeed"])


def mixed_precision_of(args: TrainingArguments) -> str:
    """Return `"no"`, `"bf16"` or `"fp16"`, from the options or else from the launcher."""
    if args.fp16 or args.bf16:
        return "fp16" if args.fp16 else "bf16"
    return os.environ.get("ACCELERATE_MIXED_PRECISION", "no")


def computes_on_cpu(args: TrainingArguments) -> bool:
    """Whether the options or the launcher ask for the CPU, or there is nothing else."""
    asked = args.use_cpu or _is_on("ACCELERATE_USE_CPU")
    return asked or not torch.accelerator.is_available()


def check_kernels(args: TrainingArguments) -> None:
    """
    Refuse kernels that this machine cannot compile. A trainer asks when it is built: a config may be for another
    machine, and TRL has its own reasons to refuse Liger, which concern the model.
    """
    interprets = os.environ.get("TRITON_INTERPRET") == "1"
    no_triton = (computes_on_cpu(args) or torch.backends.mps.is_available()) and not interprets
    if getattr(args, "use_liger_kernel", False) and no_triton:
        raise ValueError(
            "`use_liger_kernel=True` needs a GPU: Liger's kernels are written in Triton, which does not compile for a "
            "CPU or for MPS. Leave it out, or train on a GPU."
        )


def _is_on(variable: str) -> bool:
    return os.environ.get(variable, "false").lower() in ("1", "true", "yes")


def use_one_gpu() -> None:
    """Hide all GPUs except one, because `Trainer` would spread each batch over all visible GPUs (`DataParallel`)."""
    if torch.cuda.device_count() > 1:  # of other kinds it uses one
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0]
        os.environ["CUDA_VISIBLE_DEVICES"] = visible or "0"


# Devices.


def copies_beside(device: torch.device) -> bool:
    """Whether a device copies while it computes: it has streams, which a CPU need not have and MPS does not have."""
    return device.type != "cpu" and hasattr(torch.get_device_module(device), "Stream")


def describe_device(device: torch.device) -> dict[str, Any]:
    """Return `name` and `total_memory` (bytes), if torch knows them."""
    module = torch.get_device_module(device)
    if not hasattr(module, "get_device_properties"):  # CPU and MPS
        return {}
    properties = module.get_device_properties(device)
    return {"name": properties.name, "total_memory": properties.total_memory}


def device_memory(device: torch.device | None = None) -> int | None:
    """
    Bytes that this process can still allocate on a device (by default the machine's accelerator): what is free, and
    what torch keeps unused. `None` for a CPU and where torch cannot tell.
    """
    device = device or torch.accelerator.current_accelerator(check_available=True)
    module = None if device is None else torch.get_device_module(device)
    if not hasattr(module, "mem_get_info"):
        return None
    return module.mem_get_info(device)[0] + module.memory_reserved(device) - module.memory_allocated(device)


def native_bf16() -> bool | None:
    """Whether the GPU computes in bf16 by itself; `None` where torch cannot tell that from emulating it."""
    return torch.cuda.is_bf16_supported(including_emulation=False) if torch.cuda.is_available() else None


def workspace_bytes(device: torch.device | None = None) -> int:
    """Bytes that torch gives the cuBLAS handle of each thread; without a GPU, those of one before Hopper."""
    # From `parseChosenWorkspaceSize` in torch's aten/src/ATen/cuda/CublasHandlePool.cpp; not measured on a GPU.
    large = torch.cuda.is_available() and torch.cuda.get_device_capability(device)[0] >= 9
    config = os.environ.get("CUBLAS_WORKSPACE_CONFIG", ":4096:8" if large else ":4096:2:16:8")
    return 2**10 * sum(int(size) * int(count) for size, count in re.findall(r":(\d+):(\d+)", config))


class DeviceMemory:
    """One device as torch's allocator sees it."""

    def __init__(self, device: torch.device):
        self.device, self._module = device, torch.get_device_module(device)

    @staticmethod
    def of(device: torch.device) -> DeviceMemory | None:
        """Return the memory of a device; `None` if its allocator keeps no statistics."""
        return DeviceMemory(device) if hasattr(torch.get_device_module(device), "memory_stats_as_nested_dict") else None

    def read(self) -> dict[str, int]:
        """Bytes: `allocated`, `reserved`, and the peak of each since [`reset_peak`]."""
        stats = self._module.memory_stats_as_nested_dict(self.device)
        readings = {}
        for name in ("allocated", "reserved"):
            values = stats.get(f"{name}_bytes", {}).get("all", {})
            readings[name], readings[f"peak_{name}"] = values.get("current", 0), values.get("peak", 0)
        return readings

    def reset_peak(self) -> None:
        """Count peaks from now on."""
        self._module.reset_peak_memory_stats(self.device)


class Driver:
    """One CUDA device as the driver sees it, through NVML: other processes, CUDA contexts and libraries included."""

    def __init__(self, device: torch.device):
        self._handle, self._seen = None, 0
        try:
            import pynvml

            pynvml.nvmlInit()
            # By its identity, because NVML counts the devices that `CUDA_VISIBLE_DEVICES` hides.
            identity = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
            self._pynvml, self._handle = pynvml, pynvml.nvmlDeviceGetHandleByUUID(identity)
        except Exception as error:  # NVML's errors are many, and none of them may stop a training
            logger.debug("NVML cannot be read: %s", error)

    def read(self) -> dict[str, int] | None:
        """Bytes: `used` and `total`; `None` where NVML is missing or does not know the device (a MIG slice, say)."""
        if self._handle is None:
            return None
        try:
            memory = self._pynvml.nvmlDeviceGetMemoryInfo(self._handle)
        except self._pynvml.NVMLError as error:
            self._give_up(error)
            return None
        return {"used": int(memory.used), "total": int(memory.total)}

    def utilization(self) -> list[int]:
        """
        Percent of the time in which kernels ran, of any process, for each sample that the driver took since the last
        call. It takes one in 1/6 to 1 s, and keeps those of the last seconds. Empty where there are none.
        """
        if self._handle is None:
            return []
        nvml = self._pynvml
        try:
            _, samples = nvml.nvmlDeviceGetSamples(self._handle, nvml.NVML_GPU_UTILIZATION_SAMPLES, self._seen)
        except nvml.NVMLError as error:
            nothing_new = nvml.NVML_ERROR_NOT_FOUND
            if error.value != nothing_new:  # ty: ignore[missing-attribute]  # which `__new__` sets
                self._give_up(error)
            return []
        # Of what clock the time stamps are differs between drivers: they are compared with each other alone.
        latest = [sample for sample in samples if sample.timeStamp > self._seen]
        self._seen = max((sample.timeStamp for sample in latest), default=self._seen)
        return [sample.sampleValue.uiVal for sample in latest]

    def _give_up(self, error: Exception) -> None:
        logger.debug("NVML is not read any more: %s", error)
        self._handle = None


# Page-locked host memory, from and to which a device copies by itself.

PAGE = 4096
SMALL = 32 * 2**20
"""Bytes below which torch's pinned allocator is used: rounding up to powers of two costs little there."""


def host_buffer(size: int, *, pin: bool) -> Tensor:
    """
    `size` bytes of host memory, page-locked if asked for. Where the system refuses that, it is ordinary memory: copies
    then stop the host, and nothing else changes.
    """
    if pin:
        try:
            return _page_locked(size)
        except RuntimeError as error:
            _warn_of_pageable_memory(str(error))
    return torch.empty(size, dtype=torch.uint8)


def locked_bytes(size: int) -> int:
    """Bytes of host memory that [`host_buffer`] takes for `size` page-locked bytes."""
    return -(-size // PAGE) * PAGE if size >= SMALL else pinned_bytes(size)


def pinned_bytes(size: int) -> int:
    """Bytes of host memory that torch takes for `size` page-locked bytes."""
    # PowerOf2Ceil in torch's CachingHostAllocatorImpl::allocate (ATen/core/CachingHostAllocator.h).
    return 2 ** (size - 1).bit_length() if size else 0


def host_tensor(shape: torch.Size, dtype: torch.dtype, *, pin: bool) -> Tensor:
    """Return uninitialised host memory as a tensor."""
    return host_buffer(shape.numel() * dtype.itemsize, pin=pin).view(dtype).view(shape)


def copy_to_device_(target: Tensor, source: Tensor) -> Tensor:
    """
    Copy ordinary host memory into a device tensor, which is returned. Small tensors go through torch's page-locked
    memory, which torch keeps until the copy is over: the host may change `source` at once and does not stop.
    """
    if copies_beside(target.device) and source.device.type == "cpu" and source.nbytes < SMALL:
        staged = host_tensor(source.shape, source.dtype, pin=True).copy_(source)
        return target.copy_(staged, non_blocking=True)
    return target.copy_(source)


class PendingRead:
    """A tensor of the device that the host reads later: it is copied beside what the device computes meanwhile."""

    def __init__(self, numbers: Tensor):
        self._numbers: Any = numbers
        self._copied = None
        if copies_beside(numbers.device):
            self._numbers = host_tensor(numbers.shape, numbers.dtype, pin=True).copy_(numbers, non_blocking=True)
            self._copied = torch.get_device_module(numbers.device).Event()
            self._copied.record()

    def read(self) -> Any:
        """Return the numbers as plain values, and wait until they are there. They were those when this was made."""
        if isinstance(self._numbers, Tensor):
            if self._copied is not None:
                self._copied.synchronize()
            self._numbers = self._numbers.tolist()  # and the page-locked memory is free again
        return self._numbers


_OUT_OF_MEMORY = (
    *(f"{device} out of memory" for device in ("cuda", "hip", "xpu", "npu", "mps backend")),
    "error: out of memory",  # of the CUDA runtime
    "out of memory (2)",  # of `torch.cuda.check_error`
    "defaultcpuallocator: not enough memory",
    "defaultcpuallocator: can't allocate memory",
    "cublas_status_alloc_failed",
    "cudnn_status_alloc_failed",
    "previous error during capture",  # of a graph, where the allocator gave blocks back to the device
)


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether an exception, or its cause, says that memory could not be allocated, on device or host."""
    while error is not None:
        if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
            return True
        if isinstance(error, RuntimeError) and any(text in str(error).lower() for text in _OUT_OF_MEMORY):
            return True
        error = error.__cause__
    return False


def wait_for(device: torch.device) -> None:
    """Stop the host until the device has computed all that it was given."""
    torch.get_device_module(device).current_stream(device).synchronize()


def _page_locked(size: int) -> Tensor:
    if size < SMALL or not torch.cuda.is_available():
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)
    # Torch's pinned allocator rounds up to powers of two: large buffers are ordinary pages, registered with the driver.
    pages = torch.empty(size + 2 * PAGE, dtype=torch.uint8)
    start = -pages.data_ptr() % PAGE
    driver, address = torch.cuda.cudart(), pages.data_ptr() + start
    try:
        torch.cuda.check_error(driver.cudaHostRegister(address, -(-size // PAGE) * PAGE, 0))
    except RuntimeError:
        with contextlib.suppress(RuntimeError):
            torch.ones(1, device="cuda")  # the driver reports a failure once more, to the next kernel: this one
        raise
    unlock = weakref.finalize(pages.untyped_storage(), driver.cudaHostUnregister, address)
    unlock.atexit = False  # the driver may be gone by then, and the pages go with the process
    return pages[start : start + size]


@functools.cache  # once, whatever the number of buffers
def _warn_of_pageable_memory(reason: str) -> None:
    logger.warning(
        "Host memory could not be page-locked (%s). Ordinary memory is used, and copies between host and device stop "
        "the host. Raise the limit on locked memory (`ulimit -l`), or leave more host memory free.",
        reason,
    )


def page_locked_bytes() -> int:
    """Return the bytes of torch's pinned allocator, without the larger buffers that the driver registers."""
    stats = torch.cuda.host_memory_stats_as_nested_dict() if torch.cuda.is_initialized() else {}
    return stats.get("allocated_bytes", {}).get("current", 0)


# Kernels.


def keep_differentiable(model: torch.nn.Module) -> None:
    """
    Keep bitsandbytes' 4-bit layers trainable, also after the model is evaluated on a CPU, or refuse packed ones.

    On CPUs with bf16 instructions these layers pack their weights anew at the first evaluation, for a kernel whose
    backward pass is wrong without an error: cosines with the right gradients were measured down to 0.56.
    """
    for name, module in model.named_modules():
        if not hasattr(module, "support_avx512bf16_for_cpu"):
            continue
        if getattr(getattr(module.weight, "quant_state", None), "packing_format_for_cpu", False):
            raise ValueError(
                f"`model` was evaluated on the CPU, and bitsandbytes packed the 4-bit weights of `{name}` (and others) "
                "anew for it: gradients would be wrong. Load the model again, and create the trainer before anything "
                "is evaluated or generated."
            )
        module.support_avx512bf16_for_cpu = False
