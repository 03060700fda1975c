"""
A tiny model of every causal language model architecture that transformers registers.

A configuration class has dozens of fields under names of its own: sizes, counts of heads or experts, lists with one
entry per layer, ids of special tokens. No table of configurations could keep up with them, so the fields are made small
by rules on their names (`SIZE_RULES`), and what no rule can find stands in `SPECIAL`, with the reason. A new
architecture usually needs nothing. Where one cannot be built, the rules of [`tiny_config`] are what to look at.

The tests take a few architectures of each kind from here; `benchmarks/equality` takes all of them.
"""

from __future__ import annotations

import os
import re
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # before transformers is imported: some types would ask the hub

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

MAX_PARAMETERS = 3_500_000
SAMPLES, SEQUENCE = 64, 16
HIDDEN, HEADS, HEAD_DIM, LAYERS, VOCAB = 64, 4, 16, 4, 256
FIRST_DATA_TOKEN = 32  # the ids below it are kept for special tokens (padding, images, ...), which the data never use

# Tiny upper bounds by field name; the first pattern found in the name decides. Without a rule the default stays.
SIZE_RULES: tuple[tuple[str, int | None], ...] = (
    (r"type_vocab|dropout|layerdrop|_id$|_index$", None),  # not a size
    (r"vocab", VOCAB),
    (r"position_embeddings$|n_positions|n_ctx|max_seq_len|context_length|(source|target)_positions|max_length", 128),
    (r"topk_group|n_group$|num_expert_group", 1),
    (r"index_topk|centroid_intermediate_top_k", 8),
    (r"experts_per_tok|top_?k|moe_k$", 2),
    (r"shared_experts$|first_k_dense|num_dense_layers|zero_expert|nextn|mtp_layers|hash_layers|kv_shared_layers", 1),
    (r"experts$", 4),
    (r"heads(_per_layer)?$|n_head$", HEADS),
    (r"^qk_head_dim$", 2 * HEAD_DIM),  # the sum of the parts with and without rotary embedding
    (r"head_?dim$|d_head$|dim_head$|head_size$|kv_channels|d_kv$", HEAD_DIM),
    (r"rotary_dim|state_size$|d_state$", 8),
    (r"n_?groups$", 2),
    (r"rank$|mel_bins", 16),
    (r"layers?$|layers_per_stack$|num_blocks$|depth$", LAYERS),
    (r"intermediate|inner|ffn|feed_forward|mlp_dim|dff$|dim_ff|d_ssm|mid_dim", 2 * HIDDEN),
    (r"hidden|d_model|dim_model|n_embd|emb(ed|edding)?_(dim|size)|lru_width|proj_dim|latent", HIDDEN),
    (r"channels?$", HIDDEN),
    (r"image_size", 32),
    (r"window|patch_size|chunk_size$|block_size$", 8),
)

QWEN4_INDEXER = {f"indexer_{key}": size for key, size in (("n_heads", HEADS), ("kv_heads", 1), ("head_dim", 256))}
QWEN4_INDEXER |= {"indexer_budget": 8, "indexer_compress_ratio": 2}
DOTS3_SLIDING = {"swa_head_dim": 2 * HEAD_DIM, "swa_num_attention_heads": HEADS, "swa_num_key_value_heads": HEADS}
DOTS3_SLIDING |= {f"swa_{key}": HEAD_DIM for key in ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "v_head_dim")}

# What no rule on field names can find. Every entry says why.
SPECIAL: dict[str, dict[str, Any]] = {
    # training requires a sequence of exactly prod(axial_pos_shape) tokens
    "reformer": {"axial_pos_shape": [4, 4], "axial_pos_embds_dim": [16, 48]},
    # the layer kinds are given as [pattern, repeats]; repeats * len(pattern) must be the number of layers
    "gpt_neo": {"num_layers": LAYERS, "attention_types": [[["global", "local"], LAYERS // 2]]},
    # the default rope parameters are empty, while the model wants one entry per kind of layer
    "cohere_compass_text": {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4}}},
    # the attention reads a rope_theta that its configuration class does not declare, and clips although told not to
    "dbrx": {"attn_config": {"rope_theta": 1e4, "clip_qkv": 8}},
    # no default layer kinds
    "lfm2_moe": {"num_hidden_layers": LAYERS, "layer_types": ["conv", "full_attention"] * (LAYERS // 2)},
    # the attention block shared by the hybrid layers needs two of them, which the default pattern has from layer 6 on
    "zamba": {"num_hidden_layers": LAYERS, "layers_block_type": ["linear_attention", "hybrid"] * (LAYERS // 2)},
    # the sizes of its sliding layers are separate arguments, not fields
    "dots3_note_text": DOTS3_SLIDING,
    # the attention always builds its indexer, whose sizes are None by default
    "qwen4_exp": {"text_config": QWEN4_INDEXER},
    "qwen4_exp_text": QWEN4_INDEXER,
    # the language adapters need one language to be chosen
    "xmod": {"default_language": "en_XX"},
}


def causal_lm_types() -> list[str]:
    """The model types registered for AutoModelForCausalLM."""
    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def _bound(name: str) -> int | None:
    return next((bound for pattern, bound in SIZE_RULES if re.search(pattern, name)), None)


def _tiny_integer(name: str, value: int, fields: dict[str, Any]) -> int | None:
    """A smaller value for one integer field, or None to keep the default."""
    if re.search(r"(key_value|kv)_heads$|query_groups$", name):
        # Architectures without grouped attention want as many key/value heads as heads.
        heads = next((fields[key] for key in ("num_attention_heads", "n_head") if isinstance(fields.get(key), int)), 0)
        return HEADS if value == heads else min(value, HEADS // 2)
    expand = fields.get("mamba_expand", fields.get("expand"))
    if name == "attention_hidden_size" and value == 2 * fields.get("hidden_size", 0):
        return 2 * HIDDEN  # attention over two concatenated hidden states
    if expand and re.search(r"mamba.*heads$|^num_heads$", name):
        return int(expand) * HIDDEN // HEAD_DIM  # heads * head size must be the expanded hidden size
    bound = _bound(name)
    return None if bound is None or value <= bound else bound  # derived fields stay unset where they are small


def _tiny_list(name: str, value: list[Any], layers: int) -> list[Any] | None:
    """A list with one entry per layer, cut to the tiny number of layers so that every kind of layer remains."""
    if len(value) != layers or layers <= LAYERS:
        return None
    if name.endswith("_size"):
        return [_bound(name) or value[0]] * LAYERS
    head, kinds = value[:LAYERS], list(dict.fromkeys(value))
    return head if set(head) == set(kinds) else (kinds + head)[:LAYERS]


def _tiny_field(name: str, value: Any, fields: dict[str, Any], lists: bool, unset: bool) -> Any:
    """A tiny value for any kind of field, or None to keep the default."""
    if value is None:
        return _bound(name) if unset else None
    if isinstance(value, int) and not isinstance(value, bool):
        return _tiny_integer(name, value, fields)
    if isinstance(value, list) and (lists or name.endswith("_size")):
        counts = [count for key, count in fields.items() if isinstance(count, int) and re.search(r"n.*layers?$", key)]
        return _tiny_list(name, value, max(counts, default=0))
    return None


def _overrides(config: PreTrainedConfig, token_ids: dict[str, int], lists: bool, unset: bool) -> dict[str, Any]:
    """Tiny values for the fields of one configuration and of the configurations inside it."""
    fields = {key: value for key, value in config.to_dict().items() if key not in config.sub_configs}
    tiny: dict[str, Any] = {}
    for name, value in fields.items():
        if not re.search(r"token_(id|index)$", name):
            new = _tiny_field(name, value, fields, lists, unset)
            tiny.update({} if new is None else {name: new})
        elif value is not None:  # stays inside the tiny vocabulary, the same in every nested configuration
            token = token_ids.setdefault(name, len(token_ids))
            tiny[name] = [token] if isinstance(value, list) else token
    if "is_decoder" in fields:
        tiny["is_decoder"] = True  # without it BERT-like models look at the tokens they must predict
    for name in config.sub_configs:
        inner = getattr(config, name, None)
        if isinstance(inner, PreTrainedConfig):
            tiny[name] = {"model_type": inner.model_type, **_overrides(inner, token_ids, lists, unset)}
    return tiny


def _merged(base: dict[str, Any], extra: dict[str, Any]) -> dict[str, Any]:
    """`base` updated with `extra`, in nested dictionaries too."""
    both = [key for key in extra if isinstance(extra[key], dict) and isinstance(base.get(key), dict)]
    return {**base, **extra, **{key: _merged(base[key], extra[key]) for key in both}}


def tiny_config(model_type: str) -> PreTrainedConfig:
    """The configuration of a model type with every size made small.

    Most classes derive their per-layer lists and unset sizes from the other fields. Only where the outcome does not
    work are the lists (`lists`) or the sizes that are None by default (`unset`) given as well: the first combination
    with which the model computes a loss is taken, or else the first with which it can be built.
    """
    config_class, special = CONFIG_MAPPING[model_type], SPECIAL.get(model_type, {})
    built: PreTrainedConfig | None = None
    first_error: Exception | None = None
    tokens = samples()[0]["input_ids"][None]
    for lists, unset in ((False, False), (True, False), (False, True), (True, True)):
        try:
            token_ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
            config = config_class(**_merged(_overrides(config_class(**special), token_ids, lists, unset), special))
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
            if model.num_parameters() > MAX_PARAMETERS:
                raise ValueError(f"{model.num_parameters()} parameters: no size rule reaches this architecture")
            built = built or config
            with torch.no_grad():
                model(input_ids=tokens, labels=tokens)
            return config
        except Exception as failure:
            first_error = first_error or failure
    if built is not None:
        return built  # training it shows why it computes no loss
    raise first_error or ValueError("no configuration")


def build_model(model_type: str, seed: int = 0) -> PreTrainedModel:
    """A randomly initialised tiny model, float32, on the CPU."""
    config = tiny_config(model_type)
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def samples(seed: int = 0) -> list[dict[str, torch.Tensor]]:
    """Random tokens that every one of these models has in its vocabulary."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(FIRST_DATA_TOKEN, VOCAB, (SAMPLES, SEQUENCE), generator=generator)
    return [{"input_ids": row, "labels": row.clone()} for row in tokens]
