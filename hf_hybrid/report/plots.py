"""
One painter for the table of series: each figure of a run.

A figure is written as PNG and as SVG for the page, which takes its colours from the page, so that light and dark
both work. Matplotlib is optional: it is imported when something is drawn, through its object-oriented interface.
"""

from __future__ import annotations

import importlib.util
import io
import re
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from hf_hybrid.files import write_bytes
from hf_hybrid.records.summary import GIB, MIB, format_bytes
from hf_hybrid.report.run_folder import Points, Run
from hf_hybrid.report.series import Series, series_of

# Distinguishable for the colour-blind (after Okabe and Ito) and on light and dark pages.
PALETTE = {
    "warmup": "#8c95a1",
    "full": "#0072b2",
    "predict": "#cc7a00",
    "correct": "#009e73",
    "evaluate": "#b8679a",
    "bad": "#a3195b",
    "line": "#5d4fb5",
    "ink": "#1c2127",
    "muted": "#646c76",
    "grid": "#dfe3e8",
}
TITLES = {
    "loss": "Loss",
    "scores": "Accuracy and reward",
    "rate": "Learning rate",
    "gradient": "Gradient norm",
    "memory": "Memory",
}
"""Figures in the order of the page."""


@dataclass(frozen=True)
class Plot:
    """A drawn plot: file name without suffix, heading, what it shows for those who cannot see it, and its SVG."""

    name: str
    title: str
    alt: str
    svg: str


def plots_available() -> bool:
    """Whether matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def run_plots(run: Run, folder: Path) -> list[Plot]:
    """All figures of a run for which something was recorded, as PNG in `folder` and as SVG."""
    table = series_of(run)
    figures = {name: [row for row in table if row.figure == name] for name in TITLES}
    return [_draw(name, rows, folder) for name, rows in figures.items() if rows]


def _alt(title: str, rows: Sequence[Series]) -> str:
    """What a figure shows, for those who cannot see it."""
    show = format_bytes if rows[0].figure == "memory" else "{:.4g}".format
    texts = [f"{row.panel}, {row.name}: {show(row.points[0][1])} to {show(row.points[-1][1])}" for row in rows]
    return f"{title} by step. {'; '.join(texts)}."


def _draw(name: str, rows: Sequence[Series], folder: Path) -> Plot:
    """Write `NAME.png` in `folder`, and return the plot for the page."""
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with matplotlib.rc_context({"svg.hashsalt": name}, Path(__file__).parent / "plots.mplstyle"):  # ids differ by plot
        figure = Figure(figsize=(9.0, 3.2), layout="constrained")
        FigureCanvasAgg(figure)
        _paint(figure, rows)
        image = io.BytesIO()
        figure.savefig(image, format="png", dpi=150, facecolor="white")
        write_bytes(folder / f"{name}.png", image.getvalue())
        alt = _alt(TITLES[name], rows)
        return Plot(name, TITLES[name], alt, _svg(figure, alt))


def _svg(figure, alt: str) -> str:
    """Inline SVG: no prologue, no ids that could clash with those of other plots, colours as variables of the page."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>|<!--.*?-->", "", text, flags=re.DOTALL)
    text = re.sub(r'<g id="[^"]*"', "<g", text)
    text = re.sub(r'^<svg [^>]*?(viewBox="[^"]*")[^>]*>', rf'<svg \1 role="img" aria-label="{escape(alt)}">', text)
    text = text.replace("xlink:href", "href")
    for name, colour in PALETTE.items():
        text = text.replace(colour, f"var(--{name})")
    return re.sub(r"\n\s*", "\n", text).strip()


# The painter.


def _paint(figure, rows: Sequence[Series]) -> None:
    """The rows of a figure, panel under panel."""
    panels = list(dict.fromkeys(row.panel for row in rows))
    figure.set_figheight(0.9 + 2.2 * len(panels))
    axes = figure.subplots(len(panels), 1, sharex=True, squeeze=False)[:, 0]
    for axis, panel in zip(axes, panels):
        axis.margins(x=0.005)
        axis.label_outer(remove_inner_ticks=True)
        _paint_panel(axis, [row for row in rows if row.panel == panel])
    axes[-1].set_xlabel("step")
    axes[-1].xaxis.get_major_locator().set_params(integer=True)


def _paint_panel(axis, rows: Sequence[Series]) -> None:
    """
    Lines with their names above them. Many noisy points are drawn faintly, and the line is their running mean.
    Matplotlib leaves out of a long run what cannot be seen.
    """
    figure, panel = rows[0].figure, rows[0].panel
    values = [value for row in rows for _, value in row.points]
    scale, unit = 1, ""
    if figure == "memory":
        scale, unit = (GIB, ", GiB") if max(values) >= GIB else (MIB, ", MiB")
    for row in rows:
        points, name, colour = [(step, value / scale) for step, value in row.points], row.name, PALETTE[row.colour]
        options: dict[str, Any] = {}
        if len(points) >= 100 and figure not in ("memory", "rate"):
            axis.plot(*zip(*points), color=colour, alpha=0.22, linewidth=0.7)
            width = max(10, len(points) // 50)
            points, name = running_mean(points, width), f"{name}, mean of {width}"
        elif len(points) < 60 and (row.name == "eval" or len(points) < 20):
            options = {"marker": "o", "markersize": 3}
        axis.plot(*zip(*points), color=colour, label=name, **options)
    axis.set_ylabel(panel + unit)
    if [row.name for row in rows] != [panel]:  # in one row above the plot, where it covers nothing
        axis.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=6, borderaxespad=0.2, columnspacing=1.0)
    if figure == "gradient":
        axis.set_yscale("log", subs=[])
        few = max(values) > 1000 * min(values)  # only powers of ten, or also 2 and 5 times as much
        axis.yaxis.get_major_locator().set_params(subs=(1.0,) if few else (1.0, 2.0, 5.0))
    elif figure in ("memory", "rate"):
        axis.set_ylim(min(0, 1.12 * min(values)) / scale, 1.12 * max(max(values), 1e-9) / scale)
    axis.yaxis.set_major_formatter("{x:g}" if figure == "rate" else "{x:,g}")  # `3e-05`, without an offset beside it


def running_mean(points: Points, width: int) -> Points:
    """Mean over `width` successive points, at the middle one of them."""
    import numpy

    means = numpy.convolve([value for _, value in points], numpy.full(width, 1 / width), "valid")
    return [(step, mean) for (step, _), mean in zip(points[width - 1 - width // 2 :], means.tolist())]
