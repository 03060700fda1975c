"""
`HybridTrainer`: transformers.Trainer in four phases, for models that may not fit.

This module holds Trainer's hooks and no algorithm. They call four objects:

- `self.run`: the list of the run's parts (run/run.py), which build.py makes when a training begins. The monitor, leaps,
  the learning rate, the forecast and the memory guard are parts. Between trainings the list is empty;
- `self.memory`: where weights are kept (streaming/engine.py): `Resident` or `Streamed`;
- `self.recovery`: the part that computes a window again when memory runs out (recovery.py);
- `self.saver`: saves and resumes (saving/saver.py).

A step, from top to bottom: `get_batch_samples` begins it (a leap that is due is made; a skipped step trains on no
batch), `training_step` computes one micro-batch, `_before_update` and `_after_update` run around the optimizer's step,
and `_end_step` closes it.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Iterable, Mapping
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
from accelerate.data_loader import DataLoaderShard
from accelerate.utils import send_to_device
from transformers import DataCollator, PreTrainedModel, Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_callback import CallbackHandler

from hf_hybrid import build
from hf_hybrid.arguments import HybridArguments
from hf_hybrid.compat import warn_of_untested_versions
from hf_hybrid.config import CONFIG_NAME, config_values
from hf_hybrid.files import write_note
from hf_hybrid.hub.publishing import PublishingMixin
from hf_hybrid.leaps.directions import DirectionFactory
from hf_hybrid.leaps.probe import SequenceLosses
from hf_hybrid.machine import check_kernels, copy_to_device_, keep_differentiable
from hf_hybrid.part import Part, Phase, Step, check_parts
from hf_hybrid.plan.accounting import ByteTable
from hf_hybrid.plan.of_trainer import check_streamable
from hf_hybrid.records.log import LogFile
from hf_hybrid.records.of_trainer import ReportingMixin
from hf_hybrid.records.profiler import MemoryProfilerCallback, held_bytes
from hf_hybrid.records.redaction import shareable
from hf_hybrid.recovery import MemoryGuard, OutOfMemoryRecovery, device_probe
from hf_hybrid.run.epochs import Epochs
from hf_hybrid.run.monitor import numbers_of
from hf_hybrid.run.run import DataOrder, RandomStates, Run
from hf_hybrid.run.trainer_view import SEAMS, Code, acts_beside_layers, acts_between, reads_gradients
from hf_hybrid.saving.lock import check_output
from hf_hybrid.saving.manifest import last_checkpoint
from hf_hybrid.saving.preemption import agree_on_preemption
from hf_hybrid.saving.reference import parts_of_reference
from hf_hybrid.saving.saver import InStep, Saver
from hf_hybrid.saving.sharded import load_converted, load_optimizer, load_weights
from hf_hybrid.saving.start import restoring
from hf_hybrid.streaming.engine import Resident
from hf_hybrid.streaming.loss import ChunkedLossSwitch
from hf_hybrid.streaming.units import as_plain

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
        self.trainer.epochs.begin()  # last, because callbacks may draw random numbers
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
        if (streamed := self.trainer.memory.optimizer) is None:
            return super().on_optimizer_step(args, state, control, **kwargs)
        with streamed.showing_used_gradients():
            return super().on_optimizer_step(args, state, control, **kwargs)

    def on_step_end(self, args, state, control, **kwargs):
        self.trainer._end_step()
        return super().on_step_end(args, state, control, **kwargs)

    def on_log(self, args, state, control, logs, **kwargs):
        entry = state.log_history[-1]
        control = super().on_log(args, state, control, logs, **kwargs)
        self.trainer.write_log(entry)  # with what callbacks put into it
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


class HybridTrainerMixin(ReportingMixin, PublishingMixin):
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
    sequence_losses: type[SequenceLosses] = SequenceLosses
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
    loss_switch: type[ChunkedLossSwitch] = ChunkedLossSwitch
    """Class that computes the loss in chunks."""
    rows: Any = None
    """The part that computes batches as trees (rows/), if there is one."""
    blocks_of_rows: int = 1
    """Blocks of rows in a batch: 2 where all chosen completions are followed by all rejected ones, as in TRL."""
    cannot_repeat: str | None = None
    """Why a step of this trainer cannot be computed again after an out-of-memory error, as a sentence."""
    draws_first = False
    """Whether a window first draws what is not drawn again: the trainer notes the random states behind it."""
    rows_at_once: int | None = None
    """Rows of a micro-batch whose loss takes fewer at a time by itself, if memory runs out."""

    def __init__(self, *args, probe_dataset=None, parts=(), direction=None, device_map=None, **kwargs):
        self.run, self.memory, self.parts = Run(), Resident(), []
        self.obstacle: str | None = None
        """Why the run has no phases."""
        self.leap_obstacle: str | None = None
        """Why the run has phases and cannot leap."""
        self.custom_direction, self._device_map, self._memory_is_planned = direction, device_map, False
        self._chunked_loss = self.loss_switch()
        self._held: ByteTable | None = None
        """The bytes held between steps, by category and place."""
        self.saver, self.trial, self._ignored_in_evaluations = Saver(self), None, None
        self.epochs = Epochs(self)
        self._shows_gradients = False
        """Whether gradients of streamed layers are put on the parameters, for code of a user."""
        self._acts, self._acts_beside_layers = (None, None), (None, None)
        """What code of a user acts between micro-batches and beside layers, each behind what it was found out of."""
        super().__init__(*args, **kwargs)
        check_kernels(self.args)
        # One that never leaps is not asked for bits.
        default = HybridArguments() if self.can_leap else HybridArguments(enable_predict=False, share_rows="on")
        self.hybrid_args = options = self.args if isinstance(self.args, HybridArguments) else default
        build.check_muon(self)
        if self._memory_option != "off":
            self._plan_memory()
            self._move_model_to_device(self.model, self.args.device)
        elif device_map is not None:
            raise ValueError("`device_map` says which layers are streamed. Set `memory=auto` or `memory=stream`.")
        self.recovery = OutOfMemoryRecovery(self)
        self.log_file = LogFile(str(self.args.output_dir), writes=self.is_world_process_zero())
        self.memory_guard = MemoryGuard(device_probe(self.args.device), warn_at=options.guard_warn_at)
        if self.is_world_process_zero():
            warn_of_untested_versions()
        keep_differentiable(self.model)
        self.rows = build.rows_part(self) if self.rows is None else self.rows
        if self.rows is not None and not self.draws_first:
            self.rows.repeats = self.recovery.retries and self.accelerator.num_processes == 1
        self.order = DataOrder(self.args.device, self.is_world_process_zero)
        own = [self.order, *([] if self.rows is None else [self.rows]), self.recovery, self.memory_guard]
        self.parts, self.probe_dataset = [*own, *build.memory_parts(self), *self.own_parts(), *parts], probe_dataset
        check_parts(self.parts)
        self.preemption = agree_on_preemption(self)
        self.callback_handler = HookRouter(self)
        if options.sample_prompts is not None:
            from hf_hybrid.integrations import samples

            samples.install(self)
        if options.enable_predict:
            build.prepare_leaps(self)

    def own_parts(self) -> list[Part]:
        """Return the parts that trainers of this kind add to every run."""
        return parts_of_reference(self)

    def passes_beside(self) -> int:
        """Return how many passes without gradients go beside each micro-batch, where a window is walked by layer."""
        return 0

    def begin_again(self) -> None:
        """The window under way is computed again, because memory ran out."""

    @property
    def has_phases(self) -> bool:
        """Whether training goes in phases, with or without leaps. If not, it is plain `Trainer`'s."""
        return self.hybrid_args.enable_predict and self.obstacle is None

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
        return model

    def train(self, resume_from_checkpoint=None, trial=None, *args, **kwargs):
        self.trial = trial
        self.saver.begin(resume_from_checkpoint)
        self.run, self._held = Run(no_leaps=self.obstacle), None  # an error may have ended the last one
        self._ignored_in_evaluations = args[0] if args else kwargs.get("ignore_keys_for_eval")
        self.epochs = Epochs(self)
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
            if self.run.optimizer is not None:  # an error ended the run
                vars(self.run.optimizer).pop("found_inf", None)
            if self._held is None and self.model is not None and self.optimizer is not None:
                self._held = held_bytes(self, self.model, self.optimizer)
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
        self.run = build.start_run(self)
        loader = self.callback_handler.train_dataloader
        if self.rows is not None and isinstance(loader, DataLoaderShard):
            loader.device = None  # rows are laid out on the host, and `get_batch_samples` moves the batches of a step
        self.log_file.begin(self.state.global_step, self.state.max_steps, folder, **self.environment())
        self.epochs.find_place()
        self.run.begin()
        self.saver.restore()
        if self.has_phases and self.args.should_save:
            write_note(folder / CONFIG_NAME, shareable(config_values(self.args)))

    def _load_rng_state(self, checkpoint):
        with restoring(checkpoint):
            super()._load_rng_state(checkpoint)
        self.saver.restore_random_states()
        self.epochs.restore_order()

    def _end_run(self) -> None:
        had_phases = self.run.has_phases
        if had_phases:
            self._held = held_bytes(self, self.model, self.optimizer)
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
        self.saver.evaluation_is_due = self.epochs.is_at_start = False
        in_step, feed, get, there = self.saver.in_step, self.run.feed, super().get_batch_samples, device
        in_step.is_changing = True
        acts = self._who_acts()
        if acts is None and self.rows is not None and self.accelerator.num_processes == 1 and self.args.n_gpu <= 1:
            there = torch.device("cpu")  # where the loader has labels; Trainer would wait for a copy of their count
        with self.order.reading():
            fetch = get if feed is None else functools.partial(feed.fetch, get)
            batches, items = fetch(epoch_iterator, num_batches, there)
        if torch.is_tensor(items) and items.device != device:
            items = copy_to_device_(torch.empty_like(items, device=device), items)
        if batches:
            rate, on_host, rows = 0.0 if feed is None else self._get_learning_rate(), batches, self.rows
            if acts is not None or (rows is not None and rows.in_every_pass):  # else those that are computed are moved
                batches = send_to_device(batches, self.args.device, non_blocking=True)
            self._loss_before = getattr(self, "_tr_loss", torch.zeros(())).clone() if acts is not None else 0.0
            self.run.accumulations.add(self.args.gradient_accumulation_steps)
            step = self.run.begin_step(self.state.global_step, batches, items, rate, on_host, acts)
            if step.phase is Phase.PREDICT:
                batches = batches + batches[-1:] * (num_batches - len(batches))
        in_step.is_changing, in_step.begun = False, self.state.global_step if batches else None
        if self.saver.start.in_step:
            # Saved after its batches were fetched, which may draw random numbers; Trainer restores them before.
            self._load_rng_state(self.saver.start.folder)
            self.saver.start.in_step = False
        return batches, items

    def training_step(self, model, inputs, *args, **kwargs):
        """Compute one micro-batch, or nothing in a skipped step."""
        if self.run.phase is Phase.PREDICT:
            return self._skip_step(model)
        step, items = self.run.step, args[0] if args else kwargs.get("num_items_in_batch")
        if not step.is_arranged:
            self._arrange(step)
        if step.window is not None:  # a part laid it out anew
            inputs = step.window.pop(0)
        elif self.rows is not None:
            inputs = next((there for here, there in zip(step.on_host, step.batches) if here is inputs), inputs)
        if inputs is None:
            model.train()  # as in a skipped step
            return torch.zeros((), device=self.args.device)
        compute = super().training_step
        run: Callable[[Any], torch.Tensor] = lambda inputs: compute(model, inputs, *args, **kwargs)  # noqa: E731
        if self.memory.window is not None:  # layer by layer, the first call computes all of the window
            run = functools.partial(self.memory.window.next, run)
        loss = self.recovery.compute(inputs, functools.partial(self._compute, run), items)
        self.run.count(inputs, loss)
        return loss

    def _who_acts(self) -> str | None:
        """Return what code of a user acts on micro-batches, see [`acts_between`]: found out again where any is new."""
        steps = {*self.run.accumulations, self.args.gradient_accumulation_steps}
        names = attrgetter("on_substep_end", "on_pre_optimizer_step", "on_optimizer_step")
        events = map(names, self.callback_handler.callbacks)
        seams: list[Any] = [vars(self.accelerator).get("backward"), steps, *events]
        if (streamed := self.memory.optimizer) is not None:
            seams += streamed._optimizer_step_pre_hooks.values()
        for place in (self, *type(self).__mro__):
            seams += map(vars(place).get, SEAMS)
        if seams != self._acts[0]:
            self._acts = seams, acts_between(self)
            self._shows_gradients = streamed is not None and (self._acts[1] is not None or reads_gradients(self))
        return self._acts[1]

    def _who_acts_beside_layers(self) -> str | None:
        """Return what code of a user acts there, see [`acts_beside_layers`]: found out again where any is new."""
        losses = [vars(place).get("compute_loss") for place in (self, *type(self).__mro__)]
        seams = Code.of(self.accelerator.unwrap_model(self.model)), losses
        if seams != self._acts_beside_layers[0]:
            layers = [module for unit in self.memory.streamer.layers for module in unit.modules]
            self._acts_beside_layers = seams, acts_beside_layers(self, seams[0], layers)
        return self._acts_beside_layers[1]

    def _arrange(self, step: Step) -> None:
        """Decide how the micro-batches of a step are computed, now that `on_step_begin` has been called."""
        step.is_arranged, self.saver.in_step.is_changing = True, True
        step.acts = self._who_acts()
        if self.rows is not None:
            self.rows.arrange(step)
            if step.window is None and step.batches:  # else what is computed was moved
                step.batches = send_to_device(step.batches, self.args.device, non_blocking=True)
        window = self.memory.window
        if window is not None:
            window.users = self._who_acts_beside_layers()
            clips = (self.args.max_grad_norm or 0) > 0  # a callback may have set it since layers were planned
            window.updates_late = self._shows_gradients or (clips and self.memory.plan.setup.update_in_backward)
            users = (window.users, step.acts, self.compute_loss_func)
            self.memory.streamer.compares = any(code is not None for code in users)
        if window is not None and window.order != "micro_batch" and step.acts is not None:
            logger.warning("Windows are walked micro-batch by micro-batch from here on: %s.", step.acts)
            self.memory.walk_by_micro_batch()
        self.recovery.arrange(step)
        self.saver.in_step.is_changing = False

    def _compute(self, step: Callable[[Any], torch.Tensor], inputs: Any) -> torch.Tensor:
        """Run forward and backward of a micro-batch, or of a part of one after memory ran out."""
        run, rows, window, in_step = self.run, self.rows, self.memory.window, self.saver.in_step
        with contextlib.ExitStack() as afterwards:
            in_step.is_changing = True
            afterwards.callback(setattr, in_step, "is_changing", False)
            if self.memory.evaluated is not None:
                afterwards.enter_context(self.memory.evaluated.holding_heads())
            if window is not None and window.asks:
                window.look(inputs)  # before parts exchange forward passes, whose gradients may be anywhere
            if run.around_forward:
                afterwards.callback(run.call, "after_backward", run.phase)
                run.call("before_forward", run.phase)
            if rows is not None and (rows.in_every_pass or run.step.window is not None):
                afterwards.enter_context(rows.around(self.accelerator.sync_gradients))
            return step(inputs)

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
        with as_plain():  # it asks each parameter for its size, which placeholders have as well
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
        if grad_norm is None and (streamed := self.memory.optimizer) is not None:
            grad_norm = streamed.total_norm(model.parameters(), now=self.has_phases)
        self._gradient_norm = super()._get_grad_norm(model, grad_norm=grad_norm)
        return self._gradient_norm

    def _before_update(self) -> None:
        """Judge the step between clipping and the optimizer's step, and scale the learning rate."""
        self.saver.in_step.is_changing = True  # until the step ends
        run = self.run
        if run.phase is Phase.PREDICT:
            if not run.step.skipped:  # a `training_step` of the user's that does not call ours has trained
                self._withhold_update()
            return
        self.recovery.stepping = True
        if not run.step.is_arranged:
            run.step.losses = [self._tr_loss - self._loss_before]
            if self.rows is not None:
                self.rows.fallbacks.cannot_be_exact("a `training_step` of yours does not call that of this package")
        if not run.has_phases:
            return
        scaler = self.accelerator.scaler
        run.settle()
        numbers = numbers_of(run.step, self._gradient_norm, self.accelerator)
        if run.reads_later:
            run.read_later(numbers)
        elif not run.before_update(numbers.tolist(), scaler=scaler):
            self._withhold_update()
            if scaler is not None:
                scaler.update()  # what it noted of these gradients is over
        run.scale_rates(self.optimizer.param_groups)

    def _after_update(self) -> None:
        self.recovery.stepping = False
        if self.run.has_phases and self.run.phase is not Phase.PREDICT:
            stepped = self.accelerator.sync_gradients and not self.accelerator.optimizer_step_was_skipped
            self.run.after_update(self.optimizer.param_groups, stepped)

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

    def compute_loss(self, model, inputs, *args, **kwargs):
        chunked, given = self._chunked_loss, dict(zip(("return_outputs", "num_items_in_batch"), args)) | kwargs
        items = given.get("num_items_in_batch")
        whole = chunked.loss is None or given.get("return_outputs") or not chunked.applies(model, inputs, items)
        loss = None if whole else chunked.loss
        with contextlib.nullcontext() if loss is None else loss.active(inputs):
            return super().compute_loss(model, inputs, *args, **kwargs)

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
        if self._memory_option != "off" and self.model is not None:
            check_streamable(self.args, self.model, self._device_map)
        super().create_accelerator_and_postprocess()
        if self._memory_option != "off":
            self._prepared, accelerator = [], self.accelerator

            def prepare(model, device_placement=None, evaluation_mode=False):  # it moves when there is a plan
                self._prepared.append(model)
                return type(accelerator).prepare_model(accelerator, model, False, evaluation_mode)

            accelerator.prepare_model = prepare

    def _plan_memory(self) -> None:
        self.memory, self._memory_is_planned = build.build_memory(self, self._device_map), True
        vars(self.accelerator).pop("prepare_model", None)
        streamed = () if self.memory.evaluated is None else self.memory.evaluated.model.children()
        for model in set(self._prepared).difference(streamed):
            if not (getattr(model, "hf_device_map", None) or getattr(model, "is_quantized", False)):  # it lies there
                model.to(self.args.device)
        if self.memory.streams:
            self.args._n_gpu = 1  # no DataParallel: as Trainer does where a model is spread over devices
            self.accelerator.device_placement = False

    def _move_model_to_device(self, model, device):
        # Not before the plan says whether the model moves as a whole; then only if it does.
        if self._memory_option == "off" or (self._memory_is_planned and not self.memory.streams):
            super()._move_model_to_device(model, device)

    def create_optimizer(self, model=None):
        self._chunked_loss.install(self)  # before anything else wraps the head
        if not self.memory.is_for(self.model):  # `model_init` made a new one, or more of it is trained
            self.memory = Resident()  # the last one gives its memory back first
            self._plan_memory()
            self._move_model_to_device(self.model, self.args.device)
        build.build_optimizer(self, self.model if model is None else model)
        self.optimizer = self.memory.wrap(super().create_optimizer(model))
        self.memory.begin()
        return self.optimizer

    # Logging, evaluating, saving: always the real weights and what was really computed.

    def log(self, logs, *args, **kwargs):
        self.run.amend_logs(self.state.global_step, logs)
        super().log(logs, *args, **kwargs)

    def evaluate(self, *args, **kwargs):
        self.run.before_export()
        return super().evaluate(*args, **kwargs)

    def predict(self, *args, **kwargs):
        self.run.before_export()
        return super().predict(*args, **kwargs)

    def prediction_step(self, model, inputs, prediction_loss_only, *args, **kwargs):
        shares = self.rows is not None and prediction_loss_only  # else logits are read in padded rows
        with self.rows.evaluating(self.accelerator.unwrap_model(model)) if shares else contextlib.nullcontext():
            return super().prediction_step(model, inputs, prediction_loss_only, *args, **kwargs)

    def evaluation_loop(self, *args, **kwargs):
        with self.memory.running():
            return super().evaluation_loop(*args, **kwargs)

    def save_model(self, output_dir=None, *args, **kwargs):
        self.run.before_export()
        self.saver.check_weights()
        super().save_model(output_dir, *args, **kwargs)

    def _get_output_dir(self, trial):
        return self.saver.place(super()._get_output_dir(trial))

    def _finalize_training(self, trial, num_train_samples, start_time):
        self.run.settle()
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

    def _load_best_model(self):
        self.saver.writer.wait()
        self.accelerator.wait_for_everyone()
        with self.memory.suspended():
            if not load_converted(self, str(self.state.best_model_checkpoint), self.model):
                super()._load_best_model()

    def push_to_hub(self, *args, **kwargs):
        self.run.before_export()
        return super().push_to_hub(*args, **kwargs)

    def _load_from_checkpoint(self, resume_from_checkpoint, model=None):
        with restoring(resume_from_checkpoint):
            folder, into = resume_from_checkpoint, self.model if model is None else model
            if not (load_weights(self, folder, into) or load_converted(self, folder, into)):
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
            model=model, args=args, data_collator=data_collator, train_dataset=train_dataset,
            eval_dataset=eval_dataset, processing_class=processing_class, model_init=model_init,
            compute_loss_func=compute_loss_func, compute_metrics=compute_metrics, callbacks=callbacks,
            optimizers=optimizers, optimizer_cls_and_kwargs=optimizer_cls_and_kwargs,
            preprocess_logits_for_metrics=preprocess_logits_for_metrics,
            probe_dataset=probe_dataset, parts=parts, direction=direction, device_map=device_map, **kwargs,
        )  # fmt: skip
