"""The bytes of a model's weights in each format of `hf-hybrid export`, from its shapes alone."""

from __future__ import annotations

import math

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from hf_hybrid.plan.stand_ins import packed_bytes

GGUF_BLOCKS = {"q8_0": 34, "q5_1": 24, "q4_1": 20, "q4_0": 18}
"""Bytes of 32 weights, with their scale and, in the formats that end in 1, their least value."""
GGUF_MIX = {"v_proj": "q8_0", "down_proj": "q5_1"}
"""The layers that are not q4_1 in q4_m."""


def exported_bytes(model: PreTrainedModel, dtype: torch.dtype = torch.bfloat16) -> dict[str, int]:
    """
    Return the bytes of all weights by format, without the headers of files.

    Args:
        model (`nn.Module`): Causal language model in full precision, which may be on the meta device.
        dtype (`torch.dtype`): Of weights that are not quantised: embeddings, norms, biases, head; all in `merged`.
    """
    head, parameters = model.get_output_embeddings(), list(model.parameters())
    layers = [module for module in model.modules() if isinstance(module, (nn.Linear, Conv1D)) and module is not head]
    linear = {layer.weight: layer for layer in layers}
    kept = sum(parameter.numel() for parameter in parameters if parameter not in linear) * dtype.itemsize

    def of_matrix(name: str, weight: torch.Tensor, layer: nn.Module) -> int:
        count, rows = weight.numel(), weight.shape[0]
        if name == "nf4":
            return packed_bytes(count)
        if not isinstance(layer, nn.Linear):  # torchao and the ternary layers take these alone
            return count * dtype.itemsize
        return count + 5 * rows if name == "int8" else math.ceil(count / 4) + 4

    sizes = {"merged": sum(parameter.numel() for parameter in parameters) * dtype.itemsize}
    sizes |= {
        name: kept + sum(of_matrix(name, weight, layer) for weight, layer in linear.items())
        for name in ("int8", "nf4", "bitnet")
    }
    large = {embedding.weight for embedding in (model.get_input_embeddings(), head) if embedding is not None}

    def of_tensor(kind: str, name: str, parameter: nn.Parameter) -> int:
        if parameter.dim() == 1:
            return 4 * parameter.numel()
        if kind == "f16" or parameter.shape[-1] % 32:
            return 2 * parameter.numel()
        if parameter in large:
            kind = "q8_0"
        elif kind == "q4_m":
            kind = GGUF_MIX.get(name.split(".")[-2], "q4_1")
        return parameter.numel() // 32 * GGUF_BLOCKS[kind]

    kinds = ("f16", *GGUF_BLOCKS, "q4_m")
    return sizes | {
        f"gguf-{kind}": sum(of_tensor(kind, *named) for named in model.named_parameters()) for kind in kinds
    }
