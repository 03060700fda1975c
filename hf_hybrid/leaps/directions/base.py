"""What every direction of a leap is, what it may know, and how it remembers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

Tensor = torch.Tensor


@dataclass
class Clock:
    """
    Where a run stands; kept by [`~hf_hybrid.leaps.trajectory.Trajectory`], only to be read by directions.

    Attributes:
        steps_seen (`int`): Real steps since the beginning, or since the direction was told to forget.
        steps_in_block (`int`): Real steps since the last leap.
        lr_sums (`list[float]`): Learning rates of these, added up; one number per parameter group.
        progress (`float`): Share of the run that is done, 0 to 1.
    """

    steps_seen: int = 0
    steps_in_block: int = 0
    lr_sums: list[float] = field(default_factory=list)
    progress: float = 0.0


@dataclass
class DirectionContext:
    """
    What a direction is built from: the trainable parameters, their optimizer, and where buffers belong.

    Attributes:
        names (`list[str]`): Names of the parameters in the model.
        parameters (`list[torch.nn.Parameter]`): The parameters; everywhere an `index` counts in this list.
        groups (`list[int]`): Index of each parameter's group in `optimizer.param_groups`.
        optimizer (`torch.optim.Optimizer`): What moves them, unwrapped.
        memory_steps (`int`): How long slow averages should remember, in real steps.
        host (`bool`): Whether buffers live in host memory instead of beside the weights.
        clock (`Clock`): Where the run stands.
        settle (`Callable[[], None]`): To be called before weights or optimizer states are read, except in
            [`Direction.prepare`] and [`Direction.displacement`]: their update may still be under way.
    """

    names: list[str]
    parameters: list[torch.nn.Parameter]
    groups: list[int]
    optimizer: torch.optim.Optimizer
    memory_steps: int
    host: bool
    clock: Clock
    settle: Callable[[], None] = lambda: None
    _scratches: dict[torch.device, Tensor] = field(default_factory=dict)

    def group(self, index: int) -> dict[str, Any]:
        """The parameter group of a parameter."""
        return self.optimizer.param_groups[self.groups[index]]

    def state(self, index: int) -> Mapping[str, Any]:
        """What the optimizer keeps of a parameter; empty before its first update."""
        return self.optimizer.state.get(self.parameters[index], {})

    def lr_sum(self, index: int) -> float:
        """Learning rates of a parameter since the last leap, added up."""
        return self.clock.lr_sums[self.groups[index]]

    def buffer(
        self,
        like: Tensor,
        *,
        shape: tuple[int, ...] | None = None,
        dtype: torch.dtype = torch.float32,
        zero: bool = False,
    ) -> Tensor:
        """A buffer for the parameter `like`, of its shape or another, on the host (pinned for a GPU) or beside it."""
        pin = self.host and like.device.type == "cuda"
        make = torch.zeros if zero else torch.empty
        return make(like.shape if shape is None else shape, dtype=dtype, device=self.device_of(like), pin_memory=pin)

    def device_of(self, parameter: Tensor) -> torch.device:
        """Where the buffers of a parameter live."""
        return torch.device("cpu") if self.host else parameter.device

    def scratch(self, like: Tensor, device: torch.device) -> Tensor:
        """One fp32 buffer per device, as large as the largest parameter: allocating costs more than the arithmetic."""
        if device not in self._scratches:
            size = max(parameter.numel() for parameter in self.parameters)
            self._scratches[device] = torch.empty(size, dtype=torch.float32, device=device)
        return self._scratches[device][: like.numel()].view(like.shape)

    def scratches(self) -> list[Tensor]:
        """The scratch buffers made so far."""
        return list(self._scratches.values())


DirectionFactory = Callable[[DirectionContext], "Direction"]


class Direction:
    """
    A way to predict where the weights will be. Subclass it, and pass `HybridTrainer(..., direction=MyDirection)`.

    A leap adds `gain * lr_sum * displacement(index)` to every parameter, `lr_sum` being the learning rates of the real
    steps since the last leap: at a gain of 1 a leap goes as far as those steps would along the direction. Real steps
    call [`observe_gradients`] and [`observe_step`]; a leap calls [`prepare`] once and then [`displacement`] as often as
    it wants; [`block_begins`] when it was kept or undone. A leap that was kept may still be undone later.

    All that must outlive a checkpoint belongs into `buffers` (tensors) or [`state_dict`] (plain values).

    Args:
        context (`DirectionContext`): Parameters, optimizer and where buffers belong.

    Attributes:
        buffers (`dict[str, list[torch.Tensor]]`): By kind, a name without a dot; one tensor per parameter, in order, or
            an empty list. The kind `"memory"` is a slow average, whose norm is one of the signals.
    """

    def __init__(self, context: DirectionContext):
        self.context = context
        self.buffers: dict[str, list[Tensor]] = {}

    @property
    def name(self) -> str:
        """What summaries and checkpoints call it."""
        return type(self).__name__

    @property
    def ready(self) -> bool:
        """Whether a leap would lead anywhere; while not, none is made."""
        return True

    @property
    def block_is_open(self) -> bool:
        """Whether what the direction compares the end of a block with is there; if not, a block begins after a step."""
        return True

    def observe_gradients(self) -> None:
        """Gradients of a real step are there and clipped; the optimizer has not stepped yet."""

    def observe_step(self, learning_rates: list[float]) -> None:
        """The optimizer stepped with these learning rates, one per parameter group."""

    def prepare(self) -> None:
        """A leap is about to be formed: take in the block of real steps behind it, whose sums are in the clock."""

    def displacement(self, index: int, out: Tensor) -> Tensor | None:
        """
        Displacement of one parameter per unit of `gain * lr_sum`.

        Asked for several times between [`prepare`] and [`block_begins`], and always while the parameter holds the
        weights of before the leap: the answer must be the same each time.

        Args:
            index (`int`): Which parameter.
            out (`torch.Tensor`): Where the result goes: fp32, of the parameter's shape, where its buffers live.

        Returns:
            `out`; `None` to leave the parameter where it is.
        """
        return None

    def predicted_gradient(self, index: int) -> Tensor | None:
        """The gradient that the direction expects, for the fall of the loss to first order; `None` if it has none."""
        return None

    def flops(self) -> float:
        """Floating-point operations of one leap, as far as they are more than a few per weight."""
        return 0.0

    def block_begins(self, *, undoable: bool) -> None:
        """A new block of real steps begins at the weights of now; `undoable` while the leap before it is on trial."""

    def leap_judged(self) -> None:
        """The last leap is final: it cannot be undone any more."""

    def reset(self) -> None:
        """Forget what leads the way, for example after it led astray."""

    def state_dict(self) -> dict[str, Any]:
        """Plain JSON values; the buffers are saved by themselves."""
        return {}

    def load_state_dict(self, buffers: dict[str, list[Tensor]], values: dict[str, Any]) -> None:
        """Restore the buffers, which are copied to where they belong, and what [`state_dict`] returned."""
        for kind, saved in buffers.items():
            self.buffers[kind] = [
                self.context.buffer(parameter, shape=tensor.shape, dtype=tensor.dtype).copy_(tensor)
                for parameter, tensor in zip(self.context.parameters, saved)
            ]


class BlockDirection(Direction):
    """A direction that goes by how far the weights moved since the last leap: keeps an fp32 copy of them (`anchor`)."""

    def __init__(self, context: DirectionContext):
        super().__init__(context)
        self.buffers["anchor"] = []

    @property
    def block_is_open(self) -> bool:
        return bool(self.buffers["anchor"])

    def block_begins(self, *, undoable: bool) -> None:
        self.context.settle()
        if not self.buffers["anchor"]:
            self.buffers["anchor"] = [self.context.buffer(parameter) for parameter in self.context.parameters]
        for anchor, parameter in zip(self.buffers["anchor"], self.context.parameters):
            anchor.copy_(parameter.detach())

    def moved(self, index: int, out: Tensor) -> Tensor:
        """Displacement of a parameter since the block began, in `out`."""
        return out.copy_(self.context.parameters[index].detach()).sub_(self.buffers["anchor"][index])


class NoDirection(Direction):
    """Nowhere: the frozen control, whose predicted steps change nothing."""

    name = "none"
