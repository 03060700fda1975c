"""
Compare a leap with the real steps after it: [`LeapResiduals`], a part that the core does not need.

The part makes two comparisons in Correct and records them for every leap. The displacement: did the real steps continue
along the leap (`cosine` near 1) or reverse it (below 0), and how far did they go per unit of learning rate
(`norm_ratio`)? The slope: the projection of the gradient on the leap, estimated by the direction before the leap and
measured by the real steps after it. If the slope was negative before and is positive after, the leap went past the
lowest point of the loss along it, which the secant through both slopes locates. With `correct_gain=True` this becomes a
factor on the next gain, one for each kind of parameter.

Everything is estimated from at most 4096 evenly spaced coordinates of every parameter, so it needs neither a buffer nor
a pass over the weights. If FSDP2 shards the weights, each process has the coordinates in its shards.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hf_hybrid.leaps.leap import LeapObserver, Leaps
from hf_hybrid.part import Leap, Step
from hf_hybrid.run.run import Run
from hf_hybrid.run.weights import TrainedWeights

LEAST, MOST, DECAY = 0.5, 1.5, 0.9
"""Bounds of the factor on a gain, and decay of the averages of slopes over leaps."""


def group_of(name: str) -> str:
    """Return the group of a parameter, which is shared by all layers: `model.layers.*.mlp.up_proj.weight`."""
    return re.sub(r"(?<=\.)\d+(?=\.)", "*", name)


class GroupResidual(NamedTuple):
    """One group of parameters, or all of them, over one leap. Slopes are in nats per leap; negative leads downhill."""

    cosine: float  # of the leap with what the real steps of Correct did
    norm_ratio: float  # length of what they did over that of the leap, each per unit of learning rate
    slope_before: float | None  # as predicted; `None` for directions that predict no gradient
    slope_after: float  # as met in Correct


def secant_minimum(slope_before: float, slope_after: float) -> float | None:
    """
    Position of the lowest loss along the leap by the secant through the slopes at both ends: 1 if the leap was exactly
    long enough, less if it was too long; `None` if the slopes do not turn upwards.
    """
    bend = slope_after - slope_before
    return -slope_before / bend if bend > 0 and slope_before < 0 else None


class LeapResiduals(LeapObserver):
    """
    Writes down, for every leap that stays, how it compares with the real steps after it.

    Pass it in `parts=`. `hybrid_summary()["displacement_residuals"]` has the means by group. With `correct_gain` they
    change the gain of each group of parameters in later leaps. In a run without leaps it does nothing.
    """

    name = "leap_residuals"

    def __init__(self, correct_gain: bool = False):
        self.correct_gain = correct_gain
        self.watch(None)

    def begin(self, run: Run) -> None:
        self.run = run
        self.watch(run.weights)

    def watch(self, weights: TrainedWeights | None) -> None:
        """Compare leaps of these weights, one at a time, from the first on."""
        self.weights = weights
        self.means: dict[str, dict] = {}
        """By group of parameters: `leaps` judged, and the means of `cosine` and `norm_ratio` over them."""
        self.slopes: dict[str, list[float]] = {}
        """By group: averages of the slopes before and after the last leaps."""
        self.leap_rate = 0.0
        self._forget_leap()
        if weights is not None:
            self.shards, names = weights.shards, list(map(group_of, weights.names))
            self.groups = {group: [i for i, name in enumerate(names) if name == group] for group in names}

    def _forget_leap(self) -> None:
        self.leap: list[Tensor] = []
        self.start: list[Tensor] = []
        self.gradients: list[Tensor] = []
        self.slopes_before: Tensor | None = None
        self.gradient_steps = 0

    def before_leap(self, leaps: Leaps, leap: Leap) -> None:
        if self.correct_gain:
            names = leaps.trajectory.weights.names
            leaps.trajectory.gain_factors = [self.factor(group_of(name)) for name in names]

    def leap_written(self, leaps: Leaps, leap: Leap) -> None:
        self.leap_made(leap.rate, leaps.trajectory.snapshot, leaps.trajectory.predicted_gradients())

    @torch.no_grad()
    def leap_made(self, rate: float, before: Sequence[Tensor], predicted: Sequence[Tensor | None]) -> None:
        """
        Begin to compare a leap that was just kept. `rate` is its gain times the learning rates that it stands on, by
        which its length is measured; `before` are the weights before it; `predicted`, the gradients where one was.
        """
        self._forget_leap()
        self.start = [start.float().clone() for start in self._samples(self.shards.parameters)]
        self.leap = [start - b.to(start.device).float() for start, b in zip(self.start, self._samples(before))]
        self.leap_rate = rate
        known = [gradient for gradient in predicted if gradient is not None]
        if len(known) == len(predicted):
            gradients = [gradient.float() for gradient in self._samples(known)]
            self.slopes_before = self._by_group((gradients, self.leap))

    def before_update(self, step: Step) -> None:
        if self.start and step.leap is not None and not step.withheld:
            try:
                self.observe_gradients()
            except Exception as error:
                self.run.survive(error, "residuals missed a gradient")

    @torch.no_grad()
    def observe_gradients(self) -> None:
        """Add the gradients of a real step of Correct."""
        if not self.gradients:
            self.gradients = [torch.zeros_like(start) for start in self.start]
        for index, (total, parameter) in enumerate(zip(self.gradients, self.shards.parameters)):
            if parameter.grad is not None and not parameter.grad.is_sparse:
                total.add_(self.shards.sample(index, parameter.grad).to(total.device))
        self.gradient_steps += 1

    def leap_accepted(self, leaps: Leaps, leap: Leap) -> None:
        try:
            leaps.trajectory.store.finish_updates()
            of_all, groups = self.judge(leaps.trajectory.clock.lr_sum)
            if of_all is not None:
                leap.cosine, leap.norm_ratio = of_all.cosine, of_all.norm_ratio
                self.learn(groups)
        except Exception as error:
            self.run.survive(error, "residuals missed a leap")
            self._forget_leap()

    def leaps_rejected(self, leaps: Leaps, leap: Leap | None) -> None:
        if leap is not None:
            self._forget_leap()

    @torch.no_grad()
    def judge(self, rate: float) -> tuple[GroupResidual | None, dict[str, GroupResidual]]:
        """
        Compare over all parameters (`None` if nothing moved) and by group, with one host synchronisation, and forget
        the leap. `rate` is the sum of the learning rates of the real steps since.
        """
        if not self.gradient_steps or rate <= 0:
            self._forget_leap()
            return None, {}
        current = self._samples(self.shards.parameters)
        realised = [weights.to(start.device).float() - start for weights, start in zip(current, self.start)]
        before, leap = self.slopes_before, self.leap
        columns = self._by_group((leap, realised), (leap, leap), (realised, realised), (self.gradients, leap))
        columns[3] /= self.gradient_steps
        rows = torch.cat((columns, torch.zeros_like(columns[:1]) if before is None else before)).T.tolist()
        of_all = self._residual([sum(column) for column in zip(*rows)], rate)
        groups = {group: self._residual(row, rate) for group, row in zip(self.groups, rows)}
        self._forget_leap()
        return of_all, {group: residual for group, residual in groups.items() if residual is not None}

    def _residual(self, row: list[float], rate: float) -> GroupResidual | None:
        dot, leap2, realised2, after, before = row
        if not (leap2 > 0 and realised2 > 0) or not all(map(math.isfinite, row)):
            return None
        lengths = math.sqrt(realised2) / rate, math.sqrt(leap2) / max(self.leap_rate, 1e-20)
        slope_before = None if self.slopes_before is None else before
        return GroupResidual(dot / math.sqrt(leap2 * realised2), lengths[0] / lengths[1], slope_before, after)

    def _samples(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        return [self.shards.sample(index, tensor) for index, tensor in enumerate(tensors)]

    def _by_group(self, *pairs: tuple[Sequence[Tensor], Sequence[Tensor]]) -> Tensor:
        """Estimate inner products of pairs over whole groups from samples, as fp32 `[pairs, groups]` on the host."""
        dots = [
            [torch.dot(one[i].to(other[i].device), other[i]) * self.shards.weight(i) for i in members]
            for one, other in pairs
            for members in self.groups.values()
        ]
        return self.shards.totals(dots).view(len(pairs), -1)

    def learn(self, groups: dict[str, GroupResidual]) -> None:
        """Take in the residuals of one leap."""
        for group, residual in groups.items():
            mean = self.means.setdefault(group, {"leaps": 0, "cosine": 0.0, "norm_ratio": 0.0})
            mean["leaps"] += 1
            for name in ("cosine", "norm_ratio"):
                mean[name] += (getattr(residual, name) - mean[name]) / mean["leaps"]
            if residual.slope_before is not None:
                latest = (residual.slope_before, residual.slope_after)
                averages = zip(self.slopes.get(group, (0.0, 0.0)), latest)
                self.slopes[group] = [DECAY * average + (1 - DECAY) * slope for average, slope in averages]

    def factor(self, group: str) -> float:
        """Return the factor on the next leap's gain: the averaged secant, and 1 while nothing is known."""
        before, after = self.slopes.get(group, (0.0, 0.0))
        if before == after == 0.0:
            return 1.0
        minimum = secant_minimum(before, after)
        if minimum is None:
            minimum = MOST if before < 0 else LEAST  # still falling at its end, or never fell
        return min(max(minimum, LEAST), MOST)

    def summary(self) -> dict[str, Any]:
        return {"displacement_residuals": self.means}

    _SAVED = ("gradient_steps", "leap_rate", "slopes_before", "slopes", "means")

    def state_dict(self) -> dict[str, Any]:
        """Plain values, and tensors for a checkpoint inside a Correct phase. All processes must call this."""
        if self.weights is None:
            return {}
        tensors = self.weights.whole({"leap": self.leap, "start": self.start, "gradients": self.gradients})
        return {**{name: getattr(self, name) for name in self._SAVED}, "tensors": tensors}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self.weights is None:
            return
        vars(self).update({name: state[name] for name in self._SAVED})
        for kind, saved in self.weights.in_order(state["tensors"]).items():
            pairs = zip(saved, self.shards.parameters)
            setattr(self, kind, [tensor.to(parameter.device, copy=True) for tensor, parameter in pairs])
