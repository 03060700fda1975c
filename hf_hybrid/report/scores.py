"""
What a run logs beside its loss: accuracy or reward, the gradient norm, and how many tokens it trained on.

Each is shown only where it was recorded. SFT logs the accuracy of tokens, DPO that of preferences, GRPO and RLOO the
reward, and a `compute_metrics` may log an `eval_accuracy`. Tokens are counted by TRL, and by `Trainer` with
`include_num_input_tokens_seen`.
"""

from __future__ import annotations

from hf_hybrid.records.readings import number
from hf_hybrid.report.run_folder import Run

SCORES = (
    ("reward", "Reward"),
    ("rewards/accuracies", "Preference accuracy"),
    ("mean_token_accuracy", "Token accuracy"),
    ("accuracy", "Accuracy"),
)
"""Keys of the log, and what they are called. The first that a run has is its headline."""
TOKENS = ("num_tokens", "num_input_tokens_seen")
SPEEDS = ("tokens_per_second", "train_tokens_per_second")
MOST_PARTS = 8
"""Reward functions, or rewards of completions, that are shown."""
_SHORTEST = 0.1
"""Seconds between two log entries from which a speed is computed; the log has thousandths of a second."""

Series = list[tuple[int, float]]


def scores_of(run: Run) -> dict[str, dict]:
    """
    Return the scores that the run logged, by key: `name`, `training` and `held_out` (`(step, value)` pairs).

    All of them lie where more is better.
    """
    found = {}
    for key, name in SCORES:
        training, held_out = run.series(key), run.series(f"eval_{key}")
        if training or held_out:
            found[key] = {"name": name, "training": training, "held_out": held_out}
    return found


def parts_of(run: Run) -> dict[str, Series]:
    """Return what a reward consists of, by name: the mean of each reward function, or DPO's implicit rewards."""
    keys = sorted({key for entry in run.logs for key in entry if key.startswith("rewards/")})
    means = [key for key in keys if key.endswith("/mean")]
    named = [(key.removeprefix("rewards/").removesuffix("/mean"), key) for key in means]
    named = named or [(name, f"rewards/{name}") for name in ("chosen", "rejected", "margins")]
    found = {name: run.series(key) for name, key in named[:MOST_PARTS]}
    return {name: series for name, series in found.items() if series}


def score_rows(run: Run) -> dict[str, dict]:
    """Return the first, last and best value of each score, of the training and of evaluations, for `report.json`."""
    found = {}
    for key, score in scores_of(run).items():
        ends = {kind: _ends(score[kind]) for kind in ("training", "held_out")}
        found[key] = {"name": score["name"], **{kind: values for kind, values in ends.items() if values}}
    return found


def _ends(series: Series) -> dict | None:
    if not series:
        return None
    (step, last), best = series[-1], max(series, key=lambda point: point[1])
    return {"first": series[0][1], "last": last, "step": step, "best": best[1], "best_step": best[0]}


def _intervals(run: Run) -> list[tuple[int, float, float]]:
    """
    Return step, tokens and seconds between entries with a loss. They come from the log, which has the time of each
    line; each start of a run has its own clock.
    """
    found: list[tuple[int, float, float]] = []
    before: tuple[float, float] | None = None
    for line in run.log.lines:
        if "begun" in line:
            before = None
        seen = next((value for name in TOKENS if (value := number(line.get(name))) is not None), None)
        clock = number(line.get("seconds"))
        if "loss" not in line or seen is None or clock is None:
            continue
        if before is None or seen < before[0] or clock < before[1]:
            before = seen, clock
        elif clock - before[1] >= _SHORTEST:
            found.append((line["step"], seen - before[0], clock - before[1]))
            before = seen, clock
    return found


def speed_of(run: Run) -> Series:
    """Return tokens per second by step: between entries of the log, or else as the trainer logged it."""
    intervals = [(step, tokens / seconds) for step, tokens, seconds in _intervals(run)]
    return intervals or next(filter(None, map(run.series, SPEEDS)), [])


def speed(run: Run) -> dict | None:
    """Return the tokens per second of the whole run, the tokens, and the source; `None` if no tokens were counted."""
    intervals = _intervals(run)
    counted = next(filter(None, map(run.series, TOKENS)), [])
    tokens = counted[-1][1] if counted else None
    if intervals:
        value = sum(tokens for _, tokens, _ in intervals) / sum(seconds for *_, seconds in intervals)
        return {"value": value, "tokens": tokens, "source": "log, with evaluation and saving"}
    if logged := speed_of(run):
        return {"value": logged[-1][1], "tokens": tokens, "source": "logged by the trainer"}
    return None if tokens is None else {"value": None, "tokens": tokens, "source": None}
