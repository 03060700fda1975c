"""
Low precision: AdamW with 8-bit moments, bf16 weights with stochastic rounding, int8 weights.

**8-bit moments** (Dettmers et al., 2022, arXiv 2110.02861). AdamW's two moments take eight bytes per weight in fp32.
They are averages, and a step divides one by the root of the other, so they need a good relative precision over many
orders of magnitude rather than many digits. The paper codes each value in 8 bits of a *dynamic* map, whose 256 values
are dense near zero and sparse near one, in units of the largest magnitude of its block. Blocks of 256 values keep one
outlier from spoiling more than its neighbours. The kernels of bitsandbytes decode a block, update it in fp32 and code
it again.

**Stochastic rounding.** bf16 has 8 significant bits. An update below 1/256 of a weight would be rounded away, and at
usual learning rates most updates are. Usually a copy of the weights in fp32 catches them. Without one, the updated
weight is rounded up or down at random, with the probabilities that make its expectation exact: small updates then add
up on average. The random bits depend only on the seed, on the parameter and on its own step count, so a run that is
resumed, or that steps its parameters in another order, is equal bit for bit. Streamed layers need this.

**int8 rows.** Frozen weights, and weights of probes, are stored as 255 even steps between plus and minus the largest
magnitude of each row: a byte per weight. They are multiplied out to the dtype of the computation before use.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

BLOCK = 256
"""Elements that share one scale; the kernels of bitsandbytes know no other size for optimizer states."""
LEAST_QUANTIZED = 4096
"""Smaller parameters (norms, biases) keep fp32 moments, as in bitsandbytes: they are sensitive and weigh nothing."""
CHUNK = 2**24
"""Elements updated at a time, a multiple of `BLOCK`: the fp32 scratch of a large embedding stays small."""
ROWS_CHUNK = 2**20
"""Elements held in fp32 at a time while rows are quantised."""
_ZERO = 127
"""The signed code of zero."""
_ON_HOST = ("step", "rounding_id")


def bitsandbytes_functional() -> Any:
    """
    `bitsandbytes.functional`, imported when it is first needed: it is an optional dependency.

    Raises:
        ImportError: If bitsandbytes is not installed.
    """
    try:
        import bitsandbytes.functional as functional
    except ImportError as error:
        raise ImportError(
            'Computing in 8 bits needs bitsandbytes. Install it with `pip install "hf-hybrid[quantization]"`.'
        ) from error
    return functional


@functools.cache
def dynamic_map(signed: bool, device: torch.device) -> Tensor:
    """The values of the 256 codes in units of a block's scale: the dynamic map of the paper."""
    return bitsandbytes_functional().create_dynamic_map(signed=signed).to(device)


@functools.cache
def _false_zero(device: torch.device) -> int:
    """
    The code that bitsandbytes gives to zero between signed values.

    Its CPU kernel looks values up in a table of even steps, and the middle one stands for 1e-5 of the largest. Weights
    without gradients would drift by half a percent of every update.
    """
    pair = torch.tensor([0.0, 1.0], device=device)
    codes, _ = bitsandbytes_functional().quantize_blockwise(pair, code=dynamic_map(True, device), blocksize=BLOCK)
    return int(codes[0])


def clear_false_zeros_(codes: Tensor) -> Tensor:
    """Correct signed codes that bitsandbytes gave to zero. On a GPU there are none."""
    false = _false_zero(codes.device)
    return codes if false == _ZERO else codes.masked_fill_(codes == false, _ZERO)


@torch.no_grad()
def stochastic_round_(target: Tensor, source: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """
    Round the fp32 values of `source` into the bf16 `target`, up or down at random so that the expectation is exact.

    Representable values, infinite ones and NaN stay as they are. `generator` gives the random bits, on the device of
    both. Returns `target`.
    """
    if target.dtype != torch.bfloat16 or source.dtype != torch.float32:
        raise ValueError(
            f"`target` must be bf16 and `source` fp32, got `{target.dtype}` and `{source.dtype}`. Convert them first."
        )
    # bf16 is the upper half of fp32: 16 random bits added to the lower half carry with just the right probability.
    bits = torch.randint(1 << 16, source.shape, dtype=torch.int32, device=source.device, generator=generator)
    bits.add_(source.view(torch.int32)).bitwise_and_(-(1 << 16))
    # A carry turns NaN into anything; infinity has no lower bits to carry from.
    return target.copy_(torch.where(source.isnan(), source, bits.view(torch.float32)))


class AdamW8bit(torch.optim.Optimizer):
    """
    Decoupled AdamW whose moments take two bytes per weight instead of eight, through the kernels of bitsandbytes.

    fp32 weights are updated as they are. bf16 weights are updated in fp32 and rounded stochastically, by random numbers
    of `seed`; without `stochastic_rounding` to the nearest. The other arguments are those of `torch.optim.AdamW`.

    Raises:
        ImportError: If bitsandbytes is not installed.
        ValueError: If a value is out of range; at the first step also if a weight is neither fp32 nor bf16.
    """

    def __init__(
        self,
        params: Iterable,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        stochastic_rounding: bool = True,
        seed: int = 0,
    ):
        bitsandbytes_functional()
        for name, value in (("lr", lr), ("eps", eps), ("weight_decay", weight_decay)):
            if value < 0:
                raise ValueError(f"`{name}` must not be negative, got {value}.")
        if not all(0 <= beta < 1 for beta in betas):
            raise ValueError(f"`betas` must lie in [0, 1), got {betas}.")
        # Options stand in the group, so that an optimizer that is built from a part of the group behaves the same.
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, {**defaults, "stochastic_rounding": stochastic_rounding, "seed": seed})

    def add_param_group(self, param_group: dict) -> None:
        super().add_param_group(param_group)
        self._number_parameters()

    def _number_parameters(self) -> None:
        """Give each parameter a number for its random bits, in its state, which optimizers may share."""
        for index, parameter in enumerate(_parameters(self.param_groups)):
            self.state[parameter].setdefault("rounding_id", torch.tensor(index))

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient."""
        with torch.enable_grad():
            loss = None if closure is None else closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, parameter.grad, group)
        return loss

    def _update(self, parameter: Tensor, gradient: Tensor, group: dict) -> None:
        state = self.state[parameter]
        if "step" not in state:
            self._begin(parameter, state)
        if not parameter.is_contiguous():
            parameter.data = parameter.data.contiguous()  # blocks are runs of memory
        state["step"] += 1
        step = int(state["step"])
        update = _update_8bit if "exp_avg_8bit" in state else _update_fp32
        generator = None
        if parameter.dtype != torch.float32 and group["stochastic_rounding"]:
            seed = _mixed(group["seed"], int(state["rounding_id"]), step)
            generator = torch.Generator(parameter.device).manual_seed(seed)
        weights, gradient = parameter.detach().view(-1), gradient.reshape(-1)
        for start in range(0, parameter.numel(), CHUNK):
            part = slice(start, min(start + CHUNK, parameter.numel()))
            rounded = weights[part]
            exact = rounded.float()  # fp32 weights themselves, or a copy
            update(exact, gradient[part].float(), state, part, group, step)
            if generator is not None:
                stochastic_round_(rounded, exact, generator)
            elif rounded.dtype != exact.dtype:
                rounded.copy_(exact)

    def _begin(self, parameter: Tensor, state: dict) -> None:
        if parameter.dtype not in (torch.float32, torch.bfloat16):
            raise ValueError(
                f"`AdamW8bit` trains fp32 and bf16 weights, got `{parameter.dtype}`. Load the model with "
                "`dtype=torch.bfloat16` or `dtype=torch.float32`."
            )
        if "rounding_id" not in state:
            self._number_parameters()
        state["step"] = torch.tensor(0.0)
        zeros, blocks = functools.partial(torch.zeros, device=parameter.device), math.ceil(parameter.numel() / BLOCK)
        for name in ("exp_avg", "exp_avg_sq"):
            if parameter.numel() < LEAST_QUANTIZED:
                state[name] = zeros(parameter.shape, dtype=torch.float32)
            else:  # not the usual names: readers of an `exp_avg_sq` in the parameter's shape expect the moment itself
                state[f"{name}_8bit"] = zeros(parameter.shape, dtype=torch.uint8)
                state[f"{name}_absmax"] = zeros(blocks, dtype=torch.float32)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """
        Restore a `state_dict`, to the last bit.

        Raises:
            ValueError: If it is of another optimizer or of other parameters.
        """
        if any("stochastic_rounding" not in group for group in state_dict["param_groups"]):
            raise ValueError(
                "`state_dict` was written by another optimizer, not `AdamW8bit`. Resume with that one, or load only "
                "the weights of the checkpoint."
            )
        # The base class casts states to the dtype of their parameters, which would turn codes into weights.
        super().load_state_dict({**state_dict, "state": {}})
        for index, parameter in zip(_parameters(state_dict["param_groups"]), _parameters(self.param_groups)):
            self.state[parameter] = {
                name: value.to("cpu" if name in _ON_HOST else parameter.device, copy=True)
                for name, value in state_dict["state"].get(index, {}).items()
            }
        self._number_parameters()


def _parameters(groups: list[dict]) -> list:
    return [parameter for group in groups for parameter in group["params"]]


def _mixed(seed: int, identity: int, step: int) -> int:
    """A seed for three numbers, far from that of their neighbours (splitmix64). torch's CPU generator uses 32 bits."""
    mask, value = 2**64 - 1, 0
    for number in (seed, identity, step):
        value = (value + number + 0x9E3779B97F4A7C15) & mask
        value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & mask
        value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & mask
        value ^= value >> 31
    return value >> 1


def _update_8bit(weights: Tensor, gradient: Tensor, state: dict, part: slice, group: dict, step: int) -> None:
    """Update the slice `part` of a parameter, flat and fp32."""
    blocks = slice(part.start // BLOCK, math.ceil(part.stop / BLOCK))
    beta1, beta2 = group["betas"]
    first, second = state["exp_avg_8bit"].view(-1)[part], state["exp_avg_sq_8bit"].view(-1)[part]
    bitsandbytes_functional().optimizer_update_8bit_blockwise(
        "adam", gradient, weights, first, second,
        beta1, beta2, 0.0, 0.0, group["eps"], step, float(group["lr"]),
        dynamic_map(True, weights.device), dynamic_map(False, weights.device),
        state["exp_avg_absmax"][blocks], state["exp_avg_sq_absmax"][blocks],
        weight_decay=group["weight_decay"],
    )  # fmt: skip
    clear_false_zeros_(first)


def _update_fp32(weights: Tensor, gradient: Tensor, state: dict, part: slice, group: dict, step: int) -> None:
    """The arithmetic of `torch.optim.AdamW`, operation by operation."""
    (beta1, beta2), lr = group["betas"], float(group["lr"])
    first, second = state["exp_avg"].view(-1)[part], state["exp_avg_sq"].view(-1)[part]
    weights.mul_(1 - lr * group["weight_decay"])
    first.lerp_(gradient, 1 - beta1)
    second.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
    denominator = (second.sqrt() / math.sqrt(1 - beta2**step)).add_(group["eps"])
    weights.addcdiv_(first, denominator, value=-lr / (1 - beta1**step))


@torch.no_grad()
def quantize_rows(weight: Tensor) -> tuple[Tensor, Tensor]:
    """
    Round every row (along the last dimension) to 255 even steps between plus and minus its largest magnitude.

    An element is off by at most half a step, `absmax(row) / 254`. Zeros stay zeros; a row that holds NaN or an infinity
    comes back as NaN, so that a broken weight is not mistaken for a good one. Returns int8 codes of the same shape, and
    the steps as fp32 scales of shape `[..., 1]`.

    Raises:
        ValueError: If `weight` is not floating-point or has fewer than two dimensions.
    """
    if weight.ndim < 2 or not weight.is_floating_point():
        raise ValueError(
            f"`weight` must be a floating-point matrix or a stack of them, got `{weight.dtype}` of shape "
            f"`{tuple(weight.shape)}`. Leave vectors (norms, biases) unquantised; they are small."
        )
    codes = torch.empty(weight.shape, dtype=torch.int8, device=weight.device)
    scales = torch.empty((*weight.shape[:-1], 1), dtype=torch.float32, device=weight.device)
    rows = max(1, ROWS_CHUNK // max(weight.shape[-1], 1))
    parts = (tensor.flatten(0, -2).split(rows) for tensor in (weight.detach(), codes, scales))
    for part, code, scale in zip(*parts):
        part = part.float()
        # The smallest normal number keeps rows of zeros from dividing by zero; NaN passes through.
        scale.copy_(part.abs().amax(dim=1, keepdim=True).div_(127).clamp_(min=torch.finfo(torch.float32).tiny))
        code.copy_((part / scale).round_())
    return codes, scales


@torch.no_grad()
def dequantize_rows(codes: Tensor, scales: Tensor, out: Tensor) -> Tensor:
    """
    Write what [`quantize_rows`] stored into `out`, multiplied in fp32 and rounded once to the dtype of `out`.

    `out` is preallocated, in the shape of `codes` and on their device, of any floating-point dtype.

    Raises:
        ValueError: If the shapes do not belong together.
    """
    if out.shape != codes.shape or scales.shape != (*codes.shape[:-1], 1):
        raise ValueError(
            f"`codes` of shape `{tuple(codes.shape)}` need `out` of the same shape and `scales` of one column, got "
            f"`{tuple(out.shape)}` and `{tuple(scales.shape)}`. Pass the pair as `quantize_rows` gave it."
        )
    return torch.mul(codes, scales, out=out.detach())
