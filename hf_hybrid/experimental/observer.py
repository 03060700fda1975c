"""
What the planner that learns is shown of a run: the signals of each step, gathered into stretches.

[`PlannerObserver`] turns each step into 64 signals (signals.py), measures the optimizer's moments now and then, and
keeps a confidence in leaps. It hands the planner a [`Stretch`] of ten real steps or more at a time: their loss, the
leaps in them, the signals at their end. Runs with the schedule have none of it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from hf_hybrid.experimental.imagination import ImaginedGain, Stretch
from hf_hybrid.experimental.signals import SignalObserver, StepSignals
from hf_hybrid.leaps.leap import LeapObserver, Leaps
from hf_hybrid.leaps.trajectory import Trajectory
from hf_hybrid.part import NORMAL, Action, Leap, Level, Step, Verdict
from hf_hybrid.run.run import Run
from hf_hybrid.run.weights import inner_product, sums_of_squares


class StretchCounter:
    """Gathers steps and leaps into stretches of `stride` real steps, from which the planner learns."""

    def __init__(self, stride: int):
        self.stride = stride
        self.losses: list[float] = []
        self.gain, self.predicted, self.peak_rate = 0.0, 0, 0.0
        """`gain`: sum over kept leaps of their gain times the real steps before them."""

    def step(self, loss: float | None, learning_rate: float) -> bool:
        """Count a step (`loss` is `None` if it was skipped), and return whether a stretch is complete."""
        self.peak_rate = max(self.peak_rate, learning_rate)
        if loss is None:
            self.predicted += 1
            return False
        self.losses.append(loss)
        return len(self.losses) >= self.stride

    def close(self, features: Sequence[float], progress: float, learning_rate: float) -> Stretch:
        """Return the complete stretch, and begin the next one."""
        rate = learning_rate / self.peak_rate if self.peak_rate > 0 else 0.0
        loss = sum(self.losses) / len(self.losses)
        stretch = Stretch(features, loss, self.gain / self.stride, self.predicted / self.stride, progress, rate)
        self.losses, self.gain, self.predicted = [], 0.0, 0
        return stretch


class Confidence:
    """
    Trust in the next leap, one of the signals: the posterior share of kept leaps, times the stability of the run, times
    the planner's probability that leaping pays.
    """

    PRIOR_KEPT, PRIOR_REJECTED, EVIDENCE_HALF_LIFE = 3.0, 1.0, 50.0

    def __init__(self):
        self.kept = self.rejected = 0.0
        """Evidence that fades: leaps that were kept (a quarter for those that were not probed), and rejected ones."""
        self.stability = 1.0

    def observe_step(self, level: Level) -> None:
        """Fade the evidence towards the prior, so that a run that rejected early leaps tries again later."""
        keep = 0.5 ** (1.0 / self.EVIDENCE_HALF_LIFE)
        self.kept *= keep
        self.rejected *= keep
        target = {Level.NORMAL: 1.0, Level.CAUTION: 0.9, Level.WARNING: 0.5, Level.CRITICAL: 0.25}[level]
        self.stability = target if target < self.stability else self.stability + 0.1 * (1.0 - self.stability)

    def value(self, believed: float) -> float:
        """Return the confidence in `[0, 1]`; `believed` is the planner's probability that leaping pays."""
        kept = self.PRIOR_KEPT + self.kept
        share = kept / (kept + self.PRIOR_REJECTED + self.rejected)
        return self.stability * share * believed


class PlannerObserver(LeapObserver):
    """Shows the planner of the leaps the run in stretches of `stride` real steps, and logs the confidence."""

    name = "planner_observer"
    STATISTICS_EVERY = 8
    """Real steps between measurements of the optimizer's moments: they cost a pass over its states."""

    def __init__(self, planner: ImaginedGain, *, stride: int, max_grad_norm: float):
        self.planner, self.max_grad_norm = planner, max_grad_norm
        self.signals, self.stretches, self.sureness = SignalObserver(), StretchCounter(stride), Confidence()
        self.linearity = 0.0
        """Fall of the probe's loss over the fall predicted to first order, at the leap probed last: a signal."""
        self.steps_since_leap = 0
        self._tried: dict[str, Any] = {}
        """Signals of a leap that was tried since the last step."""
        self._statistics: dict[str, float] | None = None

    def begin(self, run: Run) -> None:
        self.run, self.leaps = run, next(part for part in run.parts if isinstance(part, Leaps))

    @property
    def confidence(self) -> float:
        return self.sureness.value(self.planner.confidence)

    def leap_tried(self, leaps: Leaps, leap: Leap) -> None:
        self._tried = {"leap_kept": leap.verdict != "rejected"}
        if leap.loss_before is not None and leap.loss_after is not None and leap.standard_error:
            self._tried["leap_decrease"] = (leap.loss_before - leap.loss_after) / leap.standard_error
        if leap.loss_before is not None and leap.predicted_decrease > 0 and math.isfinite(leap.decrease):
            self.linearity = leap.decrease / leap.predicted_decrease
        if leap.verdict != "rejected":
            self.stretches.gain += leap.gain * leap.real_steps
            self.steps_since_leap = 0

    def leap_accepted(self, leaps: Leaps, leap: Leap) -> None:
        self.sureness.kept += 1.0 if leap.loss_before is not None else 0.25

    def leaps_rejected(self, leaps: Leaps, leap: Leap | None) -> None:
        self.sureness.rejected += 1.0

    def before_update(self, step: Step) -> None:
        self._statistics = None
        if not step.withheld and self.leaps.trajectory.clock.steps_seen % self.STATISTICS_EVERY == 1:
            try:
                self._statistics = gradient_statistics(self.leaps.trajectory)
            except Exception as error:
                self.run.survive(error, "predictor missed a gradient")

    def end_step(self, step: Step) -> None:
        tried, self._tried = self._tried, {}
        leaps, last = self.leaps, self.run.record.leaps[-1] if self.run.record.leaps else None
        self.signals.observe(
            StepSignals(
                phase=step.phase,
                progress=(step.index + 1) / self.run.max_steps,
                learning_rate=step.learning_rate * self.run.rate_scale,
                rate_scale=self.run.rate_scale,
                max_grad_norm=self.max_grad_norm,
                loss=step.loss if step.counts else None,
                gradient_norm=step.gradient_norm if step.counts else None,
                statistics=self._statistics if step.counts else None,
                steps_in_phase=leaps.controller.steps_in_phase,
                steps_since_leap=self.steps_since_leap,
                consecutive_leaps=leaps.controller.consecutive_leaps,
                rate_in_block=leaps.trajectory.clock.lr_sum,
                leap_gain=last.gain if last else 0.0,
                leap_credit=leaps.credit,
                leap_residual=self.linearity,
                leap_relative_norm=last.relative_norm if last else 0.0,
                confidence=self.confidence,
                **tried,
            )
        )
        self.sureness.observe_step((step.verdict or NORMAL).level)
        self.steps_since_leap += 1

    def decide(self, step: Step) -> None:
        progress, rate = (step.index + 1) / self.run.max_steps, step.learning_rate * self.run.rate_scale
        if self.stretches.step(step.loss if step.counts else None, rate):
            self.planner.observe(self.stretches.close(self.signals.features, progress, rate))

    def react(self, step: Step, verdict: Verdict) -> None:
        if verdict.action is Action.RESET_PREDICTOR:
            self.linearity = 0.0

    def log(self, step: int, logs: dict[str, Any]) -> None:
        if "learning_rate" in logs:  # an entry on steps; it has no loss if all of them were skipped
            logs["hybrid/confidence"] = self.confidence

    def state_dict(self) -> dict[str, Any]:
        return {
            "signals": self.signals.state_dict(),
            "stretches": dict(vars(self.stretches)),
            "sureness": dict(vars(self.sureness)),
            "linearity": self.linearity,
            "steps_since_leap": self.steps_since_leap,
            "tried": self._tried,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.signals.load_state_dict(state["signals"])
        vars(self.stretches).update(state["stretches"])
        vars(self.sureness).update(state["sureness"])
        self.linearity, self.steps_since_leap = state["linearity"], state["steps_since_leap"]
        self._tried = state["tried"]


@torch.no_grad()
def gradient_statistics(trajectory: Trajectory) -> dict[str, float]:
    """
    Return numbers of the optimizer's state and the weights, with one host synchronisation: `first` and `second` (root
    mean squares of the optimizer's moments), `weight` (of the weights), `memory` (norm of the direction's average) and
    `alignment` (cosine of gradient and average); 0 where unknown. Gradients must be there.
    """
    parameters = trajectory.parameters
    states = [trajectory.context.state(index) for index in range(len(parameters))]
    first, second = ([s[name] for s in states if torch.is_tensor(s.get(name))] for name in ("exp_avg", "exp_avg_sq"))
    dots = [
        inner_product(average, parameter.grad.to(average.device, torch.float32))
        for average, parameter in zip(trajectory.predicted_gradients(), parameters)
        if average is not None and parameter.grad is not None and not parameter.grad.is_sparse
    ]
    sums = trajectory.shards.totals([
        sums_of_squares(p.detach() for p in parameters),
        sums_of_squares(first),
        [s.float().sum() for s in second],
        sums_of_squares(trajectory.direction.buffers.get("memory", [])),
        sums_of_squares([p.grad for p in parameters if p.grad is not None]),
        dots,
    ])  # fmt: skip
    count = max(sum(p.numel() for p in trajectory.shards.originals), 1)
    weight2, first2, second1 = (sums[:3] / count).tolist()
    memory2, gradient2, dot = sums[3:].tolist()
    return {
        "first": math.sqrt(first2),
        "second": math.sqrt(max(second1, 0.0)),
        "weight": math.sqrt(weight2),
        "memory": math.sqrt(memory2),
        "alignment": dot / max(math.sqrt(memory2 * gradient2), 1e-20),
    }
