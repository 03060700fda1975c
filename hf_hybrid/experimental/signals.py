"""
The state of training as 64 named features without units, each in [-5, 5].

They are ratios, logarithms of ratios, or shares, so their meaning does not depend on the size of the model. Each is one
line of the tables below, a function of a [`View`]. A feature that is unknown yet is 0.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from hf_hybrid.part import Phase

LIMIT = 5.0


@dataclass(frozen=True)
class StepSignals:
    """Plain numbers of one step, as the trainer and the leap planner know them."""

    phase: Phase | None
    progress: float
    learning_rate: float
    rate_scale: float
    max_grad_norm: float
    loss: float | None = None  # `None` in a skipped step, like the two below
    gradient_norm: float | None = None
    statistics: dict[str, float] | None = None  # from `gradient_statistics`, where it was measured
    steps_in_phase: int = 0
    steps_since_leap: int = 0
    consecutive_leaps: int = 0
    rate_in_block: float = 0.0
    leap_gain: float = 0.0
    leap_credit: float = 0.0
    leap_decrease: float | None = None  # of the loss of a probe since the last step, in standard errors
    leap_kept: bool | None = None
    leap_residual: float = 0.0
    leap_relative_norm: float = 0.0
    confidence: float = 0.0


class SignalObserver:
    """Keeps the short histories that the features need and turns each step into 64 numbers."""

    def __init__(self):
        self.losses, self.norms = deque[float](maxlen=64), deque[float](maxlen=64)
        self.alignments, self.rates = deque[float](maxlen=32), deque[float](maxlen=8)
        self.decreases, self.kept = deque[float](maxlen=16), deque[float](maxlen=16)
        self.steps = self.predicted = 0
        self.fast = self.mid = self.slow = 0.0  # exponential averages of the loss over about 4, 16 and 64 steps
        self.first_loss = self.first_norm = self.first_weight = 0.0
        self.peak_rate = self.rate_total = 0.0
        self.clipped = 0.0  # share of the last 16 steps or so whose gradient was clipped
        self.statistics: dict[str, float] = {}
        self.previous: dict[str, float] = {}  # the statistics before these
        self._last: StepSignals | None = None

    @property
    def features(self) -> list[float]:
        """The 64 features after the last step, in the order of `FEATURE_NAMES`; zeros before a step of this start."""
        if self._last is None:
            return [0.0] * len(FEATURE_NAMES)
        view = View(self, self._last)
        return [
            _bounded(feature(view)) if is_known(view) else 0.0
            for is_known, features in _TABLES
            for feature in features.values()
        ]

    def observe(self, step: StepSignals) -> None:
        """Record one step."""
        self._last = step
        self.steps += 1
        self.rates.append(step.learning_rate)
        self.peak_rate = max(self.peak_rate, step.learning_rate)
        self.predicted += step.phase is Phase.PREDICT
        if step.leap_decrease is not None:
            self.decreases.append(_bounded(step.leap_decrease))
        if step.leap_kept is not None:
            self.kept.append(float(step.leap_kept))
        if step.loss is None or step.gradient_norm is None:
            return  # it was skipped
        self.rate_total += step.learning_rate
        self.first_loss = self.first_loss or step.loss
        self.first_norm = self.first_norm or step.gradient_norm
        if not self.losses:
            self.fast = self.mid = self.slow = step.loss
        self.fast += (step.loss - self.fast) / 4
        self.mid += (step.loss - self.mid) / 16
        self.slow += (step.loss - self.slow) / 64
        self.losses.append(step.loss)
        self.norms.append(step.gradient_norm)
        over = step.max_grad_norm > 0 and step.gradient_norm > step.max_grad_norm
        self.clipped += (over - self.clipped) / 16
        if step.statistics:
            self.previous, self.statistics = self.statistics, step.statistics
            self.first_weight = self.first_weight or step.statistics["weight"]
            self.alignments.append(step.statistics["alignment"])

    def state_dict(self) -> dict[str, Any]:
        state = {name: list(value) if isinstance(value, deque) else value for name, value in vars(self).items()}
        del state["_last"]  # features are read after a step
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, value in state.items():
            kept = getattr(self, name)
            setattr(self, name, deque(value, kept.maxlen) if isinstance(kept, deque) else value)


class View:
    """What the features of a step are computed from."""

    def __init__(self, observer: SignalObserver, step: StepSignals):
        self.seen, self.step, self.statistics = observer, step, observer.statistics
        self.losses, self.norms, self.alignments = map(np.array, (observer.losses, observer.norms, observer.alignments))
        self.rate = max(step.learning_rate, 1e-12)
        if len(self.losses) > 1:
            self.mean, self.std = self.losses.mean(), max(self.losses.std(), 1e-12)
            self.change = np.diff(self.losses)
            self.mean_norm = max(self.norms.mean(), 1e-12)
            self.covariance = ((self.losses - self.mean) * (self.norms - self.norms.mean())).mean()
        if self.statistics:
            self.ratio = self.statistics["first"] / max(self.statistics["second"], 1e-20)
            self.clipped_norm = min(self.norms[-1], step.max_grad_norm or self.norms[-1])  # as the optimizer got it


Features = dict[str, Callable[[View], Any]]

_LEVEL: Features = {"loss_level": lambda v: math.log1p(abs(v.losses[-1]))}
_LOSS: Features = {
    "loss_log_ratio_to_first": lambda v: _log_ratio(v.seen.fast, v.seen.first_loss),
    "loss_z_score": lambda v: (v.losses[-1] - v.mean) / v.std,
    "loss_std_over_mean": lambda v: 10 * v.std / max(abs(v.mean), 1e-12),
    "loss_min_gap": lambda v: (v.mean - v.losses.min()) / v.std,
    "loss_max_gap": lambda v: (v.losses.max() - v.mean) / v.std,
    **{f"loss_slope_{n}": lambda v, n=n: _slope(v.losses[-n:]) / v.std * n for n in (8, 16, 32)},
    "loss_slope_64": lambda v: _slope(v.losses) / v.std * len(v.losses),
    "loss_curvature": lambda v: (
        (_slope(v.losses[len(v.losses) // 2 :]) - _slope(v.losses[: len(v.losses) // 2])) / v.std * len(v.losses)
    ),
    "loss_fast_minus_mid": lambda v: (v.seen.fast - v.seen.mid) / v.std,
    "loss_mid_minus_slow": lambda v: (v.seen.mid - v.seen.slow) / v.std,
    "loss_autocorrelation": lambda v: _autocorrelation(v.losses),
    "loss_share_falling": lambda v: (v.change < 0).mean(),
    "loss_turns": lambda v: (v.change[1:] * v.change[:-1] < 0).mean() if len(v.change) > 1 else 0.0,
}
_NORM: Features = {"norm_log": lambda v: math.log10(max(v.norms[-1], 1e-12))}
_GRADIENT: Features = {
    "norm_log_ratio_to_mean": lambda v: _log_ratio(v.norms[-1], v.mean_norm),
    "norm_std_over_mean": lambda v: v.norms.std() / v.mean_norm,
    "norm_min_ratio": lambda v: v.norms.min() / v.mean_norm,
    "norm_max_ratio": lambda v: v.norms.max() / v.mean_norm,
    "norm_slope_16": lambda v: _slope(v.norms[-16:]) / v.mean_norm * 16,
    "norm_slope_64": lambda v: _slope(v.norms) / v.mean_norm * len(v.norms),
    "norm_autocorrelation": lambda v: _autocorrelation(v.norms),
    "norm_share_clipped": lambda v: v.seen.clipped,
    "norm_clip_ratio": lambda v: _log_ratio(v.norms[-1], v.step.max_grad_norm or v.mean_norm),
    "norm_loss_correlation": lambda v: v.covariance / max(v.losses.std() * v.norms.std(), 1e-12),
    "norm_log_ratio_to_first": lambda v: _log_ratio(v.norms[-1], v.seen.first_norm),
}
_OPTIMIZER: Features = {
    "moment_first_log": lambda v: math.log10(max(v.statistics["first"], 1e-20)) + 5,
    "moment_second_log": lambda v: math.log10(max(v.statistics["second"], 1e-20)) + 5,
    "moment_signal_to_noise": lambda v: v.ratio,
    "moment_first_trend": lambda v: _log_ratio(v.statistics["first"], v.seen.previous.get("first", 0.0)),
    "moment_second_trend": lambda v: _log_ratio(v.statistics["second"], v.seen.previous.get("second", 0.0)),
    "update_over_weight": lambda v: (
        math.log10(max(v.step.learning_rate * v.ratio / max(v.statistics["weight"], 1e-20), 1e-12)) + 3
    ),
    "weight_log_ratio_to_first": lambda v: 10 * _log_ratio(v.statistics["weight"], v.seen.first_weight),
    "memory_over_gradient": lambda v: v.statistics["memory"] / max(v.clipped_norm, 1e-20),
    "memory_alignment": lambda v: v.statistics["alignment"],
    "memory_alignment_mean": lambda v: v.alignments.mean(),
    "memory_alignment_std": lambda v: v.alignments.std(),
    "memory_age": lambda v: math.log10(1 + len(v.alignments)),
}
_RUN: Features = {
    "rate_log": lambda v: math.log10(v.rate) + 4,
    "rate_over_peak": lambda v: v.rate / max(v.seen.peak_rate, 1e-12),
    "rate_change": lambda v: 10 * _log_ratio(v.seen.rates[-1], v.seen.rates[0]),
    "rate_scale_log": lambda v: math.log(max(v.step.rate_scale, 1e-12)) / 2,
    "rate_spent": lambda v: v.seen.rate_total / max(v.seen.peak_rate * v.seen.steps, 1e-12),
    "rate_times_norm": lambda v: math.log10(v.rate * max(v.seen.norms[-1] if v.seen.norms else 0.0, 1e-12)) + 4,
    "rate_in_block": lambda v: v.step.rate_in_block / max(v.seen.peak_rate, 1e-12) / 5,
    "progress": lambda v: v.step.progress,
    **{f"phase_{phase.value}": lambda v, phase=phase: v.step.phase is phase for phase in Phase},
    "steps_in_phase": lambda v: math.log1p(v.step.steps_in_phase),
    "steps_since_leap": lambda v: math.log1p(v.step.steps_since_leap),
    "consecutive_leaps": lambda v: v.step.consecutive_leaps / 5,
    "share_predicted": lambda v: 5 * v.seen.predicted / v.seen.steps,
    "leap_gain": lambda v: v.step.leap_gain,
    "leap_credit": lambda v: v.step.leap_credit,
    "leap_decrease": lambda v: v.seen.decreases[-1] if v.seen.decreases else 0.0,
    "leap_decrease_mean": lambda v: _mean(v.seen.decreases),
    "leap_share_kept": lambda v: _mean(v.seen.kept),
    "leap_residual": lambda v: v.step.leap_residual,
    "leap_relative_norm_log": lambda v: math.log10(max(v.step.leap_relative_norm, 1e-8)) + 3,
    "confidence": lambda v: v.step.confidence,
}
_TABLES: tuple[tuple[Callable[[View], Any], Features], ...] = (
    (lambda v: len(v.losses) > 0, _LEVEL),
    (lambda v: len(v.losses) > 1, _LOSS),
    (lambda v: len(v.norms) > 0, _NORM),
    (lambda v: len(v.norms) > 1, _GRADIENT),
    (lambda v: bool(v.statistics), _OPTIMIZER),
    (lambda v: True, _RUN),
)
"""Whether the features of a table are known, and these. Their order is that of the weights of the world model."""
FEATURE_NAMES = tuple(name for _, features in _TABLES for name in features)


def _bounded(value: float) -> float:
    return min(max(float(value), -LIMIT), LIMIT) if math.isfinite(value) else 0.0


def _log_ratio(value: float, reference: float) -> float:
    return math.log(max(value, 1e-20) / max(reference, 1e-20)) if value > 0 and reference > 0 else 0.0


def _mean(values: deque[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def _slope(x: np.ndarray) -> float:
    """Least-squares slope per step."""
    if len(x) < 2:
        return 0.0
    t = np.arange(len(x)) - (len(x) - 1) / 2
    return float(t @ x / (t @ t))


def _autocorrelation(x: np.ndarray) -> float:
    """Return the correlation of neighbouring values around the straight line through all of them."""
    residual = x - x.mean() - _slope(x) * (np.arange(len(x)) - (len(x) - 1) / 2)
    energy = float(residual @ residual)
    return float(residual[1:] @ residual[:-1]) / energy if energy > 1e-20 else 0.0
