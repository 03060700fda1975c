"""Tiny models, prompts with copies, and what `generate` makes of them, beside what this package does."""

import functools

import torch
from transformers import (
    BambaConfig,
    BambaForCausalLM,
    BloomConfig,
    BloomForCausalLM,
    FalconH1Config,
    FalconH1ForCausalLM,
    GenerationConfig,
    GPT2Config,
    GPT2LMHeadModel,
    Lfm2Config,
    Lfm2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Mamba2Config,
    Mamba2ForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3_5ForCausalLM,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

from hf_hybrid.trl.decoding import Decoding

VOCABULARY, NEW, COPIES = 97, 40, 4
ENDS = [2, 3, 4, 5, 6, 7, 8]
ARCHITECTURES = {
    "llama": (LlamaConfig, LlamaForCausalLM, {}),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, {}),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, {"head_dim": 8}),
    "gpt2": (GPT2Config, GPT2LMHeadModel, {}),
    "mistral": (MistralConfig, MistralForCausalLM, {"sliding_window": None}),
    "mistral, a window that fits": (MistralConfig, MistralForCausalLM, {"sliding_window": 100}),
    "bloom, which is not told positions": (BloomConfig, BloomForCausalLM, {}),
}
DELTA = {
    "head_dim": 8, "layer_types": ["linear_attention", "full_attention"], "linear_num_value_heads": 4,
    "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
}  # fmt: skip
EXPERTS = {
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16
}  # fmt: skip
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 1, "mamba_chunk_size": 16}
WITH_STATES = {
    "qwen3_next": (Qwen3NextConfig, Qwen3NextForCausalLM, {**DELTA, **EXPERTS}),
    "qwen3_5": (Qwen3_5TextConfig, Qwen3_5ForCausalLM, DELTA),
    "lfm2": (Lfm2Config, Lfm2ForCausalLM, {"layer_types": ["conv", "full_attention"]}),
    "bamba": (BambaConfig, BambaForCausalLM, {**MAMBA, "attn_layer_indices": [1]}),
    "mamba2": (Mamba2Config, Mamba2ForCausalLM, {"num_heads": 8, "head_dim": 8, "state_size": 8, "n_groups": 2}),
    "falcon_h1": (FalconH1Config, FalconH1ForCausalLM, {**MAMBA, "mamba_d_ssm": 64, "head_dim": 8}),
}
SHAPES = {"one length": [20], "similar and not": [5, 9, 30, 31], "a long one": [3, 60]}
WAYS = {
    "greedy": {"do_sample": False},
    "sampled": {},
    "top k": {"top_k": 20, "temperature": 0.7},
    "top p": {"top_p": 0.9},
    "min p": {"min_p": 0.05},
    "repetitions": {"repetition_penalty": 1.3},
    "n-grams, least length": {"no_repeat_ngram_size": 2, "min_new_tokens": 3},
    "no end": {"eos_token_id": None, "max_new_tokens": 6},
}


@functools.cache
def model(name: str, **changed):
    config, kind, own = {**ARCHITECTURES, **WITH_STATES}[name]
    sizes = {
        "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "max_position_embeddings": 128,
    }  # fmt: skip
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4} if name == "gpt2" else sizes
    sizes = {"hidden_size": 32, "n_layer": 2, "n_head": 4} if name.startswith("bloom") else sizes
    torch.manual_seed(0)
    made = kind(config(vocab_size=VOCABULARY, pad_token_id=0, eos_token_id=1, **{**sizes, **own, **changed}))
    with torch.no_grad():
        for name_of, parameter in made.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.15)
            elif name_of.endswith("A_log"):  # states that last
                parameter.fill_(-2.0)
    return made.eval()


def batch(lengths, prompts=4, copies=COPIES, beginnings=((),)):
    """
    Prompts of these lengths by turns, after one of the beginnings by turns, with their copies: their tokens, and what
    TRL gives `generate`.
    """
    generator = torch.Generator().manual_seed(1)
    rows = []
    for prompt in range(prompts):
        tokens = torch.randint(9, VOCABULARY, (lengths[prompt % len(lengths)],), generator=generator).tolist()
        rows += [[*beginnings[prompt % len(beginnings)], *tokens]] * copies
    width = max(map(len, rows))
    ids = torch.tensor([[0] * (width - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
    return rows, {"input_ids": ids, "attention_mask": mask}


def config(**options):
    values = {
        "max_new_tokens": NEW, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": ENDS, "do_sample": True,
        "top_k": 0, "disable_compile": True,
    }  # fmt: skip
    return GenerationConfig(**{**values, **options})


def completed(model, rows, inputs, generation_config, decoding=None):
    """Completions, and the state of the generator afterwards."""
    torch.manual_seed(7)
    if decoding is None:
        found = model.generate(**inputs, generation_config=generation_config)
    else:
        with decoding.completing(model, rows, counts=True):
            found = model.generate(**inputs, generation_config=generation_config)
        assert "generate" not in vars(model)
    return found, torch.get_rng_state()


def check_equal(model, rows, inputs, generation_config) -> Decoding:
    decoding = Decoding(off=False)
    (theirs, state), (ours, state_of_ours) = (
        completed(model, rows, inputs, generation_config, how) for how in (None, decoding)
    )
    assert torch.equal(theirs, ours) and torch.equal(state, state_of_ours)
    return decoding
