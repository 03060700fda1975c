"""
A setup: how a model is trained and within which limits. An estimate answers it.

The trainer makes one `Setup` from its options. `hf-hybrid plan` makes about twenty, one for each usual way to train
(plan/ways.py), and compares them. Both pass plain values. `Setup` knows no config class and no direction of leaps by
name. The module imports only the standard library, so the command line can import it at once.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, NamedTuple

from hf_hybrid.compat import checkpointing_option

CONTEXT_BYTES = int(0.6 * 2**30)
"""What a CUDA context and the libraries' kernels take of a device. Approximate: it differs by driver and card."""
MARGIN = 0.05
"""Share of the device's peak that is left for what the allocator rounds up and cannot use. Assumed, not measured."""


def with_context(free: int | None) -> int | None:
    """`vram` of a [`Setup`]: measuring what is free has made the CUDA context, which a plan subtracts from `vram`."""
    return None if free is None else free + CONTEXT_BYTES


_CHOICES: dict[str, tuple] = {
    "memory": ("off", "auto", "stream"),
    "optimizer_states": ("exact", "8bit"),
    "accelerator": ("cuda", "cpu"),
    "activation_checkpointing": (False, True, "auto"),
}
DECIDED = (
    "recomputed_layers", "kept_graphs", "prefetch_layers", "stream_embeddings", "buffers_device", "update_in_backward",
    "evaluated", "evaluated_on_host", "distills", "cached", "beside",
)  # fmt: skip
_LEAST = {"sequence_length": 1, "batch_size": 1, "gradient_accumulation_steps": 1, "prefetch_layers": 0}


class Evaluated(NamedTuple):
    """Bytes of models that are evaluated and not trained (a reference, teachers)."""

    whole: int = 0  # of their weights
    layers: int = 0  # what can be streamed of them: layers, embeddings and heads
    slots: int = 0  # device memory that these are streamed through, which all models share


@dataclass(frozen=True)
class Setup:
    """
    How a model is trained, and within which limits. Most fields are named as the options of `HybridConfig`; a plan
    decides those in `DECIDED`, which no option has.
    """

    sequence_length: int  # tokens, padding included
    batch_size: int = 1  # sequences per micro-batch
    gradient_accumulation_steps: int = 1
    vram: int | None = None  # bytes of the device, of which a CUDA context takes its part; None: no limit
    ram: int | None = None  # bytes of the host
    accelerator: str = "cpu"  # "cuda": computes by its rules of autocast, and needs room beside the tensors
    workspace: int = 0  # bytes that cuBLAS takes for each thread that computes on a GPU
    memory: str = "auto"  # "off": everything resident; "stream"; "auto": streamed only if it does not fit
    autocast: bool = False  # to bf16
    activation_checkpointing: bool | str = False  # "auto": of as few layers as fit; streamed, False means that too
    recomputed_layers: int | None = None  # of a resident model, with "auto": the first so many; None: as few as fit
    kept_graphs: int | None = None  # of passes through the last streamed layers, one a micro-batch; None: what fits
    offload_activations: bool = False  # outputs of checkpointed layers wait on the host, two of them on the device
    chunked_loss: bool = False
    optimizer_states: str = "exact"  # or "8bit": of AdamW
    states_per_weight: int = 2  # tensors that the optimizer keeps
    base_precision: str = "same"  # "int8": frozen weights of layers are kept and travel as int8; asks for streaming
    resident_layers: int | None = None  # layers that live on the device; a number asks for streaming, None: what fits
    prefetch_layers: int = 1
    stream_embeddings: bool | None = None  # and the head; None: only if they do not fit
    accumulation_walk: str = "auto"  # as "layer": a layer runs all micro-batches before the next; or "micro_batch"
    update_in_backward: bool = False  # streamed layers are updated as soon as their gradients are there
    enable_predict: bool = True  # leaps keep slow buffers and a snapshot of the trainable weights
    values_per_weight: float | None = 1  # fp32 values that the direction of leaps keeps of each; None: there are none
    buffers_device: str = "auto"  # of these: beside the weights, or "cpu"
    evaluated: Evaluated = Evaluated()
    evaluated_on_host: bool = False  # their layers, embeddings and heads
    distills: bool = False  # the loss is TRL's distance between the logits of the model and of a teacher
    beside: int = 0  # passes without gradients that go beside each micro-batch
    cached: int = 0  # bytes of keys and values while completions are made, when there are no activations

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

        A walk by layer runs each micro-batch, and each pass beside one, on a thread of its own, and all of them live at
        once. torch reserves a handle for a thread as long as it lives (`thread_local` in
        aten/src/ATen/cuda/CublasHandlePool.cpp).
        """
        walks = streamed and (self.micro_batches_in_flight > 1 or self.offload_activations or self.beside > 0)
        threads = 2 + self.micro_batches_in_flight * (1 + self.beside) * walks
        return threads * self.workspace if self.accelerator == "cuda" else 0

    @property
    def leaps(self) -> bool:
        """Whether leaps are made."""
        return self.enable_predict and self.values_per_weight is not None

    def recomputed(self, layers: int) -> int:
        """How many of the layers of a resident model are recomputed in backward: so many from the first on."""
        if self.activation_checkpointing != "auto" or self.offload_activations:
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
        names = [field.name for field in fields(self) if field.name not in DECIDED]
        pairs = ((name, getattr(other, name)) for name in names)
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
