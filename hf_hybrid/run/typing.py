"""The type of a trainer, for functions of rooms that the trainer imports: they cannot import it."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hf_hybrid.trainer import HybridTrainerMixin as TrainerLike
else:
    TrainerLike = object
