"""`hf-hybrid train` as a user starts it: order of options, wrong ones, a run, its resume, its data, its processes."""

import dataclasses
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from pydoc_data import topics
from types import SimpleNamespace

import pytest
import torch
import yaml
from rig.byte_llama import END, assistant, byte_tokenizer, llama_config, save_llama, user
from rig.processes import ROOT, python
from safetensors import SafetensorError
from transformers import GPT2Config, TrainingArguments

from hf_hybrid import HybridArguments, HybridConfig, HybridTrainer
from hf_hybrid.cli import launch, progress
from hf_hybrid.cli.data import Reader
from hf_hybrid.cli.loading import adapters_config, add_adapters, check_sizes, load_model, load_tokenizer, read_config
from hf_hybrid.cli.main import build_parser, main
from hf_hybrid.cli.options import (
    TRAIN,
    AdapterOptions,
    CommandLine,
    LaunchOptions,
    OptionError,
    Options,
    TextDataOptions,
    TextModelOptions,
    help_all,
    help_text,
)
from hf_hybrid.cli.yaml_file import read_options
from hf_hybrid.machine import use_one_gpu
from hf_hybrid.run.monitor import TrainingDivergedError
from hf_hybrid.saving.manifest import is_committed

CONFIGS = ROOT / "examples" / "configs"
TEXTS = [topics.topics[name] for name in sorted(topics.topics)][:12]
WITHOUT_COMPILER = {"TORCHDYNAMO_DISABLE": "1"}
"""For processes that compile nothing: bitsandbytes would load torch's compiler when it is imported."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A config, a tokenizer, texts, conversations and a YAML file that joins them."""
    folder = tmp_path_factory.mktemp("cli")
    template = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}{{ eos_token }}{% endfor %}"
    byte_tokenizer(eos_token=END, chat_template=template).save_pretrained(folder / "model")
    llama_config(max_position_embeddings=64).save_pretrained(folder / "model")
    (folder / "text.txt").write_text("\n\n".join(TEXTS), encoding="utf-8")
    chats = [{"messages": [user("Say:"), assistant(text)]} for text in TEXTS]
    (folder / "chat.jsonl").write_text("\n".join(map(json.dumps, chats)), encoding="utf-8")
    run = {
        "model": str(folder / "model"), "dataset": str(folder / "text.txt"), "sequence_length": 32, "max_steps": 30,
        "learning_rate": "2e-3", "per_device_train_batch_size": 2, "logging_steps": 1, "save_steps": 3,
        "leap_gain": 2, "report_to": "none", "disable_tqdm": True, "dataloader_pin_memory": False,
        "lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr_rate": 0.1},
    }  # fmt: skip
    (folder / "run.yaml").write_text(yaml.safe_dump(run), encoding="utf-8")
    return folder


# Options.


def parse_options(arguments):
    return CommandLine(arguments).options()


def test_defaults_yield_to_yaml_and_yaml_to_the_command_line(folder):
    words = ["--config", str(folder / "run.yaml"), "--cpu", "--max_steps", "6", "--output_dir", str(folder / "x")]
    options = parse_options(words)
    config = options.config
    assert (config.learning_rate, config.leap_gain, options.data.sequence_length) == (2e-3, 2.0, 32)  # YAML
    assert config.max_steps == 6  # command line
    assert (config.weight_decay, config.planner) == (0.0, "schedule")  # defaults
    assert config.lr_scheduler_kwargs == {"min_lr_rate": 0.1}
    assert config.use_cpu and options.launch.cpu
    assert config.disable_tqdm is True and config.dataloader_pin_memory is False


def test_the_time_left_follows_from_the_steps_after_the_first(monkeypatch, capsys):
    trainer = SimpleNamespace(remove_callback=lambda kind: None)
    args, now = SimpleNamespace(disable_tqdm=True, device=torch.device("cpu"), should_save=True), [0.0]
    state = SimpleNamespace(max_steps=13, global_step=0, is_world_process_zero=True)
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    callback = progress.Progress(trainer, threading.Event(), defaulted=frozenset(), notes={})
    control = SimpleNamespace()
    callback.on_train_begin(args, state, control)
    for took in (10, 5, 7, 6):
        now[0] += took
        state.global_step += 1
        callback.on_step_end(args, state, control)
        callback.on_log(args, state, control, {"loss": 1.0})
    said = capsys.readouterr().out.splitlines()
    assert "left" not in said[0]
    assert said.pop(2).split() == "time 01:18 for 13 steps, 6 s each (by its second and third)".split()
    assert [line.rpartition("  ")[2] for line in said[1:]] == ["00:55 left", "01:00 left", "00:54 left"]


@pytest.mark.parametrize("peft", ["none", "lora"])
@pytest.mark.long
def test_a_plan_needs_nothing_but_a_data_set_to_train(peft, folder, tmp_path):
    """As docs/cli.md says: `plan --output p.yaml`, then `train --config p.yaml --dataset ...`."""
    model, target, out = shutil.copytree(folder / "model", tmp_path / "model"), tmp_path / "p.yaml", tmp_path / "out"
    save_llama(model, load_tokenizer(TextModelOptions(model=str(model))), max_position_embeddings=64)
    asked = ["--sequence_length", "32", "--batch_size", "2", "--vram", "2GiB", "--ram", "4GiB", "--dtype", "float32"]
    asked += ["--for", "train", "--peft", peft, "--lora_r", "4", "--lora_target_modules", "q_proj", "v_proj"]
    assert main(["plan", str(model), *asked, "--output", str(target)]) == 0
    here = ["--dataset", str(folder / "text.txt"), "--max_steps", "2", "--output_dir", str(out), "--cpu"]
    more = ["--report_to", "none", "--disable_tqdm", "true"]
    assert main(["train", "--config", str(target), *here, *more]) == 0
    adapter = out / "adapter_config.json"
    assert adapter.is_file() == (peft == "lora")
    if peft == "lora":
        written = json.loads(adapter.read_text())
        assert written["r"] == 4 and sorted(written["target_modules"]) == ["q_proj", "v_proj"]


def test_the_yaml_file_is_read_once(folder, tmp_path, monkeypatch):
    reads, load = [], yaml.load
    monkeypatch.setattr(yaml, "load", lambda *args: reads.append(1) or load(*args))
    line = CommandLine(["--config", str(folder / "run.yaml"), "--cpu", "--output_dir", str(tmp_path)])
    line.set_environment()
    line.check_required()
    assert line.options().config.max_steps == line.values.max_steps == 30 and len(reads) == 1


def test_values_of_yaml_are_read_as_on_the_command_line(folder, tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text(
        "use-cpu: true\nlora_target_modules: [q_proj, v_proj]\nlabel_names: [labels]\nleap_gain: null\n"
        'optim_args: "a=1,b=2"\nenable_predict: false\nresume_from_checkpoint: true\nreport_to: [none]\n'
    )
    options = parse_options(["--config", str(file)])
    assert options.adapters.lora_target_modules == ["q_proj", "v_proj"] and options.config.label_names == ["labels"]
    assert options.config.leap_gain is None and options.config.enable_predict is False
    assert options.config.resume_from_checkpoint == "True" and options.config.optim_args == "a=1,b=2"


def test_a_bare_on_or_off_of_yaml_is_the_word(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("memory: off\nauto_lr: on\nchunked_loss: no\nsave_strategy: no\nleap_gain: 1e-1\nuse_cpu: on\n")
    config = parse_options(["--config", str(file), "--output_dir", str(tmp_path)]).config
    assert (config.memory, config.auto_lr, config.chunked_loss) == ("off", "on", "off")
    assert config.save_strategy == "no" and config.leap_gain == 0.1 and config.use_cpu is True
    file.write_text("memory: on")
    with pytest.raises(OptionError, match=re.escape("argument --memory: invalid choice: 'True'")):
        parse_options(["--config", str(file)])


def test_dashes_and_underscores_are_alike(tmp_path):
    options = parse_options(["--use-cpu", "--full-phase-steps", "7", "--leap-gain=2", "--output-dir", str(tmp_path)])
    assert (options.config.full_phase_steps, options.config.leap_gain) == (7, 2.0)
    words = ["plan", "m", "--sequence-length", "8", "--batch_size", "2", "--lora-r", "4"]
    plan = build_parser("plan").parse_args(words)
    assert (plan.sequence_length, plan.batch_size, plan.lora_r) == (8, 2, 4)


# Environment variables.


@pytest.fixture
def environment():
    """As it was before, afterwards."""
    before = dict(os.environ)
    yield os.environ
    os.environ.clear()
    os.environ.update(before)


def test_env_of_the_yaml_file_is_set_over_what_is_there(tmp_path, environment):
    file = tmp_path / "run.yaml"
    file.write_text('max_steps: 3\nenv: {OVER: new, NUMBER: 4, QUOTED: "012", WORD: on, EMPTY: ""}\n')
    environment["OVER"] = "old"
    assert CommandLine([f"--config={file}"]).values.max_steps == 3  # `env` is no option, and reading alone sets nothing
    assert environment["OVER"] == "old"
    CommandLine([f"--config={file}", "--max_steps", "4"]).set_environment()
    expected = {"OVER": "new", "NUMBER": "4", "QUOTED": "012", "WORD": "True", "EMPTY": ""}
    assert {name: environment[name] for name in expected} == expected
    before = dict(environment)
    for text in ("max_steps: 3", "env:", ""):
        file.write_text(text)
        CommandLine(["--config", str(file)]).set_environment()
    CommandLine(["--max_steps", "4"]).set_environment()
    assert dict(environment) == before


def test_the_env_of_the_docs_is_taken(tmp_path, environment):
    block = re.search(r"^```yml\n(.*?)^```$", (ROOT / "docs" / "cli.md").read_text(encoding="utf-8"), re.M | re.S)[1]
    (tmp_path / "run.yaml").write_text(block)
    CommandLine(["--config", str(tmp_path / "run.yaml")]).set_environment()
    assert (environment["CUDA_VISIBLE_DEVICES"], environment["HF_HOME"]) == ("0,1", "/data/hf")
    assert CommandLine(["--config", str(tmp_path / "run.yaml")]).values.memory == "off"


@pytest.mark.parametrize(
    "env, message",
    [
        ("[A, B]", "`env` in `{file}` must hold lines of the form `NAME: value`, got `['A', 'B']`"),
        ("{A: [1]}", "`A` under `env` in `{file}` must be a text or a number, got `[1]`"),
        ("{A: }", "`A` under `env` in `{file}` must be a text or a number, got `None`"),
        ("{A: 2026-01-31}", "`A` under `env` in `{file}` must be a text or a number, got `2026-01-31`. Put text that"),
        ("{A=B: x}", "`A=B` under `env` in `{file}` cannot be the name of an environment variable"),
        ("{1: x}", "`1` under `env` in `{file}` cannot be the name of an environment variable"),
    ],
)
def test_an_env_that_cannot_be_set_is_refused_and_sets_nothing(tmp_path, environment, refused, env, message):
    file = tmp_path / "run.yaml"
    file.write_text(f"env: {env}\n")
    before = dict(environment)
    assert message.format(file=file) in refused("train", "--config", file)
    assert dict(environment) == before


@pytest.mark.processes
@pytest.mark.parametrize(
    "start",
    [
        "from hf_hybrid.cli.main import main; main(['train', *arguments])",
        # By a launcher of the user's.
        "import runpy; sys.argv[1:] = ['train', *arguments]; runpy.run_module('hf_hybrid', run_name='__main__')",
    ],
)
def test_env_holds_before_torch_is_imported(tmp_path, start):
    (tmp_path / "run.yaml").write_text("env: {SHOWN: yes it is}\nmodel: some/model\ndataset: some/texts\n")
    code = (
        "import builtins, os\nimported, arguments = builtins.__import__, ['--config', 'run.yaml']\n"
        "def spy(name, *args, **kwargs):\n"
        "    if name.partition('.')[0] in ('torch', 'transformers', 'huggingface_hub'):\n"
        "        print(os.environ['SHOWN'], flush=True)\n        os._exit(0)\n"
        "    return imported(name, *args, **kwargs)\n"
        f"builtins.__import__ = spy\n{start}\n"
    )
    assert python(code, cwd=tmp_path, SHOWN="no").splitlines()[-1] == "yes it is"


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--learning_rte", "1"], "`--learning_rte` is no option. Did you mean `--learning_rate`?"),
        (["--leap-gian=1"], "`--leap-gian` is no option. Did you mean `--leap-gain`?"),
        (["--qqqqqqq", "1"], "`--qqqqqqq` is no option. `hf-hybrid train --help all` lists all."),
        (["--max_steps", "many"], "argument --max_steps/--max-steps: invalid int value: 'many'"),
        (["--direction", "up"], "argument --direction: invalid choice: 'up'"),
        (["--max_steps", "3", "4"], "`4` belongs to no option"),
        (["--confg", "x"], "`--confg` is no option. Did you mean `--config`?"),
        (["--tail_average", "1"], "`--tail_average` is no option. `hf-hybrid train --help all` lists all."),
        (["--max_step", "3"], "`--max_step` is no option. Did you mean `--max_steps`?"),
        (["--config", "nowhere.yaml"], "`--config nowhere.yaml` cannot be read: No such file or directory"),
        (["--sequence_length", "1"], "`sequence_length` must be at least 2, got 1"),
        (["--eval_share", "1"], "`eval_share` must be at least 0 and less than 1, got 1.0"),
        (["--lora_r", "0"], "`lora_r` must be at least 1, got 0"),
        (["--text_column", "a"], "`--text_column` is no option. Write `--columns text=NAME` in its place"),
        (["--lora_dropout", "2"], "`lora_dropout` must be at least 0 and less than 1, got 2.0"),
        (["--num_processes", "0"], "`num_processes` must be at least 1, got 0"),
    ],
)
def test_wrong_options_are_named_with_the_nearest_right_one(arguments, message):
    with pytest.raises(OptionError, match=re.escape(message)):
        parse_options(["--use_cpu", *arguments])


def test_processes_on_gpus_that_are_not_there_are_refused(folder, monkeypatch, refused):
    monkeypatch.chdir(folder)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    said = refused("train", "--config", "run.yaml", "--num_processes", "2")
    assert "`--num_processes 2` needs GPUs, and this machine has none. Add `--cpu`." in said


@pytest.mark.parametrize("words", [["plan", "m"], ["chat", "m"], ["report", "m"], ["export", "m", "--format", "int8"]])
def test_an_unknown_option_of_the_other_commands_is_one_sentence(refused, words):
    message = f"hf-hybrid {words[0]}: error: `--foo` is no option. `hf-hybrid {words[0]} --help` lists all.\n"
    assert refused(*words, "--foo", "3") == message


@pytest.mark.parametrize(
    "text, message",
    [
        ("leraning_rate: 1", "`leraning_rate` in `{file}` is no option. Did you mean `learning_rate`?"),
        ("- a\n- b", "must hold lines of the form `learning_rate: 0.001`"),
        ("a: [", "is not valid YAML: expected the node content, but found '<stream end>' in line 1."),
        ("env:\n  WANDB_API_KEY: abc: def", "is not valid YAML: mapping values are not allowed here in line 2."),
        ("seed: 1\nmodel: m\nseed: 2", "`--config {file}` has `seed` in line 1 and `seed` in line 3, and only one of"),
        ("max-steps: 1\nmax_steps: 2", "has `max-steps` in line 1 and `max_steps` in line 2, and only one of them"),
        ("env: {A: 1,\n  A: 2}", "has `A` in line 1 and `A` in line 2, and only one of them"),
        ("max_steps: few", "argument --max_steps/--max-steps: invalid int value: 'few'"),
        ("messages_column: a", "is no option. Write `--columns messages=NAME` in its place; in YAML"),
        ("config: other.yaml", "`config` in `{file}` is no option"),
        ("max_steps:", "`max_steps` in `{file}` is empty. Give a value, or leave the line out for the default"),
        ("sequence_length: null", "`sequence_length` in `{file}` is empty"),
        ("peft: ~", "`peft` in `{file}` is empty"),
        ("eval_share: [0.1, 0.2]", "`eval_share` in `{file}` takes a single value, got `[0.1, 0.2]`"),
        ("num_processes: [2]", "`num_processes` in `{file}` takes a single value, got `[2]`"),
        ("resume_from_checkpoint: [a]", "`resume_from_checkpoint` in `{file}` takes a single value, got `['a']`"),
        ("learning_rate: {a: 1}", "`learning_rate` in `{file}` takes a single value, got `{{'a': 1}}`"),
        ("seed: 2026-02-31", "`--config {file}` is not valid YAML: day is out of range for month"),
        (2000 * "[", "`--config {file}` is nested too deeply"),
        (b"model: caf\xe9", "`--config {file}` is not text in UTF-8"),
    ],
    ids=lambda value: repr(value)[:40],
)
def test_wrong_yaml_is_refused(tmp_path, text, message):
    file = tmp_path / "run.yaml"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(OptionError, match=re.escape(message.format(file=file))):
        parse_options(["--config", str(file)])


def test_a_merged_key_is_no_twin_and_an_alias_is_seen_once(tmp_path):
    text = "env: &a {A: 1, A-: 2, A_: 3}\n<<: &b {seed: 1, max_steps: 3}\nseed: 2\n"
    assert read_options(text)["seed"] == 2 and read_options("a: &x {b: *x}\n")
    assert read_options("") is None and read_options(text)["max_steps"] == 3


@pytest.mark.parametrize("text", [
    "env: {WANDB_API_KEY: [s3cret]}", "env: [WANDB_API_KEY=s3cret]", "hub_token: [s3cret]", "env:\n  KEY: s3cret: def",
])  # fmt: skip
def test_no_message_shows_a_secret(tmp_path, environment, refused, text):
    (tmp_path / "run.yaml").write_text(f"{text}\n")
    assert "s3cret" not in refused("train", "--config", tmp_path / "run.yaml", "--model", "m", "--dataset", "d")


def test_options_that_stand_in_no_file_are_given_by_environment(folder, tmp_path, environment, refused):
    (tmp_path / "run.yaml").write_text("max_steps: 3\n")
    environment["HF_HYBRID_PRIVATE_OPTIONS"] = '{"hub_token": "s3cret"}'
    values = CommandLine(["--config", str(tmp_path / "run.yaml")]).values
    assert (values.hub_token, values.max_steps) == ("s3cret", 3)
    environment["HF_HYBRID_PRIVATE_OPTIONS"] = "[1]"
    said = refused("train", "--config", tmp_path / "run.yaml")
    assert "`HF_HYBRID_PRIVATE_OPTIONS` must hold options as JSON" in said


def test_help_is_ours_in_groups_and_complete(capsys):
    text = help_all()
    for name in ("Model:", "Data:", "Adapters:", "Processes:", "Phases:", "Leaps:", "Memory:", "Divergence:"):
        assert f"\n{name}\n" in text
    for owner in (*TRAIN.groups, HybridArguments, TrainingArguments):
        for option in dataclasses.fields(owner):
            assert not option.init or re.search(rf"--{option.name}\b", text), option.name
    assert "--adam_beta1" not in help_text() and "--help all" in help_text()
    for words in (["--help-all"], ["--help", "all"]):
        assert main(["train", *words]) == 0 and capsys.readouterr().out == text


@pytest.mark.processes
def test_help_needs_neither_torch_nor_transformers():
    """Not timed here: what takes the time is importing them."""
    code = (
        "from hf_hybrid.cli.main import main\n"
        "for arguments in (['--help'], ['train', '--help'], ['train'], ['env', '--help'], ['plan', '--help']):\n"
        "    try:\n        main(arguments)\n    except SystemExit as ended:\n        assert not ended.code\n"
    )
    shown = python(code, without={"torch", "transformers", "accelerate", "datasets", "yaml", "numpy"})
    assert "usage: hf-hybrid train --model NAME" in shown and "bug report" in shown and "--vram" in shown


def test_what_is_missing_is_asked_for_before_anything_starts(folder, refused):
    assert "`--model` is missing" in refused("train", "--use_cpu")
    assert "`--dataset` is missing" in refused("train", "--model", folder / "model", "--cpu", "--num_processes", "2")


# A run.


def test_train_resumes_and_leaves_everything_behind(folder, monkeypatch):
    monkeypatch.chdir(folder)
    out = folder / "out"
    assert main(["train", "--config", "run.yaml", "--max_steps", "6", "--use_cpu", "--output_dir", "out"]) == 0
    for name in ("model.safetensors", "tokenizer.json", "README.md", "hybrid_config.json", "all_results.json"):
        assert (out / name).is_file(), name
    state = json.loads((out / "trainer_state.json").read_text())
    assert state["global_step"] == state["max_steps"] == 6
    assert json.loads((out / "hybrid_summary.json").read_text())["steps"] == 6
    values = json.loads((out / "hybrid_config.json").read_text())
    assert (values["learning_rate"], values["max_steps"], values["leap_gain"]) == (2e-3, 6, 2.0)
    assert json.loads((out / "eval_results.json").read_text())["eval_loss"] < 6

    # What a run wrote is a configuration too, JSON being YAML.
    arguments = ["--config", "out/hybrid_config.json", "--model", "model", "--dataset", "text.txt"]
    arguments += ["--sequence_length", "32", "--max_steps", "8", "--resume_from_checkpoint", "true"]
    assert main(["train", *arguments]) == 0
    state = json.loads((out / "trainer_state.json").read_text())
    assert state["global_step"] == 8
    assert [entry["step"] for entry in state["log_history"] if "hybrid/phase" in entry] == list(range(1, 9))


@pytest.mark.parametrize("special", [["bos_token", "eos_token"], ["unk_token"], []], ids=str)
def test_a_tokenizer_needs_no_pad_token(folder, tmp_path, monkeypatch, special):
    """The first example of docs/cli.md, with a folder like GPT-2's."""
    monkeypatch.chdir(tmp_path)
    byte_tokenizer(**dict.fromkeys(special, "<|end|>")).save_pretrained("gpt2")
    GPT2Config(vocab_size=257, n_embd=32, n_layer=1, n_head=2, n_positions=64).save_pretrained("gpt2")
    arguments = ["--model", "gpt2", "--dataset", str(folder / "text.txt"), "--max_steps", "3"]
    arguments += ["--output_dir", "out/gpt2", "--sequence_length", "64", "--use_cpu", "--eval_share", "0"]
    assert main(["train", *arguments]) == 0
    assert json.loads(Path("out/gpt2/trainer_state.json").read_text())["global_step"] == 3


@pytest.mark.slow
@pytest.mark.processes
def test_the_command_in_the_card_is_the_one_that_ran(folder, tmp_path):
    installed = tmp_path / "bin" / "hf-hybrid"
    installed.parent.mkdir()
    installed.write_text(f"#!{sys.executable}\nimport sys\nfrom hf_hybrid.cli.main import main\nsys.exit(main())\n")
    installed.chmod(0o755)
    path = os.pathsep.join([str(installed.parent), os.environ["PATH"]])
    environment = {**os.environ, **WITHOUT_COMPILER, "PATH": path, "PYTHONPATH": str(ROOT)}
    shutil.copy(folder / "run.yaml", tmp_path)
    typed = "hf-hybrid train --config run.yaml --max_steps 2 --save_strategy no --use_cpu True --output_dir out"
    ended = subprocess.run(typed, shell=True, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    card = (tmp_path / "out" / "README.md").read_text().replace(" \\\n  ", " ")
    assert f"### Command\n\n```bash\n{typed}\n```" in card


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--leap_gain", "-1"], "`leap_gain` must be at least 0, got -1.0"),
        (["--resume_from_checkpoint", "gone"], "Can't find a valid checkpoint at `gone`: there is no such folder"),
        (["--resume_from_checkpoint", "true"], "No valid checkpoint found in output directory"),
        (["--output_dir", "text.txt/out"], "`--output_dir text.txt/out` cannot be written to: Not a directory"),
        (["--lr_scheduler_kwargs", "{}"], "One of min_lr or min_lr_rate should be set"),
        (["--lr_scheduler_kwargs", '{"a": 1}'], "get_cosine_with_min_lr_schedule_with_warmup() got an unexpected keyw"),
        (["--sequence_length", "65"], "`sequence_length=65` is over the 64 positions of the model"),
        (["--model", "broken"], "`--model broken` cannot be loaded: Field 'hidden_size' expected int"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_what_would_fail_later_is_refused_at_once(folder, monkeypatch, refused, arguments, message):
    monkeypatch.chdir(folder)
    config = json.loads(Path("model", "config.json").read_text())
    Path("broken").mkdir(exist_ok=True)
    Path("broken", "config.json").write_text(json.dumps({**config, "hidden_size": "wide"}))
    given = ["--config", "run.yaml", "--use_cpu", "--tokenizer", "model", "--output_dir", "new", *arguments]
    assert f"hf-hybrid train: error: {message}" in refused("train", *given)


def test_a_training_that_diverges_is_a_message_and_exit_status_1(folder, monkeypatch, capsys):
    def diverge(trainer, **kwargs):
        raise TrainingDivergedError("Step 3: the loss is not finite.")

    monkeypatch.chdir(folder)
    monkeypatch.setattr(HybridTrainer, "train", diverge)
    assert main(["train", "--config", "run.yaml", "--use_cpu", "--output_dir", "new"]) == 1
    assert "hf-hybrid train: error: Step 3: the loss is not finite.\n" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["train", "save_model"])
def test_a_full_disk_is_a_message_and_exit_status_1(folder, tmp_path, monkeypatch, capsys, name):
    def full(trainer, **kwargs):
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    monkeypatch.chdir(folder)
    monkeypatch.setattr(HybridTrainer, name, full)
    words = ["--use_cpu", "--output_dir", str(tmp_path), "--max_steps", "1", "--save_strategy", "no"]
    assert main(["train", "--config", "run.yaml", *words]) == 1
    said = capsys.readouterr().err
    assert "hf-hybrid train: error: " in said and "os error 28" in said and "Traceback" not in said
    assert ("Free space, then end the run with" in said) == (name == "save_model")


@pytest.mark.processes
@pytest.mark.slow
def test_two_processes_are_launched(folder, monkeypatch):
    monkeypatch.chdir(folder)
    for name, value in (("HF_HUB_OFFLINE", "1"), ("OMP_NUM_THREADS", "1"), ("PYTHONPATH", str(ROOT))):
        monkeypatch.setenv(name, value)
    arguments = ["--config", "run.yaml", "--max_steps", "4", "--cpu", "--num_processes", "2", "--output_dir", "two"]
    written = ["--learning_rate", "5e-5", "--logging_steps", "1"]  # which is the default, and is kept
    assert main(["train", *arguments, "--eval_share", "0", *written]) == 0
    state = json.loads((folder / "two" / "trainer_state.json").read_text())
    assert 0 < max(entry.get("learning_rate", 0) for entry in state["log_history"]) <= 5e-5
    assert (folder / "two" / "checkpoint-3" / "rng_state_1.pth").is_file()
    assert not (folder / "two" / "eval_results.json").exists()
    assert "ACCELERATE_USE_CPU" not in os.environ


@pytest.mark.processes
@pytest.mark.parametrize(
    "ending, status",
    [
        ("sys.exit(int(os.environ['STATUS']))", 3),  # of `env` in the YAML file
        ("os.kill(os.getpid(), signal.SIGKILL)", 137),
        ("os.kill(os.getppid(), signal.SIGINT); time.sleep(60)", 130),  # Ctrl-C
    ],
)
def test_the_exit_status_says_how_the_processes_ended(folder, environment, monkeypatch, ending, status):
    file = folder / f"ends_{status}.py"
    file.write_text(f"import os, signal, sys, time\nif os.environ['RANK'] == '1':\n    {ending}\n")
    run = folder / f"ends_{status}.yaml"
    run.write_text((folder / "run.yaml").read_text() + "env: {STATUS: 3}\n")
    monkeypatch.setenv("PYTHONPATH", str(folder))
    monkeypatch.setattr(launch, "MODULE", file.stem)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        assert main(["train", "--config", str(run), "--cpu", "--num_processes", "2"]) == status
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


TOLD = """
import os, signal, sys, time
from pathlib import Path

number, seconds, rank = int(os.environ["NUMBER"]), float(os.environ["SECONDS"]), os.environ["RANK"]

def told(number, frame):
    time.sleep(seconds)  # saves
    Path(f"told-{rank}").touch()
    sys.exit(143)

signal.signal(number, told)
Path(f"ready-{rank}").touch()
while rank == "0" and not Path("ready-1").exists():
    time.sleep(0.01)
if rank == "0":
    os.kill(os.getppid(), number)
time.sleep(120)
"""


@pytest.mark.processes
@pytest.mark.parametrize(
    "number, seconds", [(signal.SIGUSR1, 0.2), pytest.param(signal.SIGTERM, 35, marks=pytest.mark.slow)]
)
def test_a_signal_to_the_launcher_reaches_its_processes_and_it_waits_for_them(folder, tmp_path, number, seconds):
    """torch's launcher kills its processes 30 seconds after SIGTERM, and SIGUSR1 kills the launcher."""
    (tmp_path / "told.py").write_text(TOLD)
    command = f"""
from hf_hybrid.cli import launch, main
launch.MODULE = "told"
main.sys.exit(main.main(["train", "--config", {str(folder / "run.yaml")!r}, "--cpu", "--num_processes", "2"]))
"""
    values = {"PYTHONPATH": f"{ROOT}{os.pathsep}{tmp_path}", "NUMBER": str(int(number)), "SECONDS": str(seconds)}
    values |= WITHOUT_COMPILER
    run = {"cwd": tmp_path, "env": {**os.environ, **values}, "capture_output": True, "text": True}
    ended = subprocess.run([sys.executable, "-c", command], **run)
    assert ended.returncode == 143, ended.stderr[-3000:]
    assert (tmp_path / "told-0").exists() or (tmp_path / "told-1").exists()  # torch ends the other, which is as far


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_job_whose_launcher_alone_is_told_to_end_saves_and_goes_on(folder, tmp_path, number):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "hf_hybrid", "train", "--config", str(folder / "run.yaml"), "--max_steps", "2000"]
    command += ["--cpu", "--num_processes", "2", "--output_dir", str(tmp_path / "out"), "--save_steps", "5"]
    command += ["--enable_jit_checkpoint", "true", "--resume_from_checkpoint", "auto", "--eval_share", "0"]
    launched = subprocess.Popen(command, cwd=folder, env=environment, stderr=subprocess.PIPE, text=True)
    while not list(tmp_path.glob("out/checkpoint-*")) and launched.poll() is None:
        time.sleep(0.1)
    launched.send_signal(number)
    _, said = launched.communicate()
    assert launched.returncode == 143, said[-3000:]
    steps = [int(path.name.split("-")[1]) for path in tmp_path.glob("out/checkpoint-*")]
    again = [*command, "--max_steps", str(max(steps) + 2)]
    assert subprocess.run(again, cwd=folder, env=environment, capture_output=True).returncode == 0
    assert is_committed(tmp_path / "out" / f"checkpoint-{max(steps) + 2}")


def test_a_packed_base_is_streamed_under_adapters(folder, tmp_path, monkeypatch):
    """`--peft qlora --memory stream`: packed in host memory, whatever GPU there is."""
    monkeypatch.chdir(folder)
    load("model").save_pretrained(tmp_path / "weights")
    arguments = ["--model", str(tmp_path / "weights"), "--tokenizer", "model", "--use_cpu", "--max_steps", "3"]
    arguments += ["--peft", "qlora", "--lora_r", "2", "--memory", "stream", "--output_dir", str(tmp_path / "out")]
    assert main(["train", "--config", "run.yaml", *arguments]) == 0
    assert json.loads((tmp_path / "out" / "adapter_config.json").read_text())["r"] == 2
    memory = json.loads((tmp_path / "out" / "hybrid_summary.json").read_text())["memory"]
    assert memory["plan"]["mode"] == "streamed" and memory["statistics"]["loads"] > 0


# Data and models.


def blocks(folder, **options):
    tokenizer = load_tokenizer(TextModelOptions(model=str(folder / "model")))
    for option in ("dataset", "eval_dataset"):
        options |= {option: [options[option]]} if option in options else {}
    reader = Reader("train", TextDataOptions(**{"sequence_length": 64, **options}), seed=0)
    return tokenizer, *reader.train_and_eval(tokenizer)


def test_texts_are_joined_and_cut(folder):
    tokenizer, train_set, eval_set = blocks(folder, dataset=str(folder / "text.txt"), eval_share=0.25)
    assert {len(row["input_ids"]) for row in train_set} == {64}
    assert train_set[0]["labels"] == train_set[0]["input_ids"]
    assert len(eval_set) == round(0.25 * (len(train_set) + len(eval_set)))
    joined = tokenizer.decode([token for row in blocks(folder, dataset=str(folder / "text.txt"), eval_share=0)[1]
                               for token in row["input_ids"]])  # fmt: skip
    paragraphs = [p for p in (folder / "text.txt").read_text().split("\n\n") if p.strip()]
    assert joined.startswith(paragraphs[0].strip() + "<|end|>" + paragraphs[1].strip()[:20])


def test_folders_that_datasets_saved_are_data(folder, tmp_path):
    from datasets import DatasetDict, load_dataset

    texts = load_dataset("text", data_files=str(folder / "text.txt"), split="train")
    texts.save_to_disk(tmp_path / "one")
    DatasetDict({"train": texts, "rest": texts.select(range(9))}).save_to_disk(tmp_path / "several")
    expected = blocks(folder, dataset=str(tmp_path / "one"))[1]
    assert blocks(folder, dataset=str(tmp_path / "several"))[1][:] == expected[:]
    assert len(blocks(folder, dataset=str(tmp_path / "several"), dataset_split="rest")[1]) < len(expected)


def test_conversations_go_through_the_chat_template(folder):
    tokenizer, train_set, _ = blocks(folder, dataset=str(folder / "chat.jsonl"), eval_share=0)
    text = tokenizer.decode(train_set[0]["input_ids"])
    assert text.startswith("user: Say:<|end|>assistant: ")
    _, _, eval_set = blocks(folder, dataset=str(folder / "text.txt"), eval_dataset=str(folder / "chat.jsonl"))
    assert tokenizer.decode(eval_set[0]["input_ids"]) == text


@pytest.mark.parametrize(
    "options, message",
    [
        ({"dataset": "nowhere.txt"}, "`--dataset nowhere.txt`: there is no such file"),
        ({"dataset": "nobody/nothing"}, "`--dataset nobody/nothing` cannot be loaded"),
        ({"dataset": "chat.jsonl", "columns": ["text=mesages"]}, "has `messages`. Did you mean `messages`?"),
        ({"dataset": "text.txt", "sequence_length": 10**7}, "fewer than 10000000 tokens"),
        ({"dataset": "broken.jsonl"}, "`--dataset broken.jsonl` cannot be read as json: "),
        ({"dataset": "text.txt", "eval_dataset": "empty.json"}, "`--eval_dataset empty.json` holds no rows"),
        ({"dataset": "numbers.jsonl"}, "`--dataset numbers.jsonl`, row 2: `text` is `None`, not a text. Correct or"),
        ({"dataset": "chat.jsonl", "columns": ["tools=messages"]}, "it has `tools`, and `hf-hybrid train` takes"),
        ({"dataset": "roles.jsonl"}, "`--dataset roles.jsonl`, row 1: `messages` is `5`, not a list of messages"),
    ],
    ids=repr,
)
def test_data_that_cannot_be_used_is_refused(folder, monkeypatch, options, message):
    monkeypatch.chdir(folder)
    Path("broken.jsonl").write_bytes(b"\x00\xff{")
    Path("empty.json").write_text("")
    Path("numbers.jsonl").write_text('{"text": "one"}\n{"text": null}\n')
    Path("roles.jsonl").write_text('{"messages": 5}\n')
    with pytest.raises(OptionError, match=re.escape(message)):
        blocks(folder, **options)


def options_of(model, vocabulary=257, peft="none", lora_r=16, **more):
    """Options of `train`, and the config of the model."""
    options = TextModelOptions(model=str(model), **more)
    adapters, args = AdapterOptions(peft=peft, lora_r=lora_r), HybridConfig("out", use_cpu=True)
    checked = Options(TRAIN, options, TextDataOptions(), adapters, LaunchOptions(), args, frozenset(), False)
    config = read_config(options)
    check_sizes(config, options.model, vocabulary, 0)
    return checked, config


def load(*args, **more):
    return load_model(*options_of(*args, **more))


def test_models_are_loaded_as_asked(folder, tmp_path):
    config_alone = folder / "model" / "config.json"
    assert len(load_tokenizer(TextModelOptions(model=str(config_alone)))) == 257
    random = load(config_alone)
    random.to(torch.bfloat16).save_pretrained(tmp_path)
    full = load(tmp_path)
    assert full.dtype == torch.float32 and torch.equal(full.lm_head.weight, random.lm_head.weight.float())
    assert load(tmp_path, dtype="bfloat16").dtype == load(tmp_path, dtype="auto").dtype == torch.bfloat16
    anew = load(tmp_path, from_scratch=True)
    assert not torch.equal(anew.lm_head.weight, full.lm_head.weight)
    options, config = options_of(tmp_path, peft="lora", lora_r=2)
    adapted = add_adapters(load_model(options, config), adapters_config(options.adapters), options.adapters)
    trained = {name for name, p in adapted.named_parameters() if p.requires_grad}
    assert trained and all("lora_" in name for name in trained)
    assert adapted.get_base_model().lm_head.weight.dtype == torch.bfloat16


@pytest.mark.parametrize(
    "options, message",
    [
        ({"model": "nobody/nothing"}, "`--model nobody/nothing` cannot be loaded"),
        ({"vocabulary": 1000}, "The tokenizer has 1000 tokens, and the model `{model}` embeds 257"),
        ({"peft": "lora"}, "`--peft lora` adapts trained weights, and `{model}` has none"),
    ],
)
def test_models_that_cannot_be_used_are_refused(folder, options, message):
    model = str(folder / "model")
    with pytest.raises(OptionError, match=re.escape(message.format(model=model))):
        load(**{"model": model, **options})


def test_an_index_that_leads_out_of_the_model_is_refused(folder, tmp_path):
    shutil.copytree(folder / "model", tmp_path / "model")
    (tmp_path / "model" / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../x.safetensors"}}')
    with pytest.raises(OptionError, match=r"index.json` names `../x.safetensors`, which lies outside of its folder"):
        load(tmp_path / "model")


def test_a_missing_extra_says_how_to_install_it(folder, tmp_path, monkeypatch):
    load(folder / "model").save_pretrained(tmp_path)
    for package, peft, extra in (("peft", "lora", "peft"), ("bitsandbytes", "qlora", "peft,quantization")):
        options, config = options_of(tmp_path, peft=peft)
        with monkeypatch.context() as patched:
            patched.setitem(sys.modules, package, None)
            with pytest.raises(ImportError, match=re.escape(f'pip install "hf-hybrid[{extra}]"')):
                adapters_config(options.adapters)
                load_model(options, config)


# Processes.


def test_twin_keys_of_a_config_of_accelerate_are_refused(tmp_path):
    (tmp_path / "own.yaml").write_text("num_processes: 2\nnum_processes: 3\n")
    with pytest.raises(OptionError, match="`num_processes` in line 1 and `num_processes` in line 2"):
        launch.launch_arguments(CommandLine(["--accelerate_config", str(tmp_path / "own.yaml"), "--use_cpu"]), 1)


def test_accelerate_gets_the_packaged_or_the_given_config(tmp_path):
    def command(*arguments):
        line = CommandLine(arguments)
        return launch.launch_arguments(line, line.processes)

    on_cpu = command("--cpu", "--num_processes", "3")
    assert Path(on_cpu[1]).name == "ddp_cpu.yaml"
    assert on_cpu[2:6] == ["--num_processes", "3", "--main_process_port", "0"]
    assert on_cpu[6:] == ["--module", "hf_hybrid", "train", "--cpu", "--num_processes", "3"]
    assert Path(command("--num_processes", "2", "--accelerate_config", "fsdp2")[1]).name == "fsdp2.yaml"
    own = tmp_path / "own.yaml"
    own.write_text("num_processes: 2\n")
    with pytest.raises(OptionError, match=r"own.yaml` cannot be read: A `distributed_type` must be specified"):
        command("--accelerate_config", str(own))
    own.write_text("num_processes: 2\ndistributed_type: MULTI_GPU\n")
    given = ["--config_file", str(own), "--module", "hf_hybrid", "train", "--accelerate_config", str(own)]
    assert command("--accelerate_config", str(own)) == given
    with pytest.raises(OptionError, match="`--accelerate_config zero9` is neither a file nor one of ddp, ddp_cpu, fs"):
        command("--accelerate_config", "zero9")
    with pytest.raises(OptionError, match="`--accelerate_config zero3` needs GPUs"):
        command("--accelerate_config", "zero3", "--cpu")


@pytest.mark.parametrize("arguments, gpus, processes", [
    ([], 4, 4), ([], 0, 1), (["--num_processes", "2"], 4, 2), (["--cpu"], 4, 1), (["--memory", "auto"], 4, 1),
])  # fmt: skip
def test_one_process_for_each_gpu(monkeypatch, arguments, gpus, processes):
    monkeypatch.setattr("torch.accelerator.device_count", lambda: gpus)
    assert CommandLine(arguments).processes == processes


def test_one_process_sees_one_gpu(monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 4)
    for before, after in (({"CUDA_VISIBLE_DEVICES": "2,3"}, "2"), ({}, "0")):
        monkeypatch.setattr(os, "environ", before)
        use_one_gpu()
        assert os.environ["CUDA_VISIBLE_DEVICES"] == after


def test_shipped_accelerate_configs_are_the_packaged_ones_and_load():
    from accelerate.commands.config.config_args import load_config_from_file

    shipped = sorted((ROOT / "examples" / "accelerate_configs").glob("*.yaml"))
    assert [file.name for file in shipped] == sorted(file.name for file in launch.CONFIGS.glob("*.yaml"))
    for file in shipped:
        assert file.read_bytes() == (launch.CONFIGS / file.name).read_bytes(), file.name
        assert load_config_from_file(str(file)).mixed_precision == "no"


# Configurations by size.


@pytest.mark.parametrize("size", ["124m", "1b", "7b", "7b-16gb", "13b", "50b"])
def test_configurations_by_size_are_valid(size, tmp_path):
    file = str(CONFIGS / f"{size}.yaml")
    arguments = ["--config", file, "--cpu", "--bf16", "false", "--output_dir", str(tmp_path)]
    options = parse_options(arguments)
    assert isinstance(options.config, HybridConfig)
    assert options.data.dataset and options.data.sequence_length >= 1024
    assert (options.config.memory == "off") == (size == "124m")
    assert options.config.optim == ("muon" if size == "124m" else TrainingArguments.optim)
    assert options.adapters.peft == ("lora" if size == "50b" else "none")


# Help.


@pytest.mark.processes
@pytest.mark.slow
def test_help_is_instant(tmp_path):
    for arguments in (("--help",), ("train", "--help"), ("env", "--help")):
        begun = time.perf_counter()
        subprocess.run([sys.executable, "-m", "hf_hybrid", *arguments], cwd=ROOT, capture_output=True, check=True)
        assert time.perf_counter() - begun < 1.0, arguments
