"""No step is faster: floors from rates that were measured on this machine."""

from __future__ import annotations

import time

import torch

from hf_hybrid.plan.accounting import measure_machine
from hf_hybrid.plan.fit import step_floor_seconds
from hf_hybrid.plan.plans import TrainingPlan

_SIDE, _SECONDS = 8192, 0.2


def machine_rates() -> dict[str, float] | None:
    """
    Bytes per second to and from the device and in host memory, and bf16 operations per second; `None` without a GPU.

    Returns:
        `dict[str, float]`: `"h2d"`, `"d2h"`, `"dram"` and `"flops"`.
    """
    if not torch.cuda.is_available():
        return None
    return {**measure_machine(), "flops": _matrix_rate()}


def _matrix_rate() -> float:
    """Of products of large square matrices, which training does not exceed."""
    left = torch.randn(_SIDE, _SIDE, dtype=torch.bfloat16, device="cuda")
    result = left @ left
    torch.cuda.synchronize()
    products, start = 0, time.perf_counter()
    while time.perf_counter() - start < _SECONDS:
        torch.mm(left, left, out=result)
        torch.cuda.synchronize()
        products += 1
    return products * 2 * _SIDE**3 / (time.perf_counter() - start)


def floor_seconds(plan: TrainingPlan, tokens_per_step: int, rates: dict[str, float]) -> float:
    """
    Seconds that no optimizer step of the plan is faster than: the longest of computing (without attention) and moving.

    Args:
        plan ([`TrainingPlan`]): Of the machine that was measured.
        tokens_per_step (`int`): Of all micro-batches.
        rates (`dict[str, float]`): What [`machine_rates`] found.
    """
    moves = {name: rates[name] for name in ("h2d", "d2h", "dram")}
    return step_floor_seconds(plan.shape, plan.memory_plan, tokens_per_step, rates["flops"], **moves)
