"""Every option of hybrid training with its help text. Standard library only, so that `--help` costs nothing."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, field, fields
from numbers import Real
from typing import Any, Literal, Optional, get_args, get_origin, get_type_hints

# What a preset decides unless the option is given: how far leaps go, what they are trusted to be worth, when they stop.
PRESETS: dict[str, dict[str, float | int]] = {
    "conservative": {
        "gain_factor": 0.5,
        "leap_worth": 0.1,
        "full_phase_steps": 8,
        "correct_phase_steps": 4,
        "confidence_threshold": 0.6,
        "divergence_threshold": 4.0,
        "muon_momentum": 0.95,
    },
    "balanced": {
        "gain_factor": 1.0,
        "leap_worth": 0.2,
        "full_phase_steps": 4,
        "correct_phase_steps": 2,
        "confidence_threshold": 0.5,
        "divergence_threshold": 5.0,
        "muon_momentum": 0.95,
    },
    "aggressive": {
        "gain_factor": 2.0,
        "leap_worth": 0.3,
        "full_phase_steps": 2,
        "correct_phase_steps": 1,
        "confidence_threshold": 0.3,
        "divergence_threshold": 6.0,
        "muon_momentum": 0.95,
    },
    "fast": {
        "gain_factor": 0.0,
        "leap_worth": 0.0,
        "full_phase_steps": 2,
        "correct_phase_steps": 1,
        "confidence_threshold": 0.3,
        "divergence_threshold": 6.0,
        "muon_momentum": 0.85,
    },
}
# Gain of a leap at the end of the run, and the power of the progress with which it grows there (0: constant).
GAINS: dict[str, tuple[float, float]] = {
    "orthogonal": (3.0, 0.0),
    "gradient_memory": (4.0, 2.0),
    "drift": (4.0, 2.0),
    "linear": (4.0, 2.0),
    "snoo": (1.0, 0.0),
    "rre": (1.0, 0.0),
    "nino": (0.2, 0.0),
    "none": (1.0, 0.0),
}


def _option(default, help_text: str, **metadata):
    return field(default=default, metadata={"help": help_text, **metadata})


@dataclass
class HybridArguments:
    """
    Options of phase-aware training; every field is also a command-line flag and a YAML key.

    `None` means "decided by `preset`" or "by the length of the run", as the help text says. `hf_hybrid` adds these to
    `transformers.TrainingArguments` in [`HybridConfig`]; none of them changes a default of `TrainingArguments`.
    """

    # Phases
    enable_predict: bool = _option(
        True, "Train in phases with predicted, verified weight leaps. False: bit-identical to transformers.Trainer."
    )
    preset: Literal["conservative", "balanced", "aggressive", "fast"] = _option(
        "balanced",
        "How far leaps go, what they are trusted to be worth and how often they are made. Decides every option below "
        "whose help says 'from the preset'. fast: what was fastest in docs/evaluation.md, optim=muon (where optim was "
        "left at its default) with a shorter momentum and without leaps, which added nothing to it.",
    )
    warmup_phase_steps: Optional[int] = _option(
        None, "Real steps before the first leap. Default: 5%% of the run, at least 2 and at most 100."
    )
    full_phase_steps: Optional[int] = _option(
        None, "Real steps of a Full phase. Default: from the preset (8, 4, 2, 2), shorter in runs under 40 steps."
    )
    correct_phase_steps: Optional[int] = _option(
        None, "Real steps after a leap in which it is judged. Default: from the preset (4, 2, 1, 1)."
    )
    max_predict_steps: Optional[int] = _option(
        None, "Most steps that one leap may stand for. Default: 5%% of the run, at least 1 and at most 10."
    )
    max_consecutive_leaps: int = _option(5, "Leaps that may follow each other before a Full phase is due.")
    confidence_threshold: Optional[float] = _option(
        None, "A leap needs at least this confidence, between 0 and 1. Default: from the preset (0.6, 0.5, 0.3, 0.3)."
    )

    # Leaps
    direction: Literal["orthogonal", "gradient_memory", "drift", "linear", "snoo", "rre", "nino", "none"] = _option(
        "orthogonal",
        "Where a leap goes. orthogonal: a short average of the gradients, hidden matrices orthogonalised as Muon does. "
        "gradient_memory: a slow average of the gradients through the optimizer's own "
        "preconditioner. drift: the low-pass drift of the weights. linear: the slope of the weights' last states. "
        "snoo: Nesterov momentum around the optimizer. rre: reduced rank extrapolation. nino: a published network "
        "(nino_checkpoint). none: nowhere (frozen control: predicted steps change nothing).",
    )
    leap_history: Optional[int] = _option(
        None,
        "States of the weights that linear, rre and nino look back on; one fp32 copy each. Default: 5; for nino what "
        "its network reads.",
    )
    leap_history_spacing: Optional[int] = _option(
        None, "Real steps between these states. Default: together they span leap_memory_steps."
    )
    snoo_momentum: Optional[float] = _option(None, "With direction=snoo: momentum of the outer step. Default: 0.5.")
    snoo_rate: Optional[float] = _option(None, "With direction=snoo: learning rate of the outer step. Default: 0.7.")
    rre_regularization: Optional[float] = _option(
        None, "With direction=rre: damping relative to the mean square norm of what the weights moved. Default: 0.1."
    )
    nino_checkpoint: Optional[str] = _option(
        None, "With direction=nino: file of the published network without graph, nino_mlp.pt or nino_mlp_h32.pt."
    )
    leap_gain: Optional[float] = _option(
        None,
        "Gain of a leap at the end of the run, in units of the real steps since the last. Default: by direction (3 for "
        "orthogonal, 4 for gradient_memory, drift and linear, 1 for snoo, rre and none, 0.2 for nino), times 0.5, 1, "
        "2, 0 by preset. 0: no leaps.",
    )
    leap_gain_power: Optional[float] = _option(
        None,
        "The gain grows with this power of the share of the run that is done; 0: constant. Default: 2 for "
        "gradient_memory, drift and linear, else 0.",
    )
    planner: Literal["schedule", "dynamics", "bandit", "fixed"] = _option(
        "schedule",
        "What chooses the gain and the worth of leaps. schedule: leap_gain and leap_gain_power. dynamics: a world "
        "model of training, which imagines the run with and without leaps. bandit: multiples of the schedule by what "
        "they earned. fixed: leap_gain from the first leap on.",
    )
    correct_gain: bool = _option(
        False,
        "Change the gain of each kind of parameter by what the last leaps met: where the gradient in Correct says that "
        "they went too far or not far enough.",
    )
    tail_average: float = _option(
        0.0,
        "Share of the run, at its end, over which weights are averaged; the mean takes their place if it is better on "
        "all held-out sequences. One fp32 value per trainable parameter while it lasts. 0: off.",
    )
    leap_worth: Optional[float] = _option(
        None,
        "Predicted steps granted per real step when leaps run at full gain; credit adds up and is redeemed as whole "
        "steps. Default: from the preset (0.1, 0.2, 0.3, 0).",
    )
    leap_memory_steps: Optional[int] = _option(
        None,
        "Memory of the slow averages in real steps. Default: 10 with direction=orthogonal, else a sixth of the run, at "
        "least 5 and at most 1000.",
    )
    max_leap_norm: float = _option(
        0.5, "Cap of a leap's norm relative to the norm of the weights. Leaps are never clipped by max_grad_norm."
    )
    extend_leaps: bool = _option(
        True, "Let a probed leap go beyond the schedule when held-out loss pays for it. Not while lr_rescue is on."
    )
    leap_budget: float = _option(
        0.25,
        "Arithmetic that leaps may cost, as a share of that of the real steps: with direction=orthogonal or optim=muon "
        "and few tokens per step, leaps are made more rarely, and go further.",
    )
    buffers_device: Literal["auto", "cpu"] = _option(
        "auto",
        "Where the slow buffers and the leap snapshot live: beside the weights, or in host memory. Two fp32 values "
        "per trainable parameter; one more with direction=drift or snoo, leap_history more with linear, rre and nino.",
    )

    # Verification
    probe_samples: int = _option(
        64,
        "Sequences held out of the training set to verify leaps on, at most 5%% of it; unused with probe_dataset.",
    )
    probe_batch_size: Optional[int] = _option(
        None, "Sequences per probe, rotating through the held-out ones. Default: 8, at most what is held out."
    )
    probe_budget: float = _option(0.01, "Share of the run's compute for probes; thrice that while leaps are refused.")
    acceptance_z: float = _option(2.0, "Standard errors of the paired difference that a verdict asks for.")
    rollback_margin: float = _option(
        1.0,
        "Rise of held-out loss that a leap within the schedule may cause at once, in real steps' worth of progress: "
        "such a leap pays later.",
    )

    # Learning-rate rescue
    lr_rescue: Literal["auto", "on", "off"] = _option(
        "auto",
        "Raise a learning rate that is too small for the run, from the first step on. auto: only when learning_rate "
        "was left at its default; a rate that you chose is respected.",
    )
    lr_rescue_max_scale: float = _option(512.0, "Most that the rescue may multiply the learning rate by.")

    # Optimizer
    muon_lr_scale: float = _option(
        1.0, "With optim=muon: Muon's learning rate (hidden matrices) over learning_rate (everything else)."
    )
    muon_momentum: Optional[float] = _option(
        None, "With optim=muon: decay rate of Muon's mean gradient. Default: from the preset (0.95, in fast 0.85)."
    )

    # Memory
    memory: Literal["off", "auto", "stream"] = _option(
        "off",
        "Train models that do not fit. off: as transformers.Trainer does. auto: layers are streamed from host memory "
        "if the whole training does not fit into vram_budget_gib. stream: always streamed, on any device.",
    )
    vram_budget_gib: Optional[float] = _option(
        None, "Device memory that training may use, in GiB. Default: what is free on the device; no limit on a CPU."
    )
    host_budget_gib: Optional[float] = _option(
        None, "Host memory that training may use, in GiB. Default: what is available on the machine."
    )
    resident_layers: Optional[int] = _option(
        None, "Streamed layers that stay on the device after use. Default: as many as vram_budget_gib has room for."
    )
    stream_embeddings: Optional[bool] = _option(
        None, "Stream the embeddings and the head as well. Default: only if they do not fit beside the rest."
    )
    prefetch_layers: int = _option(1, "Streamed layers that are fetched ahead of the one that computes.")
    accumulation_walk: Literal["auto", "layer", "micro_batch"] = _option(
        "auto",
        "How streamed layers walk an accumulation window. layer: each layer computes all micro-batches before the "
        "next, so that weights travel twice per step. micro_batch: twice per micro-batch. auto: layer, where possible.",
    )
    optimizer_states: Literal["exact", "8bit"] = _option(
        "exact",
        "exact: the states of `optim` as they are. 8bit: AdamW with block-wise 8-bit states, bf16 weights rounded "
        "stochastically; needs bitsandbytes.",
    )
    base_precision: Literal["same", "int8"] = _option(
        "same", "How frozen weights of streamed layers are stored and transported. int8: one byte per weight."
    )

    offload_activations: bool = _option(
        False, "Keep the activations between layers on the host until the backward pass; asynchronous on a GPU."
    )
    checkpoint_phases: Optional[str] = _option(
        None,
        "Phases in which activations are checkpointed, separated by commas, for example 'full,correct'; streamed "
        "layers always are. Default: what activation_checkpointing says.",
    )
    chunked_loss: Literal["auto", "on", "off"] = _option(
        "auto",
        "Compute the loss of big vocabularies in chunks, without ever holding all logits. auto: with memory=auto or "
        "stream and at least 32000 words, where the result agrees with the model's own loss (to rounding).",
    )
    weight_precision: Optional[str] = _option(
        None,
        "Precision of resident weights while they compute, by phase, for example 'bf16' or 'full=bf16,predict=int8'; "
        "the master weights are kept. 'auto' chooses. Default: as they are.",
    )
    int8_engine: Literal["torch", "bitsandbytes"] = _option(
        "torch",
        "What computes with int8 probe weights (weight_precision='predict=int8'). torch: expands a matrix while it is "
        "used. bitsandbytes: multiplies in int8, which is faster and adds more noise, as inputs are rounded too.",
    )
    predict_states: Literal["stay", "host", "pinned", "8bit", "drop"] = _option(
        "stay",
        "Where optimizer states are during Predict. 8bit is lossy, drop lets the optimizer start anew.",
    )

    # Running out of memory
    out_of_memory: Literal["retry", "raise"] = _option(
        "retry",
        "When device memory runs out in a step. retry: the step is computed again in smaller parts, with the same "
        "effective batch, then with activation checkpointing; what fits is kept for the rest of the run. raise: stop.",
    )
    guard_warn_at: float = _option(
        0.90, "Share of device memory in use at the end of a step above which a warning is logged; 1: never."
    )
    guard_checkpoint_at: float = _option(
        0.97, "Share of device memory above which a checkpoint is written, once, before memory runs out; 1: never."
    )
    guard_cleanup_steps: int = _option(
        0, "Give back cached device memory after every so many steps. 0: only when the warning is logged."
    )

    # Divergence
    divergence_threshold: Optional[float] = _option(
        None, "Deviation of the loss, in standard deviations, that is a warning. Default: from the preset (4, 5, 6, 6)."
    )
    gradient_explosion_factor: float = _option(
        100.0, "Gradient norm over its running median that is a warning; ten times that skips the batch."
    )
    max_bad_steps: int = _option(10, "Non-finite batches in a row after which training is aborted.")

    def __post_init__(self):
        check_hybrid_arguments(self)

    def preset_value(self, name: str):
        """The option as given, else what the preset says."""
        given = getattr(self, name)
        return PRESETS[self.preset][name] if given is None else given

    def gain_schedule(self, direction: str) -> tuple[float, float]:
        """Gain of a leap along `direction` at the end of the run, and the power of the progress with which it grows."""
        gain, power = GAINS[direction]
        gain = gain * PRESETS[self.preset]["gain_factor"] if self.leap_gain is None else self.leap_gain
        return gain, power if self.leap_gain_power is None else self.leap_gain_power


_WANTED = {bool: "`True` or `False`", int: "an integer", float: "a finite number", str: "text"}
_HISTORY = ("linear", "rre", "nino")
_OF_DIRECTION = {
    "leap_history": _HISTORY,
    "leap_history_spacing": _HISTORY,
    "snoo_momentum": ("snoo",),
    "snoo_rate": ("snoo",),
    "rre_regularization": ("rre",),
    "nino_checkpoint": ("nino",),
}
_AT_LEAST = {
    "leap_history": 2,
    "leap_history_spacing": 1,
    "rre_regularization": 0,
    "warmup_phase_steps": 0,
    "full_phase_steps": 1,
    "correct_phase_steps": 1,
    "max_predict_steps": 1,
    "max_consecutive_leaps": 1,
    "leap_memory_steps": 1,
    "leap_gain": 0,
    "leap_gain_power": 0,
    "leap_worth": 0,
    "probe_samples": 2,
    "probe_batch_size": 2,
    "acceptance_z": 0,
    "rollback_margin": 0,
    "lr_rescue_max_scale": 1,
    "max_bad_steps": 1,
    "resident_layers": 0,
    "prefetch_layers": 0,
    "guard_cleanup_steps": 0,
}
_POSITIVE = (
    "max_leap_norm",
    "divergence_threshold",
    "gradient_explosion_factor",
    "leap_budget",
    "muon_lr_scale",
    "snoo_rate",
    "vram_budget_gib",
    "host_budget_gib",
)
_FRACTIONS = (
    "confidence_threshold",
    "probe_budget",
    "snoo_momentum",
    "tail_average",
    "guard_warn_at",
    "guard_checkpoint_at",
)
_BELOW_ONE = ("muon_momentum",)


def check_hybrid_arguments(arguments: HybridArguments) -> None:
    """
    Refuse values that cannot work, and give those that YAML reads as something else the type of their option.

    Raises:
        ValueError: If an option is of another type than its annotation says, or outside its range; the message names
            the option, the value and what is wanted.
    """
    for name, hint in get_type_hints(HybridArguments).items():
        setattr(arguments, name, _as_declared(name, getattr(arguments, name), hint))
    for name, least in _AT_LEAST.items():
        value = getattr(arguments, name)
        if value is not None and not value >= least:
            raise ValueError(f"`{name}` must be at least {least}, got {value}. {_off_switch(name)}")
    for names, holds, wanted in (
        (_POSITIVE, lambda value: value > 0, "greater than 0"),
        (_FRACTIONS, lambda value: 0 <= value <= 1, "between 0 and 1"),
        (_BELOW_ONE, lambda value: 0 <= value < 1, "at least 0 and less than 1"),
    ):
        for name in names:
            value = getattr(arguments, name)
            if value is not None and not holds(value):
                raise ValueError(f"`{name}` must be {wanted}, got {value}.")
    if arguments.guard_warn_at > arguments.guard_checkpoint_at:
        raise ValueError(
            f"`guard_warn_at={arguments.guard_warn_at}` must not be above `guard_checkpoint_at="
            f"{arguments.guard_checkpoint_at}`: the warning comes first. Lower the one or raise the other."
        )
    _check_direction(arguments)


def _as_declared(name: str, value: Any, hint: Any) -> Any:
    """The value of an option as its annotation wants it. YAML reads a bare `on` as a bool, and `1e-3` as text."""
    kinds = get_args(hint) or (hint,)  # of Literal: its choices; of Optional[kind]: kind and NoneType
    if get_origin(hint) is Literal:
        value = ("off", "on")[value] if isinstance(value, bool) and {"on", "off"} & set(kinds) else value
        if isinstance(value, str) and value in kinds:
            return value
        raise ValueError(f"`{name}` must be one of {', '.join(kinds)}, got `{value}`.")
    kind = kinds[0]
    if value is None and type(None) in kinds:
        return None
    if kind in (bool, str):
        value = os.fspath(value) if kind is str and isinstance(value, os.PathLike) else value
        if isinstance(value, kind):
            return value
    elif isinstance(value, (Real, str) if kind is float else Real) and not isinstance(value, bool):
        try:
            number = float(value)
        except (ValueError, OverflowError):
            number = math.inf
        if number.is_integer() or kind is float and not math.isinf(number):  # NaN is in no range, and refused there
            return value if type(value) in (int, kind) else kind(value)
    raise ValueError(f"`{name}` must be {_WANTED[kind]}, got `{value!r}`.")


def _check_direction(arguments: HybridArguments) -> None:
    direction = arguments.direction
    for name, directions in _OF_DIRECTION.items():
        value = getattr(arguments, name)
        if value is not None and direction not in directions:
            named = " or ".join(f"`direction={other}`" for other in directions)
            raise ValueError(f"`{name}={value}` is for {named}, and `direction` is `{direction}`. Leave it out.")
    if direction == "nino" and arguments.nino_checkpoint is None:
        raise ValueError(
            "`direction=nino` needs `nino_checkpoint`, the path of the published `nino_mlp.pt`. Pass it, or choose "
            "another `direction`."
        )
    if direction == "rre" and arguments.leap_history == 2:
        raise ValueError("`leap_history` must be at least 3 with `direction=rre`, which combines increments, got 2.")


def _off_switch(name: str) -> str:
    if (name.endswith("_steps") and name != "guard_cleanup_steps") or name.startswith("leap"):
        return "To train without leaps set `enable_predict=False`."
    return ""


def hybrid_values(arguments: HybridArguments) -> dict:
    """The options of this module alone, by name."""
    return {field.name: getattr(arguments, field.name) for field in fields(HybridArguments)}
