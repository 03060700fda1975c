"""
LoRA adapters: their learning rate, where none is given, and casts that change nothing.

The rule of the rate was measured with AdamW, LoRA as PEFT makes it if nothing is said, and the losses of supervised
fine-tuning and of DPO. Whatever is not known to be like that trains at the rate of the options, as in plain `Trainer`.

The casts of inputs: PEFT casts the input of an adapter to the type of its weights, which is fp32. Under bf16 autocast
the matrix product casts it back at once. An input in bf16 comes back as it was, to the last bit, but the copy in fp32
is kept for the backward pass. [`UncastInputs`] switches PEFT's cast off while a micro-batch computes. With dropout in
between it would not be the same, so such adapters keep their casts.

The casts of weights: autocast rounds frozen fp32 weights to bf16 again and again. [`FrozenInBf16`] holds them rounded.
"""

from __future__ import annotations

import functools
import logging
from collections import Counter
from collections.abc import Iterator
from typing import Any, cast

import torch
import torch.nn.functional as F

from hf_hybrid.build import optimizer_unlike_adam, unknown_loss, unwrapped_optimizer
from hf_hybrid.machine import sharding_of
from hf_hybrid.part import Part, Phase
from hf_hybrid.run.rate import AdapterRate
from hf_hybrid.run.run import Run
from hf_hybrid.run.typing import TrainerLike
from hf_hybrid.streaming.layers import NoLayerListError, find_layers

logger = logging.getLogger(__name__)

ADAPTER_RATE, AT_ALPHA, AT_WIDTH = 1e-3, 32, 576
"""Learning rate of AdamW for the adapters of SmolLM2-135M, and what it belongs to (docs/evaluation/rates.md)."""
OF_PREFERENCES = 0.25
"""
Rate of a preference loss over that of supervised training: each pair that is learned has less gradient. Half is better
on SmolLM2, and too high on one of three seeds of a small model (docs/evaluation/rates.md).
"""
MAX_ADAPTER_RATE = 1e-2
"""About the highest rate of adapters at which the rule was measured: very narrow models would get a higher one."""


def adapter_rate(*, alpha: float, width: int, preference: bool = False) -> float:
    """
    Return the learning rate of AdamW for LoRA adapters, where none is given.

    Adam's steps have one length whatever the gradient, so that after as many steps the matrix `B` of an adapter, which
    starts at zero, is as large at any rank. Its rows add up over the rank, and the product is multiplied by
    `alpha / rank`: what a step changes in the output of a layer is in proportion to the rate and to `alpha`, and not to
    the rank. The steps of the matrix `A` add up over the width of the layer's input (Hayou et al., 2024, arXiv
    2402.12354). So the rate is in inverse proportion to both.

    Args:
        alpha (`float`): The adapters' `lora_alpha`; for rank-stabilised adapters, `lora_alpha` times the square root of
            the rank.
        width (`int`): The model's `hidden_size`.
        preference (`bool`): Whether a loss on pairs is trained, as in DPO.
    """
    rate = ADAPTER_RATE * (AT_ALPHA / alpha) * (AT_WIDTH / width)
    return rate * OF_PREFERENCES if preference else rate


def adapter_rate_scale(trainer: TrainerLike) -> AdapterRate | None:
    """Return the part that raises the default rate to that of the rule, and say the rate, or why there is none."""
    args, model = trainer.args, trainer.accelerator.unwrap_model(trainer.model)
    if (why := why_no_rate(trainer)) is not None:
        logger.warning(
            "Adapters are trained at `learning_rate=%g`, because %s. Adapters often need ten times the rate of full "
            "fine-tuning: choose `learning_rate` for them.",
            args.learning_rate,
            why,
        )
        return None
    rate = AdapterRate(max(1.0, _rate_of(trainer) / args.learning_rate), backs_off=not trainer.trains_preferences)
    if rate.scale > 1:
        logger.warning(
            "Adapters are trained at a learning rate of %.3g in place of %g. It follows from `lora_alpha=%g`%s. Set "
            "`learning_rate` to have another one, or `lr_rescue=off` to keep that one.",
            rate.scale * args.learning_rate,
            args.learning_rate,
            max(_lora_alphas(model)),
            f", `hidden_size={_width(model)}`" + " and preferences as data" * trainer.trains_preferences,
        )
    return rate


def _rate_of(trainer: TrainerLike) -> float:
    """Return the learning rate of the rule, for the largest `lora_alpha` if there are several."""
    model = trainer.accelerator.unwrap_model(trainer.model)
    alpha, width = max(_lora_alphas(model)), cast(int, _width(model))  # known, or there is no rate
    return min(MAX_ADAPTER_RATE, adapter_rate(alpha=alpha, width=width, preference=trainer.trains_preferences))


def why_no_rate(trainer: TrainerLike) -> str | None:
    """Return why the rule says nothing about these adapters, their optimizer or their loss."""
    model, rate = trainer.accelerator.unwrap_model(trainer.model), trainer.args.learning_rate
    configs = model.peft_config.values()
    other = [
        kind for config in configs if (kind := str(getattr(config.peft_type, "value", config.peft_type))) != "LORA"
    ]
    if rate == 0:
        return "the rate is zero"
    if other:
        return f"no default rate is known for adapters of the type `{other[0]}`"
    if start := [config.init_lora_weights for config in configs if config.init_lora_weights is not True]:
        return f"no default rate is known for adapters that begin as `init_lora_weights={start[0]}`"
    if _trains_more_than_lora(model):
        return "other weights are trained beside them"
    if (name := optimizer_unlike_adam(trainer)) is not None:
        return f"no default rate is known for the optimizer `{name}`"
    groups = unwrapped_optimizer(trainer).param_groups
    if any(float(group.get("initial_lr", group["lr"])) != rate for group in groups):
        return "the optimizer that was passed has learning rates of its own"
    if _width(model) is None:
        return "the width of the model is not known"
    return None if trainer.trains_preferences else unknown_loss(trainer)


def _width(model: torch.nn.Module) -> int | None:
    config = getattr(model, "config", None)
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    return getattr(config, "hidden_size", None)


def _lora_layers(model: torch.nn.Module) -> Iterator[tuple[float, list[torch.nn.Parameter]]]:
    """Return `lora_alpha`, as it acts on the product of the matrices, and parameters of each trained adapter layer."""
    from peft.tuners.lora import LoraLayer

    for layer in model.modules():
        if isinstance(layer, LoraLayer):
            for name, rank in layer.r.items():
                parts = [getattr(layer, part, {}) for part in (*layer.adapter_layer_names, "lora_magnitude_vector")]
                own = [part[name] for part in parts if name in part]
                own = [p for part in own for p in (part.parameters() if isinstance(part, torch.nn.Module) else [part])]
                if any(p.requires_grad for p in own):
                    yield layer.scaling[name] * rank, own


def _lora_alphas(model: torch.nn.Module) -> list[float]:
    return [alpha for alpha, _ in _lora_layers(model)]


def _trains_more_than_lora(model: torch.nn.Module) -> bool:
    adapters = {id(parameter) for _, own in _lora_layers(model) for parameter in own}
    return any(p.requires_grad and id(p) not in adapters for p in model.parameters())


# Casts.


def cast_parts(trainer: TrainerLike) -> list[Part]:
    """Return the parts that leave out casts under bf16 autocast, for a trainer of adapters."""
    args, model, parts = trainer.args, trainer.accelerator.unwrap_model(trainer.model), []
    if inputs := layers_with_idle_casts(model):
        parts.append(UncastInputs(inputs))
    known = unknown_loss(trainer) is None or trainer.trains_preferences  # others may generate, without autocast
    moved = trainer.memory.streams or sharding_of(args) or trainer.hybrid_args.weight_precision
    if known and not moved and not args.torch_compile and args.n_gpu <= 1:
        frozen, adapters = frozen_linear_layers(model)
        if frozen:
            parts.append(FrozenInBf16(frozen, adapters))
    return parts


class UncastInputs(Part):
    """
    Leaves out casts of the inputs of LoRA layers under bf16 autocast, where they change nothing.

    Args:
        layers (`list[torch.nn.Module]`): See [`layers_with_idle_casts`].
    """

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
    when the training is left, all weights are in fp32 again.

    Args:
        layers (`list[torch.nn.Linear]`): See [`frozen_linear_layers`].
        adapters (`list[torch.nn.Module]`): The LoRA layers of the model, which merge their products into weights.
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

    def clean_up(self) -> None:
        self.end()


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
    try:
        inside = [module for _, layer in find_layers(model) for module in layer.modules()]
    except NoLayerListError:
        return [], []
    uses = Counter(id(p) for m in model.modules() for p in m.parameters(recurse=False))  # more than one: shared
    frozen = [
        module
        for module in inside
        if type(module) is torch.nn.Linear
        and module.weight.dtype == torch.float32
        and not module.weight.requires_grad
        and uses[id(module.weight)] == 1
        and "forward" not in vars(module)
    ]
    return frozen, adapters


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
