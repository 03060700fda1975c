"""The best of five published predictors of weights (docs/why_no_prediction.md), as a user's own direction."""

from __future__ import annotations

import torch

from hf_hybrid import Direction
from hf_hybrid.leaps.directions import DirectionContext

Tensor = torch.Tensor


class Drift(Direction):
    """
    EMA-Nesterov in leaps: the weights go on as they went. Keeps them as they were when the block began (`anchor`), and
    the average over blocks of how far they moved per unit of learning rate (`memory`).
    """

    name = "drift"
    gain, gain_power = 4.0, 2.0
    values_per_weight = 2
    papers = (("EMA-Nesterov", "https://arxiv.org/abs/2605.25395"),)

    def __init__(self, context: DirectionContext):
        super().__init__(context)
        self.buffers["anchor"] = []
        self.buffers["memory"] = [context.buffer(parameter, zero=True) for parameter in context.parameters]

    @property
    def block_is_open(self) -> bool:
        return bool(self.buffers["anchor"])

    def block_begins(self, *, undoable: bool) -> None:
        self.context.finish_updates()
        if not self.buffers["anchor"]:
            self.buffers["anchor"] = [self.context.buffer(parameter) for parameter in self.context.parameters]
        for anchor, parameter in zip(self.buffers["anchor"], self.context.parameters):
            anchor.copy_(parameter.detach())

    @torch.no_grad()
    def prepare(self) -> None:
        clock = self.context.clock
        weight = min(1.0, clock.steps_in_block / min(max(clock.steps_seen, 1), self.context.memory_steps))
        for index, (anchor, memory) in enumerate(zip(self.buffers["anchor"], self.buffers["memory"])):
            lr_sum = self.context.lr_sum(index)
            if lr_sum > 0:
                moved = self.context.scratch(memory, memory.device).copy_(self.context.parameters[index].detach())
                memory.lerp_(moved.sub_(anchor).div_(lr_sum), weight)

    def displacement(self, index: int, out: Tensor) -> Tensor | None:
        return out.copy_(self.buffers["memory"][index])

    def reset(self) -> None:
        for memory in self.buffers["memory"]:
            memory.zero_()
