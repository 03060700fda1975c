"""The remaining examples and the notebook, as a user starts them, shortened; the default lengths are marked slow."""

import json
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

EXAMPLES = Path(__file__).parents[2] / "examples"
NAMES = (
    "02_compare_with_trainer",
    "03_memory_policies",
    "04_resume",
    "10_custom_direction",
    "11_gpt2_small",
    "13_low_bit",
)
pytestmark = [pytest.mark.long, pytest.mark.filterwarnings("ignore")]


@pytest.fixture
def start(monkeypatch, capfd, tmp_path):
    """Run an example in this process, as importing everything anew takes longer; returns its output and status."""

    def run(name, *arguments):
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", [str(EXAMPLES / f"{name}.py"), *map(str, arguments)])
        status = 0
        try:
            runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
        except SystemExit as exit:
            status = exit.code
        return capfd.readouterr().out, status

    return run


def test_compare(start, tmp_path):
    arms = ("trainer", "hybrid", "frozen", "muon")
    out, status = start("02_compare_with_trainer", "--max_steps", 12, "--learning_rates", 3e-3)
    runs = json.loads((tmp_path / "out/compare/comparison.json").read_text())["runs"]
    assert status == 0 and [run["arm"] for run in runs] == [*arms, "fewer"]
    by_arm = {run["arm"]: run for run in runs}
    assert by_arm["fewer"]["backward_passes"] == by_arm["hybrid"]["backward_passes"] <= 12
    assert by_arm["trainer"]["backward_passes"] == by_arm["muon"]["backward_passes"] == 12
    for arm in (*arms, "fewer"):
        assert re.search(rf"^{arm} +0\.003 +{by_arm[arm]['eval_loss']:.4f} ", out, re.M), out
    assert "at the edge" in out and "--seeds 0 1 2" in out  # one learning rate is no search, one seed no comparison


def test_compare_refuses_an_unknown_arm(start):
    with pytest.raises(ValueError, match="`arms` must be among .*got `sgd`"):
        start("02_compare_with_trainer", "--arms", "sgd")


def test_memory_policies(start):
    pytest.importorskip("bitsandbytes")
    out, _ = start("03_memory_policies", "--layers", 6, "--width", 64, "--max_steps", 2)
    found = dict(re.findall(r"^(\w+) +(\d+\.\d+ +\d+\.\d+ +\d+\.\d+ .*)$", out, re.M))
    assert list(found) == [
        "resident", "checkpointed", "streamed", "half_resident", "micro_batch", "activations", "embeddings", "8bit",
    ]  # fmt: skip
    device = {way: float(line.split()[0]) for way, line in found.items()}
    host = {way: float(line.split()[1]) for way, line in found.items()}
    assert device["embeddings"] < device["streamed"] < device["half_resident"] < device["resident"]
    assert host["8bit"] < host["streamed"] and host["resident"] == 0
    for way in ("checkpointed", "micro_batch"):
        assert found[way].endswith("none, to the last bit"), out
    assert float(found["8bit"].split()[-1]) > 0


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.skipif(os.name == "nt", reason="SIGKILL")
def test_resume(start):
    """`tests/saving/test_state.py` kills and resumes in the default suite."""
    out, status = start("04_resume", "--max_steps", 24)
    assert status == 0 and "the next step belongs to Predict: SIGKILL" in out
    assert re.search(r"^(\d+) of \1 tensors are equal to the last bit$", out, re.M), out
    whole, resumed = (re.search(rf"{said}: (\{{.*?\}})", out).group(1) for said in ("interrupted", "resumed"))
    assert whole == resumed  # steps by phase


def test_custom_direction(start):
    out, _ = start("10_custom_direction", "--max_steps", 24, "--leap_worth", 1)
    lines = re.findall(r"^(\w+): loss (\d+\.\d+), (\d+) leaps .* (\d+) backward passes, (\d+) avoided$", out, re.M)
    assert [line[0] for line in lines] == ["agreement", "orthogonal"]
    leaps, done, avoided = map(int, lines[0][2:])
    assert leaps > 0 and avoided > 0 and done + avoided == 24
    passes = re.search(r"(\d+) forward passes", out).group(1)
    assert int(passes) == done  # what the plugin counted


def test_gpt2(start, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text((EXAMPLES.parent / "README.md").read_text() * 2)
    small = ("--n_layer", 2, "--n_embd", 64, "--learning_rate", 3e-3, "--block_size", 32)
    out, status = start("11_gpt2_small", *small, "--text_file", text, "--compare_with_trainer", "True")
    found = json.loads((tmp_path / "out/gpt2_small/validation.json").read_text())
    assert status == 0 and all(found["checks"].values()), out
    assert "it is GPT-2 small" not in found["checks"] and found["parameters"] < 4e6
    assert found["eval_loss"]["Trainer"] < found["eval_loss"]["before"]
    assert found["held_bytes"]["weights"] == 4 * found["parameters"]


def test_gpt2_says_what_does_not_hold(start, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text((EXAMPLES.parent / "README.md").read_text())
    small = ("--n_layer", 1, "--n_embd", 64, "--block_size", 32, "--max_steps", 4)
    out, status = start("11_gpt2_small", *small, "--text_file", text, "--leap_gain", 0)
    assert status == 1 and "NOT  leaps were made" in out and "NOT  every phase was reached" in out


def test_low_bit(start, tmp_path):
    pytest.importorskip("torchao")
    with torch.compiler.set_stance("force_eager"):  # compiling takes half a minute
        out, status = start("13_low_bit", "--formats", "int8", "--max_steps", 6)
    assert status == 0 and len(re.findall(r"^eval loss +\d\.\d{4} +\d\.\d{4} \(", out, re.M)) == 3
    for name in ("int8", "rounded", "bitnet"):
        result = json.loads((tmp_path / f"out/low_bit-{name}/export.json").read_text())
        assert result["exported"]["disk_bytes"] < result["original"]["disk_bytes"]
    assert result["exported"]["loss"] == pytest.approx(result["original"]["loss"], abs=1e-3)


@pytest.mark.parametrize("name", NAMES)
def test_help(name, start):
    out, status = start(name, "--help")
    assert status == 0
    own = {"02": "--learning_rates", "03": "--ways", "04": "--die", "10": "--least_agreement", "11": "--n_layer"}
    own |= {"13": "--ternary"}
    assert own[name[:2]] in out and "--max_steps" in out


def test_notebook(monkeypatch, tmp_path):
    notebook = json.loads((EXAMPLES / "quickstart.ipynb").read_text(encoding="utf-8"))
    assert notebook["nbformat"] == 4
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in cells)
    monkeypatch.chdir(tmp_path)
    namespace: dict = {}
    for cell in cells:
        source = "".join(cell["source"])
        if source.startswith("%pip"):
            continue
        exec(compile(source.replace("max_steps=200", "max_steps=24"), "cell", "exec"), namespace)
    summary = namespace["summary"]
    assert sum(summary["steps_by_phase"].values()) == 24
    assert namespace["losses"]["after"] < namespace["losses"]["before"]
    # It says what leaps are tested on: no sequence is kept from training.
    words = " ".join("".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "markdown")
    assert "Leaps are tested on the next training batches, before training uses them." in words
    assert namespace["trainer"].probe_dataset is None


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_default_run(name, tmp_path):
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "hf")}
    result = subprocess.run(
        [sys.executable, str(EXAMPLES / f"{name}.py")],
        cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=1800,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr[-3000:]
