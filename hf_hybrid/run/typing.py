"""What functions of this package need of a trainer, for type checkers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from torch import nn
    from transformers import Trainer

    from hf_hybrid.arguments import HybridArguments
    from hf_hybrid.part import Part
    from hf_hybrid.run.run import Run

    class TrainerLike(Trainer):
        """
        A `transformers.Trainer` with `HybridTrainerMixin` in front: what it has of its own.

        What is `Any` here has a class that stands above this room, or beside it, or is a wrapper of one.
        """

        model: nn.Module  # there is none between the trials of a search, where nothing asks for it
        optimizer: Any
        lr_scheduler: Any
        trial: Any
        current_gradient_accumulation_steps: float

        hybrid_args: HybridArguments
        run: Run
        parts: list[Part]
        memory: Any
        recovery: Any
        log_file: Any
        probe_dataset: Any
        custom_direction: Callable[..., Any] | None
        sequence_losses: Callable[..., Any]
        obstacle: str | None
        no_leaps_because: str | None
        cannot_repeat: str | None
        trains_preferences: bool

        @property
        def has_phases(self) -> bool: ...
        @property
        def phase_name(self) -> str | None: ...
        @property
        def loss_in_chunks(self) -> bool: ...
        @property
        def run_folder(self) -> Path: ...
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None) -> Any: ...
        def hybrid_summary(self) -> dict[str, Any]: ...
        def run_position(self) -> Any: ...

else:
    TrainerLike = object
