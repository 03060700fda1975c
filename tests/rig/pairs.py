"""Preference pairs of words, tiny models of many kinds, and DPO of them by TRL and by this package."""

import pytest
import torch
import transformers
from conftest import config_values
from datasets import Dataset
from packaging.version import Version
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from hf_hybrid import HybridDPOConfig

WORDS = 61


def tokenizer():
    vocabulary = {"<pad>": 0, "<eos>": 1, **{f"w{number}": number for number in range(2, WORDS)}}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<eos>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>")


TOKENIZER = tokenizer()


def preferences(rows=24, seed=0):
    """Pairs with prompts and completions of different lengths, prompts twice as long as completions."""
    generator = torch.Generator().manual_seed(seed)

    def words(least, most):
        count = int(torch.randint(least, most, (), generator=generator))
        return " ".join(f"w{word}" for word in torch.randint(2, WORDS, (count,), generator=generator).tolist())

    return Dataset.from_list(
        [{"prompt": words(8, 20), "chosen": " " + words(3, 10), "rejected": " " + words(3, 10)} for _ in range(rows)]
    )


PAIRS = preferences()
SIZES = {
    "vocab_size": WORDS, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None,
}  # fmt: skip
GPT2 = {
    "vocab_size": WORDS, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "resid_pdrop": 0.0,
    "embd_pdrop": 0.0, "attn_pdrop": 0.0, "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None,
}  # fmt: skip
MAMBA = {
    "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 1, "mamba_chunk_size": 16,
    "attn_layer_indices": [1],
}  # fmt: skip
BLOOM = {"vocab_size": WORDS, "hidden_size": 32, "n_layer": 2, "n_head": 4, "pad_token_id": 0, "eos_token_id": 1}
BALANCED = {"num_local_experts": 4, "output_router_logits": True, "router_aux_loss_coef": 0.5}
OF_KIND = {
    "llama": SIZES, "qwen2": SIZES, "mistral": SIZES, "gemma": {**SIZES, "head_dim": 8}, "gpt2": GPT2, "phi": SIZES,
    "mixtral": {**SIZES, **BALANCED}, "bamba": {**SIZES, **MAMBA},
    "opt": {**SIZES, "ffn_dim": 48, "dropout": 0.0, "word_embed_proj_dim": 32},
}  # fmt: skip


def of_kind(kind, **options):
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **options))


def build(architecture, seed=0, **options):
    torch.manual_seed(seed)
    return of_kind(architecture, **OF_KIND[architecture], **options)


def dpo(trainer, config, folder, model=None, reference=True, **options):
    arguments = {"max_length": None, "bf16": False, "max_steps": 4, "optim": "sgd", "learning_rate": 0.3, **options}
    extra = {name: arguments.pop(name) for name in ("peft_config", "eval_dataset", "callbacks") if name in arguments}
    model = model or build("llama")
    if config is HybridDPOConfig:
        arguments.setdefault("enable_predict", False)
        arguments.setdefault("share_rows", "on")
    return trainer(
        model,
        build("llama", seed=1) if reference is True else reference,
        config(**config_values(folder, **arguments)),
        train_dataset=PAIRS,
        processing_class=TOKENIZER,
        **extra,
    )


def gradients(trainer, batch):
    trainer.model.train()
    trainer.model.zero_grad()
    loss = trainer.compute_loss(trainer.model, batch)
    loss.backward()
    return loss.item(), {name: p.grad.clone() for name, p in trainer.model.named_parameters() if p.grad is not None}


def apart(first, second):
    """The largest relative difference. What is zero up to rounding (a bias of keys) is left out."""
    assert first.keys() == second.keys()
    least = 1e-6 * max(tensor.norm() for tensor in first.values())
    return max(((first[n] - second[n]).norm() / first[n].norm()).item() for n in first if first[n].norm() > least)


DELTA = {
    "head_dim": 8, "layer_types": ["linear_attention", "full_attention"], "linear_num_value_heads": 4,
    "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8, "num_experts": 4,
    "num_experts_per_tok": 2, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16,
}  # fmt: skip
STATES = {
    "qwen3_next": DELTA,
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "mamba2": {"num_heads": 8, "head_dim": 8, "state_size": 8, "n_groups": 2, "chunk_size": 16},
    "bamba": MAMBA,
}


def with_states(architecture, scale=1.0):
    """A model whose states last, or a reference that is not far from it."""
    if architecture == "lfm2" and Version(transformers.__version__) < Version("5.23"):
        pytest.skip("its layers are not told where rows end")
    torch.manual_seed(0)
    model = of_kind(architecture, **SIZES, **STATES[architecture])
    for name, parameter in model.named_parameters():
        if name.endswith("A_log"):
            torch.nn.init.constant_(parameter, -2.0)
        elif parameter.dim() == 2:
            torch.nn.init.normal_(parameter, std=0.15 * scale)
    return model


def lora(**options):
    peft = pytest.importorskip("peft")
    return peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM", **options)


def lora_and_head():
    return lora(modules_to_save=["lm_head"])


def trained_adapters():
    """A policy whose adapters changed something already: TRL keeps a copy of them as the reference."""
    model = pytest.importorskip("peft").get_peft_model(build("llama"), lora())
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    return model


def history(trainer):
    left_out = ("runtime", "per_second", "hybrid/", "step_time")
    return [
        {key: value for key, value in entry.items() if not any(word in key for word in left_out)}
        for entry in trainer.state.log_history
    ]


LOSSES = [
    "sigmoid", "hinge", "ipo", "exo_pair", "nca_pair", "robust", "bco_pair", "sppo_hard", "aot", "aot_unpaired",
    "apo_zero", "apo_down", "discopop", "sft", "sigmoid_norm",
]  # fmt: skip
