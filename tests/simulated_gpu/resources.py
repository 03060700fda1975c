"""The resources of a timed host (clock.py): its memory, its last-level cache, and its threads, which take turns."""

from __future__ import annotations

import math
import threading
from bisect import bisect_right
from collections import OrderedDict
from concurrent.futures import Future
from dataclasses import dataclass, field

MAIN, UPDATE = "host", "update"


class HostMemory:
    """
    How many bytes per second of the host's memory are in use, from when on.

    Copies are entered when they are enqueued, operations of the host when they end.
    """

    def __init__(self, rate: float):
        self.rate = rate
        self._times, self._copied, self._worked = [0.0], [0.0], [0.0]
        """From each time to the next: bytes per second of copies, and of all."""

    def copy(self, start: float, size: float, rate: float) -> float:
        """Enter a copy over a bus of this rate, and return its end. Other copies were there first."""
        end, parts = self._plan(start, size, lambda index: min(rate, max(self.rate - self._copied[index], 0)))
        for begin, until, used in parts:
            self._enter(begin, until, used, copied=True)
        return end

    def end_of_work(self, start: float, size: float) -> float:
        """When an operation of the host would end that moves so many bytes, as far as is known by now."""
        return self._plan(start, size, self._left)[0]

    def work(self, start: float, size: float) -> float:
        """Enter an operation of the host, and return its end."""
        end, parts = self._plan(start, size, self._left)
        for begin, until, used in parts:
            self._enter(begin, until, used, copied=False)
        return end

    def forget(self, until: float) -> None:
        """Drop what nothing asks for any more."""
        index = bisect_right(self._times, until) - 1
        if index > 0:
            del self._times[:index], self._copied[:index], self._worked[:index]

    def _left(self, index: int) -> float:
        return max(self.rate - self._copied[index] - self._worked[index], 0)

    def _plan(self, start: float, size: float, rate_at) -> tuple[float, list[tuple[float, float, float]]]:
        parts, index = [], max(bisect_right(self._times, start) - 1, 0)
        while size > 0:
            rate = rate_at(index)
            until = self._times[index + 1] if index + 1 < len(self._times) else math.inf
            end = start + size / rate if rate > 0 else math.inf
            parts.append((start, min(end, until), rate))
            if end <= until:
                return end, parts
            size -= (until - start) * rate
            start, index = until, index + 1
        return start, parts

    def _enter(self, begin: float, until: float, used: float, *, copied: bool) -> None:
        for time in (begin, until):
            index = bisect_right(self._times, time) - 1
            if index < 0 or self._times[index] != time:
                self._times.insert(index + 1, time)
                for rates in (self._copied, self._worked):
                    rates.insert(index + 1, rates[index] if index >= 0 else 0.0)
        rates = self._copied if copied else self._worked
        for index in range(bisect_right(self._times, begin) - 1, bisect_right(self._times, until) - 1):
            rates[index] += used


class Cache:
    """Which tensors of the host are in its last-level cache. The one that was used longest ago leaves first."""

    def __init__(self, size: float):
        self.size, self._used = size, 0
        self._held: OrderedDict[tuple[int, int], bool] = OrderedDict()
        """By address and bytes: whether it was written to."""

    def move(self, reads: list, writes: list) -> int:
        """Return the bytes that an operation moves from or to memory."""
        moved = 0
        for tensor, written in [*((t, False) for t in reads), *((t, True) for t in writes)]:
            key, size = (tensor.data_ptr(), tensor.nbytes), tensor.nbytes
            known = self._held.pop(key, None)
            moved += size * (known is None) + size * (written and not known)
            self._held[key] = bool(known) or written
            self._used += size * (known is None)
        while self._used > self.size:
            self._used -= self._held.popitem(last=False)[0][1]
        return moved

    def lose(self, tensor) -> None:
        """Something else than the host has written to the tensor."""
        if self._held.pop((tensor.data_ptr(), tensor.nbytes), None) is not None:
            self._used -= tensor.nbytes


@dataclass
class Actor:
    """A thread of the host, or several of which one runs at a time."""

    name: str
    time: float = 0.0
    runs: bool = False
    """Else it has nothing to do, or waits for another actor."""
    waits_for: Future | None = None
    tasks: list[float] = field(default_factory=list)
    """When each was submitted that is not done."""


class Turns:
    """Lets the actor with the earliest time run, and no other."""

    def __init__(self):
        self.actors = {name: Actor(name) for name in (MAIN, UPDATE)}
        self.actors[MAIN].runs = True
        self._turn, self._changed = MAIN, threading.Condition()

    @property
    def me(self) -> Actor:
        """The actor of this thread."""
        return self.actors[UPDATE if threading.current_thread().name.startswith("lazy_update") else MAIN]

    def give_way(self) -> None:
        """Let earlier actors run; return when this one is the earliest."""
        me = self.me
        with self._changed:
            if any(other.runs and other.time < me.time for other in self.actors.values()):
                self._next()
                self._changed.wait_for(lambda: self._turn == me.name)

    def _next(self) -> None:
        running = [actor for actor in self.actors.values() if actor.runs]
        self._turn = min(running, key=lambda actor: actor.time).name if running else MAIN
        self._changed.notify_all()

    # The thread of the update.

    def submitted(self) -> None:
        """A task was given to the thread of the update."""
        with self._changed:
            update = self.actors[UPDATE]
            update.tasks.append(self.me.time)
            if not update.runs:
                update.runs, update.time = True, max(update.time, self.me.time)

    def begin_task(self) -> None:
        """On the thread of the update: wait for its turn."""
        me = self.me
        with self._changed:
            me.time = max(me.time, me.tasks[0])
            self._changed.wait_for(lambda: self._turn == me.name or self._only(me))
            self._turn = me.name
        self.give_way()

    def _only(self, me: Actor) -> bool:
        return not any(other.runs for other in self.actors.values() if other is not me)

    def end_task(self, future: Future) -> None:
        """On the thread of the update: it may wait for the next task now, and another actor for this one."""
        with self._changed:
            me, main = self.me, self.actors[MAIN]
            future.over_at = me.time
            me.tasks.pop(0)
            me.runs = bool(me.tasks)
            if me.runs:
                me.time = max(me.time, me.tasks[0])
            if main.waits_for is future:
                main.runs, main.waits_for, main.time = True, None, max(main.time, future.over_at)
            self._next()

    def wait_for(self, future: Future) -> float:
        """Let the other actor run until the future is there, and return the seconds that this took."""
        me = self.me
        with self._changed:
            before = me.time
            if not hasattr(future, "over_at"):
                me.runs, me.waits_for = False, future
                self._next()
                self._changed.wait_for(lambda: self._turn == me.name and me.runs)
            me.time = max(me.time, future.over_at)
            return me.time - before
