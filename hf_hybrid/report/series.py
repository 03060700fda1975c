"""
The table of series: everything of a run that is drawn over its steps, and listed in `report.json`.

A row says in which figure and panel a series stands, its name, its colour and its points. A run has the rows for which
something was recorded: SFT logs the accuracy of tokens, DPO that of preferences, GRPO and RLOO the reward, and a
`compute_metrics` may log an `eval_accuracy`. The painter and the alternative texts read nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass

from hf_hybrid.records.readings import reading
from hf_hybrid.report.run_folder import Points, Run

ACCEPTED = ("unprobed", "kept", "shrunk")
"""Verdicts of leaps that stayed in the weights."""
SCORES = (
    ("reward", "Reward"),
    ("rewards/accuracies", "Preference acc"),
    ("mean_token_accuracy", "Token acc"),
    ("accuracy", "Accuracy"),
)
"""Keys of the log, and what they are called. The first that a run has is its headline."""
_MOST_PARTS = 8
"""Reward functions, or rewards of completions, that are shown."""
_MEMORY = (
    ("device", "peak allocated", "ink", "device.peak_allocated"),
    ("device", "reserved", "muted", "device.peak_reserved"),
    ("device", "held after the step", "line", "device.allocated"),
    ("device", "whole device (NVML)", "warmup", "nvml.used"),
    ("host", "peak of the process", "ink", "host.peak_rss"),
    ("host", "process (RSS)", "line", "host.rss"),
    ("host", "pinned", "muted", "host.pinned"),
)


@dataclass(frozen=True)
class Series:
    """A row of the table."""

    figure: str
    panel: str
    name: str
    colour: str
    points: Points


def series_of(run: Run) -> list[Series]:
    """Return the table of a run."""
    loss = f"loss{'' if run.series('reward') else ' (nats)'}"  # that of a policy, which learns by rewards, has no unit
    rows = [
        Series("loss", loss, "training", "ink", run.series("loss")),
        Series("loss", loss, "eval", "line", run.series("eval_loss")),
    ]
    for key, name in SCORES:
        rows.append(Series("scores", name.lower(), "training", "ink", run.series(key)))
        rows.append(Series("scores", name.lower(), "eval", "line", run.series(f"eval_{key}")))
    colours = ("full", "predict", "correct", "bad", "line", "warmup", "evaluate", "ink")
    rows += [
        Series("scores", "rewards", name, colour, points) for (name, points), colour in zip(parts_of(run), colours)
    ]
    rows.append(Series("rate", "learning rate", "learning rate", "ink", run.series("learning_rate")))
    norms = [(step, norm) for step, norm in run.series("grad_norm") if norm > 0]  # the axis is logarithmic
    rows.append(Series("gradient", "gradient norm", "training", "ink", norms))
    for place, name, colour, key in _MEMORY:
        values = ((entry["step"], reading(entry, key)) for entry in run.profile.lines)
        points = [(step, value) for step, value in values if value is not None]
        rows.append(Series("memory", place, name, colour, points if any(value for _, value in points) else []))
    return [row for row in rows if row.points]


def parts_of(run: Run) -> list[tuple[str, Points]]:
    """Return what a reward consists of, by name: the mean of each reward function, or DPO's implicit rewards."""
    keys = sorted({key for entry in run.logs for key in entry if key.startswith("rewards/")})
    means = [key for key in keys if key.endswith("/mean")]
    if len(means) == 1 and run.series("reward"):
        return []  # a single function is the reward
    named = [(key.removeprefix("rewards/").removesuffix("/mean"), key) for key in means]
    named = named or [(name, f"rewards/{name}") for name in ("chosen", "rejected", "margins")]
    return [(name, points) for name, key in named[:_MOST_PARTS] if (points := run.series(key))]
