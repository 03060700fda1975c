"""A reference model that a callback moves after the trained one (`sync_ref_model` of TRL): checkpoints hold it too."""

from __future__ import annotations

import logging
from typing import Any

import torch

from hf_hybrid.machine import sharding_of
from hf_hybrid.part import Part

logger = logging.getLogger(__name__)


class Reference(Part):
    """The weights of the reference of a trainer with `ref_model`. A resumed run would begin with the first ones."""

    name = "reference"
    needs_numbers = False

    def __init__(self, trainer: Any):
        self.trainer = trainer

    def _weights(self) -> dict[str, torch.Tensor]:
        model = self.trainer.accelerator.unwrap_model(self.trainer.ref_model)
        return {name: weight.detach() for name, weight in model.named_parameters()}

    def state_dict(self) -> dict[str, Any]:
        return {"weights": self._weights()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, weight in self._weights().items():
            weight.copy_(state["weights"][name])


def parts_of_reference(trainer: Any) -> list[Part]:
    """Return [`Reference`], if the trainer moves one."""
    if not getattr(trainer.args, "sync_ref_model", False) or getattr(trainer, "ref_model", None) is None:
        return []
    if (sharding := sharding_of(trainer.args)) is None:
        return [Reference(trainer)]
    logger.warning(
        "`sync_ref_model=True` moves the reference model, and with `%s` checkpoints do not hold it: a resumed run "
        "begins with the first one.",
        sharding,
    )
    return []
