"""Routes Trainer's hooks to the recovery from out-of-memory and to the memory guard. No algorithm lives here."""

from __future__ import annotations

import functools
import logging

from torch import Tensor

from hf_hybrid.callbacks import MemoryHooks
from hf_hybrid.guard import MemoryGuard, device_probe
from hf_hybrid.phases import PluginContext, PluginList
from hf_hybrid.recovery import OutOfMemoryRecovery
from hf_hybrid.state_io import last_complete_checkpoint
from hf_hybrid.step_recovery import RecoverableStep
from hf_hybrid.streamed_trainer import StreamedTrainerMixin

logger = logging.getLogger(__name__)


class RecoveringTrainerMixin(StreamedTrainerMixin):
    """
    Training that survives an out-of-memory, for any `Trainer` subclass, with and without phases.

    Attributes:
        memory_guard (`MemoryGuard`): Watches the device at the end of every step. Its `probe` may be replaced.
    """

    plugins = PluginList()

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        options = self.hybrid_args
        self.memory_guard = MemoryGuard(
            device_probe(self.args.device),
            warn_at=options.guard_warn_at,
            checkpoint_at=options.guard_checkpoint_at,
        )
        self._recovery = OutOfMemoryRecovery(self)
        self._own_step: RecoverableStep | None = None
        self._saved_step: int | None = None
        self.add_callback(MemoryHooks(self))

    @property
    def phase_name(self) -> str | None:
        """Phase of the step under way; `None` without phases."""
        return None

    # A run.

    def train(self, *args, **kwargs):
        self._recovery.reset()
        self._saved_step = None
        try:
            return super().train(*args, **kwargs)
        finally:
            self._recovery.end()
            if self._own_step is not None:
                self._own_step.remove()
                self._own_step = None

    def _begin_recovery(self) -> None:
        self._recovery.begin(PluginContext(self.model_wrapped, self.optimizer, self.state.max_steps))
        self._own_step = RecoverableStep(self.optimizer, self._recovery, streamed=self.streaming is not None)
        self._own_step.install()

    # One step.

    def get_batch_samples(self, *args, **kwargs):
        batches, items = super().get_batch_samples(*args, **kwargs)
        self._recovery.begin_window(batches, items)
        return batches, items

    def training_step(self, model, inputs, num_items_in_batch=None):
        compute = functools.partial(self._compute_part, model, items=num_items_in_batch)
        return self._recovery.compute(inputs, compute, num_items_in_batch)

    def _compute_part(self, model, inputs, items) -> Tensor:
        """Forward and backward of a micro-batch or of a part of one."""
        return super().training_step(model, inputs, items)

    def _watch_memory(self) -> bool:
        """A step is over. Returns whether a checkpoint should be written now."""
        self._recovery.end_window()
        save = self.memory_guard.after_step(self.state.global_step)
        # Every process would have to save, and each sees its own device only.
        return save and self.accelerator.num_processes == 1

    # Saving.

    def emergency_checkpoint(self) -> str:
        """
        Save the state of after the last step, for a run that cannot go on.

        Returns:
            `str`: A sentence that says where, or why not.
        """
        step = self.state.global_step
        if self._saved_step != step:
            try:
                self._rewind_step()
                self._save_checkpoint(self.model, trial=None)
            except Exception as error:
                logger.exception("The emergency checkpoint could not be written.")
                checkpoint, _ = last_complete_checkpoint(self.args.output_dir)
                where = f"the last one is `{checkpoint}`" if checkpoint else "there is none"
                return f"An emergency checkpoint could not be written (`{type(error).__name__}`); {where}."
            self.control = self.callback_handler.on_save(self.args, self.state, self.control)
        return f"The state after step {step}, the last good one, is in `{self._checkpoint_folder(step)}`."

    def _checkpoint_folder(self, step: int) -> str:
        return f"{self._get_output_dir(trial=None)}/checkpoint-{step}"

    def _rewind_step(self) -> None:
        """What belongs to the step under way must not be saved: it will be made again."""

    def _save_optimizer_and_scheduler(self, output_dir):
        super()._save_optimizer_and_scheduler(output_dir)
        self._saved_step = self.state.global_step
        if self.args.should_save:
            self._recovery.save(output_dir)

    def _load_optimizer_and_scheduler(self, checkpoint):
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is not None:
            self._recovery.load(checkpoint)
