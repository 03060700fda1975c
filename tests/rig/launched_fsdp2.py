"""
The runs under FSDP2 that `tests/leaps/test_shards.py` launches: several in one start, as starting takes long.

    PYTHONPATH=tests torchrun --nproc_per_node 2 tests/rig/launched_fsdp2.py FOLDER NAME...

With `accelerate launch --config_file examples/accelerate_configs/fsdp2.yaml` in the place of torchrun, accelerate reads
from that file how to shard.
"""

import contextlib
import json
import math
import os
import signal
import sys
from pathlib import Path

import torch
from conftest import ByteText, hybrid_config, tiny_model
from peft import LoraConfig, get_peft_model
from safetensors.torch import save_file
from transformers import TrainerCallback

from hf_hybrid import HybridTrainer
from hf_hybrid.leaps.shards import canonical
from hf_hybrid.leaps.trajectory import Trajectory
from hf_hybrid.manifest import last_checkpoint
from rig import fsdp2_on_cpu

BY_LAUNCHER = "ACCELERATE_USE_FSDP" in os.environ  # a first trainer sets it too
STEPS = 40
BATCH = 12
"""Of all processes together, so that runs on one, two and three are the same."""
BASE = {
    "max_steps": STEPS,
    "probe_budget": 0.5,
    "probe_batch_size": BATCH,  # with fewer, each process would take the first of its own batch
    "leap_worth": 1.0,
    "correct_gain": True,
}
HARMFUL = {"direction": "gradient_memory", "leap_worth": 0.5, "correct_gain": False}
RUNS = {
    "base": {},
    "accumulated": {"gradient_accumulation_steps": 2, "fsdp_config": {"activation_checkpointing": True}},
    "offloaded": {"fsdp_config": {"cpu_offload": True, "reshard_after_forward": False}},
    "memory": {"direction": "gradient_memory", "learning_rate": 5e-4, "model": {"tie_word_embeddings": False}},
    "sampled": {"direction": "gradient_memory", "optim": "rmsprop", "learning_rate": 1e-4},
    "rescued": {"lr_rescue": "on", "learning_rate": 2e-4, "max_steps": 24},
    "muon": {"optim": "muon", "in_fp32": True, "max_steps": 24},
    "plain_muon": {"optim": "muon", "in_fp32": True, "enable_predict": False, "max_steps": 12},
    "lora": {"lora": True, "learning_rate": 1e-2},
    "bf16": {"bf16": True},
    "looked": {"hurts_at": 12, "poisoned_at": 6, "probe_budget": 1.0, "max_steps": 24},
    "unseen": {"hurts_at": 18, "probe_budget": 0.0, "divergence_threshold": 3.0, "max_steps": 28, **HARMFUL},
    "world_model": {"planner": "dynamics"},
    "rescued_lora": {"lora": True, "learning_rate": 1e-4, "direction": "auto", "lr_rescue": "on"},
}
LIKE = {"offloaded": "base"}
"""Runs that are another one's in a single process."""

SAVED = {"samples": 150, "max_steps": 28, "save_strategy": "steps", "save_steps": 3, "correct_phase_steps": 3}
DEATHS = (4, 7, 10, 13, 17)
"""Steps at which a process is killed: the checkpoints before are of different phases."""
SAVED_RUNS = {
    "whole": {},
    "halved": {"stops_at": 15},
    "resumed_from_one": {"resume": "one/halved"},
    **{f"killed_{step}": {"dies_at": step} for step in DEATHS},
    **{f"resumed_{step}": {"resume": f"killed_{step}"} for step in DEATHS},
}
for step in DEATHS[:-1]:  # whose weights and optimizer states are saved by torch, in parts
    for name in (f"killed_{step}", f"resumed_{step}"):
        SAVED_RUNS[name]["fsdp_config"] = {"state_dict_type": "SHARDED_STATE_DICT"}
"""Runs over several epochs that save, that die, and that are resumed from what another one saved."""
RUNS |= {name: {**SAVED, **more} for name, more in SAVED_RUNS.items()}


class Ends(TrainerCallback):
    """Ends a run before its time: `kill -9` of the last process, or Trainer stops after a step."""

    def __init__(self, dies_at: int | None, stops_at: int | None):
        self.dies_at, self.stops_at = dies_at, stops_at

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == self.dies_at and args.process_index == args.world_size - 1:
            os.kill(os.getpid(), signal.SIGKILL)

    def on_step_end(self, args, state, control, **kwargs):
        control.should_training_stop |= state.global_step == self.stops_at


class PoisonedTrainer(HybridTrainer):
    """The loss of one batch is not a number, on the last process alone."""

    poisoned_at = None

    def compute_loss(self, model, inputs, *args, **kwargs):
        loss = super().compute_loss(model, inputs, *args, **kwargs)
        last = self.args.process_index == self.accelerator.num_processes - 1
        poisoned = model.training and self.state.global_step == self.poisoned_at and last
        return loss * math.nan if poisoned else loss


@contextlib.contextmanager
def hurting(at: int):
    """Context in which the first leap from this step on goes uphill, three times as far as the weights are large."""
    leap, made = Trajectory.leap, []

    def wrong(trajectory, gain):
        if trajectory.open.step >= at and not made:
            made.append(trajectory.open.step)
        if made != [trajectory.open.step]:
            return leap(trajectory, gain)
        trajectory.max_relative_norm = 3.0
        return leap(trajectory, -1000.0)

    Trajectory.leap = wrong
    try:
        yield
    finally:
        Trajectory.leap = leap


@contextlib.contextmanager
def muon_in_fp32():
    """Context in which torch's Muon does not round to bf16, which would magnify the last bit to 1e-3."""
    bfloat16 = torch.Tensor.bfloat16
    torch.Tensor.bfloat16 = torch.Tensor.float
    try:
        yield
    finally:
        torch.Tensor.bfloat16 = bfloat16


def train(folder: Path, name: str, processes: int, resume: Path | None = None) -> HybridTrainer:
    """Train the run of this name as one of so many processes; `resume` is a checkpoint or a run's folder."""
    options = {**BASE, **RUNS[name]}
    model = tiny_model(**options.pop("model", {}))
    if options.pop("lora", False):
        torch.manual_seed(0)
        model = get_peft_model(model, LoraConfig(r=3, target_modules="all-linear", task_type="CAUSAL_LM"))
    sharding = {"fsdp": True, "fsdp_config": dict(options.pop("fsdp_config", {}))}
    if processes == 1 or BY_LAUNCHER:
        sharding = {}
    hurts_at, poisoned_at = options.pop("hurts_at", None), options.pop("poisoned_at", None)
    in_fp32 = options.pop("in_fp32", False)
    ends = Ends(options.pop("dies_at", None), options.pop("stops_at", None))
    data = ByteText(options.pop("samples", 1000))
    if "resume" in options:
        resume = folder / options.pop("resume")
    if resume is not None and not resume.name.startswith("checkpoint-"):
        resume = last_checkpoint(resume)
    batch = BATCH // processes // options.get("gradient_accumulation_steps", 1)
    config = hybrid_config(folder / name, per_device_train_batch_size=batch, **options, **sharding)
    trainer = PoisonedTrainer(model, config, train_dataset=data, callbacks=[ends])
    trainer.poisoned_at = poisoned_at
    with (
        contextlib.nullcontext() if hurts_at is None else hurting(hurts_at),
        muon_in_fp32() if in_fp32 else contextlib.nullcontext(),
    ):
        trainer.train(resume_from_checkpoint=resume and str(resume))
    return trainer


def result(trainer) -> dict:
    """What must not differ between processes, and the losses."""
    summary = trainer.hybrid_summary()
    return {
        "decisions": {k: v for k, v in summary.items() if k not in ("seconds_by_phase", "memory", "planner")},
        "losses": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry],
        "processes": trainer.accelerator.num_processes,
        "kind": type(trainer.model).__name__,
        "step": trainer.state.global_step,
    }


def weights(trainer) -> dict[str, torch.Tensor]:
    """The whole trained weights, on the first process."""
    trained = {canonical(name) for name, parameter in trainer.model.named_parameters() if parameter.requires_grad}
    found = trainer.accelerator.get_state_dict(trainer.model)
    return {name: found[name].clone() for name in found if name in trained}


if __name__ == "__main__":
    fsdp2_on_cpu.enable()
    folder, processes = Path(sys.argv[1]), int(os.environ["WORLD_SIZE"])
    for name in sys.argv[2:]:
        trainer = train(folder, name, processes)
        found, rank = weights(trainer), trainer.args.process_index
        (folder / f"{name}-{rank}.json").write_text(json.dumps(result(trainer)))
        if rank == 0:
            save_file(found, folder / f"{name}.safetensors")
    trainer.accelerator.wait_for_everyone()
    trainer.accelerator.end_training()
