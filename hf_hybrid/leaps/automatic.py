"""
Whether a run makes leaps.

They are made where they were measured to pay (docs/results.md): with AdamW, on a causal language model that knows
little yet. The trainer, its loss and the optimizer decide ([`reason_no_leaps`]). Only the question whether the model is
pretrained is left to the first training loss ([`FirstLoss`]), and only where that is the plain cross-entropy: DPO
begins at log 2 with random weights too, IPO at 25, DFT near 0. What is not known to be like the measured runs makes no
leaps.

A direction that is named is asked for. It makes leaps everywhere but under other optimizers, which are refused.
"""

from __future__ import annotations

import inspect
import logging
import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from hf_hybrid.leaps.directions import DirectionFactory
from hf_hybrid.leaps.leap import Leaps
from hf_hybrid.optimizers import LIBRARIES, package_of
from hf_hybrid.part import Part, RealStep
from hf_hybrid.run.run import NO_LEAPS, Run
from hf_hybrid.run.trainer_view import (
    TrainerView,
    optimizer_unlike_adam,
    trains_adapters,
    unknown_loss,
    vocabulary_size,
)

logger = logging.getLogger(__name__)


class LeapView(TrainerView, Protocol):
    """A trainer that may make leaps."""

    custom_direction: DirectionFactory | None
    obstacle: str | None
    leap_obstacle: str | None
    no_leaps_because: str | None


PRETRAINED_SHARE = 0.5
"""
A model counts as pretrained if its first training loss is below this share of the loss of a model that knows nothing,
the logarithm of its vocabulary. Where leaps harmed the share was 0.31 to 0.38, where they paid 0.62 and above
(benchmarks/speedup/pretrained.md); nothing in between was measured.
"""


def leaps_are_automatic(trainer: LeapView) -> bool:
    """Whether nobody asked for leaps: the trainer, its loss and the optimizer then decide whether there are any."""
    return trainer.custom_direction is None and trainer.hybrid_args.direction == "auto"


def reason_no_leaps(trainer: LeapView) -> str | None:
    """Return why the run makes no leaps, as far as that is known before it begins."""
    options = trainer.hybrid_args
    if options.final_gain(1.0) == 0:
        return "`leap_gain` is 0" if options.leap_gain == 0 else f"`preset={options.preset}` makes none"
    if not leaps_are_automatic(trainer):
        return None
    if trainer.leap_obstacle is not None:
        return trainer.leap_obstacle
    if trains_adapters(trainer):
        return "adapters are trained"
    if trainer.no_leaps_because is not None:
        return trainer.no_leaps_because
    step: Any = inspect.unwrap(getattr(type(trainer), "training_step"))  # noqa: B009
    names = getattr(getattr(step, "__code__", None), "co_names", ("training_step",))
    if package_of(step) not in LIBRARIES and "training_step" not in names:  # it trains in every step
        return f"`{step.__qualname__}` does not name `training_step`, so that it may train in skipped steps"
    if (name := optimizer_unlike_adam(trainer)) is not None:
        return f"the optimizer is `{name}`, and leaps were measured to pay with AdamW alone"
    reason = unknown_loss(trainer)
    return reason and f"{reason}, so it does not tell how much the model knows"


def pretrained_below(trainer: LeapView) -> float:
    """
    Return the first training loss below which the model counts as pretrained and no leaps are made; 0 if they are made
    in any case.
    """
    words = vocabulary_size(trainer.accelerator.unwrap_model(trainer.model))
    return PRETRAINED_SHARE * math.log(words) if words and leaps_are_automatic(trainer) else 0.0


class FirstLoss(Part):
    """
    Waits for the first training loss, which tells whether the model is pretrained, and then leaves the run.

    It counts as pretrained below a loss of `pretrained_below`. A model that is not gets the parts that `build_leaps`
    makes in this place, before the first gradient is shown to anybody.
    """

    name = "first_loss"

    def __init__(self, pretrained_below: float, build_leaps: Callable[[], Sequence[Part]]):
        self.pretrained_below, self.build_leaps = pretrained_below, build_leaps

    def begin(self, run: Run) -> None:
        self.run = run

    def before_update(self, step: RealStep) -> None:
        if not math.isfinite(step.loss):
            return
        if step.loss < self.pretrained_below:
            self.run.no_leaps = f"the model is pretrained (first training loss {step.loss:.3g})"
            logger.warning(NO_LEAPS, self.run.no_leaps)
        for part in self._make_room():
            part.before_update(step)

    def resume(self, state: dict[str, Any]) -> None:
        if Leaps.name in state or state.get("run", {}).get("no_leaps") is not None:
            self.run.no_leaps = state["run"]["no_leaps"]
            self._make_room()

    def _make_room(self) -> Sequence[Part]:
        parts = self.build_leaps() if self.run.no_leaps is None else []
        self.run.replace(self, parts)
        return parts
