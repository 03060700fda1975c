"""
Choose gains by imagination: compare the world model's forecasts with and without leaps.

Planning by imagination is the other half of Dreamer (Hafner et al., 2023, arXiv 2301.04104): a model of the world is
asked what would happen, and the best answer is done. With one small decision per stretch no actor network is needed.
After every stretch of real steps [`ImaginedGain`]

1. imagines the next 20 stretches five times: with the schedule's gain times 0, 0.5, 1, 1.5 and 2 in the first 5 of
   them, and with the schedule after those;
2. compares the losses at the far end, because leaps that pay often look neutral at first. A change of the schedule
   must win by more than the members of the ensemble disagree; where the model sees no difference the schedule stays;
3. sets the worth of leaps (how many steps they replace) from the same imagined futures: the loss that leaps gain over
   no leaps, divided by the imagined fall per step;
4. sets the confidence from the probability that leaping is better than not leaping;
5. forecasts the actions that will now be taken and keeps the forecast, whose errors calibrate the next ones.

All candidates are imagined at the same progress and with no skipped steps. Otherwise a candidate that skips more steps
would reach the decay of the learning rate earlier and look better for that alone.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from hf_hybrid.world_model.dynamics import DynamicsModel
from hf_hybrid.world_model.observer import LearningPlanner, Stretch
from hf_hybrid.world_model.rssm import RSSM

START_WEIGHTS = Path(__file__).parent / "rssm_start.safetensors"


class ImaginedGain(LearningPlanner):
    """
    Chooses the multiple of the schedule whose imagined loss is lowest, after every stretch.

    `rate_at` gives the learning rate at a progress of the run, over its peak; `stretch_share` is the length of a
    stretch as a share of the run.
    """

    MULTIPLES = (0.0, 0.5, 1.0, 1.5, 2.0)
    SCHEDULED = MULTIPLES.index(1.0)
    AHEAD, LASTING = 20, 5
    """Stretches to imagine, and that a choice is imagined to last; the schedule follows."""
    LEAST = 1e-4
    """Difference in log loss below which the schedule is as good."""
    OBSERVE_FIRST = 3
    """Stretches before the first choice."""

    def __init__(
        self,
        peak: float,
        power: float,
        worth: float,
        *,
        dynamics: DynamicsModel,
        rate_at: Callable[[float], float],
        stretch_share: float,
    ):
        super().__init__(peak, power, worth)
        self.dynamics, self.rate_at, self.stretch_share = dynamics, rate_at, stretch_share
        self.multiple = self.confidence = 1.0
        self.imagined_worth: float | None = None
        self.seconds = 0.0
        """Time that the planner has taken."""
        self.choices: list[dict] = []
        """After every stretch: `progress`, chosen `multiple`, `imagined_worth` and `confidence`."""

    def gain(self, progress: float) -> float:
        return self.multiple * super().gain(progress)

    def worth_of(self, gain: float, real_steps: int) -> float:
        """The imagined worth, between 0 and twice the schedule's; the schedule's before anything was imagined."""
        prior = super().worth_of(gain, real_steps)
        if self.imagined_worth is None:
            return prior
        return min(max(self.imagined_worth * real_steps, 0.0), 2.0 * prior)

    def observe(self, stretch: Stretch) -> None:
        began = time.perf_counter()
        if math.isfinite(stretch.loss):
            action = [stretch.gain, stretch.horizon, stretch.progress, stretch.rate]
            self.dynamics.observe_stretch(stretch.features, action, stretch.loss)
            ahead = min(self.AHEAD, int((1.0 - stretch.progress) / self.stretch_share + 1e-6))
            if ahead > 0:
                self._plan(stretch, ahead)
        self.seconds += time.perf_counter() - began

    def _plan(self, stretch: Stretch, ahead: int) -> None:
        observed_enough = self.dynamics.stretches >= self.OBSERVE_FIRST
        choice = self._choose(self._candidates(stretch, ahead)) if observed_enough else self.SCHEDULED
        self.multiple = self.MULTIPLES[choice]
        self.dynamics.forecast(self._intended(stretch, ahead))
        values = {name: getattr(self, name) for name in ("multiple", "imagined_worth", "confidence")}
        self.choices.append({"progress": stretch.progress, **values})

    def _candidates(self, stretch: Stretch, ahead: int) -> Tensor:
        """Actions of every multiple, `[multiples, ahead, 4]`, all at the same progress and without skipped steps."""
        progress = [min(stretch.progress + (k + 1) * self.stretch_share, 1.0) for k in range(ahead)]
        known = [(super(ImaginedGain, self).gain(p), p, self.rate_at(p)) for p in progress]
        return torch.tensor([
            [[gain * (multiple if k < self.LASTING else 1.0), 0.0, p, rate] for k, (gain, p, rate) in enumerate(known)]
            for multiple in self.MULTIPLES
        ])  # fmt: skip

    def _intended(self, stretch: Stretch, ahead: int) -> Tensor:
        """The actions that will be taken, `[up to ahead, 4]`; skipped steps bring the end of the run nearer."""
        actions, progress = [], stretch.progress
        for k in range(ahead):
            gain = super().gain(progress) * (self.multiple if k < self.LASTING else 1.0)
            horizon = self.worth_of(gain, 1)
            progress += (1.0 + horizon) * self.stretch_share
            if progress > 1.0 + 1e-6 and actions:
                break
            progress = min(progress, 1.0)
            actions.append([gain, horizon, progress, self.rate_at(progress)])
        return torch.tensor(actions)

    def _choose(self, candidates: Tensor) -> int:
        difference, disagreement = self.dynamics.compare(candidates, candidates[self.SCHEDULED])
        # A change has to win by more than the members disagree.
        scores = (difference + disagreement)[:, -1]
        best = int(scores.argmin())
        best = best if scores[best] <= -self.LEAST else self.SCHEDULED
        leap = best or self.SCHEDULED
        # 1 while leaping is imagined to be at least as good as not leaping, 0 where it is surely worse.
        better = self.dynamics.probability_better(candidates[leap, None], candidates[0, None])
        self.confidence = min(1.0, 2.0 * better.item())
        # The loss that leaping is sure to gain over not leaping: less the disagreement of the members.
        gained = difference[0] - difference[leap] - disagreement[0]
        self.imagined_worth = self._worth(gained[-1].item(), candidates[0])
        return best

    def _worth(self, gained: float, without: Tensor) -> float | None:
        """Skipped steps per real step: log loss gained by leaps, over the imagined fall per step at the far end."""
        mean = [0.0, *self.dynamics.forecast(without).mean]
        stretch = min(self.LASTING, len(mean) - 1)
        fall = (mean[-1 - stretch] - mean[-1]) / stretch
        return max(gained, 0.0) / fall / stretch if fall > 0 else None

    def summary(self) -> dict:
        """The choices, what they cost, and mean absolute errors in log loss of three forecasts, by stretches ahead."""
        names, errors = ("model", "persistence", "power_law"), self.dynamics.calibration.mean_errors()
        return {
            "choices": self.choices,
            "seconds": self.seconds,
            "errors": {k: dict(zip(names, values)) for k, values in errors.items()},
        }

    _SAVED = ("multiple", "imagined_worth", "confidence", "seconds", "choices")

    def state_dict(self) -> dict:
        return {**{name: getattr(self, name) for name in self._SAVED}, "dynamics": self.dynamics.state_dict()}

    def load_state_dict(self, state: dict) -> None:
        vars(self).update({name: state[name] for name in self._SAVED}, choices=list(state["choices"]))
        self.dynamics.load_state_dict(state["dynamics"])


def imagined_gain(
    values: tuple[float, float, float],
    *,
    device: torch.device,
    factor_at: Callable[[int], float] | None,
    max_steps: int,
    stride: int,
) -> ImaginedGain:
    """
    Make the planner of a run, whose world model has the weights that the package ships.

    `values` are `peak`, `power` and `worth` of [`~hf_hybrid.leaps.trust.GainPlanner`]; `stride` is the length of a
    stretch. `factor_at` gives the factor of the learning rate in a step; `None` is taken for a linear decay to zero.
    """
    peak = 0.0 if factor_at is None else max(factor_at(round(step * max_steps / 100)) for step in range(101))

    def over_peak(progress: float) -> float:
        if factor_at is None:
            return 1.0 - progress
        return factor_at(round(progress * max_steps)) / peak if peak > 0 else 0.0

    dynamics = DynamicsModel(RSSM().load(START_WEIGHTS), device)
    return ImaginedGain(*values, dynamics=dynamics, rate_at=over_peak, stretch_share=stride / max_steps)
