"""The usual ways to train a model, each a setup, which `hf-hybrid plan` compares; and sizes as users write them."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any

from hf_hybrid.plan.estimate import Plan
from hf_hybrid.plan.setups import Setup

DTYPES = ("mixed", "float32", "bfloat16")
KINDS = ("full", "LoRA", "QLoRA")
"""What is trained: all weights, or adapters on a base as it is, or on one in 4 bits."""


@dataclass(frozen=True)
class Way:
    """A usual way to train: the model as it is loaded, and the setup."""

    title: str
    setup: Setup
    kind: str = "full"  # of `KINDS`
    weights: str = "float32"  # dtype that they are loaded in

    @property
    def exact(self) -> bool:
        """Whether exact AdamW updates unrounded weights, or adapters on unrounded weights."""
        rounded = self.setup.optimizer_states != "exact" or self.setup.base_precision != "same"
        return not (rounded or self.kind == "QLoRA")


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


def loaded(dtype: str, kind: str) -> tuple[str, bool]:
    """
    The dtype that weights are loaded in, and whether they compute under autocast to bf16: with `"mixed"` they are in
    fp32 (a frozen base in bf16) under autocast; else everything is in `dtype`.
    """
    if dtype not in DTYPES:
        raise ValueError(f"`dtype` must be one of {', '.join(DTYPES)}, got `{dtype}`.")
    if dtype == "mixed":
        return ("float32" if kind == "full" else "bfloat16"), True
    return dtype, False


def usual_ways(
    dtype: str, setup: Setup, kinds: Collection[str] = KINDS, *, chunks: str = "maybe", can_stream: bool = True
) -> list[Way]:
    """
    The ways that a table of plans compares, the cheapest of each kind first; `setup` holds batch, limits and machine.

    `chunks` says whether the loss can be computed in chunks: `never`, `maybe` or `always`.
    """
    ways: list[Way] = []

    def add(kind: str, *words: str, dtype: str = dtype, **changes: Any) -> None:
        if kind in kinds and (can_stream or changes.get("memory") != "stream"):
            weights, autocast = loaded(dtype, kind)
            own = replace(setup, **{"memory": "off", "autocast": autocast, **changes})
            ways.append(Way(", ".join([kind, *filter(None, words)]), own, kind, weights))

    precision = {"mixed": "bf16 autocast", "float32": "fp32", "bfloat16": "bf16 weights"}[dtype]
    recomputed: dict[str, Any] = {"activation_checkpointing": True}
    chunked = "chunked loss" if chunks == "maybe" else ""
    least: dict[str, Any] = {"chunked_loss": chunks != "never"}
    first: dict[str, Any] = {"chunked_loss": chunks == "always"}
    streamed: dict[str, Any] = {**least, "memory": "stream"}
    low: dict[str, Any] = {"optimizer_states": "8bit"}
    for kind, how in (("full", precision), ("LoRA", ""), ("QLoRA", "")):
        if kind != "QLoRA":
            add(kind, how, **first)
        if kind == "full" and chunked:
            add(kind, how, chunked, **least)
        if setup.vram is not None:
            add(kind, how, chunked, "checkpointing auto", **least, activation_checkpointing="auto")
        add(kind, how, chunked, "checkpointing", **least, **recomputed)
        if setup.distills:
            add(kind, how, chunked, "checkpointing", "teacher streamed", **least, **recomputed, evaluated_on_host=True)
        if kind == "LoRA":
            add(kind, "streamed", **streamed)
            add(kind, "streamed int8 base", **streamed, base_precision="int8")
        if kind == "full":
            if dtype == "mixed":
                add(kind, "fp32", dtype="float32", **first)
            add(kind, "streamed", **streamed)
            add(kind, "streamed", "activations on the host", **streamed, offload_activations=True)
            for words, weights in (((), dtype), (("bf16 weights",), "bfloat16")):
                add(kind, *words, "8-bit states", chunked, "checkpointing", dtype=weights, **low, **least, **recomputed)
            for words, weights in (((), dtype), (("bf16 weights",), "bfloat16")):
                add(kind, "streamed", *words, "8-bit states", dtype=weights, **low, **streamed)
    return ways


def parse_size(text: str | int | float, name: str) -> int:
    """Bytes from `24GiB` (1024s), `24GB` (1000s), `24` (below 4096: GiB) or bytes; an error calls it `name`."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(?:([kmgt]?)(i?)b)?\s*", str(text).lower())
    if match is None or (match[3] and not match[2]):
        raise ValueError(f"`{name}` must be a size, got `{text}`. Write `24` or `24GiB`, or `24GB` (decimal).")
    count = float(match[1])
    if match[2] is None:  # a bare number: nobody means so few bytes
        count *= 2**30 if count < 4096 else 1
    else:
        count *= (1024 if match[3] else 1000) ** (" kmgt".index(match[2]) if match[2] else 0)
    if not 1 <= count <= 2**50:
        raise ValueError(f"`{name}` must be above 0 and at most 1024 TiB, got `{text}`. Write for example `24GiB`.")
    return int(count)
