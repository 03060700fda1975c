"""
Choose gains by imagination: compare the world model's forecasts with and without leaps.

Planning by imagination is the other half of Dreamer (Hafner et al., 2023, arXiv 2301.04104): a model of the world is
asked what would happen, and the best answer is done. With one small decision per stretch no actor network is needed.
After every stretch of real steps [`ImaginedGain`]

1. imagines the next 20 stretches five times: with the schedule's gain times 0, 0.5, 1, 1.5 and 2 in the first 5 of
   them, and with the schedule after those;
2. compares the losses at the far end, because leaps that pay often look neutral at first. A change of the schedule
   must win by more than the members of the ensemble disagree; where the model sees no difference the schedule stays;
3. sets the confidence from the probability that leaping is better than not leaping;
4. forecasts the loss under its choice. Later, the errors of this forecast calibrate the next ones.

All futures are imagined at the same progress and with no skipped steps. Otherwise one that skips more steps would reach
the decay of the learning rate earlier and look better for that alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from hf_hybrid.experimental.dynamics import DynamicsModel
from hf_hybrid.leaps.trust import GainPlanner

START_WEIGHTS = Path(__file__).parent / "rssm_start.safetensors"


@dataclass(frozen=True)
class Stretch:
    """A stretch of real steps as the planner sees it."""

    features: Sequence[float]  # at its end, as progress and rate are
    loss: float
    gain: float  # what leaps moved, in units of what the real steps moved
    horizon: float  # skipped steps per real step
    progress: float  # share of the run
    rate: float  # learning rate over its peak


class ImaginedGain(GainPlanner):
    """
    Chooses the multiple of the schedule whose imagined loss is lowest, after every stretch.

    `schedule` are the arguments of [`~hf_hybrid.leaps.trust.GainPlanner`]; `rate_at` gives the learning rate at a
    progress of the run, over its peak; `stretch_share` is the length of a stretch as a share of the run.
    """

    MULTIPLES = (0.0, 0.5, 1.0, 1.5, 2.0)
    SCHEDULED = MULTIPLES.index(1.0)
    AHEAD, LASTING = 20, 5
    """Stretches to imagine, and that a choice is imagined to last; the schedule follows."""
    LEAST, OBSERVE_FIRST = 1e-4, 3
    """Difference in log loss below which the schedule is as good, and stretches before the first choice."""

    def __init__(
        self, *schedule: float, dynamics: DynamicsModel, rate_at: Callable[[float], float], stretch_share: float
    ):
        super().__init__(*schedule)
        self.dynamics, self.rate_at, self.stretch_share = dynamics, rate_at, stretch_share
        self.multiple = self.confidence = 1.0
        self.choices: list[dict] = []
        """After every stretch: `progress`, chosen `multiple` and `confidence`."""

    def gain(self, progress: float) -> float:
        return self.multiple * super().gain(progress)

    def observe(self, stretch: Stretch) -> None:
        if not math.isfinite(stretch.loss):
            return
        action = [stretch.gain, stretch.horizon, stretch.progress, stretch.rate]
        self.dynamics.observe_stretch(stretch.features, action, stretch.loss)
        ahead = min(self.AHEAD, int((1.0 - stretch.progress) / self.stretch_share + 1e-6))
        if ahead > 0:
            futures = self._futures(stretch, ahead)
            observed_enough = len(self.dynamics.history.log_losses) >= self.OBSERVE_FIRST
            choice = self._choose(futures) if observed_enough else self.SCHEDULED
            self.multiple = self.MULTIPLES[choice]
            self.dynamics.forecast(futures[choice])
            about = {"progress": stretch.progress, "multiple": self.multiple, "confidence": self.confidence}
            self.choices.append(about)

    def _futures(self, stretch: Stretch, ahead: int) -> Tensor:
        """Actions of every multiple, `[multiples, ahead, 4]`."""
        progress = [min(stretch.progress + (k + 1) * self.stretch_share, 1.0) for k in range(ahead)]
        schedule = torch.tensor([[super(ImaginedGain, self).gain(p), 0.0, p, self.rate_at(p)] for p in progress])
        futures = schedule.repeat(len(self.MULTIPLES), 1, 1)
        futures[:, : self.LASTING, 0] *= torch.tensor(self.MULTIPLES)[:, None]
        return futures

    def _choose(self, futures: Tensor) -> int:
        difference, disagreement = self.dynamics.compare(futures, futures[self.SCHEDULED])
        # A change has to win by more than the members disagree.
        scores = (difference + disagreement)[:, -1]
        best = int(scores.argmin())
        best = best if scores[best] <= -self.LEAST else self.SCHEDULED
        leap = best or self.SCHEDULED
        # 1 while leaping is imagined to be at least as good as not leaping, 0 where it is surely worse.
        self.confidence = min(1.0, 2.0 * self.dynamics.probability_better(futures[leap], futures[0]))
        return best

    def summary(self) -> dict:
        return {"choices": self.choices}

    _SAVED = ("multiple", "confidence", "choices")

    def state_dict(self) -> dict:
        return {**{name: getattr(self, name) for name in self._SAVED}, "dynamics": self.dynamics.state_dict()}

    def load_state_dict(self, state: dict) -> None:
        vars(self).update({name: state[name] for name in self._SAVED}, choices=list(state["choices"]))
        self.dynamics.load_state_dict(state["dynamics"])
