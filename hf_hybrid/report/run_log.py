"""The folder that a profiled run leaves. Every line is handed to the system at once: a killed run keeps all of them."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from hf_hybrid.state_io import write_json

logger = logging.getLogger(__name__)

RUN_NAME = "run.json"
STEPS_NAME = "steps.jsonl"
LOGS_NAME = "logs.jsonl"
SUMMARY_NAME = "summary.json"


class RunLog:
    """
    Writes one process's part of a profile folder; docs/profiling.md describes its files.

    A run that starts anew moves what lies there to a folder of the same name with `-previous` behind it; a resumed
    one appends. Other processes than the first write only their own `steps-rankN.jsonl` and `oom-STEP-rankN`.

    Args:
        folder (`str` or `Path`): Made if it is not there.
        rank (`int`): Of this process.
        resumed (`bool`): Append.
    """

    def __init__(self, folder: str | Path, *, rank: int = 0, resumed: bool = False):
        self.folder, self.rank = Path(folder).absolute(), rank  # scripts may change their folder
        if rank == 0 and not resumed:
            self._make_room()
        self.folder.mkdir(parents=True, exist_ok=True)
        self._appends = resumed or rank == 0  # an old folder was moved away; an old file of another rank was not
        self._files: dict[str, BinaryIO] = {}
        self.broken = False

    @property
    def first(self) -> bool:
        """Whether this process writes what is written once."""
        return self.rank == 0

    def write_run(self, values: dict) -> None:
        """`run.json`, whole."""
        self._write(RUN_NAME, values)

    def write_summary(self, values: dict) -> None:
        """`summary.json`, whole."""
        self._write(SUMMARY_NAME, values)

    def add_step(self, record: dict) -> None:
        """One line of `steps.jsonl`."""
        self._append(STEPS_NAME if self.first else f"steps-rank{self.rank}.jsonl", record)

    def add_log(self, entry: dict) -> None:
        """One line of `logs.jsonl`."""
        if self.first:
            self._append(LOGS_NAME, entry)

    def records(self) -> Iterator[dict]:
        """What this process wrote to its steps so far; a line that a kill cut short is passed over."""
        path = self.folder / (STEPS_NAME if self.first else f"steps-rank{self.rank}.jsonl")
        if not path.is_file():
            return
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            try:
                yield json.loads(line)
            except ValueError:
                continue

    def out_of_memory_folder(self, step: int) -> Path:
        """Where what is known of an out-of-memory error in step `step` goes."""
        return self.folder / (f"oom-{step}" if self.first else f"oom-{step}-rank{self.rank}")

    def write_out_of_memory(self, step: int, values: dict, dump: Callable[[str], None] | None = None) -> Path | None:
        """
        `records.json` of an error, and `cuda_snapshot.pickle` of its step's first.

        Args:
            step (`int`): Under way.
            values (`dict`): What is known.
            dump (`Callable[[str], None]`, *optional*): Writes the snapshot to a path.

        Returns:
            `Path`: The snapshot, if it was written now.
        """
        folder = self.out_of_memory_folder(step)
        snapshot = folder / "cuda_snapshot.pickle"
        if not self.broken:
            with self.writing(folder.name):
                folder.mkdir(parents=True, exist_ok=True)
                write_json(folder / "records.json", values)
                if dump is not None and not snapshot.exists():
                    dump(str(snapshot))
                    return snapshot
        return None

    def close(self) -> None:
        """Close the files; a later line opens its file again."""
        while self._files:
            self._files.popitem()[1].close()

    @contextlib.contextmanager
    def writing(self, name: str) -> Iterator[None]:
        """Around what writes a file here: a full disk must not end a training. From then on nothing is written."""
        try:
            yield
        except OSError as error:
            self.broken = True
            logger.warning("`%s` cannot be written, the training goes on without: %s", self.folder / name, error)

    def _write(self, name: str, values: dict) -> None:
        if self.first and not self.broken:
            with self.writing(name):
                write_json(self.folder / name, values)

    def _append(self, name: str, entry: dict) -> None:
        if self.broken:
            return
        line = json.dumps(_plain(entry), allow_nan=False, default=str)
        with self.writing(name):
            if name not in self._files:
                self._files[name] = self._open(self.folder / name)
            self._files[name].write(f"{line}\n".encode())

    def _open(self, path: Path) -> BinaryIO:
        """Unbuffered; behind half of a line, which a kill may have left, a new line is begun."""
        file = path.open("ab" if self._appends else "wb", buffering=0)
        self._appends = True
        if file.tell() and not path.read_bytes().endswith(b"\n"):
            file.write(b"\n")
        return file

    def _make_room(self) -> None:
        if not self.folder.is_dir() or not os.listdir(self.folder):
            return
        previous = self.folder.with_name(self.folder.name + "-previous")
        shutil.rmtree(previous, ignore_errors=True)
        self.folder.rename(previous)


def _plain(value: Any) -> Any:
    """As JSON can hold it: what is not a finite number becomes null."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if getattr(value, "ndim", None) == 0:  # of numpy or torch
        value = value.item()
    return None if isinstance(value, float) and not math.isfinite(value) else value
