"""
A bit that flips on one of two processes: the next save must end the run, and say which processes differ.

One random bit of one random value of the weights or of the optimizer's states changes in a random step, on a random
process. The error must be the same on both processes, and the same command must go on from the checkpoint before and
end at the bits of a run without a flip. A change that rounding makes undone before the save leaves nothing to name:
then the run must end at those bits itself.
"""

from __future__ import annotations

import json
import os
import random
import re
from functools import partial
from pathlib import Path

import torch
from rig.bit_flips import flip
from rig.processes import together
from transformers import TrainerCallback

from chaos import Case, Result, trainings
from chaos.children import Ended, run
from hf_hybrid.optimizers import inner_optimizer

PATIENCE = 600.0
EVERY = trainings.OPTIONS["save_steps"]
KINDS = {f"{what}, leaps": (what, "leaps") for what in ("weights", "optimizer")}


class Flip(TrainerCallback):
    """Flips a bit on one process when a step begins."""

    def __init__(self, what: str, process: int, step: int, chance: random.Random):
        self.what, self.process, self.step, self.chance = what, process, step, chance
        self.flipped = ""

    def on_step_begin(self, args, state, control, model=None, optimizer=None, **kwargs):
        if (state.global_step, args.process_index) != (self.step, self.process) or self.flipped:
            return
        chance = self.chance
        named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
        name, tensor = chance.choices(named, [parameter.numel() for _, parameter in named])[0]
        if self.what == "optimizer":
            states = inner_optimizer(optimizer).state[tensor]
            key = chance.choice(sorted(key for key, value in states.items() if isinstance(value, torch.Tensor)))
            name, tensor = f"{name}.{key}", states[key]
        place, bit = chance.randrange(tensor.numel()), chance.randrange(32)
        flip(tensor, 4 * place + bit // 8, bit % 8)
        self.flipped = f"bit {bit} of value {place} of {name}"


def train(kind: str, out: Path, fault: tuple[int, int, str] | None, resume: bool = False) -> list[int]:
    """Train on two processes, and return how each ended. Each leaves its last bits or its error."""
    what, mode = KINDS[kind]

    def work() -> None:
        process, step, seed = fault or (-1, -1, "")
        callback = Flip(what, process, step, random.Random(seed))
        trainer = trainings.build(mode, out, ddp_backend="gloo")
        trainer.add_callback(callback)
        try:
            trainer.train(resume_from_checkpoint=resume)
            outcome = {"error": None, "bits": trainings.facts(trainer)["weights"]}
        except Exception as error:
            outcome = {"error": f"{type(error).__name__}: {error}", "bits": None}
        path = out.parent / f"{'again' if resume else 'first'}-{os.environ['RANK']}.json"
        path.write_text(json.dumps({**outcome, "flipped": callback.flipped}))

    return together(2, work, timeout=PATIENCE - 50)


def outcomes(folder: Path, name: str) -> list[dict]:
    """What the processes have left."""
    return [json.loads((folder / f"{name}-{process}.json").read_text()) for process in (0, 1)]


def reference(kind: str, folder: Path) -> tuple[Ended, Result]:
    """Train without a flip."""
    ended = run(partial(train, kind, folder / "out", None), log=folder / "log", patience=PATIENCE)
    case = f"references/{kind}/0"
    if ended.how != "returned" or any(ended.value):
        return Ended("died"), Result(case, "cannot train", f"{ended}")
    both = outcomes(folder, "first")
    return Ended("returned", both), Result(case, "other bits" if both[0]["error"] else "same bits", f"{ended}")


def flipped(case: Case) -> Result:
    """One case: a flip, the save after it, and the same command again."""
    kind, chance, case.interruptions = case.kind, case.chance, 1
    process, step = chance.randrange(2), chance.randint(EVERY, trainings.STEPS - 2)  # they agreed at a save before
    fault = (process, step, str(chance.random()))
    ended = run(partial(train, kind, case.out, fault), log=case.log, patience=PATIENCE)
    if ended.how != "returned" or any(ended.value):
        return case.result("hang" if ended.how == "hang" else "lost", f"{ended}\n{case.said()[-3000:]}")
    first, bits = outcomes(case.folder, "first"), [of_process["bits"] for of_process in case.expected.value]
    errors, save = {of_process["error"] for of_process in first}, -(-(step + 1) // EVERY) * EVERY
    said = f"{first[process]['flipped']} on process {process} in step {step + 1}; {errors}"
    if [of_process["bits"] for of_process in first] == bits:
        return case.result("harmless", said)
    if not re.search(rf"RanksDriftedError: Processes 0 and 1 differ after step {save} ", str(*errors)):
        return case.result("silent", said)
    again = run(partial(train, kind, case.out, None, True), log=case.log, patience=PATIENCE)
    if again.how != "returned" or any(again.value):
        return case.result("lost", f"{said}; again: {again}\n{case.said()[-3000:]}")
    same = [of_process["bits"] for of_process in outcomes(case.folder, "again")] == bits
    return case.result("named, same bits" if same else "other bits", said)
