"""
Drift: processes that must hold the same weights, and no longer do.

A bit that flips in memory, or a faulty processor, raises no error. Under DDP every process makes the same update, so
all of them must hold the same weights and states of the optimizer, bit for bit. If one differs, all train on, and the
copy of the first process is saved. So at the beginning of every save the processes compare hashes of what they hold. If
these differ, nothing is saved, and the run ends with one sentence. It names the processes in the minority. Where there
is no majority (always with two processes) it names all, because nothing tells which of them is right. The last
checkpoint was saved when all agreed, so the same command goes on from there.

Under FSDP and DeepSpeed each process has shards of its own, and nothing is compared.

Some trainers let processes differ. A run whose processes never agreed at a save logs an error instead, and goes on. So
does one with `enable_predict=False`, because plain `Trainer` would go on.

The hash is torch's: all elements as words of 64 bits, joined by exclusive or, in which one changed bit never cancels.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable

import torch
from accelerate.utils import gather_object
from torch import Tensor

from hf_hybrid.run.trainer_view import TrainerView
from hf_hybrid.run.weights import canonical
from hf_hybrid.saving.manifest import last_checkpoint

logger = logging.getLogger(__name__)


class RanksDriftedError(RuntimeError):
    """Processes that must hold the same weights hold different ones. The message names them, and the parameter."""


def hashes_of(tensors: Iterable[Tensor]) -> list[int]:
    """Return a hash of each tensor. The device is waited for once."""
    hashes = [torch.hash_tensor(tensor.detach()).view(torch.int64) for tensor in tensors]
    on_device = [value for value in hashes if value.device.type != "cpu"]
    from_device = iter(torch.stack(on_device).tolist() if on_device else [])
    return [int(value) if value.device.type == "cpu" else next(from_device) for value in hashes]


def is_plain(value: object) -> bool:
    """Whether a value is a tensor that can be hashed: no subclass that packs its bits, and neither sparse nor empty."""
    if not isinstance(value, Tensor) or type(value) not in (Tensor, torch.nn.Parameter):
        return False
    return value.layout is torch.strided and value.numel() > 0 and not value.is_complex()


class DriftCheck:
    """Compares what the processes of a training hold."""

    def __init__(self, trainer: TrainerView):
        self._trainer = trainer
        self._agreed = False

    def compare(self, step: int) -> None:
        """
        Compare weights and states of all processes, before the checkpoint of `step` is written. All must call this.

        Raises:
            RanksDriftedError: On all processes, if they differ and have agreed at an earlier save.
        """
        trainer = self._trainer
        if trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled:
            return
        tensors, states = {}, trainer.optimizer.state
        for name, parameter in trainer.accelerator.unwrap_model(trainer.model).named_parameters():
            if parameter.requires_grad:
                name = canonical(name)
                tensors[f"`{name}`"] = parameter
                tensors |= {f"state `{key}` of `{name}`": value for key, value in states.get(parameter, {}).items()}
        tensors = {name: value for name, value in tensors.items() if is_plain(value)}
        hashes = gather_object([tuple(hashes_of(tensors.values()))])
        if len(set(hashes)) == 1:
            self._agreed = True
            return
        name = next(name for name, values in zip(tensors, zip(*hashes)) if len(set(values)) > 1)
        difference = _describe(step, name, hashes)
        if self._agreed and trainer.has_phases:
            saved = last_checkpoint(trainer.run_folder)
            start = f"with `resume_from_checkpoint=True`, to go on from `{saved}`" if saved else "from the beginning"
            raise RanksDriftedError(
                f"{difference}, so no checkpoint of this step is saved; start the same command again {start}, and have "
                "the memory of that machine tested."
            )
        if trainer.is_world_process_zero():
            logger.error("%s; training goes on.", difference)


def _describe(step: int, name: str, hashes: list[tuple[int, ...]]) -> str:
    """Return the beginning of a sentence: which processes differ, in which tensor, and who is in the minority."""
    ((most, count),) = Counter(hashes).most_common(1)
    if 2 * count > len(hashes):
        drifted = [process for process, values in enumerate(hashes) if values != most]
        return f"{_processes(drifted)} drifted from the {count} others by step {step} (in {name})"
    everyone = _processes(list(range(len(hashes))))
    return f"{everyone} differ after step {step} (in {name}), and nothing tells which of them is right"


def _processes(numbers: list[int]) -> str:
    *others, last = map(str, numbers)
    return f"Processes {', '.join(others)} and {last}" if others else f"Process {last}"
