"""
Weight precision by phase: requests, what they resolve to for a model, and low-precision working copies of weights.

Under autocast a linear layer casts its fp32 weight to bf16 whenever it computes. Training on bf16 *working copies* of
the weights, with gradients added up on fp32 *masters*, computes the same bits. [`WeightPrecision`] puts such copies
into the modules for the length of a micro-batch or of a probe. It is useful for probes in half precision in a run
without autocast: activations are smaller, and the probe is faster if the hardware is. In real phases it saves only the
casts that autocast repeats when layers are recomputed. The price is two bytes per weight of the layers while the copies
are in place; autocast holds as much in a forward pass, so the peak hardly changes.

A request such as `"full=bf16,predict=int8"` takes three steps: [`parse_precision`] reads it, [`resolve`] compares it
with the weights and the autocast of the run and refuses what is not possible with them, and [`precision_parts`] makes
the parts. int8 is for probes only and has its own part ([`Int8Predict`]) with two engines: `int8` expands the weights
with torch before each use, and `int8_bitsandbytes` multiplies int8 by int8 with bitsandbytes.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from hf_hybrid.part import Part, Phase
from hf_hybrid.phase_memory.int8 import Int8Predict, layer_linears

if TYPE_CHECKING:
    from hf_hybrid.run.run import Run

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_ENGINES = {"int8": "torch", "int8_bitsandbytes": "bitsandbytes"}
"""The words for int8, with the engine of [`Int8Predict`] that each asks for."""
_CHOICES = ("auto", *DTYPES, *_ENGINES)


def parse_precision(text: str) -> dict[Phase, str]:
    """
    Read `"auto"`, `"bf16"` or `"full=bf16,correct=fp32,predict=int8"`; phases that are not named are `"auto"`.

    A word without a phase is for every phase that is not named: `"bf16,predict=int8"`. `int8_bitsandbytes` is int8 that
    bitsandbytes multiplies, see [`Int8Predict`].

    Raises:
        ValueError: If a phase or a precision is not known, is given twice, or is int8 outside Predict.
    """
    given: dict[str, str] = {}
    for part in text.lower().split(","):
        phase, equals, precision = (word.strip() for word in part.partition("="))
        if not equals:
            phase, precision = "", phase
        elif phase not in list(Phase):
            _refuse("phase", phase, [p.value for p in Phase], text)
        if precision not in _CHOICES:
            _refuse("precision", precision, _CHOICES, text)
        if precision in _ENGINES and phase != Phase.PREDICT.value:
            raise ValueError(
                f"`{precision}` in `weight_precision={text}` is for forward-only probes: write `predict={precision}`. "
                "Nothing trains in it."
            )
        if phase in given:
            raise ValueError(
                f"`weight_precision={text}` gives a precision for {f'`{phase}`' if phase else 'all phases'} twice. "
                "Keep one."
            )
        given[phase] = precision
    return {phase: given.get(phase.value, given.get("", "auto")) for phase in Phase}


def _refuse(kind: str, word: str, choices, text: str) -> None:
    close = difflib.get_close_matches(word, choices, n=1, cutoff=0.4)
    hint = f" Did you mean `{close[0]}`?" if close else ""
    raise ValueError(
        f"`{word}` in `weight_precision={text}` is not a {kind}: choose one of {', '.join(choices)}.{hint}"
    )


def resolve(
    precisions: Mapping[Phase, str], *, weights: str, autocast: str | None = None, device: str = "cpu"
) -> tuple[dict[Phase, str], str]:
    """
    Turn a request into a choice for weights that are held in `weights`.

    `auto` leaves the weights as they are. On an accelerator, Predict also tries int8, which frees memory there.

    Args:
        precisions (`Mapping[Phase, str]`): From [`parse_precision`].
        weights (`str`): The precision of the layers' weights, from [`held_precision`].
        autocast (`str`, *optional*): `"bf16"` or `"fp16"` if the trainer computes under autocast.
        device (`str`): Type of the device that the weights are on.

    Returns a precision per phase, and whether probes use int8: `"off"`, `"on"`, or `"auto"`, where noise allows.

    Raises:
        ValueError: If a precision would need other weights or another autocast; the message says which.
    """
    by_phase, int8 = {}, "off"
    for phase in Phase:
        asked = precisions.get(phase, "auto")
        if phase is Phase.PREDICT:
            int8 = "on" if asked in _ENGINES else "auto" if asked == "auto" and device != "cpu" else "off"
        by_phase[phase] = weights if asked == "auto" or asked in _ENGINES else asked
        _check(phase, by_phase[phase], weights, autocast)
    return by_phase, int8


def _check(phase: Phase, precision: str, weights: str, autocast: str | None) -> None:
    request = f"`weight_precision`: `{phase.value}={precision}`"
    if precision == weights:
        return
    if weights != "fp32":
        raise ValueError(
            f"{request} needs the weights of the layers' `nn.Linear` modules in fp32, found: {weights}. Load the model "
            f"with `dtype=torch.float32`, or ask for `{phase.value}=auto`."
        )
    if autocast != precision and (autocast is not None or phase is not Phase.PREDICT):
        found = f"it is on with {autocast}" if autocast else "it is off"
        raise ValueError(
            f"{request} needs autocast in that precision, since activations have to match, but {found}. "
            f"Set `{precision}=True` in the training arguments, or ask for `{phase.value}=auto`."
        )


def held_precision(model: nn.Module) -> str:
    """The precision of the weights of the layers' plain `nn.Linear` modules: `"fp32"`, `"bf16 and fp32"`, `"none"`."""
    return " and ".join(sorted({_NAMES[module.weight.dtype] for module in layer_linears(model)})) or "none"


def precision_parts(text: str, model: nn.Module, *, autocast: str | None = None) -> list[Part]:
    """
    The parts that a request needs for a model whose layers are resident; none where nothing changes.

    Raises:
        ValueError: If the request cannot be read, or cannot be met with this model.
        ImportError: If `int8_bitsandbytes` is asked for and bitsandbytes is not installed.
    """
    device = next(model.parameters()).device.type
    weights = held_precision(model)
    asked = parse_precision(text)
    by_phase, int8 = resolve(asked, weights=weights, autocast=autocast, device=device)
    word = asked[Phase.PREDICT]
    if int8 == "on" and weights == "none":
        raise ValueError(
            f"`weight_precision`: `predict={word}` rounds the `nn.Linear` modules of the layers, and this model has "
            "none there. Leave it out."
        )
    parts: list[Part] = []
    if any(precision != weights for precision in by_phase.values()):
        parts.append(WeightPrecision(by_phase, autocast=autocast))
    if int8 != "off":
        parts.append(_by_name(word) if int8 == "on" else Int8Predict(int8))
    return parts


def _by_name(word: str) -> Int8Predict:
    """Return int8 probes for who asks for them by name: also of narrow matrices, which save little."""
    try:
        return Int8Predict("on", engine=_ENGINES[word], min_features=1)
    except ImportError as error:
        raise ImportError(
            f"`weight_precision`: `predict={word}` multiplies with bitsandbytes, which cannot be imported. Install it "
            'with `pip install "hf-hybrid[quantization]"`, or write `predict=int8`, which needs torch alone.'
        ) from error


class WeightPrecision(Part):
    """
    Runs chosen phases on low-precision working copies of the layers' `nn.Linear` weights.

    The copies stand in the modules only between `before_forward` and `after_backward` of a micro-batch, or for the
    length of a probe. Gradients arrive on the fp32 masters, in fp32, as soon as autograd has finished with a layer, and
    add up there over an accumulation window. Optimizer, clipping, saving and evaluation see nothing but masters.

    Args:
        precisions (`Mapping[Phase, str]`): Per phase, as [`parse_precision`] or [`resolve`] give them. int8 is
            ignored here, see [`Int8Predict`].
        autocast (`str`, *optional*): `"bf16"` or `"fp16"` if the trainer computes under autocast. Without it only
            Predict can have a lower precision, and its probes then run under an autocast of their own.
    """

    name = "weight_precision"

    def __init__(self, precisions: Mapping[Phase, str], *, autocast: str | None = None):
        self.precisions, self.autocast = dict(precisions), autocast
        self._dtypes: dict[Phase, torch.dtype | None] = {}
        self._linears: list[nn.Linear] = []
        self._masters: list[tuple[nn.Linear, Tensor]] = []
        self._window = ExitStack()

    def begin(self, run: Run) -> None:
        """
        Raises:
            ValueError: If a precision cannot be had with this model, this autocast or several processes.
        """
        model: Any = run.model
        held = held_precision(model)
        chosen, _ = resolve(self.precisions, weights=held, autocast=self.autocast)
        lower = [phase.value for phase in Phase if phase is not Phase.PREDICT and chosen[phase] != held]
        if lower and torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1:
            raise ValueError(
                f"`{lower[0]}={chosen[Phase(lower[0])]}` works in one process only: gradients of working copies are "
                "not reduced. Leave real phases at `auto` under several processes: autocast computes the same."
            )
        self._dtypes = {phase: DTYPES.get(precision) for phase, precision in chosen.items()}
        self._linears = layer_linears(model)

    def after_backward(self, phase: Phase | None) -> None:
        self._close()

    def before_probe(self) -> None:
        self.before_forward(Phase.PREDICT)
        if self._masters and self.autocast is None:
            copy = self._masters[0][0].weight
            self._window.enter_context(torch.autocast(copy.device.type, copy.dtype))

    def end(self) -> None:
        self._close()
        self._linears = []

    def before_forward(self, phase: Phase | None) -> None:
        self._close()
        dtype = None if phase is None else self._dtypes[phase]
        copies: dict[int, nn.Parameter] = {}
        try:
            for module in self._linears:
                master = module.weight
                if dtype is None or master.dtype == dtype:
                    continue
                if id(master) not in copies:
                    copies[id(master)] = _working_copy(master, dtype)
                self._masters.append((module, master))
                module.weight = copies[id(master)]
        except BaseException:  # out of memory half-way
            self._close()
            raise

    def _close(self) -> None:
        self._window.close()
        while self._masters:
            module, master = self._masters.pop()
            module.weight = master

    after_probe = before_export = _close  # an export finds it open where a forward or backward pass was broken off


def _working_copy(master: Tensor, dtype: torch.dtype) -> nn.Parameter:
    copy = nn.Parameter(master.detach().to(dtype), requires_grad=master.requires_grad)
    if copy.requires_grad:
        copy.register_post_accumulate_grad_hook(partial(_hand_over, master))
    return copy


def _hand_over(master: Tensor, copy: Tensor) -> None:
    """The gradient of a copy is complete: add it to the master's, as autograd would have done, and drop it."""
    gradient, copy.grad = copy.grad, None
    if gradient is None:
        return
    if master.grad is None:
        master.grad = gradient.to(master.dtype)
    else:
        master.grad.add_(gradient)
