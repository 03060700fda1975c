"""`python -m benchmarks.gpu` at tiny size on the CPU, so that nothing silly fails on the day there is a GPU."""

import json
import math
import runpy
import sys

import pytest

pytest.importorskip("trl")
pytest.importorskip("peft")
pytestmark = pytest.mark.processes  # loaders of data

WORDS = {
    "sft": ["--scale", "0.03", "--kinds", "instructions", "system", "--arms", "free", "trl_packing", "hybrid"],
    "dpo": ["--scale", "0.03", "--kinds", "mixed"],
    "grpo": ["--length", "8", "--tokens", "4", "--mean", "4"],
    "stream": ["--tokens", "32", "--length", "16", "--arms", "stream"],
    "scratch": ["--run_steps", "4", "--length", "16", "--rows", "2", "--files", "20", "--arms", "adamw", "fast"],
}


@pytest.mark.parametrize("use", WORDS)
def test_each_use_runs_both_orders_and_writes_what_it_measured(use, monkeypatch, tmp_path, capsys):
    results = tmp_path / "results.jsonl"
    words = ["--results", str(results), use, "--shape", "tiny", "--steps", "1", "--warm_up", "1", *WORDS[use]]
    monkeypatch.setattr(sys, "argv", ["gpu", *words])
    runpy.run_module("benchmarks.gpu", run_name="__main__")
    rows = [json.loads(line) for line in results.read_text().splitlines()]
    assert not [row["error"] for row in rows if "error" in row]
    assert {row["order"] for row in rows} == {0, 1} and all(math.isfinite(row["seconds"]) for row in rows)
    assert len(capsys.readouterr().out.splitlines()) >= len(rows)
    if use == "sft":
        for row in rows:
            saves = row["arm"] == "hybrid" and row["kind"] == "system"
            assert (row.get("tokens_shared", 0) > 0) == saves or row["kind"] == "instructions"
