"""
`drift` and `snoo`: onward from where the last block of real steps moved the weights.

Both keep a copy of the weights from the beginning of the block (`anchor`) and a momentum over the displacements of
blocks. `drift` divides each displacement by the learning rates that made it and leaps along the average: it predicts
that the weights go on as they went (EMA-Nesterov, arXiv 2605.25395). `snoo` treats the displacement of a block as a
gradient and makes a Nesterov step with it around the optimizer (SNOO, arXiv 2510.15830), which is DiLoCo (arXiv
2311.08105) with one worker: with `d` the displacement,

    b <- momentum b + d        weights <- start of the block + rate (momentum b + d)
"""

from __future__ import annotations

import torch

from benchmarks.directions.history import BlockDirection
from hf_hybrid.leaps.directions import DirectionContext

Tensor = torch.Tensor

SNOO_MOMENTUM, SNOO_RATE = 0.5, 0.7
"""
The values used around a well-tuned optimizer (modded-nanogpt, track 3). The paper's 0.75 and 0.8 multiply the movement
of the weights by 3.2, which helps where the learning rate is too small.
"""


class Drift(BlockDirection):
    """EMA-Nesterov in leaps: the averaged displacement per unit of learning rate. For any optimizer."""

    name = "drift"
    gain, gain_power = 4.0, 2.0
    values_per_weight = 2
    papers = (("EMA-Nesterov", "https://arxiv.org/abs/2605.25395"),)

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
    SNOO in leaps: Nesterov momentum around the optimizer.

    At a gain of 1 a leap is `rate (momentum b + d) - d`, from where the block ended. Blocks should be longer than for
    other directions; the published ones are 20 to 100 steps.

    Args:
        context (`DirectionContext`): Parameters, optimizer and the place of buffers.
        momentum (`float`): Momentum of the outer step, 0 to 1.
        rate (`float`): Learning rate of the outer step, greater than 0.

    Raises:
        ValueError: If a number is out of its range.
    """

    name = "snoo"
    values_per_weight = 2
    papers = (
        ("SNOO: Step-K Nesterov Outer Optimizer", "https://arxiv.org/abs/2510.15830"),
        ("DiLoCo: Distributed Low-Communication Training of Language Models", "https://arxiv.org/abs/2311.08105"),
    )

    def __init__(self, context: DirectionContext, momentum: float = SNOO_MOMENTUM, rate: float = SNOO_RATE):
        super().__init__(context)
        if not 0 <= momentum <= 1:
            raise ValueError(f"`momentum` must be between 0 and 1, got {momentum}.")
        if not rate > 0:
            raise ValueError(f"`rate` must be greater than 0, got {rate}.")
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
