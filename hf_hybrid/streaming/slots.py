"""Which unit lies in which device slot: least-recently-needed out first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable

import torch

from hf_hybrid.streaming.transfers import Slot


class SlotPool:
    """
    A fixed number of equal device buffers.

    `ahead + 1` of them serve the unit that computes and those fetched ahead; the other `kept` hold units after their
    use, for when they are needed again.

    Args:
        size (`int`): Bytes of a slot: the largest unit.
        ahead (`int`): Units fetched ahead.
        kept (`int`): Units that may stay after their use.
    """

    def __init__(self, size: int, *, ahead: int, kept: int, device: torch.device):
        self.kept = kept
        self.slots = [Slot(size, device) for _ in range(ahead + 1 + kept)]
        self.free = list(self.slots)
        self.nbytes = size * len(self.slots)
        self._held: OrderedDict[Hashable, Slot] = OrderedDict()
        self._in_use: set[Hashable] = set()

    def find(self, unit: Hashable) -> Slot | None:
        """The slot that holds the unit, if any."""
        return self._held.get(unit)

    def take(self, unit: Hashable) -> Slot | None:
        """A slot for the unit, its own if it still lies in one; `None` if all are in use."""
        slot = self._held.get(unit)
        if slot is None:
            if not self.free and not self._evict():
                return None
            slot = self.free.pop()
        self._held[unit] = slot
        self._held.move_to_end(unit)
        self._in_use.add(unit)
        return slot

    def give_back(self, unit: Hashable) -> None:
        """The unit is not needed for now; it stays where it is as long as there is room."""
        self._in_use.discard(unit)
        while sum(held not in self._in_use for held in self._held) > self.kept:
            self._evict()

    def forget(self, unit: Hashable) -> None:
        """What the slot holds of the unit is no longer true."""
        if unit in self._held and unit not in self._in_use:
            self.free.append(self._held.pop(unit))

    def _evict(self) -> bool:
        for unit in self._held:
            if unit not in self._in_use:
                self.free.append(self._held.pop(unit))
                return True
        return False
