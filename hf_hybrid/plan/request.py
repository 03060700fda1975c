"""What is to be trained within which limits: the question that a memory plan answers."""

from __future__ import annotations

from dataclasses import dataclass

OPTION = {
    "mode": "memory",
    "batch_size": "per_device_train_batch_size",
    "micro_batches": "gradient_accumulation_steps",
}
_CHOICES = {
    "mode": ("off", "auto", "stream"),
    "optimizer_states": ("exact", "8bit"),
    "base_precision": ("same", "int8"),
    "accumulation_walk": ("auto", "layer", "micro_batch"),
    "buffers_device": ("auto", "cpu"),
}


@dataclass(frozen=True)
class Activations:
    """Bytes of one micro-batch as a trace found them, in place of estimates from hidden size and vocabulary."""

    always: int  # through forward and backward, outside the layers: inputs, the embeddings' output, masks
    boundary: int  # of one checkpointed layer, from its forward to its backward
    layer: int  # while one layer is recomputed and computes its gradients
    loss: int  # while head and loss compute


@dataclass(frozen=True)
class Request:
    """What is to be trained within which limits, in bytes; `None` is no limit. Values out of range are refused."""

    tokens: int  # of a micro-batch, padding included
    device_budget: int | None = None
    host_budget: int | None = None
    micro_batches: int = 1  # per optimizer step
    batch_size: int = 1  # sequences per micro-batch; fewer are proposed where that helps
    mode: str = "auto"  # "off": everything resident, "stream", or "auto": streamed only if it does not fit
    optimizer_states: str = "exact"
    base_precision: str = "same"  # "int8": frozen weights of layers are kept and travel as int8; asks for streaming
    resident_layers: int | None = None  # that stay on the device; a number asks for streaming, None takes what fits
    prefetch_layers: int = 1
    stream_embeddings: bool | None = None  # and the head; None: only if they do not fit
    accumulation_walk: str = "auto"  # as "layer": a layer runs all micro-batches before the next does; or "micro_batch"
    offload_activations: bool = False  # layer boundaries wait on the host, two of them on the device
    chunked_loss: bool = False
    activation_checkpointing: bool = False  # of a resident model; streamed layers always are
    enable_predict: bool = True  # leaps hold slow memories and a snapshot of the trainable weights
    leap_values: float = 1  # fp32 values per trainable weight that the direction of leaps holds
    orthogonal_leaps: bool = True  # a leap orthogonalises hidden matrices, as the default direction does
    tail_average: float = 0.0  # share of the run at whose end a mean of the trainable weights is held
    buffers_device: str = "auto"  # of leaps: beside the weights, or "cpu"
    working_bytes: int | None = None  # of a weight in computation, 2 under bf16; None: as stored
    activation_bytes: int | None = None  # None: as the working weights, at least 2
    chunk_tokens: int = 1024
    activations: Activations | None = None  # traced, of a streamed micro-batch; None: estimated
    state_count: int = 2  # tensors of optimizer state per weight; AdamW has 2

    def __post_init__(self):
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                allowed = ", ".join(choices)
                raise ValueError(f"`{OPTION.get(name, name)}` must be one of {allowed}, got `{getattr(self, name)}`.")
        for name, least in {"tokens": 1, "micro_batches": 1, "batch_size": 1, "prefetch_layers": 0}.items():
            if getattr(self, name) < least:
                raise ValueError(f"`{OPTION.get(name, name)}` must be at least {least}, got {getattr(self, name)}.")

    @property
    def micro_batches_in_flight(self) -> int:
        """Whose layer boundaries a streamed model holds at a time."""
        return 1 if self.accumulation_walk == "micro_batch" else self.micro_batches
