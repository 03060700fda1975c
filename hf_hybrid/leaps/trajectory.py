"""
The only place where a leap changes the weights.

A leap adds `gain * lr_sum * displacement` to every trainable parameter. `lr_sum` is the sum of the learning rates of
the real steps since the last leap. `displacement` is what a direction (directions.py) returns per unit of `lr_sum`.
At a gain of 1 a leap goes about as far as those steps went. The optimizer's moments and its step counter do not change.
Gradient clipping does not apply. Instead, the norm of a leap is capped at `max_relative_norm` times the norm of the
weights, and at a maximum speed if the direction names one (`most_per_step`). The speed limits leaps when the learning
rate is too high: above some rate they go no farther, and they still shrink as the rate decays.

A leap can hurt, so it is a transaction:

1. `with trajectory.trial(leap)` takes a snapshot of the weights and opens the leap. `trajectory.open` is the only
   answer to "is a leap open?".
2. Inside, `trajectory.leap(gain)` moves the weights; a second call starts from the same snapshot.
3. When the block ends, a rejected leap is undone from the snapshot, bit for bit. So is a leap whose block raised any
   error, for example out of memory. Otherwise `keep()` has written the leap, and a new block of real steps begins.
4. The snapshot stays until Correct has judged the leap: `roll_back()` undoes the leap, `accept()` drops the snapshot.

Weights may be stored on another device than they compute on (layers that are streamed from the host). A leap under test
is then one number, its gain. When such weights are copied to the device, the displacement is added (`displaced`), so a
rejected leap costs nothing. `keep()` writes the displacement into the weights themselves.

FSDP2 may shard the weights over processes. Everything here then works on the shards of this process, and uses `shards`
(run/weights.py) for results that need the other processes: sums over all weights, and whole tensors for a checkpoint.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Collection, Generator, Iterable

import torch
from torch import Tensor

from hf_hybrid.leaps.directions import Clock, DirectionContext, DirectionFactory
from hf_hybrid.part import Leap
from hf_hybrid.run.weights import TrainedWeights, inner_product, sum_of_squares


class Trajectory:
    """
    The weights along a run: observes real steps, applies a leap, and undoes it exactly.

    Buffers live beside the weights, or with `host` in host memory, pinned where there is a GPU: the direction's own, in
    fp32, and the snapshot of the weights before the last leap, in the dtype of the weights.

    `memory_steps` is the length of the direction's averages in real steps, `max_relative_norm` the cap of a leap's norm
    over the norm of the weights. `matrices` names the hidden matrices, for directions that treat them differently.
    """

    def __init__(
        self,
        weights: TrainedWeights,
        *,
        direction: DirectionFactory,
        memory_steps: int,
        max_relative_norm: float = 0.5,
        matrices: Collection[str] = (),
        host: bool = False,
    ):
        self.weights, self.shards, self.parameters = weights, weights.shards, weights.parameters
        self.store, self.max_relative_norm = weights.store, max_relative_norm
        self.clock = Clock(lr_sums=[0.0] * len(weights.optimizer.param_groups))
        self.context = DirectionContext(weights, self.clock, memory_steps=memory_steps, host=host, matrices=matrices)
        self.direction = direction(self.context)
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

    def opened(self) -> Leap:
        """Return the leap that can still be undone, or raise `RuntimeError`."""
        if self.open is None:
            raise RuntimeError("There is no leap that could be rolled back.")
        return self.open

    @torch.no_grad()
    def observe_gradients(self) -> None:
        """Show the direction the gradients of a real step. Call this between clipping and the optimizer's step."""
        self.clock.steps_seen += 1
        self.direction.observe_gradients()

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

    # A leap.

    @contextlib.contextmanager
    def trial(self, leap: Leap) -> Generator[None]:
        """
        Try a leap: the weights change inside the block by [`leap`], and stay changed only if it ends with [`keep`].

        An exception, of whatever kind, restores the weights of before the block bit for bit and passes on. So does the
        end of the block without a call of [`keep`].
        """
        if self.open is not None:
            raise RuntimeError(f"The leap made before step {self.open.step} is still open: accept it or roll it back.")
        self.store.finish_updates()
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
        leap, clock = self.opened(), self.clock
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
        leap = self.opened()
        elsewhere = sorted(set(range(len(self.parameters))) - self._in_place)
        if elsewhere:
            self._save(elsewhere)  # all of it before the first write: what raises from here on can be undone
            for index in elsewhere:
                delta = self._delta(index, leap.gain)
                if delta is not None:
                    _add(self.parameters[index], delta)
            self.store.changed()
        leap.under_test = False
        self._begin_block(undoable=True)

    def accept(self) -> None:
        """Close the open leap, which was judged to be good. It can no longer be undone."""
        self.open = None
        self._saved.clear()

    @torch.no_grad()
    def roll_back(self) -> None:
        """Restore the weights from before the open leap, bit for bit."""
        leap = self.opened()
        if not leap.under_test:
            self.store.finish_updates()  # real steps were made since
        self._restore()
        leap.under_test, self.open = False, None
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
        return [self.direction.predicted_gradient(index) for index in range(len(self.parameters))]

    def _delta(self, index: int, gain: float) -> Tensor | None:
        parameter = self.parameters[index]
        out = self.context.scratch(parameter, self.context.device_of(parameter))
        displacement = self.direction.displacement(index, out)
        return None if displacement is None else displacement.mul_(gain * self.context.lr_sum(index))

    def _apply(self, gain: float) -> tuple[float, float]:
        """Write the leap into weights that compute in place, and return its relative norm and predicted decrease."""
        self.formed += 1
        squares, weights, linear = [], [], []
        for index, parameter in enumerate(self.parameters):
            delta = self._delta(index, gain)
            weights.append(sum_of_squares(parameter.detach()))
            if delta is None:
                continue
            gradient = self.direction.predicted_gradient(index)
            if gradient is not None:
                linear.append(-inner_product(delta, gradient))
            squares.append(sum_of_squares(delta))
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
        self.direction.reset()
        self.clock.steps_seen = 0

    def _buffers(self) -> dict[str, list[Tensor]]:
        return {
            "memory": [],
            "anchor": [],
            **self.direction.buffers,
            "snapshot": self.snapshot,
            "scratch": [*self.context.scratches.values()],
        }

    def tensors_held(self) -> list[Tensor]:
        return [tensor for tensors in self._buffers().values() for tensor in tensors]

    def bytes_held(self) -> dict[str, int]:
        return {kind: sum(t.numel() * t.element_size() for t in held) for kind, held in self._buffers().items()}

    def state_dict(self) -> tuple[dict[str, Tensor], dict]:
        """
        Whole tensors (keyed `kind.parameter`) and plain values; the snapshot only while a leap is open. All processes
        must call this. Where they share the weights, the first one gets the tensors.
        """
        kinds = dict(self.direction.buffers)
        if self.open is not None:
            kinds["snapshot"] = self.snapshot
        values = {
            "direction": self.direction.name,
            "direction_state": self.direction.state_dict(),
            "steps_seen": self.clock.steps_seen,
            "steps_in_block": self.clock.steps_in_block,
            "lr_sums": self.clock.lr_sums,
            "peak_rate": self.clock.peak_rate,
            "reach": self.reach,
        }
        return self.weights.whole(kinds), values

    @torch.no_grad()
    def load_state_dict(self, tensors: dict[str, Tensor], values: dict, leap: Leap | None = None) -> None:
        """
        Restore what [`state_dict`] returned; `leap` is the leap that was open. A direction other than the one that was
        saved starts anew.
        """
        in_order = self.weights.in_order(tensors)
        snapshot = in_order.pop("snapshot", [])
        self.open = leap
        if leap is not None:
            buffers = [self.context.buffer(parameter, dtype=parameter.dtype) for parameter in self.parameters]
            self.snapshot = [buffer.copy_(saved) for buffer, saved in zip(buffers, snapshot, strict=True)]
            self._saved = set(range(len(self.parameters)))
        self.clock.steps_seen = values["steps_seen"]
        self.clock.steps_in_block = values["steps_in_block"]
        self.clock.lr_sums = list(values["lr_sums"])
        self.clock.lr_sum = max(self.clock.lr_sums, default=0.0)
        self.clock.peak_rate, self.reach = values["peak_rate"], values["reach"]
        if values["direction"] == self.direction.name:
            self.direction.load_state_dict(in_order, values["direction_state"])


def _add(parameter: Tensor, delta: Tensor) -> None:
    delta = delta.to(parameter.device)  # waits for the copy: all parameters share the scratch that it is in
    if parameter.dtype == torch.float32:
        parameter.add_(delta)
    else:
        # Added in fp32 and rounded once: a bf16 weight must not lose what it can hold of a small delta.
        parameter.copy_(parameter.float().add_(delta))
