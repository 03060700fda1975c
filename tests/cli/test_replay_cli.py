"""`hf-hybrid replay`: the command of a run is kept without secrets, and its steps are made again."""

import json
import os
import shutil
from pathlib import Path

import pytest
from cli.test_cli import folder  # noqa: F401 - a fixture

from hf_hybrid.cli.main import main
from hf_hybrid.cli.options import CommandLine
from hf_hybrid.cli.replay import COMMAND_NAME

ROOT = Path(__file__).parents[2]


@pytest.fixture
def place(folder, tmp_path, monkeypatch):  # noqa: F811
    """A folder of its own with the files of a run, which is the present one."""
    shutil.copytree(folder, tmp_path / "run")
    (tmp_path / "elsewhere").mkdir()
    text = (tmp_path / "run" / "run.yaml").read_text().replace(str(folder), str(tmp_path / "run"))
    (tmp_path / "run" / "run.yaml").write_text(text)
    monkeypatch.chdir(tmp_path / "run")
    return tmp_path / "run"


def trained(*more):
    """Train with paths that are relative to the present folder."""
    arguments = [
        "--config",
        "run.yaml",
        "--max_steps",
        "6",
        "--use_cpu",
        "--output_dir",
        "out",
        "--dataset",
        "text.txt",
    ]
    assert main(["train", *arguments, "--eval_share", "0", *more]) == 0
    return Path("out").resolve()


def test_a_run_is_replayed_from_anywhere_and_other_data_is_named(place, monkeypatch, capsys):
    out = trained("--hub_token", "hf_abcdefghijklmnopqrst")
    assert "hf_abc" not in (out / COMMAND_NAME).read_text()
    (place / "run.yaml").unlink()  # its options are kept
    files = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    monkeypatch.chdir(place.parent / "elsewhere")
    capsys.readouterr()
    assert main(["replay", str(out), "--from", "3", "--to", "6"]) == 0
    assert "made these 3 steps right" in capsys.readouterr().out
    assert files == {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    assert not [name for name in os.listdir(place) if name.startswith("_replay")]
    (place / "text.txt").write_text((place / "text.txt").read_text().swapcase(), encoding="utf-8")
    assert main(["replay", str(out), "--from", "3", "--to", "6"]) == 1
    assert "Step 4 is the first that differs: the run trained on other batches" in capsys.readouterr().out
    assert main(["replay", str(out), "--from", "0", "--to", "2"]) == 1
    assert "Step 1 is the first that differs: the run trained on other batches" in capsys.readouterr().out


@pytest.mark.parametrize(
    "words, message",
    [
        (["--from", "3", "--to", "3"], "`start=3` must be 0 or more, and below `end=3`"),
        (["--from", "2", "--to", "3"], "has no checkpoint up to step 2"),
    ],
)
def test_what_cannot_be_replayed_is_a_message(place, capsys, words, message):
    out = trained("--max_steps", "3")
    assert main(["replay", str(out), *words]) == 2
    assert message in capsys.readouterr().err


def test_a_folder_of_another_script_says_what_to_use(tmp_path, capsys):
    assert main(["replay", str(tmp_path), "--from", "0", "--to", "3"]) == 2
    assert "Replay other runs with `hf_hybrid.saving.replay.replay`" in capsys.readouterr().err


def test_secrets_are_left_out_of_the_command(tmp_path):
    words = ["--seed", "3", "--hub_token", "one", "--hub-token=two", "--max_steps", "4"]
    words += ["--run_name", "hf_abcdefghijklmnopqrst", "--lr_scheduler_kwargs", '{"min_lr": 0.1}']
    environment = {
        "API_KEY": 4,
        "A": "hf_abcdefghijklmnopqrst",
        "OMP_NUM_THREADS": 2,
        "MKL_CBWR": "sk-abcdefghijklmnopqr",
    }
    file = {"hub_token": "three", "run_name": "https://me:1234@host/x", "seed": 7, "env": environment}
    (tmp_path / "run.yaml").write_text(json.dumps(file))
    saved = CommandLine(["--config", str(tmp_path / "run.yaml"), *words]).to_dict()
    assert saved == {
        "arguments": ["--seed", "3", "--max_steps", "4", "--lr_scheduler_kwargs", '{"min_lr": 0.1}'],
        "config": {"seed": 7},
        "variables": {"API_KEY": None, "A": None, "OMP_NUM_THREADS": "2", "MKL_CBWR": None},
    }
    again = CommandLine.again(json.loads(json.dumps(saved)), ["--seed=5"])
    assert again.values.seed == 5 and again.from_file() == {"seed": 7, "env": {"OMP_NUM_THREADS": "2"}}


def test_a_folder_makes_no_code_run(place, monkeypatch, capsys, tmp_path):
    """Whatever stands in `_hybrid_command.json`, and whatever lies beside it."""
    out, ran = trained("--save_steps", "3"), tmp_path / "ran"
    code = f"open({str(ran)!r}, 'w')\n"
    saved = json.loads((out / COMMAND_NAME).read_text())
    evil = place / "evil"
    shutil.copytree(place / "model", evil)
    (evil / "other.py").write_text(code + "class Other: pass\n")
    config = json.loads((evil / "config.json").read_text())
    config["auto_map"] = {"AutoConfig": "other.Other", "AutoModelForCausalLM": "other.Other"}
    (evil / "config.json").write_text(json.dumps({**config, "model_type": "other"}))
    (evil / "accelerate.yaml").write_text("compute_environment: AMAZON_SAGEMAKER\n")
    monkeypatch.setattr("builtins.input", lambda prompt: pytest.fail(f"a question: {prompt}"))
    for name in ("TORCH_LIBRARY_OF_A_FOLDER", "LD_PRELOAD", "PYTHONSTARTUP", "HF_ENDPOINT"):
        monkeypatch.delenv(name, raising=False)

    def replayed(*words, arguments=(), **changed):
        changed = {"arguments": [*saved["arguments"], *arguments], **changed}
        (out / COMMAND_NAME).write_text(json.dumps({**saved, **changed}))
        status = main(["replay", str(out), "--from", "3", "--to", "6", *words])
        return status, capsys.readouterr().err

    trusting = ["--model", str(evil), "--trust_remote_code", "true"]
    in_file = {**saved["config"], "model": str(evil), "trust_remote_code": True}
    for change in ({"arguments": trusting}, {"config": in_file}):
        status, told = replayed(**change)
        assert status == 2 and "custom code" in told and not ran.exists()
    variables = dict.fromkeys(("LD_PRELOAD", "PYTHONSTARTUP", "HF_ENDPOINT", "TORCH_LIBRARY_OF_A_FOLDER"), "x")
    for change in ({"variables": variables}, {"config": {**saved["config"], "env": variables}, "variables": {}}):
        status, told = replayed(**change)
        assert status == 0 and not set(variables) & set(os.environ)
        assert ("`env`, whose values are not kept: LD_PRELOAD, PYTHONSTARTUP" in told) is bool(change["variables"])
    for name in (str(evil / "accelerate.yaml"), "../../evil"):
        status, told = replayed(arguments=["--accelerate_config", name])
        assert status == 2 and "which a folder cannot name" in told
    assert replayed("--trust_remote_code", arguments=trusting)[0] == 2 and ran.exists()  # the user asked for it


@pytest.mark.parametrize("changed", [{"arguments": "x"}, {"variables": None}, {"folder": 3}, {"processes": "2"}])
def test_a_command_of_another_kind_is_refused(tmp_path, capsys, changed):
    saved = {"arguments": [], "config": {}, "variables": {}, "processes": 1, "folder": str(tmp_path), **changed}
    (tmp_path / COMMAND_NAME).write_text(json.dumps(saved))
    assert main(["replay", str(tmp_path), "--from", "0", "--to", "3"]) == 2
    assert f"`{next(iter(changed))}` is of another kind" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.processes
def test_a_run_on_two_processes_is_replayed_on_two(place, monkeypatch, capsys):
    for name, value in (("HF_HUB_OFFLINE", "1"), ("OMP_NUM_THREADS", "1"), ("PYTHONPATH", str(ROOT))):
        monkeypatch.setenv(name, value)
    out = trained("--num_processes", "2", "--cpu")
    for name in ("torch", "accelerate"):
        (place / f"{name}.py").write_text("raise SystemExit('a module of the folder was imported')\n")
    monkeypatch.chdir(place.parent / "elsewhere")
    assert main(["replay", str(out), "--from", "3", "--to", "6"]) == 0
    assert "made these 3 steps right" in capsys.readouterr().out
