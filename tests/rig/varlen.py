"""
Twins of `torch.nn.attention.varlen.varlen_attn`, which needs a GPU: what it computes, in plain operations.

They take what torch's function takes, version by version, and no more. The signature of 2.11 was read in the wheel of
2.11.0; those of 2.12.1, 2.13.0 and 2.14.1 have one set of parameters.
"""

import functools
import threading

import torch
import torch.nn.functional as F
from torch.nn.attention import varlen


def varlen_twin(
    query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, return_aux=None, scale=None, window_size=(-1, -1),
    enable_gqa=False, seqused_k=None, block_table=None, num_splits=None,
):  # fmt: skip
    """Of 2.12 and newer: it has to be told if keys have fewer heads."""
    assert seqused_k is block_table is num_splits is None
    assert enable_gqa or query.shape[1] == key.shape[1]
    return varlen_twin_of_2_11(
        query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, return_aux=return_aux, scale=scale, window_size=window_size
    )


def varlen_twin_of_2_11(
    query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, return_aux=None, scale=None, window_size=(-1, -1)
):
    """Of 2.11: causal, lower right."""
    assert return_aux is None
    assert cu_seq_q.dtype == cu_seq_k.dtype == torch.int32 and window_size[1] == 0
    assert max_q == cu_seq_q.diff().max() and max_k == cu_seq_k.diff().max()
    parts = []
    for n in range(len(cu_seq_q) - 1):
        rows, keys = slice(cu_seq_q[n], cu_seq_q[n + 1]), slice(cu_seq_k[n], cu_seq_k[n + 1])
        q, k, v = (t.transpose(0, 1) for t in (query[rows], key[keys], value[keys]))
        rows, keys = (torch.arange(tensor.shape[1], device=query.device) for tensor in (q, k))
        back = rows[:, None] + k.shape[1] - q.shape[1] - keys
        seen = (back >= 0) & ((back <= window_size[0]) | (window_size[0] < 0))
        parts.append(F.scaled_dot_product_attention(q, k, v, seen, scale=scale, enable_gqa=True).transpose(0, 1))
    return torch.cat(parts)


TWINS = {"2.11": varlen_twin_of_2_11, "2.12": varlen_twin}
"""By the version that brought the signature."""


@functools.cache
def take_varlen_on_cpu():
    """Register kernels for torch's own `varlen_attn` on a CPU, where it has none. Nothing else changes in a process."""

    @varlen._varlen_attn.register_kernel("cpu")
    def _(query, key, value, cu_q, cu_k, max_q, max_k, is_causal=False, scale=None, window_size=None, *others):
        output = varlen_twin_of_2_11(query, key, value, cu_q, cu_k, max_q, max_k, scale=scale, window_size=window_size)
        return output.contiguous(), query.new_zeros(query.shape[1::-1]), torch.zeros(2, dtype=torch.uint64)

    @varlen._varlen_attn_backward.register_kernel("cpu")
    def _(grad, query, key, value, out, lse, cu_q, cu_k, max_q, max_k, causal, state, scale=None, window_size=None):
        gradients = []

        def compute():
            leaves = [tensor.detach().requires_grad_() for tensor in (query, key, value)]
            output = varlen_twin_of_2_11(*leaves, cu_q, cu_k, max_q, max_k, scale=scale, window_size=window_size)
            gradients.extend(gradient.contiguous() for gradient in torch.autograd.grad(output, leaves, grad))

        thread = threading.Thread(target=compute)  # autograd is off where a kernel runs
        thread.start()
        thread.join()
        return tuple(gradients)
