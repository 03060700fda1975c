"""
When checkpoints of a training are written, what they hold, and how the training goes on from one.

A save. `Trainer` writes into a temporary folder, which gets its name when every process has written its files and the
manifest says that it is whole (manifest.py). Only then older checkpoints are deleted. A thread does this while training
goes on (async_save.py). Before anything is written, the processes compare what they hold (drift.py).

Inside a step a checkpoint holds the state before the step, so that a resumed run computes all of it again: the weights
are still those, the position in the data is, and random generators and counters are set back for the save. Where
weights or states are changing, a save is put off to the end of the step.

A resume. The folder is checked (start.py), the run is compared with that of the checkpoint (run_identity.py), `Trainer`
restores its own files, and then the parts of the run are restored (state.py). If the run was saved before an evaluation
of that step was made, because the job was asked to end, the resumed run makes it before its first step, with the random
numbers of that moment.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
from collections.abc import Callable, Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import broadcast_object_list
from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import IntervalStrategy, SaveStrategy

from hf_hybrid.files import note_base
from hf_hybrid.run.monitor import TrainingDivergedError
from hf_hybrid.run.run import RandomStates
from hf_hybrid.saving import manifest, state
from hf_hybrid.saving.async_save import AsyncSaver, reason_not_async
from hf_hybrid.saving.drift import compare_processes
from hf_hybrid.saving.lock import FolderLock
from hf_hybrid.saving.run_identity import Differences, check_identity, identity_of
from hf_hybrid.saving.start import Start, find, make_room, restoring

logger = logging.getLogger(__name__)


@dataclass
class InStep:
    """Where in a step the training is. The trainer replaces it when a step ends."""

    begun: int | None = None
    """The step whose batches are fetched."""
    before: tuple[RandomStates, int, float] | None = None
    """Random generators, tokens and operations before the first micro-batch."""
    is_changing: bool = False
    """Whether weights or states are changing, so that no state is consistent."""
    save_is_put_off: bool = False
    """Whether a save was asked for meanwhile. It is made at the end of the step."""


class Saver:
    """Saves and resumes the trainings of a trainer, which calls this around its own way of saving."""

    def __init__(self, trainer: Any):
        self._trainer = trainer
        self.writer, self.lock = AsyncSaver(), FolderLock()
        self._reset()

    def _reset(self) -> None:
        self.start = Start()
        self.resumed_from: str | None = None
        """The checkpoint, from when `Trainer` has restored its files until the first batch is read."""
        self.report: state.Report | None = None
        """What the checkpoint brought back and what not; `None` for a new run."""
        self.saved_step: int | None = None
        """The step of the checkpoint that was saved last."""
        self.evaluation_is_due = False
        """Whether the run evaluates before its first step."""
        self._after_evaluation: RandomStates | None = None
        self._differences, self._identity = Differences(), dict[str, Any]()
        self._processes_agreed = False
        self._folder: Path | None = None
        """The checkpoint that is being written, as it will be called."""
        self._hides_checkpoints = False
        self.in_step = InStep()

    # A training begins and ends.

    @property
    def saves_checkpoints(self) -> bool:
        args = self._trainer.args
        return args.save_strategy != SaveStrategy.NO or args.enable_jit_checkpoint

    def begin(self, resume: str | os.PathLike | bool | None) -> None:
        """Begin a training: lock its folder, and find where it starts. All processes start where the first one does."""
        self._reset()
        trainer, outcome = self._trainer, list[Any]([None, None])
        if trainer.is_world_process_zero():
            try:
                outcome[0] = self._find_start(resume)
            except (manifest.CheckpointError, OSError) as error:  # the others wait for it
                outcome[1] = error
                self.lock.release()
        if trainer.accelerator.num_processes > 1:
            broadcast_object_list(outcome)
        start, error = outcome
        if error is not None:
            raise error
        self.start, self.writer.training = start, True
        if trainer.is_world_process_zero():
            for warning in start.warnings:
                logger.warning("%s", warning)

    def _find_start(self, resume: str | os.PathLike | bool | None) -> Start:
        if self._trainer.trial is None:
            self.lock.take(self._trainer.args.output_dir, saves=self.saves_checkpoints)
        elif not resume:  # the folder of a trial has no name yet
            return Start()
        return find(resume, self._trainer.args.output_dir)

    def make_room(self) -> None:
        """
        Move aside what an earlier run left, which this one would overwrite. Delete surplus checkpoints of a run that
        goes on: a full disk gets room for the next.
        """
        trainer, folder = self._trainer, self._trainer.run_folder
        trainer.accelerator.wait_for_everyone()
        if not (self.saves_checkpoints and trainer.args.should_save):
            return
        start = None if self.resumed_from is None else Path(self.resumed_from)
        read_from = getattr(trainer.accelerator.unwrap_model(trainer.model), "name_or_path", None) or ""
        if said := make_room(folder, start, model_is_from_here=Path(read_from).absolute() == folder.absolute()):
            self.start.warnings.append(said)
            logger.warning("%s", said)
        if start is not None and start.resolve().parent == folder.resolve():
            self._rotate(start)

    def restore(self) -> None:
        """Restore the parts of the run, once they have begun, and say what has changed."""
        trainer = self._trainer
        self._identity = identity_of(trainer)
        if self.resumed_from is not None:
            for callback in [*trainer.callback_handler.callbacks, trainer.control]:
                if isinstance(callback, ExportableState):  # which Trainer looks up in what the checkpoint had
                    trainer.state.stateful_callbacks.setdefault(type(callback).__name__, callback.state())
            with restoring(self.resumed_from):
                report = state.restore(trainer, self.resumed_from, self._differences)
            show = trainer.is_world_process_zero() and not trainer.args.disable_tqdm
            state.log_report(report, show=show, has_phases=trainer.has_phases)
            self.evaluation_is_due = report["evaluation_is_due"]
            if trainer.has_phases:
                self.report = {**report, "warnings": self.start.warnings + report["warnings"]}

    # A save.

    @contextlib.contextmanager
    def _as_before_step(self) -> Generator[None]:
        if self.in_step.before is None:
            yield
            return
        trainer, (random, tokens, flos) = self._trainer, self.in_step.before
        more_tokens, more_flos = trainer.state.num_input_tokens_seen - tokens, trainer.current_flos - flos
        trainer.state.num_input_tokens_seen, trainer.current_flos = tokens, flos
        try:
            with random.again():
                yield
        finally:
            self.in_step.before = (random, tokens, trainer.current_flos)
            trainer.state.num_input_tokens_seen = tokens + more_tokens
            trainer.current_flos += more_flos

    def save(self, write: Callable[[], Any], trial: Any) -> None:
        """Write a checkpoint as `Trainer` does (`write`), commit it, and only then delete older ones."""
        trainer = self._trainer
        streamed = trainer.memory.optimizer  # may have updated some layers in the backward pass
        if self.in_step.is_changing or (streamed is not None and streamed.torn is not None):
            logger.info("A checkpoint was asked for inside a leap, a pass or an update: it is saved after the step.")
            self.in_step.save_is_put_off = True
            return
        trainer._end_step()
        folder = Path(trainer._get_output_dir(trial), f"checkpoint-{trainer.state.global_step}")
        self.writer.begin(reason_not_async(trainer))
        try:
            if trainer.args.should_save:
                temporary = folder.parent / manifest.SAVING_NAME
                if os.path.lexists(temporary):  # an interrupt by the user left it, or it is a link
                    manifest.finish_interrupted_saves(folder.parent)
                (temporary / folder.name).mkdir(parents=True, exist_ok=True)
            trainer.accelerator.wait_for_everyone()
            self._folder = folder
            with self._as_before_step():
                trainer.run.before_export()
                if trainer.accelerator.num_processes > 1:
                    self._processes_agreed = compare_processes(trainer, agreed_before=self._processes_agreed)
                    self.check_weights(together=True)
                write()
                self.commit()
                self.saved_step = trainer.state.global_step
        except Exception as error:
            manifest.clean_up_failed_save(folder, error, delete=trainer.args.should_save)
            raise
        finally:
            self._folder = None
            self.writer.abandon()

    def commit(self) -> None:
        """Make the checkpoint whole, give it its name, and delete older ones, once all processes have written it."""
        if self._folder is None:
            return
        trainer, folder, self._folder = self._trainer, self._folder, None
        self._note_best(folder)
        trainer.accelerator.wait_for_everyone()
        if trainer.args.should_save:
            step, in_step = trainer.state.global_step, self.in_step.begun is not None
            best = trainer.state.best_model_checkpoint

            def commit() -> None:
                self.lock.note(step)
                manifest.commit(folder, step, in_step=in_step)
                manifest.rotate(folder.parent, trainer.args.save_total_limit, newest=folder, best=best)

            self.writer.finish(commit, functools.partial(manifest.saving, folder))
        trainer.accelerator.wait_for_everyone()  # the others may load it at once, as the best one

    def committed_folder(self, folder: str) -> str:
        """Commit the checkpoint under way, if there is one, and return its folder; `folder` otherwise."""
        folder = str(self._folder or folder)
        self.commit()
        return folder

    def _note_best(self, folder: Path) -> None:
        """Note which checkpoint is the best. Trainer looks for it where it writes, and only the new one is there."""
        current = self._trainer.state
        best = folder.parent / f"checkpoint-{current.best_global_step}"
        is_there = bool(current.best_global_step) and (best == folder or manifest.is_committed(best))
        if is_there and current.best_model_checkpoint != str(best):
            current.best_model_checkpoint = str(best)
            if self._trainer.args.should_save:
                current.save_to_json(str(manifest.temporary(folder) / manifest.TRAINER_STATE_NAME))

    def _rotate(self, newest: Path) -> None:
        limit, best = self._trainer.args.save_total_limit, self._trainer.state.best_model_checkpoint
        manifest.rotate(self._trainer.run_folder, limit, newest=newest, best=best)

    def add_what_callbacks_saved(self) -> None:
        """Add what callbacks wrote into the checkpoint, in `on_save`, to its manifest. No save is async with such."""
        trainer = self._trainer
        if trainer.args.should_save and self.writer.thread is None:
            manifest.add_what_callbacks_saved(trainer.run_folder / f"checkpoint-{trainer.state.global_step}")

    def place(self, folder: str) -> str:
        """Where `Trainer`, and trainers that add files, write: while a checkpoint is saved a temporary folder."""
        hidden = self._folder is not None or self._hides_checkpoints
        return os.path.join(folder, manifest.SAVING_NAME) if hidden else folder

    @contextlib.contextmanager
    def keeping_the_best(self) -> Generator[None]:
        """Context in which a training is finished: `Trainer`, which may delete all but the best, is shown none."""
        self._hides_checkpoints = True
        try:
            yield
        finally:
            self._hides_checkpoints = False
        trainer, best = self._trainer, self._trainer.state.best_model_checkpoint
        limited = trainer.args.should_save and trainer.args.save_total_limit == 1
        if limited and best is not None and not trainer.preempted:  # which goes on from its last checkpoint
            self._rotate(Path(best))

    # What a checkpoint holds.

    def write_weights(self, output_dir: str | None, state_dict: dict | None, write: Callable[..., Any]) -> None:
        """Write the weights as `Trainer` does (`write`), now or on the thread."""
        trainer = self._trainer
        model = trainer.accelerator.unwrap_model(trainer.model)
        if self.writer.is_async and state_dict is None:
            base = []
            if adapters := getattr(model, "peft_config", {}).keys():  # which alone are written, and name what is theirs
                trained = {weight for group in trainer.optimizer.param_groups for weight in group["params"]}
                named = model.named_parameters()
                base = [value for name, value in named if value not in trained and adapters.isdisjoint(name.split("."))]
            staged = self.writer.staged("weights", model.state_dict(), base)
            state_dict = staged if self.writer.is_async else None

        def save() -> None:
            with trainer.memory.suspended():
                write(output_dir, state_dict)
            if trainer.args.should_save:
                note_base(model, str(output_dir or trainer.args.output_dir))

        self.writer.write(save)

    def write_states(self, output_dir: str, write: Callable[[str], Any]) -> None:
        """Write the states of optimizer (as `Trainer` does: `write`), schedule and run."""
        trainer = self._trainer
        if self.writer.is_async:
            staged = self.writer.staged("optimizer", trainer.optimizer.state_dict())
            self.writer.write(functools.partial(torch.save, staged, os.path.join(output_dir, OPTIMIZER_NAME)))
            torch.save(trainer.lr_scheduler.state_dict(), os.path.join(output_dir, SCHEDULER_NAME))
        else:
            write(output_dir)
        about = {**self._identity, "evaluation_is_due": self._evaluation_follows()}
        about["tokens_of_trl"] = getattr(trainer, "_total_train_tokens", None)  # which Trainer's state does not have
        staged, process = self.writer.staged("parts", trainer.run.state_dict()), trainer.args.process_index
        self.writer.write(functools.partial(state.save_state, output_dir, staged, about, process=process))

    def _evaluation_follows(self) -> bool:
        """Whether an evaluation is made between the save under way and the next step, if the run goes on."""
        trainer, current, preemption = self._trainer, self._trainer.state, self._trainer.preemption
        if trainer.control.should_evaluate or (preemption is not None and preemption.leaves_out_evaluation):
            return True
        at_an_end = bool(current.epoch) and float(current.epoch).is_integer()
        if trainer.args.eval_strategy != IntervalStrategy.EPOCH or not at_an_end:
            return False
        logged_here = (entry for entry in reversed(current.log_history) if entry.get("step") == current.global_step)
        return not any(name.startswith("eval_") for entry in logged_here for name in entry)

    def check_weights(self, *, together: bool = False) -> None:
        """Raise [`TrainingDivergedError`] if weights to save are not finite, on all processes `together`."""
        weights, accelerator = self._trainer.run.weights, self._trainer.accelerator
        are_checked = self._folder is not None and accelerator.num_processes > 1 and not together
        if weights is None or are_checked:
            return
        is_wrong = not weights.are_finite()
        if together:
            is_wrong = bool(accelerator.gather(torch.tensor([is_wrong], device=self._trainer.args.device)).any())
        if is_wrong:
            raise self.diverged(TrainingDivergedError("The weights are not saved."))

    def diverged(self, error: TrainingDivergedError) -> TrainingDivergedError:
        """Return an error that also says what is left to go on from."""
        self.writer.join()
        newest, weights = manifest.last_checkpoint(self._trainer.run_folder), self._trainer.run.weights
        where = f"The last good checkpoint is `{newest}`" if newest else "No checkpoint was saved yet"
        is_good = weights is not None and weights.are_finite()
        held = "are those of the last good step" if is_good else "hold NaN or infinite values too and cannot be used"
        return TrainingDivergedError(
            f"{error} The weights in memory {held}. {where}. Check the data of these steps, or lower `learning_rate`."
        )

    # A resume.

    def compare(self, checkpoint: str) -> None:
        """Compare the run with that of a checkpoint, before optimizer and schedule are restored."""
        self._differences = check_identity(self._trainer, checkpoint)

    def evaluate_if_due(self, ignored_keys: list[str] | None) -> None:
        """Evaluate before the first step of a resumed run, if it was saved before the evaluation of that step."""
        if not self.evaluation_is_due:
            return
        trainer = self._trainer
        trainer._load_rng_state(self.start.folder)
        metrics = trainer._evaluate(trainer.trial, ignored_keys)
        is_best = trainer._determine_best_metric(metrics=metrics, trial=trainer.trial)
        here = trainer.run_folder / f"checkpoint-{trainer.state.global_step}"
        if is_best and manifest.is_committed(here):
            trainer.state.best_model_checkpoint = str(here)
        self._after_evaluation = RandomStates.now(trainer.args.device)

    def restore_random_states(self) -> None:
        """Go on with the random numbers of an evaluation that was due, which has drawn some."""
        if self._after_evaluation is not None:
            self._after_evaluation.restore()
