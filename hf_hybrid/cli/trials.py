"""
The trials of a sweep: what their folders say, which is next, its process, and its outcome.

The folders are the only truth, and Optuna's study is made of them in memory. So a sweep survives a `kill -9`, and
several processes may work on one folder.

| file | what it holds |
|---|---|
| `trial-007/trial.yaml` | the values of the trial, and the options that it has in common with the others |
| `trial-007/hybrid_log.jsonl` | its steps and losses |
| `trial-007/eval_results.json` | the held-out loss: written by the training, if it came to its end |
| `trial-007/outcome.json` | how it ended: written by the sweep |
| `trial-007/output.txt` | what it printed |
| `trial-007.lock`, `sweep.lock` | locks, held by the process that works on that trial, or chooses the next one |

A trial begins with its `trial.yaml` and ends with its `outcome.json`. The system releases the lock of a process that
dies, however it dies. So a trial without an outcome that is not locked was interrupted: it is taken up before a new one
is chosen, from its last checkpoint if it has one. It stays the same trial, so that it is never counted twice. The same
holds for a trial whose process alone was killed, by the system when memory is short for example, until that has
happened too often without a new checkpoint. Folders of a sweep with other options, or of which nothing says the values,
are refused. Nothing is deleted that a sweep did not make.

No file holds a secret. A trial inherits the environment of the sweep, with the variables that stand under `env` in its
YAML file. Options that hold a secret reach it by a variable too.
"""

from __future__ import annotations

import functools
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_hybrid.cli.console import print_line
from hf_hybrid.cli.options import COMMAND, PRIVATE, TRAINING, OptionError
from hf_hybrid.cli.yaml_file import ENVIRONMENT, as_yaml, read_options, split_private
from hf_hybrid.files import delete_temporaries, open_to_append, own_folder, write_json, write_text
from hf_hybrid.integrations.optuna import MAX_STEPS, ForecastPruner, FrozenTrial, TrialState, optuna
from hf_hybrid.records.log import LOG_NAME, load_log
from hf_hybrid.records.readings import as_dict, count_of, number, numbered, read_json
from hf_hybrid.records.redaction import redact
from hf_hybrid.saving.lock import own_lock
from hf_hybrid.saving.manifest import last_checkpoint

if TYPE_CHECKING:
    from filelock import FileLock

TRIAL_NAME = "trial.yaml"
OUTCOME_NAME = "outcome.json"
RESULT_NAMES = ("eval_results.json", "all_results.json")
REASON = "reason"
"""User attribute of a trial: why it was ended or failed."""
REWARDED = "rewarded"
"""User attribute of a trial: whether its value is a reward, negative."""
ENDED = (TrialState.COMPLETE, TrialState.PRUNED, TrialState.FAIL)
PROCESS = (sys.executable, "-m", "hf_hybrid.cli.trial")
POLL_SECONDS = 0.5
"""Between two looks at the losses of a trial."""
KILLS = 3
"""A trial that was killed so often after the same checkpoint has failed."""
FROM_OUTSIDE = ("SIGKILL", "SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2", "SIGXCPU")
"""Signals of the system when memory is short, of a scheduler, of a person."""
WEIGHTS = ("*.safetensors", "*.bin", "*.index.json")


# What the folder of a trial says.


@dataclass(frozen=True)
class Outcome:
    """How a trial ended. The `loss` of completions is their reward, negative."""

    state: TrialState
    loss: float | None = None
    reason: str = ""


def write_outcome(folder: Path, outcome: Outcome) -> None:
    """Note in the folder of a trial how it ended, as no other file says the same."""
    values = {"state": outcome.state.name.lower(), "eval_loss": outcome.loss, REASON: outcome.reason}
    write_json(folder / OUTCOME_NAME, values)


def read_outcome(folder: Path) -> Outcome | None:
    """Return how a trial ended; `None` if nothing says so, or what says so is damaged."""
    values = as_dict(read_json(folder / OUTCOME_NAME, []))
    state, loss = TrialState.__members__.get(str(values.get("state")).upper()), number(values.get("eval_loss"))
    if state not in ENDED or state == TrialState.COMPLETE and loss is None:
        return None
    return Outcome(state, loss, str(values.get(REASON) or ""))


def ended_early(folder: Path) -> bool:
    """Whether a training was told to end before its last step, as `enable_jit_checkpoint` does on a signal."""
    state = as_dict(read_json(folder / "trainer_state.json", []))
    step, max_steps = count_of(state.get("global_step")), count_of(state.get("max_steps"))
    return step is not None and max_steps is not None and step < max_steps


def held_out_loss(folder: Path) -> float | None:
    """
    Return the loss, or the negative reward, with which a training came to its end, NaN if it was not finite; `None` if
    it did not. `Trainer` writes its results in place, so a kill may have left half of a file.
    """
    if ended_early(folder):
        return None
    for name in RESULT_NAMES:
        results = as_dict(read_json(folder / name, []))
        loss = results.get("eval_loss", "absent")
        if "eval_reward" in results:  # the loss of completions says nothing
            loss = results["eval_reward"] if number(results["eval_reward"]) is None else -results["eval_reward"]
        if loss is None or isinstance(loss, float) and not math.isfinite(loss):
            return math.nan
        if number(loss) is not None:
            return number(loss)
    return None


def logged(folder: Path) -> tuple[int | None, dict[int, float]]:
    """
    Return the steps that a trial has to make, and its training losses by step, NaN for one that was not finite. Rewards
    follow no curve that could be forecast, and so give no losses.
    """
    max_steps, losses = None, {}
    for line in load_log(folder).lines:
        max_steps = count_of(line.get(MAX_STEPS)) or max_steps
        if "loss" in line and "reward" not in line:
            loss = number(line["loss"])
            losses[line["step"]] = math.nan if loss is None else loss
    return max_steps, losses


def _has_begun(folder: Path) -> bool:
    """Whether a folder has a file of a trial. A sweep that dies while it makes a folder may leave one without."""
    return any((folder / name).is_file() for name in (TRIAL_NAME, OUTCOME_NAME, LOG_NAME, *RESULT_NAMES))


def distribution(parameter: Any) -> optuna.distributions.BaseDistribution:
    """Return a `Choices` or a `Range` as Optuna wants it."""
    if hasattr(parameter, "choices"):
        return optuna.distributions.CategoricalDistribution(parameter.choices)
    integers = isinstance(parameter.low, int) and isinstance(parameter.high, int)
    kind = optuna.distributions.IntDistribution if integers else optuna.distributions.FloatDistribution
    return kind(parameter.low, parameter.high, log=parameter.logarithmic)


def best_trial(study: optuna.Study) -> FrozenTrial | None:
    """The finished trial with the lowest held-out loss."""
    finished = study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
    return min(finished, key=lambda trial: math.inf if trial.value is None else trial.value, default=None)


# The trials of a sweep.


class Trials:
    """
    The trials of one sweep: at most `count`, in a folder that exists. All have the `options`, which say under
    [`COMMAND`] what trains, if it is not `train`; `parameters` are what is tried (`Choices` and `Range`).
    """

    def __init__(
        self, folder: Path, options: dict[str, Any], parameters: list[Any], pruner: ForecastPruner, count: int
    ):
        self.folder, self.options, self.parameters = folder, options, parameters
        self.distributions = {parameter.name: distribution(parameter) for parameter in parameters}
        self.pruner, self.count, self.hopeless = pruner, count, False
        self._has_no_locks = False
        self._kills: dict[tuple[int, str | None], int] = {}  # by trial, and the checkpoint that it had
        _, self._private = split_private(options)
        secrets = (*self._private.values(), *as_dict(options.get(ENVIRONMENT)).values())
        self._secrets = [str(value) for value in secrets if len(str(value)) >= 8]
        self.study()

    def trial(self, number: int) -> Path:
        """Return the `output_dir` of a trial."""
        return self.folder / f"trial-{number:03d}"

    def study(self) -> optuna.Study:
        """
        Return a study in memory of all trials, as their folders are now. A folder of another sweep, or of which nothing
        says which values its trial had, raises an [`OptionError`].
        """
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        study = optuna.create_study(pruner=self.pruner)
        numbers = [number for number, folder in numbered(self.folder, r"trial-(\d+)") if _has_begun(folder)]
        study.add_trials([self._read(self.trial(number)) for number in range(max(numbers, default=-1) + 1)])
        return study

    def _read(self, folder: Path) -> FrozenTrial:
        """What the folder of a trial says; a trial that failed in the place of a folder that is missing."""
        if not _has_begun(folder):
            return optuna.trial.create_trial(state=TrialState.FAIL, user_attrs={REASON: "its folder is missing"})
        outcome = read_outcome(folder) or Outcome(TrialState.RUNNING)
        max_steps, losses = logged(folder)
        attributes = {
            MAX_STEPS: max_steps,
            REASON: outcome.reason,
            REWARDED: TRAINING[self.options.get(COMMAND, "train")].rewarded,
        }
        parameters = self._parameters(folder)
        try:
            return optuna.trial.create_trial(
                state=outcome.state,
                value=outcome.loss if outcome.state == TrialState.COMPLETE else None,
                params=parameters,
                distributions=self.distributions,
                user_attrs={name: value for name, value in attributes.items() if value},
                intermediate_values=losses if max_steps else {},
            )
        except (ValueError, TypeError):  # a value that is not in its distribution
            raise _of_another(folder) from None

    def _parameters(self, folder: Path) -> dict[str, Any]:
        """The values of a trial, whose other options must be those of this sweep."""
        try:
            options = as_dict(read_options((folder / TRIAL_NAME).read_text(encoding="utf-8")))
        except (OSError, ValueError):
            raise OptionError(
                f"`{folder / TRIAL_NAME}` is missing or damaged, so nothing says which values the trial had. Restore "
                f"it, or move `{folder.name}` to another place."
            ) from None
        if self.distributions.keys() - options.keys() or self._common(options) != self._common(self.options):
            raise _of_another(folder)
        return {name: options[name] for name in self.distributions}

    def _common(self, options: dict[str, Any]) -> dict[str, Any]:
        """The options that are the same in all trials and stand in their files."""
        shown, _ = split_private(options)
        own = {"output_dir", "logging_steps", "num_processes", *self.distributions}
        return {name: value for name, value in shown.items() if name not in own}

    def work(self) -> None:
        """Run trials, one after the other, while there is one to choose."""
        while not self.hopeless and (chosen := self._choose()) is not None:
            number, lock = chosen
            try:
                self._run(number)
            finally:
                lock.release()

    def _propose(self, study: optuna.Study) -> dict[str, Any] | None:
        """Return the values of the next trial; `None` where no other can be the best."""
        trials = study.get_trials(deepcopy=False)
        if len(self.parameters) > 1:
            # A proposal depends on the trials that there are, not on the process that asks.
            study.sampler = optuna.samplers.TPESampler(seed=len(trials))
            return study.ask(self.distributions).params
        [parameter] = self.parameters
        known = [trial for trial in trials if parameter.name in trial.params]  # of a lost trial nothing is known
        standings = [(trial.params[parameter.name], self.pruner.standing(trial)) for trial in known]
        ended = {value: standing for value, standing in standings if standing is not None}
        running = [value for value, standing in standings if standing is None]
        value = parameter.next_value(self.count, ended, running)
        return None if value is None else {parameter.name: value}

    def _choose(self) -> tuple[int, FileLock] | None:
        """Choose a trial that was interrupted, or else a new one. Returns its number and its lock, which is held."""
        choosing = self._take("sweep.lock")
        try:
            delete_temporaries(self.folder)
            study = self.study()
            for trial in study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
                try:
                    lock = self._take(f"{self.trial(trial.number).name}.lock", wait=0)
                except TimeoutError:
                    continue
                if read_outcome(self.trial(trial.number)) is not None:  # it ended a moment ago
                    lock.release()
                    continue
                tell(f"trial {trial.number} was interrupted and goes on")
                self._write_options(trial.number, trial.params)
                return trial.number, lock
            number = len(study.trials)
            parameters = self._propose(study) if number < self.count else None
            if parameters is None:
                return None
            lock = self._take(f"{self.trial(number).name}.lock")
            self._write_options(number, parameters)
            return number, lock
        finally:
            choosing.release()

    def _take(self, name: str, wait: float = -1) -> FileLock:
        """Take a lock. Raises `TimeoutError` if another process has it. Without any, a sweep goes on as a training."""
        lock = own_lock(self.folder / name)
        try:
            lock.acquire(timeout=wait)
        except TimeoutError:
            raise
        except (OSError, NotImplementedError) as error:
            if not self._has_no_locks:
                tell(f"`{self.folder}` cannot be locked ({error}): run one sweep at a time in it")
            self._has_no_locks = True
        return lock

    def _write_options(self, number: int, parameters: dict[str, Any]) -> None:
        """Write the options of a trial, with which it begins."""
        folder = own_folder(self.folder, self.trial(number).name)
        delete_temporaries(folder)
        values = {"logging_steps": 0.01, **self.options, **parameters, "output_dir": str(folder)}
        write_text(folder / TRIAL_NAME, as_yaml(values))

    # One trial.

    def _run(self, number: int) -> None:
        """Train in a process of its own, and follow its losses until it ends or cannot win."""
        folder = self.trial(number)
        if held_out_loss(folder) is None:  # else the sweep died between the trial's end and its outcome
            process = self._start(folder)
            try:
                pruned = self._follow(number, process)
            finally:
                if process.stdin is not None:
                    process.stdin.close()  # which ends the process
                process.wait()
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
            if not any(MAX_STEPS in other.user_attrs for other in self.study().trials):
                self.hopeless = True  # no trial ever began, and the next ones would fail as this one did
            return True
        checkpoint, how = last_checkpoint(folder), f"killed by {killed_by}" if killed_by else "told to end early"
        key = (number, None if checkpoint is None else str(checkpoint))
        self._kills[key] = self._kills.get(key, 0) + 1
        since = "without a checkpoint" if checkpoint is None else f"after `{Path(checkpoint).name}`"
        if self._kills[key] >= KILLS:
            short = "; is memory short?" if killed_by == "SIGKILL" else ""
            self._end(number, TrialState.FAIL, reason=f"{how} {KILLS} times {since}{short}")
        else:
            tell(f"trial {number} was {how} {since}")
        return True

    def _start(self, folder: Path) -> subprocess.Popen:
        words = [self.options.get(COMMAND, "train"), "--config", str(folder / TRIAL_NAME)]
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
                env={**os.environ, **private},
                start_new_session=True,  # Ctrl-C reaches the sweep alone, which then ends its trials
            )

    def _follow(self, number: int, process: subprocess.Popen) -> bool:
        """Wait for the end of a trial. Returns whether it cannot win, once that is known."""
        judged: int | None = None
        while process.poll() is None:
            _, losses = logged(self.trial(number))
            step = max(losses, default=None)
            if step != judged:
                judged, study = step, self.study()
                if self.pruner.prune(study, study.trials[number]):
                    return True
            time.sleep(POLL_SECONDS)
        return False

    def _end(self, number: int, state: TrialState, loss: float | None = None, reason: str = "") -> None:
        write_outcome(self.trial(number), Outcome(state, loss, reason))
        study = self.study()
        trial, best = study.trials[number], best_trial(study)
        step, max_steps = trial_steps(trial)
        outcome = outcome_text(self.pruner, trial)
        values = " ".join(f"{name}={_value_text(value)}" for name, value in trial.params.items())
        tell(f"trial {number}, {values}, step {step:,} of {max_steps:,}: {outcome}")
        for other in study.get_trials(deepcopy=False, states=ENDED):
            _drop_weights(self.trial(other.number), model=best is None or other.number != best.number)


tell = functools.partial(print_line, unwrapped=True)
"""Write a line for the user."""


def _of_another(folder: Path) -> OptionError:
    return OptionError(
        f"`{folder}` holds a trial with other options or other values, and their losses cannot be compared. Name "
        "another folder with `--output`."
    )


# In words.


def table(study: optuna.Study, pruner: ForecastPruner, count: int) -> str:
    """One line per trial, the best first, and how many steps were made, of those of `count` whole trials."""
    trials, best = study.get_trials(deepcopy=False), best_trial(study)
    names = sorted({name for trial in trials for name in trial.params})
    rows = [("trial", *names, "steps", "outcome")]
    behind_all = (2, math.inf)  # of the unfinished ones
    for trial in sorted(trials, key=lambda trial: pruner.standing(trial) or behind_all):
        step, max_steps = trial_steps(trial)
        values = [_value_text(trial.params.get(name, "-")) for name in names]
        outcome = outcome_text(pruner, trial) + ("  <- best" if trial is best else "")
        rows.append((str(trial.number), *values, f"{step:,}/{max_steps:,}", outcome))
    widths = [max(map(len, column)) for column in zip(*rows)]
    lines = ["  ".join([*(cell.rjust(width) for cell, width in zip(row, widths[:-1])), row[-1]]) for row in rows]
    steps, planned = (sum(column) for column in zip(*map(trial_steps, trials)))
    share = f", {steps / (planned * count / len(trials)):.0%} of those of {count} whole trials" if planned else ""
    return "\n".join(lines) + f"\n\n{len(trials)} trials made {steps:,} steps{share}."


def _value_text(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def trial_steps(trial: FrozenTrial) -> tuple[int, int]:
    """The optimizer steps that a trial made, and those that it would have made; 0 if it never began."""
    max_steps = trial.user_attrs.get(MAX_STEPS, 0)
    return max_steps if trial.state == TrialState.COMPLETE else trial.last_step or 0, max_steps


def outcome_text(pruner: ForecastPruner, trial: FrozenTrial) -> str:
    """What became of a trial, as a few words."""
    if trial.state == TrialState.COMPLETE and trial.value is not None:
        rewarded = trial.user_attrs.get(REWARDED)
        return f"held-out reward {-trial.value:.4f}" if rewarded else f"held-out loss {trial.value:.4f}"
    if trial.state == TrialState.FAIL:
        return f"failed: {trial.user_attrs.get(REASON)}"
    if trial.state == TrialState.PRUNED:
        if (end := pruner.forecast(trial)) is None:
            return "diverged"
        return f"ended early; training loss would end at {end.median:.3f} ({end.low:.3f} to {end.high:.3f})"
    return "unfinished"


def _signal(status: int) -> str | None:
    """The signal from outside that ended a process, by the status that it had itself or in a shell; or `None`."""
    numbers = {int(signal.Signals[name]): name for name in FROM_OUTSIDE}
    return numbers.get(-status if status < 0 else status - 128)


def _last_words(path: Path) -> str:
    """The last line that a process printed and that is no progress bar."""
    lines = re.split(r"[\r\n]", path.read_text(encoding="utf-8", errors="replace"))
    lines = [line.strip() for line in lines if line.strip() and not re.search(r"\d+%\|.*\||\d(s/it|it/s)", line)]
    return lines[-1] if lines else "it printed nothing"


def _drop_weights(folder: Path, *, model: bool) -> None:
    """Delete the checkpoints of a trial that ended, but not its log, and its model too unless it is the best one."""
    for log in folder.glob(f"checkpoint-*/{LOG_NAME}"):
        log.replace(folder / LOG_NAME)
    for checkpoint in folder.glob("checkpoint-*"):
        shutil.rmtree(checkpoint, ignore_errors=True)
    for path in [path for pattern in WEIGHTS for path in folder.glob(pattern)] if model else []:
        path.unlink(missing_ok=True)
