"""How the weights moved: since the last leap (`BlockDirection`), and between states some steps apart."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from hf_hybrid import Direction
from hf_hybrid.leaps.directions import DirectionContext

Tensor = torch.Tensor

STATES = 5


class BlockDirection(Direction):
    """A direction that uses how far the weights moved since the last leap; keeps an fp32 copy of them (`anchor`)."""

    def __init__(self, context: DirectionContext):
        super().__init__(context)
        self.buffers["anchor"] = []

    @property
    def block_is_open(self) -> bool:
        return bool(self.buffers["anchor"])

    def block_begins(self, *, undoable: bool) -> None:
        self.context.finish_updates()
        if not self.buffers["anchor"]:
            self.buffers["anchor"] = [self.context.buffer(parameter) for parameter in self.context.parameters]
        for anchor, parameter in zip(self.buffers["anchor"], self.context.parameters):
            anchor.copy_(parameter.detach())

    def moved(self, index: int, out: Tensor) -> Tensor:
        """Displacement of a parameter since the block began, in `out`."""
        return out.copy_(self.context.parameters[index].detach()).sub_(self.buffers["anchor"][index])


class HistoryDirection(BlockDirection):
    """
    Keeps a ring of increments of the weights: displacements by real steps alone, from one state to the next.

    Leaps are part of no increment, because increments are summed from the beginning of each block to its end. While a
    leap is on trial no increment is added to, so that undoing the leap leaves the history as it was.

    Args:
        context (`DirectionContext`): Parameters, optimizer and the place of buffers.
        states (`int`): States to look back on, the current weights included; one fp32 copy of the weights each.
        spacing (`int`, *optional*): Least real steps between them. Default: all states together span
            `context.memory_steps`.

    Raises:
        ValueError: If `states` are too few to fit anything.
    """

    gain, gain_power = 4.0, 2.0
    values_per_weight = 1 + STATES
    least_increments = 1
    """Increments that must be complete before a leap."""

    def __init__(self, context: DirectionContext, states: int = STATES, spacing: int | None = None):
        super().__init__(context)
        if states <= self.least_increments:
            raise ValueError(f"`states` must be at least {self.least_increments + 1} for `{self.name}`, got {states}.")
        self.states = states
        self.spacing = spacing or max(context.memory_steps // states, 1)
        # One slot more than there are increments: the open one, which is being added to.
        self.buffers["history"] = [
            context.buffer(parameter, shape=(states, *parameter.shape), zero=True) for parameter in context.parameters
        ]
        self._undoable = False
        self._since_anchor, self._steps_since_anchor = self._no_rates(), 0
        self._clear()

    def _no_rates(self) -> list[float]:
        return [0.0] * len(self.context.optimizer.param_groups)

    def _clear(self) -> None:
        self._open, self._complete, self._steps_open = 0, 0, 0
        self._rates = [self._no_rates() for _ in range(self.states)]

    @property
    def ready(self) -> bool:
        return self._complete >= self.least_increments

    @property
    def increments(self) -> list[int]:
        """Slots of the complete increments, oldest first."""
        return [(self._open - self._complete + i) % self.states for i in range(self._complete)]

    def rates(self, group: int) -> list[float]:
        """Learning rates of a parameter group added up over each complete increment, oldest first."""
        return [self._rates[slot][group] for slot in self.increments]

    def combine(self, index: int, coefficients: Sequence[float], out: Tensor) -> Tensor:
        """Sum of a parameter's complete increments, oldest first, times `coefficients`; in `out`."""
        history = self.buffers["history"][index]
        by_slot = [0.0] * self.states
        for slot, coefficient in zip(self.increments, coefficients):
            by_slot[slot] = coefficient
        weights = torch.tensor(by_slot, dtype=torch.float32, device=history.device)
        torch.mv(history.view(self.states, -1).T, weights, out=out.view(-1))
        return out

    def observe_step(self, learning_rates: list[float]) -> None:
        if not self.block_is_open:
            return
        self._since_anchor = [total + rate for total, rate in zip(self._since_anchor, learning_rates)]
        self._steps_since_anchor += 1
        if not self._undoable and self._steps_open + self._steps_since_anchor >= self.spacing:
            self.context.finish_updates()
            self._take_in()

    def prepare(self) -> None:
        self._undoable = False
        if self.block_is_open:
            self._take_in()

    def block_begins(self, *, undoable: bool) -> None:
        super().block_begins(undoable=undoable)
        self._undoable = undoable
        self._since_anchor, self._steps_since_anchor = self._no_rates(), 0

    def leap_judged(self) -> None:
        self._undoable = False

    @torch.no_grad()
    def _take_in(self) -> None:
        """Add to the open increment how far the weights moved since the anchor, and close it if it is long enough."""
        if not self._steps_since_anchor:
            return
        parameters = zip(self.context.parameters, self.buffers["anchor"], self.buffers["history"])
        for index, (parameter, anchor, history) in enumerate(parameters):
            history[self._open].add_(self.moved(index, self.context.scratch(anchor, anchor.device)))
            anchor.copy_(parameter.detach())
        rates = self._rates[self._open]
        self._rates[self._open] = [total + rate for total, rate in zip(rates, self._since_anchor)]
        self._steps_open += self._steps_since_anchor
        self._since_anchor, self._steps_since_anchor = self._no_rates(), 0
        if self._steps_open >= self.spacing:
            self._close()

    def _close(self) -> None:
        self._open = (self._open + 1) % self.states
        self._complete = min(self._complete + 1, self.states - 1)
        self._steps_open, self._rates[self._open] = 0, self._no_rates()
        for history in self.buffers["history"]:
            history[self._open].zero_()

    def reset(self) -> None:
        self._clear()
        for history in self.buffers["history"]:
            history.zero_()

    def state_dict(self) -> dict[str, Any]:
        return {
            "states": self.states,
            "open": self._open,
            "complete": self._complete,
            "steps_open": self._steps_open,
            "rates": self._rates,
            "since_anchor": self._since_anchor,
            "steps_since_anchor": self._steps_since_anchor,
            "undoable": self._undoable,
        }

    def load_state_dict(self, buffers: dict[str, list[Tensor]], values: dict[str, Any]) -> None:
        if values["states"] != self.states:
            return  # the run was resumed with another number of states: the history starts anew
        super().load_state_dict(buffers, values)
        self._open, self._complete, self._steps_open = values["open"], values["complete"], values["steps_open"]
        self._rates = [list(rates) for rates in values["rates"]]
        self._since_anchor, self._steps_since_anchor = list(values["since_anchor"]), values["steps_since_anchor"]
        self._undoable = values["undoable"]
