"""
Reading what a run wrote: JSON that may be damaged, and numbers out of it. Standard library only.

A run may have been killed, a disk may have been full, and anybody may have edited a file. What cannot be read is left
out with a note, and a value of another type than expected counts as absent.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hf_hybrid.part import Phase

PHASES = tuple(phase.value for phase in Phase)
"""Names of the phases in records, in the order of `Phase.index`."""

# Files.


def read_json(path: Path, notes: list[str]) -> object:
    """Return the value in a JSON file; `None` if there is none or it is broken, which is noted."""
    if not path.is_file():
        return None
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        notes.append(f"`{path.name}` in `{path.parent.name}` cannot be read and was left out.")
        return None


def read_lines(path: Path, notes: list[str]) -> Iterator[dict]:
    """Yield the objects of a JSON Lines file that have a step. A killed run may have left half of a line."""
    if not path.is_file():
        return
    lines = broken = 0
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            for line in filter(str.strip, file):
                lines += 1
                try:
                    entries = with_steps([json.loads(line)])
                except (ValueError, RecursionError):
                    entries = []
                broken += not entries
                yield from entries
    except OSError as error:
        notes.append(f"`{path.name}` cannot be read: {error.strerror}.")
    if broken:
        notes.append(f"{broken} of {lines} lines of `{path.name}` cannot be read and were left out.")


def numbered(folder: Path, pattern: str) -> list[tuple[int, Path]]:
    """Return the entries of a folder whose whole name matches, in the order of the number that is the first group."""
    matches = ((re.fullmatch(pattern, path.name), path) for path in folder.glob("*"))
    return sorted((int(match[1]), path) for match, path in matches if match)


# Values.


def number(value: object) -> float | None:
    """`value` if it is a number that a plot can show, else `None`: files may hold nulls, strings, NaN."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return value if -1e100 < value < 1e100 else None


def count_of(value: object) -> int | None:
    """`value` as a number of steps, leaps or passes; `None` if it cannot be one."""
    count = number(value)
    return int(count) if count is not None and 0 <= count < 2**53 else None


def as_dict(value: object) -> dict[str, Any]:
    """`value` if it is a dictionary, else an empty one."""
    return value if isinstance(value, dict) else {}


def dicts_of(value: object) -> list[dict]:
    """The dictionaries in `value` if it is a list."""
    return [entry for entry in value if isinstance(entry, dict)] if isinstance(value, list) else []


def texts_of(value: object) -> list[str]:
    """The texts in `value` if it is a list."""
    return [entry for entry in value if isinstance(entry, str)] if isinstance(value, list) else []


def with_steps(entries: object) -> list[dict]:
    """The dictionaries in a list that have a step, which is a whole number in the result."""
    steps = ((entry, count_of(entry.get("step"))) for entry in dicts_of(entries))
    return [{**entry, "step": step} for entry, step in steps if step is not None]


def reading(entry: dict, name: str) -> float | None:
    """A number out of a record by its dotted name: `device.peak_allocated`."""
    part, _, key = name.partition(".")
    value = entry.get(part)
    return number(as_dict(value).get(key) if key else value)


def peak_of(entry: dict) -> tuple[float | None, str]:
    """The highest use within a record, and where: of torch's allocator if there is a device, else of the process."""
    peak = reading(entry, "device.peak_allocated")
    if peak is not None:
        return peak, "device"
    peak = reading(entry, "host.peak_rss")
    return reading(entry, "host.rss") if peak is None else peak, "host"


# The sum over the records of a memory profile, for its summary, the report and the model card.

READINGS = {
    "step_seconds": "step_seconds",
    "measured": "measured",
    "allocated": "device.allocated",
    "peak_allocated": "device.peak_allocated",
    "reserved": "device.reserved",
    "peak_reserved": "device.peak_reserved",
    "nvml_used": "nvml.used",
    "rss": "host.rss",
    "peak_rss": "host.peak_rss",
    "pinned": "host.pinned",
}
"""Where a record has them. Mean, max and min of each are kept by phase."""


class Totals:
    """The sum over records: by phase the spread of every reading and the mean bytes by category; the highest peak."""

    def __init__(self) -> None:
        self.phases: dict[str, dict[str, Any]] = {}
        self.peak: dict | None = None

    def add(self, record: dict) -> None:
        """Count one more record. A line without a phase is none; what is no number in one counts as absent."""
        name, (peak, where) = record.get("phase"), peak_of(record)
        if not isinstance(name, str):
            return
        phase = self.phases.setdefault(name, {"records": 0, "accounted": None})
        phase["records"] += 1
        for label, place in READINGS.items():
            if (value := reading(record, place)) is not None:
                spread = phase.setdefault(label, {"count": 0, "mean": 0.0, "max": value, "min": value})
                spread["count"] += 1
                spread["mean"] += (value - spread["mean"]) / spread["count"]
                spread["max"], spread["min"] = max(spread["max"], value), min(spread["min"], value)
        if held := as_dict(record.get("held")):
            accounted = phase["accounted"] = phase["accounted"] or {"records": 0}
            accounted["records"] += 1
            values = {"held": held, **{key: record.get(key) for key in ("measured", "unexplained")}}
            _take_in(accounted, values, accounted["records"])
        if peak is not None and (self.peak is None or peak > self.peak["bytes"]):
            self.peak = {"step": record["step"], "phase": name, "where": where, "bytes": peak}


def _take_in(means: dict, values: dict, count: int) -> None:
    """Take values into the means over `count` records; what some of them lack counts as nothing there."""
    for key, value in values.items():
        if isinstance(value, dict):
            _take_in(means.setdefault(key, {}), value, count)
        else:
            means[key] = means.get(key, 0.0) + ((number(value) or 0) - means.get(key, 0.0)) / count
