"""
The output folder of a run: write the profile, and read all records.

A run may have finished or been killed, so no file is required and half a line is no error. Everything is read as plain
JSON. `training_args.bin` and other pickles are not opened. Importing this needs no torch.
"""

from __future__ import annotations

import json
import logging
import math
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

logger = logging.getLogger(__name__)

PHASES = ("warmup", "full", "predict", "correct")
"""Of hybrid runs, in the order of `Phase.index`."""
PROFILE = "profile"
_CHECKPOINT = re.compile(r"checkpoint-(\d+)")

# Writing.


class RunLog:
    """
    Writes one process's part of a profile folder; docs/profiling.md describes its files.

    Every line is handed to the system at once, so that a killed run keeps all of them. A new run moves what lies there
    to a folder of the same name with `-previous` behind it; a resumed one appends, and marks its first lines. Other
    processes than the first write only their own `steps-rankN.jsonl` and `oom-STEP-rankN`.
    """

    def __init__(self, folder: str | Path, *, rank: int = 0, resumed: bool = False):
        self.folder, self.rank, self.resumed = Path(folder).absolute(), rank, resumed  # scripts may change their folder
        self.steps_name = "steps.jsonl" if rank == 0 else f"steps-rank{rank}.jsonl"
        if rank == 0 and not resumed and self.folder.is_dir() and os.listdir(self.folder):
            previous = self.folder.with_name(self.folder.name + "-previous")
            shutil.rmtree(previous, ignore_errors=True)
            self.folder.rename(previous)
        self.folder.mkdir(parents=True, exist_ok=True)
        self._files: dict[str, BinaryIO] = {}
        self.broken = False

    def write(self, name: str, values: dict) -> None:
        """Replace `run.json` or `summary.json`."""
        if self.rank == 0:
            self._try(name, lambda: _write_json(self.folder / name, values))

    def add_step(self, record: dict) -> None:
        """Add a line to `steps.jsonl`."""
        self._append(self.steps_name, record)

    def add_log(self, entry: dict) -> None:
        """Add a line to `logs.jsonl`."""
        if self.rank == 0:
            self._append("logs.jsonl", entry)

    def records(self) -> Iterator[dict]:
        """What this process wrote to its steps so far, without a line that a kill cut short."""
        yield from read_lines(self.folder / self.steps_name, [])

    def out_of_memory_folder(self, step: int) -> Path:
        """The folder of an out-of-memory error in step `step`."""
        return self.folder / (f"oom-{step}" if self.rank == 0 else f"oom-{step}-rank{self.rank}")

    def write_out_of_memory(self, step: int, values: dict, dump: Callable[[str], None] | None = None) -> Path | None:
        """
        Write `records.json` of an error, and the `cuda_snapshot.pickle` of the first error in a step by calling `dump`
        with its path. Returns the snapshot, if it was written now.
        """
        folder = self.out_of_memory_folder(step)
        snapshot = folder / "cuda_snapshot.pickle"

        def write() -> Path | None:
            folder.mkdir(parents=True, exist_ok=True)
            _write_json(folder / "records.json", values)
            if dump is None or snapshot.exists():
                return None
            dump(str(snapshot))
            return snapshot

        return self._try(folder.name, write)

    def close(self) -> None:
        """Close the files."""
        while self._files:
            self._files.popitem()[1].close()

    def _append(self, name: str, entry: dict) -> None:
        if self.resumed and name not in self._files:
            entry = {**entry, "resumed": True}
        line = json.dumps(plain(entry), allow_nan=False, default=str)

        def write() -> None:
            if name not in self._files:
                self._files[name] = self._open(self.folder / name)
            self._files[name].write(f"{line}\n".encode())

        self._try(name, write)

    def _try(self, name: str, write: Callable[[], Path | None]) -> Path | None:
        """Write, and after the first error write nothing more, because a full disk must not end a training."""
        if self.broken:
            return None
        try:
            return write()
        except OSError as error:
            self.broken = True
            logger.warning("`%s` cannot be written. The training goes on without it: %s", self.folder / name, error)
            return None

    def _open(self, path: Path) -> BinaryIO:
        """Unbuffered. A kill may have left half of a line: then a new line is begun."""
        # The old folder of a new run was moved away, but an old file of another rank was not.
        file = path.open("ab" if self.resumed or self.rank == 0 else "wb", buffering=0)
        if file.tell() and not path.read_bytes().endswith(b"\n"):
            file.write(b"\n")
        return file


def _write_json(path: Path, values: dict) -> None:
    from hf_hybrid.checkpoint import write_json  # here, because it needs torch and a report does not

    write_json(path, plain(values))


def plain(value: Any) -> Any:
    """`value` as JSON can hold it: what is not a finite number becomes `None`."""
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if getattr(value, "ndim", None) == 0:  # of numpy or torch
        value = value.item()
    return None if isinstance(value, float) and not math.isfinite(value) else value


# Reading.


@dataclass
class Profile:
    """What `MemoryProfilerCallback` wrote; see docs/profiling.md for the fields. Empty for a run without one."""

    run: dict = field(default_factory=dict)
    steps: list[dict] = field(default_factory=list)
    """Of the first process, by step. A step that a resumed run trained again is there once, as trained last."""
    logs: list[dict] = field(default_factory=list)
    summary: dict = field(default_factory=dict)
    out_of_memory: list[dict] = field(default_factory=list)
    """One by `oom-STEP` folder: `step`, `folder`, `phase`, `stage`, `error`, `requested` bytes."""
    ranks: dict[int, list[dict]] = field(default_factory=dict)
    """Steps of the other processes."""
    seconds: float = 0.0
    """From the begin to the last record, summed over the parts of a resumed run."""


@dataclass
class Run:
    """A run, as far as its folder records it."""

    folder: Path
    logs: list[dict]
    """Everything that was logged, by step: the newest checkpoint's history and what the profiler wrote after it."""
    record: dict
    """Counters and leaps of the hybrid trainer; empty for plain `Trainer`."""
    record_source: str | None
    config: dict
    """Options that differ from the defaults (`hybrid_config.json`)."""
    options: dict
    """All hybrid options, where a checkpoint holds them."""
    profile: Profile
    recoveries: list[dict]
    """What was done each time that memory ran out and the run went on."""
    last_step: int
    max_steps: int | None
    finished: bool
    notes: list[str] = field(default_factory=list)
    """Notes on files that could not be read."""

    @property
    def name(self) -> str:
        return self.folder.name or str(self.folder)

    @property
    def record_steps(self) -> int:
        """Steps that the record covers."""
        return _steps_of(self.record)

    @property
    def leaps(self) -> list[dict]:
        """Records of the leaps that have a step."""
        leaps = self.record.get("leaps")
        found = [leap for leap in leaps if isinstance(leap, dict)] if isinstance(leaps, list) else []
        return [leap for leap in found if number(leap.get("step")) is not None]

    def series(self, key: str) -> list[tuple[int, float]]:
        """`(step, value)` of everything logged under `key` that is a finite number."""
        found = ((entry["step"], number(entry.get(key))) for entry in self.logs)
        return [(step, value) for step, value in found if value is not None]


def number(value: object) -> float | None:
    """`value` if it is a finite number, else `None`: files may hold nulls, strings, NaN."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return value if math.isfinite(value) else None


def reading(entry: dict, name: str) -> float | None:
    """A number out of a record by its dotted name: `device.peak_allocated`."""
    part, _, key = name.partition(".")
    value = entry.get(part)
    return number(as_dict(value).get(key) if key else value)


def peak_of(entry: dict) -> tuple[float | None, str]:
    """Highest use within a record: of torch's allocator where there is a device, else of the process."""
    peak = reading(entry, "device.peak_allocated")
    if peak is not None:
        return peak, "device"
    peak = reading(entry, "host.peak_rss")
    return reading(entry, "host.rss") if peak is None else peak, "host"


def as_dict(value: object) -> dict:
    """`value` if it is a dictionary, else an empty one."""
    return value if isinstance(value, dict) else {}


def load_run(folder: str | Path) -> Run:
    """
    Read the output folder of a `HybridTrainer` or `Trainer`, or one of its checkpoints.

    Raises:
        ValueError: If there is no such folder, or nothing in it that a report could show.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise ValueError(f"`{folder}` is not a folder. Pass the `output_dir` of a run.")
    notes: list[str] = []
    config = as_dict(_read(folder / "hybrid_config.json", notes))
    checkpoint, state = _newest_checkpoint(folder, notes)
    saved = as_dict(_read(checkpoint / "hybrid_state.json", notes)) if checkpoint else {}
    profile = _load_profile(folder / PROFILE, notes)
    logs = _merge_logs(state.get("log_history"), profile.logs)
    record, source = _newest_record(folder, checkpoint, saved, notes)
    steps = [int(number(state.get("global_step")) or 0), *(entry["step"] for entry in logs[-1:])]
    steps += [*(entry["step"] for entry in profile.steps[-1:]), _steps_of(record)]
    if not logs and not record and not profile.steps:
        raise ValueError(_nothing_found(folder, bool(config)))
    max_steps = next(filter(None, (number(source.get("max_steps")) for source in (state, profile.run, config))), None)
    last_step, ended = max(steps), source == "hybrid_summary.json" and _steps_of(record) >= max(steps)
    return Run(
        folder=folder.resolve(),
        logs=logs,
        record=record,
        record_source=source,
        config=config,
        options=as_dict(saved.get("options")),
        profile=profile,
        recoveries=_recoveries(record, checkpoint, notes),
        last_step=last_step,
        max_steps=int(max_steps) if max_steps and max_steps > 0 else None,
        finished=ended or any("train_runtime" in entry for entry in logs) or bool(max_steps and last_step >= max_steps),
        notes=notes,
    )


def _nothing_found(folder: Path, started: bool) -> str:
    if started:
        return (
            f"`{folder}` holds only `hybrid_config.json`: the run ended before its first checkpoint, and nothing that "
            "it measured was written. A lower `save_steps`, or `MemoryProfilerCallback`, which writes as it goes, "
            "leaves something to report on."
        )
    return (
        f"`{folder}` holds nothing to report on: no `hybrid_summary.json`, no `checkpoint-*/trainer_state.json` and no "
        "`profile/steps.jsonl`. Pass the `output_dir` of a run that saved a checkpoint, ended, or was profiled."
    )


# Files.


def _read(path: Path, notes: list[str]) -> object:
    """The JSON in a file; `None` if there is none or it is broken, which is noted."""
    if not path.is_file():
        return None
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        notes.append(f"`{path.name}` in `{path.parent.name}` cannot be read and was left out.")
        return None


def read_lines(path: Path, notes: list[str]) -> list[dict]:
    """The objects of a JSON Lines file; a run that was killed may have left half of its last line."""
    if not path.is_file():
        return []
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    found, broken = [], 0
    for line in lines:
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except ValueError:
            value = None
        if isinstance(value, dict) and number(value.get("step")) is not None:
            found.append({**value, "step": int(value["step"])})
        else:
            broken += 1
    if broken:
        notes.append(f"{broken} of {len(lines)} lines of `{path.name}` cannot be read and were left out.")
    return found


def _numbered(folder: Path, pattern: re.Pattern) -> Iterator[tuple[int, Path]]:
    for path in folder.iterdir():
        match = pattern.fullmatch(path.name)
        if match:
            yield int(match[1]), path


# Checkpoints, and the record of the hybrid trainer.


def _newest_checkpoint(folder: Path, notes: list[str]) -> tuple[Path | None, dict]:
    """The folder and the `trainer_state.json` that went farthest; half-written ones are skipped."""
    candidates = [folder, *(path for _, path in sorted(_numbered(folder, _CHECKPOINT), reverse=True))]
    best, best_state = None, {}
    for candidate in candidates:
        state = as_dict(_read(candidate / "trainer_state.json", notes))
        if isinstance(state.get("log_history"), list) and _step_of(state) > _step_of(best_state):
            best, best_state = candidate, state
        if best not in (None, folder):
            break
    if best == folder and not (folder / "hybrid_state.json").is_file():
        # `Trainer.save_state` leaves the history in the output folder; the engine's record is in the checkpoints.
        holding = [path for path in candidates[1:] if (path / "hybrid_state.json").is_file()]
        return (holding[0] if holding else best), best_state
    return best, best_state


def _step_of(state: dict) -> float:
    return number(state.get("global_step")) if number(state.get("global_step")) is not None else -1


def _steps_of(record: dict) -> int:
    steps = as_dict(record.get("steps_by_phase")).values()
    return int(sum(number(count) or 0 for count in steps))


def _newest_record(folder: Path, checkpoint: Path | None, saved: dict, notes: list[str]):
    """Of the summary, which only a run that ended leaves, and the newest checkpoint, the one that went farther."""
    summary = as_dict(_read(folder / "hybrid_summary.json", notes))
    found = as_dict(as_dict(saved.get("run")).get("record"))
    if summary and _steps_of(summary) >= _steps_of(found):
        return summary, "hybrid_summary.json"
    if found:
        return found, f"{checkpoint.name}/hybrid_state.json"
    return {}, None


def _recoveries(record: dict, checkpoint: Path | None, notes: list[str]) -> list[dict]:
    """From the summary, else from the checkpoint."""
    events = record.get("out_of_memory")
    if not isinstance(events, list) and checkpoint is not None:
        events = as_dict(_read(checkpoint / "out_of_memory.json", notes)).get("events")
    return [event for event in events if isinstance(event, dict)] if isinstance(events, list) else []


# Logs and profile.


def _without_abandoned(entries: Iterable[dict]) -> list[dict]:
    """Where the steps go back, the run was resumed: what an earlier part wrote from there on was abandoned."""
    kept: list[dict] = []
    for entry in entries:
        if kept and (entry["step"] < kept[-1]["step"] or entry.get("resumed")):
            kept = [earlier for earlier in kept if earlier["step"] < entry["step"]]
        kept.append(entry)
    return kept


def _merge_logs(history: object, profiled: list[dict]) -> list[dict]:
    """The newest checkpoint's history, and behind it what only the profiler saw."""
    history = history if isinstance(history, list) else []
    entries = [as_dict(entry) for entry in history]
    entries = [{**entry, "step": int(entry["step"])} for entry in entries if number(entry.get("step")) is not None]
    last = max((entry["step"] for entry in entries), default=-1)
    at_last = {key for entry in entries if entry["step"] == last for key in entry}
    for entry in profiled:
        new = {key: value for key, value in entry.items() if entry["step"] > last or key not in at_last}
        if entry["step"] > last or (entry["step"] == last and any(number(value) is not None for value in new.values())):
            entries.append({**new, "step": entry["step"]})
    return sorted(entries, key=lambda entry: entry["step"])


def _flat(entry: dict) -> dict:
    """A line of `logs.jsonl` as `log_history` has it."""
    return {**{key: value for key, value in entry.items() if key != "logs"}, **as_dict(entry.get("logs"))}


def _load_profile(folder: Path, notes: list[str]) -> Profile:
    if not folder.is_dir():
        return Profile()
    steps = read_lines(folder / "steps.jsonl", notes)
    if not steps and not (folder / "run.json").is_file():
        return Profile()
    crashes = []
    for step, path in sorted(_numbered(folder, re.compile(r"oom-(\d+)(?:-rank\d+)?"))):
        told = as_dict(_read(path / "records.json", notes))
        names = ("phase", "stage", "error", "requested")
        crashes.append({"step": step, "folder": path.name, **{name: told.get(name) for name in names}})
    ranks = _numbered(folder, re.compile(r"steps-rank(\d+)\.jsonl"))
    return Profile(
        run=as_dict(_read(folder / "run.json", notes)),
        steps=_without_abandoned(steps),
        logs=_without_abandoned(_flat(entry) for entry in read_lines(folder / "logs.jsonl", notes)),
        summary=as_dict(_read(folder / "summary.json", notes)),
        out_of_memory=crashes,
        ranks={rank: _without_abandoned(read_lines(path, notes)) for rank, path in sorted(ranks)},
        seconds=_total_seconds(steps),
    )


def _total_seconds(steps: list[dict]) -> float:
    """The clock starts again with every part of a resumed run."""
    total = last = 0.0
    for entry in steps:
        seconds = number(entry.get("seconds"))
        if seconds is None:
            continue
        if seconds < last or entry.get("resumed"):
            total += last
        last = seconds
    return total + last


# Phases of the steps.


def phases_by_step(run: Run) -> dict[int, str]:
    """
    The phase of every step for which it is known, `global_step` to name.

    From the profile; else from what was logged at each step; else Warmup and Predict from the record, and `real` for
    steps of Full or Correct, which it does not tell apart.
    """
    if run.profile.steps:
        phases = ((entry["step"], entry.get("phase")) for entry in run.profile.steps)
        return {step: phase for step, phase in phases if isinstance(phase, str) and phase != "evaluate"}
    logged = {step: PHASES[int(index)] for step, index in run.series("hybrid/phase") if 0 <= index < len(PHASES)}
    if not run.record or len(logged) >= 0.9 * run.last_step:
        return logged
    warmup = number(as_dict(run.record.get("steps_by_phase")).get("warmup")) or 0
    found = {step: "warmup" if step <= warmup else "real" for step in range(1, _steps_of(run.record) + 1)}
    for leap in run.leaps:
        first = int(leap["step"]) + 1  # leaps count steps from 0, Trainer from 1
        for step in range(first, first + int(number(leap.get("horizon")) or 0)):
            if step in found:
                found[step] = "predict"
    return found
