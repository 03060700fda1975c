"""
Digests of what a run computed: they name the process whose memory changed, and let a replay name the step.

A bit that flips in memory raises no error. With one process nobody notices. With several it makes the copies of weights
or states that processes hold drift apart, all of them train on, and the copy of the first is saved. So a run leaves
digests of three things:

1. Steps. Prints of each step's batches, of the losses of its micro-batches on each process, and of its loss and
   gradient norm over all processes: every bit of them counts, and all are there anyway. They are kept until the next
   save and then written to the log, 24 characters a step. A weight that changed shows in the losses of the next step.
2. State. At each save the checksums of the files that hold weights and states, which the manifest has made anyway.
   With several processes also a hash of all trained weights and one of all states in the memory of each, while the
   checkpoint is written: a thread hashes what lies on the host, and kernels on the device what lies there. With
   `digest_steps=N` so after every N steps.
3. Data in memory. Batches are hashed again when their step is over, and tensors that the data set holds at each save.
   Neither may have changed, unless somebody wrote to them through torch.

Processes compare theirs in every save, before the checkpoint is sealed. Under DDP weights and states must be the same
bits everywhere, because all processes make the same update. Under FSDP2 each process has parts of its own, and only
what every process holds whole can be compared (the step counters of the optimizer, modules that are not sharded). A
replay compares the rest.

Who drifted? Of three and more processes, those that differ from the majority. Of two, one may be seen to be wrong: its
value lies farther from the last checkpoint than any other of the tensor has moved. Otherwise nothing that one of them
holds proves it wrong. But the steps made again do, since every resume computes the same bits. So the checkpoint is
discarded, the digests of both are written to the log, and the run ends. The same command, started again, goes on from
the last checkpoint in which the processes agreed. It makes the steps again, and then names the process that had
drifted. That is the one whose losses alone differ in the first step that differs, before gradients, which are shared,
change the weights of both. If both differ there, it is the one whose values are much farther from those that come out
now. `hf-hybrid replay` does the same without the run. A run whose processes never agreed at a save goes on with a
warning: some trainers let them differ. So does one with `enable_predict=False`, which is plain `Trainer`.

The divergence monitor may be faster. It withholds the update of a step whose gradients are not finite, and a leap that
is rolled back takes a wrong weight with it. Then the losses of that step on each process say where it came from.

One print is enough to notice any single bit: XXH3 on the host, and on a device the sum of all words times odd numbers
modulo 2**64, in which one changed bit never cancels.
"""

from __future__ import annotations

import ctypes
import logging
import math
import re
import struct
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import torch
import xxhash
from accelerate.utils import gather_object
from safetensors import safe_open
from torch import Tensor

from hf_hybrid.part import Part, Phase, Step
from hf_hybrid.records.log import LOG_NAME
from hf_hybrid.records.readings import read_lines
from hf_hybrid.run.run import Run
from hf_hybrid.run.typing import TrainerLike
from hf_hybrid.run.weights import Gathered, canonical
from hf_hybrid.saving.courses import WIDTH, Course, differing
from hf_hybrid.saving.manifest import last_checkpoint, step_of
from hf_hybrid.saving.run_identity import inner_optimizer, stored_tensors

logger = logging.getLogger(__name__)

CHUNK = 1 << 22
"""Words of a tensor on a device that are hashed at a time, in 100 MiB of temporary memory."""
_ODD = -7046029254386353131
"""2**64 over the golden ratio, as a signed number."""
MOST_PRINTS, MOST_VALUES = 8, 1 << 24
"""Processes whose batches and losses have prints of their own; values of a parameter that are compared one by one."""
MOST_PLACES, FARTHER = 64, 8
"""
Places of a tensor whose values are kept where processes differ; how much farther from those of the steps made again the
values of a process must be than those of another to be the wrong ones.
"""
FARTHEST, FEWEST = 2, 64
"""
How much farther than all others of its tensor a value must have moved to be a wrong one, and how many others it takes.
"""
ODD = 1e3
"""How much larger than on other processes the loss of a step that cannot be used must be to come from there."""
NO_PRINT = "0" * WIDTH


_STATE = re.compile(r"(model|optimizer)[^/]*\.(safetensors|bin|pt)$|^(pytorch_model_fsdp|optimizer)_\d+/|^global_step")
"""Files of a checkpoint that hold weights or states of the optimizer."""
_UNWRITTEN = ", though nothing wrote to it"


class RanksDriftedError(RuntimeError):
    """Processes that must hold the same weights hold different ones. The message names them, and the parameter."""


# Hashing.


def words(tensor: Tensor) -> Tensor:
    """Return the bits of a tensor as a flat tensor of integers."""
    flat = tensor.detach().reshape(-1)
    flat = torch.view_as_real(flat).reshape(-1) if flat.is_complex() else flat
    return flat.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[flat.element_size()])


def add_to(found: Any, tensor: Tensor) -> None:
    """Add the bits of a tensor on the CPU to an XXH3. An array of NumPy would keep torch from resizing the storage."""
    bits = words(tensor).contiguous()
    if bits.nbytes:
        found.update((ctypes.c_char * bits.nbytes).from_address(bits.data_ptr()))


def hash_on_host(tensor: Tensor) -> int:
    """Return the XXH3 of the bits of a tensor on the CPU, 64 of them."""
    found = xxhash.xxh3_64()
    add_to(found, tensor)
    return found.intdigest()


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
    for index, part in enumerate(bits.split(CHUNK)):
        total += (part.to(torch.int64) * (factors[: part.numel()] + 2 * index)).sum()
    return total


def leaves(value: Any) -> Iterator[Any]:
    """Yield what lies in nested lists and mappings, in order."""
    if isinstance(value, Mapping):
        for key in value:
            yield key
            yield from leaves(value[key])
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from leaves(item)
    else:
        yield value


@dataclass
class Batches:
    """
    The print of a step's batches.

    Attributes:
        tensors (`list[tuple]`): Those on the host, with torch's count of what was written to them.
        of_tensors (`int`): Hash of them as they were fetched.
        of_text (`int`): Hash of arrays, text and numbers.
        on_device (`Tensor`, *optional*): Hash of tensors on a device, read at the next save.
    """

    tensors: list[tuple[Tensor, int]]
    of_tensors: int
    of_text: int
    on_device: Tensor | None

    @classmethod
    def of(cls, batches: Any) -> Batches:
        """Return the print of batches as they were fetched. Objects of other kinds are left out."""
        tensors, text, on_device = [], xxhash.xxh3_64(), None
        for leaf in leaves(batches):
            if is_plain(leaf) and leaf.device.type == "cpu":
                tensors.append((leaf, leaf._version))
            elif is_plain(leaf):
                one = hash_on_device(leaf)
                on_device = one if on_device is None else on_device * _ODD + one
            elif isinstance(leaf, numpy.ndarray) and leaf.dtype != object:
                text.update(leaf.tobytes())
            elif isinstance(leaf, (str, bytes, int, float, bool, numpy.generic)):
                text.update(repr(leaf).encode(errors="replace"))
        return cls(tensors, hash_of(tensors), text.intdigest(), on_device)

    def were_changed(self) -> bool:
        """Whether tensors on the host changed though nobody wrote to them through torch."""
        written = any(tensor._version != version for tensor, version in self.tensors)
        return not written and hash_of(self.tensors) != self.of_tensors


def is_plain(value: Any) -> bool:
    """Whether a value is a tensor whose bits lie one after the other: no subclass that packs them, nor a sparse one."""
    return type(value) in (Tensor, torch.nn.Parameter) and value.layout is torch.strided and value.device.type != "meta"


def hash_of(tensors: list[tuple[Tensor, int]]) -> int:
    """Return the hash of several tensors on the host."""
    found = xxhash.xxh3_64()
    for tensor, _ in tensors:
        add_to(found, tensor)
    return found.intdigest()


def text_of(*numbers: float | int) -> str:
    """Return 8 characters for some numbers, every bit of which counts."""
    packed = b"".join(
        struct.pack("<d", number) if isinstance(number, float) else struct.pack("<Q", number & (1 << 64) - 1)
        for number in numbers
    )
    return f"{xxhash.xxh32_intdigest(packed):08x}"


# The part.


@dataclass
class StepPrint:
    """
    What is kept of a step until the next save: its number, the print of its batches, their losses on this process, loss
    and gradient norm over all processes, and whether its update was withheld. Numbers on a device are fetched at the
    save.
    """

    step: int
    batches: Batches | None
    losses: list[float | Tensor]
    numbers: list[float | Tensor]
    withheld: bool


class Digests(Part):
    """
    Writes digests to the log of a run, and compares those of its processes.

    Args:
        trainer: Whose run it is.
        every (`int`, *optional*): Also after so many steps. Default: in each save alone.
    """

    name = "digests"

    def __init__(self, trainer: TrainerLike, every: int | None = None):
        self._trainer, self.every = trainer, every

    def begin(self, run: Run) -> None:
        self.run = run
        self._trail: list[StepPrint] = []
        self._fetched: Batches | None = None
        self._waiting: Batches | None = None
        self._work: list[tuple[str, str, bool, Any]] = []
        self._last: tuple[int, dict[str, str]] | None = None
        self._agreed = self._said = False
        self._parted: int | None = None
        self._changed: list[str] = []
        held = stored_tensors(self._trainer.train_dataset)
        self._data = [(tensor, tensor._version, hash_on_host(tensor)) for tensor in held]
        self._drifted, self._then, self._again = None, Course(), []
        if self._trainer.is_world_process_zero():
            self._find_drift_to_settle()

    # Steps.

    def begin_step(self, step: Step) -> None:
        found, is_real = Batches.of(step.batches), step.phase is not Phase.PREDICT
        if self._waiting is not None and self._waiting.were_changed():
            self._changed.append(f"A batch changed in memory while it waited for step {step.index + 1}{_UNWRITTEN}")
        # The batches of a skipped step are those of the next real one.
        self._fetched, self._waiting = (found, None) if is_real else (None, found)

    def decide(self, step: Step) -> None:
        """The step is over, and nothing changes the weights any more."""
        self._keep(step)
        if self.every and (step.index + 1) % self.every == 0:
            self._begin_to_hash()
            self.before_seal(step.index + 1)

    def _keep(self, step: Step) -> None:
        """Keep the batches of a step and its numbers, until they are compared."""
        batches, self._fetched, losses, numbers = self._fetched, None, [], []
        if batches is not None:
            if batches.were_changed():
                self._changed.append(f"A batch changed in memory while step {step.index + 1} trained on it{_UNWRITTEN}")
            batches.tensors = []
            losses, numbers = step.losses, [step.loss, getattr(self._trainer, "_gradient_norm", None)]
        kept = [[_kept(number) for number in of if number is not None] for of in (losses, numbers)]
        self._trail.append(StepPrint(step.index + 1, batches, kept[0], kept[1], step.withheld))

    def clean_up(self) -> None:
        """Let go of batches, data and numbers on a device."""
        self._trail, self._fetched, self._waiting, self._work, self._data = [], None, None, [], []

    # Saves.

    def before_save(self) -> None:
        if self._trainer.accelerator.num_processes > 1 or self.every:
            self._begin_to_hash()

    def _begin_to_hash(self) -> None:
        """Hash weights and states, on the device without waiting, and on a thread what lies on the host."""
        pool, state = ThreadPoolExecutor(1), list(self._state())
        on_host = [value for _, _, value, _ in state if value.device.type == "cpu"]
        self._work = [
            (kind, name, whole, None if value.device.type == "cpu" else hash_on_device(value))
            for kind, name, value, whole in state
        ]
        self._on_host = pool.submit(lambda: [hash_on_host(value) for value in on_host])
        self._of_data = pool.submit(self._data_was_changed)
        pool.shutdown(wait=False)

    def diverged(self, step: int) -> None:
        self._trainer.saves.join()  # the last checkpoint may be behind the steps
        if self._fetched is not None:  # in the middle of the step
            self._keep(self.run.step)
        self._begin_to_hash()
        self.before_seal(step)

    def before_seal(self, step: int) -> None:
        work, self._work = self._work, []
        values = _fetched([found for *_, found in work], self._on_host.result() if work else [])
        entries = [(kind, name, whole, value) for (kind, name, whole, _), value in zip(work, values)]
        own = (
            {}
            if not work
            else {
                kind: _joined(value for of, _, _, value in entries if of == kind) for kind in ("weights", "optimizer")
            }
        )
        comparable = [(f"{kind} {name}", value) for kind, name, whole, value in entries if whole]
        trail, self._trail = self._trail, []
        losses = _numbers_of([kept.losses for kept in trail])
        prints = _prints_of(trail), _texts_of(losses)
        odd = {
            kept.step: sum(of_step)
            for kept, of_step in zip(trail, losses)
            if of_step and (kept.withheld or not math.isfinite(sum(of_step)))
        }
        if self._of_data.result() if work else self._data_was_changed():
            self._changed.append(f"`train_dataset` holds a tensor that changed in memory by step {step}{_UNWRITTEN}")
        last, self._last = self._last, (step, own)
        if last is not None and last[0] == step and last[1] != own:
            what = "Weights or states of the optimizer changed"
            self._changed.append(f"{what} after step {step} and before its save, by a callback or in memory")
        changed, self._changed = self._changed, []
        mine = (own, _joined(value for _, value in comparable), prints, changed, odd)
        everyone = gather_object([mine]) if self._trainer.accelerator.num_processes > 1 else [mine]
        line: dict[str, Any] = {kind: _one_or_all([other[0][kind] for other in everyone]) for kind in own}
        if trail:
            line |= {"from": trail[0].step, "steps": "".join(_texts_of(_numbers_of([kept.numbers for kept in trail])))}
            line |= {what: _of_all([o[2][place] for o in everyone]) for place, what in enumerate(("batches", "losses"))}
        if trail or (own and last != self._last):
            self.run.write({"step": step, "digests": line})
        self._tell_of_memory(step, [other[3] for other in everyone])
        self._tell_of_losses(step, [other[4] for other in everyone])
        self._settle(step, line)
        digests = [other[1] for other in everyone]
        if len(set(digests)) > 1:
            self._tell_of_drift(step, digests, comparable, line)
        elif len(digests) > 1:
            self._agreed, self._parted = True, None
            self._tell_what_is_left_out(len(comparable), len(entries))

    def after_seal(self, step: int, files: dict[str, dict]) -> None:
        """The manifest has hashed what was written: that costs nothing more."""
        of_state = {name: facts["xxh3_128"] for name, facts in files.items() if _STATE.search(name)}
        self.run.write({"step": step, "sealed": of_state})

    def _state(self) -> Iterator[tuple[str, str, Tensor, bool]]:
        """Yield the weights and states of this process: kind, name, tensor, and whether every process has the same."""
        trainer = self._trainer
        trainer.memory.settle()
        optimizer = inner_optimizer(trainer.optimizer)
        if trainer.is_fsdp_enabled and trainer.accelerator.is_fsdp2:
            Gathered(trainer.model)  # shards take the places of weights that a module has gathered for a pass
        flattened = trainer.is_fsdp_enabled and not trainer.accelerator.is_fsdp2
        for name, parameter in trainer.accelerator.unwrap_model(trainer.model).named_parameters():
            if not parameter.requires_grad:
                continue
            held = trainer.memory.parameter(parameter)
            states = getattr(optimizer, "state", {}).get(held, {})
            tensors = [("weights", canonical(name), held)]
            tensors += [("optimizer", f"{canonical(name)}.{key}", value) for key, value in sorted(states.items())]
            for kind, whole_name, value in tensors:
                is_part = getattr(value, "device_mesh", None) is not None
                here: Any = value.to_local() if is_part else value  # ty: ignore[missing-attribute]
                if is_plain(here):
                    yield kind, whole_name, here, not (is_part or flattened or trainer.is_deepspeed_enabled)

    def _data_was_changed(self) -> bool:
        """Whether tensors that the data set holds changed since the last call, though nobody wrote to them."""
        found, self._data = self._data, [(t, t._version, hash_on_host(t)) for t, _, _ in self._data]
        pairs = zip(found, self._data)
        return any(old[1] == new[1] and old[2] != new[2] for old, new in pairs)

    # What the user is told.

    def _tell_of_memory(self, step: int, changed: list[list[str]]) -> None:
        for process, found in enumerate(changed):
            for what in dict.fromkeys(found):
                self._say(step, process, f"{what}: process {process}.")

    def _tell_of_losses(self, step: int, odd: list[dict[int, float]]) -> None:
        """Name the process from which a step that could not be used came, if it was one of several."""
        for of_step in sorted({place for losses in odd for place in losses}):
            found = [losses.get(of_step, 0.0) for losses in odd]  # nothing: it was finite
            least = min(map(abs, found))
            wrong = [p for p, loss in enumerate(found) if not math.isfinite(loss) or abs(loss) > ODD * max(least, 1)]
            if 0 < len(wrong) < len(found):
                names = ", ".join(map(str, wrong))
                text = (
                    f"The loss of step {of_step} was {found[wrong[0]]:.3g} on process {names} alone: its batch, or its"
                )
                self._say(step, wrong[0], f"{text} memory, is at fault.")

    def _say(self, step: int, process: int | None, text: str) -> None:
        if self._trainer.is_world_process_zero():
            logger.error("%s", text)
            self.run.write({"step": step, "corrupted": {"process": process, "what": text}})

    def _tell_what_is_left_out(self, compared: int, all_of: int) -> None:
        if compared < all_of and not self._said and self._trainer.is_world_process_zero():
            logger.info(
                "Processes compare %d of %d tensors of weights and states: the others are shards, which no two of them "
                "hold. A replay compares those (`hf-hybrid replay`).", compared, all_of,
            )  # fmt: skip
        self._said = True

    def _tell_of_drift(self, step: int, digests: list[str], comparable: list[tuple[str, int]], line: dict) -> None:
        """Name the processes that drifted, and what differs. Every process gets here, and all raise or none does."""
        everyone = gather_object([[value for _, value in comparable]])
        place = next(place for place, values in enumerate(zip(*everyone)) if len(set(values)) > 1)
        name = comparable[place][0]
        most, count = Counter(digests).most_common(1)[0]
        drifted = [process for process, digest in enumerate(digests) if digest != most]
        kind = {"weights": "weights", "optimizer": "states of the optimizer"}[name.split()[0]]
        where, values = self._where(name)
        what = f"Processes hold different {kind} after step {step}: `{name.split()[1]}` {where}."
        if 2 * count > len(digests):
            plural = "es" if len(drifted) > 1 else ""
            who = f"Process{plural} {', '.join(map(str, drifted))} drifted from the {count} others."
        else:
            who = "Two that differ cannot tell which of them is right. The steps made again do."
        saved = last_checkpoint(self._trainer.run_folder)
        self._parted = step if self._parted is None else self._parted
        if 2 * count <= len(digests) and values:
            likely = gather_object([self._moved_too_far(name, values, saved)])[0]
            if likely is not None:
                values["likely"] = likely
                who = (
                    f"It is probably process {likely} that is wrong: no other value of this tensor has moved as far "
                    f"from `{saved}`. The steps made again tell for sure."
                )
        again = (
            f"Start the same command again with `resume_from_checkpoint=True`: it goes on from `{saved}`, makes the "
            "steps after it again, and names the process. Have the memory of its machine tested."
            if saved
            else "There is no checkpoint yet, so start the run anew, and have the memory of the machines tested."
        )
        self.run.write({"step": step, "drift": {**line, "what": what, "name": name, **values}})
        if self._agreed and self._trainer.has_phases:
            raise RanksDriftedError(f"{what} {who} No checkpoint of this step is saved. {again}")
        if self._trainer.is_world_process_zero():
            logger.error("%s %s %s", what, who, again)

    def _where(self, name: str) -> tuple[str, dict[str, Any]]:
        """Return which values of a tensor differ, in words; and the first of these places with the values of each."""
        tensor = self._tensor(name)
        if tensor.numel() > MOST_VALUES:
            return "differs", {}
        everyone = gather_object([tensor.detach().cpu().reshape(-1)])
        bits = [words(values) for values in everyone]
        other = next(process for process, of_process in enumerate(bits) if not torch.equal(of_process, bits[0]))
        places = (bits[0] != bits[other]).nonzero().flatten()
        kept = places[:MOST_PLACES]
        first, second = everyone[0][places[0]].item(), everyone[other][places[0]].item()
        text = (
            f"differs in {len(places):,} of {tensor.numel():,} values; value {places[0].item():,} is {first:g} on "
            f"process 0 and {second:g} on process {other}"
        )
        return text, {
            "places": kept.tolist(),
            "values": [of_process[kept].double().tolist() for of_process in everyone],
        }

    def _moved_too_far(self, name: str, values: dict[str, Any], saved: str | None) -> int | None:
        """
        Return the process whose values moved farther from the last checkpoint than all others of the tensor.

        The first process alone reads the checkpoint. One that was saved since they differ holds what one of them had.
        """
        if saved is None or not self._trainer.is_world_process_zero():
            return None
        if self._parted is not None and step_of(Path(saved)) >= self._parted:
            return None
        then, now = self._saved_tensor(name, Path(saved)), self._tensor(name).detach().cpu().reshape(-1).double()
        if then is None or then.numel() != now.numel() or now.numel() < len(values["places"]) + FEWEST:
            return None
        then, places = then.reshape(-1).double(), torch.tensor(values["places"])
        moved = (now - then).abs()
        moved[places] = 0
        most = FARTHEST * moved.max().item()
        far = [float((torch.tensor(of).double() - then[places]).abs().max()) for of in values["values"]]
        wrong = [process for process, distance in enumerate(far) if not distance <= most]
        return wrong[0] if len(wrong) == 1 and len(values["places"]) < MOST_PLACES else None

    def _saved_tensor(self, name: str, saved: Path) -> Tensor | None:
        """Return a tensor as a checkpoint has it; `None` if it is not found in Trainer's files."""
        kind, own = name.split(" ", 1)
        try:
            if kind == "weights":
                for path in sorted(saved.glob("*model*.safetensors")):
                    with safe_open(path, framework="pt") as file:
                        for key in {own, own.replace(".default", "")} & set(file.keys()):  # adapters leave theirs out
                            return file.get_tensor(key)
                return None
            of, key = own.rsplit(".", 1)
            trainer, optimizer = self._trainer, inner_optimizer(self._trainer.optimizer)
            named = trainer.accelerator.unwrap_model(trainer.model).named_parameters()
            held = next(trainer.memory.parameter(parameter) for other, parameter in named if canonical(other) == of)
            order = [id(parameter) for group in optimizer.param_groups for parameter in group["params"]]
            states = torch.load(saved / "optimizer.pt", mmap=True, weights_only=True)["state"]
            return states[order.index(id(held))][key]
        except Exception as error:  # whatever the files of another optimizer or trainer are: nothing is told then
            logger.debug("No value of %s in %s: %s", name, saved, error)
            return None

    def _tensor(self, name: str) -> Tensor:
        return next(value for kind, own, value, _ in self._state() if f"{kind} {own}" == name)

    # The process that had drifted, once its steps were made again.

    def _find_drift_to_settle(self) -> None:
        """Find the last drift in the log of this run whose step is still to come, now that the run is resumed."""
        found, lines, start = None, [], self._trainer.state.global_step
        for line in read_lines(self._trainer.run_folder / LOG_NAME, []):
            lines.append(line)
            if "drift" in line:
                found, self._then = line, Course.of(lines, start, line["step"])
            elif found is not None and (line["step"] == 0 or ("digests" in line and line["step"] >= found["step"])):
                found = None  # another run, or it is settled
        self._drifted = found if found is not None and found["step"] > start else None

    def _settle(self, step: int, line: dict) -> None:
        """Name the processes whose digests were not those that the same steps have now."""
        before = self._drifted
        if before is None:
            return
        self._again.append({"step": step, "digests": line})
        if before["step"] > step:
            return
        self._drifted = None
        then, wrong = before["drift"], self._first_to_differ(step)
        if not wrong and before["step"] == step and then.get("values"):
            now = self._tensor(then["name"]).detach().cpu().reshape(-1)[torch.tensor(then["places"])].double().numpy()
            distances = [float(numpy.abs(numpy.array(values) - now).sum()) for values in then["values"]]
            wrong = [process for process, far in enumerate(distances) if not far <= FARTHER * min(distances)]
        made = f"The steps up to {step} were made again:"
        if 0 < len(wrong) < self._trainer.accelerator.num_processes:
            names = ", ".join(map(str, wrong))
            self._say(step, wrong[0], f"{made} process {names} had drifted. Have the memory of its machine tested.")
        else:
            self._say(step, None, f"{made} they do not tell which process had drifted, so little did it change.")

    def _first_to_differ(self, step: int) -> list[int]:
        """Return the processes whose losses were other ones in the first step whose losses were."""
        now = Course.of(self._again, -1, step)
        for place in sorted({*self._then.losses} & {*now.losses}):
            if self._then.losses[place] != now.losses[place]:
                return differing(self._then.losses[place], now.losses[place])
        return []


def _fetched(found: list[Tensor | None], on_host: list[int]) -> list[int]:
    """Return the hashes: those of the host in the places of `None`, and all that a device made, fetched at once."""
    on_device = [one for one in found if one is not None]
    fetched, of_host = iter(torch.stack(on_device).tolist() if on_device else []), iter(on_host)
    return [next(of_host) if one is None else next(fetched) & (1 << 64) - 1 for one in found]


def _joined(values: Iterable[int]) -> str:
    return xxhash.xxh3_64_hexdigest(b"".join(struct.pack("<Q", value) for value in values))


def _one_or_all(values: list[str]) -> str | list[str]:
    return values[0] if len(set(values)) == 1 else values


def _prints_of(trail: list[StepPrint]) -> list[str]:
    """Return a print of the batches of each step. What lies on a device is fetched at once."""
    on_device = [kept.batches.on_device for kept in trail if kept.batches and kept.batches.on_device is not None]
    fetched = iter(torch.stack(on_device).tolist() if on_device else [])
    found = []
    for kept in trail:
        of = kept.batches
        if of is None:
            found.append(NO_PRINT)
        else:
            found.append(text_of(of.of_tensors, of.of_text, 0 if of.on_device is None else next(fetched)))
    return found


def _kept(number: Any) -> float | Tensor:
    if not isinstance(number, Tensor):
        return float(number)
    whole = (number.full_tensor() if getattr(number, "device_mesh", None) is not None else number).detach()
    return whole.item() if whole.device.type == "cpu" else whole


def _numbers_of(steps: list[list[float | Tensor]]) -> list[list[float]]:
    """Return the numbers of each step. What lies on a device is fetched at once."""
    on_device = [number for numbers in steps for number in numbers if isinstance(number, Tensor)]
    fetched = iter(torch.stack([number.double() for number in on_device]).tolist() if on_device else [])
    return [[next(fetched) if isinstance(number, Tensor) else number for number in numbers] for numbers in steps]


def _texts_of(steps: list[list[float]]) -> list[str]:
    """Return a print of the numbers of each step."""
    return [text_of(*numbers) if numbers else NO_PRINT for numbers in steps]


def _of_all(prints: list[list[str]]) -> list[str]:
    """Return the prints of all steps, by process; of many processes one print of each step for all of them."""
    if len(prints) <= MOST_PRINTS:
        return ["".join(of_process) for of_process in prints]
    return ["".join(text_of(*(int(text, 16) for text in of_step)) for of_step in zip(*prints))]
