"""
The floor of a step's time: what moves in a step, and what this machine copies and multiplies per second.

A step of a streamed model moves its weights to the device and its gradients back, and the host reads and writes memory
while it updates. No step is faster than the slowest of these ways at its rate, nor than its products.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from hf_hybrid.machine import copies_beside
from hf_hybrid.plan.accounting import WeightCount
from hf_hybrid.plan.estimate import Plan
from hf_hybrid.plan.step_memory import WeightBytes


@dataclass(frozen=True)
class Traffic:
    """Bytes to the device, back to the host, and those that the host moves by itself."""

    into: float = 0
    back: float = 0
    host: float = 0

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(self.into + other.into, self.back + other.back, self.host + other.host)


def step_traffic(plan: Plan) -> dict[str, float]:
    """Return the least bytes of a step: `"h2d"` to the device, `"d2h"` back, `"dram"` moved in host memory."""
    if plan.mode == "resident":
        moved = _parked(plan)
    elif plan.mode == "shared":
        moved = _shared(plan)
    else:
        streamed = StreamedTraffic(plan)
        moved = _parked(plan) + streamed.weights() + streamed.gradients() + streamed.update()
    # What is copied passes through the host's memory too.
    return {"h2d": moved.into, "d2h": moved.back, "dram": moved.into + moved.back + moved.host}


def _parked(plan: Plan) -> Traffic:
    """Activations that wait on the host, once each way in every pass."""
    away = plan.parked * (plan.setup.gradient_accumulation_steps // plan.setup.micro_batches_in_flight)
    return Traffic(away, away)


def _shared(plan: Plan) -> Traffic:
    """With `cpu_offload` the rows of a process. What processes send each other is not counted."""
    setup, per = plan.setup, WeightBytes(plan.shape, plan.setup)
    if not setup.cpu_offload:
        return Traffic()
    rows, stored = plan.shape.part(setup.processes).total, per.stored.trainable
    into = 2 * setup.gradient_accumulation_steps * rows.bytes(per.stored)
    updated = rows.trainable * 3 * stored + 2 * per.states(rows)
    return Traffic(into, rows.trainable * stored, updated)


class StreamedTraffic:
    """The traffic of a streamed step, by what travels."""

    def __init__(self, plan: Plan):
        self.per = WeightBytes(plan.shape, plan.setup)
        self.setup, self.tied = plan.setup, plan.shape.tied
        self.micro_batches = plan.setup.gradient_accumulation_steps
        self.passes = self.micro_batches // plan.setup.micro_batches_in_flight
        self.placement = plan.shape.place(plan.stream_embeddings, plan.resident_layers)
        self.embedding, self.head = self.placement.ends
        self.layers = self.placement.layers  # that travel
        self.in_backward = self.setup.update_in_backward

    def weights(self) -> Traffic:
        """
        Layers come for forward and backward of each pass, but for those that lie in the slots as it turns: the last
        ones of the forward pass, and the first ones after the backward pass.
        """
        per, slots = self.per, self.setup.prefetch_layers + 1 + self.placement.kept
        # Embeddings and head share a slot, in which each stays for all micro-batches of a pass, and one that is both
        # for good.
        into = 0 if self.tied else self.passes * (per.packed(self.embedding) + per.packed(self.head))
        come = (*self.layers[slots:], *self.layers[: max(len(self.layers) - slots, 0)])
        into += self.passes * sum(per.packed(layer, int8=True) for layer in come)
        return Traffic(into)

    def gradients(self) -> Traffic:
        """
        Gradients leave after each pass, in the precision of the masters. From the second on the sum so far comes back
        and is added to. Those of tied embeddings leave twice in a walk by layer: as the head's, and at the end. The sum
        of a layer stays on the device if the layer is updated in the backward pass.
        """
        stored, ends = self.per.stored.trainable, self.embedding.trainable + self.head.trainable
        layers, walked = sum(layer.trainable for layer in self.layers), self.setup.micro_batches_in_flight > 1
        of_ends = stored * ends * self.passes * (1 + (self.tied and walked))
        sums = stored * layers * (self.passes - 1)
        return Traffic(of_ends - stored * ends + sums, of_ends + sums + stored * layers * (not self.in_backward))

    def update(self) -> Traffic:
        """Gradients, states and masters of rounded weights come to the device. States, masters and weights go."""
        per, units = self.per, [unit for unit in (*self.layers, self.embedding, self.head) if unit.trainable]
        into, gradients = (sum(map(bytes_of, units)) for bytes_of in (per.beside, per.packed_gradients))
        if self.in_backward:
            of_layers = sum(map(per.packed_gradients, self.layers))
            into, gradients = into - of_layers, gradients - of_layers
        return Traffic(into, into - gradients + sum(per.packed(unit, int8=True) for unit in units))


def measure_machine(seconds: float = 0.1, size: int = 8192) -> dict[str, float]:
    """
    Measure rates of this machine, each for a number of seconds.

    Bytes per second: `"dram"`, read and written by a copy in host memory, and on a GPU `"h2d"` and `"d2h"` (pinned).
    bf16 operations per second: `"flops"` of products of `size`-square matrices, which training does not exceed.
    """
    source, target = torch.ones(2**27, dtype=torch.uint8), torch.zeros(2**27, dtype=torch.uint8)  # beyond most caches
    rates = {"dram": 2 * source.nbytes * _per_second(lambda: target.copy_(source), seconds)}
    device = torch.accelerator.current_accelerator(check_available=True)
    if device is not None and copies_beside(device):
        pinned, there = source.pin_memory(), source.to(device)
        rates["h2d"] = pinned.nbytes * _per_second(lambda: there.copy_(pinned, non_blocking=True), seconds)
        rates["d2h"] = pinned.nbytes * _per_second(lambda: pinned.copy_(there, non_blocking=True), seconds)
        left = torch.randn(size, size, dtype=torch.bfloat16, device=device)
        result = left @ left
        rates["flops"] = 2 * size**3 * _per_second(lambda: torch.mm(left, left, out=result), seconds)
    return rates


def _per_second(work: Callable[[], object], seconds: float) -> float:
    wait = torch.accelerator.synchronize if torch.accelerator.is_available() else lambda: None
    work()
    wait()
    count, start = 0, time.perf_counter()
    while time.perf_counter() - start < seconds:
        work()
        wait()
        count += 1
    return count / (time.perf_counter() - start)


def step_floor_seconds(plan: Plan, tokens_per_step: int, rates: dict[str, float], reached: float = 1.0) -> float:
    """
    Return the least seconds of an optimizer step: the longest of computing (without attention) and copying.

    `tokens_per_step` counts all micro-batches; `rates` are those of `measure_machine`, some of which may be missing. Of
    the weights a token reaches the share `reached`: less than 1 in a mixture of experts.
    """
    layers = max(len(plan.shape.layers), 1)
    recomputed = plan.recomputed_layers / layers
    if plan.mode == "streamed":
        recomputed = 1 - plan.kept_graphs / (layers * plan.setup.micro_batches_in_flight)
    # A lookup multiplies nothing, unless the head is made of the same weights.
    lookup, total = WeightCount() if plan.shape.tied else plan.shape.embedding, plan.shape.total
    products, trained = total.weights - lookup.weights, total.trainable - lookup.trainable
    seconds = reached * tokens_per_step * ((4 + 2 * recomputed) * products + 2 * trained) / rates["flops"]
    return max([seconds, *(count / rates[name] for name, count in step_traffic(plan).items() if rates.get(name))])
