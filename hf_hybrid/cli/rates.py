"""What this machine copies and multiplies per second, and the least time of a step at these rates."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from hf_hybrid.machine import copies_beside
from hf_hybrid.plan.accounting import WeightCount
from hf_hybrid.plan.estimate import Plan
from hf_hybrid.plan.traffic import step_traffic


def measure_machine(seconds: float = 0.1, size: int = 8192) -> dict[str, float]:
    """
    Measure rates of this machine, each for a number of seconds.

    Bytes per second: `"dram"`, read and written by a copy in host memory, and on a GPU `"h2d"` and `"d2h"` (pinned).
    bf16 operations per second: `"flops"` of products of `size`-square matrices, which training does not exceed.
    """
    source, target = torch.ones(2**27, dtype=torch.uint8), torch.zeros(2**27, dtype=torch.uint8)  # beyond most caches
    rates = {"dram": 2 * source.nbytes * _per_second(lambda: target.copy_(source), seconds)}
    device = torch.accelerator.current_accelerator(check_available=True)
    if device is not None and copies_beside(device):
        pinned, there = source.pin_memory(), source.to(device)
        rates["h2d"] = pinned.nbytes * _per_second(lambda: there.copy_(pinned, non_blocking=True), seconds)
        rates["d2h"] = pinned.nbytes * _per_second(lambda: pinned.copy_(there, non_blocking=True), seconds)
        left = torch.randn(size, size, dtype=torch.bfloat16, device=device)
        result = left @ left
        rates["flops"] = 2 * size**3 * _per_second(lambda: torch.mm(left, left, out=result), seconds)
    return rates


def _per_second(work: Callable[[], object], seconds: float) -> float:
    wait = torch.accelerator.synchronize if torch.accelerator.is_available() else lambda: None
    work()
    wait()
    count, start = 0, time.perf_counter()
    while time.perf_counter() - start < seconds:
        work()
        wait()
        count += 1
    return count / (time.perf_counter() - start)


def step_floor_seconds(plan: Plan, tokens_per_step: int, rates: dict[str, float]) -> float:
    """
    Return the least seconds of an optimizer step: the longest of computing (without attention) and copying.

    `tokens_per_step` counts all micro-batches; `rates` are those of `measure_machine`, some of which may be missing.
    """
    recomputed = 1.0 if plan.mode == "streamed" else plan.recomputed_layers / max(len(plan.shape.layers), 1)
    # A lookup multiplies nothing, unless the head is made of the same weights.
    lookup, total = WeightCount() if plan.shape.tied else plan.shape.embedding, plan.shape.total
    products, trained = total.weights - lookup.weights, total.trainable - lookup.trainable
    seconds = tokens_per_step * ((4 + 2 * recomputed) * products + 2 * trained) / rates["flops"]
    return max([seconds, *(count / rates[name] for name, count in step_traffic(plan).items() if rates.get(name))])
