"""
Directions of a leap: pure functions from what is known about one parameter to its displacement per unit of gain.

A leap changes a parameter by `gain * lr_sum * direction`, `lr_sum` being the learning rates of the real steps since the
last leap, so that a gain of 1 doubles what those steps would have moved along the direction.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

Tensor = torch.Tensor


def gradient_memory(memory: Tensor, state: Mapping[str, Any], group: Mapping[str, Any], out: Tensor) -> Tensor | None:
    """
    Slow average of the gradients, passed through the optimizer's own preconditioner.

    For the Adam family `-memory / (sqrt(v_hat) + eps)`, the slow term of AdEMAMix (Pagliardini et al., 2024,
    arXiv 2409.03137) taken out of the step and into a leap; for SGD with momentum `mu`, `-memory / (1 - mu)`.

    Args:
        memory (`torch.Tensor`): fp32 slow average of the gradients, any shape.
        state (`Mapping`): The optimizer's state of this parameter.
        group (`Mapping`): Its parameter group.
        out (`torch.Tensor`): Where the result goes; fp32, of the shape and on the device of `memory`.

    Returns:
        `out`; `None` if the parameter was never updated.
    """
    second_moment = state.get("max_exp_avg_sq", state.get("exp_avg_sq"))
    if second_moment is not None:
        beta2 = group["betas"][1]
        bias = 1.0 - beta2 ** _as_number(state["step"])
        denominator = out.copy_(second_moment).div_(bias).sqrt_().add_(group.get("eps", 1e-8))
        return torch.div(memory, denominator, out=out).neg_()
    if "momentum_buffer" in state:
        return torch.mul(memory, -1.0 / (1.0 - group.get("momentum", 0.0)), out=out)
    return None


def drift(memory: Tensor, out: Tensor) -> Tensor:
    """Low-pass displacement per unit of learning rate: EMA-Nesterov (arXiv 2605.25395) in leaps. Any optimizer."""
    return out.copy_(memory)


def last_step(state: Mapping[str, Any], out: Tensor) -> Tensor | None:
    """Direction of Adam's last step (uphill), `exp_avg / (sqrt(exp_avg_sq) + eps)`; `None` for other optimizers."""
    first, second = state.get("exp_avg"), state.get("exp_avg_sq")
    if not torch.is_tensor(first) or not torch.is_tensor(second) or first.shape != second.shape:
        return None
    return torch.div(first.to(out.device, torch.float32), out.copy_(second).sqrt_().add_(1e-8), out=out)


def block_drift(theta: Tensor, anchor: Tensor, lr_sum: float, memory: Tensor, weight: float) -> None:
    """Fold the displacement of a block of real steps into `memory`, in place: `m += weight * (d / lr_sum - m)`."""
    displacement = theta.detach().to(memory.device, torch.float32) - anchor
    memory.lerp_(displacement.div_(lr_sum), weight)


def supports_gradient_memory(state: Mapping[str, Any], group: Mapping[str, Any], shape: torch.Size) -> bool:
    """Whether an optimizer state holds what [`gradient_memory`] preconditions with, unfactored and unquantised."""
    second_moment = state.get("exp_avg_sq")
    if torch.is_tensor(second_moment):
        return second_moment.shape == shape and "step" in state and "betas" in group
    return "momentum_buffer" in state


def _as_number(step: Any) -> float:
    return step.item() if torch.is_tensor(step) else float(step)
