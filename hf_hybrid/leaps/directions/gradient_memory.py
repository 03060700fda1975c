"""
`gradient_memory`: a slow average of the gradients, passed through the optimizer's own preconditioner.

AdEMAMix (Pagliardini et al., 2024, arXiv 2409.03137) observes that gradients stay useful for thousands of steps, far
longer than the ten that Adam's `beta1 = 0.9` remembers. It adds to Adam's step a second, slow average `m2` of the
gradients, under the same second moment `v`:

    step = -lr (m1 + alpha m2) / (sqrt(v) + eps)

The slow term adds up over steps and changes little from one to the next. So it need not be part of the step: once per
block a leap can apply the slow terms of all steps in the block together, without touching the optimizer,

    leap = -gain * (sum of the block's learning rates) * m2 / (sqrt(v) + eps)

which is what this direction does with AdamW; `gain` is AdEMAMix's `alpha`. `m2` is a running mean until it has seen
`memory_steps` gradients and an exponential average from then on, so it needs no bias correction. AdEMAMix warms
`alpha` up because an early average is soon obsolete; here the gain grows with the square of the run's progress.

A leap is the step that Adam would make if the slow average were its gradient: the rule reads the second moments and
their step count from the optimizer's state without changing it. Its result is per unit of learning rate and points
downhill. Where the second moments are not there in full precision (8-bit states), only the scale can be matched: each
tensor of the average is scaled to the distance that its weights moved in the last block, per unit of learning rate. The
distance is estimated from at most 4096 evenly spaced weights, which are copied when the block begins, so that it costs
no second copy of the model. If FSDP2 shards the weights, each process does all of this on its shards.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from hf_hybrid.leaps.directions.base import Direction, DirectionContext
from hf_hybrid.run.weights import sum_of_squares

# From an average of the gradients to a step: pure functions on one parameter.

Preconditioner = Callable[[Tensor, Mapping[str, Any], Mapping[str, Any], Tensor], Tensor]
"""Takes `memory` (fp32), the parameter's optimizer state and group, and `out`, shaped as `memory`; returns `out`."""


def adam(memory: Tensor, state: Mapping[str, Any], group: Mapping[str, Any], out: Tensor) -> Tensor:
    """
    `-memory / (sqrt(v_hat) + eps)`: Adam's rule, and the slow term of AdEMAMix (Pagliardini et al., 2024, arXiv
    2409.03137).
    """
    step = state["step"]
    if not torch.is_tensor(step) or step.device != out.device or out.device.type == "cpu":
        step = (
            step.item() if torch.is_tensor(step) else float(step)
        )  # fused optimizers count on the device: there it stays, and nobody waits for it
    bias = 1.0 - group["betas"][1] ** step
    second_moment = state.get("max_exp_avg_sq", state["exp_avg_sq"])
    denominator = out.copy_(second_moment).div_(bias).sqrt_().add_(group.get("eps", 1e-8))
    return torch.div(memory, denominator, out=out).neg_()


def preconditioner_of(state: Mapping[str, Any], group: Mapping[str, Any], shape: torch.Size) -> Preconditioner | None:
    """Adam's rule, if a parameter's state has an elementwise, unquantised second moment; `None` otherwise."""
    second_moment = state.get("exp_avg_sq")
    is_adams = torch.is_tensor(second_moment) and "step" in state and "betas" in group
    return adam if is_adams and second_moment.shape == shape and second_moment.is_floating_point() else None


# The direction.


class GradientMemory(Direction):
    """
    Leaps along a slow average of the gradients, by Adam's rule (AdEMAMix, arXiv 2409.03137).

    Where Adam's second moments are not there in full precision, the average is scaled, per tensor, to the distance that
    the weights moved in the last block.
    """

    name = "gradient_memory"
    gain, gain_power = 4.0, 2.0
    papers = (("The AdEMAMix Optimizer: Better, Faster, Older", "https://arxiv.org/abs/2409.03137"),)

    def __init__(self, context: DirectionContext):
        super().__init__(context)
        self.buffers["memory"] = [context.buffer(parameter, zero=True) for parameter in context.parameters]
        self.buffers["sample"] = []
        self._scales: dict[int, float] = {}

    @torch.no_grad()
    def observe_gradients(self) -> None:
        # A running mean until the memory is full: no bias to correct from the first step on.
        weight = 1.0 / min(self.context.clock.steps_seen, self.context.memory_steps)
        memories, gradients = self.buffers["memory"], (p.grad for p in self.context.parameters)
        plain = [g for g in gradients if g is not None and g.dtype == torch.float32 and not g.is_sparse]
        if len(plain) == len(memories) and all(g.device == memory.device for g, memory in zip(plain, memories)):
            for device in {memory.device for memory in memories}:
                pairs = [(memory, g) for memory, g in zip(memories, plain) if memory.device == device]
                torch._foreach_lerp_(*(list(tensors) for tensors in zip(*pairs)), weight)  # one pass over memory
            return
        for memory in memories:
            memory.mul_(1.0 - weight)
        for index, gradient in self.context.gradients():
            memories[index].add_(gradient.float(), alpha=weight)

    @property
    def block_is_open(self) -> bool:
        # Which parameters are sampled shows in the optimizer's state, which is empty before its first update.
        if self.context.clock.steps_seen != 1 or self.buffers["sample"]:
            return True
        self.context.settle()
        return not any(self._is_sampled(index) for index in range(len(self.context.parameters)))

    def _preconditioner(self, index: int) -> Preconditioner | None:
        context = self.context
        return preconditioner_of(context.state(index), context.group(index), context.parameters[index].shape)

    def _is_sampled(self, index: int) -> bool:
        """Whether the optimizer moves this parameter by an unknown rule; some optimizers keep no states at all."""
        updated = len(self.context.state(index)) > 0 or not self.context.optimizer.state
        return updated and self._preconditioner(index) is None

    @torch.no_grad()
    def prepare(self) -> None:
        self._measure_block()

    def _measure_block(self) -> None:
        """Measure how far each sampled parameter moved in the block, over the norm of its memory."""
        context, shards, moved, counts, norms = self.context, self.context.shards, [], [], []
        sampled = [index for index, _ in enumerate(self.buffers["sample"]) if self._is_sampled(index)]
        for index in sampled:
            then = self.buffers["sample"][index]
            now = shards.sample(index, context.parameters[index]).to(then.device, torch.float32)
            moved.append([sum_of_squares(now - then)] if then.numel() else [])
            counts.append([torch.tensor(float(then.numel()))])
            norms.append([sum_of_squares(self.buffers["memory"][index])])
        self._scales = {}
        if sampled:
            found = shards.totals([*moved, *counts, *norms]).view(3, -1).T.tolist()
            for index, (square, count, norm2) in zip(sampled, found):
                lr_sum = context.lr_sum(index)
                if count and norm2 > 0 and lr_sum > 0:
                    mean_square = square / count
                    self._scales[index] = -math.sqrt(mean_square * shards.shape(index).numel() / norm2) / lr_sum

    def displacement(self, index: int, out: Tensor) -> Tensor | None:
        memory, rule = self.buffers["memory"][index], self._preconditioner(index)
        if rule is not None:
            return rule(memory, self.context.state(index), self.context.group(index), out)
        scale = self._scales.get(index)
        return None if scale is None else torch.mul(memory, scale, out=out)

    def predicted_gradient(self, index: int) -> Tensor | None:
        return self.buffers["memory"][index]

    def block_begins(self, *, undoable: bool) -> None:
        sampled = [self._is_sampled(index) for index in range(len(self.context.parameters))]
        if not any(sampled):
            self.buffers["sample"] = []
            return
        self.context.settle()
        self.buffers["sample"] = []
        for index, (is_sampled, parameter) in enumerate(zip(sampled, self.context.parameters)):
            flat = parameter.detach().reshape(-1)
            values = self.context.shards.sample(index, parameter) if is_sampled else flat[:0]
            buffer = self.context.buffer(parameter, shape=values.shape)
            self.buffers["sample"].append(buffer.copy_(values))

    def reset(self) -> None:
        for memory in self.buffers["memory"]:
            memory.zero_()
