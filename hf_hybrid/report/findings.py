"""What a report says of a run, as plain values: numbers with their sources, and nothing that was not recorded."""

from __future__ import annotations

import bisect
import math
from datetime import datetime, timezone

from hf_hybrid.report.run_folder import PHASES, Run, as_dict, number, peak_of, phases_by_step, reading

ACCEPTED = ("unprobed", "kept", "shrunk")
"""Verdicts of leaps that stayed in the weights."""
PROFILER_HINT = (
    "Memory was not recorded. With `from hf_hybrid import MemoryProfilerCallback` and "
    "`callbacks=[MemoryProfilerCallback()]` in the trainer, the next report has it over time, by phase and by category."
)
LEAST_LEAPS, LEAST_FORECASTS = 8, 5
"""Leaps for a look at the confidence, and forecasts for one at their intervals: fewer show chance."""


def findings(run: Run) -> dict:
    """
    Everything in `report.json`.

    Args:
        run (`Run`): See [`load_run`].

    Returns:
        `dict`: `headline`, `phases`, `leaps`, `memory`, `recoveries`, `calibration`, `events`, `options`,
        `environment`, `notes`. What was not recorded is `None` or empty.
    """
    notes = list(run.notes)
    if run.profile is None:
        notes.append(PROFILER_HINT)
    elif not run.profile.steps:
        notes.append("The profile holds no steps: the run ended before the first one.")
    for crash in run.profile.out_of_memory if run.profile else []:
        notes.append(f"Out of memory in step {crash['step']:,}: see `profile/{crash['folder']}`.")
    logged = run.series("hybrid/leaps")
    if run.record is not None and logged and logged[-1][1] > len(run.leaps):
        lost = int(logged[-1][1]) - len(run.leaps)
        made = "1 leap was" if lost == 1 else f"{lost} leaps were"
        notes.append(f"{made} made after `{run.record_source}` was written and left no record.")
    if run.record is None:
        notes.append("No record of `HybridTrainer` was found: loss, learning rate and what was profiled are shown.")
    return {
        "schema_version": 1,
        "name": run.name,
        "folder": str(run.folder),
        "finished": run.finished,
        "status": status(run),
        "headline": headline(run),
        "phases": phase_rows(run),
        "leaps": leap_summary(run),
        "memory": memory(run),
        "recoveries": run.recoveries,
        "calibration": calibration(run),
        "events": [as_dict(event) for event in (run.record or {}).get("divergence_events") or []],
        "options": {**run.options, **run.config},
        "environment": environment(run),
        "notes": notes,
    }


def status(run: Run) -> str:
    """One sentence: whether the run ended, and what the report rests on."""
    of = f" of {run.max_steps:,}" if run.max_steps else ""
    if run.finished:
        return f"Finished at step {run.last_step:,}{of}."
    source = f" Counters and leaps are from {run.record_source}." if run.record_source else ""
    return f"Did not finish: the last record is of step {run.last_step:,}{of}.{source}"


def headline(run: Run) -> dict:
    """The five numbers that users ask for first, each with its source; values that nobody recorded are `None`."""
    return {
        "final_loss": _final_loss(run),
        "steps": _steps(run),
        "backward_passes": _backward_passes(run),
        "seconds": _seconds(run),
        "peak_memory": peak_memory(run),
    }


def _final_loss(run: Run) -> dict:
    trained, held_out = run.series("loss"), run.series("eval_loss")
    found = {
        "held_out": held_out[-1][1] if held_out else None,
        "held_out_step": held_out[-1][0] if held_out else None,
        "training": trained[-1][1] if trained else None,
        "training_step": trained[-1][0] if trained else None,
    }
    found["best_held_out"] = min((value for _, value in held_out), default=None)
    return found


def _steps(run: Run) -> dict:
    """Of the record; of a killed run by what was logged or profiled after it, if anything was."""
    steps = as_dict((run.record or {}).get("steps_by_phase"))
    counts = [(run.record_steps, int(number(steps.get("predict")) or 0))]
    counts += [(step, int(value)) for step, value in run.series("hybrid/predicted_steps")[-1:]]
    phases = phases_by_step(run)
    if len(phases) == run.last_step:
        counts.append((run.last_step, sum(phase == "predict" for phase in phases.values())))
    if not run.record:
        counts.append((run.last_step, 0))
    total, predicted = max(counts, key=lambda count: count[0])
    return {"total": total, "real": total - predicted, "predicted": predicted, "planned": run.max_steps}


def _backward_passes(run: Run) -> dict:
    """Likewise, up to `step`; how many were avoided, and forward passes alone, only the record tells."""
    record, logged = run.record or {}, run.series("hybrid/backward_passes")
    names = {"done": "backward_passes", "avoided": "backward_passes_avoided", "forward_only": "forward_only_passes"}
    found = {name: number(record.get(key)) for name, key in names.items()}
    found["step"] = run.record_steps if found["done"] is not None else None
    if logged and logged[-1][0] > run.record_steps:
        found |= {"done": logged[-1][1], "avoided": None, "forward_only": None, "step": logged[-1][0]}
    return found


def _seconds(run: Run) -> dict:
    """Wall time; where the run was killed, up to what was written last."""
    profiled = run.profile.seconds if run.profile else 0.0
    trained = run.series("train_runtime")
    if profiled > 0:
        return {"value": profiled, "source": "profile, to the last recorded step"}
    if trained:
        return {"value": trained[-1][1], "source": "train_runtime"}
    by_phase = as_dict((run.record or {}).get("seconds_by_phase")).values()
    total = sum(number(value) or 0.0 for value in by_phase)
    if total > 0:
        return {"value": total, "source": "steps alone, without evaluation and saving"}
    return {"value": None, "source": None}


# Memory.


def used_memory(entry: dict, device_total: float | None = None) -> tuple[float | None, float | None, str | None]:
    """
    Of a step's record: bytes in use, bytes there are, and whose they are.

    Device-wide use by NVML where it was read, else what the allocator holds for tensors, else the process on the host.

    Args:
        entry (`dict`): A line of `steps.jsonl`.
        device_total (`float`, *optional*): Bytes of the device, which NVML would have told.
    """
    if reading(entry, "nvml.used") is not None:
        return reading(entry, "nvml.used"), reading(entry, "nvml.total"), "device (NVML)"
    if reading(entry, "device.allocated") is not None:
        return reading(entry, "device.allocated"), device_total, "device (allocator)"
    rss = reading(entry, "host.rss")
    return rss, None, "host (RSS)" if rss is not None else None


def peak_memory(run: Run) -> dict | None:
    """The highest peak: bytes, step, phase, and whether it is of the device or of the process on the host."""
    return _highest(run.profile.steps) if run.profile else None


def _highest(steps: list[dict]) -> dict | None:
    peaks = [(*peak_of(entry), entry) for entry in steps]
    peaks = [(peak, where, entry) for peak, where, entry in peaks if peak is not None]
    if not peaks:
        return None
    peak, where, entry = max(peaks, key=lambda found: found[0])
    return {"bytes": peak, "where": where, "step": entry["step"], "phase": entry.get("phase")}


def memory(run: Run) -> dict | None:
    """Peak, floor, categories and accidents; without a profile, what the trainer held at its end."""
    held = as_dict(as_dict((run.record or {}).get("memory")).get("held"))
    if run.profile is None:
        return {"held_at_the_end": _categories(held)} if _categories(held) else None
    profile = run.profile
    floor, peak = _floor(profile), peak_memory(run)
    accounted = [entry for entry in profile.steps if _categories(as_dict(entry.get("held")))]
    most: dict[str, dict] = {}
    for entry in accounted:
        phase = str(entry.get("phase"))
        if phase not in most or _held_total(entry) >= _held_total(most[phase]):
            most[phase] = entry
    return {
        "peak": peak,
        "floor_bytes": floor,
        "achieved_over_floor": number(profile.summary.get("achieved_over_floor")),
        "categories_by_phase": [
            {
                "phase": phase,
                "step": entry["step"],
                "categories": _categories(entry["held"]),
                "unexplained": number(entry.get("unexplained")),
                "unexplained_place": "host" if entry.get("device") is None else "device",
            }
            for phase, entry in sorted(most.items(), key=lambda item: phase_rank(item[0]))
        ],
        "held_at_the_end": _categories(held),
        "spikes": [as_dict(spike) for spike in profile.summary.get("spikes") or []],
        "out_of_memory": profile.out_of_memory,
        "peak_by_rank": {str(rank): _highest(steps) for rank, steps in profile.ranks.items()},
    }


def _floor(profile) -> float | None:
    """What this way of training must hold, as the profiler worked it out."""
    for source in (profile.run, profile.summary):
        floor = source.get("floor")
        value = number(floor.get("bytes")) if isinstance(floor, dict) else number(floor)
        if value:
            return value
    return None


def _categories(held: dict) -> dict[str, dict[str, float]]:
    """Bytes by category and place, without the total and without categories that hold nothing."""
    found = {}
    for category, places in held.items():
        bytes_by_place = {place: number(as_dict(places).get(place)) or 0 for place in ("device", "host")}
        if category != "total" and any(bytes_by_place.values()):
            found[category] = bytes_by_place
    return found


def _held_total(entry: dict) -> float:
    return sum(sum(places.values()) for places in _categories(entry["held"]).values())


def phase_rank(phase: str) -> tuple[int, str]:
    """For sorting: hybrid phases in their order, others behind them."""
    return (PHASES.index(phase) if phase in PHASES else len(PHASES), phase)


def phase_rows(run: Run) -> list[dict]:
    """
    Steps and time of each phase, and the peaks of its steps where they were profiled.

    From the record, or from the profile where that goes farther, as it does in a run that was killed.
    """
    record = run.record or {}
    counts, seconds = as_dict(record.get("steps_by_phase")), as_dict(record.get("seconds_by_phase"))
    profiled: dict[str, list[dict]] = {}
    for entry in run.profile.steps if run.profile else []:
        profiled.setdefault(str(entry.get("phase")), []).append(entry)
    if sum(len(entries) for phase, entries in profiled.items() if phase in PHASES) > run.record_steps:
        counts = seconds = {}
    return [
        _phase_row(phase, profiled.get(phase, []), number(counts.get(phase)), number(seconds.get(phase)))
        for phase in sorted({*counts, *profiled}, key=phase_rank)
    ]


def _phase_row(phase: str, entries: list[dict], steps: float | None, seconds: float | None) -> dict:
    peaks = [peak for peak, _ in map(peak_of, entries) if peak is not None]
    timed = [value for value in (number(entry.get("step_seconds")) for entry in entries) if value is not None]
    return {
        "phase": phase,
        "steps": len(entries) if steps is None else int(steps),
        "seconds": (sum(timed) if timed else None) if seconds is None else seconds,
        "peak_mean": sum(peaks) / len(peaks) if peaks else None,
        "peak_min": min(peaks, default=None),
        "peak": _highest(entries),
    }


# Leaps.


def leap_summary(run: Run) -> dict | None:
    """Counts by verdict and what leaps earned; `None` for runs without the hybrid trainer."""
    if run.record is None:
        return None
    leaps, verdicts = run.leaps, {}
    for leap in leaps:
        verdict = str(leap.get("verdict"))
        verdicts[verdict] = verdicts.get(verdict, 0) + 1
    earned = [value for value in (number(leap.get("e")) for leap in leaps if accepted(leap)) if value is not None]
    return {
        "made": len(leaps),
        "accepted": sum(accepted(leap) for leap in leaps),
        "by_verdict": verdicts,
        "mean_e": sum(earned) / len(earned) if earned else None,
        "with_e": len(earned),
        "probe_cost_steps": number(run.record.get("probe_cost_steps")),
        "leap_cost_steps": number(run.record.get("leap_cost_steps")),
        "roll_backs": number(run.record.get("roll_backs")),
    }


def accepted(leap: dict) -> bool:
    """Whether the leap stayed in the weights."""
    return leap.get("verdict") in ACCEPTED


# Predicted against realised.


def calibration(run: Run) -> dict:
    """Only what the record supports; the keys of what it does not are absent."""
    found = {
        "decrease": _decreases(run),
        "forecast": _forecast_errors(run),
        "confidence": _confidence(run),
        "displacement": _displacement(run),
        "world_model_errors": (run.world_model or {}).get("errors"),
        "world_model_coverage": _coverage(run),
    }
    return {name: value for name, value in found.items() if value}


def _decreases(run: Run) -> list[dict]:
    """First-order predicted fall of the training loss and the probed fall of the held-out loss, leap by leap."""
    rows = []
    for leap in run.leaps:
        names = ("predicted_decrease", "loss_before", "loss_after", "standard_error")
        predicted, before, after, error = (number(leap.get(name)) for name in names)
        if None not in (predicted, before, after):
            row = {"step": leap["step"], "predicted": predicted, "realised": before - after, "standard_error": error}
            rows.append({**row, "accepted": accepted(leap)})
    return rows


def _forecast_errors(run: Run) -> list[dict]:
    """Training loss in Correct minus what the trend before the leap forecast."""
    errors = [(leap, number(leap.get("forecast_error"))) for leap in run.leaps]
    return [{"step": leap["step"], "error": e, "accepted": accepted(leap)} for leap, e in errors if e is not None]


def _confidence(run: Run) -> list[dict]:
    """Confidence as last logged before each leap, in groups of equal size, and the share of them that was kept."""
    logged = run.series("hybrid/confidence")
    steps, pairs = [step for step, _ in logged], []
    for leap in run.leaps:
        place = bisect.bisect_right(steps, leap["step"]) - 1
        if place >= 0:
            pairs.append((logged[place][1], accepted(leap)))
    if len(pairs) < LEAST_LEAPS:
        return []
    pairs.sort()
    groups = min(5, len(pairs) // 4)
    bounds = [round(index * len(pairs) / groups) for index in range(groups + 1)]
    rows = []
    for first, last in zip(bounds, bounds[1:]):
        group = pairs[first:last]
        kept = sum(stayed for _, stayed in group)
        low, high = wilson_interval(kept, len(group))
        row = {"confidence": sum(confidence for confidence, _ in group) / len(group), "leaps": len(group)}
        rows.append({**row, "share_kept": kept / len(group), "low": low, "high": high})
    return rows


def wilson_interval(hits: int, count: int, z: float = 1.96) -> tuple[float, float]:
    """95 % interval of a share."""
    share = hits / count
    centre = (share + z * z / (2 * count)) / (1 + z * z / count)
    half = z / (1 + z * z / count) * math.sqrt(share * (1 - share) / count + z * z / (4 * count * count))
    return max(0.0, centre - half), min(1.0, centre + half)


def _displacement(run: Run) -> list[dict]:
    """Mean cosine and norm ratio of leaps and what real steps then did, by kind of parameter."""
    rows = []
    for group, residual in as_dict((run.record or {}).get("displacement_residuals")).items():
        values = {name: number(as_dict(residual).get(name)) for name in ("leaps", "cosine", "norm_ratio")}
        if None not in values.values():
            rows.append({"group": str(group), **values})
    return rows


def _coverage(run: Run) -> list[dict]:
    """How often the world model's central intervals held the loss that came, by windows ahead."""
    levels = [0.1 * k for k in range(1, 10)]
    rows = []
    for ahead, places in ((run.world_model or {}).get("places") or {}).items():
        if len(places) >= LEAST_FORECASTS:
            inside = [sum(abs(p - 0.5) <= level / 2 for p in places) / len(places) for level in levels]
            rows.append({"windows_ahead": int(ahead), "forecasts": len(places), "levels": levels, "inside": inside})
    return rows


def environment(run: Run) -> dict:
    """What `run.json` tells of machine, versions and model: whatever is a plain value."""
    told = run.profile.run if run.profile else {}
    found = {}
    for name, value in told.items():
        if isinstance(value, dict) and name in ("versions", "parameters", "device", "model"):
            found.update({f"{name}.{key}": item for key, item in value.items() if _is_plain(item)})
        elif name == "begun" and number(value) is not None:
            found[name] = datetime.fromtimestamp(value, timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
        elif _is_plain(value) and name != "max_steps":
            found[name] = value
    return found


def _is_plain(value: object) -> bool:
    return isinstance(value, (str, int, float, bool))
