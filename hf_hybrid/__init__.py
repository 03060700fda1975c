"""Phase-aware training for Hugging Face causal language models."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

__version__ = "0.1.0"

_LAZY = {
    "Direction": "hf_hybrid.leaps.directions",
    "ForecastCallback": "hf_hybrid.forecast.run_forecast",
    "ForecastPruner": "hf_hybrid.integrations.optuna",
    "HybridArguments": "hf_hybrid.arguments",
    "HybridCPOConfig": "hf_hybrid.trl.preferences",
    "HybridCPOTrainer": "hf_hybrid.trl.preferences",
    "HybridConfig": "hf_hybrid.config",
    "HybridDPOConfig": "hf_hybrid.trl.sft_dpo",
    "HybridDPOTrainer": "hf_hybrid.trl.sft_dpo",
    "HybridGKDConfig": "hf_hybrid.trl.distillation",
    "HybridGKDTrainer": "hf_hybrid.trl.distillation",
    "HybridGRPOConfig": "hf_hybrid.trl.rl",
    "HybridGRPOTrainer": "hf_hybrid.trl.rl",
    "HybridKTOConfig": "hf_hybrid.trl.others",
    "HybridKTOTrainer": "hf_hybrid.trl.others",
    "HybridORPOConfig": "hf_hybrid.trl.preferences",
    "HybridORPOTrainer": "hf_hybrid.trl.preferences",
    "HybridRLOOConfig": "hf_hybrid.trl.rl",
    "HybridRLOOTrainer": "hf_hybrid.trl.rl",
    "HybridRewardConfig": "hf_hybrid.trl.others",
    "HybridRewardTrainer": "hf_hybrid.trl.others",
    "HybridSFTConfig": "hf_hybrid.trl.sft_dpo",
    "HybridSFTTrainer": "hf_hybrid.trl.sft_dpo",
    "HybridSummary": "hf_hybrid.records.summary",
    "HybridTrainer": "hf_hybrid.trainer",
    "HybridTrainerMixin": "hf_hybrid.trainer",
    "MemoryProfilerCallback": "hf_hybrid.records.profiler",
    "Phase": "hf_hybrid.part",
    "Part": "hf_hybrid.part",
    "SampleCallback": "hf_hybrid.integrations.samples",
    "UnrecoveredMemoryError": "hf_hybrid.recovery",
    "hybrid_config": "hf_hybrid.trl.sft_dpo",
    "plan_memory": "hf_hybrid.plan.planner",
}
# Without those of integrations/, of which most need TRL or Optuna: `from hf_hybrid import *` works without them.
__all__ = [
    "Direction",
    "ForecastCallback",
    "HybridArguments",
    "HybridConfig",
    "HybridSummary",
    "HybridTrainer",
    "HybridTrainerMixin",
    "MemoryProfilerCallback",
    "Phase",
    "Part",
    "UnrecoveredMemoryError",
    "plan_memory",
    "__version__",
]

if TYPE_CHECKING:
    from hf_hybrid.arguments import HybridArguments
    from hf_hybrid.config import HybridConfig
    from hf_hybrid.forecast.run_forecast import ForecastCallback
    from hf_hybrid.integrations.optuna import ForecastPruner as ForecastPruner
    from hf_hybrid.integrations.samples import SampleCallback as SampleCallback
    from hf_hybrid.leaps.directions import Direction
    from hf_hybrid.part import Part, Phase
    from hf_hybrid.plan.planner import plan_memory
    from hf_hybrid.records.profiler import MemoryProfilerCallback
    from hf_hybrid.records.summary import HybridSummary
    from hf_hybrid.recovery import UnrecoveredMemoryError
    from hf_hybrid.trainer import HybridTrainer, HybridTrainerMixin
    from hf_hybrid.trl.distillation import HybridGKDConfig as HybridGKDConfig
    from hf_hybrid.trl.distillation import HybridGKDTrainer as HybridGKDTrainer
    from hf_hybrid.trl.others import HybridKTOConfig as HybridKTOConfig
    from hf_hybrid.trl.others import HybridKTOTrainer as HybridKTOTrainer
    from hf_hybrid.trl.others import HybridRewardConfig as HybridRewardConfig
    from hf_hybrid.trl.others import HybridRewardTrainer as HybridRewardTrainer
    from hf_hybrid.trl.preferences import HybridCPOConfig as HybridCPOConfig
    from hf_hybrid.trl.preferences import HybridCPOTrainer as HybridCPOTrainer
    from hf_hybrid.trl.preferences import HybridORPOConfig as HybridORPOConfig
    from hf_hybrid.trl.preferences import HybridORPOTrainer as HybridORPOTrainer
    from hf_hybrid.trl.rl import HybridGRPOConfig as HybridGRPOConfig
    from hf_hybrid.trl.rl import HybridGRPOTrainer as HybridGRPOTrainer
    from hf_hybrid.trl.rl import HybridRLOOConfig as HybridRLOOConfig
    from hf_hybrid.trl.rl import HybridRLOOTrainer as HybridRLOOTrainer
    from hf_hybrid.trl.sft_dpo import HybridDPOConfig as HybridDPOConfig
    from hf_hybrid.trl.sft_dpo import HybridDPOTrainer as HybridDPOTrainer
    from hf_hybrid.trl.sft_dpo import HybridSFTConfig as HybridSFTConfig
    from hf_hybrid.trl.sft_dpo import HybridSFTTrainer as HybridSFTTrainer
    from hf_hybrid.trl.sft_dpo import hybrid_config as hybrid_config


def __getattr__(name: str):
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*__all__, *_LAZY})
