"""The trainings that are interrupted: eighteen steps of a tiny model through all phases, in every mode."""

from __future__ import annotations

import hashlib
import importlib
import os
import signal
import socket
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from conftest import ByteText, config_values, hybrid_config, tiny_model
from torch.utils.data import IterableDataset
from transformers import TrainerCallback

from hf_hybrid import HybridTrainer

STEPS = 18
OPTIONS = {
    "direction": "orthogonal", "max_steps": STEPS, "per_device_train_batch_size": 2, "per_device_eval_batch_size": 2,
    "warmup_phase_steps": 3, "full_phase_steps": 2, "correct_phase_steps": 1, "max_predict_steps": 2,
    "leap_worth": 1.0, "leap_budget": 1e3, "probe_budget": 0.3, "save_strategy": "steps", "save_steps": 3,
}  # fmt: skip
SAMPLES = 21
"""Fewer than a run needs, so that it resumes inside shuffled epochs and at their boundaries."""


def model(seed: int = 0, width: int = 16, **overrides):
    """Dropout makes a run depend on the state of the random generators."""
    values = {"hidden_size": width, "intermediate_size": 2 * width, "attention_dropout": 0.1, **overrides}
    return tiny_model(seed, **values)


def adapted(seed: int = 0, width: int = 16):
    """With LoRA."""
    from peft import LoraConfig, get_peft_model

    base = model(seed, width)
    return get_peft_model(base, LoraConfig(r=4, lora_dropout=0.1, target_modules=["q_proj", "down_proj"]))


class Stream(IterableDataset):
    """Rows without a length."""

    def __init__(self, rows: ByteText):
        self.rows = rows

    def __iter__(self):
        return (self.rows[index] for index in range(len(self.rows)))


def hub_stream(rows: ByteText):
    """A streamed data set of the library `datasets`, shuffled."""
    from datasets import Dataset

    columns = {name: rows.blocks.tolist() for name in ("input_ids", "labels")}
    return Dataset.from_dict(columns).to_iterable_dataset(num_shards=4).shuffle(seed=0, buffer_size=8)


class SavesInsideSteps(TrainerCallback):
    """Saves at every event of some steps, as callbacks of users do."""

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step % 4 == 1:
            self.trainer._save_checkpoint(self.trainer.model, trial=None)

    on_substep_end = on_pre_optimizer_step = on_step_end = on_step_begin


class FrozenInTurn(TrainerCallback):
    """One layer trains in each step, and the others are frozen meanwhile."""

    def on_step_begin(self, args, state, control, model=None, **kwargs):
        layers = self.trainer.accelerator.unwrap_model(model).model.layers
        for number, layer in enumerate(layers):
            layer.requires_grad_(number == state.global_step % len(layers))


class Steps(TrainerCallback):
    """Counts the steps of this process; ends it without a word after a step, if asked."""

    def __init__(self, stop_after: int | None = None):
        self.first: int | None = None
        self.steps: list[int] = []
        self.stop_after = stop_after

    def on_train_begin(self, args, state, control, **kwargs):
        self.first = state.global_step + 1

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == self.stop_after:
            os.kill(os.getpid(), signal.SIGKILL)

    def on_step_end(self, args, state, control, **kwargs):
        self.steps.append(state.global_step)


def hybrid(model, folder: Path, rows: ByteText, mode: Mode, callbacks: list, **options):
    config = hybrid_config(folder, **{**OPTIONS, **mode.options, **options})
    sets = {"train_dataset": mode.data(rows), "eval_dataset": rows}
    trainer = HybridTrainer(model, config, **sets, callbacks=callbacks)
    trainer.probe_sequences = 2
    return trainer


def supervised(model, folder: Path, rows: ByteText, mode: Mode, callbacks: list, **options):
    """TRL's trainer."""
    from datasets import Dataset
    from rig.byte_llama import byte_tokenizer

    from hf_hybrid import HybridSFTConfig, HybridSFTTrainer

    config = HybridSFTConfig(**config_values(folder, **{**OPTIONS, **mode.options, **options}))
    data = Dataset.from_dict({"input_ids": rows.blocks.tolist()})
    tokenizer = byte_tokenizer([], pad_token="!", eos_token="!")
    trainer = HybridSFTTrainer(model, config, train_dataset=data, processing_class=tokenizer, callbacks=callbacks)
    trainer.probe_sequences = 2
    return trainer


@dataclass(frozen=True)
class Mode:
    """
    A kind of training.

    Attributes:
        options (`dict`): Of the configuration.
        model, data, build (`Callable`): Make the model, the data set from rows, and the trainer from both.
        callbacks (`tuple`): Classes of callbacks.
        processes (`int`): 2: with DDP over gloo.
        needs (`tuple[str]`): Packages without which the mode is left out.
    """

    options: dict = field(default_factory=dict)
    model: Callable = model
    data: Callable = lambda rows: rows
    build: Callable = hybrid
    callbacks: tuple = ()
    processes: int = 1
    needs: tuple[str, ...] = ()


STREAMED = {"memory": "stream", "resident_layers": 0}
EVERY = {"save_steps": 1}
MODES: dict[str, Mode] = {
    "leaps": Mode(),
    "every step": Mode(EVERY),
    "every step, last two kept": Mode({**EVERY, "save_total_limit": 2}),
    "plain": Mode({"enable_predict": False}),
    "plain, every step": Mode({**EVERY, "enable_predict": False, "save_total_limit": 1}),
    "gradient memory": Mode({"direction": "gradient_memory", **EVERY}),
    "frozen control": Mode({"direction": "none"}),
    "aggressive": Mode({"preset": "aggressive"}),
    "fast": Mode({"preset": "fast"}),
    "auto_lr": Mode({"auto_lr": "on", "learning_rate": 1e-4, **EVERY}),
    "dynamics": Mode({"planner": "dynamics", "max_steps": 40}),
    "epochs": Mode({"max_steps": -1, "num_train_epochs": 3, "per_device_train_batch_size": 4}),
    "save by epoch": Mode({"save_strategy": "epoch", "max_steps": -1, "num_train_epochs": 4,
                           "per_device_train_batch_size": 4}),
    "accumulation": Mode({"gradient_accumulation_steps": 2, **EVERY}),
    "stream of rows": Mode(data=Stream),
    "hub stream": Mode(data=hub_stream, needs=("datasets",)),
    "workers": Mode({"dataloader_num_workers": 1}),
    "best model": Mode({"eval_strategy": "steps", "eval_steps": 3, "load_best_model_at_end": True,
                        "save_total_limit": 1}),
    "bf16": Mode({"bf16": True}),
    "weights in bf16 and int8": Mode({"weight_precision": "full=bf16,predict=int8", "bf16": True, **EVERY}),
    "states on the host": Mode({"predict_states": "host", **EVERY}),
    "phases checkpointed": Mode({"checkpoint_phases": "full,correct"}),
    "streamed": Mode({**STREAMED, **EVERY}),
    "streamed, plain": Mode({**STREAMED, "enable_predict": False}),
    "streamed, accumulation": Mode({**STREAMED, "gradient_accumulation_steps": 2,
                                    "plan_values": {"stream_embeddings": True}}),
    "streamed, updated in the backward pass": Mode({**STREAMED, **EVERY, "enable_predict": False, "max_grad_norm": 0.0,
                                                    "out_of_memory": "raise"}),
    "streamed, 8 bit": Mode({**STREAMED, "optimizer_states": "8bit"}, needs=("bitsandbytes",)),
    "streamed, LoRA over int8": Mode({**STREAMED, "base_precision": "int8"}, model=adapted, needs=("peft",)),
    "LoRA": Mode({"save_total_limit": 2}, model=adapted, needs=("peft",)),
    "layers frozen in turn": Mode({**EVERY, "enable_predict": False}, callbacks=(FrozenInTurn,)),
    "saves inside steps": Mode(callbacks=(SavesInsideSteps,)),
    "saves inside steps, accumulation": Mode({"gradient_accumulation_steps": 2}, callbacks=(SavesInsideSteps,)),
    "SFT": Mode(build=supervised, needs=("trl",)),
    "two processes": Mode({"ddp_backend": "gloo"}, processes=2),
}  # fmt: skip


def available(names: list[str]) -> tuple[list[str], dict[str, str]]:
    """Import what the modes need, before processes are forked; return those that can run, and why others cannot."""
    can, cannot = [], {}
    for name in names:
        try:
            for package in MODES[name].needs:
                importlib.import_module(package)
            can.append(name)
        except ImportError as error:
            cannot[name] = str(error)
    return can, cannot


def build(
    name: str, folder: Path, seed=0, width=16, stop_after: int | None = None, wait: float | None = None, **options
):
    """
    Make the trainer of a mode.

    Args:
        seed (`int`): Another one is another run on other data.
        width (`int`): Another one is another model.
        stop_after (`int`, *optional*): Step after which the process ends without a word.
        wait (`float`, *optional*): Seconds to wait for another training in the folder, if not as long as the default.
        options: Of the configuration.
    """
    mode = MODES[name]
    torch.manual_seed(seed)
    callbacks = [made() for made in mode.callbacks] + [Steps(stop_after)]
    rows = ByteText(SAMPLES, offset=1000 * seed)
    trainer = mode.build(mode.model(seed, width), folder, rows, mode, callbacks, seed=seed, **options)
    for callback in callbacks:
        callback.trainer = trainer
    if wait is not None:
        trainer.saver.lock.wait = wait
    return trainer


def train(name: str, folder: Path, resume: bool | str = False, **values) -> dict[str, Any]:
    """Train to the end and return what must not differ from an uninterrupted run."""

    def trained() -> HybridTrainer:
        trainer = build(name, folder, **values)
        trainer.train(resume_from_checkpoint=resume)
        return trainer

    if MODES[name].processes == 2:
        _begin_second(trained)
    return facts(trained())


def _begin_second(work: Callable) -> None:
    """Fork the second process of a run with DDP. Both are in one process group, and the first one's end ends both."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    first = os.fork()
    rank = 0 if first else 1
    ranks = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in ranks.items()})
    if first:
        return
    try:
        work()
        signal.pause()  # the first process may still need the connection
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)


def facts(trainer) -> dict[str, Any]:
    """
    What is compared.

    Returns:
        `dict`: `weights` (a digest of every bit), `counts` of the whole run, `step` (the last), and of this process
        `first` (the first step that was left to do; `None` if the run did not even begin) and `steps` (those done).
    """
    digest = hashlib.sha256()
    for key, tensor in sorted(trainer.accelerator.unwrap_model(trainer.model).state_dict().items()):
        digest.update(key.encode())
        digest.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    summary = trainer.hybrid_summary()
    counter = next(c for c in trainer.callback_handler.callbacks if isinstance(c, Steps))
    return {
        "weights": digest.hexdigest(),
        "counts": {key: summary[key] for key in ("steps_by_phase", "real_steps", "backward_passes")},
        "step": trainer.state.global_step,
        "max_steps": trainer.state.max_steps,
        "first": counter.first,
        "steps": counter.steps,
    }


def has_checkpoint(folder: Path) -> bool:
    """Whether there is anything to resume from, be it half written."""
    return any(folder.glob("checkpoint-*"))
