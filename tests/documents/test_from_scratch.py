"""Training from scratch as a user starts it, shortened; the long form is marked slow."""

import json
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from hf_hybrid.report.findings import findings
from hf_hybrid.report.run_folder import load_run

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "examples" / "07_from_scratch.py"


@pytest.mark.slow
def test_short_run_on_a_text_file_prints_its_table(tmp_path, monkeypatch, capfd):
    """In this process, as importing everything anew takes longer than the run."""
    text = tmp_path / "text.txt"
    text.write_text("\n\n".join((ROOT / name).read_text() for name in ("README.md", "LICENSE", "CONTRIBUTING.md")) * 4)
    options = {
        "--text_file": text, "--max_steps": 40, "--block_size": 32, "--learning_rate": 2e-3, "--leap_worth": 10,
        "--direction": "orthogonal",
        "--divergence_threshold": 50, "--output_dir": tmp_path / "out",
    }  # fmt: skip
    arguments = [str(part) for pair in options.items() for part in pair]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), "--disable_tqdm", "True", *arguments])
    runpy.run_path(str(SCRIPT), run_name="__main__")
    out = capfd.readouterr().out
    phases = dict(re.findall(r"(warmup|full|predict|correct) (\d+)", out))
    assert sum(map(int, phases.values())) == 40 and all(int(n) > 0 for n in phases.values())
    done, avoided = map(int, re.search(r"(\d+) done, (\d+) avoided", out).groups())
    assert done + avoided == 40 and avoided > 0
    assert re.search(r"evaluation loss\s+start \d+\.\d+  HybridTrainer \d+\.\d+  Trainer \d+\.\d+", out)
    summary = json.loads((tmp_path / "out" / "hybrid_summary.json").read_text())
    assert summary["backward_passes"] == done and len(summary["leaps"]) > 0
    run = load_run(tmp_path / "out")
    loss = findings(run)["headline"]["final_loss"]
    assert run.leaps == summary["leaps"] and run.series("loss") and loss["held_out_step"] == 40
    assert (tmp_path / "out" / "model.safetensors").exists()


def test_help_lists_our_options(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), "--help"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(SCRIPT), run_name="__main__")
    assert not ended.value.code
    shown = capsys.readouterr().out
    for option in ("--enable_predict", "--direction", "--auto_lr", "--model_name_or_path", "--learning_rate"):
        assert option in shown


@pytest.mark.processes
@pytest.mark.slow
def test_default_run(tmp_path):
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "hf")}
    result = subprocess.run(
        [sys.executable, str(SCRIPT), "--disable_tqdm", "True"],
        cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=900,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr[-3000:]
    start_loss, hybrid, plain = map(
        float, re.search(r"start (\d+\.\d+)  HybridTrainer (\d+\.\d+)  Trainer (\d+\.\d+)", result.stdout).groups()
    )
    assert hybrid < plain - 0.2 < start_loss - 1
