"""What travels together: a decoder layer, the embeddings, the head."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field

import torch
from torch import nn

from hf_hybrid.streaming.slots import SlotPool
from hf_hybrid.streaming.storage import Piece, UnitStorage
from hf_hybrid.streaming.transfers import Slot


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
