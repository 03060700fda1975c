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
            linear = [child for child in layer.children() if hasattr(child, "in_features")]  # also inside of adapters
            compute = functools.partial(_compute, gets_tree)
            for module, way in {layer: compute, **dict.fromkeys(linear, _project)}.items():
                before = {name: vars(module)[name] for name in ("forward",) if name in vars(module)}
                stack.callback(vars(module).update, before)
                stack.callback(vars(module).pop, "forward")
                vars(module)["forward"] = functools.partial(way, module, module.forward)
        yield


def _compute(
    gets_tree: Callable[[], bool], layer: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """Compute a layer, whose input `[1, slots, width]` is its first argument or called `hidden_states`."""
    layout: Layout | None = kwargs.pop(ARGUMENT, None)
    if layout is None:
        if gets_tree():
            raise CannotAttendError(f"`{type(layer).__name__}` has a state, and is not told where rows end")
        return forward(*args, **kwargs)
    flat = args[0] if args else kwargs.pop("hidden_states")
    known, way = inspect.signature(type(layer).forward).parameters, _under_way
    kwargs = {name: value for name, value in kwargs.items() if name in known and name not in _OF_PLACES}
    way.places, way.owners = layout.rows
    way.flat, way.rows = flat, F.embedding(way.places, flat[0])
    try:
        output = forward(way.rows, *args[1:], **kwargs)
    finally:
        way.flat = way.rows = None
    if not isinstance(output, Tensor):
        raise CannotAttendError(f"`{type(layer).__name__}` has a state, and returns more than hidden states")
    return output if output.shape == flat.shape else _put_back(output)


def _put_back(rows: Tensor) -> Tensor:
    """Return rows `[rows, longest, width]` as a flat row, `[1, slots, width]`."""
    return F.embedding(_under_way.owners, rows.flatten(0, 1))[None]


def _project(linear: Any, forward: Callable[..., Tensor], inputs: Tensor) -> Tensor:
    """Compute a linear layer inside of a layer with a state. Where it reads the input, or gives the output, flat."""
    way = _under_way
    if way.flat is None or way.rows is None:
        return forward(inputs)
    if inputs is way.rows:
        return F.embedding(way.places, forward(way.flat)[0])
    if linear.out_features == way.flat.shape[-1] and inputs.shape[:2] == way.rows.shape[:2]:
        return forward(_put_back(inputs))
    return forward(inputs)
