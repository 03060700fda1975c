"""Chats and pairs from Python's help, tiny models, and SFT and DPO of them by TRL and by this package."""

import importlib.util
import sys
from pathlib import Path
from pydoc_data import topics

import pytest
import torch
from conftest import config_values, tiny_model
from datasets import Dataset
from transformers import MixtralConfig, MixtralForCausalLM

NAMES = sorted(topics.topics)
CHATS = Dataset.from_list(
    [
        {"prompt": [{"role": "user", "content": name}], "completion": [{"role": "assistant", "content": text}]}
        for name in NAMES[:30]
        for text in (topics.topics[name][:90], topics.topics[name][90:180])
    ]
)
PAIRS = Dataset.from_list(
    [
        {"prompt": f"{name}:\n", "chosen": topics.topics[name][:60], "rejected": topics.topics[name][60:90][::-1]}
        for name in NAMES[:50]
    ]
)
PHASES = {
    "direction": "orthogonal",
    "warmup_phase_steps": 4,
    "full_phase_steps": 3,
    "correct_phase_steps": 2,
    "max_predict_steps": 3,
    "leap_worth": 0.5,
    "leap_budget": 10.0,
    "probe_budget": 1.0,
}


def make_tokenizer():
    path = Path(__file__).parents[2] / "examples" / "07_from_scratch.py"
    spec = importlib.util.spec_from_file_location("quickstart", path)
    quickstart = sys.modules.setdefault("quickstart", importlib.util.module_from_spec(spec))
    spec.loader.exec_module(quickstart)
    tokenizer = quickstart.train_tokenizer([topics.topics[name] for name in NAMES], vocab_size=320)
    tokenizer.chat_template = (
        "{% for message in messages %}{{ message['role'] + ':' + message['content'] + eos_token }}{% endfor %}"
        "{% if add_generation_prompt %}assistant:{% endif %}"
    )
    return tokenizer


TOKENIZER = make_tokenizer()


def llama(**overrides):
    tokens = {"eos_token_id": TOKENIZER.eos_token_id, "pad_token_id": TOKENIZER.pad_token_id, "bos_token_id": None}
    return tiny_model(vocab_size=len(TOKENIZER), **tokens, **overrides)


def mixtral():
    torch.manual_seed(0)
    return MixtralForCausalLM(
        MixtralConfig(
            vocab_size=len(TOKENIZER), hidden_size=32, intermediate_size=48, num_hidden_layers=2,
            num_attention_heads=2, num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2,
            max_position_embeddings=64, router_aux_loss_coef=0.05, output_router_logits=True,
            eos_token_id=TOKENIZER.eos_token_id, pad_token_id=TOKENIZER.pad_token_id, bos_token_id=None,
        )
    )  # fmt: skip


def lora(**options):
    options = {"lora_dropout": 0.1, **options}
    return pytest.importorskip("peft").LoraConfig(
        r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM", **options
    )


def sft(trainer, config, folder, *, model=None, data=CHATS, peft_config=None, extra=None, **options):
    args = config(**config_values(folder, **{"max_length": 48, "bf16": False, **options}))
    return trainer(
        model or llama(), args, train_dataset=data, processing_class=TOKENIZER, peft_config=peft_config, **(extra or {})
    )


def dpo(trainer, config, folder, *, model=None, peft_config=None, extra=None, **options):
    args = config(**config_values(folder, **{"max_length": 64, "bf16": False, **options}))
    reference = None if peft_config or options.get("precompute_ref_log_probs") else llama()
    keywords = {"train_dataset": PAIRS, "processing_class": TOKENIZER, "peft_config": peft_config, **(extra or {})}
    return trainer(model or llama(), reference, args, **keywords)


def history(trainer, *, last=True):
    """Everything logged, but for the clock and what only hybrid runs log."""
    left_out = ("runtime", "per_second", "hybrid/")
    entries = trainer.state.log_history if last else trainer.state.log_history[:-1]
    return [{k: v for k, v in entry.items() if not any(word in k for word in left_out)} for entry in entries]
