"""
Learning-rate rescue: find during training how much larger the learning rate can be.

The signal is the cosine between a fresh gradient and the direction that the optimizer moved along before. As the batch
is new, it is an unbiased derivative of the loss along it (hypergradient descent: Baydin et al., 2018,
arXiv 1703.04782): clearly positive while steps are too short, zero where they are right, negative beyond.
The scale grows geometrically until the cosine has fallen to a quarter of its peak, goes back a little, and is held.
A learning rate that is good already shows no clear cosine in the first steps and is left alone.

Adapters need another rule. Their best rate is about ten times that of full fine-tuning, and the cosine does not show
it: on the task `lora` it falls to zero at 3e-3, on LoRA of SmolLM2-135M at 1e-3, and the best rates are 1.6e-2 and
2e-3 or more (docs/evaluation.md). Few directions of the small factors are steep and oscillate, which makes the cosine
negative, while all others still gain. What does show the rate is where training diverges: 5e-2 and 1e-2. So
[`AdapterRateSearch`] raises the rate until the loss leaves its range, then goes back, in the rate and in the weights.
The weights of adapters are small, so that those of the last steps can be kept (a range test: Smith, 2017,
arXiv 1506.01186, without its lost steps).

Neither rule evaluates anything: both look at the loss of the training batches. A preference loss can fall while fewer
pairs are ranked right, so both look at the accuracy of these batches too, where the trainer has it ([`AccuracyWatch`]).
"""

from __future__ import annotations

import logging
import math
import statistics
from collections.abc import Callable

import torch
from torch import Tensor

from hf_hybrid.leaps.shards import Whole

logger = logging.getLogger(__name__)


class _Average:
    """Debiased exponential averages of the cosine, its square, and the log scale under which it was seen."""

    def __init__(self):
        self.clear()

    def clear(self) -> None:
        self.count = 0
        self.weight = self.first = self.second = self.scale = 0.0

    def add(self, cosine: float, log_scale: float, decay: float) -> None:
        self.count += 1
        self.weight = decay * self.weight + (1 - decay)
        self.first = decay * self.first + (1 - decay) * cosine
        self.second = decay * self.second + (1 - decay) * cosine * cosine
        self.scale = decay * self.scale + (1 - decay) * log_scale

    @property
    def mean(self) -> float:
        return self.first / self.weight

    def standard_error(self, decay: float) -> float:
        variance = max(0.0, self.second / self.weight - self.mean**2)
        return math.sqrt(variance * (1 - decay) / (1 + decay))

    @property
    def mean_log_scale(self) -> float:
        return self.scale / self.weight


class AccuracyWatch:
    """
    Notices when fewer preference pairs are ranked right: compares every `WINDOW` steps with the best ones before.

    Attributes:
        best, now (`list[float]`): Accuracies of the steps of the best window, and of the one under way.
    """

    WINDOW = 8
    CLEAR = 2.0
    """Standard errors of the difference of two windows that make it clear."""

    def __init__(self):
        self.best: list[float] = []
        self.now: list[float] = []

    def fell(self, accuracy: float | None) -> bool:
        """Add a step, `None` if it has no accuracy. Return whether a window ends that is clearly below the best."""
        if accuracy is None:
            return False
        self.now.append(accuracy)
        if len(self.now) < self.WINDOW:
            return False
        now, self.now = self.now, []
        if not self.best or sum(now) >= sum(self.best):
            self.best = now
            return False
        variance = statistics.variance(now) + statistics.variance(self.best)
        difference = statistics.fmean(self.best) - statistics.fmean(now)
        return difference > self.CLEAR * math.sqrt(variance / self.WINDOW)

    def begin_window(self) -> None:
        """Leave the window under way out, because the rate or the weights change."""
        self.now = []


class LearningRateRescue:
    """
    A scalar state machine: [`observe`] takes the numbers of one real step and moves [`scale`].

    The constants were chosen on the tasks of docs/evaluation.md, where the alternatives that were tried are listed.

    Args:
        max_steps (`int`): Length of the run; the search is to take a small part of it.
        max_scale (`float`): Upper bound of the scale; 1 is the lower one.
    """

    GROWTH, MIN_GROWTH, MAX_GROWTH = 2.5, 0.03, 0.25
    """Log growth per step: `GROWTH / sqrt(max_steps)` within the bounds."""
    DECAY_GROWING, DECAY_HOLDING = 0.8, 0.9
    CLEAR = 2.0
    """Standard errors that make a cosine clear."""
    STOP_BELOW = 0.25
    """Share of the peak cosine at which growth stops."""
    BACK = math.log(0.7)
    """Step back from where growth stopped."""
    GIVE_UP_AFTER = 0.25
    """Share of the run after which growth that has become unclear ends."""
    SPIKE = 2.5
    """Deviations of the smoothed loss above its best that count as instability."""
    COOLDOWN = 20

    def __init__(self, *, max_steps: int, max_scale: float):
        self.max_steps = max_steps
        self.max_log = math.log(max_scale)
        self.growth = min(self.MAX_GROWTH, max(self.MIN_GROWTH, self.GROWTH / math.sqrt(max_steps)))
        self.patience = 3 + round(math.sqrt(max_steps) / 3)
        """Steps at scale 1 in which a good learning rate shows itself."""
        self.log_scale = self.cap = self.peak = 0.0
        self.steps = 0
        self.holding = False
        self.average = _Average()
        self.smooth_loss: float | None = None
        self.best_loss = self.loss_variance = 0.0
        self.cooldown = self.held_at = 0
        self.watch = AccuracyWatch()

    @property
    def scale(self) -> float:
        """Factor on the scheduled learning rate, in `[1, max_scale]`."""
        return math.exp(self.log_scale)

    def observe(self, loss: float, cosine: float | None, rate: float, accuracy: float | None = None) -> None:
        """
        Learn from one real step.

        Args:
            loss (`float`): Training loss of the step.
            cosine (`float`, *optional*):
                Of the descent direction of its gradient with the optimizer's previous direction; `None` if unknown.
            rate (`float`): The scheduled learning rate of the step, which this rule does not need.
            accuracy (`float`, *optional*): Share of the preference pairs of the step that are ranked right.
        """
        if not math.isfinite(loss):
            return
        self.steps += 1
        if self._is_unstable(loss) or self._loses_accuracy(accuracy):
            self._hold(self.log_scale)
        elif cosine is not None and math.isfinite(cosine):
            decay = self.DECAY_HOLDING if self.holding else self.DECAY_GROWING
            self.average.add(cosine, self.log_scale, decay)
            mean, clear = self.average.mean, self.CLEAR * self.average.standard_error(decay)
            if self.holding:
                self._adjust(mean, clear)
            else:
                self._grow(cosine, mean, clear)

    def _grow(self, cosine: float, mean: float, clear: float) -> None:
        if self.average.count > 3:
            self.peak = max(self.peak, mean - clear)
        if self.steps <= self.patience:
            return
        # The averaged cosine lags behind the scale: stop at the scale that it was measured at.
        seen_at = min(self.log_scale, self.average.mean_log_scale)
        if mean <= self.STOP_BELOW * self.peak:
            self._hold(seen_at)
        elif mean > clear and cosine > 0:
            self.log_scale = min(self.max_log, self.log_scale + self.growth)
        elif cosine < 0:
            self.log_scale = max(0.0, self.log_scale - 2 * self.growth)
        elif self.steps > self.GIVE_UP_AFTER * self.max_steps and mean < clear:
            self._hold(seen_at)

    def _adjust(self, mean: float, clear: float) -> None:
        if self.average.count <= 5:
            return
        if mean > clear:
            self.log_scale = max(self.log_scale, min(self.cap, self.log_scale + self.growth / 4))
        elif mean < -clear:
            self.log_scale = max(0.0, self.log_scale - self.growth / 2)
            self.cap = min(self.cap, self.log_scale + 0.7)

    def _hold(self, log_scale: float) -> None:
        self.holding, self.held_at = True, self.steps
        self.watch.begin_window()
        self.cap = max(0.0, log_scale)
        self.log_scale = max(0.0, log_scale + self.BACK)
        self.average.clear()

    def _is_unstable(self, loss: float) -> bool:
        if self.smooth_loss is None:
            self.smooth_loss = self.best_loss = loss
        error = loss - self.smooth_loss
        self.smooth_loss += 0.15 * error
        if self.steps > 2:
            # Bounded once it is settled, or a spike would hide itself in the variance.
            square = error * error if self.steps <= 10 else min(error * error, 9 * self.loss_variance)
            self.loss_variance += 0.1 * (square - self.loss_variance)
        self.best_loss = min(self.best_loss, self.smooth_loss)
        self.cooldown = max(0, self.cooldown - 1)
        limit = self.best_loss + self.SPIKE * math.sqrt(self.loss_variance) + 1e-3
        if self.log_scale > 0 and self.steps > 10 and self.cooldown == 0 and self.smooth_loss > limit:
            self.cooldown, self.best_loss = self.COOLDOWN, self.smooth_loss
            return True
        return False

    def _loses_accuracy(self, accuracy: float | None) -> bool:
        """Whether accuracy falls while the scale grows, or in the first steps at the one that is held."""
        if self.holding and self.steps > self.held_at + AccuracyWatch.WINDOW:
            return False
        fell = self.watch.fell(accuracy) and self.log_scale > 0
        if fell:
            logger.warning("Fewer preference pairs are ranked right: the learning rate is lowered.")
        return fell

    def back_off(self) -> None:
        """Reduce the scale to a quarter and stop its growth, after training went badly wrong."""
        self._hold(self.log_scale - math.log(4))

    _STATE = (
        "log_scale", "cap", "peak", "steps", "holding", "held_at", "smooth_loss", "best_loss", "loss_variance",
        "cooldown",
    )  # fmt: skip

    def tensors(self) -> dict[str, Tensor]:
        """Return no tensor: the state is numbers alone."""
        return {}

    def state_dict(self) -> dict:
        found = {name: getattr(self, name) for name in self._STATE}
        return {**found, "average": dict(vars(self.average)), "watch": dict(vars(self.watch))}

    def load_state_dict(self, state: dict, tensors: dict[str, Tensor] | None = None) -> None:
        """Take back what [`state_dict`] and [`tensors`] returned."""
        for name in self._STATE:
            setattr(self, name, state[name])
        vars(self.average).update(state["average"])
        vars(self.watch).update(state["watch"])


class RecentWeights:
    """
    Copies of the weights after each of the last steps, with a mark each.

    Args:
        shards (`Whole`): The parameters that are trained. The copies lie on the host.
        optimizer: The one that steps them. Its states are forgotten when the weights go back: after a step that went
            wrong, its averages of squared gradients are too large for long.
        most (`int`): How many steps are kept.
        changed (`Callable[[], None]`): Called after the weights went back: copies made of them are out of date.
    """

    def __init__(
        self,
        shards: Whole,
        optimizer: torch.optim.Optimizer,
        most: int,
        changed: Callable[[], None] = lambda: None,
    ):
        self.shards, self.optimizer, self.most, self.changed = shards, optimizer, most, changed
        self._kept: list[tuple[float, list[Tensor]]] = []

    def add(self, mark: float) -> None:
        """Copy the weights."""
        self._kept = self._kept[max(0, len(self._kept) + 1 - self.most) :]  # first, to hold no more at any time
        copies = [torch.empty_like(p, device="cpu").copy_(p.detach()) for p in self.shards.parameters]
        self._kept.append((mark, copies))

    @torch.no_grad()
    def go_back(self, mark: float) -> None:
        """Restore the latest weights whose mark is at most `mark`, or else the oldest, and keep these alone."""
        if not self._kept:
            return
        found = next((kept for kept in reversed(self._kept) if kept[0] <= mark), self._kept[0])
        for original, parameter, copy in zip(self.shards.originals, self.shards.parameters, found[1], strict=True):
            parameter.copy_(copy)
            self.optimizer.state.pop(original, None)
        self._kept = [found]
        self.changed()

    def clear(self) -> None:
        """Keep none."""
        self._kept = []

    def marks(self) -> list[float]:
        """Return the marks of what is kept, oldest first."""
        return [mark for mark, _ in self._kept]

    def tensors(self) -> dict[str, Tensor]:
        """Return the copies by place and parameter, whole on the first process. All processes must call this."""
        return {
            f"{place}.{index}": self.shards.whole(index, copy)
            for place, (_, copies) in enumerate(self._kept)
            for index, copy in enumerate(copies)
        }

    def load(self, marks: list[float], tensors: dict[str, Tensor]) -> None:
        """Take back what [`marks`] and [`tensors`] returned."""
        self._kept = [
            (
                mark,
                [self.shards.part(i, tensors[f"{place}.{i}"]).cpu() for i in range(len(self.shards.originals))],
            )
            for place, mark in enumerate(marks)
        ]


class AdapterRateSearch:
    """
    The rescue of adapters: raise the rate until training diverges, go back to earlier weights, and hold a fifth of it.

    The search begins as soon as the mean of the first cosines is clearly positive. With two sequences per step one of
    them may be negative by chance. At a good rate the mean is not, and the scale stays at 1. Growth is fast while the
    cosine is near its peak, and slower beyond. Two losses in a row outside of the range of the last ones end it; after
    the first the scale waits. If the rate that is held diverges within the next steps too, or fewer pairs of
    preferences are ranked right than before, the weights go back again and it is halved. A search from 2e-5 takes about
    20 steps.

    Args:
        learning_rate (`float`): The peak of the schedule.
        recent (`RecentWeights`): Keeps the weights of the last steps until a rate is found.
    """

    FAST, SLOW = 0.8, 0.4
    """Log growth per step."""
    NEAR_PEAK = 0.25
    """Share of the peak cosine above which growth is fast."""
    FIRST, WAIT = 6, 12
    """Cosines that are looked at before the scale grows, at least and at most."""
    CLEAR = 3.5
    """Standard errors above zero that their mean must be. Cosines without a sign are in 1.6 % of all cases."""
    WINDOW, AT_LEAST = 8, 4
    """Losses that make the range, at most and at least."""
    OUTSIDE = 3.0
    """Standard deviations over the median of the last losses that a loss may have."""
    BACK = math.log(0.2)
    """
    From the rate at which training diverges to the one that is held. The best rate was 0.3 of it on `lora`, and 0.2 on
    LoRA of SmolLM2.
    """
    HIGHEST = 0.1
    """Rate that counts as diverging whatever the loss is. The norms of a model can hide that adapters do no good."""
    KEPT = 6
    """Steps whose weights are kept: as many as the scale takes from the rate that is held to divergence."""

    def __init__(self, learning_rate: float, recent: RecentWeights):
        self.learning_rate, self.recent = learning_rate, recent
        self.state = "waiting"
        """Or "growing", "confirming" (a rate that was found), "held"."""
        self.log_scale = self.used = self.peak = self.suspected_at = 0.0
        self.steps = self.suspicious = self.since = 0
        self.losses: list[float] = []
        self.first: list[float] = []
        self.average = _Average()
        self.watch = AccuracyWatch()

    @property
    def scale(self) -> float:
        """Factor on the scheduled learning rate, at least 1."""
        return math.exp(self.log_scale)

    def observe(self, loss: float, cosine: float | None, rate: float, accuracy: float | None = None) -> None:
        """
        Learn from one real step, and take the weights back if it shows that training diverges.

        Args:
            loss (`float`): Training loss of the step; not finite if the step was skipped.
            cosine (`float`, *optional*):
                Of the descent direction of its gradient with the optimizer's previous direction; `None` if unknown.
            rate (`float`): The scheduled learning rate of the step.
            accuracy (`float`, *optional*): Share of the preference pairs of the step that are ranked right.
        """
        self.steps += 1
        if self.state == "held":
            return
        fell = self.watch.fell(accuracy)
        # The loss is from before this step's update, so what it tells is about the update of the step before.
        caused_by, self.used = self.used, self.log_scale + math.log(max(rate / self.learning_rate, 1e-9))
        if self.state != "waiting" and not self._is_usual(loss):
            self.suspicious += 1
            if self.suspicious == 1:
                self.suspected_at = caused_by
            if self.suspicious == 2 or not math.isfinite(loss):
                self._go_back()
            return
        self.suspicious = 0
        self.losses = [*self.losses, loss][-self.WINDOW :]
        if self.state == "confirming":
            if fell and self.log_scale > 0:
                logger.warning("Fewer preference pairs are ranked right: the learning rate is lowered.")
                self._go_back()
            elif self.steps == self.since + self.WINDOW:
                self._hold()
        elif cosine is not None and math.isfinite(cosine):
            self._grow(cosine)

    def _is_usual(self, loss: float) -> bool:
        """Whether a loss lies within the range of the last ones."""
        if len(self.losses) < self.AT_LEAST:
            return math.isfinite(loss)
        changes = [abs(new - old) for old, new in zip(self.losses, self.losses[1:])]
        deviation = 1.05 * statistics.median(changes)  # of normal losses that do not depend on each other
        return loss <= statistics.median(self.losses) + self.OUTSIDE * deviation

    def _grow(self, cosine: float) -> None:
        self.average.add(cosine, self.log_scale, LearningRateRescue.DECAY_GROWING)
        self.peak = max(self.peak, self.average.mean)
        if self.state == "waiting":
            self.first.append(cosine)
            if not self._is_clear():
                return self._hold() if len(self.first) == self.WAIT else None
            self.state = "growing"
        self.recent.add(self.used)
        highest = max(0.0, math.log(self.HIGHEST / self.learning_rate))
        if self.log_scale >= highest:
            self.suspected_at = highest
            return self._go_back()
        near = min(cosine, self.average.mean) > self.NEAR_PEAK * self.peak
        self.log_scale = min(highest, self.log_scale + (self.FAST if near else self.SLOW))

    def _is_clear(self) -> bool:
        """Whether the mean of the first cosines is clearly above zero."""
        count = len(self.first)
        if count < self.FIRST:
            return False
        return statistics.fmean(self.first) > self.CLEAR * statistics.stdev(self.first) / math.sqrt(count)

    def _go_back(self) -> None:
        if self.state == "growing":
            self.log_scale = max(0.0, self.suspected_at + self.BACK)
        else:
            self.log_scale = max(0.0, self.log_scale - math.log(2))
        self.recent.go_back(self.log_scale + self.SLOW / 2)
        self.watch.begin_window()
        self.state, self.since, self.suspicious = "confirming", self.steps, 0

    def _hold(self) -> None:
        self.state, self.since = "held", self.steps
        self.recent.clear()

    def back_off(self) -> None:
        """After training went badly wrong: go back if that is possible, or else reduce the scale to a quarter."""
        if self.state == "growing":
            self.suspected_at = self.suspected_at if self.suspicious else self.used
            self._go_back()
        elif self.state == "held":
            self.log_scale = max(0.0, self.log_scale - math.log(4))

    _STATE = (
        "state", "log_scale", "used", "peak", "suspected_at", "steps", "suspicious", "since", "losses", "first",
    )  # fmt: skip

    def tensors(self) -> dict[str, Tensor]:
        """Return the weights that are kept while the scale grows."""
        return self.recent.tensors()

    def state_dict(self) -> dict:
        found = {name: getattr(self, name) for name in self._STATE}
        parts = {"average": dict(vars(self.average)), "watch": dict(vars(self.watch))}
        return {**found, **parts, "marks": self.recent.marks()}

    def load_state_dict(self, state: dict, tensors: dict[str, Tensor]) -> None:
        """Take back what [`state_dict`] and [`tensors`] returned."""
        for name in self._STATE:
            setattr(self, name, state[name])
        vars(self.average).update(state["average"])
        vars(self.watch).update(state["watch"])
        self.recent.load(state["marks"], tensors)
