"""The examples of PEFT and TRL as a user starts them, shortened; the default lengths are marked slow."""

import json
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import Trainer

pytest.importorskip("peft")
EXAMPLES = Path(__file__).parents[2] / "examples"
NEEDS = {"01_quickstart": "trl", "06_lora": "peft", "08_dpo_trl": "trl", "12_grpo_trl": "trl"}
pytestmark = [pytest.mark.long, pytest.mark.filterwarnings("ignore")]


def start(name, *arguments, monkeypatch, capsys, folder):
    """In this process: importing everything anew takes longer than the run."""
    pytest.importorskip(NEEDS[name])
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "argv", [f"{name}.py", *arguments])
    runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    return capsys.readouterr().out


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """The small Llama of the examples, hardly trained; made by the function that makes it there."""
    folder = str(tmp_path_factory.mktemp("base"))
    made = runpy.run_path(str(EXAMPLES / "06_lora.py"))["make_base"](folder, steps=2)
    assert made == folder and (Path(folder) / "model.safetensors").exists()
    return folder


SHORT = {
    "--direction": "orthogonal",
    "--max_steps": "12",
    "--per_device_train_batch_size": "2",
    "--learning_rate": "1e-3",
    "--full_phase_steps": "2",
    "--warmup_phase_steps": "2",
    "--correct_phase_steps": "1",
    "--leap_budget": "100",
    "--leap_worth": "1",
    "--divergence_threshold": "50",
    "--disable_tqdm": "True",
    "--output_dir": "out",
}


def run(name, base, monkeypatch, capsys, folder, **more):
    options = {**SHORT, "--model_name_or_path": base, **{f"--{key}": value for key, value in more.items()}}
    arguments = [part for pair in options.items() for part in pair]
    out = start(name, *arguments, monkeypatch=monkeypatch, capsys=capsys, folder=folder)
    phases = dict(re.findall(r"(warmup|full|predict|correct) (\d+)", out))
    assert sum(map(int, phases.values())) == 12, out
    summary = json.loads((folder / "out" / "hybrid_summary.json").read_text())
    done, avoided = map(int, re.search(r"(\d+) done, (\d+) avoided", out).groups())
    assert (done, avoided) == (summary["backward_passes"], summary["backward_passes_avoided"]) and done + avoided == 12
    assert summary["leaps"]
    before, after = map(float, re.search(r"evaluation loss\s+(\d+\.\d+) -> (\d+\.\d+)", out).groups())
    # Twelve steps of two pairs move the preference loss, and are too few to say where to.
    assert after < before if name != "08_dpo_trl" else after != before
    return out


@pytest.mark.parametrize("method", ["lora", "ia3"])
def test_lora(method, base, monkeypatch, capsys, tmp_path):
    # IA3 multiplies activations by vectors that begin at one: it takes longer steps to show anything.
    rate = "1e-3" if method == "lora" else "2e-2"
    text = tmp_path / "text.txt"
    text.write_text((EXAMPLES.parent / "README.md").read_text() * 3)
    more = {"block_size": "48", "text_file": str(text), "method": method, "merge": "True", "learning_rate": rate}
    out = run("06_lora", base, monkeypatch, capsys, tmp_path, **more)
    trained, total = re.search(r"trained parameters  ([\d,]+) of ([\d,]+)", out).groups()
    assert 0 < int(trained.replace(",", "")) < int(total.replace(",", "")) / 5
    assert (tmp_path / "out" / "adapter_model.safetensors").exists()
    assert (tmp_path / "out" / "merged" / "model.safetensors").exists()


def test_qlora(base, monkeypatch, capsys, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text((EXAMPLES.parent / "README.md").read_text() * 3)
    pytest.importorskip("bitsandbytes")
    more = {"block_size": "48", "text_file": str(text), "four_bits": "True"}
    out = run("06_lora", base, monkeypatch, capsys, tmp_path, **more)
    assert 0.5 < float(re.search(r"base in 4 bits\s+(\d+\.\d) MiB", out).group(1)) < 4.0
    assert (tmp_path / "out" / "adapter_model.safetensors").exists()


def test_quickstart(base, monkeypatch, capsys, tmp_path):
    arguments = ["--model_name_or_path", base, "--max_steps", "3", "--disable_tqdm", "True", "--output_dir", "out"]
    out = start("01_quickstart", *arguments, monkeypatch=monkeypatch, capsys=capsys, folder=tmp_path)
    assert (tmp_path / "out" / "adapter_model.safetensors").exists()
    summary = json.loads((tmp_path / "out" / "hybrid_summary.json").read_text())
    counts = [int(count.replace(",", "")) for count in re.search(r"tokens  .*", out)[0].split() if count[0].isdigit()]
    assert counts == [summary[name] for name in ("tokens", "tokens_shared", "tokens_padding")] and min(counts) > 1000
    losses = dict(re.findall(r"(before|HybridSFTTrainer|SFTTrainer) (\d\.\d{4})", out))
    assert float(losses["HybridSFTTrainer"]) == pytest.approx(float(losses["SFTTrainer"]), abs=2e-4)
    assert float(losses["HybridSFTTrainer"]) < float(losses["before"])


def test_dpo(base, monkeypatch, capsys, tmp_path):
    out = run("08_dpo_trl", base, monkeypatch, capsys, tmp_path, max_length="48", lora_rank="4")
    assert re.search(r"held-out pairs\s+\d+% in the preferred order", out)
    assert (tmp_path / "out" / "adapter_model.safetensors").exists()


def test_grpo(base, monkeypatch, capsys, tmp_path):
    arguments = "--max_steps 2 --max_completion_length 4 --num_generations 4 --gradient_accumulation_steps 4".split()
    arguments += ["--model_name_or_path", base, "--logging_steps", "1", "--disable_tqdm", "True", "--output_dir", "out"]
    out = start("12_grpo_trl", *arguments, monkeypatch=monkeypatch, capsys=capsys, folder=tmp_path)
    rows, left_out, done, avoided = map(int, re.findall(r"(\d+) (?:generated|left out|done|avoided)", out))
    assert rows == 64 > left_out and done + avoided == 8
    assert (tmp_path / "out" / "model.safetensors").exists()


# TRL's own scripts, with two lines changed. Their defaults have `lora_dropout=0.05`.

ROWS = {
    "sft": lambda n: {"prompt": "What is next?", "completion": " one" * (3 * (n % 5) + 1)},
    "dpo": lambda n: {
        "prompt": "Go on: " + "and " * (n % 5),
        "chosen": "one" * (1 + n % 3),
        "rejected": "no" * (n + 1),
    },
    "grpo": lambda n: {"prompt": f"{'easy' if n % 2 else 'hard'} {n}" + " word" * (n % 6)},
}
REWARD = """
def easy(prompts, completions, **_):
    return [1.0 if prompt.startswith("easy") else float(len(text)) for prompt, text in zip(prompts, completions)]
"""


def start_trl(name, base, monkeypatch, folder, *arguments) -> dict:
    """Run a script of the installed TRL in this process, and return the summary of its trainer."""
    lines = Path(pytest.importorskip(f"trl.scripts.{name}").__file__).read_text(encoding="utf-8").splitlines()
    theirs = f"{name.upper()}Trainer"
    changed = list(lines)
    for number, line in enumerate(lines):
        if re.search(rf"\bfrom trl import\b.*\b{theirs}, ", line):
            changed[number] = line.replace(f"{theirs}, ", "") + f"; from hf_hybrid import Hybrid{theirs}"
        elif f"trainer = {theirs}(" in line:
            changed[number] = line.replace(theirs, f"Hybrid{theirs}")
    assert len([line for line, other in zip(lines, changed) if line != other]) == 2
    (folder / f"{name}.py").write_text("\n".join(changed), encoding="utf-8")
    (folder / "rows").mkdir()
    (folder / "rows" / "train.jsonl").write_text("".join(json.dumps(ROWS[name](n)) + "\n" for n in range(32)))
    (folder / "rewards_of_script.py").write_text(REWARD)
    words = f"--model_name_or_path {base} --dataset_name rows --use_peft --output_dir out --max_steps 2 --use_cpu"
    trainers, train = [], Trainer.train
    monkeypatch.setattr(
        Trainer, "train", lambda trainer, *more, **named: trainers.append(trainer) or train(trainer, *more, **named)
    )
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", [str(folder), *sys.path])
    monkeypatch.setattr(sys, "argv", [f"{name}.py", *words.split(), "--report_to", "none", *arguments])
    runpy.run_path(f"{name}.py", run_name="__main__")
    assert json.loads((folder / "out" / "adapter_config.json").read_text())["lora_dropout"] == 0.05
    return trainers[0].hybrid_summary()


def test_script_of_trl_for_sft_saves_padding_and_shares_prompts(base, monkeypatch, tmp_path):
    found = start_trl("sft", base, monkeypatch, tmp_path)
    assert found["tokens_padding"] > 0.2 * found["tokens"] and found["tokens_shared"] > 0.2 * found["tokens"]
    assert found["dropout_drawn_once"] and found["plain_rows_because"] is None


def test_script_of_trl_for_dpo_saves_padding_and_shares_prompts(base, monkeypatch, tmp_path):
    """TRL turns dropout off for preferences, also that of adapters."""
    found = start_trl("dpo", base, monkeypatch, tmp_path)
    assert found["tokens_padding"] > 0 and found["tokens_shared"] > 0 and found["plain_rows_because"] is None


def test_script_of_trl_for_grpo_saves_padding_rows_and_prompts(base, monkeypatch, tmp_path):
    more = ["--reward_funcs", "rewards_of_script.easy", "--max_completion_length", "8"]
    more += ["--gradient_accumulation_steps", "4"]  # four prompts a step
    found = start_trl("grpo", base, monkeypatch, tmp_path, *more)
    assert found["rows"] == 64 and found["rows_skipped"] >= 16 and found["every_row_because"] is None
    assert found["tokens_padding"] > 0 and found["dropout_drawn_once"]
    assert found["prompt_tokens_shared"] > 0 and found["plain_rollouts_because"] is None


@pytest.mark.parametrize("name", NEEDS)
def test_help_lists_our_options_and_theirs(name, monkeypatch, capsys, tmp_path):
    with pytest.raises(SystemExit) as exit:
        start(name, "--help", monkeypatch=monkeypatch, capsys=capsys, folder=tmp_path)
    assert exit.value.code == 0
    text = capsys.readouterr().out
    own = {
        "06_lora": "--four_bits",
        "01_quickstart": "--packing",
        "08_dpo_trl": "--loss_type",
        "12_grpo_trl": "--exact_skips",
    }
    assert all(option in text for option in ("--enable_predict", "--model_name_or_path", "--learning_rate", own[name]))


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.parametrize("name", NEEDS)
def test_default_run(name, tmp_path):
    pytest.importorskip(NEEDS[name])
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "hf")}
    result = subprocess.run(
        [sys.executable, str(EXAMPLES / f"{name}.py"), "--disable_tqdm", "True"],
        cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=1800,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr[-3000:]
    measured = r"(evaluation loss|mean reward)\s+(\d+\.\d+) -> (\d+\.\d+)"
    what, before, after = re.search(measured, result.stdout).groups()
    assert float(after) < float(before) if what == "evaluation loss" else float(after) > float(before)
