"""What an export costs: the held-out loss of a model and of its export on the same batches, and their bytes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel


def checked(batches: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return held-out batches as a list. Raises `ValueError` if they are none of a language model."""
    held_out = list(batches)
    for batch in held_out:
        if "labels" not in batch:
            raise ValueError(
                f"`eval_dataset` must give batches with `labels`, got {', '.join(map(repr, batch))}. Pass texts with "
                "`input_ids` and `labels`."
            )
    if held_out and not any((batch["labels"][:, 1:] != -100).any() for batch in held_out):
        raise ValueError("`eval_dataset` holds no token with a label. Pass other texts.")
    return held_out


@torch.no_grad()
def held_out(model: PreTrainedModel, batches: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """
    Return the mean `loss` of a token in nats, its exponential, `perplexity`, and the `sequences` and `tokens` it is of.
    """
    total, tokens, sequences = 0.0, 0, 0
    for batch in batches:
        inputs = {key: value.to(model.device) if isinstance(value, Tensor) else value for key, value in batch.items()}
        labels = int((inputs["labels"][:, 1:] != -100).sum())
        if labels:
            total += float(model(**inputs).loss) * labels
        tokens, sequences = tokens + labels, sequences + len(inputs["labels"])
    loss = total / tokens
    perplexity = math.exp(loss) if loss < 700 else math.inf
    return {"loss": loss, "perplexity": perplexity, "sequences": sequences, "tokens": tokens}


def disk_bytes(folder: Path) -> int:
    """Return the bytes of the files of weights in a folder."""
    return sum(path.stat().st_size for path in folder.iterdir() if path.suffix in (".safetensors", ".gguf"))
