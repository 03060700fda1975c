"""
A run with leaps, from the first step to the last.

The idea. Much of what an optimizer will do in the next few steps can be predicted from what it just did. So the run
alternates real steps with *leaps*: the weights jump along a predicted displacement (directions/ predicts it,
trajectory.py applies it). A leap that helps is *worth* some real steps, and the run skips as many: no forward pass, no
backward pass, but the schedule, logging, evaluation and saving go on. A leap that hurts is undone bit for bit.

The course of things:

    Warmup   real steps; the signals and the direction gather statistics
    Full     real steps; at the end of a block a leap may be due
    Predict  the leap is made, and the steps that it is worth are skipped
    Correct  real steps at the new point; then the leap is accepted or rolled back -> Predict or Full

How far a leap goes is the planner's business (gains.py): a constant gain by default, a bandit, or a world model that
imagines the run with and without leaps. Its worth is credit: `worth` steps per real step at full gain add up, and whole
steps are redeemed.

How a bad leap is caught. A leap that is probed is compared on sequences that training is about to use, before and after
(probe.py). It stays unless it is clearly worse, because a good leap often looks neutral at first. One that is worse, or
after which fewer preference pairs are ranked right, is tried at a quarter, a sixteenth and a 64th until neither holds,
and then undone. Few leaps need a probe: a budget bounds what probes cost. Every leap is watched in Correct, where the
divergence monitor (divergence.py) compares the training loss with the trend before the leap, and the snapshot is there
until then. Where Correct could not tell, because there are too few losses for a trend, every leap is probed.

What was refused is learnt from (`Trust`): later leaps are not longer than what a probe accepted, and are probed until
one is accepted as it was asked for. A run in which leaps do not help uses up a small budget and then makes none.

Leaps did not pay on pretrained models and with adapters (docs/evaluation.md), and no probe notices that: where they
pay, they do not lower the loss at once either, on average. So, unless leaps were asked for, none are made there, nor
with optimizers and losses that they were not measured with (setup.py, `why_no_leaps`). Whether a language model is
pretrained shows in the very first training loss. A run without leaps is plain `Trainer`'s, with the divergence monitor
and, where it is on, the learning-rate rescue.

The trainer calls `begin_step`; for a real step `count`, `before_update` and `after_update`; and `end_step`. All
decisions follow from state that is saved, so that a resumed run takes the same ones, and from numbers that are equal on
all processes.
"""

from __future__ import annotations

import itertools
import logging
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from accelerate import skip_first_batches

from hf_hybrid.leaps.directions.base import NoDirection
from hf_hybrid.leaps.gains import GainPlanner, Stretch
from hf_hybrid.leaps.phases import PhaseController
from hf_hybrid.leaps.probe import (
    MIN_SEQUENCES,
    Probe,
    accuracy_of,
    costs_accuracy,
    is_clearly_worse,
    paired_decrease,
)
from hf_hybrid.leaps.trajectory import Trajectory
from hf_hybrid.part import Phase
from hf_hybrid.run.monitor import (
    FORECAST_WINDOW,
    MIN_FORECAST,
    NORMAL,
    Action,
    DivergenceMonitor,
    Level,
    TrainingDivergedError,
    Verdict,
    robust_trend,
)
from hf_hybrid.run.rate import AdapterRate, LearningRateRescue
from hf_hybrid.run.record import Leap, RunRecord
from hf_hybrid.world_model.residuals import DisplacementResiduals, GainCorrection, GroupResidual, group_of
from hf_hybrid.world_model.signals import SignalObserver, StepSignals

logger = logging.getLogger(__name__)

NO_LEAPS = "No leaps are made: %s. Name a `direction` to make them all the same."


def survive_nothing(error: Exception, otherwise: str) -> None:
    """Raise `error`. A trainer with out-of-memory recovery passes its own function, which does `otherwise` instead."""
    raise error


# What holds the next leap back.


@dataclass
class Trust:
    """
    Decides whether to leap, how far, and whether to probe, from the results of earlier leaps. It handles plain numbers
    only.

    1. Length. A leap's length is counted in real steps at the peak of the learning rate. A probe that accepts a shorter
       leap than was asked for limits later leaps to that length (`proven`), one that refuses every length to a quarter,
       and a roll-back to a half of what was undone. Later probes ask for `RAISE` times as much: at once as long as that
       is below the length that was refused last, and then after 4, 8, 16, ... kept leaps.
    2. Probation. No leap goes unprobed after one that was refused, shortened or rolled back, until a probe accepts a
       leap as it was asked for.
    3. Back-off. After a rejection no leap is made for 1, 2, 4, ... blocks of real steps.
    4. Level, a factor on every gain. A caution of the divergence monitor and a lasting rise of the loss halve it, and
       each kept leap raises it by a tenth, up to 1.

    What probes cost is bounded in two ways. The probes of a run in which leaps do well are spread over it and cost
    `probe_budget` at most. Where every leap needs one, those that are kept pay for theirs out of what they are worth,
    and those that are refused may cost `REFUSALS` times the budget, a tenth of which each kept leap forgives. After
    that no leap is made that needs a probe.

    It also computes a confidence, one of the signals: the posterior share of kept leaps, times the stability of the
    run, times the planner's probability that leaping pays, if it has one.

    Args:
        probe_budget (`float`): Share of the run's compute for probes.
        max_steps (`int`): Length of the run.
    """

    probe_budget: float
    max_steps: int
    kept: float = 0.0
    """Evidence that fades: leaps that were kept (a quarter for those that were not probed)."""
    rejected: float = 0.0
    stability: float = 1.0
    rejections_in_a_row: int = 0
    blocks_to_skip: int = 0
    probes_made: int = 0
    level: float = 1.0
    proven: float = math.inf
    """The longest leap that a probe accepted since one was refused; infinite if none was."""
    refused: float = math.inf
    """Length of the leap that was refused last."""
    refusals: int = 0
    kept_since: int = 0
    """Leaps that were kept since the last refusal."""
    on_probation: bool = False
    refused_cost: float = 0.0
    """What probes cost that refused or shortened a leap, in real steps, as far as kept leaps have not forgiven it."""

    PRIOR_KEPT, PRIOR_REJECTED = 3.0, 1.0
    EVIDENCE_HALF_LIFE = 50.0
    RAISE = 2.0
    REFUSALS, FORGIVES = 2.0, 0.9
    LOWEST_LEVEL = 1.0 / 64.0

    def observe_step(self, level: Level) -> None:
        """Fade the evidence towards the prior, so that a run that rejected early leaps tries again later."""
        keep = 0.5 ** (1.0 / self.EVIDENCE_HALF_LIFE)
        self.kept *= keep
        self.rejected *= keep
        target = {Level.NORMAL: 1.0, Level.CAUTION: 0.9, Level.WARNING: 0.5, Level.CRITICAL: 0.25}[level]
        self.stability = target if target < self.stability else self.stability + 0.1 * (1.0 - self.stability)

    def confidence(self, believed: float | None) -> float:
        """Return the confidence in `[0, 1]`; `believed` is the planner's probability that leaping pays, if any."""
        kept = self.PRIOR_KEPT + self.kept
        share = kept / (kept + self.PRIOR_REJECTED + self.rejected)
        return self.stability * share * (1.0 if believed is None else believed)

    def allows_leap(self, step: int, probe: Probe | None = None, *, must_probe: bool) -> bool:
        """Return whether a leap may be made, and count down the blocks of the back-off. Call this once per block."""
        if self.blocks_to_skip > 0:
            self.blocks_to_skip -= 1
            return False
        return not must_probe or self.probe_is_due(probe, step, must_probe=True)

    def probe_is_due(self, probe: Probe, step: int, *, must_probe: bool) -> bool:
        """Whether to probe the next leap: the first in any case, and later ones as far as the budgets go."""
        whole = self.probe_budget * self.max_steps
        if self.probes_made == 0:
            return True
        if must_probe:
            return self.refused_cost + 2 * probe.price <= self.REFUSALS * whole
        return probe.cost_steps + 3 * probe.price <= whole * min(step / self.max_steps + 0.1, 1.0)

    def wants_more(self, length: float) -> bool:
        """Whether it is time to try a leap of this length, which is longer than what was proven."""
        if self.on_probation or length <= self.proven:
            return False
        return self.RAISE * self.proven < self.refused or self.kept_since >= 2 ** (self.refusals + 1)

    def longest(self, *, probed: bool) -> float:
        """Return the length of the longest leap that may be made now."""
        return self.proven * (self.RAISE if probed and self.wants_more(math.inf) else 1.0)

    def leap_was_probed(self, asked: float, accepted: float, cost: float) -> None:
        """
        Learn from a probe.

        Args:
            asked (`float`), accepted (`float`): Length of the leap, and the one that the probe accepted: the same, a
                lower one, or 0.
            cost (`float`): Of the probe, in real steps.
        """
        self.probes_made += 1
        self.on_probation = accepted < asked
        if self.on_probation:
            self.refused_cost += cost
            self._refuse(asked, allowed=accepted or asked / 4)
        else:
            self.proven = max(accepted, self.proven)

    def leap_was_kept(self, *, probed: bool) -> None:
        self.kept += 1.0 if probed else 0.25
        if probed:
            self.rejections_in_a_row = 0
        self.kept_since += 1
        self.refused_cost *= self.FORGIVES
        self.level = min(1.0, self.level * 1.1)

    def leap_was_rejected(self) -> None:
        self.rejected += 1.0
        self.rejections_in_a_row += 1
        self.blocks_to_skip = 2 ** min(self.rejections_in_a_row - 1, 10)
        self.on_probation = True

    def leap_was_rolled_back(self, length: float) -> None:
        """Learn that a leap of this length did harm which no probe saw."""
        self.leap_was_rejected()
        self._refuse(length, allowed=length / 2)

    def _refuse(self, length: float, *, allowed: float) -> None:
        self.refused, self.proven = length, min(allowed, self.proven)
        self.refusals, self.kept_since = self.refusals + 1, 0

    def shorten(self) -> None:
        """Halve later leaps, until kept leaps raise the level again."""
        self.level = max(self.level / 2, self.LOWEST_LEVEL)

    def state_dict(self) -> dict:
        return {name: value for name, value in vars(self).items() if name not in ("probe_budget", "max_steps")}

    def load_state_dict(self, state: dict) -> None:
        vars(self).update(state, proven=float(state["proven"]), refused=float(state["refused"]))


# The run.


@dataclass
class _RealStep:
    """Numbers of the real step under way."""

    loss: float
    gradient_norm: float
    statistics: dict[str, float] | None = None
    cosine: float | None = None
    accuracy: float | None = None
    skipped: bool = False


class LeapRun:
    """
    Drives one run with leaps. The module's docstring describes its course.

    Args:
        controller (`PhaseController`), trajectory (`Trajectory`), gains (`GainPlanner`), trust (`Trust`), monitor
            (`DivergenceMonitor`), signals (`SignalObserver`): The parts.
        probe (`Probe`, *optional*), rescue (`LearningRateRescue` or `AdapterRate`, *optional*): More of them.
        feed (`BatchFeed`): The batches.
        stretches (`StretchCounter`): Cuts the run into the stretches that the planner learns from.
        leap_budget (`float`): Arithmetic that leaps may cost, as a share of that of the real steps. The same holds for
            the bytes that processes send.
        correct_gain (`bool`): Let what the last leaps met change the gain of each group of parameters.
        no_leaps (`str`, *optional*): Why no leaps are made in this run, if that is known.
        skip_from (`int`): No step before this one is skipped, whatever leaps are worth.
        pretrained_below (`float`): No leaps are made if the first training loss is below this.
        max_steps (`int`): Length of the run.
        max_grad_norm (`float`): Clipping threshold of the trainer, for the signals.
        on_phase_change (`Callable[[Phase, Phase], None]`): Told before the first step of a new phase.
        survive (`Callable[[Exception, str], None]`): Takes an exception from work that training can do without, and
            raises it unless it is an out-of-memory; the text says what is lost.
        log (`Callable[[dict], None]`): Takes what became of each leap and each event of the monitor: `step` (the one
            under way, 1-based), and `leap` or `event`.
    """

    MARGIN, Z = 1.0, 2.0
    """A probed leap may raise the loss by `MARGIN` real steps' worth of progress and `Z` standard errors."""
    SHORTER = (1 / 4, 1 / 16, 1 / 64)
    """Shares of a probed leap that is clearly worse that are tried before it is undone."""
    STATISTICS_EVERY = 8
    """Real steps between measurements of the optimizer's moments: they cost a pass over its states."""

    def __init__(
        self,
        *,
        controller: PhaseController,
        trajectory: Trajectory,
        gains: GainPlanner,
        trust: Trust,
        monitor: DivergenceMonitor,
        signals: SignalObserver,
        probe: Probe | None,
        feed: BatchFeed,
        rescue: LearningRateRescue | AdapterRate | None,
        stretches: StretchCounter,
        leap_budget: float,
        correct_gain: bool,
        max_steps: int,
        max_grad_norm: float,
        no_leaps: str | None = None,
        skip_from: int = 0,
        pretrained_below: float = 0.0,
        on_phase_change: Callable[[Phase, Phase], None] = lambda old, new: None,
        survive: Callable[[Exception, str], None] = survive_nothing,
        log: Callable[[dict], None] = lambda entry: None,
    ):
        self.controller, self.trajectory, self.gains, self.trust = controller, trajectory, gains, trust
        self.monitor, self.signals, self.probe, self.rescue, self.stretches = monitor, signals, probe, rescue, stretches
        self.leap_budget, self.max_steps, self.max_grad_norm = leap_budget, max_steps, max_grad_norm
        self.on_phase_change, self.survive, self.log = on_phase_change, survive, log
        self.residuals = DisplacementResiduals(trajectory.names, trajectory.shards)
        self.correction = GainCorrection(self.residuals.groups) if correct_gain else None
        self.record, self.feed = RunRecord(), feed
        self.logged, self.trained = LoggedSteps(), LoggedSteps()
        self.credit = 0.0
        self.first_loss: float | None = None
        """Training loss of the run's first real step, before any update."""
        self.no_leaps: str | None = None
        """Why no leaps are made, or `None` if they are."""
        self.pretrained_below, self.skip_from = pretrained_below, skip_from
        self.leap_cost: float | None = None
        """
        Arithmetic of a leap in real steps, or the bytes that it sends if these are more; `None` until the first step
        was counted.
        """
        self.linearity = 0.0
        """Fall of the probe's loss over the fall predicted to first order, at the leap probed last: a signal."""
        self.steps_since_leap = 0
        self.phase = self.announced = self.last_phase = controller.phase
        """Phase of the step under way, of which plugins were told, and of the last step."""
        self.leap_seconds = self.probe_seconds = 0.0
        self.learning_rate = 0.0
        self._losses: list[torch.Tensor] = []
        self._skipped = self._tokens = 0
        self._real: _RealStep | None = None
        self._new: Leap | None = None
        self._started = time.perf_counter()
        if no_leaps is not None:
            self._make_no_leaps(no_leaps)

    def _make_no_leaps(self, why: str) -> None:
        """Make no leaps from now on."""
        self.no_leaps = why
        if not self._follows_cosine:
            self.trajectory.stand_still()

    @property
    def rate_scale(self) -> float:
        """Factor on the learning rate of the next real step."""
        return self.rescue.scale if self.rescue is not None else 1.0

    @property
    def _follows_cosine(self) -> bool:
        """Whether the rescue looks at the direction of the steps, for which the trajectory keeps an average."""
        return self.rescue is not None and self.rescue.needs_cosine

    @property
    def confidence(self) -> float:
        """Trust in the next leap, in `[0, 1]`."""
        return self.trust.confidence(self.gains.confidence)

    # Before a step.

    def begin_step(self, step: int, learning_rate: Callable[[], float]) -> Phase:
        """
        Make the leap that is due before step `step` (0-based), and return the phase of the step.

        `learning_rate` returns the scheduled one.
        """
        self._started = time.perf_counter()
        self._losses, self._skipped, self._tokens, self.learning_rate = [], 0, 0, learning_rate()
        self.phase = self.controller.phase
        if self.controller.leap_due:
            self._begin_leap(step)
            self.phase = self.controller.phase
        # After the leap, which may be worth no step, and which needs what plugins put away in Predict.
        if self.phase is not self.announced:
            self.on_phase_change(self.announced, self.phase)
            self.announced = self.phase
        return self.phase

    def _begin_leap(self, step: int) -> None:
        # A leap reads numbers back from the device as it ends, so the host's time is the leap's.
        started, probed = time.perf_counter(), self.probe_seconds
        formed = self.trajectory.formed
        try:
            self._leap(step)
        except Exception as error:
            self.survive(error, "leap undone")  # the trial has put the weights back
            self.residuals.clear()
            self._reject()
        self.record.leap_cost_steps += (self.trajectory.formed - formed) * (self.leap_cost or 0.0)
        self.leap_seconds += time.perf_counter() - started - (self.probe_seconds - probed)

    def _leap(self, step: int) -> None:
        """Make one leap as a transaction: plan it, try it, probe it if a probe is due, then keep or undo it."""
        trajectory = self.trajectory
        leap = Leap(step, real_steps=trajectory.clock.steps_in_block)
        gain = self._gain(leap)
        if gain <= 0:
            self.controller.leap_rejected()  # there is nothing to leap along, or the planner wants no leap
            return
        length = gain * trajectory.clock.full_rate_steps
        needed = self.must_probe or (self.probe is not None and self.trust.wants_more(length))
        due = self.probe is not None and self.trust.probe_is_due(self.probe, step, must_probe=needed)
        probed = due and self.probe.choose()
        if self.must_probe and not probed:
            self.controller.leap_rejected()  # the epoch ends: too few sequences come next
            return
        gain *= min(1.0, self.trust.longest(probed=probed) / length)
        with trajectory.trial(leap):
            if probed:
                self._probe(leap, gain)
            else:
                trajectory.leap(gain)
            if leap.verdict != "rejected":
                self._keep(leap)
        # Nothing from here on can fail: the books are kept after the weights.
        self.record.add_leap(leap)
        self._new = leap
        if leap.verdict == "rejected":
            self._reject()
            self._log_leap(step, leap)
        else:
            self.credit += leap.worth
            self.credit -= leap.horizon
            self.controller.leap_kept(leap.horizon)
            self.stretches.leap(leap.gain, leap.real_steps)
            self.steps_since_leap = 0

    def _gain(self, leap: Leap) -> float:
        """Return the gain that is wanted, or 0 if no leap can be made."""
        trajectory, lengths = self.trajectory, self.controller.lengths
        if not trajectory.ready or trajectory.clock.lr_sum <= 0 or leap.step + 1 >= self.max_steps:
            return 0.0
        trajectory.clock.progress = leap.step / self.max_steps
        if self.correction is not None:
            trajectory.gain_factors = [self.correction.factor(group_of(name)) for name in trajectory.names]
        # A block that grew long during a back-off must not become one long leap.
        longest = max(lengths.full + lengths.correct, self.shortest_block)
        gain = self.gains.gain(trajectory.clock.progress) * self.trust.level
        return gain * min(1.0, longest / leap.real_steps)

    @property
    def must_probe(self) -> bool:
        """
        Whether no leap may be made without a probe: while leaps are on probation, and until there are enough losses to
        forecast those after a leap, by which Correct tells whether it hurt.
        """
        uncertain = self.trust.on_probation or len(self._recent_losses()) < MIN_FORECAST
        return self.probe is not None and uncertain

    def _probe(self, leap: Leap, gain: float) -> None:
        """Leap, and compare losses before and after, unless hardly any sequence has a label that they could tell by."""
        probe, spent, passes = self.probe, self.probe.cost_steps, self.probe.forward_passes
        started = time.perf_counter()
        before = probe.losses()
        self.probe_seconds += time.perf_counter() - started
        if sum(loss != 0.0 for loss in before) < MIN_SEQUENCES:
            self.trajectory.leap(gain)
            accepted = 1.0
        else:
            accepted = self._compare(leap, gain, before)
        leap.probe_cost_steps = probe.cost_steps - spent
        asked = leap.length / accepted if accepted else leap.length
        self.trust.leap_was_probed(asked, asked * accepted, leap.probe_cost_steps)
        self.record.forward_only_passes += probe.forward_passes - passes
        self.record.probe_cost_steps += leap.probe_cost_steps

    def _compare(self, leap: Leap, gain: float, before: Sequence[float]) -> float:
        """Keep the leap, shorten it until it is not worse, or reject it. Return the share of it that is accepted."""
        accepted = 1.0
        leap.loss_before, leap.accuracy_before = sum(before) / len(before), accuracy_of(before)
        self._look(leap, gain, before)
        leap.verdict = "kept"
        if is_clearly_worse(leap.decrease, leap.standard_error, margin=self.MARGIN * self.slope, z=self.Z):
            leap.worse_in = "loss"
        elif costs_accuracy(leap.accuracy_before, leap.accuracy_after):
            leap.worse_in = "accuracy"
        if leap.worse_in is not None:
            refused = replace(leap)
            for accepted in self.SHORTER:
                self._look(leap, refused.gain * accepted, before)
                worse = is_clearly_worse(leap.decrease, leap.standard_error, margin=0.0, z=1.0)
                if not worse and not costs_accuracy(leap.accuracy_before, leap.accuracy_after):
                    leap.verdict = "shrunk"
                    break
            else:  # what is written down is the leap that was asked for
                vars(leap).update(vars(refused), verdict="rejected")
                accepted = 0.0
        if self.slope > 0:
            leap.e = leap.decrease / self.slope
        if leap.predicted_decrease > 0 and math.isfinite(leap.decrease):
            self.linearity = leap.decrease / leap.predicted_decrease
        return accepted

    def _look(self, leap: Leap, gain: float, before: Sequence[float]) -> None:
        self.trajectory.leap(gain)
        started = time.perf_counter()
        after = self.probe.losses()
        self.probe_seconds += time.perf_counter() - started
        leap.loss_after, leap.accuracy_after = sum(after) / len(after), accuracy_of(after)
        leap.decrease, leap.standard_error = paired_decrease(before, after)

    def _keep(self, leap: Leap) -> None:
        """Inside the trial, write the leap for good, and remember the values that Correct compares with."""
        room = min(self.controller.lengths.max_predict, self.max_steps - leap.step - 1)
        worth = self.gains.worth_of(leap.gain, leap.real_steps) if leap.step >= self.skip_from else 0.0
        leap.worth = max(worth - leap.probe_cost_steps, 0.0)
        leap.horizon = min(int(self.credit + leap.worth), room)
        losses = self._recent_losses()
        if len(losses) >= MIN_FORECAST:
            leap.forecast, leap.deviation = robust_trend(losses)
        rate, predicted = leap.gain * self.trajectory.clock.lr_sum, self.trajectory.predicted_gradients()
        self.trajectory.keep()
        self.residuals.leap_made(rate, self.trajectory.snapshot, predicted)

    def _reject(self) -> None:
        self.trust.leap_was_rejected()
        self.controller.leap_rejected()

    def _recent_losses(self) -> list[float]:
        return list(self.monitor.losses)[-FORECAST_WINDOW:]

    @property
    def slope(self) -> float:
        """Return the recent fall of the training loss per real step; 0 if it does not fall or is unknown."""
        losses = self._recent_losses()
        if len(losses) < 4:
            return 0.0
        now, _ = robust_trend(losses)
        return max((statistics.median(losses) - now) / ((len(losses) + 1) / 2), 0.0)

    @property
    def shortest_block(self) -> int:
        """Return the real steps between leaps that keep the cost of leaps within `leap_budget`."""
        return max(1, math.ceil((self.leap_cost or 0.0) / self.leap_budget - 1e-9))

    # Within a real step.

    def skip_step(self) -> None:
        """Count one micro-batch of a skipped step, which computes nothing."""
        self._skipped += 1

    def count(self, inputs: dict, loss: torch.Tensor) -> None:
        """Count one micro-batch whose gradients are computed; `loss` is its share of the loss of the step."""
        self._losses.append(loss)
        if self.leap_cost is None:
            self._tokens += tokens_of(inputs)

    @property
    def step_loss(self) -> torch.Tensor:
        """Training loss of the real step under way on this process, a scalar on its device."""
        return torch.stack(self._losses).sum()

    @property
    def tokens(self) -> int | None:
        """Tokens of the real step under way on this process; `None` once the cost of a leap is known."""
        return self._tokens if self.leap_cost is None else None

    def observe_cost(self, step_flops: float, step_bytes: float) -> None:
        """
        Set what the first real step cost.

        Args:
            step_flops (`float`): Floating-point operations on one process.
            step_bytes (`float`): Bytes that all processes together sent.
        """
        direction = self.trajectory.direction
        costs = ((direction.flops(), step_flops), (direction.bytes_sent(), step_bytes))
        self.leap_cost = max(of_leap / of_step if of_step > 0 else 0.0 for of_leap, of_step in costs)

    def before_update(self, step: int, loss: float, gradient_norm: float, accuracy: float | None = None) -> bool:
        """
        Judge loss and gradients of a real step, and show the direction those that are used.

        `accuracy` is the share of the step's preference pairs that the model ranks right, if it trains on such.

        Returns whether the optimizer may step. If not, the caller must drop the gradients.

        Raises:
            TrainingDivergedError: If the monitor's action is to abort.
        """
        if self.first_loss is None and math.isfinite(loss):
            self._look_at_first_loss(loss)
        verdict = self.monitor.judge_gradients(loss, gradient_norm, leap_open=self.trajectory.open is not None)
        if self.controller.phase is Phase.WARMUP and math.isfinite(loss) and math.isfinite(gradient_norm):
            verdict = NORMAL  # Warmup follows plain Trainer to the last bit.
        self._real = _RealStep(loss, gradient_norm, accuracy=accuracy, skipped=verdict.action is not Action.NONE)
        if self._real.skipped:
            self.record.skipped_batches += 1
            self._react(step, verdict)
            return False
        try:
            self._observe_gradients()
        except Exception as error:
            self.survive(error, "predictor missed a gradient")
        return True

    def _look_at_first_loss(self, loss: float) -> None:
        """Decide whether the model is pretrained, and say it if no leaps follow."""
        self.first_loss = loss
        if loss < self.pretrained_below and self.no_leaps is None:
            self._make_no_leaps(f"the model is pretrained (first training loss {loss:.3g})")
            logger.warning(NO_LEAPS, self.no_leaps)

    def _observe_gradients(self) -> None:
        if self._follows_cosine:
            self._real.cosine = self.trajectory.step_cosine()
        if self.trajectory.open is not None:
            self.residuals.observe_gradients()
        self.trajectory.observe_gradients()
        if self.no_leaps is None and self.trajectory.clock.steps_seen % self.STATISTICS_EVERY == 1:
            self._real.statistics = self.trajectory.gradient_statistics()

    def after_update(self, learning_rates: list[float]) -> None:
        """Record a step of the optimizer with these learning rates (one per parameter group)."""
        self.trajectory.observe_step(learning_rates)
        still_averages = self.no_leaps is not None and not isinstance(self.trajectory.direction, NoDirection)
        if still_averages and self.trajectory.optimizer_remembers:
            self.trajectory.stand_still()  # otherwise the rescue asks the direction for its average

    # After a step.

    def end_step(self, step: int) -> None:
        """Close step `step` (0-based) and decide the phase of the next."""
        self.feed.close()
        phase, verdict = self.controller.phase, NORMAL
        real, self._real = self._real, None
        if real is not None and self.rescue is not None:
            self._observe_rate(step, real)
        finite = phase is not Phase.PREDICT and (real is None or math.isfinite(real.loss))
        if real is not None and real.skipped:
            real = None
        if real is not None:
            verdict = self._judge(real, phase)
        self._observe_signals(step, phase, real)
        self.trust.observe_step(verdict.level)
        self.steps_since_leap += 1
        self.record.steps_by_phase[phase.value] += 1
        # Not before the step ends: a checkpoint inside it is resumed at its beginning.
        self.record.backward_passes += len(self._losses)
        self.record.backward_passes_avoided += self._skipped
        if verdict.action is not Action.NONE:
            self._react(step, verdict)
        block_ends = self.controller.remaining <= 1 and phase is not Phase.PREDICT
        allowed = block_ends and self._may_leap(step + 1)
        self.controller.finish_step(leap_allowed=allowed)
        # The controller has left Correct: the leap is judged now, while its snapshot is still there.
        if phase is Phase.CORRECT and self.controller.phase is not Phase.CORRECT and self.trajectory.open is not None:
            leap = self.trajectory.open
            verdict = self._judge_leap(leap)
            if verdict.action is Action.NONE:
                self._log_leap(step, leap)
            else:
                self._react(step, verdict)
        rate = self.learning_rate * self.rate_scale
        if self.stretches.step(None if real is None else real.loss, rate):
            progress = (step + 1) / self.max_steps
            self.gains.observe(self.stretches.close(self.signals.features, progress, rate))
        self.record.seconds_by_phase[phase.value] += time.perf_counter() - self._started
        self.last_phase = phase
        for steps in (self.logged, self.trained):
            steps.count(real=phase is not Phase.PREDICT, finite=finite)

    def _may_leap(self, step: int) -> bool:
        if self.no_leaps is not None or self.trajectory.clock.steps_in_block < self.shortest_block:
            return False
        if self.gains.peak <= 0:
            return False
        return self.trust.allows_leap(step, self.probe, must_probe=self.must_probe)

    def _judge(self, real: _RealStep, phase: Phase) -> Verdict:
        leap = self.trajectory.open
        if leap is not None:
            leap.losses.append(real.loss)
        forecast = None if leap is None else leap.forecast
        verdict = self.monitor.judge_step(
            real.loss, real.gradient_norm, predicted_loss=forecast, leap_open=leap is not None
        )
        return NORMAL if phase is Phase.WARMUP else verdict

    def _judge_leap(self, leap: Leap) -> Verdict:
        """Judge the leap at the end of Correct: accept it and learn from it, or return why it must be undone."""
        if not leap.losses:
            # Every step since the leap was skipped: the snapshot may be the only good weights there are.
            return Verdict(Level.CRITICAL, "no finite loss since the leap", Action.ROLL_BACK)
        if leap.forecast is not None:
            leap.forecast_error = sum(leap.losses) / len(leap.losses) - leap.forecast
            verdict = self.monitor.judge_leap(leap.losses, leap.forecast, leap.deviation)
            if verdict.action is Action.ROLL_BACK:
                return verdict
        try:
            self._learn(leap)
        except Exception as error:
            self.survive(error, "predictor missed a lesson")
            self.residuals.clear()
        self.trajectory.accept()
        self.trust.leap_was_kept(probed=leap.loss_before is not None)
        return NORMAL

    def _learn(self, leap: Leap) -> None:
        """Compare the predicted with the realised displacement."""
        self.trajectory.store.settle()
        whole, groups = self.residuals.judge(self.trajectory.clock.lr_sum)
        if whole is not None:
            leap.cosine, leap.norm_ratio = whole.cosine, whole.norm_ratio
            self._fold(groups)
            if self.correction is not None:
                self.correction.learn(groups)

    def _fold(self, groups: dict[str, GroupResidual]) -> None:
        """Add the residual of one leap to the means by group of parameters."""
        for group, residual in groups.items():
            empty = {"leaps": 0, "cosine": 0.0, "norm_ratio": 0.0}
            mean = self.record.displacement_residuals.setdefault(group, empty)
            mean["leaps"] += 1
            for name in ("cosine", "norm_ratio"):
                mean[name] += (getattr(residual, name) - mean[name]) / mean["leaps"]

    def _react(self, step: int, verdict: Verdict) -> None:
        """Carry out one action of the recovery ladder."""
        action = verdict.action
        event = {
            "step": step,
            "phase": self.controller.phase.value,
            "level": verdict.level.name.lower(),
            "reason": verdict.reason,
            "action": action.value,
        }
        self.record.add_event(event)
        self.log({"step": step + 1, "event": event})
        if verdict.level >= Level.WARNING:
            logger.warning("Step %d: %s; %s.", step, verdict.reason, action.value.replace("_", " "))
        if action is Action.ABORT:
            raise TrainingDivergedError(f"Training diverged at step {step}: {verdict.reason}.")
        if action is Action.SHORTEN:
            self.trust.shorten()
        if action is Action.BACK_OFF:
            self.trust.leap_was_rejected()
            self.trust.shorten()
        if action in (Action.FORCE_FULL, Action.BACK_OFF, Action.ROLL_BACK, Action.RESET_PREDICTOR):
            self.controller.force_full(2 * self.controller.lengths.full)
        if action is Action.ROLL_BACK:
            self._roll_back(step)
        if action is Action.RESET_PREDICTOR:
            self.trajectory.reset_memory()
            self.linearity = 0.0
        if verdict.level is Level.CRITICAL and self.rescue is not None and action is not Action.SKIP_BATCH:
            self.rescue.back_off()

    def _roll_back(self, step: int) -> None:
        """Undo the open leap, exactly."""
        leap = self.trajectory.open
        self.trajectory.roll_back()
        self.residuals.clear()
        self.record.roll_backs += 1
        leap.verdict = "rolled_back"
        self.trust.leap_was_rolled_back(leap.length)
        self.credit -= leap.worth  # its credit is taken back
        self.monitor.errors.clear()
        self._log_leap(step, leap)

    def _observe_rate(self, step: int, real: _RealStep) -> None:
        if self.rescue.needs_cosine:
            self.rescue.observe(math.inf if real.skipped else real.loss, real.cosine, real.accuracy)
        self.record.add_scale(step + 1, self.rate_scale)

    def _observe_signals(self, step: int, phase: Phase, real: _RealStep | None) -> None:
        new, self._new = self._new, None
        last = self.record.leaps[-1] if self.record.leaps else None
        self.signals.observe(
            StepSignals(
                phase=phase,
                progress=(step + 1) / self.max_steps,
                learning_rate=self.learning_rate * self.rate_scale,
                rate_scale=self.rate_scale,
                max_grad_norm=self.max_grad_norm,
                loss=real.loss if real else None,
                gradient_norm=real.gradient_norm if real else None,
                statistics=real.statistics if real else None,
                steps_in_phase=self.controller.steps_in_phase,
                steps_since_leap=self.steps_since_leap,
                consecutive_leaps=self.controller.consecutive_leaps,
                rate_in_block=self.trajectory.clock.lr_sum,
                leap_gain=last.gain if last else 0.0,
                leap_credit=self.credit,
                leap_decrease=(new.loss_before - new.loss_after) / new.standard_error
                if new is not None and new.standard_error
                else None,
                leap_kept=None if new is None else new.verdict != "rejected",
                leap_residual=self.linearity,
                leap_relative_norm=last.relative_norm if last else 0.0,
                confidence=self.confidence,
            )
        )

    # Reports.

    def _log_leap(self, step: int, leap: Leap) -> None:
        """Write what became of a leap. `step` (0-based) is the one in which that was decided."""
        self.log({"step": step + 1, "leap": leap.summary()})

    def end(self, step: int) -> None:
        """End the run after `step` steps. A leap that is still open stays."""
        if self.trajectory.open is not None:
            self._log_leap(step - 1, self.trajectory.open)

    @property
    def last_loss(self) -> float | None:
        """Training loss of the last real step; `None` before the first."""
        return (self.signals.losses or [None])[-1]

    def summary(self) -> dict:
        """Return the run so far as plain values; see [`RunRecord`]."""
        return {
            **self.record.summary(),
            "direction": self.trajectory.direction.name,
            "no_leaps": self.no_leaps,
            "learning_rate_scale": self.rate_scale,
            "planner": self.gains.summary(),
            "buffer_bytes": self.trajectory.bytes_held(),
            "bytes_sent": self.trajectory.shards.bytes_sent,
        }

    def amend_logs(self, logs: dict) -> None:
        """Correct Trainer's log entry, whose means count skipped steps as zeros, and add the values of the phases."""
        if "loss" in logs:
            self.logged.correct_mean(logs, "loss")
            logs["learning_rate"] = self.learning_rate * self.rate_scale
            if not self.logged.last_was_real:
                logs.pop("grad_norm", None)
            self.logged = LoggedSteps()
            logs.update(self._log_values())
        self.trained.correct_mean(logs, "train_loss")
        if (
            "train_runtime" in logs and self.no_leaps is None
        ):  # the metrics of the whole run; seconds are of this start, as `train_runtime` is
            logs["hybrid_backward_passes"] = self.record.backward_passes
            logs["hybrid_backward_passes_avoided"] = self.record.backward_passes_avoided
            logs["hybrid_leaps"] = self.record.leaps_made
            logs["hybrid_leap_runtime"] = round(self.leap_seconds, 4)
            logs["hybrid_probe_runtime"] = round(self.probe_seconds, 4)

    def _log_values(self) -> dict[str, float]:
        """Return the values of the phases as numbers, which all trackers accept; without leaps there are none."""
        if self.no_leaps is not None:
            return {} if self.rescue is None else {"hybrid/learning_rate_scale": self.rate_scale}
        record, last = self.record, self.record.leaps[-1] if self.record.leaps else None
        return {
            "hybrid/phase": self.last_phase.index,
            "hybrid/predicted_steps": record.steps_by_phase[Phase.PREDICT.value],
            "hybrid/backward_passes": record.backward_passes,
            "hybrid/forward_only_passes": record.forward_only_passes,
            "hybrid/leaps": record.leaps_made,
            "hybrid/leap_gain": last.gain if last else 0.0,
            "hybrid/leap_relative_norm": last.relative_norm if last else 0.0,
            "hybrid/credit": self.credit,
            "hybrid/confidence": self.confidence,
            "hybrid/learning_rate_scale": self.rate_scale,
        }

    # Saving.

    _PARTS = ("controller", "trust", "monitor", "signals", "record", "stretches")
    _OPTIONAL = ("probe", "rescue", "correction")
    _VALUES = ("credit", "leap_cost", "linearity", "steps_since_leap", "first_loss")

    def state_dict(self) -> tuple[dict, dict]:
        """
        Return the tensors and JSON values from which a resumed run continues bit for bit. All processes must call this.
        """
        tensors, trajectory = self.trajectory.state_dict()
        for part, found in (
            ("residuals", self.residuals.tensors()),
            ("gains", self.gains.tensors()),
        ):
            tensors.update({f"{part}.{name}": tensor.contiguous() for name, tensor in found.items()})
        optional = {name: getattr(self, name) for name in self._OPTIONAL}
        values = {
            "trajectory": trajectory,
            "residuals": self.residuals.state_dict(),
            "gains": self.gains.state_dict(),
            "announced": self.announced.value,
            "leap_is_new": self._new is not None,
            "no_leaps": self.no_leaps,
            "open_leap": None if self.trajectory.open is None else self.record.leaps.index(self.trajectory.open),
            **{name: getattr(self, name).state_dict() for name in self._PARTS},
            **{name: None if part is None else part.state_dict() for name, part in optional.items()},
            **{name: getattr(self, name) for name in self._VALUES},
        }
        return tensors, values

    def load_state_dict(self, tensors: dict, values: dict) -> None:
        """Restore what [`state_dict`] returned."""

        def part_of(part: str) -> dict:
            return {key[len(part) + 1 :]: tensor for key, tensor in tensors.items() if key.startswith(f"{part}.")}

        for name in self._PARTS:
            getattr(self, name).load_state_dict(values[name])
        for name in self._OPTIONAL:
            part = getattr(self, name)
            if part is not None and values[name] is not None:
                part.load_state_dict(values[name])
        for name in self._VALUES:
            setattr(self, name, values[name])
        if values["no_leaps"] is not None and self.pretrained_below > 0:
            self._make_no_leaps(values["no_leaps"])
        if self.no_leaps is not None and values["trajectory"]["direction"] == NoDirection.name:
            self.trajectory.stand_still()
        leap = None if values["open_leap"] is None else self.record.leaps[values["open_leap"]]
        of_trajectory = {k: tensor for k, tensor in tensors.items() if not k.startswith(("residuals.", "gains."))}
        self.trajectory.load_state_dict(of_trajectory, values["trajectory"], leap)
        self.residuals.load_state_dict(part_of("residuals"), values["residuals"])
        self.gains.load_state_dict(part_of("gains"), values["gains"])
        self.phase, self.announced = self.controller.phase, Phase(values["announced"])
        self._new = self.record.leaps[-1] if values["leap_is_new"] else None


class NoLeaps:
    """
    Replaces [`LeapRun`] between runs and with `enable_predict=False`. It does nothing.

    Args:
        summary (`dict`, *optional*): Summary of the last run with leaps.
        why (`str`, *optional*): Why there are none, where they were not turned off.
    """

    phase = None
    last_phase = None
    last_loss = None
    trajectory = None
    rate_scale = 1.0

    def __init__(self, summary: dict | None = None, why: str | None = None):
        self._summary = {**RunRecord().summary(), "no_leaps": why} if summary is None else summary

    def count(self, inputs: dict, loss: torch.Tensor) -> None:
        """Count nothing."""

    def end_step(self, step: int) -> None:
        """Decide nothing."""

    def amend_logs(self, logs: dict) -> None:
        """Leave Trainer's log unchanged."""

    def summary(self) -> dict:
        """Return the summary of the last run with leaps, or zeros if there was none."""
        return self._summary


# Batches, stretches and log entries of a run.


@dataclass
class LoggedSteps:
    """
    Steps since the last log entry, to correct means that count skipped steps as zeros.

    Attributes:
        real (`int`), finite (`int`), total (`int`): Steps that were not skipped, those of them whose loss was finite,
            and all steps.
    """

    real: int = 0
    finite: int = 0
    total: int = 0
    last_was_real: bool = True

    def count(self, *, real: bool, finite: bool) -> None:
        """Count one step, which has a finite loss or none."""
        self.real += real
        self.finite += finite
        self.total += 1
        self.last_was_real = real

    def correct_mean(self, logs: dict, key: str) -> None:
        """
        Turn the mean over all steps into the mean over the real ones. Drop it if no step had a finite loss: `Trainer`
        logs zero then, unless `logging_nan_inf_filter=False`.
        """
        if key not in logs:
            return
        if self.finite:
            logs[key] *= self.total / self.real
        elif self.total and math.isfinite(logs[key]):
            del logs[key]


class BatchFeed:
    """
    Hands out the batches of an epoch, in the order of `Trainer`'s own loader, of which some are fetched early.

    A batch stays in the queue until the step that trains on it is over. So a probe may look at the next ones, a skipped
    step, which trains on none, shows the next ones to subclasses, and a checkpoint that is saved inside a step counts
    that step's batches as not trained on yet.

    `Trainer` counts batches by steps when it resumes inside an epoch, and would skip those that were never trained on.
    The feed remembers how many were, and then reads from an iterator of its own.
    """

    def __init__(self):
        self.epoch = 0
        self.trained = 0
        """Batches of this epoch that steps were made with."""
        self.begun = False
        """Whether a step of this epoch is over; it may have been skipped."""
        self._queue: list = []
        self._under_way = 0
        self._source: Iterator | None = None

    def enter(self, epoch: int) -> None:
        """Begin epoch `epoch`, or continue it after a resume."""
        if epoch != self.epoch:
            self.epoch, self.trained, self.begun = epoch, 0, False
        self._queue, self._under_way, self._source = [], 0, None

    def read(self, dataloader) -> None:
        """Read the epoch after the batches that were trained on, with an iterator of our own."""
        own = skip_first_batches(dataloader, self.trained)
        for part in (own, getattr(getattr(own, "batch_sampler", None), "batch_sampler", None)):
            if hasattr(part, "set_epoch"):
                part.set_epoch(self.epoch)
        self._source = iter(own)
        # Starting to iterate draws from the global generator, whose state Trainer restores before the first step: that
        # has to be over by then, also where the first steps take no batch.
        self.peek(1)

    def open(self, epoch_iterator: Iterator) -> None:
        """
        Read the next batches, from `Trainer`'s iterator of the epoch unless [`read`] made one of our own.

        A window that a stream ended in the middle of was trained on, though no step came of it.
        """
        if self._under_way:
            self.close()
        if self._source is None:
            self._source = epoch_iterator

    def peek(self, count: int) -> list:
        """Return the next `count` batches, or as many as the epoch still has, and leave them in the queue."""
        self._queue.extend(itertools.islice(self._source, max(count - len(self._queue), 0)))
        return self._queue[:count]

    def begin(self, count: int) -> None:
        """A step trains on the next `count` batches."""
        self._under_way = count

    def close(self) -> None:
        """The step is over."""
        del self._queue[: self._under_way]
        self.trained += self._under_way
        self._under_way, self.begun = 0, True

    def state_dict(self) -> dict:
        return {"epoch": self.epoch, "trained": self.trained, "begun": self.begun}

    def load_state_dict(self, state: dict) -> None:
        self.epoch, self.trained, self.begun = state["epoch"], state["trained"], state["begun"]


def tokens_of(inputs: dict) -> int:
    """Return the tokens in a batch: the elements of `input_ids`, or of the tensor that replaces it."""
    found = inputs.get("input_ids")
    if found is None:
        found = next((value for value in inputs.values() if getattr(value, "ndim", 0) >= 2), None)
    return 0 if found is None else found.shape[0] * found.shape[1]


class StretchCounter:
    """Gathers steps and leaps into stretches of `stride` real steps, from which planners learn."""

    def __init__(self, stride: int):
        self.stride = stride
        self.losses: list[float] = []
        self.gain, self.predicted, self.peak_rate = 0.0, 0, 0.0

    def leap(self, gain: float, real_steps: int) -> None:
        """Count a kept leap of this gain, made after `real_steps` real steps."""
        self.gain += gain * real_steps

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

    def state_dict(self) -> dict:
        return dict(vars(self))

    def load_state_dict(self, state: dict) -> None:
        for name in vars(self):
            setattr(self, name, state[name])
