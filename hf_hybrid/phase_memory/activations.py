"""
Activation checkpointing by phase, with the inputs of checkpointed layers on the host.

A forward pass saves every intermediate tensor that some derivative reads: for a decoder layer some 30 times the size of
its input. *Checkpointing* (Chen et al., 2016, arXiv 1604.06174) saves the input alone and computes the layer a second
time when the backward pass reaches it, for about a third more computation. transformers does it well, so the package
adds three things:

- **No more than needed.** A layer that need not be recomputed saves its share of the third. The plan (plan/) says how
  many layers must be, and [`ActivationCheckpointing`] checkpoints the first layers, as many as that. When they are
  recomputed, the activations of all others are freed already. So the peak is at the loss, where each checkpointed layer
  holds only its input. If memory runs out nevertheless, it checkpoints more.
- **By phase.** Predict has no backward pass, and a run may have memory to spare in some phases.
  [`ActivationCheckpointing`] switches transformers' checkpointing as the phases change.
- **Inputs on the host.** What checkpointing still saves is one input per layer, which for long sequences is most of
  what is left. They are needed in reverse order at times that are known, so each can leave while the next layer
  computes and come back while the layer above is differentiated ([`BoundaryOffload`]). The input saved last is needed
  first and stays.

How the inputs are caught: `torch.autograd.graph.saved_tensors_hooks` around the call of a checkpointed layer sees what
checkpointing itself saves, which is the input. What the layer's own operations save, now or when it is recomputed, goes
to checkpointing's inner hooks. Autograd owns the object that is saved in place of the input, so its lifetime follows
the graph's: if a graph is dropped unused, the host buffer is free again.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from hf_hybrid.compat import switch_checkpointing_on
from hf_hybrid.part import Part, Phase
from hf_hybrid.run.run import Run
from hf_hybrid.streaming.layers import decoder_layers
from hf_hybrid.streaming.transfers import HostBuffers, Transfers

logger = logging.getLogger(__name__)

_SETTING = ("gradient_checkpointing", "_gradient_checkpointing_func")


class ActivationCheckpointing(Part):
    """
    Checkpoints the activations of layers in the given phases, and in no others, by transformers' own means.

    During a run this part decides, also where `TrainingArguments.activation_checkpointing` is set; after it the model
    has its earlier setting again.

    Args:
        phases (`Iterable[str]`, *optional*): Phases with checkpointing; not Predict, which has no backward pass.
        offload (`bool`, *optional*): Also keep the inputs of the layers on the host, see [`BoundaryOffload`].
        min_bytes (`int`, *optional*): Smallest layer input that is worth the way to the host.
        layers (`int`, *optional*): How many layers are checkpointed, from the first on, and more after an out-of-memory
            error; all of them where transformers cannot checkpoint some without the others. `None`: all in any case.

    Raises:
        ValueError: If `phases` names anything else; when a run begins, if transformers cannot checkpoint the model.
    """

    name = "activation_checkpointing"

    def __init__(
        self,
        phases: Iterable[str] = ("warmup", "full", "correct"),
        offload: bool = False,
        min_bytes: int = 1 << 20,
        layers: int | None = None,
    ):
        real = [phase.value for phase in Phase if phase is not Phase.PREDICT]
        phases = (phases,) if isinstance(phases, str) else tuple(phases)
        if wrong := [phase for phase in phases if phase not in real]:
            raise ValueError(
                f"`{wrong[0]}` is no phase of `checkpoint_phases`. Choose from {', '.join(real)}; Predict has no "
                "backward pass."
            )
        self.phases = frozenset(Phase(phase) for phase in phases)
        self.offload, self.min_bytes, self.layers = offload, min_bytes, layers
        self._of: list[nn.Module] = []  # the layers that can be checkpointed one without the other
        self._before: dict[nn.Module, dict[str, Any]] = {}  # settings of all modules that have the switch
        self._differentiable_inputs: list[PreTrainedModel] = []
        self._boundaries: BoundaryOffload | None = None
        self._on = False

    def begin(self, run: Run) -> None:
        wrapped: Any = run.model
        self._boundaries = BoundaryOffload(wrapped, min_bytes=self.min_bytes) if self.offload else None
        for model in _checkpointable(wrapped):
            for module in _modules_with_switch(model):
                self._before[module] = {name: vars(module)[name] for name in _SETTING if name in vars(module)}
            had_input_gradients = bool(getattr(model, "_require_grads_hooks", None))
            model.disable_input_require_grads()
            switch_checkpointing_on(model, {"use_reentrant": False})
            # Enabling makes the embeddings' output require gradients, which only reentrant checkpointing needs: where
            # lower layers are frozen it would send the backward pass all the way down for nothing.
            model.disable_input_require_grads()
            if had_input_gradients and self.layers is None:
                model.enable_input_require_grads()
            elif had_input_gradients:
                self._differentiable_inputs.append(model)
        layers = decoder_layers(wrapped)
        self._of = layers if all(isinstance(layer, GradientCheckpointingLayer) for layer in layers) else []
        self._switch(True)
        if self.layers is not None:
            logger.info("Activation checkpointing: %s.", self._in_words())
        if self._boundaries is not None:
            self._boundaries.__enter__()
        self._follow(Phase.WARMUP)

    def on_phase_change(self, old: Phase, new: Phase) -> None:
        self._follow(new)

    def before_forward(self, phase: Phase | None) -> None:
        self._follow(phase)  # a run without warmup, or a resumed one, begins in a phase that nothing announced

    def _follow(self, phase: Phase | None) -> None:
        if phase is not None and (phase in self.phases) is not self._on:  # a run without phases stays as it began
            self._switch(not self._on)

    def _switch(self, on: bool) -> None:
        # The public switch adds hooks to the embeddings at each call and never removes them.
        left_out = set() if self.layers is None else set(self._of[self.layers :] if self.layers else self._before)
        for module in self._before:
            vars(module)["gradient_checkpointing"] = on and module not in left_out
        self._on = on

    def _in_words(self) -> str:
        if self.layers and not self._of:
            return "all layers are recomputed in backward"
        return f"{min(self.layers or 0, len(self._of))} of {len(self._of) or 'the'} layers are recomputed in backward"

    def spare_memory(self) -> str | None:
        most = len(self._of) or 1
        if self.layers is None or self.layers >= most:
            return None
        self.layers = min(max(2 * self.layers, -(-most // 4)), most)
        self._switch(self._on)
        return self._in_words()

    def summary(self) -> dict[str, Any]:
        return {} if self.layers is None else {"recomputed_layers": min(self.layers, len(self._of) or self.layers)}

    def state_dict(self) -> dict[str, Any]:
        return {} if self.layers is None else {"layers": self.layers}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Checkpoint no fewer layers than what fitted before."""
        if self.layers is not None and state["layers"] > self.layers:
            self.layers = state["layers"]
            self._switch(self._on)

    def end(self) -> None:
        if self._boundaries is not None:
            self._boundaries.__exit__()
            self._boundaries = None  # with its page-locked memory
        for module, setting in self._before.items():
            for name in _SETTING:
                vars(module).pop(name, None)
            vars(module).update(setting)
        self._before.clear()
        for model in self._differentiable_inputs:
            model.enable_input_require_grads()
        self._differentiable_inputs.clear()

    clean_up = end


def _topmost(module: nn.Module, kind: type) -> list:
    """Return the modules of a class that are not part of another module of this class."""
    if isinstance(module, kind):
        return [module]
    return list(dict.fromkeys(inner for child in module.children() for inner in _topmost(child, kind)))


def _modules_with_switch(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if hasattr(module, "gradient_checkpointing")]


def _checkpointable(model: nn.Module) -> list[PreTrainedModel]:
    """Return the transformers models inside wrappers (peft, DistributedDataParallel, ...)."""
    models = _topmost(model, PreTrainedModel)
    for part in models or [model]:
        supported = isinstance(part, PreTrainedModel) and part.supports_gradient_checkpointing
        if not (supported and _modules_with_switch(part)):
            raise ValueError(
                f"`{type(part).__name__}` does not support activation checkpointing. Remove `ActivationCheckpointing` "
                "from `parts`."
            )
    return models


class BoundaryOffload:
    """
    Context manager that keeps the inputs of checkpointed layers on the host until the backward pass needs them.

    Gradients are the same to the bit. Only the forward pass need be inside. Only the first positional argument of a
    layer is moved, if it is a contiguous floating-point tensor of `min_bytes` or more and no parameter or view of one.
    The rest stays: what a layer recomputes lives too short, loss and logits are needed at once, masks and encoder
    states are shared by all layers. On a machine without accelerator the same code copies within host memory.

    Raises:
        ValueError: If the model's layers are not of the kind that transformers checkpoints one by one, or its device
            cannot copy beside computing.
    """

    def __init__(self, model: nn.Module, *, min_bytes: int = 1 << 20):
        self.model, self.min_bytes = model, min_bytes
        self.layers = _topmost(model, GradientCheckpointingLayer)
        if not self.layers:
            name = type(model).__name__
            raise ValueError(
                f"`offload=True` needs `GradientCheckpointingLayer`s, and `{name}` has none. Leave out `offload`."
            )
        for kind in {parameter.device.type for parameter in model.parameters()} - {"meta"}:
            if not hasattr(torch.get_device_module(kind), "Stream"):
                raise ValueError(f"`offload=True` needs a device with streams, not `{kind}`. Leave out `offload`.")
        self._ways: dict[torch.device, tuple[Transfers, HostBuffers]] = {}
        self._own: set[int] = set()
        self._replaced: list[tuple[nn.Module, Callable]] = []
        self._newest: Callable[[], _Boundary | None] = lambda: None

    def __enter__(self) -> BoundaryOffload:
        self._own = {t.untyped_storage().data_ptr() for t in (*self.model.parameters(), *self.model.buffers())}
        for layer in self.layers:
            original = getattr(layer, "_gradient_checkpointing_func", None)
            if original is not None:
                vars(layer)["_gradient_checkpointing_func"] = self._around(original)
                self._replaced.append((layer, original))
        return self

    def __exit__(self, *error) -> None:
        for layer, original in self._replaced:
            vars(layer)["_gradient_checkpointing_func"] = original
        self._replaced.clear()

    def _around(self, checkpoint: Callable) -> Callable:
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
        if type(value) is not Tensor or not (value.is_floating_point() and value.is_contiguous()):
            return False
        return value.nbytes >= max(self.min_bytes, 1) and value.untyped_storage().data_ptr() not in self._own

    def _park(self, tensor: Tensor) -> _Boundary:
        newest = self._newest()
        if newest is not None:
            newest.release()  # it has been superseded: its copy on the device may go
        if tensor.device not in self._ways:
            transfers = Transfers(tensor.device)
            self._ways[tensor.device] = transfers, HostBuffers(pin=transfers.beside)
        parked = _Boundary(tensor.detach(), *self._ways[tensor.device], previous=self._newest)
        self._newest = weakref.ref(parked)
        return parked

    def _fetch(self, packed: _Boundary | Tensor) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        tensor = packed.bring_back()
        previous = packed.previous()
        if previous is not None and previous.on_device is None:
            previous.start_back()
        return tensor


class _Boundary:
    """
    One layer input that autograd saved. It is on the host, and on the device before it leaves and after it returns.

    Autograd holds it and drops it; that frees the host buffer, also where a graph is never used.
    """

    on_device: Tensor | None = None

    def __init__(self, tensor: Tensor, transfers: Transfers, buffers: HostBuffers, previous: Callable):
        self.transfers, self.buffers, self.previous = transfers, buffers, previous
        self.host = buffers.take(tensor)
        self.copied = transfers.send(tensor, self.host, keep=False)
        self.on_device, self.version = tensor, tensor._version

    def start_back(self) -> Tensor:
        coming = self.transfers.fetch(self.host)  # it has arrived there: computing waited for it when it was released
        self.on_device, self.copied, self.version = coming.tensor, coming.arrived, coming.tensor._version
        return coming.tensor

    def bring_back(self) -> Tensor:
        """Return the tensor on the device, and release it here."""
        tensor = self.start_back() if self.on_device is None else self.on_device
        self.release()
        return tensor

    def release(self) -> None:
        """Release the copy on the device. Its memory may be reused at once, so computation waits for the copy."""
        tensor, self.on_device = self.on_device, None
        if tensor is None:
            return
        self.transfers.wait(self.copied)
        if tensor._version != self.version:  # autograd's check, for a tensor that it does not hold itself
            raise RuntimeError(
                f"The input of a checkpointed layer, `{tuple(tensor.shape)}`, was modified in place after it was "
                "saved. Let the layer make a new tensor, or train without checkpointing."
            )

    def __del__(self):
        if self.on_device is not None:
            self.transfers.wait(self.copied)
        if hasattr(self, "host"):  # else there was no memory for it
            self.buffers.give_back(self.host)
