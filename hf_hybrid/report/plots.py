"""
The plots of a report: memory, loss and leaps, learning rate and gain, scores, gradient norm and speed.

A *painter* draws one plot on an empty figure and returns `False` if the run has nothing to draw. [`draw`] writes it as
PNG and as SVG for the page, which takes its colours from the page, so that light and dark both work. Phases have the
same colour in every plot. Matplotlib is optional: it is imported when something is drawn, through its object-oriented
interface.
"""

from __future__ import annotations

import importlib.util
import io
import math
import re
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from hf_hybrid.files import write_bytes
from hf_hybrid.records.readings import evenly, number, reading
from hf_hybrid.records.summary import GIB, MIB, format_bytes
from hf_hybrid.report.findings import ACCEPTED, accepted
from hf_hybrid.report.run_folder import Run, Stretch, leaps_made, phase_stretches
from hf_hybrid.report.scores import SCORES, parts_of, scores_of, speed_of

# Distinguishable for the colour-blind (after Okabe and Ito) and on light and dark pages.
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
KEPT, LOST = PALETTE["predict"], PALETTE["bad"]
"""Colours of leaps that stayed in the weights, and of those that did not."""
OF_RUNS = tuple(PALETTE[name] for name in ("full", "predict", "correct", "bad", "line", "warmup", "evaluate", "ink"))
"""Colours of the runs of a comparison. After the last one they begin again, with dashes."""
MOST_POINTS = 1500
"""More points than that are thinned."""


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


def run_plots(run: Run, found: dict, folder: Path) -> list[Plot]:
    """All plots of a run, with its [`findings`], that its data support, as PNG in `folder` and as SVG."""
    loss, rate = ("Loss and leaps", "Learning rate and gain") if leaps_made(run) else ("Loss", "Learning rate")
    plots = (
        ("loss", loss, _loss_alt(run, found), lambda figure: paint_loss(figure, run)),
        ("scores", _score_title(run), _score_alt(found), lambda figure: paint_scores(figure, run)),
        ("rate", rate, _rate_alt(run), lambda figure: paint_rate(figure, run)),
        ("gradient", "Gradient norm", _gradient_alt(found), lambda figure: paint_gradient(figure, run)),
        ("speed", "Tokens per second", _speed_alt(found), lambda figure: paint_speed(figure, run)),
        ("memory", "Memory over time", _memory_alt(found), lambda figure: paint_memory(figure, run)),
    )
    return [plot for plot in (draw(*plot, folder) for plot in plots) if plot is not None]


def comparison_plots(runs: dict[str, Run], folder: Path) -> list[Plot]:
    """Losses, scores, gradient norms, speeds and memories of runs, by their letters, over each other."""
    *others, last = (f"{letter}, {run.name}" for letter, run in runs.items())
    names = f"{'; '.join(others)}; and {last}"
    norms, speeds = ({letter: series(run) for letter, run in runs.items()} for series in (_norms, speed_of))
    plots = (
        ("loss", "Loss", f"Training and held-out loss of {names}.", lambda figure: paint_losses(figure, runs)),
        ("scores", "Scores", f"Accuracy or reward of {names}.", lambda figure: paint_all_scores(figure, runs)),
        (
            "gradient", "Gradient norm", f"Norm of the gradients of {names}.",
            lambda figure: paint_over_each_other(figure, [("gradient norm", norms)], log=True),
        ),
        (
            "speed", "Tokens per second", f"Tokens per second of {names}.",
            lambda figure: paint_over_each_other(figure, [("tokens per second", speeds)], from_zero=True),
        ),
        ("memory", "Memory", f"Memory by step of {names}.", lambda figure: paint_memories(figure, runs)),
    )  # fmt: skip
    return [plot for plot in (draw(*plot, folder) for plot in plots) if plot is not None]


def draw(name: str, title: str, alt: str, painter: Callable, folder: Path) -> Plot | None:
    """`NAME.png` in `folder`, and the plot for the page. The painter may change the height of its figure."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with _style(name):
        figure = Figure(figsize=(9.0, 3.2), layout="constrained")
        FigureCanvasAgg(figure)
        if painter(figure) is False:
            return None
        image = io.BytesIO()
        figure.savefig(image, format="png", dpi=150, facecolor="white")
        write_bytes(folder / f"{name}.png", image.getvalue())
        return Plot(name, title, alt, _svg(figure, alt))


@contextmanager
def _style(salt: str) -> Generator[None]:
    import matplotlib

    values: dict[Any, Any] = {
        "font.family": "DejaVu Sans",  # comes with matplotlib, so it is the same everywhere
        "font.size": 8,
        "svg.fonttype": "none",
        "svg.hashsalt": salt,  # so that ids in the page differ from plot to plot
        "text.parse_math": False,  # names come from files
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.titlesize": 8.5,
        "axes.titlelocation": "left",
        "axes.grid": True,
        "axes.grid.axis": "y",
        "axes.axisbelow": True,
        "axes.linewidth": 0.6,
        "grid.linewidth": 0.6,
        "xtick.major.size": 2.5,
        "ytick.major.size": 0,
        "lines.linewidth": 1.3,
        "legend.frameon": False,
        "legend.fontsize": 7.5,
        "legend.handlelength": 1.4,
        "legend.borderpad": 0,
    }
    values |= dict.fromkeys(("axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), PALETTE["muted"])
    values |= {"axes.titlecolor": PALETTE["ink"], "text.color": PALETTE["ink"], "grid.color": PALETTE["grid"]}
    with matplotlib.rc_context(values):
        yield


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


# Parts of plots.


def phase_colour(phase: str | None) -> str:
    """Colour of the steps of a phase, and of plain `Trainer`'s."""
    return PALETTE["full"] if phase in _NOT_PHASES else PALETTE.get(phase, PALETTE["full"])


def stacked(figure, heights: Sequence[float], inches: float):
    """Axes above each other that share the steps; `heights` are relative, `inches` is the sum."""
    figure.set_figheight(inches)
    axes = figure.subplots(len(heights), 1, sharex=True, squeeze=False, height_ratios=heights)[:, 0]
    for axis in axes:
        axis.margins(x=0.005)
    for axis in axes[:-1]:
        axis.tick_params(labelbottom=False, bottom=False)
    axes[-1].set_xlabel("step")
    axes[-1].xaxis.get_major_locator().set_params(integer=True)
    return list(axes)


def _bare(axis) -> None:
    axis.grid(False)
    for side in ("left", "bottom"):
        axis.spines[side].set_visible(False)


def _legend_above(axis, **options) -> None:
    """A legend in one row above the plot, where it covers nothing."""
    placed = {"loc": "lower left", "bbox_to_anchor": (0, 1), "ncols": 6, "borderaxespad": 0.2, "columnspacing": 1.0}
    axis.legend(**placed, **options)


def phase_strip(axis, stretches: Sequence[Stretch], bins: int = 600) -> None:
    """A band of phases along the steps. Where they change too often to be seen, it shows their shares of the steps."""
    axis.set_yticks([])
    axis.set_ylim(0, 1)
    _bare(axis)
    known, first, last = list(PALETTE), stretches[0][0], max(end for _, end, _ in stretches)
    phases = {phase for _, _, phase in stretches}
    order = sorted(phases, key=lambda phase: (known.index(phase) if phase in known else 0, phase))
    bins = min(bins, last - first + 1)
    width = (last - first + 1) / bins
    counts: list[dict[str, float]] = [{} for _ in range(bins)]
    for start, end, phase in stretches:
        begin, end = (start - first) / width, (end + 1 - first) / width
        for index in range(int(begin), min(math.ceil(end), bins)):
            covered = min(end, index + 1) - max(begin, index)
            counts[index][phase] = counts[index].get(phase, 0.0) + max(covered, 0.0)
    counts.append(counts[-1])  # a step plot needs its right edge
    edges = [first - 1 + index * width for index in range(bins + 1)]
    shares = [[bucket.get(phase, 0.0) / (sum(bucket.values()) or 1.0) for bucket in counts] for phase in order]
    labels = ["full or correct" if phase == "real" else phase for phase in order]
    colours = [phase_colour(phase) for phase in order]
    axis.stackplot(edges, shares, step="post", labels=labels, colors=colours, linewidth=0)
    _legend_above(axis, handlelength=0.9, handletextpad=0.4)


def lines(axis, series: Sequence[tuple[str, Sequence, str, dict]]) -> None:
    """Lines with their names above the plot: name, `(step, value)` pairs, colour and further options of each."""
    for name, points, colour, options in series:
        axis.plot(*zip(*thinned(points)), color=colour, label=name, **{"solid_capstyle": "round", **options})
    _legend_above(axis)


def _smooth(axis, name: str, points: Sequence, colour: str, **options) -> tuple[str, Sequence, str, dict]:
    """The line of a loss: many noisy points are drawn faintly, and the line is their running mean."""
    if len(points) < 100:
        return name, points, colour, options
    axis.plot(*zip(*thinned(points)), color=colour, alpha=0.22, linewidth=0.7)
    width = max(10, len(points) // 50)
    return f"{name}, mean of {width}", running_mean(points, width), colour, options


def thinned(points: Sequence[tuple[float, float]], most: int = MOST_POINTS) -> list[tuple[float, float]]:
    """About `most` points at most: of each stretch the lowest and the highest, so that no peak is lost."""
    points = list(points)
    if len(points) <= most:
        return points
    size, found = math.ceil(2 * len(points) / most), []
    for start in range(0, len(points), size):
        stretch = points[start : start + size]
        found += sorted({min(stretch, key=lambda p: p[1]), max(stretch, key=lambda p: p[1])})
    return found


def running_mean(points: Sequence[tuple[float, float]], width: int) -> list[tuple[float, float]]:
    """Mean over `width` successive points, at the middle one of them."""
    total, found = 0.0, []
    for index, (_, value) in enumerate(points):
        total += value - (points[index - width][1] if index >= width else 0.0)
        if index >= width - 1:
            found.append((points[index - width // 2][0], total / width))
    return found


def _limit_to(axis, values: Sequence[float], fan: Sequence[tuple[float, float, float, float]]) -> None:
    """
    Limit the axis to the values, and to the fan as far as it reaches half of their range beyond them: a wide early
    forecast must not press the losses flat.
    """
    low, high = min(values), max(values)
    room = 0.5 * (high - low)
    low = max(low - room, min([low, *(end for *_, end, _ in fan)]))
    high = min(high + room, max([high, *(end for *_, end in fan)]))
    margin = 0.05 * (high - low) or 0.1 * abs(high) or 1.0
    axis.set_ylim(low - margin, high + margin)


def _phases(run: Run) -> list[Stretch]:
    """Phases of the steps, where there is more than one."""
    stretches = phase_stretches(run)
    return stretches if len({phase for _, _, phase in stretches}) > 1 else []


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


def _points(run: Run, name: str) -> list[tuple[int, float]]:
    """One reading by step."""
    found = ((entry["step"], reading(entry, name)) for entry in run.profile.steps)
    return [(step, value) for step, value in found if value is not None]


def _draw_bytes(axis, place: str, series: Sequence[tuple[str, list, str, dict]]) -> None:
    most = max(value for _, points, _, _ in series for _, value in points)
    unit, name = (GIB, "GiB") if most >= GIB else (MIB, "MiB")
    axis.set_ylim(0, 1.12 * most / unit)
    axis.set_ylabel(f"{place}, {name}")
    scaled = [
        (label, [(step, value / unit) for step, value in points], colour, options)
        for label, points, colour, options in series
    ]
    lines(axis, scaled)


def paint_memory(figure, run: Run) -> bool | None:
    """Device and host memory by step over a band of phases; out-of-memory errors as vertical lines."""
    places = {}
    for place, series in _SERIES.items():
        found = [(label, _points(run, name), PALETTE[colour], options) for label, name, colour, options in series]
        if found := [line for line in found if any(value for _, value in line[1])]:
            places[place] = found
    if not places:
        return False
    phases = _phases(run)
    axes = stacked(figure, [10] * len(places) + ([0.9] if phases else []), 0.9 + 2.4 * len(places))
    for axis, (place, series) in zip(axes, places.items()):
        _draw_bytes(axis, place, series)
        for crash in run.profile.out_of_memory:
            axis.axvline(crash["step"], color=LOST, linewidth=1.0, linestyle=(0, (3, 2)))
            axis.annotate(
                "out of memory", (crash["step"], 1.0), xycoords=("data", "axes fraction"), xytext=(-3, -9), ha="right",
                textcoords="offset points", color=LOST, fontsize=7.5,
            )  # fmt: skip
    if phases:
        phase_strip(axes[-1], phases)
    return None


def _memory_alt(found: dict) -> str:
    peak = (found["memory"] or {}).get("peak")
    if not peak:
        return "Memory by step."
    by = "step and phase" if found["leaps"] else "step"
    return f"Memory by {by}. Peak {format_bytes(peak['bytes'])} on the {peak['where']}, step {peak['step']}."


# Loss and leaps.


def paint_loss(figure, run: Run) -> bool | None:
    """Training and held-out loss; below them where leaps were kept, rejected and rolled back, and the phases."""
    trained, held_out = run.series("loss"), run.series("eval_loss")
    if not trained and not held_out:
        return False
    kinds = (("accepted", ACCEPTED, KEPT), ("rejected", ("rejected",), LOST), ("rolled back", ("rolled_back",), LOST))
    rows = [
        (name, [leap["step"] for leap in run.leaps if leap.get("verdict") in of], colour) for name, of, colour in kinds
    ]
    rows, phases = [row for row in rows if row[1]], _phases(run)
    heights = [10] + ([0.9 * len(rows)] if rows else []) + ([0.8] if phases else [])
    axes = stacked(figure, heights, 3.0 + 0.22 * len(rows) + (0.4 if phases else 0))
    _fan(axes[0], run)
    series = [_smooth(axes[0], "training", trained, PALETTE["ink"])] if trained else []
    if held_out:
        options = {"marker": "o", "markersize": 3.2} if len(held_out) < 60 else {}
        series.append(("held out", held_out, PALETTE["line"], {"linewidth": 0.9, **options}))
    axes[0].set_ylabel(f"loss{_unit([run])}")
    lines(axes[0], series)
    _limit_to(axes[0], [value for _, value in (*trained, *held_out)], _fan_of(run)[1])
    if rows:
        _rug(axes[1], rows)
    if phases:
        phase_strip(axes[-1], phases)
    return None


def _unit(runs: Iterable[Run]) -> str:
    """The unit behind the name of a loss: that of a policy, which is trained on rewards, has none."""
    return "" if any(run.series("reward") for run in runs) else " (nats)"


def forecasts_of(run: Run, loss: str = "") -> list[tuple[float, float, float, float]]:
    """
    Step, median, and ends of the 90 % interval of each forecast of the final training loss, or of the held-out one with
    `loss="eval_"`.
    """
    found = [run.series(f"hybrid/forecast_{loss}{name}") for name in ("loss", "low", "high")]
    return [(step, *(value for _, value in values)) for values in zip(*found) for step in (values[0][0],)]


def came_of(run: Run) -> float | None:
    """Mean of the logged losses of the last steps, which the forecasts are of; `None` for a cut-off run."""
    from hf_hybrid.world_model.final_loss import final_steps  # needs numpy, as matplotlib does; a report needs neither

    last = [loss for step, loss in run.series("loss") if step > run.last_step - final_steps(run.last_step)]
    return sum(last) / len(last) if run.finished and last else None


def _fan(axis, run: Run) -> None:
    """
    One fan: at each step the 90 % interval of the final loss as it was forecast there, and a line where it came. It is
    of the held-out loss if that was forecast, else of the training loss; two over each other could not be read.
    """
    loss, found = _fan_of(run)
    name, colour = ("held-out end" if loss else "end"), PALETTE["real"]
    if not found:
        return
    steps, median, low, high = zip(*found)
    label = f"{name}, forecast (90 %)"
    axis.fill_between(steps, low, high, step="post", color=colour, alpha=0.25, linewidth=0, label=label)
    axis.plot(steps, median, drawstyle="steps-post", color=colour, linewidth=0.9)
    if (came := held_out_end_of(run) if loss else came_of(run)) is not None:
        axis.axhline(came, color=PALETTE["bad"], linewidth=0.8, linestyle=(0, (4, 2)), label=f"{name}, as it came")


def _fan_of(run: Run) -> tuple[str, list[tuple[float, float, float, float]]]:
    """Return which forecasts are drawn, and these, as [`forecasts_of`] does."""
    held_out = forecasts_of(run, "eval_")
    return ("eval_", held_out) if held_out else ("", forecasts_of(run))


def held_out_end_of(run: Run) -> float | None:
    """The `eval_loss` after the last step, which the held-out forecasts are of; `None` if there was none."""
    held_out = run.series("eval_loss")
    return held_out[-1][1] if run.finished and held_out and held_out[-1][0] == run.last_step else None


def _rug(axis, rows: Sequence[tuple[str, list[int], str]]) -> None:
    """A row of marks for each fate of leaps."""
    for place, (_, steps, colour) in enumerate(rows):
        drawn = evenly(steps, MOST_POINTS // 3)
        axis.vlines(drawn, place + 0.15, place + 0.85, color=colour, linewidth=1.0 if len(steps) < 200 else 0.5)
    axis.set_ylim(len(rows), 0)
    axis.set_yticks([place + 0.5 for place in range(len(rows))], [f"{len(steps):,} {name}" for name, steps, _ in rows])
    for label, (_, _, colour) in zip(axis.get_yticklabels(), rows):
        label.set_color(colour)
    _bare(axis)


def _loss_alt(run: Run, found: dict) -> str:
    loss, leaps = found["headline"]["final_loss"], found["leaps"]
    names = (("training", "training"), ("held_out", "held-out"))
    parts = [f"{name} {loss[key]:.4g}" for key, name in names if loss[key] is not None]
    told = f" {leaps['accepted']} of {leaps['made']} leaps stayed." if leaps else ""
    if forecasts := forecasts_of(run):
        step, median, low, high = forecasts[0]
        told += f" After step {step:,.0f} the end was forecast at {median:.4g}, from {low:.4g} to {high:.4g}."
    if forecasts := forecasts_of(run, "eval_"):
        step, median, low, high = forecasts[0]
        told += f" After step {step:,.0f} the held-out end was forecast at {median:.4g}, from {low:.4g} to {high:.4g}."
    return f"Loss over {run.last_step} steps. At the end: {', '.join(parts) or 'not recorded'}.{told}"


# Learning rate and gain.


def paint_rate(figure, run: Run) -> bool | None:
    """The learning rate that was used, and below it the gain of every leap."""
    rates = run.series("learning_rate")
    gains = [
        (leap["step"], gain, accepted(leap)) for leap in run.leaps if (gain := number(leap.get("gain"))) is not None
    ]
    if not rates and not gains:
        return False
    phases, panels = _phases(run), bool(rates) + bool(gains)
    axes = stacked(figure, [6] * panels + ([0.8] if phases else []), 0.7 + 1.6 * panels)
    if rates:
        axes[0].plot(*zip(*thinned(rates)), color=PALETTE["ink"])
        axes[0].set_title("learning rate")
        axes[0].set_ylim(0, 1.1 * max(rate for _, rate in rates) or 1.0)
        axes[0].yaxis.set_major_formatter("{x:g}")  # `3e-05`, without an offset or a power beside the axis
    if gains:
        axis, values = axes[panels - 1], [gain for _, gain, _ in gains]
        axis.set_title("gain of each leap")
        fates = ((True, "accepted", "o", KEPT, 3.5), (False, "rejected or rolled back", "X", LOST, 5))
        for stayed, name, marker, colour, size in fates:
            points = [(step, gain) for step, gain, kept in gains if kept is stayed]
            if points:
                label = f"{len(points):,} {name}"
                axis.plot(*zip(*thinned(points)), marker, color=colour, markersize=size, label=label, mew=0)
        axis.set_ylim(min(0, 1.15 * min(values)), 1.15 * max(*values, 1e-9))
        axis.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=2, borderaxespad=0.2)
    if phases:
        phase_strip(axes[-1], phases)
    return None


def _rate_alt(run: Run) -> str:
    rates = run.series("learning_rate")
    told = f" Highest {max(rate for _, rate in rates):.3g}, last {rates[-1][1]:.3g}." if rates else ""
    scale = number(run.record.get("learning_rate_scale"))
    told += f" The rescue made it {scale:.3g} times the scheduled rate." if scale not in (None, 1.0) else ""
    gains = f", and the gain of {len(run.leaps):,} leaps" if run.leaps else ""
    return f"Learning rate by step{gains}.{told}"


# Scores, gradient norm and speed.


def _score_title(run: Run) -> str:
    return next((score["name"] for score in scores_of(run).values()), "Scores")


def paint_scores(figure, run: Run) -> bool | None:
    """Accuracy or reward of training and evaluations; below it what a reward consists of."""
    scores, parts = scores_of(run), parts_of(run)
    parts = {} if len(parts) == 1 and "reward" in scores else parts  # a single function is the reward
    if not scores and not parts:
        return False
    panels = len(scores) + bool(parts)
    axes = stacked(figure, [1] * panels, 0.7 + 1.9 * panels)
    for axis, score in zip(axes, scores.values()):
        series = [_smooth(axis, "training", score["training"], PALETTE["ink"])] if score["training"] else []
        if score["held_out"]:
            options = {"marker": "o", "markersize": 3.2} if len(score["held_out"]) < 60 else {}
            series.append(("held out", score["held_out"], PALETTE["line"], {"linewidth": 0.9, **options}))
        axis.set_ylabel(score["name"].lower())
        lines(axis, series)
    if parts:
        axes[-1].set_ylabel("rewards")
        lines(
            axes[-1],
            [_smooth(axes[-1], name, series, colour) for (name, series), colour in zip(parts.items(), OF_RUNS)],
        )
    return None


def _score_alt(found: dict) -> str:
    told = []
    for score in found["scores"].values():
        for kind, name in (("training", "training"), ("held_out", "held out")):
            if ends := score.get(kind):
                told.append(f"{score['name']}, {name}: at first {ends['first']:.4g}, at last {ends['last']:.4g}.")
    return " ".join(told) or "Rewards of chosen and rejected completions by step."


def _norms(run: Run) -> list[tuple[int, float]]:
    """Norms of the gradients that a logarithmic axis can show."""
    return [(step, norm) for step, norm in run.series("grad_norm") if norm > 0]


def paint_gradient(figure, run: Run) -> bool | None:
    """The norm of the gradients before clipping, on a logarithmic axis."""
    return paint_over_each_other(figure, [("gradient norm", {"training": _norms(run)})], (PALETTE["ink"],), log=True)


def _gradient_alt(found: dict) -> str:
    norm = found["gradient_norm"] or {"median": 0.0, "highest": 0.0, "highest_step": 0}
    return (
        f"Norm of the gradients before clipping, by step. Median {norm['median']:.3g}, highest {norm['highest']:.3g} "
        f"in step {norm['highest_step']:,}."
    )


def paint_speed(figure, run: Run) -> bool | None:
    """Tokens per second between entries of the log."""
    panels = [("tokens per second", {"training": speed_of(run)})]
    return paint_over_each_other(figure, panels, (PALETTE["ink"],), from_zero=True)


def _speed_alt(found: dict) -> str:
    speed = found["headline"]["tokens_per_second"] or {}
    mean = "" if speed.get("value") is None else f" {speed['value']:,.0f} over the run ({speed['source']})."
    return f"Tokens per second by step.{mean}"


def paint_over_each_other(
    figure,
    panels: Sequence[tuple[str, Mapping[str, Sequence]]],
    colours: Sequence[str] = OF_RUNS,
    *,
    log: bool = False,
    from_zero: bool = False,
) -> bool | None:
    """Panels above each other, each with its name and its series by name; those without points are left out."""
    panels = [(name, {label: of for label, of in series.items() if of}) for name, series in panels]
    if not (panels := [(name, series) for name, series in panels if series]):
        return False
    axes = stacked(figure, [1] * len(panels), 0.7 + 2.0 * len(panels))
    known = list(dict.fromkeys(label for _, series in panels for label in series))
    for axis, (name, series) in zip(axes, panels):
        axis.set_ylabel(name)
        drawn = []
        for label, points in series.items():
            index = known.index(label)
            dashes = {"linestyle": (0, (4, 1.5))} if index >= len(colours) else {}
            marks = {"marker": "o", "markersize": 2.6} if len(points) < 20 else {}
            options = {"linewidth": 1.2, **dashes, **marks}
            drawn.append(_smooth(axis, label, points, colours[index % len(colours)], **options))
        lines(axis, drawn)
        if log:
            axis.set_yscale("log", subs=[])
            values = [value for points in series.values() for _, value in points]
            few = max(values) > 1000 * min(values)  # only powers of ten, or also 2 and 5 times as much
            axis.yaxis.get_major_locator().set_params(subs=(1.0,) if few else (1.0, 2.0, 5.0))
            axis.yaxis.set_major_formatter("{x:g}")
        else:
            axis.yaxis.set_major_formatter("{x:,g}")
        if from_zero:
            axis.set_ylim(bottom=0)
    return None


# Several runs.


def paint_losses(figure, runs: dict[str, Run]) -> bool | None:
    """Training and held-out loss of runs, by their letters."""
    kinds, unit = (("loss", "training loss"), ("eval_loss", "held-out loss")), _unit(runs.values())
    panels = [(f"{name}{unit}", {letter: run.series(key) for letter, run in runs.items()}) for key, name in kinds]
    return paint_over_each_other(figure, [panel for panel in panels if _in_several(panel)])


def paint_all_scores(figure, runs: dict[str, Run]) -> bool | None:
    """The scores that several runs logged, of the training and of evaluations."""
    scores = {letter: scores_of(run) for letter, run in runs.items()}
    panels = [
        (f"{name.lower()}, {word}", {letter: of[key][kind] for letter, of in scores.items() if key in of})
        for key, name in SCORES
        for kind, word in (("training", "training"), ("held_out", "held out"))
    ]
    return paint_over_each_other(figure, [panel for panel in panels if _in_several(panel)])


def _in_several(panel: tuple[str, Mapping[str, Sequence]]) -> bool:
    """Whether there is anything to compare."""
    return sum(bool(series) for series in panel[1].values()) > 1


def paint_memories(figure, runs: dict[str, Run]) -> bool | None:
    """Peak memory of runs by step: of the device where several have one, else of the process."""
    for place, name in (("device", "device.peak_allocated"), ("host", "host.peak_rss"), ("host", "host.rss")):
        points = {letter: found for letter, run in runs.items() if (found := _points(run, name))}
        if len(points) > 1:
            (axis,) = stacked(figure, [1], 2.7)
            letters = list(runs)
            found = [
                (letter, of, OF_RUNS[letters.index(letter) % len(OF_RUNS)], {"linewidth": 1.2})
                for letter, of in points.items()
            ]
            _draw_bytes(axis, f"{place}, peak", found)
            return None
    return False
