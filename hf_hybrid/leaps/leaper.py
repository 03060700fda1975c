"""Makes leaps, keeps or undoes them, and learns what became of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from hf_hybrid.leaps.divergence import (
    FORECAST_WINDOW,
    NORMAL,
    Action,
    DivergenceMonitor,
    Level,
    Verdict,
    linear_trend,
)
from hf_hybrid.leaps.leaps import LeapOutcome, LeapPlanner, LeapRecord, OpenLeap, record_as_dict
from hf_hybrid.leaps.record import RunRecord
from hf_hybrid.leaps.residuals import DisplacementResiduals, GainCorrection, group_of
from hf_hybrid.leaps.trajectory import LeapShape, Trajectory
from hf_hybrid.leaps.verifier import HeldOutProbe, Residual
from hf_hybrid.phases import PhaseController


class Leaper:
    """
    One leap at a time, from the plan to the verdict at the end of Correct.

    Args:
        trajectory, planner, probe, monitor, controller: The parts of the engine; `probe` may be `None`.
        record (`RunRecord`): Where leaps and their costs are written.
        max_steps (`int`): Length of the run.
        budget (`float`): Real steps' worth of arithmetic that leaps may cost per real step.
        correct_gain (`bool`): Let what the last leaps met change the gain of each group of parameters.
        on_kept (`Callable[[float, int], None]`): Told gain and real steps of every leap that is kept.
    """

    def __init__(
        self,
        *,
        trajectory: Trajectory,
        planner: LeapPlanner,
        probe: HeldOutProbe | None,
        monitor: DivergenceMonitor,
        controller: PhaseController,
        record: RunRecord,
        max_steps: int,
        budget: float,
        correct_gain: bool,
        on_kept: Callable[[float, int], None] = lambda gain, real_steps: None,
    ):
        self.trajectory, self.planner, self.probe = trajectory, planner, probe
        self.monitor, self.controller, self.record = monitor, controller, record
        self.max_steps, self.budget, self.on_kept = max_steps, budget, on_kept
        self.cost_steps: float | None = None
        """Arithmetic of a leap in real steps; `None` until the first step was seen."""
        self.residuals = DisplacementResiduals(trajectory.names, trajectory.parameters)
        self.correction = GainCorrection(self.residuals.groups) if correct_gain else None
        self.open: OpenLeap | None = None
        self.just_made: LeapRecord | None = None

    # A leap is made.

    def observe_compute(self, step_flops: float) -> None:
        """The first real step took so many floating-point operations."""
        self.cost_steps = self.trajectory.direction.flops() / step_flops if step_flops > 0 else 0.0

    @property
    def shortest_block(self) -> int:
        """Real steps between leaps that keep them within the budget."""
        return max(1, math.ceil((self.cost_steps or 0.0) / self.budget - 1e-9))

    @property
    def affordable(self) -> bool:
        """Whether the block of real steps since the last leap is long enough for the next."""
        return self.trajectory.steps_in_block >= self.shortest_block

    def leap(self, step: int, features: Sequence[float]) -> None:
        """The leap that is due before step `step`: plan it, look at it if a probe is due, keep or reject it."""
        real_steps = self.trajectory.steps_in_block
        if not self.trajectory.ready or self.trajectory.lr_sum <= 0 or step + 1 >= self.max_steps:
            self.controller.leap_rejected()
            return
        self.trajectory.clock.progress = step / self.max_steps
        plan = self.planner.plan(step, features, self.probe)
        lengths = self.controller.lengths
        # A block grown long while leaps backed off must not be repaid in one go.
        longest = 2 * max(lengths.full + lengths.correct, self.shortest_block)
        gain = plan.gain * min(1.0, longest / real_steps)
        if gain <= 0:
            self.controller.leap_rejected()  # the planner wants none
            return
        if self.correction is not None:
            self.trajectory.gain_factors = [self.correction.factor(group_of(name)) for name in self.trajectory.names]
        formed = self.trajectory.formed
        if plan.probe:
            self._conclude(step, features, self._look(gain), real_steps)
        else:
            self._keep(step, self.trajectory.leap(gain), None, real_steps)
        self.record.leap_cost_steps += (self.trajectory.formed - formed) * (self.cost_steps or 0.0)

    def _look(self, gain: float) -> LeapOutcome:
        passes = self.probe.forward_passes
        outcome = self.planner.look(gain, self.trajectory.leap, self.probe, self.slope)
        self.record.forward_only_passes += self.probe.forward_passes - passes
        self.record.probe_cost_steps += outcome.cost_steps
        return outcome

    def _conclude(self, step: int, features: Sequence[float], outcome: LeapOutcome, real_steps: int) -> None:
        predicted = outcome.shape.linear_decrease
        if predicted > 0:
            ratio, error = outcome.paired.decrease / predicted, outcome.paired.standard_error / predicted
            self.planner.residuals.add(Residual(step, list(features), ratio, error))
        if outcome.kept:
            self._keep(step, outcome.shape, outcome, real_steps)
        else:
            self.trajectory.roll_back()
            self.planner.leap_was_rejected()
            self._note(step, outcome.shape, outcome)
            self.controller.leap_rejected()

    def _keep(self, step: int, shape: LeapShape, outcome: LeapOutcome | None, real_steps: int) -> None:
        room = min(self.controller.lengths.max_predict, self.max_steps - step - 1)
        worth, horizon = self.planner.credit_for(shape.gain, real_steps, room)
        forecast, deviation = self._forecast()
        rate, predicted = shape.gain * self.trajectory.lr_sum, self.trajectory.predicted_gradients()
        self.trajectory.settle()
        self.residuals.leap_made(rate, self.trajectory.before_leap, predicted)
        self._note(step, shape, outcome, horizon, worth)
        self.controller.leap_kept(horizon)
        self.on_kept(shape.gain, real_steps)
        self.open = OpenLeap(
            record=len(self.record.leaps) - 1,
            probed=outcome is not None,
            worth=worth,
            forecast=forecast,
            deviation=deviation,
            losses=[],
        )

    def _note(
        self, step: int, shape: LeapShape, outcome: LeapOutcome | None, horizon: int = 0, worth: float = 0.0
    ) -> None:
        record = LeapRecord(step, horizon, shape.gain, worth, "unprobed", shape.relative_norm)
        record.predicted_decrease = shape.linear_decrease
        if outcome is not None:
            record.verdict = outcome.verdict
            record.loss_before, record.loss_after = outcome.loss_before, outcome.loss_after
            record.standard_error = outcome.paired.standard_error
            record.probe_cost_steps = outcome.cost_steps
            record.e = outcome.paired.decrease / self.slope if self.slope > 0 else None
            record.e_source = None if record.e is None else "probe"
        self.just_made = record
        self.record.leaps.append(record_as_dict(record))

    @property
    def slope(self) -> float:
        """Fall of the training loss per real step over the recent past; 0 where it does not fall or is not known."""
        losses = list(self.monitor.losses)[-FORECAST_WINDOW:]
        if len(losses) < 4:
            return 0.0
        now, _ = linear_trend(losses)
        centre = sum(losses) / len(losses)
        return max((centre - now) / ((len(losses) + 1) / 2), 0.0)

    def _forecast(self) -> tuple[float | None, float]:
        losses = list(self.monitor.losses)[-FORECAST_WINDOW:]
        return linear_trend(losses) if len(losses) >= FORECAST_WINDOW // 2 else (None, 0.0)

    # Correct watches it.

    def observe_gradients(self) -> None:
        """Gradients of a real step are there, clipped and not yet used."""
        if self.open is not None:
            self.residuals.observe_gradients()

    def settle(self) -> Verdict:
        """
        Correct is over: keep the lesson and close the way back, or say why it has to be gone.

        Returns:
            `Verdict`: With `Action.ROLL_BACK` if the leap must be undone; the caller then calls [`roll_back`].
        """
        leap = self.open
        if leap is None:
            return NORMAL
        if not leap.losses:
            # Every step since the leap was skipped: the snapshot may be the only good weights there are.
            return Verdict(Level.CRITICAL, "no finite loss since the leap", Action.ROLL_BACK)
        if leap.forecast is not None:
            # Training losses are far noisier than a paired probe: no reason to change a gain unless they are far off.
            error = sum(leap.losses) / len(leap.losses) - leap.forecast
            self.record.leaps[leap.record]["forecast_error"] = error
            verdict = self.monitor.judge_leap(leap.losses, leap.forecast, leap.deviation)
            if verdict.action is Action.ROLL_BACK:
                return verdict
        self._learn(self.record.leaps[leap.record])
        self.open = None
        self.trajectory.forget()
        self.planner.leap_was_kept(probed=leap.probed)
        return NORMAL

    def _learn(self, record: dict) -> None:
        """Predicted against realised displacement, and what the leap was worth at once where nobody looked."""
        self.trajectory.settle_updates()
        whole, groups = self.residuals.judge(self.trajectory.lr_sum)
        if whole is None:
            return
        record["cosine"], record["norm_ratio"] = whole.cosine, whole.norm_ratio
        if record["e"] is None and self.slope > 0:
            record["e"], record["e_source"] = whole.decrease / self.slope, "slopes"
        self.record.add_residuals(groups)
        if self.correction is not None:
            self.correction.learn(groups)

    def roll_back(self) -> None:
        """Undo the open leap, exactly."""
        leap, self.open = self.open, None
        self.trajectory.roll_back()
        self.residuals.forget()
        self.record.roll_backs += 1
        self.record.leaps[leap.record]["verdict"] = "rolled_back"
        self.planner.leap_was_rejected()
        self.planner.lower_gain()
        # What was granted for it has to be earned again.
        self.planner.credit -= leap.worth
        self.monitor.errors.clear()

    # Saving.

    def state_dict(self) -> tuple[dict, dict]:
        """Tensors and JSON values."""
        values = {
            "cost_steps": self.cost_steps,
            "open_leap": vars(self.open) if self.open is not None else None,
            "residuals": self.residuals.state_dict(),
            "correction": self.correction.state_dict() if self.correction is not None else None,
        }
        return self.residuals.tensors(), values

    def load_state_dict(self, tensors: dict, values: dict) -> None:
        self.cost_steps = values["cost_steps"]
        self.open = OpenLeap(**values["open_leap"]) if values["open_leap"] is not None else None
        self.residuals.load_state_dict(tensors, values["residuals"])
        if self.correction is not None and values["correction"] is not None:
            self.correction.load_state_dict(values["correction"])
