"""`hf_hybrid/leaps/shards.py`: under FSDP2 a run on several processes is the run of one with the same global batch."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import tiny_model
from rig import launched_fsdp2
from safetensors.torch import load_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from hf_hybrid.leaps.shards import SAMPLE, Shards, Whole, shards_of
from hf_hybrid.manifest import last_checkpoint
from hf_hybrid.optimizers import split_parameters

TESTS = Path(__file__).parents[1]
SLOW_RUNS = ("sampled", "plain_muon", "world_model", "rescued_lora")
ALL_RUNS = (*(name for name in launched_fsdp2.RUNS if name not in launched_fsdp2.SAVED_RUNS), "whole")
RUNS = tuple(name for name in ALL_RUNS if name not in SLOW_RUNS)
DEATH = launched_fsdp2.DEATHS[-1]


TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node")
FSDP2 = TESTS.parent / "examples" / "accelerate_configs" / "fsdp2.yaml"
ACCELERATE = (
    "-m", "accelerate.commands.launch", "--config_file", FSDP2, "--main_process_port", "0", "--num_processes",
)  # fmt: skip


def launch(processes: int, folder: Path, *names: str, by: tuple = TORCHRUN) -> subprocess.CompletedProcess:
    """Start the runs of these names."""
    paths = f"{TESTS.parent}{os.pathsep}{TESTS}"
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths, "ACCELERATE_USE_CPU": "true"}
    command = [*by, processes, launched_fsdp2.__file__, folder, *names]
    return subprocess.run(
        [sys.executable, *map(str, command)], cwd=folder, env=environment, capture_output=True, text=True, timeout=1500
    )


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """By name of the run, what it says and ends at in a single process."""
    folder, found = tmp_path_factory.mktemp("alone"), {}

    def run(name: str) -> tuple[dict, dict]:
        name = launched_fsdp2.LIKE.get(name, name)
        if name not in found:
            trainer = launched_fsdp2.train(folder, name, 1)
            found[name] = json.loads(json.dumps(launched_fsdp2.result(trainer))), launched_fsdp2.weights(trainer)
        return found[name]

    return run


class Launched:
    """The runs of several processes."""

    def __init__(self, folder: Path, processes: int, names: tuple[str, ...]):
        ended = launch(processes, folder, *names)
        assert ended.returncode == 0, ended.stderr[-3000:]
        self.folder, self.processes = folder, processes

    def results(self, name: str) -> list[dict]:
        return [json.loads((self.folder / f"{name}-{rank}.json").read_text()) for rank in range(self.processes)]

    def decisions(self, name: str) -> dict:
        return self.results(name)[0]["decisions"]

    def weights(self, name: str) -> dict[str, torch.Tensor]:
        return load_file(self.folder / f"{name}.safetensors")


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    folder = tmp_path_factory.mktemp("two")
    launched_fsdp2.train(folder / "one", "halved", 1)
    killed = launch(2, folder, f"killed_{DEATH}", by=ACCELERATE)
    assert killed.returncode != 0 and "SIGKILL" in killed.stderr, killed.stderr[-3000:]
    return Launched(folder, 2, (*RUNS, f"resumed_{DEATH}", "resumed_from_one"))


@pytest.fixture(scope="module")
def three(tmp_path_factory):
    return Launched(tmp_path_factory.mktemp("three"), 3, ALL_RUNS)


def check_that_it_is_one_run(launched: Launched, name: str, alone) -> None:
    results, (single, expected) = launched.results(name), alone(name)
    local = ("buffer_bytes", "bytes_sent")  # which differ where rows do not divide evenly
    for result in results:
        assert result["processes"] == launched.processes and result["kind"].startswith("FSDP")
        assert result["losses"] == results[0]["losses"]
        of_all = {key: value for key, value in result["decisions"].items() if key not in local}
        assert of_all == {key: value for key, value in results[0]["decisions"].items() if key not in local}
    first, one = results[0]["decisions"], single["decisions"]
    # The two runs under bf16 round differently: FSDP2 computes with weights in bf16, autocast keeps some in fp32.
    loose = name == "bf16"
    # Trainer logs the mean over the processes whose loss is a number.
    poisoned = launched_fsdp2.RUNS[name].get("poisoned_at")
    logged = [[loss for step, loss in enumerate(run["losses"]) if step != poisoned] for run in (results[0], single)]
    assert logged[0] == pytest.approx(logged[1], rel=5e-3 if loose else 1e-5)
    for key in ("steps_by_phase", "leaps_by_verdict", "forward_only_passes", "skipped_batches", "roll_backs"):
        assert first[key] == one[key], key
    decided = [[(leap["step"], leap["verdict"], leap["horizon"]) for leap in run["leaps"]] for run in (first, one)]
    assert decided[0] == decided[1]
    for key in ("gain", "cosine", "norm_ratio"):
        found, known = ([leap[key] for leap in run["leaps"]] for run in (first, one))
        assert found == pytest.approx(known, abs=5e-2 if loose else 1e-4), key
    scales = [run.get("learning_rate_scale", 1.0) for run in (first, one)]
    assert scales[0] == pytest.approx(scales[1], rel=1e-6)
    check_that_it_ends_alike(launched.weights(name), expected, atol=2e-2 if loose else 1e-5)


@pytest.mark.parametrize("name", RUNS)
def test_two_processes_are_one_with_their_batches_together(two, alone, name):
    check_that_it_is_one_run(two, name, alone)


@pytest.mark.slow
@pytest.mark.parametrize("name", ALL_RUNS)
def test_three_processes_are_one_with_their_batches_together(three, alone, name):
    """Rows do not divide by three."""
    check_that_it_is_one_run(three, name, alone)


def test_the_runs_had_something_to_decide(two):
    base, looked, unseen = (two.decisions(name) for name in ("base", "looked", "unseen"))
    assert all(base["steps_by_phase"].values()) and base["forward_only_passes"] > 0
    assert all(two.decisions(name)["leaps_made"] >= 4 for name in ("base", "memory", "muon", "lora", "bf16"))
    assert looked["leaps_by_verdict"]["rejected"] >= 1 and unseen["leaps_by_verdict"]["rolled_back"] >= 1
    assert looked["skipped_batches"] == 1
    assert two.decisions("rescued")["learning_rate_scale"] > 1.5


def check_bytes(launched: Launched) -> None:
    """Against the formula of docs/launch.md."""
    matrices, _ = split_parameters(tiny_model())
    count, held = launched.processes, sum(4 * matrix.numel() for matrix in matrices.values())
    results = launched.results("base")
    sent = sum(result["decisions"]["bytes_sent"] for result in results)
    expected = len(results[0]["decisions"]["leaps"]) * 2 * (count - 1) / count * held
    # Rows that do not divide evenly: a process collects a matrix of which it holds a little more or less than others.
    assert sent == pytest.approx(expected, rel=0.03 if 32 % count else 0)


def test_leaps_send_as_many_bytes_as_the_docs_say(two):
    check_bytes(two)


@pytest.mark.slow
def test_leaps_of_three_processes_send_as_many_bytes_as_the_docs_say(three):
    check_bytes(three)


def check_that_it_ends_alike(found: dict, expected: dict, atol: float = 0.0) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.allclose(found[name], tensor, rtol=0, atol=atol), name


def test_a_run_whose_process_was_killed_ends_like_one_that_was_not(two):
    resumed, whole = two.decisions(f"resumed_{DEATH}"), two.decisions("whole")
    assert resumed["resumed"]["restored"] is not None and len(whole["leaps"]) >= 3
    assert resumed["leaps"] == whole["leaps"]
    check_that_it_ends_alike(two.weights(f"resumed_{DEATH}"), two.weights("whole"))


def test_a_run_of_one_process_goes_on_under_fsdp2(two, alone):
    _, expected = alone("whole")
    assert two.decisions("resumed_from_one")["resumed"]["restored"] is not None
    check_that_it_ends_alike(two.weights("resumed_from_one"), expected, atol=1e-5)


def test_a_run_under_fsdp2_goes_on_in_one_process(two, alone, tmp_path):
    summary, expected = alone("whole")
    trainer = launched_fsdp2.train(tmp_path, "whole", 1, resume=two.folder / f"killed_{DEATH}")
    check_that_it_ends_alike(launched_fsdp2.weights(trainer), expected, atol=1e-5)
    assert trainer.hybrid_summary()["leaps_by_verdict"] == summary["decisions"]["leaps_by_verdict"]


@pytest.mark.slow
def test_a_process_may_be_killed_in_any_phase(two):
    phases = set()
    for step in launched_fsdp2.DEATHS[:-1]:
        assert launch(2, two.folder, f"killed_{step}").returncode != 0
        state = json.loads(Path(last_checkpoint(two.folder / f"killed_{step}"), "hybrid_state.json").read_text())
        phases.add(state["run"]["controller"]["phase"])
    state = json.loads(Path(last_checkpoint(two.folder / f"killed_{DEATH}"), "hybrid_state.json").read_text())
    assert phases | {state["run"]["controller"]["phase"]} == {"warmup", "full", "predict", "correct"}
    resumed = Launched(two.folder, 2, tuple(f"resumed_{step}" for step in launched_fsdp2.DEATHS[:-1]))
    for step in launched_fsdp2.DEATHS[:-1]:
        check_that_it_ends_alike(resumed.weights(f"resumed_{step}"), two.weights("whole"))


def test_samples_are_few_and_spread():
    shards = Whole([torch.nn.Parameter(torch.zeros(size)) for size in (3 * SAMPLE + 5, 7, 0)])
    taken = shards.sample(0, torch.arange(3 * SAMPLE + 5))
    assert SAMPLE // 2 < len(taken) <= SAMPLE and taken[-1] > 3 * SAMPLE - 5
    assert torch.equal(shards.sample(1, torch.arange(7)), torch.arange(7))
    assert len(shards.sample(2, torch.zeros(0))) == 0


@pytest.fixture
def mesh():
    """Of one process."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    torch.distributed.destroy_process_group()


def test_shards_that_are_not_rows_over_one_mesh_are_refused(mesh):
    rows, columns = (
        torch.nn.Parameter(distribute_tensor(torch.ones(4, 6), mesh, [Shard(dimension)])) for dimension in (0, 1)
    )
    assert isinstance(shards_of([rows]), Shards)
    with pytest.raises(ValueError, match=r"shape \(4, 6\) is placed as \(Shard\(dim=1\),\), and leaps take .* FSDP2"):
        shards_of([rows, columns])
    with pytest.raises(ValueError, match=r"shape \(5,\) is whole on each process, .*Drop `ignored_modules`"):
        shards_of([rows, torch.nn.Parameter(torch.ones(5))])


def test_a_part_lives_in_the_memory_of_its_parameter(mesh):
    parameter = torch.nn.Parameter(distribute_tensor(torch.ones(4, 6), mesh, [Shard(0)]))
    (2 * parameter).sum().backward()
    part = shards_of([parameter]).parameters[0]
    assert type(part) is torch.Tensor and torch.equal(part.grad, torch.full((4, 6), 2.0))
    part.mul_(3)
    assert torch.equal(parameter.full_tensor().detach(), torch.full((4, 6), 3.0))
