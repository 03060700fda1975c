"""CPU time of training steps, for benchmarks that ask what something costs."""

from __future__ import annotations

import statistics
import time
import types
from collections.abc import Callable
from typing import Any

from transformers import TrainerCallback


class StepClock(TrainerCallback):
    """CPU seconds from the end of a step to the end of the next. The first step, which initialises, is left out."""

    def __init__(self):
        self.ends: list[float] = []

    def on_step_end(self, args, state, control, **kwargs):
        self.ends.append(time.process_time())

    @property
    def steps(self) -> list[float]:
        return [after - before for before, after in zip(self.ends, self.ends[1:])]


class Stopwatch:
    """Adds up the CPU seconds spent in functions."""

    def __init__(self):
        self.seconds = 0.0

    def around(self, function: Callable) -> Callable:
        """Wrap `function` so that its seconds are added."""

        def timed(*args, **kwargs):
            start = time.process_time()
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds += time.process_time() - start

        return timed


_METHODS: dict[tuple[type, str], Callable] = {}


def put_around(trainer: Any, name: str, wrap: Callable[[Callable], types.FunctionType]) -> None:
    """
    Wrap a method of all trainers of this one's class, in place of what was put around it before.

    Where a user has a method that sees micro-batches, the package leaves nothing out. A clock only looks on, so what it
    puts there claims to be of the trainer's module.
    """
    kind = type(trainer)
    around = wrap(_METHODS.setdefault((kind, name), getattr(kind, name)))
    names = {**around.__globals__, "__name__": kind.__module__}
    setattr(kind, name, types.FunctionType(around.__code__, names, name, around.__defaults__, around.__closure__))


def paired_ratio(train: Callable[[str, StepClock], None], base: str, other: str, rounds: int) -> dict:
    """
    Median seconds of a step of `other` over those of `base`, run in turn.

    A machine's speed drifts over minutes. Runs that follow each other closely share it, so each ratio is of one pair,
    and the order within a pair alternates.

    Args:
        train (`Callable`): Trains the named arm once, with a clock among its callbacks.
        rounds (`int`): Pairs; one more is run first to warm caches and the allocator.
    """
    medians: dict[str, list[float]] = {base: [], other: []}
    for number in range(rounds + 1):
        for arm in sorted(medians, reverse=bool(number % 2)):
            clock = StepClock()
            train(arm, clock)
            if number:
                medians[arm].append(statistics.median(clock.steps))
    ratios = sorted(a / b for a, b in zip(medians[other], medians[base]))
    return {
        "rounds": rounds,
        "seconds_per_step": medians,
        "ratio": {"median": statistics.median(ratios), "least": ratios[0], "most": ratios[-1]},
    }
