"""Parts of a micro-batch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

SEQUENCES = ("input_ids", "inputs_embeds", "labels")
"""What tells how many sequences a batch has, in this order; else the first tensor in it."""


class UnsplittableBatchError(ValueError):
    """A batch whose parts cannot be told: something in it is not a row per sequence."""


def sequences_in(batch: Any, blocks: int = 1) -> int:
    """
    Number of sequences (or pairs of them) in a collated batch.

    Args:
        batch (`Any`): A collated batch.
        blocks (`int`): Blocks that its rows consist of, each with one row per sequence: 2 where all chosen completions
            are followed by all rejected ones.

    Raises:
        UnsplittableBatchError: If it is no mapping, or holds no tensor.
    """
    if not isinstance(batch, Mapping):
        raise UnsplittableBatchError(f"The batch is a `{type(batch).__name__}`, not a dictionary of tensors.")
    first = [batch[name] for name in SEQUENCES if name in batch]
    for value in tree_leaves([first, dict(batch)]):
        if isinstance(value, torch.Tensor) and value.dim() > 0:
            return value.shape[0] // blocks
    raise UnsplittableBatchError("The batch holds no tensor with rows.")


def split_batch(batch: Mapping[str, Any], most: int, blocks: int = 1) -> list[dict[str, Any]]:
    """
    Cut a batch into parts of at most `most` sequences, in their order. With one block nothing is copied.

    Cut are tensors, lists and tuples with one entry per sequence (or per sequence and block), also inside dictionaries.
    Numbers, strings and tensors of one row, which hold for all sequences, go into every part.

    Args:
        batch (`Mapping`): A collated batch.
        most (`int`): Sequences per part; the last part may hold fewer.
        blocks (`int`): See [`sequences_in`].

    Raises:
        UnsplittableBatchError: If a tensor or list has neither one entry per sequence nor a single one: images packed
            into rows of patches, for example.
    """
    count = sequences_in(batch, blocks)
    bounds = [(first, min(first + most, count)) for first in range(0, count, most)]

    def part(value: Any, start: int, stop: int, name: str) -> Any:
        if isinstance(value, Mapping):
            return {key: part(inner, start, stop, f"{name}.{key}") for key, inner in value.items()}
        if not isinstance(value, (torch.Tensor, list, tuple)) or (isinstance(value, torch.Tensor) and not value.dim()):
            return value
        if len(value) == count:
            return value[start:stop]
        if len(value) == blocks * count:
            rows = [value[block * count + start : block * count + stop] for block in range(blocks)]
            return torch.cat(rows) if isinstance(value, torch.Tensor) else type(value)(sum(map(list, rows), []))
        if len(value) == 1 and isinstance(value, torch.Tensor):
            return value
        raise UnsplittableBatchError(f"`{name}` has {len(value)} entries for {count} sequences.")

    return [{name: part(value, start, stop, name) for name, value in batch.items()} for start, stop in bounds]


def parts_of(batch: Any, most: int | None, blocks: int = 1) -> list:
    """The batch in parts of at most `most` sequences; whole, if it has no more or cannot be split."""
    try:
        return [batch] if most is None or sequences_in(batch, blocks) <= most else split_batch(batch, most, blocks)
    except UnsplittableBatchError:
        return [batch]
