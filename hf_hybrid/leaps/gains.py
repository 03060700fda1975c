"""
How far leaps go, and how many steps they are worth: the planners.

A planner answers two questions of the run. `gain(progress)`: how far a leap made now goes, in units of what the real
steps since the last leap moved. `worth_of(gain, real_steps)`: how many steps a kept leap may replace. It learns from
`Stretch`es, ten real steps or more at a time: their loss, the leaps in them, the 64 signals at their end.

`GainPlanner` is the schedule and learns nothing. The other two did not beat it (docs/evaluation.md). `BanditGain`
chooses among multiples of the schedule by what they earned. The world model chooses by what it imagines
(world_model/imagination.py); it is reached through this interface only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch


@dataclass(frozen=True)
class Stretch:
    """
    A stretch of real steps as planners see it.

    `gain` is what leaps moved in units of what the real steps moved, `horizon` the predicted steps per real step;
    `progress` (share of the run) and `rate` (learning rate over its peak) are those at its end.
    """

    features: Sequence[float]
    loss: float
    gain: float
    horizon: float
    progress: float
    rate: float


def scheduled_gain(peak: float, progress: float, power: float) -> float:
    """
    Gain of a leap within the schedule: `peak * progress ** power`.

    With `power` 2 early leaps are small: along long memories early directions are soon obsolete and early leaps hurt,
    late ones last. With `power` 0 the gain is constant. A leap's displacement is also proportional to the learning
    rate, so that it fades as the rate decays.

    Args:
        peak (`float`): Gain at the end of the run.
        progress (`float`): Share of the run that is done.
        power (`float`): Power of the progress.
    """
    return peak * progress**power if power else peak


class GainPlanner:
    """
    The schedule, and the base class of the other planners.

    Args:
        peak (`float`), power (`float`): See [`scheduled_gain`].
        worth (`float`): Predicted steps granted per real step when leaps run at the peak of the schedule.
    """

    confidence: float | None = None
    """Probability that leaping pays, in `[0, 1]`; `None` if the planner does not estimate it."""

    def __init__(self, peak: float, power: float, worth: float):
        self.peak, self.power, self.worth = peak, power, worth

    def gain(self, progress: float) -> float:
        """Return the gain of a leap made now."""
        return scheduled_gain(self.peak, progress, self.power)

    def worth_of(self, gain: float, real_steps: int) -> float:
        """Return the steps that a kept leap is worth, in proportion to its gain and at most the worth at the peak."""
        share = min(max(gain / self.peak, 0.0), 1.0) if self.peak > 0 else 0.0
        return self.worth * real_steps * share

    def observe(self, stretch: Stretch) -> None:
        """Learn from a complete stretch of real steps."""

    def summary(self) -> dict:
        """Return the choices as plain values, for the summary of the run."""
        return {}

    def tensors(self) -> dict:
        """Tensors to save, by name."""
        return {}

    def state_dict(self) -> dict:
        return {}

    def load_state_dict(self, tensors: dict, state: dict) -> None:
        """Restore what `tensors` and `state_dict` returned."""


class BanditGain(GainPlanner):
    """
    LinUCB (Li et al., 2010, arXiv 1003.0146) over multiples of the schedule, one choice per stretch.

    The context are the 64 features; the reward of a stretch is how much more than usual the loss fell in it, in units
    of the usual change, so that it is free of scale.

    Args:
        exploration (`float`): Width of the confidence bound.
    """

    ARMS = (0.0, 0.5, 1.0, 2.0)
    FEATURES = 64

    def __init__(self, peak: float, power: float, worth: float, exploration: float = 1.0):
        super().__init__(peak, power, worth)
        self.exploration = exploration
        size = self.FEATURES + 1
        self.covariance = np.stack([np.eye(size) for _ in self.ARMS])
        self.response = np.zeros((len(self.ARMS), size))
        self.arm = self.ARMS.index(1.0)
        self.context: np.ndarray | None = None
        self.last_loss: float | None = None
        self.usual = self.spread = 0.0

    def gain(self, progress: float) -> float:
        return self.ARMS[self.arm] * super().gain(progress)

    def observe(self, stretch: Stretch) -> None:
        if self.last_loss is not None and self.last_loss > 0:
            fall = 1.0 - stretch.loss / self.last_loss
            if self.context is not None and self.spread > 0:
                reward = min(max((fall - self.usual) / self.spread, -3.0), 3.0)
                self.covariance[self.arm] += np.outer(self.context, self.context)
                self.response[self.arm] += reward * self.context
            self.usual += (fall - self.usual) * (0.1 if self.spread else 1.0)
            self.spread += (abs(fall) - self.spread) * (0.1 if self.spread else 1.0)
        self.last_loss = stretch.loss
        self.context = np.append(np.asarray(stretch.features, dtype=np.float64) / self.FEATURES**0.5, 1.0)
        self.arm = int(np.argmax([self._bound(arm) for arm in range(len(self.ARMS))]))

    def _bound(self, arm: int) -> float:
        solved = np.linalg.solve(self.covariance[arm], np.stack([self.response[arm], self.context], axis=1))
        return float(self.context @ solved[:, 0] + self.exploration * np.sqrt(max(self.context @ solved[:, 1], 0.0)))

    def tensors(self) -> dict:
        return {"covariance": torch.from_numpy(self.covariance), "response": torch.from_numpy(self.response)}

    def state_dict(self) -> dict:
        context = None if self.context is None else self.context.tolist()
        scales = {"usual": self.usual, "spread": self.spread}
        return {"arm": self.arm, "context": context, "last_loss": self.last_loss, **scales}

    def load_state_dict(self, tensors: dict, state: dict) -> None:
        self.covariance, self.response = tensors["covariance"].numpy().copy(), tensors["response"].numpy().copy()
        for name in ("arm", "last_loss", "usual", "spread"):
            setattr(self, name, state[name])
        self.context = None if state["context"] is None else np.array(state["context"])
