"""`drift` and `snoo`: along the way that the weights went since the last leap."""

from __future__ import annotations

import torch

from hf_hybrid.leaps.directions.base import BlockDirection, DirectionContext

Tensor = torch.Tensor

SNOO_MOMENTUM, SNOO_RATE = 0.5, 0.7
"""
What was used around a well-tuned optimizer (modded-nanogpt, track 3). The paper's 0.75 and 0.8 multiply the way of the
weights by 3.2, which pays where the learning rate is too small.
"""


class Drift(BlockDirection):
    """EMA-Nesterov (arXiv 2605.25395) in leaps: the low-pass displacement per unit of learning rate. Any optimizer."""

    name = "drift"

    def __init__(self, context: DirectionContext):
        super().__init__(context)
        self.buffers["memory"] = [context.buffer(parameter, zero=True) for parameter in context.parameters]

    @torch.no_grad()
    def prepare(self) -> None:
        if not self.block_is_open:
            return
        clock = self.context.clock
        weight = min(1.0, clock.steps_in_block / min(max(clock.steps_seen, 1), self.context.memory_steps))
        for index, memory in enumerate(self.buffers["memory"]):
            lr_sum = self.context.lr_sum(index)
            if lr_sum > 0:
                moved = self.moved(index, self.context.scratch(memory, memory.device))
                memory.lerp_(moved.div_(lr_sum), weight)

    def displacement(self, index: int, out: Tensor) -> Tensor | None:
        return out.copy_(self.buffers["memory"][index])

    def reset(self) -> None:
        for memory in self.buffers["memory"]:
            memory.zero_()


class Snoo(BlockDirection):
    """
    SNOO (arXiv 2510.15830), which is DiLoCo (arXiv 2311.08105) with one worker: Nesterov momentum around the optimizer.

    With `d` the displacement of a block, `b <- momentum b + d`, and the weights go `rate (momentum b + d)` from where
    the block began: at a gain of 1 a leap is `rate (momentum b + d) - d`. Blocks should be longer than for other
    directions; the published ones are 20 to 100 steps.

    Args:
        context (`DirectionContext`): Parameters, optimizer and where buffers belong.
        momentum (`float`): Of the outer step, 0 to 1.
        rate (`float`): Of the outer step.
    """

    name = "snoo"

    def __init__(self, context: DirectionContext, momentum: float = SNOO_MOMENTUM, rate: float = SNOO_RATE):
        super().__init__(context)
        self.momentum, self.rate = momentum, rate
        self.buffers["memory"] = [context.buffer(parameter, zero=True) for parameter in context.parameters]

    @property
    def ready(self) -> bool:
        return self.block_is_open

    @torch.no_grad()
    def prepare(self) -> None:
        if self.block_is_open:
            for index, memory in enumerate(self.buffers["memory"]):
                memory.mul_(self.momentum).add_(self.moved(index, self.context.scratch(memory, memory.device)))

    def displacement(self, index: int, out: Tensor) -> Tensor | None:
        lr_sum = self.context.lr_sum(index)
        if not self.block_is_open or lr_sum <= 0:
            return None
        outer = self.moved(index, out).mul_(self.rate - 1.0)
        return outer.add_(self.buffers["memory"][index], alpha=self.rate * self.momentum).div_(lr_sum)

    def reset(self) -> None:
        for memory in self.buffers["memory"]:
            memory.zero_()
