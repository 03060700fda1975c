"""
Adapters on fused experts, multiplied as two thin matrices.

A mixture keeps the weights of all experts of a layer in one 3-D parameter, and PEFT adapts it by
`LoraConfig(target_parameters=...)`. It adds the product of the thin matrices to the parameter in each forward pass:

    W + s B A        [experts, outputs, inputs], whichever experts the tokens have chosen

So each pass makes a copy of all experts, autograd keeps it for the backward pass, and that pass computes the gradient
of the whole parameter for the sake of `A` and `B`. A token that is sampled costs as much as a batch. Here the tokens of
an expert are multiplied by its own thin matrices, as LoRA does in other layers:

    x W' + s (x A') B'

The tokens are sorted by expert and multiplied in groups, which is transformers' own way (`grouped_mm`, the default).
Results differ from PEFT's by rounding. Where another `experts_implementation` was chosen, PEFT's forward stays.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Generator
from typing import Any

import torch
from torch import Tensor, nn

from hf_hybrid.compat import norm_of_experts, shards_experts
from hf_hybrid.optimizers import wraps_parameter
from hf_hybrid.part import Part
from hf_hybrid.phase_memory.adapter_products import is_looked_into
from hf_hybrid.run.fallbacks import Fallbacks
from hf_hybrid.run.run import Run

GROUPED = ("grouped_mm", "batched_mm")
"""transformers' default, and what `generate` has in its place on a GPU."""
ALIGNED = 16
"""Bytes of which the rows of a thin matrix have to be a multiple, for the kernels of `grouped_mm`."""


class FusedExperts(Part):
    """Computes what [`adapted_experts`] found as described above while a training runs, in every pass."""

    name = "fused_experts"

    def __init__(self, layers: list[Any]):
        self.layers = layers
        self.fallbacks = Fallbacks("Some adapters of experts are computed as PEFT does it")

    def begin(self, run: Run | None) -> None:
        for layer in self.layers:
            layer.forward = functools.partial(_forward, layer, self.fallbacks)

    @contextlib.contextmanager
    def computing(self) -> Generator[None]:
        """Inside, layers compute like this before a training runs; copies of them too."""
        self.begin(None)
        try:
            yield
        finally:
            self.clean_up()

    def clean_up(self) -> None:
        for layer in self.layers:
            vars(layer).pop("forward", None)


def adapted_experts(model: nn.Module) -> list[Any]:
    """Return the outermost wrapper of each module of fused experts whose adapters can be multiplied in groups."""
    wrappers = [module for module in model.modules() if wraps_parameter(module)]
    inner = {module.base_layer for module in wrappers}
    own = [module for module in wrappers if module not in inner and "forward" not in vars(module)]
    return [module for module in own if _is_plain(module)]


def _is_plain(layer: Any) -> bool:
    experts, wrappers = layer.get_base_layer(), _wrappers(layer)
    known = all(hasattr(experts, name) for name in ("has_gate", "has_bias", "is_transposed"))
    inside = {experts, *wrappers.values()} - {layer}
    if not known or shards_experts(experts) or any(map(is_looked_into, inside)):
        return False
    names = {"gate_up_proj" if experts.has_gate else "up_proj", "down_proj"}
    return wrappers.keys() <= names and all(_is_thin(wrapper) for wrapper in wrappers.values())


def _is_thin(wrapper: Any) -> bool:
    weight, ranks = wrapper.get_param(), wrapper.r.values()
    floats = weight.dtype in (torch.float32, torch.bfloat16, torch.float16)
    aligned = all(rank * weight.element_size() % ALIGNED == 0 for rank in ranks)
    return weight.ndim == 3 and floats and aligned


def _wrappers(layer: Any) -> dict[str, Any]:
    """Return the wrappers around a module of experts, each by the name of the parameter that it adapts."""
    wrappers = {}
    while wraps_parameter(layer):
        wrappers[layer.parameter_name], layer = layer, layer.base_layer
    return wrappers


def _forward(
    layer: Any, fallbacks: Fallbacks, hidden: Tensor, chosen: Tensor, shares: Tensor, *args: Any, **kwargs: Any
) -> Tensor:
    """
    Return what experts compute of `hidden` `[tokens, width]`: for each token the sum over the experts that it has
    `chosen`, `[tokens, k]`, weighted by their `shares`, `[tokens, k]`.
    """
    experts, wrappers = layer.get_base_layer(), _wrappers(layer)
    active = layer.active_adapters
    adapts = len(active) == 1 and all(active[0] in wrapper.lora_A for wrapper in wrappers.values())
    stays = any(wrapper.disable_adapters or wrapper.merged for wrapper in wrappers.values()) or not adapts
    if not _is_plain(layer):
        fallbacks.cannot_be_exact("hooks look into them, or they are others than when the run began")
        stays = True
    if args or kwargs or stays or experts.config._experts_implementation not in GROUPED:
        return type(layer).forward(layer, hidden, chosen, shares, *args, **kwargs)
    of_expert, order = chosen.reshape(-1).sort()
    tokens, count = chosen.shape
    ends = torch.searchsorted(of_expert, torch.arange(experts.num_experts, device=hidden.device), right=True)
    ends = ends.to(torch.int32)

    def linear(name: str, rows: Tensor) -> Tensor:
        bias = getattr(experts, f"{name}_bias")[of_expert] if experts.has_bias else None
        result = _product(rows, getattr(experts, name), ends, experts.is_transposed)
        result = result if bias is None else result + bias
        if name not in wrappers:
            return result
        left, right, scaling = wrappers[name].get_delta_factors(active[0])  # their product is as the weight
        first, second = (left, right) if experts.is_transposed else (right, left)
        thin = _product(rows, first.contiguous(), ends, experts.is_transposed) * scaling
        return result + _product(thin, second.contiguous(), ends, experts.is_transposed)

    rows = linear("gate_up_proj" if experts.has_gate else "up_proj", hidden[order // count])
    rows = linear("down_proj", experts._apply_gate(rows) if experts.has_gate else experts.act_fn(rows))
    norm = norm_of_experts(experts)
    rows = rows if norm is None else norm(rows)
    rows = rows * shares.reshape(-1)[order].unsqueeze(-1)
    place = torch.empty_like(order)
    place[order] = torch.arange(len(order), device=order.device)
    return rows[place].view(tokens, count, -1).sum(1).to(hidden.dtype)


def _product(rows: Tensor, weight: Tensor, ends: Tensor, is_transposed: bool) -> Tensor:
    """Multiply the rows of each expert by its matrix, `[experts, inputs, outputs]` if `is_transposed`."""
    from transformers.integrations.moe import _grouped_linear

    return _grouped_linear(rows, weight, ends, is_transposed=is_transposed)
