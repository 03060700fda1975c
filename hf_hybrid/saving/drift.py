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

One hash notices any single bit: XXH3 on the host, and on a device the sum of all words times odd numbers modulo 2**64,
in which one changed bit never cancels.
"""

from __future__ import annotations

import ctypes
import json
import logging
from collections import Counter
from collections.abc import Iterable, Iterator

import torch
import xxhash
from accelerate.utils import gather_object
from torch import Tensor

from hf_hybrid.run.trainer_view import TrainerView
from hf_hybrid.run.weights import Gathered, canonical
from hf_hybrid.saving.manifest import last_checkpoint
from hf_hybrid.saving.run_identity import inner_optimizer

logger = logging.getLogger(__name__)

CHUNK = 1 << 22
"""Words of a tensor on a device that are hashed at a time, in 100 MiB of temporary memory."""
_ODD = -7046029254386353131
"""2**64 over the golden ratio, as a signed number."""


class RanksDriftedError(RuntimeError):
    """Processes that must hold the same weights hold different ones. The message names them, and the parameter."""


# Hashing.


def words(tensor: Tensor) -> Tensor:
    """Return the bits of a tensor as a flat tensor of integers."""
    flat = tensor.detach().reshape(-1)
    flat = torch.view_as_real(flat).reshape(-1) if flat.is_complex() else flat
    return flat.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[flat.element_size()])


def hash_on_host(tensor: Tensor) -> int:
    """Return the XXH3 of the bits of a tensor on the CPU, 64 of them."""
    bits = words(tensor).contiguous()
    if not bits.nbytes:
        return 0
    # An array of NumPy would keep torch from resizing the storage.
    return xxhash.xxh3_64_intdigest((ctypes.c_char * bits.nbytes).from_address(bits.data_ptr()))


@torch.no_grad()
def hash_on_device(tensor: Tensor) -> Tensor:
    """
    Return the sum of the words of a tensor times odd numbers, modulo 2**64, as a scalar on the tensor's device.

    Nothing waits for the device. A word that changes by one bit changes by a power of two below 2**64, and that times
    an odd number is not zero.
    """
    bits = words(tensor)
    factors = torch.arange(min(CHUNK, bits.numel()), device=bits.device) * _ODD | 1
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    for index, chunk in enumerate(bits.split(CHUNK)):
        total += (chunk.to(torch.int64) * (factors[: chunk.numel()] + 2 * index)).sum()
    return total


def hashes_of(tensors: Iterable[Tensor]) -> list[int]:
    """Return a hash of each tensor. The device is waited for once."""
    tensors = list(tensors)
    on_device = [hash_on_device(tensor) for tensor in tensors if tensor.device.type != "cpu"]
    from_device = iter(torch.stack(on_device).tolist() if on_device else [])
    return [hash_on_host(t) if t.device.type == "cpu" else next(from_device) for t in tensors]


def is_plain(value: Tensor) -> bool:
    """Whether the bits of a tensor lie one after the other: no subclass that packs them, nor a sparse one."""
    return type(value) in (Tensor, torch.nn.Parameter) and value.layout is torch.strided and value.device.type != "meta"


# Comparing.


class DriftCheck:
    """
    Compares what the processes of a training hold.

    Args:
        trainer: Whose processes they are.
    """

    def __init__(self, trainer: TrainerView):
        self._trainer = trainer
        self._agreed = self._told_what_is_compared = False

    def compare(self, step: int) -> None:
        """
        Compare weights and states of all processes, before the checkpoint of `step` is written. All must call this.

        Raises:
            RanksDriftedError: On all processes, if they differ and have agreed at an earlier save.
        """
        trainer = self._trainer
        held = list(self._held())
        compared = {name: tensor for name, tensor in held if is_plain(tensor)}
        self._tell_what_is_compared(len(compared), len(held))
        hashes = hashes_of(compared.values())
        digests = gather_object([xxhash.xxh3_64_hexdigest(json.dumps(hashes).encode())])
        if len(set(digests)) == 1:
            self._agreed = True
            return
        by_process = gather_object([hashes])
        name = next(name for name, values in zip(compared, zip(*by_process)) if len(set(values)) > 1)
        difference = _describe(step, name, digests)
        if self._agreed and trainer.has_phases:
            raise RanksDriftedError(f"{difference}, so no checkpoint of this step is saved; {self._advice()}")
        if trainer.is_world_process_zero():
            logger.error("%s; training goes on.", difference)

    def _held(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the trained weights and the states of the optimizer, by name, unless they are flattened."""
        trainer, accelerator = self._trainer, self._trainer.accelerator
        if trainer.is_deepspeed_enabled or (trainer.is_fsdp_enabled and not accelerator.is_fsdp2):
            return
        if trainer.is_fsdp_enabled:
            Gathered(trainer.model)  # shards take the places of weights that a module has gathered for a pass
        states = inner_optimizer(trainer.optimizer).state
        for name, parameter in accelerator.unwrap_model(trainer.model).named_parameters():
            if parameter.requires_grad:
                yield f"`{canonical(name)}`", parameter
                for key, value in sorted(states.get(parameter, {}).items()):
                    if isinstance(value, Tensor):
                        yield f"state `{key}` of `{canonical(name)}`", value

    def _tell_what_is_compared(self, compared: int, held: int) -> None:
        if compared < held and not self._told_what_is_compared and self._trainer.is_world_process_zero():
            logger.info(
                "Processes compare %d of %d tensors of weights and states: the others are shards, which no two of them "
                "hold.", compared, held,
            )  # fmt: skip
        self._told_what_is_compared = True

    def _advice(self) -> str:
        saved = last_checkpoint(self._trainer.run_folder)
        start = f"with `resume_from_checkpoint=True`, to go on from `{saved}`" if saved else "from the beginning"
        return f"start the same command again {start}, and have the memory of that machine tested."


def _describe(step: int, name: str, digests: list[str]) -> str:
    """Return the beginning of a sentence: which processes differ, in which tensor, and who is in the minority."""
    ((most, count),) = Counter(digests).most_common(1)
    if 2 * count > len(digests):
        drifted = [process for process, digest in enumerate(digests) if digest != most]
        return f"{_processes(drifted)} drifted from the {count} others by step {step} (in {name})"
    everyone = _processes(list(range(len(digests))))
    return f"{everyone} differ after step {step} (in {name}), and nothing tells which of them is right"


def _processes(numbers: list[int]) -> str:
    *others, last = map(str, numbers)
    return f"Processes {', '.join(others)} and {last}" if others else f"Process {last}"
