"""
Distillation: a student learns the distribution of a teacher, on answers that are given and on its own (TRL's GKD).

TRL's collator knows the last answer of a chat. Here rows come with labels, as those of SFT, so that every answer of a
chat is learned from; the student itself answers what stands before the last one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence

from hf_hybrid.compat import trl_error
from hf_hybrid.rows.tree import IGNORED
from hf_hybrid.trainer import HybridTrainerMixin
from hf_hybrid.trl.sft_dpo import TRLConfigBase

try:
    from trl.experimental.gkd import GKDConfig, GKDTrainer
except ImportError as error:
    raise trl_error(error) from error


@dataclass
class HybridGKDConfig(TRLConfigBase, GKDConfig):
    """TRL's `GKDConfig` with the options of [`HybridArguments`]; `bf16` is as in [`HybridSFTConfig`]."""

    def __post_init__(self):
        super().__post_init__()
        for name in ("packing", "padding_free"):
            if getattr(self, name):
                raise ValueError(f"`{name}=True` does nothing where a student answers by itself. Leave it out.")


class HybridGKDTrainer(HybridTrainerMixin, GKDTrainer):  # ty: ignore[incompatible-method-override]
    """
    Drop-in for TRL's `GKDTrainer` that computes no padding, and what rows share once, in student and teacher. Rows may
    have `input_ids` and `labels` with a [`AnswersCollator`].
    """

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        # TRL turns the cache off where layers are recomputed, and then generates without recomputing.
        self.generation_config.use_cache = self.generation_kwargs["use_cache"] = True


@dataclass
class AnswersCollator:
    """Pads rows with `input_ids` and `labels` on the left, and what stands before the last answer of each."""

    pad: int

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        ids = [torch.tensor(row["input_ids"]) for row in rows]
        labels = [torch.tensor(row["labels"]) for row in rows]
        prompts = [tokens[: _last_answer(label)] for tokens, label in zip(ids, labels)]
        batch = {"input_ids": (ids, self.pad), "labels": (labels, IGNORED), "prompts": (prompts, self.pad)}
        for name, parts in (("attention_mask", ids), ("prompt_attention_mask", prompts)):
            batch[name] = [torch.ones_like(part) for part in parts], 0
        return {
            name: pad_sequence(parts, batch_first=True, padding_value=float(fill), padding_side="left")
            for name, (parts, fill) in batch.items()
        }


def _last_answer(labels: torch.Tensor) -> int:
    """Return where the last stretch of learned tokens begins, behind at least one token."""
    before = (labels == IGNORED).nonzero()
    last = int((labels != IGNORED).nonzero()[-1])
    return max(int(before[before < last].max()) + 1 if (before < last).any() else 0, 1)
