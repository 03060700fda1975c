"""
What the rest of the package may read of a trainer ([`TrainerView`]), and what several choices ask of one: which
optimizer steps, whether adapters are trained, and whether the loss is the plain cross-entropy over the vocabulary.

A trainer has many more methods. Functions take this view of it, so that their types do not depend on trainer.py, which
imports them. A function that reads one or two things takes these.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import torch
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from hf_hybrid.optimizers import has_adapters, is_adam, optimizer_name, text_config, users_optimizer

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping
    from contextlib import AbstractContextManager
    from pathlib import Path

    from accelerate import Accelerator
    from transformers import TrainerControl, TrainerState, TrainingArguments
    from transformers.trainer_callback import CallbackHandler

    from hf_hybrid.arguments import HybridArguments
    from hf_hybrid.part import Part
    from hf_hybrid.run.run import DataOrder, Run
    from hf_hybrid.streaming.engine import Resident


class TrainerView(Protocol):
    """
    What is read of a trainer in many places. A function that reads more takes a view of its own, derived from this one.
    """

    args: TrainingArguments
    hybrid_args: HybridArguments
    accelerator: Accelerator
    model: Any
    optimizer: Any
    optimizer_cls_and_kwargs: tuple[Any, dict[str, Any]] | None
    lr_scheduler: Any
    state: TrainerState
    control: TrainerControl
    callback_handler: CallbackHandler
    order: DataOrder
    train_dataset: Any
    probe_dataset: Any
    compute_loss_func: Any
    memory: Resident
    run: Run
    parts: list[Part]
    trial: Any
    saver: Any
    is_fsdp_enabled: bool
    is_deepspeed_enabled: bool
    trains_preferences: bool
    can_leap: bool

    @property
    def has_phases(self) -> bool: ...

    @property
    def run_folder(self) -> Path: ...

    def is_world_process_zero(self) -> bool: ...


class LossView(TrainerView, Protocol):
    """A trainer that is asked for losses outside of its steps. Its model gets `more_inputs` beside a batch."""

    more_inputs: Mapping[str, Any]
    model_accepts_loss_kwargs: bool

    @property
    def loss_in_chunks(self) -> bool: ...

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False) -> Any: ...

    def compute_loss_context_manager(self) -> AbstractContextManager[Any]: ...


# The optimizer.


def optimizer_unlike_adam(trainer: TrainerView) -> str | None:
    """Return the name of the optimizer if it is not known to step as AdamW does. It may not be made yet."""
    if trainer.optimizer is not None:
        kind: type | str = type(users_optimizer(trainer.optimizer))
    elif trainer.optimizer_cls_and_kwargs is not None:
        kind = trainer.optimizer_cls_and_kwargs[0]
    else:
        kind = optimizer_name(trainer.args)
    return None if is_adam(kind) else kind if isinstance(kind, str) else kind.__name__


# The model and its loss.


def trains_adapters(trainer: TrainerView) -> bool:
    """Whether adapters are trained, and not the weights of the model."""
    return has_adapters(trainer.accelerator.unwrap_model(trainer.model))


_PLAIN_LOSSES = {("transformers", "Trainer"), ("trl", "SFTTrainer"), ("axolotl", "AxolotlTrainer")}
"""Classes whose `compute_loss` is the model's own loss, unless an option says otherwise: package and name."""
_LANGUAGE_MODELS = ("ForCausalLM", "LMHeadModel", "ForMaskedLM", "ForConditionalGeneration")


def own_losses(trainer: TrainerView) -> list[str]:
    """Return the classes of a trainer that compute a loss of their own, not the model's."""
    owners = [owner for owner in type(trainer).__mro__ if "compute_loss" in vars(owner)]
    named = [(owner.__module__.partition(".")[0], owner.__name__) for owner in owners]
    return [name for package, name in named if package != "hf_hybrid" and (package, name) not in _PLAIN_LOSSES]


def unknown_loss(trainer: TrainerView) -> str | None:
    """Return that the training loss may not be the cross-entropy over the vocabulary, if so."""
    args, model = trainer.args, trainer.accelerator.unwrap_model(trainer.model)
    model = model.get_base_model() if hasattr(model, "get_base_model") else model  # inside PEFT's
    unknown = own_losses(trainer)
    computes = next(owner.__name__ for owner in type(model).__mro__ if "forward" in vars(owner))
    by_model = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
    known = {name for names in by_model for name in ([names] if isinstance(names, str) else names)}
    if trainer.compute_loss_func is not None:
        what = "`compute_loss_func`"
    elif args.label_smoothing_factor > 0:
        what = f"`label_smoothing_factor={args.label_smoothing_factor}`"
    elif (kind := getattr(args, "loss_type", None)) not in (None, "nll", "chunked_nll"):
        what = f"`loss_type={kind}`"
    elif unknown:
        what = f"`{unknown[0]}.compute_loss`"
    elif "_loss_function" in vars(model):
        what = "the model's `loss_function`"
    elif computes not in known and not computes.endswith(_LANGUAGE_MODELS):
        what = f"`{computes}`"
    elif vocabulary_size(model) is None:
        what = "a model whose vocabulary has no known size"
    else:
        return None
    return f"the loss of {what} is not known to be the plain cross-entropy"


def vocabulary_size(model: torch.nn.Module) -> int | None:
    """Return the length of a model's vocabulary, if its config has it."""
    return getattr(text_config(model), "vocab_size", None)


# What users put in place of a method.


def outermost(trainer: Any, name: str, known: Collection[type]) -> str | None:
    """
    Return where a trainer's method `name` is not that of its `known` classes, the outermost place; `None` if nowhere.

    That is the trainer itself (`trainer.method = function`), a class above or below the mixin, or a known class into
    which somebody put a function of another package: that of its globals, as `functools.wraps` copies the rest.
    """
    packages = {"torch", *(owner.__module__.partition(".")[0] for owner in known)}
    for place in (trainer, *type(trainer).__mro__):
        if name not in vars(place):
            continue
        method = vars(place)[name]
        wrapped = [getattr(method, "__func__", method)]
        while hasattr(wrapped[-1], "__wrapped__"):
            wrapped.append(wrapped[-1].__wrapped__)
        homes = {getattr(function, "__globals__", {}).get("__name__", "").partition(".")[0] for function in wrapped}
        if place not in known or not homes <= packages:
            return f"{place.__name__ if isinstance(place, type) else 'trainer'}.{name}"
    return None
