"""
The identity of a run: a resume compares it, so that no other run silently continues from a checkpoint.

A checkpoint holds weights, optimizer states and a position in the data. They are valid only together with things that
are not in it: the data itself, the options, the class of the optimizer, and the frozen weights below adapters. So every
checkpoint has the identity of its run, which is made of these, and a resume compares it with that of the new run.

Another class of optimizer and other trained parameters are refused: one would silently load the states of the other.
What else differs is a question of what the user asked for (docs/resume.md has the table):

- `resume_from_checkpoint="auto"` promises the same run. So it refuses other data in the middle of an epoch, to which
  the position does not apply, and other frozen weights, because adapters fit one base.
- A checkpoint that is named, or `True`, is the user's will. These differences are reported like all others (a longer
  run, another learning rate, more processes), and training goes on as `Trainer` does.

An identity has the length of the data, and a hash of at most `ROWS` evenly spaced rows. No code of the user runs:
rows of a `datasets.Dataset` are read from its table, below transforms and decoders, and otherwise those of lists and of
torch's own classes. Reading the rows of a user's class through `__getitem__` could draw random numbers, count, or take
long. So it does not cover these, and a stream has no rows at all. Of the frozen weights it keeps a few values of at
most `PARAMETERS` parameters, so a base of any size takes milliseconds. They are compared by value if the base is loaded
in another precision. Packed values (4 and 8 bits) differ by machine, so a difference is only reported.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy
import torch
import transformers
from accelerate.utils import gather_object
from torch import Tensor, nn
from transformers import TrainingArguments

from hf_hybrid.arguments import HybridArguments, hybrid_values
from hf_hybrid.files import plain
from hf_hybrid.machine import describe_device
from hf_hybrid.optimizers import inner_optimizer
from hf_hybrid.records.redaction import is_secret_name, shareable
from hf_hybrid.run.trainer_view import TrainerView
from hf_hybrid.run.weights import canonical
from hf_hybrid.saving.manifest import CheckpointError, digest_of, read_json
from hf_hybrid.saving.state import SCHEMA_VERSION, VALUES_NAME, Differences

ROWS, LONGEST = 16, 1 << 16
"""Rows of the data that are hashed, and elements of an array in one."""
PARAMETERS, VALUES = 64, 4
"""Frozen parameters of which values are kept, and how many of each."""
SAME_BASE = 0.02
"""Relative distance of the kept values up to which bases in two precisions are the same. Bf16 moves them by 0.002."""

# Of `TrainingArguments`: what decides about the bits of a training. The optimizer keeps its own in its state, and so
# does the scheduler with the learning rate: `Trainer` takes those from the checkpoint.
_NEW_HOLD = (
    "max_steps", "num_train_epochs", "per_device_train_batch_size", "gradient_accumulation_steps", "optim",
    "optim_args", "optim_target_modules", "lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps", "max_grad_norm",
    "label_smoothing_factor", "neftune_noise_alpha", "bf16", "fp16", "tf32", "torch_compile", "use_liger_kernel",
    "seed", "data_seed", "train_sampling_strategy", "dataloader_drop_last", "average_tokens_across_devices",
)  # fmt: skip
_PER_STEP = ("gradient_accumulation_steps", "dataloader_drop_last")
"""Options among them that decide which batches a step takes, beside their size."""
_OLD_HOLD = ("learning_rate", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon")


def check_identity(trainer: TrainerView, folder: str) -> Differences:
    """Compare a trainer with the run of a checkpoint. Raise [`CheckpointError`] on all processes if it cannot go on."""
    epoch, saved = trainer.state.epoch or 0.0, {}
    with contextlib.suppress(OSError, CheckpointError):  # none, or damaged, which comes out when it is restored
        saved = read_json(Path(folder, VALUES_NAME))
    differences = compare(
        saved if saved.get("schema_version") == SCHEMA_VERSION else {},
        identity_of(trainer),
        inside_epoch=epoch != int(epoch) and not trainer.args.ignore_data_skip,
        has_optimizer=any(Path(folder).glob("optimizer*")) or any(Path(folder).glob("global_step*")),
        same_run=trainer.saver.start.is_same,
    )
    refused = differences.refused
    if trainer.accelerator.num_processes > 1:
        refused = list(dict.fromkeys(gather_object(refused)))  # all processes refuse it, or none
        differences.other_batches = any(gather_object([differences.other_batches]))
    if refused:
        raise CheckpointError(f"The run cannot go on from `{folder}`: {' '.join(refused)}")
    return differences


# Comparing.


def compare(
    saved: dict, current: dict, *, inside_epoch: bool = False, has_optimizer: bool = True, same_run: bool = True
) -> Differences:
    """
    Compare the identity in a checkpoint with that of the run that goes on from it, maybe `inside_epoch` (table:
    docs/resume.md). What a checkpoint lacks is not compared. Less is refused if nobody asked for the `same_run`.
    """
    differences, saved = Differences(), {**current, **saved}
    for group in ("options", "config"):
        saved[group] = {**current[group], **saved[group]}
        for name, value in current[group].items():
            old = saved[group][name]
            if old != value and name in _OLD_HOLD:
                differences.notes.append(
                    f"`{name}={value}` is not taken up: optimizer and schedule go on with the checkpoint's `{old}`."
                )
            elif old != value:
                differences.changed[name] = [old, value]
    if has_optimizer:
        _compare_optimizers(saved, current, differences)
    differences.other_batches = _batches(saved) != _batches(current)
    if None not in (saved["data"], current["data"]):
        _compare_data(saved["data"], current["data"], inside_epoch, same_run, differences)
    if None not in (saved["frozen"], current["frozen"]):
        _compare_frozen(saved["frozen"], current["frozen"], same_run, differences)
    if saved["dropout"] != current["dropout"]:
        differences.notes.append(f"Dropout of the model was `{saved['dropout']}` and is `{current['dropout']}`.")
    old, new = saved["environment"], current["environment"]
    if others := [f"`{name}` was `{old[name]}` and is `{new[name]}`" for name in old if old[name] != new.get(name)]:
        differences.notes.append(f"The machine computes other bits than that of the checkpoint: {'; '.join(others)}.")
    if saved["processes"] != current["processes"]:
        differences.notes.append(
            f"The run was on {saved['processes']} processes and is on {current['processes']}: random generators start "
            "anew, and batches are those of the saved run only if all processes together have as large ones as before."
        )
    return differences


def _batches(identity: dict) -> list:
    """Return what decides about the batches of all processes together, and how many a step takes."""
    config = identity["config"]
    return [config["per_device_train_batch_size"] * identity["processes"], *(config[name] for name in _PER_STEP)]


def _compare_optimizers(saved: dict, current: dict, differences: Differences) -> None:
    old, new = saved["optimizer"], current["optimizer"]
    weights_only = (
        "To train on with its weights alone, load them (`from_pretrained` with the folder of the checkpoint, or of its "
        "adapters) and begin a new run."
    )
    if old != new:
        differences.refused.append(
            f"its optimizer was `{old}`, and `{new}` cannot go on with the states of that. Set `optim` as it was. "
            f"{weights_only}"
        )
    elif None not in (saved["trained"], current["trained"]) and saved["trained"] != current["trained"]:
        differences.refused.append(
            "it trained other parameters, by their names, and states of the optimizer are kept by their place. Train "
            f"the same ones. {weights_only}"
        )


def _compare_data(saved: dict, current: dict, inside_epoch: bool, same_run: bool, differences: Differences) -> None:
    for name, what in {"collator": "The data collator", "sampler": "The sampler"}.items():
        if saved[name] != current[name]:
            differences.notes.append(f"{what} was `{saved[name]}` and is `{current[name]}`.")
    if saved["fingerprint"] is not None and saved["fingerprint"] == current["fingerprint"]:
        return
    if saved["class"] != current["class"]:
        differences.notes.append(
            f"`train_dataset` was a `{saved['class']}` and is a `{current['class']}`, so nothing tells whether it has "
            "the same rows."
        )
    lengths, rows = [saved["length"], current["length"]], [saved["row_hash"], current["row_hash"]]
    if lengths[0] != lengths[1]:
        words = ["no length" if length is None else f"{length:,} rows" for length in lengths]
        what = f"had {words[0]} and has {words[1]}"
    elif saved["class"] == current["class"] and None not in rows and rows[0] != rows[1]:
        what = "has other rows"
    else:
        return
    is_lost = inside_epoch and None not in lengths
    if is_lost and same_run:
        differences.refused.append(
            f"`train_dataset` {what}, and the checkpoint is in the middle of an epoch, so nothing tells which rows are "
            "left of it. Pass the data of the run, resume from a checkpoint at the end of an epoch, or set "
            "`ignore_data_skip=True` to begin the epoch with the new data. To go on with other data all the same, name "
            "the checkpoint."
        )
    else:
        place = ", at the place where `Trainer` finds as many steps done" if is_lost else ""
        differences.notes.append(f"`train_dataset` {what}: the run goes on with other data{place}.")
        differences.other_batches |= is_lost


def _compare_frozen(saved: dict, current: dict, same_run: bool, differences: Differences) -> None:
    """Compare the kept values of those frozen parameters that both have in the same parts."""
    if saved["parts"] != current["parts"]:
        return
    old_values, new_values = saved["values"], current["values"]
    shared = [(old_values[name], values) for name, values in new_values.items() if name in old_values]
    others = [(old, new) for old, new in shared if old != new]
    if not others:
        return
    if any("packed" in values for pair in others for values in pair):
        differences.notes.append(
            "The frozen weights are quantised, and are not those of the checkpoint to the bit: it was trained on "
            "another base, another quantisation, or another machine."
        )
        return
    # Of floating-point values, of which both have as many unless shapes differ.
    old, new = ([value for pair in shared for value in pair[side].get("values", ())] for side in (0, 1))
    is_other = len(old) != len(new) or any(first["dtype"] == second["dtype"] for first, second in others)
    if is_other or numpy.linalg.norm(numpy.subtract(old, new)) > SAME_BASE * numpy.linalg.norm(old):
        if same_run:
            differences.refused.append(
                "the frozen weights are not those it was trained over, and adapters fit one base. Load the base of the "
                "run. To train its adapters on over this base all the same, name the checkpoint."
            )
        else:
            differences.notes.append("The frozen weights are not those that the checkpoint was trained over.")
    else:
        old_dtype, new_dtype = (values["dtype"] for values in others[0])
        differences.notes.append(f"The frozen weights were loaded in `{old_dtype}` and are in `{new_dtype}` now.")


# Making.


def identity_of(trainer: TrainerView) -> dict[str, Any]:
    """Return the identity of a run whose model and optimizer are ready, as JSON values. It draws no random numbers."""
    args, model = trainer.args, trainer.accelerator.unwrap_model(trainer.model)
    is_joined = trainer.is_fsdp_enabled and not trainer.accelerator.is_fsdp2
    optimizer = type(inner_optimizer(trainer.optimizer))
    trained = [canonical(name) for name, parameter in model.named_parameters() if parameter.requires_grad]
    if args.device.type == "cpu":
        device = {"device": torch.backends.cpu.get_cpu_capability(), "threads": torch.get_num_threads()}
    else:
        device = {"device": describe_device(args.device).get("name", args.device.type)}
    values = {
        "options": hybrid_values(trainer.hybrid_args),
        # What changes the last bits of a computation.
        "environment": {"torch": torch.__version__, "transformers": transformers.__version__, **device},
        "config": _config(args),
        "dropout": _dropout(model),
        "optimizer": f"{optimizer.__module__.split('.')[0]}.{optimizer.__qualname__}",
        # FSDP1 joins the parameters of a layer into one, which is compared with nothing.
        "trained": None if is_joined else digest_of(trained),
        "frozen": None if is_joined else _frozen(trainer, model),
        "data": _data(trainer),
        "processes": trainer.accelerator.num_processes,
    }
    return json.loads(json.dumps(plain(values, infinity_as_text=True), default=str))  # as a checkpoint gives it back


def _config(args: TrainingArguments) -> dict[str, Any]:
    """Return what decides about the bits: options of `Trainer` by name, and all that another trainer adds."""
    of_both = {field.name for kind in (TrainingArguments, HybridArguments) for field in dataclasses.fields(kind)}
    added = [field.name for field in dataclasses.fields(args) if field.name not in of_both]
    values = {}
    for name in (*_NEW_HOLD, *_OLD_HOLD, *added):
        value = getattr(args, name, None)
        value = getattr(value, "value", value)
        if isinstance(value, (bool, int, float, str, dict, list, tuple, type(None))) and not is_secret_name(name):
            values[name] = value
    return shareable(values)


def _dropout(model: nn.Module) -> list[float]:
    """Return the rates of dropout, as modules and in the model's config."""
    config = getattr(model, "config", None)
    named = config.to_dict() if hasattr(config, "to_dict") else {}
    rates = {value for name, value in named.items() if "drop" in name and isinstance(value, (int, float))}
    return sorted({float(rate) for rate in rates} | {m.p for m in model.modules() if isinstance(m, nn.Dropout)})


@torch.no_grad()
def _frozen(trainer: TrainerView, model: nn.Module) -> dict[str, Any]:
    """Return values of some frozen parameters. Where processes share them, `parts` says whose values these are."""
    named = {canonical(name): parameter for name, parameter in model.named_parameters() if not parameter.requires_grad}
    names, kept, is_shared = sorted(named), {}, False
    for name in names[:: max(1, -(-len(names) // PARAMETERS))]:
        tensor: Any = trainer.memory.parameter(named[name]).detach()
        if getattr(tensor, "device_mesh", None) is not None:
            is_shared, tensor = True, tensor.to_local()
        if tensor.device.type == "meta" or not tensor.numel():
            continue  # it is on the disk, on other processes, or packed as int8
        values = tensor.flatten()[torch.tensor(_places(tensor.numel(), VALUES), device=tensor.device)].cpu()
        if not tensor.is_floating_point():
            kept[name] = {"packed": values.tolist()}
        elif torch.isfinite(values).all():
            kept[name] = {"dtype": str(tensor.dtype).removeprefix("torch."), "values": values.double().tolist()}
    return {"parts": [trainer.args.process_index, trainer.args.world_size] if is_shared else [], "values": kept}


def _places(length: int, most: int) -> list[int]:
    """Return at most so many places in a sequence, spread evenly: the first and the last are among them."""
    count = min(length, most)
    return [index * (length - 1) // max(count - 1, 1) for index in range(count)]


# The data.


def _data(trainer: Any) -> dict[str, Any] | None:
    data, collator = trainer.train_dataset, trainer.data_collator
    if data is None:
        return None
    length = None  # of a stream
    with contextlib.suppress(Exception):
        length = len(data)
    rows = _rows(data)
    return {
        "class": type(data).__qualname__,
        "length": length,
        "fingerprint": data._fingerprint if _is_table(data) else None,
        "row_hash": None if rows is None else digest_of([json.dumps(rows, default=_plain_value, skipkeys=True)]),
        "collator": getattr(collator, "__qualname__", type(collator).__qualname__),
        "sampler": getattr(type(trainer)._get_train_sampler, "__qualname__", None),
    }


def _is_table(data: Any) -> bool:
    """Whether this is a `datasets.Dataset`, without an import of the library where nobody has imported it."""
    return type(data).__module__.startswith("datasets.") and hasattr(data, "_data") and hasattr(data, "with_format")


def _rows(data: Any) -> list | None:
    """Return some rows of data that hold them; `None` for a class that may compute them."""
    if _is_table(data):
        table = data.with_format("arrow")
        return [table[place].to_pydict() for place in _places(len(data), ROWS)]
    if isinstance(data, (list, tuple)):
        return [data[place] for place in _places(len(data), ROWS)]
    if isinstance(data, torch.utils.data.TensorDataset):
        return [[tensor[place] for tensor in data.tensors] for place in _places(len(data), ROWS)]
    if isinstance(data, torch.utils.data.Subset):
        rows = _rows(data.dataset)
        return None if rows is None else [rows, [data.indices[place] for place in _places(len(data), ROWS)]]
    if isinstance(data, torch.utils.data.ConcatDataset):
        parts = [_rows(part) for part in data.datasets]
        return None if None in parts else parts
    return None


def _plain_value(value: Any) -> Any:
    """Return what JSON cannot hold in a form that it can: arrays as numbers, and of other objects the class."""
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, Tensor):
        value = value.detach().reshape(-1)[:LONGEST].cpu().clone().view(torch.uint8).numpy()
    if isinstance(value, (numpy.ndarray, numpy.generic)):
        return value.reshape(-1)[:LONGEST].tolist()
    return repr(value[:LONGEST]) if isinstance(value, (bytes, bytearray)) else type(value).__qualname__
