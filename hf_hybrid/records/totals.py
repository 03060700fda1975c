"""
The sum over the records of a memory profile, for its summary, the report and the model card. Standard library only.

A record is a line of `steps.jsonl`; docs/profiling.md has its fields.
"""

from __future__ import annotations

from typing import Any

from hf_hybrid.records.readings import as_dict, number, peak_of, reading

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
    """
    The sum over the records of a run: by phase the spread of every reading and the mean bytes by category, and the
    highest peak.
    """

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
