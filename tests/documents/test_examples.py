"""The examples and the notebook, as a user starts them, shortened; the default lengths are marked slow."""

import json
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import Trainer

EXAMPLES = Path(__file__).parents[2] / "examples"
NAMES = (
    "02_compare_with_trainer",
    "03_memory_policies",
    "04_resume",
    "10_custom_direction",
    "11_gpt2_small",
    "13_low_bit",
)
NEEDS = {"01_quickstart": "trl", "06_lora": "peft", "08_dpo_trl": "trl", "12_grpo_trl": "trl", "14_images": "trl"}
pytestmark = [pytest.mark.long, pytest.mark.filterwarnings("ignore")]


@pytest.fixture
def start(monkeypatch, capfd, tmp_path):
    """Run an example in this process, as importing everything anew takes longer; returns its output and status."""

    def run(name, *arguments):
        if name in NEEDS:
            pytest.importorskip(NEEDS[name])
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", [str(EXAMPLES / f"{name}.py"), *map(str, arguments)])
        status = 0
        try:
            runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
        except SystemExit as exit:
            status = exit.code
        return capfd.readouterr().out, status

    return run


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize("name", [path.stem for path in EXAMPLES.glob("*.py")])
def test_an_example_says_nothing_of_what_its_dependencies_lack(name):
    """As the commands: torchao, bitsandbytes and torch warn when they are imported."""
    script = f"import runpy; runpy.run_path({str(EXAMPLES / f'{name}.py')!r}, run_name='imported')"
    paths = {"PYTHONPATH": str(EXAMPLES.parent)}
    ended = subprocess.run([sys.executable, "-c", script], env={**os.environ, **paths}, capture_output=True, text=True)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.slow
def test_low_bit(start, tmp_path):
    pytest.importorskip("torchao")
    with torch.compiler.set_stance("force_eager"):  # compiling takes half a minute
        out, status = start("13_low_bit", "--formats", "int8", "--max_steps", 6)
    assert status == 0 and len(re.findall(r"^eval loss +\d\.\d{4} +\d\.\d{4} \(", out, re.M)) == 3
    for name in ("int8", "rounded", "bitnet"):
        result = json.loads((tmp_path / f"out/low_bit-{name}/export.json").read_text())
        assert result["exported"]["disk_bytes"] < result["original"]["disk_bytes"]
    assert result["exported"]["loss"] == pytest.approx(result["original"]["loss"], abs=1e-3)


def test_images(start, tmp_path):
    out, status = start("14_images", "--max_steps", 3)
    before, after = map(float, re.search(r"evaluation loss +(\S+) -> (\S+)", out).groups())
    assert status == 0 and after < before and len([*tmp_path.glob("out/shapes/*.png")]) == 24
    total, shared = map(int, re.search(r"images +(\d+) in rows, (\d+) of them not encoded again", out).groups())
    assert total == 72 and 0 < shared < 48


OWN = {
    "01": "--packing", "02": "--learning_rates", "03": "--ways", "04": "--die", "06": "--four_bits",
    "08": "--loss_type", "10": "--least_agreement", "11": "--n_layer", "12": "--exact_skips", "13": "--ternary",
    "14": "--freeze_encoder",
}  # fmt: skip


@pytest.mark.parametrize("name", [*NAMES, *NEEDS])
def test_help(name, start):
    out, status = start(name, "--help")
    assert status == 0 and OWN[name[:2]] in out and "--max_steps" in out
    if name in NEEDS:  # our options and theirs
        assert all(option in out for option in ("--enable_predict", "--learning_rate"))
        assert "--model_name_or_path" in out or name == "14_images"  # which builds its own


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


# PEFT and TRL.


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """The small Llama of the examples, hardly trained; made by the function that makes it there."""
    pytest.importorskip("peft")
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


def run(start, name, base, folder, **more):
    options = {**SHORT, "--model_name_or_path": base, **{f"--{key}": value for key, value in more.items()}}
    out, _ = start(name, *(part for pair in options.items() for part in pair))
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
def test_lora(method, start, base, tmp_path):
    # IA3 multiplies activations by vectors that begin at one: it takes longer steps to show anything.
    rate = "1e-3" if method == "lora" else "2e-2"
    text = tmp_path / "text.txt"
    text.write_text((EXAMPLES.parent / "README.md").read_text() * 3)
    more = {"block_size": "48", "text_file": str(text), "method": method, "merge": "True", "learning_rate": rate}
    out = run(start, "06_lora", base, tmp_path, **more)
    trained, total = re.search(r"trained parameters  ([\d,]+) of ([\d,]+)", out).groups()
    assert 0 < int(trained.replace(",", "")) < int(total.replace(",", "")) / 5
    assert (tmp_path / "out" / "adapter_model.safetensors").exists()
    assert (tmp_path / "out" / "merged" / "model.safetensors").exists()


def test_qlora(start, base, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text((EXAMPLES.parent / "README.md").read_text() * 3)
    pytest.importorskip("bitsandbytes")
    more = {"block_size": "48", "text_file": str(text), "four_bits": "True"}
    out = run(start, "06_lora", base, tmp_path, **more)
    assert 0.5 < float(re.search(r"base in 4 bits\s+(\d+\.\d) MiB", out).group(1)) < 4.0
    assert (tmp_path / "out" / "adapter_model.safetensors").exists()


def test_quickstart(start, base, tmp_path):
    arguments = ["--model_name_or_path", base, "--max_steps", "3", "--disable_tqdm", "True", "--output_dir", "out"]
    out, _ = start("01_quickstart", *arguments)
    assert (tmp_path / "out" / "adapter_model.safetensors").exists()
    summary = json.loads((tmp_path / "out" / "hybrid_summary.json").read_text())
    counts = [int(count.replace(",", "")) for count in re.search(r"tokens  .*", out)[0].split() if count[0].isdigit()]
    assert counts == [summary[name] for name in ("tokens", "tokens_shared", "tokens_padding")] and min(counts) > 1000
    losses = dict(re.findall(r"(before|HybridSFTTrainer|SFTTrainer) (\d\.\d{4})", out))
    assert float(losses["HybridSFTTrainer"]) == pytest.approx(float(losses["SFTTrainer"]), abs=2e-4)
    assert float(losses["HybridSFTTrainer"]) < float(losses["before"])


def test_dpo(start, base, tmp_path):
    out = run(start, "08_dpo_trl", base, tmp_path, max_length="48", lora_rank="4")
    assert re.search(r"held-out pairs\s+\d+% in the preferred order", out)
    assert (tmp_path / "out" / "adapter_model.safetensors").exists()


def test_grpo(start, base, tmp_path):
    arguments = "--max_steps 2 --max_completion_length 4 --num_generations 4 --gradient_accumulation_steps 4".split()
    arguments += ["--model_name_or_path", base, "--logging_steps", "1", "--disable_tqdm", "True", "--output_dir", "out"]
    out, _ = start("12_grpo_trl", *arguments)
    rows, left_out, done, avoided = map(int, re.findall(r"(\d+) (?:generated|left out|done|avoided)", out))
    assert rows == 64 > left_out and done + avoided == 8
    assert (tmp_path / "out" / "model.safetensors").exists()


def test_grpo_with_a_tool(start, base, tmp_path):
    arguments = (
        "--max_steps 1 --held_out 2 --num_generations 4 --per_device_train_batch_size 4 --logging_steps 1".split()
    )
    arguments += ["--per_device_eval_batch_size", "2", "--max_completion_length", "24", "--disable_tqdm", "True"]
    out, _ = start("15_grpo_tools", *arguments, "--model_name_or_path", base, "--output_dir", "out")
    assert re.search(r"held-out reward +0\.00 -> 0\.00", out) and re.search(r"turns +4, calls of the tool 0", out)
    assert (tmp_path / "out" / "adapter_model.safetensors").exists()


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


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.parametrize("name", [*NAMES, *NEEDS])
def test_default_run(name, tmp_path):
    more = ["--disable_tqdm", "True"] if name in NEEDS and pytest.importorskip(NEEDS[name]) else []
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "hf")}
    result = subprocess.run(
        [sys.executable, str(EXAMPLES / f"{name}.py"), *more],
        cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=1800,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr[-3000:]
    if name in NEEDS:
        measured = r"(evaluation loss|mean reward)\s+(\d+\.\d+) -> (\d+\.\d+)"
        what, before, after = re.search(measured, result.stdout).groups()
        assert float(after) < float(before) if what == "evaluation loss" else float(after) > float(before)
