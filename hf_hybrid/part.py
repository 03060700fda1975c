"""The four phases, their state machine, and plugins that follow them. Standard library only."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable
from dataclasses import dataclass
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
