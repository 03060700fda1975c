"""
What decides whether the next leap is made, and holds it back: the phases ([`PhaseController`]), and what earlier leaps
taught ([`Trust`]). Plain numbers only: no tensors, no clock, no randomness.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass

from hf_hybrid.leaps.probe import Probe
from hf_hybrid.part import Phase

# The phases.

LEGAL_TRANSITIONS = {
    Phase.WARMUP: {Phase.FULL},
    Phase.FULL: {Phase.PREDICT},
    Phase.PREDICT: {Phase.CORRECT, Phase.FULL},
    Phase.CORRECT: {Phase.PREDICT, Phase.FULL},
}


@dataclass(frozen=True)
class PhaseLengths:
    """Lengths of the phases in steps. `max_predict` is the largest worth of one leap."""

    warmup: int
    full: int
    correct: int
    max_predict: int

    def __post_init__(self):
        for name, value in vars(self).items():
            least = 0 if name == "warmup" else 1
            if value < least:
                raise ValueError(f"`PhaseLengths.{name}` must be at least {least}, got {value}.")


class PhaseController:
    """
    Decides the phase of the next step, without tensors, clock or randomness.

    Call [`finish_step`] after every step. If it returns `PREDICT`, a leap is pending. Make it before the next step, and
    report it with [`leap_kept`] or [`leap_rejected`].
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
        Count the step that just ended and choose the phase of the next one.

        Args:
            leap_allowed (`bool`): `False` while rejected leaps back off or nothing could be gained.
        """
        self.remaining -= 1
        self.steps_in_phase += 1
        if self.remaining > 0:
            return self.phase
        if self.phase is Phase.PREDICT:
            self._enter(Phase.CORRECT, self.lengths.correct)
        elif self.phase is Phase.WARMUP:
            self._enter(Phase.FULL, self.lengths.full)
        else:
            self._leap_or_full(leap_allowed)
        return self.phase

    def _leap_or_full(self, leap: bool) -> None:
        if self.phase is Phase.CORRECT and self.consecutive_leaps >= self.MAX_CONSECUTIVE_LEAPS:
            leap = False
        if leap:
            self.consecutive_leaps += 1
            self._enter(Phase.PREDICT, 0)
            self.leap_due = True
        else:
            self.consecutive_leaps = 0
            self._enter(Phase.FULL, self.lengths.full)

    def leap_kept(self, horizon: int) -> Phase:
        """Record that the pending leap stays. The next `horizon` steps are predicted (0: Correct follows at once)."""
        self.leap_due = False
        if horizon > 0:
            self.remaining = min(horizon, self.lengths.max_predict)
        else:
            self._enter(Phase.CORRECT, self.lengths.correct)
        return self.phase

    def leap_rejected(self, full_steps: int | None = None) -> Phase:
        """Record that the pending leap was undone. Real steps follow."""
        self.force_full(full_steps)
        return self.phase

    def force_full(self, steps: int | None = None) -> None:
        """Go on with real steps. Warmup is never cut short."""
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
        if phase is not self.phase and phase not in LEGAL_TRANSITIONS[self.phase]:
            raise RuntimeError(f"Illegal phase transition from `{self.phase.value}` to `{phase.value}`.")
        self.phase, self.remaining, self.steps_in_phase = phase, length, 0

    def state_dict(self) -> dict:
        return {**vars(self), "phase": self.phase.value, "lengths": asdict(self.lengths)}

    def load_state_dict(self, state: dict) -> None:
        vars(self).update(state, phase=Phase(state["phase"]), lengths=self.lengths)  # which the new options give


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

    Args:
        probe_budget (`float`): Share of the run's compute for probes.
        max_steps (`int`): Length of the run.
    """

    probe_budget: float
    max_steps: int
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

    def allows_leap(self, step: int, probe: Probe | None = None, *, must_probe: bool) -> bool:
        """Return whether a leap may be made, and count down the blocks of the back-off. Call this once per block."""
        if self.blocks_to_skip > 0:
            self.blocks_to_skip -= 1
            return False
        return not must_probe or (probe is not None and self.probe_is_due(probe, step, must_probe=True))

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
        """Halve later leaps, until kept leaps raise the level again."""
        self.level = max(self.level / 2, self.LOWEST_LEVEL)

    def state_dict(self) -> dict:
        return {name: value for name, value in vars(self).items() if name not in ("probe_budget", "max_steps")}

    def load_state_dict(self, state: dict) -> None:
        vars(self).update(state, proven=float(state["proven"]), refused=float(state["refused"]))
