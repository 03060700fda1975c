"""The runs that `tests/test_machine.py` makes in two processes under DDP."""

import hashlib
import json
import math
import os
import signal
from pathlib import Path

import torch
from conftest import TIMES, ByteText, hybrid_config, tiny_model
from datasets import IterableDataset as HubIterableDataset
from peft import LoraConfig, get_peft_model
from transformers import Trainer, TrainerCallback

from hf_hybrid import HybridTrainer
from hf_hybrid.experimental.residuals import LeapResiduals
from hf_hybrid.leaps.trajectory import Trajectory

STEPS = 28
# What leaps may cost is counted per process, which computes them whole and the step by half: not a limit here.
BASE = {
    "leap_budget": 1e3,
    "max_steps": STEPS,
    "per_device_train_batch_size": 2,
    "per_device_eval_batch_size": 4,
    "probe_budget": 0.3,
}
# A rate that is found while training, and several epochs, so that a resume has to find its place in a shuffled one.
SAVED = {"learning_rate": 5e-4, "auto_lr": "on", "leap_worth": 1.0, "save_strategy": "steps", "save_steps": 3}
DIES_AT = 17


class Dies(TrainerCallback):
    """`kill -9` of the second process."""

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == DIES_AT and args.process_index == 1:
            os.kill(os.getpid(), signal.SIGKILL)


class PoisonedTrainer(HybridTrainer):
    """The loss of one batch of the second process alone is not a number."""

    def compute_loss(self, model, inputs, *args, **kwargs):
        loss = super().compute_loss(model, inputs, *args, **kwargs)
        poisoned = model.training and self.state.global_step == 8 and self.args.process_index == 1
        return loss * math.nan if poisoned else loss


def build(folder, trainer_class=HybridTrainer, samples=400, callbacks=(), **options):
    torch.manual_seed(0)
    model = tiny_model(attention_dropout=0.1 if "save_steps" in options else 0.0)
    corrects = options.pop("corrects", False)
    parts = {"parts": [LeapResiduals(correct_gain=True)]} if corrects else {}
    config = hybrid_config(folder, ddp_find_unused_parameters=False, **{**BASE, **options})
    data = ByteText(samples)
    return trainer_class(model, config, train_dataset=data, callbacks=list(callbacks), **parts)


def result(trainer) -> dict:
    """What must not differ between processes, and the losses."""
    summary = trainer.hybrid_summary() if isinstance(trainer, HybridTrainer) else {}
    untimed = {k: v for k, v in summary.items() if k not in (*TIMES, "memory", "planner", "shared_if_together")}
    digest = hashlib.sha256()
    for parameter in trainer.accelerator.unwrap_model(trainer.model).parameters():
        digest.update(parameter.detach().numpy().tobytes())
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return {
        "decisions": untimed,
        "losses": losses,
        "digest": digest.hexdigest(),
        "processes": trainer.accelerator.num_processes,
        "step": trainer.state.global_step,
    }


def killed(folder: Path):
    """The second process is killed."""
    build(folder / "killed", samples=60, callbacks=[Dies()], **SAVED).train()


def base(folder: Path):
    trainer = build(folder / "base")
    trainer.train()
    return trainer


UNSAVED = {"save_strategy": "no"}
"""Of runs that nothing resumes."""


def whole(folder: Path):
    trainer = build(folder / "whole", samples=60, **{**SAVED, **UNSAVED})
    trainer.train()
    return trainer


def resumed(folder: Path):
    trainer = build(folder / "killed", samples=60, **{**SAVED, **UNSAVED})
    trainer.train(resume_from_checkpoint=True)
    return trainer


OFF = {"enable_predict": False, "save_strategy": "steps", "save_steps": 3}


def off_whole(folder: Path):
    trainer = build(folder / "off_whole", samples=60, **{**OFF, **UNSAVED})
    trainer.train()
    return trainer


def off_killed(folder: Path):
    """The second process is killed."""
    build(folder / "off_killed", samples=60, callbacks=[Dies()], **OFF).train()


def off_resumed(folder: Path):
    trainer = build(folder / "off_killed", samples=60, **{**OFF, **UNSAVED})
    trainer.train(resume_from_checkpoint=True)
    return trainer


def hurting(folder: Path, name: str, **options):
    """Every second leap goes far uphill."""
    leap, made = Trajectory.leap, []

    def wrong(trajectory, gain):
        trajectory.max_relative_norm = 10.0
        if trajectory.open.gain == 0:  # not moved yet
            made.append(gain)
        return leap(trajectory, -5000.0 if len(made) % 2 == 0 else gain)

    Trajectory.leap = wrong
    try:
        trainer = build(folder / name, PoisonedTrainer, **options)
        trainer.train()
    finally:
        Trajectory.leap = leap
    return trainer


def looked(folder: Path):
    """Leaps that hurt and are probed, a batch that is no number on one process, accumulated gradients."""
    options = {"gradient_accumulation_steps": 2, "corrects": True, "probe_budget": 1.0}
    phases = {"warmup_phase_steps": 2, "full_phase_steps": 1, "correct_phase_steps": 1, "max_predict_steps": 1}
    return hurting(folder, "looked", max_steps=20, **phases, **options)


def unseen(folder: Path):
    """Leaps that hurt and that nobody looks at before Correct."""
    return hurting(folder, "unseen", probe_budget=0.0, divergence_threshold=3.0, direction="gradient_memory")


def muon(folder: Path):
    trainer = build(folder / "muon", max_steps=8, optim="muon", direction="auto")
    trainer.train()
    return trainer


def lora(folder: Path):
    """Only adapters are trained."""
    torch.manual_seed(0)
    model = get_peft_model(tiny_model(), LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"))
    trainer = HybridTrainer(
        model, hybrid_config(folder / "lora", **{**BASE, "max_steps": 16}), train_dataset=ByteText(400)
    )
    trainer.train()
    return trainer


def off_muon(folder: Path):
    trainer = build(folder / "off_muon", max_steps=4, optim="muon", enable_predict=False)
    trainer.train()
    return trainer


def off_lora(folder: Path):
    torch.manual_seed(0)
    model = get_peft_model(tiny_model(), LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"))
    config = hybrid_config(folder / "off_lora", **{**BASE, "max_steps": 4, "enable_predict": False})
    trainer = HybridTrainer(model, config, train_dataset=ByteText(400))
    trainer.train()
    return trainer


def iterable(folder: Path):
    """Data without a length, which the first process reads for both."""
    data = HubIterableDataset.from_generator(lambda: (dict(row) for row in ByteText(400)))
    config = hybrid_config(folder / "iterable", **{**BASE, "max_steps": 16})
    trainer = HybridTrainer(tiny_model(), config, train_dataset=data)
    trainer.train()
    return trainer


def off(folder: Path):
    trainer = build(folder / "off", enable_predict=False, max_steps=4)
    trainer.train()
    return trainer


def plain(folder: Path):
    trainer = build(folder / "plain", Trainer, enable_predict=False, max_steps=4)
    trainer.train()
    return trainer


def run(folder: Path, names: tuple[str, ...]) -> None:
    """Make these runs as one of several processes, and write what came of them."""
    for name in names:
        trainer = globals()[name](folder)
        file = folder / f"{name}-{trainer.args.process_index}.json"
        file.write_text(json.dumps(result(trainer)))
    trainer.accelerator.wait_for_everyone()
    trainer.accelerator.end_training()
