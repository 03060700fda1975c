"""
Drift: processes that must hold the same weights, and no longer do.

A bit that flips in memory, or a faulty processor, raises no error. Under DDP every process makes the same update, so
all of them must hold the same weights and states of the optimizer, bit for bit. If one differs, all train on, and the
copy of the first process is saved. So at the beginning of every save the processes compare hashes of what they hold. If
these differ, nothing is saved, and the run ends with one sentence. It names the processes in the minority. Where there
is no majority (always with two processes) it names all, because nothing tells which of them is right. The last
checkpoint was saved when all agreed, so the same command goes on from there.

Under FSDP2 each process has shards of its own. Then only what every process holds whole can be compared: the step
counters of the optimizer, and modules that are not sharded. A line at INFO says how many tensors these are. FSDP1 and
DeepSpeed flatten the weights, so nothing is compared.

Some trainers let processes differ. A run whose processes never agreed at a save logs an error instead, and goes on. So
does one with `enable_predict=False`, because plain `Trainer` would go on.

The hash is torch's: all elements as words of 64 bits, joined by exclusive or, in which one changed bit never cancels.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Iterator

import torch
from accelerate.utils import gather_object
from torch import Tensor

from hf_hybrid.run.trainer_view import TrainerView
from hf_hybrid.run.weights import Gathered, canonical
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


def is_plain(value: Tensor) -> bool:
    """Whether a tensor can be hashed: it is no subclass that packs its bits, and neither sparse nor empty."""
    if type(value) not in (Tensor, torch.nn.Parameter) or value.layout is not torch.strided:
        return False
    return value.device.type != "meta" and value.numel() > 0 and not value.is_complex()


class DriftCheck:
    """Compares what the processes of a training hold."""

    def __init__(self, trainer: TrainerView):
        self._trainer = trainer
        self._agreed = self._has_logged = False

    def compare(self, step: int) -> None:
        """
        Compare weights and states of all processes, before the checkpoint of `step` is written. All must call this.

        Raises:
            RanksDriftedError: On all processes, if they differ and have agreed at an earlier save.
        """
        trainer = self._trainer
        held = list(self._held())
        compared = {name: tensor for name, tensor in held if is_plain(tensor)}
        if len(compared) < len(held) and not self._has_logged and trainer.is_world_process_zero():
            logger.info(
                "Processes compare %d of %d tensors of weights and states: the others are shards, which no two of them "
                "hold.", len(compared), len(held),
            )  # fmt: skip
        self._has_logged = True
        by_process = gather_object([tuple(hashes_of(compared.values()))])
        if len(set(by_process)) == 1:
            self._agreed = True
            return
        name = next(name for name, values in zip(compared, zip(*by_process)) if len(set(values)) > 1)
        difference = _describe(step, name, by_process)
        if self._agreed and trainer.has_phases:
            saved = last_checkpoint(trainer.run_folder)
            start = f"with `resume_from_checkpoint=True`, to go on from `{saved}`" if saved else "from the beginning"
            raise RanksDriftedError(
                f"{difference}, so no checkpoint of this step is saved; start the same command again {start}, and have "
                "the memory of that machine tested."
            )
        if trainer.is_world_process_zero():
            logger.error("%s; training goes on.", difference)

    def _held(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the trained weights and the states of the optimizer, by name, unless they are flattened."""
        trainer, accelerator = self._trainer, self._trainer.accelerator
        if trainer.is_deepspeed_enabled or (trainer.is_fsdp_enabled and not accelerator.is_fsdp2):
            return
        if trainer.is_fsdp_enabled:
            Gathered(trainer.model)  # shards take the places of weights that a module has gathered for a pass
        states = trainer.optimizer.state
        for name, parameter in accelerator.unwrap_model(trainer.model).named_parameters():
            if parameter.requires_grad:
                yield f"`{canonical(name)}`", parameter
                for key, value in sorted(states.get(parameter, {}).items()):
                    if isinstance(value, Tensor):
                        yield f"state `{key}` of `{canonical(name)}`", value


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
