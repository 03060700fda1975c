"""
Files that a run appends to: its log, and the profile of its memory. Standard library only.

Both are JSON Lines, and both keep three promises. Each line is handed to the system at once, so a killed run keeps it.
A line that a kill or a full disk cut short costs no other line ([`append_line`]). No disk error ends a training.

Nothing is rewritten. A training begins with a line `{"step": S, "begun": true, "max_steps": N}`, where `S` is 0 for a
new run and the step of the checkpoint for a resumed one. It makes the steps after `S` again, so it supersedes the lines
above it that belong to them, and readers leave these out. Each line after it has the `seconds` since then,
so that the time of a run that was killed and resumed can be summed up.
"""

from __future__ import annotations

import json
import logging
import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hf_hybrid.files import open_to_append, plain
from hf_hybrid.records.readings import number, numbered, read_lines

logger = logging.getLogger(__name__)

LOG_NAME = "hybrid_log.jsonl"
PROFILE = "profile"
CHECKPOINT = r"checkpoint-(\d+)"

# Writing.


def append_line(path: Path, entry: dict) -> None:
    """Append an entry to a file as a line of JSON, on a new line if the last one was cut short."""
    line = json.dumps(plain(entry), allow_nan=False, default=str)
    with open_to_append(path) as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(size - 1, 0))
        is_cut = size and file.read(1) != b"\n"
        file.write(f"{chr(10) if is_cut else ''}{line}\n".encode())


class LogFile:
    """
    Appends to `hybrid_log.jsonl` in a run's output folder, from the first step on; docs/logging.md describes its lines.

    The file grows with the run, so that nothing else has to. Without leaps the folder holds only what `Trainer` writes,
    because scripts count its files. The log then moves into the newest checkpoint when the training ends, and back when
    another training begins. Only the first process `writes`.
    """

    def __init__(self, folder: str | Path, *, writes: bool, name: str = LOG_NAME):
        self.folder, self.writes = Path(folder).absolute(), writes  # scripts may change their folder
        self.path = self.folder / name
        self._begun: float | None = None
        self._has_failed = False

    def begin(self, step: int, max_steps: int, folder: str | Path | None = None, **about: Any) -> None:
        """
        Begin a training that goes on from `step` to `max_steps`, with what else is known `about` it. A trial of a
        hyperparameter search has a `folder` of its own. Nothing is written before.
        """
        if folder is not None:
            self.folder = Path(folder).absolute()
        self._begun, self.path = time.perf_counter(), self.folder / self.path.name
        if self.writes:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._move(_log_in(self.folder, self.path.name), self.path)
        self.add({"step": step, "begun": True, "max_steps": max_steps, **about})

    def move_into_checkpoint(self, own: str | None) -> None:
        """
        Move the file into the newest checkpoint, where later lines go too. It stays where it is if there is none, or if
        that is not the run's `own` last one but of an earlier run.
        """
        checkpoints = numbered(self.folder, CHECKPOINT)
        is_own = own is not None and bool(checkpoints) and checkpoints[-1][1] == Path(own)
        if self.writes and is_own and self._move(self.path, checkpoints[-1][1] / LOG_NAME):
            self.path = checkpoints[-1][1] / LOG_NAME

    def _move(self, old: Path, new: Path) -> bool:
        try:
            if old != new:
                os.replace(old, new)
            return True
        except OSError as error:
            logger.warning("`%s` cannot be moved to `%s`: %s", old, new, error)
            return False

    def add(self, entry: dict) -> None:
        """Append a line. If the disk refuses it, a warning says so once, and the next line is tried all the same."""
        if not self.writes or self._begun is None:
            return
        since = {} if "begun" in entry else {"seconds": round(time.perf_counter() - self._begun, 3)}
        try:
            append_line(self.path, {**since, **entry})
        except OSError as error:
            if not self._has_failed:
                logger.warning("`%s` cannot be written, and a report will lack these lines: %s", self.path, error)
            self._has_failed = True


# Reading.


@dataclass
class Log:
    """What a log has of the run of its folder."""

    lines: list[dict] = field(default_factory=list)
    starts: list[float | None] = field(default_factory=list)
    """Seconds of each start, up to the last line of one that was killed; `None` if it left no time."""

    def wall_time(self) -> tuple[float | None, int]:
        """Seconds of all starts, if all are known, and their number. Steps that were made again count too."""
        known = [seconds for seconds in self.starts if seconds is not None]
        return sum(known) if known and len(known) == len(self.starts) else None, len(self.starts)


def load_log(folder: str | Path, notes: list[str] | None = None, name: str = LOG_NAME) -> Log:
    """
    Read the log of a run by its output folder: the lines that hold, without those that a later training superseded.

    `notes` gets a sentence on lines that could not be read.
    """
    log, ended = Log(), False
    for line in read_lines(_log_in(Path(folder), name), [] if notes is None else notes):
        if "begun" in line:
            # The run makes the steps after this one again.
            held = [before for before in log.lines if before["step"] <= line["step"]] if line["step"] else []
            log = Log(held, [*log.starts, 0.0] if line["step"] else [0.0])
            ended = False
        elif log.starts and not ended:  # an evaluation that follows the training is none of it
            runtime = number(line.get("train_runtime"))
            ended = runtime is not None
            log.starts[-1] = runtime if ended else number(line.get("seconds"))
        log.lines.append(line)
    return log


def _log_in(folder: Path, name: str) -> Path:
    """The log of the run in `folder`: there, or in the newest checkpoint that has one."""
    places = [folder / name, *(path / name for _, path in reversed(numbered(folder, CHECKPOINT)))]
    return next((path for path in places if os.path.lexists(path)), places[0])
