"""
The study of a sweep, `sweep.db`, and how it is made again from the folders of the trials.

The database is Optuna's, and one file: a full disk, a bad copy or a slip of the hand may take it. What it knows of a
trial stands in the folder of the trial too:

| file | what it says of the trial |
|---|---|
| `trial.yaml` | its values, and the options that it has in common with the others |
| `hybrid_log.jsonl` | its steps and losses |
| `outcome.json` | how it ended: written by the sweep, just before its note in the database |
| `eval_results.json` | the held-out loss: written by the training, if it came to its end |

Every start of a sweep compares. If the database is missing, empty or damaged, or knows less of a trial than its folder
does, it is moved aside and made again. A trial without an outcome is then one that was interrupted, and goes on. What
cannot be told is refused with a sentence: folders of a sweep with other options, or one whose values nothing says.
Nothing is deleted.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import sqlite3
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import xxhash
from filelock import BaseFileLock, FileLock, Timeout

from hf_hybrid.cli.options import OptionError
from hf_hybrid.cli.yaml_file import ENVIRONMENT, read_options, split_private
from hf_hybrid.files import write_json
from hf_hybrid.integrations.optuna import MAX_STEPS, ForecastPruner, FrozenTrial, TrialState, optuna
from hf_hybrid.records.log import read_log
from hf_hybrid.records.readings import as_dict, count_of, number, numbered, read_json

DATABASE_NAME = "sweep.db"
OUTCOME_NAME = "outcome.json"
TRIAL_NAME = "trial.yaml"
REASON = "reason"
"""User attribute of a trial: why it was ended or failed."""
ENDED = (TrialState.COMPLETE, TrialState.PRUNED, TrialState.FAIL)
LOCK_SECONDS = 60.0
"""So long the database may be locked by another process."""
_STATES = {state.name.lower(): state for state in ENDED}
_OF_EACH_TRIAL = ("output_dir", "logging_steps", "num_processes", ENVIRONMENT)
"""Options that a sweep sets itself, or that stand in no file."""


# What stands in the folder of a trial.


@dataclass(frozen=True)
class Outcome:
    """How a trial ended."""

    state: TrialState
    loss: float | None = None
    reason: str = ""
    parameters: dict[str, Any] = field(default_factory=dict)


def trial_folder(folder: Path, number: int) -> Path:
    """Return the `output_dir` of a trial in the folder of a sweep."""
    return folder / f"trial-{number:03d}"


def lock_trial(folder: Path, number: int) -> BaseFileLock | None:
    """Return the lock of a trial, held; `None` if another process works on it."""
    lock = FileLock(folder / f"{trial_folder(folder, number).name}.lock", timeout=0, thread_local=False)
    try:
        lock.acquire()
    except Timeout:
        return None
    return lock


def write_outcome(folder: Path, outcome: Outcome) -> None:
    """Note in the folder of a trial how it ended, with a checksum: it is believed where the database says otherwise."""
    values: dict[str, Any] = {"state": outcome.state.name.lower(), "eval_loss": outcome.loss, REASON: outcome.reason}
    values |= {"parameters": outcome.parameters}
    write_json(folder / OUTCOME_NAME, {**values, "xxh3_128": _digest_of(values)})


def read_outcome(folder: Path) -> Outcome | None:
    """Return how a trial ended; `None` if nothing says so, or what says so is damaged."""
    found = as_dict(read_json(folder / OUTCOME_NAME, []))
    state, loss = _STATES.get(str(found.get("state"))), number(found.get("eval_loss"))
    if (
        found.pop("xxh3_128", None) != _digest_of(found)
        or state is None
        or state == TrialState.COMPLETE
        and loss is None
    ):
        return None
    return Outcome(state, loss, str(found.get(REASON) or ""), as_dict(found.get("parameters")))


def _digest_of(values: dict[str, Any]) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(values, sort_keys=True).encode())


def ended_early(folder: Path) -> bool:
    """Whether a training was told to end before its last step, as `enable_jit_checkpoint` does on a signal."""
    state = as_dict(read_json(folder / "trainer_state.json", []))
    made, whole = count_of(state.get("global_step")), count_of(state.get("max_steps"))
    return made is not None and whole is not None and made < whole


def held_out_loss(folder: Path) -> float | None:
    """
    Return the loss with which a training came to its end, NaN if it was not finite; `None` if it did not.

    `Trainer` writes its results in place, so a kill may have left half of a file.
    """
    if ended_early(folder):
        return None
    for name in ("eval_results.json", "all_results.json"):
        loss = as_dict(read_json(folder / name, [])).get("eval_loss", "absent")
        if loss is None or isinstance(loss, float) and not math.isfinite(loss):
            return math.nan
        if (found := number(loss)) is not None:
            return found
    return None


def logged(folder: Path) -> tuple[int | None, dict[int, float]]:
    """Return the steps that a trial has to make, and its training losses by step, NaN for one that was not finite."""
    whole, losses = None, {}
    for line in read_log(folder, only=("step", MAX_STEPS, "loss")):
        whole = count_of(line.get(MAX_STEPS)) or whole
        if "loss" in line:
            loss = number(line["loss"])
            losses[line["step"]] = math.nan if loss is None else loss
    return whole, losses


# The study.


@dataclass(frozen=True)
class SweepFolder:
    """
    The folder of a sweep, and what all its trials have in common.

    Args:
        path (`Path`): It exists.
        pruner (`ForecastPruner`): Of the study.
        options (`dict`): Of all trials, by name.
        distributions (`dict`): Of the parameters, by name.
        tell (`Callable`): Takes a line for the user.
    """

    path: Path
    pruner: ForecastPruner
    options: dict[str, Any]
    distributions: dict[str, Any]
    tell: Callable[[str], None]

    def open(self) -> optuna.Study:
        """
        Return the study. It is made if there is none, and made again if it is damaged or knows less than the folders.

        The caller holds `sweep.lock`.

        Raises:
            OptionError: If it cannot be opened, or the folders are of another sweep.
        """
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        database, folders = self.path / DATABASE_NAME, self._folders()
        wrong = _wrong(database)
        if wrong is None:
            try:
                study = self._study()
                trials, _ = study.get_trials(), study.user_attrs  # reads all that there is
                wrong = _disagreement(trials, folders)
                if wrong is None:
                    return study
            except (OptionError, OSError):
                raise
            except Exception as error:  # whatever a damaged database leads to
                if re.search("locked|no longer compatible|readonly", _told(error)):
                    raise OptionError(f"`{database}` cannot be used: {_told(error)}.") from None
                wrong = "is damaged"
        if not folders:
            if wrong == "is damaged":
                self._move_aside(database)
                self.tell(f"`{DATABASE_NAME}` is damaged, and no trial has begun: the sweep begins anew")
            return self._study()
        return self._made_again(wrong, folders)

    def _study(self) -> optuna.Study:
        storage = f"sqlite:///{(self.path / DATABASE_NAME).absolute()}"
        return optuna.create_study(storage=storage, study_name="sweep", pruner=self.pruner, load_if_exists=True)

    def _folders(self) -> dict[int, Path]:
        """The folders of trials by number, without those of trials that never began, and links to something else."""
        found = {index: path for index, path in numbered(self.path, r"trial-(\d+)") if path.is_dir()}
        begun = {index: any(path.iterdir()) for index, path in found.items()}
        begun |= {index: (path / TRIAL_NAME).is_file() for index, path in found.items() if path.is_symlink()}
        return {index: path for index, path in found.items() if begun[index]}

    def _made_again(self, wrong: str, folders: dict[int, Path]) -> optuna.Study:
        trials = [self._trial(folders.get(index)) for index in range(max(folders) + 1)]
        with _nobody_works_on(self.path, folders):
            aside = self._move_aside(self.path / DATABASE_NAME)
            study = self._study()
            for trial in trials:
                study.add_trial(trial)
        kept = "" if aside is None else f" The old one is `{aside.name}`."
        self.tell(f"`{DATABASE_NAME}` {wrong}: it was made again from the folders of {len(folders)} trials.{kept}")
        return study

    def _move_aside(self, database: Path) -> Path | None:
        """Give the database another name, and its journal too, which must not be taken for that of the new one."""
        if not database.exists():
            return None
        names = (f"{DATABASE_NAME}.damaged-{count}" for count in range(1, 10_000))
        aside = next(self.path / name for name in names if not os.path.lexists(self.path / name))
        os.replace(database, aside)
        for suffix in ("-journal", "-wal", "-shm"):
            with contextlib.suppress(FileNotFoundError):
                os.replace(f"{database}{suffix}", f"{aside}{suffix}")
        return aside

    def _trial(self, folder: Path | None) -> FrozenTrial:
        """What the folder of a trial says; a trial that failed in the place of a folder that is missing."""
        if folder is None:
            return optuna.trial.create_trial(state=TrialState.FAIL, user_attrs={REASON: "its folder is missing"})
        outcome, (whole, losses) = read_outcome(folder), logged(folder)
        if outcome is None and (loss := held_out_loss(folder)) is not None:
            diverged = Outcome(TrialState.PRUNED, reason="diverged")
            outcome = Outcome(TrialState.COMPLETE, loss) if math.isfinite(loss) else diverged
        outcome = outcome or Outcome(TrialState.RUNNING)
        attributes, parameters = {MAX_STEPS: whole, REASON: outcome.reason}, self._parameters(folder, outcome)
        try:
            return optuna.trial.create_trial(
                state=outcome.state,
                value=outcome.loss if outcome.state == TrialState.COMPLETE else None,
                params=parameters,
                distributions=self.distributions,
                user_attrs={name: value for name, value in attributes.items() if value},
                intermediate_values=losses,
            )
        except (ValueError, TypeError):
            raise self._of_another(folder) from None

    def _parameters(self, folder: Path, outcome: Outcome) -> dict[str, Any]:
        """The values of a trial, whose other options must be those of this sweep."""
        try:
            found = read_options((folder / TRIAL_NAME).read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError):
            found = None
        if not isinstance(found, dict):
            if outcome.parameters:
                return outcome.parameters
            raise OptionError(
                f"`{folder / TRIAL_NAME}` is missing or damaged, and `{DATABASE_NAME}` is no better, so nothing says "
                f"which values the trial had. Restore one of them, or move `{folder.name}` to another place."
            )
        missing = [name for name in self.distributions if name not in found]
        if missing or self._common(found) != self._common(self.options):
            raise self._of_another(folder)
        return {name: found[name] for name in self.distributions}

    def _common(self, options: dict[str, Any]) -> dict[str, Any]:
        """The options that are the same in all trials and stand in their files."""
        shown, _ = split_private(options)
        return {name: value for name, value in shown.items() if name not in (*_OF_EACH_TRIAL, *self.distributions)}

    def _of_another(self, folder: Path) -> OptionError:
        return OptionError(
            f"`{folder}` is of a sweep with other options or other values, and `{DATABASE_NAME}` beside it is missing "
            "or damaged. Name another folder with `--output`."
        )


def _wrong(database: Path) -> str | None:
    """
    Return what is wrong with a database, as a phrase; `None` for one that SQLite finds whole.

    Raises:
        OptionError: If it cannot be read at all, whatever is in it.
    """
    if database.is_symlink() or database.is_dir():
        raise OptionError(f"`{database}` is a link or a folder, and must be a file. Move it to another place.")
    if not database.exists():
        return "is missing"
    if database.stat().st_size == 0:
        return "is empty"
    try:
        with contextlib.closing(sqlite3.connect(database, timeout=LOCK_SECONDS)) as connection:
            found = connection.execute("PRAGMA integrity_check").fetchall()
    except sqlite3.OperationalError as error:
        raise OptionError(
            f"`{database}` cannot be read: {error}. Move it to another place to have it made again."
        ) from None
    except (sqlite3.DatabaseError, UnicodeDecodeError):
        return "is damaged"
    return None if found == [("ok",)] else "is damaged"


def _disagreement(trials: list[FrozenTrial], folders: dict[int, Path]) -> str | None:
    """Return what a study does not know of a folder, as a phrase; `None` if it knows all."""
    for index, folder in folders.items():
        outcome = read_outcome(folder)
        if index >= len(trials):
            return f"knows nothing of `{folder.name}`"
        trial = trials[index]
        if outcome is None or trial.state == TrialState.RUNNING:
            continue
        loss = trial.value if trial.state == TrialState.COMPLETE else None
        known = (trial.state, loss, trial.params if outcome.parameters else {})
        if known != (outcome.state, outcome.loss, outcome.parameters):
            return f"contradicts `{folder.name}/{OUTCOME_NAME}`"
    return None


@contextlib.contextmanager
def _nobody_works_on(folder: Path, numbers: Iterable[int]) -> Generator[None]:
    """Hold the locks of trials, so that no other sweep goes on with the database that is replaced."""
    with contextlib.ExitStack() as held:
        for index in numbers:
            lock = lock_trial(folder, index)
            if lock is None:
                raise OptionError(
                    f"`{folder / DATABASE_NAME}` is missing or damaged, and another sweep works in this folder. End "
                    "that one, and start again."
                )
            held.callback(lock.release)
        yield


def _told(error: BaseException) -> str:
    """The innermost error in one line: SQLAlchemy wraps what SQLite says."""
    while error.__cause__ is not None:
        error = error.__cause__
    return " ".join(str(error).split())
