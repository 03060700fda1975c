"""New tokens whose embeddings are trained, and chat templates by name, from a file or from another model."""

import json
import re
from pathlib import Path

import pytest
import torch
from conftest import mostly_slow
from datasets import Dataset
from peft import AutoPeftModelForCausalLM, LoraConfig, get_peft_model
from rig.byte_llama import ENDS, assistant, byte_tokenizer, chat_tokenizer, save_llama, user
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, set_seed

from hf_hybrid import HybridSFTConfig, HybridSFTTrainer
from hf_hybrid.cli.loading import equip, finish_tokens, named_template, train_tokens
from hf_hybrid.cli.options import TemplateOptions
from hf_hybrid.export import exporter

trl = pytest.importorskip("trl")

CHAT = [user("Say 1"), assistant("1!")]
CHATML = "<|im_start|>user\nSay 1<|im_end|>\n<|im_start|>assistant\n1!<|im_end|>\n"
MARKS = ["<|im_start|>", "<|im_end|>"]
ASKED = [[user(f"Say {i}")] for i in range(8)]
ROWS = {
    "chats": [{"messages": [user(f"Say {i}"), assistant(f"{i}!")]} for i in range(8)],
    "pairs": [{"prompt": asked, "chosen": [assistant("yes")], "rejected": [assistant("no")]} for asked in ASKED],
    "labelled": [{"prompt": a, "completion": [assistant("yes")], "label": i % 2 == 0} for i, a in enumerate(ASKED)],
    "questions": [{"question": f"What is {i} + 1?", "answer": f"{i + 1}"} for i in range(8)],
}  # fmt: skip


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save_llama(tmp_path / "base", byte_tokenizer(**ENDS), max_position_embeddings=256)
    save_llama(tmp_path / "tied", byte_tokenizer(**ENDS), max_position_embeddings=256, tie_word_embeddings=True)
    other = chat_tokenizer(Path(named_template("chatml")).read_text(), *MARKS, eos_token="<|im_end|>")
    save_llama(tmp_path / "other", other)
    for name, rows in ROWS.items():
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return tmp_path


@pytest.fixture
def run(folder, cli):
    def run(command, *words, model="base", steps=4, out="out", status=0):
        always = ["--use_cpu", "--report_to", "none", "--per_device_train_batch_size", "2", "--max_steps", steps]
        always += ["--eval_share", "0"] * (command != "grpo")
        return cli(command, "--model", model, "--output_dir", out, *always, *words, status=status)

    return run


class Args:
    """Training arguments without the options of SFT."""


@pytest.mark.parametrize(
    "name, file",
    [("chatml", "qwen3_instruct_2507"), ("qwen_25", "qwen2_5"), ("phi_35", "phi3_5"), ("llama3", "llama3"),
     ("gpt_oss", "gptoss"), ("gemma2", "gemma"), ("qwen3_nothink", "qwen3_instruct_2507")],
)  # fmt: skip
def test_names_of_other_tools_lead_to_templates_of_trl(name, file):
    assert named_template(name).stem == file and named_template("nobody") is None


def test_a_named_template_is_written_as_its_model_writes_it():
    tokenizer = byte_tokenizer(**ENDS)
    new = equip(tokenizer, TemplateOptions(model="m", chat_template_path="chatml", add_tokens=MARKS), Args())
    assert new == MARKS and tokenizer.eos_token == "<|im_end|>" and "<|im_end|>" in tokenizer.all_special_tokens
    assert tokenizer.apply_chat_template(CHAT, tokenize=False) == CHATML
    tokens = tokenizer.tokenize(CHATML)
    assert tokens.count("<|im_start|>") == tokens.count("<|im_end|>") == 2


def test_another_model_gives_what_trl_takes_of_it(folder):
    ours = byte_tokenizer(**ENDS)
    new = equip(ours, TemplateOptions(model="m", chat_template_path=str(folder / "other")), Args())
    model = AutoModelForCausalLM.from_pretrained(folder / "base")
    _, theirs, added = trl.clone_chat_template(model, byte_tokenizer(**ENDS), str(folder / "other"), None)
    assert ours.chat_template == theirs.chat_template and ours.eos_token == theirs.eos_token
    assert ours.convert_tokens_to_ids(new) == added == [257, 258] and ours(CHATML) == theirs(CHATML)


@pytest.mark.parametrize("command, data, more", [
    ("train", "chats", ["--sequence_length", "32"]), ("sft", "chats", []), ("dpo", "pairs", []),
    pytest.param("kto", "labelled", [], marks=pytest.mark.slow),
    pytest.param("reward", "pairs", [], marks=pytest.mark.slow),
    ("grpo", "questions", ["--reward", "exact_match", "--num_generations", "2", "--max_completion_length", "4"]),
])  # fmt: skip
def test_every_command_takes_a_template_and_new_tokens(run, folder, command, data, more):
    out, err = run(
        command, "--dataset", f"{data}.jsonl", "--chat_template_path", "other", "--peft", "lora", *more, steps=1
    )
    assert re.search(r"new tokens +<\|im_\w+\|>, <\|im_\w+\|>: their embeddings are trained", out)
    saved = AutoTokenizer.from_pretrained(folder / "out")
    assert saved.apply_chat_template(CHAT, tokenize=False) == CHATML and saved.eos_token == "<|im_end|>"


def test_tables_with_adapters_or_trained_whole(run, folder):
    words = ["--dataset", "chats.jsonl", "--add_tokens", "<a>", "--peft", "lora", "--chat_template_path", "plain"]
    _, err = run("sft", *words, "--lora_target_modules", "q_proj", "lm_head", status=2)
    assert "are trained in `lm_head`" in err and "`--lora_modules_to_save lm_head`" in err
    run("sft", *words, "--lora_modules_to_save", "lm_head", steps=1)
    held = load_file(folder / "out/adapter_model.safetensors")
    assert sorted(len(held[name]) for name in held if "embed_tokens" in name or "lm_head" in name) == [1, 258]


@pytest.mark.parametrize("model", mostly_slow(["base", "tied"], ["base"]))
def test_adapters_train_the_rows_of_new_tokens_and_nothing_else_of_the_tables(run, folder, model):
    words = ["--dataset", "chats.jsonl", "--chat_template_path", "chatml", "--add_tokens", *MARKS, "--peft", "lora"]
    words += ["--save_steps", "2", "--learning_rate", "1e-2", "--lr_scheduler_type", "constant"]
    run("sft", *words, model=model)
    tokenizer = AutoTokenizer.from_pretrained(folder / "out")
    config = json.loads((folder / "out/adapter_config.json").read_text())
    ends = {"embed_tokens": [257, 258], "lm_head": [257, 258]}
    assert config["trainable_token_indices"] == ends or model == "tied"
    saved = load_file(folder / "out/adapter_model.safetensors")
    rows = {name: rows for name, rows in saved.items() if "token_adapter" in name}
    assert [tuple(held.shape) for held in rows.values()] == [(2, 16)] * (1 if model == "tied" else 2)
    assert not any(len(held) > 64 for held in saved.values()), "no table of embeddings is saved whole"
    # Resumed it ends at the same bits.
    run("sft", *words, model=model, steps=2, out="parts")
    run("sft", *words, "--resume_from_checkpoint", "true", model=model, out="parts")
    again = load_file(folder / "parts/adapter_model.safetensors")
    assert all(torch.equal(again[name], saved[name]) for name in saved)
    # Merged, and in `chat`.
    exporter.export(folder / "out", folder / "merged", "merged", dtype="float32")
    merged = AutoModelForCausalLM.from_pretrained(folder / "merged")
    for name, table in (("embed_tokens", merged.get_input_embeddings()), ("lm_head", merged.get_output_embeddings())):
        own = next((held for key, held in rows.items() if name in key), next(iter(rows.values())))
        assert torch.equal(table.weight[257:], own)
    adapted = AutoPeftModelForCausalLM.from_pretrained(folder / "out")
    ids = torch.tensor([tokenizer(CHATML)["input_ids"]])
    assert torch.allclose(adapted(ids).logits, merged(ids).logits, atol=1e-5)
    # Further, and anew.
    run("sft", "--dataset", "chats.jsonl", model="out", steps=1, out="further")
    further = load_file(folder / "further/adapter_model.safetensors")
    assert further.keys() == saved.keys()
    run("sft", "--dataset", "chats.jsonl", "--adapter", "new", "--peft", "lora", model="out", steps=1, out="anew")
    assert not any("token_adapter" in name for name in load_file(folder / "anew/adapter_model.safetensors"))
    _, err = run("sft", "--dataset", "chats.jsonl", "--add_tokens", "<x>", model="out", out="x", status=2)
    assert "`<x>` is a new token" in err and "`--adapter new`" in err


def trained(kind, config, folder, model, **options):
    """Losses, and the trained rows, of adapters with new tokens."""
    set_seed(0)
    tokenizer, base = byte_tokenizer(**ENDS), AutoModelForCausalLM.from_pretrained(folder / model)
    equip(tokenizer, TemplateOptions(model="m", chat_template_path="chatml", add_tokens=MARKS), Args())
    base.resize_token_embeddings(len(tokenizer))
    adapters = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
    train_tokens(adapters, base, [257, 258])
    base = get_peft_model(base, adapters)
    finish_tokens(base)
    rows = []
    for row in ROWS["chats"]:
        ids = tokenizer.apply_chat_template(row["messages"], return_dict=False)
        rows.append({"input_ids": ids, "labels": [-100] * 20 + ids[20:]})
    args = {
        "max_steps": 3,
        "per_device_train_batch_size": 4,
        "learning_rate": 1e-2,
        "report_to": "none",
        "use_cpu": True,
    }
    args |= {"logging_steps": 1, "output_dir": str(folder / "x"), "save_strategy": "no", "bf16": False, **options}
    trainer = kind(base, config(**args), train_dataset=Dataset.from_list(rows), processing_class=tokenizer)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return losses, {n: p.detach() for n, p in base.named_parameters() if "trainable_tokens_delta" in n}


@pytest.mark.parametrize("model", ["base", "tied"])
@pytest.mark.parametrize("options", mostly_slow([{}, {"memory": "stream"}], [{}]), ids=str)
def test_new_tokens_learn_as_in_plain_trl(folder, model, options):
    losses, rows = trained(trl.SFTTrainer, trl.SFTConfig, folder, model)
    ours, own = trained(HybridSFTTrainer, HybridSFTConfig, folder, model, auto_lr="off", **options)
    assert ours == pytest.approx(losses, rel=1e-3) and losses[-1] < losses[0]
    assert all(torch.allclose(own[name], rows[name], atol=1e-4) for name in rows) and rows.keys() == own.keys()
