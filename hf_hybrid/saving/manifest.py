"""
Checkpoints that are whole or refused: how they are written, deleted and checked.

Trainer writes a checkpoint file by file, takes the folder with the highest number for the newest, and loads what it
finds there. A file that is missing, cut short, changed or of another run goes unnoticed, or fails deep inside. Here a
checkpoint gets its name only when it is whole, and is checked against its manifest before anything is loaded.

A save. Trainer writes into a temporary folder, `_hybrid_saving/checkpoint-N`. All files are hashed and flushed to the
disk in parallel threads: hashing takes the processor while flushing waits for the disk. Then the manifest is written:
it commits the checkpoint. Last, one rename gives the folder its name. Only then older checkpoints are deleted, in the
order of their steps.

A kill at any moment. The next save or start deletes a save without a manifest. A save with one is whole, and the next
save or start gives it its name. A checkpoint of the same name is emptied only when its successor is committed, and then
the successor replaces the empty folder. So at any moment a whole checkpoint exists, and a folder of its name. A
checkpoint that `save_total_limit` gives up is moved into `_hybrid_saving` by a rename, and is deleted there: the next
save or start ends a deletion that was killed.

A run. A folder has the checkpoints of one run. What an earlier run left is moved aside when another begins there
([`move_aside`]), and so are later checkpoints when a run goes on from an earlier one.

A check. Every file must be there with its size and checksum. A file that would be loaded by its name, and that the
manifest does not list, is damage too. start.py says which checkpoint a training takes.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import os
import re
import shutil
import stat
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any

import xxhash

from hf_hybrid.files import is_disk_full, own_folder, write_json

MANIFEST_NAME = "hybrid_manifest.json"
SAVING_NAME = "_hybrid_saving"
"""Folder beside checkpoints in which they are written and deleted. Uploads leave out what begins with `_`."""
DELETED = "deleted-"
"""How the name of a checkpoint begins that is being deleted."""
EARLIER = "_hybrid_earlier_"
"""How the names of folders begin, in that of a run, with what earlier runs left there. A number follows."""
TRAINER_STATE_NAME = "trainer_state.json"
DELETABLE = "hybrid_state.json"
"""The file that a user may delete, as the refusal of another version's says: weights, optimizer, schedule go on."""
SCHEMA_VERSION = 1
THREADS, BLOCK = 8, 1 << 26
"""That flush and hash, and the bytes that one hashes at a time: a multiple of the buffer that it reads into."""
_LOADED = re.compile(
    r"[^/]+\.safetensors(\.index\.json)?|pytorch_model[^/]*\.bin(\.index\.json)?|([^/]+/)?adapter_(model|config)\.[^/]+"
    r"|(optimizer|scheduler|scaler)(_\d+)?\.(pt|bin)|rank\d+-of-\d+-optimizer\.pt|(training_args|user_content)\.(bin|pt)"
    r"|rng_state(_\d+)?\.pth|(random_states|custom_checkpoint)_\d+\.pkl|(config|trainer_state|out_of_memory)\.json|latest"
    r"|hybrid_state[^/]*|(pytorch_model_fsdp[^/]*|optimizer_\d+|global_step\d+)(/.+)?"
)
"""Paths in a checkpoint from which transformers, accelerate, peft, DeepSpeed or this package (in any version) loads."""
_WEIGHTS = re.compile(r"(model|pytorch_model|adapter_model)[-.].*(safetensors|bin)(\.index\.json)?")
"""Files of weights, which a user may save again in other files, for example as shards."""
_OF_RUN = re.compile(
    r"checkpoint-\d+|hybrid_(log|config|summary)\.jsonl?|_hybrid_(data|command)\.json|trainer_state\.json"
    r"|(all|train|eval)_results\.json|profile|completions"
)
"""What a run leaves in its folder beside the model: its checkpoints, and what it notes on itself."""
_OF_MODEL = re.compile(rf"{_WEIGHTS.pattern}|training_args\.bin|adapter_config\.json")


class CheckpointError(ValueError):
    """There is no checkpoint to resume from, or the one that was named is damaged; the message names the files."""


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint consists of: `files` has the bytes and the checksum of each, by its path in the folder."""

    step: int
    in_step: bool
    files: dict[str, dict]


# Saving.


@contextlib.contextmanager
def saving(folder: Path) -> Generator[None]:
    """Context in which the checkpoint `folder` is written, into [`SAVING_NAME`] beside it, and [`commit`] is called."""
    try:
        own_folder(folder.parent, SAVING_NAME, folder.name)
        yield
    except Exception as error:
        clean_up_failed_save(folder, error)
        raise


def clean_up_failed_save(folder: Path, error: Exception, *, delete: bool = True) -> None:
    """Delete what an error left of a save, if asked to. A full disk is an `OSError` that says what to do."""
    output_dir = folder.parent
    if delete:
        finish_interrupted_saves(output_dir)
    if is_disk_full(error):
        last = last_checkpoint(output_dir)
        resume = f"Then resume from `{last}`" if last else "No checkpoint was saved yet, so start anew then"
        raise OSError(
            errno.ENOSPC,
            f"The disk is full, or a limit on it is reached: `{folder}` could not be written, and "
            f"{shutil.disk_usage(output_dir).free / 2**20:,.1f} MiB are free in `{output_dir}`. Free space there, keep "
            f"fewer checkpoints with `save_total_limit`, or save only weights with `save_only_model=True`. {resume}.",
        ) from error


def commit(folder: Path, step: int, *, in_step: bool) -> None:
    """Flush a checkpoint, write its manifest, and give it its name. `in_step`: batches of the next step are fetched."""
    written = temporary(folder)
    (written / MANIFEST_NAME).unlink(missing_ok=True)  # of a trainer that copied another checkpoint into it
    paths = sorted(written.rglob("*"))  # with folders in it, which are flushed too
    with ThreadPoolExecutor(THREADS) as pool:
        flushes = [pool.submit(_flush, path) for path in paths]
        files = sizes_and_checksums(written, [path for path in paths if path.is_file()])
        for flush in flushes:
            flush.result()
    values = {"schema_version": SCHEMA_VERSION, "step": step, "in_step": in_step, "files": files}
    _write_manifest(written, values)
    finish_interrupted_saves(folder.parent)


def _write_manifest(folder: Path, values: dict[str, Any]) -> None:
    write_json(folder / MANIFEST_NAME, {**values, "xxh3_128": digest_of(values)})


def add_what_callbacks_saved(folder: Path) -> None:
    """Add to a manifest what callbacks wrote into the checkpoint in `on_save` and a resume would load."""
    values = read_json(folder / MANIFEST_NAME) if is_committed(folder) else {"files": {}}
    if values.pop("xxh3_128", None) and (added := _unlisted(folder, values["files"])):
        values["files"] |= sizes_and_checksums(folder, [folder / name for name in added if (folder / name).is_file()])
        _write_manifest(folder, values)


def finish_interrupted_saves(output_dir: Path) -> list[Path]:
    """End the saves and deletions of a folder, also of killed processes. Return the saves that were cut short."""
    folder, cut_short = output_dir / SAVING_NAME, []
    if not os.path.lexists(folder):
        return []
    for path in sorted(own_folder(output_dir, SAVING_NAME).iterdir()):
        if path.name.startswith(DELETED):
            _delete(path)
        elif is_committed(path):
            put_in_place(path, output_dir / path.name)
        else:
            _delete(path)
            cut_short.append(path)
    with contextlib.suppress(OSError):  # something of somebody else's cannot be deleted
        folder.rmdir()
    return cut_short


def temporary(folder: Path) -> Path:
    """Return where a checkpoint is written."""
    return folder.parent / SAVING_NAME / folder.name


def put_in_place(committed: Path, folder: Path) -> None:
    """
    Give a committed checkpoint its name. One of the same run that has this name already is deleted.

    A folder of this name is there at every moment: a job that is restarted after a kill looks for one, and begins anew
    if it sees none.
    """
    _flush(committed)
    if folder.is_symlink():  # what it leads to stays
        folder.unlink()
    if folder.is_dir():
        _flush(committed.parent)
        _flush(folder.parent)
        # Delete the manifest and the trainer state first: a half-deleted folder is then neither valid nor mistaken for
        # that of another trainer.
        for path in (folder / TRAINER_STATE_NAME, folder / MANIFEST_NAME, *folder.iterdir()):
            _delete(path)
    try:
        os.replace(committed, folder)  # an empty folder is replaced in one stroke
    except OSError:  # not on Windows, and some mounted buckets rename no folders
        shutil.copytree(committed, folder, symlinks=True, dirs_exist_ok=True)
        for path in (*folder.rglob("*"), folder):
            if not path.is_symlink():
                _flush(path)
        _delete(committed)
    _flush(folder.parent)
    if len(checkpoints_of(folder.parent)) == 1:  # the folder of the run may be new too, and those above it
        for above in folder.parent.absolute().parents:
            with contextlib.suppress(OSError):  # it may not be readable
                _flush(above)


def _delete(path: Path) -> None:
    """Delete a file or a folder: its manifest first, so that nothing takes the rest for whole."""
    if path.is_dir() and not path.is_symlink():
        (path / MANIFEST_NAME).unlink(missing_ok=True)
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def rotate(output_dir: Path, limit: int | None, *, newest: Path, best: str | None) -> None:
    """
    Delete checkpoints until `limit` are left, as Trainer does, but by step and not by the clock.

    The newest and the best (`best`) stay, whatever the limit. Links, and what has no manifest, are neither counted nor
    deleted.
    """
    if not limit or limit <= 0:
        return
    kept = {newest.resolve(), *([Path(best).resolve()] if best else [])}
    own = [folder for folder in checkpoints_of(output_dir) if is_committed(folder) and not folder.is_symlink()]
    surplus = max(len(own) - max(limit, len(kept)), 0)
    for folder in [folder for folder in own if folder.resolve() not in kept][:surplus]:
        _give_up(folder)
    with contextlib.suppress(OSError):  # there is none, or not all could be deleted: the next save tries again
        (output_dir / SAVING_NAME).rmdir()


def _give_up(folder: Path) -> None:
    """Delete a checkpoint. Where folders cannot be renamed its manifest goes last, so that a rotation finds it."""
    moved = folder.parent / SAVING_NAME / f"{DELETED}{step_of(folder)}"
    try:
        own_folder(folder.parent, SAVING_NAME)
        os.replace(folder, moved)
    except OSError:  # some mounted buckets rename no folders, and a full disk may have no room for a new one
        for path in folder.iterdir():
            if path.name != MANIFEST_NAME:
                _delete(path)
        moved = folder
    _delete(moved)


def left_in(output_dir: Path, *, with_model: bool = True) -> list[Path]:
    """Return what a run left in a folder: the checkpoints, its notes, and `with_model` the model itself."""
    kinds = (_OF_RUN, _OF_MODEL) if with_model else (_OF_RUN,)
    return [path for path in sorted(output_dir.glob("*")) if any(kind.fullmatch(path.name) for kind in kinds)]


def move_aside(paths: list[Path]) -> Path:
    """Move what an earlier run left in a folder into a new folder beside it, and return that."""
    output_dir = paths[0].parent
    number = next(number for number in itertools.count(1) if not os.path.lexists(output_dir / f"{EARLIER}{number}"))
    aside = own_folder(output_dir, f"{EARLIER}{number}")
    for path in paths:
        is_used = path.is_dir() and step_of(path) < 0  # the new run may have made it
        shutil.move(path, aside)
        if is_used:
            own_folder(output_dir, path.name)
    return aside


def sizes_and_checksums(folder: Path, paths: list[Path]) -> dict[str, dict]:
    """Return bytes and checksum of files, by their path in the folder. Threads share a big file by its blocks."""
    sizes = [path.stat().st_size for path in paths]
    with ThreadPoolExecutor(THREADS) as pool:
        starts = [range(0, size, BLOCK) for size in sizes]
        blocks = [[pool.submit(_digest_of_block, path, at) for at in of_file] for path, of_file in zip(paths, starts)]
        digests = [digest_of([block.result() for block in of_file]) for of_file in blocks]
    names = [path.relative_to(folder).as_posix() for path in paths]
    return {name: {"bytes": size, "xxh3_128": digest} for name, size, digest in zip(names, sizes, digests)}


def _digest_of_block(path: Path, start: int) -> str:
    digest, buffer, left = xxhash.xxh3_128(), memoryview(bytearray(1 << 18)), BLOCK
    with open(path, "rb", buffering=0) as file:
        file.seek(start)
        while left > 0 and (count := file.readinto(buffer)):
            digest.update(buffer[:count])
            left -= count
    return digest.hexdigest()


def digest_of(values: dict | list) -> str:
    """Return the checksum of JSON values."""
    return xxhash.xxh3_128_hexdigest(json.dumps(values, sort_keys=True).encode())


def _flush(path: Path) -> None:
    """Make sure that a file or the entries of a folder are on the disk."""
    if os.name == "nt" and path.is_dir():
        return  # Windows flushes no folders
    handle = os.open(path, os.O_RDWR if os.name == "nt" else os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some network file systems cannot
            raise
    finally:
        os.close(handle)


# Checking.


def read_manifest(folder: Path) -> Manifest | None:
    """Return the manifest of a checkpoint, if it has one. Raise [`CheckpointError`] if it cannot be read."""
    if not is_committed(folder):
        return None
    values = read_json(folder / MANIFEST_NAME)
    digest = values.pop("xxh3_128", None)
    if values.get("schema_version", SCHEMA_VERSION) != SCHEMA_VERSION:
        raise CheckpointError(f"`{MANIFEST_NAME}` was written by another version of hf_hybrid")
    if digest != digest_of(values):
        raise CheckpointError(f"`{MANIFEST_NAME}` is damaged")
    return Manifest(values["step"], values["in_step"], values["files"])


def is_committed(folder: str | Path) -> bool:
    """Whether the save of a checkpoint came to its end; says nothing of what happened to the files since."""
    return os.path.isfile(Path(folder) / MANIFEST_NAME)  # not of `Path`, which raises where the folder is closed


def damages(folder: Path, manifest: Manifest) -> list[str]:
    """Return what is wrong with the files of a checkpoint, a phrase for each; checksums only if all sizes agree."""
    files = manifest.files
    wrong = [
        f"`{name}` was not saved with it and would be loaded (delete it, or move it elsewhere)"
        for name in _unlisted(folder, files)
    ]
    for name, known in files.items():
        path = folder / name
        if name == DELETABLE and not path.exists():
            continue
        if not path.is_file():
            wrong.append(f"`{name}` is missing")
        elif path.stat().st_size != known["bytes"]:
            wrong.append(f"`{name}` has {path.stat().st_size:,} bytes instead of {known['bytes']:,}")
    if wrong:
        return wrong
    current = sizes_and_checksums(folder, [path for name in files if (path := folder / name).exists()])
    changed = [name for name, values in current.items() if values != files[name]]
    return [f"`{name}` is not what was saved (its checksum differs)" for name in changed]


def _unlisted(folder: Path, files: dict[str, dict]) -> list[str]:
    """Return what lies in a checkpoint, is not among the files of its manifest, and would be loaded all the same."""
    listed = {MANIFEST_NAME, *files, *(str(parent) for name in files for parent in PurePosixPath(name).parents)}
    names = [path.relative_to(folder).as_posix() for path in sorted(folder.rglob("*"))]
    return [name for name in names if name not in listed and _LOADED.fullmatch(name)]


def weights_saved_again(folder: Path, manifest: Manifest) -> list[Path]:
    """Return the files of weights in a checkpoint, if the weights in its manifest were saved again in other files."""
    saved = set(filter(_WEIGHTS.fullmatch, manifest.files))
    present = [path for path in folder.iterdir() if _WEIGHTS.fullmatch(path.name)]
    return present if saved and saved.isdisjoint(path.name for path in present) else []


def check(folder: Path, *, named: bool = False) -> Manifest | None:
    """
    Return the manifest of a checkpoint. Raise [`CheckpointError`] with the reason, if no run can resume from it. In one
    that the user named, weights that were saved again in other files are taken as they are.
    """
    if reason := no_access(folder) or next(filter(None, map(no_access, sorted(folder.rglob("*")))), None):
        raise CheckpointError(reason)
    manifest = read_manifest(folder)
    if manifest is None:
        read_json(folder / TRAINER_STATE_NAME)
    elif step_of(folder) not in (-1, manifest.step):
        raise CheckpointError(f"`{MANIFEST_NAME}` says that it is of step {manifest.step}")
    else:
        try:
            if named and (weights := weights_saved_again(folder, manifest)):
                others = {name: known for name, known in manifest.files.items() if not _WEIGHTS.fullmatch(name)}
                manifest = replace(manifest, files=others | sizes_and_checksums(folder, weights))
            wrong = damages(folder, manifest)
        except OSError as error:
            raise CheckpointError(f"not all of its files can be read ({error})") from None
        if wrong:
            raise CheckpointError("; ".join(wrong))
    return manifest


def no_access(path: Path) -> str | None:
    """Return a phrase if something is there that this user may not read, or that is none of both."""
    try:
        mode = os.stat(path).st_mode
    except PermissionError:
        return f"a folder above `{path}` may not be entered by this user"
    except OSError:  # there is none
        return None
    if not (stat.S_ISDIR(mode) or stat.S_ISREG(mode)):
        return f"`{path.name}` is neither a file nor a folder, and reading it may never end"
    if os.access(path, os.R_OK | (os.X_OK if stat.S_ISDIR(mode) else 0)):
        return None
    folder = path if stat.S_ISDIR(mode) else path.parent
    return f"`{path.name}` may not be read: it {whose(path)}. Its owner can allow it: `chmod -R a+rX {folder}`"


def whose(path: Path) -> str:
    """Return owner and mode of a file or folder, for messages: "belongs to `alice` and has mode 600"."""
    values = os.stat(path)
    try:
        owner = path.owner()
    except (KeyError, NotImplementedError):  # no name, or Windows
        owner = str(values.st_uid)
    return f"belongs to `{owner}` and has mode {stat.S_IMODE(values.st_mode):o}"


def read_json(path: Path) -> dict:
    """Read a JSON file of a checkpoint. Raises [`CheckpointError`] with a phrase if it cannot be read."""
    if not os.path.isfile(path):  # a pipe would wait for somebody who writes
        raise CheckpointError(f"`{path.name}` is missing")
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError):
        values = None
    if not isinstance(values, dict):
        raise CheckpointError(f"`{path.name}` is damaged")
    return values


# The checkpoints of a folder.


def last_checkpoint(output_dir: str | Path) -> str | None:
    """Return the last checkpoint of a folder whose save came to its end, for messages."""
    committed = [folder for folder in checkpoints_of(Path(output_dir)) if is_committed(folder)]
    return str(committed[-1]) if committed else None


def checkpoints_of(output_dir: Path) -> list[Path]:
    """Return the folders that have the name of a checkpoint, by step."""
    folders = [folder for folder in output_dir.glob("checkpoint-*") if folder.is_dir() and step_of(folder) >= 0]
    return sorted(folders, key=step_of)


def step_of(folder: Path) -> int:
    """Return the step in the name of a checkpoint; -1 if it is the name of none."""
    match = re.fullmatch(r"checkpoint-([0-9]+)", folder.name)
    return -1 if match is None else int(match[1])
