"""Tiny models of images and text, which are trained on rows of text alone."""

import torch
from transformers import AutoConfig, AutoModelForImageTextToText

SIZES = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "head_dim": 8,
}  # fmt: skip
DELTA = {
    "layer_types": ["linear_attention", "full_attention"], "linear_num_value_heads": 4, "linear_num_key_heads": 2,
    "linear_key_head_dim": 8, "linear_value_head_dim": 8,
}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
VISION = {
    "depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 32, "patch_size": 2,
    "spatial_merge_size": 1, "temporal_patch_size": 1, "num_position_embeddings": 16,
}  # fmt: skip
ROPE = {
    "rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1], "partial_rotary_factor": 1.0,
    "mrope_interleaved": True,
}  # fmt: skip
KINDS = {"qwen3_5_vl": ("qwen3_5", DELTA), "qwen3_vl": ("qwen3_vl", {}), "qwen3_vl_moe": ("qwen3_vl_moe", EXPERTS)}


def config(kind, **text):
    """Positions have three parts, which are equal in text."""
    model_type, own = KINDS[kind]
    text = {**SIZES, "rope_parameters": ROPE, **own, **text}
    return AutoConfig.for_model(model_type, text_config=text, vision_config=VISION)


def build(kind, **text):
    """A model whose tokens matter."""
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(config(kind, **text))
    for name, parameter in model.float().named_parameters():
        if name.endswith("A_log"):  # states that last
            torch.nn.init.constant_(parameter, -2.0)
        elif parameter.dim() == 2:
            torch.nn.init.normal_(parameter, std=0.15)
    return model
