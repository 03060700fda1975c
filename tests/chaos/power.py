"""
Loss of power at a random moment, and resume: of a simulated disk that keeps what was flushed and forgets the rest.

A process that is killed leaves all that it wrote, because the system has it. A loss of power leaves what is on the
disk. POSIX promises little about that. `fsync` of a file makes its content durable, but not its name. `fsync` of a
folder makes its entries durable, so what was created, renamed or deleted in it. Everything else may be on the disk or
not, in any order.

[`Disk`] replaces `os.fsync` in the process that trains. At each call it records the content of the file, or the entries
of the folder, outside of the folder that is lost. Files and folders are known by their inodes, so that a rename takes
along what was flushed before it. The process holds every inode that it recorded, so that the number of a deleted file
is not given to another one.

When the process was killed, [`lose`] replaces the folder by what the disk has. Half of the losses are strict: nothing
survives but what was flushed. In the other half chance decides for each entry and each file whether the newer state
survives too, or a part of it. Then a deletion may be on the disk and an earlier rename not. Only a rename stays atomic,
as in every file system with a journal: what was moved is not lost at both places.

Right is an outcome with the bits of a training that was left alone. And a save that has come to its end must survive:
otherwise the outcome is "not durable", even if the run computes the lost steps again.
"""

from __future__ import annotations

import json
import os
import random
import resource
import shutil
import signal
import stat
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from chaos import Case, Result, kills, trainings
from chaos.children import run
from hf_hybrid.saving import manifest

STRICT = 0.5
"""How likely nothing survives but what was flushed."""
AUTO = 0.5
"""How likely a run is resumed by `"auto"`, as a job that is always started in the same way."""
SAVED_NAME = "saved"
"""File in the record, with a byte for each step of the last save that has come to its end."""


class Disk:
    """
    Records what is durable, in place of `os.fsync`.

    Args:
        root (`Path`): The folder that is on the disk. What is in it now is durable.
        record (`Path`): Folder for the record: the bytes of file N in `N`, the entries of folder N in `N.json`.
    """

    def __init__(self, root: Path, record: Path):
        self.root, self.record = str(root.resolve()), record
        self._lock, self._held = threading.Lock(), {}
        record.mkdir()
        for path in (root, *root.rglob("*")):
            handle = os.open(path, os.O_RDONLY)
            try:
                self.fsync(handle)
            finally:
                os.close(handle)

    def fsync(self, file: Any) -> None:
        """Record the content of a file, or the entries of a folder; takes what `os.fsync` takes."""
        handle = file if isinstance(file, int) else file.fileno()
        there = f"/proc/self/fd/{handle}"
        if not f"{os.readlink(there)}/".startswith(f"{self.root}/"):
            return
        with self._lock:
            status = os.stat(handle)
            self._hold(status.st_ino, there)
            if stat.S_ISDIR(status.st_mode):
                entries = _entries(handle)
                for name, (inode, _) in entries.items():
                    self._hold(inode, name, handle)
                self._write(f"{status.st_ino}.json", json.dumps(entries).encode())
            else:
                self._write(str(status.st_ino), Path(there).read_bytes())  # also where the handle only writes

    def _hold(self, inode: int, path: str, folder: int | None = None) -> None:
        if inode not in self._held:
            self._held[inode] = os.open(path, os.O_PATH, dir_fd=folder)

    def _write(self, name: str, content: bytes) -> None:
        """In one stroke: a process that dies inside of `fsync` was promised nothing."""
        temporary = self.record / f"_{os.getpid()}"
        temporary.write_bytes(content)
        os.replace(temporary, self.record / name)


def _entries(folder: int | Path) -> dict[str, list]:
    """Return `[inode, whether it is a folder]` of what is in a folder, by name."""
    with os.scandir(folder) as entries:
        return {entry.name: [entry.stat(follow_symlinks=False).st_ino, entry.is_dir()] for entry in entries}


def train(mode: str, out: Path, resume: bool | str, record: Path, **values) -> dict:
    """Train on a simulated disk, and record the step of each save that has come to its end."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    os.fsync = Disk(out.parent, record).fsync
    commit = manifest.commit

    def noted(folder: Path, step: int, *arguments, **options) -> None:
        commit(folder, step, *arguments, **options)
        (record / f"_{SAVED_NAME}").write_bytes(bytes(step))
        os.replace(record / f"_{SAVED_NAME}", record / SAVED_NAME)  # in one stroke: the process may die at any moment

    manifest.commit = noted
    return trainings.train(mode, out, resume, **values)


def lose(root: Path, record: Path, chance: random.Random | None) -> None:
    """
    Replace a folder by what survives a loss of power.

    Args:
        root (`Path`): The folder, as the process that was killed left it.
        record (`Path`): Of the [`Disk`].
        chance (`random.Random`, *optional*): Decides what else survives; nothing without it.
    """
    inode, survived = root.stat().st_ino, root.with_name(f"{root.name}-survived")
    there = {path.lstat().st_ino: path for path in (root, *root.rglob("*"))}
    survived.mkdir()
    _restore(inode, survived, record, there, chance)
    shutil.rmtree(root)
    survived.rename(root)


def _restore(inode: int, to: Path, record: Path, there: dict[int, Path], chance: random.Random | None) -> None:
    """Write what survives of a folder; `there` has the paths of all that was in use, by inode."""
    known = record / f"{inode}.json"
    entries = json.loads(known.read_text()) if known.is_file() else {}
    if chance is not None and inode in there:
        entries = _some(entries, _entries(there[inode]), there, chance)
    for name, (of, is_folder) in entries.items():
        if is_folder:
            (to / name).mkdir()
            _restore(of, to / name, record, there, chance)
        else:
            (to / name).write_bytes(_content(of, record, there, chance))


def _some(durable: dict, new: dict, there: dict[int, Path], chance: random.Random) -> dict[str, list]:
    """Return entries of a folder of which each is the durable or the new one, or absent if one of them is."""
    chosen = {}
    for name in sorted({*durable, *new}):
        old = durable.get(name)
        moved = old is not None and name not in new and old[0] in there
        entry = old if moved else chance.choice([old, new.get(name)])
        if entry is not None:
            chosen[name] = entry
    return chosen


def _content(inode: int, record: Path, there: dict[int, Path], chance: random.Random | None) -> bytes:
    """Return what survives of a file: what was flushed; or, by chance, the newest content, or its beginning."""
    known = record / str(inode)
    durable = known.read_bytes() if known.is_file() else b""
    if chance is None or inode not in there:
        return durable
    newest = there[inode].read_bytes()
    if newest == durable:
        return durable
    written = newest[: chance.randrange(len(newest) + 1)]
    return chance.choice([durable, newest, written, written + bytes(len(newest) - len(written))])


def loss(case: Case) -> Result:
    """Train, lose the power, resume, until chance lets the run end."""
    chance, out, saved = case.chance, case.folder / "machine" / "out", 0
    resumes_itself = chance.random() < AUTO
    for number in range(kills.ATTEMPTS):
        out.parent.mkdir(exist_ok=True)
        record = case.folder / f"durable-{number}"
        again = case.interruptions == 0 or chance.random() < kills.AGAIN
        moment = kills.moment(chance, case.expected) if again else None
        resume = "auto" if resumes_itself else trainings.has_checkpoint(out)
        ended = run(train, case.kind, out, resume, record, log=case.log, watched=out.parent, moment=moment)
        if ended.how == "died" and ended.interrupted:
            case.interruptions += 1
            lose(out.parent, record, None if chance.random() < STRICT else chance)
            saved, newest = max(saved, saved_step(record)), newest_step(out)
            if newest < saved:
                return case.result("not durable", f"step {saved} was saved, and {newest} is left")
        elif case.interruptions > 0 or ended.how != "returned":
            return case.result(*kills.compare(ended, case.expected))
        else:
            shutil.rmtree(out.parent)  # it ended before the power was lost
    return case.result("lost", f"not at its end after {kills.ATTEMPTS} attempts")


def saved_step(record: Path) -> int:
    """Return the step of the last save that came to its end; 0 without one."""
    path = record / SAVED_NAME
    return path.stat().st_size if path.is_file() else 0


def newest_step(out: Path) -> int:
    """Return the step of the newest whole checkpoint; 0 without one."""
    return max(whole(out), default=0)


def whole(out: Path) -> list[int]:
    """Return the steps of whole checkpoints."""
    steps = []
    for path in out.glob("checkpoint-*"):
        try:
            known = manifest.read_manifest(path)
        except manifest.CheckpointError:
            continue
        if known is not None and not manifest.damages(path, known):
            steps.append(known.step)
    return steps


class Worst(random.Random):
    """A chance that keeps nothing that was not flushed, but every deletion."""

    def choice(self, options):
        return None if None in options else options[0]


def commit(out: Path, record: Path, times: int) -> None:
    """Commit a checkpoint on a simulated disk; the second time the process is killed before it has its name."""
    os.fsync = Disk(out.parent, record).fsync
    folder = out / "checkpoint-3"
    for number in range(times):
        if number == 1:
            kill = lambda *paths: os.kill(os.getpid(), signal.SIGKILL)  # noqa: E731
            manifest.os = SimpleNamespace(**{**vars(os), "replace": kill})
        with manifest.saving(folder):
            for name in (manifest.TRAINER_STATE_NAME, "model.safetensors"):
                (manifest.temporary(folder) / name).write_text(f"{number}")
            manifest.commit(folder, 3, in_step=False)
