"""
What a step holds, from its beginning to its end: of a resident model that was not traced, and of a streamed one.

The step of streamed models is a class, whose methods follow the course of the step. Some bytes are there
all the time; they go into the table as they are. Others are there at one moment only: a layer is recomputed, the loss
is computed, weights are updated. These moments never coincide, so only the largest of them counts ([`add_largest`]).

- [`untraced_table`]: everything lies on the device, and activations are estimated.
- [`StreamedStep`]: layers lie on the host and visit the device.

A *unit* is what travels as one: a layer, the embeddings or the head. All sizes are in bytes unless a
name says otherwise.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

from hf_hybrid.machine import locked_bytes
from hf_hybrid.plan.accounting import ByteTable, ModelShape, ParameterCount, WeightCount
from hf_hybrid.plan.setups import Setup
from hf_hybrid.plan.trace import Activations, eight_bit_sizes
from hf_hybrid.streaming.units import padded

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

DeviceBytes = dict[str, float]
"""What one moment of a step adds on the device, by category."""


def add_largest(table: ByteTable, *moments: DeviceBytes) -> None:
    """Add the largest of several moments that never coincide."""
    for category, count in max(moments, key=lambda moment: sum(moment.values())).items():
        table.add(category, "device", count)


# What a weight takes.


class PerWeight(NamedTuple):
    """Bytes per weight."""

    trainable: int
    frozen: int


class WeightBytes:
    """What a model's weights, gradients, states and buffers take under a setup, in bytes."""

    def __init__(self, shape: ModelShape, setup: Setup):
        self.shape, self.setup = shape, setup
        self.on_gpu = setup.accelerator == "cuda"
        # The page-locked bytes that a buffer takes on the host. On a CPU nothing is locked.
        self.locked: Callable[[int], int] = locked_bytes if self.on_gpu else lambda size: size
        # A weight in the dtype it is kept in, and in the one it computes in: under autocast at most two bytes.
        self.stored = PerWeight(shape.trainable_bytes, shape.element_bytes)
        self.computed = PerWeight(*(min(size, 2) if setup.autocast else size for size in self.stored))
        # The rounded copy beside a weight that does not compute as it is stored.
        pairs = zip(self.computed, self.stored)
        self.second_copy = PerWeight(*(computed if computed < stored else 0 for computed, stored in pairs))
        # A frozen weight of a layer that travels in int8, with its share of an fp32 scale per row.
        self.int8_layer = 1 + 4 / shape.hidden if setup.base_precision == "int8" else None
        # Optimizer states per trainable weight, and what the 8-bit update works in.
        self.eight_bit = setup.optimizer_states == "8bit"
        self.state = setup.states_per_weight * (EIGHT_BIT_STATE if self.eight_bit else self.stored.trainable)
        chunk = min(shape.largest_trainable, UPDATE_CHUNK) if self.eight_bit else 0
        self.update_scratch = math.ceil(chunk * UPDATE_SCRATCH.get(shape.trainable_bytes, 1))
        # What Muon or a leap works in while it orthogonalises its largest matrix. Streamed weights leap on the host.
        leap_matrix = shape.largest_leap if setup.leaps else 0
        self.orthogonal_device = MUON_SCRATCH * max(shape.largest_muon, leap_matrix)
        self.orthogonal_host = LEAP_SCRATCH_ON_HOST * leap_matrix
        # fp32 values that the direction of leaps keeps of a trainable weight; with the snapshot before a leap, bytes.
        self.leap_values = setup.values_per_weight or 0
        self.leap = 4 * self.leap_values + self.stored.trainable if setup.leaps else 0

    def states(self, unit: WeightCount) -> float:
        """Bytes of optimizer states: Muon keeps one tensor per weight."""
        return unit.trainable * self.state - unit.muon * self.stored.trainable

    def casts(self, unit: WeightCount) -> int:
        """Bytes of the rounded copies that autocast makes of its weights where they compute."""
        copy = self.second_copy
        return sum(p.count * (copy.trainable if p.trained else copy.frozen) for p in unit.by_parameter if p.rounds)

    # Of a unit that travels.

    def travelling(self, parameter: ParameterCount) -> int:
        """Bytes of one of its weights as it travels, but for int8: rounded if autocast rounds it anyway."""
        sizes = self.computed if parameter.rounds else self.stored
        return sizes.trainable if parameter.trained else sizes.frozen

    def packed(self, unit: WeightCount, *, int8: bool = False) -> int:
        """Bytes of its weights as they travel, in one buffer; with `int8` frozen ones in int8, if the setup says so."""

        def size(parameter: ParameterCount) -> float:
            in_int8 = int8 and self.int8_layer is not None and not parameter.trained
            return self.int8_layer if in_int8 else self.travelling(parameter)

        return sum(padded(math.ceil(p.count * size(p))) for p in unit.by_parameter)

    def gradients(self, unit: WeightCount) -> int:
        """Bytes of its gradients as they are computed on the device."""
        return sum(p.count * self.travelling(p) for p in unit.by_parameter if p.trained)

    def leaving(self, unit: WeightCount, passes: int) -> int:
        """
        Bytes of its gradients on the device until they have left.

        They leave in the dtype of the masters: those that are computed in fewer bytes are converted one by one. Those
        of later `passes` are added up on the device, onto a sum that comes back from the host.
        """
        trained = [p for p in unit.by_parameter if p.trained]
        converted = any(p.count and self.travelling(p) < self.stored.trainable for p in trained)
        if not (passes > 1 or converted):
            return self.gradients(unit)
        return self.stored.trainable * (unit.trainable + max((p.count for p in trained), default=0))

    def masters(self, unit: WeightCount) -> int:
        """Bytes of the masters of its trained weights that travel rounded, in one buffer."""
        wide = (p.count for p in unit.by_parameter if p.trained and self.travelling(p) < self.stored.trainable)
        return sum(padded(count * self.stored.trainable) for count in wide)

    def packed_gradients(self, unit: WeightCount) -> int:
        """Bytes of its gradients in one buffer of the host."""
        return sum(padded(p.count * self.stored.trainable) for p in unit.by_parameter if p.trained)

    def packed_states(self, unit: WeightCount) -> list[int]:
        """Bytes of its states on the host, in one buffer for each type."""
        counts = [p.count for p in unit.by_parameter if p.trained and p.count]
        if not self.eight_bit:
            size = sum(self.setup.states_per_weight * padded(count * self.stored.trainable) for count in counts)
            return [size - unit.muon * self.stored.trainable]
        sizes = [eight_bit_sizes(count) for count in counts]
        codes = sum(padded(size) for each in sizes if len(each) > 2 for size in each[::2])
        return [codes, sum(padded(size) for each in sizes for size in each) - codes]

    def beside(self, unit: WeightCount) -> int:
        """Bytes on the device of what its update needs beside the weights."""
        return sum(self.packed_states(unit)) + self.masters(unit) + self.packed_gradients(unit)

    def add_to_host(
        self, table: ByteTable, unit: WeightCount, *, int8: bool, times: int = 1, gradients: bool = True
    ) -> None:
        """
        Add what the host holds of so many such units, `gradients` among it: buffers that are page-locked take more than
        their size.
        """
        frozen = 0
        for parameter in unit.by_parameter:
            in_int8 = int8 and self.int8_layer is not None
            if not parameter.trained and self.travelling(parameter) < self.stored.frozen and not in_int8:
                frozen += parameter.count * self.stored.frozen  # beside the rounded copy that travels
        weights = self.locked(self.packed(unit, int8=int8)) + self.locked(self.masters(unit)) + frozen
        table.add("weights", "host", times * weights)
        table.add("gradients", "host", times * gradients * self.locked(self.packed_gradients(unit)))
        table.add("states", "host", times * sum(map(self.locked, self.packed_states(unit))))

    # What is there all the time.

    def held(self, resident: WeightCount, *, streamed: bool = False) -> ByteTable:
        """A table of what `resident` weights hold on the device, with gradients and states, and of what leaps keep."""
        table = ByteTable()
        table.add("weights", "device", resident.bytes(self.stored))
        table.add("gradients", "device", resident.trainable * self.stored.trainable)
        table.add("states", "device", self.states(resident))
        table.add("buffers", "device", self.shape.buffer_bytes + self.setup.workspaces(streamed))
        self.add_leaps(table, resident)
        return table

    def add_beside(self, table: ByteTable) -> None:
        """
        Add models that are not trained, on the device or on the host as far as they stream, and what completions hold
        beyond the activations of a step.
        """
        whole, layers, slots = self.setup.evaluated
        on_host = layers * self.setup.evaluated_on_host
        table.add("weights", "device", whole - on_host + slots * self.setup.evaluated_on_host)
        table.add("weights", "host", on_host)
        table.add("activations", "device", max(self.setup.cached - table.get("activations", "device"), 0))

    def add_leaps(self, table: ByteTable, resident: WeightCount) -> None:
        """Add what leaps keep: beside `resident` weights on the device if the setup says so, and else on the host."""
        if not self.setup.leaps:
            return
        beside = resident.trainable if self.setup.buffers_device == "auto" else 0
        for place, weights in (("device", beside), ("host", self.shape.total.trainable - beside)):
            scratch = 4 * self.shape.largest_trainable if weights > 0 else 0
            table.add("drift", place, weights * self.leap + scratch)
        # Buffers on the host are page-locked where the weights lie on a GPU, and then take more than their size.
        counts = [p.count for p in resident.by_parameter if p.trained and self.setup.buffers_device == "cpu"]
        values = sum(self.leap_values * self.locked(4 * count) for count in counts)
        snapshots = sum(self.locked(count * self.stored.trainable) for count in counts)
        table.add("drift", "host", values + snapshots - self.leap * sum(counts))


# Steps.


def estimated_activations(shape: ModelShape, setup: Setup) -> Activations:
    """Estimate the activations of a model that was not traced, from its hidden size and vocabulary."""
    width = max(min(shape.element_bytes, 2 if setup.autocast else 4), 2)
    boundary = setup.tokens * shape.hidden * width
    rows = min(setup.tokens, CHUNK_TOKENS) if setup.chunked_loss else setup.tokens
    logits = rows * shape.vocab * 4 * (CHUNK_LOGIT_COPIES if setup.chunked_loss else LOGIT_COPIES)
    layer = RECOMPUTED_LAYER * SAVED_BY_A_LAYER * boundary
    return Activations(0, 0, boundary, boundary, math.ceil(layer), math.ceil(logits))


def untraced_table(shape: ModelShape, setup: Setup, active: Activations, parked: float) -> ByteTable:
    """
    What a step of a model that could not be traced holds on the device at its largest moment.

    In forward each layer leaves activations for its backward pass: its boundary if layers are checkpointed, and else
    all that autograd saves. Of these, `parked` bytes wait on the host.
    """
    per, recomputed = WeightBytes(shape, setup), setup.recomputed(len(shape.layers))
    table = per.held(shape.total)
    table.add("weights", "device", shape.total.bytes(per.second_copy))  # autocast's casts, kept by autograd
    left = active.boundary * (recomputed + SAVED_BY_A_LAYER * (len(shape.layers) - recomputed))
    table.add("activations", "device", left - parked)
    recomputing: DeviceBytes = {"activations": active.layer if recomputed else 0}  # all that autograd saves of a layer
    loss: DeviceBytes = {"activations": active.loss}  # logits, and their copies
    update: DeviceBytes = {"buffers": per.update_scratch + per.orthogonal_device}
    add_largest(table, recomputing, loss, update)
    return table


class StreamedStep:
    """
    A step of a streamed model, whose layers (and maybe embeddings and head) live on the host and visit the device.

    1. [`update`]: just before its forward pass a unit gets the update that the last step put off. What it needs beside
       the weights lies in a ring of device memory, for this unit and for the layer that is fetched ahead. With
       `update_in_backward` layers are updated after 4 instead, and the ring is there from 4 to this.
    2. Forward: each layer computes in its slot and leaves its boundary, of every micro-batch in flight. Backward holds
       more, so this is no moment of its own.
    3. [`loss`]: head and loss compute.
    4. [`recomputing`]: backward, each layer visits the device again, is recomputed, and its gradients leave.

    The last layers may keep graphs from 2 to 4 instead of being recomputed: all are there in 3, and when the backward
    pass comes to the last layer; when it comes to the first that is recomputed, none is left.

    On a GPU what was sent before is still leaving in each of these moments ([`still_leaving`]).
    """

    def __init__(
        self,
        shape: ModelShape,
        setup: Setup,
        active: Activations,
        resident_layers: int,
        stream_embeddings: bool,
        adapter_copies: int = 0,
        graph: int = 0,
    ):
        self.shape, self.setup, self.active, self.per = shape, setup, active, WeightBytes(shape, setup)
        self.adapter_copies = adapter_copies
        self.layers, self.ends, resident, self.stays, kept = shape.place(stream_embeddings, resident_layers)
        self.stream_embeddings = stream_embeddings
        # Slots are made anew after a save, when the old ones are gone: the same number at any time, and none after it.
        slot = max((self.per.packed(layer, int8=True) for layer in set(self.layers)), default=0)
        self.slots = min(setup.prefetch_layers + 1 + kept, len(self.layers)) * slot
        self.casts = max((self.per.casts(layer) for layer in set(resident)), default=0)
        """Of a resident layer that computes under autocast: those of the others come rounded."""
        # A graph takes more than the boundary that is counted anyway, and of a layer that lives here its casts.
        graphs = setup.kept_graphs or 0
        of_residents = max(graphs - len(self.layers) * setup.micro_batches_in_flight, 0)
        more = max(graph - active.boundary, 0)
        self.graphs = graphs * more + of_residents * self.casts
        self.graphs_but_one = max(graphs - 1, 0) * more + of_residents * self.casts
        # The output before the last is parked as well, though it is needed again at once.
        waiting = (len(shape.layers) - 1) * setup.micro_batches_in_flight if setup.offload_activations else 0
        self.parked = waiting * active.output
        # Layers leave boundaries for their backward pass: on the device, or with `offload_activations` all but two.
        near = min(len(shape.layers), 2) if setup.offload_activations else len(shape.layers)
        self.boundaries = near * active.boundary * setup.micro_batches_in_flight
        self.parked_locked = waiting * self.per.locked(active.output)
        # Passes beside micro-batches wait in the forward pass with what a layer returned.
        self.waiting = setup.beside * setup.micro_batches_in_flight * active.output
        # Gradients of embeddings or head add up over the micro-batches of a pass; each is there beside the sum.
        self.passes = setup.gradient_accumulation_steps // setup.micro_batches_in_flight
        self.gradients_of_an_end = max(self.per.leaving(end, setup.gradient_accumulation_steps) for end in self.ends)
        leaving = [self.per.leaving(layer, self.passes) for layer in set(self.layers)]
        self.gradients_of_a_layer = max(leaving, default=0)
        layer, end = (max(map(self.per.beside, set(units)), default=0) for units in (self.layers, self.ends))
        self.in_backward = setup.update_in_backward and any(unit.trainable for unit in self.layers)
        if self.in_backward:  # gradients are there, and what one layer wrote leaves while the next one's comes
            coming = max(self.per.beside(unit) - self.per.packed_gradients(unit) for unit in set(self.layers))
            self.ring = max(2 * coming, end)
        else:
            self.ring = layer * bool(setup.prefetch_layers) + max(layer, end)

    def table(self) -> ByteTable:
        """What the device holds at its largest moment, and the host between steps."""
        table, per = self.per.held(self.stays, streamed=True), self.per
        # Weights visit the device: a slot for each layer, and one unit of embeddings or head.
        table.add("weights", "device", self.slots + max(per.packed(end) for end in self.ends))
        if per.int8_layer is not None:  # a layer in int8 is expanded where it computes
            expanded = max((layer.frozen for layer in self.layers), default=0)
            table.add("buffers", "device", expanded * per.computed.frozen)
        table.add("buffers", "device", self.adapter_copies)
        table.add("activations", "device", self.active.always * self.setup.micro_batches_in_flight + self.boundaries)
        table.add("activations", "host", self.parked_locked)
        for layer, times in Counter(self.layers).items():
            on_host = not self.in_backward or self.passes > 1  # of several passes gradients add up there
            per.add_to_host(table, layer, int8=True, times=times, gradients=on_host)
        for end in self.ends:
            per.add_to_host(table, end, int8=False)
        table.add("buffers", "host", per.orthogonal_host)
        add_largest(table, self.recomputing(), self.loss(), self.update())
        return table

    def still_leaving(self) -> int:
        """
        Bytes that were sent to the host and have not arrived, up to the limit that `Transfers.most_leaving` sets: the
        gradients of a unit; if nothing that travels is trained, parked activations. On a CPU a copy is over at once.
        """
        units = (*self.layers, *self.ends) if not self.in_backward or self.passes > 1 else self.ends
        gradients = self.per.stored.trainable * max(unit.trainable for unit in units)
        leaving = gradients or min(self.slots, self.parked)
        return leaving if self.per.on_gpu else 0

    def update(self) -> DeviceBytes:
        """A unit is updated before its forward pass. In the first step states are made beside the ring, one by one."""
        trained = (p.count for unit in (*self.layers, *self.ends) for p in unit.by_parameter if p.trained)
        states = math.ceil(max(trained, default=0) * self.per.state)
        scratch = self.per.update_scratch + MUON_SCRATCH * self.shape.largest_muon + states
        # When the last layers are updated, all boundaries are there, and what still left at the first one has left.
        leaving = max(self.still_leaving() - self.boundaries, 0)
        gradients = leaving + self.gradients_of_a_layer * self.in_backward
        return {"activations": self.waiting, "gradients": gradients, "buffers": self.ring + scratch * bool(self.ring)}

    def loss(self) -> DeviceBytes:
        """Head and loss compute: logits and their copies, and the gradient of the head, which leaves."""
        moment = {
            "activations": self.active.loss + self.graphs + self.waiting,
            "gradients": self.gradients_of_an_end + self.still_leaving(),
        }
        if not self.stream_embeddings:  # autocast's cast of the head; one that travels comes rounded
            moment["buffers"] = self.shape.vocab * self.shape.hidden * self.per.second_copy.trainable
        return moment

    def recomputing(self) -> DeviceBytes:
        """
        A layer runs once more and goes backward: what autograd saves of it, and its gradients, which leave. One with a
        graph has saved it already, and so have those before it.
        """
        # On a CPU the gradient of embeddings or head is counted beside the layer that computes next.
        beside = self.still_leaving() if self.per.on_gpu else self.gradients_of_an_end
        gradients = self.gradients_of_a_layer + beside
        buffers = self.casts + self.ring * self.in_backward
        behind = self.active.behind * self.setup.micro_batches_in_flight
        activations = self.active.layer + behind + self.graphs_but_one
        return {"activations": activations, "gradients": gradients, "buffers": buffers}
