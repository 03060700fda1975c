"""
The learning rate of LoRA adapters, where none is given.

The rule was measured with AdamW, LoRA as PEFT makes it if nothing is said, and the losses of supervised
fine-tuning and of DPO. Whatever is not known to be like that trains at the rate of the options, as in plain `Trainer`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import cast

import torch

from hf_hybrid.optimizers import text_config
from hf_hybrid.run.rate import RateScale
from hf_hybrid.run.trainer_view import TrainerView, optimizer_unlike_adam, trains_adapters, unknown_loss

logger = logging.getLogger(__name__)

ADAPTER_RATE, AT_ALPHA, AT_WIDTH = 1e-3, 32, 576
"""Learning rate of AdamW for the adapters of SmolLM2-135M, and what it belongs to (benchmarks/speedup/rates.md)."""
OF_PREFERENCES = 0.25
"""
Rate of a preference loss over that of supervised training: each pair that is learned has less gradient. Half is better
on SmolLM2, and too high on one of three seeds of a small model (benchmarks/speedup/rates.md).
"""
OF_REWARDS = 0.3
"""The same of completions whose rewards are compared (GRPO): 3e-4 on SmolLM2, best of three (docs/grpo.md)."""
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

    `alpha` is the adapters' `lora_alpha`, for rank-stabilised adapters times the square root of the rank; `width` is
    the model's `hidden_size`; `preference` is for a loss on pairs, as in DPO.
    """
    rate = ADAPTER_RATE * (AT_ALPHA / alpha) * (AT_WIDTH / width)
    return rate * OF_PREFERENCES if preference else rate


def adapter_rate_scale(trainer: TrainerView) -> AdapterRate | None:
    """
    Return the part that raises the default rate to that of the rule, for the largest `lora_alpha` if there are several.
    Say the rate, or why there is none.
    """
    args, model = trainer.args, trainer.accelerator.unwrap_model(trainer.model)
    if (reason := reason_not_by_rule(trainer)) is not None:
        logger.warning(
            "Adapters are trained at `learning_rate=%g`, because %s. Adapters often need ten times the rate of full "
            "fine-tuning: choose `learning_rate` for them.",
            args.learning_rate,
            reason,
        )
        return None
    alpha, width = max(alpha for alpha, _ in _lora_layers(model)), cast(int, _width(model))  # known, as there is a rate
    of_rule = adapter_rate(alpha=alpha, width=width, preference=trainer.trains_preferences)
    scale = max(1.0, min(MAX_ADAPTER_RATE, of_rule) / args.learning_rate)
    rate = AdapterRate(scale, backs_off=not trainer.trains_preferences)
    if rate.scale > 1:
        logger.warning(
            "Adapters are trained at a learning rate of %.3g in place of %g. It follows from `lora_alpha=%g`%s. Set "
            "`learning_rate` to have another one, or `auto_lr=off` to keep that one.",
            rate.scale * args.learning_rate,
            args.learning_rate,
            alpha,
            f", `hidden_size={width}`" + " and preferences as data" * trainer.trains_preferences,
        )
    return rate


def reason_not_by_rule(trainer: TrainerView) -> str | None:
    """Return why the rule says nothing about these adapters, their optimizer or their loss."""
    model, rate = trainer.accelerator.unwrap_model(trainer.model), trainer.args.learning_rate
    configs = model.peft_config.values()
    kinds = {str(getattr(config.peft_type, "value", config.peft_type)) for config in configs}
    if rate == 0:
        return "the rate is zero"
    if other := sorted(kinds - {"LORA"}):
        return f"no default rate is known for adapters of the type `{other[0]}`"
    if start := [config.init_lora_weights for config in configs if config.init_lora_weights is not True]:
        return f"no default rate is known for adapters that begin as `init_lora_weights={start[0]}`"
    if _trains_others(model):
        return "other weights are trained beside them"
    if (name := optimizer_unlike_adam(trainer)) is not None:
        return f"no default rate is known for the optimizer `{name}`"
    groups = trainer.optimizer.param_groups
    if any(float(group.get("initial_lr", group["lr"])) != rate for group in groups):
        return "the optimizer that was passed has learning rates of its own"
    if _width(model) is None:
        return "the width of the model is not known"
    return None if trainer.trains_preferences else unknown_loss(trainer)


def reward_rate(trainer: TrainerView) -> float | None:
    """Return the learning rate of the rule for GRPO, before its optimizer is made; `None` where the rule has none."""
    model = trainer.accelerator.unwrap_model(trainer.model)
    layers, width = list(_lora_layers(model)) if trains_adapters(trainer) else [], _width(model)
    if not layers or _trains_others(model) or width is None or optimizer_unlike_adam(trainer) is not None:
        return None
    rate = OF_REWARDS * adapter_rate(alpha=max(alpha for alpha, _ in layers), width=width)
    return max(trainer.args.learning_rate, min(MAX_ADAPTER_RATE, rate))


def _trains_others(model: torch.nn.Module) -> bool:
    """Whether more is trained than adapters and the embeddings of new tokens, which are trained at their rate."""
    adapters = {id(parameter) for _, own in _lora_layers(model) for parameter in own}
    trained = (name for name, p in model.named_parameters() if p.requires_grad and id(p) not in adapters)
    return not all(".trainable_tokens_delta." in name for name in trained)


def _width(model: torch.nn.Module) -> int | None:
    return getattr(text_config(model), "hidden_size", None)


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


class AdapterRate(RateScale):
    """
    The rate of adapters: a factor on the scheduled learning rate that is known before the first step.

    After training went badly wrong it is reduced to a quarter. Preferences are the exception: where nearly all pairs
    are ranked right, a batch with one that is not has a loss far above the trend, at any rate.
    """

    def __init__(self, scale: float, *, backs_off: bool):
        self.scale, self.backs_off = scale, backs_off

    def back_off(self) -> None:
        if self.backs_off:
            self.scale = max(1.0, self.scale / 4)

    def state_dict(self) -> dict:
        return {"scale": self.scale}

    def load_state_dict(self, state: dict) -> None:
        self.scale = state["scale"]
