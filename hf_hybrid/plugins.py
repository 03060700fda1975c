"""What a phase-aware part (memory policy, profiler, experiment) may do, and when the trainer lets it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from hf_hybrid.phases import Phase


@dataclass(frozen=True)
class PluginContext:
    """What a plugin may touch. `optimizer` is the unwrapped optimizer, `model` the model as it is trained."""

    model: Any
    optimizer: Any
    max_steps: int


class PhasePlugin:
    """
    Base class: override what you need, every hook does nothing by default.

    Hooks run in the order of the list given to the trainer, except those that leave a state
    (`after_backward`, `after_probe`, `on_train_end`), which run in reverse, so that plugins nest.
    State returned by `state_dict` must be JSON values; it is saved with every checkpoint under `name`.
    """

    name: str = ""

    def on_train_begin(self, context: PluginContext) -> None:
        """Once, after the optimizer exists and before the first step."""

    def on_phase_change(self, old: Phase, new: Phase) -> None:
        """The next step belongs to `new`. Runs before its data is fetched."""

    def before_forward(self, phase: Phase) -> None:
        """Before the forward pass of every micro-batch of a real step."""

    def after_backward(self, phase: Phase) -> None:
        """After the backward pass of every micro-batch of a real step."""

    def before_probe(self) -> None:
        """Before a forward-only evaluation on held-out sequences."""

    def after_probe(self) -> None:
        """After it; the training weights must be in place again."""

    def probe_losses(self, evaluate: Callable[[Any], list[float]]) -> Callable[[Any], list[float]]:
        """May wrap what evaluates one held-out batch to a loss per sequence, for example to measure its noise."""
        return evaluate

    def before_export(self) -> None:
        """Before weights are evaluated, saved or pushed: bring the real ones into the model."""

    def on_train_end(self) -> None:
        """Once, after the last step."""

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
                raise ValueError(f"Two plugins are named `{name}`. Give each a `name` of its own: state is kept by it.")

    @staticmethod
    def _key(plugin: PhasePlugin) -> str:
        return getattr(plugin, "name", "") or type(plugin).__name__

    def call(self, hook: str, *args) -> None:
        for plugin in reversed(self.plugins) if hook in _REVERSED else self.plugins:
            getattr(plugin, hook)(*args)

    def state_dict(self) -> dict[str, Any]:
        return {self._key(plugin): plugin.state_dict() for plugin in self.plugins}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for plugin in self.plugins:
            if self._key(plugin) in state:
                plugin.load_state_dict(state[self._key(plugin)])
