"""
Records of a run: its last leaps, the counters behind `hybrid_summary()`, and its speed. Standard library only.

The record is part of every checkpoint, so it must not grow with the run. It keeps the last leaps, the last events and
the last changes of the learning rate's scale, and exact counts of all of them. The whole history is on disk:
`hybrid_log.jsonl` (records/log.py) gets a line for each leap and each event.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Protocol

from hf_hybrid.part import Leap, Phase

if TYPE_CHECKING:
    from hf_hybrid.machine import Driver

MOST_LEAPS, MOST_EVENTS = 100, 20
"""Leaps, and events and changes of the scale, that a record keeps: the last ones."""


def _per_phase(zero):
    return field(default_factory=lambda: {phase.value: zero for phase in Phase})


@dataclass
class RunRecord:
    """Counters and bounded lists behind `trainer.hybrid_summary()`; saved and restored with every checkpoint."""

    steps_by_phase: dict[str, int] = _per_phase(0)
    seconds_by_phase: dict[str, float] = _per_phase(0.0)
    backward_passes: int = 0
    forward_only_passes: int = 0
    backward_passes_avoided: int = 0
    skipped_batches: int = 0
    roll_backs: int = 0
    probe_cost_steps: float = 0.0
    leap_cost_steps: float = 0.0
    """Arithmetic of all leaps, kept or not, in real steps; a few operations per weight are not counted."""
    leaps_made: int = 0
    leaps: list[Leap] = field(default_factory=list)
    """The last `MOST_LEAPS`."""
    earlier_verdicts: dict[str, int] = field(default_factory=dict)
    """Number of the leaps before those, by verdict."""
    divergence_events_seen: int = 0
    divergence_events: list[dict] = field(default_factory=list)
    """The last `MOST_EVENTS`."""
    learning_rate_scales: list[dict] = field(default_factory=list)
    """The last `MOST_EVENTS` changes: `step` and `scale`."""

    def add_leap(self, leap: Leap) -> None:
        """Count a leap and keep it. The oldest one goes, whose verdict was final long ago, and stays counted."""
        self.leaps_made += 1
        self.leaps.append(leap)
        for earlier in self.leaps[:-MOST_LEAPS]:
            self.earlier_verdicts[earlier.verdict] = self.earlier_verdicts.get(earlier.verdict, 0) + 1
        del self.leaps[:-MOST_LEAPS]

    def add_event(self, event: dict) -> None:
        """Count an event of the divergence monitor and keep it."""
        self.divergence_events_seen += 1
        self.divergence_events = [*self.divergence_events, event][-MOST_EVENTS:]

    def add_scale(self, step: int, scale: float) -> None:
        """Keep the learning rate's scale from `step` on, if it differs by a tenth from the one kept last."""
        last = self.learning_rate_scales[-1]["scale"] if self.learning_rate_scales else 1.0
        if abs(math.log(scale / last)) > 0.1:
            self.learning_rate_scales = [*self.learning_rate_scales, {"step": step, "scale": scale}][-MOST_EVENTS:]

    def summary(self) -> dict:
        """Return everything as plain values, with totals."""
        predicted = self.steps_by_phase[Phase.PREDICT.value]
        verdicts = Counter(self.earlier_verdicts) + Counter(leap.verdict for leap in self.leaps)
        values = {**vars(self), "leaps": [leap.summary() for leap in self.leaps]}
        del values["earlier_verdicts"]
        return {
            "steps": sum(self.steps_by_phase.values()),
            "real_steps": sum(self.steps_by_phase.values()) - predicted,
            "predicted_steps": predicted,
            "leaps_by_verdict": dict(verdicts),
            **values,
        }

    def load_state_dict(self, state: dict) -> None:
        """Restore a saved record, from `asdict`."""
        for name in vars(self):
            setattr(self, name, state[name])
        self.leaps, known = [], {field.name for field in fields(Leap)}
        for leap in state["leaps"]:
            infinite: dict = {name: float(value) for name, value in leap.items() if value in ("inf", "-inf")}
            # Text in a checkpoint, because JSON has no infinity. Earlier versions measured more of a leap.
            self.leaps.append(Leap(**{name: value for name, value in {**leap, **infinite}.items() if name in known}))


class RunView(Protocol):
    """What the monitor and the rate ask of the run (run.py), which knows both."""

    record: RunRecord
    survive: Callable[[Exception, str], None]
    write: Callable[[dict], None]
    diverged: Callable[[Any], Exception]

    def call(self, event: str, *args: Any) -> None: ...


HOST_IS_LIMIT = "The host is the limit: the device computed in %.0f %% of the time. %s"
HOST_LIMIT = 0.7
"""
Share of the time below which the host, not the device, limits a run. On an H200 the device computed in 28 to 52 % of
the time with a model of 1B, which the host limited, and in about 95 % with one of 8B.
"""
LEAST_SAMPLES = 10
"""Samples of the driver from which the device's share is known: 2 to 10 s of training."""


@dataclass
class Speed:
    """
    How fast a run trains since it was started, or resumed.

    The run lets the `clock` go on from the beginning of its first step to its end, with the wait for batches, and stops
    it while weights are evaluated, saved or pushed. It counts the tokens of the batches that it trains on.
    """

    driver: Driver | None = None
    """Samples of the device, if it is a GPU."""
    advice: str | None = None
    """What to do if the host is the limit; `None` where the reason may be another one."""
    tokens: Any = 0
    """
    Tokens without padding, as a number or a tensor that nobody waits for: of this process, and from the end of the
    training on of all. `None` where batches do not tell, or where processes share them.
    """
    seconds: float = 0.0
    clock: float | None = None
    """When `seconds` was brought up to date; `None` while the clock stands still."""
    read_at: float = 0.0
    samples: int = 0
    percent: int = 0
    """Sum of the samples."""

    def read(self, *, keep: bool) -> None:
        """Read the samples since the last time, and count them if they are of the training."""
        values = [] if self.driver is None else self.driver.utilization()
        self.read_at = time.perf_counter()
        if keep:
            self.samples, self.percent = self.samples + len(values), self.percent + sum(values)

    @property
    def device_share(self) -> float | None:
        """Share of the time in which the device computed, if it is known."""
        known = self.samples >= LEAST_SAMPLES and self.percent > 0  # some integrated GPUs always report 0
        return self.percent / self.samples / 100 if known else None

    @property
    def hint(self) -> tuple[float, str] | None:
        """The values of `HOST_IS_LIMIT`, if it is; unknown where batches hold no tokens, but prompts to complete."""
        share = self.device_share
        is_low = share is not None and share < HOST_LIMIT
        return (100 * share, self.advice) if is_low and self.tokens is not None and self.advice is not None else None

    def summary(self) -> dict[str, Any]:
        """Return `tokens_per_second`, `device_share` and `speed_hint`; each is `None` where it is not known."""
        per_second = int(self.tokens) / self.seconds if self.tokens is not None and self.seconds else 0
        hint = None if self.hint is None else HOST_IS_LIMIT % self.hint
        return {"tokens_per_second": per_second or None, "device_share": self.device_share, "speed_hint": hint}
