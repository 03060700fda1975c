"""`python -m benchmarks.gpu` at tiny size on the CPU, so that nothing silly fails on the day there is a GPU."""

import ctypes
import json
import math
import os
import signal
import subprocess
import sys
import time
import types

import pytest
import torch
from conftest import mostly_slow
from transformers.models.llama import modeling_llama

pytest.importorskip("trl")
pytest.importorskip("peft")
from benchmarks.gpu import __main__ as command  # noqa: E402
from benchmarks.gpu.calls import CALLS, Line  # noqa: E402
from benchmarks.gpu.process import outcome, way_to_begin  # noqa: E402

pytestmark = pytest.mark.processes

WORDS = {
    "sft": ["--kinds", "instructions", "system", "--arms", "free", "trl_packing", "hybrid"],
    "dpo": ["--kinds", "mixed", "--arms", "trl", "trl_precomputed", "hybrid"],
    "grpo": ["--arms", "trl", "hybrid", "hybrid_peft"],
    "stream": ["--tokens", "640", "--length", "320", "--arms", "stream"],
    "checks": ["--arms", "flex_gemma2", "flex_gpt_oss"],
    "scratch": ["--run_steps", "4", "--length", "16", "--rows", "2", "--files", "20", "--arms", "adamw", "fast"],
}


def rows_of(folder, *words: str) -> list[dict]:
    results = folder / "results.jsonl"
    command.main(["--results", str(results), *words])
    return [json.loads(line) for line in results.read_text().splitlines()]


@pytest.mark.parametrize("use", mostly_slow(WORDS, ["sft", "stream"]))
def test_each_use_writes_what_it_measured(use, tmp_path, capsys):
    words = ["--shape", "tiny", "--steps", "2", "--warm_up", "1", *WORDS[use]]
    rows = rows_of(tmp_path, use, *words)
    assert not [row["error"] for row in rows if "error" in row]
    assert all(math.isfinite(row["seconds"]) for row in rows)
    assert len(capsys.readouterr().out.splitlines()) >= len(rows)
    by_arm = {row["arm"]: row for row in rows}
    if use != "scratch":
        assert all(len(row["steps"]) == 2 for row in rows)
    if use == "sft":
        for row in rows:
            saves = row["arm"] == "hybrid" and row["kind"] == "system"
            assert (row.get("tokens_shared", 0) > 0) == saves or row["kind"] == "instructions"
    if use == "dpo":
        assert by_arm["trl_precomputed"]["precompute_seconds"] > 0
    if use == "grpo":
        # The bias on the ends of text is the same for all, and leaves our completions ours.
        assert len({row["mean_length"] for row in rows}) == 1 and by_arm["trl"]["mean_length"] < 6
        assert all(by_arm[arm]["plain_rollouts_because"] is None for arm in ("hybrid", "hybrid_peft"))
        assert by_arm["hybrid"]["rows_decoded_saved"] > 0 and not any(row["vllm"] for row in rows)


@pytest.mark.slow
def test_turns_go_on_from_those_before(tmp_path):
    words = ["--shape", "tiny", "--steps", "1", "--warm_up", "1", "--turns", "3", "--arms", "trl", "hybrid"]
    rows = rows_of(tmp_path, "grpo", *words)
    assert rows[0]["mean_length"] == rows[1]["mean_length"] and rows[1]["plain_rollouts_because"] is None
    assert rows[1]["prompt_tokens_shared"] > rows[1]["prompt_tokens_computed"] and rows[1]["bytes_between_turns"] > 0


def test_our_arm_is_the_first_of_each_line_of_a_call():
    parser = command._parser()
    for lines in CALLS.values():
        for line in lines:
            args = parser.parse_args(line.words.split())
            assert line.arm_seconds <= line.seconds and args.arms
            if not args.arms[0].startswith(("hybrid", "stream")):
                assert args.use == "checks" or all(arm.startswith("trl") for arm in args.arms)


def test_checks_name_scenarios_that_a_gpu_runs():
    from simulated_gpu.test_on_a_gpu import ON_A_GPU

    from benchmarks.gpu.checks import SCENARIOS

    assert set(SCENARIOS) <= set(ON_A_GPU)


# Arms that do not end well.


def patched() -> dict:
    """As Liger does."""
    modeling_llama.apply_rotary_pos_emb = modeling_llama.LlamaMLP = None
    return {"seconds": 1.0}


def killed() -> dict:
    os.kill(os.getpid(), signal.SIGKILL)
    return {}


def crashed() -> dict:
    ctypes.string_at(0)
    return {}


def hung() -> dict:
    subprocess.run(["sleep", "600"], start_new_session=True)
    return {}


def capture_failed() -> dict:
    """An error while a graph is captured, after which the allocator of this process is of no use."""
    torch.empty = None
    raise RuntimeError("CUDA error: operation failed due to a previous error during capture")


def healthy() -> dict:
    whole = modeling_llama.apply_rotary_pos_emb is not None and torch.empty is not None
    return {"seconds": 1.0, "whole": whole}


ARMS = {function.__name__: function for function in (patched, killed, crashed, hung, capture_failed)}


@pytest.fixture
def use(monkeypatch):
    """A use whose arms are those above, with a healthy one after each."""
    arms = {name: arm for bad, work in ARMS.items() for name, arm in ((bad, work), (f"after_{bad}", healthy))}
    module: types.Any = types.ModuleType("benchmarks.gpu.fake")
    module.ARMS, module.options = arms, lambda parser: None
    module.cases = lambda args: [{"shape": args.shape, "kind": "fake"}]
    module.run = lambda case, arm, args: arms[arm]()
    monkeypatch.setitem(sys.modules, "benchmarks.gpu.fake", module)
    monkeypatch.setitem(command.USES, "fake", ("tiny", 1.0))
    monkeypatch.setattr(command, "LEAST", 0.0)


def test_an_arm_that_patches_hangs_or_dies_costs_its_own_row_alone(use, tmp_path, monkeypatch):
    monkeypatch.setitem(command.CALLS, "first", [Line(60, 1.0, "fake")])
    rows = {row["arm"]: row for row in rows_of(tmp_path, "first", "--shape", "tiny")}
    assert len(rows) == 2 * len(ARMS)
    errors = {arm: row.get("error") for arm, row in rows.items()}
    assert errors.pop("killed") == "ended by SIGKILL" and errors.pop("crashed") == "ended by SIGSEGV"
    assert errors.pop("hung") == "stopped at its limit of 1 s"
    assert "during capture" in errors.pop("capture_failed") and set(errors.values()) == {None}
    assert all(rows[f"after_{arm}"]["whole"] for arm in ARMS)
    assert modeling_llama.apply_rotary_pos_emb is not None


def test_a_row_is_in_the_file_before_the_next_arm_begins(use, tmp_path, monkeypatch):
    results, seen = tmp_path / "results.jsonl", []

    def looking(work, limit, way):
        seen.append(len(results.read_text().splitlines()) if results.exists() else 0)
        return outcome(work, limit, way)

    monkeypatch.setattr(command, "outcome", looking)
    bench = command.Bench(results, {"device": None}, time.monotonic() + 60)
    bench.run(command._parser().parse_args(["fake", "--arms", "patched", "killed", "after_killed"]), 60, 60)
    assert seen == [0, 1, 2]


def test_the_limit_of_a_call_stops_the_arm_that_runs_and_begins_no_other(use, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(command, "LEAST", 0.2)
    bench = command.Bench(tmp_path / "results.jsonl", {"device": None}, time.monotonic() + 1.5)
    bench.run(command._parser().parse_args(["fake", "--arms", "patched", "hung", "after_hung"]), 60, 60)
    rows = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    assert [row["arm"] for row in rows] == ["patched", "hung"] and rows[1]["error"].startswith("stopped at its limit")
    assert "no time is left for fake fake after_hung" in capsys.readouterr().out


def test_what_a_killed_arm_started_is_killed_too():
    marker = f"6{os.getpid()}"

    def starts_one_in_a_session_of_its_own() -> dict:
        subprocess.run(["sleep", marker], start_new_session=True)
        return {}

    assert "limit" in outcome(starts_one_in_a_session_of_its_own, 0.5)["error"]
    running = subprocess.run(["pgrep", "-f", f"sleep {marker}"], capture_output=True, text=True)
    assert running.stdout == ""


IMPORTS = """
import torch
from benchmarks.gpu import __main__ as command
from benchmarks.gpu.process import answered

def initialises(*args):
    raise SystemExit("CUDA would be initialised")

torch.cuda._lazy_init = torch._C._cuda_getDeviceCount = initialises
torch._C._cuda_getCurrentRawStream, torch.cuda._is_compiled = initialises, lambda: True
with answered({"device": "a card", "devices": 1, "capability": (9, 0)}):
    command._parser()
"""


@pytest.mark.slow
def test_imports_ask_the_device_nothing_that_would_end_forks():
    done = subprocess.run([sys.executable, "-c", IMPORTS], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]


def test_processes_import_anew_where_this_one_uses_cuda(monkeypatch):
    assert way_to_begin() == "fork"
    monkeypatch.setattr(torch.cuda, "_is_in_bad_fork", lambda: True)
    assert way_to_begin() == "spawn"
