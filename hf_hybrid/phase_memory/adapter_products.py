"""
Adapters with fewer kernels and casts than PEFT's forward.

PEFT computes a layer, `y = x W' + s (x A') B'`, as

    x W'    cast x    cast A    x A'    cast B    (x A') B'    times s    plus

under bf16 autocast, and its backward pass has one or two kernels for each of them. While a micro-batch computes, and
where trl/captured.py captures a pass, [`AdapterProducts`] has

    x W'    x A'    += (x A') (s B)'

- **Weights are cast once per micro-batch**, in one call for all, into copies in 16 bits: `A` and `s B`. Autograd knows
  the copies as leaves. After the backward pass their gradients are cast and added to those of the weights, all at once.
- **Layers that read the same input** ([`SAME_INPUT`]) cast it once and multiply it once, by their `A` one below the
  other. Names tell which may, and the tensor whether they do.

The products have the operands of PEFT's, rounded to the same 16 bits. PEFT then rounds three times (the product, its
scaled value, the sum), and this once: weights after a step are nearer to those of fp32 (`benchmarks.skips.adapters`).
What is not plain LoRA ([`plain_lora_layers`]) keeps PEFT's forward, as does what is neither of the two. A callback may
change that in a run: it freezes `A` and `B` in turn, registers a hook, or puts other weights in place. So when the
first layer of a micro-batch is called, all are asked what they are by then ([`_Layer.reason_not_plain`]).

Two savings change no bit. PEFT casts the input of an adapter to fp32, and the product casts it back at once, but the
copy is kept for the backward pass: where PEFT's forward stays, [`UncastInputs`] switches that off. And autocast rounds
frozen fp32 weights to bf16 in each forward pass and keeps both: [`FrozenInBf16`] holds them rounded.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook as has_any_global_hook

from hf_hybrid.machine import sharding_of
from hf_hybrid.optimizers import optimizer_name, steps_in_backward
from hf_hybrid.part import Part, Phase
from hf_hybrid.run.fallbacks import Fallbacks
from hf_hybrid.run.run import Run
from hf_hybrid.run.trainer_view import TrainerView, unknown_loss
from hf_hybrid.streaming.layers import decoder_layers

SAME_INPUT = (("q_proj", "k_proj", "v_proj"), ("query", "key", "value"), ("gate_proj", "up_proj"), ("w1", "w3"))
"""Names of linear layers that stand side by side and read the same input."""
KINDS = ("lora_A", "lora_B", "lora_dropout")
"""Where PEFT keeps what a layer has of each adapter."""


def adapter_parts(trainer: TrainerView) -> list[Part]:
    """Return the parts for a trainer of adapters under bf16 autocast."""
    args, model, parts = trainer.args, trainer.accelerator.unwrap_model(trainer.model), []
    plain, options = plain_lora_layers(model), trainer.hybrid_args
    stays = not (sharding_of(args) or args.torch_compile or args.n_gpu > 1)
    # DDP reduces gradients where autograd leaves them, and some optimizers step there.
    alone = args.world_size == 1 and not steps_in_backward(optimizer_name(args))
    # Large adapters of a streamed base travel with it.
    here = all(trainer.memory.parameter(weight) is weight for layer in plain for weight in lora_weights(layer))
    known = unknown_loss(trainer) is None or trainer.trains_preferences  # others may generate, without autocast
    if plain and options.share_rows != "off" and stays and alone and here:
        parts.append(AdapterProducts(plain, torch.bfloat16, several=trainer.memory.window is not None))
    elif plain and known:
        parts.append(UncastInputs(plain))
    if known and stays and not options.weight_precision and not trainer.memory.streams:  # what travels is in bf16
        frozen, adapters = frozen_linear_layers(model)
        if frozen:
            parts.append(FrozenInBf16(frozen, adapters))
    return parts


class AdapterProducts(Part):
    """
    Computes what [`plain_lora_layers`] found as described above, where products are in this `dtype`: that of autocast,
    or without `autocast` that of a layer's input. `several` micro-batches may be computed at once, whose gradients add
    up in fp32 then.
    """

    name = "adapter_products"

    def __init__(self, layers: list[Any], dtype: torch.dtype, autocast: bool = True, several: bool = False):
        self.layers, self.dtype = [_Layer(module) for module in layers], dtype
        self.autocast, self.several = autocast, several
        self.fallbacks = Fallbacks("Some adapters are computed as PEFT does it")
        self._groups, self._leaves, self._is_fresh = [], [], False  # several copies lie in one leaf
        for layer in self.layers:
            layer.forward = functools.partial(self._forward, layer)

    def begin(self, run: Run) -> None:
        self.place(run.model)

    def place(self, model: nn.Module) -> None:
        """Make the copies."""
        layers = {layer.module: layer for layer in self.layers}
        sets = [(dict(m.named_children()), names) for m in model.modules() for names in SAME_INPUT]
        named = [[layers[of[name]] for name in names if of.get(name) in layers] for of, names in sets]
        groups = [[layer for layer in group if layer.a.shape[1] == group[0].a.shape[1]] for group in named if group]
        grouped = {layer for group in groups for layer in group}
        self._place([*groups, *([layer] for layer in self.layers if layer not in grouped)])

    def before_forward(self, phase: Phase | None) -> None:
        for leaf in self._leaves:
            leaf.grad = None  # of a micro-batch that an error cut short
        self._is_fresh = False
        self._take_forwards()

    def after_backward(self, phase: Phase | None) -> None:
        if not self._is_fresh:
            self.refresh()  # no layer computed as it was found, which may have a reason
        self._give_forwards_back()
        self._hand_over()

    def tensors_held(self) -> Sequence[Tensor]:
        return self._leaves

    def clean_up(self) -> None:
        self._give_forwards_back()
        self._place([])
        for layer in self.layers:
            for name in ("group", "down", "up"):
                vars(layer).pop(name, None)

    def _take_forwards(self) -> None:
        for layer in self.layers:
            if users_forward(layer.module) is None:
                vars(layer.module)["forward"] = layer.forward

    def _give_forwards_back(self) -> None:
        for layer in self.layers:
            if users_forward(layer.module) is None:
                vars(layer.module).pop("forward", None)
        for group in self._groups:
            group.forget()

    @property
    def used(self) -> list[_Layer]:
        """Layers that compute like this now. Others have changed since the run began."""
        return [layer for group in self._groups if group.is_used for layer in group.layers]

    @contextlib.contextmanager
    def computing(self) -> Generator[None]:
        """
        Inside, layers compute as it was found at the last [`refresh`], also where another of these parts computes a
        micro-batch around it.
        """
        before = [(layer, vars(layer.module).get("forward")) for layer in self.layers]
        self._take_forwards()
        try:
            yield
        finally:
            self._give_forwards_back()
            for layer, forward in before:
                if forward is not None:
                    vars(layer.module)["forward"] = forward

    @torch.no_grad()
    def _place(self, groups: list[list[_Layer]]) -> None:
        """Make the copies: for each group a leaf with its `A`, `[ranks, inputs]`, for each layer one with its `s B`."""
        self._groups, self._leaves = [], []
        for layers in groups:
            a = layers[0].a
            down = torch.empty(sum(len(layer.a) for layer in layers), a.shape[1], dtype=self.dtype, device=a.device)
            self._groups.append(group := _Group(layers, down))
            self._leaves.append(down)
            for layer, copy in zip(layers, down.split(group.ranks), strict=True):
                layer.group, layer.down, layer.up = group, copy, torch.empty_like(layer.b, dtype=self.dtype)
                self._leaves.append(layer.up)
        for leaf in self._leaves:
            leaf.requires_grad_()
            if self.several:
                leaf.grad_dtype = torch.float32
        self.refresh()

    @torch.no_grad()
    def refresh(self) -> None:
        """
        Find the groups whose layers are plain now, and copy their weights. `_version` would not tell which weights are
        old, because `weight.data` does not count there.
        """
        self._is_fresh = True
        for group in self._groups:
            if (reason := group.reason_not_plain()) is not None:
                self.fallbacks.cannot_be_exact(reason)
            group.is_used = reason is None
        if layers := self.used:
            copies, weights = [(layer.down, layer.up) for layer in layers], [(layer.a, layer.b) for layer in layers]
            torch._foreach_copy_([*itertools.chain(*copies)], [*itertools.chain(*weights)])
            torch._foreach_mul_([layer.up for layer in layers], [layer.scaling for layer in layers])

    @torch.no_grad()
    def _hand_over(self) -> None:
        """Cast the gradients of the copies, and add them to those of the weights: all in a few calls."""
        downs: list[tuple[Tensor, Tensor]] = []
        for group in self._groups:
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
        later = [(w.grad, gradient) for (w, _), gradient in zip(pairs, gradients, strict=True) if w.grad is not None]
        if later:
            torch._foreach_add_([grad for grad, _ in later], [gradient for _, gradient in later])
        for (weight, _), gradient in zip(pairs, gradients, strict=True):
            weight.grad = gradient if weight.grad is None else weight.grad
        for leaf in self._leaves:
            leaf.grad = None

    def _forward(self, layer: _Layer, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        module, kind = layer.module, x.device.type
        dtype = torch.get_autocast_dtype(kind) if self.autocast else x.dtype
        fits = torch.is_autocast_enabled(kind) == self.autocast and dtype == self.dtype
        adapts = not (module.disable_adapters or module.merged) and module._active_adapter in layer.active
        if args or kwargs or not fits or not adapts:  # for example the reference of DPO
            return type(module).forward(module, x, *args, **kwargs)
        if not self._is_fresh:
            self.refresh()
        if not layer.group.is_used:
            return type(module).forward(module, x)
        rows, hidden = layer.group.products(layer, x)
        result = layer.base(rows)
        return result.addmm_(hidden, layer.up.t()).view(*x.shape[:-1], -1)


class _Layer:
    """A LoRA layer, its weights `a`, `[rank, inputs]`, and `b`, `[outputs, rank]`, and their copies `down` and `up`."""

    forward: Callable[..., Tensor]
    group: _Group
    down: Tensor
    up: Tensor

    def __init__(self, module: Any):
        (self.name,) = module.active_adapters
        inner = [getattr(module, kind)[self.name] for kind in KINDS]
        self.module, self.base, self.dropout = module, module.base_layer, inner[-1]
        self.a, self.b = lora_weights(module)
        self._inner, self.active = [self.base, *inner], (self.name, [self.name])
        self._weights = [(product, product.weight, product.weight.shape) for product in inner[:2]]

    @property
    def scaling(self) -> float:
        """`s`, which PEFT's `set_scale` may change."""
        return float(self.module.scaling[self.name])

    def reason_not_plain(self) -> str | None:
        """
        Return why PEFT's forward and backward are more than the two products of these weights; `None` if they are not.
        That is asked often, so nothing here waits for the device or looks a module up by PEFT's own, slow, way.
        """
        if (reason := self.reason_not_plain_forward()) is not None:
            return reason
        for product, weight, shape in self._weights:
            own = product._parameters
            if own.get("weight") is not weight or own.get("bias") is not None or weight.shape != shape:
                return "weights of a layer are others than when the run began"
            if not weight.requires_grad:
                return "weights of a layer are frozen"
            if weight._backward_hooks or weight._post_accumulate_grad_hooks:
                return "hooks change the gradients of a layer"
        return None if isinstance(self.module.scaling[self.name], (int, float)) else "the scale of a layer is no number"

    def reason_not_plain_forward(self) -> str | None:
        """Return why PEFT's forward is more than two products, of whatever weights."""
        module, name, parts = self.module, self.name, self.module._modules
        if module._disable_adapters or module.merged_adapters or module._active_adapter not in self.active:
            return "they are merged or disabled, or others are active"
        held = [parts["base_layer"], *[parts[kind]._modules.get(name) for kind in KINDS]]
        if held != self._inner or name in module.lora_variant:
            return "modules of a layer are others than when the run began"
        if users_forward(module) or any(map(is_looked_into, self._inner)):
            return "hooks look into a layer, or it has another `forward`"
        has_dropout = not isinstance(self.dropout, nn.Identity) and getattr(self.dropout, "p", None) != 0
        return "a layer has dropout" if has_dropout else None


def users_forward(module: nn.Module) -> Any:
    """Return what the user has put in the place of a module's `forward`. What accelerate puts there moves tensors."""
    if (forward := vars(module).get("forward")) is None:
        return None
    by = getattr(getattr(forward, "func", forward), "__module__", None) or ""
    return None if by.startswith(("hf_hybrid.", "accelerate.")) else forward


def is_looked_into(module: nn.Module) -> bool:
    """Whether hooks see what a module computes, or the user has put another `forward` in its place."""
    hooks = module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    return bool(hooks) or users_forward(module) is not None


class _Group:
    """Layers that read the same input, and the copies of their `A`."""

    def __init__(self, layers: list[_Layer], down: Tensor):
        self.layers, self.down, self.ranks, self.is_used = layers, down, [len(layer.a) for layer in layers], False
        self.forget()

    def reason_not_plain(self) -> str | None:
        """Return why one of the layers is not plain now. Then all of them are PEFT's, because they share a leaf."""
        if has_any_global_hook():
            return "a hook looks into all modules"
        return next(filter(None, (layer.reason_not_plain() for layer in self.layers)), None)

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


def plain_lora_layers(model: nn.Module) -> list[Any]:
    """
    Return the LoRA layers that compute nothing but their two products: without dropout, DoRA or another variant,
    biases, several adapters, weights that are not trained or used twice, and hooks, which would see nothing.
    """
    uses = Counter(id(p) for m in model.modules() for p in m.parameters(recurse=False))
    return [module for module in model.modules() if _is_plain(module, uses)]


def lora_weights(layer: Any) -> tuple[nn.Parameter, nn.Parameter]:
    """Return `A` and `B` of such a layer."""
    (name,) = layer.active_adapters
    return layer.lora_A[name].weight, layer.lora_B[name].weight


def _is_plain(module: Any, uses: Counter[int]) -> bool:
    kind = type(module)
    if not kind.__module__.startswith("peft.tuners.lora.") or kind.__name__ not in ("Linear", "Linear4bit"):
        return False
    name, *others = module.active_adapters or [""]
    if others or name not in module.lora_A or "forward" in vars(module) or module.lora_variant:
        return False
    products: tuple[Any, ...] = module.lora_A[name], module.lora_B[name]
    alone = all(type(product) is nn.Linear and uses[id(product.weight)] == 1 for product in products)
    return alone and _Layer(module).reason_not_plain() is None


class UncastInputs(Part):
    """Leaves out casts of the inputs of LoRA layers under bf16 autocast; see [`plain_lora_layers`]."""

    name = "uncast_inputs"

    def __init__(self, layers: list[Any]):
        self.layers, self._plain = layers, [_Layer(module) for module in layers]
        self._switched_off: list[Any] = []

    def before_forward(self, phase: Phase | None) -> None:
        self._switched_off = [layer.module for layer in self._plain if layer.reason_not_plain_forward() is None]
        for module in self._switched_off:
            module.cast_input_dtype_enabled = False

    def after_backward(self, phase: Phase | None) -> None:
        for module in self._switched_off:
            module.cast_input_dtype_enabled = True


class FrozenInBf16(Part):
    """
    Holds frozen weights of linear layers in bf16 while a training runs, where that is without loss: most models on the
    Hub were saved in bf16, so that their fp32 weights have the same values, and every product has the same bits.

    Outside of autocast a layer computes in the precision of its input. Before adapters are merged, and at the end, all
    weights are in fp32 again. See [`frozen_linear_layers`] for the arguments.
    """

    name = "frozen_in_bf16"

    def __init__(self, layers: list[nn.Linear], adapters: list[Any]):
        self.layers, self.adapters = layers, adapters
        self.held: list[nn.Linear] = []
        self.fallbacks = Fallbacks("Frozen weights are in fp32 for the rest of the run")

    def begin(self, run: Run) -> None:
        for layer in self.layers:
            rounded = layer.weight.data.to(torch.bfloat16)
            if torch.equal(rounded.float(), layer.weight.data):
                layer.weight.data = rounded
                layer.forward = functools.partial(_linear, layer)
                self.held.append(layer)
        for adapter in self.adapters if self.held else ():
            adapter.merge = functools.partial(self._merge, adapter)

    def before_forward(self, phase: Phase | None) -> None:
        if any(layer.weight.requires_grad for layer in self.held):
            self.fallbacks.cannot_be_exact("some of them are trained by now")
            self.end()

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


def _linear(layer: nn.Linear, input: torch.Tensor) -> torch.Tensor:
    weight = layer.weight if torch.is_autocast_enabled(input.device.type) else layer.weight.to(input.dtype)
    return F.linear(input, weight, layer.bias)


def frozen_linear_layers(model: nn.Module) -> tuple[list[nn.Linear], list[Any]]:
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
    linear = (module for module in inside if type(module) is nn.Linear and "forward" not in vars(module))
    owned = ((layer, layer.weight) for layer in linear if uses[id(layer.weight)] == 1)
    return [layer for layer, w in owned if w.dtype == torch.float32 and not w.requires_grad], adapters
