"""`hf_hybrid/saving/drift.py` on several processes: a save that finds them different ends the run and says who does."""

import json
import logging
import re

import pytest
import torch
from conftest import ByteText, hybrid_config, mostly_slow, tiny_model
from rig.bit_flips import flip
from rig.processes import together
from transformers import TrainerCallback

from hf_hybrid import HybridTrainer
from hf_hybrid.optimizers import inner_optimizer
from hf_hybrid.saving.manifest import is_committed

pytestmark = pytest.mark.processes
SAVES, FAULT = 3, 4
"""Steps between two saves; the fault comes before the next step after this one."""
OPTIONS = {
    "max_steps": 8, "per_device_train_batch_size": 2, "save_strategy": "steps", "save_steps": SAVES,
    "leap_budget": 1e3, "ddp_find_unused_parameters": False,
}  # fmt: skip


class Fault(TrainerCallback):
    """Flips a bit on one process."""

    def __init__(self, kind, process, step=FAULT, bit=20):
        self.kind, self.process, self.step, self.bit = kind, process, step, bit

    def on_step_begin(self, args, state, control, model=None, optimizer=None, **kwargs):
        if state.global_step != self.step or args.process_index != self.process:
            return
        parameter = next(parameter for name, parameter in model.named_parameters() if "up_proj" in name)
        tensor = inner_optimizer(optimizer).state[parameter]["exp_avg"] if self.kind == "optimizer" else parameter
        flip(tensor, 4 * 9 + self.bit // 8, self.bit % 8)

    def on_step_end(self, args, state, control, model=None, **kwargs):
        if self.kind == "frozen at the save" and control.should_save:
            model.requires_grad_(False)

    def on_save(self, args, state, control, model=None, **kwargs):
        model.requires_grad_(True)


def train(folder, fault=None, resume=None, name="first", data=None, **options):
    """Train in one of several processes, and write down how it ended and what this process said."""
    said = []

    class Listens(logging.Handler):
        def emit(self, record):
            said.append(f"{record.levelname} {record.getMessage()}")

    logging.getLogger("hf_hybrid").addHandler(handler := Listens())
    logging.getLogger("hf_hybrid.saving").setLevel(logging.INFO)
    torch.manual_seed(0)
    config = hybrid_config(folder, **{**OPTIONS, **options})
    data = ByteText(60) if data is None else data
    trainer = HybridTrainer(tiny_model(attention_dropout=0.1), config, train_dataset=data)
    if fault is not None:
        trainer.add_callback(fault)
    error = None
    try:
        trainer.train(resume_from_checkpoint=resume)
    except Exception as raised:
        error = f"{type(raised).__name__}: {raised}"
    found = {"error": error, "said": said, "step": trainer.state.global_step}
    (folder / f"{name}-{config.process_index}.json").write_text(json.dumps(found))
    logging.getLogger("hf_hybrid").removeHandler(handler)
    trainer.accelerator.wait_for_everyone()
    return trainer


def of(folder, name, process=0):
    return json.loads((folder / f"{name}-{process}.json").read_text())


@pytest.mark.parametrize("kind", mostly_slow(["weights", "optimizer", "frozen at the save"], ["weights"]))
def test_a_flipped_bit_ends_the_run_and_the_same_command_goes_on(tmp_path, kind):
    """Of two processes both are named, because nothing tells which of them is right."""

    def work():
        train(tmp_path, Fault(kind, process=1))
        train(tmp_path, resume=True, name="again")

    assert together(2, work) == [0, 0]
    expected = (
        r"RanksDriftedError: Processes 0 and 1 differ after step 6 \(in .*up_proj.weight`\), and nothing tells "
        r"which of them is right, so no checkpoint of this step is saved; start the same command again with "
        rf"`resume_from_checkpoint=True`, to go on from `{tmp_path}/checkpoint-3`, and have the memory of that machine "
        r"tested\."
    )
    for process in (0, 1):
        assert re.fullmatch(expected, of(tmp_path, "first", process)["error"])
    again = of(tmp_path, "again")
    assert again["error"] is None and again["step"] == 8 and is_committed(tmp_path / "checkpoint-8")


def test_weights_that_are_not_saved_on_one_process_end_all(tmp_path):
    """They are finite, and their squares are not. The others would wait for it in the save."""
    assert together(2, lambda: train(tmp_path, Fault("weights", process=1, bit=30))) == [0, 0]
    for process in (0, 1):
        assert "RanksDriftedError: Processes 0 and 1 differ after step 6" in of(tmp_path, "first", process)["error"]
    assert not (tmp_path / "checkpoint-6").exists()


def test_of_three_processes_the_one_that_differs_is_named(tmp_path):
    assert together(3, lambda: train(tmp_path, Fault("weights", process=1))) == [0, 0, 0]
    for process in range(3):
        error = of(tmp_path, "first", process)["error"]
        assert re.search(
            r"Process 1 drifted from the 2 others by step 6 \(in `.*up_proj.weight`\), so no checkpoint", error
        )
    assert sorted(path.name for path in tmp_path.glob("*checkpoint-*")) == ["checkpoint-3"]


@pytest.mark.parametrize("options, fault", [({"enable_predict": False}, FAULT), ({}, 1)], ids=["off", "never agreed"])
def test_a_run_goes_on_with_an_error_in_its_log(tmp_path, options, fault):
    """Without leaps, as plain Trainer, and where the processes differed at the first save already."""
    assert together(2, lambda: train(tmp_path, Fault("weights", 1, fault), **options)) == [0, 0]
    found = of(tmp_path, "first")
    assert found["error"] is None and found["step"] == 8 and is_committed(tmp_path / "checkpoint-8")
    assert [line for line in found["said"] if line.startswith("ERROR Processes 0 and 1 differ after step")]
    assert not [line for line in of(tmp_path, "first", 1)["said"] if line.startswith("ERROR")]


def test_data_that_one_process_alone_has_otherwise_is_refused_by_all(tmp_path):
    def work():
        train(tmp_path, max_steps=3)
        rank = HybridTrainer(tiny_model(), hybrid_config(tmp_path / "x")).args.process_index
        train(tmp_path, resume="auto", name="again", data=ByteText(50) if rank else None)

    assert together(2, work) == [0, 0]
    for process in (0, 1):
        assert "had 60 rows and has 50 rows" in of(tmp_path, "again", process)["error"]
