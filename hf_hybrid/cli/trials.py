"""
The trials of a sweep: which one is next, its process, and its outcome.

The whole state of a sweep is in its folder:

| file | what it holds |
|---|---|
| `trial-007/` | `output_dir` of a trial (`cli/study.py` names its files), with what it printed, `output.txt` |
| `trial-007.lock` | a file lock, held by the process that works on that trial |
| `sweep.lock` | a file lock, held by the process that chooses the next trial |

A trial begins with its `trial.yaml` and ends with its `outcome.json`. The system releases the lock of a process that
dies, however it dies. So a trial without an outcome that is not locked was interrupted: it is taken up before a new one
is chosen, from its last checkpoint if it has one. It stays the same trial, so that it is never counted twice. The same
holds for a trial whose process alone was killed, by the system when memory is short for example, until that has
happened too often without a new checkpoint.

No file holds a secret. A trial inherits the environment of the sweep, with the variables that stand under `env` in its
YAML file. Options that hold a secret reach it by a variable too.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from hf_hybrid.cli.options import PRIVATE
from hf_hybrid.cli.study import (
    ENDED,
    REASON,
    TRIAL_NAME,
    Outcome,
    SweepFolder,
    best_trial,
    ended_early,
    held_out_loss,
    logged,
    read_outcome,
    write_outcome,
)
from hf_hybrid.cli.yaml_file import ENVIRONMENT, as_yaml, split_private
from hf_hybrid.files import open_to_append, write_text
from hf_hybrid.integrations.optuna import MAX_STEPS, ForecastPruner, FrozenTrial, TrialState, optuna
from hf_hybrid.records.redaction import redact
from hf_hybrid.saving.manifest import last_checkpoint

PROCESS = (sys.executable, "-m", "hf_hybrid.cli.trial")
POLL_SECONDS = 0.5
"""Between two looks at the losses of a trial."""
KILLS = 3
"""A trial that was killed so often after the same checkpoint has failed."""
KILLED = ("SIGKILL", "SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2", "SIGXCPU")
"""Signals that come from outside: of the system when memory is short, of a scheduler, of a person."""
WEIGHTS = ("*.safetensors", "*.bin", "*.index.json")


class Trials:
    """
    The trials of one sweep.

    Args:
        sweep (`SweepFolder`): Its folder, and what all trials have in common.
        count (`int`): No more trials than that.
        propose (`Callable`): Returns the values of the next trial from a study of those before it; `None` where no
            other is worth trying.
        tell (`Callable`): Takes a line for the user.
    """

    def __init__(
        self,
        sweep: SweepFolder,
        *,
        count: int,
        propose: Callable[[optuna.Study], dict[str, Any] | None],
        tell: Callable[[str], None],
    ):
        self.sweep, self.count, self.propose, self.tell = sweep, count, propose, tell
        self.stopping = threading.Event()
        self._kills: dict[tuple[int, str | None], int] = {}  # by trial, and the checkpoint that it had
        _, self._private = split_private(sweep.options)
        variables = sweep.options.get(ENVIRONMENT)
        of_environment = variables.values() if isinstance(variables, dict) else ()
        self._secrets = [str(value) for value in (*self._private.values(), *of_environment) if len(str(value)) >= 8]

    def work(self, environment: dict[str, str]) -> None:
        """Run trials, one after the other, while there is one to choose, with `environment` for their processes."""
        while not self.stopping.is_set() and (chosen := self._choose()) is not None:
            number, lock = chosen
            try:
                self._run(number, environment)
            finally:
                lock.release()

    def _choose(self) -> tuple[int, FileLock] | None:
        """Choose a trial that was interrupted, or else a new one. Returns its number and its lock, which is held."""
        with FileLock(self.sweep.path / "sweep.lock"):
            study = self.sweep.study()
            for trial in study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
                lock = self._lock(trial.number)
                try:
                    lock.acquire(timeout=0)
                except Timeout:
                    continue
                if read_outcome(self.sweep.trial(trial.number)) is not None:  # it ended a moment ago
                    lock.release()
                    continue
                self.tell(f"trial {trial.number} was interrupted and goes on")
                self._write_options(trial.number, trial.params)
                return trial.number, lock
            number = len(study.trials)
            parameters = self.propose(study) if number < self.count else None
            if parameters is None:
                return None
            lock = self._lock(number)
            lock.acquire()
            self._make_way(self.sweep.trial(number))
            self._write_options(number, parameters)
            return number, lock

    def _lock(self, number: int) -> FileLock:
        return FileLock(f"{self.sweep.trial(number)}.lock", thread_local=False)

    def _make_way(self, folder: Path) -> None:
        """Give what lies in the place of a new trial another name: nothing that a sweep did not make is deleted."""
        if folder.is_symlink() or folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
            names = (f"{folder.name}.earlier-{count}" for count in range(1, 10_000))
            aside = next(folder.with_name(name) for name in names if not os.path.lexists(folder.with_name(name)))
            os.replace(folder, aside)
            self.tell(f"`{folder.name}` is none of this sweep, and is now `{aside.name}`")

    def _write_options(self, number: int, parameters: dict[str, Any]) -> None:
        """Write the options of a trial, with which it begins."""
        folder = self.sweep.trial(number)
        folder.mkdir(exist_ok=True)
        values = {"logging_steps": 0.01, **self.sweep.options, **parameters, "output_dir": str(folder)}
        write_text(folder / TRIAL_NAME, as_yaml(values))

    # One trial.

    def _run(self, number: int, environment: dict[str, str]) -> None:
        """Train in a process of its own, and follow its losses until it ends or cannot win."""
        folder = self.sweep.trial(number)
        if held_out_loss(folder) is None:  # else the sweep died between the trial's end and its outcome
            process = self._start(folder, environment)
            try:
                pruned = self._follow(number, process)
            finally:
                if process.stdin is not None:
                    process.stdin.close()  # which ends the process
                process.wait()
            if self.stopping.is_set():
                return  # the trial is left as interrupted
            if pruned:
                self._end(number, TrialState.PRUNED)
                return
            if self._goes_on_later(number, process.returncode, folder):
                return
        loss = held_out_loss(folder)
        if loss is None:
            self._end(number, TrialState.FAIL, reason="it ended without a loss in `eval_results.json`")
        elif math.isfinite(loss):
            self._end(number, TrialState.COMPLETE, loss)
        else:
            self._end(number, TrialState.PRUNED, reason="diverged")

    def _goes_on_later(self, number: int, status: int, folder: Path) -> bool:
        """Whether a trial did not come to its end. If it was killed, it is left as interrupted; else it has failed."""
        killed_by = _signal(status)
        if status == 0 and not ended_early(folder):
            return False
        if status and killed_by is None:
            self._end(number, TrialState.FAIL, reason=redact(_last_words(folder / "output.txt"), self._secrets))
            if not any(MAX_STEPS in other.user_attrs for other in self.sweep.study().trials):
                self.stopping.set()  # no trial ever began, and the next ones would fail as this one did
            return True
        checkpoint, how = last_checkpoint(folder), f"killed by {killed_by}" if killed_by else "told to end early"
        key = (number, None if checkpoint is None else str(checkpoint))
        self._kills[key] = self._kills.get(key, 0) + 1
        since = "without a checkpoint" if checkpoint is None else f"after `{Path(checkpoint).name}`"
        if self._kills[key] >= KILLS:
            short = "; is memory short?" if killed_by == "SIGKILL" else ""
            self._end(number, TrialState.FAIL, reason=f"{how} {KILLS} times {since}{short}")
        else:
            self.tell(f"trial {number} was {how} {since}")
        return True

    def _start(self, folder: Path, environment: dict[str, str]) -> subprocess.Popen:
        words = ["--config", str(folder / TRIAL_NAME)]
        if last_checkpoint(folder) is not None:
            words += ["--resume_from_checkpoint", "true"]
        private = {PRIVATE: json.dumps(self._private, default=str)} if self._private else {}
        printed = folder / "output.txt"
        if printed.is_symlink():
            printed.unlink()
        with open_to_append(printed, private=True) as output:
            return subprocess.Popen(
                [*PROCESS, *words],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **private, **environment},
                start_new_session=True,  # Ctrl-C reaches the sweep alone, which then ends its trials
            )

    def _follow(self, number: int, process: subprocess.Popen) -> bool:
        """Wait for the end of a trial. Returns whether it cannot win, once that is known."""
        judged: int | None = None
        while process.poll() is None and not self.stopping.is_set():
            _, losses = logged(self.sweep.trial(number))
            step = max(losses, default=None)
            if step != judged:
                judged, study = step, self.sweep.study()
                if self.sweep.pruner.prune(study, study.trials[number]):
                    return True
            self.stopping.wait(POLL_SECONDS)
        return False

    def _end(self, number: int, state: TrialState, loss: float | None = None, reason: str = "") -> None:
        parameters = self.sweep.study().trials[number].params
        write_outcome(self.sweep.trial(number), Outcome(state, loss, reason, parameters))
        study = self.sweep.study()
        trial, best = study.trials[number], best_trial(study)
        step, max_steps = trial_steps(trial)
        outcome = outcome_text(study, self.sweep.pruner, trial)
        self.tell(f"trial {number}, {parameters_text(trial)}, step {step:,} of {max_steps:,}: {outcome}")
        for other in study.get_trials(deepcopy=False, states=ENDED):
            _drop_weights(self.sweep.trial(other.number), model=best is None or other.number != best.number)


def parameters_text(trial: FrozenTrial) -> str:
    """`learning_rate=0.001 lora_r=8`"""
    return " ".join(f"{name}={value:.3g}" if isinstance(value, float) else f"{name}={value}"
                    for name, value in trial.params.items())  # fmt: skip


def trial_steps(trial: FrozenTrial) -> tuple[int, int]:
    """The optimizer steps that a trial made, and those that it would have made; 0 if it never began."""
    max_steps = trial.user_attrs.get(MAX_STEPS, 0)
    return max_steps if trial.state == TrialState.COMPLETE else trial.last_step or 0, max_steps


def outcome_text(study: optuna.Study, pruner: ForecastPruner, trial: FrozenTrial) -> str:
    """What became of a trial, as a few words."""
    if trial.state == TrialState.COMPLETE:
        return f"held-out loss {trial.value:.4f}"
    if trial.state == TrialState.FAIL:
        return f"failed: {trial.user_attrs.get(REASON)}"
    if trial.state == TrialState.PRUNED:
        end = pruner.expected_end(study, trial)
        if end is None:
            return "diverged"
        low, median, high = end
        return f"ended early; training loss would end at {median:.3f} ({low:.3f} to {high:.3f})"
    return "unfinished"


def _signal(status: int) -> str | None:
    """The signal from outside that ended a process, by the status that it had itself or in a shell; or `None`."""
    number = -status if status < 0 else status - 128
    known = {getattr(signal, name): name for name in KILLED if hasattr(signal, name)}
    return known.get(number)


def _last_words(path: Path) -> str:
    """The last line that a process printed and that is no progress bar."""
    try:
        lines = re.split(r"[\r\n]", path.read_text(encoding="utf-8", errors="replace"))
    except OSError:
        lines = []
    lines = [line.strip() for line in lines if line.strip() and not re.search(r"\d+%\|.*\||\d(s/it|it/s)", line)]
    return lines[-1] if lines else "it printed nothing"


def _drop_weights(folder: Path, *, model: bool) -> None:
    """Delete the checkpoints of a trial that ended, and its model too unless it is the best one."""
    for checkpoint in folder.glob("checkpoint-*"):
        shutil.rmtree(checkpoint, ignore_errors=True)
    for path in [path for pattern in WEIGHTS for path in folder.glob(pattern)] if model else []:
        path.unlink(missing_ok=True)
