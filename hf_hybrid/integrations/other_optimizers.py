"""
How leaps along `gradient_memory` step under optimizers other than Adam: pure functions on one parameter.

The direction loads this room when it is named and the optimizer is none of Adam's. leaps/directions/gradient_memory.py
explains what a preconditioner is. Leaps under these optimizers were not measured to pay (docs/evaluation/leaps.md).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from hf_hybrid.leaps.directions.gradient_memory import Preconditioner, as_number
from hf_hybrid.optimizers import MUON_COEFFICIENTS, MUON_EPS, MUON_STEPS, at_once, muon_scale, orthogonalise


def sgd(memory: Tensor, state: Mapping[str, Any], group: Mapping[str, Any], out: Tensor) -> Tensor:
    """With momentum `mu`, `-memory / (1 - mu)`."""
    return torch.mul(memory, -1.0 / (1.0 - group.get("momentum", 0.0)), out=out)


def muon(memory: Tensor, state: Mapping[str, Any], group: Mapping[str, Any], out: Tensor) -> Tensor:
    """
    Minus the orthogonalised memory, scaled as `torch.optim.Muon` scales its step (Jordan et al., 2024).
    """
    buffer = state.get("momentum_buffer")
    computes_on = buffer.device if torch.is_tensor(buffer) else memory.device
    how = {
        "steps": group.get("ns_steps", MUON_STEPS),
        "coefficients": group.get("ns_coefficients", MUON_COEFFICIENTS),
        "eps": group.get("eps", MUON_EPS),
    }
    for memories, displacements in at_once(memory, out):
        displacements.copy_(orthogonalise(memories.to(computes_on), **how))
    return out.mul_(-muon_scale(memory.shape, group.get("adjust_lr_fn")))


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
    scale = max(group["eps"][1], as_number(state["RMS"])) if group["scale_parameter"] else 1.0
    return out.mul_(-scale)


def rule_of(
    optimizer: torch.optim.Optimizer, state: Mapping[str, Any], group: Mapping[str, Any], shape: torch.Size
) -> Preconditioner | None:
    """
    The rule of SGD, of Muon (`torch.optim.Muon`, or a group with `algorithm="muon"`) or of transformers' Adafactor;
    `None` for any other optimizer.
    """
    if isinstance(optimizer, torch.optim.SGD):
        return sgd
    if len(shape) in (2, 3) and (isinstance(optimizer, torch.optim.Muon) or group.get("algorithm") == "muon"):
        return muon
    if {"clip_threshold", "scale_parameter"} <= group.keys() and "RMS" in state:
        second_moment = state.get("exp_avg_sq")
        is_whole = torch.is_tensor(second_moment) and second_moment.shape == shape
        return adafactor if is_whole or "exp_avg_sq_row" in state else None
    return None
