"""
The forecast of the final loss while a run goes on: in the log, behind the progress bar, in report and summary.

[`RunForecast`] collects what the forecast needs (world_model/final_loss.py): the logged losses and the learning rates
of all steps. Past rates are those that were logged, because the search of the learning rate scales them; the rates to
come are the schedule's, scaled as the last one was. Losses are numbers already when `Trainer` logs them, so a forecast
waits for no device.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from torch.optim.lr_scheduler import LambdaLR
from transformers import TrainerCallback

from hf_hybrid.world_model.final_loss import FinalLoss, forecast_final_loss

FROM = 0.05
"""Share of the run before which there is no forecast: none was scored earlier."""
EVERY = 0.01
"""Share of the run after which a forecast is made anew; until then the last one is repeated."""
MOST_STEPS = 1_000_000
"""Longer runs, whose `max_steps` is a way to say without end, have no forecast."""
POINTS = 10_000
"""Steps at which a schedule is asked; between them it is straight."""


def schedule_of(scheduler: Any, max_steps: int) -> np.ndarray:
    """Factor of the learning rate in each step `[max_steps]`; 1 where the scheduler does not know it in advance."""
    scheduler = getattr(scheduler, "scheduler", scheduler)  # Accelerate wraps some
    if not isinstance(scheduler, LambdaLR):
        return np.ones(max_steps)
    at = np.unique(np.linspace(0, max_steps - 1, min(max_steps, POINTS)).astype(int))
    return np.interp(np.arange(max_steps), at, [float(scheduler.lr_lambdas[0](int(step))) for step in at])


class RunForecast:
    """The forecast of one run at a time."""

    def __init__(self):
        self._clear()

    def _clear(self) -> None:
        self.max_steps, self.made_at = 0, 0
        self.steps: list[int] = []
        self.losses: list[float] = []
        self.schedule = self.rates = np.ones(0)
        self.last: FinalLoss | None = None

    def begin(self, max_steps: int, scheduler: Any, history: list[dict]) -> None:
        """Begin a run, with the `log_history` of a resumed one."""
        self._clear()
        if not 0 < max_steps <= MOST_STEPS:
            return
        self.max_steps, self.schedule = max_steps, schedule_of(scheduler, max_steps)
        self.rates = self.schedule.copy()
        for entry in history:
            self._take(entry["step"], entry)
        self._forecast()

    def log_values(self, step: int, logs: dict) -> dict[str, float]:
        """Take in the log entry of a step, and return what to add to it."""
        if not self._take(step, logs):
            return {}
        if self.last is None or step >= self.made_at + EVERY * self.max_steps or not np.isfinite(self.losses[-1]):
            self._forecast()
        if self.last is None:
            return {}
        last = self.last
        return {"hybrid/forecast_loss": last.median, "hybrid/forecast_low": last.low, "hybrid/forecast_high": last.high}

    def _take(self, step: int, logs: dict) -> bool:
        """Whether the entry has a loss of a later step of the run."""
        before = self.steps[-1] if self.steps else 0
        if "loss" not in logs or not before < step <= self.max_steps:
            return False
        self.steps.append(step)
        self.losses.append(float(logs["loss"]) or math.nan)  # `Trainer` logs 0 for losses that are not finite
        scheduled = self.schedule[step - 1]
        if "learning_rate" in logs and scheduled > 1e-3 * self.schedule.max():
            self.rates[before:] = self.schedule[before:] * (float(logs["learning_rate"]) / scheduled)
        return True

    def _forecast(self) -> None:
        if self.steps and self.steps[-1] >= FROM * self.max_steps:
            self.last = forecast_final_loss(self.steps, self.losses, self.rates, self.max_steps)
            self.made_at = self.steps[-1]

    def summary(self) -> dict | None:
        """The last forecast with the step that it was made after, `None` before the first."""
        if self.last is None:
            return None
        return {"step": self.made_at, "loss": self.last.median, "low": self.last.low, "high": self.last.high}


class ForecastCallback(TrainerCallback):
    """
    Adds a forecast of the final training loss to the log of any `Trainer`; [`HybridTrainer`] has it built in.

    From 5 % of the run and the fifth logged loss on, each entry with a loss gets `hybrid/forecast_loss` (the median),
    `hybrid/forecast_low` and `hybrid/forecast_high` (the 90 % interval). The final loss is the mean training loss of
    the last 5 % of the steps, and of at least 5. Training is not changed. Callbacks before this one in the list get the
    entries without it.

    Attributes:
        forecast (`RunForecast`): `forecast.last` is the last [`~hf_hybrid.world_model.final_loss.FinalLoss`] or `None`;
            its `probability_below(loss)` says how likely the run ends below a loss.

    Example:

    ```python
    from hf_hybrid import ForecastCallback
    from transformers import Trainer

    trainer = Trainer(model, args, train_dataset=dataset, callbacks=[ForecastCallback()])
    ```
    """

    def __init__(self):
        self.forecast = RunForecast()

    def on_train_begin(self, args, state, control, lr_scheduler=None, **kwargs):
        self.forecast.begin(state.max_steps, lr_scheduler, state.log_history)

    def on_log(self, args, state, control, logs=None, **kwargs):
        found = self.forecast.log_values(state.global_step, logs or {})
        if found:
            logs.update(found)
            state.log_history[-1].update(found)
