"""
From an average of the gradients to the step that the optimizer would make of it: pure functions on one parameter.

Optimizers differ in how they turn a gradient into a step. Adam divides each entry by the root of its second moment
`v`, SGD takes the gradient as it is, Muon orthogonalises a matrix. That map, without the optimizer's own momentum, is
its preconditioner. A function applies one of them to `memory`, an average of gradients, and reads what it needs (second
moments, their step count) from the optimizer's state without changing it. Results are per unit of learning rate and
point downhill. Leaps are made with Adam-type optimizers unless a direction is named, so that only their rule stands
here; integrations/other_optimizers.py has the rules of SGD, Muon and Adafactor, and optimizers.py
Newton-Schulz, which Muon and the direction `orthogonal` share.
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
