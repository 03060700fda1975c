"""
A setup: how a model is trained and within which limits. An estimate answers it.

The trainer makes one `Setup` from its options. `hf-hybrid plan` makes about fifteen, one for each usual way to train,
and compares them. Both pass plain values. `Setup` knows no config class and no direction of leaps by name. The module
imports only the standard library, so the command line can import it at once.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, fields, replace
from typing import Any

DTYPES = ("mixed", "float32", "bfloat16")

CONTEXT_BYTES = int(0.6 * 2**30)
"""What a CUDA context and the libraries' kernels take of a device. Approximate: it differs by driver and card."""
MARGIN = 0.05
"""Share of the device's peak that is left for what the allocator rounds up and cannot use. Assumed, not measured."""


def with_context(free: int | None) -> int | None:
    """`vram` of a [`Setup`]: measuring what is free has made the CUDA context, which a plan subtracts from `vram`."""
    return None if free is None else free + CONTEXT_BYTES


_CHOICES = {"memory": ("off", "auto", "stream"), "optimizer_states": ("exact", "8bit"), "accelerator": ("cuda", "cpu")}
_CHOICES |= {"activation_checkpointing": (False, True, "auto")}
_LEAST = {"sequence_length": 1, "batch_size": 1, "gradient_accumulation_steps": 1, "prefetch_layers": 0, "processes": 1}


@dataclass(frozen=True)
class Setup:
    """How a model is trained, and within which limits. Most fields are named as the options of `HybridConfig`."""

    sequence_length: int  # tokens, padding included
    batch_size: int = 1  # sequences per micro-batch
    gradient_accumulation_steps: int = 1
    vram: int | None = None  # bytes of the device, of which a CUDA context takes its part; None: no limit
    ram: int | None = None  # bytes of the host
    accelerator: str = "cpu"  # "cuda": computes by its rules of autocast, and needs room beside the tensors
    workspace: int = 0  # bytes that cuBLAS takes for each thread that computes on a GPU
    processes: int = 1  # among which FSDP2 shares the rows of weights, gradients and states; each has its own batch
    cpu_offload: bool = False  # FSDP2 keeps these rows on the host
    memory: str = "auto"  # "off": everything resident; "stream"; "auto": streamed only if it does not fit
    autocast: bool = False  # to bf16
    activation_checkpointing: bool | str = False  # of a resident model; streamed layers always are. "auto": see there
    recomputed_layers: int | None = None  # with "auto": the first so many; None: as few as fit
    offload_activations: bool = False  # outputs of checkpointed layers wait on the host, two of them on the device
    chunked_loss: bool = False
    optimizer_states: str = "exact"  # or "8bit": of AdamW
    states_per_weight: int = 2  # tensors that the optimizer keeps
    base_precision: str = "same"  # "int8": frozen weights of layers are kept and travel as int8; asks for streaming
    resident_layers: int | None = None  # layers that stay on the device; a number asks for streaming, None: what fits
    prefetch_layers: int = 1
    stream_embeddings: bool | None = None  # and the head; None: only if they do not fit
    accumulation_walk: str = "auto"  # as "layer": a layer runs all micro-batches before the next; or "micro_batch"
    enable_predict: bool = True  # leaps keep slow buffers and a snapshot of the trainable weights
    values_per_weight: float | None = 1  # fp32 values that the direction of leaps keeps of each; None: there are none
    buffers_device: str = "auto"  # of these: beside the weights, or "cpu"

    def __post_init__(self):
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                listed = ", ".join(map(str, choices))
                raise ValueError(f"`{name}` must be one of {listed}, got `{getattr(self, name)}`.")
        for name, least in _LEAST.items():
            if getattr(self, name) < least:
                raise ValueError(f"`{name}` must be at least {least}, got {getattr(self, name)}.")

    @property
    def tokens(self) -> int:
        """Of a micro-batch."""
        return self.batch_size * self.sequence_length

    @property
    def micro_batches_in_flight(self) -> int:
        """Micro-batches whose layer boundaries a streamed model holds at a time."""
        return 1 if self.accumulation_walk == "micro_batch" else self.gradient_accumulation_steps

    def workspaces(self, streamed: bool) -> int:
        """
        Bytes of cuBLAS's workspaces on a GPU, one for each thread that computes: the trainer's own and autograd's.

        A walk by layer runs each micro-batch on a thread of its own, and all of them live at once. torch reserves a
        handle for a thread as long as it lives (`thread_local` in aten/src/ATen/cuda/CublasHandlePool.cpp).
        """
        walks = streamed and (self.micro_batches_in_flight > 1 or self.offload_activations)
        threads = 2 + self.micro_batches_in_flight * walks
        return threads * self.workspace if self.accelerator == "cuda" else 0

    @property
    def leaps(self) -> bool:
        """Whether leaps are made."""
        return self.enable_predict and self.values_per_weight is not None

    def recomputed(self, layers: int) -> int:
        """How many of the layers of a resident model are recomputed in backward: so many from the first on."""
        if self.activation_checkpointing != "auto" or self.offload_activations or self.processes > 1:
            return layers * bool(self.activation_checkpointing or self.offload_activations)
        return min(self.recomputed_layers or 0, layers)

    def margin(self, peak: int) -> int:
        """Bytes of the device that are needed beside a peak of tensors."""
        return CONTEXT_BYTES + int(MARGIN * peak) if self.accelerator == "cuda" else 0

    @property
    def device_budget(self) -> int | None:
        """Bytes of the device that tensors may take."""
        if self.vram is None or self.accelerator != "cuda":
            return self.vram
        return int((self.vram - CONTEXT_BYTES) / (1 + MARGIN))

    def changes(self, other: Setup) -> dict[str, Any]:
        """The fields of `HybridConfig` that lead from this setup to another."""
        pairs = ((field.name, getattr(other, field.name)) for field in fields(self) if field.name != "recomputed_layers")
        return dict(config_option(name, value) for name, value in pairs if value != getattr(self, name))


def config_option(name: str, value: Any) -> tuple[str, Any]:
    """The option of `HybridConfig` that a field of [`Setup`] stands for, and its value there."""
    if name in ("vram", "ram"):
        name, value = {"vram": "vram_budget_gib", "ram": "host_budget_gib"}[name], value and value / 2**30
    elif name == "chunked_loss":
        value = "on" if value else "off"
    elif name == "activation_checkpointing":
        name = checkpointing_option()
    return {"batch_size": "per_device_train_batch_size", "autocast": "bf16"}.get(name, name), value


def checkpointing_option() -> str:
    """The name that this version of transformers gives activation checkpointing."""
    from transformers import PreTrainedModel

    # Renamed in 5.23, there and in TrainingArguments, which takes a second longer to import.
    new = hasattr(PreTrainedModel, "activation_checkpointing_enable")
    return "activation_checkpointing" if new else "gradient_checkpointing"


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
    The ways that a table of plans compares, the fastest first; `setup` holds batch, limits and machine. Several
    processes share the weights by FSDP2, which takes neither streaming nor chunked losses nor 8-bit states.
    """
    found: list[Way] = []

    def add(title: str, trains: str = "all", dtype: str = dtype, packed: bool = False, **changes: Any) -> None:
        weights, autocast = loaded(dtype, trains)
        changes = {"memory": "off", "autocast": autocast, **changes}
        found.append(Way(title, replace(setup, **changes), trains, weights, packed))

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
        return found
    less: dict[str, Any] = {**chunks, "activation_checkpointing": True}
    streamed: dict[str, Any] = {**chunks, "memory": "stream"}
    low: dict[str, Any] = {"optimizer_states": "8bit"}
    add(precision)
    if can_chunk:
        add(f"{precision}{chunked}", **chunks)
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
    add(f"LoRA{chunked}, checkpointing", "adapters", **less)
    add("LoRA, streamed base", "adapters", **streamed)
    add(f"QLoRA{chunked}, checkpointing", "adapters", packed=True, **less)
    add("LoRA, streamed int8 base", "adapters", **streamed, base_precision="int8")
    return found


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
