"""Sums over the records of a run: by phase, its peak, its spikes; and the table that shows them."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Iterable, Iterator

from hf_hybrid.plan.accounting import format_bytes

READINGS = {
    "step_seconds": ("step_seconds", None),
    "measured": ("measured", None),
    "allocated": ("device", "allocated"),
    "peak_allocated": ("device", "peak_allocated"),
    "reserved": ("device", "reserved"),
    "peak_reserved": ("device", "peak_reserved"),
    "nvml_used": ("nvml", "used"),
    "rss": ("host", "rss"),
    "peak_rss": ("host", "peak_rss"),
    "pinned": ("host", "pinned"),
}
"""Where a record has them; mean, max and min of each are kept by phase."""


def reading(record: dict, key: str, inner: str | None = None) -> float | None:
    """One number of a record; `None` where it was not measured."""
    value = record.get(key)
    return value if inner is None or value is None else value.get(inner)


def peak_of(record: dict) -> tuple[int, str]:
    """The peak of a record and whose it is: of the allocator where there is a device, else of the process."""
    peak = reading(record, "device", "peak_allocated")
    return (record["host"]["peak_rss"], "host") if peak is None else (peak, "device")


class Spread:
    """Mean, greatest and least of a series."""

    def __init__(self):
        self.count, self.total = 0, 0.0
        self.most, self.least = float("-inf"), float("inf")

    def add(self, value: float) -> None:
        """Count one more value."""
        self.count += 1
        self.total += value
        self.most, self.least = max(self.most, value), min(self.least, value)

    @property
    def mean(self) -> float:
        """Of what was added."""
        return self.total / self.count

    def to_dict(self) -> dict[str, float]:
        """`mean`, `max`, `min`."""
        return {"mean": self.mean, "max": self.most, "min": self.least}


class PhaseTotals:
    """What the records of one phase say together."""

    def __init__(self):
        self.records = 0
        self.spreads: dict[str, Spread] = {}
        self.accounted = 0
        self._held: dict[str, dict[str, int]] = {}
        self._unexplained = self._measured = 0

    def add(self, record: dict) -> None:
        """Count one more record."""
        self.records += 1
        for name, (key, inner) in READINGS.items():
            value = reading(record, key, inner)
            if value is not None:
                self.spreads.setdefault(name, Spread()).add(value)
        if record.get("held") is None:
            return
        self.accounted += 1
        self._unexplained += record["unexplained"]
        self._measured += record["measured"]
        for category, places in record["held"].items():
            sums = self._held.setdefault(category, dict.fromkeys(places, 0))
            for place, count in places.items():
                sums[place] += count

    def categories(self) -> dict[str, dict[str, float]]:
        """Mean bytes by category and place over the records that were accounted."""
        return {
            category: {place: count / self.accounted for place, count in sums.items()}
            for category, sums in self._held.items()
        }

    def to_dict(self) -> dict:
        """Plain values for JSON."""
        accounted = None
        if self.accounted:
            accounted = {
                "records": self.accounted,
                "measured": self._measured / self.accounted,
                "held": self.categories(),
                "unexplained": self._unexplained / self.accounted,
            }
        spreads = {name: spread.to_dict() for name, spread in self.spreads.items()}
        return {"records": self.records, **spreads, "accounted": accounted}


class RunTotals:
    """
    All records of a run.

    Args:
        spike_threshold (`float`): See [`SpikeWatch`].
    """

    def __init__(self, spike_threshold: float):
        self.phases: dict[str, PhaseTotals] = {}
        self.peak: dict | None = None
        self.most_measured = 0
        self.fullest: dict | None = None
        """Of the accounted records, the one that measured most."""
        self.spikes = SpikeWatch(spike_threshold)

    def add(self, record: dict) -> None:
        """Count one more record."""
        self.phases.setdefault(record["phase"], PhaseTotals()).add(record)
        peak, where = peak_of(record)
        if self.peak is None or peak > self.peak["bytes"]:
            self.peak = {"bytes": peak, "where": where, "step": record["step"], "phase": record["phase"]}
        self.most_measured = max(self.most_measured, record["measured"])
        self.spikes.add(record)
        if record.get("held") is not None:
            if self.fullest is None or record["measured"] > self.fullest["measured"]:
                self.fullest = record

    def add_all(self, records: Iterable[dict]) -> None:
        """Count what an earlier part of the run wrote; lines that are no such records are passed over."""
        for record in records:
            if isinstance(record, dict) and {"step", "phase", "host", "measured"} <= record.keys():
                self.add(record)

    def shares(self) -> dict | None:
        """What the fullest accounted record consists of, as fractions of what was measured."""
        record = self.fullest
        if record is None or record["measured"] <= 0:
            return None
        places = ("device",) if record["device"] is not None else ("device", "host")
        parts = {name: sum(held[place] for place in places) for name, held in record["held"].items()}
        parts["unexplained"] = record["unexplained"]
        return {
            "step": record["step"],
            "phase": record["phase"],
            "measured": record["measured"],
            "shares": {name: count / record["measured"] for name, count in parts.items()},
        }


class SpikeWatch:
    """
    Finds steps whose peak stands out of the last ones of their phase.

    Args:
        threshold (`float`): A spike is that much, as a fraction, above the median of the last steps of the phase.
    """

    WINDOW, LEAST, KEPT = 20, 5, 1000
    """Steps that the median is over at most and at least; spikes that are kept."""

    def __init__(self, threshold: float):
        self.threshold = threshold
        self.found: list[dict] = []
        self._peaks: dict[str, deque[int]] = {}
        self._high: set[str] = set()
        self._accounted: dict[str, dict] = {}
        self._last: dict[str, dict] = {}

    def rises(self, phase: str, peak: int) -> bool:
        """Whether this peak would begin a spike: several high steps on end are one."""
        return phase not in self._high and self._stands_out(phase, peak)

    def add(self, record: dict) -> None:
        """Judge one more record."""
        phase, (peak, where) = record["phase"], peak_of(record)
        high = self._stands_out(phase, peak)
        if high and phase not in self._high and len(self.found) < self.KEPT:
            usual = statistics.median(self._peaks[phase])
            spike = {"step": record["step"], "phase": phase, "where": where, "bytes": peak, "usual": usual}
            self.found.append({**spike, "changed": self._changes(record)})
        (self._high.add if high else self._high.discard)(phase)
        self._peaks.setdefault(phase, deque(maxlen=self.WINDOW)).append(peak)
        self._last[phase] = record
        if record.get("held") is not None:
            self._accounted[phase] = record

    def _stands_out(self, phase: str, peak: int) -> bool:
        peaks = self._peaks.get(phase, ())
        return len(peaks) >= self.LEAST and peak > (1 + self.threshold) * statistics.median(peaks)

    def _changes(self, record: dict) -> dict:
        """Against the last record of the phase, and the last one that was accounted."""
        last, accounted = self._last[record["phase"]], self._accounted.get(record["phase"])
        changed: dict = {"moment": _moment_of_peak(record)}
        for name in ("allocated", "reserved", "rss", "pinned"):
            now, before = (reading(one, *READINGS[name]) for one in (record, last))
            if now is not None and before is not None:
                changed[name] = now - before
        if record.get("held") is not None and accounted is not None:
            changed["since_step"] = accounted["step"]
            changed["held"] = {
                category: {place: count - accounted["held"][category][place] for place, count in places.items()}
                for category, places in record["held"].items()
                if places != accounted["held"][category]
            }
            changed["unexplained"] = record["unexplained"] - accounted["unexplained"]
        return changed


def _moment_of_peak(record: dict) -> str | None:
    """In which part of its step a record's peak was reached; `None` where nobody looked within it."""
    before = (record.get("moments") or {}).get("after_backward")
    if before is None:
        return None
    peak, where = peak_of(record)
    reached = before["peak_allocated" if where == "device" else "peak_rss"]
    return "forward and backward" if reached >= peak else "update"


# For people.


def table(summary: dict) -> str:
    """A summary of [`MemoryProfilerCallback`] as text: peaks by phase, and what they consist of."""
    if summary["peak"] is None:
        return "Nothing was profiled yet."
    peak = summary["peak"]
    lines = [f"highest {format_bytes(peak['bytes'])} ({_owner(peak['where'])}) in step {peak['step']}, {peak['phase']}"]
    if summary["achieved_over_floor"] is not None:
        floor = format_bytes(summary["floor"]["bytes"])
        lines[0] += f"; {summary['achieved_over_floor']:.2f} x the floor of {floor}"
    lines += ["", *_columns(list(_peak_rows(summary)))]
    parts = list(_part_rows(summary))
    if len(parts) > 1:
        whose = "of the device" if peak["where"] == "device" else "of the process, less what it held before the run"
        lines += ["", f"What the peak of a step consists of ({whose}), mean of the accounted steps:", ""]
        lines += _columns(parts)
    for spike in summary["spikes"][-5:]:
        bytes_, usual = format_bytes(spike["bytes"]), format_bytes(spike["usual"])
        lines.append(f"spike in step {spike['step']}, {spike['phase']}: {bytes_}, usually {usual}")
    for event in summary["out_of_memory"]:
        lines.append(f"out of memory in step {event['step']}, {event['phase']}: {event['folder']}")
    return "\n".join(lines)


def _owner(where: str) -> str:
    return "torch's allocator" if where == "device" else "resident memory of the process"


def _peak_rows(summary: dict) -> Iterator[list[str]]:
    name = "peak_allocated" if summary["peak"]["where"] == "device" else "peak_rss"
    others = [other for other in ("reserved", "nvml_used", "rss", "pinned") if other != name]
    phases = summary["phases"]
    others = [other for other in others if any(phase.get(other, {"max": 0})["max"] for phase in phases.values())]
    yield ["phase", "records", "seconds", "peak: mean", "max", "min", *others]
    for phase, found in phases.items():
        spread = found.get(name)
        cells = [format_bytes(spread[key]) for key in ("mean", "max", "min")] if spread else ["-"] * 3
        cells += [format_bytes(found[other]["mean"]) if other in found else "-" for other in others]
        yield [phase, str(found["records"]), f"{found['step_seconds']['mean']:.3f}", *cells]


def _part_rows(summary: dict) -> Iterator[list[str]]:
    places = ("device",) if summary["peak"]["where"] == "device" else ("device", "host")
    accounted = {phase: found["accounted"] for phase, found in summary["phases"].items() if found["accounted"]}
    names = [
        name
        for name in dict.fromkeys(name for found in accounted.values() for name in found["held"])
        if any(found["held"][name][place] for found in accounted.values() for place in places)
    ]
    yield ["phase", "accounted", *names, "unexplained", "measured"]
    for phase, found in accounted.items():
        parts = [sum(found["held"][name][place] for place in places) for name in names]
        cells = [format_bytes(count) for count in (*parts, found["unexplained"], found["measured"])]
        yield [phase, str(found["records"]), *cells]


def _columns(rows: list[list[str]]) -> list[str]:
    widths = [max(len(row[index]) for row in rows) for index in range(len(rows[0]))]
    return ["  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in rows]
