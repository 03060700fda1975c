"""Tiny models, prompts with copies, and what `generate` makes of them, beside what this package does."""

import contextlib
import functools

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

from hf_hybrid.trl import captured
from hf_hybrid.trl.decoding import Decoding
from rig.graphs import RecordedGraph, record
from rig.tiny_architectures import build_model

VOCABULARY, NEW, COPIES = 97, 40, 4
ENDS = [2, 3, 4, 5, 6, 7, 8]
ARCHITECTURES = {
    "llama": {}, "qwen2": {}, "qwen3": {"head_dim": 8}, "gpt2": {}, "mistral": {"sliding_window": None},
    "mistral, a window that fits": {"sliding_window": 100}, "bloom, which is not told positions": {},
}  # fmt: skip
DELTA = {
    "head_dim": 8, "layer_types": ["linear_attention", "full_attention"], "linear_num_value_heads": 4,
    "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
}  # fmt: skip
EXPERTS = {
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16
}  # fmt: skip
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 1, "mamba_chunk_size": 16}
WITH_STATES = {
    "qwen3_next": {**DELTA, **EXPERTS},
    "qwen3_5_text": DELTA,
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "bamba": {**MAMBA, "attn_layer_indices": [1]},
    "mamba2": {"num_heads": 8, "head_dim": 8, "state_size": 8, "n_groups": 2},
    "falcon_h1": {**MAMBA, "mamba_d_ssm": 64, "head_dim": 8},
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


OTHERS = ("gemma3_text", "gpt_oss", "mixtral", "deepseek_v3", "olmo2")
"""Windows that rows outgrow, with and without sinks; experts; keys and values of different sizes."""


@functools.cache
def model(name: str, **changed):
    if name in OTHERS:
        made = build_model(name).eval()
        for parameter in made.parameters():
            if parameter.dim() > 1:
                torch.nn.init.normal_(parameter, 0, 0.15)
        return made
    kind, own = name.split(",")[0], {**ARCHITECTURES, **WITH_STATES}[name]
    sizes = {
        "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "max_position_embeddings": 128,
    }  # fmt: skip
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4} if kind == "gpt2" else sizes
    sizes = {"hidden_size": 32, "n_layer": 2, "n_head": 4} if kind == "bloom" else sizes
    torch.manual_seed(0)
    values = {"vocab_size": VOCABULARY, "pad_token_id": 0, "eos_token_id": 1, **sizes, **own, **changed}
    made = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **values))
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


def config_for(name, **options):
    """That of a model: one of `OTHERS` ends with other tokens."""
    return config(**{**({"eos_token_id": [*range(20, 45)]} if name in OTHERS else {}), **options})


def check_equal(model, rows, inputs, generation_config, decoding=None) -> Decoding:
    """Complete by `generate`, and by a decoding (`None`: a new one), which is returned."""
    decoding = Decoding(off=False) if decoding is None else decoding
    (theirs, state), (ours, state_of_ours) = (
        completed(model, rows, inputs, generation_config, how) for how in (None, decoding)
    )
    assert torch.equal(getattr(theirs, "sequences", theirs), getattr(ours, "sequences", ours))
    assert torch.equal(state, state_of_ours)
    return decoding


@contextlib.contextmanager
def capturing():
    """Inside, passes are captured on this CPU, on small buffers: graphs repeat recorded operations (rig/graphs.py)."""
    with pytest.MonkeyPatch.context() as patch:
        captured.CAPTURING.add("cpu")
        for name, value in {"CUDAGraph": RecordedGraph, "graph": record, "graph_pool_handle": object}.items():
            patch.setattr(torch.cpu, name, value, raising=False)
        patch.setattr(captured, "BLOCK", 16)
        patch.setattr(captured, "FEWEST_ROWS", 2)
        try:
            yield
        finally:
            captured.CAPTURING.discard("cpu")
