"""
The base class of directions: the part of a leap that decides where the weights go.

A leap replaces a few optimizer steps by one jump. Planner, cap and probe decide how far it jumps. The direction decides
where, with one class per method. The life of a direction follows the phases:

1. Real steps (Warmup, Full, Correct) call `observe_gradients` between clipping and the optimizer's step, and
   `observe_step` after it. Here a direction learns: it averages gradients, or keeps copies of the weights.
2. A leap calls `prepare` once, then `displacement` for every parameter, perhaps several times: a leap over the cap is
   formed again with a smaller gain, a worse leap is tried again at a quarter of the gain, and streamed weights are
   displaced each time a layer is copied to the device. So `displacement` must give the same answer each time.
3. `block_begins` follows when the leap is kept or undone. A block is the real steps from one leap to the next.
   `leap_judged` follows when Correct is over and the leap can no longer be undone.

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
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from hf_hybrid.machine import SMALL, copies_beside, host_tensor, wait_for
from hf_hybrid.run.weights import TrainedWeights


@dataclass
class Clock:
    """
    Progress of a run. [`~hf_hybrid.leaps.trajectory.Trajectory`] updates it; directions only read it.

    Attributes:
        steps_seen (`int`): Real steps since the run began, or since the direction was last reset.
        steps_in_block (`int`): Real steps since the last leap.
        lr_sums (`list[float]`): Sum of the learning rates of these steps, one number per parameter group.
        lr_sum (`float`): The largest of them.
        peak_rate (`float`): The largest learning rate of any real step.
        progress (`float`): Share of the run that is done, 0 to 1.
    """

    steps_seen: int = 0
    steps_in_block: int = 0
    lr_sums: list[float] = field(default_factory=list)
    lr_sum: float = 0.0
    peak_rate: float = 0.0
    progress: float = 0.0

    @property
    def full_rate_steps(self) -> float:
        """Steps at the peak rate that would move the weights as far as those of this block."""
        return self.lr_sum / self.peak_rate if self.peak_rate > 0 else 0.0


class DirectionContext(TrainedWeights):
    """
    Arguments of a direction: the trainable weights, their optimizer, and the place of its buffers.

    Attributes:
        names (`list[str]`): Names of the parameters in the model.
        shards (`Whole`): The parameters. It finds what lies on other processes.
        parameters (`Sequence[torch.Tensor]`): The parameters; every `index` counts in this list. Under FSDP2, the rows
            of each that this process holds, with their gradients; so are the states.
        groups (`list[int]`): Index of each parameter's group in `optimizer.param_groups`.
        optimizer (`torch.optim.Optimizer`): The optimizer that moves them, unwrapped.
        memory_steps (`int`): How many real steps slow averages should remember.
        host (`bool`): Whether buffers live in host memory instead of beside the weights.
        clock (`Clock`): Progress of the run.
        matrices (`Collection[str]`): Names of the hidden matrices: 2-D weights that are neither embedding nor head.
        settle (`Callable[[], None]`): Finishes optimizer updates that are still under way. Call it before you read
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
        self.names, self.shards, self.parameters = weights.names, weights.shards, weights.parameters
        self.groups, self.optimizer, self.store = weights.groups, weights.optimizer, weights.store
        self._scratches = weights._scratches
        self.clock, self.memory_steps, self.host, self.matrices = clock, memory_steps, host, matrices
        self.settle = weights.store.settle

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

    def bytes_sent(self) -> float:
        """Bytes that all processes together send for one leap, where they share the weights."""
        return 0.0

    def block_begins(self, *, undoable: bool) -> None:
        """Called when a new block begins at the current weights; `undoable` while the leap before it is on trial."""

    def leap_judged(self) -> None:
        """Called when the last leap is final and can no longer be undone."""

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


class NoDirection(Direction):
    """The frozen control: leaps move nothing, and their steps are skipped."""

    name = "none"
    values_per_weight = 0


def direction_class(factory: DirectionFactory) -> type[Direction]:
    """The class that a factory builds; [`Direction`] itself if that cannot be told before it is called."""
    while isinstance(factory, functools.partial):
        factory = factory.func
    return factory if isinstance(factory, type) and issubclass(factory, Direction) else Direction
