"""The commands for a machine with a GPU (CONTRIBUTING.md) run to their end, on the simulated device and tiny models."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from simulated_gpu.results import TESTS, python_path
from simulated_gpu.run_module import UNAVAILABLE

HERE = Path(__file__).parent
pytestmark = pytest.mark.simulated


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The output of `python -m COMMAND` on a machine with the simulated device (see run_module.py)."""
    folder = tmp_path_factory.mktemp("commands")
    hidden = ("PYTEST_", "HIDDEN_FROM_TESTS_")
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(hidden)}
    inherited["PYTHONPATH"] = python_path(TESTS.parent)
    with (folder / "log").open("w") as log:
        command = [sys.executable, str(HERE / "run_module.py"), str(folder)]
        process = subprocess.Popen(command, stdout=log, stderr=log, env=inherited, start_new_session=True)
    while process.poll() is None and not (folder / "python").exists():
        time.sleep(0.02)
    if process.returncode == UNAVAILABLE:
        pytest.skip((folder / "log").read_text())
    assert process.returncode is None, (folder / "log").read_text()

    def run(*command: str, **environment: str) -> str:
        done = subprocess.run(
            [str(folder / "python"), "-m", *command], cwd=TESTS.parent, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env={**inherited, **environment},
        )  # fmt: skip
        assert done.returncode == 0, done.stdout[-6000:]
        return done.stdout

    yield run
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def rows_of(path: Path, benchmark: str) -> list[dict]:
    found = [json.loads(line) for line in path.read_text().splitlines()]
    return [row for row in found if row["benchmark"] == benchmark]


@pytest.mark.slow
def test_scenarios_run_as_on_a_real_gpu(run):
    test = str(HERE / "test_on_a_gpu.py")
    chosen = ("-k", "[registered_lora_int8]")
    output = run("pytest", "-m", "gpu", "-q", "-p", "no:cacheprovider", test, *chosen, TORCH_CUDA_SANITIZER="1")
    assert "3 passed" in output, output[-6000:]


@pytest.mark.slow
def test_the_memory_benchmark_fills_its_table(run, tmp_path):
    results = tmp_path / "results.jsonl"
    asked = ("--models", "50b", "30b-a3b", "--modes", "lora-stream-int8", "--tokens", "2048", "--results", str(results))
    output = run("benchmarks.memory.peaks", "--gpu", "--smoke", *asked)
    rows = rows_of(results, "peaks")
    assert [row["model"] for row in rows] == ["50b", "30b-a3b"]
    for row in rows:
        assert row["outcome"] == "measured", row["detail"]
        assert row["device"] == "cuda" and row["cap_gib"] == 24
        assert row["device_plan"] >= row["device_allocated"] >= row["device_held"] > 0
        assert row["host_peak"] > 0 and row["host_pinned"] > 0
    assert output.count("goal met") == 2, output


@pytest.mark.slow
def test_the_planning_benchmark_measures_the_allocator(run, tmp_path):
    results = tmp_path / "results.jsonl"
    asked = ("--models", "llama", "--results", str(results))
    run("benchmarks.planning.accuracy", "--gpu", "--smoke", *asked)
    rows = {row["way"]: row for row in rows_of(results, "accuracy")}
    assert set(rows) == {"adamw", "adamw-checkpointing", "lora", "8bit"}
    assert all(row["reference"] == "torch.cuda.max_memory_allocated" for row in rows.values())
    assert rows["adamw"]["reference_bytes"] > 4 * 4 * rows["adamw"]["weights"]  # weights, gradients and two moments
    # A moment of an embedding takes one byte there, too.
    assert rows["8bit"]["reference_bytes"] < 0.6 * rows["adamw"]["reference_bytes"]


def test_the_gpu_benchmark_asks_the_device_in_processes_of_their_own(run, tmp_path):
    results = tmp_path / "results.jsonl"
    words = ("--shape", "tiny", "--tokens", "640", "--steps", "1", "--arms", "stream")
    run("benchmarks.gpu", "--results", str(results), "stream", *words)
    host, row = (json.loads(line) for line in results.read_text().splitlines())
    assert host["benchmark"] == "host" and host["launches_per_second"] > 0
    assert "error" not in row and row["reserved_gib"] > 0
    assert host["hardware"] == row["hardware"] and "Simulated GPU" in row["hardware"]
