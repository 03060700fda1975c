"""
Find the parts of a model that can be streamed: its decoder layers, its embeddings and its head.

No architecture is named. Decoder layers are modules in an `nn.ModuleList` that are called through their `forward`; a
model may hold several such lists (experts inside a layer, heads beside the layers), and the outermost one with the most
parameters is the list of its layers; of a model that names its decoder, the one in there, though its image encoder may
be larger. Embeddings and head are what the model itself returns as such.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from hf_hybrid.optimizers import ask, text_config


class NoLayerListError(ValueError):
    """The model has no list of decoder layers."""


def find_layers(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """
    Return the decoder layers with their dotted names, from the outermost `ModuleList` with the most parameters.

    Raises:
        NoLayerListError: If no list can be streamed. The message says what was expected.
    """
    lists: list[tuple[str, nn.ModuleList]] = []
    for name, module in model.named_modules():
        inside = any(name.startswith(f"{outer}.") for outer, _ in lists)
        if isinstance(module, nn.ModuleList) and len(module) > 1 and not inside:
            if all(type(layer).forward is not nn.Module.forward for layer in module):
                lists.append((name, module))
    sizes = {name: sum(p.numel() for p in module.parameters()) for name, module in lists}
    if not lists or max(sizes.values()) == 0:
        raise NoLayerListError(
            f"`memory` cannot stream `{type(model).__name__}`: looked for an `nn.ModuleList` of at least two decoder "
            "layers with parameters (as `model.layers` or `transformer.h`) and found none. Train it with `memory=off`."
        )
    inside = {*decoder.modules()} if (decoder := ask(model, "get_decoder")) is not None else ()
    name, layers = max(lists, key=lambda item: (item[1] in inside, sizes[item[0]]))
    if any(hasattr(layer, "backward_pass") for layer in layers):
        raise NoLayerListError(
            f"`memory` cannot stream `{type(model).__name__}`: looked for decoder layers that are used through their "
            f"`forward` alone, and `{name}` holds reversible ones (`backward_pass`). Train it with `memory=off`."
        )
    return [(f"{name}.{index}", layer) for index, layer in enumerate(layers)]


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    """Return the layers that [`find_layers`] finds, or none."""
    try:
        return [layer for _, layer in find_layers(model)]
    except NoLayerListError:
        return []


def layers_on_host(
    layers: list[tuple[str, nn.Module]], device_map: Mapping[str, object]
) -> list[tuple[str, nn.Module]]:
    """
    Return the layers that an accelerate device map keeps on `cpu` or `disk`. The longest matching name decides.

    Raises:
        ValueError: If the map says nothing about a layer.
    """
    on_host = []
    for name, layer in layers:
        key = name
        while key and key not in device_map:
            key = key.rpartition(".")[0]
        if key not in device_map:
            raise ValueError(
                f"`device_map` says nothing about `{name}`. Add it, one of its parents, or an entry `''` for "
                "everything else."
            )
        if str(device_map[key]) in ("cpu", "disk"):
            on_host.append((name, layer))
    return on_host


def embeddings_and_head(model: nn.Module) -> list[tuple[str, list[nn.Module]]]:
    """
    Return the input embeddings and the output head as units, or as one unit if they share their weight.

    Only modules whose parameters belong to no other module count. The list is empty if the model does not name them.
    """
    questions = {"embeddings": "get_input_embeddings", "head": "get_output_embeddings"}
    modules = {name: module for name, question in questions.items() if (module := ask(model, question)) is not None}
    parameters = {name: {id(p) for p in module.parameters()} for name, module in modules.items()}
    if len(modules) == 2 and parameters["embeddings"] & parameters["head"]:
        return [("embeddings", list(modules.values()))]
    return [(name, [module]) for name, module in modules.items() if parameters[name]]


def rounded_by_autocast(model: nn.Module) -> set[int]:
    """Ids of fp32 parameters that bf16 autocast always rounds: of linear layers, unless others read them too."""
    readers: list[nn.Module] = [m for m in model.modules() if isinstance(m, nn.Embedding)]
    readers += [base for m in model.modules() if (base := _base_that_is_read(m)) is not None]
    read = {id(p) for m in readers for p in m.parameters()}
    linear = {id(p) for m in model.modules() if isinstance(m, nn.Linear) for p in m.parameters(recurse=False)}
    return {id(p) for p in model.parameters() if p.dtype == torch.float32 and id(p) in linear - read}


def _base_that_is_read(adapter: nn.Module) -> nn.Module | None:
    """Return the layer whose weight an adapter reads itself: DoRA takes its norms, SHiRA adds to it."""
    calls = any(hasattr(adapter, name) for name in ("lora_A", "ia3_l")) and not getattr(adapter, "lora_variant", None)
    return None if calls else getattr(adapter, "base_layer", None)


def base_model(model: nn.Module) -> nn.Module:
    """Return the model inside a wrapper of adapters, or the model itself."""
    get_base = getattr(model, "get_base_model", None)
    return model if get_base is None else get_base()


def map_with_host_layers(model: nn.Module) -> dict | None:
    """Return the device map that a model was loaded with, if it keeps layers on the host."""
    device_map = getattr(model, "hf_device_map", None)
    return device_map if device_map is not None and layers_on_host(find_layers(model), device_map) else None


def reason_not_walked(model: nn.Module) -> str | None:
    """Return why the layers of a model cannot be walked one after the other, if so."""
    for name in ("output_router_logits", "output_attentions", "output_hidden_states"):
        if getattr(text_config(model), name, False):
            # They are read by hooks inside the layers, past the layers' outputs, and have to carry gradients.
            return f"`{name}=True` takes {name[7:].replace('_', ' ')} out of the layers for the loss."
    return None


def working_dtypes(model: nn.Module, bf16: bool) -> Callable[[nn.Parameter], torch.dtype]:
    """Under bf16 autocast a linear layer rounds its fp32 weights anyway: they travel rounded, at half the bytes."""
    rounded = rounded_by_autocast(model) if bf16 else ()
    return lambda parameter: torch.bfloat16 if id(parameter) in rounded else parameter.dtype


# Weights in 4 bits.


class _PackedProduct(torch.autograd.Function):
    """
    What a `Linear4bit` of bitsandbytes computes. Its own function keeps the memory that the weights were in, which
    another layer may have by the backward pass. Here autograd saves them, so that they are back when they are asked
    for, as all other weights of a layer that is recomputed.
    """

    @staticmethod
    def forward(ctx, x, weight, bias, layer):
        output = type(layer).forward(layer, x)
        ctx.save_for_backward(weight)
        ctx.state, ctx.dtypes = weight.quant_state, (x.dtype, layer.compute_dtype or x.dtype)
        return output

    @staticmethod
    def backward(ctx, *grad_outputs):
        from bitsandbytes.functional import dequantize_4bit

        (weight,), (dtype, computed) = ctx.saved_tensors, ctx.dtypes
        gradient = grad_outputs[0].to(computed)
        of_bias = gradient.flatten(0, -2).sum(0) if ctx.needs_input_grad[2] else None
        of_input = gradient @ dequantize_4bit(weight, ctx.state).to(computed) if ctx.needs_input_grad[0] else None
        return None if of_input is None else of_input.to(dtype), None, of_bias, None


def save_packed_weights(module: nn.Module) -> list[Callable[[], Any]]:
    """Let the 4-bit layers of a module compute by [`_PackedProduct`]. Return what undoes that."""
    undo: list[Callable[[], Any]] = []
    for layer in module.modules():
        packed = getattr(layer._parameters.get("weight"), "quant_state", None) is not None
        if packed and "forward" not in vars(layer):
            vars(layer)["forward"] = functools.partial(_packed_forward, layer)
            undo.append(functools.partial(vars(layer).pop, "forward"))
    return undo


def _packed_forward(layer: Any, x: Tensor) -> Tensor:
    return _PackedProduct.apply(x, layer.weight, layer.bias, layer)
