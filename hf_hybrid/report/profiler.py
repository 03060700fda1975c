"""`MemoryProfilerCallback`: what a run holds, step by step and phase by phase, measured while it trains."""

from __future__ import annotations

import functools
import logging
import platform
import time
import weakref
from collections import deque
from pathlib import Path

import accelerate
import torch
import transformers
from transformers import TrainerCallback

import hf_hybrid
from hf_hybrid.plan.accounting import ByteTable
from hf_hybrid.report.out_of_memory import listen, record_history, stop_listening
from hf_hybrid.report.run_log import RunLog
from hf_hybrid.report.snapshots import MemoryProbes
from hf_hybrid.report.sources import held_bytes, phase_of
from hf_hybrid.report.totals import RunTotals, peak_of, table

logger = logging.getLogger(__name__)

FOLDER_NAME = "profile"
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
        folder = Path(self.output_dir or args.output_dir) / FOLDER_NAME
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
