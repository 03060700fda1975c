"""
`torch_compile` for flat rows: decoder layers are compiled one by one, for rows of any length.

accelerate compiles a model as a whole, hooks and all, and anew for each kind of batch. But all layers are alike, and
while windows are trees they get one shape: a flat row whose length varies. So the model runs as it is, and each layer
is compiled with dynamic dimensions. torch compiles the first one, and the others find its code. What would make it
compile again is kept away from it: layouts of trees (attention.py), an input without a gradient, and what runs once.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import torch
from accelerate.utils import is_compiled_module
from torch import Tensor, nn

from hf_hybrid.part import Part
from hf_hybrid.rows.exchange import Exchange
from hf_hybrid.run.run import Run
from hf_hybrid.run.trainer_view import TrainerView
from hf_hybrid.streaming.layers import decoder_layers


class CompiledLayers(Part):
    """Compiles the decoder layers of the models of a run, and not the models as a whole."""

    name = "compiled_layers"

    def __init__(self, trainer: TrainerView, rows: Exchange, reference: nn.Module | None):
        self.trainer, self.rows, self.reference = trainer, rows, reference
        self._undo = contextlib.ExitStack()

    def begin(self, run: Run) -> None:
        args = self.trainer.args
        wrapped = [run.model, *([] if self.reference is None else [self.reference])]
        models = [self.trainer.accelerator.unwrap_model(model, keep_torch_compile=False) for model in wrapped]
        if any(self.rows.facts_of(model).reason for model in models):
            return  # padded rows, compiled as accelerate does it
        # Layers share code, and by default it holds for others without a look at their hooks.
        self._undo.enter_context(torch._dynamo.config.patch(skip_nnmodule_hook_guards=False))
        wrappers: list[Any] = [model for model in wrapped if is_compiled_module(model)]
        for wrapper in wrappers:  # nothing has been compiled yet
            self._undo.callback(setattr, wrapper, "forward", wrapper.forward)
            wrapper.forward = wrapper._orig_mod.__call__
        for layers in map(decoder_layers, models):
            for layer in layers:
                layer.compile(dynamic=True, backend=args.torch_compile_backend, mode=args.torch_compile_mode)
                self._undo.callback(vars(layer).pop, "_compiled_call_impl", None)
            first: Any = layers[0]
            first._compiled_call_impl = functools.partial(_as_later_layers, first._compiled_call_impl)

    def clean_up(self) -> None:
        self._undo.close()


def _as_later_layers(layer: Callable[..., Any], hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Give the first layer an input with a gradient where all others have one, and only there."""
    if hidden_states.is_leaf:  # of frozen embeddings, or in a pass without gradients
        hidden_states.requires_grad_(torch.is_grad_enabled())
    return layer(hidden_states, *args, **kwargs)
