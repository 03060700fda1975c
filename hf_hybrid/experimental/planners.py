"""The planner that learns: what `planner="dynamics"` adds to the leaps of a run."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hf_hybrid.experimental.dynamics import DynamicsModel
from hf_hybrid.experimental.imagination import START_WEIGHTS, ImaginedGain
from hf_hybrid.experimental.observer import PlannerObserver
from hf_hybrid.experimental.rssm import RSSM
from hf_hybrid.forecast.run_forecast import schedule_of
from hf_hybrid.part import Part

if TYPE_CHECKING:
    from hf_hybrid.build import BuiltTrainer

STRETCH_STEPS, MOST_STRETCHES = 10, 300
"""Real steps that the planner learns from at a time, and about how many such stretches a run has at most."""


def learning_planner(trainer: BuiltTrainer, schedule: tuple[float, float, float]) -> tuple[ImaginedGain, list[Part]]:
    """Return the planner of the gain, and the part that shows it the run."""
    args, max_steps = trainer.args, trainer.state.max_steps
    stride = max(STRETCH_STEPS, max_steps // MOST_STRETCHES)
    rates = schedule_of(trainer.lr_scheduler, max_steps)
    peak = rates.max() or 1.0
    planner = ImaginedGain(
        *schedule,
        dynamics=DynamicsModel(RSSM.load(START_WEIGHTS, args.device)),
        rate_at=lambda progress: rates[min(round(progress * max_steps), max_steps - 1)] / peak,
        stretch_share=stride / max_steps,
    )
    return planner, [PlannerObserver(planner, stride=stride, max_grad_norm=args.max_grad_norm)]
