"""
The state of training as 64 named features without units, each in [-5, 5].

They are ratios, logarithms of ratios, or shares, so their meaning does not depend on the size of the model. A feature
that is unknown yet is 0.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from typing import Any

import numpy as np

from hf_hybrid.part import Phase

LIMIT = 5.0
_LOSS = (
    "loss_level", "loss_log_ratio_to_first", "loss_z_score", "loss_std_over_mean", "loss_min_gap", "loss_max_gap",
    "loss_slope_8", "loss_slope_16", "loss_slope_32", "loss_slope_64", "loss_curvature", "loss_fast_minus_mid",
    "loss_mid_minus_slow", "loss_autocorrelation", "loss_share_falling", "loss_turns",
)  # fmt: skip
_GRADIENT = (
    "norm_log", "norm_log_ratio_to_mean", "norm_std_over_mean", "norm_min_ratio", "norm_max_ratio", "norm_slope_16",
    "norm_slope_64", "norm_autocorrelation", "norm_share_clipped", "norm_clip_ratio", "norm_loss_correlation",
    "norm_log_ratio_to_first",
)  # fmt: skip
_OPTIMIZER = (
    "moment_first_log", "moment_second_log", "moment_signal_to_noise", "moment_first_trend", "moment_second_trend",
    "update_over_weight", "weight_log_ratio_to_first", "memory_over_gradient", "memory_alignment",
    "memory_alignment_mean", "memory_alignment_std", "memory_age",
)  # fmt: skip
_RATE = (
    "rate_log", "rate_over_peak", "rate_change", "rate_scale_log", "rate_spent", "rate_times_norm", "rate_in_block",
    "progress",
)  # fmt: skip
_PHASE = (
    "phase_warmup", "phase_full", "phase_predict", "phase_correct", "steps_in_phase", "steps_since_leap",
    "consecutive_leaps", "share_predicted",
)  # fmt: skip
_LEAP = (
    "leap_gain", "leap_credit", "leap_decrease", "leap_decrease_mean", "leap_share_kept", "leap_residual",
    "leap_relative_norm_log", "confidence",
)  # fmt: skip
FEATURE_NAMES = _LOSS + _GRADIENT + _OPTIMIZER + _RATE + _PHASE + _LEAP
assert len(FEATURE_NAMES) == 64


@dataclass(frozen=True)
class StepSignals:
    """Plain numbers of one step, as the trainer and the leap planner know them."""

    phase: Phase | None
    """`None` in a run without phases, as in [`~hf_hybrid.part.Step`]."""
    progress: float
    learning_rate: float
    rate_scale: float
    max_grad_norm: float
    loss: float | None = None
    """Training loss; `None` in a skipped step, like the two below."""
    gradient_norm: float | None = None
    statistics: dict[str, float] | None = None
    """Of the optimizer, see `gradient_statistics` in observer.py; `None` where it was not measured."""
    steps_in_phase: int = 0
    steps_since_leap: int = 0
    consecutive_leaps: int = 0
    rate_in_block: float = 0.0
    leap_gain: float = 0.0
    leap_credit: float = 0.0
    leap_decrease: float | None = None
    """Held-out decrease of a leap probed since the last step, in standard errors."""
    leap_kept: bool | None = None
    leap_residual: float = 0.0
    leap_relative_norm: float = 0.0
    confidence: float = 0.0


class SignalObserver:
    """Keeps the short histories that the features need and turns each step into 64 numbers."""

    def __init__(self):
        self.losses: deque[float] = deque(maxlen=64)
        self.norms: deque[float] = deque(maxlen=64)
        self.alignments: deque[float] = deque(maxlen=32)
        self.decreases: deque[float] = deque(maxlen=16)
        self.kept: deque[float] = deque(maxlen=16)
        self.rates: deque[float] = deque(maxlen=8)
        self.steps = self.predicted = 0
        self.fast = self.mid = self.slow = 0.0
        """Exponential averages of the loss over about 4, 16 and 64 steps."""
        self.first_loss = self.first_norm = self.first_weight = 0.0
        self.peak_rate = self.rate_total = 0.0
        self.clipped = 0.0
        """Share of the last 16 steps or so whose gradient was clipped."""
        self.moment_first = self.moment_second = self.previous_first = self.previous_second = 0.0
        self.statistics: dict[str, float] = {}
        self._features = [0.0] * len(FEATURE_NAMES)
        self._unread: StepSignals | None = None

    def observe(self, step: StepSignals) -> None:
        """Record one step. This is cheap, because the features are computed only on demand."""
        self._remember(step)
        self._unread = step

    @property
    def features(self) -> list[float]:
        """Return the 64 features after the last step, each in [-5, 5], in the order of `FEATURE_NAMES`."""
        step, self._unread = self._unread, None
        if step is None:
            return self._features
        values = {**self._loss(), **self._gradient(step), **self._optimizer(step), **self._rate(step)}
        values.update(self._phase(step))
        values.update(self._leap(step))
        self._features = [_bounded(values[name]) for name in FEATURE_NAMES]
        return self._features

    def _remember(self, step: StepSignals) -> None:
        self.steps += 1
        self.rates.append(step.learning_rate)
        self.peak_rate = max(self.peak_rate, step.learning_rate)
        self.predicted += step.phase is Phase.PREDICT
        if step.leap_decrease is not None:
            self.decreases.append(_bounded(step.leap_decrease))
        if step.leap_kept is not None:
            self.kept.append(float(step.leap_kept))
        if step.loss is None or step.gradient_norm is None:
            return
        self.rate_total += step.learning_rate
        self.first_loss = self.first_loss or step.loss
        self.first_norm = self.first_norm or step.gradient_norm
        if self.losses:
            self.fast += (step.loss - self.fast) / 4
            self.mid += (step.loss - self.mid) / 16
            self.slow += (step.loss - self.slow) / 64
        else:
            self.fast = self.mid = self.slow = step.loss
        self.losses.append(step.loss)
        self.norms.append(step.gradient_norm)
        over = step.max_grad_norm > 0 and step.gradient_norm > step.max_grad_norm
        self.clipped += (over - self.clipped) / 16
        if step.statistics:
            self.previous_first, self.previous_second = self.moment_first, self.moment_second
            self.statistics = step.statistics
            self.moment_first, self.moment_second = step.statistics["first"], step.statistics["second"]
            self.first_weight = self.first_weight or step.statistics["weight"]
            self.alignments.append(step.statistics["alignment"])

    def _loss(self) -> dict[str, float]:
        x = np.asarray(self.losses, dtype=np.float64)
        if len(x) < 2:
            return dict.fromkeys(_LOSS, 0.0) | {"loss_level": math.log1p(abs(x[-1])) if len(x) else 0.0}
        mean, std = x.mean(), max(x.std(), 1e-12)
        change = np.diff(x)
        return {
            "loss_level": math.log1p(abs(x[-1])),
            "loss_log_ratio_to_first": _log_ratio(self.fast, self.first_loss),
            "loss_z_score": (x[-1] - mean) / std,
            "loss_std_over_mean": 10 * std / max(abs(mean), 1e-12),
            "loss_min_gap": (mean - x.min()) / std,
            "loss_max_gap": (x.max() - mean) / std,
            "loss_slope_8": _slope(x[-8:]) / std * 8,
            "loss_slope_16": _slope(x[-16:]) / std * 16,
            "loss_slope_32": _slope(x[-32:]) / std * 32,
            "loss_slope_64": _slope(x) / std * len(x),
            "loss_curvature": (_slope(x[len(x) // 2 :]) - _slope(x[: len(x) // 2])) / std * len(x),
            "loss_fast_minus_mid": (self.fast - self.mid) / std,
            "loss_mid_minus_slow": (self.mid - self.slow) / std,
            "loss_autocorrelation": _autocorrelation(x),
            "loss_share_falling": float((change < 0).mean()),
            "loss_turns": float((change[1:] * change[:-1] < 0).mean()) if len(change) > 1 else 0.0,
        }

    def _gradient(self, step: StepSignals) -> dict[str, float]:
        x = np.asarray(self.norms, dtype=np.float64)
        if len(x) < 2:
            return dict.fromkeys(_GRADIENT, 0.0) | {"norm_log": math.log10(max(x[-1], 1e-12)) if len(x) else 0.0}
        mean = max(x.mean(), 1e-12)
        losses = np.asarray(self.losses, dtype=np.float64)
        together = (losses - losses.mean()) * (x - x.mean())
        clip = step.max_grad_norm or mean
        return {
            "norm_log": math.log10(max(x[-1], 1e-12)),
            "norm_log_ratio_to_mean": _log_ratio(x[-1], mean),
            "norm_std_over_mean": x.std() / mean,
            "norm_min_ratio": x.min() / mean,
            "norm_max_ratio": x.max() / mean,
            "norm_slope_16": _slope(x[-16:]) / mean * 16,
            "norm_slope_64": _slope(x) / mean * len(x),
            "norm_autocorrelation": _autocorrelation(x),
            "norm_share_clipped": self.clipped,
            "norm_clip_ratio": _log_ratio(x[-1], clip),
            "norm_loss_correlation": together.mean() / max(losses.std() * x.std(), 1e-12),
            "norm_log_ratio_to_first": _log_ratio(x[-1], self.first_norm),
        }

    def _optimizer(self, step: StepSignals) -> dict[str, float]:
        s = self.statistics
        if not s:
            return dict.fromkeys(_OPTIMIZER, 0.0)
        aligned = np.asarray(self.alignments, dtype=np.float64)
        ratio = s["first"] / max(s["second"], 1e-20)
        norm = min(self.norms[-1], step.max_grad_norm or self.norms[-1])
        return {
            "moment_first_log": math.log10(max(s["first"], 1e-20)) + 5,
            "moment_second_log": math.log10(max(s["second"], 1e-20)) + 5,
            "moment_signal_to_noise": ratio,
            "moment_first_trend": _log_ratio(self.moment_first, self.previous_first),
            "moment_second_trend": _log_ratio(self.moment_second, self.previous_second),
            "update_over_weight": math.log10(max(step.learning_rate * ratio / max(s["weight"], 1e-20), 1e-12)) + 3,
            "weight_log_ratio_to_first": 10 * _log_ratio(s["weight"], self.first_weight),
            "memory_over_gradient": s["memory"] / max(norm, 1e-20),
            "memory_alignment": s["alignment"],
            "memory_alignment_mean": float(aligned.mean()),
            "memory_alignment_std": float(aligned.std()),
            "memory_age": math.log10(1 + len(self.alignments)),
        }

    def _rate(self, step: StepSignals) -> dict[str, float]:
        rate = max(step.learning_rate, 1e-12)
        return {
            "rate_log": math.log10(rate) + 4,
            "rate_over_peak": rate / max(self.peak_rate, 1e-12),
            "rate_change": 10 * _log_ratio(self.rates[-1], self.rates[0]),
            "rate_scale_log": math.log(max(step.rate_scale, 1e-12)) / 2,
            "rate_spent": self.rate_total / max(self.peak_rate * self.steps, 1e-12),
            "rate_times_norm": math.log10(rate * max(self.norms[-1] if self.norms else 0.0, 1e-12)) + 4,
            "rate_in_block": step.rate_in_block / max(self.peak_rate, 1e-12) / 5,
            "progress": step.progress,
        }

    def _phase(self, step: StepSignals) -> dict[str, float]:
        return {
            **{f"phase_{phase.value}": float(step.phase is phase) for phase in Phase},
            "steps_in_phase": math.log1p(step.steps_in_phase),
            "steps_since_leap": math.log1p(step.steps_since_leap),
            "consecutive_leaps": step.consecutive_leaps / 5,
            "share_predicted": 5 * self.predicted / self.steps,
        }

    def _leap(self, step: StepSignals) -> dict[str, float]:
        return {
            "leap_gain": step.leap_gain,
            "leap_credit": step.leap_credit,
            "leap_decrease": self.decreases[-1] if self.decreases else 0.0,
            "leap_decrease_mean": sum(self.decreases) / len(self.decreases) if self.decreases else 0.0,
            "leap_share_kept": sum(self.kept) / len(self.kept) if self.kept else 0.0,
            "leap_residual": step.leap_residual,
            "leap_relative_norm_log": math.log10(max(step.leap_relative_norm, 1e-8)) + 3,
            "confidence": step.confidence,
        }

    def state_dict(self) -> dict[str, Any]:
        state = {**vars(self), "_features": self.features}
        del state["_unread"]
        return {name: list(value) if isinstance(value, deque) else value for name, value in state.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, value in state.items():
            kept = getattr(self, name)
            setattr(self, name, deque(value, kept.maxlen) if isinstance(kept, deque) else value)
        self._unread = None


def _bounded(value: float) -> float:
    return min(max(float(value), -LIMIT), LIMIT) if math.isfinite(value) else 0.0


def _log_ratio(value: float, reference: float) -> float:
    return math.log(max(value, 1e-20) / max(reference, 1e-20)) if value > 0 and reference > 0 else 0.0


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
