"""
What a sweep knows: the folders of its trials, and the study that is made of them in memory.

The folders are the only truth. So a sweep survives a `kill -9`, and several processes may work on one folder.

| file in `trial-007/` | what it says of the trial |
|---|---|
| `trial.yaml` | its values, and the options that it has in common with the others |
| `hybrid_log.jsonl` | its steps and losses |
| `eval_results.json` | the held-out loss: written by the training, if it came to its end |
| `outcome.json` | how it ended: written by the sweep |

A trial without an outcome is running, or was interrupted. Folders of a sweep with other options, or of which nothing
says the values, are refused. Nothing is deleted.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import xxhash

from hf_hybrid.cli.options import OptionError
from hf_hybrid.cli.yaml_file import read_options, split_private
from hf_hybrid.files import write_json
from hf_hybrid.integrations.optuna import MAX_STEPS, ForecastPruner, FrozenTrial, TrialState, optuna
from hf_hybrid.records.log import LOG_NAME, load_log
from hf_hybrid.records.readings import as_dict, count_of, number, numbered, read_json

TRIAL_NAME = "trial.yaml"
OUTCOME_NAME = "outcome.json"
RESULT_NAMES = ("eval_results.json", "all_results.json")
REASON = "reason"
"""User attribute of a trial: why it was ended or failed."""
ENDED = (TrialState.COMPLETE, TrialState.PRUNED, TrialState.FAIL)
_STATES = {state.name.lower(): state for state in ENDED}
_OF_EACH_TRIAL = ("output_dir", "logging_steps", "num_processes")
"""Options that a sweep sets itself."""


@dataclass(frozen=True)
class Outcome:
    """How a trial ended."""

    state: TrialState
    loss: float | None = None
    reason: str = ""
    parameters: dict[str, Any] = field(default_factory=dict)


def write_outcome(folder: Path, outcome: Outcome) -> None:
    """Note in the folder of a trial how it ended, with a checksum, as no other file says the same."""
    values: dict[str, Any] = {"state": outcome.state.name.lower(), "eval_loss": outcome.loss, REASON: outcome.reason}
    values |= {"parameters": outcome.parameters}
    write_json(folder / OUTCOME_NAME, {**values, "xxh3_128": _digest(values)})


def read_outcome(folder: Path) -> Outcome | None:
    """Return how a trial ended; `None` if nothing says so, or what says so is damaged."""
    values = as_dict(read_json(folder / OUTCOME_NAME, []))
    digest = values.pop("xxh3_128", None)
    state, loss = _STATES.get(str(values.get("state"))), number(values.get("eval_loss"))
    if digest != _digest(values) or state is None or state == TrialState.COMPLETE and loss is None:
        return None
    return Outcome(state, loss, str(values.get(REASON) or ""), as_dict(values.get("parameters")))


def _digest(values: dict[str, Any]) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(values, sort_keys=True).encode())


def ended_early(folder: Path) -> bool:
    """Whether a training was told to end before its last step, as `enable_jit_checkpoint` does on a signal."""
    state = as_dict(read_json(folder / "trainer_state.json", []))
    step, max_steps = count_of(state.get("global_step")), count_of(state.get("max_steps"))
    return step is not None and max_steps is not None and step < max_steps


def held_out_loss(folder: Path) -> float | None:
    """
    Return the loss with which a training came to its end, NaN if it was not finite; `None` if it did not.

    `Trainer` writes its results in place, so a kill may have left half of a file.
    """
    if ended_early(folder):
        return None
    for name in RESULT_NAMES:
        loss = as_dict(read_json(folder / name, [])).get("eval_loss", "absent")
        if loss is None or isinstance(loss, float) and not math.isfinite(loss):
            return math.nan
        if number(loss) is not None:
            return number(loss)
    return None


def logged(folder: Path) -> tuple[int | None, dict[int, float]]:
    """Return the steps that a trial has to make, and its training losses by step, NaN for one that was not finite."""
    max_steps, losses = None, {}
    for line in load_log(folder, only=("step", MAX_STEPS, "loss")).lines:
        max_steps = count_of(line.get(MAX_STEPS)) or max_steps
        if "loss" in line:
            loss = number(line["loss"])
            losses[line["step"]] = math.nan if loss is None else loss
    return max_steps, losses


@dataclass(frozen=True)
class SweepFolder:
    """
    The folder of a sweep, and what all its trials have in common.

    Args:
        path (`Path`): It exists.
        pruner (`ForecastPruner`): Of the study.
        options (`dict`): Of all trials, by name.
        distributions (`dict`): Of the parameters, by name.
    """

    path: Path
    pruner: ForecastPruner
    options: dict[str, Any]
    distributions: dict[str, Any]

    def trial(self, number: int) -> Path:
        """Return the `output_dir` of a trial."""
        return self.path / f"trial-{number:03d}"

    def study(self) -> optuna.Study:
        """
        Return a study in memory of all trials, as their folders are now.

        Raises:
            OptionError: If a folder is of another sweep, or nothing says which values its trial had.
        """
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        study = optuna.create_study(pruner=self.pruner)
        numbers = [number for number, folder in numbered(self.path, r"trial-(\d+)") if _has_begun(folder)]
        study.add_trials([self._read(self.trial(number)) for number in range(max(numbers, default=-1) + 1)])
        return study

    def _read(self, folder: Path) -> FrozenTrial:
        """What the folder of a trial says; a trial that failed in the place of a folder that is missing."""
        if not _has_begun(folder):
            return optuna.trial.create_trial(state=TrialState.FAIL, user_attrs={REASON: "its folder is missing"})
        outcome = read_outcome(folder) or Outcome(TrialState.RUNNING)
        max_steps, losses = logged(folder)
        attributes, parameters = {MAX_STEPS: max_steps, REASON: outcome.reason}, self._parameters(folder, outcome)
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
            raise self._of_another(folder) from None

    def _parameters(self, folder: Path, outcome: Outcome) -> dict[str, Any]:
        """The values of a trial, whose other options must be those of this sweep."""
        try:
            options = as_dict(read_options((folder / TRIAL_NAME).read_text(encoding="utf-8")))
        except (OSError, ValueError):
            options = {}
        if not options and not outcome.parameters:
            raise OptionError(
                f"`{folder / TRIAL_NAME}` is missing or damaged, so nothing says which values the trial had. Restore "
                f"it, or move `{folder.name}` to another place."
            )
        missing = [name for name in self.distributions if name not in options]
        if options and (missing or self._common(options) != self._common(self.options)):
            raise self._of_another(folder)
        return outcome.parameters or {name: options[name] for name in self.distributions}

    def _common(self, options: dict[str, Any]) -> dict[str, Any]:
        """The options that are the same in all trials and stand in their files."""
        shown, _ = split_private(options)
        return {name: value for name, value in shown.items() if name not in (*_OF_EACH_TRIAL, *self.distributions)}

    def _of_another(self, folder: Path) -> OptionError:
        return OptionError(
            f"`{folder}` holds a trial with other options or other values, and their losses cannot be compared. Name "
            "another folder with `--output`."
        )


def _has_begun(folder: Path) -> bool:
    """Whether a folder has a file of a trial. A sweep that dies while it makes a folder may leave one without."""
    return any((folder / name).is_file() for name in (TRIAL_NAME, OUTCOME_NAME, LOG_NAME, *RESULT_NAMES))


def best_trial(study: optuna.Study) -> FrozenTrial | None:
    """The finished trial with the lowest held-out loss."""
    finished = study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
    return min(finished, key=lambda trial: math.inf if trial.value is None else trial.value, default=None)
