"""
A tree on the model's device: attention, in which every segment attends to its path from the root and to itself
causally, and the [`FlatRow`] that a model gets in place of a padded batch.

A mask of the square of the flat row would do, but attention would then cost the square of the row, whatever the mask
hides. Here each segment is a small attention of its own. Its queries are its own tokens, its keys those of its path and
its own, gathered. In a path the index of a key is its distance from the first token of the row, so "causal" means what
it means in a single row whose last tokens are the queries: aligned at the lower right. A sliding window is a band of
that mask. Where tokens of an image see it whole (images.py), the mask shows them so much more.

    queries    c c                keys of the path    s s s b | c c
                                                      1 1 1 1   1 .
                                                      1 1 1 1   1 1

**Which way.** [`way_of`] chooses one of four, and the model's own attention computes what is no tree:

| way | where | what computes |
|---|---|---|
| `by_flash_of_model` | the model's own is flash attention | that, in one call: a segment is a sequence |
| `in_one_call` | a GPU, 16 bits | torch's `varlen_attn`, in the same way |
| `by_flex` | caps (Gemma 2), sinks (gpt-oss), images seen whole; on a GPU | `flex_attention`: who is in whose subtree |
| `by_segment` | elsewhere | `scaled_dot_product_attention`, or with caps and sinks plain products, per segment |

`varlen_attn` ran on one H200 with torch 2.11, and `by_flex` has not run on a GPU; in the tests plain references stand
in. `varlen_attn` has no dropout. So attention with dropout is computed segment by segment: what stands behind a prefix
draws for each row, and the prefix once.

**Compiled layers.** What a compiled layer reads of an object becomes a guard: another value compiles anew. Of a
[`Layout`] it reads tensors, and numbers that count as dynamic. Segments are computed outside of what is compiled. An
operator for them was slower where rows share (six layers of SmolLM2's shape, a CPU: 1.80 instead of 1.55 s a step of
agents' rows), and hardly faster elsewhere (instructions: 0.68 instead of 0.71 s).

**How it gets into a model.** [`tree_attention`] registers an attention with transformers' `AttentionInterface`, beside
the one that the model has, and a config names the one to use. A model passes arguments of its forward on to every
attention, so the layout travels as the argument `tree_layout`. That works in recomputed layers, in layers that are
streamed, and on the threads of the backward pass, where a global variable would be another one. Without a layout the
model's own attention computes, with its own mask, so other batches may go through the model meanwhile.

**The mask.** A model that is given a mask of four dimensions makes none. [`no_mask`] is one that nothing can be
computed with: should a tree ever reach the model's own attention, it raises an error. Its shape has the number of the
layout, for attentions whose layers do not pass arguments on (StableLM, Nemotron).
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import sys
from collections.abc import Callable, Generator, Mapping, Sequence
from operator import attrgetter, itemgetter
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import repeat_kv
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hf_hybrid.compat import options_for_fewer_heads
from hf_hybrid.rows.router_loss import OPTION
from hf_hybrid.rows.tree import IGNORED, Batch, Segment, Targets, Tree, on_device

ARGUMENT = "tree_layout"
"""Argument of a model's forward that holds the [`Layout`]."""
PREFIX = "hf_hybrid_tree_or_"
MOST_KEYS_IN_FLOAT32 = 512
"""
Up to so many keys, a CPU attends faster in fp32 than in 16 bits. For 9 heads of size 64 its backward pass takes 1.9
instead of 6.5 ms with 140 keys, and 23 instead of 26 with 512.
"""
MOST_COMPILATIONS = 64
"""Of flex attention. Beyond torch's 8, it would compute without a kernel of its own."""
SMALL_BLOCKS = {
    **{f"fwd_{name}": value for name, value in {"BLOCK_M": 32, "BLOCK_N": 32, "num_stages": 2}.items()},
    **{f"bwd_{name}": 32 for name in ("BLOCK_M1", "BLOCK_N1", "BLOCK_M2", "BLOCK_N2")}, "bwd_num_stages": 2,
}  # fmt: skip
"""
Options of flex attention for heads above 128. torch's own take more memory of a multiprocessor than GPUs of sm_86,
sm_89 and sm_12x have, forward or backward. The blocks backward are those that were the fastest of what fits there
(https://github.com/pytorch/pytorch/pull/198228).
"""
FLASH_DTYPES, MOST_HEAD_SIZE = (torch.float16, torch.bfloat16), 256


class CannotAttendError(NotImplementedError):
    """A layer asks for an attention that does not exist in a tree; the message is a clause that says which."""


def tree_attention(own: str) -> str:
    """
    Register the attention of trees for models whose own attention is `own`, and return the name for their configs.

    Without a `tree_layout` it is `own`, mask and all.
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


class _NoMask(Tensor):
    """A mask that only attentions of transformers' interface can get: other readers are named."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        try:
            return super().__torch_function__(func, types, args, kwargs or {})
        except (RuntimeError, IndexError) as error:
            frame: Any = sys._getframe()
            while not isinstance(frame.f_locals.get("self"), nn.Module):
                frame = frame.f_back
            reader = f"`{type(frame.f_locals['self']).__name__}`"
            because = f"{reader} reads the mask, and is no attention of transformers' interface"
            raise CannotAttendError(because) from error


def no_mask(device: torch.device, layout: int = 1, *, named: bool = False) -> Tensor:
    """
    Return what a model gets in place of a mask. It holds nothing, and its shape tells the number of the `layout`, to
    attentions whose layers do not pass arguments on. `named`: an error tells which module computes with it.
    """
    mask = torch.zeros(1, layout, 0, 0, device=device)
    return mask.as_subclass(_NoMask) if named else mask


class _Instead:
    """An object with other values of some attributes."""

    def __init__(self, of: Any, **values: Any):
        vars(self).update(values, _of=of)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._of, name)


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
    tree_layout: Layout | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """
    Compute the attention of a flat row, with the arguments that transformers gives.

    `own` names the model's own attention. It computes where there is no `tree_layout`, and if it is flash attention,
    in trees too. With caps or sinks `dropout` must be 0. Queries, keys and values are `[1, heads, slots, size]`.
    Returns the outputs, `[1, slots, heads, size]`, and no weights.

    Raises:
        CannotAttendError: If the layer asks for more than a tree has.
    """
    layout, plain = tree_layout, kwargs.get("softcap") is None and kwargs.get("s_aux") is None
    if layout is None and attention_mask is not None and not attention_mask.numel():
        layout = Layout.known.get(attention_mask.shape[1])
    if layout is None:
        if isinstance(attention_mask, _NoMask):
            raise CannotAttendError(f"`{type(module).__name__}` is not told where rows end")
        return _of_model(own, module)(query, key, value, attention_mask, scaling=scaling, dropout=dropout, **kwargs)
    if not (compiling := torch.compiler.is_compiling()):
        layout.attended = True
    if kwargs.get("position_bias") is not None:
        raise CannotAttendError("its attention has a bias by position")
    if dropout and not plain:
        raise CannotAttendError("its attention has dropout beside caps or sinks")
    if not getattr(module, "is_causal", True) or kwargs.get("is_causal") is False:
        raise CannotAttendError("its attention is not causal")
    kind = query.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else query.dtype
    # Compiled layers have one way, so they do not ask for the number of keys.
    in_float32 = kind == "cpu" and dtype in FLASH_DTYPES and plain
    in_float32 = in_float32 and (compiling or layout.most_keys <= MOST_KEYS_IN_FLOAT32)
    query, key, value = (tensor.to(torch.float32 if in_float32 else dtype) for tensor in (query, key, value))
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    ahead = layout.sees[kwargs.get("sliding_window") is not None]
    way = way_of(own, layout, query, key, value, plain, dropout, ahead)
    with torch.autocast(kind, enabled=False):
        if way == "by_flash_of_model":
            options = {**kwargs, **layout.lengths(), "scaling": scaling, "dropout": dropout}
            keys, values = layout.gather(key, 2), layout.gather(value, 2)
            output = _of_model(own, module)(query, keys, values, None, **options)[0]
        else:
            asked = Asked(scaling, *map(kwargs.get, ("sliding_window", "softcap", "s_aux")), dropout)
            output = getattr(layout, way)(query, key, value, asked)
    return output.to(dtype).contiguous(), None


def way_of(
    own: str, layout: Layout, query: Tensor, key: Tensor, value: Tensor, plain: bool, dropout: float, ahead: bool
) -> str:
    """
    Return which way attends, the name of a method of [`Layout`] but for the first. `plain`: no caps, no sinks.
    `ahead`: tokens of images see what stands behind them.
    """
    if "flash" in own and not (plain and torch.compiler.is_compiling()):
        return "by_flash_of_model"
    if plain and not dropout and not ahead and layout.flashes(query, key, value):
        return "in_one_call"
    return "by_flex" if query.device.type == "cuda" and not dropout and not (plain and not ahead) else "by_segment"


def _of_model(own: str, module: Any) -> Callable[..., Any]:
    """Return the model's own attention for a layer. Flash attention finds its kernels by the name in the config."""
    eager: Any = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    compute: Any = ALL_ATTENTION_FUNCTIONS.get_interface(own, eager)
    if "flash" in own:
        module = _Instead(module, config=_Instead(module.config, _attn_implementation=own))
    return functools.partial(compute, module)


class Asked(NamedTuple):
    """What a layer asks of its attention."""

    scaling: float
    window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None
    dropout: float = 0.0


class Piece(NamedTuple):
    """What the attention of a segment reads."""

    path: Callable[[Sequence[Any]], tuple] | None  # takes those of its path, and itself, out of all; `None`: itself
    mask: Tensor | None  # what is added to the scores, `[queries, keys]`; without one it is causal


class Layout:
    """
    What the attentions of all layers need of the segments of a flat row, made once.

    `tensors` are those of [`tensors_of`] on the device; without them they are made when they are needed. `images` are
    the [`RowImages`] of the flat row.
    """

    attended = False
    """Whether attentions have computed with it, as far as they are not compiled."""
    holds_no_activations = True
    """Layers may get it in a walk of micro-batches (streaming/walk.py)."""
    _numbers = itertools.count(2)  # a compiler makes a constant of 0 and 1
    known: dict[int, Layout] = {}
    """By number, those that are computed with: whoever does that puts them in and takes them out."""

    def __init__(
        self, segments: tuple[Segment, ...], device: torch.device, tensors: Sequence[Tensor] | None = None,
        images: Any = None,
    ):  # fmt: skip
        self.segments, self.device = segments, device
        self._behind = None if images is None else images.behind
        self.sees = (False, False) if self._behind is None else images.of.sees
        """Whether tokens of images see those behind them: in layers without a window, and in those with one."""
        self.sizes = [segment.end - segment.begin for segment in segments]
        self.most_queries = max(self.sizes)
        self.most_keys = max(segment.keys for segment in segments)
        self.shares = any(segment.path for segment in segments)
        self.on_flash = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)
        self._masks: dict[tuple, Any] = {}
        self.passes: dict[float, Any] = {}
        """Those of layers with a state (recurrent.py)."""
        self.keys: Tensor | None = None
        if tensors is not None or device.type != "cpu":
            self._keep(tensors_of(segments) if tensors is None else tensors)
        self.number = next(self._numbers)

    def _keep(self, tensors: Sequence[Tensor]) -> None:
        keys, of_queries, of_keys = (tensor.to(self.device, non_blocking=True) for tensor in tensors)
        if not self.shares:
            keys = torch.arange(self.segments[-1].end, device=self.device)
        self.keys, self.of_queries, self.of_keys = keys, of_queries.int(), of_keys.int()
        self.for_fewer_heads = options_for_fewer_heads()

    # By flash attention.

    def lengths(self) -> dict[str, Any]:
        """Return what transformers' flash attention takes: where the queries and keys of each segment end."""
        if self.keys is None:  # flash attention for a CPU
            self._keep(tensors_of(self.segments))
        lengths = {"max_length_q": self.most_queries, "max_length_k": self.most_keys}
        return {**lengths, "cu_seq_lens_q": self.of_queries, "cu_seq_lens_k": self.of_keys}

    def gather(self, tensor: Tensor, dim: int) -> Tensor:
        """
        Return the keys or values of all segments, one path after the other; where no rows share, they stand so already.

        Indexing with a tensor adds up its gradient in a fixed order, on a GPU too, but not in compiled layers there.
        """
        gathers = torch.compiler.is_compiling() or self.shares  # compiled layers have one way
        return tensor[(slice(None),) * dim + (self.keys,)] if gathers else tensor

    def flashes(self, query: Tensor, key: Tensor, value: Tensor) -> bool:
        """Whether one call of flash attention can do it: on a GPU that has it, in 16 bits, with heads that fit."""
        fits = value.shape[-1] <= query.shape[-1] == key.shape[-1] <= MOST_HEAD_SIZE
        return self.on_flash and query.dtype in FLASH_DTYPES and fits

    def in_one_call(self, query: Tensor, key: Tensor, value: Tensor, asked: Asked) -> Tensor:
        """
        Return the outputs of all segments, `[1, slots, heads, size]`, by one call of `varlen_attn`. It takes heads of
        one size, a multiple of 8: others get zeros at their end, which change no score and are no output.
        """
        from torch.nn.attention import varlen

        size, of_values = -(-query.shape[-1] // 8) * 8, value.shape[-1]
        query, key, value = (_widened(tensor[0].transpose(0, 1), size) for tensor in (query, key, value))
        keys, values = self.gather(key, 0), self.gather(value, 0)
        output: Any = varlen.varlen_attn(
            query, keys, values, self.of_queries, self.of_keys, self.most_queries, self.most_keys,
            scale=asked.scaling, window_size=(-1 if asked.window is None else asked.window - 1, 0),
            **(self.for_fewer_heads if query.shape[1] != key.shape[1] else {}),
        )  # fmt: skip
        return output[None, ..., :of_values]

    # By flex attention.

    @torch.compiler.disable
    def by_flex(self, query: Tensor, key: Tensor, value: Tensor, asked: Asked) -> Tensor:
        """Return the outputs of all segments, `[1, slots, heads, size]`, by one call of `flex_attention`."""
        from torch.nn.attention.flex_attention import AuxRequest

        scaling, window, softcap, sinks, _ = asked
        flex, slots = _flex_attention(query.device.type)[0], query.shape[2]
        query, key, value = (F.pad(tensor, (0, 0, 0, _few_lengths(slots) - slots)) for tensor in (query, key, value))
        options: dict[str, Any] = {"scale": scaling, "enable_gqa": query.shape[1] != key.shape[1]}
        if softcap is not None:
            options["score_mod"] = _capped(softcap)
        if sinks is not None:
            options["return_aux"] = AuxRequest(lse=True)
        if max(query.shape[-1], value.shape[-1]) > 128:
            options["kernel_options"] = SMALL_BLOCKS
        # Kinds of layers, lengths, and passes with and without gradients. A second cap or scaling is a constant as the
        # first is: torch 2.15 refuses a symbol in their place.
        with torch._dynamo.config.patch(recompile_limit=MOST_COMPILATIONS, specialize_float=True):
            output = flex(query, key, value, block_mask=self._block_mask(window), **options)
        if sinks is not None:
            output, aux = output
            share = torch.sigmoid(aux.lse - sinks.to(aux.lse.dtype)[:, None])  # of the keys, beside the sink
            output = (output * share[..., None]).to(value.dtype)
        return output[:, :, :slots].transpose(1, 2)

    def _block_mask(self, window: int | None) -> Any:
        """Return which blocks of slots see which; layers share it."""
        if ("flex", window) not in self._masks:
            length = _few_lengths(self.segments[-1].end)
            parts = np.zeros((3, length), np.int64)  # nothing sees padding
            parts[:2, : self.segments[-1].end] = self._subtrees()
            if self._behind is not None and self.sees[window is not None]:
                parts[2, : self.segments[-1].end] = self._behind
            parts = torch.from_numpy(parts).to(self.device, non_blocking=True)
            self._masks["flex", window] = _flex_attention(self.device.type)[1](
                _visible(*parts, window), None, None, length, length, device=self.device
            )
        return self._masks["flex", window]

    def _subtrees(self) -> tuple[np.ndarray, np.ndarray]:
        """Return for each slot where the subtree of its segment ends, and its distance from the root: `[slots]`."""
        ends = {}
        for segment in self.segments:
            ends[segment.begin] = segment.end
            ends.update((begin, segment.end) for begin, _ in segment.path)
        depths = [np.arange(segment.keys - length, segment.keys) for segment, length in zip(self.segments, self.sizes)]
        return np.repeat([ends[segment.begin] for segment in self.segments], self.sizes), np.concatenate(depths)

    # Segment by segment.

    @torch.compiler.disable
    def by_segment(self, query: Tensor, key: Tensor, value: Tensor, asked: Asked) -> Tensor:
        """Return the outputs of all segments, `[1, slots, heads, size]`, by a function for each: torch's if it can."""
        groups, outputs, plain = query.shape[1] // key.shape[1], [], asked.softcap is None and asked.sinks is None
        key, value = repeat_kv(key, groups), repeat_kv(value, groups)
        queries, of_keys, of_values = query.split(self.sizes, 2), key.split(self.sizes, 2), value.split(self.sizes, 2)
        dtype = query.dtype if plain else torch.promote_types(query.dtype, torch.float32)
        for number, (path, mask) in enumerate(self.pieces(dtype, asked.window, masked=not plain)):
            keys, values = of_keys[number], of_values[number]
            if path is not None:
                keys, values = torch.cat(path(of_keys), 2), torch.cat(path(of_values), 2)
            if mask is not None and not plain:
                outputs.append(_with_caps_and_sinks(queries[number], keys, values, mask, asked))
                continue
            attended = F.scaled_dot_product_attention(
                queries[number], keys, values, mask, asked.dropout, is_causal=mask is None, scale=asked.scaling
            )
            outputs.append(attended)
        return torch.cat(outputs, 2).transpose(1, 2)

    def pieces(self, dtype: torch.dtype, window: int | None, masked: bool = False) -> list[Piece]:
        """Return what the attention of each segment reads; layers share it. `masked`: each has a mask."""
        known = dtype, window, masked
        if known not in self._masks:
            self._masks[known], numbers = [], {segment.begin: n for n, segment in enumerate(self.segments)}
            of_slots = self._behind if self.sees[window is not None] else None
            for segment, length in zip(self.segments, self.sizes):
                path = [numbers[begin] for begin, _ in segment.path] + [numbers[segment.begin]]
                behind = None if of_slots is None else of_slots[segment.begin : segment.end]
                plain = not (masked or segment.path) and (window is None or length <= window)
                plain = plain and (behind is None or not behind.any())
                mask = None if plain else self._mask(length, segment.keys, dtype, window, behind)
                self._masks[known].append(Piece(itemgetter(*path) if segment.path else None, mask))
        return self._masks[known]

    def _mask(
        self, queries: int, keys: int, dtype: torch.dtype, window: int | None, behind: np.ndarray | None
    ) -> Tensor:
        """
        Return what is added to the scores, `[queries, keys]`; equal segments share it. Queries see so far `behind`
        themselves.
        """
        window = None if window is None or window >= keys else window
        known = (queries, keys, dtype, window, None if behind is None else behind.tobytes())
        if known not in self._masks:
            back = torch.arange(keys - queries, keys, device=self.device)[:, None]
            back = back - torch.arange(keys, device=self.device)
            ahead = 0 if behind is None else torch.from_numpy(behind).to(self.device)[:, None]
            hidden = back + ahead < 0
            hidden = hidden if window is None else hidden | (back >= window)
            self._masks[known] = torch.zeros(queries, keys, dtype=dtype, device=self.device).masked_fill_(
                hidden, float("-inf")
            )
        return self._masks[known]


def _with_caps_and_sinks(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor, asked: Asked) -> Tensor:
    """Return the outputs of a segment, `[1, heads, queries, size]`; weights are computed in the type of the mask."""
    scores = (query @ keys.transpose(2, 3)).to(mask.dtype) * asked.scaling
    if asked.softcap is not None:
        scores = torch.tanh(scores / asked.softcap) * asked.softcap
    scores = scores + mask
    if asked.sinks is not None:
        sinks = asked.sinks.to(mask.dtype)[:, None, None].expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, sinks], -1)
    return scores.softmax(-1)[..., : keys.shape[2]].to(values.dtype) @ values


def _widened(heads: Tensor, size: int) -> Tensor:
    """Return heads `[slots, heads, any size]` with zeros at their end, if they are smaller."""
    return heads if heads.shape[-1] == size else F.pad(heads, (0, size - heads.shape[-1]))


def spans_of(segment: Segment) -> list[slice]:
    """Return the slots of the keys of a segment: those of its path, and its own."""
    return [slice(begin, end) for begin, end in (*segment.path, (segment.begin, segment.end))]


def tensors_of(segments: Sequence[Segment]) -> list[Tensor]:
    """
    Return what flash attention needs of some segments, on the host: the slots of the keys of all, one path after the
    other (none if no rows share: they are all slots then); where the queries, and where the keys of each segment end,
    from 0 on: both `[segments + 1]`.
    """
    paths = [spans_of(segment) for segment in segments] if any(segment.path for segment in segments) else []
    keys = np.concatenate([np.arange(0), *(np.arange(span.start, span.stop) for path in paths for span in path)])
    of_queries = np.array([0, *(segment.end for segment in segments)])
    of_keys = np.array([0, *itertools.accumulate(segment.keys for segment in segments)])
    return [torch.from_numpy(array) for array in (keys, of_queries, of_keys)]


@functools.cache
def _flex_attention(kind: str) -> tuple[Any, Any]:
    """Return `flex_attention` and what makes its masks. A GPU needs them compiled."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    if kind != "cuda":
        return flex_attention, create_block_mask
    return torch.compile(flex_attention, dynamic=False), torch.compile(create_block_mask, dynamic=False)


def _few_lengths(slots: int) -> int:
    """
    Return the next power of two, or three quarters of it: flex attention is compiled once for each length, even with
    `dynamic=True` (https://github.com/pytorch/pytorch/pull/189952). It skips blocks in which nothing is visible.
    """
    power = max(128, 1 << (slots - 1).bit_length())
    return power * 3 // 4 if power > 128 and slots <= power * 3 // 4 else power


@functools.cache
def _capped(softcap: float) -> Any:
    return lambda score, batch, head, query, key: softcap * torch.tanh(score / softcap)


def _visible(ends: Tensor, depths: Tensor, behind: Tensor, window: int | None) -> Any:
    """
    Return flex attention's question: may a slot see another? The first tensors are of [`Layout._subtrees`], and so far
    `behind` itself a slot sees.
    """

    def below(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query + behind[query]) & (query < ends[key])

    if window is None:
        return below
    return lambda batch, head, query, key: below(batch, head, query, key) & (depths[query] - depths[key] < window)


# Flat rows.


class FlatRow(NamedTuple):
    """
    A tree as a model gets it in place of a padded batch, and how its loss reads it.

    The model's own loss is a sum over targets: one that several rows read stands there several times, and nothing is
    put back. TRL reads values of each label (log-probability, entropy, ...), and other losses read hidden states. These
    are computed once, and put where the padded batch has them: at `places`, which are indices into
    `[batch, length - 1]`. Where rows share a target they read the same value, and autograd adds up their gradients.
    """

    ids: Tensor  # [1, slots]
    positions: Tensor  # [1, slots], or with several axes [axes, 1, slots]
    slots: Tensor  # where each target is predicted: [targets]
    tokens: Tensor  # what is predicted there: [targets]
    readers: Tensor  # the target of each label: [labels]
    places: Tensor  # [labels]
    shape: tuple[int, int]  # of the batch
    repeats: bool  # whether a target stands once for each row that reads it; then nothing is put back
    reads: Tensor | None  # [`Tree.reads`], if the model has a router's loss
    divisors: Tensor | None  # where losses are means: of the loss of targets if they repeat, else of rows
    layout: Any = None  # once it is on the device
    images: Any = None  # [`RowImages`], once they are

    @classmethod
    def on(
        cls,
        device: torch.device,
        trees: Sequence[tuple[Tree, Sequence[Batch]]],
        beside: Sequence[Tensor] = (),
        *,
        repeats: bool,
        balances: bool = False,
        images: Any = None,
    ) -> tuple[list[dict[int, FlatRow]], list[Tensor]]:
        """
        Move trees to a device, each with the batches that its rows come from, and other tensors `beside` them: all in
        one copy. Return for each tree how each of its batches reads it, by the number of the batch. `balances`: they
        have a router's loss. A batch with such a loss, or whose loss is a mean or repeats targets, has its own tree.
        """
        tensors, made = list(beside), []
        for tree, batches in trees:
            segments, rows = tree.segments, cls._of(tree, batches, Targets.of(tree, batches), repeats, balances, images)
            of_layout = [] if device.type == "cpu" else tensors_of(segments)
            of_images = None if images is None else images.of_row(device, tree)
            made.append((segments, rows, of_layout, of_images))
            for parts in (of_layout, *rows.values()):
                tensors += filter(torch.is_tensor, parts)
        known = dict(zip(map(id, tensors), tensors))  # batches that read one tree have tensors in common
        moved: dict[int, Any] = dict(zip(known, on_device(list(known.values()), device), strict=True))
        there = []
        for segments, rows, of_layout, of_images in made:
            layout = Layout(segments, device, [*map(moved.__getitem__, map(id, of_layout))] or None, of_images)
            there.append({})
            for number, row in rows.items():
                parts: Any = map(moved.get, map(id, row), row)
                there[-1][number] = cls(*parts)._replace(layout=layout, images=of_images)
        return there, [*map(moved.__getitem__, map(id, beside))]

    @classmethod
    def _of(
        cls, tree: Tree, batches: Sequence[Batch], targets: Targets, repeats: bool, balances: bool, images: Any
    ) -> dict[int, FlatRow]:
        """As [`on`] for one tree, on the host and without a layout."""
        ids, positions = tree.flat()
        if images is not None:
            ids, several = images.decoded(ids), tree.positions(batches)
            positions = positions if several is None else several
        ids, positions = ids[None], positions.unsqueeze(-2)
        slots, tokens, readers, places = targets
        found, is_empty = {}, not len(slots)
        for number in sorted(set(map(attrgetter("batch"), tree.rows))):
            batch, mine = batches[number], places[:, 0] == number
            (_, rows, columns), divisors = places[mine].T, batch.divisors
            if repeats:
                order = readers.argsort(stable=True)
                slots, tokens = slots[readers[order]], tokens[readers[order]]
                divisors = None if divisors is None else divisors[places[order, 1]]
            if is_empty:  # a loss of nothing, with a gradient of zero
                slots, tokens = torch.zeros(1, dtype=torch.long), torch.full((1,), IGNORED)
                divisors = torch.ones_like(slots) if repeats and divisors is not None else divisors
            count, length = batch.ids.shape
            if (packed := batch.packed) is not None:  # each label stands where its document does
                (count, length), rows, columns = packed.shape, packed.rows[rows], columns + packed.shifts[rows]
            shape, own, in_batch = (count, length), readers[mine], rows * (length - 1) + columns
            reads = tree.reads(batch) if balances else None
            found[number] = cls(ids, positions, slots, tokens, own, in_batch, shape, repeats, reads, divisors)
        return found

    def inputs(self, mask: Tensor, labels: bool) -> dict[str, Any]:
        """Return what stands in place of a batch; the mask is [`no_mask`]. Only models get `labels`, no backbones."""
        tokens = {"input_ids": self.ids, "attention_mask": mask, "position_ids": self.positions, "use_cache": False}
        tokens |= {} if self.images is None else self.images.inputs()
        if not labels:
            return tokens
        # Of means the model would compute one: it gets no labels, and `mean_losses` stand in for its loss behind it.
        targets = None if self.repeats and self.divisors is not None else self.tokens[None]
        balances = {} if self.reads is None else {OPTION: False}  # the losses are added behind the model
        return {**tokens, "labels": targets, "shift_labels": targets, **balances}

    def values(self, of_targets: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """
        Bring values of targets, each `[1, targets]`, into the layout of the batch, `[batch, length - 1]`; 0 elsewhere.
        """
        rows, length = self.shape
        alike: dict[Any, list[str]] = {}
        for name, values in of_targets.items():
            # What has a gradient is read alone: the head has less to do for what no loss reads.
            alike.setdefault(name if values.requires_grad else (values.device, values.dtype), []).append(name)
        read: dict[str, Tensor] = {}
        for names in alike.values():
            stacked = of_targets[names[0]] if len(names) == 1 else torch.cat([of_targets[name] for name in names])
            places, readers = (tensor.to(stacked.device) for tensor in (self.places, self.readers))
            put = stacked.new_zeros(len(names), rows * (length - 1)).index_copy_(1, places, stacked[:, readers])
            read.update(zip(names, put.view(len(names), rows, length - 1), strict=True))
        return read

    def states(self, states: Tensor) -> Tensor:
        """
        Return states `[1, slots, width]` as those of a padded batch, `[batch, length - 1, width]`. Padding has the
        first one: a loss may divide by what it multiplies with 0 afterwards, which of zeros would be NaN.
        """
        rows, length = self.shape
        slots, readers, places = (part.to(states.device) for part in (self.slots, self.readers, self.places))
        filled = states[0, :1].detach().repeat(rows * (length - 1), 1)
        return filled.index_put((places,), states[0][slots[readers]]).view(rows, length - 1, -1)
