"""
A bit that flips on one of two processes: it must be named at the next save, and a replay must find the step.

One random bit of one random value of the weights, of the optimizer's states or of the data changes in a random step, on
a random process. The next save must say so, or the run must end before it. Two processes cannot tell which of them is
right; the steps made again tell it in most cases, and must never accuse the other. At last the steps are made again by
a replay. With `digest_steps=1` it must name the step. Otherwise it must name a step and since when the change may be
older, and the step must be one of these.

A change that rounding makes undone before the save leaves nothing to name: then the run must end at the bits of a run
without it.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
from functools import partial
from pathlib import Path

import torch
from rig.bit_flips import flip
from rig.processes import together
from transformers import TrainerCallback

from chaos import Result, generator, trainings
from chaos.children import Ended, run
from hf_hybrid.part import Phase
from hf_hybrid.records.log import LOG_NAME
from hf_hybrid.records.readings import read_lines
from hf_hybrid.saving.replay import replay
from hf_hybrid.saving.run_identity import inner_optimizer

PATIENCE = 600.0
WHO = ("its process at once", "its process by the next start", "no process")
"""Which process a case names: in the run itself, when the same command is started again, or never."""
EVERY = trainings.OPTIONS["save_steps"]
KINDS = {
    f"{what}, {leaps}, digests {digests}": (what, mode, steps)
    for what in ("weights", "optimizer", "data")
    for leaps, mode in (("leaps", "leaps"), ("no leaps", "plain"))
    for digests, steps in (("in saves", None), ("of each step", 1))
}


class Flip(TrainerCallback):
    """Flips a bit on one process when a step begins, and notes the batches of all steps, and which train on them."""

    def __init__(self, what: str, process: int, step: int, chance: random.Random):
        self.what, self.process, self.step, self.chance = what, process, step, chance
        self.batches: dict[int, str] = {}
        self.trained: list[int] = []
        self.flipped = ""

    def on_step_begin(self, args, state, control, model=None, optimizer=None, **kwargs):
        batches = [batch["input_ids"].numpy().tobytes() for batch in self.trainer.run.step.batches]
        self.batches[state.global_step + 1] = hashlib.sha256(b"".join(batches)).hexdigest()
        if self.trainer.run.step.phase is not Phase.PREDICT:  # its batches are those of the next real one
            self.trained.append(state.global_step + 1)
        if state.global_step == self.step and args.process_index == self.process and not self.flipped:
            self.flipped = self._flip(model, inner_optimizer(optimizer))

    def _flip(self, model, optimizer) -> str:
        chance = self.chance
        if self.what == "data":
            in_batch, waits = chance.random() < 0.5, self.trainer.phase_name == "predict"
            held = self.trainer.run.step.batches[0]["input_ids"] if in_batch else self.trainer.train_dataset.blocks
            place, bit = chance.randrange(held.numel()), chance.randrange(7)  # a token of the vocabulary again
            flip(held, 8 * place, bit)
            held_by = "the data set" if not in_batch else "a waiting batch" if waits else "the batch"
            return f"bit {bit} of token {place} of {held_by}"
        named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
        name, tensor = chance.choices(named, [parameter.numel() for _, parameter in named])[0]
        if self.what == "optimizer":
            states = optimizer.state[tensor]
            key = chance.choice(sorted(key for key, value in states.items() if isinstance(value, torch.Tensor)))
            name, tensor = f"{name}.{key}", states[key]
        place, bit = chance.randrange(tensor.numel()), chance.randrange(32)
        flip(tensor, 4 * place + bit // 8, bit % 8)
        return f"bit {bit} of value {place} of {name}"


def train(kind: str, out: Path, fault: tuple[int, int, str] | None, resume: bool = False) -> list[int]:
    """Train on two processes, and return how each ended. Each leaves its batches, its last bits and its error."""
    what, mode, steps = KINDS[kind]

    def work() -> None:
        process = int(os.environ["RANK"])
        of, step, seed = fault or (-1, -1, "")
        callback = Flip(what, of, step, random.Random(seed))
        callback.trainer = trainer = trainings.build(mode, out, ddp_backend="gloo", digest_steps=steps)
        trainer.add_callback(callback)
        found: dict = {"error": None}
        try:
            trainer.train(resume_from_checkpoint=resume)
            found |= {"bits": trainings.facts(trainer)["weights"]}
        except Exception as error:
            found["error"] = f"{type(error).__name__}: {error}"
        found |= {"batches": callback.batches, "trained": callback.trained, "flipped": callback.flipped}
        (out.parent / f"{'again' if resume else 'first'}-{process}.json").write_text(json.dumps(found))

    return together(2, work, timeout=PATIENCE - 50)


def replayed(kind: str, out: Path, start: int, end: int) -> list[int]:
    """Replay on two processes; the first writes down what was found."""
    _, mode, _ = KINDS[kind]

    def work() -> None:
        found = replay(lambda folder: trainings.build(mode, folder, ddp_backend="gloo"), out, start, end)
        if os.environ["RANK"] == "0":
            (out.parent / "replay.json").write_text(json.dumps(found.to_dict()))

    return together(2, work, timeout=PATIENCE - 50)


def of(folder: Path, name: str) -> list[dict]:
    return [json.loads((folder / f"{name}-{process}.json").read_text()) for process in (0, 1)]


def logged(out: Path) -> list[dict]:
    """Return all lines of the log, which lies in the last checkpoint after a run without phases."""
    return [line for path in sorted(out.rglob(LOG_NAME)) for line in read_lines(path, [])]


def reference(kind: str, folder: Path) -> tuple[Ended, Result]:
    """Train without a flip."""
    ended = run(partial(train, kind, folder / "out", None), log=folder / "log", patience=PATIENCE)
    case = f"references/{kind}/0"
    if ended.how != "returned" or any(ended.value):
        return Ended("died"), Result(case, "cannot train", f"{ended}")
    lines = logged(folder / "out")
    wrong = any("drift" in line or "corrupted" in line for line in lines)
    return Ended("returned", of(folder, "first")), Result(case, "other bits" if wrong else "same bits", f"{ended}")


def flipped(case: str, seed: int, folder: Path, expected: Ended) -> Result:
    """One case: a flip, the save after it, the same command again, and a replay."""
    kind, chance = case.split("/")[1], generator(seed, case)
    what, mode, steps = KINDS[kind]
    out, log = folder / "out", folder / "log"
    process, step = chance.randrange(2), chance.randint(1, trainings.STEPS - 2)
    ended = run(partial(train, kind, out, (process, step, str(chance.random()))), log=log, patience=PATIENCE)
    if ended.how != "returned" or any(ended.value):
        return Result(case, "hang" if ended.how == "hang" else "lost", f"{ended}\n{log.read_text()[-3000:]}", 1)
    first = of(folder, "first")
    said = f"{first[process]['flipped']} on process {process} in step {step + 1}; {first[0]['error']}"
    save = -(-(step + 1) // EVERY) * EVERY
    lines = logged(out)
    drifts = [line for line in lines if "drift" in line]
    accused = {line["corrupted"]["process"] for line in lines if "corrupted" in line}
    accused |= {line["drift"]["likely"] for line in drifts if "likely" in line["drift"]}
    at_once = process in accused
    named = [line["step"] for line in lines if "drift" in line or "corrupted" in line]
    if not named and [f["error"] or f["bits"] for f in first] == [f["bits"] for f in expected.value]:
        return Result(case, "harmless", said, 1)
    if not named or named[0] > save:
        return Result(case, "silent", f"{said}; named at {named}, the save was {save}", 1)
    start, end = step // EVERY * EVERY, drifts[0]["step"] if drifts else trainings.STEPS
    truth = step + 1
    if any(held in first[process]["flipped"] for held in ("data set", "waiting")):  # the first step that reads it
        before = expected.value[process]["batches"]
        after, trained = first[process]["batches"], first[process]["trained"]
        truth = min((n for n in trained if after[str(n)] != before[str(n)]), default=None)
    made = run(partial(replayed, kind, out, start, end), log=log, patience=2 * PATIENCE)
    if made.how != "returned" or any(made.value):
        return Result(case, "lost", f"{said}; replay: {made}\n{log.read_text()[-3000:]}", 1)
    found = json.loads((folder / "replay.json").read_text())
    said += f"; truth {truth}; replay of {start} to {end}: {found}"
    if "RanksDriftedError" in (first[0]["error"] or ""):
        again = run(partial(train, kind, out, None, True), log=log, patience=PATIENCE)
        if again.how != "returned" or any(again.value):
            return Result(case, "lost", f"{said}; again: {again}\n{log.read_text()[-3000:]}", 1)
        accused |= {line["corrupted"]["process"] for line in logged(out) if "corrupted" in line}
    said += f"; accused {accused}"
    if accused - {process, None}:
        return Result(case, "another process was accused", said, 1)
    who = WHO[0] if at_once else WHO[1] if process in accused else WHO[2]
    if found["step"] == truth:
        return Result(case, f"named with {who}, step found", said, 1)
    if steps is None and truth and found["step"] and found["since"] <= truth <= found["step"]:
        return Result(case, f"named with {who}, steps found", said, 1)
    return Result(case, "another step was found", said, 1)
