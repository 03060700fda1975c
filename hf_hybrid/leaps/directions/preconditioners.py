"""
From an average of the gradients to the step that the optimizer would make of it: pure functions on one parameter.

Optimizers differ in how they turn a gradient into a step. Adam divides each entry by the root of its second moment
`v`, SGD takes the gradient as it is, Muon orthogonalises a matrix. That map, without the optimizer's own momentum, is
its preconditioner. A function applies one of them to `memory`, an average of gradients, and reads what it needs (second
moments, their step count) from the optimizer's state without changing it. Results are per unit of learning rate and
point downhill. Leaps are made with Adam-type optimizers unless a direction is named, so that only their rule stands
here; integrations/other_optimizers.py has the rules of SGD, Muon and Adafactor.

Newton-Schulz, shared by Muon and the direction `orthogonal`: with the matrix scaled so that no singular value exceeds
1, repeat `X <- a X + b (X X^T) X + c (X X^T)^2 X`. The polynomial acts on each singular value alone,
`s <- a s + b s^3 + c s^5`. Muon's coefficients are not those that converge to 1: they are steep at 0, so that five
rounds lift even small singular values to somewhere between 0.7 and 1.2, which is as good for training and much faster.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from hf_hybrid.files import has_room, load_room
from hf_hybrid.optimizers import is_adam

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
        step = as_number(step)  # fused optimizers count on the device: there it stays, and nobody waits for it
    bias = 1.0 - group["betas"][1] ** step
    second_moment = state.get("max_exp_avg_sq", state["exp_avg_sq"])
    denominator = out.copy_(second_moment).div_(bias).sqrt_().add_(group.get("eps", 1e-8))
    return torch.div(memory, denominator, out=out).neg_()


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


def preconditioner_of(
    optimizer: torch.optim.Optimizer, state: Mapping[str, Any], group: Mapping[str, Any], shape: torch.Size
) -> Preconditioner | None:
    """
    The rule of an optimizer whose state is known: Adam-type with an elementwise, unquantised second moment, and those
    in integrations/other_optimizers.py; `None` for any other.
    """
    second_moment = state.get("exp_avg_sq")
    if torch.is_tensor(second_moment) and "step" in state and "betas" in group:
        return adam if second_moment.shape == shape and second_moment.is_floating_point() else None
    others = None if is_adam(optimizer) else _other_rules()
    return None if others is None else others.rule_of(optimizer, state, group, shape)


def orthogonalises(rule: Preconditioner | None) -> bool:
    """Whether a rule orthogonalises matrices, for which it needs them whole."""
    others = None if rule in (None, adam) else _other_rules()
    return others is not None and rule is others.muon


@functools.cache
def _other_rules() -> ModuleType | None:
    name = "integrations.other_optimizers"
    return load_room(name, "direction") if has_room(name) else None


def as_number(value: Any) -> float:
    """Return a number that an optimizer may keep as a tensor."""
    return value.item() if torch.is_tensor(value) else float(value)
