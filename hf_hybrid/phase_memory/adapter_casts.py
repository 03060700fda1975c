"""
Casts of LoRA adapters, and of the weights below them, that change nothing.

Inputs: PEFT casts the input of an adapter to the type of its weights, which is fp32. Under bf16 autocast the matrix
product casts it back at once. An input in bf16 comes back as it was, to the last bit, but the copy in fp32 is kept for
the backward pass. [`UncastInputs`] switches PEFT's cast off while a micro-batch computes. With dropout in between it
would not be the same, so such adapters keep their casts.

Weights: autocast rounds frozen fp32 weights to bf16 again and again. [`FrozenInBf16`] holds them rounded.
"""

from __future__ import annotations

import functools
from collections import Counter
from typing import Any

import torch
import torch.nn.functional as F

from hf_hybrid.machine import sharding_of
from hf_hybrid.optimizers import optimizer_name, steps_in_backward
from hf_hybrid.part import Part, Phase
from hf_hybrid.phase_memory.adapter_products import AdapterProducts, plain_lora_layers
from hf_hybrid.run.run import Run
from hf_hybrid.run.trainer_view import TrainerView, unknown_loss
from hf_hybrid.streaming.layers import decoder_layers


def cast_parts(trainer: TrainerView) -> list[Part]:
    """Return the parts that leave out casts under bf16 autocast, for a trainer of adapters."""
    args, model, parts = trainer.args, trainer.accelerator.unwrap_model(trainer.model), []
    inputs, options = layers_with_idle_casts(model), trainer.hybrid_args
    stays = not (trainer.memory.streams or sharding_of(args) or args.torch_compile or args.n_gpu > 1)
    # DDP reduces gradients where autograd leaves them, and some optimizers step there.
    alone = args.world_size == 1 and not steps_in_backward(optimizer_name(args))
    if options.share_rows != "off" and stays and alone and (plain := plain_lora_layers(model)):
        parts.append(AdapterProducts(plain, torch.bfloat16))
        inputs = [layer for layer in inputs if layer not in plain]
    if inputs:
        parts.append(UncastInputs(inputs))
    known = unknown_loss(trainer) is None or trainer.trains_preferences  # others may generate, without autocast
    if known and stays and not options.weight_precision:
        frozen, adapters = frozen_linear_layers(model)
        if frozen:
            parts.append(FrozenInBf16(frozen, adapters))
    return parts


class UncastInputs(Part):
    """Leaves out casts of the inputs of LoRA layers under bf16 autocast; see [`layers_with_idle_casts`]."""

    name = "uncast_inputs"

    def __init__(self, layers: list[Any]):
        self.layers = layers

    def before_forward(self, phase: Phase | None) -> None:
        for layer in self.layers:
            layer.cast_input_dtype_enabled = False

    def after_backward(self, phase: Phase | None) -> None:
        for layer in self.layers:
            layer.cast_input_dtype_enabled = True


class FrozenInBf16(Part):
    """
    Holds frozen weights of linear layers in bf16 while a training runs, where that is without loss.

    Under bf16 autocast a linear layer computes with its weights rounded to bf16. It rounds fp32 weights in each forward
    pass, and keeps the rounded ones beside them until the backward pass. Weights of most models on the Hub were saved
    in bf16, so that their fp32 copies have the same values: held in bf16 they take a third of the memory, and every
    product has the same bits. Weights that would be rounded stay as they are.

    Outside of autocast the layer computes in the precision of its input, as before. Before adapters are merged, and
    when the training is left, all weights are in fp32 again. See [`frozen_linear_layers`] for the arguments.
    """

    name = "frozen_in_bf16"

    def __init__(self, layers: list[torch.nn.Linear], adapters: list[Any]):
        self.layers, self.adapters = layers, adapters
        self.held: list[torch.nn.Linear] = []

    def begin(self, run: Run) -> None:
        for layer in self.layers:
            rounded = layer.weight.data.to(torch.bfloat16)
            if torch.equal(rounded.float(), layer.weight.data):
                layer.weight.data = rounded
                layer.forward = functools.partial(_linear, layer)
                self.held.append(layer)
        for adapter in self.adapters if self.held else ():
            adapter.merge = functools.partial(self._merge, adapter)

    def _merge(self, adapter: Any, *args: Any, **kwargs: Any) -> None:
        self.end()
        adapter.merge(*args, **kwargs)

    def end(self) -> None:
        for layer in self.held:
            layer.weight.data = layer.weight.data.float()
            vars(layer).pop("forward", None)
        for adapter in self.adapters if self.held else ():
            vars(adapter).pop("merge", None)
        self.held.clear()

    clean_up = end


def _linear(layer: torch.nn.Linear, input: torch.Tensor) -> torch.Tensor:
    weight = layer.weight if torch.is_autocast_enabled(input.device.type) else layer.weight.to(input.dtype)
    return F.linear(input, weight, layer.bias)


def frozen_linear_layers(model: torch.nn.Module) -> tuple[list[torch.nn.Linear], list[Any]]:
    """
    Return the frozen fp32 linear layers in the decoder layers of a model, and its LoRA layers; none where an adapter
    does more with the weights of its layer than multiply by them.
    """
    from peft.tuners.lora import Linear
    from peft.tuners.tuners_utils import BaseTunerLayer

    adapters = [module for module in model.modules() if isinstance(module, BaseTunerLayer)]
    if any(type(adapter) is not Linear or adapter.lora_variant for adapter in adapters):
        return [], []
    inside = [module for layer in decoder_layers(model) for module in layer.modules()]
    uses = Counter(id(p) for m in model.modules() for p in m.parameters(recurse=False))  # more than one: shared
    linear = (module for module in inside if type(module) is torch.nn.Linear and "forward" not in vars(module))
    owned = ((layer, layer.weight) for layer in linear if uses[id(layer.weight)] == 1)
    return [layer for layer, w in owned if w.dtype == torch.float32 and not w.requires_grad], adapters


def layers_with_idle_casts(model: torch.nn.Module) -> list[Any]:
    """Return the LoRA layers of a model between whose cast and matrix product nothing happens."""
    from peft.tuners.lora import Linear

    return [
        module
        for module in model.modules()
        if type(module) is Linear
        and getattr(module, "cast_input_dtype_enabled", False)
        and not module.lora_variant
        and all(isinstance(dropout, torch.nn.Identity) for dropout in module.lora_dropout.values())
    ]
