"""`hf_hybrid/saving/replay.py`: which step of a run differs from the same steps made again, and why."""

import random

import pytest
import torch
from conftest import ByteText, hybrid_config, tiny_model
from rig.bit_flips import flip
from transformers import TrainerCallback

from hf_hybrid import HybridTrainer
from hf_hybrid.records.log import read_log
from hf_hybrid.saving.replay import Replay, replay

STEPS, START, END = 12, 4, 10
OPTIONS = {"max_steps": STEPS, "per_device_train_batch_size": 2, "save_strategy": "steps", "save_steps": 2}


class Fault(TrainerCallback):
    """Flips a bit between two steps, in a weight or a state of the optimizer."""

    def __init__(self, kind, step, chance):
        self.kind, self.step, self.chance = kind, step, chance

    def on_step_begin(self, args, state, control, model=None, optimizer=None, **kwargs):
        if state.global_step == self.step and self.kind != "data":
            parameter = self.chance.choice([p for p in model.parameters() if p.requires_grad])
            inner = optimizer.optimizer if hasattr(optimizer, "optimizer") else optimizer
            tensor = parameter if self.kind == "weights" else inner.state[parameter]["exp_avg"]
            # Of the mantissa and the low bits of the exponent: others give NaN, which the monitor finds by itself.
            flip(tensor, 4 * self.chance.randrange(tensor.numel()) + 2, self.chance.randrange(7))


class Rows(ByteText):
    """Of which the row that is read at some time has one other bit, once."""

    def __init__(self, samples, reads=None, chance=None):
        super().__init__(samples)
        self.reads, self.chance = reads, chance

    def __getitem__(self, index):
        row = super().__getitem__(index)
        if self.reads is not None:
            self.reads -= 1
            if self.reads == 0:
                row = {name: tensor.clone() for name, tensor in row.items()}
                flip(row["input_ids"], 8 * self.chance.randrange(32), self.chance.randrange(5))
        return row


def build(folder, data=None, callbacks=(), **options):
    torch.manual_seed(0)
    config = hybrid_config(folder, **{**OPTIONS, **options})
    model = tiny_model(attention_dropout=0.1)
    return HybridTrainer(model, config, train_dataset=data or ByteText(21), callbacks=list(callbacks))


MODES = {"leaps": {"leap_budget": 100.0}, "off": {"enable_predict": False}}
KINDS = ("weights", "optimizer", "data")


def found_in(folder, kind, mode, number, **options) -> tuple[Replay, int]:
    """Train with a fault, replay, and return what was found and the step in which the fault took effect."""
    chance = random.Random(f"{kind} {mode} {number}")
    options = {**MODES[mode], **options}
    step = chance.randrange(START, END - 1)
    if kind == "data":
        reads = 2 * step + 1 + chance.randrange(2)  # rows are read step by step, and each has two
        build(folder, Rows(21, reads, chance), **options).train()
    else:
        build(folder, callbacks=[Fault(kind, step, chance)], **options).train()
    return replay(lambda output: build(output, **options), folder, START, END), step + 1


@pytest.mark.parametrize("mode", MODES)
def test_a_sound_run_is_called_sound_and_left_as_it_is(tmp_path, mode):
    build(tmp_path, **MODES[mode]).train()
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    found = replay(lambda output: build(output, **MODES[mode]), tmp_path, START, END)
    assert found.verdict == "same" and "made these 6 steps right" in found.text
    assert before == {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}


@pytest.mark.parametrize("kind", KINDS)
def test_the_step_is_found_and_the_reason(tmp_path, kind):
    found, step = found_in(tmp_path, kind, "off", 0, digest_steps=1)
    assert found.step == step, found
    assert found.verdict == ("other data" if kind == "data" else "corrupted")
    assert f"Step {step} is the first that differs" in found.text


@pytest.mark.slow
@pytest.mark.parametrize("number", range(1, 21))
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mode", ["off"])
def test_in_twenty_of_twenty_cases(tmp_path, kind, mode, number):
    found, step = found_in(tmp_path, kind, mode, number, digest_steps=1)
    assert found.step == step and (found.verdict == "other data") == (kind == "data"), found


class FlipsWaiting(TrainerCallback):
    """Flips a bit of the batch that waits while the first step is predicted."""

    trainer = step = None

    def on_step_begin(self, args, state, control, **kwargs):
        if self.step is None and self.trainer.phase_name == "predict":
            self.step = state.global_step + 1
            flip(self.trainer.run.step.batches[0]["input_ids"], 8 * 3, 2)


def test_a_batch_that_changes_while_it_waits_behind_a_leap_is_named(tmp_path):
    options = {"leap_budget": 1e3, "leap_worth": 1.0, "warmup_phase_steps": 3, "full_phase_steps": 2}
    callback = FlipsWaiting()
    trainer = build(tmp_path, callbacks=[callback], direction="orthogonal", **options)
    callback.trainer = trainer
    trainer.train()
    (found,) = [line["corrupted"] for line in read_log(tmp_path) if "corrupted" in line]
    assert f"while it waited for step {callback.step + 1}" in found["what"] and found["process"] == 0
