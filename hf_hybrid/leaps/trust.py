"""
How far a leap goes: the gain that the planner wants ([`GainPlanner`]), and what earlier leaps taught ([`Trust`]). Plain
numbers only: no tensors, no clock, no randomness.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from hf_hybrid.leaps.probe import Probe

# How far leaps go, and how many steps they are worth. The schedule learns nothing. The planner of experimental/
# subclasses it and learns from the run; it did not beat it (docs/results.md), and is loaded only if `planner` names it.
# `gain(progress)` is how far a leap made now goes, in units of what the real steps since the last leap moved.


class GainPlanner:
    """
    The schedule, and the base class of the other planner.

    With `power` 2 early leaps are small: along long memories early directions are soon obsolete and early leaps hurt,
    late ones last. With `power` 0 the gain is constant. A leap's displacement is also proportional to the learning
    rate, so that it fades as the rate decays.

    `peak` is the gain at the end of the run. The gain grows with this `power` of the share of the run that is done.
    `worth` are the skipped steps granted per real step when leaps run at the peak of the schedule.
    """

    def __init__(self, peak: float, power: float, worth: float):
        self.peak, self.power, self.worth = peak, power, worth

    def gain(self, progress: float) -> float:
        return self.peak * progress**self.power if self.power else self.peak

    def worth_of(self, gain: float, real_steps: int) -> float:
        """Return the steps that a kept leap is worth, in proportion to its gain and at most the worth at the peak."""
        share = min(max(gain / self.peak, 0.0), 1.0) if self.peak > 0 else 0.0
        return self.worth * real_steps * share

    def summary(self) -> dict:
        """Return the choices as plain values, for the summary of the run."""
        return {}

    state_dict: Callable[[], dict] = dict
    """Returns plain values, and dictionaries of tensors. The schedule has none."""

    def load_state_dict(self, state: dict) -> None:
        """Restore what `state_dict` returned."""


# What holds the next leap back.


@dataclass
class Trust:
    """
    Decides whether to leap, how far, and whether to probe, from the results of earlier leaps.

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
    """

    probe_budget: float  # share of the run's compute for probes
    max_steps: int  # of the run
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

    RAISE = 2.0
    REFUSALS, FORGIVES = 2.0, 0.9
    LOWEST_LEVEL = 1.0 / 64.0

    def probe_is_due(self, probe: Probe, step: int, *, must_probe: bool) -> bool:
        """Whether to probe the next leap: the first in any case, and later ones as far as the budgets go."""
        budget = self.probe_budget * self.max_steps
        if self.probes_made == 0:
            return True
        if must_probe:
            return self.refused_cost + 2 * probe.price <= self.REFUSALS * budget
        return probe.cost_steps + 3 * probe.price <= budget * min(step / self.max_steps + 0.1, 1.0)

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
        Learn from a probe, which `cost` so many real steps: of the length of leap that was `asked` for it `accepted`
        the same, a lower one, or 0.
        """
        self.probes_made += 1
        self.on_probation = accepted < asked
        if self.on_probation:
            self.refused_cost += cost
            self._refuse(asked, allowed=accepted or asked / 4)
        else:
            self.proven = max(accepted, self.proven)

    def leap_was_kept(self, *, probed: bool) -> None:
        if probed:
            self.rejections_in_a_row = 0
        self.kept_since += 1
        self.refused_cost *= self.FORGIVES
        self.level = min(1.0, self.level * 1.1)

    def leap_was_rejected(self) -> None:
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
        self.level = max(self.level / 2, self.LOWEST_LEVEL)

    def load_state_dict(self, state: dict) -> None:
        state = {**state, "probe_budget": self.probe_budget, "max_steps": self.max_steps}
        vars(self).update(state, proven=float(state["proven"]), refused=float(state["refused"]))
