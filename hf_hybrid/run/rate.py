"""
The search of the learning rate: find during training how much larger it can be.

The signal is the cosine between a fresh gradient and the direction that the optimizer moved along before. As the batch
is new, it is an unbiased derivative of the loss along it (hypergradient descent: Baydin et al., 2018,
arXiv 1703.04782): clearly positive while steps are too short, zero where they are right, negative beyond.
The scale grows geometrically until the cosine has fallen to a quarter of its peak. One and a half times that scale is
held. A learning rate that is good already shows no clear cosine in the first steps and is left alone.

Adapters need another rule. Their best rate is about ten times that of full fine-tuning. While the rate grows slowly,
the cosine falls to zero far below it: few directions of the small factors are steep and oscillate, which makes the
cosine negative, while all others still gain. But which rate is best is known from their shape alone, as
[`~hf_hybrid.run.adapters.adapter_rate`] explains.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from hf_hybrid.part import Action, Level, Part, Step, Verdict
from hf_hybrid.run.record import RunView
from hf_hybrid.run.weights import TrainedWeights, inner_product, sum_of_squares


class _Average:
    """Debiased exponential averages of the cosine, its square, and the log scale under which it was seen."""

    def __init__(self):
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


class RateScale(Part):
    """Base class of the parts that scale the learning rate. The run applies it in each real step."""

    name = "rate"
    needs_numbers = False  # it learns from a step before the next update
    scale: float
    """Factor on the scheduled learning rate."""

    def begin(self, run: RunView) -> None:
        self.run = run

    def end_step(self, step: Step) -> None:
        if step.loss is not None:
            self.learn(step)
            self.run.record.add_scale(step.index + 1, self.scale)

    def react(self, step: Step, verdict: Verdict) -> None:
        if verdict.level is Level.CRITICAL and verdict.action is not Action.SKIP_BATCH:
            self.back_off()

    def learn(self, step: Step) -> None:
        """Move the scale after a real step."""

    def back_off(self) -> None:
        """Reduce the scale, after training went badly wrong."""
        raise NotImplementedError

    def log(self, step: int, logs: dict[str, Any]) -> None:
        if "learning_rate" in logs:  # an entry on steps; it has no loss if all of them were skipped
            logs["hybrid/learning_rate_scale"] = self.scale

    def summary(self) -> dict[str, Any]:
        return {"learning_rate_scale": self.scale}


class LearningRateSearch(RateScale):
    """
    A scalar state machine: [`observe`] takes the numbers of one real step and moves [`scale`] between 1 and
    `max_scale`. The search is to take a small part of the run. Its signal is measured on `weights` of torch's Adam or
    AdamW.

    The constants were chosen on the tasks of benchmarks/speedup/leaps.md. benchmarks/NOTEBOOK.md has the alternatives.
    """

    GROWTH, MIN_GROWTH, MAX_GROWTH = 2.5, 0.03, 0.25
    """Log growth per step: `GROWTH / sqrt(max_steps)` within the bounds."""
    DECAY_GROWING, DECAY_HOLDING = 0.8, 0.9
    CLEAR = 2.0
    """Standard errors that make a cosine clear."""
    STOP_BELOW = 0.25
    """Share of the peak cosine at which growth stops."""
    BEYOND = math.log(1.5)
    """
    From the scale at which growth stopped to the one that is held: the best rate is higher. Less growth than this may
    be chance, and the scale goes back to 1.
    """
    BACK = math.log(0.7)
    """From a scale at which training went wrong to the one that is held."""
    GIVE_UP_AFTER = 0.25
    """Share of the run after which growth that has become unclear ends."""
    SPIKE = 2.5
    """Deviations of the smoothed loss above its best that count as instability."""
    COOLDOWN = 20

    def __init__(self, *, max_steps: int, max_scale: float, weights: TrainedWeights | None = None):
        self.max_steps, self.weights = max_steps, weights
        self.cosine: Callable[[], float | None] | None = None
        """Waits for the cosine of the last real step, if its gradients were looked at."""
        self.max_log = math.log(max_scale)
        self.growth = min(self.MAX_GROWTH, max(self.MIN_GROWTH, self.GROWTH / math.sqrt(max(max_steps, 1))))
        self.patience = 3 + round(math.sqrt(max_steps) / 3)
        """Steps at scale 1 in which a good learning rate shows itself."""
        self.log_scale = self.cap = self.peak = 0.0
        self.steps = 0
        self.holding = False
        self.average = _Average()
        self.smooth_loss: float | None = None
        self.best_loss = self.loss_variance = 0.0
        self.cooldown = 0

    @property
    def scale(self) -> float:  # ty: ignore[incompatible-property-override]  # nobody writes it from outside
        """Factor on the scheduled learning rate, in `[1, max_scale]`."""
        return math.exp(self.log_scale)

    def before_update(self, step: Step) -> None:
        self.cosine = None
        if step.withheld or self.weights is None:
            return
        try:
            self.cosine = step_cosine(self.weights)
        except Exception as error:
            self.run.survive(error, "search of the learning rate missed a gradient")

    def learn(self, step: Step) -> None:
        cosine = None if step.withheld or self.cosine is None else self.cosine()
        self.observe(math.inf if step.withheld or step.loss is None else step.loss, cosine)

    def observe(self, loss: float, cosine: float | None) -> None:
        """Learn from a real step: its loss and its cosine."""
        if not math.isfinite(loss):
            return
        self.steps += 1
        if self._is_unstable(loss):
            self._hold(self.log_scale, self.BACK)
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
        seen_at = min(self.log_scale, self.average.scale / self.average.weight)
        if mean <= self.STOP_BELOW * self.peak:
            self._hold_beyond(seen_at)
        elif mean > clear and cosine > 0:
            self.log_scale = min(self.max_log, self.log_scale + self.growth)
        elif cosine < 0:
            self.log_scale = max(0.0, self.log_scale - 2 * self.growth)
        elif self.steps > self.GIVE_UP_AFTER * self.max_steps and mean < clear:
            self._hold_beyond(seen_at)

    def _adjust(self, mean: float, clear: float) -> None:
        if self.average.count <= 5:
            return
        if mean > clear:
            self.log_scale = max(self.log_scale, min(self.cap, self.log_scale + self.growth / 4))
        elif mean < -clear:
            self.log_scale = max(0.0, self.log_scale - self.growth / 2)
            self.cap = min(self.cap, self.log_scale + 0.7)

    def _hold_beyond(self, seen_at: float) -> None:
        self._hold(seen_at, self.BEYOND if seen_at > self.BEYOND else -seen_at)

    def _hold(self, log_scale: float, change: float) -> None:
        self.holding = True
        self.cap = max(0.0, log_scale)
        self.log_scale = min(self.max_log, max(0.0, log_scale + change))
        self.average = _Average()

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

    def back_off(self) -> None:
        """Reduce the scale to a quarter and stop its growth, after training went badly wrong."""
        self._hold(self.log_scale, -math.log(4))

    _STATE = ("log_scale", "cap", "peak", "steps", "holding", "smooth_loss", "best_loss", "loss_variance", "cooldown")

    def state_dict(self) -> dict:
        values = {name: getattr(self, name) for name in self._STATE}
        return {**values, "average": dict(vars(self.average))}

    def load_state_dict(self, state: dict) -> None:
        for name in self._STATE:
            setattr(self, name, state[name])
        vars(self.average).update(state["average"])


@torch.no_grad()
def step_cosine(weights: TrainedWeights) -> Callable[[], float | None] | None:
    """
    Order the cosine of a fresh gradient with the direction of the last step of Adam (uphill), which keeps it in its
    state: `exp_avg / (sqrt(exp_avg_sq) + eps)`.
    Return a function that waits for it, `None` if there is nothing to compare with. The cosine is positive if the last
    direction still leads downhill, and `None` if one of both is zero.
    """
    dots, squares, gradients = [], [], []
    for index, parameter in enumerate(weights.parameters):
        if parameter.grad is None or parameter.grad.is_sparse:
            continue
        if "exp_avg" not in (state := weights.state(index)):  # before the first step
            continue
        out, first = weights.scratch(parameter, parameter.device), state["exp_avg"]
        followed = out.copy_(state["exp_avg_sq"]).sqrt_().add_(1e-8)
        followed = torch.div(first.to(out.device, torch.float32), followed, out=out)
        gradient = parameter.grad.to(followed.device, torch.float32)
        dots.append(inner_product(gradient, followed))
        squares.append(sum_of_squares(followed))
        gradients.append(sum_of_squares(gradient))
    if not dots:
        return None
    read = weights.shards.totals_later([dots, squares, gradients])

    def cosine() -> float | None:
        dot, square, gradient = read().tolist()
        return dot / math.sqrt(square * gradient) if square > 0 and gradient > 0 else None

    return cosine
