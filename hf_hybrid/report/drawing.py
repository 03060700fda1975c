"""
How plots are drawn: one style, one colour per phase, PNG files and SVG that takes its colours from the page.

Uses matplotlib's object-oriented interface; matplotlib is optional and imported when something is drawn.
"""

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

from hf_hybrid.report.run_folder import runs_of
from hf_hybrid.report.summary import GIB, KIB, MIB

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
