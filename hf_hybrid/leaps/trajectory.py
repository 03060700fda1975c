"""
The only place where a leap changes the weights.

A leap adds `gain * lr_sum * displacement` to every trainable parameter. `lr_sum` is the sum of the learning rates of
the real steps since the last leap and `displacement` is what a direction (leaps/directions/) predicts per unit of it:
at a gain of 1 a leap goes about as far as those steps went. The optimizer's moments and its step counter stay as they
are. Gradient clipping does not apply. Instead, the norm of a leap is capped: at `max_relative_norm` times the norm of
the weights, and, where the direction names a speed (`most_per_step`), at that speed. A speed makes leaps independent of
a learning rate that is too high: from some rate on they go no farther, and still shrink as the rate decays.

Predictions can be wrong, so a leap is a transaction:

1. `with trajectory.trial(leap)` takes a snapshot of the weights and opens the leap. `trajectory.open` is the only
   answer to "is a leap open?".
2. Inside, `trajectory.leap(gain)` moves the weights; a second call starts from the same snapshot.
3. When the block ends, a rejected leap is undone from the snapshot, bit for bit. So is a leap whose block raised
   anything, an out-of-memory for example. Otherwise `keep()` has written the leap for good and a new block of real
   steps begins.
4. The snapshot stays until Correct has judged the leap: `roll_back()` undoes it, `accept()` closes the way back.

Weights may be stored on another device than they compute on (layers that are streamed from the host). A leap under test
is then one number, its gain. The copy of such weights to the device adds the displacement on the way (`displaced`), so
a rejected leap costs nothing. `keep()` writes the displacement into the weights themselves.

Weights may be spread over processes (FSDP2). Everything here then works on the rows that this process holds, and asks
`shards` (shards.py) for what needs the others: sums over all weights, and whole tensors for a checkpoint.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Collection, Iterable, Iterator
from typing import Protocol

import torch
from torch import Tensor

from hf_hybrid.leaps.directions.base import Clock, DirectionContext, DirectionFactory, NoDirection
from hf_hybrid.leaps.directions.preconditioners import keeps_last_step, last_step
from hf_hybrid.run import sums
from hf_hybrid.run.record import Leap
from hf_hybrid.run.shards import shards_of


class WeightStore(Protocol):
    """
    Interface to weights stored on another device than they compute on.

    `holds` says whether copies of a parameter compute in its place. `settle` is called before weights or optimizer
    states are read: it finishes updates that are under way. `changed` is called after weights were written, or after
    the leap under test changed: copies made of them are out of date.
    """

    def holds(self, parameter: torch.nn.Parameter) -> bool: ...

    def settle(self) -> None: ...

    def changed(self) -> None: ...


class InPlace:
    """The [`WeightStore`] of weights that compute where they are stored."""

    def holds(self, parameter: torch.nn.Parameter) -> bool:
        """Never."""
        return False

    def settle(self) -> None:
        """Do nothing, because no update is ever pending."""

    def changed(self) -> None:
        """Do nothing, because there are no copies."""


class Trajectory:
    """
    The weights along a run: observes real steps, applies a leap, and undoes it exactly.

    Buffers live beside the weights or on the host (`host=True`): the direction's own, in fp32, and the snapshot of the
    weights before the last leap, in the dtype of the weights.

    Args:
        parameters (`Iterable[tuple[str, torch.nn.Parameter]]`): Named trainable parameters.
        optimizer (`torch.optim.Optimizer`): The optimizer that moves them, unwrapped.
        direction (`Callable[[DirectionContext], Direction]`): The class of the direction, or another callable that
            makes it.
        memory_steps (`int`): Length of the direction's averages in real steps.
        max_relative_norm (`float`): Cap of a leap's norm over the norm of the weights.
        matrices (`Collection[str]`): Names of the hidden matrices, for directions that treat them differently.
        host (`bool`): Keep the buffers in host memory, pinned where there is a GPU.
        store (`WeightStore`): Where the weights are stored.
    """

    def __init__(
        self,
        parameters: Iterable[tuple[str, torch.nn.Parameter]],
        optimizer: torch.optim.Optimizer,
        *,
        direction: DirectionFactory,
        memory_steps: int,
        max_relative_norm: float = 0.5,
        matrices: Collection[str] = (),
        host: bool = False,
        store: WeightStore | None = None,
    ):
        group_of = {id(p): index for index, group in enumerate(optimizer.param_groups) for p in group["params"]}
        moved = [(name, parameter) for name, parameter in parameters if id(parameter) in group_of]
        self.names = [name for name, _ in moved]
        self.shards = shards_of([parameter for _, parameter in moved])
        self.parameters = self.shards.parameters
        self.optimizer = optimizer
        self.max_relative_norm = max_relative_norm
        self.store: WeightStore = store or InPlace()
        self.clock = Clock(lr_sums=[0.0] * len(optimizer.param_groups))
        self.context = DirectionContext(
            names=self.names,
            shards=self.shards,
            groups=[group_of[id(parameter)] for _, parameter in moved],
            optimizer=optimizer,
            memory_steps=memory_steps,
            host=host,
            clock=self.clock,
            matrices=matrices,
            settle=self.store.settle,
        )
        self.direction = direction(self.context)
        self.gain_factors: list[float] | None = None
        """One factor per parameter on the gain of the next leap."""
        self.reach = 0.0
        """Relative norm of the last leap per unit of gain times learning rate; 0 before the first."""
        self.formed = 0
        """Number of displacements of all weights that were computed, for all leaps."""
        self.open: Leap | None = None
        """The leap that can still be undone."""
        self.snapshot: list[Tensor] = []
        """One buffer per parameter; the weights before the open leap where the index is in `_saved`."""
        self._saved: set[int] = set()
        self._in_place = {i for i, p in enumerate(self.shards.originals) if not self.store.holds(p)}
        """Indices of parameters that compute where they are stored: a leap under test is written into them."""
        self._index_of = {id(parameter): index for index, parameter in enumerate(self.shards.originals)}

    @property
    def ready(self) -> bool:
        """Whether the direction knows enough for a leap."""
        return self.direction.ready

    @torch.no_grad()
    def observe_gradients(self) -> None:
        """Show the direction the gradients of a real step. Call this between clipping and the optimizer's step."""
        self.clock.steps_seen += 1
        self.direction.observe_gradients()

    @torch.no_grad()
    def step_cosine(self) -> float | None:
        """
        Return the cosine of the new gradient with Adam's last direction, or else with the slow memory.

        It is positive if the last direction still leads downhill, and `None` if there is nothing to compare with. Call
        this before [`observe_gradients`]. It synchronises with the host once.
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
        dot, square, gradient = self.shards.totals([dots, squares, gradients]).tolist()
        return dot / math.sqrt(square * gradient) if square > 0 and gradient > 0 else None

    def _followed(self, index: int) -> Tensor | None:
        parameter = self.parameters[index]
        followed = last_step(self.context.state(index), self.context.scratch(parameter, parameter.device))
        if followed is None and self.clock.steps_seen:
            return self.direction.predicted_gradient(index)
        return followed

    @torch.no_grad()
    def observe_step(self, learning_rates: list[float]) -> None:
        """Count a real step that was made with these learning rates, one per parameter group."""
        self.clock.steps_in_block += 1
        self.clock.lr_sums = [total + lr for total, lr in zip(self.clock.lr_sums, learning_rates)]
        self.clock.lr_sum = max(self.clock.lr_sums, default=0.0)
        self.clock.peak_rate = max(self.clock.peak_rate, *learning_rates)
        self.direction.observe_step(learning_rates)
        if not self.direction.block_is_open:
            self._begin_block(undoable=False)

    @property
    def optimizer_remembers(self) -> bool:
        """Whether the optimizer keeps the last direction of every parameter, so that [`step_cosine`] needs no other."""
        return all(keeps_last_step(self.context.state(index)) for index in range(len(self.parameters)))

    def stand_still(self) -> None:
        """Drop the direction with its buffers, because no leap will be made."""
        self.direction = NoDirection(self.context)

    # A leap.

    @contextlib.contextmanager
    def trial(self, leap: Leap) -> Iterator[None]:
        """
        Try a leap: the weights change inside the block by [`leap`], and stay changed only if it ends with [`keep`].

        An exception, of whatever kind, restores the weights of before the block bit for bit and passes on. So does the
        end of the block without a call of [`keep`].
        """
        if self.open is not None:
            raise RuntimeError(f"The leap made before step {self.open.step} is still open: accept it or roll it back.")
        self.store.settle()
        self.direction.prepare()
        self.open, leap.under_test, leap.gain = leap, True, 0.0
        try:
            self._save(self._in_place)
            yield
        except BaseException:
            self.roll_back()
            raise
        if leap.under_test:
            self.roll_back()

    @torch.no_grad()
    def leap(self, gain: float) -> None:
        """
        Move the weights by `gain` times the displacement from the snapshot of [`trial`]. A later call replaces an
        earlier one. Writes gain (after the cap), relative norm and predicted decrease into the open leap.
        """
        leap, clock = self.open, self.clock
        if leap.gain:
            self._restore()
        cap = min(self.max_relative_norm, self.direction.most_per_step * clock.full_rate_steps)
        if self.reach * abs(gain) * clock.lr_sum > cap:  # as far as the last leap tells, so that most are formed once
            gain *= cap / (self.reach * abs(gain) * clock.lr_sum)
        size, linear = self._apply(gain)
        if size > 1.01 * cap:
            self._restore()
            gain = gain * cap / size
            size, linear = self._apply(gain)
        if gain:
            self.reach = size / (abs(gain) * clock.lr_sum)
        leap.gain, leap.length = gain, abs(gain) * clock.full_rate_steps
        leap.relative_norm, leap.predicted_decrease = size, linear
        self.store.changed()

    @torch.no_grad()
    def keep(self) -> None:
        """Keep the leap under test: write it into weights that are stored elsewhere, and begin a new block of steps."""
        gain = self.open.gain
        elsewhere = sorted(set(range(len(self.parameters))) - self._in_place)
        if elsewhere:
            self._save(elsewhere)  # all of it before the first write: what raises from here on can be undone
            for index in elsewhere:
                delta = self._delta(index, gain)
                if delta is not None:
                    _add(self.parameters[index], delta)
            self.store.changed()
        self.open.under_test = False
        self._begin_block(undoable=True)

    def accept(self) -> None:
        """Close the open leap, which was judged to be good. It can no longer be undone."""
        self.open = None
        self._saved.clear()
        self.direction.leap_judged()

    @torch.no_grad()
    def roll_back(self) -> None:
        """
        Restore the weights from before the open leap, bit for bit.

        Raises:
            RuntimeError: If no leap is open.
        """
        if self.open is None:
            raise RuntimeError("There is no leap to roll back.")
        if not self.open.under_test:
            self.store.settle()  # real steps were made since
        self._restore()
        self.open.under_test, self.open = False, None
        self._saved.clear()
        self.store.changed()
        self._begin_block(undoable=False)

    @torch.no_grad()
    def displaced(self, parameter: torch.nn.Parameter) -> Tensor | None:
        """Return the weights of one parameter with the leap under test; `None` if there is none."""
        index = self._index_of.get(id(parameter))
        if index is None or self.open is None or not (self.open.under_test and self.open.gain):
            return None
        delta = self._delta(index, self.open.gain)
        return None if delta is None else parameter.detach().float().add(delta).to(parameter.dtype)

    def predicted_gradients(self) -> list[Tensor | None]:
        """Return the gradient that the direction expects of every parameter; `None` if it expects none."""
        return [self.direction.predicted_gradient(index) for index in range(len(self.parameters))]

    def _delta(self, index: int, gain: float) -> Tensor | None:
        parameter = self.parameters[index]
        out = self.context.scratch(parameter, self.context.device_of(parameter))
        displacement = self.direction.displacement(index, out)
        factor = 1.0 if self.gain_factors is None else self.gain_factors[index]
        return None if displacement is None else displacement.mul_(factor * gain * self.context.lr_sum(index))

    def _apply(self, gain: float) -> tuple[float, float]:
        """Write the leap into weights that compute in place, and return its relative norm and predicted decrease."""
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
            if index in self._in_place:
                _add(parameter, delta)
        square, weight, decrease = self.shards.totals([squares, weights, linear]).tolist()
        return math.sqrt(square) / max(math.sqrt(weight), 1e-12), decrease

    @torch.no_grad()
    def _save(self, indices: Iterable[int]) -> None:
        if not self.snapshot:
            self.snapshot = [self.context.buffer(p, dtype=p.dtype) for p in self.parameters]
        for index in indices:
            self.snapshot[index].copy_(self.parameters[index].detach())
            self._saved.add(index)

    def _restore(self) -> None:
        for index in self._saved:
            self.parameters[index].copy_(self.snapshot[index])

    def _begin_block(self, *, undoable: bool) -> None:
        self.clock.steps_in_block = 0
        self.clock.lr_sums, self.clock.lr_sum = [0.0] * len(self.clock.lr_sums), 0.0
        self.direction.block_begins(undoable=undoable)

    @torch.no_grad()
    def reset_memory(self) -> None:
        """Reset the direction, for example after bad leaps."""
        self.direction.reset()
        self.clock.steps_seen = 0

    @torch.no_grad()
    def gradient_statistics(self) -> dict[str, float]:
        """
        Return norms of the optimizer's state and the weights, with one host synchronisation. Gradients must be there.

        Returns:
            `dict`: `first` and `second` (root mean squares of the optimizer's moments), `weight` (of the weights),
            `memory` (norm of the slow memory) and `alignment` (cosine of gradient and memory); 0 where unknown.
        """
        states = [self.context.state(index) for index in range(len(self.parameters))]
        first = [s["exp_avg"] for s in states if torch.is_tensor(s.get("exp_avg"))]
        second = [s["exp_avg_sq"] for s in states if torch.is_tensor(s.get("exp_avg_sq"))]
        count = max(sum(p.numel() for p in self.shards.originals), 1)
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        memory = self.direction.buffers.get("memory", [])
        means = [
            sums.squares(p.detach() for p in self.parameters),
            sums.squares(first),
            [s.float().sum() for s in second],
        ]
        found = self.shards.totals([*means, sums.squares(memory), sums.squares(gradients), self._gradient_dot_memory()])
        weight2, first2, second1 = (found[:3] / count).tolist()
        memory2, gradient2, dot = found[3:].tolist()
        return {
            "first": math.sqrt(first2),
            "second": math.sqrt(max(second1, 0.0)),
            "weight": math.sqrt(weight2),
            "memory": math.sqrt(memory2),
            "alignment": dot / max(math.sqrt(memory2 * gradient2), 1e-20),
        }

    def _gradient_dot_memory(self) -> list[Tensor]:
        dots = []
        for index, parameter in enumerate(self.parameters):
            predicted = self.direction.predicted_gradient(index)
            if predicted is not None and parameter.grad is not None and not parameter.grad.is_sparse:
                dots.append(sums.dot(predicted, parameter.grad.to(predicted.device, torch.float32)))
        return dots

    @torch.no_grad()
    def weights_are_finite(self) -> bool:
        """One pass over the trainable weights, one host synchronisation."""
        self.store.settle()
        return bool(torch.isfinite(self.shards.totals([sums.squares(p.detach() for p in self.parameters)])))

    def _buffers(self) -> dict[str, list[Tensor]]:
        return {
            "memory": [],
            "anchor": [],
            **self.direction.buffers,
            "snapshot": self.snapshot,
            "scratch": self.context.scratches(),
        }

    def tensors_held(self) -> list[Tensor]:
        """All buffers."""
        return [tensor for tensors in self._buffers().values() for tensor in tensors]

    def bytes_held(self) -> dict[str, int]:
        """Return the exact bytes of the buffers by kind."""
        return {kind: sum(t.numel() * t.element_size() for t in held) for kind, held in self._buffers().items()}

    def state_dict(self) -> tuple[dict[str, Tensor], dict]:
        """
        Whole tensors (keyed `kind.parameter`) and plain values; the snapshot only while a leap is open. All processes
        must call this. Where they share the weights, the first one gets the tensors.
        """
        kinds = dict(self.direction.buffers)
        if self.open is not None:
            kinds["snapshot"] = self.snapshot
        tensors = {
            f"{kind}.{name}": self.shards.whole(index, tensor)
            for kind, buffers in kinds.items()
            for index, (name, tensor) in enumerate(zip(self.names, buffers))
        }
        values = {
            "direction": self.direction.name,
            "direction_state": self.direction.state_dict(),
            "steps_seen": self.clock.steps_seen,
            "steps_in_block": self.clock.steps_in_block,
            "lr_sums": self.clock.lr_sums,
            "peak_rate": self.clock.peak_rate,
            "reach": self.reach,
        }
        return tensors, values

    @torch.no_grad()
    def load_state_dict(self, tensors: dict[str, Tensor], values: dict, leap: Leap | None = None) -> None:
        """
        Restore what [`state_dict`] returned; `leap` is the leap that was open. A direction other than the one that was
        saved starts anew.

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
        in_order = {
            kind: [self.shards.part(index, saved[name]) for index, name in enumerate(self.names)]
            for kind, saved in kinds.items()
        }
        snapshot = in_order.pop("snapshot", None)
        self.open = leap
        if leap is not None:
            buffers = [self.context.buffer(parameter, dtype=parameter.dtype) for parameter in self.parameters]
            self.snapshot = [buffer.copy_(saved) for buffer, saved in zip(buffers, snapshot)]
            self._saved = set(range(len(self.parameters)))
        self.clock.steps_seen = values["steps_seen"]
        self.clock.steps_in_block = values["steps_in_block"]
        self.clock.lr_sums = list(values["lr_sums"])
        self.clock.lr_sum = max(self.clock.lr_sums, default=0.0)
        self.clock.peak_rate, self.reach = values["peak_rate"], values["reach"]
        if values["direction"] == self.direction.name:
            self.direction.load_state_dict(in_order, values["direction_state"])


def _add(parameter: torch.nn.Parameter, delta: Tensor) -> None:
    delta = delta.to(parameter.device)  # waits for the copy: all parameters share the scratch that it is in
    if parameter.dtype == torch.float32:
        parameter.add_(delta)
    else:
        # Added in fp32 and rounded once: a bf16 weight must not lose what it can hold of a small delta.
        parameter.copy_(parameter.float().add_(delta))
