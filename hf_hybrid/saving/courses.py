"""
What the log of a run knows of its steps, and where two courses of the same steps differ.

A replay compares the run with steps made again. So does a run that goes on after its processes drifted apart: the
losses of each process before they were joined tell which of them was wrong first.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

WIDTH = 8
"""Characters of a print."""


@dataclass
class Course:
    """
    What a log knows of some steps.

    Attributes:
        batches (`dict[int, list[str]]`): By step, a print of its batches for each process.
        losses (`dict[int, list[str]]`): By step, a print of the losses of its micro-batches for each process.
        numbers (`dict[int, str]`): By step, a print of its loss and gradient norm over all processes.
        states (`dict[int, dict]`): By step, hashes of weights and states after it: one, or one for each process.
        files (`dict[int, dict]`): By step, checksums of the files of its checkpoint that hold weights or states.
    """

    batches: dict[int, list[str]] = field(default_factory=dict)
    losses: dict[int, list[str]] = field(default_factory=dict)
    numbers: dict[int, str] = field(default_factory=dict)
    states: dict[int, dict[str, str | list[str]]] = field(default_factory=dict)
    files: dict[int, dict[str, str]] = field(default_factory=dict)

    @classmethod
    def of(cls, lines: Iterable[dict], start: int, end: int) -> Course:
        """Read the digests of the steps behind `start`, up to `end`."""
        found = cls()
        for line in lines:
            if start < line["step"] <= end and isinstance(line.get("sealed"), dict):
                found.files[line["step"]] = line["sealed"]
            digests = line.get("digests")
            if not isinstance(digests, dict):
                continue
            if start < line["step"] <= end and "weights" in digests:
                found.states[line["step"]] = {kind: digests[kind] for kind in ("weights", "optimizer")}
            for place in range(len(digests.get("steps", "")) // WIDTH):
                step, part = digests["from"] + place, slice(place * WIDTH, (place + 1) * WIDTH)
                if start < step <= end:
                    found.numbers[step] = digests["steps"][part]
                    found.batches[step] = [of_process[part] for of_process in digests["batches"]]
                    found.losses[step] = [of_process[part] for of_process in digests["losses"]]
        return found


@dataclass
class Difference:
    """The first difference of two courses: the step, what differs in it, and the processes in which it does."""

    step: int
    what: str
    processes: list[int]


def first_difference(one: Course, other: Course) -> Difference | None:
    """Return the first step in which two courses differ, as far as both know it."""
    for step in sorted({*one.numbers, *one.states, *one.files}):
        if step in one.numbers and step in other.numbers:
            for what in ("batches", "losses"):
                first, second = getattr(one, what)[step], getattr(other, what)[step]
                if first != second:
                    return Difference(step, what, differing(first, second))
            if one.numbers[step] != other.numbers[step]:
                return Difference(step, "gradients", [])
        for kind in ("weights", "optimizer") if step in one.states and step in other.states else ():
            if one.states[step][kind] != other.states[step][kind]:
                return Difference(step, kind, differing(one.states[step][kind], other.states[step][kind]))
        first, second = one.files.get(step, {}), other.files.get(step, {})
        if differ := [name for name in sorted(first) if name in second and first[name] != second[name]]:
            return Difference(step, "optimizer" if all("optimizer" in name for name in differ) else "weights", [])
    return None


def differing(one: str | list[str], other: str | list[str]) -> list[int]:
    """Return the processes that differ; none if that is all there are, or if there is one."""
    count = max(len(value) if isinstance(value, list) else 1 for value in (one, other))
    pairs = list(zip(*(value if isinstance(value, list) else [value] * count for value in (one, other))))
    found = [process for process, (first, second) in enumerate(pairs) if first != second]
    return found if len(found) < count else []
