"""
What the rest of the package may read of a trainer ([`TrainerView`]), and what several choices ask of one: which
optimizer steps, whether adapters are trained, and whether the loss is the plain cross-entropy over the vocabulary.

A trainer has many more methods. Functions take this view of it, so that their types do not depend on trainer.py, which
imports them. A function that reads one or two things takes these.
"""

from __future__ import annotations

import inspect
import sys
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from hf_hybrid.optimizers import (
    LIBRARIES,
    has_adapters,
    is_adam,
    optimizer_name,
    package_of,
    steps_in_backward,
    text_config,
    users_optimizer,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
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
    """What is read of a trainer in many places. A function that reads more takes a view of its own, derived from it."""

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

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None): ...

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


# What users put in place of a method.


def overridden(trainer: Any, *names: str, below: type | None = None) -> str | None:
    """
    Return where one of these methods of a trainer is not that of [`LIBRARIES`], the outermost place; `None` if nowhere.
    `below` a class, only those count that its own method calls.

    That is the trainer itself (`trainer.method = function`), a class above or below the mixin, or a class of a library
    into which somebody put a function.
    """
    kinds = type(trainer).__mro__
    places = (trainer, *kinds) if below is None else kinds[kinds.index(below) + 1 :]
    for name in names:
        for place in places:
            if name not in vars(place):
                continue
            home = place.__module__.partition(".")[0] if isinstance(place, type) else ""
            if home not in LIBRARIES or package_of(vars(place)[name]) not in LIBRARIES:
                return f"{place.__name__ if isinstance(place, type) else 'trainer'}.{name}"
    return None


PER_MICRO_BATCH = (
    "training_step", "_prepare_inputs", "_prepare_input", "get_batch_samples", "compute_loss_context_manager",
    "_inner_training_loop", "_run_epoch",
)  # fmt: skip
SEAMS = (*PER_MICRO_BATCH, "_clip_grad_norm", "_get_grad_norm")
"""Methods that decide what [`acts_between`] and [`reads_gradients`] return."""


def acts_between(trainer: Any) -> str | None:
    """Return what code of a user acts on micro-batches, or between them, as a clause; `None` if none does."""
    if (method := overridden(trainer, *PER_MICRO_BATCH)) is not None:
        return f"`{method}` may change each micro-batch"
    for callback in trainer.callback_handler.callbacks:
        if package_of(callback.on_substep_end) not in LIBRARIES:
            return f"`{type(callback).__name__}.on_substep_end` may change what micro-batches add up"
    if "backward" in vars(trainer.accelerator):
        return "`accelerator.backward` is another"
    if steps_in_backward(optimizer := optimizer_name(trainer.args)):
        return f"`optim={optimizer}` steps inside the backward pass"
    if trainer.run.accumulations - {trainer.args.gradient_accumulation_steps}:  # Trainer may step inside a window
        return "`gradient_accumulation_steps` has changed"
    return None


def reads_gradients(trainer: Any) -> bool:
    """Whether code of a user may read or change the gradients of a window of streamed layers."""
    if overridden(trainer, "_clip_grad_norm", "_get_grad_norm") or trainer.memory.optimizer._optimizer_step_pre_hooks:
        return True
    events = (
        event for c in trainer.callback_handler.callbacks for event in (c.on_pre_optimizer_step, c.on_optimizer_step)
    )
    return any(package_of(event) not in LIBRARIES for event in events)


# What users put into a model.

_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


class Code(NamedTuple):
    """What code of a user may be in a model: hooks of modules, functions in place of a `forward`, and classes."""

    hooks: list[Any]
    forwards: list[Any]
    kinds: set[Any]

    @classmethod
    def of(cls, model: torch.nn.Module) -> Code:
        """Look at a model, and at hooks of all modules."""
        everywhere = vars(torch.nn.modules.module)
        hooks, stack = [hook for name in _HOOKS for hook in everywhere[f"_global{name}"].values()], [model]
        code = cls(hooks, [], set())
        while stack:  # `modules()` takes four times as long
            own = vars(module := stack.pop())
            code.kinds.add(type(module))
            if "forward" in own:
                code.forwards.append(own["forward"])
            for name in _HOOKS:
                if own[name]:
                    code.hooks.extend(own[name].values())
            for child in own["_modules"].values():
                if child is not None:
                    stack.append(child)
        return code


def module_of_user(model: torch.nn.Module) -> str | None:
    """Return the class of a module that is in no installed package, if there is one: a user's, or one of the Hub."""
    for kind in {type(module) for module in model.modules()}:
        file = getattr(sys.modules.get(kind.__module__), "__file__", None) or ""
        if "-packages" not in file and kind.__module__.partition(".")[0] not in LIBRARIES:
            return f"`{kind.__name__}`"
    return None


# The model and its loss.


def trains_adapters(trainer: TrainerView) -> bool:
    """Whether adapters are trained, and not the weights of the model."""
    return has_adapters(trainer.accelerator.unwrap_model(trainer.model))


_PLAIN_LOSSES = {("transformers", "Trainer"), ("trl", "SFTTrainer"), ("axolotl", "AxolotlTrainer")}
"""Classes whose `compute_loss` is the model's own loss, unless an option says otherwise: package and name."""
FORWARDS = (*LIBRARIES, "liger_kernel")
"""Packages whose forward passes compute the cross-entropy as transformers does."""
KERNELS = ("cut_cross_entropy", "axolotl", "unsloth_zoo")
"""Packages that put other forward passes into classes of transformers. They may lose more, but keep no state."""
IN_PLACE = "the function in place of"
"""Begins what [`own_forward`] returns where somebody put a function on the model, or into a class of a library."""
_LANGUAGE_MODELS = ("ForCausalLM", "LMHeadModel", "ForMaskedLM", "ForConditionalGeneration")


def own_losses(trainer: TrainerView) -> list[tuple[str, str, str]]:
    """
    Return package and name of the classes of a trainer that compute a loss of their own, not the model's, and the
    method that does, the outermost first. A function that somebody put on the trainer, or into a class, is one of the
    package that it was written in. A class with a whole `training_step` of its own computes one too.
    """
    found = []
    for place in (trainer, *type(trainer).__mro__):
        own = vars(place).get("compute_loss")
        if (method := own or _whole_step(place)) is not None:
            name = place.__name__ if isinstance(place, type) else "trainer"
            owner, package = (place if isinstance(place, type) else type(place)).__module__, package_of(method)
            if package != owner.partition(".")[0] or (package, name) not in _PLAIN_LOSSES:
                found.append((package, name, "training_step" if own is None else "compute_loss"))
    return [loss for loss in found if loss[0] != "hf_hybrid"]


def _whole_step(place: Any) -> Any:
    """Return the `training_step` of a class if it calls neither `compute_loss` nor another `training_step`."""
    step = vars(place).get("training_step") if isinstance(place, type) else None
    code = getattr(inspect.unwrap(step), "__code__", None) if step is not None else None
    calls = code is None or code.co_freevars or {"compute_loss", "training_step"} & {*code.co_names}
    return None if calls else step


def unknown_loss(trainer: TrainerView) -> str | None:
    """Return that the training loss may not be the cross-entropy over the vocabulary, if so."""
    args, model = trainer.args, trainer.accelerator.unwrap_model(trainer.model)
    model = model.get_base_model() if hasattr(model, "get_base_model") else model  # inside PEFT's
    unknown = own_losses(trainer)
    if trainer.compute_loss_func is not None:
        what = "`compute_loss_func`"
    elif args.label_smoothing_factor > 0:
        what = f"`label_smoothing_factor={args.label_smoothing_factor}`"
    elif (kind := getattr(args, "loss_type", None)) not in (None, "nll", "chunked_nll"):
        what = f"`loss_type={kind}`"
    elif unknown:
        what = f"`{'.'.join(unknown[0][1:])}`"
    elif "_loss_function" in vars(model):
        what = "the model's `loss_function`"
    elif (own := own_forward(model)) is not None:
        what = own
    elif vocabulary_size(model) is None:
        what = "a model whose vocabulary has no known size"
    else:
        return None
    return f"the loss of {what} is not known to be the plain cross-entropy"


def own_forward(model: Any) -> str | None:
    """
    Return the forward pass of a causal model if it is not one of transformers: that of a class of a user or of the Hub,
    or a function that was put on the model or into its class ([`IN_PLACE`]).
    """
    if hasattr(model, "get_base_model"):  # PEFT's has no loss of its own
        return _foreign(model) or own_forward(model.get_base_model())
    by_model = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
    known = {name for names in by_model for name in ([names] if isinstance(names, str) else names)}
    name = next(owner.__name__ for owner in type(model).__mro__ if "forward" in vars(owner))
    return _foreign(model) or (None if name in known or name.endswith(_LANGUAGE_MODELS) else f"`{name}`")


def classifies(model: Any) -> bool:
    """Whether a model of transformers has no head over its vocabulary: it classifies rows or tokens."""
    model = model.get_base_model() if hasattr(model, "get_base_model") else model
    head = getattr(model, "get_output_embeddings", lambda: model)()
    return head is None and own_forward(model) is not None and _foreign(model) is None


def _foreign(model: Any) -> str | None:
    """Return the outermost `forward` of a model, or one inside of it, that is not of [`FORWARDS`]."""
    owner = next(owner for owner in type(model).__mro__ if "forward" in vars(owner))
    if "forward" in vars(model) and package_of(vars(model)["forward"], FORWARDS) not in FORWARDS:
        return f"{IN_PLACE} `model.forward`"
    package, name = package_of(vars(owner)["forward"], FORWARDS), f"`{owner.__name__}.forward`"
    is_put_in = owner.__module__.partition(".")[0] in LIBRARIES and package not in KERNELS
    return None if package in FORWARDS else f"{IN_PLACE} {name}" if is_put_in else name


def acts_beside_layers(trainer: TrainerView, code: Code, layers: Iterable[torch.nn.Module]) -> str | None:
    """
    Return what code of a user may leave something of a micro-batch, or find it, beside the inputs and outputs of
    layers, as a clause; `None` if none does.
    """
    own = [loss for loss in own_losses(trainer) if loss[0] not in LIBRARIES]
    if own:
        return f"`{'.'.join(own[0][1:])}` may note something of a micro-batch, or read what layers leave"
    for hook in code.hooks:
        if package_of(hook) not in LIBRARIES or type(hook).__module__.startswith("torch.nn.utils"):
            return f"the hook `{_name_of(hook)}` may note something of a micro-batch"
    model = trainer.accelerator.unwrap_model(trainer.model)
    models = {type(model), type(model.get_base_model() if hasattr(model, "get_base_model") else model)}
    known = models | {kind for kind in code.kinds if kind.__module__.partition(".")[0] in FORWARDS}
    for forward in (*code.forwards, *(kind.forward for kind in known)):
        if package_of(forward, FORWARDS) not in (*FORWARDS, *KERNELS):
            return f"the forward pass `{_name_of(forward)}` may note something of a micro-batch"
    parametrized = (f"`{kind.__name__}`" for kind in code.kinds if kind.__module__.startswith("torch.nn.utils"))
    kind = next(filter(None, (*parametrized, *map(module_of_user, layers))), None)
    return None if kind is None else f"{kind} in a layer may note something of a micro-batch"


def _name_of(function: Any) -> str:
    function = getattr(function, "func", function)  # of a partial
    return getattr(function, "__qualname__", type(function).__name__)


def vocabulary_size(model: torch.nn.Module) -> int | None:
    """Return the length of a model's vocabulary, if its config has it."""
    return getattr(text_config(model), "vocab_size", None)
