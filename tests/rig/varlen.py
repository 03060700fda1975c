"""A twin of `torch.nn.attention.varlen.varlen_attn`, which needs a GPU."""

import torch
import torch.nn.functional as F


def varlen_twin(query, key, value, cu_q, cu_k, max_q, max_k, *, scale=None, window_size=(-1, -1), enable_gqa=False):
    """`torch.nn.attention.varlen.varlen_attn` as its documentation has it, in plain operations: causal, lower right."""
    assert cu_q.dtype == cu_k.dtype == torch.int32 and window_size[1] == 0
    assert enable_gqa == (query.shape[1] != key.shape[1])
    assert max_q == cu_q.diff().max() and max_k == cu_k.diff().max()
    parts = []
    for n in range(len(cu_q) - 1):
        rows, keys = slice(cu_q[n], cu_q[n + 1]), slice(cu_k[n], cu_k[n + 1])
        q, k, v = (t.transpose(0, 1) for t in (query[rows], key[keys], value[keys]))
        rows, keys = (torch.arange(tensor.shape[1], device=query.device) for tensor in (q, k))
        back = rows[:, None] + k.shape[1] - q.shape[1] - keys
        seen = (back >= 0) & ((back <= window_size[0]) | (window_size[0] < 0))
        parts.append(F.scaled_dot_product_attention(q, k, v, seen, scale=scale, enable_gqa=enable_gqa).transpose(0, 1))
    return torch.cat(parts)
