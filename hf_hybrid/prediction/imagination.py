"""Gains chosen by a world model of training: the loss imagined with leaps against the loss imagined without."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from hf_hybrid.prediction.dynamics import DynamicsModel
from hf_hybrid.prediction.gains import GainPlanner, Window

Tensor = torch.Tensor


class ImaginedGain(GainPlanner):
    """
    After every window imagines multiples of the schedule over the next windows, and no leaps, and takes what is best.

    The comparison is at the far end of the imagined stretch, not at once: leaps that pay often look neutral at first.
    Where the model sees no difference the schedule is followed.

    Args:
        peak, power, worth: See [`GainPlanner`].
        dynamics (`DynamicsModel`): What imagines.
        rate_at (`Callable[[float], float]`): Learning rate at a progress of the run, over its peak.
        window_share (`float`): Share of the run that a window is.
    """

    MULTIPLES = (0.0, 0.5, 1.0, 1.5, 2.0)
    PLANNED = 5
    """Windows that a choice is imagined to last; after them the schedule."""
    AHEAD = 20
    """Windows imagined."""
    LEARN_FIRST = 3
    """Windows before the first choice."""

    def __init__(
        self,
        peak: float,
        power: float,
        worth: float,
        *,
        dynamics: DynamicsModel,
        rate_at: Callable[[float], float],
        window_share: float,
    ):
        super().__init__(peak, power, worth)
        self.dynamics, self.rate_at, self.window_share = dynamics, rate_at, window_share
        self.multiple = 1.0
        self.believed = 1.0
        self.imagined_worth: float | None = None

    def gain(self, progress: float) -> float:
        return self.multiple * super().gain(progress)

    def worth_of(self, gain: float, real_steps: int) -> float:
        """As imagined, where something was, between nothing and twice the schedule's prior."""
        prior = super().worth_of(gain, real_steps)
        if self.imagined_worth is None:
            return prior
        return min(max(self.imagined_worth * real_steps, 0.0), 2.0 * prior)

    @property
    def confidence(self) -> float:
        """1 while leaping is imagined to be as good as not leaping or better, down to 0 where it surely is worse."""
        return self.believed

    def observe(self, window: Window) -> None:
        if not math.isfinite(window.loss):
            return
        action = [window.gain, window.horizon, window.progress, window.rate]
        self.dynamics.observe_window(window.features, action, window.loss)
        ahead = min(self.AHEAD, int((1.0 - window.progress) / self.window_share + 1e-6))
        if ahead < 1:
            return
        candidates = self._candidates(window, ahead)
        choice = self.MULTIPLES.index(1.0)
        if self.dynamics.windows >= self.LEARN_FIRST:
            choice = self._choose(candidates)
        self.multiple = self.MULTIPLES[choice]
        self.dynamics.forecast(candidates[choice], keep=True)

    def _candidates(self, window: Window, ahead: int) -> Tensor:
        """Actions `[multiples, ahead, 4]`."""
        actions = torch.zeros(len(self.MULTIPLES), ahead, 4)
        for k in range(ahead):
            progress = min(window.progress + (k + 1) * self.window_share, 1.0)
            scheduled = GainPlanner.gain(self, progress)
            for row, multiple in enumerate(self.MULTIPLES):
                gain = scheduled * (multiple if k < self.PLANNED else 1.0)
                horizon = super().worth_of(gain, 1)
                actions[row, k] = torch.tensor([gain, horizon, progress, self.rate_at(progress)])
        return actions

    def _choose(self, candidates: Tensor) -> int:
        difference, disagreement = self.dynamics.compare(candidates, candidates[:1])
        score = (difference + disagreement)[:, -1].tolist()
        scheduled = self.MULTIPLES.index(1.0)
        # Nothing is gained by a change that the members do not agree on.
        best = min(range(len(score)), key=lambda row: (score[row], row != scheduled))
        if score[best] > score[scheduled] - 1e-4:
            best = scheduled
        leap = best or scheduled
        better = self.dynamics.probability_better(candidates[leap], candidates[0], candidates.shape[1]).item()
        self.believed = min(1.0, 2.0 * better)
        self.imagined_worth = self._worth(difference[leap, -1].item(), candidates[0])
        return best

    def _worth(self, difference: float, without: Tensor) -> float | None:
        """Predicted steps per real step: the imagined difference over the imagined fall per step at the far end."""
        mean = [0.0, *self.dynamics.forecast(without).mean]
        stretch = min(self.PLANNED, len(mean) - 1)
        fall = (mean[-1 - stretch] - mean[-1]) / stretch
        if fall <= 0:
            return None
        return max(-difference, 0.0) / fall / stretch

    def tensors(self) -> dict[str, Tensor]:
        return self.dynamics.state_dict()[0]

    def state_dict(self) -> dict:
        values = {"multiple": self.multiple, "believed": self.believed, "imagined_worth": self.imagined_worth}
        return {**values, "dynamics": self.dynamics.state_dict()[1]}

    def load_state_dict(self, tensors: dict, state: dict) -> None:
        for name in ("multiple", "believed", "imagined_worth"):
            setattr(self, name, state[name])
        self.dynamics.load_state_dict(tensors, state["dynamics"])
