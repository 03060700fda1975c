"""
One training per folder: a lock of the operating system in the output folder.

Two trainings in one folder overwrite each other's files: a checkpoint may get the weights of one and the optimizer of
the other. So a training takes a lock before it looks at the folder, and gives it back when it ends. The system drops
the lock of a process that dies, however it dies, so no lock is ever stale. Beside the lock stands a note on who holds
it, for the message that another training gets.

A job that is requeued may start while the one before it is still dying: schedulers send a signal and wait, usually 30
seconds, before they kill. So a training waits [`WAIT`] seconds for the folder before it gives up.

Only the first process of a training takes the lock; the others wait for its outcome. Where a file system has no locks
(some network mounts and buckets), training goes on without one, and a warning says so. A file in place of a lock would
be worse: if its process is killed and the job is restarted on another host, nobody could tell that it is stale.

A folder that cannot be written is found here too, before the first step, and not by the first save.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import socket
import tempfile
from pathlib import Path

from filelock import FileLock, Timeout

from hf_hybrid.files import delete_temporaries, write_note
from hf_hybrid.saving.manifest import CheckpointError, no_access, read_json, whose

logger = logging.getLogger(__name__)

LOCK_NAME, HOLDER_NAME = "_hybrid_lock", "_hybrid_lock.json"
"""Uploads leave out what begins with `_`."""
WAIT = 60.0
"""Seconds that a training waits for another one to leave the folder."""


class FolderInUseError(CheckpointError):
    """Another training writes into the folder; the message says which."""


def check_output(folder: str | Path) -> None:
    """Raise `ValueError` if a path cannot be an output folder, before Trainer makes it."""
    if os.path.lexists(folder) and not os.path.isdir(folder):
        kind = "a file" if os.path.exists(folder) else f"a link to `{os.readlink(folder)}`, which is not there"
        raise ValueError(f"`output_dir={folder}` is {kind}. Remove it, or set another `output_dir`.")
    if not os.path.lexists(folder) and (reason := no_access(Path(folder))):
        raise ValueError(f"`output_dir={folder}` cannot be used: {reason}. Set another `output_dir`.")


def own_lock(path: Path) -> FileLock:
    """
    Return the lock of a file, as this package makes all of its own. `acquire` raises `OSError` or `NotImplementedError`
    where a file system has no locks.
    """
    return FileLock(path, thread_local=False, fallback_to_soft=False)


class FolderLock:
    """The lock of an output folder. It is taken and released any number of times. `wait` counts seconds."""

    def __init__(self, wait: float = WAIT):
        self.wait = wait
        self._held: tuple[Path, FileLock] | None = None
        self._made_folder = False

    def take(self, folder: str | Path, *, saves: bool = True) -> None:
        """
        Take the lock of a folder, which is made if it is not there, and delete what killed processes left beside it.
        Raise [`FolderInUseError`] if another training has it and does not end in time, and [`CheckpointError`] if the
        training saves checkpoints (`saves`) and the folder cannot be written.
        """
        self.release()
        folder = Path(folder)
        lock = own_lock(folder / LOCK_NAME)
        try:
            self._made_folder = not folder.exists()
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
        except (OSError, NotImplementedError) as error:  # the latter where a file system has no locks
            if saves:
                _check_writable(folder)
            logger.warning(
                "`%s` cannot be locked (%s): nothing tells whether another training writes into it.", folder, error
            )
            return
        self._held = folder, lock
        delete_temporaries(folder)
        self.note(0)

    def note(self, step: int) -> None:
        """Note for others who has the lock, and at which step it is."""
        if self._held is not None:
            values = {"host": socket.gethostname(), "process": os.getpid(), "step": step}
            write_note(self._held[0] / HOLDER_NAME, values)

    def release(self) -> None:
        """Give the lock back, and delete its files. Whoever waits for it sees that the file is gone, and makes one."""
        if self._held is None:
            return
        (folder, lock), self._held = self._held, None
        for name in (HOLDER_NAME, LOCK_NAME):
            with contextlib.suppress(OSError):
                (folder / name).unlink(missing_ok=True)
        lock.release()
        if self._made_folder:
            with contextlib.suppress(OSError):
                folder.rmdir()  # if nothing was written into it


def _check_writable(folder: Path) -> None:
    """Raise [`CheckpointError`] if no file can be made in a folder, unless its disk is full: a resume makes room."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        if error.errno not in (errno.EROFS, errno.EACCES, errno.EPERM):
            return
        existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
        raise CheckpointError(
            f"`output_dir={folder}` cannot be written ({error.strerror}): `{existing}` {whose(existing)}. The run "
            'would fail at its first save. Make it writable, set another `output_dir`, or set `save_strategy="no"`.'
        ) from None


def _in_use(folder: Path) -> str:
    """Return the beginning of a sentence about who has the lock."""
    try:
        note = read_json(folder / HOLDER_NAME)
        who = f"process {note['process']} on `{note['host']}`, which was at step {note['step']} when it saved last"
    except (OSError, ValueError, KeyError):
        who = "another process"
    return f"A training writes into `{folder}`: {who}"
