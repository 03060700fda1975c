"""
Reward models and KTO. A reward model's rows share under a loss of its own (rows/any_loss.py); KTO reads labels.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from hf_hybrid.compat import trl_error
from hf_hybrid.part import Step
from hf_hybrid.rows.exchange import Exchange
from hf_hybrid.rows.tree import Rows
from hf_hybrid.run.trainer_view import overridden
from hf_hybrid.trainer import HybridTrainerMixin
from hf_hybrid.trl.sft_dpo import (
    ReferenceMixin,
    TRLConfigBase,
    as_reference,
    check_images,
    config_for,
    copy_pairs_ahead,
    options_of_rows,
    rows_of_pairs,
)

try:
    from trl import KTOConfig, KTOTrainer, RewardConfig, RewardTrainer
except ImportError as error:
    raise trl_error(error) from error


@dataclass
class HybridRewardConfig(TRLConfigBase, RewardConfig):
    """[`~trl.RewardConfig`] with the options of [`HybridArguments`]; `bf16` is as in [`HybridSFTConfig`]."""


@dataclass
class HybridKTOConfig(TRLConfigBase, KTOConfig):
    """[`~trl.KTOConfig`] with the options of [`HybridArguments`]; `bf16` is as in [`HybridSFTConfig`]."""


class HybridRewardTrainer(HybridTrainerMixin, RewardTrainer):  # ty: ignore[incompatible-method-override]
    """
    Drop-in for [`~trl.RewardTrainer`] that computes no padding, and a prompt once for both of its completions. There
    are no leaps. `args` may be a [`HybridRewardConfig`] or TRL's.
    """

    blocks_of_rows = 2  # a pair is two rows of a batch, if memory runs out

    def __init__(self, model=None, args=None, data_collator=None, *positional, **kwargs):
        self._own_collator = data_collator is not None
        super().__init__(model, args, data_collator, *positional, **kwargs)

    def _prepare_dataset(self, dataset, processing_class, args, *more, **kwargs):
        read = self._own_collator and not args.remove_unused_columns
        for name in {"image", "images"}.intersection(() if read else dataset.column_names or next(iter(dataset))):
            raise ValueError(
                f"The data have images in `{name}`, and TRL's reward trainer reads text alone. Remove the column to "
                "train without them, or set `remove_unused_columns=False` and a `data_collator` that reads them."
            )
        return super()._prepare_dataset(dataset, processing_class, args, *more, **kwargs)


class JudgedRows(Exchange):
    """Shares the rows of judged answers."""

    def begin_step(self, step: Step) -> None:
        super().begin_step(step)
        copy_pairs_ahead(self, step)

    def rows_foreseen(self, batch: Any) -> Rows | None:
        return (
            rows_of_pairs(batch)
            if isinstance(batch, Mapping) and torch.is_tensor(batch.get("completion_mask"))
            else None
        )


class HybridKTOTrainer(ReferenceMixin, HybridTrainerMixin, KTOTrainer):  # ty: ignore[incompatible-method-override]
    """
    Drop-in for [`~trl.KTOTrainer`] that computes no padding, and what rows share once. There are no leaps. `args` may
    be a [`HybridKTOConfig`] or TRL's.
    """

    ref_model: nn.Module | None

    def __init__(self, model, ref_model=None, args=None, *positional, **kwargs):
        args = config_for(args, model, HybridKTOConfig, "KTO")
        self.rows = JudgedRows(*options_of_rows(args), compiles=args.torch_compile)
        super().__init__(model, ref_model, args, *positional, **kwargs)
        check_images(self)

    @property
    def of_reference(self) -> tuple[tuple[str, ...], ...]:
        if not self.calculate_KL:
            return (("ref_logps",),) if super().of_reference else ()
        return () if self._precomputes else (("ref_logps",), ("ref_KL_logps",))

    def passes_beside(self) -> int:
        return len(self.of_reference) + bool(self.calculate_KL)

    def compute_loss(self, model, inputs, *args, **kwargs):
        own = overridden(self, "_compute_loss") or overridden(self, "compute_loss", below=HybridKTOTrainer)
        self.rows.number_of(inputs, may_change=own is not None)
        with self.rows.on(self.model, self.ref_model):
            return super().compute_loss(model, inputs, *args, **kwargs)

    def _compute_kl_logps(self, model, batch):
        compute, later = super()._compute_kl_logps, None

        def beside():
            with self.compute_loss_context_manager():
                return [compute(model, batch)]

        if self.calculate_KL and self._goes_beside():  # of the policy, before the pass that has them
            later = self.memory.beside(beside, 1)
        return compute(model, batch) if later is None else later[0]

    def _compute_of_reference(self, names, inputs):
        if not self.calculate_KL:
            return super()._compute_of_reference(names, inputs)[:1]
        if names == ("ref_logps",):
            own = {name: value for name, value in inputs.items() if not name.startswith("KL_")}
            inputs = {f"KL_{name}" if f"KL_{name}" in inputs else name: value for name, value in own.items()}
        adapters = as_reference(self) if self.ref_model is None else contextlib.nullcontext()
        with torch.no_grad(), adapters, self.compute_loss_context_manager():
            return [self._compute_kl_logps(self.ref_model or self.model, inputs)]
