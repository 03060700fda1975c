"""`MemoryProfilerCallback`: what a run holds, step by step and phase by phase, measured while it trains."""

from __future__ import annotations

import functools
import logging
import os
import platform
import statistics
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import accelerate
import psutil
import torch
import transformers
from torch import nn
from transformers import TrainerCallback

import hf_hybrid
from hf_hybrid.plan.accounting import ByteTable, format_bytes, measure_held, storage_address
from hf_hybrid.report.run_folder import PROFILE, RunLog

logger = logging.getLogger(__name__)

# What the allocator, the driver and the system say of memory at one moment. Nothing here waits for a device.


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


# What a trainer can tell a profiler.


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


# Sums over the records of a run.

READINGS = {
    "step_seconds": ("step_seconds", None),
    "measured": ("measured", None),
    "allocated": ("device", "allocated"),
    "peak_allocated": ("device", "peak_allocated"),
    "reserved": ("device", "reserved"),
    "peak_reserved": ("device", "peak_reserved"),
    "nvml_used": ("nvml", "used"),
    "rss": ("host", "rss"),
    "peak_rss": ("host", "peak_rss"),
    "pinned": ("host", "pinned"),
}
"""Where a record has them; mean, max and min of each are kept by phase."""


def reading(record: dict, key: str, inner: str | None = None) -> float | None:
    """One number of a record; `None` where it was not measured."""
    value = record.get(key)
    return value if inner is None or value is None else value.get(inner)


def peak_of(record: dict) -> tuple[int, str]:
    """The peak of a record and whose it is: of the allocator where there is a device, else of the process."""
    peak = reading(record, "device", "peak_allocated")
    return (record["host"]["peak_rss"], "host") if peak is None else (peak, "device")


class Spread:
    """Mean, greatest and least of a series."""

    def __init__(self):
        self.count, self.total = 0, 0.0
        self.most, self.least = float("-inf"), float("inf")

    def add(self, value: float) -> None:
        """Count one more value."""
        self.count += 1
        self.total += value
        self.most, self.least = max(self.most, value), min(self.least, value)

    @property
    def mean(self) -> float:
        """Of what was added."""
        return self.total / self.count

    def to_dict(self) -> dict[str, float]:
        """`mean`, `max`, `min`."""
        return {"mean": self.mean, "max": self.most, "min": self.least}


class PhaseTotals:
    """What the records of one phase say together."""

    def __init__(self):
        self.records = 0
        self.spreads: dict[str, Spread] = {}
        self.accounted = 0
        self._held: dict[str, dict[str, int]] = {}
        self._unexplained = self._measured = 0

    def add(self, record: dict) -> None:
        """Count one more record."""
        self.records += 1
        for name, (key, inner) in READINGS.items():
            value = reading(record, key, inner)
            if value is not None:
                self.spreads.setdefault(name, Spread()).add(value)
        if record.get("held") is None:
            return
        self.accounted += 1
        self._unexplained += record["unexplained"]
        self._measured += record["measured"]
        for category, places in record["held"].items():
            sums = self._held.setdefault(category, dict.fromkeys(places, 0))
            for place, count in places.items():
                sums[place] += count

    def categories(self) -> dict[str, dict[str, float]]:
        """Mean bytes by category and place over the records that were accounted."""
        return {
            category: {place: count / self.accounted for place, count in sums.items()}
            for category, sums in self._held.items()
        }

    def to_dict(self) -> dict:
        """Plain values for JSON."""
        accounted = None
        if self.accounted:
            accounted = {
                "records": self.accounted,
                "measured": self._measured / self.accounted,
                "held": self.categories(),
                "unexplained": self._unexplained / self.accounted,
            }
        spreads = {name: spread.to_dict() for name, spread in self.spreads.items()}
        return {"records": self.records, **spreads, "accounted": accounted}


class RunTotals:
    """
    All records of a run.

    Args:
        spike_threshold (`float`): See [`SpikeWatch`].
    """

    def __init__(self, spike_threshold: float):
        self.phases: dict[str, PhaseTotals] = {}
        self.peak: dict | None = None
        self.most_measured = 0
        self.fullest: dict | None = None
        """Of the accounted records, the one that measured most."""
        self.spikes = SpikeWatch(spike_threshold)

    def add(self, record: dict) -> None:
        """Count one more record."""
        self.phases.setdefault(record["phase"], PhaseTotals()).add(record)
        peak, where = peak_of(record)
        if self.peak is None or peak > self.peak["bytes"]:
            self.peak = {"bytes": peak, "where": where, "step": record["step"], "phase": record["phase"]}
        self.most_measured = max(self.most_measured, record["measured"])
        self.spikes.add(record)
        if record.get("held") is not None:
            if self.fullest is None or record["measured"] > self.fullest["measured"]:
                self.fullest = record

    def add_all(self, records: Iterable[dict]) -> None:
        """Count what an earlier part of the run wrote; lines that are no such records are passed over."""
        for record in records:
            if isinstance(record, dict) and {"step", "phase", "host", "measured"} <= record.keys():
                self.add(record)

    def shares(self) -> dict | None:
        """What the fullest accounted record consists of, as fractions of what was measured."""
        record = self.fullest
        if record is None or record["measured"] <= 0:
            return None
        places = ("device",) if record["device"] is not None else ("device", "host")
        parts = {name: sum(held[place] for place in places) for name, held in record["held"].items()}
        parts["unexplained"] = record["unexplained"]
        return {
            "step": record["step"],
            "phase": record["phase"],
            "measured": record["measured"],
            "shares": {name: count / record["measured"] for name, count in parts.items()},
        }


class SpikeWatch:
    """
    Finds steps whose peak stands out of the last ones of their phase.

    Args:
        threshold (`float`): A spike is that much, as a fraction, above the median of the last steps of the phase.
    """

    WINDOW, LEAST, KEPT = 20, 5, 1000
    """Steps that the median is over at most and at least; spikes that are kept."""

    def __init__(self, threshold: float):
        self.threshold = threshold
        self.found: list[dict] = []
        self._peaks: dict[str, deque[int]] = {}
        self._high: set[str] = set()
        self._accounted: dict[str, dict] = {}
        self._last: dict[str, dict] = {}

    def rises(self, phase: str, peak: int) -> bool:
        """Whether this peak would begin a spike: several high steps on end are one."""
        return phase not in self._high and self._stands_out(phase, peak)

    def add(self, record: dict) -> None:
        """Judge one more record."""
        phase, (peak, where) = record["phase"], peak_of(record)
        high = self._stands_out(phase, peak)
        if high and phase not in self._high and len(self.found) < self.KEPT:
            usual = statistics.median(self._peaks[phase])
            spike = {"step": record["step"], "phase": phase, "where": where, "bytes": peak, "usual": usual}
            self.found.append({**spike, "changed": self._changes(record)})
        (self._high.add if high else self._high.discard)(phase)
        self._peaks.setdefault(phase, deque(maxlen=self.WINDOW)).append(peak)
        self._last[phase] = record
        if record.get("held") is not None:
            self._accounted[phase] = record

    def _stands_out(self, phase: str, peak: int) -> bool:
        peaks = self._peaks.get(phase, ())
        return len(peaks) >= self.LEAST and peak > (1 + self.threshold) * statistics.median(peaks)

    def _changes(self, record: dict) -> dict:
        """Against the last record of the phase, and the last one that was accounted."""
        last, accounted = self._last[record["phase"]], self._accounted.get(record["phase"])
        changed: dict = {"moment": _moment_of_peak(record)}
        for name in ("allocated", "reserved", "rss", "pinned"):
            now, before = (reading(one, *READINGS[name]) for one in (record, last))
            if now is not None and before is not None:
                changed[name] = now - before
        if record.get("held") is not None and accounted is not None:
            changed["since_step"] = accounted["step"]
            changed["held"] = {
                category: {place: count - accounted["held"][category][place] for place, count in places.items()}
                for category, places in record["held"].items()
                if places != accounted["held"][category]
            }
            changed["unexplained"] = record["unexplained"] - accounted["unexplained"]
        return changed


def _moment_of_peak(record: dict) -> str | None:
    """In which part of its step a record's peak was reached; `None` where nobody looked within it."""
    before = (record.get("moments") or {}).get("after_backward")
    if before is None:
        return None
    peak, where = peak_of(record)
    reached = before["peak_allocated" if where == "device" else "peak_rss"]
    return "forward and backward" if reached >= peak else "update"


# For people.


def table(summary: dict) -> str:
    """A summary of [`MemoryProfilerCallback`] as text: peaks by phase, and what they consist of."""
    if summary["peak"] is None:
        return "Nothing was profiled yet."
    peak = summary["peak"]
    lines = [f"highest {format_bytes(peak['bytes'])} ({_owner(peak['where'])}) in step {peak['step']}, {peak['phase']}"]
    if summary["achieved_over_floor"] is not None:
        floor = format_bytes(summary["floor"]["bytes"])
        lines[0] += f"; {summary['achieved_over_floor']:.2f} x the floor of {floor}"
    lines += ["", *_columns(list(_peak_rows(summary)))]
    parts = list(_part_rows(summary))
    if len(parts) > 1:
        whose = "of the device" if peak["where"] == "device" else "of the process, less what it held before the run"
        lines += ["", f"What the peak of a step consists of ({whose}), mean of the accounted steps:", ""]
        lines += _columns(parts)
    for spike in summary["spikes"][-5:]:
        bytes_, usual = format_bytes(spike["bytes"]), format_bytes(spike["usual"])
        lines.append(f"spike in step {spike['step']}, {spike['phase']}: {bytes_}, usually {usual}")
    for event in summary["out_of_memory"]:
        lines.append(f"out of memory in step {event['step']}, {event['phase']}: {event['folder']}")
    return "\n".join(lines)


def _owner(where: str) -> str:
    return "torch's allocator" if where == "device" else "resident memory of the process"


def _peak_rows(summary: dict) -> Iterator[list[str]]:
    name = "peak_allocated" if summary["peak"]["where"] == "device" else "peak_rss"
    others = [other for other in ("reserved", "nvml_used", "rss", "pinned") if other != name]
    phases = summary["phases"]
    others = [other for other in others if any(phase.get(other, {"max": 0})["max"] for phase in phases.values())]
    yield ["phase", "records", "seconds", "peak: mean", "max", "min", *others]
    for phase, found in phases.items():
        spread = found.get(name)
        cells = [format_bytes(spread[key]) for key in ("mean", "max", "min")] if spread else ["-"] * 3
        cells += [format_bytes(found[other]["mean"]) if other in found else "-" for other in others]
        yield [phase, str(found["records"]), f"{found['step_seconds']['mean']:.3f}", *cells]


def _part_rows(summary: dict) -> Iterator[list[str]]:
    places = ("device",) if summary["peak"]["where"] == "device" else ("device", "host")
    accounted = {phase: found["accounted"] for phase, found in summary["phases"].items() if found["accounted"]}
    names = [
        name
        for name in dict.fromkeys(name for found in accounted.values() for name in found["held"])
        if any(found["held"][name][place] for found in accounted.values() for place in places)
    ]
    yield ["phase", "accounted", *names, "unexplained", "measured"]
    for phase, found in accounted.items():
        parts = [sum(found["held"][name][place] for place in places) for name in names]
        cells = [format_bytes(count) for count in (*parts, found["unexplained"], found["measured"])]
        yield [phase, str(found["records"]), *cells]


def _columns(rows: list[list[str]]) -> list[str]:
    widths = [max(len(row[index]) for row in rows) for index in range(len(rows[0]))]
    return ["  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in rows]


# CUDA's out-of-memory errors.

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


# The callback.

FLOOR = ("weights", "gradients", "states")
"""What full training cannot do without, between the steps of a window."""


def _while_running(hook):
    """A hook that does nothing outside a training, and counts its own time."""

    @functools.wraps(hook)
    def timed(self, *args, **kwargs):
        if self._log is None:
            return
        start = time.perf_counter()
        try:
            hook(self, *args, **kwargs)
        finally:
            self.own_seconds += time.perf_counter() - start

    return timed


class MemoryProfilerCallback(TrainerCallback):
    """
    Writes down what a training holds: for any `Trainer`, on a GPU or a CPU.

    For every step there is a record of torch's allocator, the driver (NVML), the resident memory of the process and
    the peak of each within the step; from time to time every live tensor is counted, so that the peak is told by
    weights, gradients, optimizer states, activations, buffers, and what nobody can explain. It goes to
    `OUTPUT_DIR/profile`, line by line; docs/profiling.md describes the files. The training itself is not changed:
    losses are the same to the last bit.

    Args:
        account_every (`int`, *optional*):
            Steps between counts of all live tensors. Default: as often as it takes a quarter of a percent of the
            time. The first step of each phase, and one whose peak stands out, are always counted.
        spike_threshold (`float`, defaults to 0.1):
            A step is a spike if its peak is that much, as a fraction, above the usual one of its phase.
        log_keys (`bool`, defaults to `True`):
            Add `memory/...` values, in GiB, to what the trainer logs. See [`attach`].
        memory_history (`bool`, defaults to `False`):
            On a GPU: keep the last allocations with their stacks, so that an out-of-memory error leaves a snapshot for
            pytorch.org/memory_viz. Costs time at every allocation.
        output_dir (`str` or `Path`, *optional*):
            Where the folder `profile` is made. Default: the `output_dir` of the trainer.

    Raises:
        ValueError: If `account_every` is below 1 or `spike_threshold` is not above 0.

    Example:

    ```python
    profiler = MemoryProfilerCallback()
    trainer = Trainer(model, args, train_dataset=dataset, callbacks=[profiler])
    trainer.train()
    print(profiler)
    ```
    """

    ACCOUNTING_SHARE = 0.0025
    """Of the time of training, for counting tensors, where `account_every` does not say."""
    RECORDS_KEPT = 50
    """That an out-of-memory error leaves."""
    EVENTS_KEPT = 100
    """Out-of-memory errors that the summary lists."""
    SNAPSHOTS_KEPT = 3
    """CUDA snapshots of one run: they are large, and a trainer that retries may run out of memory often."""

    def __init__(
        self,
        *,
        account_every: int | None = None,
        spike_threshold: float = 0.1,
        log_keys: bool = True,
        memory_history: bool = False,
        output_dir: str | Path | None = None,
    ):
        is_count = isinstance(account_every, int) and not isinstance(account_every, bool) and account_every >= 1
        if account_every is not None and not is_count:
            raise ValueError(
                f"`account_every` must be a whole number of steps from 1, got `{account_every!r}`. Leave it out to "
                "count tensors as often as it takes a quarter of a percent of the time."
            )
        if isinstance(spike_threshold, bool) or not spike_threshold > 0:
            raise ValueError(
                f"`spike_threshold` must be above 0, got `{spike_threshold!r}`: it is a fraction of the usual peak, "
                "for example 0.1 for a tenth above it."
            )
        self.account_every, self.spike_threshold = account_every, spike_threshold
        self.log_keys, self.memory_history, self.output_dir = log_keys, memory_history, output_dir
        self.own_seconds = 0.0
        self._trainer: weakref.ref | None = None
        self._log: RunLog | None = None
        self._totals = RunTotals(spike_threshold)
        self._floor: dict | None = None
        self._events: list[dict] = []
        self._elapsed = 0.0

    def attach(self, trainer) -> MemoryProfilerCallback:
        """
        Let the profiler see its trainer, which callbacks are not told of.

        With it, phases and the buffers of a `HybridTrainer` are known, and the profiler comes before the callbacks of
        TensorBoard, W&B and others, so that they see its keys. `HybridTrainer` does this by itself.

        Args:
            trainer (`Trainer`): That the profiler is, or is to be, a callback of.

        Returns:
            `MemoryProfilerCallback`: Itself.
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

    def on_train_begin(self, args, state, control, model=None, optimizer=None, **kwargs):
        folder = Path(self.output_dir or args.output_dir) / PROFILE
        resumed = state.global_step > 0
        if self._log is not None:  # of a training that an error ended
            self._log.close()
        self._log = RunLog(folder, rank=args.process_index, resumed=resumed)
        self._probes = MemoryProbes(args.device)
        self._totals = RunTotals(self.spike_threshold)
        if resumed:
            self._totals.add_all(self._log.records())
        self._marks_resumption = {"steps": resumed, "logs": resumed}
        self._recent: deque[dict] = deque(maxlen=self.RECORDS_KEPT)
        self._floor, self._events, self._snapshots = None, [], 0
        self._evaluating, self._steps, self._step = False, 0, state.global_step
        self._phase, self._stage = self._current_phase(), "before the first step"
        self._accounted_at: dict[str, int] = {}
        self._held: tuple[ByteTable, dict] | None = None
        self._moments: dict[str, dict] = {}
        self._logged_peaks: dict[str, int] = {}
        held = held_bytes(self.trainer, model, optimizer)
        # What the process holds beside the run: libraries, data, whatever else the script has made.
        self._baseline = self._probes.host.read()["rss"] - held.total("device") - held.total("host")
        self._run = self._describe(args, state, model)
        self._log.write_run(self._run)
        if args.device.type == "cuda":
            if not listen(self._about_to_raise):
                logger.info("This build of torch tells nobody of out-of-memory errors: none will be recorded.")
            if self.memory_history:
                record_history(True)
        self.own_seconds = self._accounting_seconds = self._elapsed = 0.0
        self._probes.reset_peaks()
        self._begun = self._section_begun = time.perf_counter()

    @_while_running
    def on_train_end(self, args, state, control, **kwargs):
        self._write_summary()
        stop_listening()
        if self.memory_history and args.device.type == "cuda":
            record_history(False)
        self._log.close()
        self._log = None

    def _describe(self, args, state, model) -> dict:
        device = {"type": args.device.type, "name": platform.processor() or platform.machine()}
        if args.device.type == "cuda":
            properties = torch.cuda.get_device_properties(args.device)
            device = {"type": "cuda", "name": properties.name, "total_memory": properties.total_memory}
        parameters = list(model.parameters())
        config = getattr(model, "config", None)
        return {
            "versions": {
                "hf_hybrid": hf_hybrid.__version__,
                "torch": torch.__version__,
                "transformers": transformers.__version__,
                "accelerate": accelerate.__version__,
                "python": platform.python_version(),
            },
            "device": device,
            "processes": args.world_size,
            "model": {"type": type(model).__name__, "name": getattr(config, "name_or_path", None) or None},
            "parameters": {
                "total": sum(p.numel() for p in parameters),
                "trainable": sum(p.numel() for p in parameters if p.requires_grad),
            },
            "max_steps": state.max_steps,
            "begun_at_step": state.global_step,
            "begun": time.time(),
            "options": {
                "account_every": self.account_every,
                "spike_threshold": self.spike_threshold,
                "log_keys": self.log_keys,
                "memory_history": self.memory_history,
            },
            "peak_rss_source": self._probes.host.peak_source,
            "baseline_rss": self._baseline,
            "floor": None,
        }

    # One step.

    @_while_running
    def on_step_begin(self, args, state, control, **kwargs):
        self._step, self._phase, self._stage = state.global_step + 1, self._current_phase(), "forward and backward"

    @_while_running
    def on_pre_optimizer_step(self, args, state, control, model=None, optimizer=None, **kwargs):
        glance = self._moments["after_backward"] = self._probes.glance()
        self._stage = "update"
        # The states are made by the first update; before it the table would lack them.
        if (self._steps > 0 or getattr(optimizer, "state", None)) and self._accounting_is_due(glance):
            self._account(model, optimizer, glance)

    @_while_running
    def on_optimizer_step(self, args, state, control, **kwargs):
        self._moments["after_update"] = self._probes.glance()

    @_while_running
    def on_step_end(self, args, state, control, **kwargs):
        self._steps += 1
        self._step, self._stage = state.global_step, "between steps"
        self._log.add_step(self._close(self._phase))

    @_while_running
    def on_prediction_step(self, args, state, control, **kwargs):
        self._evaluating, self._stage = True, "evaluation"

    @_while_running
    def on_evaluate(self, args, state, control, **kwargs):
        self._evaluating, self._stage = False, "between steps"
        self._log.add_step(self._close("evaluate"))

    on_predict = on_evaluate

    @_while_running
    def on_save(self, args, state, control, **kwargs):
        self._close("save")
        self._write_summary()

    def _current_phase(self) -> str:
        return phase_of(self.trainer) or "train"

    def _close(self, phase: str) -> dict:
        """The record of everything since the last one."""
        now, readings = time.perf_counter(), self._probes.read()
        self._elapsed = now - self._begun
        record = {
            "step": self._step,
            "phase": phase,
            "seconds": self._elapsed,
            "step_seconds": now - self._section_begun,
            **readings,
            "measured": self._measured(readings),
            "held": None,
            "unexplained": None,
            "moments": self._moments or None,
        }
        if self._held is not None:
            record["held"], record["unexplained"] = self._explain(record["measured"])
        if self._marks_resumption["steps"]:
            record["resumed"], self._marks_resumption["steps"] = True, False
        self._totals.add(record)
        self._recent.append(record)
        for place, key in (("device", "peak_allocated"), ("host", "peak_rss")):
            if record[place] is not None:
                self._logged_peaks[key] = max(self._logged_peaks.get(key, 0), record[place][key])
        self._moments, self._held = {}, None
        self._probes.reset_peaks()
        self._section_begun = now
        return record

    # What it consists of.

    def _measured(self, readings: dict) -> int:
        """The peak that the run is answerable for."""
        peak, where = peak_of(readings)
        return peak if where == "device" else peak - self._baseline

    def _accounting_is_due(self, glance: dict) -> bool:
        last = self._accounted_at.get(self._phase)
        peak = glance["peak_rss"] if glance["peak_allocated"] is None else glance["peak_allocated"]
        if last is None or self._totals.spikes.rises(self._phase, peak):
            return True
        if self.account_every is not None:
            return self._steps - last >= self.account_every
        return self._accounting_seconds <= self.ACCOUNTING_SHARE * (time.perf_counter() - self._begun)

    def _account(self, model, optimizer, glance: dict) -> None:
        start = time.perf_counter()
        held = held_bytes(self.trainer, model, optimizer)
        self._held, self._accounted_at[self._phase] = (held, glance), self._steps
        if self._floor is None and held.get("gradients", "device") + held.get("gradients", "host") > 0:
            self._floor = self._floor_of(held)
            self._run["floor"] = self._floor
            self._log.write_run(self._run)
        self._accounting_seconds += time.perf_counter() - start

    def _floor_of(self, held: ByteTable) -> dict:
        device, host = (sum(held.get(name, place) for name in FLOOR) for place in ("device", "host"))
        on_gpu = self._probes.device is not None
        parts = {name: {place: held.get(name, place) for place in ("device", "host")} for name in FLOOR}
        return {"bytes": device if on_gpu else device + host, "device": device, "host": host, "held": parts}

    def _explain(self, measured: int) -> tuple[dict, int]:
        """Bytes by category, and what of the measured ones is in none."""
        table, glance = self._held
        held = {category: {"device": device, "host": host} for category, device, host in table.rows()}
        if glance["allocated"] is None:
            return held, measured - table.total("device") - table.total("host")
        # What forward and backward needed at their peak beyond what was there when they ended.
        held["activations"]["device"] += glance["peak_allocated"] - glance["allocated"]
        return held, measured - sum(places["device"] for places in held.values())

    # Telling.

    @_while_running
    def on_log(self, args, state, control, logs=None, **kwargs):
        if self.log_keys and self._recent and "learning_rate" in logs:
            values = self._log_values()
            logs.update(values)
            if state.log_history and state.log_history[-1].get("step") == state.global_step:
                state.log_history[-1].update(values)
        phase = "evaluate" if self._evaluating else self._phase
        seconds = time.perf_counter() - self._begun
        entry = {"step": state.global_step, "phase": phase, "seconds": seconds, "time": time.time(), "logs": dict(logs)}
        if self._marks_resumption["logs"]:
            entry["resumed"], self._marks_resumption["logs"] = True, False
        self._log.add_log(entry)

    def _log_values(self) -> dict[str, float]:
        """For `Trainer.log`: the last record, and the peaks since the last time."""
        last, peaks = self._recent[-1], self._logged_peaks
        found = {"memory/rss_gib": last["host"]["rss"], "memory/peak_rss_gib": peaks["peak_rss"]}
        if last["device"] is not None:
            found["memory/allocated_gib"] = last["device"]["allocated"]
            found["memory/reserved_gib"] = last["device"]["reserved"]
            found["memory/peak_device_gib"] = peaks["peak_allocated"]
        if last["nvml"] is not None:
            found["memory/device_used_gib"] = last["nvml"]["used"]
        self._logged_peaks = {}
        return {name: count / 2**30 for name, count in found.items()}

    def summary(self) -> dict:
        """
        The run so far as plain values: `peak` (bytes, step, phase), `phases` (mean, max and min of every reading, and
        mean bytes by category), `shares` of the fullest record, `spikes`, `out_of_memory`, `floor` and
        `achieved_over_floor`, `own_seconds` (of the profiler) and `seconds`.
        """
        found, floor = self._totals, self._floor
        return {
            "peak": found.peak,
            "floor": floor,
            "achieved_over_floor": None if not floor or not floor["bytes"] else found.most_measured / floor["bytes"],
            "phases": {phase: numbers.to_dict() for phase, numbers in found.phases.items()},
            "shares": found.shares(),
            "spikes": found.spikes.found,
            "out_of_memory": self._events,
            "seconds": self._elapsed,
            "own_seconds": self.own_seconds,
        }

    def table(self) -> str:
        """The summary for people: peaks by phase, and what they consist of."""
        return table(self.summary())

    __str__ = table

    def _write_summary(self) -> None:
        self._log.write_summary(self.summary())

    # Out of memory.

    def record_out_of_memory(self, error: BaseException | None = None) -> Path | None:
        """
        Write down what is known of an out-of-memory error: its message and the last records; on a GPU with
        `memory_history` also torch's snapshot. `HybridTrainer` calls this before it retries; after an error of a plain
        `Trainer` you can, in your `except`. CUDA's errors are recorded without it, while the memory is still full.

        Args:
            error (`BaseException`, *optional*): The error. Only its text is kept.

        Returns:
            `Path`: The folder; `None` outside a training.
        """
        return None if self._log is None else self._record_out_of_memory(None if error is None else str(error), None)

    def _about_to_raise(self, requested: int) -> None:
        if self._log is not None:
            self._record_out_of_memory(None, requested)

    def _record_out_of_memory(self, message: str | None, requested: int | None) -> Path:
        """The allocator tells first, by `requested`; a `message` that follows belongs to the same error."""
        folder = self._log.out_of_memory_folder(self._step)
        event = self._events[-1] if self._events else None
        if requested is not None or event is None or event["step"] != self._step or event["error"] is not None:
            phase = "evaluate" if self._evaluating else self._phase
            event = {"step": self._step, "phase": phase, "stage": self._stage, "time": time.time(), "error": None}
            event |= {"requested": requested, "folder": folder.name}
            self._events = [*self._events, event][-self.EVENTS_KEPT :]
            logger.warning("Out of memory in step %d (%s, %s): `%s`.", self._step, phase, self._stage, folder)
        event["error"] = message
        values = {**event, **self._probes.read(), "records": list(self._recent)}
        with_snapshot = self.memory_history and self._probes.device is not None
        dump = torch.cuda.memory._dump_snapshot if with_snapshot and self._snapshots < self.SNAPSHOTS_KEPT else None
        self._snapshots += self._log.write_out_of_memory(self._step, values, dump) is not None
        self._write_summary()
        return folder
