"""
What code of a user finds between passes: parameters of streamed layers, which have no weights there, and answer for
them.

A callback reads weights for an average, a loss adds a penalty of them, a script prunes them. With plain `Trainer` the
parameters are there at any time. Those of streamed layers are placeholders but for the moments in which their layer
computes, and their weights, gradients and states lie on the host. So a placeholder has a class of its own meanwhile, as
`nn.UninitializedParameter` has until its shape is known. It passes questions about shape, dtype and device on. Any
other function of torch is called with the weights on the host, after updates that are put off. So what is read is what
plain `Trainer` would have, and what is written is trained:

- without gradients, functions get the weights themselves, or copies on the device where other arguments lie there. What
  they return lies on the device, unless it shares the weights' memory ([`HostWeights`]). The layer is copied to the
  device anew, since they may have written to its weights;
- with gradients, the parameter gets the gradient of what was computed, as if it had been there;
- `parameter.data = new` is copied into the weights at once, or refused at that line;
- `parameter.grad` is the sum of the window so far, and `None` drops it.

The layers themselves never meet this class: their parameters are plain ones while they compute.
"""

from __future__ import annotations

import functools
import weakref
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from hf_hybrid.streaming.units import StreamedParameter, Unit, as_plain

_OF_WEIGHTS = {"data", "T", "mT", "H", "mH", "real", "imag", "__cuda_array_interface__"}
"""Properties that are read of the weights. All others are the placeholder's."""
_OF_PLACEHOLDER = frozenset(
    "__hash__ __len__ _has_compatible_shallow_copy_type backward can_cast data_ptr dim element_size empty_like "
    "full_like get_device grad is_complex is_conj is_contiguous is_floating_point is_inference is_neg is_same_size "
    "is_shared is_signed ndimension nelement new_empty new_full new_ones new_tensor new_zeros numel ones_like "
    "rand_like randint_like randn_like register_hook register_post_accumulate_grad_hook requires_grad_ result_type "
    "retain_grad size storage_offset stride untyped_storage zeros_like".split()
)
"""Functions that ask for no weights."""
_SHARED = ("data", "detach")
"""They give the weights themselves: what is written into them is written into the weights."""
_NO_OPERATORS = {"__index__", "__int__", "__invert__", "__iter__"}


class Streamer(Protocol):
    """What placeholders ask of the streamer (streamer.py), which makes them."""

    device: torch.device
    updates: Any

    def weights_of(self, unit: Unit, param: StreamedParameter) -> Tensor: ...

    def gradient_of(self, unit: Unit, param: StreamedParameter) -> Tensor | None: ...

    def use_gradient(self, unit: Unit, param: StreamedParameter, gradient: Tensor | None) -> None: ...


class Placeholder(nn.Parameter):
    """Mixed into the class of a streamed parameter while its layer does not compute."""

    holder: tuple[Streamer, Unit, StreamedParameter]
    plain: type
    """The class while it is none."""

    @classmethod
    def __torch_function__(cls, func, types, args: tuple[Any, ...] = (), kwargs=None):
        name, kwargs = func.__name__, kwargs or {}
        if name in ("__get__", "__set__", "__delete__"):
            asked = getattr(func.__self__, "__name__", "__cuda_array_interface__")
            if asked == "grad":
                streamer, unit, param = args[0].holder
                if name != "__get__":
                    return streamer.use_gradient(unit, param, args[1] if name == "__set__" else None)
                with as_plain():
                    own = args[0].grad  # of a pass under way
                is_there = streamer.updates.shows_used or getattr(param.host_weights, "grad", None) is not None
                return streamer.gradient_of(unit, param) if own is None and is_there else own
            if asked == "data" and name == "__set__":
                return _assign(*args)
            of_weights = asked in _OF_WEIGHTS
        else:
            asked, of_weights = name, name not in _OF_PLACEHOLDER
        if not of_weights:
            with as_plain():
                return func(*args, **kwargs)
        return _computed(func, asked, args, kwargs)

    def __deepcopy__(self, memo):
        return memo.setdefault(id(self), self.plain(self.data.clone(), self.requires_grad))

    def __reduce_ex__(self, proto):
        return self.plain(self.data, self.requires_grad).__reduce_ex__(proto)


@functools.cache
def _placeholder_class(kind: type) -> type:
    return type(kind.__name__, (Placeholder, kind), {"__module__": kind.__module__, "plain": kind})


def become_placeholders(streamer: Streamer, unit: Unit, nothing: dict[torch.dtype, Tensor]) -> None:
    """Let the parameters of a unit be `nothing`, one number for each dtype, and answer for their weights."""
    with as_plain():
        for param in unit.storage.params:
            parameter: Any = param.parameter
            parameter.data = nothing[param.dtype].expand(param.shape)
            if type(parameter) is param.kind:
                parameter.__class__ = _placeholder_class(param.kind)
                parameter.holder = streamer, unit, param


def _assign(parameter: Any, new: Tensor) -> None:
    """`parameter.data = new`: the weights become these."""
    streamer, unit, param = parameter.holder
    weights = streamer.weights_of(unit, param)
    if new.shape != weights.shape or new.dtype not in (weights.dtype, parameter.dtype):
        raise RuntimeError(
            f"`{param.name}` was assigned `{new.dtype}` of shape {tuple(new.shape)}. With `memory=stream` it stays "
            f"`{weights.dtype}` of shape {tuple(weights.shape)} in a run. Change the model before the trainer is made, "
            "or train with `memory=off`."
        )
    if new.data_ptr() != weights.data_ptr():
        if param.shared is not None and (taken := param.shared()) is not None:  # it stays what it was
            with as_plain():
                taken.data, param.shared = weights.clone(), None
        weights.copy_(new)


def _computed(func: Any, asked: str, args: tuple, kwargs: dict) -> Any:
    """Call a function with weights in place of placeholders. With a device its other tensors say where."""
    writes = asked == "__setitem__" or (asked[-1] == "_" and asked[:2] != "__")
    writes = writes or (asked[:3] == "__i" and asked not in _NO_OPERATORS)
    target = next(iter(tree_leaves(args[:1] or kwargs)), None)
    in_place = writes and isinstance(target, HELD)
    others = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor) and not isinstance(leaf, HELD)]
    beside = next((other.device for other in others if other.device.type != "cpu"), None)

    def weights(held: Any) -> Tensor:
        if isinstance(held, HostWeights):
            found = held.as_subclass(Tensor)
        else:
            streamer, unit, param = held.holder
            found = streamer.weights_of(unit, param)
            if torch.is_grad_enabled() and held.requires_grad and not in_place:
                return _OfParameter.apply(held, found.to(held.device))
        return found if in_place or beside is None else found.to(beside)

    def placed(result: Tensor) -> Tensor:
        shares = result.untyped_storage().data_ptr() == args_[0].untyped_storage().data_ptr()
        return result.as_subclass(HostWeights) if shares else result.to(args[0].device)

    with as_plain():
        if asked in _SHARED and isinstance(args[0], Placeholder):
            return _shared(*args[0].holder)
        args_, kwargs_ = tree_map_only(HELD, weights, (args, kwargs))
        if in_place and beside is not None:
            args_, kwargs_ = tree_map_only(Tensor, Tensor.cpu, (args_, kwargs_))
        result = func(*args_, **kwargs_)
        if in_place:
            return target if isinstance(result, Tensor) else result
        alone = not others and args and isinstance(args[0], Placeholder) and args[0].device != args_[0].device
        return tree_map_only(Tensor, placed, result) if alone else result


def _shared(streamer: Streamer, unit: Unit, param: StreamedParameter) -> Tensor:
    """
    Return the weights themselves. All who ask get the same tensor, as long as one of them holds it. Of those that are
    packed as int8 it has no values: state dicts name them too.
    """
    if param.host_weights is None:
        return torch.empty_like(param.parameter, device="meta")
    streamer.weights_of(unit, param)
    weights = None if param.shared is None else param.shared()
    if weights is None:
        weights = param.master.data if streamer.device.type == "cpu" else param.master.data.as_subclass(HostWeights)
        param.shared = weakref.ref(weights)
    return weights


class _OfParameter(torch.autograd.Function):
    """The weights of a parameter, whose gradient is the parameter's."""

    @staticmethod
    def forward(ctx, parameter, weights):
        return weights.detach()

    @staticmethod
    def backward(ctx, *gradients):
        return gradients[0], None


class HostWeights(Tensor):
    """
    Weights on the host that stand for some on a device, as `parameter.data` gives them: a copy of them on the host is a
    copy, and they can be computed with, and written from, tensors of the device.
    """

    @classmethod
    def __torch_function__(cls, func, types, args: tuple[Any, ...] = (), kwargs=None):
        name, kwargs = func.__name__, kwargs or {}
        if name in ("__get__", "__set__", "__delete__") or name in _OF_PLACEHOLDER:
            with as_plain():
                return func(*args, **kwargs)
        result = _computed(func, name, args, kwargs)
        return result.clone() if name in ("cpu", "to") and result.device.type == "cpu" else result


HELD = (Placeholder, HostWeights)
