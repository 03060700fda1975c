"""
How long a step takes, estimated from data sheets: for `hf-hybrid plan --gpu`.

The estimate follows the course of a streamed step (docs/memory.md). It has two phases:

1. **Forward.** A layer computes when its update is done and its weights are there. So the phase takes as long as the
   slowest of computing, the update on the host, and the copies in each direction. The update of the first layer hides
   behind the layers that live on the device, if there are any.
2. **Backward**, with recomputation. Weights come and gradients leave meanwhile, and the host widens those of a single
   micro-batch.

A resident model only computes, and updates its weights on the device.

**Computing** is the larger of launching kernels and running them. Matrix products are counted by their operations. All
other kernels of eager PyTorch are bound by device memory. Their bytes are proportional to the widths that a token
passes in a layer, which are the layer's weights divided by the width of the model. The bytes per token and width were
read off the clock of the simulated device (tests/simulated_gpu/clock.py), which prices each kernel for itself. A test
compares both.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hf_hybrid.cli.cards import CARDS, HOSTS, LAUNCH_SECONDS, Card, Host
from hf_hybrid.machine import PART
from hf_hybrid.plan.accounting import WeightCount
from hf_hybrid.plan.estimate import Plan
from hf_hybrid.plan.step_memory import WeightBytes
from hf_hybrid.plan.traffic import StreamedTraffic

MOVED = {"autocast": (40.5, 200), "same": (36, 108), "adapters": (57, 50), "fp32": (72, 216)}
"""
Bytes of device memory in one pass through a layer, per token and unit of width (a backward pass counts as two), and in
the loss, per token and word. By what is trained: fp32 weights under autocast, weights in the dtype that they compute
in, or adapters. In fp32 alone twice the bytes of bf16 are assumed.
"""
LAUNCHES = {"autocast": 62, "same": 57, "adapters": 99, "fp32": 62}
"""
Kernels of one pass through a layer of a Llama, counted by the simulated device; a backward pass counts as two. In fp32
alone, which the clock has no row of, those of autocast are assumed.
"""
CAST_BYTES = 6
"""Device memory moved where autocast rounds a weight of a layer that lives on the device."""
SUMMED_BYTES = 10
"""Device memory moved where the gradient of a weight is added to those of earlier micro-batches in fp32."""
UPDATED_BYTES = {"exact": 28, "8bit": 93}
"""Device memory moved where a weight is updated on the device."""

PART_SECONDS = 18e-6
"""Of the host, beside its memory, for a part of an update: three operations (`HOST_CALL` of the clock)."""

OTHERS = "0.86 to 1.22"
"""How many times as long as estimated published steps took (benchmarks/planning/published.py)."""
MEASURED = {"resident": "0.9-1.3", "streamed": "1.9-3.1"}
"""The same of this package's steps, by mode, on the one GPU that has run them (there, from docs/memory.md)."""


def chosen_machine(card: str | None, host: str | None) -> tuple[Card, Host] | None:
    """
    The card and host of these names; without a card the one that is here, and `None` where it is not in the table.

    Raises:
        ValueError: If the table has no such name, or a host is named and there is no card.
    """
    name = _name_of_this_card() if card is None else card.lower().replace(" ", "")
    if card is not None and name not in CARDS:
        raise ValueError(f"`--gpu {card}` is not in the table of cards. Give one of {', '.join(CARDS)}, or `--vram`.")
    if host is not None and host not in HOSTS:
        raise ValueError(f"`--host {host}` is not in the table of hosts. Give one of {', '.join(HOSTS)}.")
    if name not in CARDS:
        if host is not None:
            raise ValueError(f"`--host {host}` says where a card is, and none is named. Give `--gpu rtx4090` with it.")
        return None
    return CARDS[name], HOSTS[host or ("desktop" if name.startswith("rtx") else "server")]


def _name_of_this_card() -> str:
    device = torch.accelerator.current_accelerator(check_available=True)
    if device is None or device.type != "cuda":
        return ""
    found = torch.cuda.get_device_name().lower().replace(" ", "")
    return next((name for name in CARDS if name in found), "")


@dataclass(frozen=True)
class StepTime:
    """An optimizer step of a plan: seconds, and what it spends most of them on."""

    seconds: float
    tokens: int
    bound: str

    @property
    def tokens_per_second(self) -> float:
        """Tokens that are trained on."""
        return self.tokens / self.seconds

    def hours(self, tokens: float) -> float:
        """Hours that training on so many tokens takes."""
        return tokens / self.tokens_per_second / 3600


def step_time(plan: Plan, card: Card, host: Host) -> StepTime | None:
    """Estimate a step of a plan; `None` for one that several processes share, whose links are not in the table."""
    if plan.mode == "shared":
        return None
    tokens = plan.setup.tokens * plan.setup.gradient_accumulation_steps
    computing = _Computing(plan, card)
    if plan.mode == "resident":
        parked = plan.parked * plan.setup.gradient_accumulation_steps / card.bus
        seconds = max(computing.forward + computing.backward, 2 * parked) + computing.update
        return StepTime(seconds, tokens, "compute" if seconds > 2 * parked else "copies")
    seconds, bound = _streamed(plan, card, host, computing)
    return StepTime(seconds, tokens, bound)


@dataclass
class _Computing:
    """Seconds of computing in a step."""

    plan: Plan
    card: Card

    def __post_init__(self):
        plan, card, shape, setup = self.plan, self.card, self.plan.shape, self.plan.setup
        count, layers = setup.gradient_accumulation_steps, shape.layers
        per = WeightBytes(shape, setup)
        in_fp32 = not setup.autocast and shape.trainable_bytes == 4
        kind = "fp32" if in_fp32 else "autocast" if per.second_copy.trainable else "same"
        kind = "adapters" if shape.total.trainable < shape.total.weights / 10 else kind
        self._pass_bytes, logit_bytes = MOVED[kind]
        self._launching = LAUNCHES[kind] * LAUNCH_SECONDS
        self._rate = card.peak_fp32 * card.reached if in_fp32 else card.products
        self._attended = 2 * setup.tokens * setup.sequence_length * shape.hidden  # causal, one pass
        streamed = plan.mode == "streamed"
        recomputed = len(layers) if streamed else plan.recomputed_layers
        resident = shape.place(plan.stream_embeddings, plan.resident_layers).resident if streamed else []
        passes = [self._layer(layer) for layer in layers]
        casts = CAST_BYTES * sum(layer.trainable for layer in resident) / card.memory if kind == "autocast" else 0.0
        forward = sum(passes)
        again = sum(passes[:recomputed])
        backward = sum(self._layer(layer, backward=True) for layer in layers)
        logits = setup.tokens * shape.vocab
        head = 2 * logits * shape.hidden / self._rate
        trained = (shape.head if shape.head.weights else shape.embedding).trainable > 0
        ends = head * (3 if trained else 2) + logit_bytes * logits / card.memory
        of_weights = shape.total.trainable
        summed = SUMMED_BYTES * of_weights / card.memory if count > 1 else 0.0
        self.forward = count * (forward + casts + ends / 3)
        """Of all micro-batches."""
        self.backward = count * (backward + again + casts + ends * 2 / 3 + summed)
        self.resident = count * (sum(self._layer(layer) for layer in resident) + casts)
        """Forward of the layers that live on the device though others travel. They come first."""
        self.first = count * passes[0]
        self.update = self._update(shape.total)
        """Of all weights, if the device updates them."""

    def _layer(self, layer: WeightCount, *, backward: bool = False) -> float:
        shape, setup = self.plan.shape, self.plan.setup
        passes = 2 if backward else 1
        weights = layer.trainable * passes + layer.frozen
        operations = 2 * setup.tokens * weights + self._attended * (2.5 if backward else 1)
        moved = self._pass_bytes * passes * setup.tokens * layer.weights / shape.hidden
        return max(operations / self._rate + moved / self.card.memory, passes * self._launching)

    def _update(self, weights: WeightCount) -> float:
        return UPDATED_BYTES[self.plan.setup.optimizer_states] * weights.trainable / self.card.memory


def _streamed(plan: Plan, card: Card, host: Host, computing: _Computing) -> tuple[float, str]:
    """Seconds of a step, and what bounds it."""
    per, traffic = WeightBytes(plan.shape, plan.setup), StreamedTraffic(plan)
    weights, gradients, update = traffic.weights(), traffic.gradients(), traffic.update()
    parked = plan.parked * (plan.setup.gradient_accumulation_steps // plan.setup.micro_batches_in_flight)
    travelling, stays = traffic.travelling, traffic.placement.stays
    in_slots = computing._update(travelling) if per.eight_bit else 0.0
    on_host = widening = 0.0
    if not per.eight_bit and travelling.trainable:
        stored, rounded = per.stored.trainable, per.computed.trainable
        # Beside the least that an update moves: lines of rounded weights come into the cache before they are written.
        moved = update.host + rounded * per.rounded_weights(travelling)
        on_host = (moved + weights.into / 2) / host.memory + PART_SECONDS * travelling.trainable / PART
        widening = gradients.host and (gradients.host + stored * per.rounded_weights(travelling)) / host.memory
    first = max(plan.shape.layers, key=lambda layer: layer.weights)
    share = first.trainable / travelling.trainable if travelling.trainable else 0.0
    forward = {
        "compute": computing.forward + in_slots,
        "host": on_host + (computing.first if on_host else 0.0),
        "copies": max(weights.into / 2 + update.into, update.back + parked) / card.bus,
    }
    backward = {
        "compute": computing.backward + computing._update(stays),
        "copies": max(weights.into / 2 + gradients.into + parked, gradients.back) / card.bus,
        "host": widening,
    }
    phases = [(max(phase, key=phase.__getitem__), max(phase.values())) for phase in (forward, backward)]
    seconds = sum(duration for _, duration in phases)
    waits = {name: duration - phase["compute"] for (name, duration), phase in zip(phases, (forward, backward))}
    if phases[0][0] == "compute":
        # The first layer that travels waits for its update, while those that live on the device compute.
        seconds += max(share * on_host - computing.resident, 0.0)
    name = max(waits, key=waits.__getitem__)
    return seconds, name if waits[name] > 0.1 * seconds else "compute"
