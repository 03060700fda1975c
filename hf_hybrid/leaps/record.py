"""What happened in a run, counted where it happened. Plain values; standard library only."""

from __future__ import annotations

from dataclasses import dataclass, field

from hf_hybrid.phases import Phase

MAX_EVENTS = 1000


def _per_phase(zero):
    return field(default_factory=lambda: {phase.value: zero for phase in Phase})


@dataclass
class RunRecord:
    """Counters and lists behind `trainer.hybrid_summary()`; saved and restored with every checkpoint."""

    steps_by_phase: dict[str, int] = _per_phase(0)
    seconds_by_phase: dict[str, float] = _per_phase(0.0)
    backward_passes: int = 0
    forward_only_passes: int = 0
    backward_passes_avoided: int = 0
    skipped_batches: int = 0
    roll_backs: int = 0
    probe_cost_steps: float = 0.0
    leap_cost_steps: float = 0.0
    """Arithmetic of all leaps, kept or not, in real steps; what is a few operations per weight is not counted."""
    leaps: list[dict] = field(default_factory=list)
    divergence_events: list[dict] = field(default_factory=list)
    learning_rate_scales: list[dict] = field(default_factory=list)
    displacement_residuals: dict[str, dict] = field(default_factory=dict)
    """By group of parameters: `leaps` judged, and the means of `cosine` and `norm_ratio` over them."""
    tail_average: dict | None = None

    def add_residuals(self, residuals: dict) -> None:
        """Fold what one leap met into the means by group."""
        for group, residual in residuals.items():
            mean = self.displacement_residuals.setdefault(group, {"leaps": 0, "cosine": 0.0, "norm_ratio": 0.0})
            mean["leaps"] += 1
            for name in ("cosine", "norm_ratio"):
                mean[name] += (getattr(residual, name) - mean[name]) / mean["leaps"]

    def add_event(self, event: dict) -> None:
        if len(self.divergence_events) < MAX_EVENTS:
            self.divergence_events.append(event)

    def summary(self) -> dict:
        """Everything, with the totals that follow from it."""
        predicted = self.steps_by_phase[Phase.PREDICT.value]
        verdicts: dict[str, int] = {}
        for leap in self.leaps:
            verdicts[leap["verdict"]] = verdicts.get(leap["verdict"], 0) + 1
        return {
            "steps": sum(self.steps_by_phase.values()),
            "real_steps": sum(self.steps_by_phase.values()) - predicted,
            "predicted_steps": predicted,
            "leaps_by_verdict": verdicts,
            **vars(self),
        }

    def state_dict(self) -> dict:
        return dict(vars(self))

    def load_state_dict(self, state: dict) -> None:
        for name in vars(self):
            setattr(self, name, state[name])


@dataclass
class StepWindow:
    """Real and predicted steps since something was logged, to mend means that count predicted steps as zeros."""

    real: int = 0
    total: int = 0
    last_was_real: bool = True

    def count(self, *, real: bool) -> None:
        self.real += real
        self.total += 1
        self.last_was_real = real

    def correct_mean(self, logs: dict, key: str) -> None:
        """Turn the mean over all steps into that over the real ones; without any, there is nothing to report."""
        if key not in logs:
            return
        if self.real:
            logs[key] *= self.total / self.real
        elif self.total:
            del logs[key]
