"""
Compare a leap with the real steps after it: [`LeapResiduals`], a part that the core does not need.

The part makes two comparisons in Correct and records them for every leap. The displacement: did the real steps continue
along the leap (`cosine` near 1) or reverse it (below 0), and how far did they go per unit of learning rate
(`norm_ratio`)? The slope: the projection of the gradient on the leap, estimated by the direction before the leap and
measured by the real steps after it. If the slope was negative before and is positive after, the leap went past the
lowest point of the loss along it, which the secant through both slopes locates. `GainCorrection` turns this into a
factor on the next gain, one for each kind of parameter.

Everything is estimated from at most 4096 evenly spaced coordinates of every parameter, so it needs neither a buffer nor
a pass over the weights. If FSDP2 shards the weights, each process has the coordinates in its shards.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hf_hybrid.leaps.leap import LeapObserver, Leaps
from hf_hybrid.part import Step
from hf_hybrid.run.record import Leap
from hf_hybrid.run.weights import TrainedWeights

if TYPE_CHECKING:
    from hf_hybrid.run.run import Run


def group_of(name: str) -> str:
    """Return the group of a parameter, which is shared by all layers: `model.layers.*.mlp.up_proj.weight`."""
    return re.sub(r"(?<=\.)\d+(?=\.)", "*", name)


@dataclass(frozen=True)
class GroupResidual:
    """
    One group of parameters, or all of them, over one leap.

    `cosine` of the leap with what the real steps of Correct did; `norm_ratio` realised over predicted, each per unit of
    learning rate; `slope_before` and `slope_after`: projection of the gradient on the leap (nats per leap), as
    predicted before it (`None` for directions that predict no gradient) and as met in Correct. Negative leads downhill.
    """

    cosine: float
    norm_ratio: float
    slope_before: float | None
    slope_after: float

    @property
    def decrease(self) -> float:
        """Fall of the training loss along the leap, by the slopes at its ends (nats)."""
        if self.slope_before is None:
            return -self.slope_after
        return -(self.slope_before + self.slope_after) / 2


def secant_minimum(slope_before: float, slope_after: float) -> float | None:
    """
    Position of the lowest loss along the leap, in leaps, by the secant through the slopes at both ends.

    1 if the leap was exactly long enough, less if it was too long; `None` if the slopes do not turn upwards.
    """
    bend = slope_after - slope_before
    return -slope_before / bend if bend > 0 and slope_before < 0 else None


class GainCorrection:
    """
    Factors on the gain, one per group of parameters: the averaged secant of the last leaps.

    Args:
        groups (`Sequence[str]`): See [`group_of`].
    """

    LEAST, MOST = 0.5, 1.5
    DECAY = 0.9

    def __init__(self, groups: Sequence[str]):
        self.slopes: dict[str, list[float]] = {group: [0.0, 0.0] for group in groups}

    def learn(self, residuals: dict[str, GroupResidual]) -> None:
        """Learn from one leap."""
        for group, residual in residuals.items():
            if residual.slope_before is None:
                continue
            before, after = self.slopes[group]
            self.slopes[group] = [
                self.DECAY * before + (1 - self.DECAY) * residual.slope_before,
                self.DECAY * after + (1 - self.DECAY) * residual.slope_after,
            ]

    def factor(self, group: str) -> float:
        """Return the factor on the next leap's gain; 1 while nothing is known."""
        before, after = self.slopes[group]
        if before == after == 0.0:
            return 1.0
        minimum = secant_minimum(before, after)
        if minimum is None:
            minimum = self.MOST if before < 0 else self.LEAST  # still falling at its end, or never fell
        return min(max(minimum, self.LEAST), self.MOST)

    def state_dict(self) -> dict:
        return {"slopes": self.slopes}

    def load_state_dict(self, state: dict) -> None:
        self.slopes = {group: list(state["slopes"].get(group, [0.0, 0.0])) for group in self.slopes}


class LeapComparison:
    """
    Watches one leap at a time: [`leap_made`], [`observe_gradients`] at every real step of Correct, then [`judge`].

    Args:
        weights (`TrainedWeights`): What leaps move.
    """

    def __init__(self, weights: TrainedWeights):
        names = weights.names
        self.weights, self.shards = weights, weights.shards
        self.groups = list(dict.fromkeys(group_of(name) for name in names))
        self._members = {group: [i for i, name in enumerate(names) if group_of(name) == group] for group in self.groups}
        self.leap: list[Tensor] = []
        self.start: list[Tensor] = []
        self.gradients: list[Tensor] = []
        self.slopes_before: Tensor | None = None
        self.gradient_steps = 0
        self.leap_rate = 0.0

    @property
    def watching(self) -> bool:
        return bool(self.start)

    @torch.no_grad()
    def leap_made(self, rate: float, before: Sequence[Tensor], predicted: Sequence[Tensor | None]) -> None:
        """
        Begin to watch a leap that was just kept.

        Args:
            rate (`float`): Its gain times the learning rates that it stands on: what its length is measured by.
            before (`Sequence[torch.Tensor]`): The weights before it.
            predicted (`Sequence[torch.Tensor | None]`): The gradient that was predicted, where one was.
        """
        self.clear()
        self.start = [start.float().clone() for start in self._samples(self.shards.parameters)]
        self.leap = [start - b.to(start.device).float() for start, b in zip(self.start, self._samples(before))]
        self.leap_rate = rate
        known = [gradient for gradient in predicted if gradient is not None]
        if len(known) == len(predicted):
            gradients = [gradient.float() for gradient in self._samples(known)]
            (self.slopes_before,) = self._by_group((gradients, self.leap))

    def _samples(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        return [self.shards.sample(index, tensor) for index, tensor in enumerate(tensors)]

    def _by_group(self, *pairs: tuple[Sequence[Tensor], Sequence[Tensor]]) -> list[Tensor]:
        """Estimate inner products of each pair over whole groups from samples, as fp32 `[groups]` on the host."""
        dots = [
            [
                torch.dot(first[index].to(second[index].device), second[index]) * self.shards.weight(index)
                for index in group
            ]
            for first, second in pairs
            for group in self._members.values()
        ]
        return list(self.shards.totals(dots).view(len(pairs), -1))

    @torch.no_grad()
    def observe_gradients(self) -> None:
        """Add the gradients of a real step of Correct."""
        if not self.watching:
            return
        if not self.gradients:
            self.gradients = [torch.zeros_like(start) for start in self.start]
        for index, (total, parameter) in enumerate(zip(self.gradients, self.shards.parameters)):
            if parameter.grad is not None and not parameter.grad.is_sparse:
                total.add_(self.shards.sample(index, parameter.grad).to(total.device))
        self.gradient_steps += 1

    @torch.no_grad()
    def judge(self, rate: float) -> tuple[GroupResidual | None, dict[str, GroupResidual]]:
        """
        Compare; one host synchronisation. What was remembered is dropped.

        Args:
            rate (`float`): Learning rates of the real steps since the leap, added up.

        Returns:
            Over all parameters (`None` if nothing was watched or moved), and by group.
        """
        if not self.watching or not self.gradient_steps or rate <= 0:
            self.clear()
            return None, {}
        now = self._samples(self.shards.parameters)
        realised = [weights.to(start.device).float() - start for weights, start in zip(now, self.start)]
        before, leap = self.slopes_before, self.leap
        columns = self._by_group((leap, realised), (leap, leap), (realised, realised), (self.gradients, leap))
        columns[3] /= self.gradient_steps
        columns.append(torch.zeros_like(columns[0]) if before is None else before.cpu())
        rows = torch.stack(columns, dim=1).tolist()
        whole = self._residual([sum(column) for column in zip(*rows)], rate)
        groups = {group: found for group, row in zip(self.groups, rows) if (found := self._residual(row, rate))}
        self.clear()
        return whole, groups

    def _residual(self, row: list[float], rate: float) -> GroupResidual | None:
        dot, leap2, realised2, after, before = row
        if not (leap2 > 0 and realised2 > 0) or not all(map(math.isfinite, row)):
            return None
        lengths = math.sqrt(realised2) / rate, math.sqrt(leap2) / max(self.leap_rate, 1e-20)
        return GroupResidual(
            cosine=dot / math.sqrt(leap2 * realised2),
            norm_ratio=lengths[0] / lengths[1],
            slope_before=None if self.slopes_before is None else before,
            slope_after=after,
        )

    def clear(self) -> None:
        """Stop watching a leap."""
        self.leap, self.start, self.gradients, self.gradient_steps = [], [], [], 0
        self.slopes_before = None

    def state_dict(self) -> dict:
        """Plain values, and tensors for a checkpoint inside a Correct phase. All processes must call this."""
        kinds = {"leap": self.leap, "start": self.start, "gradients": self.gradients}
        slopes = None if self.slopes_before is None else self.slopes_before.tolist()
        values = {"gradient_steps": self.gradient_steps, "leap_rate": self.leap_rate, "slopes_before": slopes}
        return {**values, "tensors": self.weights.whole(kinds)}

    def load_state_dict(self, state: dict) -> None:
        """Restore what `state_dict` returned."""
        saved = self.weights.in_order(state["tensors"])
        for kind in ("leap", "start", "gradients"):
            pairs = zip(saved.get(kind, []), self.shards.parameters)
            setattr(self, kind, [tensor.to(parameter.device, copy=True) for tensor, parameter in pairs])
        slopes = state["slopes_before"]
        self.slopes_before = None if slopes is None else torch.tensor(slopes)
        self.gradient_steps, self.leap_rate = state["gradient_steps"], state["leap_rate"]


class LeapResiduals(LeapObserver):
    """
    Writes down, for every leap that stays, how it compares with the real steps after it; may correct later gains.

    Pass one in `parts=` to watch, or set `correct_gain=True` to let what was seen change the gain of each group of
    parameters. `hybrid_summary()["displacement_residuals"]` has the means by group. In a run
    without phases, which makes no leap, it does nothing.

    Args:
        correct_gain (`bool`): Whether later leaps are corrected.
    """

    name = "leap_residuals"

    def __init__(self, correct_gain: bool = False):
        self.correct_gain = correct_gain
        self.comparison: LeapComparison | None = None
        self.correction: GainCorrection | None = None
        self.means: dict[str, dict] = {}
        """By group of parameters: `leaps` judged, and the means of `cosine` and `norm_ratio` over them."""

    def begin(self, run: Run) -> None:
        self.run, self.means = run, {}
        self.comparison = self.correction = None
        if run.weights is not None:
            self.comparison = LeapComparison(run.weights)
            self.correction = GainCorrection(self.comparison.groups) if self.correct_gain else None

    def before_update(self, step: Step) -> None:
        if self.comparison is not None and step.leap is not None and not step.withheld:
            try:
                self.comparison.observe_gradients()
            except Exception as error:
                self.run.survive(error, "residuals missed a gradient")

    def before_leap(self, leaps: Leaps, leap: Leap) -> None:
        if self.correction is not None:
            names = leaps.trajectory.weights.names
            leaps.trajectory.gain_factors = [self.correction.factor(group_of(name)) for name in names]

    def leap_written(self, leaps: Leaps, leap: Leap) -> None:
        trajectory = leaps.trajectory
        if self.comparison is not None:
            self.comparison.leap_made(leap.rate, trajectory.snapshot, trajectory.predicted_gradients())

    def leap_accepted(self, leaps: Leaps, leap: Leap) -> None:
        if self.comparison is None:
            return
        try:
            leaps.trajectory.store.settle()
            whole, groups = self.comparison.judge(leaps.trajectory.clock.lr_sum)
            if whole is not None:
                leap.cosine, leap.norm_ratio = whole.cosine, whole.norm_ratio
                self._add(groups)
                if self.correction is not None:
                    self.correction.learn(groups)
        except Exception as error:
            self.run.survive(error, "residuals missed a leap")
            self.comparison.clear()

    def _add(self, groups: dict[str, GroupResidual]) -> None:
        """Add the residual of one leap to the means by group of parameters."""
        for group, residual in groups.items():
            mean = self.means.setdefault(group, {"leaps": 0, "cosine": 0.0, "norm_ratio": 0.0})
            mean["leaps"] += 1
            for name in ("cosine", "norm_ratio"):
                mean[name] += (getattr(residual, name) - mean[name]) / mean["leaps"]

    def leaps_rejected(self, leaps: Leaps, leap: Leap | None) -> None:
        if self.comparison is not None and leap is not None:
            self.comparison.clear()

    def summary(self) -> dict[str, Any]:
        return {"displacement_residuals": self.means}

    def state_dict(self) -> dict[str, Any]:
        if self.comparison is None:
            return {}
        correction = None if self.correction is None else self.correction.state_dict()
        return {"comparison": self.comparison.state_dict(), "correction": correction, "means": self.means}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self.comparison is None:
            return
        self.comparison.load_state_dict(state["comparison"])
        if self.correction is not None and state["correction"] is not None:
            self.correction.load_state_dict(state["correction"])
        self.means = {group: dict(mean) for group, mean in state["means"].items()}
