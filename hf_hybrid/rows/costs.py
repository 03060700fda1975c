"""
Is it worth it? What a model computes for padded rows, and for trees.

Linear layers cost the same per token, attention per pair of tokens, and the head per scored token. [`Costs`] counts all
three. If less than 5 % is saved the padded batch is computed, to the last bit as plain `Trainer` does.

On a GPU the host launches the same kernels for a micro-batch of any size. One more micro-batch costs no time if each
keeps the device busy for longer than that, [`busy`], and a small one holds less memory.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from operator import attrgetter
from typing import Any, NamedTuple

import torch

from hf_hybrid.compat import configs_of_layers
from hf_hybrid.rows.images import encoder_of, patches_of
from hf_hybrid.rows.tree import Batch, Tree
from hf_hybrid.streaming.layers import base_model

WORTH = 0.95
"""Padded rows are exchanged for trees that cost less than this share of them."""
BUSY = 1.3e12
"""
Operations of one layer, in the forward and the backward pass of a micro-batch, after which a fast GPU has computed for
as long as its host launched: 264 TFLOP/s, which an H100 reached at 1B (`benchmarks/gpu`, DPO), for 5 ms, which is 30 us
for each of 165 kernels. A layer with adapters launches 143 to 148 operations in a step, with 1.13 to 1.32 kernels each.
It lies between what was measured (`benchmarks/gpu`, instructions): at 1B a micro-batch has 0.6e12 and the host is the
limit, at 8B it has 2.2e12 and the device is. [`busy`] counts less for slower GPUs.
"""
MEMORY_OF_AN_H100 = 3.35e12
"""Bytes per second that it reads."""


def busy(device: torch.device) -> float:
    """
    Return [`BUSY`] for a device, by how fast it reads its memory, which bounds most of the kernels that a host hardly
    launches in time. The driver says the rate: a measured one, and so windows, could be another after a resume.
    """
    rate = 0.0
    if device.type == "cuda" and torch.cuda.is_available():
        properties: Any = torch.cuda.get_device_properties(device)
        clock, width = (getattr(properties, name, 0) for name in ("memory_clock_rate", "memory_bus_width"))  # kHz, bits
        rate = 2e3 * clock * width / 8  # twice per cycle
    return BUSY * rate / MEMORY_OF_AN_H100 if rate else BUSY


def share_saved(tree: Tree) -> float:
    """Return the share of the tokens of a tree's rows that it does not compute again."""
    return 1 - tree.size / max(sum(row.length for row in tree.rows), 1)


class Costs(NamedTuple):
    """Operations of a forward pass; the backward pass has about twice as many, or as many where weights are frozen."""

    token: float  # per token, in linear layers without the head
    pair: float  # per pair of tokens, in attention
    scored: float  # per token that the head scores
    layers: int = 1
    image: float = 0.0  # per token of an image that is encoded
    passes: float = 3.0  # operations of forward and backward pass, as a multiple of those of the forward pass

    @classmethod
    def of(cls, model: Any) -> Costs:
        """Count the operations of a model: 2 per weight, and 4 per layer, head and dimension for a pair of tokens."""
        base: Any = base_model(model)
        config, tables = base.config.get_text_config(), {}
        for table in (base.get_input_embeddings(), base.get_output_embeddings()):
            if table is not None:
                tables[id(table.weight)] = _weights_of(table.weight)
        weights = trained = of_images = 0.0
        sees = set() if (encoder := encoder_of(base)) is None else set(map(id, encoder.parameters()))
        sees -= set(map(id, base.get_decoder().parameters()))
        for name, parameter in model.named_parameters():
            if id(parameter) not in tables:
                count = _weights_of(parameter) * (_share_of_experts(config) if ".experts." in name else 1.0)
                if id(parameter) in sees:
                    of_images += count * patches_of(encoder) ** 2
                    continue
                weights, trained = weights + count, trained + count * parameter.requires_grad
        layers, passes = config.num_hidden_layers, 2.0 + trained / weights
        widths = sum(map(_width_of_attention, configs_of_layers(config)))
        return cls(2.0 * weights, 4.0 * widths, 2.0 * max(tables.values()), layers, 2.0 * of_images, passes)

    def padded(self, batch: Batch, *, compact: bool) -> float:
        """Return the operations of a padded batch, whose head scores every token unless it is `compact`."""
        rows, length = batch.ids.shape
        scored = int(batch.predicted.sum()) if compact else rows * length
        return rows * (length * self.token + length**2 * self.pair) + scored * self.scored

    def tree(self, tree: Tree) -> float:
        """Return the operations of a tree, each label counted once per row."""
        return self._layers(tree) + tree.labels * self.scored

    def pays(self, trees: Sequence[Tree], instead: Sequence[Tree]) -> bool:
        """Whether trees cost clearly less than others."""
        return sum(map(self.tree, trees)) < WORTH * sum(map(self.tree, instead))

    def keep_busy(self, trees: Sequence[Tree], device: torch.device) -> bool:
        """Whether a GPU computes micro-batches of such trees for longer than the host launches them."""
        return self.passes * sum(map(self._layers, trees)) > busy(device) * self.layers * len(trees)

    def _layers(self, tree: Tree) -> float:
        """Return the operations of a tree without the head."""
        return tree.size * self.token + sum(map(attrgetter("pairs"), tree.segments)) * self.pair


def _weights_of(parameter: Any) -> int:
    """Return how many weights a parameter stands for, which may be packed (two in a byte) or elsewhere (ZeRO-3)."""
    packed = getattr(parameter, "quant_state", None) or parameter
    return getattr(packed, "ds_numel", math.prod(packed.shape))


def _width_of_attention(config: Any) -> int:
    """Return heads times their size."""
    heads = getattr(config, "num_attention_heads", 0)
    return heads * (getattr(config, "head_dim", None) or config.hidden_size // max(heads, 1))


def _share_of_experts(config: Any) -> float:
    """Return the share of a layer's experts that compute a token."""
    names = ("num_local_experts", "num_experts", "n_routed_experts")
    counts = [getattr(config, name) for name in names if getattr(config, name, None)]
    return getattr(config, "num_experts_per_tok", counts[0]) / counts[0] if counts else 1.0
