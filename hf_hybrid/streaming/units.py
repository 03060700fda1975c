"""What travels together (a unit), its weights on the host (packed), and the device buffers that it lies in (slots)."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field

import torch
from torch import nn

from hf_hybrid.streaming.low_bit import dequantize_rows, quantize_rows
from hf_hybrid.streaming.transfers import Slot, host_buffer

Tensor = torch.Tensor

ALIGNMENT = 256
"""Bytes: every tensor in a packed buffer starts at a multiple of it, as CUDA's allocator does."""


def padded(count: int) -> int:
    """`count` bytes, rounded up to the alignment."""
    return -(-count // ALIGNMENT) * ALIGNMENT


@dataclass
class Piece:
    """One streamed parameter: where its bytes lie in the packed buffer, and its master on the host."""

    name: str
    parameter: nn.Parameter
    dtype: torch.dtype
    """Of the weights on the device."""
    start: int = 0
    scales_start: int = -1
    """Where the scales of an int8 piece lie; -1 for any other."""
    expanded_start: int = 0
    master: nn.Parameter | None = None
    """Host weights that the optimizer updates; `None` for a base that is kept as int8."""
    gradient: Tensor | None = None
    """Host buffer for the master's gradient, allocated once."""

    @property
    def shape(self) -> torch.Size:
        return self.parameter.shape

    @property
    def is_int8(self) -> bool:
        return self.scales_start >= 0

    def view_of_packed(self, storage: UnitStorage) -> Tensor:
        """This parameter's part of the unit's packed buffer."""
        return self.view(storage.packed, self.start)

    @property
    def nbytes(self) -> int:
        return self.parameter.numel() * self.dtype.itemsize

    def allocate_gradient(self, *, pin: bool) -> None:
        """Make the gradient buffer if there is none yet."""
        if self.gradient is None:
            size = self.parameter.numel() * self.master.element_size()
            self.gradient = host_buffer(size, pin=pin).view(self.master.dtype).view(self.shape)

    def view(self, buffer: Tensor, start: int, dtype: torch.dtype | None = None) -> Tensor:
        """This parameter's part of a byte buffer."""
        dtype = dtype or self.dtype
        size = self.parameter.numel() * dtype.itemsize
        return buffer[start : start + size].view(dtype).view(self.shape)


class UnitStorage:
    """
    Packs the parameters of one unit into one host buffer, so that a unit travels in one copy.

    Where the weights travel in the dtype of the masters, the masters are views into the packed buffer: nothing is held
    twice. Otherwise (`dtype_of` says another dtype) the packed buffer is a rounded copy, refreshed after each update.
    With `int8`, frozen matrices are held as int8 codes with one scale per row and no master.

    Args:
        parameters (`Iterable[tuple[str, nn.Parameter]]`): Named parameters, on the host.
        dtype_of (`Callable`): Dtype that a parameter has on the device.
        int8 (`bool`): Hold frozen matrices as int8.
        pin (`bool`): Page-lock the buffer.
    """

    def __init__(
        self,
        parameters: Iterable[tuple[str, nn.Parameter]],
        *,
        dtype_of: Callable[[nn.Parameter], torch.dtype] = lambda parameter: parameter.dtype,
        int8: bool = False,
        pin: bool = False,
    ):
        self.pieces = [Piece(name, parameter, dtype_of(parameter)) for name, parameter in parameters]
        self.expanded_bytes = 0
        self.pin = pin
        self.written: torch.cuda.Event | None = None
        """When what was last sent into the packed buffer has arrived."""
        self.packed_bytes = self._lay_out(int8)
        self.packed: Tensor | None = None
        self.rounded = [p for p in self.pieces if not p.is_int8 and p.dtype != p.parameter.dtype]
        # An int8 base is packed when a run begins: until then, and after it, its weights are the model's own.
        self.packs_for_runs = any(p.is_int8 for p in self.pieces) and not any(
            p.parameter.requires_grad for p in self.pieces
        )
        if not self.packs_for_runs:
            self.pack()
            self.restore()

    def _lay_out(self, int8: bool) -> int:
        end = 0
        for piece in self.pieces:
            piece.start = end
            frozen = not piece.parameter.requires_grad and piece.parameter.is_floating_point()
            if int8 and frozen and piece.parameter.dim() >= 2:
                piece.scales_start = end + padded(piece.parameter.numel())
                piece.expanded_start = self.expanded_bytes
                self.expanded_bytes += padded(piece.nbytes)
                rows = piece.parameter.numel() // piece.shape[-1]
                end = piece.scales_start + padded(4 * rows)
            else:
                end += padded(piece.nbytes)
        return end

    def pack(self) -> None:
        """Copy the model's weights into the packed buffer, unless they are there; refresh what is rounded in it."""
        if self.packed is not None:
            self.refresh()
            return
        self.packed = host_buffer(self.packed_bytes, pin=self.pin)
        for piece in self.pieces:
            self._fill(piece)

    @torch.no_grad()
    def _fill(self, piece: Piece) -> None:
        weights = piece.parameter.data
        if piece.is_int8:
            codes, scales = quantize_rows(weights)
            piece.view(self.packed, piece.start, torch.int8).copy_(codes.view(piece.shape))
            self._scales(self.packed, piece).copy_(scales.view(-1))
            return
        packed = piece.view(self.packed, piece.start)
        packed.copy_(weights)
        master = weights if piece in self.rounded else packed
        piece.master = nn.Parameter(master, requires_grad=piece.parameter.requires_grad)

    @staticmethod
    def _scales(buffer: Tensor, piece: Piece) -> Tensor:
        rows = piece.parameter.numel() // piece.shape[-1]
        return buffer[piece.scales_start : piece.scales_start + 4 * rows].view(torch.float32)

    @torch.no_grad()
    def refresh(self) -> None:
        """Round the masters into the packed buffer again, after they changed."""
        for piece in self.rounded:
            piece.view(self.packed, piece.start).copy_(piece.master)

    def bind(self, buffer: Tensor, expanded: Tensor) -> None:
        """Let the parameters be views into `buffer`, a device copy of `packed`; int8 ones are expanded first."""
        for piece in self.pieces:
            piece.parameter.data = (
                self.expand(piece, buffer, expanded) if piece.is_int8 else piece.view(buffer, piece.start)
            )

    def expand(self, piece: Piece, buffer: Tensor, expanded: Tensor) -> Tensor:
        """The weights of an int8 piece, in `expanded`."""
        out = piece.view(expanded, piece.expanded_start)
        codes = piece.view(buffer, piece.start, torch.int8)
        dequantize_rows(codes, self._scales(buffer, piece).view(*piece.shape[:-1], 1), out)
        return out

    def restore(self, *, for_good: bool = True) -> None:
        """
        Let the parameters be the host weights.

        Args:
            for_good (`bool`): Also expand an int8 base, into memory of its own, and drop its codes; otherwise its
                parameters are left as they are, for readers of everything else.
        """
        for piece in self.pieces:
            if not piece.is_int8:
                piece.parameter.data = piece.master.data.clone() if self.packs_for_runs else piece.master.data
            elif for_good:
                own = torch.empty(padded(piece.nbytes), dtype=torch.uint8)
                start, piece.expanded_start = piece.expanded_start, 0
                piece.parameter.data = self.expand(piece, self.packed, own)
                piece.expanded_start = start
        if self.packs_for_runs and for_good:
            self.packed = None
            for piece in self.pieces:
                piece.master = None

    def host_bytes(self) -> int:
        """Bytes of weights held on the host, exact."""
        if self.packed is None:
            return 0
        return self.packed_bytes + sum(piece.master.numel() * piece.master.element_size() for piece in self.rounded)


class SlotPool:
    """
    A fixed number of equal device buffers.

    `ahead + 1` of them serve the unit that computes and those fetched ahead; the other `kept` hold units after their
    use, for when they are needed again.

    Args:
        size (`int`): Bytes of a slot: the largest unit.
        ahead (`int`): Units fetched ahead.
        kept (`int`): Units that may stay after their use.
    """

    def __init__(self, size: int, *, ahead: int, kept: int, device: torch.device):
        self.kept = kept
        self.slots = [Slot(size, device) for _ in range(ahead + 1 + kept)]
        self.free = list(self.slots)
        self.nbytes = size * len(self.slots)
        self._held: OrderedDict[Hashable, Slot] = OrderedDict()
        self._in_use: set[Hashable] = set()

    def find(self, unit: Hashable) -> Slot | None:
        """The slot that holds the unit, if any."""
        return self._held.get(unit)

    def take(self, unit: Hashable) -> Slot | None:
        """A slot for the unit, its own if it still lies in one; `None` if all are in use."""
        slot = self._held.get(unit)
        if slot is None:
            if not self.free and not self._evict():
                return None
            slot = self.free.pop()
        self._held[unit] = slot
        self._held.move_to_end(unit)
        self._in_use.add(unit)
        return slot

    def give_back(self, unit: Hashable) -> None:
        """The unit is not needed for now; it stays where it is as long as there is room."""
        self._in_use.discard(unit)
        while sum(held not in self._in_use for held in self._held) > self.kept:
            self._evict()

    def forget(self, unit: Hashable) -> None:
        """What the slot holds of the unit is no longer true."""
        if unit in self._held and unit not in self._in_use:
            self.free.append(self._held.pop(unit))

    def _evict(self) -> bool:
        for unit in self._held:
            if unit not in self._in_use:
                self.free.append(self._held.pop(unit))
                return True
        return False


@dataclass(eq=False)
class Unit:
    """Modules whose weights travel together."""

    name: str
    modules: list[nn.Module]
    storage: UnitStorage
    pool: SlotPool | None = None
    slot: Slot | None = None
    bound: bool = False
    """Its parameters are its weights, not placeholders."""
    loaded: bool = False
    altered: bool = False
    """The slot holds something else than the masters: do not keep it."""
    loads: int = 0
    calls: int = 0
    update: Future | None = None
    """The pending optimizer update; what is loaded before it is done would be old."""
    lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def trainable(self) -> list[Piece]:
        return [piece for piece in self.storage.pieces if piece.parameter.requires_grad]


def make_units(
    layers: Iterable[tuple[str, nn.Module]],
    ends: Iterable[tuple[str, list[nn.Module]]],
    *,
    dtype_of: Callable[[nn.Parameter], torch.dtype],
    int8: bool,
    pin: bool,
) -> tuple[list[Unit], list[Unit]]:
    """
    Units of the layers and of the ends (embeddings, head), packed; see [`LayerStreamer`] for the arguments.

    Weights that several units share belong to none: they stay on the device.
    """
    layers, ends = list(layers), list(ends)
    owners = _count_owners([[module] for _, module in layers] + [modules for _, modules in ends])

    def make(name: str, modules: list[nn.Module], int8: bool) -> Unit:
        owned = {id(p): (n, p) for module in modules for n, p in module.named_parameters() if owners[id(p)] == 1}
        named = [(f"{name}.{n}", p) for n, p in _worth_streaming(owned.values())]
        return Unit(name, modules, UnitStorage(named, dtype_of=dtype_of, int8=int8, pin=pin))

    return [make(name, [module], int8) for name, module in layers], [make(*end, False) for end in ends]


def _count_owners(units: list[list[nn.Module]]) -> dict[int, int]:
    owners: dict[int, int] = {}
    for modules in units:
        for key in {id(p) for module in modules for p in module.parameters()}:
            owners[key] = owners.get(key, 0) + 1
    return owners


def _worth_streaming(named: Iterable[tuple[str, nn.Parameter]]) -> list[tuple[str, nn.Parameter]]:
    """Adapters stay on the device: trainable parameters that are under a tenth of their unit."""
    named = list(named)
    total = sum(p.numel() for _, p in named)
    trainable = sum(p.numel() for _, p in named if p.requires_grad)
    return [(name, p) for name, p in named if not p.requires_grad or trainable >= total / 10]
