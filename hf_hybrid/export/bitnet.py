"""
1.58 bits: linear layers whose weights are -1, 0 or 1, after BitNet b1.58 (Ma et al., 2024, arXiv 2402.17764).

Each matrix is divided by the mean of its magnitudes, rounded, and cut to -1, 0 and 1; the mean is its one scale. The
inputs of a layer are rounded to 8 bits, with a scale for each token. A matrix that was trained without this is ruined
by it. So the rounding is part of training: the optimizer steps *latent* weights in full precision, every forward pass
rounds them anew, and the backward pass takes the rounding for the identity (the straight-through estimator). Latent
weights are parameters like others. Leaps move them, probes see them rounded, a roll-back restores them, checkpoints
hold them.

After training only the rounded weights are of use. They are packed four to a byte.

Layers, rounding and packing are those of transformers. Embeddings, norms and the head stay as they are.
"""

from __future__ import annotations

import itertools
from pathlib import Path

import torch
from huggingface_hub import save_torch_state_dict
from torch import nn
from transformers import BitNetQuantConfig, PreTrainedConfig, PreTrainedModel

ROWS = 4
"""Rows whose weights share a byte."""
NOT_TRAINED = (
    "The model was not trained to be ternary: its weights are rounded to -1, 0 and 1 after training, which ruins most "
    "models. Compare the losses, and train with `--qat bitnet` (or `to_bitnet`) instead."
)


def trains_bitnet(config: PreTrainedConfig) -> bool:
    """Whether a config is of a model with latent weights: one that [`to_bitnet`] made."""
    quantization = getattr(config, "quantization_config", None) or {}
    values = quantization if isinstance(quantization, dict) else quantization.to_dict()
    return values.get("quant_method") == "bitnet" and values.get("quantization_mode") == "online"


def to_bitnet(model: PreTrainedModel) -> PreTrainedModel:
    """
    Make the linear layers of a model ternary in the forward pass, for training. Weights become latent weights.

    The model is changed in place and returned. Its config says so, and `from_pretrained` then loads what it saves with
    these layers. A `ValueError` says if it is quantised already, or a layer cannot be packed later.
    """
    from transformers.integrations.bitnet import replace_with_bitnet_linear
    from transformers.quantizers.quantizer_bitnet import BitNetHfQuantizer

    if trains_bitnet(model.config):
        return model
    if getattr(model, "is_quantized", False):
        raise ValueError(f"`{type(model).__name__}` is quantised already. Load it in float32 or bfloat16.")
    config = BitNetQuantConfig(linear_class="autobitlinear", quantization_mode="online")
    skipped = BitNetHfQuantizer.get_modules_to_not_convert(model, None, list(model._keep_in_fp32_modules or ()))
    weights = dict(itertools.chain(model.named_parameters(), model.named_buffers()))
    training = model.training
    replace_with_bitnet_linear(model, modules_to_not_convert=skipped, quantization_config=config)
    for name, module in _ternary_layers(model):
        if module.out_features % ROWS:
            raise ValueError(
                f"`{name}` has {module.out_features} rows, which cannot be packed {ROWS} to a byte. Choose sizes that "
                f"are multiples of {ROWS}."
            )
        for key in dict(module.named_parameters(recurse=False)):
            setattr(module, key, weights[f"{name}.{key}"])  # the new layers have none of their own yet
    quantizer = BitNetHfQuantizer(config, pre_quantized=True)
    vars(model).update(is_quantized=True, quantization_method=config.quant_method, hf_quantizer=quantizer)
    model.config.quantization_config = config
    return model.train(training)


def _ternary_layers(model: nn.Module) -> list[tuple[str, nn.Linear]]:
    from transformers.integrations.bitnet import AutoBitLinear

    return [(name, module) for name, module in model.named_modules() if isinstance(module, AutoBitLinear)]


@torch.no_grad()
def write_packed(model: PreTrainedModel, folder: Path, max_shard_size: str) -> None:
    """Write the rounded weights of a model of [`to_bitnet`] packed, as transformers loads them into `BitLinear`."""
    from transformers.integrations.bitnet import WeightQuant, pack_weights

    state = dict(model.state_dict())
    for name, module in _ternary_layers(model):
        rounded = WeightQuant.apply(module.weight)
        scale = rounded.abs().max().clamp(min=1e-5)  # every weight is 0 or this, up to the sign
        state[f"{name}.weight"] = pack_weights((rounded / scale).round())
        state[f"{name}.weight_scale"] = (1 / scale).reshape(1)  # `BitLinear` divides by it
    tied = [*(model._tied_weights_keys or ())] if model.config.tie_word_embeddings else []
    save_torch_state_dict(state, folder, max_shard_size=max_shard_size, shared_tensors_to_discard=tied)
    latent, model.config.quantization_config = model.config.quantization_config, BitNetQuantConfig()
    model.config.save_pretrained(folder)
    model.config.quantization_config = latent
    if model.generation_config is not None:
        model.generation_config.save_pretrained(folder)
