"""
What resident weights compute in, and where optimizer states are, by phase: [`PhaseMemory`].

**Working copies.** Under autocast a linear layer casts its fp32 weight to bf16 whenever it computes. Computing with a
bf16 *working copy* of the weight, through which autograd adds the gradient up on the fp32 *master*, gives the same
bits. The copies are there for the length of a micro-batch or of a probe. It is useful for probes in half precision in
a run without autocast: activations are smaller, and the probe is faster if the hardware is. In real phases it saves
only the casts that autocast repeats when layers are recomputed. The price is two bytes per weight while the copies are
there.

**int8 probes.** A probe needs neither gradients nor optimizer states, so it can run on rounded weights if there is no
room for a normal one. The matrices of the layers are rounded row by row for each probed batch, and the training weights
wait on the host. A probe compares losses before and after a leap: most of the rounding is the same and cancels, and
what does not shifts the differences of all sequences alike. `int8` expands the weights with torch before each use.
`int8_bitsandbytes` multiplies int8 by int8, so the inputs of every layer are rounded as well: faster, and noisier.

**States.** AdamW keeps two values per trained weight, and no code reads them in skipped steps. On the host they come
back to the last bit, also before an evaluation, a save or a push, so that checkpoints hold whole states.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hf_hybrid.machine import copies_beside, host_tensor, wait_for
from hf_hybrid.part import Part, Phase
from hf_hybrid.run.run import Run
from hf_hybrid.streaming.low_bit import bitsandbytes_functional, dequantize_rows, quantize_rows
from hf_hybrid.streaming.transfers import Transfers

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
INT8 = ("int8", "int8_bitsandbytes")
_CHOICES, _PHASES = ("auto", *DTYPES, *INT8), [phase.value for phase in Phase]


def parse_precision(text: str) -> dict[Phase, str]:
    """
    Read `"auto"`, `"bf16"` or `"full=bf16,correct=fp32,predict=int8"`; phases that are not named are `"auto"`.

    A word without a phase is for every phase that is not named: `"bf16,predict=int8"`. Raises `ValueError`.
    """
    words: dict[str, str] = {}
    for part in text.lower().split(","):
        phase, _, precision = (word.strip() for word in part.rpartition("="))
        if phase not in ("", *_PHASES) or precision not in _CHOICES or phase in words:
            raise ValueError(
                f"`weight_precision={text}`: `{part}` must be a precision ({', '.join(_CHOICES)}), or one for a phase "
                f"({', '.join(_PHASES)}) as in `full=bf16`, and each phase has one."
            )
        if precision in INT8 and phase != Phase.PREDICT.value:
            raise ValueError(
                f"`{precision}` in `weight_precision={text}` is for forward-only probes: write `predict={precision}`. "
                "Nothing trains in it."
            )
        words[phase] = precision
    return {phase: words.get(phase.value, words.get("", "auto")) for phase in Phase}


def resolve(precisions: Mapping[Phase, str], *, weights: str, autocast: str | None = None) -> dict[Phase, str]:
    """
    Turn a request from [`parse_precision`] into a choice for weights that are held in `weights` ([`held_precision`]).
    `auto` leaves them as they are; `autocast` is `"bf16"` or `"fp16"` if the trainer computes under it. A `ValueError`
    says which other weights or autocast a precision would need.
    """
    by_phase = {phase: weights if asked == "auto" else asked for phase, asked in precisions.items()}
    for phase, precision in by_phase.items():
        request = f"`weight_precision`: `{phase.value}={precision}`"
        if precision in INT8 and weights == "none":
            raise ValueError(
                f"{request} rounds the `nn.Linear` modules of the layers, and this model has none there. Leave it out."
            )
        if precision in (weights, *INT8):
            continue
        if weights != "fp32":
            raise ValueError(
                f"{request} needs the weights of the layers' `nn.Linear` modules in fp32, found: {weights}. Load the "
                f"model with `dtype=torch.float32`, or ask for `{phase.value}=auto`."
            )
        if autocast != precision and (autocast is not None or phase is not Phase.PREDICT):
            state = f"it is on with {autocast}" if autocast else "it is off"
            raise ValueError(
                f"{request} needs autocast in that precision, since activations have to match, but {state}. "
                f"Set `{precision}=True` in the training arguments, or ask for `{phase.value}=auto`."
            )
    return by_phase


def layer_linears(model: nn.Module) -> list[nn.Linear]:
    """
    The plain `nn.Linear` modules inside repeated layers: not the embeddings, not the head, not adapters of peft.

    Left out as well are subclasses (quantised or parametrised elsewhere), sharded weights, modules whose `forward` was
    replaced, and weights that a module outside shares.
    """
    linears = list(_inside_layers(model))
    chosen = set(map(id, linears))
    outside = {id(p) for m in model.modules() if id(m) not in chosen for p in m.parameters(recurse=False)}
    return [module for module in linears if id(module.weight) not in outside]


def _inside_layers(module: nn.Module, inside: bool = False) -> Iterator[nn.Linear]:
    adapters = getattr(module, "adapter_layer_names", ())  # peft: what a wrapped layer holds besides its base
    for name, child in module.named_children():
        if name in adapters:
            continue
        if not (inside and type(child) is nn.Linear):
            yield from _inside_layers(child, inside or isinstance(module, nn.ModuleList))
            continue
        weight = child.weight
        plain = type(weight) is nn.Parameter and type(weight.data) is Tensor and not weight.is_meta
        if plain and weight.dtype in _NAMES and "forward" not in vars(child):
            yield child


def held_precision(model: nn.Module) -> str:
    """The precision of the weights of the layers' plain `nn.Linear` modules: `"fp32"`, `"bf16 and fp32"`, `"none"`."""
    return " and ".join(sorted({_NAMES[module.weight.dtype] for module in layer_linears(model)})) or "none"


class PhaseMemory(Part):
    """
    Computes chosen phases in lower precision, and keeps optimizer states elsewhere while steps are predicted.

    Modules compute through another `forward`; optimizer, clipping, saving and evaluation see nothing but masters.

    Args:
        weight_precision (`str`): As [`parse_precision`] reads it.
        predict_states (`str`): Where optimizer states are in Predict: `"stay"` or `"host"`.
        autocast (`str`, *optional*): `"bf16"` or `"fp16"` if the trainer computes under autocast. Without it only
            Predict can have a lower precision, and its probes then run under an autocast of their own.

    Raises `ValueError` for a word that is not known, and `ImportError` without bitsandbytes where it is needed.
    """

    name = "phase_memory"

    def __init__(self, weight_precision: str = "auto", predict_states: str = "stay", *, autocast: str | None = None):
        self.precisions, self.autocast = parse_precision(weight_precision), autocast
        self.predict_states = predict_states
        probes = self.precisions[Phase.PREDICT]
        if probes == "int8_bitsandbytes":
            bitsandbytes_functional()
        self.int8 = probes in INT8
        self._int8_linear = _multiplied_linear if probes == "int8_bitsandbytes" else _expanded_linear
        self._dtypes: dict[Phase, torch.dtype | None] = {}
        self._linears: list[nn.Linear] = []
        self._replaced: list[nn.Linear] = []
        self._parked: list[tuple[Tensor, Tensor]] = []
        self._probe = ExitStack()
        self._optimizer: torch.optim.Optimizer | None = None
        self._away: list[tuple[dict, str, Transfers]] = []
        self._transfers: dict[torch.device, Transfers] = {}

    def check(self, model: nn.Module) -> dict[Phase, str]:
        """Return the precision of each phase. Raises `ValueError` as [`resolve`], and for several processes."""
        held = held_precision(model)
        chosen = resolve(self.precisions, weights=held, autocast=self.autocast)
        lower = [phase.value for phase in Phase if phase is not Phase.PREDICT and chosen[phase] != held]
        if lower and torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1:
            raise ValueError(
                f"`{lower[0]}={chosen[Phase(lower[0])]}` works in one process only. Leave real phases at `auto` under "
                "several processes: autocast computes the same."
            )
        return chosen

    def begin(self, run: Run) -> None:
        model: Any = run.model
        self._dtypes = {phase: DTYPES.get(precision) for phase, precision in self.check(model).items()}
        self._linears = layer_linears(model)
        self._bring_states()  # of a run that ended in an exception
        self._optimizer = run.optimizer

    def before_forward(self, phase: Phase | None) -> None:
        self._replace(None if phase is None else self._dtypes[phase])

    def after_backward(self, phase: Phase | None) -> None:
        self._restore()

    def before_probe(self) -> None:
        dtype = self._dtypes[Phase.PREDICT]
        self._replace(dtype, int8=self.int8)
        if self._replaced and dtype is not None and self.autocast is None:
            device = self._replaced[0].weight.device.type
            self._probe.enter_context(torch.autocast(device, dtype))

    def after_probe(self) -> None:
        self._restore()

    def on_phase_change(self, old: Phase, new: Phase) -> None:
        self._bring_states()
        if new is Phase.PREDICT and self._optimizer is not None and self.predict_states == "host":
            self._send_states(self._optimizer.state)

    def before_export(self) -> None:
        self._restore()  # a forward or backward pass may have been broken off
        self._bring_states()

    def end(self) -> None:
        self.before_export()
        self._linears, self._optimizer = [], None

    def _replace(self, dtype: torch.dtype | None, int8: bool = False) -> None:
        """Let modules compute with their weights in this dtype, or in int8."""
        self._restore()
        forwards: dict[int, Callable] = {}  # by weight, which modules may share
        try:
            for module in self._linears:
                weight = module.weight
                if (not int8 and dtype in (None, weight.dtype)) or "forward" in vars(module):  # a user's own
                    continue
                if id(weight) not in forwards:
                    forwards[id(weight)] = self._rounded(weight) if int8 else partial(_linear, weight.to(dtype))
                module.forward = partial(forwards[id(weight)], module)
                self._replaced.append(module)
        except BaseException:  # out of memory half-way: the caller has not begun, so it will not end
            self._restore()
            raise

    def _rounded(self, weight: Tensor) -> Callable:
        """Round a weight, park it on the host, and return what computes with the rounded one."""
        codes, scales = quantize_rows(weight)
        beside = copies_beside(weight.device)
        # Nobody reads it before it is copied back, on the same stream.
        host = host_tensor(weight.shape, weight.dtype, pin=beside).copy_(weight.data, non_blocking=beside)
        self._parked.append((weight, host))
        # One NaN seen as the whole matrix: shape and dtype are right, and using it by mistake gives NaN.
        weight.data = weight.data.new_full((), math.nan).expand(weight.shape)
        return partial(self._int8_linear, codes, scales)

    def _restore(self) -> None:
        """Let modules compute with their own weights again."""
        self._probe.close()
        while self._replaced:
            vars(self._replaced.pop()).pop("forward")
        for weight, host in self._parked:
            weight.data = host.to(weight.device, non_blocking=copies_beside(weight.device))
        for device in {weight.device for weight, _ in self._parked if copies_beside(weight.device)}:
            wait_for(device)  # what is copied from is freed in the next line
        self._parked.clear()

    def _send_states(self, states: dict[Tensor, dict[str, Any]]) -> None:
        for state in states.values():
            for key, value in state.items():
                # Step counters stay.
                if torch.is_tensor(value) and value.numel() > 1 and not in_host_memory(value):
                    transfers = self._transfers.setdefault(value.device, Transfers(value.device))
                    self._away.append((state, key, transfers))
                    state[key] = host_tensor(value.shape, value.dtype, pin=False)
                    transfers.send(value, state[key])
        for transfers in self._transfers.values():
            transfers.finish_sending()  # the memory that they leave is wanted now

    def _bring_states(self) -> None:
        coming = [(state, key, transfers.fetch(state[key])) for state, key, transfers in self._away]
        self._away.clear()
        for state, key, fetched in coming:
            state[key] = fetched.take()


def in_host_memory(tensor: Tensor) -> bool:
    """Whether moving a tensor to the host would free nothing."""
    return tensor.device.type == "cpu"


def _linear(weight: Tensor, module: nn.Linear, input: Tensor) -> Tensor:
    return F.linear(input, weight, module.bias)


def _compute_dtype(x: Tensor) -> torch.dtype:
    """The dtype that `F.linear` would compute in: a replaced forward must return what the real one returns."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype


def _expanded_linear(codes: Tensor, scales: Tensor, module: nn.Linear, input: Tensor) -> Tensor:
    weight = codes.new_empty(codes.shape, dtype=_compute_dtype(input))
    return _linear(dequantize_rows(codes, scales, weight), module, input)


def _multiplied_linear(codes: Tensor, scales: Tensor, module: nn.Linear, input: Tensor) -> Tensor:
    dtype = _compute_dtype(input)
    # Quantised and scaled back here: the matching functions of bitsandbytes go through fp16, which bf16 can exceed.
    inputs, steps = quantize_rows(input.to(dtype).reshape(-1, input.shape[-1]))
    out = bitsandbytes_functional().int8_linear_matmul(inputs, codes).float().mul_(steps).mul_(scales.view(-1))
    if module.bias is not None:
        out += module.bias
    return out.to(dtype).view(*input.shape[:-1], -1)
