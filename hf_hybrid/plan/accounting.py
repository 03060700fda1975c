"""Bytes by category and place: of live objects, of a model's shape, and free bytes of the machine."""

from __future__ import annotations

import functools
import math
import os
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, is_dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from hf_hybrid.optimizers import ask, elements_at_once, inner_optimizer, text_config
from hf_hybrid.streaming.layers import rounded_by_autocast
from hf_hybrid.streaming.units import as_plain

Storage = tuple[torch.device, int]  # and its address there

CATEGORIES = ("weights", "gradients", "states", "activations", "drift", "buffers")
PLACES = ("device", "host")


def format_bytes(count: float) -> str:
    """Return `count` bytes as text in GiB, or in MiB, KiB or B if it is less than one of the larger unit."""
    for name, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if abs(count) >= size:
            return f"{count / size:.2f} {name}"
    return f"{count:.0f} B"


@dataclass
class ByteTable:
    """Bytes by category (weights, gradients, states, activations, drift, buffers) and place (device, host)."""

    _bytes: Counter[tuple[str, str]] = field(default_factory=Counter)

    def add(self, category: str, place: str, count: float) -> None:
        """Count `count` more bytes; a fraction of a byte is rounded up. Raises `ValueError` for unknown names."""
        if category not in CATEGORIES or place not in PLACES or count < 0:
            raise ValueError(f"no table has `category={category}`, `place={place}` and `count={count}`.")
        self._bytes[category, place] += math.ceil(count)

    def get(self, category: str, place: str) -> int:
        """Bytes of one category in one place."""
        return self._bytes[category, place]

    def total(self, place: str) -> int:
        """Bytes of all categories in one place."""
        return sum(self._bytes[category, place] for category in CATEGORIES)

    def rows(self) -> list[tuple[str, int, int]]:
        """Category, bytes on the device, bytes on the host: one row per category, in fixed order."""
        return [(category, self.get(category, "device"), self.get(category, "host")) for category in CATEGORIES]

    def to_dict(self) -> dict[str, dict[str, int]]:
        """Plain values for JSON: `{category: {"device": bytes, "host": bytes}}`, and the same under `"total"`."""
        table = {category: {"device": device, "host": host} for category, device, host in self.rows()}
        return {**table, "total": {place: self.total(place) for place in PLACES}}

    def __str__(self) -> str:
        lines = [f"{'':<12}{'device':>12}{'host':>12}"]
        for name, *counts in [*self.rows(), ("total", self.total("device"), self.total("host"))]:
            cells = [format_bytes(count) if count else "-" for count in counts]
            lines.append(f"{name:<12}{cells[0]:>12}{cells[1]:>12}")
        lines.insert(-1, "-" * len(lines[0]))
        return "\n".join(lines)


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the storages that `tensors` keep alive: whole storages, each counted once."""
    seen: set[Storage] = set()
    return sum(count for tensor in tensors for _, count in _new_storages(tensor, seen))


def storage_address(tensor: Tensor) -> int:
    """The address of the first byte of a tensor's storage, which all its views share."""
    return tensor.untyped_storage().data_ptr()


def measure_held(
    model: nn.Module | None,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    extra: Mapping[str, Iterable[Tensor]] | None = None,
    host_storages: set[int] | None = None,
) -> ByteTable:
    """
    Count the bytes of live objects exactly, every storage once, under the first category in which it appears.

    `extra` has more tensors by category. Where the accelerator is the CPU itself, `host_storages` has the
    [`storage_address`] of each tensor that counts as host; left out, tensors on the CPU are host.
    """
    model = nn.Module() if model is None else model
    with as_plain():  # those of streamed layers are in `extra`
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
    by_category: list[tuple[str, Iterable[Tensor]]] = [
        ("weights", model.parameters()),
        ("gradients", gradients),
        ("states", () if optimizer is None else _tensors_in(inner_optimizer(optimizer).state)),
        ("buffers", model.buffers()),
        *(extra or {}).items(),
    ]
    table, seen = ByteTable(), set()
    for category, tensors in by_category:
        for tensor in tensors:
            for (device, address), count in _new_storages(tensor, seen):
                on_host = device.type == "cpu" if host_storages is None else address in host_storages
                table.add(category, "host" if on_host else "device", count)
    return table


def _tensors_in(value: object) -> Iterator[Tensor]:
    """Optimizers nest their states differently: walk mappings, data classes and sequences to any depth."""
    value = vars(value) if is_dataclass(value) else value
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (Mapping, list, tuple)):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from _tensors_in(item)


def _dense_parts(tensor: Tensor) -> list[Tensor]:
    """Return the plain tensors of a tensor: itself, unless it is sparse or a wrapper around others."""
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is not None:
        names, _ = flatten()
        parts = [getattr(tensor, name) for name in names]  # a sharded tensor names its mesh as well
        return [dense for part in parts if isinstance(part, torch.Tensor) for dense in _dense_parts(part)]
    return [tensor._indices(), tensor._values()] if tensor.layout == torch.sparse_coo else [tensor]


def _new_storages(tensor: Tensor, seen: set[Storage]) -> Iterator[tuple[Storage, int]]:
    for part in _dense_parts(tensor):
        key = (part.device, storage_address(part))
        if key not in seen and part.device.type != "meta":  # a shape without memory
            seen.add(key)
            yield key, part.untyped_storage().nbytes()


class ParameterCount(NamedTuple):
    """A parameter: its number of weights, whether they are trained, and whether autocast lets them travel rounded."""

    count: int
    trained: bool
    rounds: bool = True


class WeightCount(NamedTuple):
    """
    Number of trainable and of frozen weights of a part of a model; of the trainable, those that Muon moves.

    `parameters` lists them one by one, because each of them may have buffers of its own, whose sizes are rounded.
    """

    trainable: int = 0
    frozen: int = 0
    muon: int = 0
    parameters: tuple[ParameterCount, ...] = ()

    @property
    def weights(self) -> int:
        """All of them."""
        return self.trainable + self.frozen

    @property
    def by_parameter(self) -> tuple[ParameterCount, ...]:
        """The parameters; those of a unit that was made from its numbers alone count as one, or one of each kind."""
        by_kind = (ParameterCount(self.trainable, True), ParameterCount(self.frozen, False))
        return self.parameters or tuple(piece for piece in by_kind if piece.count)

    def join(self, other: WeightCount) -> WeightCount:
        """Both parts together."""
        return WeightCount(*(mine + theirs for mine, theirs in zip(self, other)))

    def bytes(self, per_weight: tuple[int, int]) -> int:
        """Return bytes, from a number of bytes per trainable and per frozen weight."""
        return self.trainable * per_weight[0] + self.frozen * per_weight[1]

    def split(self) -> tuple[WeightCount, WeightCount]:
        """Return the streamed part of a unit, and the part that stays on the device (adapters under a tenth of it)."""
        if 0 < self.trainable < self.weights / 10:
            base, adapters = (tuple(p for p in self.parameters if p.trained == trained) for trained in (False, True))
            return WeightCount(0, self.frozen, 0, base), WeightCount(self.trainable, 0, self.muon, adapters)
        return self, WeightCount()


@dataclass(frozen=True)
class ModelShape:
    """The sizes of a model that decide its memory."""

    layers: tuple[WeightCount, ...]
    embedding: WeightCount  # with the head, where both share their weight
    head: WeightCount
    rest: WeightCount
    hidden: int
    vocab: int
    element_bytes: int  # of a frozen weight
    trainable_bytes: int
    largest_trainable: int  # elements of the largest trainable parameter
    tied: bool = False
    buffer_bytes: int = 0
    largest_muon: int = 0  # elements that Muon orthogonalises at once
    largest_leap: int = 0  # elements that leaps orthogonalise at once

    @classmethod
    def of(
        cls,
        model: nn.Module,
        layer_names: list[str],
        muon: Iterable[nn.Parameter] = (),
        leaps: Iterable[nn.Parameter] = (),
    ) -> ModelShape:
        """
        Read a live model, also inside a PEFT wrapper; its weights may lie anywhere, on the meta device too.

        `layer_names` are those of its decoder layers, `muon` the parameters that Muon moves, `leaps` those that leaps
        orthogonalise.
        """
        if not layer_names:
            raise ValueError("`layer_names` is empty. Name the decoder layers, for example `model.layers.0`.")
        ends = [ask(model, question) for question in ("get_input_embeddings", "get_output_embeddings")]
        weights = [getattr(end, "weight", None) for end in ends]
        config = text_config(model)
        vocab, hidden = weights[0].shape if weights[0] is not None else (None, None)
        hidden, vocab = getattr(config, "hidden_size", hidden), getattr(config, "vocab_size", vocab)
        if hidden is None or vocab is None:
            raise ValueError(f"`{type(model).__name__}` has no `hidden_size` and `vocab_size` in its config.")
        matrices = {id(p): elements_at_once(p.shape) for p in muon}
        count = functools.partial(_count, seen=set(), muon=matrices.keys(), rounds=rounded_by_autocast(model))
        trainable = [p for p in model.parameters() if p.requires_grad]
        frozen = [p for p in model.parameters() if not p.requires_grad]
        return cls(
            layers=tuple(count(model.get_submodule(name)) for name in layer_names),
            embedding=count(ends[0]),
            head=count(ends[1]),
            rest=count(model),
            hidden=hidden,
            vocab=vocab,
            element_bytes=_usual_size(frozen or trainable),
            trainable_bytes=_usual_size(trainable or frozen),
            largest_trainable=max((p.numel() for p in trainable), default=0),
            tied=weights[0] is not None and weights[0] is weights[1],
            buffer_bytes=storage_bytes(model.buffers()),
            largest_muon=max(matrices.values(), default=0),
            largest_leap=max((elements_at_once(p.shape) for p in leaps), default=0),
        )

    @functools.cached_property
    def total(self) -> WeightCount:
        """All weights, each once."""
        return functools.reduce(WeightCount.join, [*self.layers, self.embedding, self.head, self.rest])

    def place(self, stream_embeddings: bool, resident_layers: int = 0) -> Placement:
        """Return what is streamed, and what stays on the device."""
        travelling, stays, left = [], self.rest, resident_layers
        resident: list[WeightCount] = []
        for layer in self.layers:
            streamed, adapters = layer.split()
            if streamed.trainable and left:  # trained layers stay as a whole, from the first on
                resident.append(layer)
                stays, left = stays.join(layer), left - 1
            else:
                travelling.append(streamed)
                stays = stays.join(adapters)
        ends = [end.split() if stream_embeddings else (WeightCount(), end) for end in (self.embedding, self.head)]
        for _, adapters in ends:
            stays = stays.join(adapters)
        return Placement(travelling, [end for end, _ in ends], resident, stays, kept=left)


class Placement(NamedTuple):
    """Where the weights of a streamed model are."""

    layers: list[WeightCount]
    """Layers that travel, without adapters."""
    ends: list[WeightCount]
    """Embeddings and head, as far as they travel."""
    resident: list[WeightCount]
    """Trained layers that live on the device."""
    stays: WeightCount
    """All that lives on the device: these layers too, embeddings and head if they do not travel, adapters, the rest."""
    kept: int
    """Frozen layers whose copies stay on the device after their use."""


def _count(module: nn.Module | None, *, seen: set[int], muon: Collection[int], rounds: Collection[int]) -> WeightCount:
    counts, parameters = [0, 0, 0], []
    for parameter in module.parameters() if module is not None else ():
        if id(parameter) not in seen:
            seen.add(id(parameter))
            counts[not parameter.requires_grad] += parameter.numel()
            counts[2] += parameter.numel() * (id(parameter) in muon)
            parameters.append(ParameterCount(parameter.numel(), parameter.requires_grad, id(parameter) in rounds))
    return WeightCount(*counts, tuple(parameters))


def _usual_size(parameters: list[nn.Parameter]) -> int:
    """Return the bytes of an element in the dtype of most weights. A few norms in fp32 change little."""
    sizes: Counter[int] = Counter()
    for parameter in parameters:
        sizes[parameter.element_size()] += parameter.numel()
    return sizes.most_common(1)[0][0]


def host_memory(root: str | Path = "/") -> int:
    """Return the bytes that can still be allocated on the host, within the limits of control groups."""
    root = Path(root)
    try:
        lines = (root / "proc/meminfo").read_text().splitlines()
        available = next(int(line.split()[1]) * 2**10 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([available, *_left_by_control_groups(root)])


def _left_by_control_groups(root: Path) -> Iterator[int]:
    """Yield the bytes that this process's control group and its parents may still take, under version 2 or 1."""
    try:
        entries = [line.split(":", 2) for line in (root / "proc/self/cgroup").read_text().splitlines()]
    except OSError:
        return
    for _, controllers, path in entries:
        top, names = root / "sys/fs/cgroup", ("memory.max", "memory.current", "inactive_file")
        if "memory" in controllers.split(","):
            top, names = top / "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        group = top / path.lstrip("/")
        # Inside a container the path may be the host's: then only the top is there.
        for folder in [group, *group.parents]:
            try:
                most, taken = ((folder / name).read_text().strip() for name in names[:2])
                statistics = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
            except (OSError, ValueError):
                continue
            if most != "max":
                # Pages of files count as used, but make room when memory is asked for.
                yield max(int(most) - int(taken) + int(statistics.get(names[2], 0)), 0)
