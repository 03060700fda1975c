"""Callbacks that the trainer installs. They hold no state of the run: what must survive lives in the engine."""

from __future__ import annotations

import sys
from collections.abc import Callable

import psutil
import torch
from tqdm.auto import tqdm
from transformers import ProgressCallback, TrainerCallback

from hf_hybrid.phases import Phase
from hf_hybrid.report.summary import RunPosition


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


def memory_in_use(device: torch.device) -> int:
    """Bytes that this process holds: what torch's allocator reserved on a CUDA device, elsewhere its resident set."""
    if device.type == "cuda":
        return torch.cuda.memory_reserved(device)
    return psutil.Process().memory_info().rss


def short_logs(logs: dict) -> dict:
    """
    What a line on the console holds of a log entry; `log_history` and trackers get the entry as it is.

    Args:
        logs (`dict`): As `Trainer.log` takes it. Its `hybrid/*` and `memory/*` values are left out; of the former
            `phase`, `leaps` and `predicted` (steps) stand for all.
    """
    shown = {name: value for name, value in logs.items() if not name.startswith(("hybrid/", "memory/"))}
    if "hybrid/phase" in logs:
        shown["phase"] = list(Phase)[logs["hybrid/phase"]].value
        shown |= {name: logs[f"hybrid/{key}"] for name, key in (("leaps", "leaps"), ("predicted", "predicted_steps"))}
    return shown


class _PositionBar(tqdm):
    """Asks where the run stands when it is drawn, which is not after every step."""

    def __init__(self, *args, position_of_run: Callable[[], RunPosition | None], **kwargs):
        self._position_of_run = position_of_run
        super().__init__(*args, **kwargs)

    @property
    def format_dict(self) -> dict:
        position = self._position_of_run()
        if position is not None:  # the last drawing comes after the end of the run
            self.postfix = str(position)
        return super().format_dict


class HybridProgressCallback(ProgressCallback):
    """
    Trainer's bar with the phase, the last real loss and the memory in use behind it, and short lines for the log.

    Args:
        trainer (`HybridTrainerMixin`): Whose `run_position()` is shown.
        max_str_len (`int`): As [`~transformers.ProgressCallback`].
    """

    def __init__(self, trainer, max_str_len: int = 100):
        super().__init__(max_str_len)
        self.trainer = trainer

    def on_train_begin(self, args, state, control, **kwargs):
        # In place of Trainer's, which makes a bar of its own.
        if state.is_world_process_zero:
            options = {"total": state.max_steps, "dynamic_ncols": True}
            self.training_bar = _PositionBar(position_of_run=self.trainer.run_position, **options)
        self.current_step = 0

    def on_log(self, args, state, control, logs=None, **kwargs):
        super().on_log(args, state, control, logs=short_logs(logs), **kwargs)


def install_progress(trainer) -> None:
    """Put our bar, or our table, in the place of the one that Trainer chose; a user's own callbacks stay."""
    choices = {ProgressCallback: lambda: HybridProgressCallback}
    # Only where Trainer chose it: its module needs IPython.
    of_notebooks = sys.modules.get("transformers.utils.notebook")
    if of_notebooks is not None:
        choices[of_notebooks.NotebookProgressCallback] = _notebook_callback
    for callback in list(trainer.callback_handler.callbacks):
        if type(callback) in choices:
            trainer.remove_callback(callback)
            trainer.add_callback(choices[type(callback)]()(trainer))


def _notebook_callback() -> type[TrainerCallback]:
    from hf_hybrid.report.notebooks import HybridNotebookProgressCallback

    return HybridNotebookProgressCallback
