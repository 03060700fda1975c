"""
Every option of hybrid training. The field of an option holds its default, its range and its help text.

    name: kind = option(default, help_text, at_least=0, below=1)

The command line (`cli/options.py`), the check below and docs/configuration.md read all three from the field. This
module imports only the standard library, so `--help` is fast.
"""

from __future__ import annotations

import math
import operator
import os
from collections.abc import Mapping
from dataclasses import Field, dataclass, field, fields
from numbers import Real
from typing import Any, Literal, Optional, get_args, get_origin, get_type_hints

# The values that a preset sets unless the option is given.
_BY_PRESET = {
    "gain_factor": (0.5, 1.0, 2.0, 0.0),
    "leap_worth": (0.1, 0.2, 0.3, 0.0),
    "full_phase_steps": (8, 4, 2, 2),
    "correct_phase_steps": (4, 2, 1, 1),
    "divergence_threshold": (4.0, 5.0, 6.0, 6.0),
    "muon_momentum": (0.95, 0.95, 0.95, 0.85),
}
PRESETS: dict[str, dict[str, float | int]] = {
    preset: {name: values[column] for name, values in _BY_PRESET.items()}
    for column, preset in enumerate(("conservative", "balanced", "aggressive", "fast"))
}

_LIMITS = {
    "at_least": ("at least", operator.ge),
    "above": ("greater than", operator.gt),
    "at_most": ("at most", operator.le),
    "below": ("less than", operator.lt),
}


class HelpText(str):
    """
    The help text of an option, which ends with its range.

    transformers' `HfArgumentParser` hands every key of a field's metadata to argparse, which takes only `help` of ours.
    So range and group travel as attributes of the help text.
    """

    text: str  # what the option does, without the range
    limits: dict[str, float]  # the range: `at_least`, `above`, `at_most`, `below`
    group: str | None  # heading that begins with this option, in `--help` and in docs/configuration.md

    def __new__(cls, text: str, group: str | None = None, **limits: float):
        help_text = super().__new__(cls, f"{text} Must be {in_words(limits)}." if limits else text)
        help_text.text, help_text.limits, help_text.group = text, limits, group
        return help_text


def option(default: Any, text: str, *, group: str | None = None, **limits: float) -> Any:
    """Make the field of an option, see [`HelpText`]. If the default is `None`, the text has it after `Default: `."""
    return field(default=default, metadata={"help": HelpText(text, group, **limits)})


def in_words(limits: Mapping[str, float]) -> str:
    """Return a range in the words of help texts and error messages."""
    if limits.keys() == {"at_least", "at_most"}:
        return f"between {limits['at_least']} and {limits['at_most']}"
    return " and ".join(f"{_LIMITS[name][0]} {limit}" for name, limit in limits.items())


@dataclass
class HybridArguments:
    """
    Options of phase-aware training. Every field is also a command-line flag and a YAML key.

    `None` means that the preset or the length of the run decides, as the help text says. [`HybridConfig`] adds these
    options to `transformers.TrainingArguments` and changes none of the defaults there.

    Raises:
        ValueError: If an option has the wrong type or is outside its range.

    Attributes:
        plan_values (`dict`): Values of `Setup` (plan/setups.py) that no option has and a memory plan decides, such as
            `prefetch_layers`. Set it on a config to decide them yourself.
    """

    plan_values = {}

    enable_predict: bool = option(
        True,
        "Train in phases, with weight leaps that replace optimizer steps. False: bit-identical to "
        "transformers.Trainer.",
        group="Phases",
    )
    preset: Literal["conservative", "balanced", "aggressive", "fast"] = option(
        "balanced",
        "How far leaps go, how many steps they replace and how often they are made. The preset decides every option "
        "below whose help says 'from the preset'. fast: no leaps, and optim=muon (unless you set optim) "
        "with a shorter momentum, which was fastest in docs/results.md. With adapters it trains by AdamW, because "
        "Muon gains nothing there.",
    )
    warmup_phase_steps: Optional[int] = option(
        None, "Real steps before the first leap. Default: 5%% of the run, 2 to 100.", at_least=0
    )
    full_phase_steps: Optional[int] = option(
        None,
        "Real steps of a Full phase. Default: from the preset (8, 4, 2, 2), fewer in runs under 40 steps.",
        at_least=1,
    )
    correct_phase_steps: Optional[int] = option(
        None, "Real steps after a leap, in which it is judged. Default: from the preset (4, 2, 1, 1).", at_least=1
    )
    max_predict_steps: Optional[int] = option(
        None, "Most steps that one leap may replace. Default: 5%% of the run, 1 to 10.", at_least=1
    )

    share_rows: Literal["auto", "on", "off"] = option(
        "auto",
        "Compute every token of a step once: without padding, and with one copy of a prefix that rows share. "
        "Where this is not exact or saves little, rows are computed as they are, and the log says why. auto: on, but "
        "off with enable_predict=False. off: never.",
        group="Exact skips",
    )

    direction: Literal["auto", "orthogonal", "gradient_memory", "none"] = option(
        "auto",
        "Where a leap goes. auto: orthogonal with AdamW on a language model from scratch, and no leaps elsewhere: with "
        "adapters, on a pretrained model (whose first training loss is below half the logarithm of the vocabulary), on "
        "preferences, and with an optimizer or a loss that leaps were not measured with in docs/results.md. "
        "orthogonal: along a short average of the gradients; hidden matrices are orthogonalised, "
        "as Muon does. gradient_memory: along a long average of the gradients, through the optimizer's own "
        "preconditioner. none: nowhere; skipped steps change nothing (the control of a comparison). "
        "HybridTrainer(direction=...) takes your own.",
        group="Leaps",
    )
    leap_gain: Optional[float] = option(
        None,
        "Length of a leap at the end of the run, in real steps per real step since the last leap. 0: no leaps. "
        "Default: by direction (3 for orthogonal, 4 for gradient_memory, 1 for none), times 0.5, 1, 2, 0 by preset.",
        at_least=0,
    )
    planner: Literal["schedule", "dynamics"] = option(
        "schedule",
        "What chooses the gain and the worth of leaps. schedule: leap_gain and leap_worth. dynamics: a world model, "
        "which imagines the rest of the run with and without leaps.",
    )
    leap_worth: Optional[float] = option(
        None,
        "Skipped steps granted per real step when leaps have full gain; fractions add up until they make a whole "
        "step. Default: from the preset (0.1, 0.2, 0.3, 0).",
        at_least=0,
    )
    leap_budget: float = option(
        0.25,
        "Most arithmetic that leaps may cost, as a share of that of the real steps. If orthogonalising costs much "
        "beside a step (few tokens per step), leaps are made less often and go further.",
        above=0,
    )

    probe_budget: float = option(
        0.01,
        "Most arithmetic that probes of leaps may cost, as a share of the run's; twice that if they refuse leaps.",
        group="Verification",
        at_least=0,
        at_most=1,
    )

    auto_lr: Literal["auto", "on", "off"] = option(
        "auto",
        "Raise a learning rate that is too small for the run, from the first step on: search for a better one, or "
        "compute that of LoRA adapters from their shape. auto: only if you set no learning_rate.",
        group="Learning rate and optimizer",
    )
    muon_momentum: Optional[float] = option(
        None,
        "With optim=muon: decay rate of Muon's average of the gradients. Default: from the preset (0.95, 0.95, 0.95, "
        "0.85).",
        at_least=0,
        below=1,
    )

    memory: Literal["off", "auto", "stream"] = option(
        "off",
        "Where the layers are kept. off: on the device, as transformers.Trainer does. stream: in host memory, from "
        "where each layer is streamed to the device when it computes. auto: stream if the whole training does not fit "
        "into vram_budget_gib.",
        group="Memory",
    )
    vram_budget_gib: Optional[float] = option(
        None, "Device memory that training may use, in GiB. Default: what is free; no limit on a CPU.", above=0
    )
    host_budget_gib: Optional[float] = option(
        None, "Host memory that training may use, in GiB. Default: what is available.", above=0
    )
    resident_layers: Optional[int] = option(
        None,
        "Layers of a streamed model that stay on the device: trained ones with gradients and optimizer states, of "
        "frozen ones the copies. Default: as many as fit into vram_budget_gib.",
        at_least=0,
    )
    accumulation_walk: Literal["auto", "layer", "micro_batch"] = option(
        "auto",
        "Order in which streamed layers compute the micro-batches of a step. layer: a layer computes all micro-batches "
        "before the next layer is fetched, so that weights travel twice per step. micro_batch: weights travel twice "
        "per micro-batch. auto: layer where possible, and micro_batch if all layers fit on the device.",
    )
    optimizer_states: Literal["exact", "8bit"] = option(
        "exact",
        "exact: the states of `optim` as they are. 8bit: AdamW with block-wise 8-bit states and bf16 weights that are "
        "rounded stochastically; needs bitsandbytes.",
    )
    base_precision: Literal["same", "int8"] = option(
        "same", "How frozen weights of streamed layers are stored and moved. int8: one byte per weight."
    )
    offload_activations: bool = option(
        False,
        "Keep the activations between layers in host memory until the backward pass; copied asynchronously on a GPU.",
    )
    checkpoint_phases: Optional[str] = option(
        None,
        "Phases in which activations are checkpointed, separated by commas, for example 'full,correct'; not "
        "of streamed layers. Default: as activation_checkpointing says.",
    )
    chunked_loss: Literal["auto", "on", "off"] = option(
        "auto",
        "Compute the loss in chunks of tokens, so that the logits of a whole batch are never held. auto: with "
        "memory=auto or stream and a vocabulary of at least 32000, if the result equals the model's own loss up to "
        "rounding.",
    )
    weight_precision: Optional[str] = option(
        None,
        "Precision in which resident weights compute, by phase: 'bf16' or 'full=bf16,predict=int8'. Masters are kept. "
        "auto: unchanged. predict=int8_bitsandbytes: int8 probes on bitsandbytes' engine. Default: unchanged.",
    )
    predict_states: Literal["stay", "host"] = option(
        "stay",
        "Where optimizer states are kept during Predict. This lowers the memory held then, not the peak of the run.",
    )

    out_of_memory: Literal["retry", "raise"] = option(
        "retry",
        "What happens when device memory runs out in a step. retry: the step is computed again, with more recomputed "
        "layers (all that are streamed; others under activation_checkpointing=auto), in smaller parts of the same "
        "batch, then with activation checkpointing; what fits is kept for the rest of the run. raise: training stops. "
        "With max_grad_norm=0 and enable_predict=False, raise also updates streamed layers inside the backward pass.",
        group="Running out of memory",
    )
    guard_warn_at: float = option(
        0.90,
        "Share of device memory in use after a step above which a warning is logged. Above 0.97, and above this share, "
        "one checkpoint is written. 1: neither.",
        at_least=0,
        at_most=1,
    )

    divergence_threshold: Optional[float] = option(
        None,
        "Deviation of the loss, in standard deviations, that counts as a warning. Default: from the preset (4, 5, 6, "
        "6).",
        group="Divergence",
        above=0,
    )

    async_save: bool = option(
        True,
        "Write checkpoints while training goes on: their state is copied, and a thread writes and commits them. "
        "True: where nobody reads a checkpoint before the next step, and a quarter of the free host memory holds the "
        "copies. False: training waits for each checkpoint.",
        group="Checkpoints",
    )

    forecast: bool = option(
        True,
        "Forecast the final training loss from 5%% of the run on, with a 90%% interval: in the log, behind the "
        "progress bar and in the report. Each evaluation forecasts the final eval_loss too. Training is not changed. "
        "Needs enable_predict=True; ForecastCallback does it in any Trainer.",
        group="Forecast",
    )

    sample_prompts: Optional[str] = option(
        None,
        "Text file with a prompt per line. They are completed greedily at every evaluation, by at most 64 tokens, and "
        "the completions go to samples.jsonl and to the report. Training is not changed. SampleCallback does it in any "
        "Trainer, and takes another length. Default: no samples.",
        group="Samples",
    )

    profile_memory: bool = option(
        False,
        "Record the memory of every step, by phase and category, in the profile of the run and in its report. Training "
        "is not changed. MemoryProfilerCallback does it in any Trainer.",
        group="Memory profile",
    )

    def __post_init__(self):
        for name, hint in get_type_hints(HybridArguments).items():
            setattr(self, name, as_declared(name, getattr(self, name), hint))
        check_ranges(self, fields(HybridArguments))

    @property
    def exactness(self) -> Literal["bits", "rounding"]:
        """What a step has in common with `Trainer`'s: each bit, or all but the order in which sums are added up."""
        return "rounding" if self.enable_predict or self.share_rows == "on" else "bits"

    def preset_value(self, name: str) -> Any:
        """Return the option as given, or else the preset's value."""
        value = getattr(self, name)
        return PRESETS[self.preset][name] if value is None else value

    def final_gain(self, own: float) -> float:
        """Return the gain at the end of the run: `leap_gain`, else the direction's `own` times the preset's factor."""
        return own * PRESETS[self.preset]["gain_factor"] if self.leap_gain is None else self.leap_gain


def check_ranges(options: Any, within: tuple[Field, ...]) -> None:
    """Refuse values outside the ranges of the fields that [`option`] made."""
    for checked in within:
        check_range(checked.name, getattr(options, checked.name), checked.metadata["help"].limits)


def check_range(name: str, value: float | None, limits: Mapping[str, float]) -> None:
    """Refuse a value outside a range."""
    # A NaN is in no range.
    if value is not None and not all(_LIMITS[limit][1](value, bound) for limit, bound in limits.items()):
        hint = " To train without leaps set `enable_predict=False`." if name == "max_predict_steps" else ""
        raise ValueError(f"`{name}` must be {in_words(limits)}, got {value}.{hint}")


_WANTED = {bool: "`True` or `False`", int: "an integer", float: "a finite number", str: "text"}


def as_declared(name: str, value: Any, hint: Any) -> Any:
    """Convert a value to the type of the option's annotation. YAML reads a bare `on` as a bool, and `1e-3` as text."""
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
        if number % 1 == 0 or kind is float and not math.isinf(number):  # a NaN is left to `check_ranges`
            return value if type(value) in (int, kind) else kind(value)
    raise ValueError(f"`{name}` must be {_WANTED[kind]}, got `{value!r}`.")


def options_of(*groups: str) -> list[str]:
    """Return the names of the options that stand in these groups."""
    names, group = [], None
    for known in fields(HybridArguments):
        group = known.metadata["help"].group or group
        names += [known.name] * (group in groups)
    return names


def hybrid_values(arguments: HybridArguments) -> dict[str, Any]:
    """Return only the options of this module, by name."""
    return {option.name: getattr(arguments, option.name) for option in fields(HybridArguments)}
