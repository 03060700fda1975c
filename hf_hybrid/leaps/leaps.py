"""Whether to leap, how far, whether to look, and how many real steps a leap stands for."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field

from hf_hybrid.leaps.divergence import Level
from hf_hybrid.leaps.gains import GainPlanner
from hf_hybrid.leaps.trajectory import LeapShape
from hf_hybrid.leaps.verifier import (
    HeldOutProbe,
    Paired,
    ResidualStore,
    accept_extended,
    keep_scheduled,
    paired_decrease,
    parabola_minimum,
)


@dataclass
class LeapRecord:
    """What is kept of every leap; losses are means over the probed held-out sequences, `None` where none was made."""

    step: int
    horizon: int
    gain: float
    worth: float
    verdict: str
    """`unprobed`, `kept`, `extended`, `shrunk`, `rejected`, or `rolled_back` where Correct undid it."""
    relative_norm: float
    loss_before: float | None = None
    loss_after: float | None = None
    standard_error: float | None = None
    e: float | None = None
    """Immediate gain in real-step equivalents: fall of the loss over its fall per real step."""
    e_source: str | None = None
    """`probe`: held-out loss before and after; `slopes`: training loss, from the gradient's projection on the leap."""
    cosine: float | None = None
    """Of the leap with what the real steps of Correct did; `None` if there were none."""
    norm_ratio: float | None = None
    """Length of what the real steps of Correct did over that of the leap, each per unit of learning rate."""
    predicted_decrease: float | None = None
    """Fall of the training loss along the leap to first order, from the slow memory of the gradients."""
    forecast_error: float | None = None
    """Mean training loss in Correct over what the trend before the leap forecast."""
    probe_cost_steps: float = 0.0


@dataclass(frozen=True)
class LeapPlan:
    """A scheduled leap: its gain, and whether it is to be probed."""

    gain: float
    probe: bool


@dataclass(frozen=True)
class LeapOutcome:
    """A leap that was looked at: what is in the weights now if it was kept, else what was refused, and the evidence."""

    verdict: str
    shape: LeapShape
    loss_before: float
    loss_after: float
    paired: Paired
    cost_steps: float

    @property
    def kept(self) -> bool:
        return self.verdict != "rejected"


@dataclass
class OpenLeap:
    """A leap that Correct is judging: what was forecast, and what came."""

    record: int
    probed: bool
    worth: float
    forecast: float | None
    deviation: float
    losses: list[float]


@dataclass
class LeapPlanner:
    """
    Credit, confidence, probing and backing off around the gain that a [`GainPlanner`] asks for. Plain numbers in, plain
    numbers out.

    Args:
        gains (`GainPlanner`): How far leaps go and what they are worth.
        probe_budget (`float`): Share of the run's compute for probes.
        max_steps (`int`): Length of the run.
        z (`float`): Standard errors for every verdict.
        margin (`float`): Rise of held-out loss tolerated for a scheduled leap, in real steps' worth of progress.
        extend (`bool`): Allow extended leaps.
    """

    gains: GainPlanner
    probe_budget: float
    max_steps: int
    z: float
    margin: float
    extend: bool
    residuals: ResidualStore = field(default_factory=ResidualStore)
    credit: float = 0.0
    gain_level: float = 1.0
    """Lowered by roll-backs and cautions, recovers with leaps that went well."""
    kept_evidence: float = 0.0
    rejected_evidence: float = 0.0
    stability: float = 1.0
    rejections_in_a_row: int = 0
    blocks_to_skip: int = 0
    probes_made: int = 0
    extension: float = 4.0

    PRIOR_KEPT, PRIOR_REJECTED = 3.0, 1.0
    EVIDENCE_HALF_LIFE = 50.0
    MAX_EXTENSION = 64.0
    WIDER = 3.0
    """Times the budget for probes, while no leap is made that nobody looked at."""

    # What every real step changes.

    def observe_step(self, level: Level) -> None:
        """Evidence fades towards the prior, so that a run which rejected leaps early asks again later."""
        keep = 0.5 ** (1.0 / self.EVIDENCE_HALF_LIFE)
        self.kept_evidence *= keep
        self.rejected_evidence *= keep
        target = {Level.NORMAL: 1.0, Level.CAUTION: 0.9, Level.WARNING: 0.5, Level.CRITICAL: 0.25}[level]
        self.stability = target if target < self.stability else self.stability + 0.1 * (1.0 - self.stability)

    @property
    def confidence(self) -> float:
        """
        Trust in the next leap, in `[0, 1]`: posterior share of leaps that are kept, times the stability of the run,
        times the planner's probability that leaping pays, where it has one.
        """
        kept = self.PRIOR_KEPT + self.kept_evidence
        believed = self.gains.confidence
        share = kept / (kept + self.PRIOR_REJECTED + self.rejected_evidence)
        return self.stability * share * (1.0 if believed is None else believed)

    def allows_leap(self, step: int, probe: HeldOutProbe | None) -> bool:
        """
        Ask once per block: counts down the blocks that rejected leaps back off for.

        After two rejections in a row no leap is made that nobody looks at: the budget for probes bounds what a run pays
        whose leaps do not help.
        """
        if self.gains.peak <= 0:
            return False
        if self.blocks_to_skip > 0:
            self.blocks_to_skip -= 1
            return False
        return self.rejections_in_a_row < 2 or probe is None or self._probe_is_due(probe, step / self.max_steps)

    # One leap.

    def plan(self, step: int, features: Sequence[float], probe: HeldOutProbe | None) -> LeapPlan:
        """What the leap before step `step` should be, by the schedule and by what similar leaps taught."""
        progress = step / self.max_steps
        gain = self.gains.gain(progress) * self.gain_level
        gain *= self.residuals.gain_factor(step, features, z=self.z)
        return LeapPlan(gain, probe is not None and self._probe_is_due(probe, progress))

    def _probe_is_due(self, probe: HeldOutProbe, progress: float) -> bool:
        """
        The first leap is always looked at; then the budget is spent evenly over the run, and faster where it decides
        whether there are leaps at all.
        """
        budget = self.probe_budget * (self.WIDER if self.rejections_in_a_row >= 2 else 1.0)
        allowance = budget * self.max_steps * min(progress + 0.1, 1.0)
        return self.probes_made == 0 or probe.cost_steps + 3 * probe.price <= allowance

    def look(self, gain: float, leap, probe: HeldOutProbe, slope: float) -> LeapOutcome:
        """
        Probe a leap: keep it, extend it, shrink it or reject it.

        Args:
            gain (`float`): Scheduled gain.
            leap (`Callable`): Puts the weights at a gain, counted from before the leap; returns its `LeapShape`.
            probe (`HeldOutProbe`): Where the losses come from.
            slope (`float`): Fall of the loss per real step.
        """
        self.probes_made += 1
        spent = probe.cost_steps
        probe.choose()
        before = probe.losses()
        tried: dict[float, tuple[Paired, float, LeapShape]] = {}

        def measure(at: float) -> Paired:
            shape = leap(at)
            after = probe.losses()
            tried[at] = (paired_decrease(before, after), _mean(after), shape)
            return tried[at][0]

        paired = measure(gain)
        choice, verdict = gain, "kept"
        if not keep_scheduled(paired, margin=self.margin * max(slope, 0.0), z=self.z):
            choice, verdict = self._shrink(gain, _mean(before), tried, measure)
        elif self.extend and paired.decrease > self.z * paired.standard_error:
            # Early scheduled gains are tiny; beyond the schedule it is the probe that decides.
            far = max(gain, self.gains.peak / 4) * self.extension
            further = measure(far)
            cost = probe.cost_steps - spent
            pays = further.decrease > paired.decrease and accept_extended(further, slope=slope, cost=cost, z=self.z)
            if pays:
                choice, verdict = far, "extended"
            self.extension = min(max(self.extension * (2.0 if pays else 0.5), 2.0), self.MAX_EXTENSION)
        if verdict != "rejected" and choice != next(reversed(tried)):
            leap(choice)
        chosen, loss_after, shape = tried[choice]
        return LeapOutcome(verdict, shape, _mean(before), loss_after, chosen, probe.cost_steps - spent)

    def _shrink(self, gain: float, loss_before: float, tried: dict, measure) -> tuple[float, str]:
        """Half the leap, then the minimum of the parabola; reject if neither lowers the loss."""
        half = gain / 2
        candidates = [half]
        if measure(half).decrease <= 0:
            best = parabola_minimum([(0.0, loss_before), (half, tried[half][1]), (gain, tried[gain][1])])
            if best is None or not 0.02 * gain < best < half:
                return gain, "rejected"
            measure(best)
            candidates.append(best)
        best = max(candidates, key=lambda at: tried[at][0].decrease)
        return (best, "shrunk") if tried[best][0].decrease > 0 else (gain, "rejected")

    def credit_for(self, gain: float, real_steps: int, max_horizon: int) -> tuple[float, int]:
        """
        What a kept leap is worth, and how many whole steps of the credit so far are redeemed now.

        Worth is the planner's, from the schedule's prior or from imagination.
        """
        worth = self.gains.worth_of(gain, real_steps)
        self.credit += worth
        horizon = min(int(self.credit), max_horizon)
        self.credit -= horizon
        return worth, horizon

    # What became of it.

    def leap_was_kept(self, *, probed: bool) -> None:
        self.kept_evidence += 1.0 if probed else 0.25
        if probed:
            self.rejections_in_a_row = 0
        self.gain_level = min(1.0, self.gain_level * 1.1)

    def leap_was_rejected(self) -> None:
        """Back off exponentially: 1, 2, 4, ... blocks of real steps without a leap."""
        self.rejected_evidence += 1.0
        self.rejections_in_a_row += 1
        self.blocks_to_skip = 2 ** min(self.rejections_in_a_row - 1, 10)

    def lower_gain(self, factor: float = 0.5) -> None:
        self.gain_level = max(self.gain_level * factor, 1.0 / 64.0)

    _STATE = (
        "credit", "gain_level", "kept_evidence", "rejected_evidence", "stability", "rejections_in_a_row",
        "blocks_to_skip", "probes_made", "extension",
    )  # fmt: skip

    def state_dict(self) -> dict:
        values = {name: getattr(self, name) for name in self._STATE}
        return {**values, "residuals": self.residuals.state_dict(), "gains": self.gains.state_dict()}

    def load_state_dict(self, state: dict, tensors: dict | None = None) -> None:
        for name in self._STATE:
            setattr(self, name, state[name])
        self.residuals.load_state_dict(state["residuals"])
        self.gains.load_state_dict(tensors or {}, state["gains"])


def record_as_dict(record: LeapRecord) -> dict:
    """For JSON: numbers that are not finite become `None`."""
    return {name: _json_number(value) for name, value in asdict(record).items()}


def _json_number(value):
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
