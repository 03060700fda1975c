"""Which technique lets this model train within these limits, the bytes it takes, and the floor of a step's time."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from hf_hybrid.plan.accounting import ByteTable, ModelShape, Unit, format_bytes
from hf_hybrid.plan.request import OPTION, Request

# What autograd saves in a layer per token, hidden unit and byte of an activation; how much more to recompute it.
# Approximate: measured with a Llama in bf16 and SDPA attention (49 B); wide MLPs and experts differ.
SAVED_BY_A_LAYER, RECOMPUTED_LAYER = 49 / 2, 1.15
# fp32 tensors as large as the logits (of all tokens, of a chunk) that the loss holds.
LOGIT_COPIES, CHUNK_LOGIT_COPIES = 2.5, 2
# Bytes of an 8-bit state per element: a code, and an fp32 absolute maximum per block of 256.
EIGHT_BIT_STATE = 1 + 4 / 256
# The 8-bit update works on so many elements at a time, with four fp32 tensors of that size.
UPDATE_CHUNK, UPDATE_SCRATCH = 2**24, 16
# Orthogonalising, in Muon's step or a leap, holds of one matrix an fp32 tensor and at most four of its size in bf16.
MUON_SCRATCH = 4 + 4 * 2
LEAP_SCRATCH_ON_HOST = 4 * 4  # leaps orthogonalise in fp32 there


@dataclass(frozen=True)
class MemoryPlan:
    """How a model is trained, and what that holds at its peak."""

    mode: str  # "resident" or "streamed"
    resident_layers: int
    prefetch_layers: int
    stream_embeddings: bool
    optimizer_states: str
    base_precision: str  # "int8" where frozen weights of streamed layers are kept as int8, else "same"
    weight_bytes: int  # per weight that travels (frozen, if any are); of a resident model, that it computes with
    table: ByteTable
    request: Request

    @property
    def peak_device_bytes(self) -> int:
        return self.table.total("device")

    @property
    def peak_host_bytes(self) -> int:
        return self.table.total("host")

    def fits(self, device_budget: int | None, host_budget: int | None) -> bool:
        """Whether both peaks are within their limits; `None` is no limit."""
        return not _excess(self, device_budget, host_budget)

    def to_dict(self) -> dict:
        """Plain values for JSON: what was decided, and the peaks expected by category."""
        decided = (
            "mode",
            "resident_layers",
            "prefetch_layers",
            "stream_embeddings",
            "optimizer_states",
            "base_precision",
        )
        return {**{name: getattr(self, name) for name in decided}, "peak": self.table.to_dict()}

    def describe(self) -> str:
        """The plan in words, and its byte table."""
        words = [f"optimizer states {self.optimizer_states}"]
        if self.mode == "streamed":
            words += [f"{self.resident_layers} resident layers", f"{self.prefetch_layers} fetched ahead"]
            words += ["embeddings and head streamed"] * self.stream_embeddings
            words += ["frozen layers in int8"] * (self.base_precision == "int8")
        return f"{self.mode}: {', '.join(words)}\n{self.table}"


class _PerWeight:
    """Bytes per weight, as pairs for trainable and frozen ones."""

    def __init__(self, shape: ModelShape, request: Request):
        self.own = (shape.trainable_bytes, shape.element_bytes)
        self.work = tuple(min(own, request.working_bytes or own) for own in self.own)
        # A second copy of what is not computed with as it is stored.
        self.rounded = tuple(work * (work < own) for work, own in zip(self.work, self.own))
        self.host = tuple(own + rounded for own, rounded in zip(self.own, self.rounded))
        self.travel, self.host_layer, self.expanded = self.work, self.host, (0, 0)
        if request.base_precision == "int8":
            coded = 1 + 4 / shape.hidden  # a code, and an fp32 scale per row
            self.travel, self.host_layer = (self.work[0], coded), (self.host[0], coded)
            self.expanded = (0, self.work[1])
        eight_bit = request.optimizer_states == "8bit"
        self.state = request.state_count * (EIGHT_BIT_STATE if eight_bit else self.own[0])
        self.scratch = UPDATE_SCRATCH * min(shape.largest_trainable, UPDATE_CHUNK) * eight_bit
        # Leaps orthogonalise what Muon moves, and all hidden matrices along the default direction.
        leap = request.enable_predict * max(shape.largest_muon, shape.largest_hidden * request.orthogonal_leaps)
        self.orthogonal = {
            "device": MUON_SCRATCH * max(shape.largest_muon, leap),
            "host": max(MUON_SCRATCH * shape.largest_muon, LEAP_SCRATCH_ON_HOST * leap),
        }
        self.leaps = 4 * (request.leap_values + (request.tail_average > 0)) + self.own[0]
        self.slot = math.ceil(max(layer.split()[0].bytes(self.travel) for layer in set(shape.layers)))

    def states(self, unit: Unit) -> float:
        """Bytes of optimizer states: Muon keeps one tensor per weight."""
        return unit.trainable * self.state - unit.muon * self.own[0]


def _start(shape: ModelShape, request: Request, per: _PerWeight, resident: Unit) -> ByteTable:
    """A table of what stays on the device, and of the buffers of leaps."""
    table = ByteTable()
    table.add("weights", "device", resident.bytes(per.own))
    table.add("gradients", "device", resident.trainable * per.own[0])
    table.add("states", "device", per.states(resident))
    table.add("buffers", "device", shape.buffer_bytes)
    if request.enable_predict:
        beside = resident.trainable if request.buffers_device == "auto" else 0
        for place, weights in (("device", beside), ("host", shape.total.trainable - beside)):
            scratch = 4 * shape.largest_trainable * (weights > 0)
            table.add("drift", place, weights * per.leaps + scratch)
    return table


def _add_activations(table: ByteTable, shape: ModelShape, request: Request, streamed: bool) -> tuple[float, float]:
    """Add what is held between layers; what a recomputed layer and the loss hold for a moment is returned."""
    width = request.activation_bytes or max(min(shape.element_bytes, request.working_bytes or 4), 2)
    one, layers, recomputed = request.tokens * shape.hidden * width, len(shape.layers), 0.0
    if request.activations is not None and streamed:
        return _add_traced(table, request, layers)
    if streamed or request.activation_checkpointing or request.offload_activations:
        boundary = one * (request.micro_batches_in_flight if streamed else 1)
        near = min(layers, 2) if request.offload_activations else layers
        table.add("activations", "device", near * boundary)
        table.add("activations", "host", (layers - near) * boundary)
        recomputed = RECOMPUTED_LAYER * SAVED_BY_A_LAYER * one
    else:
        table.add("activations", "device", layers * SAVED_BY_A_LAYER * one)
    rows = min(request.tokens, request.chunk_tokens) if request.chunked_loss else request.tokens
    return recomputed, rows * shape.vocab * 4 * (CHUNK_LOGIT_COPIES if request.chunked_loss else LOGIT_COPIES)


def _add_traced(table: ByteTable, request: Request, layers: int) -> tuple[float, float]:
    traced, windows = request.activations, request.micro_batches_in_flight
    near = min(layers, 2) if request.offload_activations else layers
    table.add("activations", "device", (traced.always + near * traced.boundary) * windows)
    table.add("activations", "host", (layers - near) * traced.boundary * windows)
    return traced.layer, traced.loss


def _add_largest(table: ByteTable, *moments: dict[str, float]) -> None:
    """Add what the device holds in the largest of moments that never coincide."""
    for category, count in max(moments, key=lambda moment: sum(moment.values())).items():
        table.add(category, "device", count)


def _resident_plan(shape: ModelShape, request: Request) -> MemoryPlan:
    per = _PerWeight(shape, request)
    table = _start(shape, request, per, shape.total)
    table.add("weights", "device", shape.total.bytes(per.rounded))  # autocast's casts, which autograd keeps
    recomputed, logits = _add_activations(table, shape, request, streamed=False)
    _add_largest(
        table, {"activations": recomputed}, {"activations": logits}, {"buffers": per.scratch + per.orthogonal["device"]}
    )
    decided = (len(shape.layers), 0, False, request.optimizer_states, "same")
    return MemoryPlan("resident", *decided, per.work[1], table, request)


def _streamed_plan(shape: ModelShape, request: Request, resident_layers: int, stream_embeddings: bool) -> MemoryPlan:
    per = _PerWeight(shape, request)
    layers, (embedding, head), resident = shape.place(stream_embeddings)
    units = [*layers, embedding, head]
    travelling = functools.reduce(Unit.join, units)
    table = _start(shape, request, per, resident)
    slots = (request.prefetch_layers + 1 + resident_layers) * per.slot
    # A lookup is not rounded under autocast, so embeddings travel as they are stored.
    table.add("weights", "device", slots + max(embedding.bytes(per.own), head.bytes(per.work)))
    table.add("buffers", "device", max(layer.bytes(per.expanded) for layer in layers))  # int8, where it computes
    ends = embedding.bytes(per.own) + head.bytes(per.host)
    table.add("weights", "host", sum(layer.bytes(per.host_layer) for layer in layers) + ends)
    table.add("gradients", "host", travelling.trainable * per.own[0])
    table.add("states", "host", per.states(travelling))
    table.add("buffers", "host", per.orthogonal["host"])
    recomputed, logits = _add_activations(table, shape, request, streamed=True)
    # The gradient of embeddings or head is still leaving while the layer beside them computes.
    wide = max(embedding.trainable * per.own[0], head.trainable * per.work[0])
    layer = {"activations": recomputed, "gradients": max(unit.trainable for unit in layers) * per.work[0] + wide}
    loss, update = {"activations": logits, "gradients": wide}, {}
    if not stream_embeddings:
        loss["buffers"] = shape.vocab * shape.hidden * per.rounded[0]  # autocast's cast of the head
    if request.optimizer_states == "8bit":
        # Units are updated before their forward: gradients, states, and masters where the slot holds a rounded copy.
        one = per.own[0] + per.state + per.own[0] * (per.rounded[0] > 0)
        arriving = max(unit.trainable for unit in layers) * request.prefetch_layers  # what is fetched ahead
        update["buffers"] = (max(unit.trainable for unit in units) + arriving) * one + per.scratch
    _add_largest(table, layer, loss, update)
    decided = (resident_layers, request.prefetch_layers, stream_embeddings, request.optimizer_states)
    return MemoryPlan("streamed", *decided, request.base_precision, int(per.travel[1]), table, request)


def plan(shape: ModelShape, **request) -> MemoryPlan:
    """
    The first that fits: resident; streamed, with as many resident layers as possible; embeddings streamed too.

    Args:
        shape ([`ModelShape`]): The model.
        request: The fields of [`Request`].

    Raises:
        PlanError: If nothing fits what was asked for.
        ValueError: If a value is outside its range.
    """
    found = best_plan(shape, Request(**request))
    if _over(found):
        raise _refusal(shape, found)
    return found


def _excess(plan: MemoryPlan, device_budget: int | None, host_budget: int | None) -> int:
    needs = ((plan.peak_device_bytes, device_budget), (plan.peak_host_bytes, host_budget))
    return sum(max(need - budget, 0) for need, budget in needs if budget is not None)


def _over(plan: MemoryPlan) -> int:
    return _excess(plan, plan.request.device_budget, plan.request.host_budget)


def best_plan(shape: ModelShape, request: Request) -> MemoryPlan:
    """The first candidate that fits, else the one that is over by least."""
    return min(_candidates(shape, request), key=_over)


def _candidates(shape: ModelShape, request: Request) -> Iterator[MemoryPlan]:
    asks_for_streaming = request.resident_layers is not None or request.base_precision == "int8"
    if request.mode == "off" or (request.mode == "auto" and not asks_for_streaming):
        yield _resident_plan(shape, request)
    if request.mode == "off":
        return
    for stream_embeddings in (False, True) if request.stream_embeddings is None else (request.stream_embeddings,):
        candidate = _streamed_plan(shape, request, request.resident_layers or 0, stream_embeddings)
        if request.resident_layers is None and request.device_budget is not None:
            room = (request.device_budget - candidate.peak_device_bytes) // _PerWeight(shape, request).slot
            candidate = _streamed_plan(shape, request, min(max(room, 0), len(shape.layers)), stream_embeddings)
        yield candidate


def _levers(shape: ModelShape, request: Request) -> list[list[tuple[int, dict]]]:
    """What else could be asked for, and what it costs: speed is cheap, exact numbers and leaps are dear."""
    has_base = any(layer.frozen for layer in shape.layers)
    has_8bit = shape.total.trainable and not shape.total.muon  # they are AdamW's
    levers = [
        (not request.chunked_loss, 1, {"chunked_loss": True}),
        (request.resident_layers is not None, 1, {"resident_layers": None}),
        (request.stream_embeddings is False, 1, {"stream_embeddings": None}),
        (not request.offload_activations, 2, {"offload_activations": True}),
        (request.mode == "off" and not request.activation_checkpointing, 2, {"activation_checkpointing": True}),
        (request.buffers_device == "auto" and request.enable_predict, 2, {"buffers_device": "cpu"}),
        (request.prefetch_layers > 0, 2, {"prefetch_layers": 0}),
        (request.mode == "off", 3, {"mode": "auto"}),
        (request.micro_batches_in_flight > 1, 3, {"accumulation_walk": "micro_batch"}),
        (request.tail_average > 0 and request.enable_predict, 5, {"tail_average": 0.0}),
        (request.enable_predict, 6, {"enable_predict": False}),
        (request.optimizer_states == "exact" and has_8bit, 7, {"optimizer_states": "8bit"}),
        (request.base_precision == "same" and has_base, 7, {"base_precision": "int8"}),
    ]
    sizes, size = [(0, {})], request.batch_size // 2
    while size and request.activations is None:  # traced at this size
        tokens = -(-request.tokens * size // request.batch_size)
        micro_batches = -(-request.micro_batches * request.batch_size // size)
        sizes.append((3 + len(sizes), {"batch_size": size, "tokens": tokens, "micro_batches": micro_batches}))
        size //= 2
    return [[(0, {}), (cost, change)] for helps, cost, change in levers if helps] + [sizes]


def _nearest(shape: ModelShape, request: Request) -> MemoryPlan:
    """The cheapest change of options that fits, else the one that is over by least."""
    choices = sorted(itertools.product(*_levers(shape, request)), key=lambda choice: sum(cost for cost, _ in choice))
    least = None
    for choice in choices:
        changes = {name: value for _, change in choice for name, value in change.items()}
        candidate = best_plan(shape, replace(request, **changes))
        if not _over(candidate):
            return candidate
        least = candidate if least is None else min(least, candidate, key=_over)
    return least


class PlanError(ValueError):
    """Nothing fits: `plan` was refused; `nearest` works after `changes` (options and their values), if there is one."""

    def __init__(self, message: str, plan: MemoryPlan | None = None):
        super().__init__(message)
        self.plan, self.nearest, self.changes = plan, None, {}


def refuse(reason: str, what: ModelShape | MemoryPlan, nearest: str | None = None) -> PlanError:
    """
    An error to raise: `reason`, the bytes of a plan or of a model's weights, and `nearest`, what works instead.

    Both texts name options and values in backticks.
    """
    refused = what if isinstance(what, MemoryPlan) else None
    shown = what.describe() if refused else ByteTable()
    if not refused:
        shown.add("weights", "device", what.total.bytes((what.trainable_bytes, what.element_bytes)))
    return PlanError(f"{reason}\n\n{shown}\n\n{nearest or 'No change of options is known to work.'}", refused)


def _refusal(shape: ModelShape, refused: MemoryPlan) -> PlanError:
    nearest = _nearest(shape, refused.request)
    changes = _changes(refused.request, nearest)
    options = ", ".join(f"`{name}={value}`" for name, value in changes.items()) or "the options as they are"
    device, host = format_bytes(nearest.peak_device_bytes), format_bytes(nearest.peak_host_bytes)
    works = not _over(nearest)
    advice = "Nearest plan that works" if works else "No change of options fits these limits. The smallest need found"
    advice = f"{advice}: {options} ({device} on the device, {host} on the host)."
    error = refuse(_reason(shape, refused), refused, advice)
    if works:
        error.nearest, error.changes = nearest, changes
    return error


def _changes(request: Request, nearest: MemoryPlan) -> dict[str, object]:
    changes = {}
    for name, value in vars(nearest.request).items():
        if value != getattr(request, name) and name != "tokens":
            decided = value is None and nearest.mode == "streamed"  # left to the plan: name what it decided
            changes[OPTION.get(name, name)] = getattr(nearest, name) if decided else value
    return changes


def _reason(shape: ModelShape, refused: MemoryPlan) -> str:
    request, parts = refused.request, []
    device = ("device", refused.peak_device_bytes, request.device_budget, "vram_budget_gib")
    host = ("host", refused.peak_host_bytes, request.host_budget, "host_budget_gib")
    for place, need, budget, option in (device, host):
        if budget is not None and need > budget:
            over = f"{format_bytes(need - budget)} ({need - budget} bytes) over `{option}={budget / 2**30:.3g}`"
            parts.append(f"the {place} would hold {format_bytes(need)}, {over}")
    slot = _PerWeight(shape, request).slot
    if refused.mode == "streamed" and request.device_budget is not None and slot > request.device_budget:
        parts.append(f"the largest layer alone takes {format_bytes(slot)}")
    return f"`memory={request.mode}` cannot train this model: {'; '.join(parts)}."


def step_traffic(shape: ModelShape, plan: MemoryPlan) -> dict[str, float]:
    """Least bytes of a step: `"h2d"` to the device, `"d2h"` back, `"dram"` read and written in host memory."""
    request, per = plan.request, _PerWeight(shape, plan.request)
    passes = request.micro_batches // request.micro_batches_in_flight
    away = plan.table.get("activations", "host") * passes
    if plan.mode == "resident":
        return {"h2d": away, "d2h": away, "dram": 2 * away}
    layers, (embedding, head), _ = shape.place(plan.stream_embeddings)
    layers.sort(key=lambda layer: layer.bytes(per.travel))
    count = max(len(layers) - plan.resident_layers, 0)
    travelling = functools.reduce(Unit.join, [*layers, embedding, head])
    trainable = travelling.trainable
    weights = 2 * sum(layer.bytes(per.travel) for layer in layers[:count]) + embedding.join(head).bytes(per.work)
    own, work, rounded = per.own[0], per.work[0], per.rounded[0]
    into, back = passes * weights + away, passes * trainable * work + away
    if plan.optimizer_states == "8bit":
        # Gradients and states come, states and weights go; the masters come too where the slot holds a rounded copy.
        into += trainable * (own + per.state + own * (rounded > 0))
        back += trainable * (own + per.state + rounded)
        return {"h2d": into, "d2h": back, "dram": into + back}
    into += sum(layer.trainable for layer in layers[count:]) * work  # what is resident is old after the update
    updated = trainable * (3 * own + rounded) + 2 * per.states(travelling)
    return {"h2d": into, "d2h": back, "dram": into + back + updated}


def step_floor_seconds(
    shape: ModelShape,
    plan: MemoryPlan,
    tokens_per_step: int,
    flops_per_second: float,
    h2d: float | None = None,
    d2h: float | None = None,
    dram: float | None = None,
) -> float:
    """No step is faster: the longest of computation (without attention) and transfers, at rates in bytes per second."""
    recomputes = plan.mode == "streamed" or plan.request.activation_checkpointing or plan.request.offload_activations
    # A lookup multiplies nothing, unless the head is made of the same weights.
    lookup = Unit() if shape.tied else shape.embedding
    products, trained = shape.total.weights - lookup.weights, shape.total.trainable - lookup.trainable
    seconds = tokens_per_step * ((6 if recomputes else 4) * products + 2 * trained) / flops_per_second
    rates = {"h2d": h2d, "d2h": d2h, "dram": dram}
    return max([seconds, *(n / rates[name] for name, n in step_traffic(shape, plan).items() if rates[name])])
