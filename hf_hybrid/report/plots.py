"""What the plots of a report show. Each painter draws on an empty figure, or says that there is nothing to draw."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from hf_hybrid.report.calibration_plot import calibration_alt, paint_calibration
from hf_hybrid.report.drawing import (
    PALETTE,
    Plot,
    byte_unit,
    draw,
    faint_bands,
    lines,
    phase_colour,
    phase_strip,
    plain_ticks,
    running_mean,
    stacked,
    thinned,
)
from hf_hybrid.report.findings import accepted
from hf_hybrid.report.run_folder import Run, number, phases_by_step, reading
from hf_hybrid.report.summary import format_bytes

MOST_MARKS = 60
A, B = PALETTE["full"], PALETTE["predict"]
"""Colours of the first and the second run of a comparison."""


def run_plots(run: Run, found: dict, folder: Path) -> list[Plot]:
    """
    All plots of a run that its data support, as PNG in `folder` and as SVG.

    Args:
        run (`Run`): The run.
        found (`dict`): See [`findings`].
        folder (`Path`): Exists already.
    """
    painters = (
        ("memory", "Memory over time", _memory_alt(found), lambda f, n: paint_memory(f, n, run)),
        ("loss", "Loss and leaps", _loss_alt(run, found), lambda f, n: paint_loss(f, n, run)),
        ("rate", "Learning rate and gain", _rate_alt(run), lambda f, n: paint_rate(f, n, run)),
        ("calibration", "Predicted against realised", calibration_alt(found["calibration"]),
         lambda f, n: paint_calibration(f, n, found["calibration"])),
        ("bytes", "Bytes by category", "Bytes held by category and phase; the table has the numbers.",
         lambda f, n: paint_bytes(f, n, found["memory"])),
    )  # fmt: skip
    drawn = [draw(name, title, alt, painter, folder) for name, title, alt, painter in painters]
    return [plot for plot in drawn if plot is not None]


def comparison_plots(first: Run, second: Run, folder: Path) -> list[Plot]:
    """Loss and memory of two runs over each other."""
    names = f"A, {first.name}, and B, {second.name}"
    painters = (
        ("loss", "Loss", f"Training and held-out loss of {names}.", lambda f, n: paint_losses(f, n, first, second)),
        ("memory", "Memory", f"Memory by step of {names}.", lambda f, n: paint_memories(f, n, first, second)),
    )
    drawn = [draw(name, title, alt, painter, folder) for name, title, alt, painter in painters]
    return [plot for plot in drawn if plot is not None]


# Memory.

_SERIES = {
    "device": (
        ("peak allocated", "device.peak_allocated", "ink", {}),
        ("reserved", "device.peak_reserved", "muted", {"linewidth": 0.8}),
        ("held after the step", "device.allocated", "line", {"linewidth": 1.0}),
        ("whole device (NVML)", "nvml.used", "muted", {"linewidth": 0.8, "linestyle": (0, (4, 2))}),
    ),
    "host": (
        ("peak of the process", "host.peak_rss", "ink", {}),
        ("process (RSS)", "host.rss", "line", {"linewidth": 1.0}),
        ("pinned", "host.pinned", "muted", {"linewidth": 0.8}),
    ),
}


def _memory_series(run: Run, place: str) -> list[tuple[str, list, str, dict]]:
    found = []
    for label, name, colour, options in _SERIES[place]:
        points = [(entry["step"], reading(entry, name)) for entry in run.profile.steps]
        points = [(step, value) for step, value in points if value is not None]
        if points and any(value for _, value in points):
            found.append((label, points, PALETTE[colour], options))
    return found


def paint_memory(figure, narrow: bool, run: Run) -> bool | None:
    """Device and host memory by step over a band of phases; out-of-memory errors as crosses."""
    if run.profile is None:
        return False
    places = {place: found for place in _SERIES if (found := _memory_series(run, place))}
    if not places:
        return False
    phases = _phases(run)
    axes = stacked(figure, [10] * len(places) + ([0.9] if phases else []), 0.9 + 2.4 * len(places))
    for axis, (place, series) in zip(axes, places.items()):
        unit, name = byte_unit([value for _, points, _, _ in series for _, value in points])
        faint_bands(axis, phases)
        scaled = [(label, [(s, v / unit) for s, v in points], *rest) for label, points, *rest in series]
        axis.set_ylim(0, 1.12 * max(value for _, points, *_ in scaled for _, value in points))
        axis.set_ylabel(f"{place}, {name}")
        lines(axis, scaled, narrow, envelope=True)
        _mark_out_of_memory(axis, run)
    if phases:
        phase_strip(axes[-1], phases, narrow)
    return None


def _phases(run: Run) -> dict[int, str]:
    """Of the steps, where there is more than one to tell apart."""
    phases = phases_by_step(run)
    return phases if len(set(phases.values())) > 1 else {}


def _mark_out_of_memory(axis, run: Run) -> None:
    for crash in run.profile.out_of_memory:
        axis.axvline(crash["step"], color=PALETTE["bad"], linewidth=1.0, linestyle=(0, (3, 2)))
        axis.annotate(
            "out of memory", (crash["step"], 1.0), xycoords=("data", "axes fraction"), xytext=(-3, -9), ha="right",
            textcoords="offset points", color=PALETTE["bad"], fontsize=7.5,
        )  # fmt: skip


def _memory_alt(found: dict) -> str:
    peak = (found["memory"] or {}).get("peak")
    if not peak:
        return "Memory by step."
    return f"Memory by step and phase. Peak {format_bytes(peak['bytes'])} on the {peak['where']}, step {peak['step']}."


# Loss and leaps.


def _smooth(points: Sequence, colour: str, name: str) -> list[tuple[str, Sequence, str, dict]]:
    """Many noisy points as a faint line, and their running mean over it."""
    if len(points) < 100:
        return [(name, points, colour, {})]
    width = max(10, len(points) // 50)
    return [(f"{name}, mean of {width}", running_mean(points, width), colour, {})]


def paint_loss(figure, narrow: bool, run: Run) -> bool | None:
    """Training and held-out loss; below them where leaps were kept, rejected and rolled back, and the phases."""
    trained, held_out = run.series("loss"), run.series("eval_loss")
    if not trained and not held_out:
        return False
    rows, phases = _leap_rows(run), _phases(run)
    heights = [10] + ([0.9 * len(rows)] if rows else []) + ([0.8] if phases else [])
    axes = stacked(figure, heights, 3.0 + 0.22 * len(rows) + (0.4 if phases else 0))
    _draw_losses(axes[0], [("training", trained, PALETTE["ink"]), ("held out", held_out, PALETTE["line"])], narrow)
    axes[0].set_ylabel("loss (nats)")
    _mark_leaps(axes[0], run, trained or held_out)
    if rows:
        _rug(axes[1], rows)
    if phases:
        phase_strip(axes[-1], phases, narrow)
    return None


def _draw_losses(axis, losses: Sequence[tuple[str, list, str]], narrow: bool) -> None:
    series = []
    for name, points, colour in losses:
        if name == "held out" and points:
            options = {"marker": "o", "markersize": 3.2, "linewidth": 0.8}
            series.append((name, points, colour, options if len(points) < 60 else {"linewidth": 0.9}))
        elif points:
            if len(points) >= 100:
                axis.plot(*zip(*thinned(points)), color=colour, alpha=0.22, linewidth=0.7)
            series += _smooth(points, colour, name)
    lines(axis, series, narrow)


def _leap_rows(run: Run) -> list[tuple[str, list[int], str]]:
    """A row of marks for each kind of verdict: its name with the count, steps, colour."""
    kinds = (
        ("accepted", ("unprobed", "kept", "extended", "shrunk"), PALETTE["predict"]),
        ("rejected", ("rejected",), PALETTE["bad"]),
        ("rolled back", ("rolled_back",), PALETTE["bad"]),
    )
    rows = []
    for name, verdicts, colour in kinds:
        steps = [leap["step"] for leap in run.leaps if leap.get("verdict") in verdicts]
        if steps:
            rows.append((f"{len(steps)} {name}", steps, colour))
    return rows


def _rug(axis, rows: Sequence[tuple[str, list[int], str]]) -> None:
    for place, (_, steps, colour) in enumerate(rows):
        axis.vlines(steps, place + 0.15, place + 0.85, color=colour, linewidth=1.0 if len(steps) < 200 else 0.5)
    axis.set_ylim(len(rows), 0)
    axis.set_yticks([place + 0.5 for place in range(len(rows))], [name for name, _, _ in rows])
    for label, (_, _, colour) in zip(axis.get_yticklabels(), rows):
        label.set_color(colour)
    axis.grid(False)
    for side in ("left", "bottom"):
        axis.spines[side].set_visible(False)


def _mark_leaps(axis, run: Run, points: Sequence[tuple[int, float]]) -> None:
    """On the line itself, while they are few: circles for leaps that stayed, crosses for those that did not."""
    if len(run.leaps) > MOST_MARKS:
        return
    steps, values = zip(*points)
    for leap in run.leaps:
        stayed = accepted(leap)
        axis.plot(
            leap["step"], _interpolated(leap["step"], steps, values), marker="o" if stayed else "X",
            markersize=3.5 if stayed else 5.5, markerfacecolor=PALETTE["predict"] if stayed else PALETTE["bad"],
            markeredgecolor="none", linestyle="none", zorder=4,
        )  # fmt: skip


def _interpolated(at: float, steps: Sequence[float], values: Sequence[float]) -> float:
    if at <= steps[0]:
        return values[0]
    for index in range(1, len(steps)):
        if at <= steps[index]:
            share = (at - steps[index - 1]) / max(steps[index] - steps[index - 1], 1e-9)
            return values[index - 1] + share * (values[index] - values[index - 1])
    return values[-1]


def _loss_alt(run: Run, found: dict) -> str:
    loss, leaps = found["headline"]["final_loss"], found["leaps"]
    parts = [f"{name} {loss[key]:.4g}" for key, name in (("training", "training"), ("held_out", "held-out"))
             if loss[key] is not None]  # fmt: skip
    told = f" {leaps['accepted']} of {leaps['made']} leaps stayed." if leaps and leaps["made"] else ""
    return f"Loss over {run.last_step} steps. At the end: {', '.join(parts) or 'not recorded'}.{told}"


# Learning rate and gain.


def paint_rate(figure, narrow: bool, run: Run) -> bool | None:
    """The learning rate that was used, and below it the gain of every leap."""
    rates = run.series("learning_rate")
    gains = [(leap, number(leap.get("gain"))) for leap in run.leaps]
    gains = [(leap, gain) for leap, gain in gains if gain is not None]
    if not rates and not gains:
        return False
    phases = _phases(run)
    panels = bool(rates) + bool(gains)
    axes = stacked(figure, [6] * panels + ([0.8] if phases else []), 0.7 + 1.6 * panels)
    if rates:
        axes[0].plot(*zip(*thinned(rates)), color=PALETTE["ink"])
        axes[0].set_title("learning rate")
        axes[0].set_ylim(0, 1.1 * max(rate for _, rate in rates) or 1.0)
        plain_ticks(axes[0], "y")
    if gains:
        axis = axes[panels - 1]
        axis.set_title("gain of each leap")
        for stayed, marker, colour in ((True, "o", PALETTE["predict"]), (False, "X", PALETTE["bad"])):
            points = [(leap["step"], gain) for leap, gain in gains if accepted(leap) is stayed]
            if points:
                label = f"{len(points)} {'accepted' if stayed else 'rejected or rolled back'}"
                axis.plot(*zip(*points), marker, color=colour, markersize=3.5 if stayed else 5, label=label, mew=0)
        axis.set_ylim(min(0, 1.15 * min(g for _, g in gains)), 1.15 * max(max(g for _, g in gains), 1e-9))
        axis.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=2, borderaxespad=0.2, borderpad=0)
    if phases:
        phase_strip(axes[-1], phases, narrow)
    return None


def _rate_alt(run: Run) -> str:
    rates = run.series("learning_rate")
    told = f" Highest {max(rate for _, rate in rates):.3g}, last {rates[-1][1]:.3g}." if rates else ""
    return f"Learning rate by step, and the gain of {len(run.leaps)} leaps.{told}"


# Bytes.


def _byte_rows(memory: dict | None) -> list[tuple[str, dict]]:
    """Categories by phase; without a profile, of the end of training."""
    if not memory:
        return []
    by_phase = memory.get("categories_by_phase") or []
    if by_phase:
        return [
            (row["phase"], {**row["categories"], **_unexplained(row["unexplained"], row["unexplained_place"])})
            for row in by_phase
        ]
    return [("end of training", memory["held_at_the_end"])] if memory.get("held_at_the_end") else []


def _unexplained(count: float | None, place: str) -> dict:
    """What was measured and not accounted for."""
    return {"unexplained": {"device": 0, "host": 0, place: count}} if count and count > 0 else {}


def paint_bytes(figure, narrow: bool, memory: dict | None) -> bool | None:
    """Bytes of each category on device and host, a bar for each phase."""
    rows = _byte_rows(memory)
    names = list(dict.fromkeys(category for _, held in rows for category in held))
    present = {
        place: [name for name in names if any(held.get(name, {}).get(place) for _, held in rows)]
        for place in ("device", "host")
    }
    places = [place for place, found in present.items() if found]
    if not places:
        return False
    shape = (len(places), 1) if narrow else (1, len(places))
    heights = [0.35 + len(present[place]) * max(0.26, 0.085 * len(rows)) for place in places]
    figure.set_figheight(0.8 + (sum(heights) if narrow else max(heights)))
    panels = figure.subplots(*shape, squeeze=False, height_ratios=heights if narrow else None).flat
    for axis, place in zip(panels, places):
        _category_bars(axis, rows, present[place], place)
    if len(rows) > 1:
        handles, labels = figure.axes[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside upper left", ncols=len(rows), handlelength=0.9, borderpad=0)
    return None


def _category_bars(axis, rows: list, categories: list[str], place: str) -> None:
    most = [max(held.get(category, {}).get(place, 0) for _, held in rows) for category in categories]
    unit, name = byte_unit(most)
    height = 0.8 / len(rows)
    for index, (phase, held) in enumerate(rows):
        counts = [held.get(category, {}).get(place, 0) / unit for category in categories]
        tops = [k - 0.4 + (index + 0.5) * height for k in range(len(categories))]
        axis.barh(tops, counts, height * 0.9, color=phase_colour(phase), label=phase)
    for k, count in enumerate(most):
        axis.annotate(
            format_bytes(count), (count / unit, k), xytext=(4, 0), textcoords="offset points", va="center", fontsize=7.5
        )
    axis.set_title(f"{place}, {name}")
    axis.set_yticks(range(len(categories)), categories)
    axis.set_ylim(len(categories) - 0.5, -0.5)
    axis.set_xlim(0, 1.25 * max(most) / unit)
    axis.grid(False, axis="y")
    axis.grid(True, axis="x")
    axis.spines["left"].set_visible(False)
    axis.tick_params(axis="y", colors=PALETTE["ink"])


# Two runs.


def paint_losses(figure, narrow: bool, first: Run, second: Run) -> bool | None:
    """Training and held-out loss of two runs."""
    kinds = [(key, name) for key, name in (("loss", "training"), ("eval_loss", "held out"))
             if first.series(key) and second.series(key)]  # fmt: skip
    if not kinds:
        return False
    axes = stacked(figure, [1] * len(kinds), 0.6 + 2.1 * len(kinds))
    for axis, (key, name) in zip(axes, kinds):
        axis.set_ylabel(f"{name} loss (nats)")
        series = []
        for label, run, colour, width in (("A", first, A, 2.4), ("B", second, B, 1.1)):
            points = run.series(key)
            if len(points) >= 100:
                axis.plot(*zip(*thinned(points)), color=colour, alpha=0.2, linewidth=0.7)
            series += [(*line[:3], {"linewidth": width}) for line in _smooth(points, colour, f"{label}, {name}")]
        lines(axis, series, narrow)
    return None


def paint_memories(figure, narrow: bool, first: Run, second: Run) -> bool | None:
    """Peak memory of two runs by step: of the device where both have one, else of the process."""
    profiles = [run.profile.steps for run in (first, second) if run.profile]
    for place, name in (("device", "device.peak_allocated"), ("host", "host.peak_rss"), ("host", "host.rss")):
        points = [[(e["step"], reading(e, name)) for e in steps if reading(e, name) is not None] for steps in profiles]
        if len(points) == 2 and all(points):
            return _paint_pair(figure, narrow, place, points)
    return False


def _paint_pair(figure, narrow: bool, place: str, points: Sequence[list]) -> None:
    unit, unit_name = byte_unit([value for series in points for _, value in series])
    (axis,) = stacked(figure, [1], 2.7)
    axis.set_ylabel(f"{place}, peak, {unit_name}")
    axis.set_ylim(0, 1.12 * max(value for series in points for _, value in series) / unit)
    series = [
        (label, [(step, value / unit) for step, value in found], colour, {"linewidth": width})
        for label, colour, width, found in zip("AB", (A, B), (2.4, 1.1), points)
    ]
    lines(axis, series, narrow, envelope=True)
