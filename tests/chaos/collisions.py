"""
Two processes that train in one folder: one trains, and the other is told who is there, or waits until the first ends.

The second process begins up to a second after the first, and always while it still trains if it goes as fast as its
reference. Chance decides what they are ([`KINDS`]), how long the second waits for the folder, and whether older
checkpoints are deleted.

Right is an outcome in which each process ends as its reference did, goes on from where the other one was killed, or is
refused in one sentence. Then every checkpoint that is left must be whole, and each of its files must be that of one of
the two runs, bit for bit: a checkpoint with the model of one and the optimizer of the other is "mixed". One of them is
resumed to the end of its run.
"""

from __future__ import annotations

import hashlib
import pickle
import random
import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from chaos import Case, Result, kills, trainings
from chaos.children import Ended, Moment, begin, run
from hf_hybrid.saving import lock, manifest

SEEDS = (0, 1)
"""Of two different runs."""
LATEST = 1.0
"""Seconds after which the second process begins, at most."""
SHORT, LONG = 0.1, 90.0
"""Seconds that the second waits for the folder: it is refused, or goes on when the first has ended."""
TOLD = re.compile(r"FolderInUseError: A training writes into `[^`]*`: (another process|process \d+ on `[^`]*`, )[^\n]*")
OWN = re.compile(r"(model|adapter_model).*\.safetensors|optimizer\.pt")
"""Files of a checkpoint that hold the same in each run of one seed, and differ between seeds."""


@dataclass(frozen=True)
class Kind:
    """
    What two processes do.

    Attributes:
        resume (`tuple`): `resume_from_checkpoint` of the first and of the second.
        seeds (`tuple`): Which runs they are.
        killed (`bool`): Whether the first is killed while the second waits for it.
    """

    resume: tuple[bool | str, bool | str]
    seeds: tuple[int, int] = (0, 0)
    killed: bool = False


KINDS = {
    "both begin": Kind((False, False), SEEDS),
    "the second resumes": Kind((False, True)),
    "both go on where there is something": Kind(("auto", "auto")),
    "the first is killed": Kind((False, "auto"), killed=True),
    "the first is killed, both go on": Kind(("auto", "auto"), killed=True),
}


def prepare(mode: str, folder: Path) -> None:
    """Train the two runs alone, and keep all their checkpoints."""
    for seed in SEEDS:
        alone = folder / f"alone-{seed}"
        ended = run(trainings.train, mode, alone / "out", log=folder / "alone.log", seed=seed, save_total_limit=None)
        if ended.how != "returned":
            raise RuntimeError(f"The run to be met ({mode}, seed {seed}) did not end: {ended.value}\n{ended.trace}")
        (alone / "ended").write_bytes(pickle.dumps(ended))


def collide(case: Case) -> Result:
    """Let two processes meet, and check what they leave. The numbers go through all kinds, each mode from another."""
    chance, names = case.chance, list(KINDS)
    name = names[(case.number + random.Random(case.kind).randrange(len(names))) % len(names)]
    kind, alone = KINDS[name], [pickle.loads((case.prepared / f"alone-{of}" / "ended").read_bytes()) for of in SEEDS]
    waits = kind.killed or chance.random() < 0.5
    limit, skew = chance.choice([None, 1, 2]), chance.uniform(0.0, min(LATEST, case.expected.seconds))
    moment = Moment(changes=chance.randint(1, case.expected.changes)) if kind.killed else None
    logs = [case.folder / "first.log", case.folder / "second.log"]
    processes = []
    for place, wait in enumerate((LONG, LONG if waits else SHORT)):
        values = {"seed": kind.seeds[place], "wait": wait, **({} if limit is None else {"save_total_limit": limit})}
        values |= {"log": logs[place], "watched": case.out}
        processes.append(begin(trainings.train, case.kind, case.out, kind.resume[place], **values))
        if place == 0:
            time.sleep(skew)
    ended = [processes[0].end(moment), processes[1].end()]
    said = f"{name}, {skew:.2f} s apart, the second waits {LONG if waits else SHORT:g} s, save_total_limit={limit}"
    outcomes = []
    case.interruptions = int(kind.killed)
    for place, process in enumerate(ended):
        outcome, detail = _judge(process, alone[kind.seeds[place]], kind.resume[place], moment if place == 0 else None)
        outcomes.append(outcome)
        if outcome not in ("same bits", "refused", "killed"):
            return case.result(outcome, f"{said}: process {place + 1}: {detail}")
    if "same bits" not in outcomes:
        return case.result("lost", f"{said}: none trained to its end: {outcomes}")
    fault = _left(case, kind, alone)
    if fault is not None:
        return case.result(fault[0], f"{said}: {fault[1]}")
    waited = any("Waiting up to" in path.read_text(errors="replace") for path in logs)
    case.interruptions = int(ended[0].interrupted)
    return case.result("refused" if "refused" in outcomes else "waited" if waited else "same bits", said)


def _judge(ended: Ended, alone: Ended, resume: bool | str, moment: Moment | None) -> tuple[str, str]:
    """Return what one of the two came to, and what is wrong with it."""
    if ended.how == "died" and moment is not None and ended.interrupted:
        return "killed", ""
    if ended.how != "raised":
        return kills.compare(ended, alone)
    came_first = resume is True and ended.value.startswith("CheckpointError: No valid checkpoint found in output")
    if came_first or TOLD.fullmatch(ended.value):
        return "refused", ""
    return "deep error", f"{ended.value}\n{ended.trace}"


def _left(case: Case, kind: Kind, alone: list[Ended]) -> tuple[str, str] | None:
    """Check every checkpoint that is left, and resume one. Return what is wrong, if anything is."""
    for name in (lock.LOCK_NAME, lock.HOLDER_NAME, manifest.SAVING_NAME):
        if (case.out / name).exists():
            return "left over", name
    owners = {}
    for path in sorted(case.out.glob("checkpoint-*")):
        try:
            known = manifest.read_manifest(path)
            damages = ["it has no manifest"] if known is None else manifest.damages(path, known)
        except manifest.CheckpointError as error:
            known, damages = None, [str(error)]
        if known is None and kind.killed and not (path / manifest.MANIFEST_NAME).exists():
            continue  # the kill met the deletion of an older checkpoint
        if damages:
            return "damaged", f"{path.name}: {damages}"
        of = {name: _owners(path, name, known.step, case.prepared) for name in known.files if OWN.fullmatch(name)}
        owners[path] = set(SEEDS).intersection(*of.values())
        if not known.in_step and not owners[path]:
            return ("mixed" if all(of.values()) else "other bits"), f"{path.name}: files are of the runs {of}"
    path = case.chance.choice(sorted(owners))
    seed, again = min(owners[path] or kind.seeds), case.folder / "resumed"
    ended = run(trainings.train, case.kind, again, str(path), log=case.folder / "resumed.log", seed=seed)
    outcome, detail = kills.compare(ended, alone[seed])
    return None if outcome == "same bits" else (outcome, f"resumed from {path.name} of run {seed}: {detail}")


def _owners(checkpoint: Path, name: str, step: int, prepared: Path) -> set[int]:
    """Return which runs have saved the same in this file after this step."""
    seeds = set()
    for seed in SEEDS:
        own = prepared / f"alone-{seed}" / "out" / f"checkpoint-{step}" / name
        if own.is_file() and _digest(own) == _digest(checkpoint / name):
            seeds.add(seed)
    return seeds


def _digest(path: Path) -> str:
    """Return a digest of what a file holds: a resumed run writes equal tensors in other bytes."""
    digest = hashlib.sha256()

    def add(value: Any) -> None:
        if isinstance(value, torch.Tensor):
            digest.update(value.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        elif isinstance(value, dict):
            for key, item in sorted(value.items(), key=lambda pair: str(pair[0])):
                digest.update(str(key).encode())
                add(item)
        elif isinstance(value, (list, tuple)):
            for item in value:
                add(item)
        else:
            digest.update(repr(value).encode())

    add(load_file(path) if path.suffix == ".safetensors" else torch.load(path, weights_only=True))
    return digest.hexdigest()
