"""
A run is a list of parts: this is the interface that all of them have.

Parts do everything that a run does besides plain training. The divergence monitor, the search of the learning rate,
leaps, the forecast, the memory guard, shared prefixes and exact skips are parts, and so are those that a user passes in
`parts=`. The run (run/run.py) holds the list in order. At each event of a step it calls the parts that handle this
event. It also collects their summaries, and their states for a checkpoint. The list has only the parts that the run
needs.

The hooks, each with the parts that implement it:

| hook | when it is called | who listens |
|---|---|---|
| `begin` | before the first step | nearly all |
| `resume` | before states are restored, with those of all parts | the choice of leaps, rollouts |
| `load_state_dict` | a checkpoint is restored | all that keep a state |
| `begin_step` | the batches are there | leaps, shared rows, rollouts |
| `on_phase_change` | a step begins another phase | precision and states by phase |
| `before_forward`, `after_backward` | around each micro-batch | shared rows, phase memory, adapters |
| `before_update` | gradients are clipped; the monitor may withhold the update | monitor, rate, leaps, planner |
| `after_update` | the optimizer has stepped | leaps |
| `end_step` | the step is over | rate, planner, shared rows, rollouts, recovery, the guard |
| `react` | the monitor found something, or a leap is undone | monitor, rate, leaps, planner |
| `decide` | last in a step: what the next one will be | leaps, planner |
| `log` | an entry of the log is written | rate, leaps, forecast, planner |
| `before_probe`, `after_probe` | around the losses of a probe | phase memory |
| `spare_memory` | memory ran out, before the pass is computed again | recomputed layers |
| `before_export` | weights are evaluated, saved or pushed | optimizer states by phase |
| `state_dict` | a checkpoint is written | all that keep a state |
| `summary` | `hybrid_summary()` is asked for | most |
| `tensors_held` | memory is measured | leaps |
| `end` | after the last step | leaps, shared rows, phase memory, recovery |
| `clean_up` | `train()` is left, also by an error | phase memory |

A new capability is a new part: subclass [`Part`], override the hooks that it needs, and add it to the list in build.py.
Standard library only.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


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
    def index(self) -> int:  # ty: ignore[incompatible-property-override]  # not that of `str`
        return list(Phase).index(self)


class Level(enum.IntEnum):
    """How serious the state of the run is."""

    NORMAL = 0
    CAUTION = 1
    WARNING = 2
    CRITICAL = 3


class Action(str, enum.Enum):
    """The recovery ladder, mildest first."""

    NONE = "none"
    SHORTEN = "shorten"
    """Halve the next leaps."""
    FORCE_FULL = "force_full"
    """No leaps for a while."""
    BACK_OFF = "back_off"
    """No leaps for a while, longer each time, then shorter leaps. Every leap is probed until one is kept."""
    ROLL_BACK = "roll_back"
    """Restore the weights from before the last leap and lower the gain."""
    SKIP_BATCH = "skip_batch"
    """Drop these gradients: the optimizer does not step."""
    RESET_PREDICTOR = "reset_predictor"
    """Reset the direction's averages."""
    ABORT = "abort"
    """Stop, and name the last good checkpoint."""


@dataclass(frozen=True)
class Verdict:
    """A level, why, and the rung of the ladder that answers it."""

    level: Level
    reason: str
    action: Action


NORMAL = Verdict(Level.NORMAL, "", Action.NONE)


@dataclass
class Leap:
    """
    One leap, from the decision to make it until Correct has judged it.

    While the leap can still be undone it is `Trajectory.open`; it is one of `RunRecord.leaps` too. Losses are means
    over the sequences of its probe and `None` where the leap was not probed.
    """

    step: int  # before which it was made, from 0
    real_steps: int  # since the last leap
    gain: float = 0.0  # in units of these real steps, after the cap; 0 until the weights have moved
    length: float = 0.0  # the same in real steps at the peak of the learning rate
    verdict: str = "unprobed"  # or `kept`, `shrunk` (a part of it was kept), `rejected`, `rolled_back` by Correct
    horizon: int = 0  # steps that were skipped for it
    worth: float = 0.0  # steps that it was credited with
    relative_norm: float = 0.0  # its norm over the norm of the weights
    predicted_decrease: float = 0.0
    """Fall of the training loss along it to first order (nats), by the direction's own expectation of the gradient."""
    loss_before: float | None = None
    loss_after: float | None = None
    standard_error: float | None = None
    accuracy_before: float | None = None
    """Share of the pairs of the probe that the model ranks right; `None` where the sequences are no such pairs."""
    accuracy_after: float | None = None
    worse_in: str | None = None  # why the probe refused the leap as it was asked for: `loss` or `accuracy`
    e: float | None = None
    """Immediate gain in real steps by the probe: fall of the loss over its fall per real step before the leap."""
    forecast_error: float | None = None  # mean training loss in Correct minus the forecast of the trend before it
    probe_cost_steps: float = 0.0  # price of its probe in real steps
    decrease: float = 0.0
    """Mean paired fall of the loss of its probe (nats); minus infinity where the loss after it is not finite."""
    under_test: bool = False  # it is being tried right now, between its snapshot and its verdict
    forecast: float | None = None  # loss that the trend before the leap forecast
    deviation: float = 0.0  # around that trend
    losses: list[float] = field(default_factory=list)  # of the training since the leap

    def summary(self) -> dict:
        """Return plain values for summaries and JSON, with `None` for numbers that are not finite."""
        inner = ("decrease", "under_test", "real_steps", "forecast", "deviation", "losses")
        values = {name: value for name, value in asdict(self).items() if name not in inner}
        return {n: None if isinstance(v, float) and not math.isfinite(v) else v for n, v in values.items()}


@dataclass
class Step:
    """
    The step under way.

    Attributes:
        index (`int`): Its number, from 0.
        phase (`Phase`, *optional*): `None` in a run without phases. [`Part.begin_step`] may change it.
        learning_rate (`float`): As scheduled, without [`Run.rate_scale`].
        batches (`Sequence`): The micro-batches. A skipped step trains on none of them.
        on_host (`Sequence`): The same as the loader gave them: on the host they are read without waiting.
        window (`list`, *optional*): The micro-batches as a part laid them out anew, one in place of each that is not
            computed yet; `None` computes nothing.
        parts_add_up (`bool`): Whether losses of parts of a micro-batch in `window` add up to its loss, without `items`.
        is_arranged (`bool`): Whether it is known how they are computed: once the first one is.
        acts (`str`, *optional*): What code of a user acts on micro-batches or between them, as a clause.
        items (`Any`): `num_items_in_batch`: the label count that divides the loss; `None` if the loss is a mean.
        losses (`list[torch.Tensor]`): Of the micro-batches computed so far, as shares of the loss of the step.
        tokens (`int`): Of these micro-batches, on this process.
        skipped (`int`): Micro-batches of a skipped step, which are not computed.
        loss (`float`, *optional*): Training loss, the mean over all processes; known from `before_update` on, where a
            part needs it at once ([`Part.needs_numbers`]), and only in a real step in which a token has a label.
        gradient_norm (`float`, *optional*): Before clipping; as `loss`.
        leap (`Leap`, *optional*): The one that can still be undone.
        withheld (`bool`): Whether the optimizer does not step, because the gradients cannot be used.
        verdict (`Verdict`, *optional*): Of the divergence monitor on the loss, if the gradients are used.
        counts (`bool`): Whether this is a real step whose gradients were used; known after `before_update`.
        asks_save (`bool`): Whether a part asks for a checkpoint after this step.
    """

    index: int
    phase: Phase | None = None
    learning_rate: float = 0.0
    batches: Sequence[Any] = ()
    on_host: Sequence[Any] = ()
    window: list[Any] | None = None
    parts_add_up: bool = False
    is_arranged: bool = False
    acts: str | None = None
    items: Any = None
    losses: list[torch.Tensor] = field(default_factory=list)
    tokens: int = 0
    skipped: int = 0
    loss: float | None = None
    gradient_norm: float | None = None
    leap: Leap | None = None
    withheld: bool = False
    verdict: Verdict | None = None
    counts: bool = False
    asks_save: bool = False


class RealStep(Step):
    """A step between its gradients and its end, for type checkers: its loss and gradient norm are known."""

    loss: float  # ty: ignore[incompatible-mutable-override]  # nobody takes it away
    gradient_norm: float  # ty: ignore[incompatible-mutable-override]


class Part:
    """
    Base class of the parts of a run. Override the hooks that you need; by default each does nothing and costs nothing.

    Hooks run in the order of the run's list, except those that leave a state (`after_backward`, `after_probe`, `end`),
    which run in reverse, so that parts nest. What `state_dict` returns is saved with every checkpoint under `name`:
    JSON values and tensors, nested as it likes. Parts of one run need different names.
    """

    name: str = ""
    needs_numbers = True
    """
    Whether `before_update`, `after_update`, `end_step` or `decide` of this part read the loss or norm of the step, or
    what became of it. If no part does, the host reads them in the next step, so that the device never waits for it. The
    monitor judges then, and others react, before the next update, the log, or a save.
    """

    @property
    def failed(self) -> Sequence[str]:
        """What the part could not do because of an exception that nobody foresaw (run/fallbacks.py)."""
        return ()

    # The run.

    def begin(self, run: Any) -> None:
        """
        Called once, when model and optimizer are ready and before the first step.

        `run.model` is the model as it is trained, `run.optimizer` the unwrapped optimizer, `run.max_steps` the length.
        """

    def end(self) -> None:
        """Called once, after the last step."""

    def clean_up(self) -> None:
        """Called when `train()` is left, also by an exception. Leave the model as it was."""

    # A step.

    def begin_step(self, step: Step) -> None:
        """Called when a step begins and its batches are fetched."""

    def before_forward(self, phase: Phase | None) -> None:
        """Called before the forward pass of every micro-batch of a real step."""

    def after_backward(self, phase: Phase | None) -> None:
        """Called after the backward pass of every micro-batch of a real step."""

    def before_update(self, step: RealStep) -> None:
        """Called in a real step between the clipping of the gradients and the optimizer's step."""

    def after_update(self, step: Step, learning_rates: list[float]) -> None:
        """Called after the optimizer stepped with these learning rates, one per parameter group."""

    def end_step(self, step: Step) -> None:
        """Called when the step is over."""

    def react(self, step: Step, verdict: Verdict) -> None:
        """Called when the divergence monitor found something, or the verdict on a leap undoes it."""

    def decide(self, step: Step) -> None:
        """Called last in a step, to choose what the next one will be."""

    def log(self, step: int, logs: dict[str, Any]) -> None:
        """Called with each entry of Trainer's log after `step` steps, before it is written; may change it."""

    # Phases.

    def on_phase_change(self, old: Phase, new: Phase) -> None:
        """Called when the step that begins belongs to another phase than the last one."""

    def before_probe(self) -> None:
        """Called before a forward-only evaluation of a probe."""

    def after_probe(self) -> None:
        """Called after that evaluation. The training weights must be in place again."""

    def spare_memory(self) -> str | None:
        """
        Called after an out-of-memory error in a forward or backward pass, before it is computed again. Take a measure
        that changes no result, for the rest of the run, and say in words what holds now; `None` if there is none.
        """
        return None

    def before_export(self) -> None:
        """Called before weights are evaluated, saved or pushed. Put the real weights into the model."""

    # What remains of it.

    def summary(self) -> dict[str, Any]:
        """Return entries of `hybrid_summary()`, as plain values."""
        return {}

    def tensors_held(self) -> Sequence[torch.Tensor]:
        """Return the tensors that this part holds between steps beside model and optimizer, for memory reports."""
        return ()

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs. All processes call this. Inside a step: the state before the step."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned. Called after `begin`."""

    def resume(self, state: dict[str, Any]) -> None:
        """Called before that with the states of all parts: a part may put others in its place."""


REVERSED = {"after_backward", "after_probe", "end"}
"""Hooks that leave a state."""


def listening(parts: Sequence[Part], hook: str) -> list[Callable[..., Any]]:
    """Return the methods for a hook of those parts that override it, in the order in which they are called."""
    idle = getattr(Part, hook)
    methods = [getattr(part, hook) for part in parts]
    overridden = [method for method in methods if getattr(method, "__func__", method) is not idle]
    return overridden[::-1] if hook in REVERSED else overridden


def check_parts(parts: Sequence[Part]) -> None:
    """Refuse what is no part, and two parts of one name."""
    for part in parts:
        if not isinstance(part, Part):
            raise TypeError(f"`parts` must hold instances of `hf_hybrid.Part`, got `{part!r}`. Subclass it.")
    names = [name_of(part) for part in parts]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"Two parts are named `{name}`. Give each its own `name`; state is saved under it.")


def name_of(part: Part) -> str:
    """Return the name under which the state of a part is saved."""
    return part.name or type(part).__name__
