"""Goes on from a checkpoint: restores what lives beside `Trainer`'s state, and says what was restored and what not."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from tqdm.auto import tqdm

from hf_hybrid.arguments import hybrid_values
from hf_hybrid.report.summary import format_bytes, format_number
from hf_hybrid.state_io import load_hybrid_state

logger = logging.getLogger(__name__)

Report = dict[str, Any]

# Of `TrainingArguments`: what decides about the course of a training. The optimizer keeps its own in its state, and so
# does the scheduler with the learning rate: `Trainer` takes those from the checkpoint.
_NEW_HOLD = (
    "max_steps", "num_train_epochs", "per_device_train_batch_size", "gradient_accumulation_steps", "optim",
    "lr_scheduler_type", "warmup_steps", "max_grad_norm", "label_smoothing_factor", "bf16", "fp16", "seed", "data_seed",
)  # fmt: skip
_OLD_HOLD = ("learning_rate", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon")


def resume_values(trainer) -> dict[str, Any]:
    """What a checkpoint keeps of the options and the data, to compare with when a run goes on; JSON values."""
    found = {name: getattr(trainer.args, name, None) for name in (*_NEW_HOLD, *_OLD_HOLD)}
    return {
        "options": hybrid_values(trainer.hybrid_args),
        "training_options": {name: getattr(value, "value", value) for name, value in found.items()},
        "probe_sequences": _probe_sequences(trainer),
        "processes": trainer.accelerator.num_processes,
    }


def _probe_sequences(trainer) -> int | None:
    probe = trainer._engine.probe
    return sum(probe.sizes) if probe is not None else None


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
            f"`{checkpoint}` holds no hybrid state (it was saved with `save_only_model`, or by another trainer): "
            "weights and optimizer are restored, phases and predictor start anew."
        )
        return report
    tensors, values = state
    _compare_options(trainer, values, report)
    tensors = _without_other_planner(trainer, tensors, values, report)
    trainer._engine.load_state_dict(tensors, values["engine"])
    trainer.plugins.load_state_dict(values["plugins"])
    if not trainer.args.ignore_data_skip:
        trainer._feed.load_state_dict(values["feed"])
    report["restored"] = _restored(trainer, tensors, values)
    report["warnings"] += _not_restored(trainer, checkpoint, values)
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
    """What another planner learned is of no use to this one, which starts anew."""
    planner = trainer.hybrid_args.planner
    if values["options"].get("planner", planner) == planner:
        return tensors
    gains = trainer._engine.planner.gains
    values["engine"]["planner"]["gains"] = gains.state_dict()
    was = values["options"]["planner"]
    report["warnings"].append(f"What the planner has learned is not restored: it was `{was}` and is `{planner}`.")
    kept = {name: tensor for name, tensor in tensors.items() if not name.startswith("gains.")}
    return {**kept, **{f"gains.{name}": tensor for name, tensor in gains.tensors().items()}}


def _restored(trainer, tensors: dict, values: dict) -> dict[str, Any]:
    """What is there again, as plain values."""
    engine, feed = trainer._engine, trainer._feed.state_dict()
    of_memories = ("leaper.", "gains.", "tail.", "before_leap.")
    same = values["engine"]["trajectory"]["direction"] == engine.trajectory.direction.name
    memories = [t for name, t in tensors.items() if same and not name.startswith(of_memories)]
    return {
        "phase": engine.phase.value,
        "leaps": len(engine.record.leaps),
        "open_leap": engine.leaper.open is not None,
        "direction": engine.trajectory.direction.name,
        "memory_bytes": sum(tensor.numel() * tensor.element_size() for tensor in memories),
        "planner": trainer.hybrid_args.planner,
        "learning_rate_scale": engine.rate_scale,
        "probe_sequences": _probe_sequences(trainer),
        "data": None if trainer.args.ignore_data_skip else feed,
    }


def _not_restored(trainer, checkpoint: str, values: dict) -> list[str]:
    engine, saved, found = trainer._engine, values["engine"], []
    direction, was = engine.trajectory.direction.name, saved["trajectory"]["direction"]
    if was != direction:
        found.append(f"The memories of the direction are not restored: it was `{was}` and is `{direction}`.")
    if trainer.args.ignore_data_skip:
        found.append(
            "The place in the data is not restored (`ignore_data_skip=True`): the epoch starts with other batches."
        )
    if (saved["rescue"] is None) != (engine.rescue is None):
        was, now = ("on", "off") if engine.rescue is None else ("off", "on")
        found.append(f"Learning-rate rescue was {was} and is {now}: the scale begins at {engine.rate_scale:g}.")
    sequences, then = _probe_sequences(trainer), values.get("probe_sequences")
    if then is not None and then != sequences:
        found.append(f"The probe set had {then} sequences and has {sequences}.")
    processes = trainer.accelerator.num_processes
    if (then := values.get("processes", processes)) != processes:
        found.append(f"The run was on {then} processes and is on {processes}: this was not tested with leaps.")
    if not any(Path(checkpoint).glob("rng_state*.pth")):
        found.append(
            "Random generators are not restored, as there is no `rng_state.pth`: dropout and the order of later epochs "
            "differ."
        )
    return found


# Telling.


def describe(report: Report) -> str:
    """One line: where the run goes on, and with what."""
    line = f"Resumed from `{report['checkpoint']}` at step {report['step']:,}"
    found = report["restored"]
    if found is None:
        return f"{line}: weights and optimizer only."
    memories = f"memories of `{found['direction']}` ({format_bytes(found['memory_bytes'])})"
    parts = [
        f"phase `{found['phase']}`" + (", in which a leap is open" if found["open_leap"] else ""),
        memories if found["memory_bytes"] else f"direction `{found['direction']}` without memories",
        f"planner `{found['planner']}` after {found['leaps']} leaps",
        f"learning-rate scale {format_number(found['learning_rate_scale'])}",
    ]
    if found["probe_sequences"] is not None:
        parts.append(f"probe set of {found['probe_sequences']} sequences")
    if found["data"] is not None:
        data = found["data"]
        parts.append(f"data behind {data['fetched']:,} batches of epoch {data['epoch']}")
    return f"{line}: {', '.join(parts)}."


def tell(report: Report, *, show: bool) -> None:
    """
    Log the report: what was restored at INFO, what was not at WARNING.

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
