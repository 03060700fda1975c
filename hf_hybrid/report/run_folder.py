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
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from hf_hybrid.hub.provenance import shareable

logger = logging.getLogger(__name__)
T = TypeVar("T")

PHASES = ("warmup", "full", "predict", "correct")
"""Of hybrid runs, in the order of `Phase.index`."""
PROFILE = "profile"
LOG_NAME = "hybrid_log.jsonl"
_CHECKPOINT = re.compile(r"checkpoint-(\d+)")
_NO_LINKS = getattr(os, "O_NOFOLLOW", 0)  # others may have put a link into a shared folder; Windows has no such flag

# Writing.


class LogFile:
    """
    Appends to `hybrid_log.jsonl` in a run's output folder, from the first step on; docs/logging.md describes its lines.

    The file grows with the run, so that nothing else has to. Each line is handed to the system at once and a killed run
    keeps it. A training begins with a line `{"step": S, "begun": true, "max_steps": N}`, where `S` is 0 for a new run
    and the step of the checkpoint for a resumed one: lines above it that belong to later steps are superseded. Each
    line after it has the `seconds` since then, so that the time of a run that was killed and resumed can be summed up.

    A run without leaps shall leave the entries of plain `Trainer` in its output folder, which scripts count. Its file
    moves into the newest checkpoint when the training ends, and back when another training begins.

    Args:
        folder (`str` or `Path`): The output folder.
        writes (`bool`): Whether this process writes. Only the first one should.
    """

    def __init__(self, folder: str | Path, *, writes: bool):
        self.folder, self.writes = Path(folder).absolute(), writes  # scripts may change their folder
        self.path = self.folder / LOG_NAME
        self._begun: float | None = None
        self._has_failed = False

    def begin(self, step: int, max_steps: int, folder: str | Path | None = None, **about: Any) -> None:
        """
        Begin a training that goes on from step `step` to `max_steps`. Nothing is written before.

        A trial of a hyperparameter search has a `folder` of its own. Otherwise it is that of the run. What is said
        `about` the training stands in its first line.
        """
        if folder is not None:
            self.folder = Path(folder).absolute()
        self._begun, self.path = time.perf_counter(), self.folder / LOG_NAME
        if self.writes:
            self.folder.mkdir(parents=True, exist_ok=True)
        if self.writes:
            self._move(_log_in(self.folder), self.path)
        self.add({"step": step, "begun": True, "max_steps": max_steps, **about})

    def move_into_checkpoint(self) -> None:
        """Move the file into the newest checkpoint, where later lines go too. Without one it stays where it is."""
        newest = max(_numbered(self.folder, _CHECKPOINT), default=None)
        if self.writes and newest is not None and self._move(self.path, newest[1] / LOG_NAME):
            self.path = newest[1] / LOG_NAME

    def _move(self, old: Path, new: Path) -> bool:
        try:
            if old != new:
                os.replace(old, new)
            return True
        except OSError as error:
            logger.warning("`%s` cannot be moved to `%s`: %s", old, new, error)
            return False

    def add(self, entry: dict) -> None:
        """Append a line. A full disk must not end a training, so an error is only told, and only once."""
        if not self.writes or self._begun is None:
            return
        since = {} if "begun" in entry else {"seconds": round(time.perf_counter() - self._begun, 3)}
        line = json.dumps(plain({**entry, **since}), allow_nan=False, default=str)
        try:
            with os.fdopen(os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT | _NO_LINKS, 0o666), "ab+") as file:
                size = file.seek(0, os.SEEK_END)
                file.seek(max(size - 1, 0))
                torn = size and file.read(1) != b"\n"  # by a kill, or a full disk
                file.write(f"{chr(10) if torn else ''}{line}\n".encode())
        except OSError as error:
            if not self._has_failed:
                logger.warning("`%s` cannot be written, and a report will lack these lines: %s", self.path, error)
            self._has_failed = True


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
        return read_lines(self.folder / self.steps_name, [])

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
    from hf_hybrid.files import write_json  # here, because it needs torch and a report does not

    write_json(path, shareable(plain(values)))


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

_SHOWN = (
    "step", "begun", "max_steps", "phases", "leap", "event", "loss", "eval_loss", "learning_rate", "grad_norm",
    "train_runtime",
    "hybrid/forecast_loss", "hybrid/forecast_low", "hybrid/forecast_high",
    "hybrid/forecast_eval_loss", "hybrid/forecast_eval_low", "hybrid/forecast_eval_high",
    "hybrid/phase", "hybrid/leaps", "hybrid/predicted_steps", "hybrid/backward_passes",
)  # fmt: skip
"""What a report shows of a line of the log. It does not hold the rest, because a log can have a million lines."""
_DEEPEST = 32
"""Levels of nesting in a file that are read; a run writes fewer than ten."""


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
    """Everything that was logged, by step."""
    leaps: list[dict]
    """Records of the leaps, by step: of all leaps where `hybrid_log.jsonl` is whole, else of the last ones."""
    events: list[dict]
    """What the divergence monitor did: as for leaps."""
    record: dict
    """Counters of the hybrid trainer; empty for plain `Trainer`."""
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
    starts: list[float | None] = field(default_factory=list)
    """Seconds of each start of the run, as its log has them: up to the last line of one that was killed."""
    notes: list[str] = field(default_factory=list)
    """Notes on files that could not be read."""

    @property
    def name(self) -> str:
        return self.folder.name or str(self.folder)

    @property
    def record_steps(self) -> int:
        """Steps that the record covers."""
        return _steps_of(self.record)

    def series(self, key: str) -> list[tuple[int, float]]:
        """`(step, value)` of everything logged under `key` that is a finite number."""
        found = ((entry["step"], number(entry.get(key))) for entry in self.logs)
        return [(step, value) for step, value in found if value is not None]


def number(value: object) -> float | None:
    """`value` if it is a number that a plot can show, else `None`: files may hold nulls, strings, NaN."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return value if -1e100 < value < 1e100 else None


def count_of(value: object) -> int | None:
    """`value` as a number of steps, leaps or passes; `None` if it cannot be one."""
    found = number(value)
    return int(found) if found is not None and 0 <= found < 2**53 else None


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


def dicts_of(value: object) -> list[dict]:
    """The dictionaries in `value` if it is a list."""
    return [entry for entry in value if isinstance(entry, dict)] if isinstance(value, list) else []


def evenly(entries: Sequence[T], most: int) -> list[T]:
    """`most` of the entries, evenly spaced from the first to the last; all of them if they are no more."""
    if len(entries) <= most:
        return list(entries)
    return [entries[round(index * (len(entries) - 1) / (most - 1))] for index in range(most)]


def load_run(folder: str | Path) -> Run:
    """
    Read the output folder of a `HybridTrainer` or `Trainer`, or one of its checkpoints.

    If several runs were made in the folder, it is read of the newest one alone, and a note says so.

    Raises:
        ValueError: If there is no such folder, or nothing in it that a report could show.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise ValueError(f"`{folder}` is not a folder. Pass the `output_dir` of a run.")
    notes: list[str] = []
    config = as_dict(_read(folder / "hybrid_config.json", notes))
    log = _read_log_file(folder, notes, _SHOWN)
    lines, others = log.lines, set()
    newest_run = as_dict(_read(folder / "hybrid_run.json", notes)).get("run")
    checkpoint, state = _newest_checkpoint(folder, newest_run, lines, notes, others)
    saved = as_dict(_read(checkpoint / "hybrid_state.json", notes)) if checkpoint else {}
    profile = _load_profile(folder / PROFILE, notes)
    if not _agree(profile.logs, lines or with_steps(state.get("log_history"))):
        profile = Profile()
        others.add(PROFILE)
    begun = next((line for line in reversed(lines) if "begun" in line), {})
    if begun.get("phases") is False:
        config = {}  # such a run writes none, so it is of an earlier one
    record, source = _newest_record(folder, newest_run, checkpoint, saved, notes, others)
    if others or log.earlier_runs:
        notes.append(_other_runs(others))
    logs = _merge_logs(with_steps(state.get("log_history")), lines, profile.logs)
    steps = [count_of(state.get("global_step")) or 0, _steps_of(record)]
    steps += [entry["step"] for entries in (lines, logs, profile.steps) for entry in entries[-1:]]
    if not (logs or record or any(steps)):
        raise ValueError(" ".join([_nothing_found(folder, bool(config or lines)), *notes]))
    planned = (count_of(source.get("max_steps")) for source in (begun, state, profile.run, config))
    max_steps = next(filter(None, planned), None)
    last_step, ended = max(steps), source == "hybrid_summary.json" and _steps_of(record) >= max(steps)
    # An earlier end says nothing of a run that was resumed with more steps.
    ended |= any("train_runtime" in entry and entry["step"] == last_step for entry in logs)
    # What the log says of a leap was written later than what a checkpoint says of it.
    leaps = {leap["step"]: leap for leap in with_steps([*dicts_of(record.get("leaps")), *_parts(lines, "leap")])}
    run = Run(
        folder=folder.resolve(),
        logs=logs,
        leaps=[leaps[step] for step in sorted(leaps)],
        events=_parts(lines, "event") or dicts_of(record.get("divergence_events")),
        record=record,
        record_source=source,
        config=config,
        options=as_dict(saved.get("options")),
        profile=profile,
        recoveries=_recoveries(record, checkpoint, notes),
        last_step=last_step,
        max_steps=max_steps,
        finished=ended or bool(max_steps and last_step >= max_steps),
        starts=log.starts,
        notes=notes,
    )
    if not leaps_made(run):
        _without_phases(run)
    return run


def leaps_made(run: Run) -> int:
    """How many leaps are known of: by their records, by the counters, or by the number that was logged last."""
    logged = [int(value) for _, value in run.series("hybrid/leaps")[-1:]]
    return max(len(run.leaps), sum(verdicts_of(run).values()), *logged)


def verdicts_of(run: Run) -> Counter[str]:
    """Number of leaps by verdict: from the records of the leaps, or from the counters where those go farther."""
    known = Counter(str(leap.get("verdict")) for leap in run.leaps)
    last = Counter(str(leap.get("verdict")) for leap in with_steps(run.record.get("leaps")))
    totals, earlier = (
        Counter({str(verdict): count_of(count) or 0 for verdict, count in as_dict(run.record.get(name)).items()})
        for name in ("leaps_by_verdict", "earlier_verdicts")
    )
    return max(known, totals, last + earlier, key=Counter.total)


def _without_phases(run: Run) -> None:
    """Name all phases of training `train`: without leaps there are steps of one kind, as in plain `Trainer`."""
    profile = run.profile
    spikes = dicts_of(profile.summary.get("spikes"))
    for entries in (profile.steps, profile.out_of_memory, spikes, *profile.ranks.values(), run.recoveries, run.events):
        for entry in entries:
            if entry.get("phase") in PHASES:
                entry["phase"] = "train"


def _other_runs(names: Iterable[str]) -> str:
    """Say that a folder holds more than one run, and what was left out."""
    shown = sorted(names)[:6]
    found = f" ({', '.join(f'`{name}`' for name in shown)}{', and more' if len(shown) < len(set(names)) else ''})"
    return (
        f"The folder holds another, earlier run too{found if shown else ''}. It is left out: this report is of the "
        "newest run alone. Give each run a folder of its own to compare them."
    )


def _nothing_found(folder: Path, started: bool) -> str:
    if started:
        return (
            f"`{folder}` holds a run that ended before anything was logged or saved, so there is nothing to report on. "
            "A lower `logging_steps` logs earlier."
        )
    trials = sorted(
        path.parent.name for path in folder.glob(f"*/{LOG_NAME}") if not _CHECKPOINT.match(path.parent.name)
    )
    if trials:
        return (
            f"`{folder}` holds the trials of a search, {', '.join(f'`{name}`' for name in trials[:6])}"
            f"{' and more' if len(trials) > 6 else ''}. Pass the folder of one, or of two to compare them."
        )
    return (
        f"`{folder}` holds nothing to report on: no readable `hybrid_log.jsonl`, `hybrid_summary.json`, "
        "`checkpoint-*/trainer_state.json` or `profile/steps.jsonl`. Pass the `output_dir` of a run."
    )


# Files.


def _parsed(text: str) -> object:
    """
    The value of a JSON text.

    Raises:
        ValueError: If it is broken, or nested deeper than a run writes.
    """
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError("too deep") from None
    if text.count("{") + text.count("[") > _DEEPEST and _is_deeper(value, _DEEPEST):
        raise ValueError("too deep")
    return value


def _is_deeper(value: object, levels: int) -> bool:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return levels < 0 or any(_is_deeper(item, levels - 1) for item in inner)


def _read(path: Path, notes: list[str]) -> object:
    """The JSON in a file; `None` if there is none or it is broken, which is noted."""
    if not path.is_file():
        return None
    try:
        return _parsed(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        notes.append(f"`{path.name}` in `{path.parent.name}` cannot be read and was left out.")
        return None


def read_lines(path: Path, notes: list[str]) -> Iterator[dict]:
    """The objects of a JSON Lines file that have a step; a run that was killed may have left half of its last line."""
    if not path.is_file():
        return
    lines = broken = 0
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            for line in filter(str.strip, file):
                lines += 1
                try:
                    value = as_dict(_parsed(line))
                except ValueError:
                    value = {}
                step = count_of(value.get("step"))
                if step is None:
                    broken += 1
                else:
                    yield {**value, "step": step}
    except OSError as error:
        notes.append(f"`{path.name}` cannot be read: {error.strerror}.")
    if broken:
        notes.append(f"{broken} of {lines} lines of `{path.name}` cannot be read and were left out.")


def with_steps(entries: object) -> list[dict]:
    """The dictionaries in a list that have a step."""
    steps = ((entry, count_of(entry.get("step"))) for entry in dicts_of(entries))
    return [{**entry, "step": step} for entry, step in steps if step is not None]


def _numbered(folder: Path, pattern: re.Pattern) -> Iterator[tuple[int, Path]]:
    for path in folder.glob("*"):  # nothing, where there is no such folder
        match = pattern.fullmatch(path.name)
        if match:
            yield int(match[1]), path


# Checkpoints, and the record of the hybrid trainer.


def _newest_checkpoint(
    folder: Path, newest_run: object, lines: list[dict], notes: list[str], others: set[str]
) -> tuple[Path | None, dict]:
    """
    The folder and the `trainer_state.json` that went farthest in the newest run; half-written ones are skipped, and the
    names of checkpoints of earlier runs are put into `others`.

    Manifests tell runs apart. What has none is told by its history: one run has one loss at a step. Where no log says
    which run is the newest (plain `Trainer`), it is that of the file that was written last.
    """
    candidates = [folder, *(path for _, path in sorted(_numbered(folder, _CHECKPOINT), reverse=True))]
    found: list[tuple[int, Path, dict]] = []
    for candidate in candidates:
        state = as_dict(_read(candidate / "trainer_state.json", notes))
        step, history = count_of(state.get("global_step")), state.get("log_history")
        if not isinstance(history, list) or step is None:
            continue
        run = as_dict(_read(candidate / "hybrid_manifest.json", notes)).get("run")
        # The state in the folder itself has no manifest. Beyond the log it is of a run that ended before.
        beyond = candidate == folder and bool(lines) and step > lines[-1]["step"]
        if beyond or _is_of_other_run(run, newest_run, step) or not _agree(with_steps(history), lines):
            if not _is_abandoned(run, newest_run):
                others.add("trainer_state.json" if candidate == folder else candidate.name)
            continue
        found.append((step, candidate, state))
    if not found:
        return None, {}
    if not lines:
        written = max(found, key=lambda one: (one[1] / "trainer_state.json").stat().st_mtime_ns)[2]
        newest = [one for one in found if _agree(with_steps(one[2]["log_history"]), with_steps(written["log_history"]))]
        others |= {one[1].name for one in found if one not in newest and one[1] != folder}
        found = newest
    _, best, best_state = max(found, key=lambda one: one[0])
    if best == folder and not (folder / "hybrid_state.json").is_file():
        # `Trainer.save_state` leaves the history in the output folder; the engine's record is in the checkpoints.
        holding = [path for _, path, _ in found if (path / "hybrid_state.json").is_file()]
        return (holding[0] if holding else best), best_state
    return best, best_state


def _agree(entries: list[dict], others: list[dict]) -> bool:
    """Whether two histories can be of one run: they have the same loss at each step that both have."""
    known = {entry["step"]: loss for entry in others if (loss := number(entry.get("loss"))) is not None}
    losses = ((entry["step"], number(entry.get("loss"))) for entry in entries)
    return all(known.get(step, loss) == loss for step, loss in losses if loss is not None)


def _is_abandoned(run: object, newest: object) -> bool:
    """Whether a checkpoint of another course is of the same run, which was continued from an earlier checkpoint."""
    return isinstance(run, list) and isinstance(newest, list) and bool(run and newest) and run[0] == newest[0]


def _is_of_other_run(run: object, newest: object, step: int) -> bool:
    """
    Whether a file of step `step` is of another run than the newest of its folder, or of a course that was abandoned.

    Both runs are lists of pairs, id and first step, as in `hybrid_manifest.json`. Where they are missing nothing tells,
    and the file is taken.
    """
    if not (isinstance(run, list) and isinstance(newest, list) and run and newest):
        return False
    ends = [count_of(pair[1]) for pair in newest[len(run) :] if isinstance(pair, list) and len(pair) == 2]
    return run != newest[: len(run)] or any(end is not None and step > end for end in ends)


def _steps_of(record: dict) -> int:
    steps = as_dict(record.get("steps_by_phase")).values()
    return sum(count_of(count) or 0 for count in steps)


def _newest_record(
    folder: Path, newest_run: object, checkpoint: Path | None, saved: dict, notes: list[str], others: set[str]
):
    """Of the summary, which only a run that ended leaves, and the newest checkpoint, the one that went farther."""
    summary = as_dict(_read(folder / "hybrid_summary.json", notes))
    found = as_dict(as_dict(saved.get("run")).get("record"))
    if _is_of_other_run(summary.get("run"), newest_run, _steps_of(summary)):
        if not _is_abandoned(summary.get("run"), newest_run):
            others.add("hybrid_summary.json")
        summary = {}
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
    return dicts_of(events)


# Logs and profile.


def read_log(folder: str | Path, notes: list[str] | None = None, only: Iterable[str] | None = None) -> list[dict]:
    """
    Return the lines of `hybrid_log.jsonl` that hold, which means without those that a later training superseded.

    Args:
        folder (`str` or `Path`): The output folder of the run.
        notes (`list[str]`, *optional*): Gets a sentence on lines that could not be read; they are left out.
        only (`Iterable[str]`, *optional*): Keys to keep. Default: all.
    """
    return _read_log_file(Path(folder), [] if notes is None else notes, only).lines


@dataclass
class _Log:
    """What a log has of its newest run, and how many earlier runs it has."""

    lines: list[dict] = field(default_factory=list)
    starts: list[float | None] = field(default_factory=list)
    """As in [`Run`]: the time of steps that were made again counts, because it passed."""
    earlier_runs: int = 0


def _read_log_file(folder: Path, notes: list[str], only: Iterable[str] | None = None) -> _Log:
    log, ended = _Log(), False
    for line in read_lines(_log_in(folder), notes):
        if "begun" in line:
            if line["step"]:
                log.lines = [earlier for earlier in log.lines if earlier["step"] <= line["step"]]
            else:
                log = _Log(earlier_runs=log.earlier_runs + any("begun" not in earlier for earlier in log.lines))
            log.starts.append(0.0)
            ended = False
        elif log.starts and not ended:  # an evaluation that follows the training is none of it
            runtime = number(line.get("train_runtime"))
            ended = runtime is not None
            log.starts[-1] = runtime if ended else number(line.get("seconds"))
        log.lines.append(line if only is None else {key: line[key] for key in only if key in line})
    return log


def wall_time(folder: str | Path) -> tuple[float | None, int]:
    """Seconds that the newest run of a folder took in all its starts, if all are known, and the number of starts."""
    return summed(_read_log_file(Path(folder), []).starts)


def summed(starts: Sequence[float | None]) -> tuple[float | None, int]:
    """The sum of the seconds of all starts, if all are known, and their number."""
    return (sum(starts) if starts and None not in starts else None), len(starts)


def _log_in(folder: Path) -> Path:
    """The log of the run in `folder`: there, or in the newest checkpoint that has one."""
    checkpoints = [path for _, path in sorted(_numbered(folder, _CHECKPOINT), reverse=True)]
    places = [path / LOG_NAME for path in (folder, *checkpoints)]
    return next((path for path in places if os.path.lexists(path)), places[0])


def _parts(lines: Iterable[dict], name: str) -> list[dict]:
    """The leaps or the events of a log."""
    return dicts_of([line[name] for line in lines if name in line])


def _without_abandoned(entries: Iterable[dict]) -> list[dict]:
    """Where the steps go back, the run was resumed: what an earlier part wrote from there on was abandoned."""
    kept: list[dict] = []
    for entry in entries:
        if kept and (entry["step"] < kept[-1]["step"] or entry.get("resumed")):
            kept = [earlier for earlier in kept if earlier["step"] < entry["step"]]
        kept.append(entry)
    return kept


def _merge_logs(history: list[dict], lines: list[dict], profiled: list[dict]) -> list[dict]:
    """
    Everything that was logged, by step: the log on disk, and before its first step the newest checkpoint's history.

    Without a log (plain `Trainer`) it is that history, and behind it what only the profiler saw.
    """
    if lines:
        logged = [line for line in lines if not {"begun", "leap", "event"} & line.keys()]
        return [entry for entry in history if 0 < entry["step"] <= lines[0]["step"]] + logged
    last = max((entry["step"] for entry in history), default=-1)
    at_last = {key for entry in history if entry["step"] == last for key in entry}
    entries = list(history)
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
    steps = list(read_lines(folder / "steps.jsonl", notes))
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

Stretch = tuple[int, int, str]
"""First and last step, and the phase of all steps from one to the other."""


def phase_stretches(run: Run) -> list[Stretch]:
    """
    The phases of all steps for which they are known, in order.

    From the profile; else from what was logged at each step; else Warmup and Predict from the record and the leaps, and
    `real` for steps of Full or Correct, which these do not tell apart. A run without leaps has none. A phase is not
    listed step by step, because a damaged record can claim any number of steps.
    """
    if not leaps_made(run):
        return []
    if run.profile.steps:
        phases = ((entry["step"], entry.get("phase")) for entry in run.profile.steps)
        return _joined((step, phase) for step, phase in phases if isinstance(phase, str) and phase != "evaluate")
    logged = {step: PHASES[int(index)] for step, index in run.series("hybrid/phase") if 0 <= index < len(PHASES)}
    if not run.record or len(logged) >= 0.9 * run.last_step:
        return _joined(sorted(logged.items()))
    return _from_record(run)


def _joined(phases: Iterable[tuple[int, str]]) -> list[Stretch]:
    """Successive steps of the same phase as one stretch."""
    found: list[Stretch] = []
    for step, phase in phases:
        if found and found[-1][1:] == (step - 1, phase):
            found[-1] = (found[-1][0], step, phase)
        else:
            found.append((step, step, phase))
    return found


def _from_record(run: Run) -> list[Stretch]:
    warmup = count_of(as_dict(run.record.get("steps_by_phase")).get("warmup")) or 0
    last, found = run.record_steps, []
    # Before the first leap with a record there may have been others, of which only the number is known.
    lost = (count_of(run.record.get("leaps_made")) or 0) > len(run.leaps)
    step = run.leaps[0]["step"] + 1 if lost and run.leaps else 1

    def add(until: int, phase: str) -> None:
        nonlocal step
        if step <= min(until, last):
            found.append((step, min(until, last), phase))
            step = found[-1][1] + 1

    for leap in run.leaps:
        horizon = count_of(leap.get("horizon")) or 0
        if horizon:  # leaps count steps from 0, Trainer from 1
            add(min(warmup, leap["step"]), "warmup")
            add(leap["step"], "real")
            add(leap["step"] + horizon, "predict")
    add(warmup, "warmup")
    add(last, "real")
    return found
