"""Phase-aware training for Hugging Face causal language models."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

__version__ = "0.1.0"

_LAZY = {
    "Direction": "hf_hybrid.prediction.directions.base",
    "HybridArguments": "hf_hybrid.arguments",
    "HybridConfig": "hf_hybrid.config",
    "HybridTrainer": "hf_hybrid.trainer",
    "HybridTrainerMixin": "hf_hybrid.trainer",
    "Phase": "hf_hybrid.phases",
    "PhasePlugin": "hf_hybrid.plugins",
}
__all__ = [
    "Direction",
    "HybridArguments",
    "HybridConfig",
    "HybridTrainer",
    "HybridTrainerMixin",
    "Phase",
    "PhasePlugin",
    "__version__",
]

if TYPE_CHECKING:
    from hf_hybrid.arguments import HybridArguments
    from hf_hybrid.config import HybridConfig
    from hf_hybrid.phases import Phase
    from hf_hybrid.plugins import PhasePlugin
    from hf_hybrid.prediction.directions.base import Direction
    from hf_hybrid.trainer import HybridTrainer, HybridTrainerMixin


def __getattr__(name: str):
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
