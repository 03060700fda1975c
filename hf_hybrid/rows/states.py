"""
Layers with a state that runs along the row: Gated DeltaNet, Mamba, short convolutions.

Such a layer reads its tokens one after the other. Each changes a state, and the next token sees the state. In a flat
row the state of one row would run on into the next. Transformers' layers cannot be told where rows end, except by
kernels that few have. So these layers, and only these, compute rows one below the other: their inputs are taken out of
the flat row, a row for each leaf of the tree, and their outputs are put back.

    flat row          s s s a a b b b               s is a prefix of two rows
    in such a layer   s s s a a .                   padding on the right: no token sees what follows it
                      s s s b b b                   a prefix is computed once for each leaf below it
    flat row again    s s s a a b b b               `s` comes from one of them, the others are the same

Attention, feed-forward layers, experts, norms and the head compute each token once, as everywhere. So do the
projections of such a layer, which are most of its work. A linear layer that reads the layer's input computes the flat
row, and its outputs are taken apart. The one that computes the layer's output gets a flat row too.

**Memory.** Between its projections such a layer holds as much as for padded rows. So a flat row takes more memory than
its slots ([`again`]), and fewer rows are put together.

**Which layers.** Those that hold a convolution along the row (`Conv1d`), as nearly all do that have a state. They learn
of the tree by an argument, as attention does. A model whose layers do not get it (Mamba 1, Jamba), or have a state and
no convolution (MiniMax, RWKV), is computed in padded rows.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import threading
from collections.abc import Callable, Generator
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from hf_hybrid.rows.attention import ARGUMENT, CannotAttendError, Layout

_OF_PLACES = ("attention_mask", "position_ids", "position_embeddings")
"""Arguments that belong to the flat row. Rows have no padding on the left, so such layers need no mask."""


class _UnderWay(threading.local):
    """The layer that this thread computes."""

    flat: Tensor | None = None  # its input: [1, slots, width]
    rows: Tensor | None = None  # the same, row by row: [rows, longest, width]
    places: Tensor  # of its rows in the flat row: [rows, longest]
    owners: Tensor  # of its slots among the rows: [slots]


_under_way = _UnderWay()


def layers_with_state(model: nn.Module) -> list[nn.Module]:
    """Return the layers of a model that have a state along the row."""
    return [module for module in model.modules() if any(isinstance(child, nn.Conv1d) for child in module.children())]


def again(model: Any) -> float:
    """Return the share of a token's memory that each row takes again, also for tokens that it shares."""
    return min(0.5 * len(layers_with_state(model)) / model.config.get_text_config().num_hidden_layers, 0.5)


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
    """Give a layer its rows. Its input `[1, slots, width]` is its first argument or called `hidden_states`."""
    layout: Layout | None = kwargs.get(ARGUMENT)
    if layout is None:
        if gets_tree():
            raise CannotAttendError(f"`{type(layer).__name__}` has a state, and is not told where rows end")
        return None
    known, way = inspect.signature(type(layer).forward).parameters, _under_way
    kept = {name: value for name, value in kwargs.items() if name in known and name not in _OF_PLACES}
    flat = args[0] if args else kept["hidden_states"]
    way.places, way.owners = layout.rows
    way.flat, way.rows = flat, F.embedding(way.places, flat[0])
    return ((way.rows, *args[1:]), kept) if args else ((), {**kept, "hidden_states": way.rows})


def _behind(layer: nn.Module, args: tuple, output: Any) -> Any:
    """Put the rows of a layer back. It is called after an error too."""
    way, flat = _under_way, _under_way.flat
    way.flat = way.rows = None
    if flat is None or output is None:
        return None
    if not isinstance(output, Tensor):
        raise CannotAttendError(f"`{type(layer).__name__}` has a state, and returns more than hidden states")
    return output if output.shape == flat.shape else _put_back(output)


def _put_back(rows: Tensor) -> Tensor:
    """Return rows `[rows, longest, width]` as a flat row, `[1, slots, width]`."""
    return F.embedding(_under_way.owners, rows.flatten(0, 1))[None]


def _before_linear(linear: Any, args: tuple) -> Any:
    """Let a linear layer that reads the input, or gives the output, of a layer with a state compute the flat row."""
    way, inputs = _under_way, args[0]
    if way.flat is None or way.rows is None:
        return None
    if inputs is way.rows:
        return way.flat
    gives_output = linear.out_features == way.flat.shape[-1] and inputs.shape[:2] == way.rows.shape[:2]
    return _put_back(inputs) if gives_output else None


def _behind_linear(linear: nn.Module, args: tuple, output: Tensor) -> Tensor | None:
    """Take the outputs of a linear layer that read the input apart."""
    way = _under_way
    return F.embedding(way.places, output[0]) if way.flat is not None and args[0] is way.flat else None
