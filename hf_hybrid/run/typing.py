"""What functions of this package need of a trainer, for type checkers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

    from hf_hybrid.arguments import HybridArguments


class TrainerLike(Protocol):
    """A `transformers.Trainer` with `HybridTrainerMixin` in front: the attributes that others read."""

    model: nn.Module
    label_smoother: Callable | None
    compute_loss_func: Callable | None

    @property
    def hybrid_args(self) -> HybridArguments:
        """The options of this package."""
        ...
