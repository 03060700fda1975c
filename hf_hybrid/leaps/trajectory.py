"""Leaps along a direction: tried, kept, or undone to the last bit."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass

import torch

from hf_hybrid.leaps import sums
from hf_hybrid.leaps.directions.base import Clock, DirectionContext, DirectionFactory
from hf_hybrid.leaps.directions.preconditioners import last_step

Tensor = torch.Tensor


@dataclass(frozen=True)
class LeapShape:
    """What a leap did to the weights: the gain after the cap, norms, and the fall of the loss to first order (nats)."""

    gain: float
    norm: float
    relative_norm: float
    linear_decrease: float


class WeightStore:
    """Where weights live that do not compute where they live: told before they are read and after they were written."""

    def holds(self, parameter: torch.nn.Parameter) -> bool:
        """Whether copies of this parameter compute in its place."""
        return False

    def settle(self) -> None:
        """Finish updates under way: parameters and optimizer states are about to be read."""

    def changed(self) -> None:
        """The weights were written, or the leap under test is another one: copies made of them are old."""


class Trajectory:
    """
    Applies a leap along a direction, holds it while it is under test, and rolls it back exactly.

    Buffers live beside the weights or on the host (`host=True`): those of the direction, in fp32, and the snapshot of
    the weights before the last leap, in the weights' own dtype.

    Args:
        parameters (`Iterable[tuple[str, torch.nn.Parameter]]`): Named trainable parameters.
        optimizer (`torch.optim.Optimizer`): The optimizer that moves them, unwrapped.
        direction (`Callable[[DirectionContext], Direction]`): A subclass of `Direction`, or a callable that makes one.
        memory_steps (`int`): Length of slow averages in real steps.
        max_relative_norm (`float`): Cap of a leap's norm over the norm of the weights.
        matrices (`Collection[str]`): Names of the hidden matrices, for directions that treat them by themselves.
        host (`bool`): Keep the buffers in host memory, pinned where there is a GPU.
        store (`WeightStore`, *optional*): For weights that live elsewhere than they compute. A leap under test is then
            one number: whoever copies weights to where they compute adds it ([`displaced`]), and a rejection costs
            nothing.
    """

    def __init__(
        self,
        parameters: Iterable[tuple[str, torch.nn.Parameter]],
        optimizer: torch.optim.Optimizer,
        *,
        direction: DirectionFactory,
        memory_steps: int,
        max_relative_norm: float,
        matrices: Collection[str] = (),
        host: bool = False,
        store: WeightStore | None = None,
    ):
        group_of = {id(p): index for index, group in enumerate(optimizer.param_groups) for p in group["params"]}
        moved = [(name, parameter) for name, parameter in parameters if id(parameter) in group_of]
        self.names = [name for name, _ in moved]
        self.parameters = [parameter for _, parameter in moved]
        self.groups = [group_of[id(parameter)] for parameter in self.parameters]
        self.optimizer = optimizer
        self.max_relative_norm = max_relative_norm
        self.store = store
        self.clock = Clock(lr_sums=[0.0] * len(optimizer.param_groups))
        self.context = DirectionContext(
            names=self.names,
            parameters=self.parameters,
            groups=self.groups,
            optimizer=optimizer,
            memory_steps=memory_steps,
            host=host,
            clock=self.clock,
            matrices=matrices,
            settle=self.settle_updates,
        )
        self.direction = direction(self.context)
        self.gain_factors: list[float] | None = None
        """One factor per parameter on the gain of the next leap."""
        self.formed = 0
        """How often a leap was formed, kept or not."""
        self.pending_gain: float | None = None
        self._at_hand = {i for i, p in enumerate(self.parameters) if store is None or not store.holds(p)}
        """Parameters that compute where they live: a leap under test is written into them."""
        self._index_of = {id(parameter): index for index, parameter in enumerate(self.parameters)}
        self.before_leap: list[Tensor] = []
        self.has_snapshot = False

    @property
    def steps_seen(self) -> int:
        """Real steps since the beginning, or since [`reset_memory`]."""
        return self.clock.steps_seen

    @property
    def steps_in_block(self) -> int:
        """Real steps since the last leap."""
        return self.clock.steps_in_block

    @property
    def lr_sum(self) -> float:
        """Learning rates since the last leap, added up (largest group)."""
        return max(self.clock.lr_sums, default=0.0)

    @property
    def ready(self) -> bool:
        """Whether the direction knows enough for a leap."""
        return self.direction.ready

    @torch.no_grad()
    def observe_gradients(self) -> None:
        """Let the direction see the gradients of a real step. Call between clipping and the optimizer's step."""
        self.clock.steps_seen += 1
        self.direction.observe_gradients()

    @torch.no_grad()
    def step_cosine(self) -> float | None:
        """
        Cosine of the new gradient with what the optimizer followed before: Adam's last direction, else the slow memory.

        Positive where the last direction still leads downhill. Call before [`observe_gradients`]; one host
        synchronisation. `None` before the first step, or if there is nothing to compare with.
        """
        dots, squares, gradients = [], [], []
        for index, parameter in enumerate(self.parameters):
            if parameter.grad is None or parameter.grad.is_sparse:
                continue
            followed = self._followed(index)
            if followed is not None:
                gradient = parameter.grad.to(followed.device, torch.float32)
                dots.append(sums.dot(gradient, followed))
                squares.append(sums.square(followed))
                gradients.append(sums.square(gradient))
        if not dots:
            return None
        dot, square, gradient = sums.gather([sums.gather(x).sum() for x in (dots, squares, gradients)]).tolist()
        return dot / math.sqrt(square * gradient) if square > 0 and gradient > 0 else None

    def _followed(self, index: int) -> Tensor | None:
        parameter = self.parameters[index]
        followed = last_step(self.context.state(index), self.context.scratch(parameter, parameter.device))
        if followed is None and self.steps_seen:
            return self.direction.predicted_gradient(index)
        return followed

    @torch.no_grad()
    def observe_step(self, learning_rates: list[float]) -> None:
        """Count a real step that was made with these learning rates, one per parameter group."""
        self.clock.steps_in_block += 1
        self.clock.lr_sums = [total + lr for total, lr in zip(self.clock.lr_sums, learning_rates)]
        self.direction.observe_step(learning_rates)
        if not self.direction.block_is_open:
            self._begin_block(undoable=False)

    @torch.no_grad()
    def leap(self, gain: float) -> LeapShape:
        """
        Keep a snapshot of the weights and move them by `gain` times the direction.

        Called again before [`settle`], it starts from the same snapshot: the last call wins.
        """
        if self.pending_gain is not None:
            self._restore(self._at_hand)
        else:
            self.settle_updates()
            self.direction.prepare()
            self._take_snapshot(self._at_hand)
        shape = self._apply(gain, self._at_hand)
        if shape.relative_norm > self.max_relative_norm:
            self._restore(self._at_hand)
            shape = self._apply(gain * self.max_relative_norm / shape.relative_norm, self._at_hand)
        self.pending_gain = shape.gain
        self.weights_changed()
        return shape

    def settle_updates(self) -> None:
        """Finish updates under way; to be called before weights or optimizer states are read from outside."""
        if self.store is not None:
            self.store.settle()

    def weights_changed(self) -> None:
        """The weights were written; to be called by whoever did."""
        if self.store is not None:
            self.store.changed()

    def predicted_gradients(self) -> list[Tensor | None]:
        """The gradient that the direction expects of every parameter; `None` where it expects none."""
        return [self.direction.predicted_gradient(index) for index in range(len(self.parameters))]

    @torch.no_grad()
    def displaced(self, parameter: torch.nn.Parameter) -> Tensor | None:
        """The weights of one parameter with the leap under test; `None` if there is none."""
        index = self._index_of.get(id(parameter))
        delta = None if self.pending_gain is None or index is None else self._delta(index, self.pending_gain)
        return None if delta is None else parameter.detach().float().add(delta).to(parameter.dtype)

    def _delta(self, index: int, gain: float) -> Tensor | None:
        parameter = self.parameters[index]
        out = self.context.scratch(parameter, self.context.device_of(parameter))
        displacement = self.direction.displacement(index, out)
        factor = 1.0 if self.gain_factors is None else self.gain_factors[index]
        return None if displacement is None else displacement.mul_(factor * gain * self.context.lr_sum(index))

    def _apply(self, gain: float, written: set[int]) -> LeapShape:
        self.formed += 1
        squares, weights, linear = [], [], []
        for index, parameter in enumerate(self.parameters):
            delta = self._delta(index, gain)
            weights.append(sums.square(parameter.detach()))
            if delta is None:
                continue
            gradient = self.direction.predicted_gradient(index)
            if gradient is not None:
                linear.append(-sums.dot(delta, gradient))
            squares.append(sums.square(delta))
            if index in written:
                _add(parameter, delta)
        norm, size = math.sqrt(sums.total(squares)), math.sqrt(sums.total(weights))
        return LeapShape(gain, norm, norm / max(size, 1e-12), sums.total(linear))

    def _take_snapshot(self, indices: set[int]) -> None:
        if not self.before_leap:
            self.before_leap = [self.context.buffer(p, dtype=p.dtype) for p in self.parameters]
        for index in indices:
            self.before_leap[index].copy_(self.parameters[index].detach())
        self.has_snapshot = True

    def _restore(self, indices: set[int]) -> None:
        for index in indices:
            self.parameters[index].copy_(self.before_leap[index])

    @torch.no_grad()
    def settle(self) -> None:
        """The leap stays for now: a new block of real steps begins. The snapshot is kept until [`forget`]."""
        gain, self.pending_gain = self.pending_gain, None
        elsewhere = set(range(len(self.parameters))) - self._at_hand
        if gain is not None and elsewhere:
            self._take_snapshot(elsewhere)
            for index in sorted(elsewhere):
                delta = self._delta(index, gain)
                if delta is not None:
                    _add(self.parameters[index], delta)
            self.weights_changed()
        self._begin_block(undoable=self.has_snapshot)

    def forget(self) -> None:
        """The last leap was judged: the way back is closed."""
        self.has_snapshot = False
        self.direction.leap_judged()

    @torch.no_grad()
    def roll_back(self) -> None:
        """
        Put back, bit for bit, the weights of before the last leap.

        Raises:
            RuntimeError: If there is no leap to undo.
        """
        if not self.has_snapshot:
            raise RuntimeError("There is no leap to roll back.")
        if self.pending_gain is not None:
            self.pending_gain = None
            self._restore(self._at_hand)
        else:
            self.settle_updates()
            self._restore(set(range(len(self.parameters))))
        self.has_snapshot = False
        self.weights_changed()
        self._begin_block(undoable=False)

    def _begin_block(self, *, undoable: bool) -> None:
        self.clock.steps_in_block = 0
        self.clock.lr_sums = [0.0] * len(self.clock.lr_sums)
        self.direction.block_begins(undoable=undoable)

    @torch.no_grad()
    def reset_memory(self) -> None:
        """Forget the direction, for example after it led astray."""
        self.direction.reset()
        self.clock.steps_seen = 0

    @torch.no_grad()
    def gradient_statistics(self) -> dict[str, float]:
        """
        Norms that tell where training stands; one host synchronisation. Call while gradients are there.

        Returns:
            `dict`: `first` and `second` (root mean squares of the optimizer's moments), `weight` (of the weights),
            `memory` (norm of the slow memory) and `alignment` (cosine of gradient and memory); 0 where unknown.
        """
        states = [self.optimizer.state.get(p, {}) for p in self.parameters]
        first = [s["exp_avg"] for s in states if torch.is_tensor(s.get("exp_avg"))]
        second = [s["exp_avg_sq"] for s in states if torch.is_tensor(s.get("exp_avg_sq"))]
        count = max(sum(p.numel() for p in self.parameters), 1)
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        parts = [
            sums.sum_of_squares([p.detach() for p in self.parameters]) / count,
            sums.sum_of_squares(first) / count,
            sums.gather([s.float().sum() for s in second]).sum() / count if second else torch.zeros(()),
            sums.sum_of_squares(self.direction.buffers.get("memory", [])),
            sums.sum_of_squares(gradients),
            self._gradient_dot_memory(),
        ]
        weight2, first2, second1, memory2, gradient2, dot = sums.gather(parts).tolist()
        return {
            "first": math.sqrt(first2),
            "second": math.sqrt(max(second1, 0.0)),
            "weight": math.sqrt(weight2),
            "memory": math.sqrt(memory2),
            "alignment": dot / max(math.sqrt(memory2 * gradient2), 1e-20),
        }

    def _gradient_dot_memory(self) -> Tensor:
        dots = []
        for index, parameter in enumerate(self.parameters):
            predicted = self.direction.predicted_gradient(index)
            if predicted is not None and parameter.grad is not None and not parameter.grad.is_sparse:
                dots.append(sums.dot(predicted, parameter.grad.to(predicted.device, torch.float32)))
        return sums.gather(dots).sum() if dots else torch.zeros(())

    @torch.no_grad()
    def weights_are_finite(self) -> bool:
        """One pass over the trainable weights, one host synchronisation."""
        self.settle_updates()
        return bool(torch.isfinite(sums.sum_of_squares([p.detach() for p in self.parameters])))

    def _buffers(self) -> dict[str, list[Tensor]]:
        return {
            "memory": [],
            "anchor": [],
            **self.direction.buffers,
            "snapshot": self.before_leap,
            "scratch": self.context.scratches(),
        }

    def tensors_held(self) -> list[Tensor]:
        """All buffers."""
        return [tensor for tensors in self._buffers().values() for tensor in tensors]

    def bytes_held(self) -> dict[str, int]:
        """Bytes of the buffers, exact, by what they are for."""
        return {kind: sum(t.numel() * t.element_size() for t in held) for kind, held in self._buffers().items()}

    def state_dict(self) -> tuple[dict[str, Tensor], dict]:
        """Tensors (keyed `kind.parameter`) and plain values; the snapshot only while a leap can still be undone."""
        kinds = dict(self.direction.buffers)
        if self.has_snapshot:
            kinds["before_leap"] = self.before_leap
        tensors = {
            f"{kind}.{name}": tensor.contiguous()
            for kind, buffers in kinds.items()
            for name, tensor in zip(self.names, buffers)
        }
        values = {
            "direction": self.direction.name,
            "direction_state": self.direction.state_dict(),
            "steps_seen": self.clock.steps_seen,
            "steps_in_block": self.clock.steps_in_block,
            "lr_sums": self.clock.lr_sums,
            "has_snapshot": self.has_snapshot,
        }
        return tensors, values

    @torch.no_grad()
    def load_state_dict(self, tensors: dict[str, Tensor], values: dict) -> None:
        """
        Restore what [`state_dict`] returned. A direction other than the one that was saved starts anew.

        Raises:
            ValueError: If the parameters of the checkpoint are not those of the model.
        """
        kinds: dict[str, dict[str, Tensor]] = {}
        for key, tensor in tensors.items():
            kind, name = key.split(".", 1)
            kinds.setdefault(kind, {})[name] = tensor
        for saved in kinds.values():
            if set(saved) != set(self.names):
                odd = sorted(set(saved) ^ set(self.names))[0]
                raise ValueError(
                    f"The hybrid state of the checkpoint belongs to other parameters (`{odd}` is only in one of them). "
                    "Resume with the model, adapters and trainable layers of the run that wrote it."
                )
        in_order = {kind: [saved[name] for name in self.names] for kind, saved in kinds.items()}
        before_leap = in_order.pop("before_leap", None)
        if before_leap is not None:
            buffers = [self.context.buffer(parameter, dtype=parameter.dtype) for parameter in self.parameters]
            self.before_leap = [buffer.copy_(saved) for buffer, saved in zip(buffers, before_leap)]
        self.clock.steps_seen = values["steps_seen"]
        self.clock.steps_in_block = values["steps_in_block"]
        self.clock.lr_sums = list(values["lr_sums"])
        self.has_snapshot = values["has_snapshot"]
        if values["direction"] == self.direction.name:
            self.direction.load_state_dict(in_order, values["direction_state"])


def _add(parameter: torch.nn.Parameter, delta: Tensor) -> None:
    delta = delta.to(parameter.device, non_blocking=True)
    if parameter.dtype == torch.float32:
        parameter.add_(delta)
    else:
        # Added in fp32 and rounded once: a bf16 weight must not lose what it can hold of a small delta.
        parameter.copy_(parameter.float().add_(delta))
