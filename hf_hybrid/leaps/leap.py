"""
Leaps: when one is made, how far it goes, and whether it stays.

The idea. The run alternates real steps with *leaps*: the weights jump along a direction that recent gradients give
(directions.py computes the displacement, trajectory.py applies it). A leap that helps is *worth* some real steps, and
the run skips as many: no forward pass, no backward pass, but the schedule, logging, evaluation and saving go on. A leap
that hurts is undone bit for bit.

The course of things:

    Warmup   real steps; the direction and the monitor gather statistics
    Full     real steps; at the end of a block a leap may be due
    Predict  the leap is made, and the steps that it is worth are skipped
    Correct  real steps at the new point; then the leap is accepted or rolled back -> Predict or Full

How far a leap goes is the planner's business ([`GainPlanner`]): a constant gain by default, or a world model that
imagines the run with and without leaps. Its worth is credit: `worth` steps per real step at full gain add up, and whole
steps are redeemed.

How a bad leap is caught. A leap that is probed is compared on sequences that training is about to use, before and after
(probe.py). It stays unless it is clearly worse, because a good leap often looks neutral at first. One that is worse, or
after which fewer preference pairs are ranked right, is tried at a quarter, a sixteenth and a 64th until neither holds,
and then undone. Few leaps need a probe: a budget bounds what probes cost. Every leap is watched in Correct, where the
divergence monitor (run/monitor.py) compares the training loss with the trend before the leap, and the snapshot is there
until then. Where Correct could not tell, because there are too few losses for a trend, every leap is probed.

The run learns from refused leaps (trust.py): later leaps are not longer than the length that a probe accepted, and are
probed until one is accepted at its full length. A run in which leaps do not help uses up a small budget and then makes
none.

Leaps did not pay on pretrained models and with adapters (docs/results.md). No probe can find that out, because even in
runs that leaps improve they do not lower the loss at once, on average. So, unless a direction is named, none are made
there, nor with losses that they were not measured with (automatic.py). A run without leaps has no part of this module.

[`Leaps`] is a part of the run (part.py). All its decisions follow from state that is saved, so that a resumed run takes
the same ones, and from numbers that are equal on all processes. From the top of this file: the phases, and the leaps.
trust.py says how far a leap goes.
"""

from __future__ import annotations

import logging
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from torch import Tensor

from hf_hybrid.leaps.probe import MIN_SEQUENCES, Losses, Probe, costs_accuracy, is_clearly_worse, paired_decrease
from hf_hybrid.leaps.trajectory import Trajectory
from hf_hybrid.leaps.trust import GainPlanner, Trust
from hf_hybrid.part import NORMAL, Action, Leap, Level, Part, Phase, Step, Verdict
from hf_hybrid.run.monitor import FORECAST_WINDOW, MIN_FORECAST, DivergenceMonitor, robust_trend
from hf_hybrid.run.run import Run

logger = logging.getLogger(__name__)

# The phases.


@dataclass(frozen=True)
class PhaseLengths:
    """Lengths of the phases in steps. `max_predict` is the largest worth of one leap."""

    warmup: int
    full: int
    correct: int
    max_predict: int


class PhaseController:
    """
    Decides the phase of the next step, without tensors, clock or randomness.

    Call [`finish_step`] after every step. If it returns `PREDICT`, a leap is pending. Make it before the next step, and
    report it with [`leap_kept`] or [`force_full`].
    """

    MAX_CONSECUTIVE_LEAPS = 5
    """Leaps that may follow each other without a Full block in between."""

    def __init__(self, lengths: PhaseLengths):
        self.lengths = lengths
        self.phase = Phase.WARMUP if lengths.warmup > 0 else Phase.FULL
        self.remaining = lengths.warmup or lengths.full
        self.steps_in_phase = 0
        self.consecutive_leaps = 0
        self.leap_due = False

    def finish_step(self, *, leap_allowed: bool) -> Phase:
        """
        Count the step that just ended and choose the phase of the next one. No leap is allowed while rejected leaps
        back off or nothing could be gained.
        """
        self.remaining -= 1
        self.steps_in_phase += 1
        if self.remaining > 0:
            return self.phase
        if self.phase is Phase.PREDICT:
            self._enter(Phase.CORRECT, self.lengths.correct)
            return self.phase
        leaps_enough = self.phase is Phase.CORRECT and self.consecutive_leaps >= self.MAX_CONSECUTIVE_LEAPS
        if leap_allowed and self.phase is not Phase.WARMUP and not leaps_enough:
            self.consecutive_leaps += 1
            self._enter(Phase.PREDICT, 0)
            self.leap_due = True
        else:
            self.consecutive_leaps = 0
            self._enter(Phase.FULL, self.lengths.full)
        return self.phase

    def leap_kept(self, horizon: int) -> Phase:
        """Record that the pending leap stays. The next `horizon` steps are predicted (0: Correct follows at once)."""
        self.leap_due = False
        if horizon > 0:
            self.remaining = min(horizon, self.lengths.max_predict)
        else:
            self._enter(Phase.CORRECT, self.lengths.correct)
        return self.phase

    def force_full(self, steps: int | None = None) -> None:
        """Go on with real steps, without the pending leap. Warmup is never cut short."""
        self.leap_due = False
        self.consecutive_leaps = 0
        if self.phase is Phase.WARMUP:
            return
        length = max(steps or self.lengths.full, 1)
        if self.phase is Phase.FULL:
            self.remaining = max(self.remaining, length)
        else:
            self._enter(Phase.FULL, length)

    def _enter(self, phase: Phase, length: int) -> None:
        self.phase, self.remaining, self.steps_in_phase = phase, length, 0

    def state_dict(self) -> dict:
        return {**vars(self), "phase": self.phase.value, "lengths": asdict(self.lengths)}

    def load_state_dict(self, state: dict) -> None:
        vars(self).update(state, phase=Phase(state["phase"]), lengths=self.lengths)  # which the new options give


# The leaps.


class LeapObserver(Part):
    """A part that also follows each leap, as the signals of the world model do."""

    def leap_tried(self, leaps: Leaps, leap: Leap) -> None:
        """Called when the probe of a leap is over and the weights are final until Correct."""

    def leap_accepted(self, leaps: Leaps, leap: Leap) -> None:
        """Called at the end of Correct when the leap stays, before the way back is closed."""

    def leaps_rejected(self, leaps: Leaps, leap: Leap | None) -> None:
        """Called when a leap was undone, or when leaps back off without one (`None`)."""


@dataclass(eq=False, kw_only=True)
class Leaps(Part):
    """Makes the leaps of a run. The module's docstring describes the course of things."""

    controller: PhaseController
    trajectory: Trajectory
    gains: GainPlanner
    trust: Trust
    monitor: DivergenceMonitor
    """The part of the run that judges its losses."""
    probe: Probe | None
    """Without it no leap is probed."""
    leap_budget: float
    """Arithmetic that leaps may cost, as a share of that of the real steps."""
    cost_of_step: Callable[[int], float]
    """From the tokens of a real step on this process to its floating-point operations on one process."""
    skip_from: int = 0
    """No step before this one is skipped, whatever leaps are worth."""
    observers: Sequence[LeapObserver] = ()
    """Parts that follow each leap. They stand in the run's list too."""
    credit: float = 0.0
    leap_cost: float | None = None
    """Cost of a leap in real steps; `None` before the first step."""
    _waits: bool = False
    """Whether the log has that the direction was not ready for a leap that was due."""

    name = "leaps"
    MARGIN, Z = 1.0, 2.0
    """A probed leap may raise the loss by `MARGIN` real steps' worth of progress and `Z` standard errors."""
    SHORTER = (1 / 4, 1 / 16, 1 / 64)
    """Shares of a probed leap that is clearly worse that are tried before it is undone."""

    def begin(self, run: Run) -> None:
        self.run, self.max_steps, self.record = run, run.max_steps, run.record

    # Before a step.

    def begin_step(self, step: Step) -> None:
        """Make the leap that is due, and say which phase the step belongs to."""
        self.run.phase = step.phase = self.controller.phase
        if self.controller.leap_due:
            formed, leap = self.trajectory.formed, Leap(step.index, real_steps=self.trajectory.clock.steps_in_block)
            try:
                self._leap(leap)
            except Exception as error:
                self.run.survive(error, "leap undone")  # the trial has put the weights back
                self._reject(leap)
            self.record.leap_cost_steps += (self.trajectory.formed - formed) * (self.leap_cost or 0.0)
        step.phase, step.leap = self.controller.phase, self.trajectory.open

    def _leap(self, leap: Leap) -> None:
        """Make one leap as a transaction: plan it, try it, probe it if a probe is due, then keep or undo it."""
        trajectory, trust, probe = self.trajectory, self.trust, self.probe
        gain = self._gain(leap)
        if gain <= 0:
            self.controller.force_full()  # there is nothing to leap along, or the planner wants no leap
            return
        length = gain * trajectory.clock.full_rate_steps
        if probe is not None:
            needed = self.must_probe or trust.wants_more(length)
            if not (trust.probe_is_due(probe, leap.step, must_probe=needed) and probe.choose()):
                probe = None
        if self.must_probe and probe is None:
            self.controller.force_full()  # the epoch ends: too few sequences come next
            return
        gain *= min(1.0, trust.longest(probed=probe is not None) / length)
        with trajectory.trial(leap):
            if probe is not None:
                self._probe(probe, leap, gain)
            else:
                trajectory.leap(gain)
            if leap.verdict != "rejected":
                self._keep(leap)
        # Nothing from here on can fail: the books are kept after the weights.
        self.record.add_leap(leap)
        if leap.verdict == "rejected":
            self._reject(leap)
            self._write(leap.step, leap)
        else:
            self.credit += leap.worth
            self.credit -= leap.horizon
            self.controller.leap_kept(leap.horizon)
        self._notify("leap_tried", leap)

    def _gain(self, leap: Leap) -> float:
        """Return the gain that is wanted, or 0 if no leap can be made."""
        trajectory, lengths = self.trajectory, self.controller.lengths
        if not trajectory.direction.ready:
            if not self._waits:
                why = "the optimizer's states do not tell the direction how"
                logger.warning("No leap is made at step %d: %s.", leap.step, why)
            self._waits = True
            return 0.0
        if trajectory.clock.lr_sum <= 0 or leap.step + 1 >= self.max_steps:
            return 0.0
        trajectory.clock.progress = leap.step / self.max_steps
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

    def _probe(self, probe: Probe, leap: Leap, gain: float) -> None:
        """
        Leap, and compare losses before and after. If hardly any sequence has a label, this is a leap without a probe,
        and is not made where there has to be one.
        """
        spent, passes, before = probe.cost_steps, probe.forward_passes, probe.losses()
        if sum(loss != 0.0 for loss in before.values) >= MIN_SEQUENCES:
            accepted = self._compare(probe, leap, gain, before)
        elif self.must_probe:
            leap.verdict, accepted = "rejected", None
        else:
            self.trajectory.leap(gain)
            accepted = 1.0
        leap.probe_cost_steps = probe.cost_steps - spent
        if accepted is not None:
            asked = leap.length / accepted if accepted else leap.length
            self.trust.leap_was_probed(asked, asked * accepted, leap.probe_cost_steps)
        self.record.forward_only_passes += probe.forward_passes - passes
        self.record.probe_cost_steps += leap.probe_cost_steps

    def _compare(self, probe: Probe, leap: Leap, gain: float, before: Losses) -> float:
        """Keep the leap, shorten it until it is not worse, or reject it. Return the share of it that is accepted."""
        accepted, slope = 1.0, self.slope
        leap.loss_before, leap.accuracy_before = before.mean, before.accuracy
        error = self._look(probe, leap, gain, before)
        leap.verdict = "kept"
        if is_clearly_worse(leap.decrease, error, margin=self.MARGIN * slope, z=self.Z):
            leap.worse_in = "loss"
        elif costs_accuracy(leap.accuracy_before, leap.accuracy_after):
            leap.worse_in = "accuracy"
        if leap.worse_in is not None:
            refused = replace(leap)
            for accepted in self.SHORTER:
                error = self._look(probe, leap, refused.gain * accepted, before)
                worse = is_clearly_worse(leap.decrease, error, margin=0.0, z=1.0)
                if not worse and not costs_accuracy(leap.accuracy_before, leap.accuracy_after):
                    leap.verdict = "shrunk"
                    break
            else:  # what is written down is the leap that was asked for
                vars(leap).update(vars(refused), verdict="rejected")
                accepted = 0.0
        if slope > 0:
            leap.e = leap.decrease / slope
        return accepted

    def _look(self, probe: Probe, leap: Leap, gain: float, before: Losses) -> float:
        """Leap and evaluate, and return the standard error of the fall of the loss."""
        self.trajectory.leap(gain)
        after = probe.losses()
        leap.loss_after, leap.accuracy_after = after.mean, after.accuracy
        leap.decrease, leap.standard_error = paired_decrease(before.values, after.values)
        return leap.standard_error

    def _keep(self, leap: Leap) -> None:
        """Inside the trial, write the leap for good, and remember the values that Correct compares with."""
        room = min(self.controller.lengths.max_predict, self.max_steps - leap.step - 1)
        worth = self.gains.worth_of(leap.gain, leap.real_steps) if leap.step >= self.skip_from else 0.0
        leap.worth = max(worth - leap.probe_cost_steps, 0.0)
        leap.horizon = min(int(self.credit + leap.worth), room)
        losses = self._recent_losses()
        if len(losses) >= MIN_FORECAST:
            leap.forecast, leap.deviation = robust_trend(losses)
        self.trajectory.keep()

    def _reject(self, leap: Leap | None) -> None:
        self.trust.leap_was_rejected()
        self.controller.force_full()
        self._notify("leaps_rejected", leap)

    def _notify(self, event: str, leap: Leap | None) -> None:
        for observer in self.observers:
            getattr(observer, event)(self, leap)

    def _recent_losses(self) -> list[float]:
        return list(self.monitor.losses)[-FORECAST_WINDOW:]

    @property
    def slope(self) -> float:
        """Return the recent fall of the training loss per real step; 0 if it does not fall or is unknown."""
        losses = self._recent_losses()
        if len(losses) < 4:
            return 0.0
        return max((statistics.median(losses) - robust_trend(losses)[0]) / ((len(losses) + 1) / 2), 0.0)

    @property
    def shortest_block(self) -> int:
        """Return the real steps between leaps that keep the cost of leaps within `leap_budget`."""
        return max(1, math.ceil((self.leap_cost or 0.0) / self.leap_budget - 1e-9))

    # Within a real step.

    def before_update(self, step: Step) -> None:
        """Show the direction gradients that are used."""
        if self.leap_cost is None:
            of_step = self.cost_of_step(step.tokens)
            self.leap_cost = self.trajectory.direction.flops() / of_step if of_step > 0 else 0.0
        if step.withheld:
            return
        try:
            self.trajectory.observe_gradients()
        except Exception as error:
            self.run.survive(error, "predictor missed a gradient")

    def after_update(self, step: Step, learning_rates: list[float]) -> None:
        self.trajectory.observe_step(learning_rates)

    # After a step.

    def decide(self, step: Step) -> None:
        """Decide the phase of the next step, and judge the leap whose Correct is over."""
        if step.counts and step.leap is not None and step.loss is not None:
            step.leap.losses.append(step.loss)
        block_ends = self.controller.remaining <= 1 and self.controller.phase is not Phase.PREDICT
        allowed = block_ends and self._may_leap(step.index + 1)
        self.controller.finish_step(leap_allowed=allowed)
        # The controller has left Correct: the leap is judged now, while its snapshot is still there.
        leap, phase = self.trajectory.open, self.controller.phase
        if step.phase is Phase.CORRECT and phase is not Phase.CORRECT and leap is not None:
            verdict = self._judge(leap)
            if verdict.action is Action.NONE:
                self._write(step.index, leap)
            else:
                self.run.call("react", step, verdict)

    def _may_leap(self, step: int) -> bool:
        if self.trajectory.clock.steps_in_block < self.shortest_block or self.gains.peak <= 0:
            return False
        trust = self.trust
        if trust.blocks_to_skip > 0:
            trust.blocks_to_skip -= 1
            return False
        return not self.must_probe or (self.probe is not None and trust.probe_is_due(self.probe, step, must_probe=True))

    def _judge(self, leap: Leap) -> Verdict:
        """Judge the leap at the end of Correct: accept it and learn from it, or return why it must be undone."""
        if not leap.losses:
            # Every step since the leap was skipped: the snapshot may be the only good weights there are.
            return Verdict(Level.CRITICAL, "no finite loss since the leap", Action.ROLL_BACK)
        if leap.forecast is not None:
            leap.forecast_error = sum(leap.losses) / len(leap.losses) - leap.forecast
            verdict = self.monitor.judge_leap(leap.losses, leap.forecast, leap.deviation)
            if verdict.action is Action.ROLL_BACK:
                return verdict
        self._notify("leap_accepted", leap)
        self.trajectory.accept()
        self.trust.leap_was_kept(probed=leap.loss_before is not None)
        return NORMAL

    def react(self, step: Step, verdict: Verdict) -> None:
        action = verdict.action
        if action is Action.SHORTEN:
            self.trust.shorten()
        if action is Action.BACK_OFF:
            self.trust.leap_was_rejected()
            self.trust.shorten()
            self._notify("leaps_rejected", None)
        if action in (Action.FORCE_FULL, Action.BACK_OFF, Action.ROLL_BACK, Action.RESET_PREDICTOR):
            self.controller.force_full(2 * self.controller.lengths.full)
        if action is Action.ROLL_BACK:
            self._roll_back(step)
        if action is Action.RESET_PREDICTOR:
            self.trajectory.reset_memory()

    def _roll_back(self, step: Step) -> None:
        """Undo the open leap, exactly."""
        leap, step.leap = self.trajectory.opened(), None
        self.trajectory.roll_back()
        self.record.roll_backs += 1
        leap.verdict = "rolled_back"
        self.trust.leap_was_rolled_back(leap.length)
        self.credit -= leap.worth  # its credit is taken back
        self._notify("leaps_rejected", leap)
        self._write(step.index, leap)

    # Reports.

    def _write(self, step: int, leap: Leap) -> None:
        """Write what became of a leap in step `step` (0-based)."""
        self.run.write({"step": step + 1, "leap": leap.summary()})

    def end(self) -> None:
        """A leap that is still open stays."""
        if self.trajectory.open is not None:
            self._write(self.run.steps_done - 1, self.trajectory.open)

    def summary(self) -> dict[str, Any]:
        return {
            "direction": self.trajectory.direction.name,
            "planner": self.gains.summary(),
            "buffer_bytes": self.trajectory.bytes_held(),
            "bytes_sent": self.trajectory.shards.bytes_sent,
        }

    def log(self, step: int, logs: dict[str, Any]) -> None:
        """Add the values of the phases as numbers, which all trackers accept."""
        record, last = self.record, self.record.leaps[-1] if self.record.leaps else None
        if "learning_rate" in logs:  # an entry on steps; it has no loss if all of them were skipped
            logs["hybrid/phase"] = (self.run.last_phase or self.controller.phase).index
            logs["hybrid/predicted_steps"] = record.steps_by_phase[Phase.PREDICT.value]
            logs["hybrid/backward_passes"] = record.backward_passes
            logs["hybrid/forward_only_passes"] = record.forward_only_passes
            logs["hybrid/leaps"] = record.leaps_made
            logs["hybrid/leap_gain"] = last.gain if last else 0.0
            logs["hybrid/leap_relative_norm"] = last.relative_norm if last else 0.0
            logs["hybrid/credit"] = self.credit
            logs["hybrid/learning_rate_scale"] = self.run.rate_scale
        if "train_runtime" in logs:
            # Of the whole run, so that they are the same after a resume.
            logs["hybrid_backward_passes"] = record.backward_passes
            logs["hybrid_backward_passes_avoided"] = record.backward_passes_avoided
            logs["hybrid_leaps"] = record.leaps_made

    def tensors_held(self) -> Sequence[Tensor]:
        return self.trajectory.tensors_held()

    # Saving.

    def state_dict(self) -> dict[str, Any]:
        tensors, trajectory = self.trajectory.state_dict()
        opened, probe = self.trajectory.open, None
        if self.probe is not None:
            probe = {name: getattr(self.probe, name) for name in ("price", "forward_passes", "cost_steps")}
            probe["next_batch"] = self.probe.source.next_batch
        return {
            "tensors": tensors,
            "trajectory": trajectory,
            "controller": self.controller.state_dict(),
            "trust": dict(vars(self.trust)),
            "probe": probe,
            "gains": self.gains.state_dict(),
            "credit": self.credit,
            "leap_cost": self.leap_cost,
            "open_leap": None if opened is None else self.record.leaps.index(opened),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what [`state_dict`] returned, after the run restored its record."""
        self.controller.load_state_dict(state["controller"])
        self.trust.load_state_dict(state["trust"])
        if self.probe is not None and state["probe"] is not None:
            self.probe.load_state_dict(state["probe"])
        if state["gains"] is not None:  # of another planner
            self.gains.load_state_dict(state["gains"])
        self.credit, self.leap_cost = state["credit"], state["leap_cost"]
        leap = None if state["open_leap"] is None else self.record.leaps[state["open_leap"]]
        self.trajectory.load_state_dict(state["tensors"], state["trajectory"], leap)
