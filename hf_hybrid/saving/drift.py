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
    """Return a hash of each tensor."""
    return [int(value) for value in [torch.hash_tensor(tensor.detach()).view(torch.int64) for tensor in tensors]]


def is_plain(value: object) -> bool:
    """Whether a value is a tensor that can be hashed: no subclass that packs its bits, and neither sparse nor empty."""
    if not isinstance(value, Tensor) or type(value) not in (Tensor, torch.nn.Parameter):
        return False
    return value.layout is torch.strided and value.numel() > 0 and not value.is_complex()


def compare_processes(trainer: TrainerView, *, agreed_before: bool) -> bool:
    """
    Compare weights and states of all processes before a checkpoint is written. All must call this. Return whether they
    agree, or did at an earlier save (`agreed_before`). Raise [`RanksDriftedError`] on all if they no longer do.
    """
    if trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled:
        return False
    tensors, states = {}, trainer.optimizer.state
    for name, parameter in trainer.accelerator.unwrap_model(trainer.model).named_parameters():
        if parameter.requires_grad or parameter in states:  # or is frozen in this step alone
            name = canonical(name)
            tensors[f"`{name}`"] = parameter
            tensors |= {f"state `{key}` of `{name}`": value for key, value in states.get(parameter, {}).items()}
    tensors = {name: value for name, value in tensors.items() if is_plain(value)}
    hashes = gather_object([tuple(hashes_of(tensors.values()))])
    if len(set(hashes)) == 1:
        return True
    name = next(name for name, values in zip(tensors, zip(*hashes)) if len(set(values)) > 1)
    difference = _describe(trainer.state.global_step, name, hashes)
    if agreed_before and trainer.has_phases:
        saved = last_checkpoint(trainer.run_folder)
        start = f"with `resume_from_checkpoint=True`, to go on from `{saved}`" if saved else "from the beginning"
        raise RanksDriftedError(
            f"{difference}, so no checkpoint of this step is saved; start the same command again {start}, and have "
            "the memory of that machine tested."
        )
    if trainer.is_world_process_zero():
        logger.error("%s; training goes on.", difference)
    return agreed_before


def _describe(step: int, name: str, hashes: list[tuple[int, ...]]) -> str:
    """Return the beginning of a sentence: which processes differ, in which tensor, and who is in the minority."""
    ((most, count),) = Counter(hashes).most_common(1)
    if 2 * count > len(hashes):
        drifted = [process for process, values in enumerate(hashes) if values != most]
        return f"{_processes(drifted)} drifted from the {count} others by step {step} (in {name})"
    everyone = _processes(range(len(hashes)))
    return f"{everyone} differ after step {step} (in {name}), and nothing tells which of them is right"


def _processes(numbers: Iterable[int]) -> str:
    *others, last = map(str, numbers)
    return f"Processes {', '.join(others)} and {last}" if others else f"Process {last}"
