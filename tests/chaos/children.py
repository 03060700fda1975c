"""Runs a function in a forked process, and sends it a signal at a moment that is chosen beforehand."""

from __future__ import annotations

import functools
import os
import pickle
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PATIENCE = 120.0
"""Seconds after which a process hangs."""
FILE_EVENTS = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.truncate", "shutil.rmtree"}
"""Audit events of Python that change a folder (of `open`, those for writing)."""


@dataclass(frozen=True)
class Moment:
    """After so many changes of files in the folder that is watched, and then so many seconds."""

    changes: int = 0
    seconds: float = 0.0


@dataclass(frozen=True)
class Ended:
    """
    How a process ended.

    Attributes:
        how (`str`): "returned", "raised", "died" (by a signal, or without a word) or "hang".
        value: What the function returned; or the error as text.
        trace (`str`): The traceback of the error.
        changes (`int`): Changes of files in the watched folder.
        seconds (`float`): From start to end.
        interrupted (`bool`): Whether the signal reached it alive.
    """

    how: str
    value: Any = None
    trace: str = ""
    changes: int = 0
    seconds: float = 0.0
    interrupted: bool = False


def run(
    function: Callable, *arguments, log: Path, watched: Path | None = None, moment: Moment | None = None,
    number: int = signal.SIGKILL, patience: float = PATIENCE, **values,
) -> Ended:  # fmt: skip
    """
    Call a function in a forked process and wait for its end.

    Args:
        function (`Callable`): What it returns must be picklable and small.
        log (`Path`): What the process prints is appended to this file.
        watched (`Path`, *optional*): Folder whose changes are counted.
        moment (`Moment`, *optional*): When to send the signal `number`.
        patience (`float`): Seconds after which the process hangs.
        values: Further arguments of the function.
    """
    return begin(function, *arguments, log=log, watched=watched, **values).end(moment, number, patience)


def begin(function: Callable, *arguments, log: Path, watched: Path | None = None, **values) -> Process:
    """Call a function in a forked process, as [`run`] does, and return the process."""
    changed, changes = os.pipe()
    pipe, result = os.pipe()
    pid = os.fork()
    if pid == 0:
        _call(functools.partial(function, *arguments, **values), log, watched, changes, result)
    os.close(changes)
    os.close(result)
    return Process(pid, changed, pipe)


class Process:
    """The parent's view: the end of the process, what it says, and a byte in a pipe for each change of a file."""

    def __init__(self, pid: int, changed: int, pipe: int):
        self.pid, self.changed, self.pipe = pid, changed, pipe
        self.ended, self.changes, self.begun = os.pidfd_open(pid), 0, time.monotonic()

    def end(self, moment: Moment | None = None, number: int = signal.SIGKILL, patience: float = PATIENCE) -> Ended:
        """Send a signal at a moment, if there is one, and wait for the end. Can be called once."""
        try:
            interrupted = moment is not None and self._reaches(moment)
            if interrupted:
                os.kill(self.pid, number)
            in_time = self._ends_by(self.begun + patience)
            said = _read(self.pipe) if in_time else b""
        finally:
            # Loaders' workers outlive a process that is killed, for some seconds.
            _kill_group(self.pid)
            os.waitpid(self.pid, 0)
            for handle in (self.changed, self.ended, self.pipe):
                os.close(handle)
        counted = {"changes": self.changes, "seconds": time.monotonic() - self.begun, "interrupted": interrupted}
        if not in_time:
            return Ended("hang", **counted)
        if not said:
            return Ended("died", **counted)
        how, value, trace = pickle.loads(said)
        return Ended(how, value, trace, **counted)

    def _reaches(self, moment: Moment) -> bool:
        """Wait for the moment. False: the process ended before, or hangs."""
        while self.changes < moment.changes:
            ready, _, _ = select.select([self.changed, self.ended], [], [], PATIENCE)
            if self.changed in ready:
                self.changes += len(os.read(self.changed, moment.changes - self.changes))
            if self.ended in ready or not ready:
                return False
        ended, _, _ = select.select([self.ended], [], [], moment.seconds)
        return not ended

    def _ends_by(self, deadline: float) -> bool:
        """Wait for the end; count what changes meanwhile."""
        while True:
            ready, _, _ = select.select([self.changed, self.ended], [], [], max(0.0, deadline - time.monotonic()))
            read = os.read(self.changed, 4096) if self.changed in ready else b""
            self.changes += len(read)
            if self.ended in ready and not read:
                return True
            if not ready:
                return False


def _read(pipe: int) -> bytes:
    """All that the process said; a worker of it that lives on may hold the pipe open."""
    os.set_blocking(pipe, False)
    said = b""
    try:
        while part := os.read(pipe, 1 << 16):
            said += part
    except BlockingIOError:
        pass
    return said


def _kill_group(pid: int) -> None:
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass


def _call(function: Callable, log: Path, watched: Path | None, changes: int, result: int) -> None:
    """In the forked process; does not return."""
    try:
        os.setpgid(0, 0)
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(output, 1)
        os.dup2(output, 2)
        if watched is not None:
            _count_changes(str(watched), changes)
        said = "returned", function(), ""
    except BaseException as error:
        said = "raised", f"{type(error).__name__}: {error}"[:8000], traceback.format_exc()[-8000:]
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os.write(result, pickle.dumps(said))
        os._exit(0)


def _count_changes(folder: str, changes: int) -> None:
    """Write a byte for every change of a file below the folder. An audit hook stays until the process ends."""
    os.set_blocking(changes, False)

    def hook(event: str, values: tuple) -> None:
        if event not in FILE_EVENTS or not str(values[0]).startswith(folder):
            return
        if event != "open" or values[2] & (os.O_WRONLY | os.O_RDWR):
            try:
                os.write(changes, b".")
            except BlockingIOError:
                pass  # the parent counts no more

    sys.addaudithook(hook)
