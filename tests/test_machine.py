"""`hf_hybrid/machine.py`: two processes decide alike and resume after a kill; what a launcher asks for is heeded."""

import json
import signal
from pathlib import Path

import pytest
import torch
from conftest import ByteText, hybrid_config, tiny_model
from rig import launched
from rig.processes import together
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from hf_hybrid import HybridTrainer
from hf_hybrid.saving.manifest import last_checkpoint

TESTS = Path(__file__).parent
ROOT = TESTS.parent

RUNS = tuple("base resumed whole looked unseen muon lora iterable off plain off_muon off_lora".split())


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("launched")


@pytest.fixture(scope="module")
def killed(folder):
    """How a run ended whose second process was killed, and its last checkpoint."""
    return together(2, lambda: launched.run(folder, ("killed",))), last_checkpoint(folder / "killed")


@pytest.fixture(scope="module")
def results(folder, killed):
    """By name of the run, what each of the two processes says of it."""
    assert together(2, lambda: launched.run(folder, RUNS)) == [0, 0]
    return {name: [json.loads((folder / f"{name}-{rank}.json").read_text()) for rank in (0, 1)] for name in RUNS}


@pytest.mark.processes
@pytest.mark.parametrize("name", RUNS)
def test_both_processes_decide_alike_and_hold_the_same_weights(results, name):
    first, second = results[name]
    assert first["processes"] == second["processes"] == 2
    assert first["decisions"] == second["decisions"]
    assert first["digest"] == second["digest"]


@pytest.mark.processes
def test_the_runs_had_something_to_decide(results):
    base, whole, looked, unseen = (results[n][0]["decisions"] for n in ("base", "whole", "looked", "unseen"))
    assert all(base["steps_by_phase"].values()) and base["forward_only_passes"] > 0
    assert looked["leaps_by_verdict"]["rejected"] >= 1 and unseen["leaps_by_verdict"]["rolled_back"] >= 1
    assert looked["skipped_batches"] == 1
    assert whole["learning_rate_scale"] > 1.5
    assert all(results[name][0]["decisions"]["leaps"] for name in ("lora", "iterable"))


@pytest.mark.processes
def test_two_processes_are_one_with_twice_the_batch(results, tmp_path):
    trainer = launched.build(tmp_path, per_device_train_batch_size=4, per_device_eval_batch_size=8)
    trainer.train()
    alone, (first, _) = launched.result(trainer), results["base"]
    assert first["losses"] == pytest.approx(alone["losses"], rel=1e-5)
    for name in ("steps_by_phase", "leaps_by_verdict", "backward_passes", "forward_only_passes"):
        assert first["decisions"][name] == alone["decisions"][name], name
    steps = [[(leap["step"], leap["verdict"]) for leap in run["decisions"]["leaps"]] for run in (first, alone)]
    assert steps[0] == steps[1] and len(steps[0]) >= 3


@pytest.mark.processes
def test_a_run_whose_process_was_killed_ends_like_one_that_was_not(killed, results):
    ended, checkpoint = killed
    assert ended == [1, -signal.SIGKILL]
    assert 0 < int(checkpoint.rpartition("-")[2]) <= launched.DIES_AT
    resumed, whole = results["resumed"][0], results["whole"][0]
    assert resumed["step"] == launched.STEPS
    assert resumed["digest"] == whole["digest"]
    assert resumed["decisions"]["leaps"] == whole["decisions"]["leaps"]


@pytest.mark.processes
@pytest.mark.slow
def test_a_process_may_be_killed_without_leaps(tmp_path):
    assert together(2, lambda: launched.run(tmp_path, ("off_killed",))) == [1, -signal.SIGKILL]
    assert together(2, lambda: launched.run(tmp_path, ("off_whole", "off_resumed"))) == [0, 0]
    whole, resumed = (json.loads((tmp_path / f"off_{name}-0.json").read_text()) for name in ("whole", "resumed"))
    assert resumed["digest"] == whole["digest"] and resumed["step"] == launched.STEPS


@pytest.mark.processes
def test_without_leaps_it_is_trainer_bit_for_bit(results):
    off, plain = results["off"][0], results["plain"][0]
    assert off["digest"] == plain["digest"] and off["losses"] == plain["losses"]


@pytest.mark.parametrize(
    "variable, value, options, message",
    [
        ("ACCELERATE_USE_FSDP", "true", {}, "`fsdp` shards nothing with `use_cpu=True` or without a GPU"),
        ("ACCELERATE_USE_FSDP", "true", {"enable_predict": False}, "would train with DDP. Drop `fsdp`"),
        ("ACCELERATE_MIXED_PRECISION", "fp16", {}, "`fp16=True` cannot be combined with leaps"),
        ("ACCELERATE_USE_MEGATRON_LM", "true", {}, "`megatron_lm` cannot be combined with leaps"),
        ("ACCELERATE_USE_PARALLELISM_CONFIG", "true", {}, "`parallelism_config` cannot be combined with leaps"),
        ("ACCELERATE_USE_PARALLELISM_CONFIG", "true", {"optim": "muon"}, "cannot be combined with `optim=muon`"),
    ],
)
def test_what_a_launcher_asks_for_is_refused_like_an_option(tmp_path, monkeypatch, variable, value, options, message):
    monkeypatch.setenv(variable, value)
    with pytest.raises(ValueError, match=message):
        hybrid_config(tmp_path, **options)


def test_a_model_that_is_sharded_already_is_refused(tmp_path):
    """As `from_pretrained(..., tp_plan="auto")` leaves it."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        model = tiny_model()
        fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
        with pytest.raises(ValueError, match="is spread over processes already .a `DTensor`.* Let FSDP2 shard it"):
            HybridTrainer(model, hybrid_config(tmp_path), train_dataset=ByteText(40))
        streamed = hybrid_config(tmp_path, memory="stream", enable_predict=False)
        with pytest.raises(ValueError, match="`memory=stream` .*spread over processes already. .*`tp_plan`"):
            HybridTrainer(model, streamed, train_dataset=ByteText(40))
    finally:
        torch.distributed.destroy_process_group()
