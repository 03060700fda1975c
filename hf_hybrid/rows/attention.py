"""
Attention in a tree of rows: every segment attends to its path from the root, and to itself causally.

A mask of the square of the flat row would do, but attention would then cost the square of the row, whatever the mask
hides. Here each segment is a small attention of its own. Its queries are its own tokens, its keys those of its path and
its own, gathered. In a path the index of a key is its distance from the first token of the row, so "causal" means what
it means in a single row whose last tokens are the queries: aligned at the lower right. A sliding window is a band of
that mask.

    queries    c c                keys of the path    s s s b | c c
                                                      1 1 1 1   1 .
                                                      1 1 1 1   1 1

**One call or several.** On a GPU with flash attention all segments go through one call of torch's `varlen_attn`, whose
sequences of queries and of keys may differ in length. Elsewhere there is one call of `scaled_dot_product_attention` per
segment. `varlen_attn` needs a GPU: it ran on one H200 with torch 2.11. A test gives its arguments to a plain reference
that has the signatures of 2.11 and of 2.12. It has no dropout. So attention with dropout, where rows share nothing, is
computed segment by segment.

**How it gets into a model.** [`tree_attention`] registers an attention with transformers' `AttentionInterface`, beside
the one that the model has, and a config names the one to use. A model passes arguments of its forward on to every
attention, so the segments travel as the argument `tree_segments`, as plain numbers. That works in recomputed layers, in
layers that are streamed, and on the threads of the backward pass, where a global variable would be another one. Without
segments the model's own attention computes, with its own mask, so other batches may go through the model meanwhile.

**The mask.** A model that is given a mask of four dimensions makes none. [`no_mask`] is one that nothing can be
computed with: should a tree ever reach the model's own attention, it raises an error.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Generator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import repeat_kv
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hf_hybrid.compat import varlen_attention
from hf_hybrid.rows.tree import Segment

ARGUMENT = "tree_segments"
"""Argument of a model's forward that holds the segments."""
PREFIX = "hf_hybrid_tree_or_"
NOT_IN_A_TREE = {
    "softcap": "its attention caps its scores",
    "s_aux": "its attention has sinks",
    "position_bias": "its attention has a bias by position",
}
"""Arguments of an attention that a tree does not take, and what they are."""
MOST_KEYS_IN_FLOAT32 = 512
"""
Up to so many keys, a CPU attends faster in fp32 than in 16 bits. For 9 heads of size 64 its backward pass takes 1.9
instead of 6.5 ms with 140 keys, and 23 instead of 26 with 512.
"""
FLASH_DTYPES, MOST_HEAD_SIZE = (torch.float16, torch.bfloat16), 256


class CannotAttendError(NotImplementedError):
    """A layer asks for an attention that does not exist in a tree; the message is a clause that says which."""


def tree_attention(own: str) -> str:
    """
    Register the attention of trees for models whose own attention is `own`, and return the name for their configs.

    Without `tree_segments` it is `own`, mask and all.
    """
    if own.startswith(PREFIX):
        return own
    name = f"{PREFIX}{own}"
    if name not in ALL_ATTENTION_FUNCTIONS:
        AttentionInterface.register(name, functools.partial(attend, own))
        if own in ALL_MASK_ATTENTION_FUNCTIONS:
            AttentionMaskInterface.register(name, ALL_MASK_ATTENTION_FUNCTIONS[own])
    return name


@contextlib.contextmanager
def attention(config: Any, name: str) -> Generator[None]:
    """Context in which the model of a config computes with another attention."""
    before, config._attn_implementation = config._attn_implementation, name
    try:
        yield
    finally:
        config._attn_implementation = before


def no_mask(device: torch.device) -> Tensor:
    """Return what a model gets in place of a mask."""
    return torch.zeros(1, 1, 0, 0, device=device)


def attend(
    own: str,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    tree_segments: tuple[Segment, ...] | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """
    Compute the attention of a flat row, with the arguments that transformers gives.

    `own` names the model's own attention. It computes where there are no `tree_segments`, and where no rows share and
    it is flash attention, which takes rows without padding. Where rows share, `dropout` must be 0. Queries, keys and
    values are `[1, heads, slots, size]`. Returns the outputs, `[1, slots, heads, size]`, and no weights.

    Raises:
        CannotAttendError: If the layer asks for more than a tree has.
    """
    eager: Any = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    compute: Any = ALL_ATTENTION_FUNCTIONS.get_interface(own, eager)
    if tree_segments is None:
        return compute(module, query, key, value, attention_mask, scaling=scaling, dropout=dropout, **kwargs)
    layout, window = layout_of(tree_segments, query.device), kwargs.get("sliding_window")
    obstacles = [obstacle for name, obstacle in NOT_IN_A_TREE.items() if kwargs.get(name) is not None]
    if dropout and layout.shares:
        obstacles.append("its attention has dropout")
    if not getattr(module, "is_causal", True) or kwargs.get("is_causal") is False:
        obstacles.append("its attention is not causal")
    if obstacles:
        raise CannotAttendError(obstacles[0])
    kind = query.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else query.dtype
    in_float32 = kind == "cpu" and dtype in FLASH_DTYPES and layout.most_keys <= MOST_KEYS_IN_FLOAT32
    query, key, value = (tensor.to(torch.float32 if in_float32 else dtype) for tensor in (query, key, value))
    with torch.autocast(kind, enabled=False):
        if "flash" in own and not layout.shares:
            _, ends, _, longest, _ = layout.gathered
            lengths = {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": longest, "max_length_k": longest}
            options = {"scaling": scaling, "dropout": dropout, **kwargs, **lengths}
            output = compute(module, query, key, value, None, **options)[0]
        elif not dropout and layout.flashes(query, key, value):  # `varlen_attn` has no dropout
            output = layout.in_one_call(query, key, value, scaling, window)
        else:
            groups = query.shape[1] // key.shape[1]
            key, value = repeat_kv(key, groups), repeat_kv(value, groups)
            options = {"scale": scaling, "dropout_p": dropout}
            parts = [layout.segment(segment, query, key, value, window, options) for segment in tree_segments]
            output = torch.cat(parts, 2).transpose(1, 2)
    return output.to(dtype), None


class Layout:
    """What the attentions of all layers need of the segments of a flat row, made once."""

    def __init__(self, segments: tuple[Segment, ...], device: torch.device):
        self.segments, self.device = segments, device
        self.most_keys = max(segment.keys for segment in segments)
        self.shares = any(segment.path for segment in segments)
        self._masks: dict[tuple, Tensor] = {}

    def segment(
        self, segment: Segment, query: Tensor, key: Tensor, value: Tensor, window: int | None, options: dict[str, Any]
    ) -> Tensor:
        """Return the outputs of a segment, `[1, heads, slots of the segment, size]`; `options` of torch's function."""
        own = slice(segment.begin, segment.end)
        query, length = query[:, :, own], segment.end - segment.begin
        if not segment.path and (window is None or length <= window):
            key, value = key[:, :, own], value[:, :, own]
            return F.scaled_dot_product_attention(query, key, value, is_causal=True, **options)
        spans = [slice(begin, end) for begin, end in segment.path] + [own]
        key, value = (torch.cat([tensor[:, :, span] for span in spans], 2) for tensor in (key, value))
        mask = self._mask(length, segment.keys, query.dtype, window)
        return F.scaled_dot_product_attention(query, key, value, mask, **options)

    def _mask(self, queries: int, keys: int, dtype: torch.dtype, window: int | None) -> Tensor:
        """Return what is added to the scores, `[queries, keys]`. Layers share it: the backward pass keeps it."""
        window = None if window is None or window >= keys else window
        known = (queries, keys, dtype, window)
        if known not in self._masks:
            back = torch.arange(keys - queries, keys, device=self.device)[:, None]
            back = back - torch.arange(keys, device=self.device)
            hidden = back < 0 if window is None else (back < 0) | (back >= window)
            self._masks[known] = torch.zeros(queries, keys, dtype=dtype, device=self.device).masked_fill_(
                hidden, float("-inf")
            )
        return self._masks[known]

    def flashes(self, query: Tensor, key: Tensor, value: Tensor) -> bool:
        """Whether one call of flash attention can do it: on a GPU that has it, in 16 bits, with heads of one size."""
        return (
            query.device.type == "cuda"
            and query.dtype in FLASH_DTYPES
            and query.shape[-1] == key.shape[-1] == value.shape[-1] <= MOST_HEAD_SIZE
            and torch.cuda.get_device_capability(query.device) >= (8, 0)
        )

    @functools.cached_property
    def gathered(self) -> tuple[Tensor, Tensor, Tensor, int, int]:
        """
        Slots of the keys of all segments, one path after the other; where the queries and the keys of each segment end,
        from 0 on; the most queries and the most keys of a segment.
        """
        index, ends = [], [(0, 0)]
        for segment in self.segments:
            for begin, end in (*segment.path, (segment.begin, segment.end)):
                index.append(torch.arange(begin, end))
            ends.append((segment.end, ends[-1][1] + segment.keys))
        keys = torch.cat(index).to(self.device, non_blocking=True)
        of_queries, of_keys = torch.tensor(ends, dtype=torch.int32).t().contiguous().to(self.device, non_blocking=True)
        longest = max(segment.end - segment.begin for segment in self.segments)
        return keys, of_queries, of_keys, longest, self.most_keys

    def in_one_call(
        self, query: Tensor, key: Tensor, value: Tensor, scaling: float | None, window: int | None
    ) -> Tensor:
        """Return the outputs of all segments, `[1, slots, heads, size]`, by one call of `varlen_attn`."""
        keys, of_queries, of_keys, most_queries, most_keys = self.gathered
        query, key, value = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
        back = -1 if window is None else window - 1
        output = varlen_attention(
            query, key[keys], value[keys], of_queries, of_keys, most_queries, most_keys,
            scale=scaling, window_size=(back, 0),
        )  # fmt: skip
        return output[None]


@functools.lru_cache(maxsize=64)
def layout_of(segments: tuple[Segment, ...], device: torch.device) -> Layout:
    """Return the layout of a flat row. Whoever computes with it forgets it afterwards: `layout_of.cache_clear()`."""
    return Layout(segments, device)
