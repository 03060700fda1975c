"""The content of a report as plain values: numbers with their sources, only if they were recorded."""

from __future__ import annotations

from hf_hybrid.records.readings import PHASES, as_dict, count_of, number
from hf_hybrid.records.summary import HybridSummary
from hf_hybrid.report.run_folder import Points, Run, leaps_made, verdicts_of
from hf_hybrid.report.samples import samples_of
from hf_hybrid.report.series import ACCEPTED, SCORES, series_of

PROFILER_HINT = (
    "Memory was not recorded. With `profile_memory=True` (`--profile_memory` on the command line) the next report "
    "has it over time, by phase and by category."
)


def findings(run: Run) -> dict:
    """Return the content of `report.json`. What was not recorded is `None` or empty."""
    held = as_dict(as_dict(run.record.get("memory")).get("held"))
    by_phase = {name: {key: as_dict(run.record.get(f"{key}_by_phase")).get(name) for key in ("steps", "seconds")}
                for name in PHASES}  # fmt: skip
    begun = next((line for line in reversed(run.log.lines) if "begun" in line), {})
    return {
        "schema_version": 3,
        "name": run.name,
        "folder": str(run.folder),
        "finished": run.finished,
        "status": _status(run),
        "headline": {
            "final_loss": _final_loss(run),
            "steps": _steps(run),
            "backward_passes": _backward_passes(run),
            "seconds": _seconds(run),
            "peak_memory": run.memory.peak,
            "tokens_per_second": _speed(run),
        },
        "scores": _scores(run),
        "samples": sorted(samples_of(run.folder), key=lambda sample: -sample["step"]),
        "savings": dict(HybridSummary(run.record).savings_rows()),
        "phases": by_phase if leaps_made(run) and run.record_steps else {},
        "series": [
            {"figure": row.figure, "panel": row.panel, "name": row.name, "points": row.points} for row in series_of(run)
        ],
        "leaps": _leaps(run),
        "leap_records": run.leaps,
        "memory": {"peak": run.memory.peak, "by_phase": run.memory.phases, "held_at_the_end": held},
        "recoveries": run.recoveries,
        "events_seen": max(len(run.events), count_of(run.record.get("divergence_events_seen")) or 0),
        "events": run.events,
        "options": run.config,
        "environment": {**as_dict(begun.get("hardware")), **as_dict(begun.get("versions"))},
        "notes": _notes(run),
    }


def _notes(run: Run) -> list[str]:
    notes = list(run.notes)
    if not run.memory.phases:
        empty = "The profile holds no steps, because the run ended before the first one."
        notes.append(empty if run.profile.lines else PROFILER_HINT)
    scale = number(run.record.get("learning_rate_scale"))
    if scale not in (None, 1.0):
        notes.append(f"The run set the learning rate itself: it ended at {scale:.3g} times the scheduled rate.")
    if hint := run.record.get("speed_hint"):
        notes.append(str(hint))
    leaps = leaps_made(run)
    if lost := max(leaps - len(run.leaps), 0):
        notes.append(f"{lost:,} of {leaps:,} leaps left no record: `hybrid_log.jsonl` does not have them.")
    return notes


def _status(run: Run) -> str:
    """One sentence: whether the run ended, and where the numbers come from."""
    planned = f" of {run.max_steps:,}" if run.max_steps else ""
    if run.finished:
        return f"Finished at step {run.last_step:,}{planned}."
    source = f" Counters and leaps are from {run.record_source}." if run.record_source else ""
    return f"Did not finish: the last record is of step {run.last_step:,}{planned}.{source}"


# The headline.


def _final_loss(run: Run) -> dict:
    trained, evaluated = run.series("loss"), run.series("eval_loss")
    training_step, training = trained[-1] if trained else (None, None)
    eval_step, last = evaluated[-1] if evaluated else (None, None)
    losses = {"held_out": last, "held_out_step": eval_step, "training": training, "training_step": training_step}
    return {**losses, "best_held_out": min((value for _, value in evaluated), default=None)}


def _scores(run: Run) -> dict[str, dict]:
    """
    Return the first, last and best value of each score, of the training and of evaluations, and what it was before the
    training. More is better.
    """
    scores = {}
    for key, name in SCORES:
        ends = {kind: _ends(run.series(logged)) for kind, logged in (("training", key), ("held_out", f"eval_{key}"))}
        if any(ends.values()):
            scores[key] = {"name": name, **{kind: values for kind, values in ends.items() if values}}
    return scores


def _ends(points: Points) -> dict | None:
    if not points:
        return None
    (begin, first), (step, last), best = points[0], points[-1], max(points, key=lambda point: point[1])
    before = {"before": first} if begin == 0 < step else {}
    return {"first": first, **before, "last": last, "step": step, "best": best[1], "best_step": best[0]}


def _steps(run: Run) -> dict:
    """Count steps. Predicted ones are those of the record, or of the log where that goes farther."""
    counts = [(run.record_steps, int(number(as_dict(run.record.get("steps_by_phase")).get("predict")) or 0))]
    counts += [(step, int(value)) for step, value in run.series("hybrid/predicted_steps")[-1:]]
    predicted = max(counts, key=lambda count: count[0])[1]
    counted = {"total": run.last_step, "real": run.last_step - predicted, "predicted": predicted}
    return {**counted, "planned": run.max_steps}


def _backward_passes(run: Run) -> dict:
    """Up to `step`: from the record, or from the log where that goes farther, which does not know the other counts."""
    logged = run.series("hybrid/backward_passes")
    names = {"done": "backward_passes", "avoided": "backward_passes_avoided", "forward_only": "forward_only_passes"}
    if logged and logged[-1][0] > run.record_steps:
        return {**dict.fromkeys(names), "done": logged[-1][1], "step": logged[-1][0]}
    if not run.record_steps:  # without leaps they are not counted
        return {**dict.fromkeys(names), "step": None}
    return {**{name: number(run.record.get(key)) for name, key in names.items()}, "step": run.record_steps}


def _seconds(run: Run) -> dict:
    """Return the wall time of all starts of the run; for one that was killed, up to its last record."""
    logged, starts = run.log.wall_time()
    trained = [seconds for step, seconds in run.series("train_runtime") if step == run.last_step]
    if logged and starts > 1:
        return {"value": logged, "source": f"log, over {starts} starts"}
    if trained:
        return {"value": trained[-1], "source": "train_runtime"}
    if logged:
        return {"value": logged, "source": "log, to its last line"}
    total = sum(number(value) or 0.0 for value in as_dict(run.record.get("seconds_by_phase")).values())
    return {"value": total or None, "source": "steps alone, without evaluation and saving" if total else None}


def _speed(run: Run) -> dict | None:
    """The tokens per second of the whole run, as its summary or the trainer's last log entry has them."""
    value, share = number(run.record.get("tokens_per_second")), number(run.record.get("device_share"))
    if value is None:
        logged = run.series("train_tokens_per_second")
        return {"value": logged[-1][1], "source": "logged by the trainer"} if logged else None
    computed = "" if share is None else f"; the device computed in {100 * share:.0f} % of the time"
    return {"value": value, "source": f"without evaluation and saving{computed}"}


def _leaps(run: Run) -> dict | None:
    """Counts of leaps by verdict; `None` for runs that made none."""
    if not leaps_made(run):
        return None
    verdicts = verdicts_of(run)
    accepted = sum(verdicts[verdict] for verdict in ACCEPTED)
    return {"made": leaps_made(run), "accepted": accepted, "by_verdict": dict(verdicts)}
