"""The order of things in a phase-aware run: joins controller, trajectory, planner, monitor and signals."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass

from hf_hybrid.phases import Phase, PhaseController
from hf_hybrid.prediction.divergence import (
    FORECAST_WINDOW,
    NORMAL,
    Action,
    DivergenceMonitor,
    Level,
    TrainingDivergedError,
    Verdict,
    linear_trend,
)
from hf_hybrid.prediction.leaps import LeapOutcome, LeapPlanner, LeapRecord, OpenLeap, record_as_dict
from hf_hybrid.prediction.rescue import LearningRateRescue
from hf_hybrid.prediction.signals import SignalObserver, StepSignals
from hf_hybrid.prediction.trajectory import LeapShape, Trajectory
from hf_hybrid.prediction.verifier import HeldOutProbe, Residual
from hf_hybrid.records import RunRecord

logger = logging.getLogger(__name__)


@dataclass
class _RealStep:
    """Numbers of the real step under way."""

    loss: float
    gradient_norm: float
    statistics: dict[str, float] | None = None
    cosine: float | None = None
    skipped: bool = False


class PredictionEngine:
    """
    Drives one run. The trainer calls, for every step and in this order, [`begin_step`]; for a real step
    [`before_update`] and [`after_update`]; and [`end_step`]. All decisions follow from saved state alone.

    Args:
        controller, trajectory, planner, monitor, signals, probe, rescue: The parts; `probe` and `rescue` may be `None`.
        record (`RunRecord`): Where everything is counted.
        max_steps (`int`): Length of the run.
        max_grad_norm (`float`): Clipping threshold of the trainer, for the signals.
        on_phase_change (`Callable[[Phase, Phase], None]`): Told before the first step of a new phase.
    """

    STATISTICS_EVERY = 8
    """Real steps between measurements of the optimizer's moments: they cost a pass over its states."""

    def __init__(
        self,
        *,
        controller: PhaseController,
        trajectory: Trajectory,
        planner: LeapPlanner,
        monitor: DivergenceMonitor,
        signals: SignalObserver,
        probe: HeldOutProbe | None,
        rescue: LearningRateRescue | None,
        record: RunRecord,
        max_steps: int,
        max_grad_norm: float,
        on_phase_change: Callable[[Phase, Phase], None] = lambda old, new: None,
    ):
        self.controller, self.trajectory, self.planner = controller, trajectory, planner
        self.monitor, self.signals, self.probe, self.rescue = monitor, signals, probe, rescue
        self.record = record
        self.max_steps, self.max_grad_norm = max_steps, max_grad_norm
        self.on_phase_change = on_phase_change
        self.announced = controller.phase
        self.last_phase = controller.phase
        self.steps_since_leap = 0
        self._real: _RealStep | None = None
        self._open: OpenLeap | None = None
        self._just_made: LeapRecord | None = None
        self._started = time.perf_counter()

    @property
    def phase(self) -> Phase:
        return self.controller.phase

    @property
    def rate_scale(self) -> float:
        """What the learning rate of the next real step is multiplied by."""
        return self.rescue.scale if self.rescue is not None else 1.0

    # Before a step.

    def begin_step(self, step: int) -> Phase:
        """Make the leap that is due before step `step` (0-based); returns the phase of the step."""
        self._started = time.perf_counter()
        if self.controller.leap_pending:
            self._leap(step)
        self._announce()  # after the leap, which may be worth no step, and needs what plugins put away in Predict
        return self.phase

    def _announce(self) -> None:
        if self.phase is not self.announced:
            self.on_phase_change(self.announced, self.phase)
            self.announced = self.phase

    def _leap(self, step: int) -> None:
        real_steps = self.trajectory.steps_in_block
        if self.trajectory.lr_sum <= 0 or step + 1 >= self.max_steps:
            self.controller.leap_rejected()
            return
        plan = self.planner.plan(step, self.signals.features, self.probe)
        lengths = self.controller.lengths
        # A block grown long while leaps backed off must not be repaid in one go.
        gain = plan.gain * min(1.0, 2 * (lengths.full + lengths.correct) / real_steps)
        if plan.probe:
            self._conclude(step, self._look(gain), real_steps)
        else:
            self._keep(step, self.trajectory.leap(gain), None, real_steps)

    def _look(self, gain: float) -> LeapOutcome:
        passes = self.probe.forward_passes
        outcome = self.planner.look(gain, self.trajectory.leap, self.probe, self.slope)
        self.record.forward_only_passes += self.probe.forward_passes - passes
        self.record.probe_cost_steps += outcome.cost_steps
        return outcome

    def _conclude(self, step: int, outcome: LeapOutcome, real_steps: int) -> None:
        predicted = outcome.shape.linear_decrease
        if predicted > 0:
            ratio, error = outcome.paired.decrease / predicted, outcome.paired.standard_error / predicted
            self.planner.residuals.add(Residual(step, list(self.signals.features), ratio, error))
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
        self.trajectory.settle()
        self._note(step, shape, outcome, horizon, worth)
        self.controller.leap_kept(horizon)
        self.steps_since_leap = 0
        self._open = OpenLeap(
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
        self._just_made = record
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

    # Within a real step.

    def before_update(self, step: int, loss: float, gradient_norm: float) -> bool:
        """
        Judge loss and gradients of a real step; take them into the slow memory if they are used.

        Returns:
            `bool`: Whether the optimizer may step. If not, the caller must drop the gradients.

        Raises:
            TrainingDivergedError: If nothing helped.
        """
        verdict = self.monitor.judge_gradients(loss, gradient_norm, leap_open=self._open is not None)
        finite = math.isfinite(loss) and math.isfinite(gradient_norm)
        if self.phase is Phase.WARMUP and finite:
            verdict = NORMAL  # Warmup follows plain Trainer to the last bit.
        self._real = _RealStep(loss, gradient_norm, skipped=verdict.action is not Action.NONE)
        if verdict.action is not Action.NONE:
            self.record.skipped_batches += 1
            self._react(step, verdict)
            return False
        if self.rescue is not None:
            self._real.cosine = self.trajectory.step_cosine()
        self.trajectory.observe_gradients()
        if self.trajectory.steps_seen % self.STATISTICS_EVERY == 1:
            self._real.statistics = self.trajectory.gradient_statistics()
        return True

    def after_update(self, learning_rates: list[float]) -> None:
        """The optimizer stepped with these learning rates (one per parameter group)."""
        self.trajectory.observe_step(learning_rates)

    # After a step.

    def end_step(self, step: int, learning_rate: float) -> Phase:
        """
        Close step `step` (0-based, `learning_rate` as scheduled) and decide the phase of the next.

        Returns:
            `Phase`: Of the step that just ended.
        """
        phase = self.phase
        verdict = NORMAL
        real, self._real = self._real, None
        used = real is not None and not real.skipped
        if used:
            verdict = self._judge(real, phase)
            if self.rescue is not None:
                self._observe_rate(step, real)
        self._observe_signals(step, learning_rate, phase, real if used else None)
        self.planner.observe_step(verdict.level)
        self.steps_since_leap += 1
        self.record.steps_by_phase[phase.value] += 1
        if verdict.action is not Action.NONE:
            self._react(step, verdict)
        ends_block = self.controller.remaining <= 1 and phase is not Phase.PREDICT
        allowed = ends_block and self.planner.allows_leap(step + 1, self.probe)
        self.controller.finish_step(confidence=self.planner.confidence, leap_allowed=allowed)
        if phase is Phase.CORRECT and self.phase is not Phase.CORRECT:
            self._settle_open_leap(step)
        self.record.seconds_by_phase[phase.value] += time.perf_counter() - self._started
        self.last_phase = phase
        return phase

    def _observe_rate(self, step: int, real: _RealStep) -> None:
        self.rescue.observe(real.loss, real.cosine)
        scales = self.record.learning_rate_scales
        if abs(math.log(self.rate_scale / (scales[-1]["scale"] if scales else 1.0))) > 0.1:
            scales.append({"step": step + 1, "scale": self.rate_scale})

    def _judge(self, real: _RealStep, phase: Phase) -> Verdict:
        predicted = None
        if self._open is not None:
            self._open.losses.append(real.loss)
            predicted = self._open.forecast
        verdict = self.monitor.judge_step(
            real.loss, real.gradient_norm, predicted_loss=predicted, leap_open=self._open is not None
        )
        return NORMAL if phase is Phase.WARMUP else verdict

    def _settle_open_leap(self, step: int) -> None:
        """Correct is over: keep the lesson and close the way back, or go it."""
        leap = self._open
        if leap is None:
            return
        if not leap.losses:
            # Every step since the leap was skipped: the snapshot may be the only good weights there are.
            self._react(step, Verdict(Level.CRITICAL, "no finite loss since the leap", Action.ROLL_BACK))
            return
        if leap.forecast is not None:
            # Training losses are far noisier than a paired probe: no reason to change a gain unless they are far off.
            error = sum(leap.losses) / len(leap.losses) - leap.forecast
            self.record.leaps[leap.record]["forecast_error"] = error
            verdict = self.monitor.judge_leap(leap.losses, leap.forecast, leap.deviation)
            if verdict.action is Action.ROLL_BACK:
                self._react(step, verdict)
                return
        self._open = None
        self.trajectory.forget()
        self.planner.leap_was_kept(probed=leap.probed)

    def _react(self, step: int, verdict: Verdict) -> None:
        """One rung of the recovery ladder."""
        self.record.add_event(
            {
                "step": step,
                "phase": self.phase.value,
                "level": verdict.level.name.lower(),
                "reason": verdict.reason,
                "action": verdict.action.value,
            }
        )
        if verdict.level >= Level.WARNING:
            logger.warning("Step %d: %s; %s.", step, verdict.reason, verdict.action.value.replace("_", " "))
        if verdict.action is Action.ABORT:
            raise TrainingDivergedError(f"Training diverged at step {step}: {verdict.reason}.")
        if verdict.action is Action.SHORTEN:
            self.planner.lower_gain()
        if verdict.action in (Action.FORCE_FULL, Action.ROLL_BACK, Action.RESET_PREDICTOR):
            self.controller.force_full(2 * self.controller.lengths.full)
        if verdict.action is Action.ROLL_BACK:
            self._roll_back()
        if verdict.action is Action.RESET_PREDICTOR:
            self.trajectory.reset_memory()
            self.planner.residuals.residuals.clear()
        if verdict.level is Level.CRITICAL and self.rescue is not None and verdict.action is not Action.SKIP_BATCH:
            self.rescue.back_off()

    def _roll_back(self) -> None:
        leap, self._open = self._open, None
        self.trajectory.roll_back()
        self.record.roll_backs += 1
        self.record.leaps[leap.record]["verdict"] = "rolled_back"
        self.planner.leap_was_rejected()
        self.planner.lower_gain()
        # What was granted for it has to be earned again.
        self.planner.credit -= leap.worth
        self.monitor.errors.clear()

    def _observe_signals(self, step: int, learning_rate: float, phase: Phase, real: _RealStep | None) -> None:
        made, self._just_made = self._just_made, None
        decrease = None
        if made is not None and made.standard_error:
            decrease = (made.loss_before - made.loss_after) / made.standard_error
        last = self.record.leaps[-1] if self.record.leaps else {"gain": 0.0, "relative_norm": 0.0}
        residuals = self.planner.residuals.residuals
        self.signals.observe(
            StepSignals(
                phase=phase,
                progress=(step + 1) / self.max_steps,
                learning_rate=learning_rate * self.rate_scale,
                rate_scale=self.rate_scale,
                max_grad_norm=self.max_grad_norm,
                loss=real.loss if real else None,
                gradient_norm=real.gradient_norm if real else None,
                statistics=real.statistics if real else None,
                steps_in_phase=self.controller.steps_in_phase,
                steps_since_leap=self.steps_since_leap,
                consecutive_leaps=self.controller.consecutive_leaps,
                rate_in_block=self.trajectory.lr_sum,
                leap_gain=last["gain"],
                leap_credit=self.planner.credit,
                leap_decrease=decrease,
                leap_kept=None if made is None else made.verdict != "rejected",
                leap_residual=residuals[-1].ratio if residuals else 0.0,
                leap_relative_norm=last["relative_norm"],
                confidence=self.planner.confidence,
            )
        )

    # Telling.

    def summary(self) -> dict:
        """What happened, as plain values; see `RunRecord`."""
        return {
            **self.record.summary(),
            "direction": self.trajectory.direction,
            "learning_rate_scale": self.rate_scale,
            "buffer_bytes": self.trajectory.bytes_held(),
        }

    def log_values(self) -> dict[str, float]:
        """For `Trainer.log`: numbers only, as trackers want them."""
        record = self.record
        return {
            "hybrid/phase": self.last_phase.index,
            "hybrid/predicted_steps": record.steps_by_phase[Phase.PREDICT.value],
            "hybrid/backward_passes": record.backward_passes,
            "hybrid/forward_only_passes": record.forward_only_passes,
            "hybrid/leaps": len(record.leaps),
            "hybrid/leap_gain": record.leaps[-1]["gain"] if record.leaps else 0.0,
            "hybrid/leap_relative_norm": record.leaps[-1]["relative_norm"] if record.leaps else 0.0,
            "hybrid/credit": self.planner.credit,
            "hybrid/confidence": self.planner.confidence,
            "hybrid/learning_rate_scale": self.rate_scale,
        }

    # Saving.

    def state_dict(self) -> tuple[dict, dict]:
        """Tensors and JSON values from which a resumed run continues bit for bit."""
        tensors, trajectory = self.trajectory.state_dict()
        values = {
            "controller": self.controller.state_dict(),
            "trajectory": trajectory,
            "planner": self.planner.state_dict(),
            "monitor": self.monitor.state_dict(),
            "signals": self.signals.state_dict(),
            "probe": self.probe.state_dict() if self.probe is not None else None,
            "rescue": self.rescue.state_dict() if self.rescue is not None else None,
            "record": self.record.state_dict(),
            "steps_since_leap": self.steps_since_leap,
            "announced": self.announced.value,
            "open_leap": vars(self._open) if self._open is not None else None,
        }
        return tensors, values

    def load_state_dict(self, tensors: dict, values: dict) -> None:
        self.trajectory.load_state_dict(tensors, values["trajectory"])
        for name in ("controller", "planner", "monitor", "signals", "record"):
            getattr(self, name).load_state_dict(values[name])
        for name in ("probe", "rescue"):
            part = getattr(self, name)
            if part is not None and values[name] is not None:
                part.load_state_dict(values[name])
        self.steps_since_leap = values["steps_since_leap"]
        self.announced = Phase(values["announced"])
        self._open = OpenLeap(**values["open_leap"]) if values["open_leap"] is not None else None
