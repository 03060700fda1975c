"""
What resident weights compute in, and where optimizer states are, by phase: [`PhaseMemory`].

**Working copies.** Under autocast a linear layer casts its fp32 weight to bf16 whenever it computes. Training on bf16
*working copies* of the weights, with gradients added up on fp32 *masters*, computes the same bits. The copies stand in
the modules for the length of a micro-batch or of a probe. It is useful for probes in half precision in a run without
autocast: activations are smaller, and the probe is faster if the hardware is. In real phases it saves only the casts
that autocast repeats when layers are recomputed. The price is two bytes per weight while the copies are in place.

**int8 probes.** A probe needs neither gradients nor optimizer states, so it can run on rounded weights if there is no
room for a normal one. The matrices of the layers are rounded row by row for each probed batch, and the training weights
wait on the host. A probe compares losses before and after a leap: most of the rounding is the same and cancels, and
what does not shifts the differences of all sequences alike. `int8` expands the weights with torch before each use.
`int8_bitsandbytes` multiplies int8 by int8, so the inputs of every layer are rounded as well: faster, and noisier.

**States.** AdamW keeps two values per trained weight, and no code reads them in skipped steps. On the host they come
back to the last bit. In 8 bits, values are coded in blocks of 256 with one scale each (Dettmers et al., 2022, arXiv
2110.02861, as in streaming/low_bit.py). Before an evaluation, a save or a push they are moved back, so that checkpoints
hold whole states.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hf_hybrid.machine import copies_beside, host_tensor, wait_for
from hf_hybrid.part import Part, Phase
from hf_hybrid.streaming.low_bit import (
    BLOCK,
    CHUNK,
    bitsandbytes_functional,
    clear_false_zeros_,
    dequantize_rows,
    dynamic_map,
    quantize_rows,
)
from hf_hybrid.streaming.transfers import Transfers, is_big

if TYPE_CHECKING:
    from hf_hybrid.run.run import Run

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
INT8 = ("int8", "int8_bitsandbytes")
_CHOICES = ("auto", *DTYPES, *INT8)


# What is asked for.


def parse_precision(text: str) -> dict[Phase, str]:
    """
    Read `"auto"`, `"bf16"` or `"full=bf16,correct=fp32,predict=int8"`; phases that are not named are `"auto"`.

    A word without a phase is for every phase that is not named: `"bf16,predict=int8"`.

    Raises:
        ValueError: If a phase or a precision is not known, is given twice, or is int8 outside Predict.
    """
    words: dict[str, str] = {}
    for part in text.lower().split(","):
        phase, equals, precision = (word.strip() for word in part.partition("="))
        if not equals:
            phase, precision = "", phase
        elif phase not in list(Phase):
            _refuse("phase", phase, [p.value for p in Phase], text)
        if precision not in _CHOICES:
            _refuse("precision", precision, _CHOICES, text)
        if precision in INT8 and phase != Phase.PREDICT.value:
            raise ValueError(
                f"`{precision}` in `weight_precision={text}` is for forward-only probes: write `predict={precision}`. "
                "Nothing trains in it."
            )
        if phase in words:
            raise ValueError(
                f"`weight_precision={text}` gives a precision for {f'`{phase}`' if phase else 'all phases'} twice. "
                "Keep one."
            )
        words[phase] = precision
    return {phase: words.get(phase.value, words.get("", "auto")) for phase in Phase}


def _refuse(kind: str, word: str, choices, text: str) -> None:
    close = difflib.get_close_matches(word, choices, n=1, cutoff=0.4)
    hint = f" Did you mean `{close[0]}`?" if close else ""
    raise ValueError(
        f"`{word}` in `weight_precision={text}` is not a {kind}: choose one of {', '.join(choices)}.{hint}"
    )


def resolve(precisions: Mapping[Phase, str], *, weights: str, autocast: str | None = None) -> dict[Phase, str]:
    """
    Turn a request from [`parse_precision`] into a choice for weights that are held in `weights` ([`held_precision`]).
    `auto` leaves them as they are; `autocast` is `"bf16"` or `"fp16"` if the trainer computes under it.

    Raises:
        ValueError: If a precision would need other weights or another autocast; the message says which.
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
    linears = [module for module in _inside_layers(model) if _is_plain(module)]
    chosen = set(map(id, linears))
    outside = {id(p) for m in model.modules() if id(m) not in chosen for p in m.parameters(recurse=False)}
    return [module for module in linears if id(module.weight) not in outside]


def _inside_layers(module: nn.Module, inside: bool = False) -> Iterator[nn.Linear]:
    adapters = getattr(module, "adapter_layer_names", ())  # peft: what a wrapped layer holds besides its base
    for name, child in module.named_children():
        if name in adapters:
            continue
        if inside and type(child) is nn.Linear:
            yield child
        else:
            yield from _inside_layers(child, inside or isinstance(module, nn.ModuleList))


def _is_plain(module: nn.Linear) -> bool:
    weight = module.weight
    plain = type(weight) is nn.Parameter and type(weight.data) is Tensor and not weight.is_meta
    return plain and weight.dtype in _NAMES and "forward" not in vars(module)


def held_precision(model: nn.Module) -> str:
    """The precision of the weights of the layers' plain `nn.Linear` modules: `"fp32"`, `"bf16 and fp32"`, `"none"`."""
    return " and ".join(sorted({_NAMES[module.weight.dtype] for module in layer_linears(model)})) or "none"


# The part.


class PhaseMemory(Part):
    """
    Computes chosen phases in lower precision, and keeps optimizer states elsewhere while steps are predicted.

    Gradients of working copies arrive on the fp32 masters, in fp32, as soon as autograd has finished with a layer, and
    add up there over an accumulation window. Optimizer, clipping, saving and evaluation see nothing but masters.
    Training weights are never rounded.

    Args:
        weight_precision (`str`): As [`parse_precision`] reads it.
        predict_states (`str`): Where optimizer states are in Predict: `"stay"`, `"host"` (the run is the same to the
            last bit) or `"8bit"` (quantised in place; second moments come back within a few percent).
        autocast (`str`, *optional*): `"bf16"` or `"fp16"` if the trainer computes under autocast. Without it only
            Predict can have a lower precision, and its probes then run under an autocast of their own.

    Raises:
        ValueError: If a word is not known.
        ImportError: If it needs bitsandbytes, which is not installed.
    """

    name = "phase_memory"

    def __init__(self, weight_precision: str = "auto", predict_states: str = "stay", *, autocast: str | None = None):
        self.precisions, self.autocast = parse_precision(weight_precision), autocast
        if predict_states not in ("stay", "host", "8bit"):
            raise ValueError(f"`predict_states` must be one of stay, host, 8bit, got `{predict_states}`.")
        self.predict_states = predict_states
        if predict_states == "8bit":
            bitsandbytes_functional()
        self.int8 = self.precisions[Phase.PREDICT] in INT8
        self._forward: Callable = _expanded_linear
        if self.precisions[Phase.PREDICT] == "int8_bitsandbytes":
            self._forward = partial(_int8_linear, _matmul_of_bitsandbytes())
        self._dtypes: dict[Phase, torch.dtype | None] = {}
        self._linears: list[nn.Linear] = []
        self._masters: list[tuple[nn.Linear, Tensor]] = []
        self._rounded: list[nn.Linear] = []
        self._parked: list[tuple[Tensor, Tensor]] = []
        self._probe = ExitStack()
        self._optimizer: torch.optim.Optimizer | None = None
        self._away: list[tuple[dict, str, Transfers]] = []
        self._transfers: dict[torch.device, Transfers] = {}

    def check(self, model: nn.Module) -> dict[Phase, str]:
        """
        Return the precision of each phase.

        Raises:
            ValueError: If one cannot be had with this model, this autocast or several processes.
        """
        held = held_precision(model)
        chosen = resolve(self.precisions, weights=held, autocast=self.autocast)
        lower = [phase.value for phase in Phase if phase is not Phase.PREDICT and chosen[phase] != held]
        if lower and torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1:
            raise ValueError(
                f"`{lower[0]}={chosen[Phase(lower[0])]}` works in one process only: gradients of working copies are "
                "not reduced. Leave real phases at `auto` under several processes: autocast computes the same."
            )
        return chosen

    def begin(self, run: Run) -> None:
        model: Any = run.model
        self._dtypes = {phase: DTYPES.get(precision) for phase, precision in self.check(model).items()}
        self._linears = layer_linears(model)
        self._bring_states()  # of a run that ended in an exception
        self._optimizer = run.optimizer

    def before_forward(self, phase: Phase | None) -> None:
        self._restore()
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
            self._restore()
            raise

    def after_backward(self, phase: Phase | None) -> None:
        self._restore()

    def before_probe(self) -> None:
        self.before_forward(Phase.PREDICT)
        if self._masters and self.autocast is None:
            copy = self._masters[0][0].weight
            self._probe.enter_context(torch.autocast(copy.device.type, copy.dtype))
        if self.int8:
            try:
                self._round()
            except BaseException:  # out of memory half-way: the caller has not begun, so it will not end
                self._restore()
                raise

    def after_probe(self) -> None:
        self._restore()

    def on_phase_change(self, old: Phase, new: Phase) -> None:
        self._bring_states()
        if new is Phase.PREDICT and self._optimizer is not None:
            self._send_states(self._optimizer.state)

    def before_export(self) -> None:
        self._restore()  # an export finds copies where a forward or backward pass was broken off
        self._bring_states()

    def end(self) -> None:
        self.before_export()
        self._linears, self._optimizer = [], None

    # Weights.

    def _round(self) -> None:
        stored: dict[int, tuple[Tensor, Tensor]] = {}
        for module in self._linears:
            weight = module.weight
            if id(weight) not in stored:
                stored[id(weight)] = quantize_rows(weight)
                beside = copies_beside(weight.device)
                # Nobody reads it before it is copied back, on the same stream.
                host = host_tensor(weight.shape, weight.dtype, pin=beside).copy_(weight.data, non_blocking=beside)
                self._parked.append((weight, host))
                # One NaN seen as the whole matrix: shape and dtype are right, and using it by mistake gives NaN.
                weight.data = weight.data.new_full((), math.nan).expand(weight.shape)
            module.forward = partial(self._forward, module, *stored[id(weight)])
            self._rounded.append(module)

    def _restore(self) -> None:
        """Put the masters back into the modules."""
        self._probe.close()
        while self._masters:
            module, master = self._masters.pop()
            module.weight = master
        while self._rounded:
            vars(self._rounded.pop()).pop("forward")
        coming = []
        while self._parked:
            weight, host = self._parked[-1]
            weight.data = host.to(weight.device, non_blocking=copies_beside(weight.device))
            coming.append(self._parked.pop())
        for device in {weight.device for weight, _ in coming if copies_beside(weight.device)}:
            wait_for(device)  # what is copied from is freed as this returns

    # States.

    def _send_states(self, states: dict[Tensor, dict[str, Any]]) -> None:
        for parameter, state in list(states.items()):
            if self.predict_states == "host":
                for key, value in state.items():
                    if is_big(value) and not in_host_memory(value):
                        transfers = self._transfers.setdefault(value.device, Transfers(value.device))
                        self._away.append((state, key, transfers))
                        state[key] = host_tensor(value.shape, value.dtype, pin=False)
                        transfers.send(value, state[key])
            elif self.predict_states == "8bit":
                states[parameter] = QuantizedState(state)
                for key, value in state.items():
                    if is_big(value) and value.is_floating_point() and value.shape == parameter.shape:
                        states[parameter][key] = QuantizedTensor.of(value)
        for transfers in self._transfers.values():
            transfers.finish_sending()  # the memory that they leave is wanted now

    def _bring_states(self) -> None:
        coming = [(state, key, transfers.fetch(state[key])) for state, key, transfers in self._away]
        self._away.clear()
        for state, key, fetched in coming:
            state[key] = fetched.take()
        states = {} if self._optimizer is None else self._optimizer.state
        for parameter, state in list(states.items()):
            if isinstance(state, QuantizedState):
                states[parameter] = {key: state[key] for key in state}


def in_host_memory(tensor: Tensor) -> bool:
    """Whether moving a tensor to the host would free nothing."""
    return tensor.device.type == "cpu"


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


def _matmul_of_bitsandbytes() -> Callable:
    try:
        return bitsandbytes_functional().int8_linear_matmul
    except ImportError as error:
        raise ImportError(
            "`weight_precision`: `predict=int8_bitsandbytes` multiplies with bitsandbytes, which cannot be imported. "
            'Install it with `pip install "hf-hybrid[quantization]"`, or write `predict=int8`, which needs torch alone.'
        ) from error


def _compute_dtype(x: Tensor) -> torch.dtype:
    """The dtype that `F.linear` would compute in: a replaced forward must return what the real one returns."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype


def _expanded_linear(module: nn.Linear, codes: Tensor, scales: Tensor, input: Tensor) -> Tensor:
    weight = torch.empty(codes.shape, dtype=_compute_dtype(input), device=codes.device)
    return F.linear(input, dequantize_rows(codes, scales, weight), module.bias)


def _int8_linear(matmul: Callable, module: nn.Linear, codes: Tensor, scales: Tensor, input: Tensor) -> Tensor:
    dtype = _compute_dtype(input)
    # Quantised and scaled back here: the matching functions of bitsandbytes go through fp16, which bf16 can exceed.
    inputs, steps = quantize_rows(input.to(dtype).reshape(-1, input.shape[-1]))
    out = matmul(inputs, codes).float().mul_(steps).mul_(scales.view(-1))
    if module.bias is not None:
        out += module.bias
    return out.to(dtype).view(*input.shape[:-1], -1)


@dataclass(frozen=True)
class QuantizedTensor:
    """
    A tensor in block-wise 8 bits.

    Of tensors without negative values (second moments) the square root is stored: it halves the orders of magnitude
    that the codes have to span, nothing comes back negative, and only zero comes back as zero, which a step divides by.
    """

    codes: Tensor
    absmax: Tensor
    rooted: bool
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: Tensor) -> QuantizedTensor:
        """Quantise; `tensor` is left as it is."""
        flat = tensor.reshape(-1)
        rooted = bool(flat.min() >= 0)
        codes = torch.empty(flat.shape, dtype=torch.uint8, device=flat.device)
        absmax = torch.empty(math.ceil(flat.numel() / BLOCK), dtype=torch.float32, device=flat.device)
        values_of_codes = dynamic_map(not rooted, flat.device)
        for start in range(0, flat.numel(), CHUNK):
            part = flat[start : start + CHUNK].float()
            part = part.sqrt() if rooted else part
            code, scale = bitsandbytes_functional().quantize_blockwise(part, code=values_of_codes, blocksize=BLOCK)
            if rooted:
                code.masked_fill_((code == 0) & (part > 0), 1).masked_fill_(part == 0, 0)
            else:
                clear_false_zeros_(code)
            codes[start : start + CHUNK] = code
            absmax[start // BLOCK :][: scale.absmax.numel()] = scale.absmax
        return cls(codes.view(tensor.shape), absmax, rooted, tensor.dtype)

    def restore(self) -> Tensor:
        """A new tensor of the old dtype."""
        result = torch.empty(self.codes.shape, dtype=self.dtype, device=self.codes.device)
        flat, codes = result.view(-1), self.codes.view(-1)
        values_of_codes = dynamic_map(not self.rooted, codes.device)
        for start in range(0, flat.numel(), CHUNK):
            part = codes[start : start + CHUNK]
            absmax = self.absmax[start // BLOCK :][: math.ceil(part.numel() / BLOCK)]
            values = bitsandbytes_functional().dequantize_blockwise(
                part, absmax=absmax, code=values_of_codes, blocksize=BLOCK
            )
            flat[start : start + CHUNK] = values.square_() if self.rooted else values
        return result


class QuantizedState(dict):
    """State of one parameter with tensors in 8 bits; a callback that reads one in Predict gets it restored."""

    def __getitem__(self, key: object) -> Any:
        value = super().__getitem__(key)
        return value.restore() if isinstance(value, QuantizedTensor) else value

    def get(self, key: object, default: Any = None, /) -> Any:
        return self[key] if key in self else default
