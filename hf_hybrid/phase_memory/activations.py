"""Activations that the backward pass needs: recomputed phase by phase, layer inputs on the host, and measured."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from hf_hybrid.phases import Phase, PhasePlugin, PluginContext

_SETTING = ("gradient_checkpointing", "_gradient_checkpointing_func")


class ActivationCheckpointing(PhasePlugin):
    """
    Activation checkpointing of every layer in the phases that are named, none in the others.

    It is transformers' own (non-reentrant), switched as the run goes. Layers left out would keep everything: every
    second layer saves less than half, so that is not offered. During a run the plugin decides, also where
    `TrainingArguments.activation_checkpointing` is set; after it the model has its setting from before. What a run
    that ended in an exception left behind is put right when the next one begins.

    Args:
        phases (`Iterable[str]`, *optional*): Phases with checkpointing; not Predict, which has no backward pass.
        offload (`bool`, *optional*): Also keep the inputs of the layers on the host, see [`BoundaryOffload`].
        min_bytes (`int`, *optional*): Smallest layer input that is worth the way to the host.

    Raises:
        ValueError: If `phases` names anything else; when a run begins, if transformers cannot checkpoint the model.
    """

    def __init__(
        self, phases: Iterable[str] = ("warmup", "full", "correct"), offload: bool = False, min_bytes: int = 1 << 20
    ):
        real = [phase.value for phase in Phase if phase is not Phase.PREDICT]
        phases = (phases,) if isinstance(phases, str) else tuple(phases)
        wrong = [phase for phase in phases if phase not in real]
        if wrong:
            raise ValueError(f"`phases` holds `{wrong[0]}`, which has no backward pass. Choose from `{real}`.")
        self.phases = frozenset(Phase(phase) for phase in phases)
        self.offload, self.min_bytes = offload, min_bytes
        self.stats = OffloadStats()  # of the last run
        self._before: list[tuple[nn.Module, dict[str, Any]]] = []
        self._boundaries: BoundaryOffload | None = None
        self._on = False

    def on_train_begin(self, context: PluginContext) -> None:
        self.on_train_end()  # of a run that ended in an exception
        boundaries = BoundaryOffload(context.model, min_bytes=self.min_bytes) if self.offload else None
        for model in _checkpointable(context.model):
            for module in _switches(model):
                self._before.append((module, {name: vars(module)[name] for name in _SETTING if name in vars(module)}))
            _enable(model)
        self._on = True
        if boundaries is not None:
            self._boundaries, self.stats = boundaries.__enter__(), boundaries.stats
        self._follow(Phase.WARMUP)

    def on_phase_change(self, old: Phase, new: Phase) -> None:
        self._follow(new)

    def before_forward(self, phase: Phase) -> None:
        self._follow(phase)  # a run without warmup, or a resumed one, begins in a phase that nothing announced

    def _follow(self, phase: Phase) -> None:
        on = phase in self.phases
        if on is not self._on:
            # Not the public switch again: each call of it adds hooks to the embeddings that are never taken away.
            for module, _ in self._before:
                module.gradient_checkpointing = on
            self._on = on

    def on_train_end(self) -> None:
        if self._boundaries is not None:
            self._boundaries.__exit__()
            self._boundaries = None
        for module, setting in self._before:
            for name in _SETTING:
                vars(module).pop(name, None)
            vars(module).update(setting)
        self._before.clear()


def _topmost(model: nn.Module, kind: type) -> list:
    """Modules of a kind that are not part of another one of it."""
    found: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        if isinstance(module, kind) and not any(name.startswith(above and f"{above}.") for above in found):
            found[name] = module
    return list(found.values())


def _switches(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if hasattr(module, "gradient_checkpointing")]


def _checkpointable(model: nn.Module) -> list[PreTrainedModel]:
    """The transformers models in whatever wraps them (peft, DistributedDataParallel, ...)."""
    models = _topmost(model, PreTrainedModel)
    for part in models or [model]:
        if not (isinstance(part, PreTrainedModel) and part.supports_gradient_checkpointing and _switches(part)):
            raise ValueError(
                f"`{type(part).__name__}` does not support activation checkpointing. Remove `ActivationCheckpointing` "
                "from `plugins`."
            )
    return models


def _enable(model: PreTrainedModel) -> None:
    options = {"use_reentrant": False}
    had_input_gradients = bool(getattr(model, "_require_grads_hooks", None))
    model.disable_input_require_grads()
    if hasattr(model, "activation_checkpointing_enable"):
        model.activation_checkpointing_enable(activation_checkpointing_kwargs=options)
    else:  # transformers < 5.23
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)
    # Enabling makes the embeddings' output require gradients, which only reentrant checkpointing needs: where lower
    # layers are frozen it would send the backward pass all the way down for nothing.
    model.disable_input_require_grads()
    if had_input_gradients:
        model.enable_input_require_grads()


@dataclass
class OffloadStats:
    """What a [`BoundaryOffload`] did so far. `waits`: layer inputs whose copy back was not started ahead of time."""

    tensors: int = 0
    bytes_offloaded: int = 0
    peak_host_bytes: int = 0
    waits: int = 0


class BoundaryOffload:
    """
    Context manager that keeps the inputs of checkpointed layers, all that checkpointing still saves of them, on the
    host until the backward pass needs them. Gradients are the same to the bit. Only the forward pass need be inside.

    On an accelerator, copies run on a stream of their own, through pinned buffers that are used again and again: out
    while the layer computes, back while the layer above is in its backward pass. The newest input stays where it is,
    as it is needed first. On a machine without accelerator the same code copies within host memory.

    Only the first positional argument of a layer is moved, if it is a contiguous floating-point tensor of `min_bytes`
    or more and no parameter or view of one. The rest stays: what a layer recomputes lives too short, loss and logits
    are needed at once, masks and encoder states are shared by all layers.

    Raises:
        ValueError: If the model's layers are not of the kind that transformers checkpoints one by one, or its device
            cannot copy beside computing.
    """

    def __init__(self, model: nn.Module, *, min_bytes: int = 1 << 20):
        self.model, self.min_bytes = model, min_bytes
        self.layers = _topmost(model, GradientCheckpointingLayer)
        if not self.layers:
            name = type(model).__name__
            raise ValueError(f"`offload=True` needs `GradientCheckpointingLayer`s and `{name}` has none. Leave it out.")
        for kind in {parameter.device.type for parameter in model.parameters()} - {"meta"}:
            if not hasattr(torch.get_device_module(kind), "Stream"):
                raise ValueError(f"`offload=True` needs a device with streams, not `{kind}`. Leave it out.")
        self.stats = OffloadStats()
        self._lanes: dict[torch.device, _Lane] = {}
        self._own: set[int] = set()
        self._replaced: list[tuple[nn.Module, Callable]] = []
        self._newest: Callable[[], _Parked | None] = lambda: None

    def __enter__(self) -> BoundaryOffload:
        self._own = {t.untyped_storage().data_ptr() for t in (*self.model.parameters(), *self.model.buffers())}
        for layer in self.layers:
            original = getattr(layer, "_gradient_checkpointing_func", None)
            if original is not None:
                layer._gradient_checkpointing_func = self._around(original)
                self._replaced.append((layer, original))
        return self

    def __exit__(self, *error) -> None:
        for layer, original in self._replaced:
            layer._gradient_checkpointing_func = original
        self._replaced.clear()

    def _around(self, checkpoint: Callable) -> Callable:
        # Hooks around the call see what checkpointing saves itself, the inputs. What the layer saves, now and when it
        # is recomputed, goes to checkpointing's own hooks: the innermost win.
        def checkpoint_and_offload(function, *args, **kwargs):
            if not (args and self._is_worth_moving(args[0])):
                return checkpoint(function, *args, **kwargs)
            boundary = args[0].data_ptr()

            def pack(tensor):
                return self._park(tensor) if tensor.data_ptr() == boundary and tensor.is_contiguous() else tensor

            with torch.autograd.graph.saved_tensors_hooks(pack, self._fetch):
                return checkpoint(function, *args, **kwargs)

        return checkpoint_and_offload

    def _is_worth_moving(self, value: Any) -> bool:
        if type(value) is not torch.Tensor or not (value.is_floating_point() and value.is_contiguous()):
            return False
        return value.nbytes >= max(self.min_bytes, 1) and value.untyped_storage().data_ptr() not in self._own

    def _park(self, tensor: torch.Tensor) -> _Parked:
        newest = self._newest()
        if newest is not None:
            newest.take()
        if tensor.device not in self._lanes:
            self._lanes[tensor.device] = _Lane(tensor.device, self.stats)
        lane = self._lanes[tensor.device]
        parked = _Parked(tensor.detach(), lane, lane.lend(tensor.nbytes), previous=self._newest)
        self._newest = weakref.ref(parked)
        return parked

    def _fetch(self, packed: _Parked | torch.Tensor) -> torch.Tensor:
        if isinstance(packed, torch.Tensor):
            return packed
        if packed.on_device is None:
            self.stats.waits += 1
            packed.start_back()
        tensor = packed.take()
        previous = packed.previous()
        if previous is not None and previous.on_device is None:
            previous.start_back()
        return tensor


class _Parked:
    """
    One tensor that autograd saved: on the host, and on the device before it has left or once it is coming back.
    Autograd holds it and drops it; that frees the host buffer, also where a graph is never used.
    """

    on_device: torch.Tensor | None = None

    def __init__(self, tensor: torch.Tensor, lane: _Lane, buffer: torch.Tensor, previous: Callable):
        self.lane, self.buffer, self.previous = lane, buffer, previous
        self.host = buffer[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        self.copied = lane.copy(self.host, tensor)
        self.on_device, self.version = tensor, tensor._version

    def start_back(self) -> None:
        tensor = torch.empty(self.host.shape, dtype=self.host.dtype, device=self.lane.device)
        self.copied = self.lane.copy(tensor, self.host)
        self.on_device, self.version = tensor, tensor._version

    def take(self) -> torch.Tensor | None:
        """Give up what is on the device. Its memory may be used anew at once, so computing waits for the copy."""
        tensor, self.on_device = self.on_device, None
        if tensor is not None:
            self.lane.wait(self.copied)
            if tensor._version != self.version:  # autograd's check, for a tensor that it does not hold itself
                raise RuntimeError(
                    f"The input of a checkpointed layer, `{tuple(tensor.shape)}`, was modified in place after it was "
                    "saved. Let the layer make a new tensor, or train without checkpointing."
                )
        return tensor

    def __del__(self):
        if self.on_device is not None:
            self.lane.wait(self.copied)
        self.lane.free.append(self.buffer)


class _Lane:
    """
    The way from one device to the host and back: host buffers, and a stream. There is one for both directions, so a
    buffer can be written again once the copy out of it has been started.
    """

    def __init__(self, device: torch.device, stats: OffloadStats):
        self.device, self.stats = device, stats
        self.module = torch.get_device_module(device)
        self.stream = self.module.Stream() if device.type == "cpu" else self.module.Stream(device=device)
        self.free: list[torch.Tensor] = []
        self.host_bytes = 0

    def copy(self, target: torch.Tensor, source: torch.Tensor):
        """Start a copy, after all that computing was given so far, and return the event of its end."""
        self.stream.wait_stream(self.module.current_stream(self.device))
        with self.module.stream(self.stream):
            target.copy_(source, non_blocking=True)
        return self.stream.record_event()

    def wait(self, event) -> None:
        """Let computing wait, not this process."""
        self.module.current_stream(self.device).wait_event(event)

    def lend(self, size: int) -> torch.Tensor:
        self.stats.tensors += 1
        self.stats.bytes_offloaded += size
        for index in reversed(range(len(self.free))):
            if self.free[index].nbytes >= size:
                return self.free.pop(index)
        if self.free:  # all are too small: sequences grow longer, and one makes room
            self.host_bytes -= self.free.pop().nbytes
        self.host_bytes += size
        self.stats.peak_host_bytes = max(self.stats.peak_host_bytes, self.host_bytes)
        return torch.empty(size, dtype=torch.uint8, pin_memory=self.device.type != "cpu")


def saved_for_backward(model: nn.Module, forward: Callable[[], Any]) -> int:
    """
    Bytes that the forward pass made and the backward pass still needs.

    Counted are storages created while `forward` ran that live on when only the autograd graph of its result is left:
    what operations saved, what checkpointing keeps (also beside autograd, such as keyword arguments of a layer), and
    new copies on the host. Not counted are parameters and buffers, what existed before (the batch), the result itself
    where nothing needs it, and states of random generators. Not for compiled models.

    `forward` runs a forward pass of `model` and returns a tensor, a container of tensors, or a transformers output.
    """
    with _Created() as created:
        graph = [leaf.grad_fn for leaf in tree_leaves(forward()) if isinstance(leaf, torch.Tensor)]
    gc.collect(1)  # what hangs in young reference cycles is not needed; a full collection takes too long
    own = _storages((*model.parameters(), *model.buffers()))
    alive = (reference() for reference in created.storages.values())
    total = sum(storage.nbytes() for storage in alive if storage is not None and id(storage) not in own)
    del graph  # not before everything is counted
    return total


class _Created(TorchDispatchMode):
    """Remembers the storages that operations create, without keeping them alive."""

    def __init__(self):
        super().__init__()
        self.storages: dict[int, weakref.ref] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        given = _storages((args, kwargs))
        result = func(*args, **(kwargs or {}))
        for key, storage in _storages(result).items():
            if key not in given:
                self.storages[key] = weakref.ref(storage)
        return result


def _storages(values) -> dict[int, torch.UntypedStorage]:
    found = (leaf.untyped_storage() for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor))
    return {id(storage): storage for storage in found}
