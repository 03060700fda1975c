"""A planner of the gain that tries multiples of the schedule and learns which of them earned most."""

from __future__ import annotations

import numpy as np
import torch

from hf_hybrid.experimental.observer import LearningPlanner, Stretch


class BanditGain(LearningPlanner):
    """
    LinUCB (Li et al., 2010, arXiv 1003.0146) over multiples of the schedule, one choice per stretch.

    The context are the 64 features; the reward of a stretch is how much more than usual the loss fell in it, in units
    of the usual change, so that it is free of scale.
    """

    ARMS, FEATURES = (0.0, 0.5, 1.0, 2.0), 64
    EXPLORATION = 1.0
    """Width of the confidence bound."""

    def __init__(self, peak: float, power: float, worth: float):
        super().__init__(peak, power, worth)
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
        self.context = context = np.append(np.asarray(stretch.features, dtype=np.float64) / self.FEATURES**0.5, 1.0)
        self.arm = int(np.argmax([self._bound(arm, context) for arm in range(len(self.ARMS))]))

    def _bound(self, arm: int, context: np.ndarray) -> float:
        solved = np.linalg.solve(self.covariance[arm], np.stack([self.response[arm], context], axis=1))
        return float(context @ solved[:, 0] + self.EXPLORATION * np.sqrt(max(context @ solved[:, 1], 0.0)))

    _SAVED = ("arm", "last_loss", "usual", "spread")

    def state_dict(self) -> dict:
        tensors = {"covariance": torch.from_numpy(self.covariance), "response": torch.from_numpy(self.response)}
        if self.context is not None:
            tensors["context"] = torch.from_numpy(self.context)
        return {**{name: getattr(self, name) for name in self._SAVED}, "tensors": tensors}

    def load_state_dict(self, state: dict) -> None:
        vars(self).update({name: state[name] for name in self._SAVED})
        vars(self).update({name: tensor.numpy().copy() for name, tensor in state["tensors"].items()})
