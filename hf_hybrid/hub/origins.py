"""What a model was made from, as its card says it: model, licence, data sets, and the papers behind the methods."""

from __future__ import annotations

import dataclasses
import functools
import logging
import math
import os
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, TypeGuard

from huggingface_hub import model_info
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id
from transformers.modelcard import TASK_MAPPING

from hf_hybrid.hub.provenance import listed, unique
from hf_hybrid.leaps.directions import DIRECTIONS, Direction, Orthogonal
from hf_hybrid.leaps.directions.base import direction_class
from hf_hybrid.optimizers import optimizer_name

if TYPE_CHECKING:
    from hf_hybrid.trainer import HybridTrainerMixin as PublishedTrainer

logger = logging.getLogger(__name__)


def is_repo_id(name: object) -> TypeGuard[str]:
    """Whether a name can be that of a repository on the Hub."""
    if not isinstance(name, str):
        return False
    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return True


def is_local(name: str) -> bool:
    """Whether a name is a path on this machine and not one on the Hub."""
    return os.path.isabs(name) or name.startswith((".", "~")) or os.path.exists(name)


def model_facts(trainer: PublishedTrainer, finetuned_from: str | None, tasks: list[str]) -> dict[str, Any]:
    """
    What the trained model is, and what training began with: `base` is the id on the Hub of the model whose weights were
    loaded, `base_is_local` says that they came from a folder (whose name means nothing to others), and `config_of` is
    the id of a model whose configuration alone was used.
    """
    model = trainer.accelerator.unwrap_model(trainer.model)
    peft = getattr(model, "active_peft_config", None) if hasattr(model, "peft_config") else None
    inner = model.get_base_model() if peft is not None else model
    name = finetuned_from or getattr(peft, "base_model_name_or_path", None)
    name = name or getattr(getattr(inner, "config", None), "_name_or_path", None)
    on_hub = is_repo_id(name) and not os.path.exists(name)
    # `from_pretrained` leaves this mark; a model built from another's configuration has only the other's name.
    loaded = finetuned_from is not None or hasattr(inner, "_weight_conversions")
    class_name, parameters = type(inner).__name__, list(model.parameters())
    known = (
        task for task, classes in TASK_MAPPING.items() if any(class_name in listed(names) for names in classes.values())
    )
    task = tasks[0] if tasks else next(known, None)
    auto = {"text-generation": "AutoModelForCausalLM", "text-classification": "AutoModelForSequenceClassification"}
    tokenizer = trainer.processing_class or getattr(trainer.data_collator, "tokenizer", None)
    return {
        "class_name": class_name,
        "loads_with": auto.get(task, class_name) if type(inner).__module__.startswith("transformers.") else None,
        "task": task,
        "parameters": count_parameters(parameters),
        "trainable": count_parameters(parameter for parameter in parameters if parameter.requires_grad),
        "base": name if on_hub and loaded else None,
        "base_is_local": bool(name) and not on_hub and loaded,
        "config_of": name if on_hub and not loaded else None,
        "adapter": None if peft is None else str(getattr(peft.peft_type, "value", peft.peft_type)),
        "has_tokenizer": tokenizer is not None,
        "is_chat": bool(getattr(tokenizer, "chat_template", None)),
    }


_OF_LORA = ("r", "lora_alpha", "lora_dropout", "target_modules")
_OF_NO_INTEREST = ("peft_type", "auto_mapping", "base_model_name_or_path", "revision", "task_type", "inference_mode",
                   "peft_version", "runtime_config")  # fmt: skip


def adapter_of(trainer: PublishedTrainer) -> dict[str, Any]:
    """The settings of adapters: those that everybody asks for, and others that differ from their defaults."""
    model = trainer.accelerator.unwrap_model(trainer.model)
    config = getattr(model, "active_peft_config", None) if hasattr(model, "peft_config") else None
    if config is None:
        return {}
    shown = {name: getattr(config, name) for name in _OF_LORA if hasattr(config, name)}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if field.name not in (*_OF_NO_INTEREST, *_OF_LORA) and value not in (None, field.default, {}, []):
            shown[field.name] = getattr(value, "value", value)
    # A set has no order of its own.
    several = {name: sorted(map(str, value)) for name, value in shown.items() if isinstance(value, (set, list, tuple))}
    return {**shown, **{name: ", ".join(values) for name, values in several.items()}}


def count_parameters(parameters: Iterable) -> int:
    """Weights of a model, also of those that bitsandbytes packed in 4 bits, or of which DeepSpeed holds a part here."""
    full = (getattr(parameter, "quant_state", None) or parameter for parameter in parameters)
    return sum(math.prod(getattr(parameter, "ds_shape", parameter.shape)) for parameter in full)


@functools.lru_cache(maxsize=32)
def license_of(base: str) -> dict[str, str]:
    """`license`, `license_name` and `license_link` as a model on the Hub states them; nothing when offline."""
    try:
        stated = model_info(base, timeout=10).card_data or {}
    except Exception as error:  # a card without a licence is better than no card
        logger.info("The licence of `%s` could not be looked up: %s", base, error)
        return {}
    keys = ("license", "license_name", "license_link")
    return {key: value for key in keys if isinstance(value := stated.get(key), str)}


def data_of(trainer: PublishedTrainer) -> list[dict[str, Any]]:
    """The training set and the evaluation sets: `role`, `name` within the run, and number of `sequences`, if known."""
    sets = trainer.eval_dataset if isinstance(trainer.eval_dataset, dict) else {"": trainer.eval_dataset}
    roles: list[tuple[str, str, Any]] = [
        ("Training", "", trainer.train_dataset),
        *(("Evaluation", name, data) for name, data in sets.items()),
    ]
    return [
        {"role": role, "name": name, "sequences": len(data) if hasattr(data, "__len__") else None}
        for role, name, data in roles
        if data is not None
    ]


def papers_of(trainer: PublishedTrainer, summary: dict) -> list[tuple[str, str]]:
    """Title and address of the papers behind the optimizer and the leaps of the run."""
    direction = direction_class(trainer.custom_direction or DIRECTIONS.get(summary.get("direction"), Direction))
    of_optimizer = Orthogonal.papers if optimizer_name(trainer.args) == "muon" else ()
    return unique([*of_optimizer, *(direction.papers if summary["leaps"] else ())])
