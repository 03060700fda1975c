"""
`MemoryProfilerCallback`: measures the memory of a training by step and phase.

A run is cut into *records*. Each covers the time since the last one, so no moment is left out. At its end the profiler
reads three sources, none of which waits for a device: torch's allocator, the driver (NVML) and the kernel (resident
memory of the process). Each keeps a high-water mark, which is reset for the next record, so no peak is missed.

A peak alone explains nothing. So in some steps, when gradients are complete and before the update, the profiler counts
every live tensor: each storage once, under weights, gradients, optimizer states, buffers of leaps or buffers of the
model. On a GPU the allocator's peak minus its bytes at that moment is what forward and backward needed beyond these:
activations. The rest is shown as `unexplained`, so the categories always add up to the measured bytes. On a CPU the
process holds much besides tensors (libraries, the C library's free lists), so activations are part of the rest.

Counting takes time in proportion to the number of tensors. The profiler counts only as often as this takes a quarter of
a percent of the run's time, and at the first step of each phase.
"""

from __future__ import annotations

import copy
import functools
import logging
import os
import time
import weakref
from pathlib import Path
from typing import Any

import psutil
import torch
import transformers
from torch import nn
from transformers import TrainerCallback

from hf_hybrid import machine
from hf_hybrid.files import own_folder
from hf_hybrid.machine import DeviceMemory, Driver
from hf_hybrid.optimizers import inner_optimizer
from hf_hybrid.plan.accounting import ByteTable, measure_held, storage_address
from hf_hybrid.records.log import PROFILE, LogFile, load_log
from hf_hybrid.records.readings import Totals

logger = logging.getLogger(__name__)

# Readings of allocator, driver and kernel.


class HostMemory:
    """
    Resident memory of this process. Its peak is the kernel's high-water mark where that can be reset (Linux), otherwise
    the highest of the values that were read; `peak_source` says which.
    """

    def __init__(self, process: Path = Path("/proc/self")):
        self.peak_source = "high-water mark"
        self._process, self._sampled = psutil.Process(), 0
        try:
            # Kept open, because opening them costs more than reading them.
            self._status = (process / "status").open("rb", buffering=0)
            self._marks = (process / "clear_refs").open("wb", buffering=0)
            self.reset_peak()
            self._read_status()
        except (OSError, ValueError) as error:
            logger.debug("The peak of resident memory is sampled: %s", error)
            self.peak_source = "sampled"

    def read(self) -> dict[str, int]:
        """Bytes: `rss`, its peak since [`reset_peak`], and what torch's pinned allocator holds."""
        if self.peak_source == "sampled":
            rss = self._process.memory_info().rss
            peak = self._sampled = max(self._sampled, rss)
        else:
            rss, peak = self._read_status()
        return {"rss": rss, "peak_rss": max(rss, peak), "pinned": machine.page_locked_bytes()}

    def reset_peak(self) -> None:
        self._sampled = 0
        if self.peak_source != "sampled":
            os.pwrite(self._marks.fileno(), b"5", 0)  # resets the mark and nothing else, see proc(5)

    def _read_status(self) -> tuple[int, int]:
        text = os.pread(self._status.fileno(), 8192, 0)
        rss, peak = (int(text[text.index(name) :].split(None, 2)[1]) * 2**10 for name in (b"VmRSS:", b"VmHWM:"))
        return rss, peak


class MemoryProbes:
    """All memory readings of this machine."""

    def __init__(self, device: torch.device):
        self.device = DeviceMemory.of(device)
        self.driver = Driver(device) if device.type == "cuda" else None
        self.host = HostMemory()

    def read(self, *, with_driver: bool = True) -> dict[str, Any]:
        """`device`, `nvml` and `host`; `None` for what this machine lacks. Without the driver it is quicker."""
        return {
            "device": None if self.device is None else self.device.read(),
            "nvml": None if self.driver is None or not with_driver else self.driver.read(),
            "host": self.host.read(),
        }

    def reset_peaks(self) -> None:
        if self.device is not None:
            self.device.reset_peak()
        self.host.reset_peak()


def held_bytes(trainer: Any, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> ByteTable:
    """Count all live tensors by category and place, also buffers of leaps and streamed layers of a `trainer`."""
    optimizer = inner_optimizer(optimizer)
    if not hasattr(trainer, "memory"):  # not one of ours
        return measure_held(model, optimizer)
    memory, buffers = trainer.memory, trainer.run.tensors_held()
    host = memory.host_tensors(buffers) if trainer.args.device.type == "cpu" else None
    host = None if host is None else {storage_address(tensor) for tensor in host}
    extra = memory.tensors_held({"drift": buffers})
    return measure_held(model, optimizer, extra=extra, host_storages=host)


# The callback.


def _while_running(hook):
    """A hook that does nothing outside a training, and counts its own time."""

    @functools.wraps(hook)
    def timed(self, *args, **kwargs):
        if not self._running:
            return
        start = time.perf_counter()
        try:
            hook(self, *args, **kwargs)
        finally:
            self.own_seconds += time.perf_counter() - start

    return timed


class MemoryProfilerCallback(TrainerCallback):
    """
    Records the memory of a training, for any `Trainer`, on a GPU or a CPU.

    The records go to `OUTPUT_DIR/profile/steps.jsonl`, line by line; docs/profiling.md describes them. The training
    itself is not changed: losses are equal to the last bit.

    Args:
        account_every (`int`, *optional*):
            Steps between counts of all live tensors. Default: as often as it takes a quarter of a percent of the
            time. The first step of each phase is always counted.

    Example:

    ```python
    profiler = MemoryProfilerCallback()
    trainer = Trainer(model, args, train_dataset=dataset, callbacks=[profiler])
    trainer.train()
    profiler.summary()["peak"]
    ```
    """

    ACCOUNTING_SHARE = 0.0025
    """Share of the training time for counting tensors, unless `account_every` is given."""

    def __init__(self, *, account_every: int | None = None):
        is_count = isinstance(account_every, int) and not isinstance(account_every, bool) and account_every >= 1
        if account_every is not None and not is_count:
            raise ValueError(
                f"`account_every` must be a whole number of steps from 1, got `{account_every!r}`. Leave it out to "
                "count tensors as often as it takes a quarter of a percent of the time."
            )
        self.account_every = account_every
        self.own_seconds = self._elapsed = 0.0
        self._trainer: weakref.ref | None = None
        self._log: LogFile
        self._running = False
        self._totals = Totals()

    def attach(self, trainer: transformers.Trainer) -> MemoryProfilerCallback:
        """
        Give the profiler its trainer, which callbacks do not know, and return it.

        With it the profiler knows the phases and buffers of a `HybridTrainer`, and comes before the callbacks of
        TensorBoard, W&B and others, so that they see its keys. `HybridTrainer` does this by itself.
        """
        callbacks = trainer.callback_handler.callbacks
        if self in callbacks:
            callbacks.remove(self)
        callbacks.insert(0, self)
        self._trainer = weakref.ref(trainer)
        return self

    @property
    def trainer(self):
        """The trainer that it was attached to, while that lives."""
        return None if self._trainer is None else self._trainer()

    # A run begins and ends.

    def on_train_begin(self, args, state, control, model: Any = None, optimizer: Any = None, **kwargs):
        folder = getattr(self.trainer, "run_folder", args.output_dir)  # of the trial in a hyperparameter search
        rank = f"-rank{args.process_index}" if args.process_index else ""
        self._log = LogFile(own_folder(Path(folder), PROFILE), writes=True, name=f"steps{rank}.jsonl")
        self._probes = MemoryProbes(args.device)
        self._last: dict | None = None
        self._steps, self._step, self._phase = 0, state.global_step, self._current_phase()
        self._accounted_at: dict[str, int] = {}
        self._held: tuple[ByteTable, dict | None] | None = None
        self._logged_peaks: dict[str, int] = {}
        held = held_bytes(self.trainer, model, optimizer)
        # What the process holds besides the run: libraries, data, whatever else the script has made.
        self._baseline = self._probes.host.read()["rss"] - held.total("device") - held.total("host")
        about: dict[str, Any] = {"baseline_rss": self._baseline, "peak_rss_source": self._probes.host.peak_source}
        self._log.begin(state.global_step, state.max_steps, **about)
        self._totals = Totals()
        for record in load_log(self._log.folder, name=self._log.path.name).lines:  # of the earlier parts of the run
            self._totals.add(record)
        self.own_seconds = self._accounting_seconds = self._elapsed = 0.0
        self._probes.reset_peaks()
        self._begun = self._section_begun = time.perf_counter()
        self._running = True

    @_while_running
    def on_train_end(self, args, state, control, **kwargs):
        self._running = False

    def _current_phase(self) -> str:
        return getattr(self.trainer, "phase_name", None) or "train"

    # One step.

    @_while_running
    def on_step_begin(self, args, state, control, **kwargs):
        self._step, self._phase = state.global_step + 1, self._current_phase()

    @_while_running
    def on_pre_optimizer_step(self, args, state, control, model: Any = None, optimizer=None, **kwargs):
        readings = self._probes.read(with_driver=False)  # also where the kernel keeps no mark of the peak
        # The first update makes the optimizer's states. Before it the table would lack them.
        if (self._steps > 0 or getattr(optimizer, "state", None)) and self._accounting_is_due():
            start = time.perf_counter()
            self._held = held_bytes(self.trainer, model, optimizer), readings["device"]
            self._accounted_at[self._phase] = self._steps
            self._accounting_seconds += time.perf_counter() - start

    @_while_running
    def on_step_end(self, args, state, control, **kwargs):
        self._steps += 1
        self._step = state.global_step
        self._log.add(self._close(self._phase))

    @_while_running
    def on_evaluate(self, args, state, control, **kwargs):
        self._log.add(self._close("evaluate"))

    on_predict = on_evaluate

    @_while_running
    def on_save(self, args, state, control, **kwargs):
        self._close("save")

    def _close(self, phase: str) -> dict:
        ended, readings = time.perf_counter(), self._probes.read()
        self._elapsed = ended - self._begun
        device, host = readings["device"], readings["host"]
        record: dict[str, Any] = {
            "step": self._step,
            "phase": phase,
            "seconds": self._elapsed,
            "step_seconds": ended - self._section_begun,
            **readings,
            "measured": host["peak_rss"] - self._baseline if device is None else device["peak_allocated"],
            "held": None,
            "unexplained": None,
        }
        if self._held is not None:
            record["held"], record["unexplained"] = self._explain(*self._held, record["measured"])
        self._totals.add(record)
        self._last = record
        for place, key in (("device", "peak_allocated"), ("host", "peak_rss")):
            if record[place] is not None:
                self._logged_peaks[key] = max(self._logged_peaks.get(key, 0), record[place][key])
        self._held = None
        self._probes.reset_peaks()
        self._section_begun = ended
        return record

    def _accounting_is_due(self) -> bool:
        last = self._accounted_at.get(self._phase)
        if last is None:
            return True
        if self.account_every is not None:
            return self._steps - last >= self.account_every
        return self._accounting_seconds <= self.ACCOUNTING_SHARE * (time.perf_counter() - self._begun)

    @staticmethod
    def _explain(counted: ByteTable, device: dict | None, measured: int) -> tuple[dict, int]:
        """Bytes by category, and the measured ones that are in none."""
        held = {category: {"device": there, "host": host} for category, there, host in counted.rows()}
        if device is None:
            return held, measured - counted.total("device") - counted.total("host")
        # What forward and backward needed at their peak beyond what was still there when they ended.
        held["activations"]["device"] += device["peak_allocated"] - device["allocated"]
        return held, measured - sum(places["device"] for places in held.values())

    # Output for users.

    @_while_running
    def on_log(self, args, state, control, logs: Any = None, **kwargs):
        if self._last is not None and "learning_rate" in logs:
            values = self._log_values(self._last)
            logs.update(values)
            if state.log_history and state.log_history[-1].get("step") == state.global_step:
                state.log_history[-1].update(values)

    def _log_values(self, last: dict) -> dict[str, float]:
        """For `Trainer.log`, in GiB: the last record, and the peaks since the last log."""
        peaks = self._logged_peaks
        values = {"rss": last["host"]["rss"], "peak_rss": peaks["peak_rss"]}
        if last["device"] is not None:
            values |= {name: last["device"][name] for name in ("allocated", "reserved")}
            values["peak_device"] = peaks["peak_allocated"]
        if last["nvml"] is not None:
            values["device_used"] = last["nvml"]["used"]
        self._logged_peaks = {}
        return {f"memory/{name}_gib": count / 2**30 for name, count in values.items()}

    def summary(self) -> dict:
        """
        Return the run so far as plain values: `peak` (bytes, step, phase), `phases` (mean, max and min of every
        reading, and mean bytes by category), `own_seconds` (of the profiler) and `seconds`.
        """
        return {
            "peak": self._totals.peak,
            "phases": copy.deepcopy(self._totals.phases),
            "seconds": self._elapsed,
            "own_seconds": self.own_seconds,
        }
