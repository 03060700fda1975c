"""`HybridTrainer`: transformers.Trainer whose hooks are routed to the prediction engine. No algorithm lives here."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from transformers import DataCollator, PreTrainedModel, Trainer, TrainerCallback, TrainingArguments

from hf_hybrid.assembly import build_engine
from hf_hybrid.callbacks import HookRouter
from hf_hybrid.config import CONFIG_NAME, check_training_arguments, config_values
from hf_hybrid.leaps.clocks import LeapClock
from hf_hybrid.leaps.data import BatchFeed, check_probe_set, hold_out, tokens_of
from hf_hybrid.leaps.directions.base import DirectionFactory
from hf_hybrid.leaps.divergence import TrainingDivergedError
from hf_hybrid.leaps.engine import PredictionEngine
from hf_hybrid.leaps.probing import SequenceLosses, keep_differentiable
from hf_hybrid.leaps.record import RunRecord, StepWindow
from hf_hybrid.memory_setup import memory_plugins
from hf_hybrid.phase_recovery import SmallerProbes, before_update, begin_step, build, end_step
from hf_hybrid.phases import Phase, PhasePlugin, PluginContext, PluginList
from hf_hybrid.processes import check_whole_parameters, warn_of_lone_process
from hf_hybrid.recovering_trainer import RecoveringTrainerMixin
from hf_hybrid.report.profiler import MemoryProfilerCallback
from hf_hybrid.report.progress import install_progress, memory_in_use
from hf_hybrid.report.publishing import PublishingMixin
from hf_hybrid.report.summary import HybridSummary, RunPosition
from hf_hybrid.resuming import restore, resume_values, tell
from hf_hybrid.state_io import last_complete_checkpoint, save_hybrid_state, write_json

logger = logging.getLogger(__name__)

SUMMARY_NAME = "hybrid_summary.json"


class HybridTrainerMixin(RecoveringTrainerMixin, PublishingMixin):
    """
    Phase-aware training for any `Trainer` subclass: `class MyTrainer(HybridTrainerMixin, SFTTrainer)`.

    Takes everything that the trainer takes. `args` is best a [`HybridConfig`]; any other `TrainingArguments` trains
    with the default hybrid options.

    Args:
        probe_dataset (*optional*):
            Held-out sequences that verify leaps, in the form of `train_dataset`. Without it, `probe_samples` sequences
            are taken out of `train_dataset`. Never pass the set that you report results on.
        plugins (`list[PhasePlugin]`, *optional*):
            Parts that follow the phases.
        direction (`Callable[[DirectionContext], Direction]`, *optional*):
            Your own [`Direction`], used instead of the option `direction`: a subclass, or a callable that makes one.

    Raises:
        ValueError: If the model has nothing to train, the data cannot be split, or an option cannot be combined with
            leaps; the message says what to do.
    """

    _tag_names = ["hf-hybrid"]
    sequence_losses = SequenceLosses
    """What evaluates held-out sequences; trainers whose batches are of another form have their own."""

    def __init__(self, *args, probe_dataset=None, plugins=(), direction=None, **kwargs):
        self.custom_direction = direction  # before plans are made, which count its buffers
        super().__init__(*args, **kwargs)
        warn_of_lone_process()
        keep_differentiable(self.model)
        self._clock = LeapClock(self.args.device)
        recovering = (self.memory_guard, SmallerProbes(self._recovery))
        self.plugins = PluginList([*recovering, *memory_plugins(self), self._clock, *plugins])
        self.probe_dataset = probe_dataset
        self._engine: PredictionEngine | None = None
        self._summary = RunRecord().summary()
        self._resumed_from: str | None = None
        self._resumed: dict[str, Any] | None = None
        if not self.hybrid_args.enable_predict:
            return
        check_training_arguments(self.args, self.hybrid_args)
        if direction is not None and not callable(direction):
            raise ValueError(
                f"`direction` must be a subclass of `Direction` or a callable that makes one, got `{direction!r}`. "
                "Directions of the package go by name: set the option `direction` of `HybridConfig`."
            )
        if not any(parameter.requires_grad for parameter in self.model.parameters()):
            raise ValueError(
                "`model` has no trainable parameters: every `requires_grad` is False. Unfreeze some, or add adapters "
                "(for example with peft) before creating the trainer."
            )
        check_whole_parameters(self.model)
        if probe_dataset is None:
            samples, seed = self.hybrid_args.probe_samples, self.args.seed
            self.train_dataset, self.probe_dataset = hold_out(self.train_dataset, samples, seed)
        check_probe_set(self.probe_dataset)
        self.add_callback(HookRouter(self))
        install_progress(self)  # behind the router: the bar shows the step that it closed

    # What users read.

    def hybrid_summary(self) -> HybridSummary:
        """
        What happened in the run so far, as plain values: `steps_by_phase`, `real_steps`, `predicted_steps`,
        `backward_passes`, `forward_only_passes`, `leaps`, `divergence_events`, `seconds_by_phase` and more; all zero
        with `enable_predict=False`, which counts nothing because it does nothing. `memory` is [`memory_summary`];
        `out_of_memory` lists what was done each time that memory ran out; `resumed` says what a checkpoint brought
        back and what not, `None` for a run that began anew.
        """
        summary = self._summary if self._engine is None else self._engine.summary()
        events = list(self._recovery.events)
        found = {"memory": self.memory_summary(), "out_of_memory": events, "resumed": self._resumed}
        return HybridSummary({**summary, **found})

    @property
    def phase_name(self) -> str | None:
        return None if self._engine is None else self._engine.phase.value

    def run_position(self) -> RunPosition | None:
        """What progress bars and notebooks show; `None` outside of a run, and without phases."""
        if (engine := self._engine) is None:
            return None
        loss, avoided = (engine.signals.losses or [None])[-1], engine.record.backward_passes_avoided
        return RunPosition(engine.last_phase.value, loss, avoided, memory_in_use(self.args.device))

    # A run begins and ends.

    def train(self, resume_from_checkpoint=None, *args, **kwargs):
        if resume_from_checkpoint is True and self.hybrid_args.enable_predict:
            checkpoint, broken = last_complete_checkpoint(self.args.output_dir)
            for folder in broken:
                logger.warning("`%s` was not written to its end and is passed over.", folder)
            resume_from_checkpoint = checkpoint or True  # True: Trainer says that there is none
        self._resumed_from = self._resumed = None
        for callback in list(self.callback_handler.callbacks):
            if isinstance(callback, MemoryProfilerCallback):
                callback.attach(self)
        output = super().train(resume_from_checkpoint, *args, **kwargs)
        if self.hybrid_args.enable_predict and "train_loss" in output.metrics:
            output = output._replace(training_loss=output.metrics["train_loss"])
        return output

    def _start(self) -> None:
        """Everything that Trainer makes for a run is there: build the engine, or restore it."""
        self._engine = build(lambda: build_engine(self), self.hybrid_args, self._recovery)
        self._feed = BatchFeed()
        self._next_epoch = int(self.state.epoch or 0)
        self._logged, self._trained = StepWindow(), StepWindow()
        self._scheduled_rates: list[float] | None = None
        self._tokens = 0
        context = PluginContext(self.model_wrapped, self._engine.trajectory.optimizer, self.state.max_steps)
        self.plugins.call("on_train_begin", context)
        if self._resumed_from is not None:
            self._resumed = restore(self, self._resumed_from)
            tell(self._resumed, show=self.is_world_process_zero() and not self.args.disable_tqdm)
        if self.args.should_save:
            write_json(Path(self.args.output_dir) / CONFIG_NAME, config_values(self.args))

    def _enter_epoch(self) -> None:
        self._feed.enter(self._next_epoch)
        if self._resumed_from is not None:
            self._feed.resume(self.callback_handler.train_dataloader)
            self._resumed_from = None
        self._next_epoch += 1

    def _finish(self) -> None:
        self.plugins.call("on_train_end")
        self._measure_memory(self._engine.trajectory.tensors_held())
        self._summary, self._engine = self._engine.summary(), None
        if self.args.should_save:
            write_json(Path(self.args.output_dir) / SUMMARY_NAME, self.hybrid_summary())

    # One step.

    def get_batch_samples(self, epoch_iterator, num_batches, device):
        if self._engine is None:
            return super().get_batch_samples(epoch_iterator, num_batches, device)
        self._scheduled_rate = self._get_learning_rate()
        if self._begin_phase() is Phase.PREDICT:
            self._feed.passed_over += num_batches
            return [{} for _ in range(num_batches)], None
        batches, items = super().get_batch_samples(self._feed.source(epoch_iterator), num_batches, device)
        self._feed.fetched += len(batches)
        return batches, items

    def _begin_phase(self) -> Phase:
        """Make the leap that is due; the phase of the step."""
        engine = self._engine
        with self._clock.leap() if engine.controller.leap_pending else contextlib.nullcontext():
            return begin_step(engine, self.state.global_step, self._recovery)

    def training_step(self, model, inputs, num_items_in_batch=None):
        engine = self._engine
        if engine is None:
            return super().training_step(model, inputs, num_items_in_batch)
        if engine.phase is Phase.PREDICT:
            self._withhold_update()
            engine.record.backward_passes_avoided += 1
            return torch.zeros((), device=self.args.device)
        if engine.leaper.cost_steps is None:
            self._tokens += tokens_of(inputs)
        loss = super().training_step(model, inputs, num_items_in_batch)
        engine.record.backward_passes += 1
        return loss

    def _compute_part(self, model, inputs, items):
        if self._engine is None:
            return super()._compute_part(model, inputs, items)
        phase = self._engine.phase
        try:
            self.plugins.call("before_forward", phase)
            return super()._compute_part(model, inputs, items)
        finally:
            self.plugins.call("after_backward", phase)

    def _withhold_update(self) -> None:
        """Accelerate's optimizer steps only when gradients are synchronised; some optimizers act without gradients."""
        self.accelerator.gradient_state._set_sync_gradients(False)
        if self.streaming is not None:
            self.streaming.optimizer.drop_gradients()

    def _track_num_input_tokens(self, inputs):
        if inputs:  # a predicted step has none
            super()._track_num_input_tokens(inputs)

    def _get_grad_norm(self, model, grad_norm=None):
        self._gradient_norm = super()._get_grad_norm(model, grad_norm=grad_norm)
        return self._gradient_norm

    def _before_update(self) -> None:
        """Gradients are summed up and clipped; the optimizer has not stepped yet."""
        engine = self._engine
        if engine.phase is Phase.PREDICT:
            return
        loss = torch.stack(self._recovery.losses).sum()
        if self.accelerator.num_processes > 1:
            loss = self.accelerator.reduce(loss, reduction="mean")
        if engine.leaper.cost_steps is None:
            engine.leaper.observe_compute(self._step_flops())
        try:
            norm = float(self._gradient_norm)
            used = before_update(engine, self.state.global_step, loss.item(), norm, self._recovery)
        except TrainingDivergedError as error:
            raise self._diverged(error) from None
        if not used:
            self._withhold_update()
        self._scheduled_rates = [group["lr"] for group in self.optimizer.param_groups]
        for group in self.optimizer.param_groups:
            group["lr"] = group["lr"] * engine.rate_scale

    def _step_flops(self) -> float:
        """Of the real step under way on one process, the mean over all: every rank must decide alike."""
        tokens = torch.tensor(float(self._tokens), device=self.args.device)
        if self.accelerator.num_processes > 1:
            tokens = self.accelerator.reduce(tokens, reduction="mean")
        weights = [(p.numel(), p.requires_grad) for p in self.model.parameters()]
        per_token = sum(4 * count + 2 * count * trained for count, trained in weights)
        return tokens.item() * per_token

    def _after_update(self) -> None:
        if self._engine.phase is Phase.PREDICT:
            return
        groups = self.optimizer.param_groups
        if self.accelerator.sync_gradients:
            self._engine.after_update([float(group["lr"]) for group in groups])
        # Schedulers of the chained kind compute the next rate from the last: leave them theirs.
        self._restore_rates()

    def _restore_rates(self) -> None:
        if self._scheduled_rates is not None:
            for group, rate in zip(self.optimizer.param_groups, self._scheduled_rates):
                group["lr"] = rate
            self._scheduled_rates = None

    def _rewind_step(self) -> None:
        if self._engine is None:
            return
        self._feed.fetched -= self._recovery.window_size
        if self._scheduled_rates is not None and self.state.global_step == 0:
            self._engine = None  # it has seen the gradients of a step that is not made
            self._engine = build_engine(self)
        self._restore_rates()

    def _end_step(self) -> None:
        self._logged_rate = self._scheduled_rate * self._engine.rate_scale
        phase = end_step(self._engine, self.state.global_step - 1, self._scheduled_rate, self._recovery)
        for window in (self._logged, self._trained):
            window.count(real=phase is not Phase.PREDICT)

    def _diverged(self, error: TrainingDivergedError) -> TrainingDivergedError:
        checkpoint, _ = last_complete_checkpoint(self.args.output_dir)
        where = f"The last good checkpoint is `{checkpoint}`" if checkpoint else "No checkpoint was saved yet"
        return TrainingDivergedError(
            f"{error} The weights in memory are those of the last good step. {where}. Look at the data of these steps, "
            "lower `learning_rate`, or raise `max_bad_steps`."
        )

    # Logging, evaluating, saving: always the real weights and what was really computed.

    def log(self, logs, *args, **kwargs):
        if self._engine is not None:
            if "loss" in logs:
                self._logged.correct_mean(logs, "loss")
                logs["learning_rate"] = self._logged_rate
                if not self._logged.last_was_real:
                    logs.pop("grad_norm", None)
                self._logged = StepWindow()
                logs.update(self._engine.log_values())
            self._trained.correct_mean(logs, "train_loss")
            if "train_runtime" in logs:  # the metrics of the whole run, which `train` returns too
                logs.update(self._total_metrics())
        super().log(logs, *args, **kwargs)

    def _total_metrics(self) -> dict[str, float]:
        """Counts of the whole run, as `total_flos` is, and seconds of this start, as `train_runtime` is."""
        record = self._engine.record
        return {
            "hybrid_backward_passes": record.backward_passes,
            "hybrid_backward_passes_avoided": record.backward_passes_avoided,
            "hybrid_leaps": len(record.leaps),
            "hybrid_leap_runtime": round(self._clock.leap_seconds, 4),
            "hybrid_probe_runtime": round(self._clock.probe_seconds, 4),
        }

    def evaluate(self, *args, **kwargs):
        self.plugins.call("before_export")
        return super().evaluate(*args, **kwargs)

    def predict(self, *args, **kwargs):
        self.plugins.call("before_export")
        return super().predict(*args, **kwargs)

    def save_model(self, *args, **kwargs):
        self.plugins.call("before_export")
        if self._engine is not None and not self._engine.trajectory.weights_are_finite():
            raise self._diverged(TrainingDivergedError("The weights hold NaN or infinite values and are not saved."))
        super().save_model(*args, **kwargs)

    def push_to_hub(self, *args, **kwargs):
        self.plugins.call("before_export")
        return super().push_to_hub(*args, **kwargs)

    def _save_optimizer_and_scheduler(self, output_dir):
        super()._save_optimizer_and_scheduler(output_dir)
        if self._engine is not None and self.args.should_save:
            tensors, engine = self._engine.state_dict()
            parts = {"engine": engine, "feed": self._feed.state_dict(), "plugins": self.plugins.state_dict()}
            save_hybrid_state(output_dir, tensors, {**resume_values(self), **parts})

    def _load_optimizer_and_scheduler(self, checkpoint):
        super()._load_optimizer_and_scheduler(checkpoint)
        # Trainer restores before it announces the run; the engine follows in `_start`.
        self._resumed_from = checkpoint


class HybridTrainer(HybridTrainerMixin, Trainer):
    """
    Drop-in for [`~transformers.Trainer`] that trains in phases: Warmup, Full, Predict, Correct.

    In Predict the weights leap along a predicted displacement and the steps that the leap is worth pass without
    backward passes. With `enable_predict=False` it is bit-identical to `Trainer`.

    Args:
        model to preprocess_logits_for_metrics:
            As [`~transformers.Trainer`], in the same order; `args` is best a [`HybridConfig`].
        probe_dataset, plugins, direction:
            As [`HybridTrainerMixin`].
        device_map (`dict[str, int | str]`, *optional*):
            Accelerate's form: module name to device. With `memory="stream"` the layers on `"cpu"` or `"disk"` are
            streamed. Default: the map that the model was loaded with, if any.
        kwargs:
            What a later version of `Trainer` takes besides.

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
        plugins: Iterable[PhasePlugin] = (),
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
            plugins=plugins,
            direction=direction,
            device_map=device_map,
            **kwargs,
        )
