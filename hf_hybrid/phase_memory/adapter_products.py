"""
LoRA with fewer kernels: PEFT's products under autocast, in fewer calls.

For small models a GPU waits for the host, which launches one kernel after the other; for large ones the products of
adapters are bound by memory. PEFT computes a layer, `y = x W' + s (x A') B'`, as

    x W'    cast x    cast A    x A'    cast B    (x A') B'    times s    plus

and its backward pass has one or two kernels for each of them. Here, while a micro-batch computes, a layer is

    x W'    x A'    += (x A') (s B)'

- **Weights are cast once per step**, in one call for all, into copies in 16 bits: `A` and `s B`. Autograd knows the
  copies as leaves. After the backward pass their gradients are cast and added to those of the weights, all at once.
- **Layers that read the same input** (q, k, v; gate, up) cast it once and multiply it once, by their `A` one below the
  other. Which layers these are is seen in the first micro-batch: they get the same tensor, one after the other.
- **The last product adds**, over the output of the base layer.

The products have the operands of PEFT's, rounded to the same 16 bits. PEFT then rounds three times (the product, its
scaled value, the sum), and this once. So weights after a step differ from PEFT's by rounding, and are nearer to those
of fp32 (`python -m benchmarks.skips.adapters`).

Layers that are not plain LoRA keep PEFT's forward ([`plain_lora_layers`]); so does what computes outside of the
micro-batches of a training, or without autocast.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hf_hybrid.part import Part, Phase, Step
from hf_hybrid.run.run import Run


class AdapterProducts(Part):
    """
    Computes LoRA layers as described above.

    Args:
        layers: What [`plain_lora_layers`] found.
        dtype (`torch.dtype`): What autocast computes in.
    """

    name = "adapter_products"

    def __init__(self, layers: list[Any], dtype: torch.dtype):
        self.layers, self.dtype = [_Layer(module, self._forward) for module in layers], dtype
        self._calls: list[tuple[_Layer, Tensor]] | None = None
        """Calls of the first micro-batch with their inputs; `None` once they were looked at."""
        self._weights: list[Tensor] = []
        self._copies: list[Tensor] = []
        """Of the weights. Several lie in one leaf."""
        self._leaves: list[Tensor] = []

    def begin(self, run: Run) -> None:
        self._calls = []
        self._place([[layer] for layer in self.layers])

    def begin_step(self, step: Step) -> None:
        if step.phase is not Phase.PREDICT:
            self._copy()

    def before_forward(self, phase: Phase | None) -> None:
        for leaf in self._leaves:
            leaf.grad = None  # of a micro-batch that an error cut short
        for layer in self.layers:
            vars(layer.module)["forward"] = layer.forward

    def after_backward(self, phase: Phase | None) -> None:
        self._leave()
        self._hand_over()
        if self._calls is not None:
            groups, self._calls = groups_of(self._calls), None
            grouped = {layer for group in groups for layer in group}
            self._place([*groups, *([layer] for layer in self.layers if layer not in grouped)])

    def clean_up(self) -> None:
        self._leave()

    def tensors_held(self) -> Sequence[Tensor]:
        return self._leaves

    def state_dict(self) -> dict[str, Any]:
        """Return the layers of each group by number: products of other sizes would be rounded otherwise."""
        if self._calls is not None:
            return {}
        numbers, groups = {layer: n for n, layer in enumerate(self.layers)}, {layer.group: 0 for layer in self.layers}
        return {"groups": [[numbers[layer] for layer in group.layers] for group in groups]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state:
            self._calls = None
            self._place([[self.layers[number] for number in numbers] for numbers in state["groups"]])

    def _leave(self) -> None:
        for layer in self.layers:
            vars(layer.module).pop("forward", None)
            layer.group.forget()

    @torch.no_grad()
    def _place(self, groups: list[list[_Layer]]) -> None:
        """Make the copies: for each group a leaf with its `A`, `[ranks, inputs]`, for each layer one with its `s B`."""
        self._weights, self._copies, self._leaves = [], [], []
        for layers in groups:
            a = layers[0].a
            down = torch.empty(sum(len(layer.a) for layer in layers), a.shape[1], dtype=self.dtype, device=a.device)
            group = _Group(layers, down)
            self._leaves.append(down)
            for layer, copy in zip(layers, down.split(group.ranks), strict=True):
                layer.group, layer.up = group, torch.empty_like(layer.b, dtype=self.dtype)
                self._leaves.append(layer.up)
                self._weights += [layer.a, layer.b]
                self._copies += [copy, layer.up]
        for leaf in self._leaves:
            leaf.requires_grad_()
        self._copy()

    @torch.no_grad()
    def _copy(self) -> None:
        torch._foreach_copy_(self._copies, self._weights)
        torch._foreach_mul_([layer.up for layer in self.layers], [layer.scaling for layer in self.layers])

    @torch.no_grad()
    def _hand_over(self) -> None:
        """Cast the gradients of the copies, and add them to those of the weights: all in a few calls."""
        downs: list[tuple[Tensor, Tensor]] = []
        for group in {layer.group: None for layer in self.layers}:
            if group.down.grad is not None:  # not all layers compute, for example experts
                downs += zip([layer.a for layer in group.layers], group.down.grad.split(group.ranks), strict=True)
        ups = [(layer.b, layer.up.grad) for layer in self.layers if layer.up.grad is not None]
        scales = [layer.scaling for layer in self.layers if layer.up.grad is not None]
        pairs = [*downs, *ups]
        gradients = [torch.empty_like(weight) for weight, _ in pairs]
        if gradients:
            torch._foreach_copy_(gradients, [of_copy for _, of_copy in pairs])
        if scales:
            torch._foreach_mul_(gradients[len(downs) :], scales)
        later: tuple[list[Tensor], list[Tensor]] = ([], [])
        for (weight, _), gradient in zip(pairs, gradients, strict=True):
            if weight.grad is None:
                weight.grad = gradient
            else:
                later[0].append(weight.grad)
                later[1].append(gradient)
        if later[0]:
            torch._foreach_add_(*later)
        for leaf in self._leaves:
            leaf.grad = None

    def _forward(self, layer: _Layer, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        module, kind = layer.module, x.device.type
        casts = torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) == self.dtype
        adapts = not (module.disable_adapters or module.merged) and module._active_adapter == layer.active
        if args or kwargs or not casts or not adapts:  # for example the reference of DPO
            return type(module).forward(module, x, *args, **kwargs)
        if self._calls is not None:
            self._calls.append((layer, x))
        rows, hidden = layer.group.products(layer, x)
        result = layer.base(rows)
        return result.addmm_(hidden, layer.up.t()).view(*x.shape[:-1], -1)


class _Layer:
    """A LoRA layer, its weights `a`, `[rank, inputs]`, and `b`, `[outputs, rank]`, and the copy `up` of `s B`."""

    group: _Group
    up: Tensor

    def __init__(self, module: Any, forward: Callable[..., Tensor]):
        (name,) = module.active_adapters
        self.forward = functools.partial(forward, self)
        self.module, self.active, self.scaling = module, module._active_adapter, float(module.scaling[name])
        self.base, self.a, self.b = module.base_layer, module.lora_A[name].weight, module.lora_B[name].weight


class _Group:
    """Layers that read the same input, in the order in which they are called, and the copies of their `A`."""

    def __init__(self, layers: list[_Layer], down: Tensor):
        self.layers, self.down, self.ranks = layers, down, [len(layer.a) for layer in layers]
        self.forget()

    def forget(self) -> None:
        self._input: Tensor | None = None
        self._rows = self.down
        self._hidden: dict[_Layer, Tensor] = {}

    def products(self, layer: _Layer, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return an input as `[rows, inputs]` in 16 bits, and its product with the `A` of a layer, `[rows, rank]`."""
        if self._input is not x or layer not in self._hidden:
            self._input, self._rows = x, x.flatten(0, -2).to(self.down.dtype)
            hidden = (self._rows @ self.down.t()).split(self.ranks, -1)
            self._hidden = dict(zip(self.layers, hidden, strict=True))
        rows, hidden = self._rows, self._hidden.pop(layer)
        if not self._hidden:
            self.forget()
        return rows, hidden


def groups_of(calls: list[tuple[_Layer, Tensor]]) -> list[list[_Layer]]:
    """Return the layers that were called one after the other with the same input."""
    groups: list[list[_Layer]] = []
    seen: set[_Layer] = set()
    before: Tensor | None = None
    for layer, x in calls:
        if layer in seen:  # recomputed, or used twice
            before = None
            continue
        seen.add(layer)
        if x is before:
            groups[-1].append(layer)
        else:
            groups.append([layer])
        before = x
    return groups


def plain_lora_layers(model: nn.Module) -> list[Any]:
    """
    Return the LoRA layers of a model that compute nothing but their two products, over linear layers or such in 4 bits.

    Dropout, DoRA and other variants, biases, several active adapters, adapters that are not trained, weights that two
    layers use and hooks, which would see nothing, are other layers.
    """
    return [module for module in model.modules() if _is_plain(module)]


def _is_plain(module: Any) -> bool:
    kind = type(module)
    if not kind.__module__.startswith("peft.tuners.lora.") or kind.__name__ not in ("Linear", "Linear4bit"):
        return False
    if "forward" in vars(module) or module.lora_variant or len(module.active_adapters) != 1:
        return False
    (name,) = module.active_adapters
    if name not in module.lora_A or not isinstance(module.lora_dropout[name], nn.Identity):
        return False
    products: tuple[Any, ...] = module.lora_A[name], module.lora_B[name]
    return all(
        type(product) is nn.Linear
        and product.bias is None
        and product.weight.requires_grad
        and not (product._forward_hooks or product._forward_pre_hooks or product.weight._backward_hooks)
        for product in products
    )
