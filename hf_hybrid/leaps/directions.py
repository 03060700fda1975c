"""
Directions: where a leap goes. One class per method, each with its paper.

A leap replaces a few optimizer steps by one jump. Planner, cap and probe decide how far it jumps, and a direction
decides where. The life of a direction follows the phases:

1. Real steps (Warmup, Full, Correct) call `observe_gradients` between clipping and the optimizer's step, and
   `observe_step` after it. Here a direction learns: it averages gradients, or keeps copies of the weights.
2. A leap calls `prepare` once, then `displacement` for every parameter, perhaps several times: a leap over the cap is
   formed again with a smaller gain, a worse leap is tried again at a quarter of the gain, and streamed weights are
   displaced each time a layer is copied to the device. So `displacement` must give the same answer each time.
3. `block_begins` follows when the leap is kept or undone. A block is the real steps from one leap to the next.

Displacements are per unit of learning rate: the trajectory adds `gain * lr_sum * displacement`, with `lr_sum` the sum
of the learning rates of the block. If a displacement has the size of an optimizer step, the gain is a pure number: the
length of the leap in units of the length of the block. It keeps its meaning under any learning rate and schedule.

The class itself states what the rest of the package must know about a method: its default gain and how the gain grows
(`gain`, `gain_power`), over how many steps it averages (`memory_steps`), what it costs in memory (`values_per_weight`),
and what to cite (`papers`).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from hf_hybrid.machine import SMALL, copies_beside, host_tensor, wait_for
from hf_hybrid.optimizers import at_once, muon_scale, orthogonalisation_flops, orthogonalise
from hf_hybrid.run.weights import Shards, TrainedWeights


@dataclass
class Clock:
    """Progress of a run. [`~hf_hybrid.leaps.trajectory.Trajectory`] updates it; directions only read it."""

    steps_seen: int = 0
    """Real steps since the run began, or since the direction was last reset."""
    steps_in_block: int = 0
    """Real steps since the last leap."""
    lr_sums: list[float] = field(default_factory=list)
    """Sum of the learning rates of these steps, one number per parameter group."""
    lr_sum: float = 0.0
    """The largest of them."""
    peak_rate: float = 0.0
    """The largest learning rate of any real step."""
    progress: float = 0.0
    """Share of the run that is done, 0 to 1."""

    @property
    def full_rate_steps(self) -> float:
        """Steps at the peak rate that would move the weights as far as those of this block."""
        return self.lr_sum / self.peak_rate if self.peak_rate > 0 else 0.0


class DirectionContext(TrainedWeights):
    """
    Arguments of a direction: the trainable weights, as [`TrainedWeights`] has them, and the place of its buffers.

    Attributes:
        memory_steps (`int`): How many real steps slow averages should remember.
        host (`bool`): Whether buffers live in host memory instead of beside the weights.
        clock (`Clock`): Progress of the run.
        matrices (`Collection[str]`): Names of the hidden matrices: 2-D weights that are neither embedding nor head.
        finish_updates (`Callable[[], None]`): Finishes optimizer updates that are under way. Call it before you read
            weights or optimizer states; in [`Direction.prepare`] and [`Direction.displacement`] this has been done.
    """

    def __init__(
        self,
        weights: TrainedWeights,
        clock: Clock,
        *,
        memory_steps: int,
        host: bool = False,
        matrices: Collection[str] = (),
    ):
        vars(self).update(vars(weights))
        self.clock, self.memory_steps, self.host, self.matrices = clock, memory_steps, host, matrices
        self.finish_updates = weights.store.finish_updates

    def lr_sum(self, index: int) -> float:
        """Sum of a parameter's learning rates since the last leap."""
        return self.clock.lr_sums[self.groups[index]]

    def buffer(
        self, like: Tensor, *, shape: torch.Size | None = None, dtype: torch.dtype = torch.float32, zero: bool = False
    ) -> Tensor:
        """A buffer for the parameter `like`, of its shape or another, beside it or on the host (page-locked)."""
        shape = like.shape if shape is None else shape
        if self.host and copies_beside(like.device):
            return host_tensor(shape, dtype, pin=True).zero_()
        return (torch.zeros if zero else torch.empty)(shape, dtype=dtype, device=self.device_of(like))

    def gradients(self) -> Iterator[tuple[int, Tensor]]:
        """
        Gradients by index, dense, where their buffers live; in no order, and not to be kept. Small ones travel to the
        host together, so that it does not stop for each of them.
        """
        travelling: list[tuple[int, Tensor]] = []
        for index, parameter in enumerate(self.parameters):
            if parameter.grad is None:
                continue
            gradient = parameter.grad.to_dense() if parameter.grad.is_sparse else parameter.grad
            if self.host and copies_beside(gradient.device) and gradient.nbytes < SMALL:
                if sum(waiting.nbytes for _, waiting in travelling) + gradient.nbytes > SMALL:
                    yield from _on_host(travelling)
                    travelling = []
                travelling.append((index, gradient))
            else:
                yield index, gradient.to(self.device_of(parameter))
        yield from _on_host(travelling)

    def device_of(self, parameter: Tensor) -> torch.device:
        """Where the buffers of a parameter live."""
        return torch.device("cpu") if self.host else parameter.device


DirectionFactory = Callable[[DirectionContext], "Direction"]


def _on_host(tensors: list[tuple[int, Tensor]]) -> list[tuple[int, Tensor]]:
    copies = [(index, host_tensor(t.shape, t.dtype, pin=True).copy_(t, non_blocking=True)) for index, t in tensors]
    for device in {tensor.device for _, tensor in tensors}:
        wait_for(device)  # the host reads the copies
    return copies


class Direction:
    """
    A way to predict where the weights will be. Subclass it, and pass `HybridTrainer(..., direction=MyDirection)`.

    A leap adds `gain * lr_sum * displacement(index)` to every parameter, where `lr_sum` is the sum of the learning
    rates of the real steps since the last leap. At a gain of 1 a leap goes as far as those steps would along the
    direction. The module's docstring tells when each method is called. Pass `functools.partial(MyDirection, ...)` for
    a direction with arguments of its own.

    Keep everything that must survive a checkpoint in `buffers` (tensors) or [`state_dict`] (plain values).

    Args:
        context (`DirectionContext`): Parameters, optimizer and the place of buffers.

    Attributes:
        gain (`float`): Gain of a leap at the end of the run, before the preset's factor; the option `leap_gain`
            replaces it.
        gain_power (`float`): The gain grows with this power of the share of the run that is done; 0: constant.
        memory_steps (`int`, *optional*): Length of slow averages in real steps. `None`: a sixth of the run, at least 5
            and at most 1000. Read from the class.
        most_per_step (`float`): Largest relative change of the weights for each real step that a leap follows, at the
            peak of the learning rate. It falls with the rate.
        values_per_weight (`float`): Most fp32 values per trainable weight that the direction holds, without the
            snapshot of the weights. Memory plans count them before training, so it is read from the class.
        papers (`tuple[tuple[str, str], ...]`): Title and link of each source, for model cards.
        buffers (`dict[str, list[torch.Tensor]]`): By kind, a name without a dot; one tensor per parameter, in order,
            or an empty list. The kind `"memory"` is a slow average, whose norm is one of the signals.
    """

    gain: float = 1.0
    gain_power: float = 0.0
    memory_steps: int | None = None
    most_per_step: float = math.inf
    values_per_weight: float = 1
    papers: tuple[tuple[str, str], ...] = ()

    def __init__(self, context: DirectionContext):
        self.context = context
        self.buffers: dict[str, list[Tensor]] = {}

    @property
    def name(self) -> str:
        """The name in summaries and checkpoints."""
        return type(self).__name__

    @property
    def ready(self) -> bool:
        """Whether the direction knows enough for a leap; no leap is made before."""
        return True

    @property
    def block_is_open(self) -> bool:
        """Whether the direction recorded where the block began; if not, a new block begins after the next step."""
        return True

    def observe_gradients(self) -> None:
        """Called in a real step when the gradients are clipped and the optimizer has not stepped yet."""

    def observe_step(self, learning_rates: list[float]) -> None:
        """Called after the optimizer stepped with these learning rates, one per parameter group."""

    def prepare(self) -> None:
        """Called before a leap is formed: take in the block of real steps before it, whose sums are in the clock."""

    def displacement(self, index: int, out: Tensor) -> Tensor | None:
        """
        Displacement of one parameter per unit of `gain * lr_sum`.

        It is called several times between [`prepare`] and [`block_begins`], always while the parameter holds its
        weights from before the leap, and must return the same values each time.

        Args:
            index (`int`): Index of the parameter.
            out (`torch.Tensor`): Receives the result: fp32, of the parameter's shape, on the device of its buffers.

        Returns:
            `out`, or `None` to leave the parameter where it is.
        """
        return None

    def predicted_gradient(self, index: int) -> Tensor | None:
        """The gradient that the direction expects, for the first-order fall of the loss; `None` if it expects none."""
        return None

    def flops(self) -> float:
        """Floating-point operations of one leap; a few per weight may be left out."""
        return 0.0

    def block_begins(self, *, undoable: bool) -> None:
        """Called when a new block begins at the current weights; `undoable` while the leap before it is on trial."""

    def reset(self) -> None:
        """Clear the direction's memory, for example after bad leaps."""

    def state_dict(self) -> dict[str, Any]:
        """Plain JSON values; the buffers are saved separately."""
        return {}

    def load_state_dict(self, buffers: dict[str, list[Tensor]], values: dict[str, Any]) -> None:
        """Restore the buffers, copied to their device, and the values that [`state_dict`] returned."""
        for kind, saved in buffers.items():
            self.buffers[kind] = [
                self.context.buffer(parameter, shape=tensor.shape, dtype=tensor.dtype).copy_(tensor)
                for parameter, tensor in zip(self.context.parameters, saved)
            ]


def direction_class(factory: DirectionFactory) -> type[Direction]:
    """The class that a factory builds; [`Direction`] itself if that cannot be told before it is called."""
    while isinstance(factory, functools.partial):
        factory = factory.func
    return factory if isinstance(factory, type) and issubclass(factory, Direction) else Direction


# The directions of the package.


class NoDirection(Direction):
    """The frozen control: leaps move nothing, and their steps are skipped."""

    name = "none"
    values_per_weight = 0


class GradientMemory(Direction):
    """
    `gradient_memory`: a slow average of the gradients, passed through the optimizer's own preconditioner.

    AdEMAMix (Pagliardini et al., 2024, arXiv 2409.03137) observes that gradients stay useful for thousands of steps,
    far longer than the ten that Adam's `beta1 = 0.9` remembers. It adds to Adam's step a second, slow average `m2` of
    the gradients, under the same second moment `v`:

        step = -lr (m1 + alpha m2) / (sqrt(v) + eps)

    The slow term adds up over steps and changes little from one to the next. So it need not be part of the step: once
    per block a leap can apply the slow terms of all steps in the block together, without touching the optimizer,

        leap = -gain * (sum of the block's learning rates) * m2 / (sqrt(v) + eps)

    which is what this direction does with AdamW; `gain` is AdEMAMix's `alpha`. `m2` is a running mean until it has seen
    `memory_steps` gradients and an exponential average from then on, so it needs no bias correction. AdEMAMix warms
    `alpha` up because an early average is soon obsolete; here the gain grows with the square of the run's progress.

    A leap is the step that Adam would make if the slow average were its gradient. The second moments and their step
    count are read from the optimizer's state. What has none in full precision (8-bit states) stays where it is. If
    FSDP2 shards the weights, each process does all of this on its shards.
    """

    name = "gradient_memory"
    gain, gain_power = 4.0, 2.0
    papers = (("The AdEMAMix Optimizer: Better, Faster, Older", "https://arxiv.org/abs/2409.03137"),)

    def __init__(self, context: DirectionContext):
        super().__init__(context)
        self.buffers["memory"] = [context.buffer(parameter, zero=True) for parameter in context.parameters]

    @property
    def ready(self) -> bool:
        return any(map(self._has_rule, range(len(self.context.parameters))))

    def _has_rule(self, index: int) -> bool:
        """Whether the weight moves in leaps."""
        context = self.context
        return has_second_moments(context.state(index), context.group(index), context.parameters[index].shape)

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

    def displacement(self, index: int, out: Tensor) -> Tensor | None:
        state, group = self.context.state(index), self.context.group(index)
        return adam(self.buffers["memory"][index], state, group, out) if self._has_rule(index) else None

    def predicted_gradient(self, index: int) -> Tensor | None:
        return self.buffers["memory"][index]

    def reset(self) -> None:
        for memory in self.buffers["memory"]:
            memory.zero_()


def adam(memory: Tensor, state: Mapping[str, Any], group: Mapping[str, Any], out: Tensor) -> Tensor:
    """
    Adam's rule, and the slow term of AdEMAMix: `-memory / (sqrt(v_hat) + eps)` of one parameter in `out`, with its
    average of the gradients (fp32), its state and its group.
    """
    step = state["step"]
    if not torch.is_tensor(step) or step.device != out.device or out.device.type == "cpu":
        step = float(step)  # fused optimizers count on the device: there it stays, and nobody waits for it
    bias = 1.0 - group["betas"][1] ** step
    second_moment = state.get("max_exp_avg_sq", state["exp_avg_sq"])
    denominator = out.copy_(second_moment).div_(bias).sqrt_().add_(group.get("eps", 1e-8))
    return torch.div(memory, denominator, out=out).neg_()


def has_second_moments(state: Mapping[str, Any], group: Mapping[str, Any], shape: torch.Size) -> bool:
    """Whether a parameter's state has Adam's second moment, elementwise and unquantised."""
    second_moment = state.get("exp_avg_sq")
    is_adams = torch.is_tensor(second_moment) and "step" in state and "betas" in group
    return is_adams and second_moment.shape == shape and second_moment.is_floating_point()


class Orthogonal(GradientMemory):
    """
    `orthogonal`, the default: a short average of the gradients whose hidden matrices are orthogonalised.

    The gradient of a weight matrix has a few large singular values and many small ones. A step along it moves the
    weights in a few directions of their space and hardly in the others, although the others matter as much for what the
    layer can learn. So Muon (Jordan et al., 2024) replaces the averaged gradient `M = U S V^T` by `U V^T`, the nearest
    orthogonal matrix: all singular values become 1, and the step is equally long along every singular direction. A
    Newton-Schulz iteration of matrix products computes `U V^T` without an SVD (optimizers.py). Each expert of a mixture
    has its own matrices.

    Muon is an optimizer, and changing the optimizer of a run is the user's choice. This direction applies Muon's rule
    only in the leaps and leaves the optimizer and its state untouched. This gives an AdamW run part of Muon's benefit.
    Each orthogonalised matrix is scaled by `0.2 sqrt(max(rows, columns))`, which gives its entries the root mean square
    of an Adam step (Liu et al., 2025, arXiv 2502.16982), so that a learning rate tuned for Adam fits it too.

    The average is short (10 steps, and a sixth of the run in `gradient_memory`), and the gain is constant, because the
    leap does not extrapolate a lasting direction. It applies the gradients of the last few steps once more by a better
    rule, and a longer average would only make them older. For the same reason leaps work early in the run, and the gain
    is 3 from the first leap to the last.

    Embeddings, the output head, biases and norms have no useful spectrum; they go along [`GradientMemory`], with the
    short average. If no hidden matrices (`context.matrices`) are trained, the run uses `gradient_memory` itself.

    If FSDP2 shards the weights, matrices are orthogonalised when a leap is prepared, in rounds (run/weights.py), and
    kept until the leap is over: a leap that is shortened sends nothing again. Stacks of experts are sharded between
    experts, so the matrices that a process holds are whole.
    """

    name = "orthogonal"
    gain, gain_power, memory_steps = 3.0, 0.0, 10
    most_per_step = 0.04
    papers = (
        ("Muon: An optimizer for hidden layers in neural networks", "https://kellerjordan.github.io/posts/muon/"),
        ("Muon is Scalable for LLM Training", "https://arxiv.org/abs/2502.16982"),
    )

    def __init__(self, context: DirectionContext):
        super().__init__(context)
        self._matrices = {index for index, name in enumerate(context.names) if name in context.matrices}
        self._orthogonalised: dict[int, Tensor] = {}
        """By index, displacements that were computed together with other processes."""

    def _has_rule(self, index: int) -> bool:
        return index in self._matrices or super()._has_rule(index)

    def _orthogonalise(self, index: int, memory: Tensor, out: Tensor) -> Tensor:
        for memories, displacements in at_once(memory, out):
            if memories.device.type == "cpu":
                memories = memories.to(self.context.parameters[index].device)  # where it is fastest
            displacements.copy_(orthogonalise(memories))
        return out.mul_(-muon_scale(memory.shape, "match_rms_adamw"))

    @torch.no_grad()
    def prepare(self) -> None:
        shards, memories = self.context.shards, self.buffers["memory"]
        if isinstance(shards, Shards) and shards.processes > 1:
            matrices = sorted(index for index in self._matrices if memories[index].ndim == 2)
            tasks = [(index, shards.shape(index), memories[index]) for index in matrices]
            self._orthogonalised = dict(
                shards.in_rounds(
                    tasks, lambda index, matrix: self._orthogonalise(index, matrix, torch.empty_like(matrix))
                )
            )

    def displacement(self, index: int, out: Tensor) -> Tensor | None:
        if index in self._orthogonalised:
            return out.copy_(self._orthogonalised[index])
        if index in self._matrices:
            return self._orthogonalise(index, self.buffers["memory"][index], out)
        return super().displacement(index, out)

    def block_begins(self, *, undoable: bool) -> None:
        self._orthogonalised = {}
        super().block_begins(undoable=undoable)

    def flops(self) -> float:
        shapes = map(self.context.shards.shape, sorted(self._matrices))
        return sum(map(orthogonalisation_flops, shapes)) / self.context.shards.processes


DIRECTIONS: dict[str, type[Direction]] = {
    "orthogonal": Orthogonal,
    "gradient_memory": GradientMemory,
    "none": NoDirection,
}
"""The choices of the option `direction`. A direction is added to the package here."""
