"""The plots of a report."""

from __future__ import annotations

import importlib.util
import io
import math
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from html import escape
from pathlib import Path

from hf_hybrid.report.findings import accepted
from hf_hybrid.report.run_folder import Run, number, phases_by_step, reading, runs_of
from hf_hybrid.report.summary import GIB, KIB, MIB, format_bytes

# Distinguishable for the colour-blind (after Okabe and Ito) and on light and dark pages; the same in every plot.
PALETTE = {
    "warmup": "#8c95a1",
    "full": "#0072b2",
    "predict": "#cc7a00",
    "correct": "#009e73",
    "evaluate": "#b8679a",
    "real": "#4a90b8",
    "bad": "#a3195b",
    "line": "#5d4fb5",
    "ink": "#1c2127",
    "muted": "#646c76",
    "grid": "#dfe3e8",
}
_NOT_PHASES = ("bad", "line", "ink", "muted", "grid")
PHASE_LABELS = {"real": "full or correct"}
MOST_BANDS, MOST_POINTS = 80, 1500
WIDE, NARROW = 9.0, 3.9
"""Inches; on a phone the page shows the narrow drawing."""


@dataclass(frozen=True)
class Plot:
    """A drawn plot: file name without suffix, heading, what it shows for those who cannot see it, and its SVGs."""

    name: str
    title: str
    alt: str
    wide: str
    narrow: str


def plots_available() -> bool:
    """Whether matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def phase_colour(phase: str | None) -> str:
    """Of steps of a phase, and of plain `Trainer`'s."""
    return PALETTE.get(phase, PALETTE["full"]) if phase not in _NOT_PHASES else PALETTE["full"]


def draw(name: str, title: str, alt: str, painter: Callable, folder: Path) -> Plot | None:
    """
    Draw a plot wide (PNG and SVG) and narrow (SVG).

    Args:
        name (`str`), title (`str`), alt (`str`): See [`Plot`].
        painter (`Callable`): `painter(figure, narrow)` draws on an empty figure, and may change its height; it returns
            `False` if there is nothing to draw, and then nothing is written.
        folder (`Path`): Where `NAME.png` goes.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    drawn = []
    for narrow in (False, True):
        with _style(f"{name}-{narrow}"):
            figure = Figure(figsize=(NARROW if narrow else WIDE, 3.2), layout="constrained")
            FigureCanvasAgg(figure)
            if painter(figure, narrow) is False:
                return None
            if not narrow:
                figure.savefig(folder / f"{name}.png", dpi=150, facecolor="white")
            drawn.append(_svg(figure, alt))
    return Plot(name, title, alt, *drawn)


@contextmanager
def _style(salt: str) -> Iterator[None]:
    import matplotlib

    values = {
        "font.family": "DejaVu Sans",  # comes with matplotlib: the same everywhere
        "font.size": 8,
        "svg.fonttype": "none",
        "svg.hashsalt": salt,  # ids in the page differ from plot to plot
        "text.parse_math": False,  # names come from files
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.edgecolor": PALETTE["muted"],
        "axes.labelcolor": PALETTE["muted"],
        "axes.titlecolor": PALETTE["ink"],
        "axes.titlesize": 8.5,
        "axes.titlelocation": "left",
        "axes.grid": True,
        "axes.grid.axis": "y",
        "axes.axisbelow": True,
        "axes.linewidth": 0.6,
        "grid.color": PALETTE["grid"],
        "grid.linewidth": 0.6,
        "text.color": PALETTE["ink"],
        "xtick.color": PALETTE["muted"],
        "ytick.color": PALETTE["muted"],
        "xtick.major.size": 2.5,
        "ytick.major.size": 0,
        "lines.linewidth": 1.3,
        "legend.frameon": False,
        "legend.fontsize": 7.5,
        "legend.handlelength": 1.4,
    }
    with matplotlib.rc_context(values):
        yield


def _svg(figure, alt: str) -> str:
    """Inline SVG: no prologue, no ids that could meet those of other plots, colours as variables of the page."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r'<g id="[^"]*"', "<g", text)
    text = re.sub(r'^<svg [^>]*?(viewBox="[^"]*")[^>]*>', rf'<svg \1 role="img" aria-label="{escape(alt)}">', text)
    text = text.replace("xlink:href", "href").replace("<!--", "<!-- ")
    text = re.sub(r"<!-- .*?-->", "", text, flags=re.DOTALL)
    for name, colour in PALETTE.items():
        text = text.replace(colour, f"var(--{name})")
    return re.sub(r"\n\s*", "\n", text).strip()


# Parts of plots.


def stacked(figure, heights: Sequence[float], inches: float):
    """Axes above each other that share the steps; `heights` relative, `inches` in all."""
    figure.set_figheight(inches)
    axes = figure.subplots(len(heights), 1, sharex=True, squeeze=False, height_ratios=heights)[:, 0]
    for axis in axes:
        axis.margins(x=0.005)
    for axis in axes[:-1]:
        axis.tick_params(labelbottom=False, bottom=False)
    axes[-1].set_xlabel("step")
    axes[-1].xaxis.get_major_locator().set_params(integer=True)
    return list(axes)


def phase_strip(axis, phases: dict[int, str], narrow: bool) -> None:
    """A band of phases along the steps; where they change too often to be seen, their shares of the steps."""
    axis.set_yticks([])
    axis.set_ylim(0, 1)
    axis.grid(False)
    for side in ("left", "bottom"):
        axis.spines[side].set_visible(False)
    stretches, known = runs_of(phases), list(PALETTE)
    order = sorted(set(phases.values()), key=lambda phase: (known.index(phase) if phase in known else 0, phase))
    if len(stretches) <= MOST_BANDS * (1 if narrow else 3):
        for first, last, phase in stretches:
            axis.axvspan(first - 1, last, color=phase_colour(phase), linewidth=0)
    else:
        _phase_shares(axis, phases, order, 60 if narrow else 150)
    handles = [_patch(phase_colour(phase)) for phase in order]
    labels = [PHASE_LABELS.get(phase, phase) for phase in order]
    axis.legend(
        handles, labels, loc="lower left", bbox_to_anchor=(0, 1), ncols=len(order), borderaxespad=0.2,
        columnspacing=1.0, handlelength=0.9, handletextpad=0.4, borderpad=0,
    )  # fmt: skip


def _patch(colour: str):
    from matplotlib.patches import Patch

    return Patch(facecolor=colour, linewidth=0)


def _phase_shares(axis, phases: dict[int, str], order: Sequence[str], bins: int) -> None:
    first, last = min(phases), max(phases)
    width = (last - first + 1) / bins
    counts: list[dict[str, int]] = [{} for _ in range(bins)]
    for step, phase in phases.items():
        bucket = counts[min(int((step - first) / width), bins - 1)]
        bucket[phase] = bucket.get(phase, 0) + 1
    counts.append(counts[-1])  # a step drawn to its end
    edges = [first - 1 + index * width for index in range(bins + 1)]
    shares = [[bucket.get(phase, 0) / max(sum(bucket.values()), 1) for bucket in counts] for phase in order]
    axis.stackplot(edges, shares, step="post", colors=[phase_colour(phase) for phase in order], linewidth=0)


def faint_bands(axis, phases: dict[int, str]) -> None:
    """Phases behind the lines, while there are few enough to tell them apart."""
    stretches = runs_of(phases)
    if len(stretches) <= MOST_BANDS:
        for first, last, phase in stretches:
            axis.axvspan(first - 1, last, color=phase_colour(phase), alpha=0.09, linewidth=0, zorder=0)


def lines(axis, series: Sequence[tuple[str, Sequence, str, dict]], narrow: bool, *, envelope: bool = False) -> None:
    """
    Lines with their names at their right ends, or above the plot where there is no room beside it.

    Args:
        series: Name, `(step, value)` pairs, colour and further options of each line.
        envelope: Of lines with more points than can be seen, draw the highest of each stretch, shaded down to the
            lowest, instead of all.
    """
    ends = []
    for name, points, colour, options in series:
        size = -(-len(points) // (180 if narrow else 400)) if envelope and len(points) > MOST_POINTS else 1
        if size > 1:
            stretches = [points[start : start + size] for start in range(0, len(points), size)]
            lows = [min(value for _, value in stretch) for stretch in stretches]
            points = [(stretch[0][0], max(value for _, value in stretch)) for stretch in stretches]
            axis.fill_between([step for step, _ in points], lows, [high for _, high in points], color=colour,
                              alpha=0.18, linewidth=0)  # fmt: skip
        steps, values = zip(*thinned(points))
        axis.plot(steps, values, color=colour, label=name, **{"solid_capstyle": "round", **options})
        ends.append((values[-1], steps[-1], name, colour))
    if narrow:
        if len(series) > 1:
            axis.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=2, borderaxespad=0.2, borderpad=0)
        else:
            axis.set_title(series[0][0])
    else:
        end_labels(axis, ends)


def end_labels(axis, ends: Sequence[tuple[float, float, str, str]]) -> None:
    """Names right of where their lines end, moved apart where they would lie on each other."""
    low, high = axis.get_ylim()
    inches = axis.get_window_extent().height / axis.figure.dpi
    ends = sorted(reversed(ends), key=lambda end: end[0])  # of equal ones the first stays above
    places = _apart([end[0] for end in ends], (high - low) * 0.15 / max(inches, 0.5))
    right = max(end[1] for end in ends)
    for place, (_, _, name, colour) in zip(places, ends):
        axis.annotate(
            name, (right, place), xytext=(6, 0), textcoords="offset points", va="center", color=colour,
            annotation_clip=False, fontsize=7.5,
        )  # fmt: skip


def _apart(places: Sequence[float], gap: float) -> list[float]:
    """Rising places, moved as little as needed to be `gap` apart."""
    places = list(places)
    for _ in range(20 * len(places)):
        for index in range(1, len(places)):
            missing = gap - (places[index] - places[index - 1])
            if missing > 1e-6 * gap:
                places[index - 1] -= missing / 2
                places[index] += missing / 2
    return places


def plain_ticks(axis, which: str = "both") -> None:
    """Numbers as they are, `0.003` and `3e-05`, without an offset or a power beside the axis."""
    from matplotlib.ticker import FuncFormatter

    for name in "xy" if which == "both" else which:
        getattr(axis, f"{name}axis").set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


def thinned(points: Sequence[tuple[float, float]], most: int = MOST_POINTS) -> list[tuple[float, float]]:
    """At most about `most` points: of each stretch the lowest and the highest, so that no peak is lost."""
    points = list(points)
    if len(points) <= most:
        return points
    size = math.ceil(2 * len(points) / most)
    found = []
    for start in range(0, len(points), size):
        stretch = points[start : start + size]
        ends = {min(stretch, key=lambda p: p[1]), max(stretch, key=lambda p: p[1])}
        found += sorted(ends)
    return found


def byte_unit(values: Sequence[float]) -> tuple[int, str]:
    """The unit in which the largest of these numbers of bytes is easiest to read."""
    most = max(values, default=0)
    return next(((unit, name) for unit, name in ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")) if most >= unit), (1, "B"))


def running_mean(points: Sequence[tuple[float, float]], width: int) -> list[tuple[float, float]]:
    """Mean over `width` points on end, where the middle one of them is."""
    total, found = 0.0, []
    for index, (_, value) in enumerate(points):
        total += value - (points[index - width][1] if index >= width else 0.0)
        if index >= width - 1:
            found.append((points[index - width // 2][0], total / width))
    return found


# What the plots show. Each painter draws on an empty figure, or says that there is nothing to draw.

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


# Predicted against realised.

MOST_GROUPS, MOST_NAME = 12, 26
KEPT, LOST = PALETTE["predict"], PALETTE["bad"]


def paint_calibration(figure, narrow: bool, found: dict) -> bool | None:
    """
    Panels next to each other, below each other on a narrow page.

    Args:
        found (`dict`): `calibration` of [`findings`].
    """
    panels = [(painter, found[key]) for key, painter in _PAINTERS.items() if found.get(key)]
    if not panels:
        return False
    columns = 1 if narrow else 2 if len(panels) == 4 else min(3, len(panels))
    rows = math.ceil(len(panels) / columns)
    figure.set_figheight(2.7 * rows)
    axes = list(figure.subplots(rows, columns, squeeze=False).flat)
    for axis, (painter, values) in zip(axes, panels):
        painter(axis, values)
    for axis in axes[len(panels) :]:
        axis.set_visible(False)
    return None


def calibration_alt(found: dict) -> str:
    """What the panels show, in words."""
    told = {
        "decrease": "fall of the loss predicted along each leap against the probed fall",
        "forecast": "loss after leaps against its forecast",
        "confidence": "confidence against the share of leaps that stayed",
        "displacement": "cosine of leaps with what real steps then did, by kind of parameter",
        "world_model_errors": "error of the world model's forecasts beside two baselines",
        "world_model_coverage": "how often the world model's intervals held the loss that came",
    }
    return "Panels: " + "; ".join(text for key, text in told.items() if found.get(key)) + "."


def _diagonal(axis, low: float, high: float) -> None:
    axis.plot([low, high], [low, high], color=PALETTE["muted"], linewidth=0.8, linestyle=(0, (4, 3)))


def _paint_decrease(axis, rows: Sequence[dict]) -> None:
    for stayed, marker, colour in ((True, "o", KEPT), (False, "X", LOST)):
        chosen = [row for row in rows if row["accepted"] is stayed]
        if chosen:
            axis.errorbar(
                [row["predicted"] for row in chosen], [row["realised"] for row in chosen],
                yerr=[row["standard_error"] or 0.0 for row in chosen], fmt=marker, color=colour, markersize=3.5,
                elinewidth=0.6, markeredgewidth=0,
            )  # fmt: skip
    _diagonal(axis, 0.0, max(max(row["predicted"], row["realised"]) for row in rows))
    _widen_small(axis, [abs(row[name]) for row in rows for name in ("predicted", "realised")])
    axis.axhline(0, color=PALETTE["muted"], linewidth=0.6)
    axis.set_title(f"Fall of the loss by a leap, n = {len(rows)}")
    axis.set_xlabel("predicted to first order, training (nats)")
    axis.set_ylabel("probed, held out, ± SE")


def _widen_small(axis, sizes: Sequence[float]) -> None:
    """Logarithmic from the median on, where one leap, often the first, would leave the others no room."""
    middle = sorted(sizes)[len(sizes) // 2]
    if middle > 0 and max(sizes) > 10 * middle:
        axis.set_xscale("symlog", linthresh=10 ** math.ceil(math.log10(middle)))
        axis.set_yscale("symlog", linthresh=10 ** math.ceil(math.log10(middle)))
        plain_ticks(axis)


def _paint_forecast(axis, rows: Sequence[dict]) -> None:
    axis.axhline(0, color=PALETTE["muted"], linewidth=0.6)
    for stayed, marker, colour in ((True, "o", KEPT), (False, "X", LOST)):
        chosen = [(row["step"], row["error"]) for row in rows if row["accepted"] is stayed]
        if chosen:
            axis.plot(*zip(*chosen), marker, color=colour, markersize=3.5, markeredgewidth=0)
    mean = sum(row["error"] for row in rows) / len(rows)
    axis.axhline(mean, color=KEPT, linewidth=0.8, linestyle=(0, (4, 3)))
    axis.set_title("Loss after leaps over its forecast")
    axis.set_xlabel(f"step; dashed: mean, {mean:+.3g}")
    axis.set_ylabel("nats; above 0: worse than the trend")


def _paint_confidence(axis, rows: Sequence[dict]) -> None:
    shares = [row["share_kept"] for row in rows]
    down = [max(0.0, row["share_kept"] - row["low"]) for row in rows]  # rounding may leave a share outside by a bit
    up = [max(0.0, row["high"] - row["share_kept"]) for row in rows]
    axis.errorbar(
        [row["confidence"] for row in rows], shares, yerr=[down, up], fmt="o", color=PALETTE["line"], markersize=4,
        elinewidth=0.8,
    )  # fmt: skip
    _diagonal(axis, 0.0, 1.0)
    axis.set_xlim(0, 1)
    axis.set_ylim(0, 1.04)
    axis.set_title(f"Share of leaps that stayed, n = {sum(row['leaps'] for row in rows)}")
    axis.set_xlabel("confidence as last logged")
    axis.set_ylabel("share, 95 % interval")


def _paint_displacement(axis, rows: Sequence[dict]) -> None:
    rows = sorted(rows, key=lambda row: row["cosine"])
    left_out = max(0, len(rows) - MOST_GROUPS)
    rows = rows[: MOST_GROUPS // 2] + rows[len(rows) - MOST_GROUPS // 2 :] if left_out else rows
    places = range(len(rows))
    axis.plot([row["cosine"] for row in rows], places, "o", color=PALETTE["correct"], markersize=4)
    axis.axvline(0, color=PALETTE["muted"], linewidth=0.6)
    axis.set_yticks(places, [_short(row["group"]) for row in rows], fontsize=6.5)
    axis.set_xlim(min(-0.05, 1.1 * rows[0]["cosine"]), 1.0)
    axis.grid(False, axis="y")
    axis.grid(True, axis="x")
    axis.set_title("Leap against real steps after it" + (f" ({left_out} more)" if left_out else ""))
    axis.set_xlabel("mean cosine; 1: they went on along it")


def _short(group: str) -> str:
    """What layers have in common is left out, and the middle of what is still too long."""
    group = group.removesuffix(".weight").replace("model.layers.*.", "")
    return group if len(group) <= MOST_NAME else f"{group[:8]}…{group[9 - MOST_NAME :]}"


def _paint_errors(axis, errors: dict[str, dict]) -> None:
    kinds = (
        ("model", "world model", PALETTE["line"]),
        ("persistence", "persistence", PALETTE["warmup"]),
        ("power_law", "power law", PALETTE["evaluate"]),
    )
    horizons = sorted(errors, key=int)
    for index, (key, label, colour) in enumerate(kinds):
        places = [k + (index - 1) * 0.26 for k in range(len(horizons))]
        axis.bar(places, [errors[h].get(key, 0.0) for h in horizons], 0.24, color=colour, label=label)
    axis.set_xticks(range(len(horizons)), horizons)
    axis.set_title("Error of loss forecasts")
    axis.set_xlabel("windows ahead")
    axis.set_ylabel("mean absolute, log loss")
    axis.set_ylim(0, 1.35 * max(max(values.values()) for values in errors.values()))
    axis.legend(loc="upper left", borderpad=0)


def _paint_coverage(axis, rows: Sequence[dict]) -> None:
    colours = (PALETTE["line"], PALETTE["predict"], PALETTE["correct"])
    _diagonal(axis, 0.0, 1.0)
    for row, colour in zip(rows, colours):
        label = f"{row['windows_ahead']} ahead, n = {row['forecasts']}"
        axis.plot(row["levels"], row["inside"], "o-", color=colour, markersize=3, linewidth=0.9, label=label)
    axis.set_xlim(0, 1)
    axis.set_ylim(0, 1.04)
    axis.set_title("Intervals of the forecasts")
    axis.set_xlabel("level of the central interval")
    axis.set_ylabel("share of losses inside")
    axis.legend(loc="lower right", borderpad=0)


_PAINTERS: dict[str, Callable] = {
    "decrease": _paint_decrease,
    "forecast": _paint_forecast,
    "confidence": _paint_confidence,
    "displacement": _paint_displacement,
    "world_model_errors": _paint_errors,
    "world_model_coverage": _paint_coverage,
}
