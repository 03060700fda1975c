"""
Learning-rate rescue: find during training how much larger the learning rate can be.

The signal is the cosine between a fresh gradient and the direction that the optimizer moved along before. As the batch
is new, it is an unbiased derivative of the loss along it (hypergradient descent: Baydin et al., 2018,
arXiv 1703.04782): clearly positive while steps are too short, zero where they are right, negative beyond.
The scale grows geometrically until the cosine has fallen to a quarter of its peak. One and a half times that scale is
held. A learning rate that is good already shows no clear cosine in the first steps and is left alone.

Adapters need another rule. Their best rate is about ten times that of full fine-tuning. While the rate grows slowly,
the cosine falls to zero far below it: few directions of the small factors are steep and oscillate, which makes the
cosine negative, while all others still gain. If the rate grows by a factor of 2.2 per step, they have no time to. Then
the cosine crosses zero at 4e-3 to 8e-3 on the task `lora` and at 9e-4 on LoRA of SmolLM2-135M, where the best rates are
1.6e-2 and 1e-3 (docs/evaluation.md). So [`AdapterRateSearch`] raises the rate that fast and goes back, in the rate and
in the weights. Then it tries three times the rate at which the cosine crossed zero, and that rate itself, for some
steps each, and goes on from the weights that are better. The weights of adapters are small, so that copies can be kept
(a range test: Smith, 2017, arXiv 1506.01186, that looks at the cosine and loses few steps).

A preference loss can fall while fewer pairs are ranked right, so both rules look at the accuracy of the training
batches too, where the trainer has it ([`AccuracyWatch`]).
"""

from __future__ import annotations

import contextlib
import logging
import math
import statistics
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from hf_hybrid.leaps.probe import clearly_costs_accuracy, paired_decrease
from hf_hybrid.leaps.shards import Whole
from hf_hybrid.leaps.trajectory import WeightStore

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
    CLEAR = 3.0
    """
    Standard errors of the difference of two windows that make it clear. Two were too few with two pairs per step: the
    best of several windows is good by chance.
    """

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

    @property
    def sees_pairs(self) -> bool:
        """Whether any step had an accuracy, so that preference pairs are trained on."""
        return bool(self.best or self.now)

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
    probe_is_due = False
    """It needs no probes."""
    needs_cosine = True
    """It follows the cosine to the end of the run."""

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
        seen_at = min(self.log_scale, self.average.mean_log_scale)
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
        self.holding, self.held_at = True, self.steps
        self.watch.begin_window()
        self.cap = max(0.0, log_scale)
        self.log_scale = min(self.max_log, max(0.0, log_scale + change))
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
        self._hold(self.log_scale, -math.log(4))

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


class KeptWeights:
    """
    Copies of the weights as they were at some moments, which have names.

    Args:
        shards (`Whole`): The parameters that are trained. The copies lie on the host.
        optimizer: The one that steps them. Its states are forgotten when the weights go back: after a step that went
            wrong, its averages of squared gradients are too large for long.
        store (`WeightStore`): Where the weights lie.
    """

    def __init__(self, shards: Whole, optimizer: torch.optim.Optimizer, store: WeightStore):
        self.shards, self.optimizer, self.store = shards, optimizer, store
        self._kept: dict[str, list[Tensor]] = {}

    def keep(self, moment: str) -> None:
        """Copy the weights; an earlier copy of that name is replaced."""
        self._kept[moment] = self._copies()

    @contextlib.contextmanager
    def as_at(self, moment: str) -> Iterator[None]:
        """Inside, the weights are those of that moment."""
        now = self._copies()
        self._write(self._kept[moment])
        try:
            yield
        finally:
            self._write(now)

    def go_back(self, moment: str) -> None:
        """Restore the weights of that moment."""
        self._write(self._kept[moment])
        for parameter in self.shards.originals:
            self.optimizer.state.pop(parameter, None)

    def clear(self) -> None:
        """Keep none."""
        self._kept = {}

    def _copies(self) -> list[Tensor]:
        self.store.settle()
        return [torch.empty_like(p, device="cpu").copy_(p.detach()) for p in self.shards.parameters]

    @torch.no_grad()
    def _write(self, copies: list[Tensor]) -> None:
        self.store.settle()
        for parameter, copy in zip(self.shards.parameters, copies, strict=True):
            parameter.copy_(copy)
        self.store.changed()

    def moments(self) -> list[str]:
        """Return the names of what is kept."""
        return list(self._kept)

    def held(self) -> list[Tensor]:
        """Return the copies of this process."""
        return [copy for copies in self._kept.values() for copy in copies]

    def tensors(self) -> dict[str, Tensor]:
        """Return the copies by moment and parameter, whole on the first process. All processes must call this."""
        return {
            f"{moment}.{index}": self.shards.whole(index, copy)
            for moment, copies in self._kept.items()
            for index, copy in enumerate(copies)
        }

    def load(self, moments: list[str], tensors: dict[str, Tensor]) -> None:
        """Take back what [`moments`] and [`tensors`] returned."""
        count = len(self.shards.originals)
        self._kept = {
            moment: [self.shards.part(i, tensors[f"{moment}.{i}"]).cpu() for i in range(count)] for moment in moments
        }


class AdapterRateSearch:
    """
    The rescue of adapters: raise the rate fast until the cosine crosses zero, go back, and try two rates near it.

    The search begins as soon as the mean of the first cosines is clearly positive. With two sequences per step one of
    them may be negative by chance. At a good rate the mean is not, and the scale stays at 1. Then the rate grows by
    `GROWTH` per step until a cosine is not positive and the next is small. Where the cosine crossed zero is
    interpolated from the last positive one and the first that is not. The weights go back to those of the last
    positive cosine, the optimizer's states begin anew, and some steps are made at `BEYOND` of the rate of the crossing.
    The weights go back once more, and as many steps are made at the rate of the crossing. Then a probe compares what
    the two rates have led to with each other and with the weights at which the search began. The run continues with
    the better rate and its weights. As long as neither is better than the beginning, the weights go back to those of
    the beginning, and half of the rate is tried. The weights of about 10 steps are not kept.

    The rate of the crossing alone does not tell the best rate. On a small model that has much to learn the best rate is
    about three times as high. On a pretrained model with two sequences per step the noise of the gradients limits the
    rate, and the best one is that of the crossing.

    A preference loss needs a rate far below the crossing, which is tried alone, from the weights at which the search
    began. Those of the last positive cosine were made at a rate that is too high. One run on SmolLM2 never recovered
    from them (docs/evaluation.md). The rate is halved as well if clearly fewer pairs are ranked right than before.

    The probe compares the same sequences at all weights. Losses of different batches differ by more than what a rate
    costs that is five times too high: with two sequences per step they did not show it until training was destroyed.

    Args:
        learning_rate (`float`): The peak of the schedule.
        kept (`KeptWeights`): Keeps weights until a rate is found.
    """

    GROWTH = 0.8
    """Log growth per step."""
    KEPT = 3
    """Copies of the adapters: at the beginning of the search, at the last positive cosine, after the first trial."""
    FIRST, WAIT = 6, 12
    """Cosines that are looked at before the scale grows, at least and at most."""
    CLEAR = 3.5
    """Standard errors above zero that their mean must be. Cosines without a sign are in 1.6 % of all cases."""
    RECOVERED = 0.5
    """Share of the mean of the first cosines that the cosine after one that is not positive must have to go on."""
    BEYOND = math.log(3.0)
    """
    From the rate at which the cosine crosses zero to the higher one that is tried. The best rate was 1.9 to 3.9 times
    that of the crossing on `lora`, and 1.1 times on LoRA of SmolLM2.
    """
    BEYOND_OF_PREFERENCES = math.log(0.07)
    """
    From there to the one rate that is tried in DPO, where each pair that is learned has less gradient: a rate at which
    training goes well for some steps is far too high for a run. On the task `dpo` the cosine stays positive up to
    `HIGHEST`, and the best rate is 0.07 of that; it was chosen there. On SmolLM2 three seeds end with 9.3e-4, 4.4e-4
    and 1.3e-4, and AdamW is best at 5e-4 (docs/evaluation.md).
    """
    AFTER_DIVERGENCE = math.log(0.2)
    """From the rate at which the monitor saw training diverge to the one that is tried."""
    HIGHEST = 0.03
    """Rate that is never exceeded. The norms of a model can hide that adapters do no good."""
    WARMUP = 5
    """Steps until the rate of a trial is reached. Adam's first steps are of full length in every direction."""
    TRIAL = 8
    """Steps with a rate until it is compared."""
    SEQUENCES = 16
    """Sequences of the probe. With three, a rate three times too high was held on SmolLM2 (one seed of three)."""

    def __init__(self, learning_rate: float, kept: KeptWeights):
        self.learning_rate, self.kept = learning_rate, kept
        self.highest = max(0.0, math.log(self.HIGHEST / learning_rate))
        self.state = "waiting"
        """Or "growing", "trying" (a rate near the crossing), "held"."""
        self.log_scale = self.used = 0.0
        self.steps = 0
        self.since = -self.WARMUP
        """Step at which the optimizer's states began anew."""
        self.first: list[float] = []
        self.last_cosine = self.last_used = 0.0
        """The last positive cosine, and the log scale of the step that led to it."""
        self.watch = AccuracyWatch()
        self.crossing: float | None = None
        """Log scale at which the cosine crosses zero, while the last one was not positive."""
        self.lower: float | None = None
        """Log scale that is tried next."""
        self.rival: float | None = None
        """Log scale of the trial before, whose weights are kept."""
        self.alarm: int | None = None
        """Step of the last batch that stood out while a rate is held."""

    @property
    def scale(self) -> float:
        """Factor on the scheduled learning rate; it rises within some steps after the optimizer's states began anew."""
        return math.exp(self.log_scale) * min(1.0, (self.steps - self.since + 1) / self.WARMUP)

    @property
    def probe_is_due(self) -> bool:
        """Whether [`judge`] is to be called before the next step."""
        return self._trial_is_over and self.lower is None

    @property
    def _trial_is_over(self) -> bool:
        return self.state == "trying" and self.steps >= self.since + self.TRIAL

    @property
    def needs_cosine(self) -> bool:
        """Whether the cosine is still looked at, for which the host waits for the device in each step."""
        return self.state in ("waiting", "growing")

    def observe(self, loss: float, cosine: float | None, rate: float, accuracy: float | None = None) -> None:
        """
        Learn from one real step.

        Args:
            loss (`float`): Training loss of the step; not finite if the step was skipped.
            cosine (`float`, *optional*):
                Of the descent direction of its gradient with the optimizer's previous direction; `None` if unknown, or
                if [`needs_cosine`] is `False`.
            rate (`float`): The scheduled learning rate of the step.
            accuracy (`float`, *optional*): Share of the preference pairs of the step that are ranked right.
        """
        if not math.isfinite(loss):
            self.back_off()
            return
        # Loss and cosine are from before this step's update: what they tell is about the update of the step before.
        caused_by, self.used = self.used, math.log(self.scale * max(rate / self.learning_rate, 1e-9))
        self.steps += 1
        if self.state != "held" and self.watch.fell(accuracy) and self.state == "trying" and self.log_scale > 0:
            logger.warning("Fewer preference pairs are ranked right: the learning rate is lowered.")
            self._refuse()
        elif cosine is not None and math.isfinite(cosine):
            if self.state == "waiting":
                self._wait(cosine, caused_by)
            elif self.state == "growing":
                self._grow(cosine, caused_by)
        if self._trial_is_over and self.lower is not None:
            self.kept.keep("rival")
            self.rival = self.log_scale
            self._try_lower()

    def _wait(self, cosine: float, caused_by: float) -> None:
        self.first.append(cosine)
        if self._is_clear() and self.highest > 0:
            self.state = "growing"
            self.kept.keep("start")
            self._grow(statistics.fmean(self.first), caused_by)
        elif len(self.first) == self.WAIT:
            self.state = "held"

    def _is_clear(self) -> bool:
        """Whether the mean of the first cosines is clearly above zero."""
        count = len(self.first)
        if count < self.FIRST:
            return False
        return statistics.fmean(self.first) > self.CLEAR * statistics.stdev(self.first) / math.sqrt(count)

    def _grow(self, cosine: float, caused_by: float) -> None:
        # A step that overshoots and the next that comes back are nearly at right angles: then the cosine is about zero.
        goes_on = cosine > (0.0 if self.crossing is None else self.RECOVERED * statistics.fmean(self.first))
        if goes_on and self.log_scale < self.highest:
            self.last_cosine, self.last_used, self.crossing = cosine, caused_by, None
            self.kept.keep("good")
            self.log_scale = min(self.highest, self.log_scale + self.GROWTH)
        elif goes_on:
            self._try_near(self.highest)
        elif self.crossing is None:
            share = self.last_cosine / (self.last_cosine - cosine)
            self.crossing = self.last_used + share * (caused_by - self.last_used)
        else:
            self._try_near(self.crossing)

    def _try_near(self, crossing: float) -> None:
        if self.watch.sees_pairs:
            self._try(crossing + self.BEYOND_OF_PREFERENCES, "start")
        else:
            higher = min(self.highest, crossing + self.BEYOND)
            self.lower = higher - self.BEYOND
            self._try(higher, "good")

    def _try(self, log_scale: float, moment: str) -> None:
        """Make some steps at a rate, from the weights of that moment."""
        self.log_scale = min(self.highest, max(0.0, log_scale))
        self._go_back(moment)
        self.state = "trying"

    def _go_back(self, moment: str) -> None:
        self.kept.go_back(moment)
        self.watch.begin_window()
        self.since = self.steps

    def judge(self, losses: Callable[[], Sequence[float]]) -> None:
        """
        End the trials: compare the weights with those of the trial before, and the better ones with the beginning.

        Args:
            losses (`Callable`): Returns the losses of some sequences that training has not seen, always of the same,
                at the weights of the moment.
        """
        ended, rival_is_better = losses(), False
        if self.rival is not None:
            with self.kept.as_at("rival"):
                of_rival = losses()
            rival_is_better = paired_decrease(ended, of_rival)[0] > 0
            ended = of_rival if rival_is_better else ended
        with self.kept.as_at("start"):
            before = losses()
        better = paired_decrease(before, ended)[0] > 0 and not clearly_costs_accuracy(before, ended)
        if not better and self.log_scale > 0:
            self._refuse()
            return
        if better and rival_is_better:
            self.log_scale = self.rival
            self._go_back("rival")
        self.state = "held"
        self.kept.clear()

    def _refuse(self) -> None:
        """Do without the rate that is tried: take the lower one, or half of it."""
        if self.lower is not None:
            self._try_lower()
        else:
            self.rival = None
            # The weights of the last positive cosine may be what did the harm: the cosine is positive by chance too.
            self._try(self.log_scale - math.log(2), "start")

    def _try_lower(self) -> None:
        lower, self.lower = self.lower, None
        self._try(lower, "good")

    def back_off(self) -> None:
        """
        After training went badly wrong: go back if that is possible, or else reduce the scale to a quarter.

        Where nearly all preference pairs are ranked right, a batch with one that is not has a loss far above the trend,
        at any rate. So for preferences a rate that is held is reduced only if two batches stand out within a window of
        [`AccuracyWatch`].
        """
        if self.state == "growing":
            factor = self.BEYOND_OF_PREFERENCES if self.watch.sees_pairs else self.AFTER_DIVERGENCE
            self._try(self.used + factor, "start")
        elif self.state == "trying":
            self._refuse()
        elif self.state == "held":
            alone = self.alarm is None or self.steps > self.alarm + AccuracyWatch.WINDOW
            self.alarm = self.steps
            if not (alone and self.watch.sees_pairs):
                self.log_scale = max(0.0, self.log_scale - math.log(4))

    _STATE = (
        "state", "log_scale", "used", "steps", "since", "first", "last_cosine", "last_used", "crossing", "lower",
        "rival", "alarm",
    )  # fmt: skip

    def tensors(self) -> dict[str, Tensor]:
        """Return the weights that are kept during the search."""
        return self.kept.tensors()

    def state_dict(self) -> dict:
        found = {name: getattr(self, name) for name in self._STATE}
        return {**found, "watch": dict(vars(self.watch)), "moments": self.kept.moments()}

    def load_state_dict(self, state: dict, tensors: dict[str, Tensor]) -> None:
        """Take back what [`state_dict`] and [`tensors`] returned."""
        for name in self._STATE:
            setattr(self, name, state[name])
        vars(self.watch).update(state["watch"])
        self.kept.load(state["moments"], tensors)
