"""
Damaged checkpoints: each must be repaired by an older one, refused by the file's name, or make no difference. So must
those to which a file was added.

A run is killed after its fourteenth step, and one file of its newest checkpoint is damaged or added, or of all. Then
the run is resumed, by `True` or by the checkpoint's path. The same bits as in an uninterrupted run are right, with or
without a word. An error is right if it names the file. Everything else is a fault: other bits without a word above all.
"""

from __future__ import annotations

import itertools
import random
import shutil
from collections.abc import Callable
from pathlib import Path

from chaos import Case, Result, generator, kills, trainings
from chaos.children import Ended, run

MODES = ("leaps", "plain", "streamed", "LoRA", "accumulation", "best model")
STOP_AFTER = 14
AT_ALL = 0.15
"""How likely all checkpoints are damaged alike, as by a bad disk."""
DONORS = {"of another run": {"seed": 1}, "of another model": {"width": 24}}


def prepare(mode: str, folder: Path) -> None:
    """Make the checkpoints that are damaged in copies, and those that files are taken from."""
    for name, values in {"own": {}, **DONORS}.items():
        train = trainings.train
        ended = run(train, mode, folder / name, False, log=folder.with_suffix(".log"), stop_after=STOP_AFTER, **values)
        if ended.how != "died":
            raise RuntimeError(f"The run to be damaged ({mode}, {name}) did not stop: {ended.value}\n{ended.trace}")


def checkpoints(folder: Path) -> list[Path]:
    """From the oldest to the newest."""
    return sorted(folder.glob("checkpoint-*"), key=lambda path: int(path.name.rpartition("-")[2]))


# What happens to a file. `donor` is a file of the same name, or does not exist.


def _delete(path: Path, chance: random.Random, donor: Path) -> None:
    path.unlink()


def _rewritten(change: Callable[[bytes, random.Random], bytes]) -> Callable:
    return lambda path, chance, donor: path.write_bytes(change(path.read_bytes(), chance))


def _flip_a_bit(content: bytes, chance: random.Random) -> bytes:
    flipped = bytearray(content)
    if flipped:
        flipped[chance.randrange(len(flipped))] ^= 1 << chance.randrange(8)
    return bytes(flipped)


def _zero_a_part(content: bytes, chance: random.Random) -> bytes:
    """As a power cut leaves a file whose blocks were not written."""
    start = chance.randrange(max(1, len(content)))
    return content[:start] + bytes(len(content) - start)


def _replace_by_folder(path: Path, chance: random.Random, donor: Path) -> None:
    path.unlink()
    path.mkdir()


def _swap(path: Path, chance: random.Random, donor: Path) -> None:
    if donor.is_file():
        shutil.copyfile(donor, path)


def _put_unlisted(path: Path, chance: random.Random, donor: Path) -> None:
    """Put a file or folder there that no manifest lists and that is loaded by its name, with the bytes of `path`."""
    names = [name for name in UNLISTED if not (path.parent / name).exists()]
    added = path.parent / chance.choice(names)
    added.parent.mkdir(exist_ok=True)
    shutil.copyfile(path, added)


UNLISTED = (
    "pytorch_model_fsdp.bin", "pytorch_model.bin", "optimizer.bin", "scaler.pt", "hybrid_state_1.safetensors",
    "out_of_memory.json", "adapter_model.safetensors", "adapter_model.bin", "model.safetensors.index.json",
    "rng_state_0.pth", "mine/adapter_model.safetensors", "pytorch_model_fsdp_0/.metadata", "global_step14/states.pt",
)  # fmt: skip

DAMAGES: dict[str, Callable] = {
    "deleted": _delete,
    "emptied": _rewritten(lambda content, chance: b""),
    "truncated": _rewritten(lambda content, chance: content[: chance.randrange(max(1, len(content)))]),
    "one bit flipped": _rewritten(_flip_a_bit),
    "zeros from some byte on": _rewritten(_zero_a_part),
    "bytes appended": _rewritten(lambda content, chance: content + chance.randbytes(chance.randint(1, 64))),
    "replaced by a folder": _replace_by_folder,
    "beside one that is not listed": _put_unlisted,
    "of another step": _swap,
    **dict.fromkeys(DONORS, _swap),
}


def damage(case: Case) -> Result:
    """Damage one file and resume. The numbers go through all files and damages of the mode in random order."""
    chance, own_folder, case.interruptions = case.chance, case.prepared / "own", 1
    shutil.copytree(own_folder, case.out)
    own = checkpoints(case.out)
    kind, file = _chosen(own[-1], case.number, generator(case.seed, f"damages/{case.kind}"))
    for checkpoint in own if chance.random() < AT_ALL else own[-1:]:
        # Of another step: the one before; the oldest has that of the newest.
        before = own_folder / own[own.index(checkpoint) - 1].name
        donor = case.prepared / kind / checkpoint.name if kind in DONORS else before
        if (checkpoint / file).is_file():
            DAMAGES[kind](checkpoint / file, chance, donor / file)
    resume = str(own[-1]) if chance.random() < 0.5 else True
    ended = run(trainings.train, case.kind, case.out, resume, log=case.log)
    file = "was not saved with it" if DAMAGES[kind] is _put_unlisted else file
    outcome, detail = _judge(ended, case.expected, file, case.said())
    return case.result(outcome, f"`{file}` {kind}, resume_from_checkpoint={resume}. {detail}")


def _chosen(checkpoint: Path, number: int, order: random.Random) -> tuple[str, str]:
    files = sorted(str(path.relative_to(checkpoint)) for path in checkpoint.rglob("*") if path.is_file())
    everything = list(itertools.product(DAMAGES, files))
    order.shuffle(everything)
    return everything[number % len(everything)]


def _judge(ended: Ended, expected: Ended, file: str, log: str) -> tuple[str, str]:
    name = Path(file).name
    if ended.how == "raised":
        return ("refused", "") if name in ended.value else ("not named", f"{ended.value}\n{ended.trace}")
    outcome, detail = kills.compare(ended, expected)
    said = name in log
    if outcome == "same bits":
        return ("repaired" if said else "harmless"), ""
    return ("told, but other bits" if said else "silent"), detail
