"""
Checkpoints that are whole or refused.

Trainer writes a checkpoint file by file, takes the folder with the highest number for the newest, and loads what it
finds there. A file that is missing, cut short, changed or of another run goes unnoticed, or fails deep inside. Here a
checkpoint gets its name only when it is whole, and is checked against its manifest before anything is loaded.

A save. Trainer writes into a temporary folder, `_hybrid_saving/checkpoint-N`. All files are hashed and flushed to the
disk in parallel threads: hashing takes the processor while flushing waits for the disk. Then the manifest is written:
it seals the checkpoint. Last, one rename gives the folder its name. Only then older checkpoints are deleted, in the
order of their steps.

A kill at any moment. The next save or start deletes a save without a manifest. A save with one is whole, and the next
save or start gives it its name. A checkpoint of the same name is emptied only when its successor is sealed, and then
the successor replaces the empty folder. So at any moment a whole checkpoint exists, and a folder of its name. A
checkpoint that `save_total_limit` gives up is moved into `_hybrid_saving` by a rename, and is deleted there: the next
save or start ends a deletion that was killed.

A resume. `resume_from_checkpoint=True` takes the newest checkpoint of the newest run that agrees with its manifest, and
says why newer ones are passed over. A checkpoint that is named is taken or refused. A file that is loaded by its name,
and that the manifest does not list, is refused like a damaged one. Checkpoints without a manifest (of another trainer)
resume if no checkpoint beside them has one, or if they are named; a warning says that nothing could be checked. A run
that was interrupted in its first save starts again, with a warning.

A run. `hybrid_run.json` in the output folder says which run is the newest, and so does each manifest. With
`enable_predict=False` the file is written only if the folder has older checkpoints or weights, so that other folders
are as `Trainer` leaves them. It also has the checksums of the weights that were in the folder when training began,
until others are saved: if the newest run is interrupted, the weights in its folder are not its own. A run is a list of
pairs `[id, step]`. Each pair names a course and its first step. A new run has one pair. If a run is continued from a
checkpoint while it has later ones, a pair is added, because the course of the later ones was abandoned.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import itertools
import json
import logging
import os
import re
import secrets
import shutil
import stat
from collections.abc import Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

import xxhash

from hf_hybrid.files import is_disk_full, write_json, write_note
from hf_hybrid.records.course import is_on_course, is_same_run

if TYPE_CHECKING:
    from torch import nn

logger = logging.getLogger(__name__)

MANIFEST_NAME = "hybrid_manifest.json"
RUN_NAME = "hybrid_run.json"
SAVING_NAME = "_hybrid_saving"
"""
Folder beside the checkpoints in which the next one is written and old ones are deleted. Uploads leave out what begins
with `_`.
"""
DELETED = "deleted-"
"""How the name of a checkpoint begins that is being deleted."""
TRAINER_STATE_NAME = "trainer_state.json"
EARLIER_NAME = "_hybrid_earlier"
"""Folder for what stood where a checkpoint of this run had to go. Uploads leave it out too."""
SCHEMA_VERSION = 1
THREADS, BLOCK = 8, 1 << 26
"""That flush and hash, and the bytes that one hashes at a time: a multiple of the buffer that it reads into."""
_WEIGHTS = re.compile(r"(model|pytorch_model|adapter_model)[-.].*(safetensors|bin)(\.index\.json)?")
_LOADED = re.compile(
    r"[^/]+\.safetensors(\.index\.json)?|pytorch_model[^/]*\.bin(\.index\.json)?|([^/]+/)?adapter_(model|config)\.[^/]+"
    r"|(optimizer|scheduler|scaler)(_\d+)?\.(pt|bin)|rank\d+-of-\d+-optimizer\.pt|(training_args|user_content)\.(bin|pt)"
    r"|rng_state(_\d+)?\.pth|(random_states|custom_checkpoint)_\d+\.pkl|(config|trainer_state|out_of_memory)\.json|latest"
    r"|hybrid_state[^/]*|(pytorch_model_fsdp[^/]*|optimizer_\d+|global_step\d+)(/.+)?"
)
"""Paths in a checkpoint from which transformers, accelerate, peft, DeepSpeed or this package (in any version) loads."""

Run = list[list]
"""`[[id, first step], ...]`, the newest last."""


DELETABLE = "hybrid_state.json"
"""
The file that a user may delete from a checkpoint, as the refusal of another version's says. What is left is whole: a
run goes on with weights, optimizer and schedule.
"""


class CheckpointError(ValueError):
    """There is no checkpoint to resume from, or the one that was named is damaged; the message names the files."""


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint consists of: `files` has the bytes and the checksum of each, by its path in the folder."""

    step: int
    in_step: bool
    run: Run
    model: str
    files: dict[str, dict]


@dataclass
class Start:
    """
    Where a training starts: the checked folder (`None` for a new run), its run and model, whether it was saved inside
    a step, what the user has to know, and whether the user asked for the same run (`"auto"`), wherever it starts.
    """

    folder: str | None
    run: Run
    model: str
    in_step: bool = False
    warnings: list[str] = field(default_factory=list)
    is_same: bool = False


def new_run(model: nn.Module | None) -> Start:
    """Return the start of a run that begins anew. Between the trials of a search there is no model."""
    return Start(None, [[secrets.token_hex(8), 0]], "" if model is None else names_digest(model))


def names_digest(model: nn.Module) -> str:
    """Return what tells models apart: a digest of the names of all parameters, wherever they are."""
    from hf_hybrid.run.weights import canonical  # here, because it needs torch and nothing else does

    return _digest_of([canonical(name) for name, _ in model.named_parameters()])


# Saving.


@contextlib.contextmanager
def saving(folder: Path) -> Generator[None]:
    """
    Context in which the checkpoint `folder` is written, into [`SAVING_NAME`] beside it, and [`seal`] is called.

    If the save fails, no part of it is left.

    Raises:
        OSError: If the disk is full, with what to do; other errors pass.
    """
    with explaining_a_full_disk(folder):
        try:
            temporary(folder).mkdir(parents=True, exist_ok=True)
            yield
        except Exception:
            settle(folder.parent)
            raise


@contextlib.contextmanager
def explaining_a_full_disk(folder: Path) -> Generator[None]:
    """
    Context in which a process writes its files of the checkpoint `folder`.

    Raises:
        OSError: If the disk is full, with what to do; other errors pass.
    """
    output_dir = folder.parent
    try:
        yield
    except Exception as error:
        if not is_disk_full(error):
            raise
        last = last_checkpoint(output_dir)
        resume = f"Then resume from `{last}`" if last else "No checkpoint was saved yet, so start anew then"
        raise OSError(
            errno.ENOSPC,
            f"The disk is full, or a limit on it is reached: `{folder}` could not be written, and "
            f"{shutil.disk_usage(output_dir).free / 2**20:,.1f} MiB are free in `{output_dir}`. Free space there, keep "
            f"fewer checkpoints with `save_total_limit`, or save only weights with `save_only_model=True`. {resume}.",
        ) from error


def seal(folder: Path, step: int, start: Start, *, in_step: bool) -> dict[str, dict]:
    """
    Flush all files of a checkpoint to the disk, write the manifest that makes it whole, give it its name, and return
    bytes and checksums of the files.

    Args:
        folder (`Path`): The checkpoint, as it will be called.
        step (`int`): Steps that the run has made.
        start (`Start`): Of the run.
        in_step (`bool`): Whether the next step was under way, with its batches fetched.
    """
    written = temporary(folder)
    (written / MANIFEST_NAME).unlink(missing_ok=True)  # of a trainer that copied another checkpoint into it
    paths = sorted(written.rglob("*"))  # with folders in it, which are flushed too
    with ThreadPoolExecutor(THREADS) as waiting:
        flushed = [waiting.submit(_flush, path) for path in paths]
        files = _facts(written, [path for path in paths if path.is_file()])
        for work in flushed:
            work.result()
    values: dict[str, Any] = {"schema_version": SCHEMA_VERSION, "step": step, "in_step": in_step, "run": start.run}
    values |= {"model": start.model, "files": files}
    write_json(written / MANIFEST_NAME, {**values, "xxh3_128": _digest_of(values)})
    settle(folder.parent)
    return files


def add_what_callbacks_saved(folder: Path) -> None:
    """Add to a manifest what callbacks wrote into the sealed checkpoint in `on_save` and a resume would load."""
    values = _read_json(folder / MANIFEST_NAME) if is_sealed(folder) else {"files": {}}
    if values.pop("xxh3_128", None) and (added := _unlisted(folder, values["files"])):
        values["files"] |= _facts(folder, [folder / name for name in added if (folder / name).is_file()])
        write_json(folder / MANIFEST_NAME, {**values, "xxh3_128": _digest_of(values)})


def settle(output_dir: Path) -> list[Path]:
    """
    End the saves and deletions of a folder, also those of a process that was killed: a sealed save gets its name, and
    the rest is deleted. Return the saves that were cut short.
    """
    folder, cut_short = output_dir / SAVING_NAME, []
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        if path.name.startswith(DELETED):
            _delete(path)
        elif is_sealed(path):
            _put_in_place(path, output_dir / path.name)
        else:
            _delete(path)
            cut_short.append(path)
    with contextlib.suppress(OSError):  # there is none
        folder.rmdir()
    return cut_short


def temporary(folder: Path) -> Path:
    """Return where a checkpoint is written."""
    return folder.parent / SAVING_NAME / folder.name


def _put_in_place(sealed: Path, folder: Path) -> None:
    """
    Give a sealed checkpoint its name; one that has this name already is deleted.

    A folder of this name is there at every moment: a job that is restarted after a kill looks for one, and begins anew
    if it sees none. What is of another run is not emptied but moved, right before the rename.
    """
    _flush(sealed)
    if os.path.lexists(folder) and not _is_own(folder, sealed):
        _move_aside(folder)
    if folder.is_dir():
        _flush(sealed.parent)
        _flush(folder.parent)
        # Without the first nothing takes it for whole, and without both nothing takes it for another trainer's.
        for path in (folder / TRAINER_STATE_NAME, folder / MANIFEST_NAME, *folder.iterdir()):
            _delete(path)
    try:
        os.replace(sealed, folder)  # an empty folder is replaced in one stroke
    except OSError:  # not on Windows, nor where the name is a link; and some mounted buckets rename no folders
        _copy(sealed, folder)
        _delete(sealed)
    _flush(folder.parent)
    if len(_checkpoints(folder.parent)) == 1:  # the folder of the run may be new too, and those above it
        for above in folder.parent.absolute().parents:
            with contextlib.suppress(OSError):  # it may not be readable
                _flush(above)


def _copy(path: Path, to: Path) -> None:
    """Copy what has a name, and make sure that the copy is on the disk. Links stay links."""
    if path.is_dir() and not path.is_symlink():
        shutil.copytree(path, to, symlinks=True, dirs_exist_ok=True)
    else:
        shutil.copy2(path, to, follow_symlinks=False)
    for copied in (*to.rglob("*"), to):
        if not copied.is_symlink():
            _flush(copied)


def _is_own(folder: Path, sealed: Path) -> bool:
    """Whether what has the name of a checkpoint is one of the same run, or the rest of one that was being deleted."""
    if folder.is_symlink() or not folder.is_dir():
        return False
    try:
        there, new = read_manifest(folder), read_manifest(sealed)
    except CheckpointError:
        return False
    if there is None or new is None:
        return there is None and not (folder / TRAINER_STATE_NAME).is_file()
    return is_same_run(there.run, new.run)


def _move_aside(path: Path) -> None:
    """Move what stands where a checkpoint has to go, as it is: it may be of an earlier run, a file or a link."""
    place = path.parent / EARLIER_NAME
    place.mkdir(exist_ok=True)
    moved = next(to for number in itertools.count(1) if not os.path.lexists(to := place / f"{path.name}-{number}"))
    try:
        os.replace(path, moved)
    except OSError:  # some mounted buckets rename no folders
        _copy(path, moved)
        _delete(path)
    _flush(place)  # before the folder that it comes from, which is flushed when its successor has its name
    logger.warning("`%s` was not saved by this run: it is `%s` now.", path, moved)


def _delete(path: Path) -> None:
    """Delete a file or a folder: its manifest first, so that nothing takes the rest for whole."""
    if path.is_dir() and not path.is_symlink():
        (path / MANIFEST_NAME).unlink(missing_ok=True)
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def rotate(output_dir: Path, limit: int | None, *, run: Run, newest: Path, best: str | None) -> None:
    """
    Delete checkpoints of this run until `limit` are left, as Trainer does, but by step and not by the clock.

    Those of an abandoned course go first. The newest and the best (`best`) stay, whatever the limit. What other runs
    have saved is neither counted nor deleted, and links are left alone.
    """
    if not limit or limit <= 0:
        return
    kept = {newest.resolve(), *([Path(best).resolve()] if best else [])}
    own = [
        (is_on_course(manifest.run, manifest.step, run), manifest.step, folder)
        for folder, manifest in _manifests(output_dir)
        if is_same_run(manifest.run, run) and not folder.is_symlink()
    ]
    surplus = len(own) - max(limit, len(kept))
    given_up = [folder for _, _, folder in sorted(own) if folder.resolve() not in kept][: max(surplus, 0)]
    for folder in given_up:
        _give_up(folder)
    if given_up:
        with contextlib.suppress(OSError):  # not all could be deleted: the next save tries again
            (output_dir / SAVING_NAME).rmdir()


def _give_up(folder: Path) -> None:
    """
    Delete a checkpoint. After a kill at any moment the rest of it is found: by [`settle`] where it was moved, and where
    folders cannot be renamed by the next rotation, because its manifest goes last.
    """
    moved = folder.parent / SAVING_NAME / f"{DELETED}{step_of(folder)}"
    try:
        moved.parent.mkdir(exist_ok=True)
        os.replace(folder, moved)
    except OSError:  # some mounted buckets rename no folders, and a full disk may have no room for a new one
        for path in folder.iterdir():
            if path.name != MANIFEST_NAME:
                _delete(path)
        moved = folder
    _delete(moved)


def is_of_run(folder: Path, run: Run) -> bool:
    """Whether a folder is a sealed checkpoint that this run has saved."""
    try:
        manifest = read_manifest(folder)
    except CheckpointError:
        return False
    return manifest is not None and is_same_run(manifest.run, run)


def holds_a_run(output_dir: str | Path) -> bool:
    """Whether a folder has checkpoints or weights, or says already which run is its newest."""
    folder = Path(output_dir)
    return (folder / RUN_NAME).exists() or bool(_checkpoints(folder) or _weights(folder))


def write_run(output_dir: str | Path, run: Run) -> None:
    """Write which run is the newest of a folder, as it begins, and which weights are there already."""
    folder, values = Path(output_dir), {"schema_version": SCHEMA_VERSION, "run": run}
    earlier = _facts(folder, [path for path in _weights(folder) if not _no_access(path)])
    write_note(folder / RUN_NAME, values | ({"earlier_weights": earlier} if earlier else {}))


def weights_saved(folder: str | Path) -> None:
    """Note that weights were saved in a folder: what is there now is no longer of an earlier run."""
    path = Path(folder) / RUN_NAME
    with contextlib.suppress(CheckpointError):  # there is no such file, or nothing can be read from it
        values = _read_json(path)
        if values.pop("earlier_weights", None):
            write_note(path, values)


def earlier_weights(folder: str | Path) -> list[str]:
    """
    Return the files of weights in the folder of a run that were there before its newest training began, and are still
    the same: that training has not saved its own.

    Raises:
        CheckpointError: If the file that knows them is damaged.
    """
    folder = Path(folder)
    known = _read_json(folder / RUN_NAME).get("earlier_weights", {}) if (folder / RUN_NAME).is_file() else {}
    return [name for name, facts in _facts(folder, _weights(folder)).items() if known.get(name) == facts]


def _weights(folder: Path) -> list[Path]:
    """Return the files of weights that lie in a folder."""
    return sorted(path for path in folder.glob("*") if _WEIGHTS.fullmatch(path.name) and path.is_file())


def _facts(folder: Path, paths: list[Path]) -> dict[str, dict]:
    """Return bytes and checksum of files, by their path in the folder. Threads share a big file by its blocks."""
    sizes = [path.stat().st_size for path in paths]
    with ThreadPoolExecutor(THREADS) as pool:
        starts = [range(0, size, BLOCK) for size in sizes]
        blocks = [[pool.submit(_digest_of_block, path, start) for start in of] for path, of in zip(paths, starts)]
        digests = [_digest_of([block.result() for block in of]) for of in blocks]
    names = [path.relative_to(folder).as_posix() for path in paths]
    return {name: {"bytes": size, "xxh3_128": digest} for name, size, digest in zip(names, sizes, digests)}


def _digest_of_block(path: Path, start: int) -> str:
    found, buffer, left = xxhash.xxh3_128(), memoryview(bytearray(1 << 18)), BLOCK
    with open(path, "rb", buffering=0) as file:
        file.seek(start)
        while left > 0 and (count := file.readinto(buffer)):
            found.update(buffer[:count])
            left -= count
    return found.hexdigest()


def _digest_of(values: dict | list) -> str:
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
    """
    Return the manifest of a checkpoint, or `None` if it has none.

    Raises:
        CheckpointError: If the manifest itself is damaged or may not be read, or another version wrote it.
    """
    if not is_sealed(folder):
        if why := _no_access(folder):
            raise CheckpointError(why)
        return None
    values = _read_json(folder / MANIFEST_NAME)
    digest = values.pop("xxh3_128", None)
    if values.get("schema_version", SCHEMA_VERSION) != SCHEMA_VERSION:
        raise CheckpointError(f"`{MANIFEST_NAME}` was written by another version of hf_hybrid")
    if digest != _digest_of(values):
        raise CheckpointError(f"`{MANIFEST_NAME}` is damaged")
    return Manifest(**{name: values[name] for name in ("step", "in_step", "run", "model", "files")})


def is_sealed(folder: str | Path) -> bool:
    """Whether the save of a checkpoint came to its end; says nothing of what happened to the files since."""
    return os.path.isfile(Path(folder) / MANIFEST_NAME)  # not of `Path`, which raises where the folder is closed


def damages(folder: Path, manifest: Manifest) -> list[str]:
    """Return what is wrong with the files of a checkpoint, a phrase for each; checksums only if all sizes agree."""
    found = [
        f"`{name}` was not saved with it and would be loaded (delete it, or move it elsewhere)"
        for name in _unlisted(folder, manifest.files)
    ]
    for name, known in manifest.files.items():
        path = folder / name
        if name == DELETABLE and not path.exists():
            continue
        if not path.is_file():
            found.append(f"`{name}` is missing")
        elif path.stat().st_size != known["bytes"]:
            found.append(f"`{name}` has {path.stat().st_size:,} bytes instead of {known['bytes']:,}")
    if found:
        return found
    facts = _facts(folder, [path for name in manifest.files if (path := folder / name).exists()])
    changed = [name for name, known in manifest.files.items() if name in facts and facts[name] != known]
    return [f"`{name}` is not what was saved (its checksum differs)" for name in changed]


def _unlisted(folder: Path, files: dict[str, dict]) -> list[str]:
    """Return what lies in a checkpoint, is not among the files of its manifest, and would be loaded all the same."""
    listed = {MANIFEST_NAME, *files, *(str(parent) for name in files for parent in PurePosixPath(name).parents)}
    there = [path.relative_to(folder).as_posix() for path in sorted(folder.rglob("*"))]
    return [name for name in there if name not in listed and _LOADED.fullmatch(name)]


def _check(folder: Path, manifest: Manifest | None) -> None:
    """Raise [`CheckpointError`] with the reason if no run can resume from a checkpoint."""
    if manifest is None:
        _read_json(folder / TRAINER_STATE_NAME)
    elif step_of(folder) not in (-1, manifest.step):
        raise CheckpointError(f"`{MANIFEST_NAME}` says that it is of step {manifest.step}")
    else:
        try:
            found = damages(folder, manifest)
        except OSError as error:
            raise CheckpointError(f"not all of its files can be read ({error})") from None
        if found:
            raise CheckpointError("; ".join(found))


def _unreadable(folder: Path) -> str | None:
    """Return a phrase on the first file of a checkpoint that this user may not read, or on the folder."""
    return next(filter(None, map(_no_access, (folder, *sorted(folder.rglob("*"))))), None)


def _no_access(path: Path) -> str | None:
    """Return a phrase if a file or folder is there and this user may not read it: whose it is, and what to do."""
    try:
        mode = os.stat(path).st_mode
    except PermissionError:
        return f"a folder above `{path}` may not be entered by this user"
    except OSError:  # there is none
        return None
    if os.access(path, os.R_OK | (os.X_OK if stat.S_ISDIR(mode) else 0)):
        return None
    folder = path if stat.S_ISDIR(mode) else path.parent
    return f"`{path.name}` may not be read: it {whose(path)}. Its owner can allow it: `chmod -R a+rX {folder}`"


def whose(path: Path) -> str:
    """Return owner and mode of a file or folder, for messages: "belongs to `alice` and has mode 600"."""
    found = os.stat(path)
    try:
        owner = path.owner()
    except (KeyError, NotImplementedError):  # no name, or Windows
        owner = str(found.st_uid)
    return f"belongs to `{owner}` and has mode {stat.S_IMODE(found.st_mode):o}"


def _read_json(path: Path) -> dict:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"`{path.name}` is missing") from None
    except OSError as error:
        raise CheckpointError(_no_access(path) or f"`{path.name}` cannot be read ({error.strerror})") from None
    except (ValueError, RecursionError):
        raise CheckpointError(f"`{path.name}` is damaged") from None
    if not isinstance(values, dict):
        raise CheckpointError(f"`{path.name}` is damaged")
    return values


# Resuming.


def find(resume: str | os.PathLike | bool | None, output_dir: str | Path, model: nn.Module | None) -> Start:
    """
    Return where a training starts.

    Args:
        resume (`str`, `PathLike` or `bool`, *optional*): As `resume_from_checkpoint` of `Trainer.train`; with `"auto"`
            a run goes on where it has saved a checkpoint, and begins anew where it has not.
        output_dir (`str` or `Path`): Folder of the run.
        model (`nn.Module`, *optional*): The model to train, before anything wraps it; `None` if it is made later.

    Raises:
        CheckpointError: If there is nothing to resume from, or `resume` names a checkpoint that is damaged.
    """
    start, output_dir = new_run(model), Path(output_dir)
    if why := _no_access(output_dir) or _no_access(output_dir / SAVING_NAME):
        raise CheckpointError(f"`output_dir={output_dir}` cannot be used: {why}.")
    cut_short = settle(output_dir)
    if resume == "auto":
        resume, start.is_same = _has_saved(output_dir), True
    if not resume:
        start.warnings = _left_alone(output_dir)
        return start
    folder, start.warnings = _newest(output_dir, cut_short) if resume is True else _named(Path(resume))
    if folder is None:
        return start
    start.folder, manifest = str(folder), read_manifest(folder)
    if manifest is None:
        start.warnings.append(
            f"`{folder}` has no `{MANIFEST_NAME}` (another trainer wrote it, or its save was cut short), so nothing "
            "tells whether its files are whole."
        )
    else:
        if model is not None and manifest.model != start.model:
            start.warnings.append(f"`{folder}` is of another model: the names of its parameters differ.")
        later = [other for _, other in _manifests(output_dir) if other.step > manifest.step]
        abandoned = any(is_on_course(other.run, other.step, manifest.run) for other in later)
        if DELETABLE in manifest.files and not (folder / DELETABLE).exists():
            start.warnings.append(
                f"`{DELETABLE}` is gone from `{folder}`, so that this run is not compared with the saved one, and the "
                "order of the data is the one that `Trainer` finds. Weights, optimizer and schedule are whole."
            )
        start.in_step = manifest.in_step
        start.run = manifest.run + ([[start.run[0][0], manifest.step]] if abandoned else [])
    _check_values(folder, manifest)
    start.warnings += _not_saved(folder)
    return start


def _has_saved(output_dir: Path) -> bool:
    """
    Whether the newest run of a folder has saved a checkpoint there. One that says nothing of its run counts too, since
    it is damaged or may not be read.
    """
    run = _run_of(output_dir)
    for folder in _checkpoints(output_dir):
        try:
            manifest = read_manifest(folder)
        except CheckpointError:
            return True
        if manifest is None:
            saved = run is None and os.path.isfile(folder / TRAINER_STATE_NAME)
        else:
            saved = run is None or is_same_run(manifest.run, run)
        if saved:
            return True
    return False


def _left_alone(output_dir: Path) -> list[str]:
    """Return a sentence on the checkpoints in the folder of a run that begins anew, if there are any."""
    earlier = [step_of(folder) for folder in _checkpoints(output_dir)]
    if not earlier:
        return []
    many = f"{len(earlier)} checkpoints" if len(earlier) > 1 else "a checkpoint"
    return [
        f"`{output_dir}` holds {many} of an earlier run, up to step {max(earlier):,}. This run begins anew and leaves "
        f"them: `save_total_limit` counts its own, and one whose name it needs moves to `{EARLIER_NAME}`. To go on "
        'with the earlier run, set `resume_from_checkpoint="auto"`.'
    ]


def _named(folder: Path) -> tuple[Path, list[str]]:
    """Return a checkpoint that the user named, and what cannot be checked in it."""
    if is_sealed(temporary(folder)):  # the save was killed right before the rename
        _put_in_place(temporary(folder), folder)
    if not os.path.isdir(folder) and not _no_access(folder):
        raise CheckpointError(f"Can't find a valid checkpoint at `{folder}`: there is no such folder.")
    if why := _unreadable(folder):
        raise CheckpointError(f"Can't find a valid checkpoint at `{folder}`: {why}.")
    warnings = []
    try:
        manifest = read_manifest(folder)
        if manifest is not None and (replaced := _replaced_weights(folder, manifest)):
            kept = {name: known for name, known in manifest.files.items() if name not in replaced}
            manifest = dataclasses.replace(manifest, files=kept | _facts(folder, _weights(folder)))
            names = ", ".join(f"`{name}`" for name in replaced)
            warnings = [f"`{folder}` has other files of weights than were saved ({names}), so they are not checked."]
        _check(folder, manifest)
    except CheckpointError as error:
        raise CheckpointError(
            f"Can't find a valid checkpoint at `{folder}`: {error}. Name another one, or set "
            "`resume_from_checkpoint=True` for the newest that is whole. To load what is left of this one, delete its "
            f"`{MANIFEST_NAME}`."
        ) from None
    return folder, warnings


def _replaced_weights(folder: Path, manifest: Manifest) -> list[str]:
    """Return the files of weights in a manifest if none of them is left and others are there, for example shards."""
    saved = {name for name in manifest.files if _WEIGHTS.fullmatch(name)}
    there = {path.name for path in _weights(folder)}
    return sorted(saved) if there and not saved & there else []


def _newest(output_dir: Path, cut_short: list[Path]) -> tuple[Path | None, list[str]]:
    """
    Return the newest whole checkpoint of the newest run of a folder, and why newer ones are passed over.

    Return `None` for a run that was interrupted in its first save. It has saved nothing that could be lost, and a job
    that is restarted may always resume. `cut_short` is what [`settle`] deleted.
    """
    folders = sorted(_checkpoints(output_dir), key=step_of, reverse=True)
    run, passed_over = _run_of(output_dir), {}
    sealed = run is not None or any(is_sealed(folder) for folder in folders)
    for folder in folders:
        try:
            if why := _unreadable(folder):
                raise CheckpointError(why)
            manifest = read_manifest(folder)
            if manifest is None and sealed:
                raise CheckpointError(
                    f"it has no `{MANIFEST_NAME}` (its save was cut short, or another trainer wrote it)"
                )
            if manifest is not None and run is not None and not is_on_course(manifest.run, manifest.step, run):
                raise CheckpointError(
                    f"it is of an earlier run, or of an abandoned course of this one, says `{MANIFEST_NAME}`"
                )
            _check(folder, manifest)
            return folder, [f"`{path}` is passed over: {why}." for path, why in passed_over.items()]
        except CheckpointError as error:
            passed_over[folder] = str(error)
    # Trainer writes its own state last, and its just-in-time checkpoints begin with a folder of their own.
    begun = [
        folder
        for folder in folders
        if not (_no_access(folder) or is_sealed(folder) or (folder / TRAINER_STATE_NAME).is_file())
    ]
    if folders == begun and len(folders) <= 1 and (begun or cut_short):
        first = (begun or cut_short)[0]
        return None, [f"`{first}` is the first save of a run, and was cut short: the run begins anew."]
    raise CheckpointError(_nothing(output_dir, passed_over))


def _nothing(output_dir: Path, passed_over: dict[Path, str]) -> str:
    text = f"No valid checkpoint found in output directory ({output_dir})"
    if not passed_over:
        return f"{text}. Start anew without `resume_from_checkpoint`, or set it to the folder of a checkpoint."
    found = "; ".join(f"`{folder.name}`: {reason}" for folder, reason in passed_over.items())
    return (
        f"{text}. Passed over: {found}. Start anew without `resume_from_checkpoint`, or set it to the folder of one of "
        "them that you want to continue."
    )


def _check_values(folder: Path, manifest: Manifest | None) -> None:
    """
    Raise [`CheckpointError`] if Trainer cannot go on from its state in a checkpoint: if it is of another version of
    transformers, or was changed together with the manifest.
    """
    from transformers import TrainerState  # here, because nothing else needs it

    values = _read_json(folder / TRAINER_STATE_NAME)
    number, log = (int, float), values.get("log_history")
    types: dict[str, type | tuple[type, ...]] = {"log_history": list, "stateful_callbacks": dict}
    types |= dict.fromkeys(("global_step", "max_steps", "best_global_step", "train_batch_size"), int)
    types |= dict.fromkeys(("epoch", "best_metric", "total_flos", "num_input_tokens_seen", "num_train_epochs"), number)
    types |= dict.fromkeys(("logging_steps", "eval_steps", "save_steps"), number) | {"best_model_checkpoint": str}
    wrong = [name for name in values if name not in {field.name for field in dataclasses.fields(TrainerState)}]
    wrong += [
        name
        for name, expected in types.items()
        if values.get(name) is not None and (not isinstance(values[name], expected) or values[name] is True)
    ]
    if isinstance(log, list) and not all(isinstance(entry, dict) for entry in log):
        wrong.append("log_history")
    step = values.get("global_step")
    if not isinstance(step, int) or step < 0 or (manifest is not None and step != manifest.step):
        wrong.append("global_step")
    if wrong:
        names = ", ".join(f"`{name}={str(values.get(name))[:40]}`" for name in dict.fromkeys(wrong))
        raise CheckpointError(
            f"The run cannot go on from `{folder}`: `{TRAINER_STATE_NAME}` holds what this version of transformers "
            f"does not write ({names}). Set `resume_from_checkpoint` to another checkpoint."
        )


@contextlib.contextmanager
def restoring(folder: str | Path | None) -> Generator[None]:
    """
    Context in which a part of a checkpoint is restored.

    Raises:
        CheckpointError: If the part is of another kind than what is restored from it.
    """
    try:
        yield
    except (TypeError, KeyError, IndexError, AttributeError, RecursionError) as error:
        if folder is None:
            raise
        raise CheckpointError(
            f"The run cannot go on from `{folder}`: its files are of another kind than those of this run "
            f"({type(error).__name__}: {error}). Set `resume_from_checkpoint` to another checkpoint."
        ) from error


def _not_saved(folder: Path) -> list[str]:
    """Return what Trainer will not find in a checkpoint, a sentence for each; it starts anew without a word."""
    found = []
    if not any(folder.glob("global_step*")):  # of DeepSpeed, which holds both
        names = {"optimizer.pt": any(folder.glob("optimizer*")), "scheduler.pt": (folder / "scheduler.pt").is_file()}
        absent = [f"no `{name}`" for name, there in names.items() if not there]
        if absent:
            found.append(
                f"Optimizer and schedule are not restored, as there is {' and '.join(absent)}: both start anew."
            )
    if not any(folder.glob("rng_state*.pth")):
        found.append(
            "Random generators are not restored, as there is no `rng_state.pth`: dropout and the order of later epochs "
            "differ."
        )
    return found


def last_checkpoint(output_dir: str | Path) -> str | None:
    """Return the last checkpoint of a folder's newest run whose save came to its end, for messages."""
    output_dir, run = Path(output_dir), None
    with contextlib.suppress(CheckpointError):
        run = _run_of(output_dir)
    if run is None:
        sealed = [folder for folder in _checkpoints(output_dir) if is_sealed(folder)]
    else:
        sealed = [path for path, manifest in _manifests(output_dir) if is_on_course(manifest.run, manifest.step, run)]
    return str(max(sealed, key=step_of)) if sealed else None


# The checkpoints and the run of a folder.


def _checkpoints(output_dir: Path) -> list[Path]:
    return [folder for folder in output_dir.glob("checkpoint-*") if folder.is_dir() and step_of(folder) >= 0]


def step_of(folder: Path) -> int:
    """Return the step in the name of a checkpoint; -1 if it is the name of none."""
    found = re.fullmatch(r"checkpoint-([0-9]+)", folder.name)
    return -1 if found is None else int(found[1])


def _manifests(output_dir: Path) -> Iterator[tuple[Path, Manifest]]:
    for folder in _checkpoints(output_dir):
        try:
            manifest = read_manifest(folder)
        except CheckpointError:
            continue
        if manifest is not None:
            yield folder, manifest


def _run_of(output_dir: Path) -> Run | None:
    path = output_dir / RUN_NAME
    if not path.is_file():
        return None
    try:
        return [[str(name), int(step)] for name, step in _read_json(path)["run"]]
    except (CheckpointError, KeyError, TypeError, ValueError):
        raise CheckpointError(
            f"`{path}` is damaged: it says which run of the folder is the newest. Set `resume_from_checkpoint` to the "
            "folder of a checkpoint."
        ) from None
