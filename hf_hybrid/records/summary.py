"""Numbers as text, and the summary of a run, which displays itself in notebooks. Standard library only."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING

from hf_hybrid.records.readings import count_of, number, texts_of

if TYPE_CHECKING:
    from hf_hybrid.forecast.final_loss import FinalLoss

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30


def format_bytes(count: float | None) -> str:
    """`1.50 GiB`, `312 MiB`, `4.0 KiB`, `12 B`; an en dash for `None`."""
    if count is None:
        return "–"
    for unit, name in ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if abs(count) >= unit:
            return f"{format_number(count / unit)} {name}"
    return f"{count:.0f} B"


def format_seconds(seconds: float | None) -> str:
    """`450 ms`, `12.3 s`, `4 min 05 s`, `3 h 20 min`; an en dash for `None`."""
    if seconds is None:
        return "–"
    if seconds < 1:
        return f"{format_number(seconds * 1000)} ms"
    if seconds < 99.5:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 100:
        return f"{minutes} min {rest:02d} s"
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"{hours} h {minutes:02d} min"


def format_number(value: float | None) -> str:
    """Three to four significant digits, thousands separated; an en dash for `None`."""
    if value is None:
        return "–"
    if isinstance(value, int) or (math.isfinite(value) and abs(value) >= 1000):
        return f"{value:,.0f}"
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    if abs(value) < 0.01:
        return f"{value:.3g}"
    return f"{value:.{max(0, 2 - math.floor(math.log10(abs(value))))}f}"


def html_table(headers: Sequence[str], rows: Iterable[Sequence[object]], caption: str = "") -> str:
    """A plain HTML table; every cell is escaped, the first cell of a row is its heading."""
    head = "".join(f'<th scope="col">{escape(header)}</th>' for header in headers)
    body = []
    for first, *rest in rows:
        cells = "".join(f"<td>{escape(str(cell))}</td>" for cell in rest)
        body.append(f'<tr><th scope="row">{escape(str(first))}</th>{cells}</tr>')
    title = f"<caption>{escape(caption)}</caption>" if caption else ""
    header = f"<thead><tr>{head}</tr></thead>" if headers else ""
    return f"<table>{title}{header}<tbody>{''.join(body)}</tbody></table>"


@dataclass(frozen=True)
class RunPosition:
    """
    Where a run stands after a step. As text it is what stands behind the progress bar: `phase=full loss=2.31
    end=2.05+-0.08 gib=5.1`.
    """

    phase: str | None
    """Of the step that was made last; `None` if the run makes no leaps."""
    loss: float | None
    bytes_in_use: int
    forecast: FinalLoss | None = None

    def __str__(self) -> str:
        loss = "" if self.loss is None else f"loss={format_number(self.loss)} "
        end = ""
        if self.forecast is not None:
            half = (self.forecast.high - self.forecast.low) / 2
            doubt = f"+-{half:.2g}" if half > 1e-4 * abs(self.forecast.median) else ""  # none where the run ended
            end = f"end={format_number(self.forecast.median)}{doubt} "
        phase = "" if self.phase is None else f"phase={self.phase} "
        return f"{phase}{loss}{end}gib={self.bytes_in_use / GIB:.1f}"


class HybridSummary(dict):
    """
    The result of `trainer.hybrid_summary()`: a dictionary of plain values that prints as text and, in a notebook,
    displays as tables. It shows lists (leaps, events) as counts; the dictionary has the last entries of each.

    The report and the model card show its rows too. The report has them from a file that anybody may have edited, so
    a value of another type than expected counts as absent.
    """

    _STEPS = ("real steps", "predicted steps", "backward passes", "backward passes avoided", "forward-only passes",
              "skipped batches", "roll-backs")  # fmt: skip
    _SAVINGS = {
        "tokens": ("tokens shared", "tokens padding", "micro-batches saved"),
        "rows": ("rows skipped", "backward passes avoided exactly", "log probs skipped"),
        "rows decoded": ("rows decoded saved", "prompt tokens computed", "prompt tokens shared"),
        "turns": ("tool calls", "tool errors"),
        "images": ("images shared",),
    }
    """What was computed, and what of it was not computed again or not at all."""
    _REASONS = {"rows were padded": "plain_rows_because", "completions were left to TRL": "plain_rollouts_because"}

    def _counts(self, labels: Iterable[str]) -> list[tuple[str, str]]:
        """Those of these counts that are not zero."""
        keys = {label: label.replace(" ", "_").replace("-", "_") for label in labels}
        return [(label, format_number(count)) for label, key in keys.items() if (count := count_of(self.get(key)))]

    def phase_rows(self) -> list[tuple[str, str, str]]:
        """Name, steps and time of each phase; none for runs without leaps, whose steps are all of one kind."""
        if not self.get("leaps_made"):
            return []
        steps, seconds = self.get("steps_by_phase") or {}, self.get("seconds_by_phase") or {}
        return [
            (phase, format_number(count), format_seconds(seconds.get(phase) if count else None))
            for phase, count in steps.items()
            if any(steps.values())
        ]

    def savings_rows(self, *, reasons: bool = True) -> list[tuple[str, str]]:
        """What was not computed again or not at all, and the `reasons` why what could have been saved was not."""
        rows = []
        for total, saved in self._SAVINGS.items():
            if counts := self._counts(saved):
                rows += self._counts([total]) + counts
        if reasons and (together := number(self.get("shared_if_together"))) is not None:
            rows.append(("shared if rows that begin alike stood together", f"{together:.0%}"))
        if reasons:
            rows += [(label, str(self[key])) for label, key in self._REASONS.items() if self.get(key)]
        failed = texts_of(self.get("failed_savings"))
        return rows + [("savings that did not work", "; ".join(failed))] * bool(failed)

    def _rows(self) -> list[tuple[str, str]]:
        """Everything that fits on a line, by name."""
        rows = self._counts(self._STEPS)
        if leaps_made := self.get("leaps_made"):
            verdicts = self.get("leaps_by_verdict") or {}
            by_verdict = ", ".join(f"{count} {verdict.replace('_', ' ')}" for verdict, count in verdicts.items())
            rows.append(("leaps", f"{leaps_made}" + (f" ({by_verdict})" if by_verdict else "")))
            if "direction" in self and not self.get("no_leaps"):
                rows.append(("direction", str(self["direction"])))
        if self.get("no_leaps"):
            rows.append(("no leaps", self["no_leaps"]))
        if self.get("divergence_events_seen"):
            rows.append(("divergence events", str(self["divergence_events_seen"])))
        if self.get("out_of_memory"):
            rows.append(("recovered from out of memory", f"{len(self['out_of_memory'])} x"))
        rows += self.savings_rows()
        if (per_second := number(self.get("tokens_per_second"))) is not None:
            rows.append(("tokens per second", format_number(per_second)))
        if (share := number(self.get("device_share"))) is not None:
            rows.append(("time in which the device computed", f"{share:.0%}"))
        if self.get("speed_hint"):
            rows.append(("hint", str(self["speed_hint"])))
        forecast = self.get("forecast") or {}
        for name, end in (("final loss", forecast), ("final eval loss", forecast.get("held_out"))):
            if end:
                low, high = format_number(end["low"]), format_number(end["high"])
                value = f"{format_number(end['loss'])} ({low} to {high}) after step {end['step']:,}"
                rows.append((f"forecast of the {name}", value))
        if self.get("learning_rate_scale", 1.0) != 1.0:
            rows.append(("learning-rate scale", format_number(self["learning_rate_scale"])))
        held = ((self.get("memory") or {}).get("held") or {}).get("total")
        if held:
            rows.append(("held at the end", ", ".join(f"{format_bytes(n)} {where}" for where, n in held.items() if n)))
        return rows

    def __str__(self) -> str:
        phases = self.phase_rows()
        lines = [f"{phase:<10}{steps:>10} steps  {seconds}" for phase, steps, seconds in phases]
        return "\n".join(lines + [f"{label}: {value}" for label, value in self._rows()])

    def _repr_html_(self) -> str:
        phases = html_table(("phase", "steps", "time"), self.phase_rows(), "Phases") if self.phase_rows() else ""
        return f"<div>{phases}{html_table((), self._rows(), 'Run')}</div>"
