"""One training step on tensors without data, and what it holds at every moment."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from accelerate.utils import convert_outputs_to_fp32
from torch import nn
from torch.overrides import TorchFunctionMode

from hf_hybrid.plan.tracker import Held, Moment, StorageTracker
from hf_hybrid.streaming.loss import linear_cross_entropy
from hf_hybrid.streaming.low_bit import BLOCK, CHUNK, LEAST_QUANTIZED

Tensor = torch.Tensor

# Scratch of the 8-bit update in bytes per element of a chunk. bf16: fp32 copies of weights and gradient, random bits,
# what is rounded; fp32: a mask of codes.
_TRACED_ROWS = 1024  # of the chunked loss, two chunks
_UPDATE_SCRATCH = {torch.bfloat16: 13, torch.float32: 1}


@dataclass(frozen=True)
class StepOptions:
    """What of a training step is to be traced."""

    batch_size: int
    sequence_length: int
    autocast: bool = True  # to bf16
    activation_checkpointing: bool = False
    chunked_loss: bool = False
    optimizer_states: str = "exact"  # or "8bit": of AdamW
    accumulates: bool = False  # gradients of earlier micro-batches are there
    accelerator: str = "cuda"  # whose autocast rules hold; or "cpu"


@dataclass(frozen=True)
class StepTrace:
    """What a step held, by owner (its layers in order, then what is outside) and category."""

    layers: int
    moments: list[Moment]
    begin: Held
    after_forward: Held  # of the layers, before head and loss
    before_backward: Held  # of the layers, after head and loss
    after_backward: Held


class _AutocastOfCuda(TorchFunctionMode):
    """What autocast computes in fp32 on a GPU and in bf16 on a CPU: with fp32 inputs, or with fp32 results alone."""

    INPUTS = {
        F.layer_norm, F.group_norm, F.softplus, F.cross_entropy, F.nll_loss, F.normalize, torch.layer_norm,
        torch.group_norm, torch.pow, torch.rsqrt, torch.exp, torch.log, torch.norm, torch.reciprocal, torch.Tensor.pow,
        torch.Tensor.__pow__, torch.Tensor.rsqrt, torch.Tensor.exp, torch.Tensor.log, torch.Tensor.norm,
        torch.Tensor.reciprocal,
    }  # fmt: skip
    RESULTS = {
        F.softmax, F.log_softmax, torch.softmax, torch.log_softmax, torch.cumsum, torch.cumprod, torch.prod, torch.sum,
        torch.Tensor.softmax, torch.Tensor.log_softmax, torch.Tensor.cumsum, torch.Tensor.cumprod, torch.Tensor.prod,
        torch.Tensor.sum,
    }  # fmt: skip

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func in self.INPUTS and torch.is_autocast_enabled("cpu"):
            args = tuple(value.float() if _is_low(value) else value for value in args)
            kwargs = {name: value.float() if _is_low(value) else value for name, value in kwargs.items()}
        elif func in self.RESULTS and torch.is_autocast_enabled("cpu") and args and _is_low(args[0]):
            kwargs = {"dtype": torch.float32, **kwargs}
        return func(*args, **kwargs)


def _is_low(value: object) -> bool:
    return isinstance(value, Tensor) and value.dtype in (torch.bfloat16, torch.float16)


def autocast_rules(accelerator: str) -> contextlib.AbstractContextManager:
    """Autocast on the CPU does meanwhile as it does on the accelerator; enter it again where backward recomputes."""
    return _AutocastOfCuda() if accelerator == "cuda" else contextlib.nullcontext()


def enable_checkpointing(model: nn.Module, accelerator: str) -> None:
    """
    Activation checkpointing as `Trainer` switches it on.

    Raises:
        ValueError: If transformers cannot checkpoint the model.
    """
    options = {
        "use_reentrant": False,
        "preserve_rng_state": False,
        "context_fn": lambda: (contextlib.nullcontext(), autocast_rules(accelerator)),
    }
    try:
        if hasattr(model, "activation_checkpointing_enable"):
            model.activation_checkpointing_enable(activation_checkpointing_kwargs=options)
        else:  # transformers < 5.23
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)
    except ValueError as error:
        raise ValueError(f"`activation_checkpointing=True`: {error}") from None


def trace_step(model: nn.Module, layers: list[nn.Module], options: StepOptions) -> StepTrace:
    """
    Trace forward, backward, clipping and update as `Trainer` runs them; call it under `FakeTensorMode`.

    Args:
        model (`nn.Module`): In training mode, with fake parameters; maybe with adapters.
        layers (`list[nn.Module]`): Its decoder layers, in order.
        options (`StepOptions`): What is run.
    """
    inputs = _inputs(options)
    if options.accumulates:
        for parameter in model.parameters():
            parameter.grad = torch.empty_like(parameter) if parameter.requires_grad else None
    tracker = StorageTracker(len(layers) + 1)
    _hold_what_is_there(tracker, model, layers, inputs.values(), options.optimizer_states)
    marks = _Marks(tracker, layers)
    begin = tracker.now()
    handles = [*marks.install(), *_gradient_hooks(tracker, model, layers)]
    try:
        with tracker:
            tracker.record()
            _forward_and_backward(model, inputs, options, marks)
            after_backward = tracker.now()
            tracker.stage, tracker.where = "update", tracker.outside
            _update(tracker, model, options)
    finally:
        for handle in handles:
            handle.remove()
    return StepTrace(len(layers), tracker.moments, begin, *marks.between(after_backward), after_backward)


def _inputs(options: StepOptions) -> dict[str, Tensor]:
    shape = (options.batch_size, options.sequence_length)
    return {name: torch.empty(shape, dtype=torch.int64) for name in ("input_ids", "attention_mask", "labels")}


def _owners(model: nn.Module, layers: list[nn.Module]) -> Callable[[Tensor], int]:
    owner = {
        id(tensor): index for index, layer in enumerate(layers) for tensor in [*layer.parameters(), *layer.buffers()]
    }
    return lambda tensor: owner.get(id(tensor), len(layers))


def _hold_what_is_there(
    tracker: StorageTracker, model: nn.Module, layers: list[nn.Module], inputs: Iterable[Tensor], states: str
) -> None:
    owner = _owners(model, layers)
    for tensor in inputs:
        tracker.hold(tensor, "activations", tracker.outside)
    for parameter in model.parameters():
        tracker.hold(parameter, "weights", owner(parameter))
        if parameter.requires_grad:
            tracker.hold_bytes(state_bytes(parameter, states), "states", owner(parameter))
        if parameter.grad is not None:
            tracker.hold(parameter.grad, "gradients", owner(parameter))
    for buffer in model.buffers():
        tracker.hold(buffer, "buffers", owner(buffer))


def state_bytes(parameter: Tensor, states: str) -> int:
    """Bytes of AdamW's states of a parameter on its device, `"exact"` or `"8bit"`."""
    count = parameter.numel()
    if states == "exact":
        return 2 * count * parameter.element_size() + 4  # and the step
    return 2 * (count + 4 * math.ceil(count / BLOCK)) if count >= LEAST_QUANTIZED else 8 * count


class _Marks:
    """Tells the tracker which layer computes, and remembers what is held where the stages meet."""

    def __init__(self, tracker: StorageTracker, layers: list[nn.Module]):
        self.tracker, self.layers = tracker, layers
        self._after_forward: Held | None = None
        self._before_backward: Held | None = None

    def between(self, end: Held) -> tuple[Held, Held]:
        """What is held after the layers' forward and before their backward; `end` where there were no such layers."""
        return self._after_forward or end, self._before_backward or end

    def install(self) -> list:
        """Returns the handles of the hooks."""
        handles = []
        for index, layer in enumerate(self.layers):
            handles.append(layer.register_forward_pre_hook(self._entering(index), with_kwargs=True))
            handles.append(layer.register_forward_hook(self._leaving(index)))
        return handles

    def _entering(self, index: int):
        def hook(_, args, kwargs):
            if self.tracker.stage == "forward":
                if index == 0:
                    self._at_gradient(args[0] if args else kwargs.get("hidden_states"), self.tracker.outside)
                self.tracker.where = index

        return hook

    def _leaving(self, index: int):
        def hook(_, args, output):
            if self.tracker.stage == "forward":
                self._after_forward = self.tracker.now()
                self.tracker.where = self.tracker.outside
                self._at_gradient(output[0] if isinstance(output, tuple) else output, index)

        return hook

    def _at_gradient(self, tensor: Tensor | None, where: int) -> None:
        def hook(_):
            if self._before_backward is None:
                self._before_backward = self.tracker.now()
            self.tracker.where = where

        if isinstance(tensor, Tensor) and tensor.requires_grad:
            tensor.register_hook(hook)


def _gradient_hooks(tracker: StorageTracker, model: nn.Module, layers: list[nn.Module]) -> list:
    owner = _owners(model, layers)

    def hook(parameter: Tensor) -> None:
        tracker.move(parameter.grad, "gradients", owner(parameter))

    return [p.register_post_accumulate_grad_hook(hook) for p in model.parameters() if p.requires_grad]


def _forward_and_backward(model: nn.Module, inputs: dict[str, Tensor], options: StepOptions, marks: _Marks) -> None:
    with autocast_rules(options.accelerator):
        loss = _loss(model, inputs, options)
    marks.tracker.stage = "backward"
    loss.backward()


def _loss(model: nn.Module, inputs: dict[str, Tensor], options: StepOptions) -> Tensor:
    """As `Trainer.compute_loss`, with accelerate's autocast around the model; the output ends with this function."""
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=options.autocast):
        outputs = _run_chunked(model, inputs) if options.chunked_loss else _run(model, inputs)
    if options.autocast and not options.chunked_loss:
        outputs = convert_outputs_to_fp32(lambda: outputs)()
    return outputs["loss"]


def _run(model: nn.Module, inputs: dict[str, Tensor]):
    # Without the mask of ones, whose values nobody can look at here: attention is causal.
    return model(input_ids=inputs["input_ids"], labels=inputs["labels"])


def _run_chunked(model: nn.Module, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    head, seen = model.get_output_embeddings(), []

    def forward(hidden: Tensor) -> Tensor:
        seen.append(hidden)
        return hidden[..., :1]

    head.forward = forward
    try:
        model(input_ids=inputs["input_ids"])
    finally:
        del head.forward
    targets = F.pad(inputs["labels"], (0, 1), value=-100)[..., 1:].flatten()
    hidden = seen.pop().flatten(0, 1)
    if len(hidden) > _TRACED_ROWS:
        if torch.is_autocast_enabled("cpu"):
            hidden = hidden.to(torch.get_autocast_dtype("cpu"))
        hidden, targets = _FirstRows.apply(hidden, _TRACED_ROWS), targets[:_TRACED_ROWS]
    return {"loss": linear_cross_entropy(hidden, head.weight, targets, bias=head.bias)}


class _FirstRows(torch.autograd.Function):
    """Chunks are alike: a few are computed, and the gradient of all rows is held, as it would be."""

    @staticmethod
    def forward(ctx, hidden, rows):
        ctx.gradient = torch.zeros_like(hidden)
        return hidden[:rows]

    @staticmethod
    def backward(ctx, _):
        gradient, ctx.gradient = ctx.gradient, None
        return gradient, None


def _update(tracker: StorageTracker, model: nn.Module, options: StepOptions) -> None:
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    torch.nn.utils.clip_grad_norm_([p for p in trainable if p.grad is not None], 1.0)
    if options.optimizer_states == "8bit" and trainable:
        # The fused AdamW updates in place; this one works through chunks.
        scratch = max(min(p.numel(), CHUNK) * _UPDATE_SCRATCH.get(p.dtype, 1) for p in trainable)
        tracker.hold_bytes(scratch, "buffers", tracker.outside)
        tracker.record()
