"""
Watch training: turn the numbers of a step into a level, a reason and an action.

Training can go wrong with and without leaps. The monitor compares numbers that every run has with their normal values
in this run, so no threshold depends on the model or the data:

- gradients before they are used: a loss or norm that is not finite, or a norm far above its running median;
- the loss after each real step: its deviation from the linear trend of the last 32 real steps, a lasting rise of their
  mean;
- after a leap, at the end of Correct: the mean loss since the leap against the trend before it, in standard errors of
  that comparison.

The answer is a rung of a ladder (`Action`), mildest first: shorter leaps, real steps for a while, no leaps for longer
and longer, roll-back of the open leap, a dropped batch, a forgotten direction, and in the end an error that names the
last good checkpoint. A loss that a rolled-back leap caused never becomes part of what counts as normal.
"""

from __future__ import annotations

import logging
import math
import operator
import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from hf_hybrid.part import NORMAL, Action, Level, Part, Phase, RealStep, Step, Verdict
from hf_hybrid.run.record import RunView

if TYPE_CHECKING:
    from accelerate import Accelerator

logger = logging.getLogger(__name__)

FORECAST_WINDOW = 32
"""Losses of real steps that a forecast continues."""
MIN_FORECAST = FORECAST_WINDOW // 2
"""Fewer losses make no forecast."""


class TrainingDivergedError(RuntimeError):
    """Training cannot go on. The message says what happened and where the last good checkpoint is."""


class DivergenceMonitor(Part):
    """
    Judges the gradients of every real step ([`judge_gradients`]) and, if they are used, its loss ([`judge_step`]).
    Thresholds are relative to what this run does normally. In Warmup it withholds gradients that are not finite and is
    silent otherwise, because Warmup follows plain `Trainer` to the last bit. A loss that is more than `threshold`
    standard deviations above its trend is a warning.
    """

    name = "monitor"
    needs_numbers = False  # the device can decide as it does
    ACTIONS = (Action.NONE, Action.SHORTEN, Action.FORCE_FULL, Action.FORCE_FULL)
    """By level, where no leap can be rolled back."""
    MIN_HISTORY, HISTORY = 20, 64
    """Steps before relative thresholds mean anything, and the last ones that they are relative to."""
    EXPLODING = 100.0
    """Gradient norm over the running median that is a warning; ten times it is critical."""
    VANISHING = 1e-3
    """Gradient norm over the running median that counts as vanished."""
    FORGIVEN_PER_STEP = 0.002
    """Share of a lasting rise of the loss that each step takes for normal: data may have become harder."""
    RISE_EVERY = 8
    """Steps between two warnings of a lasting rise: about as long as one keeps leaps away."""
    BAD_BEFORE_RESET = 3
    """Non-finite steps in a row after which the last leap and the direction's averages are suspected."""
    MAX_BAD_STEPS = 30
    """Non-finite steps in a row that end the training: a damaged row makes one or two."""
    _STATE = ("bad_steps", "warnings_in_a_row", "best", "steps_since_rise")

    def __init__(self, threshold: float):
        self.threshold = threshold
        self.losses: deque[float] = deque(maxlen=self.HISTORY)
        self.norms: deque[float] = deque(maxlen=self.HISTORY)
        self.bad_steps = 0
        self.warnings_in_a_row = 0
        self.best: Sequence[float] | None = None
        """Lowest mean of a window of losses so far, and the deviation around its trend."""
        self.steps_since_rise = self.RISE_EVERY

    # As a part of a run.

    def begin(self, run: RunView) -> None:
        self.run = run

    def before_update(self, step: RealStep) -> None:
        leap_open, in_warmup = step.leap is not None, step.phase is Phase.WARMUP
        verdict = self.judge_gradients(step.loss, step.gradient_norm, leap_open=leap_open)
        is_finite = math.isfinite(step.loss) and math.isfinite(step.gradient_norm)
        if verdict.action is not Action.NONE and not (in_warmup and is_finite):
            step.withheld = True
            self.run.record.skipped_batches += 1
            self.run.call("react", step, verdict)
            return
        verdict = self.judge_step(step.loss, step.gradient_norm, leap_open=leap_open)
        step.verdict = NORMAL if in_warmup else verdict

    def withheld(self, step: Step, numbers: torch.Tensor) -> torch.Tensor:
        """
        Decide on the device what `before_update` will find on the host: 1 if the gradients of a step without leaps are
        withheld, else 0. `numbers` are those of [`numbers_of`].
        """
        loss, norm, is_known = numbers
        most = math.inf if step.phase is Phase.WARMUP else self.highest_norm
        bad = loss.isfinite().logical_and_(norm <= most).logical_not_().logical_and_(is_known)
        return norm.isfinite().logical_not_().logical_or_(bad).float()

    def react(self, step: Step, verdict: Verdict) -> None:
        """Write the verdict down, and raise an error if training cannot go on."""
        event = {
            "step": step.index,
            "phase": None if step.phase is None else step.phase.value,
            "level": verdict.level.name.lower(),
            "reason": verdict.reason,
            "action": verdict.action.value,
        }
        self.run.record.add_event(event)
        self.run.write({"step": step.index + 1, "event": event})
        if verdict.level >= Level.WARNING:
            logger.warning("Step %d: %s; %s.", step.index, verdict.reason, verdict.action.value.replace("_", " "))
        if verdict.action is Action.ABORT:
            error = TrainingDivergedError(f"Training diverged at step {step.index}: {verdict.reason}.")
            raise self.run.diverged(error)

    # The judgements.

    def judge_gradients(self, loss: float, norm: float, *, leap_open: bool) -> Verdict:
        """Judge before the optimizer's step. `leap_open`: a leap was made that can still be rolled back."""
        if not (math.isfinite(loss) and math.isfinite(norm)):
            self.bad_steps += 1
            what = "loss" if not math.isfinite(loss) else "gradient norm"
            reason = f"{what} is not finite ({self.bad_steps} in a row)"
            if self.bad_steps >= self.MAX_BAD_STEPS:
                return Verdict(Level.CRITICAL, reason, Action.ABORT)
            if self.bad_steps == self.BAD_BEFORE_RESET:
                return Verdict(Level.CRITICAL, reason, Action.ROLL_BACK if leap_open else Action.RESET_PREDICTOR)
            return Verdict(Level.CRITICAL, reason, Action.SKIP_BATCH)
        self.bad_steps = 0
        if norm > (highest := self.highest_norm):
            action, ratio = Action.ROLL_BACK if leap_open else Action.SKIP_BATCH, 10 * self.EXPLODING * norm / highest
            return Verdict(Level.CRITICAL, f"gradient norm {norm:.3g} is {ratio:.0f} times its median", action)
        self.norms.append(norm)
        return NORMAL

    @property
    def highest_norm(self) -> float:
        """Gradient norm above which gradients are not used."""
        if len(self.norms) < self.MIN_HISTORY:
            return math.inf
        return 10 * self.EXPLODING * max(statistics.median(self.norms), 1e-12)

    def judge_step(self, loss: float, norm: float, *, leap_open: bool) -> Verdict:
        """Judge after a real step with finite numbers."""
        risen = self._rise()
        level, reason = max((self._loss_deviation(loss), risen, self._norm(norm)), key=operator.itemgetter(0))
        if level < Level.CRITICAL or not leap_open:
            # A loss that is rolled back must not become part of what counts as normal.
            self.losses.append(loss)
        self.warnings_in_a_row = self.warnings_in_a_row + 1 if level >= Level.WARNING else 0
        if self.warnings_in_a_row >= 3:
            level, reason = Level.CRITICAL, f"{reason} (third warning in a row)"
            self.warnings_in_a_row = 0
        if (level, reason) == risen and level > Level.NORMAL:
            return Verdict(level, reason, Action.BACK_OFF)
        if level is Level.CRITICAL and leap_open:
            return Verdict(level, reason, Action.ROLL_BACK)
        return Verdict(level, reason, self.ACTIONS[level])

    def judge_leap(self, losses: list[float], forecast: float, deviation: float) -> Verdict:
        """Judge a leap at the end of Correct: compare the losses since it with the `robust_trend` before it."""
        # The error of the mean, and that of a line continued beyond its end.
        error = max(deviation, 1e-3 * abs(forecast)) * math.sqrt(1 / len(losses) + 4 / FORECAST_WINDOW)
        score = (sum(losses) / len(losses) - forecast) / max(error, 1e-8)
        if score <= self.threshold:
            return NORMAL
        reason = f"loss after the leap is {score:.1f} standard errors above its forecast {forecast:.4g}"
        return Verdict(Level.CRITICAL, reason, Action.ROLL_BACK)

    def _loss_deviation(self, loss: float) -> tuple[Level, str]:
        if len(self.losses) < self.MIN_HISTORY:
            return Level.NORMAL, ""
        trend, deviation = linear_trend(list(self.losses))
        score = (loss - trend) / max(deviation, 1e-3 * abs(trend), 1e-8)
        reason = f"loss {loss:.4g} is {score:.1f} standard deviations above its trend {trend:.4g}"
        if score > 2 * self.threshold:
            return Level.CRITICAL, reason
        if score > self.threshold:
            return Level.WARNING, reason
        return (Level.CAUTION, reason) if score > 0.8 * self.threshold else (Level.NORMAL, "")

    def _rise(self) -> tuple[Level, str]:
        """A loss that grows step by step takes its own trend along, and never stands out from that."""
        if len(self.losses) < FORECAST_WINDOW:
            return Level.NORMAL, ""
        window = list(self.losses)[-FORECAST_WINDOW:]
        mean, recent = sum(window) / len(window), sum(window[len(window) // 2 :]) / (len(window) - len(window) // 2)
        if self.best is None or mean <= self.best[0]:
            self.best = (mean, linear_trend(window)[1])
        lowest, deviation = self.best
        self.best = (lowest + self.FORGIVEN_PER_STEP * (mean - lowest), deviation)
        self.steps_since_rise += 1
        risen = recent > lowest + self.threshold * max(deviation, 1e-3 * abs(lowest), 1e-8)
        if not risen or self.steps_since_rise < self.RISE_EVERY:
            return Level.NORMAL, ""
        self.steps_since_rise = 0
        return Level.WARNING, f"losses average {recent:.4g}, and {lowest:.4g} when they were lowest"

    def _norm(self, norm: float) -> tuple[Level, str]:
        if len(self.norms) < self.MIN_HISTORY:
            return Level.NORMAL, ""
        ratio = norm / max(statistics.median(self.norms), 1e-12)
        if ratio > self.EXPLODING:
            return Level.WARNING, f"gradient norm {norm:.3g} is {ratio:.0f} times its median"
        if ratio < self.VANISHING:
            return Level.WARNING, f"gradient norm {norm:.3g} vanished ({ratio:.1g} of its median)"
        return Level.NORMAL, ""

    def state_dict(self) -> dict:
        deques = {name: list(getattr(self, name)) for name in ("losses", "norms")}
        return deques | {name: getattr(self, name) for name in self._STATE}

    def load_state_dict(self, state: dict) -> None:
        for name in ("losses", "norms"):
            getattr(self, name).clear()
            getattr(self, name).extend(state[name])
        vars(self).update({name: state[name] for name in self._STATE})


def linear_trend(values: list[float]) -> tuple[float, float]:
    """Fit a least-squares line, and return its continuation to the next value and the deviation around it."""
    count = len(values)
    centre = (count - 1) / 2
    mean = sum(values) / count
    spread = sum([(i - centre) ** 2 for i in range(count)])
    slope = sum([(i - centre) * (v - mean) for i, v in enumerate(values)]) / spread if spread else 0.0
    residuals = sum([(v - mean - slope * (i - centre)) ** 2 for i, v in enumerate(values)])
    return mean + slope * (count - centre), math.sqrt(residuals / max(count - 2, 1))


def robust_trend(values: list[float]) -> tuple[float, float]:
    """
    Fit a line that a few bad leaps do not move, and return its continuation to the next value and the noise around it.

    A leap that hurts leaves a jump in the losses. Least squares turn that jump into a steeper line and a larger
    deviation, so that the next bad leap looks normal. Here the slope is the median of all slopes between two values
    (Theil, 1950; Sen, 1968). The noise is read from the distances to the line at two quantiles, the median and the
    fourth fifth, each scaled to the standard deviation of a normal distribution: the larger of both, which no fifth of
    the values can raise, however far off it is. It takes at least three values.
    """
    count = len(values)
    slope = statistics.median((values[j] - values[i]) / (j - i) for i in range(count) for j in range(i + 1, count))
    level = statistics.median(value - slope * i for i, value in enumerate(values))
    off = sorted(abs(value - level - slope * i) for i, value in enumerate(values))
    median, fourth_fifth = off[count // 2], off[4 * count // 5]
    return level + slope * count, max(median / 0.6745, fourth_fifth / 1.2816)


# The numbers of a step.


def numbers_of(step: Step, norm: Any, accelerator: Accelerator) -> torch.Tensor:
    """
    Return loss and gradient norm of a step, and whether it has a loss (0 or 1), on its device: [3] in fp64.

    The loss is the mean over all processes. Where it is not finite, micro-batches without a label count as zero: they
    gave 0 / 0. If no token has a label, there is none.
    """
    losses = torch.stack(step.losses)
    labelled = _labelled(step, losses.device)
    sums = torch.stack([losses.sum(), losses.where(labelled, 0).sum(), labelled.sum().to(losses.dtype)])
    if accelerator.num_processes > 1:
        sums = accelerator.reduce(sums, reduction="mean")
    loss, of_labelled, count = sums.double()
    if type(norm) is not torch.Tensor or norm.device != losses.device:  # of streamed layers, and FSDP2's own class
        norm = torch.full_like(loss, float(norm))
    is_finite = loss.isfinite()
    return torch.stack([loss.where(is_finite, of_labelled), norm.double(), is_finite.logical_or(count).double()])


def _labelled(step: Step, device: torch.device) -> torch.Tensor:
    """Return which micro-batches of a step have labels, as far as that is known."""
    all_labelled = torch.ones(len(step.losses), dtype=torch.bool, device=device)
    if step.items is not None:
        return all_labelled & torch.as_tensor(step.items).to(device, non_blocking=True).bool().any()
    labels = [batch["labels"] for batch in step.batches if isinstance(batch, Mapping) and "labels" in batch]
    if len(labels) != len(step.losses) or not all(map(torch.is_tensor, labels)):
        return all_labelled
    found = [label[..., label.dim() > 1 :].ne(-100).any() for label in labels]
    return torch.stack([any_label.to(device, non_blocking=True) for any_label in found])


def overflowed(gradient_norm: float, scaler: Any) -> bool:
    """
    Whether gradients are infinite because the gradient scaler of fp16 multiplied the loss by too much. It finds its
    factor that way, and lowers it now. Gradients that overflow below a factor of 1 are the training's fault.
    """
    return not math.isfinite(gradient_norm) and scaler.get_scale() >= 1
