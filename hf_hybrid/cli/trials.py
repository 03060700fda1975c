"""
The trials of a sweep: which one is next, its process, and its outcome.

The whole state of a sweep is in its folder, so it survives a `kill -9` and several processes may work on it:

| file | what it holds |
|---|---|
| `sweep.db` | Optuna's study: parameters, losses and outcome of each trial (`cli/study.py`) |
| `trial-007/` | `output_dir` of a trial, with its `trial.yaml`, log, outcome, and what it printed, `output.txt` |
| `trial-007.lock` | a file lock, held by the process that works on that trial |
| `sweep.lock` | a file lock, held by the process that chooses the next trial |

A trial goes through the study's states once. It is *running* from the moment that it is chosen; then *complete*,
*pruned* or *failed*. The system releases the lock of a process that dies, however it dies. So a trial that is running
and not locked was interrupted: it is taken up before a new one is chosen, from its last checkpoint if it has one. It
stays the same trial, so that it is never counted twice. The same holds for a trial whose process alone was killed, by
the system when memory is short for example, until that has happened too often without a new checkpoint.

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

from filelock import BaseFileLock, FileLock

from hf_hybrid.cli.options import PRIVATE
from hf_hybrid.cli.study import (
    ENDED,
    REASON,
    TRIAL_NAME,
    Outcome,
    ended_early,
    held_out_loss,
    lock_trial,
    logged,
    read_outcome,
    trial_folder,
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
        folder (`Path`): Of the sweep; it exists.
        study (`optuna.Study`): From [`open_study`].
        count (`int`): No more trials than that.
        base (`dict`): The options of all trials, by name.
        distributions (`dict`): Of the parameters, by name.
        propose (`Callable`): Returns the values of the next trial from those before it, as far as they are decided;
            `None` where no other is worth trying.
        tell (`Callable`): Takes a line for the user.
    """

    def __init__(
        self,
        folder: Path,
        study: optuna.Study,
        *,
        count: int,
        base: dict[str, Any],
        distributions: dict[str, Any],
        propose: Callable[[list[FrozenTrial]], dict[str, Any] | None],
        tell: Callable[[str], None],
    ):
        self.folder, self.study, self.count, self.tell = folder, study, count, tell
        self.base, self.distributions, self.propose = base, distributions, propose
        self.stopping = threading.Event()
        self._kills: dict[tuple[int, str | None], int] = {}  # by trial, and the checkpoint that it had
        _, self._private = split_private(base)
        variables = base.get(ENVIRONMENT)
        of_environment = variables.values() if isinstance(variables, dict) else ()
        self._secrets = [str(value) for value in (*self._private.values(), *of_environment) if len(str(value)) >= 8]

    def work(self, environment: dict[str, str]) -> None:
        """Run trials, one after the other, while there is one to choose, with `environment` for their processes."""
        while not self.stopping.is_set() and (taken := self._take()) is not None:
            trial, lock = taken
            try:
                self._run(trial, environment)
            finally:
                lock.release()

    def _take(self) -> tuple[optuna.Trial, BaseFileLock] | None:
        """Choose a trial that was interrupted, or else a new one. Returns it with its lock, which is held."""
        with FileLock(self.folder / "sweep.lock"):
            trials = self.study.get_trials(deepcopy=False)
            for found in trials:
                if found.state == TrialState.RUNNING and (lock := self._lock(found.number)) is not None:
                    self.tell(f"trial {found.number} was interrupted and goes on")
                    # Optuna has no public way to go on with a trial that another process asked for.
                    trial = optuna.Trial(self.study, found._trial_id)
                    for name, distribution in self.distributions.items():
                        trial._suggest(name, distribution)  # changes nothing unless it died while it was asking
                    return trial, lock
            begun = [found for found in trials if found.state != TrialState.WAITING]
            if len(begun) >= self.count:
                return None
            if len(begun) == len(trials):  # else a process died between the next two calls
                proposal = self.propose(begun)
                if proposal is None:
                    return None
                self.study.enqueue_trial(proposal)
            # A proposal depends on the trials that there are, not on the process that asks.
            self.study.sampler = optuna.samplers.TPESampler(seed=len(begun))
            trial = self.study.ask(self.distributions)
            self._make_way(self._folder(trial.number))
            lock = self._lock(trial.number)
            if lock is None:
                raise RuntimeError(f"Trial {trial.number} is new, and another process works on it.")
            return trial, lock

    def _lock(self, number: int) -> BaseFileLock | None:
        return lock_trial(self.folder, number)

    def _folder(self, number: int) -> Path:
        return trial_folder(self.folder, number)

    def _make_way(self, folder: Path) -> None:
        """Give what lies in the place of a new trial another name: nothing that a sweep did not make is deleted."""
        if folder.is_symlink():
            folder.unlink()
        elif folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
            names = (f"{folder.name}.earlier-{count}" for count in range(1, 10_000))
            aside = next(folder.with_name(name) for name in names if not os.path.lexists(folder.with_name(name)))
            os.replace(folder, aside)
            self.tell(f"`{folder.name}` is none of this sweep, and is now `{aside.name}`")

    # One trial.

    def _run(self, trial: optuna.Trial, environment: dict[str, str]) -> None:
        """Train in a process of its own, and follow its losses until it ends or cannot win."""
        folder = self._folder(trial.number)
        outcome = read_outcome(folder)  # else the sweep died between the trial's end and its own note of it
        if outcome is not None:
            self._end(trial, outcome.state, outcome.loss, outcome.reason)
            return
        if held_out_loss(folder) is None:
            process = self._start(trial, folder, environment)
            try:
                pruned = self._follow(trial, process, folder)
            finally:
                if process.stdin is not None:
                    process.stdin.close()  # which ends the process
                process.wait()
            if self.stopping.is_set():
                return  # the trial is left as interrupted
            if pruned:
                self._end(trial, TrialState.PRUNED)
                return
            if self._goes_on_later(trial, process.returncode, folder):
                return
        loss = held_out_loss(folder)
        if loss is None:
            self._end(trial, TrialState.FAIL, reason="it ended without a loss in `eval_results.json`")
        elif math.isfinite(loss):
            self._end(trial, TrialState.COMPLETE, loss)
        else:
            self._end(trial, TrialState.PRUNED, reason="diverged")

    def _goes_on_later(self, trial: optuna.Trial, status: int, folder: Path) -> bool:
        """Whether a trial did not come to its end. If it was killed, it is left as interrupted; else it has failed."""
        killed_by = _signal(status)
        if status == 0 and not ended_early(folder):
            return False
        if status and killed_by is None:
            self._end(trial, TrialState.FAIL, reason=redact(_last_words(folder / "output.txt"), self._secrets))
            if not any(MAX_STEPS in other.user_attrs for other in self.study.get_trials(deepcopy=False)):
                self.stopping.set()  # no trial ever began, and the next ones would fail as this one did
            return True
        checkpoint, how = last_checkpoint(folder), f"killed by {killed_by}" if killed_by else "told to end early"
        key = (trial.number, None if checkpoint is None else str(checkpoint))
        self._kills[key] = self._kills.get(key, 0) + 1
        since = "without a checkpoint" if checkpoint is None else f"after `{Path(checkpoint).name}`"
        if self._kills[key] >= KILLS:
            short = "; is memory short?" if killed_by == "SIGKILL" else ""
            self._end(trial, TrialState.FAIL, reason=f"{how} {KILLS} times {since}{short}")
        else:
            self.tell(f"trial {trial.number} was {how} {since}")
        return True

    def _start(self, trial: optuna.Trial, folder: Path, environment: dict[str, str]) -> subprocess.Popen:
        folder.mkdir(exist_ok=True)
        values = {"logging_steps": 0.01, **self.base, **trial.params, "output_dir": str(folder)}
        write_text(folder / TRIAL_NAME, as_yaml(values))
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

    def _follow(self, trial: optuna.Trial, process: subprocess.Popen, folder: Path) -> bool:
        """Report the losses to the study as they come. Returns whether the trial cannot win, once that is known."""
        reported = self.study.get_trials(deepcopy=False)[trial.number].last_step or 0
        ended = False
        while not (ended or self.stopping.is_set()):
            ended = process.poll() is not None  # before the losses are read, so that none is missed
            whole, losses = logged(folder)
            if whole is not None and MAX_STEPS not in trial.user_attrs:
                trial.set_user_attr(MAX_STEPS, whole)
            for step, loss in losses.items():
                if step > reported:
                    reported = step
                    trial.report(loss, step)
            if not ended:
                if trial.should_prune():
                    return True
                self.stopping.wait(POLL_SECONDS)
        return False

    def _end(self, trial: optuna.Trial, state: TrialState, loss: float | None = None, reason: str = "") -> None:
        write_outcome(self._folder(trial.number), Outcome(state, loss, reason, trial.params))
        if reason:
            trial.set_user_attr(REASON, reason)
        self.study.tell(trial.number, loss, state)
        ended = self.study.get_trials(deepcopy=False)[trial.number]
        made, whole = trial_steps(ended)
        outcome = outcome_text(self.study, ended)
        self.tell(f"trial {ended.number}, {parameters_text(ended)}, step {made:,} of {whole:,}: {outcome}")
        best = best_trial(self.study)
        for other in self.study.get_trials(deepcopy=False, states=ENDED):
            _drop_weights(self._folder(other.number), model=other.number != best.number if best else True)


def forecast_pruner(study: optuna.Study) -> ForecastPruner:
    """The pruner that [`open_study`] gave the study."""
    if not isinstance(study.pruner, ForecastPruner):
        raise TypeError(f"The study has a `{type(study.pruner).__name__}`, and was not opened as that of a sweep.")
    return study.pruner


def best_trial(study: optuna.Study) -> FrozenTrial | None:
    """The finished trial with the lowest held-out loss."""
    finished = study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
    return min(finished, key=lambda trial: math.inf if trial.value is None else trial.value, default=None)


def parameters_text(trial: FrozenTrial) -> str:
    """`learning_rate=0.001 lora_r=8`"""
    return " ".join(f"{name}={value:.3g}" if isinstance(value, float) else f"{name}={value}"
                    for name, value in trial.params.items())  # fmt: skip


def trial_steps(trial: FrozenTrial) -> tuple[int, int]:
    """The optimizer steps that a trial made, and those that it would have made; 0 if it never began."""
    whole = trial.user_attrs.get(MAX_STEPS, 0)
    return whole if trial.state == TrialState.COMPLETE else trial.last_step or 0, whole


def outcome_text(study: optuna.Study, trial: FrozenTrial) -> str:
    """What became of a trial, as a few words."""
    if trial.state == TrialState.COMPLETE:
        return f"held-out loss {trial.value:.4f}"
    if trial.state == TrialState.FAIL:
        return f"failed: {trial.user_attrs.get(REASON)}"
    if trial.state == TrialState.PRUNED:
        found = forecast_pruner(study).expected_end(study, trial)
        if found is None:
            return "diverged"
        low, median, high = found
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
    if folder.is_symlink():
        return
    for checkpoint in folder.glob("checkpoint-*"):
        shutil.rmtree(checkpoint, ignore_errors=True)
    for path in [path for pattern in WEIGHTS for path in folder.glob(pattern)] if model else []:
        path.unlink(missing_ok=True)
