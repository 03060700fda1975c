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

Optimizers differ in how they turn a gradient into a step. Adam divides each entry by the root of its second moment `v`,
SGD takes the gradient as it is, Muon orthogonalises a matrix. That map, without the optimizer's own momentum, is its
preconditioner. This file has Adam's, because leaps are made with Adam-type optimizers unless a direction is named;
integrations/other_optimizers.py has those of SGD, Muon and Adafactor. A rule reads what it needs (second moments, their
step count) from the optimizer's state without changing it. Its results are per unit of learning rate and point
downhill. So a leap is the step that the optimizer would make if the slow average were its gradient. If the rule is
unknown (Lion, 8-bit states, ...), only its scale can be matched: each tensor of the average is scaled to the distance
that its weights moved in the last block, per unit of learning rate. The distance is estimated from at most 4096 evenly
spaced weights, which are copied when the block begins, so that it costs no second copy of the model.

If FSDP2 shards the weights, each process does all of this on its shards, except for orthogonalised matrices. These are
computed when a leap is prepared, in rounds (run/weights.py), and kept until the leap is over: a leap that is shortened
sends nothing again. Stacks of experts are sharded between experts, so the matrices that a process holds are whole.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from torch import Tensor

from hf_hybrid.leaps.directions.base import Direction, DirectionContext
from hf_hybrid.optimizers import is_adam, orthogonalisation_flops
from hf_hybrid.run.weights import Shards, sum_of_squares

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
    if is_adam(optimizer):
        return None
    from hf_hybrid.integrations.other_optimizers import rule_of

    return rule_of(optimizer, state, group, shape)


def _orthogonalises(rule: Preconditioner | None) -> bool:
    """Whether a rule orthogonalises matrices, for which it needs them whole."""
    if rule in (None, adam):
        return False
    from hf_hybrid.integrations.other_optimizers import muon

    return rule is muon


def as_number(value: Any) -> float:
    """Return a number that an optimizer may keep as a tensor."""
    return value.item() if torch.is_tensor(value) else float(value)


# The direction.


class GradientMemory(Direction):
    """
    Leaps along a slow average of the gradients, by the optimizer's own rule (AdEMAMix, arXiv 2409.03137).

    Adam-type optimizers, SGD, Muon and Adafactor make a step of the average by their own rule
    ([`preconditioner_of`]). For any other optimizer the average is scaled,
    per tensor, to the distance that the weights moved in the last block.
    """

    name = "gradient_memory"
    gain, gain_power = 4.0, 2.0
    papers = (("The AdEMAMix Optimizer: Better, Faster, Older", "https://arxiv.org/abs/2409.03137"),)

    def __init__(self, context: DirectionContext):
        super().__init__(context)
        self.buffers["memory"] = [context.buffer(parameter, zero=True) for parameter in context.parameters]
        self.buffers["sample"] = []
        self._scales: dict[int, float] = {}
        self._orthogonalised: dict[int, Tensor] = {}
        """By index, displacements that were computed together with other processes."""

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
        shape = context.parameters[index].shape
        return preconditioner_of(context.optimizer, context.state(index), context.group(index), shape)

    def _orthogonalises(self, index: int) -> bool:
        return _orthogonalises(self._preconditioner(index))

    def _is_sampled(self, index: int) -> bool:
        """Whether the optimizer moves this parameter by an unknown rule; some optimizers keep no states at all."""
        updated = len(self.context.state(index)) > 0 or not self.context.optimizer.state
        return updated and self._preconditioner(index) is None

    @torch.no_grad()
    def prepare(self) -> None:
        self._measure_block()
        shards, memories = self.context.shards, self.buffers["memory"]
        if isinstance(shards, Shards) and shards.processes > 1:
            chosen = [i for i, memory in enumerate(memories) if memory.ndim == 2 and self._orthogonalises(i)]
            tasks = [(index, shards.shape(index), memories[index]) for index in chosen]
            self._orthogonalised = dict(shards.in_rounds(tasks, self._displacement_of_whole))

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

    def _displacement_of_whole(self, index: int, memory: Tensor) -> Tensor:
        rule = cast("Preconditioner", self._preconditioner(index))  # one that orthogonalises
        return rule(memory, {}, self.context.group(index), torch.empty_like(memory))

    def displacement(self, index: int, out: Tensor) -> Tensor | None:
        if index in self._orthogonalised:
            return out.copy_(self._orthogonalised[index])
        memory, rule = self.buffers["memory"][index], self._preconditioner(index)
        if rule is not None:
            return rule(memory, self.context.state(index), self.context.group(index), out)
        scale = self._scales.get(index)
        return None if scale is None else torch.mul(memory, scale, out=out)

    def flops(self) -> float:
        return sum(map(orthogonalisation_flops, self._orthogonalised_shapes())) / self.context.shards.processes

    def bytes_sent(self) -> float:
        matrices = (shape for shape in self._orthogonalised_shapes() if len(shape) == 2)
        return self.context.shards.bytes_in_rounds(sum(shape.numel() for shape in matrices))

    def _orthogonalised_shapes(self) -> list[torch.Size]:
        shards = self.context.shards
        return [shards.shape(index) for index in range(len(shards.originals)) if self._orthogonalises(index)]

    def predicted_gradient(self, index: int) -> Tensor | None:
        return self.buffers["memory"][index]

    def block_begins(self, *, undoable: bool) -> None:
        self._orthogonalised = {}
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
