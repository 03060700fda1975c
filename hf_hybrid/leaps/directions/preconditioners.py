"""
From an average of the gradients to the step that the optimizer would make of it: pure functions on one parameter.

Optimizers differ in how they turn a gradient into a step. Adam divides each entry by the root of its second moment
`v`, SGD takes the gradient as it is, Muon orthogonalises a matrix, Adafactor divides by a second moment that it keeps
as one mean per row and one per column. That map, without the optimizer's own momentum, is its preconditioner. Each
function here applies one of them to `memory`, an average of gradients, and reads what it needs (second moments, their
step count) from the optimizer's state without changing it. Results are per unit of learning rate and point downhill.

Newton-Schulz, shared by Muon and the direction `orthogonal`: with the matrix scaled so that no singular value exceeds
1, repeat `X <- a X + b (X X^T) X + c (X X^T)^2 X`. The polynomial acts on each singular value alone,
`s <- a s + b s^3 + c s^5`. Muon's coefficients are not those that converge to 1: they are steep at 0, so that five
rounds lift even small singular values to somewhere between 0.7 and 1.2, which is as good for training and much faster.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

Preconditioner = Callable[[Tensor, Mapping[str, Any], Mapping[str, Any], Tensor], Tensor]
"""Takes `memory` (fp32), the parameter's optimizer state and group, and `out`, shaped as `memory`; returns `out`."""

MUON_COEFFICIENTS, MUON_STEPS, MUON_EPS = (3.4445, -4.7750, 2.0315), 5, 1e-7
"""Muon's Newton-Schulz iteration (Jordan et al., 2024), where a parameter group does not say otherwise."""


def adam(memory: Tensor, state: Mapping[str, Any], group: Mapping[str, Any], out: Tensor) -> Tensor:
    """
    `-memory / (sqrt(v_hat) + eps)`: Adam's rule, and the slow term of AdEMAMix (Pagliardini et al., 2024, arXiv
    2409.03137).
    """
    step = state["step"]
    if not torch.is_tensor(step) or step.device != out.device or out.device.type == "cpu":
        step = _as_number(step)  # fused optimizers count on the device: there it stays, and nobody waits for it
    bias = 1.0 - group["betas"][1] ** step
    second_moment = state.get("max_exp_avg_sq", state["exp_avg_sq"])
    denominator = out.copy_(second_moment).div_(bias).sqrt_().add_(group.get("eps", 1e-8))
    return torch.div(memory, denominator, out=out).neg_()


def sgd(memory: Tensor, state: Mapping[str, Any], group: Mapping[str, Any], out: Tensor) -> Tensor:
    """With momentum `mu`, `-memory / (1 - mu)`."""
    return torch.mul(memory, -1.0 / (1.0 - group.get("momentum", 0.0)), out=out)


def muon(memory: Tensor, state: Mapping[str, Any], group: Mapping[str, Any], out: Tensor) -> Tensor:
    """
    Minus the orthogonalised memory, scaled as `torch.optim.Muon` scales its step (Jordan et al., 2024): `"original"`
    by `sqrt(max(1, rows / columns))`, `"match_rms_adamw"` by `0.2 sqrt(max(rows, columns))` (Liu et al., 2025,
    arXiv 2502.16982).
    """
    buffer = state.get("momentum_buffer")
    computes_on = buffer.device if torch.is_tensor(buffer) else memory.device
    rows, columns = memory.shape
    if group.get("adjust_lr_fn") == "match_rms_adamw":
        scale = 0.2 * math.sqrt(max(rows, columns))
    else:
        scale = math.sqrt(max(1.0, rows / columns))
    orthogonal = orthogonalise(
        memory.to(computes_on),
        steps=group.get("ns_steps", MUON_STEPS),
        coefficients=group.get("ns_coefficients", MUON_COEFFICIENTS),
        eps=group.get("eps", MUON_EPS),
    )
    return out.copy_(orthogonal).mul_(-scale)


SMALL = 2**18
"""Elements of a matrix that a GPU orthogonalises in fp32 as fast as in bf16, since launches take most of the time."""


def orthogonalise(
    matrix: Tensor,
    *,
    steps: int = MUON_STEPS,
    coefficients: tuple[float, float, float] = MUON_COEFFICIENTS,
    eps: float = MUON_EPS,
) -> Tensor:
    """
    Muon's quintic Newton-Schulz iteration on `[rows, columns]`: moves all singular values near 1.

    It computes in bf16, as `torch.optim.Muon` does; in fp32 on a CPU, where bf16 is several times slower, and for
    matrices that are too small to keep a GPU busy.
    """
    a, b, c = coefficients
    x = matrix.float() if matrix.device.type == "cpu" or matrix.numel() <= SMALL else matrix.bfloat16()
    is_tall = x.shape[0] > x.shape[1]
    x = x.T if is_tall else x
    x = x / x.norm().clamp(min=eps)  # Frobenius, so that no singular value exceeds 1
    for _ in range(steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if is_tall else x


def orthogonalisation_flops(shape: torch.Size, steps: int = MUON_STEPS) -> float:
    """Floating-point operations of [`orthogonalise`] on a matrix of this shape."""
    short, long = sorted(shape)
    return steps * (4.0 * short**2 * long + 2.0 * short**3)


def adafactor(memory: Tensor, state: Mapping[str, Any], group: Mapping[str, Any], out: Tensor) -> Tensor:
    """
    `-memory / sqrt(v)` with the factored second moment of transformers' Adafactor (Shazeer and Stern, 2018,
    arXiv 1804.04235), clipped to its root mean square and scaled with the parameter as its step is.
    """
    if "exp_avg_sq_row" in state:
        rows = state["exp_avg_sq_row"].to(out.device, torch.float32)
        columns = state["exp_avg_sq_col"].to(out.device, torch.float32)
        factor = (rows / rows.mean(dim=-1, keepdim=True)).rsqrt_().unsqueeze(-1)
        torch.mul(memory, factor, out=out).mul_(columns.rsqrt().unsqueeze(-2))
    else:
        torch.mul(memory, out.copy_(state["exp_avg_sq"]).rsqrt_(), out=out)
    mean_square = torch.dot(out.view(-1), out.view(-1)) / max(out.numel(), 1)
    out.div_((mean_square.sqrt() / group["clip_threshold"]).clamp_(min=1.0))
    scale = max(group["eps"][1], _as_number(state["RMS"])) if group["scale_parameter"] else 1.0
    return out.mul_(-scale)


def preconditioner_of(
    optimizer: torch.optim.Optimizer, state: Mapping[str, Any], group: Mapping[str, Any], shape: torch.Size
) -> Preconditioner | None:
    """
    The rule of an optimizer whose state is known: Adam-type with an elementwise, unquantised second moment, SGD, Muon
    (`torch.optim.Muon`, or a group with `algorithm="muon"`) and transformers' Adafactor; `None` for any other.
    """
    if isinstance(optimizer, torch.optim.SGD):
        return sgd
    if len(shape) == 2 and (isinstance(optimizer, torch.optim.Muon) or group.get("algorithm") == "muon"):
        return muon
    second_moment = state.get("exp_avg_sq")
    is_whole = torch.is_tensor(second_moment) and second_moment.shape == shape and second_moment.is_floating_point()
    if {"clip_threshold", "scale_parameter"} <= group.keys() and "RMS" in state:
        return adafactor if is_whole or "exp_avg_sq_row" in state else None
    return adam if is_whole and "step" in state and "betas" in group else None


def _as_number(value: Any) -> float:
    return value.item() if torch.is_tensor(value) else float(value)
