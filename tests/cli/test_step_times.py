"""What a step took is kept, and said before the next run like it."""

import threading
from types import SimpleNamespace

import pytest
import torch
from conftest import mostly_slow, tiny_model
from huggingface_hub import constants
from peft import get_peft_model

from hf_hybrid import HybridConfig, HybridTrainer
from hf_hybrid.cli import progress
from hf_hybrid.cli.step_times import StepTimes, _path, plan_of
from hf_hybrid.plan.models import lora_config
from hf_hybrid.plan.planner import Planner

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setattr(constants, "HF_HOME", str(tmp_path / "hf"))


def plans_of(length=32, rows=2, kinds=("full", "LoRA")):
    planner = Planner(
        tiny_model(num_hidden_layers=6).config, sequence_length=length, batch_size=rows, gradient_accumulation_steps=2,
        vram="1GiB", ram="8GiB", accelerator="cpu",
    )  # fmt: skip
    return {plan.way.title: plan for plan in planner.plans("bfloat16", kinds)}


def trainer_of(plan, folder, length=32):
    """As `hf-hybrid train` makes it of a file that `hf-hybrid plan --output` wrote."""
    model = tiny_model(num_hidden_layers=6).to(torch.bfloat16)
    if plan.way.kind == "LoRA":
        model = get_peft_model(model, lora_config())
    row = {"input_ids": torch.arange(length), "labels": torch.arange(length)}
    return HybridTrainer(model, HybridConfig(str(folder), use_cpu=True, **plan.options), train_dataset=[row] * 8)


WAYS = (
    "full, bf16 weights",
    "full, streamed",
    "full, streamed, bf16 weights, 8-bit states",
    "LoRA, streamed int8 base",
    "LoRA, chunked loss, checkpointing",
)


@pytest.mark.parametrize("title", mostly_slow(WAYS, WAYS[2:4]))
def test_a_run_of_a_measured_plan_knows_its_steps(title, tmp_path):
    plan = plans_of()[title]
    StepTimes(plan, CPU).keep(2.5)
    trainer = trainer_of(plan, tmp_path)
    times = StepTimes(plan_of(trainer), CPU, "data")
    assert times.known.seconds == 2.5 and times.known.of_plan
    times.keep(1.5)
    known = StepTimes(times.plan, CPU, "data").known
    assert known.seconds == 1.5 and not known.of_plan
    assert StepTimes(times.plan, CPU, "other data").known.seconds == 2.5


def test_other_work_is_not_known():
    plans = plans_of()
    StepTimes(plans.pop("LoRA, streamed"), CPU, "data").keep(2.5)
    for plan in (plans_of(length=16, kinds=["LoRA"]), plans_of(rows=3, kinds=["LoRA"])):
        assert StepTimes(plan["LoRA, streamed"], CPU, "data").known is None
    assert not any(StepTimes(plan, CPU, "data").known for plan in plans.values())


def test_a_cache_that_cannot_be_used_stops_no_run(tmp_path):
    times = StepTimes(plans_of(kinds=["full"])["full, streamed"], CPU)
    (tmp_path / "hf").write_text("a file where the folder would be")
    times.keep(1.0)
    assert times.known is None
    (tmp_path / "hf").unlink()
    times.keep(1.0)
    _path().write_text("half of a fi")
    assert StepTimes(times.plan, CPU).known is None
    times.keep(3.0)
    assert StepTimes(times.plan, CPU).known.seconds == 3.0


def lines(monkeypatch, capsys, times, seconds, steps=13):
    """What a run says whose steps take so long."""
    trainer = SimpleNamespace(remove_callback=lambda kind: None)
    args, now = SimpleNamespace(disable_tqdm=True, device=CPU), [0.0]
    state = SimpleNamespace(max_steps=steps, global_step=0, is_world_process_zero=True)
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    callback, control = progress.Progress(trainer, threading.Event(), times, defaulted=frozenset()), SimpleNamespace()
    callback.on_train_begin(args, state, control)
    for took in seconds:
        now[0] += took
        state.global_step += 1
        callback.on_step_end(args, state, control)
        callback.on_log(args, state, control, {"loss": 1.0})
    callback.on_train_end(args, state, control)
    return capsys.readouterr().out.splitlines()


def test_the_time_left_follows_from_the_steps_after_the_first(monkeypatch, capsys):
    times = StepTimes(plans_of(kinds=["full"])["full, streamed"], CPU, "data")
    said = lines(monkeypatch, capsys, times, (10, 5, 7, 6))
    assert "left" not in said[0]
    fact = said.pop(2)
    assert fact.split() == "time 01:18 for 13 steps, 6 s each (by its second and third)".split()
    assert [line.rpartition("  ")[2] for line in said[1:]] == ["00:55 left", "01:00 left", "00:54 left"]
    times = StepTimes(times.plan, CPU, "data")
    assert times.known.seconds == 6
    said = lines(monkeypatch, capsys, times, (10, 2, 2, 2))
    assert [line.rpartition("  ")[2] for line in said] == ["01:12 left", "00:22 left", "00:20 left", "00:18 left"]
    assert StepTimes(times.plan, CPU, "data").known.seconds == 6, "a few seconds were kept"
