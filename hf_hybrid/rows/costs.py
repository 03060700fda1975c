"""
Is it worth it? What a model computes for padded rows, and for trees.

Linear layers cost the same per token, attention per pair of tokens, and the head per scored token. [`Costs`] counts all
three. If less than 5 % is saved the padded batch is computed, to the last bit as plain `Trainer` does.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from hf_hybrid.rows.tree import Batch, Tree
from hf_hybrid.streaming.layers import base_model

WORTH = 0.95
"""Padded rows are exchanged for trees that cost less than this share of them."""


def share_saved(tree: Tree) -> float:
    """Return the share of the tokens of a tree's rows that it does not compute again."""
    return 1 - tree.size / max(sum(row.length for row in tree.rows), 1)


class Costs(NamedTuple):
    """Operations of a forward pass; the backward pass has about twice as many."""

    token: float  # per token, in linear layers without the head
    pair: float  # per pair of tokens, in attention
    scored: float  # per token that the head scores

    @classmethod
    def of(cls, model: Any) -> Costs:
        """Count the operations of a model: 2 per weight, and 4 per layer, head and dimension for a pair of tokens."""
        base: Any = base_model(model)
        config, tables = base.config.get_text_config(), {}
        for table in (base.get_input_embeddings(), base.get_output_embeddings()):
            if table is not None:
                tables[id(table.weight)] = table.weight.numel()
        weights = sum(parameter.numel() for parameter in model.parameters()) - sum(tables.values())
        heads = config.num_attention_heads
        size = getattr(config, "head_dim", None) or config.hidden_size // heads
        return cls(2.0 * weights, 4.0 * config.num_hidden_layers * heads * size, 2.0 * max(tables.values()))

    def padded(self, batch: Batch, *, compact: bool) -> float:
        """Return the operations of a padded batch, whose head scores every token unless it is `compact`."""
        rows, length = batch.ids.shape
        scored = int(batch.predicted.sum()) if compact else rows * length
        return rows * (length * self.token + length**2 * self.pair) + scored * self.scored

    def tree(self, tree: Tree) -> float:
        """Return the operations of a tree, each label counted once per row."""
        pairs = sum(segment.pairs for segment in tree.segments)
        return tree.size * self.token + pairs * self.pair + tree.labels * self.scored
