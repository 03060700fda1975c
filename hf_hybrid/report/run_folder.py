"""
The output folder of a run, read without torch: what of its files is of the newest run, and what is known of that run.

A run may have finished or been killed, so no file is required and half a line is no error. `training_args.bin` and
other pickles are not opened.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hf_hybrid.records.course import is_on_course, is_same_run
from hf_hybrid.records.log import CHECKPOINT, LOG_NAME, PROFILE, Log, load_log, up_to
from hf_hybrid.records.readings import (
    PHASES,
    as_dict,
    count_of,
    dicts_of,
    number,
    numbered,
    read_json,
    read_lines,
    with_steps,
)

_SHOWN = (
    "step", "begun", "max_steps", "phases", "leap", "event", "loss", "eval_loss", "learning_rate", "grad_norm",
    "train_runtime", "seconds", "num_tokens", "num_input_tokens_seen", "tokens_per_second", "train_tokens_per_second",
    "mean_token_accuracy", "eval_mean_token_accuracy", "accuracy", "eval_accuracy", "reward", "eval_reward",
    "rewards/", "eval_rewards/",
    "hybrid/forecast_loss", "hybrid/forecast_low", "hybrid/forecast_high",
    "hybrid/forecast_eval_loss", "hybrid/forecast_eval_low", "hybrid/forecast_eval_high",
    "hybrid/phase", "hybrid/leaps", "hybrid/predicted_steps", "hybrid/backward_passes",
)  # fmt: skip
"""What a report shows of a line of the log. It does not hold the rest, because a log can have a million lines."""


@dataclass
class Profile:
    """What `MemoryProfilerCallback` wrote; see docs/profiling.md for the fields. Empty for a run without one."""

    run: dict = field(default_factory=dict)
    steps: list[dict] = field(default_factory=list)
    """Of the first process, by step. A step that a resumed run trained again is there once, as trained last."""
    logs: list[dict] = field(default_factory=list)
    summary: dict = field(default_factory=dict)
    out_of_memory: list[dict] = field(default_factory=list)
    """One by `oom-STEP` folder: `step`, `folder`, `phase`, `stage`, `error`, `requested` bytes."""
    ranks: dict[int, list[dict]] = field(default_factory=dict)
    """Steps of the other processes."""
    seconds: float = 0.0
    """From the begin to the last record, summed over the parts of a resumed run."""


@dataclass
class Run:
    """A run, as far as its folder records it."""

    folder: Path
    logs: list[dict]
    """Everything that was logged, by step."""
    leaps: list[dict]
    """Records of the leaps, by step: of all leaps where `hybrid_log.jsonl` is whole, else of the last ones."""
    events: list[dict]
    """What the divergence monitor did: as for leaps."""
    record: dict
    """Counters of the hybrid trainer; empty for plain `Trainer`."""
    record_source: str | None
    config: dict
    """Options that differ from the defaults (`hybrid_config.json`)."""
    options: dict
    """All hybrid options, where a checkpoint holds them."""
    profile: Profile
    recoveries: list[dict]
    """What was done each time that memory ran out and the run went on."""
    last_step: int
    max_steps: int | None
    finished: bool
    log: Log
    """`hybrid_log.jsonl` as it is read: the time of each start, and lines with what a report shows of them."""
    notes: list[str] = field(default_factory=list)
    """Notes on files that could not be read."""

    @property
    def name(self) -> str:
        return self.folder.name or str(self.folder)

    @property
    def record_steps(self) -> int:
        """Steps that the record covers."""
        return _steps_of(self.record)

    def series(self, key: str) -> list[tuple[int, float]]:
        """`(step, value)` of everything logged under `key` that is a finite number."""
        found = ((entry["step"], number(entry.get(key))) for entry in self.logs)
        return [(step, value) for step, value in found if value is not None]


class NothingYetError(ValueError):
    """A folder holds nothing that a report could show. A run that has just begun may bring it."""

    def __init__(self, message: str, folder: Path):
        super().__init__(message)
        self.folder = folder


def load_run(folder: str | Path) -> Run:
    """
    Read the output folder of a `HybridTrainer` or `Trainer`, or one of its checkpoints.

    If several runs were made in the folder, it is read of the newest one alone, and a note says so.

    Raises:
        ValueError: If there is no such folder, or it holds the trials of a search.
        NothingYetError: If there is nothing in it that a report could show.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise ValueError(f"`{folder}` is not a folder. Pass the `output_dir` of a run.")
    files = _Files(folder)
    config = files.json("hybrid_config.json")
    log = load_log(folder, files.notes, _SHOWN)
    lines = log.lines
    files.newest = files.json("hybrid_run.json").get("run")
    checkpoint, state = _newest_checkpoint(files, lines)
    history = with_steps(state.get("log_history"))
    saved = files.json(f"{checkpoint}/hybrid_state.json") if checkpoint else {}
    profile = _load_profile(files)
    if not _agree(profile.logs, lines or history):
        profile = Profile()
        files.others.add(PROFILE)
    begun = next((line for line in reversed(lines) if "begun" in line), {})
    if begun.get("phases") is False:
        config = {}  # such a run writes none, so it is of an earlier one
    record, source = _newest_record(files, checkpoint, saved)
    if files.others or log.earlier_runs:
        files.notes.append(_other_runs(files.others))
    logs = _merged_logs(history, lines, profile.logs)
    steps = [count_of(state.get("global_step")) or 0, _steps_of(record)]
    # The last line may be of an earlier step: a checkpoint that was written behind the steps is sealed later.
    steps += [max((entry["step"] for entry in entries), default=0) for entries in (lines, logs, profile.steps)]
    if not (logs or record or any(steps)):
        raise _nothing_found(folder, bool(config or lines), files.notes)
    planned = (count_of(source.get("max_steps")) for source in (begun, state, profile.run, config))
    max_steps = next(filter(None, planned), None)
    last_step, ended = max(steps), source == _SUMMARY and _steps_of(record) >= max(steps)
    # An earlier end says nothing of a run that was resumed with more steps.
    ended |= any("train_runtime" in entry and entry["step"] == last_step for entry in logs)
    # What the log says of a leap was written later than what a checkpoint says of it.
    leaps = {leap["step"]: leap for leap in with_steps([*dicts_of(record.get("leaps")), *_parts(lines, "leap")])}
    recoveries = record.get("out_of_memory")
    if not isinstance(recoveries, list) and checkpoint:
        recoveries = as_dict(as_dict(saved.get("parts")).get("out_of_memory")).get("events")
    run = Run(
        folder=folder.resolve(),
        logs=logs,
        leaps=[leaps[step] for step in sorted(leaps)],
        events=_parts(lines, "event") or dicts_of(record.get("divergence_events")),
        record=record,
        record_source=source,
        config=config,
        options=as_dict(saved.get("options")),
        profile=profile,
        recoveries=dicts_of(recoveries),
        last_step=last_step,
        max_steps=max_steps,
        finished=ended or bool(max_steps and last_step >= max_steps),
        log=log,
        notes=files.notes,
    )
    if not leaps_made(run):
        _without_phases(run)
    return run


def leaps_made(run: Run) -> int:
    """How many leaps are known of: by their records, by the counters, or by the number that was logged last."""
    logged = [int(value) for _, value in run.series("hybrid/leaps")[-1:]]
    return max(len(run.leaps), sum(verdicts_of(run).values()), *logged)


def verdicts_of(run: Run) -> Counter[str]:
    """Number of leaps by verdict: from the records of the leaps, or from the counters where those go farther."""
    known = Counter(str(leap.get("verdict")) for leap in run.leaps)
    last = Counter(str(leap.get("verdict")) for leap in with_steps(run.record.get("leaps")))
    totals, earlier = (
        Counter({str(verdict): count_of(count) or 0 for verdict, count in as_dict(run.record.get(name)).items()})
        for name in ("leaps_by_verdict", "earlier_verdicts")
    )
    return max(known, totals, last + earlier, key=Counter.total)


def _without_phases(run: Run) -> None:
    """Name all phases of training `train`: without leaps there are steps of one kind, as in plain `Trainer`."""
    profile = run.profile
    spikes = dicts_of(profile.summary.get("spikes"))
    for entries in (profile.steps, profile.out_of_memory, spikes, *profile.ranks.values(), run.recoveries, run.events):
        for entry in entries:
            if entry.get("phase") in PHASES:
                entry["phase"] = "train"


def _other_runs(names: Iterable[str]) -> str:
    """Say that a folder holds more than one run, and what was left out."""
    shown = sorted(names)[:6]
    found = f" ({', '.join(f'`{name}`' for name in shown)}{', and more' if len(shown) < len(set(names)) else ''})"
    return (
        f"The folder holds another, earlier run too{found if shown else ''}. It is left out: this report is of the "
        "newest run alone. Give each run a folder of its own to compare them."
    )


def _nothing_found(folder: Path, started: bool, notes: list[str]) -> ValueError:
    if started:
        found = f"`{folder}` holds a run that has logged and saved nothing, so there is nothing to report on. "
        return NothingYetError(" ".join([found + "A lower `logging_steps` logs earlier.", *notes]), folder)
    trials = sorted(
        path.parent.name for path in folder.glob(f"*/{LOG_NAME}") if not re.match(CHECKPOINT, path.parent.name)
    )
    if trials:
        return ValueError(
            f"`{folder}` holds the trials of a search, {', '.join(f'`{name}`' for name in trials[:6])}"
            f"{' and more' if len(trials) > 6 else ''}. Pass the folder of one, or of two to compare them."
        )
    found = (
        f"`{folder}` holds nothing to report on: no readable `hybrid_log.jsonl`, `hybrid_summary.json`, "
        "`checkpoint-*/trainer_state.json` or `profile/steps.jsonl`. Pass the `output_dir` of a run."
    )
    return NothingYetError(" ".join([found, *notes]), folder)


# Checkpoints, and the record of the hybrid trainer.

_SUMMARY, _STATE = "hybrid_summary.json", "trainer_state.json"


@dataclass
class _Files:
    """The files of a folder, and what was left out of it."""

    folder: Path
    notes: list[str] = field(default_factory=list)
    """On files that cannot be read."""
    others: set[str] = field(default_factory=set)
    """Names of files of earlier runs."""
    newest: object = None
    """The newest run of the folder, as in `hybrid_run.json`."""

    def json(self, name: str) -> dict[str, Any]:
        """The dictionary in a file; an empty one if there is none."""
        return as_dict(read_json(self.folder / name, self.notes))

    def is_newest(self, name: str, run: object, step: int, agrees: bool = True) -> bool:
        """Whether a file is of the newest run. One of an earlier run is remembered, one of an abandoned course not."""
        if agrees and is_on_course(run, step, self.newest):
            return True
        if not is_same_run(run, self.newest):
            self.others.add(name)
        return False


def _newest_checkpoint(files: _Files, lines: list[dict]) -> tuple[str, dict]:
    """
    The name and the `trainer_state.json` of what went farthest in the newest run: a checkpoint, or `.` for the folder.

    Half-written ones are skipped. Manifests tell runs apart. What has none is told by its history: one run has one loss
    at a step. Where no log says which run is the newest (plain `Trainer`), it is that of the file written last.
    """
    found: list[tuple[int, str, dict]] = []
    for name in (".", *(path.name for _, path in reversed(numbered(files.folder, CHECKPOINT)))):
        state = files.json(f"{name}/{_STATE}")
        step, history = count_of(state.get("global_step")), state.get("log_history")
        if not isinstance(history, list) or step is None:
            continue
        run = files.json(f"{name}/hybrid_manifest.json").get("run")
        # The state in the folder itself has no manifest. Beyond the log it is of a run that ended before.
        beyond = name == "." and bool(lines) and step > lines[-1]["step"]
        agrees = not beyond and _agree(with_steps(history), lines)
        if files.is_newest(_STATE if name == "." else name, run, step, agrees):
            found.append((step, name, state))
    if found and not lines:
        written = max(found, key=lambda one: (files.folder / one[1] / _STATE).stat().st_mtime_ns)
        history = with_steps(written[2]["log_history"])
        newest = [one for one in found if one is written or _agree(with_steps(one[2]["log_history"]), history)]
        files.others.update(name for _, name, _ in found if name not in (".", *(one[1] for one in newest)))
        found = newest
    if not found:
        return "", {}
    _, best, state = max(found, key=lambda one: one[0])
    if best == ".":  # `Trainer.save_state` leaves the history in the output folder; checkpoints hold our record
        holding = (name for _, name, _ in found if (files.folder / name / "hybrid_state.json").is_file())
        best = next(holding, best)
    return best, state


def _agree(entries: list[dict], others: list[dict]) -> bool:
    """Whether two histories can be of one run: they have the same loss at each step that both have."""
    known = {entry["step"]: loss for entry in others if (loss := number(entry.get("loss"))) is not None}
    losses = ((entry["step"], number(entry.get("loss"))) for entry in entries)
    return all(known.get(step, loss) == loss for step, loss in losses if loss is not None)


def _newest_record(files: _Files, checkpoint: str, saved: dict) -> tuple[dict, str | None]:
    """Of the summary, which only a run that ended leaves, and the newest checkpoint, the one that went farther."""
    parts = as_dict(saved.get("parts"))
    summary, found = files.json(_SUMMARY), as_dict(as_dict(parts.get("run")).get("record"))
    if found:
        found = {**found, "displacement_residuals": as_dict(parts.get("leap_residuals")).get("means")}
    steps = _steps_of(summary)
    if files.is_newest(_SUMMARY, summary.get("run"), steps) and summary and steps >= _steps_of(found):
        return summary, _SUMMARY
    return found, f"{(files.folder / checkpoint).resolve().name}/hybrid_state.json" if found else None


def _steps_of(record: dict) -> int:
    steps = as_dict(record.get("steps_by_phase")).values()
    return sum(count_of(count) or 0 for count in steps)


# Logs and profile.


def _parts(lines: Iterable[dict], name: str) -> list[dict]:
    """The leaps or the events of a log."""
    return dicts_of([line[name] for line in lines if name in line])


def _merged_logs(history: list[dict], lines: list[dict], profiled: list[dict]) -> list[dict]:
    """
    Everything that was logged, by step: the log on disk, and before its first step the newest checkpoint's history.

    Without a log (plain `Trainer`) it is that history, and what the profiler saw from its last step on.
    """
    if lines:
        logged = [
            line for line in lines if line.keys() - {"step", "seconds"} and not {"begun", "leap", "event"} & line.keys()
        ]
        return [entry for entry in history if 0 < entry["step"] <= lines[0]["step"]] + logged
    last = max((entry["step"] for entry in history), default=-1)
    known = {key for entry in history if entry["step"] == last for key in entry} - {"step"}
    after = [entry for entry in profiled if entry["step"] > last]
    at_last = [
        {key: value for key, value in entry.items() if key not in known} for entry in profiled if entry["step"] == last
    ]
    return sorted(history + at_last + after, key=lambda entry: entry["step"])


def _flat(line: dict) -> dict:
    """A line of `logs.jsonl` as `log_history` has it."""
    logs = as_dict(line.pop("logs", None))
    return {**line, **logs, "step": line["step"]}


def _load_profile(files: _Files) -> Profile:
    folder, notes = files.folder / PROFILE, files.notes
    if not folder.is_dir():
        return Profile()
    steps = list(read_lines(folder / "steps.jsonl", notes))
    if not steps and not (folder / "run.json").is_file():
        return Profile()
    crashes = []
    for step, path in numbered(folder, r"oom-(\d+)(?:-rank\d+)?"):
        told, names = files.json(f"{PROFILE}/{path.name}/records.json"), ("phase", "stage", "error", "requested")
        crashes.append({"step": step, "folder": path.name, **{name: told.get(name) for name in names}})
    ranks = numbered(folder, r"steps-rank(\d+)\.jsonl")
    return Profile(
        run=files.json(f"{PROFILE}/run.json"),
        steps=_holding(steps),
        logs=_holding(map(_flat, read_lines(folder / "logs.jsonl", notes))),
        summary=files.json(f"{PROFILE}/summary.json"),
        out_of_memory=crashes,
        ranks={rank: _holding(read_lines(path, notes)) for rank, path in ranks},
        seconds=_total_seconds(steps),
    )


def _holding(entries: Iterable[dict]) -> list[dict]:
    """The lines that hold. The first of a start says `resumed`; if a kill took that line, the steps go back there."""
    kept: list[dict] = []
    for entry in entries:
        if kept and (entry["step"] < kept[-1]["step"] or entry.get("resumed")):
            kept = up_to(kept, entry["step"] - 1)
        kept.append(entry)
    return kept


def _total_seconds(steps: list[dict]) -> float:
    """The clock starts again with every part of a resumed run."""
    total = last = 0.0
    for entry in steps:
        seconds = number(entry.get("seconds"))
        if seconds is None:
            continue
        if seconds < last or entry.get("resumed"):
            total += last
        last = seconds
    return total + last


# Phases of the steps.

Stretch = tuple[int, int, str]
"""First and last step, and the phase of all steps from one to the other."""


def phase_stretches(run: Run) -> list[Stretch]:
    """
    The phases of all steps for which they are known, in order.

    From the profile; else from what was logged at each step; else Warmup and Predict from the record and the leaps, and
    `real` for steps of Full or Correct, which these do not tell apart. A run without leaps has none. A phase is not
    listed step by step, because a damaged record can claim any number of steps.
    """
    if not leaps_made(run):
        return []
    if run.profile.steps:
        phases = ((entry["step"], entry.get("phase")) for entry in run.profile.steps)
        return _joined((step, phase) for step, phase in phases if isinstance(phase, str) and phase != "evaluate")
    logged = {step: PHASES[int(index)] for step, index in run.series("hybrid/phase") if 0 <= index < len(PHASES)}
    if not run.record or len(logged) >= 0.9 * run.last_step:
        return _joined(sorted(logged.items()))
    return _from_record(run)


def _joined(phases: Iterable[tuple[int, str]]) -> list[Stretch]:
    """Successive steps of the same phase as one stretch."""
    found: list[Stretch] = []
    for step, phase in phases:
        if found and found[-1][1:] == (step - 1, phase):
            found[-1] = (found[-1][0], step, phase)
        else:
            found.append((step, step, phase))
    return found


def _from_record(run: Run) -> list[Stretch]:
    warmup = count_of(as_dict(run.record.get("steps_by_phase")).get("warmup")) or 0
    last, found = run.record_steps, []
    # Before the first leap with a record there may have been others, of which only the number is known.
    lost = (count_of(run.record.get("leaps_made")) or 0) > len(run.leaps)
    step = run.leaps[0]["step"] + 1 if lost and run.leaps else 1

    def add(until: int, phase: str) -> None:
        nonlocal step
        if step <= min(until, last):
            found.append((step, min(until, last), phase))
            step = found[-1][1] + 1

    for leap in run.leaps:
        horizon = count_of(leap.get("horizon")) or 0
        if horizon:  # leaps count steps from 0, Trainer from 1
            add(min(warmup, leap["step"]), "warmup")
            add(leap["step"], "real")
            add(leap["step"] + horizon, "predict")
    add(warmup, "warmup")
    add(last, "real")
    return found
