"""Attention as a GPU's fused kernels hold it: no scores of every token with every other, whatever the kernel."""

from __future__ import annotations

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

Tensor = torch.Tensor

NAME = "hf_hybrid_fused"


class _Fused(torch.autograd.Function):
    @staticmethod
    def forward(ctx, query, key, value, bias):
        batch, heads, length, _ = query.shape
        shape = (batch, heads, length, value.shape[-1])
        result = torch.empty_permuted(shape, (0, 2, 1, 3), dtype=query.dtype, device=query.device)
        logsumexp = torch.empty(shape[:-1], dtype=torch.float32, device=query.device)
        ctx.save_for_backward(query, key, value, bias, result, logsumexp)
        return result

    @staticmethod
    def backward(ctx, grad):
        query, key, value, _, _, _ = ctx.saved_tensors
        return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value), None


def _attention(module, query, key, value, attention_mask, **kwargs) -> tuple[Tensor, None]:
    """What `F.scaled_dot_product_attention` allocates where it is fused: a shape without numbers."""
    if torch.is_autocast_enabled("cpu"):
        query, key, value = (tensor.to(torch.get_autocast_dtype("cpu")) for tensor in (query, key, value))
    groups = query.shape[1] // key.shape[1]
    if groups > 1 and attention_mask is not None:  # kernels with a mask take no groups: transformers repeats the heads
        key, value = (tensor.repeat_interleave(groups, dim=1) for tensor in (key, value))
    bias = attention_mask
    if bias is not None and bias.dtype == torch.bool:
        bias = torch.zeros_like(bias, dtype=query.dtype)  # what kernels turn it into, in each layer anew
    return _Fused.apply(query, key, value, bias).transpose(1, 2).contiguous(), None


def _mask(*, kv_length: int, local_size: int | None = None, **kwargs) -> Tensor | None:
    """None where attention is causal and nothing else, as transformers finds by looking at the values of a batch."""
    if local_size is None or kv_length < local_size:
        return None
    kwargs["allow_is_causal_skip"] = False
    return sdpa_mask(kv_length=kv_length, local_size=local_size, **kwargs)


def register() -> str:
    """Make the attention known to transformers; returns the name that a config asks for it with."""
    AttentionInterface.register(NAME, _attention)
    AttentionMaskInterface.register(NAME, _mask)
    return NAME
