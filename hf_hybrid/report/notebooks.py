"""Trainer's table in notebooks, with the phases. Needs IPython, and is imported only where Trainer chose that table."""

from __future__ import annotations

from collections.abc import Callable

from transformers.utils.notebook import NotebookProgressCallback, NotebookTrainingTracker

from hf_hybrid.report.summary import RunPosition, format_number


class PhaseTracker(NotebookTrainingTracker):
    """
    Bar and table of a run: the phase stands beside the bar, `Phase` and `Skipped` (backward passes avoided so far) are
    columns of the table.

    Args:
        num_steps (`int`): Steps of the run.
        columns (`list[str]`): Those of Trainer's own table.
        position_of_run (`Callable[[], RunPosition | None]`): Where the run stands; asked when something is drawn.
    """

    def __init__(self, num_steps: int, columns: list[str], position_of_run: Callable[[], RunPosition | None]):
        super().__init__(num_steps, [*columns, "Phase", "Skipped"])
        self._position_of_run = position_of_run
        self._position: RunPosition | None = None

    def _look(self) -> RunPosition | None:
        self._position = self._position_of_run() or self._position  # the last drawing comes after the end of the run
        return self._position

    def update_bar(self, value, comment=None):
        """Draw the bar; called as often as it is to be drawn, not after every step."""
        epoch, position = self.comment, self._look()
        self.comment = ", ".join(str(part) for part in (epoch, position) if part)
        super().update_bar(value, comment)
        self.comment = epoch

    def write_line(self, values):
        """A line of the table, as Trainer writes it."""
        position = self._look()
        if position is not None:
            skipped = format_number(position.backward_passes_avoided)
            values = {**values, "Phase": position.phase.capitalize(), "Skipped": skipped}
        super().write_line(values)


class HybridNotebookProgressCallback(NotebookProgressCallback):
    """
    [`~transformers.utils.notebook.NotebookProgressCallback`] with the phases.

    Args:
        trainer (`HybridTrainerMixin`): Whose `run_position()` is shown.
    """

    def __init__(self, trainer):
        super().__init__()
        self.trainer = trainer

    def on_train_begin(self, args, state, control, **kwargs):
        super().on_train_begin(args, state, control, **kwargs)
        columns = self.training_tracker.inner_table[0]  # nothing is drawn before the first step
        self.training_tracker = PhaseTracker(state.max_steps, columns, self.trainer.run_position)
