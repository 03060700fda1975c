"""Progress of a run: Trainer's progress bar, or its table in a notebook, with the phases."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import psutil
import torch
from tqdm.auto import tqdm
from transformers import ProgressCallback, TrainerCallback

from hf_hybrid.part import Phase
from hf_hybrid.records.summary import RunPosition, format_number
from hf_hybrid.run.trainer_view import TrainerLike


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

    def __init__(self, trainer: TrainerLike):
        super().__init__()
        self.trainer = trainer

    def on_train_begin(self, args, state, control, **kwargs):
        # Replaces Trainer's method, which makes a bar of its own.
        if state.is_world_process_zero:
            options = {"total": state.max_steps, "dynamic_ncols": True}
            self.training_bar = PositionBar(position_of_run=self.trainer.run_position, **options)
        self.current_step = 0

    def on_log(self, args, state, control, logs: Any = None, **kwargs):
        super().on_log(args, state, control, logs=short_logs(logs), **kwargs)


def install_progress(trainer: TrainerLike) -> None:
    """Replace Trainer's bar or table. A user's own callbacks stay."""
    choices: dict[type, Callable[[], Any]] = {ProgressCallback: lambda: HybridProgressCallback}
    # Looked up, not imported: the module needs IPython, and Trainer has imported it where it chose the table.
    of_notebooks = sys.modules.get("transformers.utils.notebook")
    if of_notebooks is not None:
        choices[of_notebooks.NotebookProgressCallback] = lambda: notebook_callback(of_notebooks)
    for callback in list(trainer.callback_handler.callbacks):
        if type(callback) in choices:
            trainer.remove_callback(callback)
            trainer.add_callback(choices[type(callback)]()(trainer))


@functools.cache
def notebook_callback(notebook) -> type[TrainerCallback]:
    """
    Trainer's table in notebooks with the position of the run beside the bar and, where leaps are made, two more
    columns: `Phase` and `Skipped` (backward passes avoided so far). The classes are made here, because their bases need
    IPython.
    """

    class PhaseTracker(notebook.NotebookTrainingTracker):
        def __init__(self, num_steps: int, columns: list[str], position_of_run: Callable[[], RunPosition | None]):
            super().__init__(num_steps, columns)  # a line adds those that it has
            self._position_of_run = position_of_run
            self._position: RunPosition | None = None

        def _read_position(self) -> RunPosition | None:
            self._position = self._position_of_run() or self._position  # drawn once more after the end of the run
            return self._position

        def update_bar(self, value, comment=None):
            epoch, position = self.comment, self._read_position()
            self.comment = ", ".join(str(part) for part in (epoch, position) if part)
            super().update_bar(value, comment)
            self.comment = epoch

        def write_line(self, values):
            position = self._read_position()
            if position is not None and position.phase is not None:
                skipped = format_number(position.backward_passes_avoided)
                values = {**values, "Phase": position.phase.capitalize(), "Skipped": skipped}
            super().write_line(values)

    class HybridNotebookProgressCallback(notebook.NotebookProgressCallback):
        def __init__(self, trainer: TrainerLike):
            super().__init__()
            self.trainer = trainer

        def on_train_begin(self, args, state, control, **kwargs):
            super().on_train_begin(args, state, control, **kwargs)
            columns = self.training_tracker.inner_table[0]  # Trainer draws nothing before the first step
            self.training_tracker = PhaseTracker(state.max_steps, columns, self.trainer.run_position)

    return HybridNotebookProgressCallback
