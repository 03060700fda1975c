"""The runs that `tests/test_machine.py` makes in two processes under DDP."""

import contextlib
import hashlib
import json
import math
import os
import signal
from pathlib import Path
from unittest.mock import patch

import torch
from conftest import TIMES, ByteText, hybrid_config, losses, tiny_model
from datasets import IterableDataset
from peft import LoraConfig, get_peft_model
from transformers import Trainer, TrainerCallback

from hf_hybrid import HybridTrainer
from hf_hybrid.leaps.trajectory import Trajectory

STEPS = 28
# What leaps may cost is counted per process, which computes them whole and the step by half: not a limit here.
BASE = {
    "leap_budget": 1e3,
    "max_steps": STEPS,
    "per_device_train_batch_size": 2,
    "per_device_eval_batch_size": 4,
    "probe_budget": 0.3,
    "ddp_find_unused_parameters": False,
}
# A rate that is found while training, and several epochs, so that a resume has to find its place in a shuffled one.
SAVED = {"learning_rate": 5e-4, "auto_lr": "on", "leap_worth": 1.0, "save_strategy": "steps", "save_steps": 3}
OFF = {"enable_predict": False, "save_strategy": "steps", "save_steps": 3}
UNSAVED = {"save_strategy": "no"}
"""Of runs that nothing resumes."""
DIES_AT = 17
SHORT = {"warmup_phase_steps": 2, "full_phase_steps": 1, "correct_phase_steps": 1, "max_predict_steps": 1}
RUNS = {
    "base": {},
    "killed": {**SAVED, "samples": 60, "dies_at": DIES_AT},
    "whole": {**SAVED, **UNSAVED, "samples": 60},
    "resumed": {**SAVED, **UNSAVED, "samples": 60, "resumes": "killed"},
    "off_killed": {**OFF, "samples": 60, "dies_at": DIES_AT},
    "off_whole": {**OFF, **UNSAVED, "samples": 60},
    "off_resumed": {**OFF, **UNSAVED, "samples": 60, "resumes": "off_killed"},
    # Leaps that hurt and are probed, a batch that is no number on one process, accumulated gradients.
    "looked": {**SHORT, "hurts": True, "max_steps": 20, "gradient_accumulation_steps": 2, "probe_budget": 1.0},
    # Leaps that hurt and that nobody looks at before Correct.
    "unseen": {"hurts": True, "probe_budget": 0.0, "divergence_threshold": 3.0, "direction": "gradient_memory"},
    "muon": {"max_steps": 8, "optim": "muon", "direction": "auto"},
    "off_muon": {"max_steps": 4, "optim": "muon", "enable_predict": False},
    "lora": {"max_steps": 16, "lora": True},
    "off_lora": {"max_steps": 4, "lora": True, "enable_predict": False},
    # Data without a length, which the first process reads for both.
    "iterable": {"max_steps": 16, "iterable": True},
    "off": {"enable_predict": False, "max_steps": 4},
    "plain": {"enable_predict": False, "max_steps": 4, "kind": Trainer},
}  # fmt: skip


class Ends(TrainerCallback):
    """Ends a run before its time: `kill -9` of the last process, or Trainer stops after a step."""

    def __init__(self, dies_at: int | None, stops_at: int | None = None):
        self.dies_at, self.stops_at = dies_at, stops_at

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == self.dies_at and args.process_index == args.world_size - 1:
            os.kill(os.getpid(), signal.SIGKILL)

    def on_step_end(self, args, state, control, **kwargs):
        control.should_training_stop |= state.global_step == self.stops_at


class PoisonedTrainer(HybridTrainer):
    """The loss of one batch is not a number, on the last process alone."""

    poisoned_at = 8

    def compute_loss(self, model, inputs, *args, **kwargs):
        loss = super().compute_loss(model, inputs, *args, **kwargs)
        last = self.args.process_index == self.accelerator.num_processes - 1
        poisoned = model.training and self.state.global_step == self.poisoned_at and last
        return loss * math.nan if poisoned else loss


def only_adapters(model, rank):
    torch.manual_seed(0)
    return get_peft_model(model, LoraConfig(r=rank, target_modules="all-linear", task_type="CAUSAL_LM"))


def without_length(rows: ByteText) -> IterableDataset:
    return IterableDataset.from_generator(lambda: (dict(row) for row in rows))


def decisions(trainer) -> dict:
    """What must not differ between processes, and the losses."""
    summary = trainer.hybrid_summary() if isinstance(trainer, HybridTrainer) else {}
    return {
        "decisions": {k: v for k, v in summary.items() if k not in (*TIMES, "memory", "planner", "shared_if_together")},
        "losses": losses(trainer),
        "processes": trainer.accelerator.num_processes,
        "step": trainer.state.global_step,
    }


def hurting():
    """Context in which every second leap goes far uphill."""
    leap, made = Trajectory.leap, []

    def wrong(trajectory, gain):
        trajectory.max_relative_norm = 10.0
        if trajectory.open.gain == 0:  # not moved yet
            made.append(gain)
        return leap(trajectory, -5000.0 if len(made) % 2 == 0 else gain)

    return patch.object(Trajectory, "leap", wrong)


def build(folder, kind=HybridTrainer, samples=400, dies_at=None, lora=False, iterable=False, **options):
    torch.manual_seed(0)
    model = tiny_model(attention_dropout=0.1 if "save_steps" in options else 0.0)
    data = without_length(ByteText(samples)) if iterable else ByteText(samples)
    config = hybrid_config(folder, **{**BASE, **options})
    model = only_adapters(model, 4) if lora else model
    return kind(model, config, train_dataset=data, callbacks=[Ends(dies_at)])


def train(folder: Path, name: str):
    options = dict(RUNS[name])
    resumes, hurts = options.pop("resumes", None), options.pop("hurts", False)
    kind = {"kind": PoisonedTrainer} if hurts else {}
    trainer = build(folder / (resumes or name), **kind, **options)
    with hurting() if hurts else contextlib.nullcontext():
        trainer.train(resume_from_checkpoint=resumes is not None)
    return trainer


def result(trainer) -> dict:
    digest = hashlib.sha256()
    for parameter in trainer.accelerator.unwrap_model(trainer.model).parameters():
        digest.update(parameter.detach().numpy().tobytes())
    return {**decisions(trainer), "digest": digest.hexdigest()}


def run(folder: Path, names: tuple[str, ...]) -> None:
    """Make these runs as one of several processes, and write what came of them."""
    for name in names:
        trainer = train(folder, name)
        file = folder / f"{name}-{trainer.args.process_index}.json"
        file.write_text(json.dumps(result(trainer)))
    trainer.accelerator.wait_for_everyone()
    trainer.accelerator.end_training()
