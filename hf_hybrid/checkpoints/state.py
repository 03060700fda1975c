"""
The files of a checkpoint beside `Trainer`'s own, and how a run resumes from them.

| file | what |
|---|---|
| `hybrid_state.safetensors` | buffers of the direction, the snapshot of an open leap, what the planner has learned |
| `hybrid_state.json` | phases, counters, last leaps; position in the data; plugins; options to compare with |
| `out_of_memory.json` | sizes that fitted after memory ran out (recovery.py); exists only if it did |

There is no pickle, and tensors are whole, also where processes share the weights. Weights, optimizer, schedule and
random generators are in Trainer's files. Whether all files are whole is for the manifest to say (manifest.py). A run
that is killed in any phase and resumes from its last complete checkpoint ends at the same weights, bit for bit, as a
run that was never interrupted.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from tqdm.auto import tqdm

from hf_hybrid.arguments import hybrid_values
from hf_hybrid.files import write_json

logger = logging.getLogger(__name__)

TENSORS_NAME = "hybrid_state.safetensors"
VALUES_NAME = "hybrid_state.json"
SCHEMA_VERSION = 4

Report = dict[str, Any]

# Files.


def save_hybrid_state(folder: str | Path, tensors: dict, values: dict[str, Any]) -> None:
    """Write both files of the hybrid state."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    host = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    save_file(host, folder / TENSORS_NAME)
    write_json(folder / VALUES_NAME, {"schema_version": SCHEMA_VERSION, **values})


def load_hybrid_state(folder: str | Path) -> tuple[dict, dict[str, Any]] | None:
    """
    Read what [`save_hybrid_state`] wrote; `None` if the checkpoint holds no hybrid state.

    Raises:
        ValueError: If another version wrote it, or if it has no version.
    """
    folder = Path(folder)
    if not (folder / VALUES_NAME).is_file() or not (folder / TENSORS_NAME).is_file():
        return None
    values = json.loads((folder / VALUES_NAME).read_text(encoding="utf-8"))
    version = values.pop("schema_version", None)
    if version != SCHEMA_VERSION:
        found = "missing" if version is None else f"`{version}`"
        raise ValueError(
            f"`{folder / VALUES_NAME}` was written by another version of hf_hybrid: its `schema_version` is {found}, "
            f"and this one reads `{SCHEMA_VERSION}`. Resume with that version, or delete the file: weights and "
            "optimizer are restored then, and phases start anew."
        )
    return load_file(folder / TENSORS_NAME), values


# Resuming.

# Of `TrainingArguments`: what decides about the course of a training. The optimizer keeps its own in its state, and so
# does the scheduler with the learning rate: `Trainer` takes those from the checkpoint.
_NEW_HOLD = (
    "max_steps", "num_train_epochs", "per_device_train_batch_size", "gradient_accumulation_steps", "optim",
    "lr_scheduler_type", "warmup_steps", "max_grad_norm", "label_smoothing_factor", "bf16", "fp16", "seed", "data_seed",
)  # fmt: skip
_OLD_HOLD = ("learning_rate", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon")


def save(trainer, folder: str | Path) -> None:
    """Write the hybrid state of a run into the checkpoint that Trainer is writing. All processes must call this."""
    tensors, run = trainer.run.state_dict()
    # Sharded weights are whole on the first process alone.
    is_whole = trainer.run.trajectory.shards.processes == 1
    if not (trainer.args.should_save if is_whole else trainer.is_world_process_zero()):
        return
    parts = {"run": run, "feed": trainer.run.feed.state_dict(), "plugins": trainer.plugins.state_dict()}
    save_hybrid_state(folder, tensors, {**resume_values(trainer), **parts})


def resume_values(trainer) -> dict[str, Any]:
    """Return the options and facts about the data that a resumed run compares with, as JSON values."""
    found = {name: getattr(trainer.args, name, None) for name in (*_NEW_HOLD, *_OLD_HOLD)}
    return {
        "options": hybrid_values(trainer.hybrid_args),
        "training_options": {name: getattr(value, "value", value) for name, value in found.items()},
        "probe_sequences": _probe_sequences(trainer),
        "processes": trainer.accelerator.num_processes,
    }


def _probe_sequences(trainer) -> int | None:
    probe = trainer.run.probe
    return None if probe is None else getattr(probe.source, "sequences", None)


def restore(trainer, checkpoint: str) -> Report:
    """
    Restore phases, predictor, data position and plugins of a run that is about to start.

    Args:
        trainer: Ready to run, with a fresh engine; `Trainer` has restored weights, optimizer and schedule already.
        checkpoint (`str`): The folder.

    Returns:
        `dict`: Plain values for `hybrid_summary()["resumed"]`: `checkpoint`, `step`, `restored` (what the hybrid state
        brought back; `None` if the checkpoint holds none), `changed_options` (`[then, now]` by name), and `warnings`
        (sentences on what was not restored, or not taken up).
    """
    report = {
        "checkpoint": str(checkpoint),
        "step": trainer.state.global_step,
        "restored": None,
        "changed_options": {},
        "warnings": [],
    }
    state = load_hybrid_state(checkpoint)
    if state is None:
        report["warnings"].append(
            f"`{checkpoint}` holds no hybrid state (it was saved with `save_only_model`, or by another trainer), so "
            "that phases and predictor start anew."
        )
        return report
    tensors, values = state
    _compare_options(trainer, values, report)
    tensors = _without_other_planner(trainer, tensors, values, report)
    trainer.run.load_state_dict(tensors, values["run"])
    trainer.plugins.load_state_dict(values["plugins"])
    if not trainer.args.ignore_data_skip:
        trainer.run.feed.load_state_dict(values["feed"])
    report["restored"] = _restored(trainer, tensors, values)
    report["warnings"] += _not_restored(trainer, values)
    return report


def _compare_options(trainer, values: dict, report: Report) -> None:
    """Fill in `changed_options`, and the warnings about options that the state of the optimizer overrules."""
    now, then = resume_values(trainer), values.get("training_options", {})
    for name, value in now["options"].items():
        if values["options"].get(name, value) != value:
            report["changed_options"][name] = [values["options"][name], value]
    for name, value in now["training_options"].items():
        if then.get(name, value) == value:
            continue
        if name in _NEW_HOLD:
            report["changed_options"][name] = [then[name], value]
        else:
            report["warnings"].append(
                f"`{name}={value}` is not taken up: optimizer and schedule go on with the checkpoint's `{then[name]}`."
            )


def _without_other_planner(trainer, tensors: dict, values: dict, report: Report) -> dict:
    """Start the planner anew if the checkpoint is of another planner."""
    planner = trainer.hybrid_args.planner
    if values["options"].get("planner", planner) == planner:
        return tensors
    gains = trainer.run.gains
    values["run"]["gains"] = gains.state_dict()
    was = values["options"]["planner"]
    report["warnings"].append(f"What the planner has learned is not restored: it was `{was}` and is `{planner}`.")
    kept = {name: tensor for name, tensor in tensors.items() if not name.startswith("gains.")}
    return {**kept, **{f"gains.{name}": tensor for name, tensor in gains.tensors().items()}}


def _restored(trainer, tensors: dict, values: dict) -> dict[str, Any]:
    """Return what was restored, as plain values."""
    run, feed = trainer.run, trainer.run.feed.state_dict()
    of_others = ("residuals.", "gains.", "snapshot.")
    same = values["run"]["trajectory"]["direction"] == run.trajectory.direction.name
    memories = [t for name, t in tensors.items() if same and not name.startswith(of_others)]
    return {
        "phase": run.phase.value,
        "leaps": run.record.leaps_made,
        "open_leap": run.trajectory.open is not None,
        "direction": run.trajectory.direction.name,
        "memory_bytes": sum(tensor.numel() * tensor.element_size() for tensor in memories),
        "planner": trainer.hybrid_args.planner,
        "learning_rate_scale": run.rate_scale,
        "probe_sequences": _probe_sequences(trainer),
        "data": None if trainer.args.ignore_data_skip else feed,
    }


def _not_restored(trainer, values: dict) -> list[str]:
    run, saved, found = trainer.run, values["run"], []
    direction, was = run.trajectory.direction.name, saved["trajectory"]["direction"]
    if was != direction:
        found.append(f"The memories of the direction are not restored: it was `{was}` and is `{direction}`.")
    if trainer.args.ignore_data_skip:
        found.append(
            "The place in the data is not restored (`ignore_data_skip=True`): the epoch starts with other batches."
        )
    if (saved["rescue"] is None) != (run.rescue is None):
        was, now = ("on", "off") if run.rescue is None else ("off", "on")
        found.append(f"Learning-rate rescue was {was} and is {now}: the scale begins at {run.rate_scale:g}.")
    sequences, then = _probe_sequences(trainer), values.get("probe_sequences")
    if then is not None and then != sequences:
        found.append(f"`probe_dataset` had {then} sequences and has {sequences}.")
    processes = trainer.accelerator.num_processes
    if (then := values.get("processes", processes)) != processes:
        found.append(
            f"The run was on {then} processes and is on {processes}: random generators start anew, and batches are "
            "those of the saved run only if all processes together have as large ones as before."
        )
    return found


# The report of a resume.


def describe(report: Report) -> str:
    """Return one line that says where the run goes on and what was restored."""
    line = f"Resumed from `{report['checkpoint']}` at step {report['step']:,}"
    found = report["restored"]
    if found is None:
        return f"{line}, without hybrid state."
    memories = f"memories of `{found['direction']}` ({found['memory_bytes'] / 2**20:,.1f} MiB)"
    parts = [
        f"phase `{found['phase']}`" + (", in which a leap is open" if found["open_leap"] else ""),
        memories if found["memory_bytes"] else f"direction `{found['direction']}` without memories",
        f"planner `{found['planner']}` after {found['leaps']} leaps",
        f"learning-rate scale {found['learning_rate_scale']:.3g}",
    ]
    if found["probe_sequences"] is not None:
        parts.append(f"`probe_dataset` of {found['probe_sequences']} sequences")
    if found["data"] is not None:
        data = found["data"]
        parts.append(f"data behind {data['trained']:,} batches of epoch {data['epoch']}")
    return f"{line}: {', '.join(parts)}."


def tell(report: Report, *, show: bool) -> None:
    """
    Log what was restored at INFO, and what was not at WARNING.

    Args:
        report (`dict`): From [`restore`].
        show (`bool`): Write the line above the progress bar too, where the logger does not show INFO.
    """
    line = describe(report)
    logger.info("%s", line)
    if show and not logger.isEnabledFor(logging.INFO):
        tqdm.write(line)
    if report["changed_options"]:
        changed = [f"`{name}={now}` (was `{then}`)" for name, (then, now) in report["changed_options"].items()]
        logger.warning(
            "Options differ from those that `%s` was saved with; the new ones hold from here on: %s.",
            report["checkpoint"],
            ", ".join(changed),
        )
    for warning in report["warnings"]:
        logger.warning("%s", warning)
