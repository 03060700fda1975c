"""
The runs that `tests/run/test_weights.py` makes under FSDP2 in several processes, and in one.

    PYTHONPATH=tests accelerate launch --config_file examples/accelerate_configs/fsdp2.yaml --num_processes 2 \
        tests/run/launched_fsdp2.py FOLDER NAME...

makes them with a launcher: accelerate then reads from that file how to shard, unless the run says it.
"""

import contextlib
import json
import math
import os
import sys
from pathlib import Path
from unittest.mock import patch

import torch
from conftest import ByteText, hybrid_config, tiny_model
from rig import fsdp2_on_cpu, launched
from safetensors.torch import save_file
from transformers import MixtralConfig, MixtralForCausalLM

from hf_hybrid import HybridTrainer
from hf_hybrid.leaps.trajectory import Trajectory
from hf_hybrid.run.weights import canonical
from hf_hybrid.saving.manifest import last_checkpoint

BY_LAUNCHER = "ACCELERATE_USE_FSDP" in os.environ  # a first trainer sets it too
STEPS = 24
BATCH = 12
"""Of all processes together, so that runs on one, two and three are the same."""
BASE = {"max_steps": STEPS, "probe_budget": 0.5, "leap_worth": 1.0}
EXPERTS = {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2, "architectures": None}
SHORT = {"max_steps": 18}
"""Two leaps and more."""
MUON = {"optim": "muon", "in_fp32": True, "direction": "auto"}
NO_LEAPS = {"max_steps": 8}
"""Muon and the rate of adapters make none, and all their steps are alike."""
HARMFUL = {"direction": "gradient_memory", "leap_worth": 0.5}
RUNS = {
    "base": {**SHORT},
    "accumulated": {**SHORT, "gradient_accumulation_steps": 2, "fsdp_config": {"activation_checkpointing": True}},
    "offloaded": {**SHORT, "fsdp_config": {"cpu_offload": True, "reshard_after_forward": False}},
    "memory": {"direction": "gradient_memory", "learning_rate": 5e-4, "model": {"tie_word_embeddings": False}},
    "rescued": {"auto_lr": "on", "learning_rate": 2e-4, "max_steps": 24},
    "muon": {**NO_LEAPS, **MUON},
    "muon_lora": {**MUON, "lora": True},
    "plain_muon": {"optim": "muon", "in_fp32": True, "enable_predict": False, "max_steps": 12},
    # One gradient of an expert is so small that AdamW divides its rounding by itself, unless epsilon is larger.
    "experts": {"experts": True, "adam_epsilon": 1e-6},
    "muon_experts": {**MUON, "experts": True},
    "lora": {**SHORT, "lora": True, "learning_rate": 1e-2},
    "bf16": {**SHORT, "bf16": True},
    "looked": {"hurts_at": 12, "poisoned_at": 6, "probe_budget": 1.0, "max_steps": 24},
    "unseen": {"hurts_at": 18, "probe_budget": 0.0, "divergence_threshold": 3.0, "max_steps": 28, **HARMFUL},
    "world_model": {"planner": "dynamics"},
    "iterable": {"iterable": True},
    "rescued_lora": {**NO_LEAPS, "lora": True, "learning_rate": None, "direction": "auto"},
}
for name in ("base", "accumulated", "offloaded", "memory", "lora", "bf16"):
    RUNS[f"plain_{name}"] = {**RUNS[name], "enable_predict": False, "max_steps": 12}
LIKE = {"offloaded": "base", "plain_offloaded": "plain_base"}
"""Runs that are another one's in a single process."""

SAVED = {"samples": 156, "max_steps": 28, "save_strategy": "steps", "save_steps": 3, "correct_phase_steps": 3}
"""Over several epochs of whole batches, with checkpoints."""
SAVED_RUNS = {
    "adamw": {},
    "muon": MUON,
    "lora": {"lora": True, "learning_rate": 1e-2},
    "plain": {"enable_predict": False},
    "plain_muon": {"optim": "muon", "in_fp32": True, "enable_predict": False},
    "plain_lora": {"lora": True, "learning_rate": 1e-2, "enable_predict": False},
}
STOPS_AT = 13
DEATHS = (4, 7, 10, 13, 17)
"""Steps at which a process is killed: the checkpoints before are of different phases."""
UNSAVED = {"save_strategy": "no"}
"""Of runs that nothing resumes: under FSDP2 a checkpoint takes longer than the steps before it."""
for name, options in SAVED_RUNS.items():
    RUNS[f"{name}_whole"] = {**SAVED, **options, **UNSAVED}
    RUNS[f"{name}_halved"] = {**SAVED, **options, "stops_at": STOPS_AT}
    for count in (1, 2, 3):
        RUNS[f"{name}_from_{count}"] = {**SAVED, **options, **UNSAVED, "resume": f"{count}/{name}_halved"}
IN_PARTS = {"fsdp_config": {"state_dict_type": "SHARDED_STATE_DICT"}}
"""Weights and optimizer states are saved by torch."""
RUNS["killed_plain"] = {**SAVED, **SAVED_RUNS["plain"], **IN_PARTS, "dies_at": DEATHS[-1]}
RUNS["resumed_plain"] = {**SAVED, **SAVED_RUNS["plain"], **IN_PARTS, **UNSAVED, "resume": "2/killed_plain"}
for step in DEATHS:
    kind = {} if step == DEATHS[-1] else IN_PARTS
    RUNS[f"killed_{step}"] = {**SAVED, **kind, "dies_at": step}
    RUNS[f"resumed_{step}"] = {**SAVED, **kind, **UNSAVED, "resume": f"2/killed_{step}"}


def hurting(at: int):
    """Context in which the first leap from this step on goes uphill, ten times as far as the weights are large."""
    leap, made = Trajectory.leap, []

    def wrong(trajectory, gain):
        if trajectory.open.step >= at and not made:
            made.append(trajectory.open.step)
        if made != [trajectory.open.step]:
            return leap(trajectory, gain)
        trajectory.max_relative_norm, trajectory.direction.most_per_step = 10.0, math.inf
        return leap(trajectory, -1000.0)

    return patch.object(Trajectory, "leap", wrong)


def muon_in_fp32():
    """Context in which torch's Muon does not round to bf16, which would magnify the last bit to 1e-3."""
    return patch.object(torch.Tensor, "bfloat16", torch.Tensor.float)


def train(folder: Path, name: str, resume: Path | None = None) -> HybridTrainer:
    """Train the run of this name as one of the processes; `resume` is a checkpoint or a run's folder."""
    options, processes = {**BASE, **RUNS[name]}, int(os.environ.get("WORLD_SIZE", 1))
    model = tiny_model(**options.pop("model", {}))
    if options.pop("experts", False):
        torch.manual_seed(0)
        model = MixtralForCausalLM(MixtralConfig(**{**model.config.to_diff_dict(), **EXPERTS}))
    if options.pop("lora", False):
        model = launched.only_adapters(model, 3)
    sharding = {"fsdp": True, "fsdp_config": dict(options.pop("fsdp_config", {}))}
    if processes == 1 or (BY_LAUNCHER and not sharding["fsdp_config"]):
        sharding = {}
    hurts_at, poisoned_at = options.pop("hurts_at", None), options.pop("poisoned_at", None)
    in_fp32 = options.pop("in_fp32", False)
    ends = launched.Ends(options.pop("dies_at", None), options.pop("stops_at", None))
    data = ByteText(options.pop("samples", 1000))
    if options.pop("iterable", False):
        data = launched.without_length(data)
    if "resume" in options:
        resume = folder / options.pop("resume")
    if resume is not None and not resume.name.startswith("checkpoint-"):
        resume = last_checkpoint(resume)
    batch = BATCH // processes // options.get("gradient_accumulation_steps", 1)
    place = folder / str(processes) / name
    config = hybrid_config(place, per_device_train_batch_size=batch, **options, **sharding)
    kind = HybridTrainer if poisoned_at is None else launched.PoisonedTrainer
    trainer = kind(model, config, train_dataset=data, callbacks=[ends])
    trainer.poisoned_at = poisoned_at
    trainer.probe_sequences = BATCH  # with fewer, each process would take the first of its own batch
    with (
        contextlib.nullcontext() if hurts_at is None else hurting(hurts_at),
        muon_in_fp32() if in_fp32 else contextlib.nullcontext(),
    ):
        trainer.train(resume_from_checkpoint=resume and str(resume))
    return trainer


def result(trainer) -> dict:
    return {**launched.decisions(trainer), "kind": type(trainer.model).__name__}


def weights(trainer) -> dict[str, torch.Tensor]:
    """The whole trained weights, on the first process."""
    trained = {canonical(name) for name, parameter in trainer.model.named_parameters() if parameter.requires_grad}
    found = trainer.accelerator.get_state_dict(trainer.model)
    return {name: found[name].clone() for name in found if name in trained}


def run(folder: Path, names: tuple[str, ...]) -> None:
    """Make these runs as one of several processes, and write what came of them."""
    fsdp2_on_cpu.enable()
    for name in names:
        trainer = train(folder, name)
        found, place = weights(trainer), Path(trainer.args.output_dir)
        place.mkdir(parents=True, exist_ok=True)
        (place / f"rank{trainer.args.process_index}.json").write_text(json.dumps(result(trainer)))
        if trainer.is_world_process_zero():
            save_file(found, place / "weights.safetensors")
    trainer.accelerator.wait_for_everyone()
    trainer.accelerator.end_training()


if __name__ == "__main__":
    from rig.strict import be_strict

    be_strict()
    run(Path(sys.argv[1]), tuple(sys.argv[2:]))
