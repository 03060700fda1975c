"""
One training per folder: a lock of the operating system in the output folder.

Two trainings in one folder overwrite each other's files: a checkpoint may get the weights of one and the optimizer of
the other. So a training takes a lock before it looks at the folder, and gives it back when it ends. The system drops
the lock of a process that dies, however it dies, so no lock is ever stale. Beside the lock stands a note on who holds
it, for the message that another training gets.

A job that is requeued may start while the one before it is still dying: schedulers send a signal and wait, usually 30
seconds, before they kill. So a training waits [`WAIT`] seconds for the folder before it gives up.

Only the first process of a training takes the lock; the others wait for what it finds. Where a file system has no locks
(some network mounts), or the folder cannot be written, training goes on without one, and a warning says so.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
from pathlib import Path

from filelock import FileLock, Timeout

from hf_hybrid.checkpoints.manifest import CheckpointError
from hf_hybrid.files import write_note

logger = logging.getLogger(__name__)

LOCK_NAME, HOLDER_NAME = "_hybrid_lock", "_hybrid_lock.json"
"""Uploads leave out what begins with `_`."""
WAIT = 60.0
"""Seconds that a training waits for another one to leave the folder."""


class FolderInUseError(CheckpointError):
    """Another training writes into the folder; the message says which."""


class FolderLock:
    """
    The lock of an output folder. It is taken and released any number of times.

    Args:
        wait (`float`): Seconds to wait for another training.
    """

    def __init__(self, wait: float = WAIT):
        self.wait = wait
        self._folder: Path | None = None
        self._lock: FileLock | None = None
        self._made = False

    def take(self, folder: str | Path) -> None:
        """
        Take the lock of a folder, which is made if it is not there.

        Raises:
            FolderInUseError: If another training has it and does not end in time.
        """
        self.release()
        folder = Path(folder)
        lock = FileLock(folder / LOCK_NAME, thread_local=False)
        try:
            self._made = not folder.exists()
            folder.mkdir(parents=True, exist_ok=True)
            try:
                lock.acquire(timeout=0)
            except Timeout:
                logger.warning("%s. Waiting up to %g seconds for it to end.", _in_use(folder), self.wait)
                lock.acquire(timeout=self.wait)
        except Timeout:
            raise FolderInUseError(
                f"{_in_use(folder)}, and it has not ended in {self.wait:g} seconds. Two trainings in one folder would "
                "mix their checkpoints. Wait for it or end it, or set another `output_dir`."
            ) from None
        except (OSError, NotImplementedError) as error:
            logger.warning(
                "`%s` cannot be locked (%s): nothing tells whether another training writes into it.", folder, error
            )
            return
        self._folder, self._lock = folder, lock
        self.note(0)

    def note(self, step: int) -> None:
        """Note for others who has the lock, and at which step it is."""
        if self._folder is not None:
            values = {"host": socket.gethostname(), "process": os.getpid(), "step": step}
            write_note(self._folder / HOLDER_NAME, values)

    def release(self) -> None:
        """Give the lock back, and delete its files. Whoever waits for it sees that the file is gone, and makes one."""
        folder, lock = self._folder, self._lock
        self._folder = self._lock = None
        if folder is None or lock is None:
            return
        with contextlib.suppress(OSError):
            (folder / HOLDER_NAME).unlink(missing_ok=True)
        if os.name != "nt":  # where an open file cannot be deleted
            with contextlib.suppress(OSError):
                (folder / LOCK_NAME).unlink(missing_ok=True)
        lock.release()
        if self._made:
            with contextlib.suppress(OSError):
                folder.rmdir()  # if nothing was written into it


def _in_use(folder: Path) -> str:
    """Return the beginning of a sentence about who has the lock."""
    try:
        known = json.loads((folder / HOLDER_NAME).read_text(encoding="utf-8"))
        who = f"process {known['process']} on `{known['host']}`, which was at step {known['step']} when it saved last"
    except (OSError, ValueError, KeyError, TypeError):
        who = "another process"
    return f"A training writes into `{folder}`: {who}"
