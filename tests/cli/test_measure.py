"""`hf-hybrid plan --measure`: which trainings it makes, and what it says of them."""

import json

import pytest
import torch
from conftest import mostly_slow, tiny_model

from hf_hybrid.cli import measure as measuring
from hf_hybrid.cli.main import build_parser, main
from hf_hybrid.cli.measure import Measurement, Run, StepTime, extrapolated, layers_of_a_run, measure
from hf_hybrid.cli.plan import _Report
from hf_hybrid.cli.step_times import StepTimes
from hf_hybrid.plan.planner import Planner


@pytest.mark.parametrize(
    "stands_for, layers",
    [
        ((0, 1, 1, 1, 1, 2), 4),
        ((0, 1, 2, 1, 2, 1, 2, 3), 4),
        ((0, 1, 1, 2, 1, 1, 2, 1, 1, 3), 6),
        ((0, 1, 1, 1, 1, 2, 1, 1, 1, 1, 2, 1, 3), 5),
    ],
)
def test_as_many_layers_are_trained_as_kinds_alternate_in(stands_for, layers):
    assert layers_of_a_run(stands_for) == layers


def test_a_step_is_the_sum_of_its_layers():
    def step(streamed, resident, graphs=0):
        seconds = 5.0 + 2 * streamed + 0.5 * resident - 0.1 * graphs
        return StepTime(seconds, kernels=1.0 + streamed, copies_in=3.0 * streamed)

    runs = [Run(4), Run(8), Run(4, 3), Run(4, graphs=8)]
    times = [step(4, 0), step(8, 0), step(1, 3), step(4, 0, 8)]
    whole = extrapolated(runs, times, Run(32, 10, 20))
    assert whole.seconds == pytest.approx(step(22, 10, 20).seconds)
    assert whole.copies_in == pytest.approx(66) and whole.copies_out == 0
    assert whole.bound == "copies in"
    assert extrapolated(runs[:2], times[:2], Run(32)).seconds == pytest.approx(step(32, 0).seconds)


def plans_of(layers: int, **setup):
    planner = Planner(
        tiny_model(num_hidden_layers=layers).config, sequence_length=32, batch_size=2, accelerator="cpu", **setup
    )
    return planner, {plan.way.title: plan for plan in planner.plans("bfloat16", ("full", "LoRA"))}


@pytest.mark.long
@pytest.mark.parametrize(
    "title",
    mostly_slow(
        ["full, streamed", "LoRA, streamed", "full, bf16 weights, chunked loss, checkpointing auto"], ["full, streamed"]
    ),
)
def test_the_trainer_runs_as_the_plan_says(title, monkeypatch):
    planner, plans = plans_of(10, gradient_accumulation_steps=2)
    resident = plans["full, bf16 weights"].peak_device_bytes
    recomputed = plans["full, bf16 weights, chunked loss, checkpointing"].peak_device_bytes
    planner, plans = plans_of(10, gradient_accumulation_steps=2, vram=(resident + recomputed) // 2)
    plan = asked = plans[title]
    assert plan.mode != "streamed" or plan.kept_graphs
    made = []

    class Recorded(measuring.HybridTrainer):
        def train(self, *args, **kwargs):
            streams, layers, plan = self.memory.streams, self.model.config.num_hidden_layers, self.memory.plan
            made.append((layers, *((plan.resident_layers, plan.kept_graphs) if streams else (None,))))
            assert not streams or plan.stream_embeddings == asked.stream_embeddings
            return super().train(*args, **kwargs)

    monkeypatch.setattr(measuring, "HybridTrainer", Recorded)

    def prepare(model):
        from peft import get_peft_model

        from hf_hybrid.plan.models import lora_config

        return model if plan.way.kind == "full" else get_peft_model(model, lora_config())

    measured = measure(planner, plan, prepare)
    other = plan.resident_layers if plan.mode == "streamed" else 0
    expected = [(4, 0, 0), (8, 0, 0), *[(4, min(other, 4), 0)] * bool(other)]
    most = 4 * plan.setup.micro_batches_in_flight
    expected += [(4, 0, min(plan.kept_graphs, most))] * bool(plan.kept_graphs)
    assert made[: len(expected)] == (expected if plan.mode == "streamed" else [(4, None), (8, None)])
    assert measured.trained[:2] == (4, 8) and measured.tokens == 32 * 2 * 2
    assert (measured.planned_bytes > 0) == (plan.mode == "streamed")


def test_a_small_model_is_trained_as_it_is():
    planner, plans = plans_of(3)
    measured = measure(planner, plans["full, streamed"])
    assert measured.trained == (3,) and measured.step.bound == ""


@pytest.fixture
def config_file(tmp_path):
    tiny_model().config.to_json_file(tmp_path / "config.json")
    return str(tmp_path / "config.json")


def test_without_a_gpu_the_command_says_that_nothing_is_measured(config_file, capsys):
    assert main(["plan", config_file, "--sequence_length", "32", "--measure", "--json"]) == 0
    shown = capsys.readouterr()
    assert "no GPU here, so `--measure` measured nothing" in shown.err
    assert json.loads(shown.out)["measured"] == {}


@pytest.mark.parametrize("more", [["--for", "dpo"], ["--num_processes", "2", "--accelerate_config", "fsdp2"]])
def test_what_is_not_measured_is_refused(more, config_file, capsys):
    assert main(["plan", config_file, "--measure", *more]) == 2
    assert f"not as `{' '.join(more[:2])}` asks" in capsys.readouterr().err


def test_the_command_says_seconds_and_what_bounds_them(config_file, capsys, monkeypatch):
    step = StepTime(4.0, kernels=3.0, copies_in=2.0, copies_out=1.0)
    outcomes = iter([Measurement(step, 16384, (4, 8), 2**30, 2**31), torch.OutOfMemoryError("CUDA out of memory")])

    def measured(*_):
        outcome = next(outcomes)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    monkeypatch.setattr(measuring, "measure", measured)
    words = ["plan", config_file, "--sequence_length", "32", "--vram", "8GiB", "--measure", "--peft"]
    reports = [_Report(build_parser("plan").parse_args([*words, kind])) for kind in ("none", "lora")]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Card")
    kept = []
    monkeypatch.setattr(StepTimes, "keep", lambda times, seconds: kept.append((times.plan.way.kind, seconds)))
    shown = []
    for report in reports:
        report.measure()
        text = "\n".join(report._measured())
        assert max(map(len, text.splitlines())) <= 80
        shown.append(" ".join(text.split()))
    assert "Measured on this Card" in shown[0]
    assert "full: 4 s a step, 4,096 tokens/s, 1 million tokens in 4.07 min; from 4 and 8 layers." in shown[0]
    assert "copies out 1 s: a step that overlaps all is bound by kernels." in shown[0]
    assert "Device: 1.00 GiB, planned 2.00." in shown[0]
    assert kept == [("full", 4.0)]
    assert "LoRA: not measured: memory ran out, so this plan does not fit." in shown[1]
