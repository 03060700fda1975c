"""Progress of a run: Trainer's progress bar with the phases."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import psutil
import torch
from tqdm.auto import tqdm
from transformers import ProgressCallback
from transformers.trainer_callback import CallbackHandler

from hf_hybrid.part import Phase
from hf_hybrid.records.summary import RunPosition


def memory_in_use(device: torch.device) -> int:
    """Bytes this process holds: reserved by torch's allocator where it tells, otherwise resident host memory."""
    module = torch.get_device_module(device)
    return module.memory_reserved(device) if hasattr(module, "memory_reserved") else psutil.Process().memory_info().rss


def short_logs(logs: dict) -> dict:
    """
    The part of a log entry that is printed; `log_history` and trackers get the whole entry.

    `phase`, `leaps` and `predicted` (steps) stand for its `hybrid/*` and `memory/*` values.
    """
    shown = {name: value for name, value in logs.items() if not name.startswith(("hybrid/", "memory/"))}
    if "hybrid/phase" in logs:
        shown["phase"] = list(Phase)[logs["hybrid/phase"]].value
        shown |= {name: logs[f"hybrid/{key}"] for name, key in (("leaps", "leaps"), ("predicted", "predicted_steps"))}
    return shown


class PositionBar(tqdm):  # ty: ignore[unsupported-base]
    """A bar that reads the run's position when it is drawn, which is less often than every step."""

    def __init__(self, *args, position_of_run: Callable[[], RunPosition | None], **kwargs):
        self._position_of_run = position_of_run
        super().__init__(*args, **kwargs)

    @property
    def format_dict(self) -> dict:
        position = self._position_of_run()
        if position is not None:  # the bar is drawn once more after the end of the run
            self.postfix = str(position)
        return super().format_dict


class HybridProgressCallback(ProgressCallback):
    """Trainer's bar, followed by phase, last real loss and memory in use; log entries are printed short."""

    def __init__(self, position_of_run: Callable[[], RunPosition | None]):
        super().__init__()
        self.position_of_run = position_of_run

    def on_train_begin(self, args, state, control, **kwargs):
        # Replaces Trainer's method, which makes a bar of its own.
        if state.is_world_process_zero:
            options = {"total": state.max_steps, "dynamic_ncols": True}
            self.training_bar = PositionBar(position_of_run=self.position_of_run, **options)
        self.current_step = 0

    def on_log(self, args, state, control, logs: Any = None, **kwargs):
        super().on_log(args, state, control, logs=short_logs(logs), **kwargs)


def install_progress(handler: CallbackHandler, position_of_run: Callable[[], RunPosition | None]) -> None:
    """Replace Trainer's bar. A user's own callbacks stay, and so does Trainer's table in notebooks."""
    for callback in list(handler.callbacks):
        if type(callback) is ProgressCallback:
            handler.remove_callback(callback)
            handler.add_callback(HybridProgressCallback(position_of_run))
