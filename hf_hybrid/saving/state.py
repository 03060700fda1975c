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
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.utils._pytree import tree_flatten_with_path, tree_map, tree_unflatten
from tqdm.auto import tqdm
from transformers.trainer_utils import IntervalStrategy

from hf_hybrid.files import write_json
from hf_hybrid.leaps.leap import Leaps
from hf_hybrid.run.trainer_view import TrainerView
from hf_hybrid.saving.async_save import AsyncSaver
from hf_hybrid.saving.manifest import DELETABLE, MANIFEST_NAME, CheckpointError

if TYPE_CHECKING:
    from hf_hybrid.saving.run_identity import Differences

logger = logging.getLogger(__name__)

TENSORS_NAME = "hybrid_state.safetensors"
VALUES_NAME = DELETABLE
SCHEMA_VERSION = 6
OWN = "own"
"""Key in the state of a part: below it stands what each process keeps for itself."""

Report = dict[str, Any]

# Files.


def save_state(
    folder: str | Path,
    state: dict[str, Any],
    about: dict[str, Any],
    *,
    process: int = 0,
    writer: AsyncSaver | None = None,
) -> None:
    """
    Write the states of parts. All processes call this.

    Args:
        folder (`str` or `Path`): The checkpoint.
        state (`dict`): By part. Tensors may stand anywhere in it.
        about (`dict`): JSON values beside them.
        process (`int`): This one's number. The first writes everything, others what is below `own`.
        writer (`AsyncSaver`, *optional*): Writes the files of the first process. Default: now.
    """
    folder, writer = Path(folder), AsyncSaver() if writer is None else writer
    folder.mkdir(parents=True, exist_ok=True)  # another process writes the weights and may not be there yet
    if process:
        own = {name: {OWN: values[OWN]} for name, values in state.items() if OWN in values}
        if own:
            tensors, values = _apart(own)
            save_file(tensors, folder / _tensors_name(process), metadata={"values": json.dumps(values)})
        return
    tensors, values = _apart(state)
    tensors, values = writer.staged("parts", tensors), {"schema_version": SCHEMA_VERSION, **about, "parts": values}

    def write() -> None:
        save_file(tensors, folder / TENSORS_NAME)
        write_json(folder / VALUES_NAME, values)

    writer.write(write)


class OtherVersionError(ValueError):
    """An earlier or later version wrote the state of a checkpoint; the message is a clause that says which."""


def load_state(folder: str | Path, *, process: int = 0) -> tuple[dict[str, Any], dict[str, Any]] | None:
    """
    Read what [`save_state`] wrote: states by part, and what stands beside them; `None` if the checkpoint holds none.

    Raises:
        OtherVersionError: If another version wrote it.
        ValueError: If it is damaged.
    """
    folder = Path(folder)
    if not (folder / VALUES_NAME).is_file() or not (folder / TENSORS_NAME).is_file():
        return None
    name = VALUES_NAME
    try:
        about = json.loads((folder / name).read_text(encoding="utf-8"))
        name = TENSORS_NAME
        tensors = load_file(folder / name)
    except (ValueError, SafetensorError) as error:
        raise ValueError(
            f"`{folder / name}` is damaged: {error}. Delete `{MANIFEST_NAME}`, `{VALUES_NAME}` and `{TENSORS_NAME}` in "
            f"this folder and set `resume_from_checkpoint={folder}`: weights and optimizer are restored then, and "
            "phases start anew."
        ) from None
    version = about.pop("schema_version", None)
    if version != SCHEMA_VERSION:
        raise OtherVersionError(
            f"its `schema_version` is {'missing' if version is None else f'`{version}`'}, and this version of "
            f"hf_hybrid reads `{SCHEMA_VERSION}`"
        )
    state = _together(tensors, about.pop("parts"))
    if process:
        path, own = folder / _tensors_name(process), {}
        if path.is_file():
            with safe_open(path, framework="pt") as file:
                tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 - not a dictionary
                own = _together(tensors, json.loads(file.metadata()["values"]))
        for name, found in state.items():
            found.pop(OWN, None)
            found.update(own.get(name, {}))
    return state, about


def _tensors_name(process: int) -> str:
    return f"hybrid_state_{process}.safetensors"


_TENSOR = "__tensor__"


def _apart(state: Any) -> tuple[dict[str, Tensor], Any]:
    """Return the tensors in nested dictionaries and lists, by the path to each, and the rest."""
    paths_and_leaves, spec = tree_flatten_with_path(state)
    tensors, rest = {}, []
    for path, leaf in paths_and_leaves:
        if isinstance(leaf, Tensor):
            name = "/".join([str(getattr(key, "key", getattr(key, "idx", key))) for key in path])
            tensors[name], leaf = leaf.detach().cpu().contiguous(), {_TENSOR: name}
        rest.append(leaf)
    return tensors, tree_unflatten(rest, spec)


def _together(tensors: dict[str, Tensor], values: Any) -> Any:
    """Return what [`_apart`] took apart."""

    def stands_for_tensor(value: Any) -> bool:
        return isinstance(value, dict) and set(value) == {_TENSOR}

    return tree_map(
        lambda value: tensors[value[_TENSOR]] if stands_for_tensor(value) else value, values, is_leaf=stands_for_tensor
    )


# Resuming.


def save(trainer: TrainerView, folder: str | Path, about: dict[str, Any]) -> None:
    """Write the state of a run, and what is known about it, into a checkpoint. All processes must call this."""
    state = trainer.run.state_dict()
    if trainer.args.should_save or trainer.is_world_process_zero() or any(OWN in values for values in state.values()):
        about = {**about, "probe_sequences": _probe_sequences(trainer)}
        save_state(folder, state, about, process=trainer.args.process_index, writer=trainer.saver.writer)


def _probe_sequences(trainer: TrainerView) -> int | None:
    leaps = trainer.run.part(Leaps)
    return None if leaps is None or leaps.probe is None else getattr(leaps.probe.source, "sequences", None)


def restore(trainer: TrainerView, checkpoint: str, differences: Differences) -> Report:
    """
    Restore the parts of a run that is about to start.

    Args:
        trainer: Ready to run, with a fresh run; `Trainer` has restored weights, optimizer and schedule already.
        checkpoint (`str`): The folder.
        differences (`Differences`): Of the run and the one that the checkpoint is of.

    Returns:
        `dict`: Plain values for `hybrid_summary()["resumed"]`: `checkpoint`, `step`, `restored` (what the hybrid state
        brought back; `None` if the checkpoint holds none), `changed_options` (`[then, now]` by name), `warnings`
        (sentences on what was not restored, or not taken up), and `evaluation_is_due` (whether the run evaluates before
        its first step, because it was saved before an evaluation of that step was made).
    """
    report: Report = {"checkpoint": str(checkpoint), "step": trainer.state.global_step, "restored": None}
    report |= {"evaluation_is_due": False, "changed_options": {}, "warnings": []}
    try:
        saved = load_state(checkpoint, process=trainer.args.process_index)
    except OtherVersionError as error:
        if trainer.saver.start.is_same:
            raise CheckpointError(
                f"`{Path(checkpoint) / VALUES_NAME}` was written by another version of hf_hybrid: {error}. "
                '`resume_from_checkpoint="auto"` promises the same run, which needs that file. Resume with the version '
                f"that saved it. Or delete the file, or name the checkpoint (`resume_from_checkpoint={checkpoint}`): "
                "weights, optimizer, schedule and random generators go on, and phases start anew."
            ) from None
        saved = None
        anew = (
            "Phases, leaps, the planner and the scale of the learning rate start anew; an open leap is never judged. "
        )
        report["warnings"].append(
            f"`{Path(checkpoint) / VALUES_NAME}` is not restored: {error}. Weights, optimizer, schedule and random "
            f"generators go on. {anew if trainer.run.has_phases else ''}Options and data are not compared with "
            "those of the saved run. To go on with all of it, resume with the version that saved it."
        )
    if saved is None:
        if trainer.run.has_phases and not report["warnings"]:
            report["warnings"].append(
                f"`{checkpoint}` holds no hybrid state (it was saved with `save_only_model` or by another trainer, or "
                f"`{VALUES_NAME}` was deleted), so that phases and predictor start anew."
            )
        trainer.run.load_state_dict({})
        return report
    state, about = saved
    evaluates = trainer.args.eval_strategy != IntervalStrategy.NO
    report["evaluation_is_due"] = evaluates and about.get("evaluation_is_due", False)
    _leave_out_other_planner(trainer, state, about, report)
    if trainer.args.ignore_data_skip or differences.other_batches:
        state.pop("feed", None)  # the place is where Trainer finds as many steps done, or the start of the epoch
        state.pop("order", None)
    leap_is_open = any(name.startswith("snapshot.") for name in state.get("leaps", {}).get("tensors", {}))
    trainer.run.load_state_dict(state)
    report["changed_options"].update(differences.changed)
    report["warnings"] += differences.notes
    if leap_is_open and trainer.run.part(Leaps) is None:
        report["warnings"].append(_OPEN_LEAP)
    if trainer.run.has_phases:
        report["restored"] = _restored(trainer, state)
        report["warnings"] += _not_restored(trainer, state, about)
    return report


_OPEN_LEAP = (
    "The checkpoint was saved while a leap was open: its weights hold a leap that nothing has verified yet, and "
    "without leaps nothing undoes it. Resume with leaps to have it judged, or from an earlier checkpoint."
)


def _leave_out_other_planner(trainer: TrainerView, state: dict, about: dict, report: Report) -> None:
    """Start the planner anew if the checkpoint is of another planner."""
    planner = trainer.hybrid_args.planner
    was = about["options"].get("planner", planner)
    if was != planner and "leaps" in state:
        state["leaps"]["gains"] = None
        state.pop("planner_observer", None)
        report["warnings"].append(f"What the planner has learned is not restored: it was `{was}` and is `{planner}`.")


def _restored(trainer: TrainerView, state: dict) -> dict[str, Any]:
    """Return what was restored, as plain values."""
    run, leaps = trainer.run, trainer.run.part(Leaps)
    phase = run.phase_of(trainer.state.global_step) if leaps is None else leaps.controller.phase
    of_leaps: dict[str, Any] = {"direction": None, "open_leap": False, "memory_bytes": 0}
    if leaps is not None:
        direction, found = leaps.trajectory.direction.name, state.get("leaps")
        same = found is not None and found["trajectory"]["direction"] == direction
        memories = [t for name, t in found["tensors"].items() if not name.startswith("snapshot.")] if same else []
        of_leaps = {
            "direction": direction,
            "open_leap": leaps.trajectory.open is not None,
            "memory_bytes": sum(tensor.numel() * tensor.element_size() for tensor in memories),
        }
    return {
        "phase": None if phase is None else phase.value,
        "leaps": run.record.leaps_made,
        **of_leaps,
        "planner": trainer.hybrid_args.planner,
        "learning_rate_scale": run.rate_scale,
        "probe_sequences": _probe_sequences(trainer),
        "data": None if trainer.args.ignore_data_skip or run.feed is None else run.feed.state_dict(),
    }


def _not_restored(trainer: TrainerView, state: dict, about: dict) -> list[str]:
    run, found, leaps = trainer.run, [], trainer.run.part(Leaps)
    if leaps is not None and "leaps" in state:
        direction, was = leaps.trajectory.direction.name, state["leaps"]["trajectory"]["direction"]
        if was != direction:
            found.append(f"The memories of the direction are not restored: it was `{was}` and is `{direction}`.")
    if trainer.args.ignore_data_skip:
        found.append(
            "The place in the data is not restored (`ignore_data_skip=True`): the epoch starts with other batches."
        )
    rate = run.rate
    if ("rate" in state) != (rate is not None):
        was, now = ("on", "off") if rate is None else ("off", "on")
        found.append(f"Automatic learning rate was {was} and is {now}: the scale begins at {run.rate_scale:g}.")
    sequences, then = _probe_sequences(trainer), about.get("probe_sequences")
    if then is not None and then != sequences:
        found.append(f"`probe_dataset` had {then} sequences and has {sequences}.")
    return found


# The report of a resume.


def describe(report: Report) -> str:
    """Return one line that says where the run goes on and what was restored."""
    line = f"Resumed from `{report['checkpoint']}` at step {report['step']:,}"
    found = report["restored"]
    if found is None:
        return f"{line}, without hybrid state."
    parts = [f"phase `{found['phase']}`" + (", in which a leap is open" if found["open_leap"] else "")]
    if found["direction"] is not None:
        memories = f"memories of `{found['direction']}` ({found['memory_bytes'] / 2**20:,.1f} MiB)"
        parts += [
            memories if found["memory_bytes"] else f"direction `{found['direction']}` without memories",
            f"planner `{found['planner']}` after {found['leaps']} leaps",
        ]
    parts.append(f"learning-rate scale {found['learning_rate_scale']:.3g}")
    if found["probe_sequences"] is not None:
        parts.append(f"`probe_dataset` of {found['probe_sequences']} sequences")
    if found["data"] is not None:
        data = found["data"]
        parts.append(f"data behind {data['trained']:,} batches of epoch {data['epoch']}")
    return f"{line}: {', '.join(parts)}."


def tell(report: Report, *, show: bool, has_phases: bool = True) -> None:
    """
    Log what was restored at INFO, in a run with phases; what has changed or was not restored in one WARNING.

    Args:
        report (`dict`): From [`restore`].
        show (`bool`): Write the line above the progress bar too, where the logger does not show INFO.
    """
    if has_phases:
        line = describe(report)
        logger.info("%s", line)
        if show and not logger.isEnabledFor(logging.INFO):
            tqdm.write(line)
    if differences := table_of(report):
        logger.warning("%s", differences)


def table_of(report: Report) -> str:
    """Return what differs from the run of the checkpoint: a table of options, and a sentence for everything else."""
    lines, changed = [], report["changed_options"]
    if changed:
        lines.append(
            f"Options differ from those that `{report['checkpoint']}` was saved with; the new ones hold from here on:"
        )
        rows = [("option", "was", "is"), *((f"`{name}`", f"{then}", f"{now}") for name, (then, now) in changed.items())]
        widths = [max(len(row[column]) for row in rows) for column in range(2)]
        lines += [f"  {name:<{widths[0]}}  {then:<{widths[1]}}  {now}" for name, then, now in rows]
    return "\n".join([*lines, *report["warnings"]])
