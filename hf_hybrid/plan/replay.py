"""From what a few layers held to what all of them would hold, moment by moment."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from hf_hybrid.plan.request import Activations
from hf_hybrid.plan.step import StepTrace
from hf_hybrid.plan.tracker import CATEGORIES, Held

WIDTH = len(CATEGORIES)
_ACTIVATIONS = CATEGORIES.index("activations")

Bytes = tuple[int, ...]
"""By category, in the order of `CATEGORIES`."""


@dataclass(frozen=True)
class Peak:
    """The largest moment of a step: bytes by category, and when it is."""

    held: Bytes
    stage: str

    @property
    def total(self) -> int:
        """All categories together."""
        return sum(self.held)

    def get(self, category: str) -> int:
        """Bytes of one category at this moment."""
        return self.held[CATEGORIES.index(category)]


def replay(trace: StepTrace, stands_for: Sequence[int]) -> Peak:
    """
    The peak of the whole model.

    Layers of a kind hold the same. At each moment of the trace, the layers that are missing from it hold what those
    that stand for them hold before or after they computed.

    Args:
        trace (`StepTrace`): Of the excerpt.
        stands_for (`Sequence[int]`): For each layer of the whole, the traced layer that stands for it.
    """
    missing = _Missing(trace, stands_for)
    best = Peak((0,) * WIDTH, "forward")
    for moment in trace.moments:
        if moment.where < trace.layers:
            extra = missing.while_computing(moment.stage, moment.where)
        else:
            extra = missing.outside(moment.held)
        held = tuple(a + b for a, b in zip(_all_owners(moment.held), extra))
        if sum(held) > best.total:
            best = Peak(held, moment.stage)
    return best


def _of(held: Held, owner: int) -> Bytes:
    return held[owner * WIDTH : (owner + 1) * WIDTH]


def _all_owners(held: Held) -> Bytes:
    return tuple(sum(held[category::WIDTH]) for category in range(WIDTH))


def _sum(parts: Iterable[Bytes]) -> Bytes:
    totals = [0] * WIDTH
    for part in parts:
        for index, value in enumerate(part):
            totals[index] += value
    return tuple(totals)


def _minus(first: Bytes, second: Bytes) -> Bytes:
    return tuple(a - b for a, b in zip(first, second))


class _Missing:
    """What layers hold that are not in the trace."""

    def __init__(self, trace: StepTrace, stands_for: Sequence[int]):
        self.trace, self.stands_for = trace, stands_for
        self.extra = [sum(1 for layer in stands_for if layer == traced) - 1 for traced in range(trace.layers)]
        self._known: dict[tuple[str, int], Bytes] = {}

    def outside(self, held: Held) -> Bytes:
        """While head, loss, embeddings or the update compute: all layers are at the same point."""
        return _sum(
            tuple(count * value for value in _of(held, layer)) for layer, count in enumerate(self.extra) if count
        )

    def while_computing(self, stage: str, layer: int) -> Bytes:
        """While a layer computes: at its place in the whole where the others hold most."""
        if (stage, layer) not in self._known:
            places = [place for place, stands in enumerate(self.stands_for) if stands == layer]
            candidates = (self._at(stage, layer, place) for place in places)
            self._known[stage, layer] = max(candidates, key=sum)
        return self._known[stage, layer]

    def _at(self, stage: str, layer: int, place: int) -> Bytes:
        trace = self.trace
        if stage == "forward":
            before, after = trace.after_forward, trace.begin
        else:
            before, after = trace.before_backward, trace.after_backward
        real = _sum(
            _of(before if index < place else after, stands)
            for index, stands in enumerate(self.stands_for)
            if index != place
        )
        traced = _sum(_of(before if index < layer else after, index) for index in range(trace.layers) if index != layer)
        return _minus(real, traced)


def activations(trace: StepTrace, stands_for: Sequence[int]) -> Activations:
    """
    What streaming the layers needs to know of a step that was traced with activation checkpointing.

    Args:
        trace (`StepTrace`): Of the excerpt; its layers are checkpointed.
        stands_for (`Sequence[int]`): For each layer of the whole, the traced layer that stands for it.
    """
    kept = [_of(trace.before_backward, owner)[_ACTIVATIONS] for owner in range(trace.layers + 1)]
    forward_end = sum(trace.after_forward[_ACTIVATIONS::WIDTH])
    layer = loss = 0
    for moment in trace.moments:
        held = sum(moment.held[_ACTIVATIONS::WIDTH])
        if moment.where < trace.layers and moment.stage == "backward":
            layer = max(layer, held - kept[-1] - sum(kept[: moment.where + 1]))
        elif moment.where == trace.layers and moment.stage != "update":
            loss = max(loss, held - forward_end)
    boundary = math.ceil(sum(kept[layer] for layer in stands_for) / len(stands_for))
    return Activations(always=kept[-1], boundary=boundary, layer=layer, loss=loss)
