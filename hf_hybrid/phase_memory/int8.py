"""
Int8 weights for forward-only probes. Their noise is measured before they are trusted.

A probe needs no gradients and no optimizer states, only forward passes, so it can run on rounded weights if there is no
room for a normal one. [`Int8Predict`] rounds the matrices of the layers row by row for the duration of one probed
batch, moves the training weights to the host, and restores the same parameters with the same bits afterwards. It rounds
them again for every batch, because the leap moves the weights in between.

**Is a rounded probe worth anything?** A probe compares the loss before and after a leap on the same sequences, and a
verdict rests on the mean of the paired differences and its standard error. The difference is often a thousandth of the
loss, and rounding errors can be larger. What matters is not the error of a loss but that of a difference: most of the
rounding is the same before and after, and cancels. What does not cancel shifts the differences of all sequences alike,
because int8 rounds the same weights for every sequence. No spread over sequences shows this shift, and no number of
sequences averages it out.

So it is measured ([`added_noise`]). In `"auto"`, the first few probes run in both precisions, and int8 is used only if
the squared shift of the mean, plus the squared standard error with which the shift is known, is small beside the
probe's own variance. The decision is repeated after some probes ([`NoiseMeter`]): the smaller the leaps, the more of
their effect int8 hides.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hf_hybrid.machine import copies_beside, host_tensor, wait_for
from hf_hybrid.part import Part, Phase
from hf_hybrid.streaming.low_bit import bitsandbytes_functional, dequantize_rows, quantize_rows

if TYPE_CHECKING:
    from hf_hybrid.run.run import Run

logger = logging.getLogger(__name__)


def layer_linears(model: nn.Module, min_features: int = 1) -> list[nn.Linear]:
    """
    The plain `nn.Linear` modules inside repeated layers: not the embeddings, not the head, not adapters of peft.

    Left out as well are subclasses (quantised or parametrised elsewhere), sharded weights, modules whose `forward` was
    replaced, those narrower than `min_features` on either side, and weights that a module outside shares.
    """
    found = [m for m in _inside_layers(model) if _is_plain(m) and min(m.weight.shape) >= min_features]
    chosen = set(map(id, found))
    outside = {id(p) for m in model.modules() if id(m) not in chosen for p in m.parameters(recurse=False)}
    return [module for module in found if id(module.weight) not in outside]


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
    return plain and weight.dtype in (torch.float32, torch.float16, torch.bfloat16) and "forward" not in vars(module)


def added_noise(
    full_before: Sequence[float], full_after: Sequence[float], int8_before: Sequence[float], int8_after: Sequence[float]
) -> float:
    """
    Variance that int8 adds to a paired probe, relative to the probe's own: 0.1 means ten per cent more.

    Takes the losses of the same sequences before and after a leap, in full precision and through int8. Infinite where
    int8 gave a loss that is not finite, or changed something where the leap did not.

    Raises:
        ValueError: If the four do not hold the same number of sequences, or fewer than two.
    """
    lengths = [len(losses) for losses in (full_before, full_after, int8_before, int8_after)]
    if len(set(lengths)) > 1 or lengths[0] < 2:
        raise ValueError(f"The four losses must be of the same two or more sequences, got {lengths} of them.")
    full = [before - after for before, after in zip(full_before, full_after)]
    error = [before - after - difference for before, after, difference in zip(int8_before, int8_after, full)]
    shift, added = _mean_and_error(error)
    _, own = _mean_and_error(full)
    square = shift**2 + added**2
    if math.isfinite(square) and own > 0:
        return square / own**2
    return 0.0 if square == 0 else math.inf


def _mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    mean = sum(values) / len(values)
    variance = sum((value - mean) ** 2 for value in values) / (len(values) - 1)
    return mean, math.sqrt(variance / len(values))


class NoiseMeter:
    """
    Measures the noise of int8 over a few looks, decides, and measures anew later.

    A look is what is evaluated between two real steps: the sequences before a leap and again after it. A decision
    changes only between looks, since a pair of which one half is int8 would compare nothing.
    """

    LOOKS = 3
    HOLD = 16

    def __init__(self, limit: float):
        self.limit = limit
        self.int8 = False
        self.noises: list[float] = []
        self.hold = 0
        self.looked = False  # a batch was evaluated since the last real step
        self._pairs: dict[int, list[tuple[list[float], list[float]]]] = {}

    @property
    def measuring(self) -> bool:
        return self.hold == 0

    def add(self, key: int, full: list[float], int8: list[float]) -> None:
        """Record the losses of a batch (`key`) in both precisions, at the same weights."""
        self._pairs.setdefault(key, []).append((full, int8))

    def close_look(self) -> None:
        """Complete the current look, when a real step begins or the state is saved."""
        self.hold, self.looked = max(self.hold - self.looked, 0), False
        pairs = [seen[:2] for seen in self._pairs.values() if len(seen) > 1]
        self._pairs.clear()
        losses = [[loss for pair in pairs for loss in pair[when][which]] for which in (0, 1) for when in (0, 1)]
        before, after = losses[:2]
        # A leap that changed nothing, or broke the model in full precision too, says nothing about int8.
        if len(before) < 2 or before == after or not all(map(math.isfinite, before + after)):
            return
        self.noises.append(added_noise(*losses))
        if len(self.noises) >= self.LOOKS:
            self.int8 = sum(self.noises) / len(self.noises) < self.limit  # an infinity too
            verdict = "used" if self.int8 else "not used"
            logger.info("int8 adds %s of a probe's variance (limit %g): it is %s.", self.noises, self.limit, verdict)
            self.noises, self.hold = [], self.HOLD

    def state_dict(self) -> dict:
        self.close_look()
        return {name: getattr(self, name) for name in ("int8", "noises", "hold")}

    def load_state_dict(self, state: dict) -> None:
        self.int8, self.hold = state["int8"], state["hold"]
        self.noises = [float(noise) for noise in state["noises"]]  # an infinity is saved as a string


class Int8Predict(Part):
    """
    Forward-only probes with int8 weights in the layers' `nn.Linear` modules; training weights are never rounded.

    Worth it where a probe would not fit beside gradients and optimizer states. It saves no time by itself, and with
    `offload_master` the weights travel to the host and back for each batch.

    Args:
        mode (`str`): `"on"`, or `"auto"`: only while int8 is measured to add little noise to the paired differences.
            That needs [`probe_losses`] around what evaluates a probe's batch; without it `"auto"` never uses int8.
        engine (`str`): `"torch"` expands each matrix to the dtype of the computation while it is used: only the weights
            are rounded. `"bitsandbytes"` multiplies int8 by int8, so the inputs of every layer are rounded as well:
            faster where int8 units are, and noisier. Option: `weight_precision="predict=int8_bitsandbytes"`.
        offload_master (`bool`): Park the weights in host memory during the probe; without it int8 comes on top of them.
        min_features (`int`): Matrices narrower than this on either side stay as they are.
        noise_limit (`float`): Added variance below which `"auto"` uses int8, relative to the probe's own.
    """

    name = "int8_predict"

    def __init__(
        self,
        mode: str = "auto",
        *,
        engine: str = "torch",
        offload_master: bool = True,
        min_features: int = 256,
        noise_limit: float = 0.1,
    ):
        for name, value, choices in (("mode", mode, ("auto", "on")), ("engine", engine, ("torch", "bitsandbytes"))):
            if value not in choices:
                raise ValueError(f"`{name}` must be one of {', '.join(choices)}, got `{value}`.")
        if not noise_limit > 0:
            raise ValueError(f"`noise_limit` must be greater than 0, got `{noise_limit}`; 0.1 is 10 % more variance.")
        self.mode, self.engine = mode, engine
        self.offload_master, self.min_features = offload_master, min_features
        multiply = None if engine == "torch" else bitsandbytes_functional().int8_linear_matmul
        self._forward = _expanded_linear if multiply is None else partial(_int8_linear, multiply)
        self.meter = NoiseMeter(noise_limit)
        self._linears: list[nn.Linear] = []
        self._parked: list[tuple[Tensor, Tensor]] = []
        self._forced = False

    def begin(self, run: Run) -> None:
        model: Any = run.model
        self._linears = layer_linears(model, self.min_features)
        if not self._linears and self.mode == "on":
            raise ValueError(
                f'`Int8Predict(mode="on")` found no `nn.Linear` of at least `min_features={self.min_features}` in the '
                "layers of the model. Lower `min_features`, or train without it."
            )

    def probe_losses(self, evaluate: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Wrap the evaluation of a batch to losses per sequence. While measuring it runs twice; the full ones count."""

        def losses(batch: Any) -> Any:
            result = evaluate(batch)
            self.meter.looked = True
            if self.mode == "auto" and self.meter.measuring and self._linears:
                self._forced = True
                try:
                    self.meter.add(id(batch), result.values, evaluate(batch).values)
                finally:
                    self._forced = False
            return result

        return losses

    def before_forward(self, phase: Phase | None) -> None:
        self.meter.close_look()

    def before_probe(self) -> None:
        if self.mode == "on" or self._forced or (self.meter.int8 and not self.meter.measuring):
            try:
                self._quantize()
            except BaseException:  # out of memory half-way: the caller has not begun, so it will not end
                self.after_probe()
                raise

    def after_probe(self) -> None:
        for module in self._linears:
            vars(module).pop("forward", None)
        coming = []
        while self._parked:
            weight, host = self._parked[-1]
            weight.data = host.to(weight.device, non_blocking=copies_beside(weight.device))
            coming.append(self._parked.pop())
        for device in {weight.device for weight, _ in coming if copies_beside(weight.device)}:
            wait_for(device)  # what is copied from is freed as this returns

    def end(self) -> None:
        self.after_probe()
        self._linears = []

    def state_dict(self) -> dict:
        return self.meter.state_dict()

    def load_state_dict(self, state: dict) -> None:
        self.meter.load_state_dict(state)

    def _quantize(self) -> None:
        stored: dict[int, tuple[Tensor, Tensor]] = {}
        for module in self._linears:
            weight = module.weight
            if id(weight) not in stored:
                stored[id(weight)] = quantize_rows(weight)
                if self.offload_master:
                    self._park(weight)
            module.forward = partial(self._forward, module, *stored[id(weight)])

    def _park(self, weight: Tensor) -> None:
        beside = copies_beside(weight.device)
        # Nobody reads it before it is copied back, on the same stream.
        host = host_tensor(weight.shape, weight.dtype, pin=beside).copy_(weight.data, non_blocking=beside)
        self._parked.append((weight, host))
        # One NaN seen as the whole matrix: shape and dtype are right, and using it by mistake gives NaN.
        weight.data = weight.data.new_full((), math.nan).expand(weight.shape)


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
