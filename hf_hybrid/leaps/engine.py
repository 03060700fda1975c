"""The order of things in a phase-aware run: joins controller, trajectory, planner, monitor and signals."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass

from hf_hybrid.leaps.divergence import (
    NORMAL,
    Action,
    DivergenceMonitor,
    Level,
    TrainingDivergedError,
    Verdict,
)
from hf_hybrid.leaps.gains import WindowCounter
from hf_hybrid.leaps.leaper import Leaper
from hf_hybrid.leaps.leaps import LeapPlanner
from hf_hybrid.leaps.record import RunRecord
from hf_hybrid.leaps.rescue import LearningRateRescue
from hf_hybrid.leaps.signals import SignalObserver, StepSignals
from hf_hybrid.leaps.tail import TailAverage
from hf_hybrid.leaps.trajectory import Trajectory
from hf_hybrid.leaps.verifier import HeldOutProbe
from hf_hybrid.phases import Phase, PhaseController

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
        controller, trajectory, planner, monitor, signals, probe, rescue, tail: The parts; the last three may be
            `None`.
        windows (`WindowCounter`): Cuts the run into the windows that the planner learns from.
        leap_budget (`float`), correct_gain (`bool`): See [`Leaper`].
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
        tail: TailAverage | None,
        windows: WindowCounter,
        leap_budget: float,
        correct_gain: bool,
        record: RunRecord,
        max_steps: int,
        max_grad_norm: float,
        on_phase_change: Callable[[Phase, Phase], None] = lambda old, new: None,
    ):
        self.controller, self.trajectory, self.planner = controller, trajectory, planner
        self.monitor, self.signals, self.probe, self.rescue = monitor, signals, probe, rescue
        self.tail, self.windows, self.record = tail, windows, record
        self.max_steps, self.max_grad_norm = max_steps, max_grad_norm
        self.leaper = Leaper(
            trajectory=trajectory,
            planner=planner,
            probe=probe,
            monitor=monitor,
            controller=controller,
            record=record,
            max_steps=max_steps,
            budget=leap_budget,
            correct_gain=correct_gain,
            on_kept=windows.leap,
        )
        self.on_phase_change = on_phase_change
        self.announced = controller.phase
        self.last_phase = controller.phase
        self.steps_since_leap = 0
        self._real: _RealStep | None = None
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
            leaps = len(self.record.leaps)
            self.leaper.leap(step, self.signals.features)
            if len(self.record.leaps) > leaps and self.leaper.open is not None:
                self.steps_since_leap = 0
        self._announce()  # after the leap, which may be worth no step, and needs what plugins put away in Predict
        return self.phase

    def _announce(self) -> None:
        if self.phase is not self.announced:
            self.on_phase_change(self.announced, self.phase)
            self.announced = self.phase

    # Within a real step.

    def before_update(self, step: int, loss: float, gradient_norm: float) -> bool:
        """
        Judge loss and gradients of a real step; take them into the slow memory if they are used.

        Returns:
            `bool`: Whether the optimizer may step. If not, the caller must drop the gradients.

        Raises:
            TrainingDivergedError: If nothing helped.
        """
        verdict = self.monitor.judge_gradients(loss, gradient_norm, leap_open=self.leaper.open is not None)
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
        self.leaper.observe_gradients()
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
        allowed = ends_block and self.leaper.affordable and self.planner.allows_leap(step + 1, self.probe)
        self.controller.finish_step(confidence=self.planner.confidence, leap_allowed=allowed)
        if phase is Phase.CORRECT and self.phase is not Phase.CORRECT:
            verdict = self.leaper.settle()
            if verdict.action is not Action.NONE:
                self._react(step, verdict)
        self._observe_window(step, learning_rate * self.rate_scale, real.loss if used else None)
        if self.tail is not None:
            self._observe_tail(step, used)
        self.record.seconds_by_phase[phase.value] += time.perf_counter() - self._started
        self.last_phase = phase
        return phase

    def _observe_window(self, step: int, learning_rate: float, loss: float | None) -> None:
        if self.windows.step(loss, learning_rate):
            progress = (step + 1) / self.max_steps
            self.planner.gains.observe(self.windows.close(self.signals.features, progress, learning_rate))

    def _observe_tail(self, step: int, used: bool) -> None:
        progress = (step + 1) / self.max_steps
        if used and self.tail.wants(progress):
            self.trajectory.settle_updates()
            self.tail.observe()
        if progress < 1.0:
            return
        # The last step of a run is always real; what is kept here is what is evaluated, saved and pushed.
        report = self.tail.conclude(self._held_out_loss, self.trajectory.weights_changed)
        self.record.tail_average = report
        if report is not None:
            logger.info("Tail average %s: %s.", "kept" if report["kept"] else "not kept", report)

    def _held_out_loss(self) -> float:
        """Mean over all held-out sequences."""
        passes, cost = self.probe.forward_passes, self.probe.cost_steps
        losses = self.probe.all_losses()
        self.record.forward_only_passes += self.probe.forward_passes - passes
        self.record.probe_cost_steps += self.probe.cost_steps - cost
        return sum(losses) / len(losses)

    def _observe_rate(self, step: int, real: _RealStep) -> None:
        self.rescue.observe(real.loss, real.cosine)
        scales = self.record.learning_rate_scales
        if abs(math.log(self.rate_scale / (scales[-1]["scale"] if scales else 1.0))) > 0.1:
            scales.append({"step": step + 1, "scale": self.rate_scale})

    def _judge(self, real: _RealStep, phase: Phase) -> Verdict:
        predicted, leap = None, self.leaper.open
        if leap is not None:
            leap.losses.append(real.loss)
            predicted = leap.forecast
        verdict = self.monitor.judge_step(
            real.loss, real.gradient_norm, predicted_loss=predicted, leap_open=leap is not None
        )
        return NORMAL if phase is Phase.WARMUP else verdict

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
        if verdict.action is Action.BACK_OFF:
            self.planner.leap_was_rejected()
            self.planner.lower_gain()
        if verdict.action in (Action.FORCE_FULL, Action.BACK_OFF, Action.ROLL_BACK, Action.RESET_PREDICTOR):
            self.controller.force_full(2 * self.controller.lengths.full)
        if verdict.action is Action.ROLL_BACK:
            self.leaper.roll_back()
        if verdict.action is Action.RESET_PREDICTOR:
            self.trajectory.reset_memory()
            self.planner.residuals.residuals.clear()
        if verdict.level is Level.CRITICAL and self.rescue is not None and verdict.action is not Action.SKIP_BATCH:
            self.rescue.back_off()

    def _observe_signals(self, step: int, learning_rate: float, phase: Phase, real: _RealStep | None) -> None:
        made, self.leaper.just_made = self.leaper.just_made, None
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
            "direction": self.trajectory.direction.name,
            "learning_rate_scale": self.rate_scale,
            "planner": self.planner.gains.summary(),
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
        leap_tensors, leaper = self.leaper.state_dict()
        parts = {"leaper": leap_tensors, "gains": self.planner.gains.tensors()}
        if self.tail is not None:
            parts["tail"] = self.tail.tensors()
        for part, found in parts.items():
            tensors.update({f"{part}.{name}": tensor.contiguous() for name, tensor in found.items()})
        values = {
            "leaper": leaper,
            "windows": self.windows.state_dict(),
            "tail": self.tail.state_dict() if self.tail is not None else None,
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
        }
        return tensors, values

    def load_state_dict(self, tensors: dict, values: dict) -> None:
        def part_of(part: str) -> dict:
            return {key[len(part) + 1 :]: tensor for key, tensor in tensors.items() if key.startswith(f"{part}.")}

        own = ("leaper.", "gains.", "tail.")
        of_trajectory = {key: tensor for key, tensor in tensors.items() if not key.startswith(own)}
        self.trajectory.load_state_dict(of_trajectory, values["trajectory"])
        self.leaper.load_state_dict(part_of("leaper"), values["leaper"])
        self.planner.load_state_dict(values["planner"], part_of("gains"))
        for name in ("controller", "monitor", "signals", "record", "windows"):
            getattr(self, name).load_state_dict(values[name])
        for name in ("probe", "rescue"):
            part = getattr(self, name)
            if part is not None and values[name] is not None:
                part.load_state_dict(values[name])
        if self.tail is not None and values["tail"] is not None:
            self.tail.load_state_dict(part_of("tail"), values["tail"])
        self.steps_since_leap = values["steps_since_leap"]
        self.announced = Phase(values["announced"])
