"""What the allocator, the driver and the system say of memory at one moment. Nothing here waits for a device."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import psutil
import torch

logger = logging.getLogger(__name__)


class DeviceMemory:
    """
    One CUDA device as torch's allocator sees it.

    Args:
        device (`torch.device`): Which one.
    """

    def __init__(self, device: torch.device):
        self.device = device

    def read(self) -> dict[str, int]:
        """Bytes: `allocated`, `reserved`, and the peak of each since [`reset_peak`]."""
        stats = torch.cuda.memory_stats_as_nested_dict(self.device)
        found = {}
        for name in ("allocated", "reserved"):
            values = stats.get(f"{name}_bytes", {}).get("all", {})
            found[name], found[f"peak_{name}"] = values.get("current", 0), values.get("peak", 0)
        return found

    def reset_peak(self) -> None:
        """Peaks are counted from here on."""
        torch.cuda.reset_peak_memory_stats(self.device)


class DriverMemory:
    """
    One CUDA device as the driver sees it, through NVML: other processes, CUDA contexts and libraries included.

    Where NVML is missing or does not know the device (a MIG slice, say), [`read`] returns `None`.
    """

    def __init__(self, device: torch.device):
        self._pynvml, self._handle = None, None
        try:
            import pynvml

            pynvml.nvmlInit()
            # By its identity: NVML counts the devices that `CUDA_VISIBLE_DEVICES` hides.
            identity = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
            self._pynvml, self._handle = pynvml, pynvml.nvmlDeviceGetHandleByUUID(identity)
        except Exception as error:  # NVML's errors are many, and none of them may stop a training
            logger.debug("NVML cannot be read: %s", error)

    def read(self) -> dict[str, int] | None:
        """Bytes: `used` and `total`."""
        if self._handle is None:
            return None
        try:
            memory = self._pynvml.nvmlDeviceGetMemoryInfo(self._handle)
        except self._pynvml.NVMLError as error:
            logger.debug("NVML is not read any more: %s", error)
            self._handle = None
            return None
        return {"used": int(memory.used), "total": int(memory.total)}


class HostMemory:
    """
    Resident memory of this process.

    Its peak is the kernel's high-water mark where that can be reset (Linux), otherwise the highest of the values that
    were read; `peak_source` says which.

    Args:
        process (`Path`, *optional*): Folder of the process in the file system of the kernel.
    """

    def __init__(self, process: Path = Path("/proc/self")):
        self._status, self._marks = None, None
        self._process = psutil.Process()
        self._sampled = 0
        try:
            # Kept open: opening them costs more than reading them.
            self._status = (process / "status").open("rb", buffering=0)
            self._marks = (process / "clear_refs").open("wb", buffering=0)
            self._reset_mark()
            self._read_status()
        except (OSError, ValueError) as error:
            logger.debug("The peak of resident memory is sampled: %s", error)
            self._status = self._marks = None

    @property
    def peak_source(self) -> str:
        """Where the peak comes from."""
        return "sampled" if self._status is None else "high-water mark"

    def read(self) -> dict[str, int]:
        """Bytes: `rss`, its peak since [`reset_peak`], and what torch's pinned allocator holds."""
        if self._status is None:
            rss = self._process.memory_info().rss
            peak = self._sampled = max(self._sampled, rss)
        else:
            rss, peak = self._read_status()
        return {"rss": rss, "peak_rss": max(rss, peak), "pinned": pinned_bytes()}

    def reset_peak(self) -> None:
        """The peak is counted from here on."""
        self._sampled = 0
        if self._marks is not None:
            self._reset_mark()

    def _reset_mark(self) -> None:
        os.pwrite(self._marks.fileno(), b"5", 0)  # resets the mark and nothing else, see proc(5)

    def _read_status(self) -> tuple[int, int]:
        text = os.pread(self._status.fileno(), 8192, 0)
        return tuple(int(text[text.index(name) :].split(None, 2)[1]) * 2**10 for name in (b"VmRSS:", b"VmHWM:"))


def pinned_bytes() -> int:
    """
    Host bytes that torch's pinned allocator owns, cached ones included.

    The streamer's buffers above 32 MiB are registered with the driver past that allocator and are not in it.
    """
    if not torch.cuda.is_initialized():
        return 0
    return torch.cuda.host_memory_stats_as_nested_dict().get("allocated_bytes", {}).get("current", 0)


class MemoryProbes:
    """
    All that can be read on this machine.

    Args:
        device (`torch.device`): That the model is trained on. Only CUDA devices have an allocator that is read.
    """

    def __init__(self, device: torch.device):
        on_gpu = device.type == "cuda"
        self.device = DeviceMemory(device) if on_gpu else None
        self.driver = DriverMemory(device) if on_gpu else None
        self.host = HostMemory()

    def read(self) -> dict[str, dict[str, int] | None]:
        """Everything: `device`, `nvml` and `host`; `None` for what there is not."""
        return {
            "device": None if self.device is None else self.device.read(),
            "nvml": None if self.driver is None else self.driver.read(),
            "host": self.host.read(),
        }

    def glance(self) -> dict[str, int | None]:
        """Within a step: `allocated` and `peak_allocated` on the device, `rss` and `peak_rss`; the peaks so far."""
        device, host = {} if self.device is None else self.device.read(), self.host.read()
        return {
            "allocated": device.get("allocated"),
            "peak_allocated": device.get("peak_allocated"),
            "rss": host["rss"],
            "peak_rss": host["peak_rss"],
        }

    def reset_peaks(self) -> None:
        """Peaks are counted from here on."""
        if self.device is not None:
            self.device.reset_peak()
        self.host.reset_peak()
