"""`hf-hybrid plan`: light help, a table, a YAML that trains, and errors that say what to do."""

import functools
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from conftest import ByteText, config_values, mostly_slow, tiny_model
from rig import vision
from rig.live_bytes import LiveBytes
from transformers import Gemma3TextConfig, GptOssConfig, HfArgumentParser, Qwen3MoeConfig

from hf_hybrid import HybridConfig, HybridTrainer
from hf_hybrid.cli.options import CommandLine
from hf_hybrid.compat import checkpointing_option
from hf_hybrid.plan.models import build, read_config
from hf_hybrid.plan.planner import plan_memory
from hf_hybrid.plan.setups import CONTEXT_BYTES, MARGIN
from hf_hybrid.plan.trace import _distance

SHORT = ("--sequence_length", "32")
"""Most tests plan the same steps, which are traced once (tests/rig/traces.py)."""
EXAMPLES = Path(__file__).parents[2] / "examples" / "model_configs"


@pytest.fixture(scope="module")
def config_file(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    tiny_model(num_hidden_layers=6).config.to_json_file(folder / "config.json")
    return folder / "config.json"


@pytest.fixture
def plan(cli):
    """Plan, check how it ended, and return what it wrote to stdout and to stderr."""
    return functools.partial(cli, "plan")


@pytest.mark.processes
def test_python_m_runs_the_same():
    done = subprocess.run([sys.executable, "-m", "hf_hybrid", "--version"], check=True, capture_output=True, text=True)
    assert done.stdout.startswith("hf_hybrid ")


@pytest.mark.slow
def test_models_that_take_images_get_commands_that_cut_none(plan, tmp_path):
    vision.vision_model("qwen2_vl")[0].config.save_pretrained(tmp_path)
    asked = (tmp_path, "--vram", "2GiB", "--ram", "4GiB", "--sequence_length", "64", "--peft", "none")
    shown, _ = plan(*asked, "--output", tmp_path / "plan.yaml")
    assert "\n  hf-hybrid sft " in shown and "--per_device_train_batch_size 8" in " ".join(shown.split())
    assert "max_length" not in shown and "max_length" not in (tmp_path / "plan.yaml").read_text()
    assert "Half of the tokens stand for" in shown
    _, error = plan(*asked, "--for", "train", status=2)
    assert "`--for train` trains models of text" in error


@pytest.mark.long
def test_a_table_and_a_recommendation(config_file, plan, tmp_path):
    shown, _ = plan(config_file.parent, "--vram", "2GiB", "--ram", "4GiB", *SHORT)
    assert "6 layers" in shown and "vocabulary 256, tied to the head" in shown
    assert "device: 2.00 GiB (--vram)" in shown and "host:   4.00 GiB (--ram)" in shown
    rows = [line for line in shown.splitlines() if re.match(r"[ >] {4,8}\d+\.", line)]
    # Full training or adapters is said in each row, and what TRL does anyway is not planned without.
    assert len(rows) == 17 and all(re.search(r"\d  yes +(full|LoRA|QLoRA)\b", row) for row in rows)
    assert "full, bf16 autocast" in rows[0] and "chunked loss" not in shown
    assert [row.split()[4] for row in rows if row.startswith(">")] == ["full,", "LoRA", "QLoRA,"]
    assert max(map(len, shown.splitlines())) <= 80 and shown.count("\n  hf-hybrid sft --model ") == 3
    assert "does not fit" not in shown and "Nothing fits" not in shown
    words, target = ("--for", "train", "--peft", "none"), str(tmp_path / "plan.yaml")
    of_train, _ = plan(config_file.parent, "--vram", "2", "--ram", "4GiB", *SHORT, *words, "--output", target)
    assert "device: 2.00 GiB" in of_train and "full, bf16 autocast, chunked loss, checkpointing" in of_train
    assert "LoRA" not in of_train and of_train.count("\n  hf-hybrid train --model ") == 1
    written = CommandLine(["--config", target, "--cpu", "--output_dir", str(tmp_path)]).options()
    assert written.config.per_device_train_batch_size == 8 and written.config.bf16 is True


BEST = {
    "gpt-oss-20b": (
        {"16": (None, "streamed", None), "24": (None, "streamed", None), "80": ("streamed", "resident", "resident")},
        lambda: GptOssConfig(num_hidden_layers=24, num_local_experts=32),
    ),
    "Gemma-3-27B": (
        {"16": (None, "streamed", None), "24": (None, "streamed", "resident"), "80": (None, "resident", "resident")},
        lambda: Gemma3TextConfig(
            hidden_size=5376, intermediate_size=21504, num_hidden_layers=62, num_attention_heads=32,
            num_key_value_heads=16, head_dim=128, sliding_window=1024, vocab_size=262_208,
        ),
    ),
    "Qwen3-30B-A3B": (
        {"16": (None, None, None), "24": (None, "streamed", None), "80": (None, "resident", "resident")},
        lambda: Qwen3MoeConfig(
            hidden_size=2048, num_hidden_layers=48, num_attention_heads=32, num_key_value_heads=4, head_dim=128,
            moe_intermediate_size=768, num_experts=128, max_position_embeddings=40_960,
        ),
    ),
}  # fmt: skip
"""By model, with 64 GiB of host memory: device memory in GiB, and how the best full, LoRA and QLoRA training fits."""


@pytest.mark.parametrize("name, vram", [(name, vram) for name in BEST for vram in BEST[name][0]])
@pytest.mark.slow
def test_the_best_of_each_kind_that_fits_is_recommended(name, vram, tmp_path, plan):
    by_memory, config = BEST[name]
    config().to_json_file(tmp_path / "config.json")
    words = ("--vram", vram, "--ram", "64", "--sequence_length", "2048", "--batch_size", "2")
    report = json.loads(plan(tmp_path, *words, "--json")[0])
    fitting = {row["kind"] for row in report["plans"] if row["fits"]}
    for (kind, title), way in zip(report["recommended"].items(), by_memory[vram], strict=True):
        assert (title is not None) == (way is not None) == (kind in fitting), kind
        assert way is None or ("streamed" in title) == (way == "streamed"), (kind, title)


@pytest.mark.slow
def test_what_does_not_fit_is_said_beside_the_best_of_each_kind(tmp_path, plan):
    BEST["Qwen3-30B-A3B"][1]().to_json_file(tmp_path / "config.json")
    words = ("--vram", "24", "--ram", "64", "--sequence_length", "2048", "--batch_size", "2")
    best = plan(tmp_path, *words)[0].partition("Best of each kind")[2]
    assert "full: does not fit, short by " in best and "Nothing fits" not in best
    assert re.search(r"\nLoRA, streamed.* GiB\n  hf-hybrid sft .*--peft lora .*--dataset DATA", best, re.S)


@pytest.mark.long
def test_as_few_layers_are_recomputed_as_fit(config_file, plan, tmp_path):
    sizes = {"sequence_length": 32, "batch_size": 8, "chunked_loss": True, "memory": "off"}
    most, least = (
        plan_memory(config_file, **sizes, activation_checkpointing=on).peak_device_bytes for on in (False, True)
    )
    vram = CONTEXT_BYTES + int((1 + MARGIN) * (most + least) / 2)
    target = tmp_path / "plan.yaml"
    words = ("--vram", vram, "--ram", "1KiB", *SHORT, "--peft", "none", "--output", target)
    shown, _ = plan(config_file, *words)
    assert re.search(r">.* yes +full, bf16 autocast, checkpointing auto \([1-5] of 6\)\n", shown)
    assert yaml.safe_load(target.read_text())[checkpointing_option()] == "auto"
    shown, _ = plan(config_file, "--vram", "1KiB", "--ram", "1KiB", *SHORT, "--peft", "none")
    assert "checkpointing auto" not in shown  # where all are recomputed, the next plan says so


@pytest.mark.long
def test_what_is_short_is_said(config_file, plan):
    target = config_file.parent / "none.yaml"
    out, err = plan(config_file, "--vram", "600MiB", "--ram", "1MiB", *SHORT, "--output", target, status=1)
    assert "short by" in out and "(device)" in out and "Nothing fits" in out
    assert "full: does not fit" in out and "hf-hybrid sft --model" not in out
    assert "not written" in err and not target.exists()
    full = (*SHORT, "--peft", "none")
    _, err = plan(config_file, *full, "--output", config_file / "below-a-file.yaml", status=2)
    assert "below-a-file.yaml` cannot be written: Not a directory." in err
    precious = config_file.parent / "precious"
    precious.write_text("of another user")
    target.symlink_to(precious)
    plan(config_file, *full, "--output", target)
    assert precious.read_text() == "of another user" and not target.is_symlink(), "the file takes the place of a link"


def test_limits_default_to_the_machine(config_file, plan):
    shown, _ = plan(config_file, *SHORT)
    assert "no GPU here and no --vram: no limit" in shown and "available on this machine" in shown


def test_json(config_file, plan):
    report = json.loads(plan(config_file, "--vram", "2GiB", "--ram", "4GiB", "--json", "--peft", "lora", *SHORT)[0])
    assert report["recommended"] == {"LoRA": "LoRA"} and report["vram"] == 2 * 2**30
    assert {row["kind"] for row in report["plans"]} == {"LoRA"}, "nothing else was asked for"
    best = next(row for row in report["plans"] if row["title"] == "LoRA")
    assert best["fits"] and best["categories"]["total"]["device"] == best["peak_device_bytes"]


@pytest.mark.long
def test_ternary_weights_train_all_and_hold_more(config_file, plan, tmp_path):
    def least(*words) -> int:
        asked = ("--vram", "2GiB", "--ram", "4GiB", "--output", tmp_path / "plan.yaml", "--json", *SHORT, *words)
        plans = json.loads(plan(config_file, *asked)[0])["plans"]
        assert "--qat" not in words or not any("LoRA" in row["title"] for row in plans)
        return plans[0]["peak_device_bytes"]

    exact = least()
    assert least("--qat", "bitnet") > exact
    assert yaml.safe_load((tmp_path / "plan.yaml").read_text())["qat"] == "bitnet"
    _, err = plan(config_file, "--qat", "bitnet", "--peft", "lora", status=2)
    assert "`--qat bitnet` trains all weights, and `--peft lora` freezes them" in err


@pytest.mark.parametrize("memory", mostly_slow(["off", "stream"], ["stream"]))
def test_the_yaml_trains(memory, tmp_path, plan):
    """Whatever fits: the options load, build the config, and a trainer carries them out."""
    model, target = tiny_model(num_hidden_layers=12), tmp_path / "plan.yaml"
    model.config.to_json_file(tmp_path / "config.json")
    asked = {"sequence_length": 32, "batch_size": 4, "dtype": "float32", "activation_checkpointing": True}
    least = plan_memory(model, chunked_loss=True, memory="off", **asked)  # of resident plans
    workspaces = least.setup.workspaces(False)  # more than all of this tiny model
    tensors = least.peak_device_bytes - workspaces
    vram = CONTEXT_BYTES + int(1.05 * workspaces) + (2 * tensors if memory == "off" else 4 * tensors // 5)
    arguments = ["--ram", "1GiB", *SHORT, "--batch_size", "4", "--dtype", "float32", "--for", "train", "--peft", "none"]
    plan(tmp_path / "config.json", *arguments, "--vram", vram, "--output", target)
    (parsed,) = HfArgumentParser(HybridConfig).parse_yaml_file(str(target), allow_extra_keys=True)
    values = yaml.safe_load(target.read_text())
    of_train = [values.pop(name) for name in ("model", "sequence_length", "dtype")]
    assert of_train == [str(tmp_path / "config.json"), 32, "float32"]
    assert parsed.memory == values["memory"] == memory
    here = config_values(tmp_path, per_device_train_batch_size=4, max_steps=2)
    trainer = HybridTrainer(model, HybridConfig(**{**values, **here}), train_dataset=ByteText(40))
    assert trainer.train().training_loss > 0
    if memory == "stream":
        streamed = trainer.memory_summary()["plan"]
        assert streamed["resident_layers"] == values["resident_layers"]
        assert not streamed["stream_embeddings"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "there is no file"),
        ("{", "is not JSON"),
        ("{}", "has no `model_type`"),
        ('{"model_type": "perceptron"}', "cannot be read"),
        ('{"model_type": "bert"}', "is an encoder"),
        ('{"model_type": "llama", "hidden_size": 100, "num_attention_heads": 0}', "`model`"),
        ('{"model_type": "llama", "hidden_size": "wide"}', "Field 'hidden_size' expected int, got str"),
        ('{"model_type": "llama", "hidden_size": 64, "num_attention_heads": 7}', "not a multiple of the number of"),
        ('{"model_type": "llama", "num_hidden_layers": 10000000}', "`num_hidden_layers=10000000` is over 2000"),
    ],
)
def test_what_cannot_be_planned_says_why(tmp_path, plan, content, message):
    file = tmp_path / "config.json"
    if content is not None:
        file.write_text(content)
    out, err = plan(file, *SHORT, status=2)
    assert err.startswith("hf-hybrid plan: error: `model`") and message in err and not out


def test_code_that_a_config_brings_is_neither_run_nor_asked_about(config_file, tmp_path, refused, monkeypatch):
    config = json.loads(Path(config_file).read_text()) | {"auto_map": {"AutoConfig": "other.Other"}, "model_type": "x"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "other.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Other: pass\n")
    monkeypatch.setattr("builtins.input", lambda prompt: pytest.fail(f"a question: {prompt}"))
    assert "brings code of its own (`auto_map`), and a plan runs none" in refused("plan", tmp_path)
    assert not (tmp_path / "ran").exists()


def test_a_hub_id_without_a_network(refused, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert "`HF_HUB_OFFLINE` is set" in refused("plan", "nobody/no-such-model")


WRONG = (
    ["--vram", "much"], ["--lora_r", "0"], ["--batch_size", "0"], ["--batch_size", "3", "--for", "grpo"],
    ["--teacher", "x"], ["--teacher", "x", "--for", "dpo"],
)  # fmt: skip


@pytest.mark.parametrize("words", WRONG)
def test_options_out_of_range(config_file, refused, words):
    assert words[0].removeprefix("--") in refused("plan", config_file, *SHORT, *words)


def test_teachers_and_completions_count(config_file, plan, tmp_path):
    def planned(*words):
        asked = (*SHORT, "--vram", "24GiB", "--ram", "64GiB", "--peft", "none", "--json", *words)
        plans = json.loads(plan(config_file, *asked)[0])["plans"]
        return {found["title"].partition(", bf16")[0]: found["categories"] for found in reversed(plans)}

    teacher = ["--for", "distill", "--teacher", EXAMPLES / "qwen2.5-7b.json"]
    small = planned("--for", "distill", "--teacher", config_file)
    alone, with_teacher = planned("--for", "train"), planned(*teacher)
    weights = 4 * 7_615_616_512  # in fp32, as the student
    more = {name: with_teacher[name]["weights"]["device"] - alone[name]["weights"]["device"] for name in alone}
    assert more["full"] == pytest.approx(weights, rel=1e-3) and more["full, streamed"] < 0.3 * weights
    assert with_teacher["full, streamed"]["weights"]["host"] > 0.8 * weights
    held = [found["full"]["activations"]["device"] for found in (with_teacher, small, alone)]
    assert held[0] == held[1] > 2 * held[2]
    of_tasks = [
        planned("--for", task)["full"]["activations"]["device"] for task in ("dpo", "kto", "reward", "rloo", "sft")
    ]
    assert of_tasks[0] == of_tasks[1] == of_tasks[2] > 1.9 * of_tasks[3] == 1.9 * of_tasks[4]
    many = planned("--for", "grpo", "--gradient_accumulation_steps", "512")["full"]["activations"]["device"]
    config = read_config(config_file)
    width = config.num_key_value_heads * config.hidden_size // config.num_attention_heads
    assert many == 8 * 512 * int(SHORT[1]) * 4 * config.num_hidden_layers * width > 2 * of_tasks[3]
    text, _ = plan(config_file, *SHORT, "--for", "grpo", "--gradient_accumulation_steps", "512", "--vram", "24GiB")
    assert f"With tools up to {2 * many / 2**30:.3g} GiB more wait" in " ".join(text.split())  # a way without autocast


def test_a_teacher_that_does_not_fit_is_streamed_alone(plan):
    words = ["--for", "distill", "--teacher", EXAMPLES / "qwen2.5-32b.json", "--peft", "qlora"]
    size = ["--batch_size", "4", "--sequence_length", "2048", "--vram", "24GiB", "--ram", "64GiB"]
    found = json.loads(plan(EXAMPLES / "qwen2.5-7b.json", *size, *words, "--json")[0])
    assert found["recommended"]["QLoRA"] == "QLoRA, chunked loss, checkpointing, teacher streamed"
    whole, streamed = found["plans"][-2:]
    assert not whole["fits"] and streamed["fits"] and whole["options"]["memory"] == "off"
    assert streamed["options"] | {"memory": "auto", "vram_budget_gib": 24.0} == streamed["options"]
    in_four_bits = 32_763_876_352 - 2 * 152_064 * 5120  # without embeddings and head, which are in 16 bits
    assert streamed["peak_host_bytes"] == pytest.approx(0.52 * in_four_bits + 4 * 152_064 * 5120, rel=0.02)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_the_distance_to_a_teacher_takes(dtype):
    gkd = pytest.importorskip("trl.experimental.gkd")
    tokens, vocabulary = 64, 2000
    states, head = torch.randn(1, tokens, 8, dtype=dtype), torch.nn.Linear(8, vocabulary, bias=False).to(dtype)
    labels, peaks = torch.zeros(1, tokens, dtype=torch.long), []
    for of_trl in (False, True):
        with LiveBytes(made_only=True) as live:
            logits = head(states)
            if of_trl:
                both = logits[:, :-1], head(states).detach()[:, :-1], labels[:, 1:]
                loss = gkd.GKDTrainer.generalized_jsd_loss(*both, num_items_in_batch=torch.tensor(tokens))
            else:
                loss = _distance(logits)
            loss.backward()
        peaks.append(live.peak)
    assert peaks[0] == pytest.approx(peaks[1], rel=0.05)


@pytest.mark.parametrize(("name", "weights"), [
    ("llama-2-7b", 6_738_415_616), ("llama-2-13b", 13_015_864_320), ("qwen2.5-7b", 7_615_616_512),
    ("qwen2.5-14b", 14_770_033_664), ("qwen2.5-32b", 32_763_876_352),
    ("mixtral-8x7b", 46_702_792_704), ("dense-50b", 49_493_942_272),
])  # fmt: skip
def test_example_configs_are_the_models_they_name(name, weights):
    """By the numbers of weights that their makers publish (the last is made up)."""
    whole = build(read_config(EXAMPLES / f"{name}.json"), torch.bfloat16)
    assert sum(parameter.numel() for parameter in whole.parameters()) == weights


def test_the_configuration_for_16_gb_fits_there():
    asked = yaml.safe_load((EXAMPLES.parent / "configs" / "7b-16gb.yaml").read_text())
    shared = ("sequence_length", "gradient_accumulation_steps", "memory", "optimizer_states", "dtype", "enable_predict")
    planned = plan_memory(
        EXAMPLES / "llama-2-7b.json",
        batch_size=asked["per_device_train_batch_size"],
        chunked_loss=asked["chunked_loss"] == "on",
        vram=f"{asked['vram_budget_gib']}GiB",
        ram="64GB",
        **{name: asked[name] for name in shared},
    )
    assert planned.fits and planned.mode == "streamed"
    assert planned.peak_device_bytes + planned.margin_bytes <= 16 * 2**30 * 0.98  # the driver keeps some of 16 GiB
    assert planned.peak_host_bytes < 40 * 2**30


@pytest.mark.slow
def test_smaller_micro_batches_of_the_same_update_are_found(cli, tmp_path):
    """A base of 7B in 4 bits fits a card of 8 GiB, two sequences at a time."""
    model, target = EXAMPLES / "qwen2.5-7b.json", tmp_path / "plan.yaml"
    asked = ["--vram", "8GiB", "--ram", "32GiB", "--peft", "qlora", "--output", target]
    out, err = cli("plan", model, *asked)
    assert "does not fit" not in out and re.search(r"^> +6\.\d\d .* yes +QLoRA, .*, 2 x 4 \*$", out, re.M)
    assert "--per_device_train_batch_size 2 --gradient_accumulation_steps 4" in " ".join(out.split())
    values = yaml.safe_load(target.read_text())
    assert (values["per_device_train_batch_size"], values["gradient_accumulation_steps"]) == (2, 4)
    assert ", 2 x 4" in err and max(map(len, out.splitlines())) <= 80
