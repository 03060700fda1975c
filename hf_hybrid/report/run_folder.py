"""
The output folder of a run, read without torch.

A run may have finished or been killed, so no file is required and half a line is no error. `training_args.bin` and
other pickles are not opened. A folder holds one run.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hf_hybrid.records.log import CHECKPOINT, LOG_NAME, PROFILE, Log, load_log
from hf_hybrid.records.readings import PHASES, Totals, as_dict, count_of, dicts_of, number, read_json, with_steps
from hf_hybrid.saving.manifest import checkpoints_of

Points = list[tuple[int, float]]
"""Values by step."""
_SUMMARY, _STATE = "hybrid_summary.json", "trainer_state.json"
_OF_PARTS = ("begun", "leap", "event")
"""Keys of lines that Trainer's log does not have."""


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
    """What `hybrid_summary()` has; empty for plain `Trainer`."""
    record_source: str | None
    config: dict
    """Options that differ from the defaults (`hybrid_config.json`)."""
    profile: Log
    """What `MemoryProfilerCallback` wrote in the first process, see docs/profiling.md; empty for a run without one."""
    memory: Totals
    """The sum over the profile."""
    recoveries: list[dict]
    """What was done each time that memory ran out and the run went on."""
    last_step: int
    max_steps: int | None
    finished: bool
    log: Log
    """`hybrid_log.jsonl` as it is read, with the time of each start."""
    notes: list[str] = field(default_factory=list)
    """Notes on files that could not be read."""

    @property
    def name(self) -> str:
        return self.folder.name or str(self.folder)

    @property
    def record_steps(self) -> int:
        """Steps that the record covers."""
        return _steps_of(self.record)

    def series(self, key: str) -> Points:
        """`(step, value)` of everything logged under `key` that is a finite number."""
        values = ((entry["step"], number(entry.get(key))) for entry in self.logs)
        return [(step, value) for step, value in values if value is not None]


def load_run(folder: str | Path) -> Run:
    """
    Read the output folder of a `HybridTrainer` or `Trainer`, or one of its checkpoints. Raises `ValueError` if there is
    none, or it holds nothing that a report could show.
    """
    folder, notes = Path(folder), list[str]()
    if not folder.is_dir():
        raise ValueError(f"`{folder}` is not a folder. Pass the `output_dir` of a run.")
    config = _read(folder / "hybrid_config.json", notes)
    log = load_log(folder, notes)
    checkpoint, state = _farthest_checkpoint(folder, notes)
    saved = _read(folder / checkpoint / "hybrid_state.json", notes)
    profile = load_log(folder / PROFILE, notes, name="steps.jsonl")
    record, source = _newest_record(folder, checkpoint, saved, log, notes)
    logs = _merged_logs(with_steps(state.get("log_history")), log.lines)
    # The last line may be of an earlier step: a checkpoint that is saved asynchronously is complete some steps later.
    seen = [max((entry["step"] for entry in entries), default=0) for entries in (log.lines, logs, profile.lines)]
    last_step = max(count_of(state.get("global_step")) or 0, _steps_of(record), *seen)
    if not (logs or record or last_step):
        raise _nothing_to_report(folder, bool(config or log.lines), notes)
    begun = next((line for line in reversed(log.lines) if "begun" in line), {})
    planned = (count_of(values.get("max_steps")) for values in (begun, state, *profile.lines[:1], config))
    max_steps = next(filter(None, planned), None)
    # An earlier end says nothing of a run that was resumed with more steps.
    ended = source == _SUMMARY and _steps_of(record) >= last_step
    ended |= any("train_runtime" in entry and entry["step"] == last_step for entry in logs)
    # What the log says of a leap was written later than what a checkpoint says of it.
    leaps = {leap["step"]: leap for leap in with_steps([*dicts_of(record.get("leaps")), *_parts(log.lines, "leap")])}
    recoveries = record.get("out_of_memory")
    if not isinstance(recoveries, list):
        recoveries = as_dict(as_dict(saved.get("parts")).get("out_of_memory")).get("events")
    run = Run(
        folder=folder.resolve(),
        logs=logs,
        leaps=[leaps[step] for step in sorted(leaps)],
        events=_parts(log.lines, "event") or dicts_of(record.get("divergence_events")),
        record=record,
        record_source=source,
        config=config,
        profile=profile,
        memory=Totals(),
        recoveries=dicts_of(recoveries),
        last_step=last_step,
        max_steps=max_steps,
        finished=ended or bool(max_steps and last_step >= max_steps),
        log=log,
        notes=notes,
    )
    if not leaps_made(run):  # without leaps there are steps of one kind, as in plain `Trainer`
        for entry in (*profile.lines, *run.recoveries, *run.events):
            if entry.get("phase") in PHASES:
                entry["phase"] = "train"
    for entry in profile.lines:
        run.memory.add(entry)
    return run


def _read(path: Path, notes: list[str]) -> dict[str, Any]:
    """The dictionary in a file; an empty one if there is none."""
    return as_dict(read_json(path, notes))


def leaps_made(run: Run) -> int:
    """How many leaps are known of: by their records, by the counters, or by the number that was logged last."""
    logged = [int(value) for _, value in run.series("hybrid/leaps")[-1:]]
    return max(len(run.leaps), sum(verdicts_of(run).values()), *logged)


def verdicts_of(run: Run) -> Counter[str]:
    """Number of leaps by verdict: from the records of the leaps, or from the counters where those go farther."""
    known = Counter(str(leap.get("verdict")) for leap in run.leaps)
    totals = {str(name): count_of(count) or 0 for name, count in as_dict(run.record.get("leaps_by_verdict")).items()}
    return max(known, Counter(totals), key=Counter.total)


def _nothing_to_report(folder: Path, started: bool, notes: list[str]) -> ValueError:
    if started:
        message = f"`{folder}` holds a run that has logged and saved nothing, so there is nothing to report on. "
        return ValueError(" ".join([message + "A lower `logging_steps` logs earlier.", *notes]))
    trials = sorted(
        path.parent.name for path in folder.glob(f"*/{LOG_NAME}") if not re.match(CHECKPOINT, path.parent.name)
    )
    if trials:
        return ValueError(
            f"`{folder}` holds the trials of a search, {', '.join(f'`{name}`' for name in trials[:6])}"
            f"{' and more' if len(trials) > 6 else ''}. Pass the folder of one."
        )
    message = (
        f"`{folder}` holds nothing to report on: no readable `hybrid_log.jsonl`, `hybrid_summary.json`, "
        "`checkpoint-*/trainer_state.json` or `profile/steps.jsonl`. Pass the `output_dir` of a run."
    )
    return ValueError(" ".join([message, *notes]))


def _farthest_checkpoint(folder: Path, notes: list[str]) -> tuple[str, dict]:
    """
    The name and the `trainer_state.json` of the farthest checkpoint that is not half-written, or of the folder.
    """
    own = _read(folder / _STATE, notes)  # `Trainer.save_state` leaves the whole history in the output folder
    for path in reversed(checkpoints_of(folder)):
        state = _read(path / _STATE, notes)
        step = count_of(state.get("global_step"))
        if isinstance(state.get("log_history"), list) and step is not None:
            return path.name, own if (count_of(own.get("global_step")) or 0) >= step else state
    return ".", own


def _newest_record(folder: Path, checkpoint: str, saved: dict, log: Log, notes: list[str]) -> tuple[dict, str | None]:
    """
    Of the summary of a run that ended, and the newest checkpoint, the one that went farther. A run with
    `enable_predict=False` leaves no file of ours in its folder, so its summary stands in its log.
    """
    summary = _read(folder / _SUMMARY, notes)
    parts = as_dict(saved.get("parts"))
    record = as_dict(as_dict(parts.get("run")).get("record"))
    if summary and _steps_of(summary) >= _steps_of(record):
        return summary, _SUMMARY
    logged = [as_dict(line["summary"]) for line in log.lines if "summary" in line]
    if logged and not record:
        return logged[-1], LOG_NAME
    record = {**record, **as_dict(as_dict(parts.get("run_counts")).get("own"))}
    return record, f"{(folder / checkpoint).resolve().name}/hybrid_state.json" if record else None


def _steps_of(record: dict) -> int:
    steps = as_dict(record.get("steps_by_phase")).values()
    return sum(count_of(count) or 0 for count in steps)


def _parts(lines: Iterable[dict], name: str) -> list[dict]:
    """The leaps or the events of a log."""
    return dicts_of([line[name] for line in lines if name in line])


def _merged_logs(history: list[dict], lines: list[dict]) -> list[dict]:
    """Everything that was logged: the log on disk, and before its first step the newest checkpoint's history."""
    if not lines:
        return history  # of plain `Trainer`
    logged = [line for line in lines if line.keys() - {"step", "seconds"} and not line.keys() & _OF_PARTS]
    return [entry for entry in history if 0 < entry["step"] <= lines[0]["step"]] + logged
