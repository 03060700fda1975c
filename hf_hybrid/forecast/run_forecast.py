"""
The forecast of the final losses while a run goes on: in the log, behind the progress bar, in report and summary.

[`RunForecast`] collects what the forecasts need (final_loss.py): the logged losses and the learning rates of all steps.
Past rates are those that were logged, because the search of the learning rate scales them; the rates to come are the
schedule's, scaled as the last one was.

A forecast waits for no device, because losses are numbers already when `Trainer` logs them, and no device waits for a
forecast: what became due with a log entry is made in the next step, once its kernels are queued, while the device works
through them. The log entry after that has it.

The held-out loss at the end is forecast at each evaluation. That forecast goes into the log entries of the training
loss that follow: what an evaluation returns is what searches of hyperparameters add up, so nothing is added to it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from torch.optim.lr_scheduler import LambdaLR
from transformers import TrainerCallback

from hf_hybrid.forecast.final_loss import FinalLoss, forecast_final_loss
from hf_hybrid.part import Part
from hf_hybrid.run.run import Run

FROM = 0.05
"""Share of the run before which there is no forecast: none was scored earlier."""
EVERY = 0.02
"""Share of the run after which a forecast is made anew; until then the last one is repeated."""
MOST_STEPS = 1_000_000
"""Longer runs, whose `max_steps` is a way to say without end, have no forecast."""
POINTS = 10_000
"""Steps at which a schedule is asked; between them it is straight."""


def schedule_of(scheduler: Any, max_steps: int) -> np.ndarray:
    """Factor of the learning rate in each step `[max_steps]`; 1 where the scheduler does not know it in advance."""
    scheduler = getattr(scheduler, "scheduler", scheduler)  # accelerate wraps some
    if not isinstance(scheduler, LambdaLR) or not max_steps:  # the two of transformers that watch the loss
        return np.ones(max_steps)
    at = np.unique(np.linspace(0, max_steps - 1, min(max_steps, POINTS)).astype(int))
    return np.interp(np.arange(max_steps), at, [scheduler.lr_lambdas[0](int(step)) for step in at])


class RunForecast:
    """The forecast of one run; `history` is the `log_history` of a resumed one."""

    def __init__(self, max_steps: int, scheduler: Any, history: Sequence[dict] = ()):
        self.max_steps = max_steps if max_steps <= MOST_STEPS else 0
        self.schedule = schedule_of(scheduler, self.max_steps)
        self.rates, self.peak = self.schedule.copy(), self.schedule.max(initial=0.0)
        self.scale = 1.0  # learning rate of the last step over the schedule's factor
        self.steps: list[int] = []
        self.losses: list[float] = []
        self.is_due = False
        self.evaluation: tuple[int, float] | None = None  # step and loss of the last, until a forecast is made of it
        self.last: FinalLoss | None = None
        self.held_out: FinalLoss | None = None
        self.made_at = self.held_out_made_at = 0
        for entry in history:  # forecasts are made anew at the same steps, so that a resumed run goes on with the same
            self.log_values(entry["step"], entry)
            self.make()

    def log_values(self, step: int, logs: dict) -> dict[str, float]:
        """Take in the log entry of a step, and return what to add to it: nothing if it has no training loss."""
        before = self.steps[-1] if self.steps else 0
        if "eval_loss" in logs and FROM * self.max_steps <= before <= step < self.max_steps:
            self.evaluation = (step, float(logs["eval_loss"]))
        if "loss" not in logs or not before < step <= self.max_steps:
            return {}
        self.steps.append(step)
        self.losses.append(float(logs["loss"]) or math.nan)  # `Trainer` logs 0 for losses that are not finite
        if "learning_rate" in logs and self.schedule[step - 1] > 1e-3 * self.peak:
            self.scale = float(logs["learning_rate"]) / self.schedule[step - 1]
        self.rates[before:step] = self.scale * self.schedule[before:step]
        if not math.isfinite(self.losses[-1]):
            self.last = self.held_out = self.evaluation = None
            self.is_due = False
            return {}
        ends = step == self.max_steps
        again = self.last is None or ends or step >= self.made_at + EVERY * self.max_steps
        self.is_due = again and step >= FROM * self.max_steps
        if ends:
            self.make()
        return {
            f"hybrid/forecast_{prefix}{name}": value
            for prefix, forecast in (("", self.last), ("eval_", self.held_out))
            for name, value in _numbers(forecast).items()
        }

    @property
    def is_waiting(self) -> bool:
        return self.is_due or self.evaluation is not None

    def make(self) -> None:
        """Make the forecasts that are due. To be called while the device is busy."""
        if not self.is_waiting:
            return
        known = self.steps, self.losses, self.learning_rates(), self.max_steps
        if self.is_due:
            self.last, self.made_at, self.is_due = forecast_final_loss(*known), self.steps[-1], False
        if self.evaluation is not None:
            (self.held_out_made_at, loss), self.evaluation = self.evaluation, None
            self.held_out = forecast_final_loss(*known, loss)

    def learning_rates(self) -> np.ndarray:
        """Learning rates of all steps `[max_steps]`; those to come are the schedule's, scaled as the last one was."""
        done = self.steps[-1]
        return np.concatenate([self.rates[:done], self.scale * self.schedule[done:]])

    def summary(self) -> dict | None:
        """The last forecast with the step that it was made after, and that of the held-out loss; `None` without one."""
        self.make()
        if self.last is None:
            return None
        held_out = {"step": self.held_out_made_at, **_numbers(self.held_out)} if self.held_out else None
        return {"step": self.made_at, **_numbers(self.last), "held_out": held_out}


def _numbers(forecast: FinalLoss | None) -> dict[str, float]:
    return {"loss": forecast.median, "low": forecast.low, "high": forecast.high} if forecast else {}


class Forecast(Part):
    """The forecast as a part of a run: in the log, in the summary, and for who shows progress."""

    name = "forecast"

    def __init__(self, scheduler: Any, history: list[dict]):
        self.scheduler, self.history = scheduler, history

    def begin(self, run: Run) -> None:
        self.run, self.curve = run, RunForecast(run.max_steps, self.scheduler, self.history)

    def log(self, step: int, logs: dict[str, Any]) -> None:
        logs.update(self.curve.log_values(step, logs))
        self.run.forecast = self.curve.last
        if self.curve.is_waiting and self._make not in self.run.later:
            self.run.later.append(self._make)

    def _make(self) -> None:
        self.curve.make()
        self.run.forecast = self.curve.last

    def summary(self) -> dict[str, Any]:
        return {"forecast": self.curve.summary()}


class ForecastCallback(TrainerCallback):
    """
    Adds a forecast of the final losses to the log of any `Trainer`; [`HybridTrainer`] has it built in.

    After 5 % of the run and the fifth logged loss, each entry with a loss gets `hybrid/forecast_loss` (the median),
    `hybrid/forecast_low` and `hybrid/forecast_high` (the 90 % interval). The final loss is the mean training loss of
    the last 5 % of the steps, and of at least 5. From the first evaluation after that on, entries with a training loss
    also get `hybrid/forecast_eval_loss`, `hybrid/forecast_eval_low` and `hybrid/forecast_eval_high`: the `eval_loss`
    after the last step, as it was forecast at the last evaluation. Training is not changed. Callbacks before this one
    in the list get the entries without it.

    Pass `callbacks=[ForecastCallback()]`. Its `forecast.last` is the last forecast of the last training, a
    [`~hf_hybrid.forecast.final_loss.FinalLoss`] or `None`, which tells the probability to end below a loss.
    """

    forecast: RunForecast

    def on_train_begin(self, args, state, control, lr_scheduler=None, **kwargs):
        self.forecast = RunForecast(state.max_steps, lr_scheduler, state.log_history)

    def on_optimizer_step(self, args, state, control, **kwargs):
        self.forecast.make()

    def on_log(self, args, state, control, logs=None, **kwargs):
        if logs and (forecasts := self.forecast.log_values(state.global_step, logs)):
            logs.update(forecasts)
            state.log_history[-1].update(forecasts)
