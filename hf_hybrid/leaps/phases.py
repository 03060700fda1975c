"""The state machine of the four phases. Standard library only."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from hf_hybrid.part import Phase

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
        return {
            "phase": self.phase.value,
            "remaining": self.remaining,
            "steps_in_phase": self.steps_in_phase,
            "consecutive_leaps": self.consecutive_leaps,
            "leap_due": self.leap_due,
            "lengths": asdict(self.lengths),
        }

    def load_state_dict(self, state: dict) -> None:
        self.phase = Phase(state["phase"])
        self.remaining = state["remaining"]
        self.steps_in_phase = state["steps_in_phase"]
        self.consecutive_leaps = state["consecutive_leaps"]
        self.leap_due = state["leap_due"]
