"""
Signals on ranks: the processes of one training are told to end at moments that differ by up to a second.

Each process gets SIGTERM or SIGUSR1 at a moment of its own, or none; some get a second one. The first comes at a random
moment, inside a save or inside an evaluation. All must save the same step and end. The run then goes on without signals
and must end at the bits of a run that was left alone.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import threading
import time
from functools import partial
from pathlib import Path

from rig import fsdp2_on_cpu
from rig.processes import together
from transformers import TrainerCallback

from chaos import Case, Result, power, trainings
from chaos.children import Ended, run
from hf_hybrid.part import Part
from hf_hybrid.saving.manifest import is_committed

PAUSE = 0.05
"""Seconds that each step takes at least, so that a run lasts as long as signals are apart."""
SKEW = 1.0
PATIENCE = 600.0
KINDS = {
    f"{sharding}, {count} processes, {'leaps' if mode == 'leaps' else 'no leaps'}": (sharding, count, mode)
    for sharding in ("DDP", "FSDP2")
    for count in (2, 3)
    for mode in ("leaps", "plain")
}
OPTIONS = {"enable_jit_checkpoint": True, "eval_strategy": "steps", "eval_steps": 4, "per_device_train_batch_size": 1}
SHARDED = {
    "DDP": {"ddp_backend": "gloo"},
    "FSDP2": {"fsdp": True, "fsdp_config": {"transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]}},
}


Plan = list[list[tuple[float, int]]]
"""What each process gets: seconds after the moment, and signals."""


class Signals(TrainerCallback):
    """Sends this process signals so many seconds after a moment: `begin`, `save` or `evaluation`, with its step."""

    def __init__(self, sent: list[tuple[float, int]], moment: tuple[str, int]):
        self.sent, self.moment, self.begun = sent, moment, False

    def reached(self, moment: str, step: int) -> None:
        if (moment, step) != self.moment or self.begun:
            return
        self.begun = True
        for delay, number in self.sent:
            timer = threading.Timer(delay, os.kill, (os.getpid(), number))
            timer.daemon = True
            timer.start()

    def on_train_begin(self, args, state, control, **kwargs):
        self.reached("begin", state.global_step)

    def on_step_begin(self, args, state, control, **kwargs):
        if self.sent:
            time.sleep(PAUSE)

    def on_prediction_step(self, args, state, control, **kwargs):
        self.reached("evaluation", state.global_step)


class InsideSaves(Part):
    """Tells when a save has begun."""

    name = "inside_saves"

    def __init__(self, trainer, signals: Signals):
        self.trainer, self.signals = trainer, signals

    def state_dict(self):
        self.signals.reached("save", self.trainer.state.global_step)
        return {}


def train(kind: str, out: Path, resume: bool | str, plan: Plan, moment: tuple[str, int] = ("begin", 0)) -> list[int]:
    """Train on several processes, and return how each ended."""
    sharding, count, mode = KINDS[kind]

    def rank() -> None:
        if sharding == "FSDP2":
            fsdp2_on_cpu.enable()
        number = int(os.environ["RANK"])
        trainer = trainings.build(mode, out, **OPTIONS, **SHARDED[sharding])
        signals = Signals(plan[number] if plan else [], moment)
        trainer.add_callback(signals)
        trainer.parts.append(InsideSaves(trainer, signals))
        trainer.train(resume_from_checkpoint=resume)
        name = f"ended-{'first' if plan else 'last'}-{number}.json"
        (out.parent / name).write_text(json.dumps([trainer.state.global_step, trainer.state.max_steps]))

    return together(count, rank, timeout=PATIENCE - 30)


def planned(chance: random.Random, count: int) -> tuple[tuple[str, int], Plan]:
    """Return the moment and what each process gets then, and later by its skew."""
    kind = chance.choice(["begin", "save", "evaluation"])
    every = {"begin": 0, "save": trainings.OPTIONS["save_steps"], "evaluation": OPTIONS["eval_steps"]}[kind]
    moment = kind, every * chance.randint(1, 3)
    first = chance.uniform(0, 1.2 if kind == "begin" else 0.05)
    number = chance.choice([signal.SIGTERM, signal.SIGUSR1])
    skews = [0.0] + [chance.choice([None, 0.0, 0.02, 0.1, chance.uniform(0, SKEW), SKEW]) for _ in range(count - 1)]
    chance.shuffle(skews)
    plan = [[] if skew is None else [(first + skew, number)] for skew in skews]
    if chance.random() < 0.3:
        told = chance.choice([sent for sent in plan if sent])
        told.append((told[0][0] + chance.uniform(0, 0.1), signal.SIGTERM))
    return moment, plan


def reference(kind: str, folder: Path) -> tuple[Ended, Result]:
    """Train twice without a signal."""
    ends = [
        run(partial(train, kind, folder / name / "out", False, []), log=folder / f"{name}.log", patience=PATIENCE)
        for name in ("first", "second")
    ]
    bits = [final(folder / name / "out") for name in ("first", "second")]
    made = all(ended.how == "returned" and not any(ended.value) for ended in ends)
    outcome = "cannot train" if not made else "same bits" if len(set(bits)) == 1 and bits[0] else "other bits"
    return Ended("returned", bits[0]), Result(f"references/{kind}/0", outcome, str(ends))


def final(out: Path) -> str | None:
    """Return a digest of the weights of the last step."""
    files = sorted((out / f"checkpoint-{trainings.STEPS}").glob("*.safetensors"))
    weights = [path for path in files if not path.name.startswith("hybrid_")]
    return hashlib.sha256(b"".join(path.read_bytes() for path in weights)).hexdigest() if weights else None


def told_to_end(case: Case) -> Result:
    """One case: signals, the end of all processes, and a run that goes on."""
    kind, out = case.kind, case.out
    moment, plan = planned(case.chance, KINDS[kind][1])
    case.interruptions = sum(map(len, plan))
    ended = run(partial(train, kind, out, False, plan, moment), log=case.log, patience=PATIENCE)
    said = f"signals {plan} at {moment}; {ended.how} {ended.value}"
    if ended.how == "hang" or (ended.how == "returned" and -signal.SIGKILL in ended.value):
        return case.result("hang", said)
    if ended.how != "returned" or any(status not in (0, -signal.SIGTERM, -signal.SIGUSR1) for status in ended.value):
        return case.result("lost", f"{said} {ended.trace}")  # a signal may meet a process that has trained
    told = {path.stem[-1]: tuple(json.loads(path.read_text())) for path in case.folder.glob("ended-first-*.json")}
    silent = [status for rank, status in enumerate(ended.value) if str(rank) not in told]
    steps = set(told.values()) or {(power.newest_step(out), trainings.STEPS)}
    if len(steps) != 1 or 0 in silent:  # others were killed by a late signal when they had trained
        return case.result("lost", f"{said}; they ended at {told}")
    step = steps.pop()[0]
    if not is_committed(out / f"checkpoint-{step}"):
        return case.result("lost", f"{said}; no checkpoint of step {step}: {sorted(os.listdir(out))}")
    again = run(partial(train, kind, out, True, []), log=case.log, patience=PATIENCE)
    if again.how != "returned" or any(again.value):
        return case.result("lost", f"{said}; ended at {step}; again: {again.how} {again.value} {again.trace}")
    same = final(out) == case.expected.value
    return case.result("same bits" if same else "other bits", f"{said}; ended at {step}")
