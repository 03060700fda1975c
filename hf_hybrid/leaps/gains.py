"""
How far leaps go, and how many steps they are worth: the planners.

A planner answers two questions of the run. `gain(progress)`: how far a leap made now goes, in units of what the real
steps since the last leap moved. `worth_of(gain, real_steps)`: how many steps a kept leap may replace.

[`GainPlanner`] is the schedule and learns nothing. The planners of the room world_model/ subclass it and learn from the
run; they did not beat it (docs/evaluation.md), and are loaded only if the option `planner` names them.
"""

from __future__ import annotations


def scheduled_gain(peak: float, progress: float, power: float) -> float:
    """
    Gain of a leap within the schedule: `peak * progress ** power`.

    With `power` 2 early leaps are small: along long memories early directions are soon obsolete and early leaps hurt,
    late ones last. With `power` 0 the gain is constant. A leap's displacement is also proportional to the learning
    rate, so that it fades as the rate decays.

    Args:
        peak (`float`): Gain at the end of the run.
        progress (`float`): Share of the run that is done.
        power (`float`): Power of the progress.
    """
    return peak * progress**power if power else peak


class GainPlanner:
    """
    The schedule, and the base class of the other planners.

    Args:
        peak (`float`), power (`float`): See [`scheduled_gain`].
        worth (`float`): Predicted steps granted per real step when leaps run at the peak of the schedule.
    """

    def __init__(self, peak: float, power: float, worth: float):
        self.peak, self.power, self.worth = peak, power, worth

    def gain(self, progress: float) -> float:
        """Return the gain of a leap made now."""
        return scheduled_gain(self.peak, progress, self.power)

    def worth_of(self, gain: float, real_steps: int) -> float:
        """Return the steps that a kept leap is worth, in proportion to its gain and at most the worth at the peak."""
        share = min(max(gain / self.peak, 0.0), 1.0) if self.peak > 0 else 0.0
        return self.worth * real_steps * share

    def summary(self) -> dict:
        """Return the choices as plain values, for the summary of the run."""
        return {}

    def state_dict(self) -> dict:
        """Return plain values, and dictionaries of tensors."""
        return {}

    def load_state_dict(self, state: dict) -> None:
        """Restore what `state_dict` returned."""
