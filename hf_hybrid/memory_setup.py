"""Turns options and a Trainer into a plan and the streaming engine that carries it out."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from accelerate.hooks import remove_hook_from_submodules

from hf_hybrid.memory.layers import embeddings_and_head, find_layers, layers_on_host
from hf_hybrid.memory.lazy_update import LazyOptimizer
from hf_hybrid.memory.streaming import LayerStreamer
from hf_hybrid.memory.walk import Window
from hf_hybrid.prediction.trajectory import WeightStore


class StreamedTraining(WeightStore):
    """
    One model's streaming engine: the streamer, and the optimizer that follows it.

    Args:
        model (`nn.Module`): The model as the trainer holds it.
        streamer (`LayerStreamer`): Of the model.
        on_device (`bool`): Step streamed units on the device.
        order (`str`): See `accumulation_walk`.
    """

    def __init__(self, model: torch.nn.Module, streamer: LayerStreamer, *, on_device: bool, order: str):
        self.model, self.streamer, self.on_device = model, streamer, on_device
        self.window = Window(streamer, order)
        self.optimizer: LazyOptimizer | None = None

    def wrap(self, optimizer: torch.optim.Optimizer) -> LazyOptimizer:
        """The optimizer that steps what is streamed when it is streamed."""
        self.optimizer = LazyOptimizer(optimizer, self.streamer, on_device=self.on_device)
        return self.optimizer

    def begin(self) -> None:
        """Take over the model."""
        self.streamer.attach()

    def end(self) -> None:
        """Finish what is pending and leave the model with its weights, on the host."""
        if self.streamer.attached:
            self.settle()
            self.streamer.detach()
        self.streamer.overlay = None

    @contextlib.contextmanager
    def suspended(self) -> Iterator[None]:
        """The model holds its own weights meanwhile."""
        attached = self.streamer.attached
        if attached:
            self.settle()
            self.streamer.detach(keep_rest=True)
        try:
            yield
        finally:
            if attached:
                self.streamer.attach()

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """The model can compute on the device meanwhile."""
        attached = self.streamer.attached
        self.streamer.attach()
        try:
            yield
        finally:
            if not attached:
                self.end()

    def holds(self, parameter: torch.nn.Parameter) -> bool:
        return id(parameter) in self.streamer.masters

    def settle(self) -> None:
        if self.optimizer is not None:
            self.optimizer.flush()

    def changed(self) -> None:
        for unit in self.streamer.units:
            self.streamer.weights_changed(unit)

    def statistics(self) -> dict:
        """See [`LayerStreamer.statistics`]."""
        return self.streamer.statistics()


def check_streamable(args) -> None:
    """
    Refuse what streaming cannot be combined with.

    Raises:
        ValueError: With the option to change.
    """
    why = None
    if args.fp16:
        why = "`fp16=True` scales losses, and streamed gradients leave before they are unscaled. Use `bf16=True`"
    elif args.deepspeed or args.fsdp:
        why = f"`{'deepspeed' if args.deepspeed else 'fsdp'}` places the weights itself. Drop it"
    elif args.world_size > 1:
        why = f"there are {args.world_size} processes, and streaming is for one. Launch one process, or use `fsdp`"
    elif args.torch_compile:
        why = "`torch_compile=True` would compile placeholders. Drop it"
    elif args.bf16_full_eval or args.fp16_full_eval:
        why = "`bf16_full_eval` and `fp16_full_eval` cast the whole model. Drop them"
    if why is not None:
        raise ValueError(f"`memory={args.memory}` cannot be used here: {why}, or set `memory=off`.")


def set_up_memory(trainer, device_map: dict | None) -> StreamedTraining | None:
    """Decide what is streamed, and build the engine; `None` if the model is trained as it is."""
    options, model = trainer.hybrid_args, trainer.model
    if device_map is None:
        device_map = getattr(model, "hf_device_map", None)
    remove_hook_from_submodules(model)  # accelerate's hooks of an offloaded model train nothing
    layers = find_layers(model)
    if device_map is not None:
        layers = layers_on_host(layers, device_map)
    streamer = LayerStreamer(
        model, layers, device=trainer.args.device, ahead=options.prefetch_layers, kept=options.resident_layers or 0,
        int8=options.base_precision == "int8",
    )
    return StreamedTraining(model, streamer, on_device=options.optimizer_states == "8bit", order=options.accumulation_walk)
