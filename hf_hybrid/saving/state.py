"""
What a checkpoint holds beside Trainer's own files, and how a run resumes from it.

| file | what |
|---|---|
| `hybrid_state.json` | the state of every part, by name; record and position in the data; the identity of the run |
| `hybrid_state.safetensors` | the tensors in these states: buffers of the direction, the snapshot of an open leap |
| `hybrid_state_1.safetensors`, ... | what a part keeps on each process for itself: generators, GRPO's completions |

A part (part.py) returns JSON values and dictionaries of tensors, and gets them back. Nothing here knows what they mean.
There is no pickle, and tensors are whole, also where processes share the weights. Weights, optimizer, schedule and
random generators are in Trainer's files. Whether all files are whole is for the manifest to say (manifest.py). A run
that is killed in any phase and resumes from its last complete checkpoint ends at the same weights, bit for bit, as a
run that was never interrupted.
"""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.utils._pytree import tree_flatten_with_path, tree_map, tree_unflatten
from tqdm.auto import tqdm
from transformers.trainer_utils import IntervalStrategy

from hf_hybrid.files import own_folder, write_json
from hf_hybrid.leaps.leap import Leaps
from hf_hybrid.run.trainer_view import TrainerView
from hf_hybrid.saving.manifest import DELETABLE, MANIFEST_NAME, CheckpointError

logger = logging.getLogger(__name__)

TENSORS_NAME = "hybrid_state.safetensors"
VALUES_NAME = DELETABLE
SCHEMA_VERSION = 6
OWN, OWN_NAME = "own", "hybrid_state_{}.safetensors"
"""Key in the state of a part, below which stands what each process keeps for itself; and the file of a process."""

Report = dict[str, Any]

# Files.


def save_state(folder: str | Path, state: dict[str, Any], about: dict[str, Any], *, process: int = 0) -> None:
    """Write the states of parts, by name: process 0 all of them with the JSON values `about`, others what is `own`."""
    folder = Path(folder)
    if process:
        state = {name: {OWN: values[OWN]} for name, values in state.items() if OWN in values}
        if not state:
            return
    own_folder(folder.parent, folder.name)  # another process writes the weights and may not be there yet
    tensors, values = _split(state)
    if process:
        save_file(tensors, folder / OWN_NAME.format(process), metadata={"values": json.dumps(values)})
    else:
        save_file(tensors, folder / TENSORS_NAME)
        write_json(folder / VALUES_NAME, {"schema_version": SCHEMA_VERSION, **about, "parts": values})


class OtherVersionError(ValueError):
    """Another version wrote the state of a checkpoint; the message is a clause that says which."""


def load_state(folder: str | Path, *, process: int = 0) -> tuple[dict[str, Any], dict[str, Any]] | None:
    """Read what [`save_state`] wrote, if there is any. [`OtherVersionError`], or `CheckpointError` if it is damaged."""
    folder, path = Path(folder), Path(folder, VALUES_NAME)
    if not path.is_file() or not (folder / TENSORS_NAME).is_file():
        return None
    try:
        about = json.loads(path.read_text(encoding="utf-8"))
        path = folder / TENSORS_NAME
        tensors = load_file(path)
    except (ValueError, RecursionError, SafetensorError) as error:
        raise CheckpointError(
            f"`{path}` is damaged: {error}. Delete `{MANIFEST_NAME}`, `{VALUES_NAME}` and `{TENSORS_NAME}` in this "
            f"folder and set `resume_from_checkpoint={folder}`: weights and optimizer are restored then, and phases "
            "start anew."
        ) from None
    version = about.pop("schema_version", None)
    if version != SCHEMA_VERSION:
        raise OtherVersionError(
            f"its `schema_version` is {'missing' if version is None else f'`{version}`'}, and this version of "
            f"hf_hybrid reads `{SCHEMA_VERSION}`"
        )
    state = _joined(tensors, about.pop("parts"))
    if process:
        own: dict[str, Any] = {}
        if (path := folder / OWN_NAME.format(process)).is_file():
            with safe_open(path, framework="pt") as file:
                tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 - not a dictionary
                own = _joined(tensors, json.loads(file.metadata()["values"]))
        for name, values in state.items():
            values.pop(OWN, None)
            values.update(own.get(name, {}))
    return state, about


_TENSOR = "__tensor__"


def _split(state: Any) -> tuple[dict[str, Tensor], Any]:
    """Return the tensors in nested dictionaries and lists, by the path to each, and the rest."""
    paths_and_leaves, spec = tree_flatten_with_path(state)
    tensors, rest = {}, []
    for path, leaf in paths_and_leaves:
        if isinstance(leaf, Tensor):
            name = "/".join([str(getattr(key, "key", getattr(key, "idx", key))) for key in path])
            tensors[name], leaf = leaf.detach().cpu().contiguous(), {_TENSOR: name}
        rest.append(leaf)
    return tensors, tree_unflatten(rest, spec)


def _joined(tensors: dict[str, Tensor], values: Any) -> Any:
    """Return what [`_split`] took apart."""

    def stands_for_tensor(value: Any) -> bool:
        return isinstance(value, dict) and set(value) == {_TENSOR}

    return tree_map(
        lambda value: tensors[value[_TENSOR]] if stands_for_tensor(value) else value, values, is_leaf=stands_for_tensor
    )


# Resuming.


@dataclass
class Differences:
    """What a run differs in from the one that a checkpoint is of."""

    refused: list[str] = field(default_factory=list)
    """Why it cannot be the same run, and what to do, a text for each reason."""
    changed: dict[str, list] = field(default_factory=dict)
    """Options whose new values hold, as `[saved, current]`."""
    notes: list[str] = field(default_factory=list)
    """What else the user has to know, a sentence each."""
    other_batches: bool = False
    """Whether the position in the data, as a number of batches, means nothing any more."""


def restore(trainer: TrainerView, checkpoint: str, differences: Differences) -> Report:
    """
    Restore the parts of a run that is about to start. `Trainer` has restored weights, optimizer and schedule already.
    Return plain values for `hybrid_summary()["resumed"]`: `restored` is what the hybrid state brought back (`None` if
    there is none), `changed_options` is `[saved, current]` by name, and `warnings` say what was not taken up.
    """
    warnings: list[str] = []
    report: Report = {"checkpoint": str(checkpoint), "step": trainer.state.global_step, "restored": None}
    report |= {"evaluation_is_due": False, "changed_options": {}, "warnings": warnings}
    file, run = Path(checkpoint) / VALUES_NAME, trainer.run
    try:
        saved = load_state(checkpoint, process=trainer.args.process_index)
        if saved is None and run.has_phases:
            warnings.append(
                f"`{checkpoint}` holds no hybrid state (it was saved with `save_only_model` or by another trainer, or "
                f"`{VALUES_NAME}` was deleted), so that phases and predictor start anew."
            )
    except OtherVersionError as error:
        if trainer.saver.start.is_same:
            raise CheckpointError(
                f"`{file}` was written by another version of hf_hybrid: {error}. "
                '`resume_from_checkpoint="auto"` promises the same run, which needs that file. Resume with the version '
                f"that saved it. Or delete the file, or name the checkpoint (`resume_from_checkpoint={checkpoint}`): "
                "weights, optimizer, schedule and random generators go on, and phases start anew."
            ) from None
        saved = None
        phases = " Phases, leaps, the planner and the learning-rate scale start anew, and no open leap is judged."
        warnings.append(
            f"`{file}` is not restored: {error}. Weights, optimizer, schedule and random generators go on."
            f"{phases if run.has_phases else ''} Options and data are not compared with those of the saved run. To go "
            "on with all of it, resume with the version that saved it."
        )
    if saved is None:
        run.load_state_dict({})
        return report
    state, about = saved
    evaluates = trainer.args.eval_strategy != IntervalStrategy.NO
    report["evaluation_is_due"] = evaluates and about.get("evaluation_is_due", False)
    planner = about["options"].get("planner", trainer.hybrid_args.planner)
    if planner != trainer.hybrid_args.planner and "leaps" in state:
        state["leaps"]["gains"] = None
        state.pop("planner_observer", None)
        warnings.append(
            f"What the planner has learned is not restored: it was `{planner}` and is `{trainer.hybrid_args.planner}`."
        )
    if trainer.args.ignore_data_skip or differences.other_batches:
        state.pop("feed", None)  # the place is where Trainer finds as many steps done, or the start of the epoch
        state.pop("order", None)
    tensors_of_leaps = state.get("leaps", {}).get("tensors", {})
    run.load_state_dict(state)
    if (tokens := about.get("tokens_of_trl")) is not None:
        vars(trainer)["_total_train_tokens"] = tokens
    report["changed_options"].update(differences.changed)
    warnings += differences.notes
    if run.part(Leaps) is None and any(name.startswith("snapshot.") for name in tensors_of_leaps):
        warnings.append(
            "The checkpoint was saved while a leap was open: its weights hold a leap that nothing has verified yet, "
            "and without leaps nothing undoes it. Resume with leaps to have it judged, or from an earlier checkpoint."
        )
    if run.has_phases:
        report["restored"] = _restored(trainer)
        warnings += _not_restored(trainer, state)
    return report


def _restored(trainer: TrainerView) -> dict[str, Any]:
    """Return where the run goes on, as plain values."""
    run, leaps = trainer.run, trainer.run.part(Leaps)
    phase = run.phase_of(trainer.state.global_step) if leaps is None else leaps.controller.phase
    return {
        "phase": None if phase is None else phase.value,
        "open_leap": leaps is not None and leaps.trajectory.open is not None,
        "data": None if trainer.args.ignore_data_skip or run.feed is None else run.feed.state_dict(),
    }


def _not_restored(trainer: TrainerView, state: dict) -> list[str]:
    run, sentences, leaps = trainer.run, [], trainer.run.part(Leaps)
    if leaps is not None and "leaps" in state:
        current, saved = leaps.trajectory.direction.name, state["leaps"]["trajectory"]["direction"]
        if saved != current:
            sentences.append(f"The memories of the direction are not restored: it was `{saved}` and is `{current}`.")
    if trainer.args.ignore_data_skip:
        sentences.append(
            "The place in the data is not restored (`ignore_data_skip=True`): the epoch starts with other batches."
        )
    if ("rate" in state) != (run.rate is not None):
        saved, current = ("on", "off") if run.rate is None else ("off", "on")
        sentences.append(
            f"Automatic learning rate was {saved} and is {current}: the scale begins at {run.rate_scale:g}."
        )
    return sentences


# The report of a resume.


def log_report(report: Report, *, show: bool, has_phases: bool) -> None:
    """
    Log what was restored at INFO, in a run with phases; what has changed or was not restored in one WARNING. `show`
    writes the line above the progress bar too, where the logger does not show INFO.
    """
    checkpoint, restored, changed = report["checkpoint"], report["restored"], report["changed_options"]
    if has_phases:
        line = f"Resumed from `{checkpoint}` at step {report['step']:,}"
        if restored is None:
            line += ", without hybrid state"
        else:
            line += f": phase `{restored['phase']}`" + (", in which a leap is open" if restored["open_leap"] else "")
            if (data := restored["data"]) is not None:
                line += f", data behind {data['trained']:,} batches of epoch {data['epoch']}"
        logger.info("%s.", line)
        if show and not logger.isEnabledFor(logging.INFO):
            tqdm.write(f"{line}.")
    lines = []
    if changed:
        lines.append(f"Options differ from those that `{checkpoint}` was saved with; the new ones hold from here on:")
        rows = [("option", "was", "is"), *((f"`{name}`", str(old), str(new)) for name, (old, new) in changed.items())]
        widths = [max(len(row[column]) for row in rows) for column in range(2)]
        lines += [f"  {name:<{widths[0]}}  {old:<{widths[1]}}  {new}" for name, old, new in rows]
    if lines := [*lines, *report["warnings"]]:
        logger.warning("%s", "\n".join(lines))
