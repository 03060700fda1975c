"""Callbacks that the trainer installs. They hold no state of the run: what must survive lives in the engine."""

from __future__ import annotations

from transformers import TrainerCallback


class HookRouter(TrainerCallback):
    """Calls the trainer where `Trainer` has no method to override."""

    def __init__(self, trainer):
        self.trainer = trainer

    def on_train_begin(self, args, state, control, **kwargs):
        self.trainer._start()

    def on_epoch_begin(self, args, state, control, **kwargs):
        self.trainer._enter_epoch()

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        self.trainer._before_update()

    def on_optimizer_step(self, args, state, control, **kwargs):
        self.trainer._after_update()

    def on_step_end(self, args, state, control, **kwargs):
        self.trainer._end_step()

    def on_train_end(self, args, state, control, **kwargs):
        self.trainer._finish()


class MemoryHooks(TrainerCallback):
    """As [`HookRouter`], for the parts that run with and without phases."""

    def __init__(self, trainer):
        self.trainer = trainer

    def on_train_begin(self, args, state, control, **kwargs):
        self.trainer._begin_recovery()

    def on_step_end(self, args, state, control, **kwargs):
        if self.trainer._watch_memory():
            control.should_save = True
