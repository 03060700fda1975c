"""`hf_hybrid/saving/drift.py` on several processes: whose memory changed, and what the run does about it."""

import json
import logging
import re

import pytest
import torch
from conftest import ByteText, hybrid_config, tiny_model
from rig.bit_flips import flip
from rig.processes import together
from transformers import TrainerCallback

from hf_hybrid import HybridTrainer
from hf_hybrid.run.monitor import DivergenceMonitor
from hf_hybrid.saving.manifest import is_sealed
from hf_hybrid.saving.run_identity import inner_optimizer

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
        trainer = self.trainer
        if self.kind == "batch":
            flip(trainer.run.step.batches[0]["input_ids"], 8 * 5, 2)
        elif self.kind == "data":
            flip(trainer.train_dataset.blocks, 8 * 7, 2)
        else:
            of = "model.norm" if self.kind == "norm" else "up_proj"
            parameter = next(p for name, p in model.named_parameters() if of in name)
            tensor = (
                parameter
                if self.kind in ("weights", "norm")
                else inner_optimizer(optimizer).state[parameter]["exp_avg"]
            )
            flip(getattr(tensor, "to_local", lambda: tensor)(), 4 * 9 + self.bit // 8, self.bit % 8)


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
        fault.trainer = trainer
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


def corrupted(folder):
    lines = [json.loads(line) for path in folder.rglob("hybrid_log.jsonl") for line in path.read_text().splitlines()]
    return [line["corrupted"]["process"] for line in lines if "corrupted" in line]


@pytest.mark.parametrize("kind", ["weights", pytest.param("optimizer", marks=pytest.mark.slow)])
def test_a_flipped_bit_ends_the_run_and_the_same_command_names_the_process(tmp_path, kind):
    def work():
        train(tmp_path, Fault(kind, process=1))
        train(tmp_path, resume=True, name="again")

    assert together(2, work) == [0, 0]
    for process in (0, 1):
        error = of(tmp_path, "first", process)["error"]
        assert re.search(
            r"RanksDriftedError: Processes hold different .* after step 6: `.*up_proj.weight.*` differs in ", error
        )
        assert "on process 0 and " in error and f"{tmp_path}/checkpoint-3`, makes the steps after it again" in error
    again = of(tmp_path, "again")
    assert again["error"] is None and again["step"] == 8
    assert [line for line in again["said"] if "made again: process 1 had drifted" in line]
    assert corrupted(tmp_path) == [1] and is_sealed(tmp_path / "checkpoint-8")


def test_of_two_processes_the_one_whose_value_jumped_is_named_at_once(tmp_path):
    assert together(2, lambda: train(tmp_path, Fault("weights", process=1, bit=25))) == [0, 0]
    for process in (0, 1):
        assert "It is probably process 1 that is wrong" in of(tmp_path, "first", process)["error"]


def test_a_checkpoint_of_the_wrong_process_accuses_nobody(tmp_path):
    """A run without leaps goes on, and saves what the first process holds, which then is where the values come from."""
    options = {"enable_predict": False}
    assert together(2, lambda: train(tmp_path, Fault("weights", process=0, bit=25), **options)) == [0, 0]
    lines = (tmp_path / "checkpoint-8" / "hybrid_log.jsonl").read_text().splitlines()
    drifts = {line["step"]: line["drift"] for line in map(json.loads, lines) if "drift" in line}
    assert {step: drift.get("likely") for step, drift in drifts.items()} == {6: 0, 8: None}


def test_weights_that_are_not_saved_on_one_process_end_all(tmp_path):
    """They are finite, and their squares are not. The others would wait for it in the save."""
    assert together(2, lambda: train(tmp_path, Fault("weights", process=1, bit=30))) == [0, 0]
    for process in (0, 1):
        assert "It is probably process 1 that is wrong" in of(tmp_path, "first", process)["error"]
    assert not (tmp_path / "checkpoint-6").exists()


@pytest.mark.slow
@pytest.mark.parametrize("bad_steps", [1, 10])
def test_a_process_whose_loss_alone_cannot_be_used_is_named(tmp_path, bad_steps, monkeypatch):
    """At the next save, or when the run ends because it diverged. A 1 becomes infinite."""
    monkeypatch.setattr(DivergenceMonitor, "MAX_BAD_STEPS", bad_steps)  # processes are forked
    assert together(2, lambda: train(tmp_path, Fault("norm", process=1, bit=30))) == [0, 0]
    assert corrupted(tmp_path)[0] == 1
    assert "RanksDriftedError" in of(tmp_path, "first")["error"]


def test_of_three_processes_the_one_that_differs_is_named(tmp_path):
    assert together(3, lambda: train(tmp_path, Fault("weights", process=1))) == [0, 0, 0]
    assert "Process 1 drifted from the 2 others. No checkpoint of this step is saved" in of(tmp_path, "first")["error"]
    assert sorted(path.name for path in tmp_path.glob("*checkpoint-*")) == ["checkpoint-3"]


@pytest.mark.parametrize(
    "kind, what", [("batch", "A batch changed in memory while step 5"), ("data", "`train_dataset` holds a")]
)
def test_a_bit_of_the_data_is_named_at_the_next_save(tmp_path, kind, what):
    assert together(2, lambda: train(tmp_path, Fault(kind, process=1))) == [0, 0]
    found = of(tmp_path, "first")
    assert found["error"] is None and found["step"] == 8
    (line,) = [line for line in found["said"] if what in line]
    assert line.endswith("though nothing wrote to it: process 1.") and corrupted(tmp_path) == [1]


@pytest.mark.parametrize("options, fault", [({"enable_predict": False}, FAULT), ({}, 1)], ids=["off", "never agreed"])
def test_a_run_goes_on_with_an_error_in_its_log(tmp_path, options, fault):
    """Without leaps, as plain Trainer, and where the processes differed at the first save already."""
    assert together(2, lambda: train(tmp_path, Fault("weights", 1, fault), **options)) == [0, 0]
    found = of(tmp_path, "first")
    assert found["error"] is None and found["step"] == 8 and is_sealed(tmp_path / "checkpoint-8")
    assert [line for line in found["said"] if line.startswith("ERROR Processes hold different weights after step")]
    assert not [line for line in of(tmp_path, "first", 1)["said"] if line.startswith("ERROR")]


def test_data_that_one_process_alone_has_otherwise_is_refused_by_all(tmp_path):
    def work():
        train(tmp_path, max_steps=3)
        rank = HybridTrainer(tiny_model(), hybrid_config(tmp_path / "x")).args.process_index
        train(tmp_path, resume="auto", name="again", data=ByteText(50) if rank else None)

    assert together(2, work) == [0, 0]
    for process in (0, 1):
        assert "had 60 rows and has 50 rows" in of(tmp_path, "again", process)["error"]


def sharded(folder):
    """As [`train`], under FSDP2."""
    from rig import fsdp2_on_cpu

    fsdp2_on_cpu.enable()
    options = {"fsdp": True, "fsdp_config": {"fsdp_version": 2, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]}}
    return train(folder, ddp_find_unused_parameters=None, **options)


def test_shards_have_digests_of_their_own_and_what_is_not_compared_is_said(tmp_path):
    assert together(2, lambda: sharded(tmp_path)) == [0, 0]
    found = of(tmp_path, "first")
    assert found["error"] is None and found["step"] == 8
    (line,) = [line for line in found["said"] if "are shards, which no two of them hold" in line]
    lines = [json.loads(line) for line in (tmp_path / "hybrid_log.jsonl").read_text().splitlines()]
    digests = [line["digests"] for line in lines if "digests" in line]
    assert len(digests) == 3 and all(len(of_run["weights"]) == 2 for of_run in digests)
    assert not any("drift" in line or "corrupted" in line for line in lines)


def test_a_replay_on_two_processes_names_the_one_whose_batch_was_another(tmp_path):
    from hf_hybrid.saving.replay import replay

    def make(output):
        torch.manual_seed(0)
        model = tiny_model(attention_dropout=0.1)
        return HybridTrainer(model, hybrid_config(output, **OPTIONS), train_dataset=ByteText(60))

    def work():
        trainer = train(tmp_path / "out", Fault("batch", process=1))
        found = replay(make, tmp_path / "out", 3, 8)
        (tmp_path / f"found-{trainer.args.process_index}.json").write_text(json.dumps(found.to_dict()))

    (tmp_path / "out").mkdir()
    assert together(2, work) == [0, 0]
    first, second = (json.loads((tmp_path / f"found-{process}.json").read_text()) for process in (0, 1))
    assert first == second and first["step"] == FAULT + 1 and first["processes"] == [1]
    assert (
        "losses of the run (first seen on process 1) are not what the step gives, made again twice the same"
        in first["text"]
    )
