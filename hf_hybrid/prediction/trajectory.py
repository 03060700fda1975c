"""Slow memory per parameter, and leaps along it that can be undone to the last bit."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from hf_hybrid.prediction import directions, sums

logger = logging.getLogger(__name__)

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
    Owns the slow buffers of every trainable parameter, applies a leap and rolls it back exactly.

    Buffers are fp32 and live beside the weights or on the host (`host=True`): the slow memory, the snapshot of the
    weights before the last leap (in the weights' own dtype) and, for `direction="drift"`, the anchor of the block.

    Args:
        parameters (`Iterable[tuple[str, torch.nn.Parameter]]`): Named trainable parameters.
        optimizer (`torch.optim.Optimizer`): The optimizer that moves them, unwrapped.
        direction (`str`): `"gradient_memory"`, `"drift"` or `"none"`.
        memory_steps (`int`): Length of the slow average in real steps.
        max_relative_norm (`float`): Cap of a leap's norm over the norm of the weights.
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
        direction: str,
        memory_steps: int,
        max_relative_norm: float,
        host: bool = False,
        store: WeightStore | None = None,
    ):
        group_of = {id(p): index for index, group in enumerate(optimizer.param_groups) for p in group["params"]}
        self.names, self.parameters, self.groups = [], [], []
        for name, parameter in parameters:
            if id(parameter) in group_of:
                self.names.append(name)
                self.parameters.append(parameter)
                self.groups.append(group_of[id(parameter)])
        self.optimizer = optimizer
        self.direction = direction
        self.memory_steps = memory_steps
        self.max_relative_norm = max_relative_norm
        self.host = host
        self.store = store
        self.pending_gain: float | None = None
        self._at_hand = {i for i, p in enumerate(self.parameters) if store is None or not store.holds(p)}
        """Parameters that compute where they live: a leap under test is written into them."""
        self._index_of = {id(parameter): index for index, parameter in enumerate(self.parameters)}
        self.memory = [] if direction == "none" else [self._buffer(p, zero=True) for p in self.parameters]
        self.anchor: list[Tensor] = []
        self.before_leap: list[Tensor] = []
        self._scratches: dict[torch.device, Tensor] = {}
        self.has_snapshot = False
        self.steps_seen = 0
        self.steps_in_block = 0
        self.lr_sums = [0.0] * len(optimizer.param_groups)

    def _buffer(self, like: Tensor, *, zero: bool = False, dtype: torch.dtype = torch.float32) -> Tensor:
        device = torch.device("cpu") if self.host else like.device
        pin = self.host and like.device.type == "cuda"
        make = torch.zeros if zero else torch.empty
        return make(like.shape, dtype=dtype, device=device, pin_memory=pin)

    def _scratch(self, like: Tensor) -> Tensor:
        """One fp32 buffer per device, as large as the largest parameter: allocating costs more than the arithmetic."""
        if like.device not in self._scratches:
            size = max(p.numel() for p in self.parameters)
            self._scratches[like.device] = torch.empty(size, dtype=torch.float32, device=like.device)
        return self._scratches[like.device][: like.numel()].view(like.shape)

    @property
    def lr_sum(self) -> float:
        """Learning rates since the last leap, added up (largest group)."""
        return max(self.lr_sums, default=0.0)

    @torch.no_grad()
    def observe_gradients(self) -> None:
        """Fold the gradients of a real step into the memory. Call between clipping and the optimizer's step."""
        self.steps_seen += 1
        if self.direction != "gradient_memory":
            return
        # A running mean until the memory is full: no bias to correct, right from the first step.
        weight = 1.0 / min(self.steps_seen, self.memory_steps)
        gradients = [p.grad for p in self.parameters]
        if not self.host and all(g is not None and g.dtype == torch.float32 and not g.is_sparse for g in gradients):
            torch._foreach_lerp_(self.memory, gradients, weight)
            return
        for memory, gradient in zip(self.memory, gradients):
            memory.mul_(1.0 - weight)
            if gradient is not None:
                dense = gradient.to_dense() if gradient.is_sparse else gradient
                memory.add_(dense.to(memory.device, torch.float32), alpha=weight)

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
        followed = directions.last_step(self.optimizer.state.get(parameter, {}), self._scratch(parameter))
        if followed is None and self.direction == "gradient_memory" and self.steps_seen:
            return self.memory[index]
        return followed

    @torch.no_grad()
    def observe_step(self, learning_rates: list[float]) -> None:
        """Count a real step that was made with these learning rates, one per parameter group."""
        self.steps_in_block += 1
        self.lr_sums = [total + lr for total, lr in zip(self.lr_sums, learning_rates)]
        if self.steps_seen == 1:
            self._settle_store()
            self._settle_direction()
        if self.direction == "drift" and not self.anchor:
            self._reset_block()

    def _settle_direction(self) -> None:
        """Optimizers without an elementwise second moment (Adafactor, 8-bit states) leap along the drift instead."""
        if self.direction != "gradient_memory":
            return
        supported = [
            directions.supports_gradient_memory(self.optimizer.state[p], self.optimizer.param_groups[group], p.shape)
            for p, group in zip(self.parameters, self.groups)
            if self.optimizer.state.get(p)
        ]
        if isinstance(self.optimizer, torch.optim.SGD) or (supported and all(supported)):
            return
        logger.warning(
            "`direction=gradient_memory` needs the second moment of an Adam-type optimizer, which `%s` does not keep. "
            "Leaps go along `drift` instead; set `direction=drift` to silence this.",
            type(self.optimizer).__name__,
        )
        self.direction = "drift"
        for memory in self.memory:
            memory.zero_()

    @torch.no_grad()
    def leap(self, gain: float) -> LeapShape:
        """
        Keep a snapshot of the weights and move them by `gain` times the direction.

        Called again before [`settle`], it starts from the same snapshot: the last call wins.
        """
        if self.pending_gain is not None:
            self._restore(self._at_hand)
        else:
            self._settle_store()
            self._update_drift()
            self._take_snapshot(self._at_hand)
        shape = self._apply(gain, self._at_hand)
        if shape.relative_norm > self.max_relative_norm:
            self._restore(self._at_hand)
            shape = self._apply(gain * self.max_relative_norm / shape.relative_norm, self._at_hand)
        self.pending_gain = shape.gain
        self._store_changed()
        return shape

    def _settle_store(self) -> None:
        if self.store is not None:
            self.store.settle()

    def _store_changed(self) -> None:
        if self.store is not None:
            self.store.changed()

    @torch.no_grad()
    def displaced(self, parameter: torch.nn.Parameter) -> Tensor | None:
        """The weights of one parameter with the leap under test; `None` if there is none."""
        index = self._index_of.get(id(parameter))
        direction = None if self.pending_gain is None or index is None else self._direction(index)
        if direction is None:
            return None
        delta = direction.mul_(self.pending_gain * self.lr_sums[self.groups[index]])
        return parameter.detach().float().add(delta).to(parameter.dtype)

    def _apply(self, gain: float, written: set[int]) -> LeapShape:
        squares, weights, linear = [], [], []
        for index, (parameter, group) in enumerate(zip(self.parameters, self.groups)):
            direction = self._direction(index)
            weights.append(sums.square(parameter.detach()))
            if direction is None:
                continue
            delta = direction.mul_(gain * self.lr_sums[group])
            if self.direction == "gradient_memory":
                linear.append(-sums.dot(delta, self.memory[index]))
            squares.append(sums.square(delta))
            if index not in written:
                continue
            delta = delta.to(parameter.device, non_blocking=True)
            if parameter.dtype == torch.float32:
                parameter.add_(delta)
            else:
                # Added in fp32 and rounded once: a bf16 weight must not lose what it can hold of a small delta.
                parameter.copy_(parameter.float().add_(delta))
        norm, size = math.sqrt(sums.total(squares)), math.sqrt(sums.total(weights))
        return LeapShape(gain, norm, norm / max(size, 1e-12), sums.total(linear))

    def _direction(self, index: int) -> Tensor | None:
        if self.direction == "none":
            return None
        if self.direction == "drift":
            return directions.drift(self.memory[index], self._scratch(self.memory[index]))
        parameter = self.parameters[index]
        group = self.optimizer.param_groups[self.groups[index]]
        state = self.optimizer.state.get(parameter, {})
        if isinstance(self.optimizer, torch.optim.SGD):
            state = {"momentum_buffer": None}
        return directions.gradient_memory(self.memory[index], state, group, self._scratch(self.memory[index]))

    def _update_drift(self) -> None:
        if self.direction != "drift" or not self.anchor or self.lr_sum <= 0:
            return
        weight = min(1.0, self.steps_in_block / min(self.steps_seen, self.memory_steps))
        for index, (parameter, group) in enumerate(zip(self.parameters, self.groups)):
            lr_sum = self.lr_sums[group]
            if lr_sum > 0:
                directions.block_drift(parameter, self.anchor[index], lr_sum, self.memory[index], weight)

    def _take_snapshot(self, indices: set[int]) -> None:
        if not self.before_leap:
            self.before_leap = [self._buffer(p, dtype=p.dtype) for p in self.parameters]
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
            self._apply(gain, elsewhere)
            self._store_changed()
        self._reset_block()

    def forget(self) -> None:
        """The last leap was judged: the way back is closed."""
        self.has_snapshot = False

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
            self._settle_store()
            self._restore(set(range(len(self.parameters))))
        self.has_snapshot = False
        self._store_changed()
        self._reset_block()

    def _reset_block(self) -> None:
        self.steps_in_block = 0
        self.lr_sums = [0.0] * len(self.lr_sums)
        if self.direction == "drift":
            self._settle_store()
            if not self.anchor:
                self.anchor = [self._buffer(p) for p in self.parameters]
            for anchor, parameter in zip(self.anchor, self.parameters):
                anchor.copy_(parameter.detach())

    def reset_memory(self) -> None:
        """Forget the direction, for example after it led astray."""
        for memory in self.memory:
            memory.zero_()
        self.steps_seen = 0

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
            sums.sum_of_squares(self.memory),
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
        if self.direction != "gradient_memory":
            return torch.zeros(())
        dots = [
            sums.dot(m, p.grad.to(m.device, torch.float32))
            for m, p in zip(self.memory, self.parameters)
            if p.grad is not None and not p.grad.is_sparse
        ]
        return sums.gather(dots).sum() if dots else torch.zeros(())

    @torch.no_grad()
    def weights_are_finite(self) -> bool:
        """One pass over the trainable weights, one host synchronisation."""
        self._settle_store()
        return bool(torch.isfinite(sums.sum_of_squares([p.detach() for p in self.parameters])))

    def tensors_held(self) -> list[Tensor]:
        """All buffers."""
        return [*self.memory, *self.before_leap, *self.anchor, *self._scratches.values()]

    def bytes_held(self) -> dict[str, int]:
        """Bytes of the buffers, exact, by what they are for."""
        return {
            name: sum(t.numel() * t.element_size() for t in tensors)
            for name, tensors in (
                ("memory", self.memory),
                ("snapshot", self.before_leap),
                ("anchor", self.anchor),
                ("scratch", list(self._scratches.values())),
            )
        }

    def state_dict(self) -> tuple[dict[str, Tensor], dict]:
        """Tensors (keyed `kind.parameter`) and plain values; the snapshot only while a leap can still be undone."""
        kinds = {"memory": self.memory, "anchor": self.anchor}
        if self.has_snapshot:
            kinds["before_leap"] = self.before_leap
        tensors = {
            f"{kind}.{name}": tensor.contiguous()
            for kind, buffers in kinds.items()
            for name, tensor in zip(self.names, buffers)
        }
        values = {
            "direction": self.direction,
            "steps_seen": self.steps_seen,
            "steps_in_block": self.steps_in_block,
            "lr_sums": self.lr_sums,
            "has_snapshot": self.has_snapshot,
        }
        return tensors, values

    @torch.no_grad()
    def load_state_dict(self, tensors: dict[str, Tensor], values: dict) -> None:
        """
        Restore what [`state_dict`] returned.

        Raises:
            ValueError: If the parameters of the checkpoint are not those of the model.
        """
        self.direction = values["direction"]
        for kind in ("memory", "anchor", "before_leap"):
            saved = {key[len(kind) + 1 :]: t for key, t in tensors.items() if key.startswith(f"{kind}.")}
            if saved and set(saved) != set(self.names):
                odd = sorted(set(saved) ^ set(self.names))[0]
                raise ValueError(
                    f"The hybrid state of the checkpoint belongs to other parameters (`{odd}` is only in one of them). "
                    "Resume with the model, adapters and trainable layers of the run that wrote it."
                )
            if saved:
                dtype_of = (lambda p: p.dtype) if kind == "before_leap" else (lambda p: torch.float32)
                buffers = [self._buffer(p, dtype=dtype_of(p)) for p in self.parameters]
                for name, buffer in zip(self.names, buffers):
                    buffer.copy_(saved[name])
                setattr(self, kind, buffers)
        self.steps_seen = values["steps_seen"]
        self.steps_in_block = values["steps_in_block"]
        self.lr_sums = list(values["lr_sums"])
        self.has_snapshot = values["has_snapshot"]
