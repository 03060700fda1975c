"""
The router's loss of a mixture of experts, from the router logits of a flat row.

A router that sends all tokens to one expert wastes the others. So transformers adds a loss (of the Switch Transformer,
https://huggingface.co/papers/2101.03961) to that of the labels. For each micro-batch it takes two numbers per expert:

    f = the share of tokens that chose the expert          P = the mean probability that routers gave to it
    loss = experts * sum over experts of f * P

Both are means over the tokens of the micro-batch and over the layers. Padding that the mask hides does not count. The
loss is no sum over tokens, because `f` multiplies `P`. So three things are needed to have it from a tree:

- **Every token has to be there**, also those that predict nothing ([`Batch.rows`] with `whole`).
- **Each slot counts as often as rows read it.** A mean over the tokens of a micro-batch is a mean over slots, weighted
  with the number of that micro-batch's rows that go through a slot ([`Tree.reads`]).
- **A micro-batch stays together.** A flat row may hold several micro-batches of `Trainer`. Each has its own weights,
  and its own loss. But a micro-batch is not divided among flat rows ([`join`] in tree.py), since one half does not know
  the `f` of the other.

The model would compute its loss from the flat row, where every slot counts once. So it is told to leave it out, its
backbone is told to return the router logits all the same, and the losses are added behind the model (exchange.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

OPTION = "output_router_logits"
"""Option of a config, and argument of a forward pass, that adds the loss."""


class Router(NamedTuple):
    """What a model does with router logits, as its config and attributes say now."""

    base: Any
    config: Any

    @classmethod
    def of(cls, base: Any) -> Router | None:
        """Return that of a causal model, or `None` if its config knows of none."""
        config = base.config.get_text_config()
        return cls(base, config) if hasattr(config, OPTION) else None

    @property
    def chosen(self) -> int | None:
        """Experts per token."""
        return getattr(self.base, "num_experts_per_tok", None) or getattr(self.config, "num_experts_per_tok", None)

    @property
    def weight(self) -> float | None:
        """That of the loss in the loss of the model; `None` if it has none, and only others add it."""
        name = "router_aux_loss_coef"
        return getattr(self.base, name, getattr(self.config, name, None))

    def has_loss(self, inputs: Mapping[str, Any]) -> bool:
        """Whether a model adds a router's loss for these inputs."""
        asked = inputs.get(OPTION)
        return bool(getattr(self.config, OPTION) if asked is None else asked)


def router_losses(logits: Sequence[Tensor], chosen: int, reads: Tensor) -> Tensor:
    """
    Return the loss of each micro-batch, `[micro_batches]` in fp32, not yet weighted.

    `logits` are those of each layer, `[slots, experts]`; `chosen` is the number of experts per token; `reads`, of shape
    `[micro_batches, slots]`, says how many rows of a micro-batch read a slot. It is `load_balancing_loss_func` of
    transformers (models/mixtral), whose mask would be one row of `reads`.
    """
    device = logits[0].device
    reads = reads.to(device, torch.float32)
    shares = probabilities = reads.new_zeros(len(reads), logits[0].shape[-1])
    with torch.autocast(device.type, enabled=False):
        for of_layer in logits:
            weights = of_layer.to(device).flatten(0, -2).float().softmax(-1)
            choices = torch.zeros_like(weights).scatter_(1, weights.topk(chosen, dim=-1).indices, 1.0)
            shares = shares + reads @ choices
            probabilities = probabilities + reads @ weights
    tokens = reads.sum(1, keepdim=True) * len(logits)
    return shares.shape[1] * (shares / tokens * (probabilities / tokens)).sum(1)
