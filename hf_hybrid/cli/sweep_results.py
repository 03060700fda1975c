"""What a sweep found: a table for the terminal, a plot, and the options of the best trial."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_hybrid.cli.study import best_trial
from hf_hybrid.cli.trials import outcome_text, trial_steps
from hf_hybrid.cli.yaml_file import as_yaml
from hf_hybrid.files import write_text
from hf_hybrid.integrations.optuna import ForecastPruner, FrozenTrial, TrialState, optuna
from hf_hybrid.report.plots import KEPT, LOST, PALETTE, draw, plots_available

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

HEADINGS = ("trial", "steps", "outcome")
NUMBERS = (optuna.distributions.FloatDistribution, optuna.distributions.IntDistribution)
UNFINISHED = (2, math.inf)
"""Behind all that ended."""
MOST_CURVES = 40
"""More trials than that make a plot of curves unreadable; the best are shown."""


def table(study: optuna.Study, pruner: ForecastPruner, count: int) -> str:
    """One line per trial, the best first, and how many steps were made, of those of `count` whole trials."""
    trials = study.get_trials(deepcopy=False)
    best = best_trial(study)
    names = sorted({name for trial in trials for name in trial.params})
    rows = [(HEADINGS[0], *names, *HEADINGS[1:])]
    for trial in _best_first(study, pruner, trials):
        step, max_steps = trial_steps(trial)
        values = [_number(trial.params.get(name, "-")) for name in names]
        outcome = outcome_text(study, pruner, trial) + ("  <- best" if trial is best else "")
        rows.append((str(trial.number), *values, f"{step:,}/{max_steps:,}", outcome))
    widths = [max(map(len, column)) for column in zip(*rows)]
    lines = ["  ".join([*(cell.rjust(width) for cell, width in zip(row, widths[:-1])), row[-1]]) for row in rows]
    made, planned = (sum(column) for column in zip(*map(trial_steps, trials)))
    share = f", {made / (planned * count / len(trials)):.0%} of those of {count} whole trials" if planned else ""
    return "\n".join(lines) + f"\n\n{len(trials)} trials made {made:,} steps{share}.\n"


def _best_first(study: optuna.Study, pruner: ForecastPruner, trials: list[FrozenTrial]) -> list[FrozenTrial]:
    return sorted(trials, key=lambda trial: pruner.standing(study, trial) or UNFINISHED)


def _number(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def write_best(folder: Path, options: dict[str, Any]) -> Path:
    """Write the options of the best trial, for `hf-hybrid train --config`, without those that may be secret."""
    path = folder / "best.yaml"
    write_text(path, as_yaml(options))
    return path


def write_plot(folder: Path, study: optuna.Study, pruner: ForecastPruner, best: FrozenTrial) -> Iterator[Path]:
    """Draw the sweep, if matplotlib is installed. Yields the file that was written."""
    if plots_available() and draw("sweep", "Sweep", "Final loss by parameter, and the curves of all trials.",
                                  lambda figure: _paint(figure, study, pruner, best), folder):  # fmt: skip
        yield folder / "sweep.png"


def _paint(figure: Figure, study: optuna.Study, pruner: ForecastPruner, best: FrozenTrial) -> None:
    """Left: where trials ended, or would have, by the first parameter that is a number. Right: their losses."""
    trials = [trial for trial in study.get_trials(deepcopy=False) if trial.intermediate_values]
    numbers = [name for name, kind in best.distributions.items() if isinstance(kind, NUMBERS)]
    left, right = figure.subplots(1, 2)
    if numbers:
        _paint_ends(left, study, pruner, best, numbers[0])
    else:
        figure.delaxes(left)
    for trial in _best_first(study, pruner, trials)[:MOST_CURVES]:
        steps, losses = zip(*sorted(trial.intermediate_values.items()))
        if trial.number == best.number:
            right.plot(steps, losses, color=KEPT, linewidth=1.6, zorder=3)
        else:
            right.plot(
                steps, losses, color=PALETTE["real" if trial.state == TrialState.COMPLETE else "muted"], linewidth=0.7
            )
        if trial.state == TrialState.PRUNED:
            right.plot(steps[-1], losses[-1], "x", color=LOST, markersize=4)
    right.set_title("Training loss, by step")
    right.set_xlabel("step")
    right.xaxis.get_major_locator().set_params(integer=True)


def _paint_ends(axis: Axes, study: optuna.Study, pruner: ForecastPruner, best: FrozenTrial, name: str) -> None:
    finished = study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
    if best.value is not None:
        axis.plot(best.params[name], best.value, "o", color=KEPT, markersize=8, fillstyle="none", label="best")
    values = [(trial.params[name], trial.value) for trial in finished]
    axis.plot(*zip(*values), "o", color=PALETTE["real"], markersize=4, label="held-out loss at the end")
    ended = study.get_trials(deepcopy=False, states=(TrialState.PRUNED,))
    forecasts = [(trial.params[name], end) for trial in ended if (end := pruner.expected_end(study, trial)) is not None]
    if forecasts:
        values, middles = [value for value, _ in forecasts], [median for _, (_, median, _) in forecasts]
        spans = [[mid - low for _, (low, mid, _) in forecasts], [high - mid for _, (_, mid, high) in forecasts]]
        label = "ended early: forecast of the training loss"
        axis.errorbar(values, middles, yerr=spans, fmt="x", color=LOST, markersize=4, elinewidth=0.7, label=label)
    kind = best.distributions[name]
    if isinstance(kind, NUMBERS) and kind.log:
        axis.set_xscale("log")
        axis.xaxis.set_major_formatter("{x:g}")
    axis.set_xlabel(name)
    axis.set_title("Loss at the end")
    axis.legend()
