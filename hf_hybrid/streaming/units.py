"""
Units, which are copied to the device as a whole: their weights on the host, and their slots on the device.

A *unit* is a decoder layer, the embeddings or the head. On the host, the weights of a unit are packed into one
contiguous page-locked buffer, so one copy moves the unit at the full speed of the bus. A copy per parameter would be
slower, and its tensors would fragment the device's memory. On the device, a *slot* is a buffer as large as the largest
unit. Slots are allocated once and all have the same size, so any unit fits any slot and the allocator has nothing to do
during training. When a unit has arrived, its parameters become views into the slot.

The optimizer updates *masters*: host parameters with the precision that the model was loaded in. There are three kinds
of params (streamed parameters):

- Weights that are copied as the masters are: the masters are views into the packed buffer, so nothing is held twice.
- Weights that are copied rounded (fp32 masters under bf16 autocast, which would round them anyway): the packed buffer
  is a rounded copy, refreshed after each update, and only half the bytes are copied.
- Frozen matrices of an int8 base: codes and one scale per row are copied, and expanded on the device into a second
  buffer, which all units share because one unit computes at a time. There is no master.

Frozen experts of a mixture travel by their use ([`hf_hybrid.streaming.expert_streaming`]).

A [`SlotPool`] assigns units to slots. `ahead + 1` slots are for the unit that computes and those fetched ahead. A unit
stays in its slot until another needs it, and the one whose last use is longest ago goes first. A training step goes
through the layers forwards and then backwards, so the layers that were used last are needed first: they need not come
again. That holds for the next step too: an update is made in the slot, so what lies there is never old. So the first
layers of a step are there when it begins. More slots keep more frozen layers.

Where there is room for trained layers, the first of them are *resident* instead: their weights, gradients and optimizer
states live on the device, and nothing of them travels. They are units without params. They come first in the forward
pass, so the device has work while what the update of the first layer that travels needs is on its way.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from hf_hybrid.machine import host_buffer, host_tensor
from hf_hybrid.streaming.expert_streaming import Experts, frozen_experts
from hf_hybrid.streaming.low_bit import dequantize_rows, quantize_rows
from hf_hybrid.streaming.transfers import Event, Slot

as_plain = torch._C.DisableTorchFunctionSubclass
"""Context in which a placeholder (placeholders.py) is a plain parameter."""
ALIGNMENT = 256
"""Bytes: every tensor in a packed buffer starts at a multiple of it, as CUDA's allocator does."""


def padded(count: int) -> int:
    """`count` bytes, rounded up to the alignment."""
    return -(-count // ALIGNMENT) * ALIGNMENT


class Packing:
    """Places of tensors in a buffer of bytes, one after the other, each at a multiple of the alignment."""

    def __init__(self, tensors: Iterable[tuple[Any, torch.Size, torch.dtype]] = ()):
        self.size = 0
        self._places: dict[Any, tuple[int, torch.Size, torch.dtype]] = {}
        for key, shape, dtype in tensors:
            self._places[key] = self.size, shape, dtype
            self.size += padded(shape.numel() * dtype.itemsize)

    def views(self, buffer: Tensor) -> dict[Any, Tensor]:
        """Return the tensors in such a buffer, by their keys."""
        views = {}
        for key, (start, shape, dtype) in self._places.items():
            views[key] = buffer[start : start + shape.numel() * dtype.itemsize].view(dtype).view(shape)
        return views


@dataclass
class StreamedParameter:
    """One streamed parameter: the place of its bytes in the packed buffer, and its master on the host."""

    name: str
    parameter: nn.Parameter
    dtype: torch.dtype
    """Of the weights on the device."""
    start: int = 0
    is_int8: bool = False
    scales_start: int = 0
    expanded_start: int = 0
    host_weights: nn.Parameter | None = None
    """The [`master`], if the parameter has one."""
    gradient: Tensor | None = None
    """Host memory for the master's gradient."""
    total: Tensor | None = None
    """Sum of gradients that arrive in a lower precision than the master's, while a window is walked by layer."""
    norm: Tensor | None = None
    """Of the gradient that was sent last, on the device that it left."""
    shared: Any = None
    """A weak reference to the weights that code of a user was given last."""
    hooks: list[int] = field(default_factory=list)
    """Ours on its gradient: the one that takes it, and one that comes before those of a user."""

    def __post_init__(self):
        self.shape, self.master_dtype = self.parameter.shape, self.parameter.dtype
        self.kind: type = getattr(self.parameter, "plain", type(self.parameter))  # of a placeholder, its class before
        self.nbytes = self.shape.numel() * self.dtype.itemsize
        self.planned = self.parameter.requires_grad
        """Whether it was trained when the units were made: if not, there is no place to train it."""

    @property
    def master(self) -> nn.Parameter:
        """Host weights that the optimizer updates. Raises `RuntimeError` for a base that is kept as int8."""
        if self.host_weights is None:
            raise RuntimeError(f"`{self.name}` has no master: its base is kept as int8, or is not packed now.")
        return self.host_weights

    def place_of_gradient(self, *, pin: bool) -> Tensor:
        """Return host memory for the master's gradient, which is made once."""
        if self.gradient is None:
            self.gradient = host_tensor(self.master.shape, self.master.dtype, pin=pin)
        return self.gradient

    @property
    def rows(self) -> int:
        return self.shape.numel() // self.shape[-1]

    def view(self, buffer: Tensor, dtype: torch.dtype | None = None, *, start: int | None = None) -> Tensor:
        """Return this parameter's part of a byte buffer. Without `start`, it is at its place in the packed buffer."""
        dtype, start = dtype or self.dtype, self.start if start is None else start
        return buffer[start : start + self.shape.numel() * dtype.itemsize].view(dtype).view(self.shape)

    def scales(self, buffer: Tensor) -> Tensor:
        """Return the fp32 scales of an int8 parameter, one per row: `[..., 1]`."""
        scales = buffer[self.scales_start : self.scales_start + 4 * self.rows]
        return scales.view(torch.float32).view(*self.shape[:-1], 1)

    def places(self, first: int, last: int) -> Iterator[tuple[int, int]]:
        """Yield where the entries `first` to `last` of the first dimension lie in the packed buffer."""
        share = self.shape.numel() // self.shape[0] * (1 if self.is_int8 else self.dtype.itemsize)
        yield self.start + first * share, self.start + last * share
        if self.is_int8:
            share = 4 * self.rows // self.shape[0]
            yield self.scales_start + first * share, self.scales_start + last * share

    def expand(self, buffer: Tensor, out: Tensor, *, start: int, rows: slice = slice(None)) -> Tensor:
        """
        Write the weights of an int8 parameter into the byte buffer `out` at `start`, and return them: those with these
        indices (`rows`) of the first dimension.
        """
        out = self.view(out, start=start)
        dequantize_rows(self.view(buffer, torch.int8)[rows], self.scales(buffer)[rows], out[rows])
        return out


def cannot_train(param: StreamedParameter) -> RuntimeError:
    """Return the error for a parameter that is to be trained now and was not when the units were made."""
    return RuntimeError(
        f"`{param.name}` is to be trained now, and was not when the trainer was made. With `memory=stream` memory is "
        "planned then for what is trained. Make the trainer and its optimizer with all that is trained at some time, "
        "and freeze it in `on_train_begin`; or train with `memory=off`."
    )


class UnitStorage:
    """
    The host side of a unit: its params, packed. `pin` page-locks the buffer.

    The parameters lie on the host. With `int8` frozen matrices are held as int8, but for the `whole` ones. An int8 base
    is packed when a run begins; until then, and after it, its weights are the model's own. The weights of `experts`,
    frozen ones and the modules that are called for them, lie behind all others.
    """

    def __init__(
        self,
        parameters: Iterable[tuple[str, nn.Parameter]],
        *,
        dtype_of: Callable[[nn.Parameter], torch.dtype],
        int8: bool = False,
        pin: bool = False,
        experts: Iterable[tuple[nn.Module, list[nn.Parameter]]] = (),
        whole: Collection[int] = (),
    ):
        params = {id(p): StreamedParameter(name, p, dtype_of(p)) for name, p in parameters}
        of_experts = [(called, [params.pop(id(p)) for p in stacks if id(p) in params]) for called, stacks in experts]
        self.experts = [Experts(called, stacks) for called, stacks in of_experts if stacks]
        """Which travel by their use."""
        self.params = [*params.values(), *(param for experts in self.experts for param in experts.params)]
        self.pin, self.packed_bytes, self.expanded_bytes = pin, 0, 0
        self.written: Event = None
        """When the last copies into the packed buffer, and of what the unit's update wrote, are over."""
        self.gradients_sent: Event = None
        """When the gradient of the unit that was sent last has arrived on the host."""
        self.packed: Tensor | None = None
        for param in self.params:
            # One after the other, in bytes: the weights in the dtype that they travel in, at 1, 2 or 4 each; of an int8
            # matrix `[..., rows, columns]` a byte for each weight, and behind them an fp32 scale for each row.
            frozen = not param.parameter.requires_grad and id(param.parameter) not in whole
            param.start = self.packed_bytes
            if int8 and frozen and param.parameter.is_floating_point() and param.parameter.dim() >= 2:
                param.is_int8, param.scales_start = True, param.start + padded(param.parameter.numel())
                param.expanded_start = self.expanded_bytes
                self.expanded_bytes += padded(param.nbytes)
                self.packed_bytes = param.scales_start + padded(4 * param.rows)
            else:
                self.packed_bytes += padded(param.nbytes)
        self.whole_bytes = min((e.params[0].start for e in self.experts), default=self.packed_bytes)
        """What always travels. The experts lie behind it."""
        self.rounded = [p for p in self.params if not p.is_int8 and p.dtype != p.parameter.dtype]
        wide = [p for p in self.rounded if p.parameter.requires_grad]
        self.wide_packing = Packing((id(p.parameter), p.parameter.shape, p.parameter.dtype) for p in wide)
        self.wide: Tensor | None = None
        """The masters of trained params that travel rounded. The device updates them, so they travel too."""
        trains = any(p.parameter.requires_grad for p in self.params)
        self.packs_for_runs = any(p.is_int8 for p in self.params) and not trains
        if not self.packs_for_runs:
            self.pack()
            self.restore()

    @torch.no_grad()
    def pack(self) -> None:
        """Copy the model's weights into the packed buffer, unless they are there, and refresh its rounded copies."""
        if self.packed is not None:
            self._take_assigned()
            self.refresh()
            return
        self.packed = packed = host_buffer(self.packed_bytes, pin=self.pin)
        self.wide = host_buffer(self.wide_packing.size, pin=self.pin) if self.wide_packing.size else None
        wide = {} if self.wide is None else self.wide_packing.views(self.wide)
        for param in self.params:
            weights = param.parameter.data
            if param.is_int8:
                codes, scales = quantize_rows(weights)
                param.view(packed, torch.int8).copy_(codes)
                param.scales(packed).copy_(scales)
                continue
            place = param.view(packed).copy_(weights)
            master = weights.cpu() if param in self.rounded else place
            if id(param.parameter) in wide:
                master = wide[id(param.parameter)].copy_(weights)
            param.host_weights = nn.Parameter(master, requires_grad=param.parameter.requires_grad)

    def _take_assigned(self) -> None:
        """Take over weights that a user has assigned (`p.data = new`) since the model was detached."""
        for param in [param for param in self.params if not param.is_int8]:
            weights, master = param.parameter.data, param.master.data
            if weights.data_ptr() == master.data_ptr():
                continue
            if weights.dtype != master.dtype or weights.shape != master.shape:
                raise ValueError(
                    f"`{param.name}` has become `{weights.dtype}` of shape {tuple(weights.shape)} since the trainer "
                    f"was made. With `memory=stream` it stays `{master.dtype}` of shape {tuple(master.shape)}. Change "
                    "the model before the trainer is made."
                )
            master.copy_(weights)

    @torch.no_grad()
    def refresh(self) -> None:
        """Round the masters into the packed buffer again, after they changed."""
        if self.packed is not None:
            for param in self.rounded:
                param.view(self.packed).copy_(param.master)

    def bind(self, buffer: Tensor, expanded: Tensor) -> None:
        """
        Make the parameters views into `buffer`, a device copy of `packed`. int8 ones are expanded first, but for those
        of experts.
        """
        for param in self.params:
            parameter, start, size = param.parameter, param.start, param.nbytes
            parameter.__class__ = param.kind
            if not param.is_int8:
                parameter.data = buffer[start : start + size].view(param.dtype).view(param.shape)
            elif start < self.whole_bytes:
                parameter.data = param.expand(buffer, expanded, start=param.expanded_start)
            else:
                parameter.data = param.view(expanded, start=param.expanded_start)
        for experts in self.experts:
            experts.expanded.clear()

    def restore(self, *, for_good: bool = True) -> None:
        """
        Let the parameters be the host weights. `for_good` also expands an int8 base, into memory of its own, and drops
        its codes; otherwise its parameters are left as they are, for readers of everything else.
        """
        for param in self.params:
            if not param.is_int8:
                param.parameter.__class__ = param.kind
                param.parameter.data = param.master.data.clone() if self.packs_for_runs else param.master.data
            elif for_good and self.packed is not None:
                own = torch.empty(param.nbytes, dtype=torch.uint8)
                param.parameter.__class__ = param.kind
                param.parameter.data = param.expand(self.packed, own, start=0)
        if self.packs_for_runs and for_good:
            self.packed = None
            for param in self.params:
                param.host_weights = None


class SlotPool:
    """A fixed number of device buffers of `size` bytes, and the unit that each holds; see the top of this file."""

    def __init__(self, size: int, *, slots: int, device: torch.device):
        self.slots = [Slot(torch.empty(size, dtype=torch.uint8, device=device)) for _ in range(slots)]
        self._free = list(self.slots)
        self.held: OrderedDict[Unit, Slot] = OrderedDict()
        """The unit in each slot; a unit that has the slot itself is in use."""

    def take(self, unit: Unit, turns: bool = True) -> Slot | None:
        """
        Return a slot for the unit, its own if it still has one, or `None` if all are in use. `turns` tells whether the
        pass will come back; one that begins anew instead, as for each token of a completion, finds the first units.
        """
        slot = self.held.get(unit)
        if slot is None:
            if not self._free:
                # The one whose last use is longest ago goes: a pass that turns round needs the others again.
                idle = [other for other in self.held if other.slot is None]
                if not idle:
                    return None
                self.forget(idle[0 if turns else -1])
            slot = self._free.pop()
        self.held[unit] = slot
        self.held.move_to_end(unit)
        return slot

    def forget(self, unit: Unit) -> None:
        """Remove the unit from its slot, because its weights have changed on the host."""
        if unit in self.held and unit.slot is None:
            self._free.append(self.held.pop(unit))


@dataclass(eq=False)
class Unit:
    """Modules whose weights travel together, and where they are now."""

    name: str
    modules: list[nn.Module]
    storage: UnitStorage
    pool: SlotPool | None = None
    slot: Slot | None = None
    bound: bool = False
    """Its parameters are its weights, not placeholders."""
    loaded: bool = False
    written: bool = False
    """Code of a user may have written to its weights on the host."""
    altered: bool = False
    """The slot holds something else than the masters: do not keep it."""
    loads: int = 0
    calls: int = 0
    updates: int = 0
    open_calls: int = 0
    """Its calls that the backward pass has yet to come to."""
    graphs: int = 0
    """So many of its calls may keep their graph until then, and are not recomputed."""
    open_graphs: int = 0
    """Of its open calls, those that do."""

    def __post_init__(self):
        self.resident = not self.storage.params
        """It lives on the device: nothing of it travels."""

    @property
    def trainable(self) -> list[StreamedParameter]:
        """Its params that are trained now."""
        with as_plain():
            return [param for param in self.storage.params if param.parameter.requires_grad]

    @property
    def planned(self) -> list[StreamedParameter]:
        """Its params that can be trained, and may be frozen meanwhile."""
        return [param for param in self.storage.params if param.planned]


def adapter_weights(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Return the weights of adapters of PEFT, trained or not, with their names in their layers."""
    layers = [module for module in model.modules() if "_disable_adapters" in vars(module)]
    named = [(name, weight) for layer in layers for name, weight in layer.named_parameters()]
    return [(name, weight) for name, weight in named if not name.startswith(("base_layer.", "original_module."))]


def make_units(
    layers: Iterable[tuple[str, nn.Module]],
    ends: Iterable[tuple[str, list[nn.Module]]],
    *,
    dtype_of: Callable[[nn.Parameter], torch.dtype],
    int8: bool,
    pin: bool,
    resident: int = 0,
) -> tuple[list[Unit], list[Unit]]:
    """
    Units of the layers and of the ends (embeddings, head), packed; see [`LayerStreamer`] for the arguments.

    Three kinds of weights stay on the device: those that several units share; adapters, whose trainable parameters are
    under a tenth of their unit, with those that only compute (the copy that is a reference); and all of the first
    `resident` layers that are trained otherwise. A unit of which nothing else is left is there only if it is such a
    layer.
    """
    layers, ends = list(layers), list(ends)
    candidates = [[module] for _, module in layers] + [modules for _, modules in ends]
    sets = [{id(p) for module in modules for p in module.parameters()} for modules in candidates]
    owners = Counter(key for parameters in sets for key in parameters)
    adapters = {id(p) for modules in candidates for module in modules for _, p in adapter_weights(module)}

    def streamed(name: str, modules: list[nn.Module]) -> list[tuple[str, nn.Parameter]]:
        named = {id(p): (f"{name}.{n}", p) for module in modules for n, p in module.named_parameters()}
        own = [(n, p) for key, (n, p) in named.items() if owners[key] == 1]
        trainable = sum(p.numel() for _, p in own if p.requires_grad)
        trains = trainable >= sum(p.numel() for _, p in own) / 10
        return [(n, p) for n, p in own if trains or not (p.requires_grad or id(p) in adapters)]

    def make(name: str, modules: list[nn.Module], own: list[tuple[str, nn.Parameter]], int8: bool) -> Unit:
        options: Any = {"pin": pin, "experts": frozen_experts(modules), "whole": adapters}
        return Unit(name, modules, UnitStorage(own, dtype_of=dtype_of, int8=int8, **options))

    of_layers = []
    for name, module in layers:
        own = streamed(name, [module])
        if resident > 0 and any(parameter.requires_grad for _, parameter in own):
            resident -= 1
            of_layers.append(make(name, [module], [], False))
        elif own:
            of_layers.append(make(name, [module], own, int8))
    return of_layers, [make(name, modules, own, False) for name, modules in ends if (own := streamed(name, modules))]
