"""ORPO, CPO and SimPO: preferences without a reference. TRL puts their rows together in the loss (rows/any_loss.py)."""

from __future__ import annotations

from dataclasses import dataclass

from hf_hybrid.compat import trl_error
from hf_hybrid.trainer import HybridTrainerMixin
from hf_hybrid.trl.sft_dpo import TRLConfigBase

try:
    from trl.experimental.cpo import CPOConfig, CPOTrainer
    from trl.experimental.orpo import ORPOConfig, ORPOTrainer
except ImportError as error:
    raise trl_error(error) from error


@dataclass
class HybridORPOConfig(TRLConfigBase, ORPOConfig):
    """TRL's `ORPOConfig` with the options of [`HybridArguments`]; `bf16` is as in [`HybridSFTConfig`]."""


@dataclass
class HybridCPOConfig(TRLConfigBase, CPOConfig):
    """TRL's `CPOConfig` with the options of [`HybridArguments`]; `bf16` is as in [`HybridSFTConfig`]."""


class HybridORPOTrainer(HybridTrainerMixin, ORPOTrainer):  # ty: ignore[incompatible-method-override]
    """Drop-in for TRL's `ORPOTrainer` that computes no padding, and a prompt once for both of its completions."""

    trains_preferences = True


class HybridCPOTrainer(HybridTrainerMixin, CPOTrainer):  # ty: ignore[incompatible-method-override]
    """Drop-in for TRL's `CPOTrainer`, also with the loss of SimPO, as [`HybridORPOTrainer`]."""

    trains_preferences = True
