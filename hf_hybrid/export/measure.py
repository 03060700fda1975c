"""
What an export costs: held-out loss, bytes and speed of a model and of its export, in one run.

Both models see the same batches. Speed is that of `generate` without sampling, one sequence at a time. The two take
turns, and the median of their runs counts, so that a machine that is busy for a while slows both.

Bytes in memory are those of weights, buffers and what belongs to packed weights (scales, tables), as they stand in the
loaded model. transformers unpacks GGUF files of most architectures when it loads them; llama.cpp does not.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationMixin, PreTrainedModel

from hf_hybrid.plan.accounting import storage_bytes

PROMPT, GENERATED, TURNS = 16, 32, 3
"""Tokens of the prompt, tokens generated after it, and how often each model generates them."""


@torch.no_grad()
def held_out(model: PreTrainedModel, batches: Iterable[Mapping[str, Any]]) -> dict[str, float | int]:
    """
    Return the mean `loss` of a token in nats, its exponential, `perplexity`, and the `sequences` and `tokens` it is of.

    Args:
        model (`PreTrainedModel`): In evaluation mode.
        batches: What the model's `forward` takes, with `labels`, on any device.

    Raises:
        ValueError: If a batch has no labels: then the loss is not one of a language model.
    """
    total, tokens, sequences = 0.0, 0, 0
    for batch in batches:
        if "labels" not in batch:
            raise ValueError(
                f"`eval_dataset` must give batches with `labels`, got {', '.join(map(repr, batch))}. Pass texts with "
                "`input_ids` and `labels`."
            )
        inputs = {key: value.to(model.device) if isinstance(value, Tensor) else value for key, value in batch.items()}
        counted = int((inputs["labels"][:, 1:] != -100).sum())
        total += float(model(**inputs).loss) * counted
        tokens, sequences = tokens + counted, sequences + len(inputs["labels"])
    if not tokens:
        raise ValueError("`eval_dataset` holds no token with a label. Pass other texts.")
    loss = total / tokens
    perplexity = math.exp(loss) if loss < 700 else math.inf
    return {"loss": loss, "perplexity": perplexity, "sequences": sequences, "tokens": tokens}


def generation_speeds(*models: PreTrainedModel) -> list[float]:
    """Return the tokens per second that each of the models generates, which take turns."""
    seconds: list[list[float]] = [[] for _ in models]
    for turn in range(TURNS + 1):
        for model, times in zip(models, seconds):
            started = time.perf_counter()
            _generate(model)
            if turn:  # the first warms up
                times.append(time.perf_counter() - started)
    return [GENERATED / statistics.median(times) for times in seconds]


@torch.no_grad()
def _generate(model: PreTrainedModel) -> None:
    if not isinstance(model, GenerationMixin):
        raise TypeError(f"`{type(model).__name__}` generates no text.")
    prompt = torch.arange(1, PROMPT + 1, device=model.device)[None] % model.config.get_text_config().vocab_size
    generated = model.generate(
        input_ids=prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=GENERATED,
        min_new_tokens=GENERATED,
        do_sample=False,
        pad_token_id=0,
    )
    generated.cpu()  # waits for the device


def memory_bytes(model: nn.Module) -> int:
    """Return the bytes that a model holds in memory, every storage once."""
    return storage_bytes([*model.parameters(), *model.buffers(), *_tables(model)])


def _tables(model: nn.Module) -> Iterator[Tensor]:
    """What bitsandbytes keeps beside packed weights, and no module lists."""
    for parameter in model.parameters():
        state = getattr(parameter, "quant_state", None)
        while state is not None:
            yield from (value for value in vars(state).values() if isinstance(value, Tensor))
            state = getattr(state, "state2", None)


def disk_bytes(folder: Path) -> int:
    """Return the bytes of the files of weights in a folder."""
    return sum(path.stat().st_size for path in folder.iterdir() if path.suffix in (".safetensors", ".gguf"))
