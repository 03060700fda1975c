"""
The place of a run's weights: `Resident` on the device, or `Streamed` from the host.

The trainer asks one object, `trainer.memory`, wherever the place matters. `Resident` is plain Trainer, and has nothing
to do. `Streamed` joins the modules of this folder, and its methods say what the trainer asks for:

- `LayerStreamer` (streamer.py) copies a layer to the device when it computes and collects its gradients;
- `Window` (walk.py) computes the micro-batches of an optimizer step layer by layer, so weights are copied twice per
  step and not twice per micro-batch;
- `LazyOptimizer` (optimizer.py) updates a layer when it is needed next, exactly as the optimizer would have.

Models that the loss computes and nobody trains have a `LayerStreamer` of their own, with one pair of slots for all of
them, beside a `Resident` or a `Streamed` one.

Both are an `InPlace` (run/weights.py), and so tell the leaps where weights are stored: a leap under test is added to
streamed weights when they are copied to the device.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Generator, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hf_hybrid.optimizers import optimizer_layers
from hf_hybrid.run.weights import InPlace
from hf_hybrid.streaming.optimizer import LazyOptimizer
from hf_hybrid.streaming.placeholders import Placeholder
from hf_hybrid.streaming.streamer import LayerStreamer
from hf_hybrid.streaming.units import as_plain
from hf_hybrid.streaming.walk import LayerWalk, Window

logger = logging.getLogger(__name__)


class Resident(InPlace):
    """Weights, gradients and states are where plain Trainer has them."""

    streams = False
    plan: Any = None
    """The memory plan in use, if there is one."""
    window: Window | None = None
    """How streamed layers compute the micro-batches of an accumulation window."""
    optimizer: LazyOptimizer | None = None
    """The one that has the gradients of streamed layers."""

    def __init__(self, buffers_on_host: bool = False, evaluated: LayerStreamer | None = None):
        self.buffers_on_host = buffers_on_host
        """Whether the plan keeps the buffers of leaps on the host."""
        self.evaluated = evaluated
        """Streams models that the loss computes and nobody trains (a reference, teachers), if they are on the host."""

    @property
    def torn(self) -> str | None:
        return None

    def is_for(self, model: nn.Module) -> bool:
        return True

    def wrap(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        return optimizer

    def parameter(self, parameter: nn.Parameter) -> nn.Parameter:
        return parameter

    def tensors_held(self, extra: dict[str, list[Tensor]]) -> dict[str, list[Tensor]]:
        """Return `extra` and all other tensors held beside the model between steps, by category."""
        if self.evaluated is None:
            return extra
        held, model = self.evaluated.tensors_held(), self.evaluated.model
        with as_plain():
            weights = [*held["slots"], *held["host_weights"], *model.parameters(), *model.buffers()]
        return {**extra, "weights": extra.get("weights", []) + weights}

    def _nothing(self) -> Any:
        """There is nothing to do, nothing to tell, and nothing changes."""

    discard_gradients = walk_by_micro_batch = recompute_all = _nothing

    def beside(self, function: Callable[[], Sequence[Tensor]], count: int) -> list[Tensor] | None:
        """As [`LayerWalk.beside`], where a window is walked by layer; `None` elsewhere."""

    def together(self, functions: Sequence[Callable[[], Any]]) -> list[Any] | None:
        """
        Compute functions, which make passes without gradients, where windows are walked by layer: each layer comes in
        once for all of them. `None` elsewhere.
        """

    def begin(self) -> None:
        """Take over the models at the start of a run."""
        if self.evaluated is not None:
            self.evaluated.attach()

    def end(self) -> None:
        """Give models their weights back, on the host."""
        if self.evaluated is not None:
            self.evaluated.detach()

    def statistics(self) -> dict | None:
        return None if self.evaluated is None else {"evaluated": self.evaluated.statistics()}

    def overlay(self, displaced: Callable[[nn.Parameter], Tensor | None]) -> None:
        """Weights are what they are: a leap under test is in them."""

    def host_tensors(self, buffers: Iterable[Tensor]) -> list[Tensor] | None:
        return None

    @contextlib.contextmanager
    def running(self) -> Generator[None]:
        """Context in which models can compute on the device, so that they can be evaluated."""
        attached = self.evaluated is None or self.evaluated.attached
        Resident.begin(self)
        try:
            with contextlib.nullcontext() if self.evaluated is None else self.evaluated.holding_heads():
                yield
        finally:
            if not attached:
                Resident.end(self)

    def suspended(self) -> contextlib.AbstractContextManager:
        return contextlib.nullcontext()


class Streamed(Resident):
    """
    Decoder layers live on the host and visit the device while they compute, as the `plan` says.

    `host_memory` returns how many bytes can still be allocated on the host.
    """

    streams = True
    window: Window  # ty: ignore[incompatible-mutable-override]  # nobody takes it away

    def __init__(
        self, model: nn.Module, streamer: LayerStreamer, window: Window, plan: Any, *, host_memory: Callable[[], int]
    ):
        super().__init__(plan.buffers_on_host, window.evaluated)
        self.model, self.streamer, self.window, self.plan = model, streamer, window, plan
        self.host_memory = host_memory

    def is_for(self, model: nn.Module) -> bool:
        """Whether this object was made for `model`, and for what of it is trained."""
        params = [param for unit in self.streamer.units for param in unit.storage.params]
        more = any(param.parameter.requires_grad and not param.planned for param in params)
        return self.model is model and not (more and self.optimizer is None)  # with an optimizer it is too late

    @property
    def torn(self) -> str | None:
        """Name of the update that an error cut short, if any: its weights and states belong to no step."""
        return None if self.optimizer is None else self.optimizer.torn

    def wrap(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """Return the optimizer that the run uses instead of Trainer's: it updates a layer when that is streamed."""
        for layer in optimizer_layers(optimizer):  # in a second run accelerate has wrapped the first's
            if isinstance(layer, LazyOptimizer):
                self.optimizer = layer
                return optimizer
        self.optimizer = LazyOptimizer(optimizer, self.streamer, in_backward=self.plan.setup.update_in_backward)
        return self.optimizer

    def begin(self) -> None:
        super().begin()
        self.window.is_compared = False
        self.streamer.attach()

    def end(self) -> None:
        super().end()
        if self.streamer.attached:
            if self.torn is None:
                self.finish_updates()
            else:  # there is nothing to finish
                logger.warning("%s The weights in memory are of no step. Load the last checkpoint.", self.torn)
            if self.optimizer is not None:
                self.optimizer.drop_gradients()  # of a window that an error cut short
            self.streamer.detach(expand=self._base_fits())
            self._parking().clear()
        self.streamer.overlay = None

    def _base_fits(self) -> bool:
        """Whether the host can hold an int8 base as the model had it."""
        params = [param for unit in self.streamer.units for param in unit.storage.params if param.is_int8]
        needed = sum(param.nbytes for param in params)
        available = self.host_memory()
        if needed > available:
            logger.warning(
                "The frozen base stays packed as int8, because expanding it takes %.1f GiB and %.1f are available. "
                "The adapters can be saved. To use the model outside this trainer, load the base again.",
                needed / 2**30,
                available / 2**30,
            )
        return needed <= available

    def parameter(self, parameter: nn.Parameter) -> nn.Parameter:
        """Return the parameter that the optimizer updates instead of a parameter of the model."""
        self.streamer.gradients_arrived()  # whoever asks may read them
        found = self.streamer.counterpart(parameter)
        return nn.Parameter(torch.empty(0)) if isinstance(found, Placeholder) else found  # there is an int8 base alone

    def walk_by_micro_batch(self) -> bool:
        """Compute micro-batches one by one to save memory, and return whether this changes anything."""
        before, self.window.order = self.window.order, "micro_batch"
        return before != "micro_batch"

    def recompute_all(self) -> bool:
        """Recompute all layers to save memory, and return whether this changes anything."""
        changes = any(unit.graphs for unit in self.streamer.layers)
        self.streamer.keep_graphs(0, 1)
        return changes

    def beside(self, function: Callable[[], Sequence[Tensor]], count: int) -> list[Tensor] | None:
        walk: Any = self.streamer.walk
        return None if walk is None else walk.beside(function, count)

    def together(self, functions: Sequence[Callable[[], Any]]) -> list[Any] | None:
        window = self.window
        if not window.by_layer or window.order == "micro_batch" or window.users is not None:
            return None
        return LayerWalk(self.streamer, None, self.evaluated).run(functions, begun=True)

    def discard_gradients(self) -> None:
        """Drop gradients that the optimizer has not used."""
        self.streamer.gradients_arrived()
        if self.optimizer is not None:
            self.optimizer.drop_gradients()

    def holds(self, parameter: nn.Parameter) -> bool:
        return id(parameter) in self.streamer.masters

    def finish_updates(self) -> None:
        if self.optimizer is not None:
            self.optimizer.flush()

    def changed(self) -> None:
        for unit in self.streamer.units:
            self.streamer.renew(unit)

    def overlay(self, displaced: Callable[[nn.Parameter], Tensor | None]) -> None:
        """Add what `displaced` returns to weights on their way to the device."""
        self.streamer.overlay = displaced

    @contextlib.contextmanager
    def suspended(self) -> Generator[None]:
        """Context in which the model holds its own weights, so that they can be saved or loaded."""
        attached = self.streamer.attached
        if attached:
            self.finish_updates()
            # Adapters are saved without their base, which may stay packed; any other model is saved whole.
            self.streamer.detach(for_good=False, expand=not hasattr(self.model, "peft_config"))
        try:
            yield
        finally:
            if attached:
                self.streamer.attach()

    @contextlib.contextmanager
    def running(self) -> Generator[None]:
        attached = self.streamer.attached
        self.streamer.attach()
        try:
            with super().running():
                yield
        finally:
            if not attached:
                self.end()

    def statistics(self) -> dict:
        return {**self.streamer.statistics(), **(super().statistics() or {})}

    def tensors_held(self, extra: dict[str, list[Tensor]]) -> dict[str, list[Tensor]]:
        if self.optimizer is None:
            return extra
        held, extra = self.streamer.tensors_held(), super().tensors_held(extra)
        return {
            **extra,
            "weights": held["slots"] + held["host_weights"] + extra.get("weights", []),
            "gradients": held["host_gradients"],
            "activations": self._parking(),
            "buffers": held["expanded"] + held["updates"],
        }

    def host_tensors(self, buffers: Iterable[Tensor]) -> list[Tensor] | None:
        """If the device is the host itself: the tensors that would be on the host of a GPU; `None` if unknown."""
        if self.optimizer is None:
            return None
        held, masters = self.streamer.tensors_held(), [param.master for param in self.streamer.masters.values()]
        states = [value for master in masters for value in self.optimizer.base.state.get(master, {}).values()]
        states = [value for value in states if torch.is_tensor(value)]
        evaluated = [] if self.evaluated is None else self.evaluated.tensors_held()["host_weights"]
        on_host = held["host_weights"] + held["host_gradients"] + evaluated
        return on_host + list(buffers) + self._parking() + states

    def _parking(self) -> list[Tensor]:
        return [] if self.window.parking is None else self.window.parking.spare
