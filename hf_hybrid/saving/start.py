"""
Where a training starts: anew, from the newest checkpoint of its folder, or from one that the user named.

A folder has the checkpoints of one run. `resume_from_checkpoint=True` takes the last one that agrees with its manifest
(manifest.py), and says why newer ones are passed over. `"auto"` does the same where a checkpoint was saved, and begins
anew where none was. A checkpoint that is named is taken or refused. Where a run begins anew, what an earlier one left
is moved aside ([`make_room`]), and so are later checkpoints than the one that a run goes on from.
Checkpoints without a manifest (of another trainer) resume if no checkpoint beside them has one, or if they are named; a
warning says that nothing could be checked. A run that was interrupted in its first save starts again, with a warning.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Generator
from dataclasses import dataclass, field
from pathlib import Path

from safetensors import SafetensorError
from transformers import TrainerState

from hf_hybrid.saving.manifest import (
    DELETABLE,
    MANIFEST_NAME,
    SAVING_NAME,
    TRAINER_STATE_NAME,
    CheckpointError,
    check,
    checkpoints_of,
    finish_interrupted_saves,
    is_committed,
    left_in,
    move_aside,
    no_access,
    put_in_place,
    read_json,
    read_manifest,
    step_of,
    temporary,
    weights_saved_again,
)


@dataclass
class Start:
    """
    Where a training starts: the checked folder (`None` for a new run), whether it was saved inside a step, what the
    user has to know, and whether the user asked for the same run (`"auto"`), wherever it starts.
    """

    folder: str | None = None
    in_step: bool = False
    warnings: list[str] = field(default_factory=list)
    is_same: bool = False


def find(resume: str | os.PathLike | bool | None, output_dir: str | Path) -> Start:
    """
    Return where a training starts whose folder is `output_dir`. `resume` is as in `Trainer.train`; with `"auto"` a run
    goes on where it has saved a checkpoint, and begins anew where it has not. Raise [`CheckpointError`] if it cannot
    start.
    """
    start, output_dir = Start(), Path(output_dir)
    if reason := no_access(output_dir) or no_access(output_dir / SAVING_NAME):
        raise CheckpointError(f"`output_dir={output_dir}` cannot be used: {reason}.")
    for path in output_dir.glob("checkpoint-*"):
        if step_of(path) >= 0 and not path.is_dir():
            raise CheckpointError(f"`{path}` has the name of a checkpoint and is no folder. Move it elsewhere.")
    cut_short = finish_interrupted_saves(output_dir)
    if resume == "auto":
        resume, start.is_same = bool(_saved_checkpoints(output_dir)), True
    if not resume:
        return start
    if resume is True:
        folder, start.warnings = _newest(output_dir, cut_short)
    else:
        folder = _named(Path(resume))
    if folder is None:
        return start
    start.folder, manifest = str(folder), read_manifest(folder)
    if manifest is None:
        start.warnings.append(
            f"`{folder}` has no `{MANIFEST_NAME}` (another trainer wrote it, or its save was cut short), so nothing "
            "tells whether its files are whole."
        )
    else:
        start.in_step = manifest.in_step
        if DELETABLE in manifest.files and not (folder / DELETABLE).exists():
            start.warnings.append(
                f"`{DELETABLE}` is gone from `{folder}`, so that this run is not compared with the saved one, and the "
                "order of the data is the one that `Trainer` finds. Weights, optimizer and schedule are whole."
            )
        if weights_saved_again(folder, manifest):
            start.warnings.append(f"The weights of `{folder}` were saved again in other files. They are not checked.")
    _check_trainer_state(folder)
    start.warnings += _not_saved(folder)
    return start


def make_room(output_dir: Path, taken: Path | None, *, model_is_from_here: bool) -> str | None:
    """
    Move aside what an earlier run left in a folder, before a run begins there that goes on from the checkpoint `taken`,
    or begins anew, and return a sentence that says so. A model that was read from the folder is not moved.
    """
    saved = checkpoints_of(output_dir)
    if taken is not None and taken.resolve().parent == output_dir.resolve():
        why, moved = f"This run goes on from `{taken.name}`", [path for path in saved if step_of(path) > step_of(taken)]
        what = "later checkpoints"
    else:
        has_run = bool(_saved_checkpoints(output_dir)) or (output_dir / TRAINER_STATE_NAME).is_file()
        moved = left_in(output_dir, with_model=not model_is_from_here) if has_run else []
        why, what = "This run begins anew", "what an earlier run left"
    if not moved:
        return None
    last = f" (up to step {step_of(saved[-1]):,})" if saved else ""
    try:
        aside = move_aside(moved)
    except OSError as error:
        raise CheckpointError(
            f"`output_dir={output_dir}` has an earlier run{last}, which cannot be moved aside ({error}). Set another "
            "`output_dir`."
        ) from error
    return f"{why}, so {what} in `{output_dir}`{last} is in `{aside}` now. Delete that if you need it no more."


def _saved_checkpoints(output_dir: Path) -> list[Path]:
    """Return the checkpoints that were saved to their end, also by other trainers, and those that may not be read."""
    return [
        folder
        for folder in checkpoints_of(output_dir)
        if is_committed(folder) or os.path.isfile(folder / TRAINER_STATE_NAME) or no_access(folder)
    ]


def _named(folder: Path) -> Path:
    """Return a checkpoint that the user named, if a run can go on from it."""
    saved = temporary(folder)
    if is_committed(saved) and not saved.parent.is_symlink():  # the save was killed right before the rename
        put_in_place(saved, folder)
    if not os.path.isdir(folder) and not no_access(folder):
        raise CheckpointError(f"Can't find a valid checkpoint at `{folder}`: there is no such folder.")
    try:
        check(folder, named=True)
    except CheckpointError as error:
        raise CheckpointError(
            f"Can't find a valid checkpoint at `{folder}`: {error}. Name another one, or set "
            "`resume_from_checkpoint=True` for the newest that is whole. To load what is left of this one, delete its "
            f"`{MANIFEST_NAME}`."
        ) from None
    return folder


def _newest(output_dir: Path, cut_short: list[Path]) -> tuple[Path | None, list[str]]:
    """
    Return the newest whole checkpoint of a folder, and why newer ones are passed over. Return `None` for a run that was
    interrupted in its first save (`cut_short` is what [`finish_interrupted_saves`] deleted): it has saved nothing that
    could be lost, and a job that is restarted may always resume.
    """
    folders, passed_over = checkpoints_of(output_dir)[::-1], {}
    ours = any(is_committed(folder) for folder in folders)
    for folder in folders:
        try:
            manifest = check(folder)
        except CheckpointError as error:
            passed_over[folder] = str(error)
            continue
        if manifest is None and ours:
            raise CheckpointError(
                f"`{folder}` has no `{MANIFEST_NAME}`, so another trainer wrote it, and a run that goes on from an "
                "earlier one would overwrite it. Name it to go on from it, or move it elsewhere."
            )
        return folder, [f"`{path}` is passed over: {reason}." for path, reason in passed_over.items()]
    # Trainer writes its own state last, and its just-in-time checkpoints begin with a folder of their own.
    begun = [folder for folder in folders if folder not in _saved_checkpoints(output_dir)]
    if folders == begun and len(folders) <= 1 and (begun or cut_short):
        first = (begun or cut_short)[0]
        return None, [f"`{first}` is the first save of a run, and was cut short: the run begins anew."]
    text = f"No valid checkpoint found in output directory ({output_dir})"
    if not passed_over:
        raise CheckpointError(
            f"{text}. Start anew without `resume_from_checkpoint`, or set it to the folder of a checkpoint."
        )
    reasons = "; ".join(f"`{folder.name}`: {reason}" for folder, reason in passed_over.items())
    raise CheckpointError(
        f"{text}. Passed over: {reasons}. Start anew in another `output_dir`, or set `resume_from_checkpoint` to the "
        "folder of one of them that you want to continue."
    )


def _check_trainer_state(folder: Path) -> None:
    """Raise [`CheckpointError`] if Trainer's state is of another version of transformers, or of another step."""
    values = read_json(folder / TRAINER_STATE_NAME)
    if wrong := values.keys() - {field.name for field in dataclasses.fields(TrainerState)}:
        names = ", ".join(f"`{name}={str(values.get(name))[:40]}`" for name in sorted(wrong))
        raise CheckpointError(
            f"The run cannot go on from `{folder}`: `{TRAINER_STATE_NAME}` holds what this version of transformers "
            f"does not write ({names}). Set `resume_from_checkpoint` to another checkpoint."
        )
    with restoring(folder):
        step = TrainerState(**values).global_step
    if not isinstance(step, int) or step < 0 or step_of(folder) not in (-1, step):
        raise CheckpointError(
            f"The run cannot go on from `{folder}`: `{TRAINER_STATE_NAME}` says that it is of step {step}."
        )


@contextlib.contextmanager
def restoring(folder: str | Path | None) -> Generator[None]:
    """Context in which a part of a checkpoint is restored. It raises [`CheckpointError`] if that is of another kind."""
    try:
        yield
    except (TypeError, LookupError, AttributeError, ValueError, RecursionError, SafetensorError) as error:
        if folder is None or isinstance(error, CheckpointError):
            raise
        raise CheckpointError(
            f"The run cannot go on from `{folder}`: its files are of another kind than those of this run "
            f"({type(error).__name__}: {error}). Set `resume_from_checkpoint` to another checkpoint."
        ) from error


def _not_saved(folder: Path) -> list[str]:
    """Return what Trainer will not find in a checkpoint, a sentence for each; it starts anew without a word."""
    sentences = []
    if not any(folder.glob("global_step*")):  # of DeepSpeed, which holds both
        names = {"optimizer.pt": "optimizer*", "scheduler.pt": "scheduler.pt"}
        if absent := " and ".join(f"no `{name}`" for name, pattern in names.items() if not any(folder.glob(pattern))):
            sentences.append(f"Optimizer and schedule are not restored, as there is {absent}: both start anew.")
    if not any(folder.glob("rng_state*.pth")):
        sentences.append(
            "Random generators are not restored, as there is no `rng_state.pth`: dropout and the order of later epochs "
            "differ."
        )
    return sentences
