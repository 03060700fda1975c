"""Out-of-memory around forward and backward: while a leap is made, probed or judged, or gradients are looked at."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from hf_hybrid.arguments import HybridArguments
from hf_hybrid.guard import free_memory
from hf_hybrid.leaps.engine import PredictionEngine
from hf_hybrid.micro_batches import UnsplittableBatchError, parts_of, sequences_in, split_batch
from hf_hybrid.phases import Phase, PhasePlugin, PluginContext
from hf_hybrid.recovery import OutOfMemoryRecovery, UnrecoveredMemoryError

logger = logging.getLogger(__name__)

Result = TypeVar("Result")


def attempt(recovery: OutOfMemoryRecovery, function: Callable[[], Result]) -> Result | None:
    """
    What `function` returns, or `None` after an out-of-memory, whose tensors are gone by then.

    Raises:
        Exception: Whatever else it raises; an out-of-memory too, if `recovery` may not try anything.
    """
    try:
        return function()
    except Exception as error:
        recovery.catch(error)
    free_memory()
    return None


class SmallerProbes(PhasePlugin):
    """
    Evaluates held-out batches in smaller parts after an out-of-memory, for the rest of the run.

    Args:
        recovery (`OutOfMemoryRecovery`): What may be tried, and where it is written down.
    """

    name = "smaller_probes"

    def __init__(self, recovery: OutOfMemoryRecovery):
        self.recovery = recovery
        self.most: int | None = None

    def probe_losses(self, evaluate: Callable[[Any], list[float]]) -> Callable[[Any], list[float]]:
        def in_parts(batch: Any) -> list[float]:
            def evaluate_all() -> list[float]:
                return [loss for part in parts_of(batch, self.most, self.recovery.blocks) for loss in evaluate(part)]

            while (losses := attempt(self.recovery, evaluate_all)) is None:
                self._halve(batch)
            return losses

        return in_parts

    def _halve(self, batch: Any) -> None:
        try:
            size = sequences_in(batch, self.recovery.blocks)
            split_batch(batch, 1, self.recovery.blocks)
        except UnsplittableBatchError:
            size = 1
        size = min(size, self.most or size)
        if size == 1:
            # For who asked for the probe: the leap is undone.
            raise torch.OutOfMemoryError(f"A probe of 1 sequence does not fit: {self.recovery.reason}")
        self.most = (size + 1) // 2
        self.recovery.note("split probes", before=size, after=self.most)
        logger.warning("A probe of %d sequences does not fit: %d at a time from here on.", size, self.most)

    def on_train_begin(self, context: PluginContext) -> None:
        self.most = None

    def state_dict(self) -> dict[str, Any]:
        return {"most": self.most}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.most = state["most"]


def build(make: Callable[[], PredictionEngine], options: HybridArguments, recovery: OutOfMemoryRecovery):
    """
    The engine that `make` builds; if its buffers do not fit on the device, `options` place them on the host.

    Raises:
        UnrecoveredMemoryError: If they do not fit there either.
    """
    engine = attempt(recovery, make)
    if engine is None and options.buffers_device != "cpu":
        options.buffers_device = "cpu"
        recovery.note("buffers on the host")
        logger.warning("%s: the buffers of leaps do not fit, `buffers_device=cpu` from here on.", recovery.where())
        engine = attempt(recovery, make)
    if engine is None:
        raise UnrecoveredMemoryError(
            f"{recovery.where()}: the buffers of leaps do not fit: {recovery.reason} Set `enable_predict=False`."
        )
    return engine


def begin_step(engine: PredictionEngine, step: int, recovery: OutOfMemoryRecovery) -> Phase:
    """
    Begin a step of the engine; a leap that does not fit is undone to the last bit, and real steps follow.

    Args:
        engine (`PredictionEngine`): Of the run.
        step (`int`): 0-based.
        recovery (`OutOfMemoryRecovery`): What may be tried, and where it is written down.

    Raises:
        UnrecoveredMemoryError: If the phase cannot begin without the leap either.
    """
    credit = engine.planner.credit
    phase = attempt(recovery, lambda: engine.begin_step(step))
    if phase is None:
        undo_leap(engine, recovery, credit)
        phase = attempt(recovery, lambda: engine.begin_step(step))
    if phase is None:
        recovery.give_up(f"{recovery.where()}, before its forward pass: {recovery.reason}")
    return phase


def undo_leap(engine: PredictionEngine, recovery: OutOfMemoryRecovery, credit: float) -> None:
    """
    Put back the weights of before the leap that failed while it was made, and go on with real steps.

    Args:
        engine, recovery: See [`begin_step`].
        credit (`float`): The planner's, before the leap.

    Raises:
        UnrecoveredMemoryError: If it cannot be told which weights the leap had reached.
    """
    leaper, trajectory = engine.leaper, engine.trajectory
    if not engine.controller.leap_pending:
        recovery.note("tried again")  # no leap was under way, or it is made and complete
        return
    if trajectory.has_snapshot:
        settled = trajectory.steps_in_block == 0
        if trajectory.pending_gain is None and not settled:
            if trajectory.store is not None and not recovery.on_device:
                raise UnrecoveredMemoryError(
                    f"{recovery.where()}, while a leap was written into streamed weights: {recovery.reason} The "
                    "weights in memory are those of no step. Resume from the last checkpoint, with "
                    "`enable_predict=False` or more host memory."
                )
            trajectory.pending_gain = 0.0  # on the device, only weights that live there can have been reached
        trajectory.roll_back()
    recovery.note("leap undone")
    leaper.residuals.forget()
    engine.planner.credit = credit
    engine.planner.leap_was_rejected()
    engine.controller.leap_rejected()
    logger.warning(
        "%s (%s): the leap is undone, real steps follow. `buffers_device=cpu` makes leaps on the host.",
        recovery.where(),
        recovery.reason,
    )


def before_update(
    engine: PredictionEngine, step: int, loss: float, gradient_norm: float, recovery: OutOfMemoryRecovery
) -> bool:
    """
    [`PredictionEngine.before_update`]; if it does not fit, the optimizer steps and the predictor misses the gradient.
    """
    skipped = engine.record.skipped_batches
    used = attempt(recovery, lambda: engine.before_update(step, loss, gradient_norm))
    if used is None:
        recovery.note("predictor missed a gradient")
        used = engine.record.skipped_batches == skipped
    return used


def end_step(engine: PredictionEngine, step: int, learning_rate: float, recovery: OutOfMemoryRecovery) -> Phase:
    """
    [`PredictionEngine.end_step`]; if judging a leap does not fit, the leap is kept without its lesson.

    Returns:
        `Phase`: Of the step that just ended.
    """
    phase, before = engine.phase, engine.controller.state_dict()
    ended = attempt(recovery, lambda: engine.end_step(step, learning_rate))
    if ended is not None:
        return ended
    if engine.controller.state_dict() == before:
        engine.controller.finish_step(confidence=0.0, leap_allowed=False)
    leaper = engine.leaper
    if leaper.open is not None and phase is Phase.CORRECT and engine.phase is not Phase.CORRECT:
        engine.planner.leap_was_kept(probed=leaper.open.probed)
        leaper.open = None
        leaper.residuals.forget()
        engine.trajectory.forget()
    engine.last_phase = phase
    recovery.note("predictor missed a lesson")
    return phase
