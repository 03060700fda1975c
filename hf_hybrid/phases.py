"""The four phases, their state machine, and plugins that follow them. Standard library only."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Any


class Phase(str, enum.Enum):
    """The phase of a step."""

    WARMUP = "warmup"
    """Real steps that gather statistics, without leaps."""
    FULL = "full"
    """Real steps between leaps."""
    PREDICT = "predict"
    """The weights leap, and the steps that the leap is worth are skipped."""
    CORRECT = "correct"
    """Real steps at the new point; the leap is judged and can still be rolled back."""

    @property
    def index(self) -> int:
        return list(Phase).index(self)


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


@dataclass(frozen=True)
class PluginContext:
    """The objects that a plugin may use. `optimizer` is the unwrapped optimizer, `model` the model as it is trained."""

    model: Any
    optimizer: Any
    max_steps: int


class PhasePlugin:
    """
    Base class of plugins. Override the hooks that you need; by default each does nothing.

    Hooks run in the order of the list given to the trainer, except those that leave a state
    (`after_backward`, `after_probe`, `on_train_end`), which run in reverse, so that plugins nest.
    State returned by `state_dict` must be JSON values; it is saved with every checkpoint under `name`.
    """

    name: str = ""

    def on_train_begin(self, context: PluginContext) -> None:
        """Called once, after the optimizer exists and before the first step."""

    def on_phase_change(self, old: Phase, new: Phase) -> None:
        """Called when the next step belongs to `new`, before its data is fetched."""

    def before_forward(self, phase: Phase) -> None:
        """Called before the forward pass of every micro-batch of a real step."""

    def after_backward(self, phase: Phase) -> None:
        """Called after the backward pass of every micro-batch of a real step."""

    def before_probe(self) -> None:
        """Called before a forward-only evaluation of a probe."""

    def after_probe(self) -> None:
        """Called after that evaluation. The training weights must be in place again."""

    def probe_losses(self, evaluate: Callable[[Any], list[float]]) -> Callable[[Any], list[float]]:
        """Wrap the function that returns the losses of a probe's batch, for example to measure its noise."""
        return evaluate

    def before_export(self) -> None:
        """Called before weights are evaluated, saved or pushed. Put the real weights into the model."""

    def on_train_end(self) -> None:
        """Called once, after the last step."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned. Called after `on_train_begin`."""


_REVERSED = {"after_backward", "after_probe", "on_train_end"}


class PluginList:
    """The ordered plugins of a run."""

    def __init__(self, plugins: Iterable[PhasePlugin] = ()):
        self.plugins = list(plugins)
        names = [self._key(plugin) for plugin in self.plugins]
        for plugin, name in zip(self.plugins, names):
            if not isinstance(plugin, PhasePlugin):
                raise TypeError(
                    f"`plugins` must hold `PhasePlugin` instances, got `{plugin!r}`. Subclass `hf_hybrid.PhasePlugin`."
                )
            if names.count(name) > 1:
                raise ValueError(f"Two plugins are named `{name}`. Give each its own `name`; state is saved under it.")

    @staticmethod
    def _key(plugin: PhasePlugin) -> str:
        return getattr(plugin, "name", "") or type(plugin).__name__

    def listens(self, *hooks: str) -> bool:
        """Whether any plugin does something at one of these hooks."""
        idle = {getattr(PhasePlugin, hook) for hook in hooks}
        methods = [getattr(plugin, hook) for plugin in self.plugins for hook in hooks]
        return any(getattr(method, "__func__", method) not in idle for method in methods)

    def call(self, hook: str, *args) -> None:
        for plugin in reversed(self.plugins) if hook in _REVERSED else self.plugins:
            getattr(plugin, hook)(*args)

    def state_dict(self) -> dict[str, Any]:
        return {self._key(plugin): plugin.state_dict() for plugin in self.plugins}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for plugin in self.plugins:
            if self._key(plugin) in state:
                plugin.load_state_dict(state[self._key(plugin)])
