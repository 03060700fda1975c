"""
`torch_compile` for flat rows: decoder layers are compiled one by one, for rows of any length.

accelerate compiles a model as a whole, hooks and all, and anew for each kind of batch. But all layers are alike, and
while windows are trees they get one shape: a flat row whose length varies. So the model runs as it is, and each layer
is compiled with dynamic dimensions. torch compiles the first one, and the others find its code. What would make it
compile again is kept away from it: layouts of trees (attention.py), an input without a gradient, and what runs once.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from accelerate.utils import is_compiled_module
from torch import Tensor, nn

from hf_hybrid.part import Part
from hf_hybrid.rows.sharing import SharedRows
from hf_hybrid.run.run import Run
from hf_hybrid.run.trainer_view import TrainerView
from hf_hybrid.streaming.layers import base_model, decoder_layers


class CompiledLayers(Part):
    """Compiles the decoder layers of the models of a run, and not the models as a whole."""

    name = "compiled_layers"

    def __init__(self, trainer: TrainerView, rows: SharedRows):
        self.trainer, self.rows, self._undo = trainer, rows, contextlib.ExitStack()

    def begin(self, run: Run) -> None:
        args = self.trainer.args
        models = [self.trainer.accelerator.unwrap_model(run.model, keep_torch_compile=False)]
        models += [] if getattr(self.trainer, "ref_model", None) is None else [self.trainer.ref_model]
        if any(self.rows.facts_of(model).reason for model in models):
            return  # padded rows, compiled as accelerate does it
        wrapper: Any = run.model
        if is_compiled_module(wrapper):  # lazily: nothing has been compiled
            self._undo.callback(setattr, wrapper, "forward", wrapper.forward)
            wrapper.forward = wrapper._orig_mod.__call__
        for model in models:
            hook = base_model(model).get_input_embeddings().register_forward_hook(_with_gradient)
            self._undo.callback(hook.remove)
            for layer in decoder_layers(model):
                layer.compile(dynamic=True, backend=args.torch_compile_backend, mode=args.torch_compile_mode)
                self._undo.callback(vars(layer).pop, "_compiled_call_impl", None)

    def clean_up(self) -> None:
        self._undo.close()


def _with_gradient(embeddings: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
    """Give the first layer an input with a gradient, as all others have."""
    if torch.is_grad_enabled() and not output.requires_grad:
        output.requires_grad_()
