"""`HybridConfig`: TrainingArguments with the hybrid options, and the checks that need neither model nor data."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import importlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import TrainingArguments
from transformers.training_args import OptimizerNames

from hf_hybrid.arguments import HybridArguments, as_declared, check_range
from hf_hybrid.compat import checkpointing_option
from hf_hybrid.machine import LeapObstacleError, computes_on_cpu, mixed_precision_of, sharding_of, shards_by_fsdp2
from hf_hybrid.optimizers import inner_optimizer, is_adam, optimizer_name, steps_in_backward

CONFIG_NAME = "hybrid_config.json"
REPLACED = ("learning_rate", "optim")
"""
Options whose default a run replaces: the rate by `auto_lr=auto`, the optimizer by `preset=fast`. (`bf16` of TRL's
configs is replaced too. Its default is `None`, so that whoever wrote a value is known by it.)
"""

if TYPE_CHECKING:

    class _Arguments(HybridArguments, TrainingArguments):  # as every class of arguments will be
        _written: frozenset[str] | None
        _is_complete: bool
else:
    _Arguments = HybridArguments


@dataclass
class HybridConfigBase(_Arguments):
    """
    The options and checks of [`HybridConfig`] for any kind of `TrainingArguments`. Put it in front,
    `class MyConfig(HybridConfigBase, MyArguments)`, and make the class a dataclass.
    """

    # A `str`, as the command line would take transformers' enumeration for the complete list of values.
    optim: str = dataclasses.field(
        default=TrainingArguments.optim,
        metadata={
            "help": "The optimizer: 'muon' (Muon for the hidden matrices, AdamW for the rest), or one of "
            "transformers' `OptimizerNames`, for example adamw_torch_fused, adafactor, sgd."
        },
    )

    # As text on the command line: `HfArgumentParser` takes one type beside None.
    activation_checkpointing: str | None = dataclasses.field(  # ty: ignore[incompatible-attribute-override]
        default=None,
        metadata={
            "help": "Compute the activations of layers a second time in the backward pass, to save memory. true: of "
            "all layers. auto: of as few layers as fit into the device's memory, by the plan; more if memory runs out.",
            "nargs": "?",
            "const": "true",
        },
    )

    def __new__(cls, *values, **named):
        """
        Note which options are written: afterwards a value that equals a default cannot be told from the default.

        `_written` has their names, or is `None` if nothing tells. Copies and pickles keep it. Once the config
        `_is_complete`, an option that is set is written too.
        """
        config = super().__new__(cls)
        options = [field for field in dataclasses.fields(cls) if field.init]
        in_order = [field.name for field in options if not field.kw_only]
        written = frozenset((*in_order[: len(values)], *named))
        # `HfArgumentParser`, `TrlParser` and `dataclasses.replace` write every option, whatever the user wrote.
        unknown = written.issuperset(field.name for field in options)
        vars(config).update(_written=None if unknown else written, _is_complete=False)
        return config

    def __setattr__(self, name: str, value) -> None:
        super().__setattr__(name, value)
        if name in REPLACED and self._is_complete and self._written is not None:  # by the user, or a trial of a search
            vars(self)["_written"] = self._written | {name}

    def __post_init__(self):
        if self._written is not None:  # a subclass with an `__init__` of its own may have other arguments
            others = {field.name for field in dataclasses.fields(self) if field.default is not dataclasses.MISSING
                      and getattr(self, field.name) != field.default}  # fmt: skip
            vars(self)["_written"] = self._written | others
        HybridArguments.__post_init__(self)
        for name, (kind, limits) in (
            _NUMBERS | {name: _OF_TRL[name] for name in _OF_TRL if not isinstance(getattr(self, name, []), list)}
        ).items():
            setattr(self, name, as_declared(name, getattr(self, name), kind))
            check_range(name, getattr(self, name), limits)
        if self.max_steps <= 0:
            check_range("num_train_epochs", self.num_train_epochs, {"at_least": 0})
        words = {"true": True, "false": False, "auto": "auto", "none": None}
        for name in _TEXT_OR_BOOL:
            if (word := str(getattr(self, name, None)).lower()) in ("true", "false"):
                setattr(self, name, words[word])
        for name in ("gradient_checkpointing", "activation_checkpointing"):
            if isinstance(value := getattr(self, name, None), str):
                if value.lower() not in words:
                    raise ValueError(f"`{name}` must be `True`, `False` or `auto`, got `{value}`.")
                setattr(self, name, words[value.lower()])
        if checkpointing_option() == "gradient_checkpointing" and self.activation_checkpointing is not None:
            vars(self)["gradient_checkpointing"] = self.activation_checkpointing  # before transformers 5.23
        names = ["muon", *(name.value for name in OptimizerNames)]
        if (optim := optimizer_name(self)) not in names:
            raise ValueError(f"`optim` must be one of {', '.join(names)}, got `{optim}`.")
        if self.preset == "fast" and was_given(self, "optim") is False:
            self.optim = "muon"
        if sharding_of(self) not in (None, "fsdp"):
            _check_shards(self, self)  # before the class behind looks for the package
        uses_muon = self.optim == "muon"
        if uses_muon:
            self.optim = TrainingArguments.optim  # the class behind makes a member of `OptimizerNames` of it
        super(HybridArguments, self).__post_init__()  # that of the class behind
        if uses_muon:
            self.optim = "muon"
        check_training_arguments(self, self)
        vars(self)["_is_complete"] = True

    def __getstate__(self) -> dict:
        """Return what a pickle holds, also `training_args.bin`, which is pushed with the model: all but the token."""
        return {**vars(self), "hub_token": None}

    def __copy__(self):
        copied = object.__new__(type(self))
        vars(copied).update(vars(self))
        return copied

    def __deepcopy__(self, memo: dict):
        copied = copy.copy(self)
        vars(copied).update(copy.deepcopy(vars(self), memo))
        return copied

    @classmethod
    def from_json(cls, path: str | Path, **overrides) -> HybridConfigBase:
        """
        Read the options that a run wrote as `hybrid_config.json`: from this file, or from the folder that holds it.

        `overrides` come first. Pass tokens again, which are never written, and an `output_dir` outside of the working
        folder and the home, of which the file has the name alone, as it is meant to be shared. A file that is not JSON,
        or holds an option that does not exist, raises a `ValueError`.
        """
        path = Path(path)
        path = path / CONFIG_NAME if path.is_dir() else path
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"`{path}` is not JSON: {error}. Give the `{CONFIG_NAME}` of a run.") from None
        if not isinstance(values, dict):
            raise ValueError(f"`{path}` holds no options by name. Give the `{CONFIG_NAME}` of a run.")
        if unknown := sorted(values.keys() - {field.name for field in dataclasses.fields(cls) if field.init}):
            raise ValueError(f"Unknown options in `{path}`: {', '.join(f'`{name}`' for name in unknown)}.")
        return cls(**{**values, **overrides})


@dataclass
class HybridConfig(HybridConfigBase, TrainingArguments):
    """
    [`~transformers.TrainingArguments`] plus the options of [`HybridArguments`]. It changes no default of the former.

    `optim` takes `"muon"` too (AdamW for all but hidden matrices), `activation_checkpointing` takes `"auto"`.

    Raises:
        ValueError: If an option is out of range or cannot be combined with another.
    """


def was_given(args: TrainingArguments, name: str) -> bool | None:
    """
    Return whether the user wrote the option. A value that equals the default of its class may be written too.

    `None`: nothing tells. A parser wrote every option, or `args` is no hybrid config. Nothing is replaced then.
    """
    written = getattr(args, "_written", None)
    if written is not None:
        return name in written
    default = next(field.default for field in dataclasses.fields(args) if field.name == name)
    return None if getattr(args, name) == default else True


def config_values(args: TrainingArguments, *, written_defaults: bool = True) -> dict:
    """
    Return the options that differ from the defaults of the class of `args`, as JSON values without tokens.

    With `written_defaults` also those that the user wrote, so that a config that is made from them means the same.
    Where nothing tells what was written, these are the options that a run would replace.
    """
    values, written = {}, getattr(args, "_written", None)
    written = () if not written_defaults else REPLACED if written is None else written
    # Defaults come from the fields: a second instance to compare with would reset accelerate's state.
    for field in dataclasses.fields(args):
        default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        value, default = (getattr(v, "value", v) for v in (getattr(args, field.name), default))  # of enumerations
        unset = not value and (isinstance(value, bool) or not isinstance(value, (int, float)))
        same = value == default or (unset and not default)  # None that became False or an empty list; 0 is a number
        same = same and not (value is False and field.name == "bf16" and default is None)  # TRL: None asks the hardware
        if field.init and not (same and field.name not in written) and not field.name.endswith("_token"):
            # `TrainingArguments` turns some options into objects (`accelerator_config`), which are no options any more.
            with contextlib.suppress(TypeError):
                json.dumps(value)
                values[field.name] = value
    if "activation_checkpointing" in values:
        values.pop("gradient_checkpointing", None)  # its older name, under which no parser takes `auto`
    return {**values, "output_dir": str(args.output_dir)}


_NUMBERS = {
    "per_device_train_batch_size": (int, {"at_least": 1}),
    "per_device_eval_batch_size": (int | None, {"at_least": 1}),
    "gradient_accumulation_steps": (int, {"at_least": 1}),
    "learning_rate": (float, {"at_least": 0}),
    "weight_decay": (float, {"at_least": 0}),
    "adam_beta1": (float, {"at_least": 0, "below": 1}),
    "adam_beta2": (float, {"at_least": 0, "below": 1}),
    "adam_epsilon": (float, {"at_least": 0}),
    "label_smoothing_factor": (float, {"at_least": 0, "at_most": 1}),
    "neftune_noise_alpha": (float | None, {"at_least": 0}),
}
"""Options of TrainingArguments that are looked at only when training has begun."""
_OF_TRL = {
    "max_length": (int | None, {"at_least": 1}),
    "max_completion_length": (int | None, {"at_least": 1}),
    "num_generations": (int | None, {"at_least": 2}),
    "num_iterations": (int, {"at_least": 1}),
    "temperature": (float, {"above": 0}),
    "top_p": (float | None, {"above": 0, "at_most": 1}),
    "min_p": (float | None, {"at_least": 0, "at_most": 1}),
    "repetition_penalty": (float, {"above": 0}),
    "top_entropy_quantile": (float, {"at_least": 0, "at_most": 1}),
    "beta": (float, {"at_least": 0}),
    "epsilon": (float, {"at_least": 0}),
    "epsilon_high": (float | None, {"at_least": 0}),
    "label_smoothing": (float, {"at_least": 0, "at_most": 1}),
    "discopop_tau": (float, {"above": 0}),
    "ld_alpha": (float | None, {"at_least": 0, "at_most": 1}),
    "ref_model_mixup_alpha": (float, {"at_least": 0, "at_most": 1}),
    "ref_model_sync_steps": (int, {"at_least": 1}),
}
"""The same for configs of TRL, where they exist and are no lists."""
_TEXT_OR_BOOL = ("fsdp", "scale_rewards", "trackio_static_space_id")
"""Options that take a text or a bool, of which `HfArgumentParser` makes the text `True` or `False`."""
_BY_PHASE = ("checkpoint_phases", "weight_precision", "predict_states")
_FOR_WHOLE_WEIGHTS = (*_BY_PHASE, "offload_activations", "optimizer_states", "chunked_loss")
"""Options that change weights, states or activations by means that were made for whole tensors."""
EXACT_ADAMW = ("adamw_torch", "adamw_torch_fused")


def _changed(options: HybridArguments, names: tuple[str, ...]) -> list[str]:
    return [name for name in names if getattr(options, name) not in (getattr(HybridArguments, name), "off")]


def experiment(name: str) -> Any:
    """Find a module of `hf_hybrid/experimental` for an option that asks for it: the core imports none of them."""
    return importlib.import_module(f"hf_hybrid.experimental.{name}")


def phase_options(options: HybridArguments) -> list[str]:
    """Return the names of the options in use that follow the phases, so that a run without phases cannot have them."""
    return _changed(options, _BY_PHASE)


def check_training_arguments(args: TrainingArguments, options: HybridArguments) -> None:
    """Refuse options that cannot be combined. Only this function does so before model and data are known."""
    optim, by_phase, checkpointing = optimizer_name(args), phase_options(options), checkpointing_option()
    if by_phase and not options.enable_predict:
        raise ValueError(
            f"`{by_phase[0]}` follows the phases, and `enable_predict=False` has none. Leave it out; to checkpoint "
            "activations throughout set `activation_checkpointing=True`."
        )
    if by_phase and options.memory == "stream":
        raise ValueError(
            f"`{by_phase[0]}` is for weights and states on the device, and `memory=stream` keeps them on the host: "
            "the plan says which of them are checkpointed, and they travel in bf16 under `bf16=True`. Leave it out."
        )
    if options.weight_precision is not None:
        experiment("precision").parse_precision(options.weight_precision)
    details = getattr(args, f"{checkpointing}_kwargs", None) or {}
    extra = [name for name, value in details.items() if (name, value) != ("use_reentrant", False)]
    if extra and getattr(args, checkpointing) == "auto":
        raise ValueError(
            f"`{checkpointing}=auto` chooses the layers itself, and recomputes without reentrance. Leave `{extra[0]}` "
            f"out of `{checkpointing}_kwargs`, or set `{checkpointing}=True`."
        )
    if options.optimizer_states == "8bit" and optim not in EXACT_ADAMW:
        raise ValueError(
            f"`optimizer_states=8bit` is an AdamW with 8-bit states and cannot be combined with `optim={optim}`. Leave "
            "`optim` at its default, or set `optimizer_states=exact`."
        )
    if options.base_precision == "int8" and options.memory == "off":
        raise ValueError(
            "`base_precision=int8` is for streamed layers, and `memory=off` streams none. Set `memory=auto` or "
            "`memory=stream`."
        )
    if sharding_of(args) == "fsdp" and computes_on_cpu(args):
        raise ValueError(
            "`fsdp` shards nothing with `use_cpu=True` or without a GPU: accelerate has it for GPUs only and would "
            "train with DDP. Drop `fsdp` (and `--use_fsdp` of the launcher), or train on GPUs."
        )
    if shards_by_fsdp2(args) and (changed := _changed(options, _FOR_WHOLE_WEIGHTS)):
        raise ValueError(
            f"`{changed[0]}={getattr(options, changed[0])}` was made for whole weights, and FSDP2 leaves each process "
            "a part of them. Leave it out. To save more memory, set `activation_checkpointing` or `cpu_offload` in "
            "`fsdp_config`."
        )
    if options.muon_momentum is not None and optim != "muon":
        raise ValueError(
            f"`muon_momentum={options.muon_momentum}` is for `optim=muon`, and `optim` is `{optim}`. Leave it out, or "
            "set `optim=muon`."
        )
    _check_shards(args, options)
    if options.enable_predict and options.direction != "auto" and options.final_gain(1.0) > 0:
        check_leap_optimizer(optim)
        if options.direction == "gradient_memory" and (optim not in EXACT_ADAMW or options.optimizer_states == "8bit"):
            raise ValueError(
                f"`direction=gradient_memory` needs AdamW's second moments in full precision, and `optim={optim}` with "
                f"`optimizer_states={options.optimizer_states}` keeps others. Leave `direction` or these two out."
            )


_OBSTACLES = {
    "deepspeed": "DeepSpeed keeps gradients and states in partitions of its own, which only its accessors can read",
    "fsdp": "version 1 of FSDP joins the weights of a layer into one flat parameter, in which no matrix is left",
    "megatron_lm": "Megatron-LM has its own training step and optimizer",
    "parallelism_config": "it cuts weights along several dimensions, or repeats the shards (hybrid sharding)",
}
"""Why leaps, and Muon's steps, do not work on the parts of weights that a mechanism leaves each process."""
_USE_FSDP2 = (
    "Use FSDP2, which shards weights, gradients and states too (`fsdp=True`, accelerate's `fsdp_version: 2`, or "
    "`hf-hybrid train --accelerate_config fsdp2`), or DDP."
)


def _check_shards(args: TrainingArguments, options: HybridArguments) -> None:
    """Refuse Muon, and leaps whose direction was named, on weights that they cannot work with."""
    sharding = sharding_of(args)
    if optimizer_name(args) == "muon" and sharding and not shards_by_fsdp2(args):
        why = f"`{sharding}` cannot be combined with `optim=muon`: {_OBSTACLES[sharding]}."
        raise ValueError(f"{why} {_USE_FSDP2} Or choose another `optim`.")
    if options.enable_predict and options.direction != "auto":
        check_leaps(args)


def check_leaps(args: TrainingArguments) -> None:
    """
    Refuse options that `Trainer` and TRL's trainers take and leaps cannot work with ([`LeapObstacleError`]). Where a
    direction was named, this is when the config is made. Elsewhere the trainer asks, and trains without leaps.
    """
    optim, sharding = optimizer_name(args), sharding_of(args)
    another = "Choose another optimizer, for example `adamw_torch_fused`."
    if sharding and not shards_by_fsdp2(args):
        raise LeapObstacleError(f"`{sharding}` cannot be combined with leaps: {_OBSTACLES[sharding]}.", _USE_FSDP2)
    if mixed_precision_of(args) == "fp16":
        reason = "the gradient scaler fails on a skipped step, which has no gradients"
        reason = f"`fp16=True` cannot be combined with leaps: {reason}."
        raise LeapObstacleError(reason, "Use `bf16=True`.", leaps_alone=True)
    if steps_in_backward(optim):
        reason = "updates weights inside the backward pass, where a leap cannot see the gradients"
        raise LeapObstacleError(f"`optim={optim}` {reason}.", another)
    if optim.startswith("schedule_free"):
        reason = "keeps two sets of weights, and a leap would move one of them without the other"
        raise LeapObstacleError(f"`optim={optim}` {reason}.", another)
    if getattr(args, "sync_ref_model", False):
        raise LeapObstacleError(
            "`sync_ref_model=True` copies the weights of the run into the reference, and weights that are taken back "
            "later could not be taken out of it.",
            "Set `sync_ref_model=False`.",
        )


def check_leap_optimizer(optimizer: Any) -> None:
    """Refuse leaps under an optimizer other than Adam or AdamW, an object (also wrapped), its class or an `optim`."""
    optimizer = inner_optimizer(optimizer)
    kind = optimizer if isinstance(optimizer, (str, type)) else type(optimizer)
    if not is_adam(kind) and not (isinstance(kind, type) and issubclass(kind, (torch.optim.Adam, torch.optim.AdamW))):
        name = f"optim={kind}" if isinstance(kind, str) else kind.__name__
        raise LeapObstacleError(f"Leaps need Adam or AdamW, and the optimizer is `{name}`.", "Leave `direction` out.")
