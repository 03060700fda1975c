"""
Reward models and KTO: TRL's trainers with the mixin. Their rows share under losses of their own (rows/any_loss.py).
"""

from __future__ import annotations

from dataclasses import dataclass

from hf_hybrid.compat import trl_error
from hf_hybrid.trainer import HybridTrainerMixin
from hf_hybrid.trl.sft_dpo import TRLConfigBase

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


class HybridKTOTrainer(HybridTrainerMixin, KTOTrainer):  # ty: ignore[incompatible-method-override]
    """
    Drop-in for [`~trl.KTOTrainer`] that computes no padding, and what rows share once. There are no leaps. `args` may
    be a [`HybridKTOConfig`] or TRL's.
    """
