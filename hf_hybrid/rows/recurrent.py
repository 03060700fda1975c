"""
Layers with a state that runs along the row: Gated DeltaNet, Mamba 2, short convolutions.

Such a layer reads its tokens one after the other. Each changes a state, and the next token sees the state. In a flat
row the state of one row would run on into the next. But the layer can start from a state, as it does when a model
generates. So a segment of a tree goes on where the one above it ended:

    flat row          s s s s a a b b b c         s is a prefix of two rows, `s a` and `s b`; `c` is another row
    first pass        s s s s                     its last state is kept
    last pass         a a .                       both start from that state; padding is on the right, so that no token
                      b b b                       sees it
                      c . .                       starts from zeros
    flat row again    s s s s a a b b b c

**Passes.** [`passes_of`] makes them. The last ones compute the leaves of the tree, those of similar length together.
Each one before computes segments of one length, whose states are needed further down: behind padding a state would not
be theirs. A pass takes kernels of its own, so a segment gets one only if it saves enough tokens ([`LEAST`]). Others are
computed once for each segment below. In a layer that cannot start from a state each leaf begins at its root.

Sequences of a pass are rows of a batch, and not one row with `cu_seqlens`. transformers 5.24 hands these to kernels
alone: its own functions refuse them (`use_kernel_func_from_hub_with_fallback` in integrations/hub_kernels.py). And a
layer puts what its convolution starts from in front of a row, so a row has one start.

**The state.** A layer writes what it keeps of a row into the cache of a model that generates: the last tokens of its
convolution, and the state of its recurrence. Here it gets [`_States`] as cache. They hold tensors as the layer gave
them, with their graph, so that the gradients of all segments below reach the one above.

**Projections.** They are most of the work of such a layer, and need no rows. A linear layer that reads the layer's
input computes the flat row in the first pass, and its outputs are taken apart. The one that gives the layer's output
computes the flat row in the last pass. In the other passes they compute one token, which nobody reads. Attention,
feed-forward layers, experts, norms and the head compute each token once, as everywhere.

**Which layers.** Those that hold a convolution along the row (`Conv1d`), as nearly all do that have a state. They learn
of the tree by an argument, as attention does. A model whose layers do not get it (Mamba 1, Jamba), need positions
(RecurrentGemma), or have a state and no convolution (MiniMax, RWKV), is computed in padded rows. So is one whose layers
take a cache and do not start from it: its first batch differs from padded rows.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import threading
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hf_hybrid.compat import CACHES
from hf_hybrid.rows.attention import ARGUMENT, CannotAttendError, Layout
from hf_hybrid.rows.tree import Segment

LEAST = 64
"""Tokens that a pass for a segment has to save."""
CHUNK = 64
"""Tokens to a multiple of which most such layers pad."""
_OF_PLACES = ("attention_mask", "position_ids", "position_embeddings")
"""Arguments that belong to the flat row. Rows have no padding on the left, so such layers need no mask."""


def layers_with_state(model: nn.Module) -> list[nn.Module]:
    """Return the layers of a model that have a state along the row."""
    return [module for module in model.modules() if any(isinstance(child, nn.Conv1d) for child in module.children())]


def again(model: Any) -> float:
    """Return the share of a token's memory that each row takes again, also for tokens that it shares."""
    layers = [layer for layer in layers_with_state(model) if _name_of_cache(layer) is None]
    return min(0.5 * len(layers) / model.config.get_text_config().num_hidden_layers, 0.5)


def _name_of_cache(layer: nn.Module) -> str | None:
    """Return the argument by which a layer gets a state; `None` if it cannot start from one."""
    return next((name for name in CACHES if name in inspect.signature(type(layer).forward).parameters), None)


# Passes.


def passes_of(segments: Sequence[Segment], least: float) -> list[list[tuple[int, list[int]]]]:
    """
    Return the passes of a tree. Each is a list of sequences: the number of the one that it starts behind, counted from
    1 through all passes (0 is none), and its slots.

    A segment whose pass would save fewer than `least` tokens is computed with each of those below it.
    """
    children = Counter(segment.path[-1][0] for segment in segments if segment.path)
    behind: dict[int, tuple[int | None, list[int]]] = {}  # a segment: what those below start behind and with
    depths: dict[int | None, int] = {None: 0}  # of a sequence, known by the segment that it ends with
    inner: dict[tuple[int, int], list[_Sequence]] = {}  # by depth and length
    leaves: list[_Sequence] = []
    for segment in segments:  # those above come first
        begin, count = segment.begin, children[segment.begin]
        start, slots = behind[segment.path[-1][0]] if segment.path else (None, [])
        slots = [*slots, *range(begin, segment.end)]
        if not count:
            leaves.append(_Sequence(begin, start, slots))
        elif len(slots) == 1 or len(slots) * (count - 1) < least:
            behind[begin] = start, slots
        else:
            inner.setdefault((depths[start], len(slots)), []).append(_Sequence(begin, start, slots))
            behind[begin], depths[begin] = (begin, []), depths[start] + 1
    passes = [inner[key] for key in sorted(inner)]
    chunks = 0
    for leaf in sorted(leaves, key=lambda leaf: len(leaf.slots)):
        if -(-len(leaf.slots) // CHUNK) > 1.25 * chunks:
            chunks = -(-len(leaf.slots) // CHUNK)
            passes.append([])
        passes[-1].append(leaf)
    numbers: dict[int | None, int] = {None: 0}
    for sequence in itertools.chain(*passes):
        numbers[sequence.end] = len(numbers)
    return [[(numbers[start], slots) for _, start, slots in sequences] for sequences in passes]


class _Sequence(NamedTuple):
    end: int  # the segment that it ends with, by its first slot
    start: int | None  # that which it starts behind
    slots: list[int]


class Pass(NamedTuple):
    """Sequences that a layer computes together."""

    shape: tuple[int, int]  # number of sequences, tokens of the longest
    starts: Tensor | None  # the sequence that each starts behind, of all passes from 1 on; `None` if all are from zeros
    ends: bool  # whether others start behind them


class Passes(NamedTuple):
    """The passes of a flat row, on its device."""

    each: list[Pass]
    places: Tensor  # the slots of all of them, padded on the right with any slot: [sequences of any length]
    owners: Tensor  # for each slot one of its places among these: [slots]

    @classmethod
    def of(cls, layout: Layout, least: float) -> Passes:
        """Return those of a layout, which are made once."""
        if least not in layout.passes:
            passes, each, places = passes_of(layout.segments, least), [], []
            owners, count, number = np.zeros(layout.segments[-1].end, np.int64), 0, 0
            inner = max(start for sequences in passes for start, _ in sequences)  # others start behind the first ones
            for sequences in passes:
                longest = max(len(slots) for _, slots in sequences)
                longest = max(longest, 1 + (len(passes) > 1))  # one token behind a state is computed otherwise
                for _, slots in sequences:
                    places.append(np.pad(slots, (0, longest - len(slots))))
                    owners[slots] = np.arange(count, count + len(slots))
                    count += longest
                starts = torch.tensor([start for start, _ in sequences])
                starts = starts.to(layout.device, non_blocking=True) if starts.any() else None
                each.append(Pass((len(sequences), longest), starts, number < inner))
                number += len(sequences)
            flat = [torch.from_numpy(array) for array in (np.concatenate(places), owners)]
            layout.passes[least] = cls(each, *(tensor.to(layout.device, non_blocking=True) for tensor in flat))
        return layout.passes[least]


class _States:
    """
    The states of one layer behind the sequences of its passes, as a cache of transformers.

    By the kind of a state (of the convolution, of the recurrence) and its index there is one tensor for each pass:
    `[sequences, ...]`.
    """

    record_past = False

    def __init__(self) -> None:
        self.computed = Pass((0, 0), None, False)
        self._kept: dict[tuple[str, int], list[Tensor]] = {}

    def _start(self, kind: str, index: int) -> Tensor | None:
        """Return the states that the sequences of a pass start from, `[sequences, ...]`."""
        starts, kept = self.computed.starts, self._kept.get((kind, index))
        if starts is None or kept is None:
            return None
        of_all = torch.cat([torch.zeros_like(kept[0][:1]), *kept])
        return F.embedding(starts, of_all.flatten(1)).unflatten(1, of_all.shape[1:])

    def _keep(self, kind: str, index: int, states: Tensor) -> None:
        self._kept.setdefault((kind, index), []).append(states)

    # What layers call.

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        return self._start("convolution", state_idx)

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        return self._start("recurrence", state_idx)

    def update_conv_state(
        self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, *, conv_kernel_size: int, **kwargs: Any
    ) -> Tensor:
        """Keep the last tokens, `[sequences, width, conv_kernel_size]`. Return all, with those that came before."""
        before = self._start("convolution", state_idx)
        states = conv_states if before is None else torch.cat([before, conv_states], -1)
        if self.computed.ends:
            last = states[..., -conv_kernel_size:]
            self._keep("convolution", state_idx, F.pad(last, (conv_kernel_size - last.shape[-1], 0)))
        return states

    def update_recurrent_state(
        self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any
    ) -> Tensor:
        if self.computed.ends:
            self._keep("recurrence", state_idx, recurrent_states)
        return recurrent_states

    def is_recording_past(self, layer_idx: int) -> bool:
        return False

    # The same until transformers 5.22: a layer looks into the cache.

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int = 0) -> bool:
        return self.computed.starts is not None

    @property
    def layers(self) -> Any:
        return _Everywhere(self)

    @property
    def conv_states(self) -> Any:
        return _Everywhere(self._start("convolution", 0))

    @property
    def recurrent_states(self) -> Any:
        return _Everywhere(self._start("recurrence", 0))


class _Everywhere:
    """A list with the same element at each index."""

    def __init__(self, element: Any):
        self.element = element

    def __getitem__(self, index: int) -> Any:
        return self.element


# A layer.


class _LayerPass(threading.local):
    """The layer that this thread computes."""

    flat: Tensor | None = None  # its input: [1, slots, width]
    token: Tensor  # the first of it: [1, 1, width]
    rows: Tensor | None = None  # the same in the sequences of a pass: [sequences, longest, width]
    passes: Passes
    number: int  # of the pass
    taken_apart: dict[nn.Module, Sequence[Tensor]]  # of linear layers that read the input, the outputs by pass
    found: list[Tensor]  # by pass, what the layer's output is computed from, or the output itself: [places, any width]

    @property
    def is_last(self) -> bool:
        return self.number == len(self.passes.each) - 1

    def apart(self, flat: Tensor) -> list[Tensor]:
        """Return a flat row `[slots, width]` in the sequences of each pass, `[sequences, longest, width]`."""
        shapes = [each.shape for each in self.passes.each]
        parts = F.embedding(self.passes.places, flat).split([rows * longest for rows, longest in shapes])
        return [part.unflatten(0, shape) for part, shape in zip(parts, shapes, strict=True)]

    def put_back(self) -> Tensor:
        """Return what was found in all passes as a flat row, `[1, slots, width]`."""
        return F.embedding(self.passes.owners, torch.cat(self.found))[None]


_under_way = _LayerPass()


@contextlib.contextmanager
def by_row(layers: list[nn.Module], gets_tree: Callable[[], bool]) -> Generator[None]:
    """
    Context in which layers with a state compute row by row, if they get a layout. `gets_tree` tells whether the model
    on this thread gets a tree, so that they should.
    """
    with contextlib.ExitStack() as stack:
        for layer in layers:
            before = functools.partial(_before, gets_tree)
            stack.callback(layer.register_forward_pre_hook(before, with_kwargs=True).remove)
            stack.callback(layer.register_forward_hook(_behind, always_call=True).remove)
            for linear in layer.children():
                if hasattr(linear, "in_features"):  # also with an adapter
                    stack.callback(linear.register_forward_pre_hook(_before_linear).remove)
                    stack.callback(linear.register_forward_hook(_behind_linear).remove)
        yield


def _before(gets_tree: Callable[[], bool], layer: nn.Module, args: tuple, kwargs: dict[str, Any]) -> Any:
    """
    Compute all passes of a layer but the last, and return the arguments of that one. Its input `[1, slots, width]` is
    its first argument or called `hidden_states`.
    """
    layout: Layout | None = kwargs.get(ARGUMENT)
    if layout is None:
        if gets_tree():
            raise CannotAttendError(f"`{type(layer).__name__}` has a state, and is not told where rows end")
        return None
    known, way, cache = inspect.signature(type(layer).forward).parameters, _under_way, _name_of_cache(layer)
    for name in _OF_PLACES:
        if name in known and known[name].default is inspect.Parameter.empty:
            raise CannotAttendError(f"`{type(layer).__name__}` has a state, and needs `{name}`")
    kept = {name: value for name, value in kwargs.items() if name in known and name not in _OF_PLACES}
    flat = args[0] if args else kept.pop("hidden_states")
    way.passes = passes = Passes.of(layout, float("inf") if cache is None else LEAST)
    way.flat, way.token, way.taken_apart, way.found = flat, flat[:, :1], {}, []
    states, inputs = _States(), way.apart(flat[0])
    if cache is not None and passes.each[0].ends:
        kept[cache] = states
    for way.number, way.rows in enumerate(inputs):
        states.computed = passes.each[way.number]
        if not way.is_last:
            _find(layer, layer.forward(way.rows, *args[1:], **kept))
    return (way.rows, *args[1:]), kept


def _find(layer: nn.Module, output: Any) -> None:
    """Keep the output of a pass, unless it is junk, because the linear layer that computes it got one token."""
    if not isinstance(output, Tensor):
        raise CannotAttendError(f"`{type(layer).__name__}` has a state, and returns more than hidden states")
    if len(_under_way.found) == _under_way.number:
        _under_way.found.append(output.flatten(0, 1))


def _behind(layer: nn.Module, args: tuple, output: Any) -> Any:
    """Return the output of a layer as a flat row. It is called after an error too."""
    way, found = _under_way, None
    if way.flat is not None and output is not None:
        is_flat = len(way.found) == len(way.passes.each)
        _find(layer, output)
        found = output if is_flat else way.put_back()
    way.flat = way.rows = None
    return found


def _before_linear(linear: Any, args: tuple) -> Any:
    """Let a linear layer that reads the input, or gives the output, of a layer with a state compute the flat row."""
    way, inputs = _under_way, args[0]
    if way.flat is None or way.rows is None:
        return None
    if inputs is way.rows:
        return way.token if linear in way.taken_apart else way.flat
    if linear.out_features != way.flat.shape[-1] or inputs.shape[:2] != way.rows.shape[:2]:
        return None
    way.found.append(inputs.flatten(0, 1))
    return way.put_back() if way.is_last else inputs[:1, :1]


def _behind_linear(linear: nn.Module, args: tuple, output: Tensor) -> Tensor | None:
    """Take the outputs of a linear layer that read the input apart."""
    way = _under_way
    if way.flat is None or not (args[0] is way.flat or args[0] is way.token):
        return None
    if args[0] is way.flat:
        way.taken_apart[linear] = way.apart(output[0])
    return way.taken_apart[linear][way.number]
