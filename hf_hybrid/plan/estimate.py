"""
The estimate of a setup's peak on device and host, whether it fits, and the nearest setup that fits.

One [`Estimator`] serves the trainer (for its live model) and `hf-hybrid plan` (for a model that is made from its config
and has no data). Both get the same plan for the same setup.

**Resident.** The device's peak is read from a trace of a step ([`trace`]): the largest moment, by category. Leaps add
their buffers, category `drift`: per trainable weight the direction's fp32 values and a snapshot. Adapters train
without leaps.

**Streamed.** Layers live on the host and visit the device, so a trace of the resident model is not theirs. The table is
summed up from the sizes of the layers and from the trace's activations of checkpointed layers:

    device   slots for the layers fetched ahead, the one that computes and the resident ones; embeddings, head and all
             else that is not streamed, with gradients and states; between two layers their boundary, for every
             micro-batch in flight; and the largest of three moments that never coincide: a layer is recomputed and its
             gradients leave; head and loss compute; a unit is updated (8-bit states). On a GPU what was sent before is
             still leaving in each of them.
    host     weights, gradients and states of what is streamed, rounded copies that travel in its place, boundaries
             that wait there, and scratch of Muon's or the leaps' orthogonalisation, which holds a few copies of the
             largest matrix.

**Shared by FSDP2.** Each process holds its rows of weights, gradients, states and leaps' buffers, on the device or
(`cpu_offload`) on the host. The weights of a layer are gathered while it computes; those of the last norm and the head,
and of embeddings that are tied to it, from the loss to the end of their backward pass. What is held and the largest of
the moments in [`Estimator.shared`] are added up. Gathered weights and their gradients are in bf16 under bf16, and so is
all that computes: the trace is that of a model in bf16.

Where a model cannot be traced because its code needs values, activations are estimated from hidden size and vocabulary
instead. They enter the same sums, and the plan says that it was not traced.

**Does it fit?** A limit of a GPU leaves room for the CUDA context and 5 % for the allocator (`Setup.margin`). Of the
candidates (resident; streamed; streamed with embeddings and head) the first that fits is chosen; a streamed one keeps
as many layers on the device as there is room for. If none fits, the refusal shows the table of the one that is over by
least, and names the cheapest change of options that fits. Each option that helps has a cost: what only takes time (a
chunked loss, waiting for transfers, smaller micro-batches) comes before leaps, and these before exactness. All
combinations are tried in the order of their cost, so that the advice is known to work.
"""

from __future__ import annotations

import functools
import itertools
import logging
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

from hf_hybrid.machine import locked_bytes, pinned_bytes
from hf_hybrid.plan.accounting import ByteTable, ModelShape, Parameter, Unit, format_bytes
from hf_hybrid.plan.setups import Setup, Way, option
from hf_hybrid.plan.trace import TRACED, Activations, Shared, Tracer, eight_bit_sizes
from hf_hybrid.streaming.units import padded

logger = logging.getLogger(__name__)

# Without a trace: what autograd saves in a layer per token, hidden unit and byte of an activation, and how much more
# recomputing it holds (a Llama in bf16 and SDPA attention: 49 B); fp32 tensors as large as the logits, of all tokens or
# of two chunks, that the loss holds.
SAVED_BY_A_LAYER, RECOMPUTED_LAYER = 49 / 2, 1.15
LOGIT_COPIES, CHUNK_LOGIT_COPIES, CHUNK_TOKENS = 2.5, 2, 1024
# Bytes of an 8-bit state per element: a code, and an fp32 absolute maximum per block of 256.
EIGHT_BIT_STATE = 1 + 4 / 256
# The 8-bit update works on so many elements at a time. Scratch in bytes per element: of bf16 weights, fp32 copies of
# weights and gradient, random bits, and what is rounded; of fp32 weights, a mask of codes.
UPDATE_CHUNK, UPDATE_SCRATCH = 2**24, {2: 13, 4: 1}
# Orthogonalising, in Muon's step or a leap, holds of one matrix an fp32 tensor and at most four of its size in bf16;
# leaps on the host compute in fp32.
MUON_SCRATCH, LEAP_SCRATCH_ON_HOST = 4 + 4 * 2, 4 * 4


@dataclass(frozen=True)
class Plan:
    """A setup and the bytes that it holds at its peak."""

    setup: Setup
    shape: ModelShape
    mode: str  # "resident", "streamed" or "shared"
    resident_layers: int
    stream_embeddings: bool
    table: ByteTable  # on the device at its largest moment, on the host between steps
    stage: str = ""  # of a traced resident model, when the device holds most: "forward", "backward" or "update"
    traced: bool = False  # else activations are estimated from sizes
    parked: int = 0  # bytes of activations that wait on the host
    way: Way | None = None  # that was planned, of the usual ones

    @property
    def peak_device_bytes(self) -> int:
        """Bytes of tensors on the device at its largest moment."""
        return self.table.total("device")

    @property
    def peak_host_bytes(self) -> int:
        """Bytes of tensors on the host."""
        return self.table.total("host")

    @property
    def categories(self) -> dict[str, dict[str, int]]:
        """`{category: {"device": bytes, "host": bytes}}`, and the same under `"total"`."""
        return self.table.to_dict()

    @property
    def margin_bytes(self) -> int:
        """Device memory beside tensors: the CUDA context, and what the allocator rounds up and cannot use."""
        return self.setup.margin(self.peak_device_bytes)

    @property
    def device_shortfall(self) -> int:
        """Bytes by which the device is too small, with its margin; 0 if it is not."""
        vram = self.setup.vram
        return 0 if vram is None else max(self.peak_device_bytes + self.margin_bytes - vram, 0)

    @property
    def host_shortfall(self) -> int:
        """Bytes by which the host is too small; 0 if it is not."""
        return 0 if self.setup.ram is None else max(self.peak_host_bytes - self.setup.ram, 0)

    @property
    def fits(self) -> bool:
        """Whether device (with its margin) and host are large enough. Without a limit they are."""
        return not (self.device_shortfall or self.host_shortfall)

    @property
    def options(self) -> dict[str, object]:
        """The fields of `HybridConfig` that carry the plan out."""
        names = ["batch_size", "gradient_accumulation_steps", "autocast", "enable_predict", "optimizer_states"]
        names += ["memory", "chunked_loss"]
        streamed = ["offload_activations", "base_precision", "vram", "ram", "resident_layers", "stream_embeddings"]
        names += streamed if self.mode == "streamed" else ["activation_checkpointing"]
        kept = {"resident_layers": self.resident_layers, "stream_embeddings": self.stream_embeddings}
        decided = replace(self.setup, memory="stream" if self.mode == "streamed" else "off", **kept)
        found = (option(name, getattr(decided, name)) for name in names)
        offload = {"fsdp": True, "fsdp_config": {"cpu_offload": True}} if self.setup.cpu_offload else {}
        return {"optim": "adamw_torch_fused", **{name: value for name, value in found if value is not None}, **offload}

    def to_dict(self) -> dict:
        """Plain values for JSON: what was decided, and the peaks expected by category."""
        streamed = self.mode == "streamed"
        return {
            "mode": self.mode,
            "resident_layers": self.resident_layers,
            "prefetch_layers": self.setup.prefetch_layers if streamed else 0,
            "stream_embeddings": self.stream_embeddings,
            "optimizer_states": self.setup.optimizer_states,
            "base_precision": self.setup.base_precision if streamed else "same",
            "peak": self.table.to_dict(),
            "traced": self.traced,
        }

    def describe(self) -> str:
        """The plan in words, and the table of its bytes, which are estimates."""
        words = [f"optimizer states {self.setup.optimizer_states}"]
        if self.mode == "streamed":
            words += [f"{self.resident_layers} resident layers", f"{self.setup.prefetch_layers} fetched ahead"]
            words += ["embeddings and head streamed"] * self.stream_embeddings
            words += ["frozen layers in int8"] * (self.setup.base_precision == "int8")
        if self.mode == "shared":
            words += [f"FSDP2 on {self.setup.processes} processes", *["CPU offload"] * self.setup.cpu_offload]
        return f"{self.mode}: {', '.join(words)}\nestimated bytes at the peak:\n{self.table}"


class _PerWeight:
    """Bytes per weight under a setup; pairs are for trainable and frozen ones."""

    def __init__(self, shape: ModelShape, setup: Setup):
        self.own = (shape.trainable_bytes, shape.element_bytes)
        self.work = tuple(min(own, 2 if setup.autocast else own) for own in self.own)
        # A second copy of what is not computed with as it is stored.
        self.rounded = tuple(work * (work < own) for work, own in zip(self.work, self.own))
        self.coded = 1 + 4 / shape.hidden if setup.base_precision == "int8" else None  # and an fp32 scale per row
        self.expanded = (0, self.work[1] * (self.coded is not None))
        self.eight_bit = setup.optimizer_states == "8bit"
        self.state = setup.states_per_weight * (EIGHT_BIT_STATE if self.eight_bit else self.own[0])
        chunk = min(shape.largest_trainable, UPDATE_CHUNK) * self.eight_bit
        self.scratch = math.ceil(chunk * UPDATE_SCRATCH.get(shape.trainable_bytes, 1))
        leap = shape.largest_leap * setup.leaps
        self.orthogonal = {
            "device": MUON_SCRATCH * max(shape.largest_muon, leap),
            "host": max(MUON_SCRATCH * shape.largest_muon, LEAP_SCRATCH_ON_HOST * leap),
        }
        self.leaps = 4 * setup.values_per_weight + self.own[0] if setup.leaps else 0
        self.slot = max(self.packed(layer.split()[0], int8=True) for layer in set(shape.layers))
        self.on_gpu = setup.accelerator == "cuda"
        self.locked = locked_bytes if self.on_gpu else lambda size: size

    def states(self, unit: Unit) -> float:
        """Bytes of optimizer states: Muon keeps one tensor per weight."""
        return unit.trainable * self.state - unit.muon * self.own[0]

    # Of a unit that travels.

    def _width(self, piece: Parameter) -> int:
        """Bytes of one of its weights on the device."""
        return (self.work if piece.rounds else self.own)[not piece.trained]

    def packed(self, unit: Unit, *, int8: bool = False) -> int:
        """Bytes of its weights as they travel, in one buffer; frozen ones maybe in int8."""
        coded = self.coded if int8 else None
        widths = ((p.count, self._width(p) if p.trained or coded is None else coded) for p in unit.pieces)
        return sum(padded(math.ceil(count * width)) for count, width in widths)

    def rounding(self, unit: Unit) -> int:
        """Number of its trained weights that travel rounded, beside masters that do not."""
        return sum(piece.count for piece in unit.pieces if piece.trained and self._width(piece) < self.own[0])

    def gradients(self, unit: Unit) -> int:
        """Bytes of its gradients on the device, and as they leave it: the host converts them."""
        return sum(piece.count * self._width(piece) for piece in unit.pieces if piece.trained)

    def leaving(self, unit: Unit, passes: int, together: int = 1) -> int:
        """
        Bytes of its gradients on the device. Micro-batches that are walked `together` add up as masters are; so do
        later passes on a GPU, to a sum that comes back.
        """
        if (passes == 1 or not self.on_gpu) and not (together > 1 and self.rounding(unit)):
            return self.gradients(unit)
        largest = max((piece.count for piece in unit.pieces if piece.trained), default=0)
        return self.own[0] * (unit.trainable + largest)

    def add_to_host(self, table: ByteTable, unit: Unit, *, int8: bool, times: int = 1) -> None:
        """Add what the host holds of so many such units: buffers that are page-locked take more than their size."""
        trained = [piece.count for piece in unit.pieces if piece.trained]
        pieces = [piece for piece in unit.pieces if piece.trained or not (int8 and self.coded)]
        widths = ((piece.count, self.own[not piece.trained], self._width(piece)) for piece in pieces)
        masters = [count * own for count, own, width in widths if width < own]
        # Only an update on the device makes masters travel.
        masters = sum(self.locked(size) if self.eight_bit else size for size in masters)
        table.add("weights", "host", times * (self.locked(self.packed(unit, int8=int8)) + masters))
        # Gradients land in the end of the buffers that they are converted in.
        table.add("gradients", "host", times * sum(self.locked(count * self.own[0]) for count in trained))
        # The optimizer allocates states in full precision, which do not travel; those in 8 bits do.
        states = self.states(unit)
        if self.eight_bit:
            states = sum(self.locked(size) for count in trained for size in eight_bit_sizes(count))
        table.add("states", "host", times * states)


def estimated_activations(shape: ModelShape, setup: Setup) -> Activations:
    """Estimate the activations of a model that was not traced, from its hidden size and vocabulary."""
    width = max(min(shape.element_bytes, 2 if setup.autocast else 4), 2)
    boundary = setup.tokens * shape.hidden * width
    rows = min(setup.tokens, CHUNK_TOKENS) if setup.chunked_loss else setup.tokens
    logits = rows * shape.vocab * 4 * (CHUNK_LOGIT_COPIES if setup.chunked_loss else LOGIT_COPIES)
    layer = RECOMPUTED_LAYER * SAVED_BY_A_LAYER * boundary
    return Activations(0, boundary, boundary, math.ceil(layer), math.ceil(logits))


class Estimator:
    """Plans of one model, by its sizes and its tracer; without a tracer, activations are estimated from the sizes."""

    def __init__(self, shape: ModelShape, tracer: Tracer | None = None):
        self.shape, self.tracer = shape, tracer

    def plan(self, setup: Setup) -> Plan:
        """Return the best plan. If nothing fits, raise [`PlanError`] with the bytes and the nearest plan that works."""
        found = self.best(setup)
        if not found.fits:
            raise self._refusal(found)
        return found

    def best(self, setup: Setup) -> Plan:
        """The first candidate that fits, else the one that is over by least."""
        return _first_that_fits(self._candidates(setup))

    def _candidates(self, setup: Setup) -> Iterator[Plan]:
        if setup.processes > 1:
            yield self.shared(setup)
            return
        asks_for_streaming = setup.resident_layers is not None or setup.base_precision == "int8"
        if setup.memory == "off" or (setup.memory == "auto" and not asks_for_streaming):
            yield self.resident(setup)
        if setup.memory == "off":
            return
        for ends in (False, True) if setup.stream_embeddings is None else (setup.stream_embeddings,):
            candidate = self.streamed(setup, setup.resident_layers or 0, ends)
            if setup.resident_layers is None and setup.vram is not None:
                room = (setup.device_budget - candidate.peak_device_bytes) // _PerWeight(self.shape, setup).slot
                candidate = self.streamed(setup, min(max(room, 0), len(self.shape.layers)), ends)
            yield candidate

    def resident(self, setup: Setup) -> Plan:
        """Everything on the device."""
        shape, per = self.shape, _PerWeight(self.shape, setup)
        at_update = per.scratch + per.orthogonal["device"]
        peak = self._ask_tracer(lambda tracer: tracer.peak(setup, at_update))
        active = self._activations(setup) if peak is None or setup.offload_activations else None
        away = max(len(shape.layers) - 2, 0) * active.boundary if setup.offload_activations else 0
        if peak is None:
            table = self._held(setup, per, shape.total)
            table.add("weights", "device", shape.total.bytes(per.rounded))  # autocast's casts, which autograd keeps
            each = active.boundary if setup.checkpointed else SAVED_BY_A_LAYER * active.boundary
            table.add("activations", "device", len(shape.layers) * each - away)
            layer = active.layer * setup.checkpointed
            _add_largest(table, {"activations": layer}, {"activations": active.loss}, {"buffers": at_update})
        else:
            table = ByteTable()
            for category in TRACED:
                table.add(category, "device", max(peak.get(category) - away * (category == "activations"), 0))
            table.add("states", "device", self.tracer.states(setup) - math.ceil(shape.total.muon * per.own[0]))
            table.add("buffers", "device", setup.workspaces(False))
            self._add_leaps(table, setup, per, shape, shape.total)
        if away:
            table.add("activations", "host", (len(shape.layers) - 2) * per.locked(active.boundary))
        stage = "" if peak is None else peak.stage
        return Plan(setup, shape, "resident", len(shape.layers), False, table, stage, peak is not None, away)

    def shared(self, setup: Setup) -> Plan:
        """Rows on each of several processes. FSDP2 gathers groups of them: a layer, or the ends of the model."""
        count, part = setup.processes, self.shape.part(setup.processes)
        per, rows, place = _PerWeight(part, setup), part.total, "host" if setup.cpu_offload else "device"
        taken = pinned_bytes if setup.cpu_offload and per.on_gpu else lambda size: size
        table = ByteTable()
        for piece in rows.pieces:
            table.add("weights", place, taken(piece.count * per.own[not piece.trained]))
            table.add("states", place, 4 * piece.trained)  # the number of the step
        gradients = sum(taken(piece.count * per.own[0]) for piece in rows.pieces if piece.trained)
        table.add("states", place, per.states(rows))
        table.add("buffers", "device", part.buffer_bytes + setup.workspaces(False))
        self._add_leaps(table, replace(setup, buffers_device="cpu") if setup.cpu_offload else setup, per, part, rows)
        if setup.cpu_offload:
            table.add("gradients", "host", gradients)
        ends = functools.reduce(Unit.join, [part.head, part.rest, *[part.embedding] * part.tied])
        groups = {*part.layers, *[part.embedding] * (not part.tied)}
        layer, gathered = (count * max(unit.bytes(per.work) for unit in units) for units in (groups, (ends,)))
        of_layer, of_ends = (count * per.work[0] * n for n in (max(unit.trainable for unit in groups), ends.trainable))
        waits = setup.gradient_accumulation_steps > 1  # no gradient is sent before the last micro-batch
        if waits:
            table.add("gradients", "device", count * per.work[0] * rows.trainable)
        computing, loss = self._moments(setup, 0 if waits or setup.cpu_offload else per.own[0])
        largest = max(self.shape.largest_muon, self.shape.largest_leap * setup.leaps)
        results = 4 * sum(unit.trainable for unit in part.layers) * (largest > 0)
        _add_largest(
            table,
            # The next group is received before this one has computed. Then it is copied into its weights.
            {
                "activations": loss.activations,
                "weights": gathered + max(gathered, layer),
                "gradients": loss.gradients + of_ends,
            },
            # What was sent of gradients lasts until that of the next group is due.
            {
                "activations": computing.activations,
                "weights": 2 * layer,
                "gradients": computing.gradients + of_layer + max(of_layer, of_ends),
            },
            {"gradients": gradients * (not setup.cpu_offload)},
            # Leaps or Muon: rows of all results; a matrix that was received, one to be sent, and scratch.
            {"buffers": results + (2 * 4 + MUON_SCRATCH) * largest},
        )
        return Plan(setup, self.shape, "shared", len(part.layers), False, table, "", self.tracer is not None)

    def _moments(self, setup: Setup, element_bytes: int) -> tuple[Shared, Shared]:
        """Return the largest moments while a layer computes, and while the loss is computed; see `trace.shared`."""
        found = self._ask_tracer(lambda tracer: tracer.shared(setup, element_bytes))
        if found is not None:
            return found
        active = estimated_activations(self.shape, setup)
        kept = len(self.shape.layers) * (1 if setup.checkpointed else SAVED_BY_A_LAYER) * active.boundary
        gradients = element_bytes * self.shape.total.trainable / setup.processes
        return Shared(kept + active.layer, gradients), Shared(kept + active.loss, 0)

    def streamed(self, setup: Setup, resident_layers: int, stream_embeddings: bool) -> Plan:
        """Layers on the host but for so many, and maybe embeddings and head."""
        if self.tracer is not None and not self.tracer.excerpt.stands_for:
            raise ValueError("`memory=stream`: the model has no list of decoder layers. Set `memory=off`.")
        shape, per = self.shape, _PerWeight(self.shape, setup)
        layers, (embedding, head), resident = shape.place(stream_embeddings)
        units = [*layers, embedding, head]
        table = self._held(setup, per, resident, streamed=True)
        # Slots are made anew after a save, when the old ones are gone: the same number at any time, and none after it.
        slots = (setup.prefetch_layers + 1 + resident_layers) * per.slot
        table.add("weights", "device", slots + max(per.packed(embedding), per.packed(head)))
        table.add("buffers", "device", max(layer.bytes(per.expanded) for layer in layers))  # int8, where it computes
        for unit, times in Counter(layers).items():
            per.add_to_host(table, unit, int8=True, times=times)
        for unit in (embedding, head):
            per.add_to_host(table, unit, int8=False)
        table.add("buffers", "host", per.orthogonal["host"])
        active, windows = self._activations(setup), setup.micro_batches_in_flight
        near = min(len(layers), 2) if setup.offload_activations else len(layers)
        table.add("activations", "device", (active.always + near * active.boundary) * windows)
        # The output before the last is parked as well, though it is needed again at once.
        parked = (len(layers) - 1) * windows * setup.offload_activations
        table.add("activations", "host", parked * per.locked(active.output))
        wide = max(per.leaving(end, setup.gradient_accumulation_steps) for end in (embedding, head))
        passes = setup.gradient_accumulation_steps // windows
        widest = max(per.leaving(layer, passes, windows) for layer in set(layers))
        # On a GPU, what was sent before may still be leaving, up to a limit (`Transfers.most_leaving`). On a CPU, the
        # gradient of embeddings or head is counted beside the layer that computes next.
        before = per.own[0] * max(unit.trainable for unit in units) or min(slots, parked * active.output)
        before *= per.on_gpu
        recomputing = {"activations": active.layer, "gradients": widest + (before if per.on_gpu else wide)}
        loss, update = {"activations": active.loss, "gradients": wide + before}, {"gradients": before}
        if not stream_embeddings:
            loss["buffers"] = shape.vocab * shape.hidden * per.rounded[0]  # autocast's cast of the head
        if setup.optimizer_states == "8bit":
            # Units are updated before their forward: gradients, states, and masters where the slot holds a copy.
            one = per.own[0] + per.state + per.own[0] * (per.rounded[0] > 0)
            arriving = max(layer.trainable for layer in layers) * setup.prefetch_layers
            update["buffers"] = (max(unit.trainable for unit in units) + arriving) * one + per.scratch
        _add_largest(table, recomputing, loss, update)
        traced, parked = self.tracer is not None, parked * active.output
        return Plan(setup, shape, "streamed", resident_layers, stream_embeddings, table, "", traced, parked)

    def _held(self, setup: Setup, per: _PerWeight, resident: Unit, *, streamed: bool = False) -> ByteTable:
        """A table of what stays on the device, and of what leaps keep."""
        table = ByteTable()
        table.add("weights", "device", resident.bytes(per.own))
        table.add("gradients", "device", resident.trainable * per.own[0])
        table.add("states", "device", per.states(resident))
        table.add("buffers", "device", self.shape.buffer_bytes + setup.workspaces(streamed))
        self._add_leaps(table, setup, per, self.shape, resident)
        return table

    def _add_leaps(self, table: ByteTable, setup: Setup, per: _PerWeight, shape: ModelShape, resident: Unit) -> None:
        if not setup.leaps:
            return
        beside = resident.trainable if setup.buffers_device == "auto" else 0
        for place, weights in (("device", beside), ("host", shape.total.trainable - beside)):
            scratch = 4 * shape.largest_trainable * (weights > 0)
            table.add("drift", place, weights * per.leaps + scratch)
        # Buffers on the host are page-locked where the weights lie on a GPU.
        counts = [piece.count for piece in resident.pieces if piece.trained and setup.buffers_device == "cpu"]
        taken = sum(setup.values_per_weight * per.locked(4 * n) + per.locked(per.own[0] * n) for n in counts)
        table.add("drift", "host", taken - per.leaps * sum(counts))

    def _activations(self, setup: Setup) -> Activations:
        return self._ask_tracer(lambda tracer: tracer.activations(setup)) or estimated_activations(self.shape, setup)

    def _ask_tracer(self, question: Callable):
        if self.tracer is None:
            return None
        try:
            return question(self.tracer)
        except Exception as error:  # whatever a model's own code makes of tensors without data
            logger.info("No step of this model can be traced (%r). Its activations are estimated from sizes.", error)
            self.tracer = None
            return None

    # Refusals.

    def _levers(self, setup: Setup) -> list[list[tuple[int, dict]]]:
        """Other options and their costs: speed is cheap, leaps and exact numbers are expensive."""
        has_base = any(layer.frozen for layer in self.shape.layers)
        is_adamw = setup.states_per_weight == 2 and self.shape.total.trainable and not self.shape.total.muon
        can_chunk = self.tracer is None or self.tracer.cannot_chunk is None
        levers = [
            (not setup.chunked_loss and can_chunk, 1, {"chunked_loss": True}),
            (setup.resident_layers is not None, 1, {"resident_layers": None}),
            (setup.stream_embeddings is False, 1, {"stream_embeddings": None}),
            (not setup.offload_activations, 2, {"offload_activations": True}),
            (setup.memory == "off" and not setup.checkpointed, 2, {"activation_checkpointing": True}),
            (setup.buffers_device == "auto" and setup.leaps, 2, {"buffers_device": "cpu"}),
            (setup.prefetch_layers > 0, 2, {"prefetch_layers": 0}),
            (setup.memory == "off", 3, {"memory": "auto"}),
            (setup.micro_batches_in_flight > 1, 3, {"accumulation_walk": "micro_batch"}),
            (setup.enable_predict, 6, {"enable_predict": False}),
            (setup.optimizer_states == "exact" and is_adamw, 7, {"optimizer_states": "8bit"}),
            (setup.base_precision == "same" and has_base, 7, {"base_precision": "int8"}),
        ]
        sizes, size = [(0, {})], setup.batch_size // 2
        while size:
            steps = -(-setup.gradient_accumulation_steps * setup.batch_size // size)
            sizes.append((3 + len(sizes), {"batch_size": size, "gradient_accumulation_steps": steps}))
            size //= 2
        return [[(0, {}), (cost, change)] for helps, cost, change in levers if helps] + [sizes]

    def _nearest(self, setup: Setup) -> Plan:
        """Return the cheapest change of options that fits, or else the one with the smallest excess."""
        choices = sorted(itertools.product(*self._levers(setup)), key=lambda choice: sum(cost for cost, _ in choice))
        changes = ({name: value for _, change in choice for name, value in change.items()} for choice in choices)
        return _first_that_fits(self.best(replace(setup, **change)) for change in changes)

    def _refusal(self, refused: Plan) -> PlanError:
        nearest = self._nearest(refused.setup)
        changes = refused.setup.changes(nearest.setup)
        # What a change leaves to the plan is named as the plan decided it.
        left = [name for name, value in changes.items() if value is None and nearest.mode == "streamed"]
        changes |= {name: getattr(nearest, name) for name in left}
        options = ", ".join(f"`{name}={value}`" for name, value in changes.items()) or "the options as they are"
        device, host = format_bytes(nearest.peak_device_bytes), format_bytes(nearest.peak_host_bytes)
        advice = "No change of options fits these limits. The smallest need found"
        advice = "Nearest plan that works" if nearest.fits else advice
        advice = f"{advice}: {options} (estimated: {device} on the device, {host} on the host)."
        error = refuse(self._reason(refused), refused, advice)
        if nearest.fits:
            error.nearest, error.changes = nearest, changes
        return error

    def _reason(self, refused: Plan) -> str:
        setup, parts, margin = refused.setup, [], refused.margin_bytes
        beside = f" and needs {format_bytes(margin)} beside" if margin else ""
        for place, held, more, over, name, limit in (
            ("device", refused.peak_device_bytes, beside, refused.device_shortfall, "vram_budget_gib", setup.vram),
            ("host", refused.peak_host_bytes, "", refused.host_shortfall, "host_budget_gib", setup.ram),
        ):
            if over:
                over = f"{format_bytes(over)} ({over} bytes) over `{name}={limit / 2**30:.3g}`"
                parts.append(f"the {place} would hold an estimated {format_bytes(held)}{more}, {over}")
        slot = _PerWeight(self.shape, setup).slot
        if refused.mode == "streamed" and setup.vram is not None and slot > setup.device_budget:
            parts.append(f"the largest layer alone takes {format_bytes(slot)}")
        return f"`memory={setup.memory}` cannot train this model: {'; '.join(parts)}."


def _first_that_fits(plans: Iterable[Plan]) -> Plan:
    """Return the first plan that fits, else the one that exceeds its limits least."""
    least, over = None, math.inf
    for plan in plans:
        short = plan.device_shortfall + plan.host_shortfall
        if short < over:
            least, over = plan, short
        if not short:
            break
    return least


def _add_largest(table: ByteTable, *moments: dict[str, float]) -> None:
    """Add the largest of several moments that never coincide."""
    for category, count in max(moments, key=lambda moment: sum(moment.values())).items():
        table.add(category, "device", count)


class PlanError(ValueError):
    """No plan fits. `plan` was refused; `nearest` works after `changes` (options and their values), if there is one."""

    def __init__(self, message: str, plan: Plan | None = None):
        super().__init__(message)
        self.plan, self.nearest, self.changes = plan, None, {}


def refuse(reason: str, what: ModelShape | Plan, nearest: str | None = None) -> PlanError:
    """Return an error with `reason`, the bytes of a plan or of a model's weights, and `nearest`, which works."""
    refused = what if isinstance(what, Plan) else None
    shown = what.describe() if refused else ByteTable()
    if not refused:
        shown.add("weights", "device", what.total.bytes((what.trainable_bytes, what.element_bytes)))
    return PlanError(f"{reason}\n\n{shown}\n\n{nearest or 'No change of options is known to work.'}", refused)


# The floor of a step's time.


def step_traffic(plan: Plan) -> dict[str, float]:
    """Return the least bytes of a step: `"h2d"` to the device, `"d2h"` back, `"dram"` moved in host memory."""
    setup, per = plan.setup, _PerWeight(plan.shape, plan.setup)
    micro_batches = setup.gradient_accumulation_steps
    passes = micro_batches // setup.micro_batches_in_flight
    away = plan.parked * passes
    if plan.mode == "resident":
        return {"h2d": away, "d2h": away, "dram": 2 * away}
    if plan.mode == "shared":  # what processes send each other is not counted
        rows = plan.shape.part(setup.processes).total if setup.cpu_offload else Unit()
        into, back = 2 * micro_batches * rows.bytes(per.own), rows.trainable * per.own[0]
        updated = rows.trainable * 3 * per.own[0] + 2 * per.states(rows)
        return {"h2d": into, "d2h": back, "dram": into + back + updated}
    layers, (embedding, head), _ = plan.shape.place(plan.stream_embeddings)
    layers.sort(key=lambda layer: per.packed(layer, int8=True))
    count = max(len(layers) - plan.resident_layers, 0)
    travelling = functools.reduce(Unit.join, [*layers, embedding, head])
    trainable, own, work, rounding = travelling.trainable, per.own[0], per.work[0], per.rounding(travelling)
    # Each micro-batch calls embeddings and head on its own. Unless the loss is chunked, the head is recomputed. Then it
    # stays for the next micro-batch of its pass.
    heads = micro_batches + passes * (not setup.chunked_loss)
    into = micro_batches * per.packed(embedding) + heads * per.packed(embedding if plan.shape.tied else head)
    into += passes * 2 * sum(per.packed(layer, int8=True) for layer in layers[:count]) + away
    back, converted = away, 0
    for unit, times in [*((layer, passes) for layer in layers), (embedding, micro_batches), (head, micro_batches)]:
        # Gradients leave as they are. If there is one, the host converts it to the precision of the master. Else they
        # are added up on the device, and the sum leaves in that precision.
        summed = unit in layers and setup.micro_batches_in_flight > 1
        first = own * unit.trainable if summed else per.gradients(unit)
        converted += (work + own) * per.rounding(unit) * (times == 1 and not summed)
        into += (first + own * unit.trainable * (times - 2)) * (times > 1)
        back += first + own * unit.trainable * (times - 1)
    if per.eight_bit:
        # Gradients and states come, states and weights go; the masters come too where the slot holds a rounded copy.
        into += trainable * (own + per.state) + own * rounding
        back += trainable * (own + per.state) + work * rounding
        return {"h2d": into, "d2h": back, "dram": into + back + converted}
    # What is resident and trained is old after the update.
    into += sum(per.packed(layer) for layer in layers[count:] if layer.trainable)
    updated = trainable * 3 * own + work * rounding + 2 * per.states(travelling)
    return {"h2d": into, "d2h": back, "dram": into + back + converted + updated}


def step_floor_seconds(plan: Plan, tokens_per_step: int, rates: dict[str, float]) -> float:
    """
    Return the least seconds of an optimizer step: the longest of computing (without attention) and copying.

    `tokens_per_step` counts all micro-batches; `rates` are those of `measure_machine`, some of which may be missing.
    """
    recomputes = plan.mode == "streamed" or plan.setup.checkpointed
    # A lookup multiplies nothing, unless the head is made of the same weights.
    lookup, total = Unit() if plan.shape.tied else plan.shape.embedding, plan.shape.total
    products, trained = total.weights - lookup.weights, total.trainable - lookup.trainable
    seconds = tokens_per_step * ((6 if recomputes else 4) * products + 2 * trained) / rates["flops"]
    return max([seconds, *(count / rates[name] for name, count in step_traffic(plan).items() if rates.get(name))])
