"""
`HybridTrainer`: transformers.Trainer in four phases, for models that may not fit.

This module orders what a step, a save, an evaluation and a resume do, so that a checkpoint holds a whole step. It
forwards Trainer's hooks to three objects:

- `self.run`: the list of the run's parts (run/run.py), which build.py makes when a training begins. The monitor, leaps,
  the learning rate, the forecast and the memory guard are parts. Between trainings the list is empty;
- `self.memory`: where weights are kept (streaming/engine.py): `Resident` or `Streamed`;
- `self.recovery`: the part that computes a window again when memory runs out (recovery.py).

A step, from top to bottom: `get_batch_samples` begins it (a leap that is due is made; a skipped step trains on no
batch), `training_step` computes one micro-batch, `_before_update` and `_after_update` run around the optimizer's step,
and `_end_step` closes it.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import os
import tempfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from accelerate.data_loader import DataLoaderShard
from accelerate.utils import send_to_device
from transformers import DataCollator, PreTrainedModel, Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_callback import CallbackHandler
from transformers.trainer_utils import has_length

from hf_hybrid.arguments import HybridArguments
from hf_hybrid.build import (
    adapter_parts,
    build_memory,
    build_optimizer,
    build_run,
    leave_adapters_to_adamw,
    makes_muon,
    phase_memory_parts,
    refuse_other_optimizers,
    rows_part,
    share_optimizer,
    tell_of_kept_defaults,
    tell_of_no_leaps,
)
from hf_hybrid.compat import warn_of_untested_versions
from hf_hybrid.config import CONFIG_NAME, check_leaps, check_training_arguments, config_values, phase_options
from hf_hybrid.files import write_note
from hf_hybrid.hub.publishing import PublishingMixin
from hf_hybrid.leaps.automatic import leaps_are_automatic
from hf_hybrid.leaps.directions.base import DirectionFactory
from hf_hybrid.leaps.probe import SequenceLosses, check_probe_set
from hf_hybrid.machine import (
    LeapObstacleError,
    RandomStates,
    check_kernels,
    check_whole_parameters,
    keep_differentiable,
    warn_of_lone_process,
)
from hf_hybrid.optimizers import check_hidden_matrices
from hf_hybrid.part import Part, Phase, check_parts
from hf_hybrid.plan.accounting import ByteTable
from hf_hybrid.plan.of_trainer import check_streamable
from hf_hybrid.records.log import LogFile
from hf_hybrid.records.profiler import MemoryProfilerCallback, held_bytes
from hf_hybrid.records.progress import install_progress, memory_in_use
from hf_hybrid.records.redaction import shareable
from hf_hybrid.records.summary import HybridSummary, RunPosition
from hf_hybrid.recovery import MemoryGuard, OutOfMemoryRecovery, SmallerProbes, device_probe
from hf_hybrid.run.monitor import TrainingDivergedError
from hf_hybrid.run.run import DataOrder, Run
from hf_hybrid.saving.lock import check_output
from hf_hybrid.saving.manifest import last_checkpoint
from hf_hybrid.saving.preemption import agree_on_preemption, check_thread
from hf_hybrid.saving.saver import InStep, Saver
from hf_hybrid.saving.sharded import load_optimizer, load_weights
from hf_hybrid.saving.start import names_digest, restoring
from hf_hybrid.streaming.engine import Resident
from hf_hybrid.streaming.loss import ChunkedLossSwitch

logger = logging.getLogger(__name__)

SUMMARY_NAME = "hybrid_summary.json"


class HookRouter(CallbackHandler):
    """
    Trainer's callback handler, which also calls the trainer at events for which `Trainer` has no method to override.

    The list of callbacks stays as plain `Trainer` has it: users count, reorder and remove callbacks. A step is closed
    before callbacks see its end, so that one that saves there saves the whole step. Callbacks come first before the
    optimizer steps, because they may change the gradients, and at the end of a run, because they may still read it.
    """

    def __init__(self, trainer: HybridTrainerMixin):
        vars(self).update(vars(trainer.callback_handler))  # its own `__init__` would warn once more of duplicates
        self.trainer = trainer

    def on_train_begin(self, args, state, control, **kwargs):
        self.trainer._begin_run()
        control = super().on_train_begin(args, state, control, **kwargs)
        self.trainer.saver.evaluate_if_due(self.trainer._ignored_in_evaluations)
        return control

    def on_epoch_begin(self, args, state, control, **kwargs):
        control = super().on_epoch_begin(args, state, control, **kwargs)
        self.trainer._begin_epoch()  # last, because callbacks may draw random numbers
        return control

    def on_step_begin(self, args, state, control, **kwargs):
        before = RandomStates.now(args.device), state.num_input_tokens_seen, self.trainer.current_flos
        self.trainer.saver.in_step.before = before  # what the first micro-batch will change
        return super().on_step_begin(args, state, control, **kwargs)

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        control = super().on_pre_optimizer_step(args, state, control, **kwargs)
        self.trainer._before_update()
        return control

    def on_optimizer_step(self, args, state, control, **kwargs):
        self.trainer._after_update()
        return super().on_optimizer_step(args, state, control, **kwargs)

    def on_step_end(self, args, state, control, **kwargs):
        self.trainer._end_step()
        return super().on_step_end(args, state, control, **kwargs)

    def on_log(self, args, state, control, logs, **kwargs):
        entry = state.log_history[-1]
        control = super().on_log(args, state, control, logs, **kwargs)
        self.trainer.log_file.add(entry)  # with what callbacks put into it
        return control

    def on_train_end(self, args, state, control, **kwargs):
        self.trainer.saver.writer.end()  # callbacks may read checkpoints
        control = super().on_train_end(args, state, control, **kwargs)
        self.trainer._end_run()
        return control

    def on_push_begin(self, args, state, control, **kwargs):
        self.trainer._refresh_card()
        return super().on_push_begin(args, state, control, **kwargs)

    def on_save(self, args, state, control, **kwargs):
        if args.push_to_hub:
            self.trainer._watch_uploads()
        control = super().on_save(args, state, control, **kwargs)
        self.trainer.saver.add_what_callbacks_saved()
        return control


class HybridTrainerMixin(PublishingMixin):
    """
    Phase-aware training for any `Trainer` subclass: `class MyTrainer(HybridTrainerMixin, SFTTrainer)`.

    It takes all arguments of the trainer. `args` should be a [`HybridConfig`]. Any other `TrainingArguments` trains
    with the default hybrid options.

    Args:
        probe_dataset (*optional*):
            Sequences that verify leaps, in the form of `train_dataset`. Without it, leaps are verified on the next
            training batches, before training uses them. Never pass the set that you report results on.
        parts (`list[Part]`, *optional*):
            Your own parts of the run, see [`Part`]. They come after those of the package.
        direction (`Callable[[DirectionContext], Direction]`, *optional*):
            Your own [`Direction`] in place of the option `direction`: the class, or a callable that makes one.
        device_map (`dict[str, int | str]`, *optional*):
            Accelerate's form: module name to device. With `memory="stream"` layers on `"cpu"` or `"disk"` are streamed;
            others stay on the device with their optimizer states. Default: the map that the model was loaded with.

    Raises:
        ValueError: If the model has nothing to train, or an option cannot be combined with leaps; the message says what
            to do.

    Attributes:
        memory_guard (`MemoryGuard`): Watches the device at the end of every step. Its `probe` may be replaced.
    """

    model: torch.nn.Module  # there is none between the trials of a search, when nothing asks for it
    optimizer: Any  # accelerate and users wrap it
    lr_scheduler: Any
    current_gradient_accumulation_steps: float
    _tag_names = ["hf-hybrid"]
    sequence_losses = SequenceLosses
    """Class that evaluates the sequences of probes. Trainers with other batches set their own."""
    can_leap = True
    """Whether leaps can be verified. If not, a config without hybrid options trains without leaps."""
    no_leaps_because: str | None = None
    """Why trainers of this kind make no leaps unless a direction is named."""
    more_inputs: Mapping[str, Any] = {}
    """What the trainer gives the model beside the batch. A plan traces the model with it."""
    probe_sequences: int | None = None
    """Sequences of a probe, at least 2. `None`: 8, and fewer where the budget of probes affords no more."""
    trains_preferences = False
    """Whether the loss is that of preference pairs, for which adapters have a lower learning rate by default."""
    rows: Any = None
    """The part that computes batches as trees (rows/), if there is one."""
    cannot_repeat: str | None = None
    """Why a step of this trainer cannot be computed again after an out-of-memory error, as a sentence."""

    def __init__(self, *args, probe_dataset=None, parts=(), direction=None, device_map=None, **kwargs):
        self.run, self.memory, self.parts = Run(), Resident(), []
        self.obstacle: str | None = None
        """Why the run has no phases."""
        self.leap_obstacle: str | None = None
        """Why the run has phases and cannot leap."""
        self.custom_direction, self._device_map, self._memory_is_planned = direction, device_map, False
        self._chunked_loss = ChunkedLossSwitch()
        self._held: ByteTable | None = None
        self.saver, self.trial = Saver(self), None
        self._ignored_in_evaluations = None
        self._scheduled_rates: list[float] = []
        self._next_epoch, self._is_at_epoch, self._around_forward = 0, False, False
        self._epochs_began_at: list[int] = []
        super().__init__(*args, **kwargs)
        check_kernels(self.args)
        self.hybrid_args = (
            self.args if isinstance(self.args, HybridArguments) else HybridArguments(enable_predict=self.can_leap)
        )
        options = self.hybrid_args
        leave_adapters_to_adamw(self)
        if makes_muon(self):
            check_hidden_matrices(self.model)
        if self._memory_option != "off":
            self._plan_memory()
            self._move_model_to_device(self.model, self.args.device)
        elif device_map is not None:
            raise ValueError("`device_map` says which layers are streamed. Set `memory=auto` or `memory=stream`.")
        self.recovery = OutOfMemoryRecovery(self)
        self.log_file = LogFile(str(self.args.output_dir), writes=self.is_world_process_zero())
        self.memory_guard = MemoryGuard(device_probe(self.args.device), warn_at=options.guard_warn_at)
        warn_of_lone_process()
        if self.is_world_process_zero():
            warn_of_untested_versions()
        keep_differentiable(self.model)
        self.rows = rows_part(self) if self.rows is None else self.rows
        self.order = DataOrder(self.args.device, self.is_world_process_zero)
        own = [self.order] if self.rows is None else [self.order, self.rows]
        own += [self.recovery, self.memory_guard, SmallerProbes(self.recovery), *phase_memory_parts(self)]
        own += adapter_parts(self)
        self.parts = [*own, *self.own_parts(), *parts]
        check_parts(self.parts)
        self.probe_dataset: Any = probe_dataset
        self.preemption = agree_on_preemption(self)
        self.callback_handler = HookRouter(self)
        if options.sample_prompts is not None:
            from hf_hybrid.integrations import samples

            samples.install(self)
        if options.enable_predict:
            self._prepare_leaps()

    def own_parts(self) -> list[Part]:
        """Return the parts that trainers of this kind add to every run."""
        return []

    @property
    def has_phases(self) -> bool:
        """Whether training goes in phases, with or without leaps. If not, it is plain `Trainer`'s."""
        return self.hybrid_args.enable_predict and self.obstacle is None

    def _prepare_leaps(self) -> None:
        """Refuse what leaps cannot work with, if they were asked for. Else leave them out."""
        options, direction = self.hybrid_args, self.custom_direction
        check_training_arguments(self.args, options)
        if direction is not None and not callable(direction):
            raise ValueError(
                f"`direction` must be a subclass of `Direction` or a callable that makes one, got `{direction!r}`. "
                "Directions of the package go by name: set the option `direction` of `HybridConfig`."
            )
        try:
            check_leaps(self.args)
            refuse_other_optimizers(self)
            if self.train_dataset is not None:  # otherwise the trainer may only evaluate
                self._check_trainable()
        except LeapObstacleError as error:
            self._leave_out_leaps(error)
        if self.probe_dataset is not None and self.leap_obstacle is None and self.has_phases:
            check_probe_set(self.probe_dataset)
        if self.has_phases:
            install_progress(self)

    def _leave_out_leaps(self, error: LeapObstacleError) -> None:
        """
        Make no leaps, and say why. If nothing else of a run works either, train as plain `Trainer` does. Raise `error`
        if leaps, or phases, were asked for by name.
        """
        if not leaps_are_automatic(self) or phase_options(self.hybrid_args):
            raise error
        if error.leaps_alone:
            self.leap_obstacle = error.reason
            logger.warning("%s So this run makes no leaps.", error.reason)
            return
        self.obstacle = error.reason
        self.run = Run(no_leaps=error.reason)
        logger.warning(
            "%s So this run makes no leaps and trains as plain `Trainer` does: without the divergence monitor, the "
            "rescue of the learning rate and the forecast.",
            error.reason,
        )

    def _check_trainable(self) -> None:
        if not any(parameter.requires_grad for parameter in self.model.parameters()):
            raise ValueError(
                "`model` has no trainable parameters: every `requires_grad` is False. Unfreeze some, or add adapters "
                "(for example with peft) before creating the trainer."
            )
        if not self.is_fsdp_enabled:
            check_whole_parameters(self.model)

    # Reports for users.

    def hybrid_summary(self) -> HybridSummary:
        """
        Return the run so far as plain values: `steps_by_phase`, `real_steps`, `predicted_steps`, `backward_passes`,
        `forward_only_passes`, `leaps_made`, `leaps_by_verdict`, `seconds_by_phase` and more; all zero with
        `enable_predict=False`, which counts nothing because it does nothing. `leaps`, `divergence_events` and
        `learning_rate_scales` have the last entries, and `hybrid_log.jsonl` has all. `no_leaps` says why no leaps are
        made, and is `None` where they are. `memory` is [`memory_summary`]; `out_of_memory` lists what was done each
        time that memory ran out; `forecast` is the last forecast of the final loss (`step`, `loss`, `low`, `high`, and
        the same of the held-out loss in `held_out`), or `None`; `recomputed_layers` counts those that
        `activation_checkpointing="auto"` chose; `resumed` says what a checkpoint brought back and what not, or `None`;
        `failed_savings` lists savings that are off because of an exception, each with it.
        """
        failed = list(dict.fromkeys(why for part in self.parts for why in part.failed))
        found = {"memory": self.memory_summary(), "resumed": self.saver.report, "failed_savings": failed}
        for part in self.parts:  # as they are now; the run's own summary ends with it
            found.update(part.summary())
        return HybridSummary({**self.run.summary(), **found})

    def memory_summary(self) -> dict:
        """
        `held`: bytes by category on device and host at the end of the last training, exact for what is held between
        steps (activations and temporary memory are not); `plan` and `statistics` (loads, bytes moved, seconds waited)
        of streamed layers, `None` where nothing is streamed.
        """
        plan = self.memory.plan
        return {
            "held": None if self._held is None else self._held.to_dict(),
            "plan": None if plan is None else plan.to_dict(),
            "statistics": self.memory.statistics(),
        }

    @property
    def phase_name(self) -> str | None:
        """Phase of the step under way; `None` without leaps."""
        return None if self.run.phase is None else self.run.phase.value

    def run_position(self) -> RunPosition | None:
        """Return the values that progress bars and notebooks show; `None` outside a run, and without leaps."""
        run = self.run
        if not run.has_phases:
            return None
        avoided = run.record.backward_passes_avoided
        used = memory_in_use(self.args.device)
        phase = run.last_phase.value if run.no_leaps is None and run.last_phase is not None else None
        return RunPosition(phase, run.last_loss, avoided, used, run.forecast)

    def export(
        self,
        format: str,
        folder: str | os.PathLike | None = None,
        *,
        eval_dataset: Any = None,
        dtype: str = "auto",
        max_shard_size: str = "50GB",
    ) -> dict[str, Any]:
        """
        Write the model in 16 bits or in a low-bit format, and measure held-out loss, bytes and speed beside those of
        the original.

        Both are loaded from their files, so that memory must have room for them beside the trainer. Adapters are merged
        into their base, which is loaded anew.

        Args:
            format (`str`):
                `merged`, `int8`, `int4`, `nf4`, `bitnet`, or `gguf-` and one of `f16`, `q8_0`, `q5_1`, `q4_m`, `q4_1`,
                `q4_0`.
            folder (`str` or `PathLike`, *optional*):
                Folder to write, which must not exist or be empty. Default: `output_dir` with `-FORMAT` after it.
            eval_dataset (*optional*): Held-out sequences with labels. Default: the trainer's `eval_dataset`.
            dtype (`str`, *optional*):
                Of weights that are not quantised; `auto`: as they are; in `merged` 16 bits (docs/export.md).
            max_shard_size (`str`, *optional*): Of a file of weights. A GGUF file is not split.

        Returns:
            `dict`: What was measured, as in `export.json`; see [`~hf_hybrid.export.exporter.export`].

        Raises:
            ValueError: If the format cannot be written here, with what to install; if `folder` is not empty; if several
                processes train.
        """
        if self.accelerator.num_processes > 1:
            raise ValueError(
                f"`export` runs on one process, got `{self.accelerator.num_processes}`. Save the model, and run "
                f"`hf-hybrid export {self.args.output_dir} --format {format}` afterwards."
            )
        from hf_hybrid.export import exporter

        folder = Path(folder or f"{os.path.abspath(str(self.args.output_dir))}-{format}")
        exporter.check_output(folder)
        folder.absolute().parent.mkdir(parents=True, exist_ok=True)
        held_out: Any = self.eval_dataset if eval_dataset is None else eval_dataset
        batches = None if held_out is None else self.get_eval_dataloader(held_out)
        card = Path(str(self.args.output_dir), "README.md")
        with tempfile.TemporaryDirectory(dir=folder.absolute().parent, prefix=f"_{folder.name}.") as saved:
            self.save_model(saved, _internal_call=True)  # else it would push
            options = {"dtype": dtype, "max_shard_size": max_shard_size}
            return exporter.export(saved, folder, format, batches=batches, card=card, **options)

    # A run begins and ends.

    @property
    def preempted(self) -> bool:
        """Whether the last training was asked to end before its last step, and did (`enable_jit_checkpoint`)."""
        return self.preemption is not None and self.preemption.ended

    @property
    def run_folder(self) -> Path:
        """Where the run leaves its files: `output_dir`, or in a hyperparameter search the folder of the trial in it."""
        return Path(super()._get_output_dir(self.trial))

    def call_model_init(self, trial=None):
        """Make the model of a training. In a search each trial has its own, and between trials there is none."""
        model = super().call_model_init(trial)
        keep_differentiable(model)
        self._tag(model)
        self.saver.start.model = names_digest(model)
        return model

    def train(self, resume_from_checkpoint=None, trial=None, *args, **kwargs):
        self.trial = trial
        self.saver.begin(resume_from_checkpoint)
        self.run, self._around_forward = Run(no_leaps=self.obstacle), False  # an error may have ended the last one
        self._held = None
        self._ignored_in_evaluations = args[0] if args else kwargs.get("ignore_keys_for_eval")
        self._epochs_began_at = []
        self.recovery.reset()
        profilers = [call for call in self.callback_handler.callbacks if isinstance(call, MemoryProfilerCallback)]
        if self.hybrid_args.profile_memory and not profilers:
            profilers = [MemoryProfilerCallback()]
        for profiler in profilers:
            profiler.attach(self)
        try:
            output = super().train(self.saver.start.folder, trial, *args, **kwargs)
        except Exception as error:
            explained = self.recovery.explain(error)
            if explained is error:
                raise
            raise explained from error
        finally:
            self.saver.writer.end()
            if self.preemption is not None:
                self.preemption.give_back()
            for part in self.parts:
                part.clean_up()
            self.recovery.end()
            if self._held is None and self.model is not None and self.optimizer is not None:
                self._measure_memory()
            self.memory.end()
            self._chunked_loss.remove()
            self.saver.in_step = InStep()
            self.saver.lock.release()
        if not self.has_phases:
            self.log_file.move_into_checkpoint(last_checkpoint(self.run_folder))
        elif "train_loss" in output.metrics:
            output = output._replace(training_loss=output.metrics["train_loss"])
        return output

    def _begin_run(self) -> None:
        """Begin the run, after Trainer has made everything and restored its own part of a checkpoint."""
        folder = self.run_folder
        self.saver.make_room()
        share_optimizer(self)
        try:
            if self.has_phases:
                self._check_trainable()
            self.run = build_run(self)
        except LeapObstacleError as error:
            self._leave_out_leaps(error)
            self.run = build_run(self)
        self._keep_batches_on_host()
        self.log_file.begin(self.state.global_step, self.state.max_steps, folder, phases=self.has_phases)
        if self.has_phases:
            tell_of_no_leaps(self)
        tell_of_kept_defaults(self)
        self._next_epoch, self._scheduled_rates = self._place_in_data()[0], []
        self._around_forward = self.run.listens("before_forward", "after_backward")
        self.run.begin()
        self.saver.restore()
        if self.has_phases and self.args.should_save:
            write_note(folder / CONFIG_NAME, shareable(config_values(self.args)))

    def _keep_batches_on_host(self) -> None:
        """
        Let the loader of this training leave batches on the host where rows may be laid out anew.

        `get_batch_samples` moves those of a step. Before, the layout looks at them without waiting for the device.
        """
        loader = self.callback_handler.train_dataloader
        if self.rows is not None and isinstance(loader, DataLoaderShard):
            loader.device = None

    def _load_rng_state(self, checkpoint):
        with restoring(checkpoint):
            super()._load_rng_state(checkpoint)
        self.saver.restore_random_states()
        if self._is_at_epoch:
            self.order.enter(self._next_epoch - 1, self.callback_handler.train_dataloader)

    def _place_in_data(self) -> tuple[int, int]:
        """Return the epoch that Trainer enters next, and how many of its batches a resume skips."""
        loader, accumulation = self.callback_handler.train_dataloader, self.args.gradient_accumulation_steps
        if not has_length(loader):
            return int(self.state.epoch or 0), 0
        epoch, steps = divmod(self.state.global_step, max(-(-len(loader) // accumulation), 1))
        return epoch, 0 if self.args.ignore_data_skip else steps * accumulation

    def _begin_epoch(self) -> None:
        self._epochs_began_at = [*self._epochs_began_at, self.state.global_step][-3:]
        if len(self._epochs_began_at) == 3 and len(set(self._epochs_began_at)) == 1:  # a resumed pass may be at its end
            raise ValueError(
                f"Two passes through `train_dataset` made no step: it gives fewer batches than "
                f"`gradient_accumulation_steps={self.args.gradient_accumulation_steps}`. Lower that or "
                "`per_device_train_batch_size`, or pass more data."
            )
        feed, loader = self.run.feed, self.callback_handler.train_dataloader
        epoch, self._next_epoch, self._is_at_epoch = self._next_epoch, self._next_epoch + 1, True
        self.order.enter(epoch, loader)
        if feed is None:
            return
        if has_length(loader) and len(loader) == 0:
            raise ValueError(
                f"`train_dataset` gives no batch: `dataloader_drop_last={self.args.dataloader_drop_last}` drops one "
                f"with fewer rows than `per_device_train_batch_size={self.args.per_device_train_batch_size}`. Lower "
                "the batch size, or pass more data."
            )
        feed.enter(epoch)
        if self.saver.resumed_from is not None:
            ours, self.saver.resumed_from = feed.begun, None
            if not ours:
                feed.trained = self._place_in_data()[1]
        else:  # Trainer does not know how often a resumed run has gone through a stream, which may differ by epoch
            ours = self.saver.report is not None and not has_length(loader)
        if ours:
            feed.read(loader)
            self._is_at_epoch = False

    def _end_run(self) -> None:
        had_phases, self._around_forward = self.run.has_phases, False
        if had_phases:
            self._measure_memory()
        self.run.end()
        if had_phases and self.args.should_save:
            write_note(self.run_folder / SUMMARY_NAME, shareable(self.hybrid_summary()))

    # One step.

    def get_batch_samples(self, epoch_iterator, num_batches, device):
        """Begin a step, unless the run was resumed at its end: Trainer would train one step more."""
        if 0 < self.state.max_steps <= self.state.global_step:
            logger.info("The run is at step %d, its last one: nothing is left to train.", self.state.global_step)
            self.control.should_training_stop = True
            return [], None
        if self.saver.evaluation_is_due and self.control.should_training_stop:  # which a callback decided in it
            return [], None
        self.saver.evaluation_is_due = self._is_at_epoch = False
        in_step, feed = self.saver.in_step, self.run.feed
        in_step.is_changing = True
        with self.order.reading():
            if feed is None:
                batches, items = super().get_batch_samples(epoch_iterator, num_batches, device)
            else:
                feed.open(epoch_iterator)
                coming = feed.peek(num_batches)
                if coming:
                    batches, items = super().get_batch_samples(iter(coming), len(coming), device)
                else:
                    batches, items = [], None  # a stream has ended
        if batches:
            rate, on_host = 0.0 if feed is None else self._get_learning_rate(), batches
            if self.rows is not None:
                batches = send_to_device(batches, self.args.device, non_blocking=True)
            step = self.run.begin_step(self.state.global_step, batches, items, rate, on_host)
            if step.phase is Phase.PREDICT:  # trains on none of them: they stay the next
                batches = batches + batches[-1:] * (num_batches - len(batches))
            elif feed is not None:
                feed.begin(len(batches))
        in_step.is_changing, in_step.begun = False, self.state.global_step if batches else None
        if self.saver.start.in_step:
            # Saved after its batches were fetched, which may draw random numbers; Trainer restores them before.
            self._load_rng_state(self.saver.start.folder)
            self.saver.start.in_step = False
        return batches, items

    def training_step(self, model, inputs, num_items_in_batch=None):
        """Compute one micro-batch, or nothing in a skipped step."""
        if self.run.phase is Phase.PREDICT:
            return self._skip_step(model)
        if self.run.step.window is not None:  # a part laid it out anew
            inputs = self.run.step.window.pop(0)
        if inputs is None:
            model.train()  # as in a skipped step
            return torch.zeros((), device=self.args.device)
        step = functools.partial(super().training_step, model, num_items_in_batch=num_items_in_batch)
        if self.memory.window is not None:  # layer by layer, the first call computes all of the window
            step = functools.partial(self.memory.window.next, step)
        loss = self.recovery.compute(inputs, functools.partial(self._compute, step), num_items_in_batch)
        self.run.count(inputs, loss)
        return loss

    def _compute(self, step: Callable[[Any], torch.Tensor], inputs: Any) -> torch.Tensor:
        """Run forward and backward of a micro-batch, or of a part of one after memory ran out."""
        laid_out, in_step = self.run.step.window is not None, self.saver.in_step
        in_step.is_changing = True
        try:
            with self.rows.around() if laid_out else contextlib.nullcontext():
                if self._around_forward:
                    self.run.call("before_forward", self.run.phase)
                return step(inputs)
        finally:
            in_step.is_changing = False
            if self._around_forward:
                self.run.call("after_backward", self.run.phase)

    def _skip_step(self, model) -> torch.Tensor:
        model.train()  # as a real step does: TRL tells by it which metrics it logs
        self._withhold_update()
        self.run.step.skipped += 1
        return torch.zeros((), device=self.args.device)

    def _withhold_update(self) -> None:
        """Withhold the optimizer's step in a skipped step, because some optimizers act without gradients."""
        self.accelerator.gradient_state._set_sync_gradients(False)
        self.memory.discard_gradients()

    # A skipped step trains on nothing: its batch is that of the next real step, and counts there.

    def floating_point_ops(self, inputs):
        return 0 if self.run.phase is Phase.PREDICT else super().floating_point_ops(inputs)

    def _track_num_input_tokens(self, inputs):
        if self.run.phase is not Phase.PREDICT:
            super()._track_num_input_tokens(inputs)

    def _clip_grad_norm(self, model):
        if (streamed := self.memory.optimizer) is None:
            return super()._clip_grad_norm(model)
        # With leaps the direction reads clipped gradients before the optimizer does.
        return streamed.clip(model.parameters(), self.args.max_grad_norm, now=self.has_phases)

    def _get_grad_norm(self, model, grad_norm=None):
        if grad_norm is None and self.memory.optimizer is not None:
            grad_norm = self.memory.optimizer.total_norm(model.parameters())
        self._gradient_norm = super()._get_grad_norm(model, grad_norm=grad_norm)
        return self._gradient_norm

    def _before_update(self) -> None:
        """Judge the step between clipping and the optimizer's step, and scale the learning rate."""
        self.saver.in_step.is_changing = True  # until the step ends
        run = self.run
        if run.phase is Phase.PREDICT:
            return
        self.recovery.stepping = True
        if not run.has_phases:
            return
        loss, norm = self._loss_and_norm()
        try:
            if loss is not None and math.isfinite(loss) and self._overflowed(norm):
                run.step.counts = False  # the scaler leaves the update out, and the parts are shown nothing
            elif not run.before_update(loss, norm, self.accuracy_of_step()):
                self._withhold_update()
                if self.accelerator.scaler is not None:
                    self.accelerator.scaler.update()  # what it noted of these gradients is over
        except TrainingDivergedError as error:
            raise self.saver.diverged(error) from None
        # The learning rate is scaled here and nowhere else; `_after_update` takes the factor out again.
        scale = run.rate_scale
        self._scheduled_rates = [group["lr"] for group in self.optimizer.param_groups]
        for group in self.optimizer.param_groups:
            group["lr"] = group["lr"] * scale

    def _loss_and_norm(self) -> tuple[float | None, float]:
        """
        Return loss and gradient norm of the step. The loss is the mean over all processes, `None` if no token has a
        label. The host waits once for the device, and once more if the loss is not finite.
        """

        def mean(numbers: torch.Tensor) -> torch.Tensor:
            several = self.accelerator.num_processes > 1
            return self.accelerator.reduce(numbers, reduction="mean") if several else numbers

        losses, norm = torch.stack(self.run.step.losses), self._gradient_norm
        total = mean(losses.sum())
        if type(norm) is torch.Tensor and norm.device == total.device:  # FSDP2 has another class
            loss, norm = torch.stack([total.double(), norm.double()]).tolist()
        else:
            loss, norm = total.item(), float(norm)
        if math.isfinite(loss):
            return loss, norm
        labelled = self._labelled().to(losses.device)  # all processes come here, or none
        total = torch.stack([losses.where(labelled, 0).sum(), labelled.sum().to(losses.dtype)])
        loss, count = mean(total).tolist()
        return loss if count else None, norm

    def _overflowed(self, gradient_norm: float) -> bool:
        """
        Whether gradients are infinite because the gradient scaler of fp16 multiplied the loss by too much. It finds its
        factor that way, and lowers it now. Gradients that overflow below a factor of 1 are the training's fault.
        """
        scaler = self.accelerator.scaler
        return scaler is not None and not math.isfinite(gradient_norm) and scaler.get_scale() >= 1

    def _labelled(self) -> torch.Tensor:
        """Return which micro-batches of a step have labels, as far as that is known. The others gave 0 / 0."""
        step = self.run.step
        found = torch.ones(len(step.losses), dtype=torch.bool)
        if step.items is not None:
            return found & torch.as_tensor(step.items).bool().any().cpu()
        labels = [batch["labels"] for batch in step.batches if isinstance(batch, Mapping) and "labels" in batch]
        if len(labels) != len(step.losses) or not all(map(torch.is_tensor, labels)):
            return found
        return torch.stack([label[..., label.dim() > 1 :].ne(-100).any().cpu() for label in labels])

    def _after_update(self) -> None:
        self.recovery.stepping = False
        if not self.run.has_phases or self.run.phase is Phase.PREDICT:
            return
        groups = self.optimizer.param_groups
        if self.accelerator.sync_gradients and not self.accelerator.optimizer_step_was_skipped:
            self.run.after_update([float(group["lr"]) * group.get("rate_scale", 1.0) for group in groups])
        # Schedulers of the chained kind compute the next rate from the last: leave them theirs.
        for group, rate in zip(groups, self._scheduled_rates):
            group["lr"] = rate

    def _end_step(self) -> None:
        """Close the step under way, once, if Trainer has counted it."""
        if self.saver.writer.error is not None:
            self.saver.writer.wait()
        if self.saver.in_step.begun in (None, self.state.global_step):
            return
        put_off, self.saver.in_step = self.saver.in_step.save_is_put_off, InStep()
        step = self.run.end_step()
        # Every process would have to save, and each sees its own device only.
        self.control.should_save |= put_off or (step.asks_save and self.accelerator.num_processes == 1)

    # The loss.

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        compute = functools.partial(super().compute_loss, model, inputs, return_outputs, num_items_in_batch)
        chunked = self._chunked_loss
        if chunked.loss is None or return_outputs or not chunked.applies(model, inputs, num_items_in_batch):
            return compute()
        with chunked.active(inputs):
            return compute()

    def accuracy_of_step(self) -> float | None:
        """Return the share of the preference pairs of the step under way, of all processes, that are ranked right."""
        return None

    @property
    def loss_in_chunks(self) -> bool:
        """Whether the training loss is computed without holding all logits."""
        return self._chunked_loss.in_use

    # Where weights live.

    @property
    def _memory_option(self) -> str:
        return getattr(self.args, "memory", "off")  # read while Trainer is still being built

    def create_accelerator_and_postprocess(self):
        # The first thing that Trainer does with the model: what cannot work is refused before the model moves.
        check_output(str(self.args.output_dir))
        check_thread(self.args)
        if self._memory_option != "off" and self.model is not None:
            check_streamable(self.args, self.model, self._device_map)
        super().create_accelerator_and_postprocess()

    def _plan_memory(self) -> None:
        self.memory, self._memory_is_planned = build_memory(self, self._device_map), True
        if self.memory.streams:
            self.args._n_gpu = 1  # no DataParallel: as Trainer does where a model is spread over devices
            self.accelerator.device_placement = False

    def _move_model_to_device(self, model, device):
        # Not before the plan says whether the model moves as a whole; then only if it does.
        if self._memory_option == "off" or (self._memory_is_planned and not self.memory.streams):
            super()._move_model_to_device(model, device)

    def create_optimizer(self, model=None):
        self._chunked_loss.install(self)  # before anything else wraps the head
        if not self.memory.is_for(self.model):  # `model_init` made a new one
            self._plan_memory()
        build_optimizer(self, self.model if model is None else model)
        self.optimizer = self.memory.wrap(super().create_optimizer(model))
        self.memory.begin()
        return self.optimizer

    def _measure_memory(self) -> None:
        """Return the bytes held between steps, by category and place."""
        self._held = held_bytes(self, self.model, self.optimizer)

    # Logging, evaluating, saving: always the real weights and what was really computed.

    def log(self, logs, *args, **kwargs):
        self.run.amend_logs(self.state.global_step, logs)
        super().log(logs, *args, **kwargs)

    def _show_real_weights(self) -> None:
        self.run.call("before_export")

    def evaluate(self, *args, **kwargs):
        self._show_real_weights()
        return super().evaluate(*args, **kwargs)

    def predict(self, *args, **kwargs):
        self._show_real_weights()
        return super().predict(*args, **kwargs)

    def prediction_step(self, model, inputs, prediction_loss_only, *args, **kwargs):
        shares = self.rows is not None and prediction_loss_only  # else logits are read in padded rows
        with self.rows.evaluating(self.accelerator.unwrap_model(model)) if shares else contextlib.nullcontext():
            return super().prediction_step(model, inputs, prediction_loss_only, *args, **kwargs)

    def evaluation_loop(self, *args, **kwargs):
        with self.memory.running():
            return super().evaluation_loop(*args, **kwargs)

    def save_model(self, output_dir=None, *args, **kwargs):
        self._show_real_weights()
        self.saver.check_weights()
        super().save_model(output_dir, *args, **kwargs)

    def _get_output_dir(self, trial):
        return self.saver.place(super()._get_output_dir(trial))

    def _finalize_training(self, trial, num_train_samples, start_time):
        with self.saver.keeping_the_best():
            return super()._finalize_training(trial, num_train_samples, start_time)

    def _save_checkpoint(self, model, trial):
        self.saver.save(functools.partial(super()._save_checkpoint, model, trial), trial)

    def _push_from_checkpoint(self, checkpoint_folder):
        super()._push_from_checkpoint(self.saver.committed_folder(checkpoint_folder))  # before its files are collected

    def _save(self, output_dir=None, state_dict=None):
        self.saver.write_weights(output_dir, state_dict, super()._save)

    def _save_optimizer_and_scheduler(self, output_dir):
        self.saver.write_states(output_dir, super()._save_optimizer_and_scheduler)
        self.recovery.saved_step = self.state.global_step

    def _load_best_model(self):
        self.saver.writer.wait()
        self.accelerator.wait_for_everyone()
        with self.memory.suspended():
            super()._load_best_model()

    def push_to_hub(self, *args, **kwargs):
        self._show_real_weights()
        return super().push_to_hub(*args, **kwargs)

    def _load_from_checkpoint(self, resume_from_checkpoint, model=None):
        with restoring(resume_from_checkpoint):
            if not load_weights(self, resume_from_checkpoint, self.model if model is None else model):
                super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_optimizer_and_scheduler(self, checkpoint):
        with restoring(checkpoint):
            if checkpoint is not None:
                self.saver.compare(checkpoint)
            if checkpoint is None or not load_optimizer(self, checkpoint):
                super()._load_optimizer_and_scheduler(checkpoint)
        self.saver.resumed_from = checkpoint  # Trainer restores before it announces the run; our own state follows

    def _load_scaler(self, checkpoint):
        with restoring(checkpoint):
            super()._load_scaler(checkpoint)


class HybridTrainer(HybridTrainerMixin, Trainer):
    """
    Drop-in for [`~transformers.Trainer`] that trains in phases: Warmup, Full, Predict, Correct.

    In Predict the weights leap along a predicted displacement, and the steps that the leap is worth are skipped. By
    default there are no leaps with adapters and on pretrained models, where they did not pay. With
    `enable_predict=False` it is bit-identical to `Trainer`.

    Args:
        model to preprocess_logits_for_metrics:
            As [`~transformers.Trainer`], in the same order; `args` should be a [`HybridConfig`].
        probe_dataset, parts, direction, device_map:
            As [`HybridTrainerMixin`].
        kwargs:
            Arguments that a later version of `Trainer` adds.

    Example:

    ```python
    from hf_hybrid import HybridConfig, HybridTrainer

    trainer = HybridTrainer(model, HybridConfig("out", max_steps=300), train_dataset=dataset)
    trainer.train()
    print(trainer.hybrid_summary()["steps_by_phase"])
    ```
    """

    def __init__(
        self,
        model: PreTrainedModel | torch.nn.Module | None = None,
        args: TrainingArguments | None = None,
        data_collator: DataCollator | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        model_init: Callable[..., PreTrainedModel] | None = None,
        compute_loss_func: Callable | None = None,
        compute_metrics: Callable | None = None,
        callbacks: list[TrainerCallback] | None = None,
        optimizers: tuple[torch.optim.Optimizer | None, Any] = (None, None),
        optimizer_cls_and_kwargs: tuple[type[torch.optim.Optimizer], dict[str, Any]] | None = None,
        preprocess_logits_for_metrics: Callable | None = None,
        *,
        probe_dataset: Any = None,
        parts: Iterable[Part] = (),
        direction: DirectionFactory | None = None,
        device_map: dict[str, int | str] | None = None,
        **kwargs,
    ):
        super().__init__(
            model=model,
            args=args,
            data_collator=data_collator,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            processing_class=processing_class,
            model_init=model_init,
            compute_loss_func=compute_loss_func,
            compute_metrics=compute_metrics,
            callbacks=callbacks,
            optimizers=optimizers,
            optimizer_cls_and_kwargs=optimizer_cls_and_kwargs,
            preprocess_logits_for_metrics=preprocess_logits_for_metrics,
            probe_dataset=probe_dataset,
            parts=parts,
            direction=direction,
            device_map=device_map,
            **kwargs,
        )
