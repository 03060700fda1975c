"""
Weights and optimizer of a checkpoint whose files are not those that `Trainer` looks for.

FSDP2 has files of its own, which name every parameter. A run may go on with them in one process, or the other way
round. And a mixture of experts has other names in its files than in memory ([`load_converted`]).
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import PreTrainedModel

from hf_hybrid.run.trainer_view import TrainerView
from hf_hybrid.run.weights import canonical

_FSDP_WEIGHTS, _FSDP_OPTIMIZER = "pytorch_model_fsdp.bin", "optimizer.bin"


def load_weights(trainer: TrainerView, folder: str | Path, model: torch.nn.Module) -> bool:
    """
    Load weights whose files are not those that Trainer looks for: into one process from FSDP2's files, and under FSDP2
    from those of one process. Return whether this was the case. Raise `ValueError` if trained weights are missing.
    """
    folder = Path(folder)
    if not trainer.accelerator.is_fsdp2:
        file = folder / _FSDP_WEIGHTS
        if not file.is_file() or trainer.is_fsdp_enabled:
            return False
        lacking = model.load_state_dict(torch.load(file, map_location="cpu", weights_only=True), strict=False)
        _check_complete(set(_trained(model)) - set(map(canonical, lacking.missing_keys)), model, folder)
        return True
    if any(folder.glob("pytorch_model_fsdp*")):
        return False
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, strict=False)
    weights = _weights_of_one_process(folder, model) if trainer.accelerator.is_main_process else {}
    set_model_state_dict(model, weights, options=options)
    return True


def load_converted(trainer: TrainerView, folder: str | Path, model: torch.nn.Module) -> bool:
    """
    Load weights that have other names in their files than in the model. Return whether this was the case.

    transformers saves the experts of a mixture one by one, as they are on the Hub, and joins them in
    `from_pretrained` alone. `Trainer` would go on with the experts that the model happens to have, and a warning.
    """
    if trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled or not isinstance(model, PreTrainedModel):
        return False
    names: set[str] = set()
    for path in Path(folder).glob("model*.safetensors"):
        with safe_open(path, "pt") as file:
            names |= set(file.keys())
    if names <= set(model.state_dict()):
        return False
    saved = type(model).from_pretrained(folder, dtype=model.dtype)
    model.load_state_dict(saved.state_dict())
    return True


def _weights_of_one_process(folder: Path, model: torch.nn.Module) -> dict:
    saved = {name: tensor for path in folder.glob("*model*.safetensors") for name, tensor in load_file(path).items()}
    if hasattr(model, "peft_config"):
        # as peft writes them
        in_file = {name: name.replace(f".{model.active_adapter}.", ".") for name in _trained(model)}
        saved = {name: saved[known] for name, known in in_file.items() if known in saved}
    _check_complete(saved, model, folder)
    return saved


def _trained(model: torch.nn.Module) -> list[str]:
    return [canonical(name) for name, parameter in model.named_parameters() if parameter.requires_grad]


def _check_complete(names: Collection[str], model: torch.nn.Module, folder: Path) -> None:
    for name in _trained(model):
        if name not in names:
            raise ValueError(
                f"`{folder}` holds no weights for `{name}`. Resume with the model and the adapters of the run that "
                "wrote it."
            )


def load_optimizer(trainer: TrainerView, folder: str | Path) -> bool:
    """As [`load_weights`], for optimizer and schedule."""
    folder, model, optimizer = Path(folder), trainer.model, trainer.optimizer
    sharded = trainer.accelerator.is_fsdp2
    file = folder / ("optimizer.pt" if sharded else _FSDP_OPTIMIZER)
    if not file.is_file() or trainer.is_fsdp_enabled != sharded:
        return False
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_optimizer_state_dict

    state = {}
    if trainer.accelerator.is_main_process or not sharded:
        state = torch.load(file, map_location="cpu", weights_only=True)
        state = _by_name(state, model, optimizer) if sharded else state
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=sharded)
    set_optimizer_state_dict(model, optimizer, state, options=options)
    trainer.lr_scheduler.load_state_dict(torch.load(folder / "scheduler.pt", weights_only=True))
    return True


def _by_name(state: dict, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict:
    """Name the parameters in an optimizer's state, which knows them by their place."""
    name_of = {id(parameter): canonical(name) for name, parameter in model.named_parameters()}
    names = [name_of[id(parameter)] for group in optimizer.param_groups for parameter in group["params"]]
    groups = [{**group, "params": [names[place] for place in group["params"]]} for group in state["param_groups"]]
    return {"state": {names[place]: values for place, values in state["state"].items()}, "param_groups": groups}
