"""Plots of what `forecast.py` found."""

from __future__ import annotations

from pathlib import Path


def draw(ours: dict, baselines: dict, path: Path) -> None:
    """
    Scores by horizon, calibration, reliability of the confidence, branches.

    Args:
        ours (`dict`): The line of an arm, with the rows of its branches.
        baselines (`dict`): Horizon -> baseline -> scores.
        path (`Path`): Of the picture.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(2, 3, figsize=(15, 8.5))
    _score_bars(axes[0, 0], baselines, ours, "crps", "CRPS of the log loss")
    _score_bars(axes[0, 1], baselines, ours, "nll", "negative log-likelihood (nats)")
    _coverage_curves(axes[0, 2], ours)
    _reliability(axes[1, 0], ours["confidence"], "loss in 5 windows at most 2 % higher")
    for axis, target, name in (
        (axes[1, 1], "realised_end", "training loss, last shared windows"),
        (axes[1, 2], "held_out_end", "held-out loss at the end"),
    ):
        _branches(axis, ours["branches"]["rows"], target, name)
    figure.suptitle(f"{ours['runs']['held_out']} held-out runs; bars: 95 % by bootstrap over runs")
    figure.tight_layout()
    figure.savefig(path, dpi=90)
    pyplot.close(figure)


def _score_bars(axis, baselines: dict, ours: dict, score: str, label: str) -> None:
    horizons = list(ours["horizons"])
    series = {"world model": {k: ours["horizons"][k][score] for k in horizons}}
    for name in baselines[horizons[0]]:
        series[name] = {k: baselines[k][name][score] for k in horizons}
    width = 0.8 / len(series)
    for number, (name, values) in enumerate(series.items()):
        means = [values[k]["mean"] for k in horizons]
        errors = [[m - values[k]["low"] for m, k in zip(means, horizons)]]
        errors.append([values[k]["high"] - m for m, k in zip(means, horizons)])
        places = [index + (number - (len(series) - 1) / 2) * width for index in range(len(horizons))]
        axis.bar(places, means, width, yerr=errors, label=name, capsize=2)
    steps = [ours["horizons"][k]["real_steps"] for k in horizons]
    axis.set_xticks(range(len(horizons)), [f"{count} real steps" for count in steps])
    axis.set_ylabel(f"{label}, lower is better")
    axis.axhline(0, color="black", linewidth=0.6)
    axis.legend(fontsize=8)


def _coverage_curves(axis, ours: dict) -> None:
    axis.plot([0, 1], [0, 1], color="grey", linewidth=0.8)
    for horizon in ours["horizons"].values():
        calibration = horizon["calibration"]
        label = f"{horizon['real_steps']} real steps, ECE {calibration['ece']:.3f}"
        axis.plot(calibration["levels"], calibration["coverage"], marker="o", markersize=3, label=label)
    axis.set_xlabel("level of the central interval")
    axis.set_ylabel("share of realised losses inside")
    axis.legend(fontsize=8)


def _reliability(axis, confidence: dict, what: str) -> None:
    axis.plot([0, 1], [0, 1], color="grey", linewidth=0.8)
    rows = confidence["bins"]
    total = sum(row["n"] for row in rows)
    axis.scatter(
        [row["probability"] for row in rows],
        [row["frequency"] for row in rows],
        s=[15 + 500 * row["n"] / total for row in rows],
    )
    axis.set_xlabel(f"confidence: probability of {what}")
    axis.set_ylabel("frequency (size: number of windows)")
    axis.set_title(f"ECE {confidence['ece']:.3f}, n = {total}", fontsize=10)


def _branches(axis, rows: list[dict], target: str, name: str) -> None:
    axis.scatter([row["imagined_end"] for row in rows], [row[target] for row in rows], s=10)
    axis.axhline(0, color="grey", linewidth=0.6)
    axis.axvline(0, color="grey", linewidth=0.6)
    axis.set_yscale("symlog", linthresh=0.05)
    axis.set_xscale("symlog", linthresh=0.05)
    axis.set_xlabel("imagined difference of the log loss")
    axis.set_ylabel("realised difference")
    axis.set_title(f"branches, {name}, n = {len(rows)}", fontsize=10)
