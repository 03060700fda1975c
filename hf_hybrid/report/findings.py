"""The content of a report as plain values: numbers with their sources, only if they were recorded."""

from __future__ import annotations

from datetime import datetime, timezone

from hf_hybrid.records.readings import PHASES, as_dict, count_of, dicts_of, number, peak_of, reading, texts_of
from hf_hybrid.report.run_folder import Run, leaps_made, phase_stretches, verdicts_of
from hf_hybrid.report.samples import samples_of
from hf_hybrid.report.scores import score_rows, speed

ACCEPTED = ("unprobed", "kept", "shrunk")
"""Verdicts of leaps that stayed in the weights."""
OPTIONS_OF_LEAPS = frozenset((
    "enable_predict", "warmup_phase_steps", "full_phase_steps", "correct_phase_steps", "max_predict_steps", "direction",
    "leap_gain", "planner", "leap_worth", "leap_budget", "probe_budget", "predict_states", "checkpoint_phases",
))  # fmt: skip
"""Options that do nothing in a run without leaps."""
MOST_RECORDS = 1000
"""Records in a JSON or CSV file. `hybrid_log.jsonl` of the run has all."""
PROFILER_HINT = (
    "Memory was not recorded. With `profile_memory=True` (`--profile_memory` on the command line) the next report "
    "has it over time, by phase and by category."
)


def findings(run: Run) -> dict:
    """
    Return the content of `report.json`, from a run that [`load_run`] read.

    What was not recorded is `None` or empty.
    """
    return {
        "schema_version": 1,
        "name": run.name,
        "folder": str(run.folder),
        "finished": run.finished,
        "status": _status(run),
        "headline": {
            "final_loss": _final_loss(run),
            "steps": _steps(run),
            "backward_passes": _backward_passes(run),
            "seconds": _seconds(run),
            "peak_memory": _highest(run.profile.steps),
            "tokens_per_second": speed(run),
        },
        "scores": score_rows(run),
        "gradient_norm": _gradient_norm(run),
        "samples": samples_of(run.folder),
        "tokens": _tokens(run),
        "phases": _phase_rows(run),
        "leaps": _leap_summary(run),
        "memory": _memory(run),
        "recoveries": run.recoveries,
        "displacement": _displacement(run),
        "forecast_errors": as_dict(as_dict(run.record.get("planner")).get("errors")),
        "events_seen": max(len(run.events), count_of(run.record.get("divergence_events_seen")) or 0),
        "events": run.events[-MOST_RECORDS:],
        "options": _options(run),
        "environment": _environment(run.profile.run),
        "notes": _notes(run),
    }


def _options(run: Run) -> dict:
    """Return the recorded options: of leaps, where there were none, only those that the user set."""
    recorded = {name: value for name, value in run.options.items() if leaps_made(run) or name not in OPTIONS_OF_LEAPS}
    return {**recorded, **run.config}


def _notes(run: Run) -> list[str]:
    notes = list(run.notes)
    if not run.profile.steps:
        empty = "The profile holds no steps, because the run ended before the first one."
        notes.append(empty if run.profile.run else PROFILER_HINT)
    for crash in run.profile.out_of_memory:
        notes.append(f"Out of memory in step {crash['step']:,}: see `profile/{crash['folder']}`.")
    if failed := texts_of(run.record.get("failed_savings")):
        notes.append(f"Savings that did not work, so the run computed more than it had to: {'; '.join(failed)}.")
    made = leaps_made(run)
    if lost := max(made - len(run.leaps), 0):
        notes.append(f"{lost:,} of {made:,} leaps left no record: `hybrid_log.jsonl` does not have them.")
    if not run.record:
        notes.append("No record of `HybridTrainer` was found. The page shows loss, learning rate and the profile.")
    return notes


def _status(run: Run) -> str:
    """One sentence: whether the run ended, and where the numbers come from."""
    of = f" of {run.max_steps:,}" if run.max_steps else ""
    if run.finished:
        return f"Finished at step {run.last_step:,}{of}."
    source = f" Counters and leaps are from {run.record_source}." if run.record_source else ""
    return f"Did not finish: the last record is of step {run.last_step:,}{of}.{source}"


# The headline: the five most important numbers.


def _final_loss(run: Run) -> dict:
    trained, held_out = run.series("loss"), run.series("eval_loss")
    training_step, training = trained[-1] if trained else (None, None)
    held_out_step, last = held_out[-1] if held_out else (None, None)
    found = {"held_out": last, "held_out_step": held_out_step, "training": training, "training_step": training_step}
    return {**found, "best_held_out": min((value for _, value in held_out), default=None)}


def _gradient_norm(run: Run) -> dict | None:
    """Return the middle, the highest and the last of the norms that were logged, before clipping."""
    norms = run.series("grad_norm")
    if not norms:
        return None
    step, highest = max(norms, key=lambda point: point[1])
    middle = sorted(norm for _, norm in norms)[len(norms) // 2]
    return {"median": middle, "highest": highest, "highest_step": step, "last": norms[-1][1]}


_TOKENS = {
    "tokens of all rows": "tokens",
    "of these shared, or without influence on a label": "tokens_shared",
    "tokens of padding that were not computed": "tokens_padding",
    "micro-batches that were left over": "micro_batches_saved",
}


def _tokens(run: Run) -> dict:
    """Return what a run that computes every token once left out; nothing where the record does not tell."""
    if not number(run.record.get("tokens")):
        return {}
    found = {name: f"{int(number(run.record.get(key)) or 0):,}" for name, key in _TOKENS.items()}
    together, why = number(run.record.get("shared_if_together")), run.record.get("plain_rows_because")
    if together is not None:
        found["shared if rows that begin alike stood together"] = f"{together:.0%}"
    return {**found, "rows were computed padded because": str(why)} if why else found


def _steps(run: Run) -> dict:
    """Count steps by the source that goes farthest: the record, the log after it, or the phase of every step."""
    steps = as_dict(run.record.get("steps_by_phase"))
    counts = [(run.record_steps, int(number(steps.get("predict")) or 0))]
    counts += [(step, int(value)) for step, value in run.series("hybrid/predicted_steps")[-1:]]
    phases = phase_stretches(run)
    if sum(last - first + 1 for first, last, _ in phases) == run.last_step:
        counts.append((run.last_step, sum(last - first + 1 for first, last, phase in phases if phase == "predict")))
    if not run.record:
        counts.append((run.last_step, 0))
    total, predicted = max(counts, key=lambda count: count[0])
    return {"total": total, "real": total - predicted, "predicted": predicted, "planned": run.max_steps}


def _backward_passes(run: Run) -> dict:
    """Up to `step`: from the record, or from the log where that goes farther, which does not know the other counts."""
    logged = run.series("hybrid/backward_passes")
    names = {"done": "backward_passes", "avoided": "backward_passes_avoided", "forward_only": "forward_only_passes"}
    found = {name: number(run.record.get(key)) for name, key in names.items()}
    found["step"] = run.record_steps if found["done"] is not None else None
    if logged and logged[-1][0] > run.record_steps:
        found = {**dict.fromkeys(found), "done": logged[-1][1], "step": logged[-1][0]}
    return found


def _seconds(run: Run) -> dict:
    """Return the wall time of all starts of the run; for one that was killed, up to its last record."""
    logged, starts = run.log.wall_time()
    trained = [seconds for step, seconds in run.series("train_runtime") if step == run.last_step]
    if run.profile.seconds > 0:
        return {"value": run.profile.seconds, "source": "profile, to the last recorded step"}
    if logged and starts > 1:
        return {"value": logged, "source": f"log, over {starts} starts"}
    if trained:
        return {"value": trained[-1], "source": "train_runtime"}
    if logged:
        return {"value": logged, "source": "log, to its last line"}
    total = sum(number(value) or 0.0 for value in as_dict(run.record.get("seconds_by_phase")).values())
    known = total > 0
    return {
        "value": total if known else None,
        "source": "steps alone, without evaluation and saving" if known else None,
    }


# Memory.


def used_memory(entry: dict, device_total: float | None = None) -> tuple[float | None, float | None, str | None]:
    """
    Bytes in use, bytes there are, and their source, from a line of `steps.jsonl`.

    The first that was read of: the whole device by NVML, torch's allocator, the resident memory of the process.
    """
    if reading(entry, "nvml.used") is not None:
        return reading(entry, "nvml.used"), reading(entry, "nvml.total"), "device (NVML)"
    if reading(entry, "device.allocated") is not None:
        return reading(entry, "device.allocated"), device_total, "device (allocator)"
    rss = reading(entry, "host.rss")
    return rss, None, "host (RSS)" if rss is not None else None


def _highest(steps: list[dict]) -> dict | None:
    """The highest peak: bytes, step, phase, and whether it is of the device or of the process on the host."""
    peaks = [(*peak_of(entry), entry) for entry in steps]
    peaks = [found for found in peaks if found[0] is not None]
    if not peaks:
        return None
    peak, where, entry = max(peaks, key=lambda found: found[0])
    return {"bytes": peak, "where": where, "step": entry["step"], "phase": entry.get("phase")}


def _memory(run: Run) -> dict | None:
    """Peak, floor, categories and accidents. Without a profile, what the trainer held at its end."""
    profile, held = run.profile, _categories(as_dict(as_dict(run.record.get("memory")).get("held")))
    if not profile.steps and not profile.run:
        return {"held_at_the_end": held} if held else None
    fullest: dict[str, tuple[float, dict, dict]] = {}
    for entry in profile.steps:
        categories = _categories(as_dict(entry.get("held")))
        total, phase = sum(sum(places.values()) for places in categories.values()), str(entry.get("phase"))
        if categories and (phase not in fullest or total >= fullest[phase][0]):
            fullest[phase] = (total, entry, categories)
    return {
        "peak": _highest(profile.steps),
        "floor_bytes": reading(profile.run, "floor.bytes") or reading(profile.summary, "floor.bytes"),
        "achieved_over_floor": number(profile.summary.get("achieved_over_floor")),
        "categories_by_phase": [
            {
                "phase": phase,
                "step": entry["step"],
                "categories": categories,
                "unexplained": number(entry.get("unexplained")),
                "unexplained_place": "host" if entry.get("device") is None else "device",
            }
            for phase, (_, entry, categories) in sorted(fullest.items(), key=lambda item: _rank(item[0]))
        ],
        "held_at_the_end": held,
        "spikes": dicts_of(profile.summary.get("spikes")),
        "out_of_memory": profile.out_of_memory,
        "peak_by_rank": {str(rank): _highest(steps) for rank, steps in profile.ranks.items()},
    }


def _categories(held: dict) -> dict[str, dict[str, float]]:
    """Bytes by category and place, without the total and without categories that hold nothing."""
    found = {
        name: {at: number(as_dict(places).get(at)) or 0 for at in ("device", "host")} for name, places in held.items()
    }
    return {name: places for name, places in found.items() if name != "total" and any(places.values())}


def _rank(phase: str) -> tuple[int, str]:
    """Return a sort key: hybrid phases in their order, then others."""
    return (PHASES.index(phase) if phase in PHASES else len(PHASES), phase)


def _phase_rows(run: Run) -> list[dict]:
    """
    Steps and time of each phase, and the peaks of its steps where they were profiled.

    Counts are from the record, or from the profile where that goes farther, as it does after a kill.
    """
    record = run.record if leaps_made(run) else {}  # without leaps nobody needs to know of phases
    counts, seconds = (as_dict(record.get(f"{name}_by_phase")) for name in ("steps", "seconds"))
    profiled: dict[str, list[dict]] = {}
    for entry in run.profile.steps:
        profiled.setdefault(str(entry.get("phase")), []).append(entry)
    if sum(len(entries) for phase, entries in profiled.items() if phase in PHASES) > run.record_steps:
        counts = seconds = {}
    rows = []
    for phase in sorted({*counts, *profiled}, key=_rank):
        entries, steps, time = profiled.get(phase, []), number(counts.get(phase)), number(seconds.get(phase))
        peaks = [peak for peak, _ in map(peak_of, entries) if peak is not None]
        timed = [value for entry in entries if (value := reading(entry, "step_seconds")) is not None]
        row = {
            "phase": phase,
            "steps": len(entries) if steps is None else int(steps),
            "seconds": (sum(timed) if timed else None) if time is None else time,
            "peak_mean": sum(peaks) / len(peaks) if peaks else None,
            "peak_min": min(peaks, default=None),
            "peak": _highest(entries),
        }
        rows.append(row)
    return rows


# Leaps.


def accepted(leap: dict) -> bool:
    """Whether the leap stayed in the weights."""
    return leap.get("verdict") in ACCEPTED


def _leap_summary(run: Run) -> dict | None:
    """Counts by verdict and what leaps gained; `None` for runs that made none."""
    if not run.record or not leaps_made(run):
        return None
    verdicts = verdicts_of(run)
    gains = [value for leap in run.leaps if accepted(leap) and (value := number(leap.get("e"))) is not None]
    totals = ("probe_cost_steps", "leap_cost_steps", "roll_backs")
    return {
        "made": leaps_made(run),
        "accepted": sum(verdicts[verdict] for verdict in ACCEPTED),
        "by_verdict": dict(verdicts),
        "mean_e": sum(gains) / len(gains) if gains else None,
        "with_e": len(gains),
        **{name: number(run.record.get(name)) for name in totals},
    }


def _displacement(run: Run) -> list[dict]:
    """Mean cosine and norm ratio of leaps and the real steps after them, by kind of parameter."""
    rows = []
    for group, residual in as_dict(run.record.get("displacement_residuals")).items():
        values = {name: number(as_dict(residual).get(name)) for name in ("leaps", "cosine", "norm_ratio")}
        if None not in values.values():
            rows.append({"group": str(group), **values})
    return rows


def _environment(values: dict) -> dict:
    """Machine, versions and model from `run.json`, as far as they are plain values."""
    found = {}
    for name, value in values.items():
        if isinstance(value, dict) and name in ("versions", "parameters", "device", "model"):
            found |= {f"{name}.{key}": item for key, item in value.items() if isinstance(item, (str, int, float))}
        elif name == "begun" and number(value) is not None:
            found[name] = datetime.fromtimestamp(value, timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
        elif isinstance(value, (str, int, float)) and name != "max_steps":
            found[name] = value
    return found
