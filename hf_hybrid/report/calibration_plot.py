"""Predicted against realised: a panel for each kind of forecast that a run recorded, and none for what it did not."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from hf_hybrid.report.drawing import PALETTE, plain_ticks

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
