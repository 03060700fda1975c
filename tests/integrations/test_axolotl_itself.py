"""
The plugin in Axolotl itself: `python -m axolotl.cli.train` on a YAML file, its checkpoints, and going on from one.

Axolotl's own pins rule its environment, so these tests have a job of their own: `.ci/axolotl` makes the environment and
starts them. Elsewhere they are skipped.
"""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, set_seed

if importlib.util.find_spec("axolotl") is None:
    pytest.skip("Axolotl is not installed; `.ci/axolotl` installs it", allow_module_level=True)
pytestmark = [pytest.mark.slow, pytest.mark.processes]

LEAPS = {"warmup_phase_steps": 4, "full_phase_steps": 3, "leap_worth": 3.0, "leap_budget": 100}
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A folder with a tiny Llama, its tokenizer, and a file of chats."""
    folder = tmp_path_factory.mktemp("axolotl")
    words = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "<|im_start|>", "<|im_end|>", "<|endoftext|>"]
    numbers = {word: number for number, word in enumerate(words)}
    backend = Tokenizer(models.BPE(numbers, []))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    special = {"bos_token": "<|endoftext|>", "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, additional_special_tokens=["<|im_start|>"], chat_template=TEMPLATE, **special
    )
    tokenizer.save_pretrained(folder / "model")
    set_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(vocab_size=len(words) + 1, max_position_embeddings=256, num_key_value_heads=2, **sizes)
    LlamaForCausalLM(config).save_pretrained(folder / "model")
    with open(folder / "rows.jsonl", "w", encoding="utf-8") as file:
        for number in range(200):
            question = {"role": "user", "content": f"What is {number} + {number % 7}?"}
            answer = {"role": "assistant", "content": f"It is {number + number % 7}."}
            file.write(json.dumps({"messages": [question, answer]}) + "\n")
    return folder


def run(folder: Path, output: str, hybrid: dict | None, **values) -> subprocess.CompletedProcess:
    """Train twenty steps of two rows with Axolotl in a process of its own; `hybrid=None` without the plugin."""
    config = {
        "base_model": "model",
        "datasets": [{"path": "rows.jsonl", "type": "chat_template"}],
        "dataset_prepared_path": "prepared",
        "output_dir": output,
        "sequence_len": 128,
        "val_set_size": 0.1,
        "micro_batch_size": 2,
        "gradient_accumulation_steps": 1,
        "max_steps": 20,
        "save_steps": 10,
        "eval_steps": 10,
        "logging_steps": 1,
        "optimizer": "adamw_torch",
        "learning_rate": 3e-3,
        **{"bf16": False, "fp16": False, "tf32": False, "seed": 1},
        **values,
    }
    if hybrid is not None:
        config |= {"plugins": ["hf_hybrid.integrations.axolotl.HybridPlugin"], "hybrid": hybrid}
    path = folder / f"{output}.yaml"
    path.write_text(yaml.safe_dump(config), encoding="utf-8")
    environment = {**os.environ, "AXOLOTL_DO_NOT_TRACK": "1", "DO_NOT_TRACK": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "axolotl.cli.train", path.name]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=600)


def trained(folder: Path, output: str, hybrid: dict | None, **values) -> Path:
    done = run(folder, output, hybrid, **values)
    assert done.returncode == 0, done.stderr[-4000:]
    return folder / output


def summary(output: Path) -> dict:
    return json.loads((output / "hybrid_summary.json").read_text(encoding="utf-8"))


def losses(output: Path) -> list[float]:
    state = json.loads((output / "checkpoint-20" / "trainer_state.json").read_text(encoding="utf-8"))
    return [entry["loss"] for entry in state["log_history"] if "loss" in entry]


@pytest.fixture(scope="module")
def whole(folder) -> Path:
    return trained(folder, "whole", {**LEAPS, "direction": "orthogonal"})


def test_a_run_goes_through_the_phases(folder, whole):
    found = summary(whole)
    assert sum(found["steps_by_phase"].values()) == 20 and found["leaps"] and found["steps_by_phase"]["predict"] > 0
    assert found["backward_passes"] == 20 - found["backward_passes_avoided"] < 20
    assert losses(whole)[-1] < 0.8 * losses(whole)[0]
    assert (whole / "checkpoint-10" / "hybrid_manifest.json").is_file()
    model = AutoModelForCausalLM.from_pretrained(whole)
    before = load_file(folder / "model" / "model.safetensors")
    assert not torch.equal(model.model.norm.weight, before["model.norm.weight"])
    assert "hf_hybrid" in (whole / "README.md").read_text(encoding="utf-8")


def test_a_run_goes_on_from_a_checkpoint_with_the_same_bits(folder, whole):
    shutil.copytree(whole, folder / "resumed")
    shutil.rmtree(folder / "resumed" / "checkpoint-20")
    (folder / "resumed" / "model.safetensors").unlink()
    options = {**LEAPS, "direction": "orthogonal"}
    resumed = trained(folder, "resumed", options, resume_from_checkpoint="resumed/checkpoint-10")
    there, here = (load_file(path / "model.safetensors") for path in (whole, resumed))
    assert there.keys() == here.keys() and all(torch.equal(there[name], here[name]) for name in there)
    assert losses(resumed) == losses(whole)
    assert summary(resumed)["steps_by_phase"] == summary(whole)["steps_by_phase"]


def test_without_phases_it_is_axolotl_s_own_training(folder):
    plain = trained(folder, "plain", None)
    same = trained(folder, "same", {"enable_predict": False})
    there, here = (load_file(path / "model.safetensors") for path in (plain, same))
    assert there.keys() == here.keys() and all(torch.equal(there[name], here[name]) for name in there)
    assert losses(plain) == losses(same)


def test_adapters_with_packed_rows(folder):
    kernels = {"lora_mlp_kernel": False, "lora_qkv_kernel": False, "lora_o_kernel": False}  # Triton's
    lora = {"adapter": "lora", "lora_r": 4, "lora_alpha": 8, "lora_target_linear": True, **kernels}
    packed = {"sample_packing": True, "pad_to_sequence_len": True, "attn_implementation": "sdpa"}
    output = trained(folder, "packed", {**LEAPS, "direction": "orthogonal"}, **lora, **packed)
    assert summary(output)["leaps"] and losses(output)[-1] < losses(output)[0]
    assert (output / "adapter_model.safetensors").is_file()


@pytest.mark.parametrize(
    ("hybrid", "values", "expected"),
    [({"leap_gian": 2.0}, {}, "leap_gian"), ({}, {"rl": "simpo"}, "`rl: simpo` trains with a trainer of TRL")],
)
def test_what_is_refused(folder, hybrid, values, expected):
    done = run(folder, "refused", hybrid, **values)
    assert done.returncode != 0 and expected in done.stderr, done.stderr[-4000:]
    assert not list((folder / "refused").glob("checkpoint-*"))
