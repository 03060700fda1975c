"""The usual ways to train a model, each a setup, which `hf-hybrid plan` compares; and sizes as users write them."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any

from hf_hybrid.plan.estimate import Plan
from hf_hybrid.plan.setups import Setup

DTYPES = ("mixed", "float32", "bfloat16")


@dataclass(frozen=True)
class Way:
    """A usual way to train: the model as it is loaded, and the setup."""

    title: str
    setup: Setup
    trains: str = "all"  # weights, or "adapters"
    weights: str = "float32"  # dtype that they are loaded in
    packed: bool = False  # the base is in nf4

    @property
    def exact(self) -> bool:
        """Whether exact AdamW updates unrounded weights, or adapters on unrounded weights."""
        rounded = self.setup.optimizer_states != "exact" or self.setup.base_precision != "same"
        return not (rounded or self.packed)


@dataclass(frozen=True, kw_only=True)
class WayPlan(Plan):
    """The plan of a usual way to train."""

    way: Way

    @property
    def title(self) -> str:
        """Of the way, and how many layers are recomputed, or resident, if the plan decided that."""
        layers = len(self.shape.layers)
        if self.mode == "streamed":
            return self.way.title + f", {self.resident_layers} of {layers} layers resident" * bool(self.resident_layers)
        decided = self.setup.activation_checkpointing == "auto"
        return self.way.title + f" ({self.recomputed_layers} of {layers})" * decided


def loaded(dtype: str, trains: str) -> tuple[str, bool]:
    """
    The dtype that weights are loaded in, and whether they compute under autocast to bf16.

    With `"mixed"`, weights are in fp32 (a frozen base in bf16) under autocast; else everything is in `dtype`.
    """
    if dtype not in DTYPES:
        raise ValueError(f"`dtype` must be one of {', '.join(DTYPES)}, got `{dtype}`.")
    if dtype == "mixed":
        return ("float32" if trains == "all" else "bfloat16"), True
    return dtype, False


def usual_ways(dtype: str, setup: Setup, can_chunk: bool) -> list[Way]:
    """
    The ways that a table of plans compares, the cheapest first; `setup` holds batch, limits and machine. Several
    processes share the weights by FSDP2, which takes neither streaming nor chunked losses nor 8-bit states.
    """
    ways: list[Way] = []

    def add(title: str, trains: str = "all", dtype: str = dtype, packed: bool = False, **changes: Any) -> None:
        weights, autocast = loaded(dtype, trains)
        changes = {"memory": "off", "autocast": autocast, **changes}
        ways.append(Way(title, replace(setup, **changes), trains, weights, packed))

    precision = {"mixed": "bf16 autocast", "float32": "fp32", "bfloat16": "bf16 weights"}[dtype]
    chunks: dict[str, Any] = {"chunked_loss": can_chunk}
    chunked = ", chunked loss" * can_chunk
    if setup.processes > 1:
        spared: dict[str, Any] = {"activation_checkpointing": True}
        add(f"FSDP2, {precision}")
        add(f"FSDP2, {precision}, checkpointing", **spared)
        if dtype == "mixed":
            add("FSDP2, fp32", dtype="float32")
        add(f"FSDP2, {precision}, checkpointing, CPU offload", **spared, cpu_offload=True)
        add("FSDP2, LoRA", "adapters")
        add("FSDP2, LoRA, checkpointing", "adapters", **spared)
        add("FSDP2, LoRA, checkpointing, CPU offload", "adapters", **spared, cpu_offload=True)
        return ways
    less: dict[str, Any] = {**chunks, "activation_checkpointing": True}
    streamed: dict[str, Any] = {**chunks, "memory": "stream"}
    low: dict[str, Any] = {"optimizer_states": "8bit"}
    fewest: dict[str, Any] = {**chunks, "activation_checkpointing": "auto"}
    add(precision)
    if can_chunk:
        add(f"{precision}{chunked}", **chunks)
    if setup.vram is not None:
        add(f"{precision}{chunked}, checkpointing auto", **fewest)
    add(f"{precision}{chunked}, checkpointing", **less)
    if dtype == "mixed":
        add("fp32", dtype="float32")
    add("streamed", **streamed)
    add("streamed, activations on the host", **streamed, offload_activations=True)
    add(f"8-bit states{chunked}, checkpointing", **low, **less)
    add(f"bf16 weights, 8-bit states{chunked}, checkpointing", dtype="bfloat16", **low, **less)
    add("streamed, 8-bit states", **low, **streamed)
    add("streamed bf16 weights, 8-bit states", dtype="bfloat16", **low, **streamed)
    add("LoRA", "adapters")
    if setup.vram is not None:
        add(f"LoRA{chunked}, checkpointing auto", "adapters", **fewest)
    add(f"LoRA{chunked}, checkpointing", "adapters", **less)
    add("LoRA, streamed base", "adapters", **streamed)
    if setup.vram is not None:
        add(f"QLoRA{chunked}, checkpointing auto", "adapters", packed=True, **fewest)
    add(f"QLoRA{chunked}, checkpointing", "adapters", packed=True, **less)
    add("LoRA, streamed int8 base", "adapters", **streamed, base_precision="int8")
    return ways


def parse_size(text: str | int | float, name: str) -> int:
    """Bytes from `"24GiB"` (1024s), `"24GB"` (1000s) or a number of bytes, in any case; an error calls it `name`."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(?:([kmgt]?)(i?)b)?\s*", str(text).lower())
    if match is None or (match[3] and not match[2]):
        raise ValueError(
            f"`{name}` must be a size, got `{text}`. Write `24GiB`, `24GB` (decimal) or a number of bytes."
        )
    power = " kmgt".index(match[2]) if match[2] else 0
    count = int(float(match[1]) * (1024 if match[3] else 1000) ** power)
    if not 0 < count <= 2**50:
        raise ValueError(f"`{name}` must be above 0 and at most 1024 TiB, got `{text}`. Write for example `24GiB`.")
    return count
