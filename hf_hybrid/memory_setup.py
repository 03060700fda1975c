"""Turns options and a Trainer into a plan and the streaming engine that carries it out."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator

import torch
from accelerate.hooks import remove_hook_from_submodules

from hf_hybrid.leaps.directions import DIRECTIONS, Orthogonal
from hf_hybrid.leaps.directions.base import direction_class
from hf_hybrid.leaps.trajectory import WeightStore
from hf_hybrid.optimizers import split_parameters
from hf_hybrid.phases import PhasePlugin
from hf_hybrid.plan.accounting import ModelShape, device_memory, host_memory
from hf_hybrid.plan.estimate import Estimator, Plan, refuse
from hf_hybrid.plan.setups import Setup
from hf_hybrid.plan.trace import Tracer
from hf_hybrid.processes import mixed_precision_of, sharding_of
from hf_hybrid.streaming.layers import embeddings_and_head, find_layers, layers_on_host
from hf_hybrid.streaming.loss import BIG_VOCABULARY, ChunkedCausalLoss
from hf_hybrid.streaming.optimizer import LazyOptimizer, UnsupportedOptimizerError, check_separable
from hf_hybrid.streaming.streamer import LayerStreamer
from hf_hybrid.streaming.units import Unit
from hf_hybrid.streaming.walk import Window

logger = logging.getLogger(__name__)

Tensor = torch.Tensor


class StreamedTraining(WeightStore):
    """
    One model's streaming engine: the streamer, and the optimizer that follows it.

    Args:
        model (`nn.Module`): The model as the trainer holds it.
        streamer (`LayerStreamer`): Of the model.
        window (`Window`): How its layers walk an accumulation window.
        plan (`Plan`): What all of it carries out.
    """

    def __init__(self, model: torch.nn.Module, streamer: LayerStreamer, window: Window, plan: Plan):
        self.model, self.streamer, self.window, self.plan = model, streamer, window, plan
        self.optimizer: LazyOptimizer | None = None
        self._updating: Unit | None = None

    def wrap(self, optimizer: torch.optim.Optimizer) -> LazyOptimizer:
        """The optimizer that steps what is streamed when it is streamed."""
        self.optimizer = LazyOptimizer(optimizer, self.streamer, on_device=self.plan.setup.optimizer_states == "8bit")
        if self.optimizer.on_device:
            self.streamer.on_load = self._noting(self.streamer.on_load)
            self.streamer.before_forward = self._noting(self.streamer.before_forward)
        return self.optimizer

    def _noting(self, update: Callable[[Unit], None]) -> Callable[[Unit], None]:
        def run(unit: Unit) -> None:
            self._updating = unit
            update(unit)
            self._updating = None

        return run

    @property
    def torn(self) -> str | None:
        """Which unit's update an error cut short, if one did: its weights and states are then of no step."""
        failed = [u for u in self.streamer.units if u.update is not None and u.update.done() and u.update.exception()]
        unit = failed[0] if failed else self._updating
        return None if unit is None else f"The update of `{unit.name}` was cut short."

    def begin(self) -> None:
        """Take over the model."""
        self.streamer.attach()

    def end(self) -> None:
        """Finish what is pending and leave the model with its weights, on the host."""
        if self.streamer.attached:
            if self.torn is None:  # else there is nothing to finish: the weights are of no step
                self.settle()
            if self.optimizer is not None:
                self.optimizer.drop_gradients()  # of a window that an error cut short
            self.streamer.detach(expand=self._base_fits())
        self.streamer.overlay = None

    def _base_fits(self) -> bool:
        """Whether the host can hold an int8 base as the model had it."""
        pieces = [piece for unit in self.streamer.units for piece in unit.storage.pieces if piece.is_int8]
        needed, available = sum(piece.nbytes for piece in pieces), host_memory()
        if needed > available:
            logger.warning(
                "The frozen base stays packed as int8: expanding it takes %.1f GiB and %.1f are available. Adapters "
                "are in place and can be saved; load the base anew to use the model outside this trainer.",
                needed / 2**30,
                available / 2**30,
            )
        return needed <= available

    @contextlib.contextmanager
    def suspended(self) -> Iterator[None]:
        """The model holds its own weights meanwhile."""
        attached = self.streamer.attached
        if attached:
            self.settle()
            # Adapters are saved without their base, which may stay packed; any other model is saved whole.
            self.streamer.detach(for_good=False, expand=not hasattr(self.model, "peft_config"))
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

    def tensors_held(self, extra: dict[str, list[Tensor]]) -> dict[str, list[Tensor]]:
        """`extra` and what the engine holds between steps, by category."""
        held = self.streamer.tensors_held()
        parking = [] if self.window.parking is None else self.window.parking.spare
        return {
            **extra,
            "weights": held["slots"] + held["host_weights"],
            "gradients": held["host_gradients"],
            "activations": parking,
            "buffers": held["expanded"],
        }

    def host_tensors(self, drift: list[Tensor]) -> list[Tensor]:
        """Where the device is the host itself: which tensors would be on the host of a GPU."""
        held = self.streamer.tensors_held()
        masters = [piece.master for unit in self.streamer.units for piece in unit.trainable]
        states = [value for master in masters for value in self.optimizer.state.get(master, {}).values()]
        parking = [] if self.window.parking is None else self.window.parking.spare
        return (
            held["host_weights"] + held["host_gradients"] + drift + parking + [t for t in states if torch.is_tensor(t)]
        )


def check_streamable(args, model: torch.nn.Module, device_map: dict | None) -> None:
    """
    Refuse what streaming cannot be combined with, before anything is built.

    Raises:
        ValueError: With the option to change; where the model decides, with its bytes and the nearest plan that works.
    """
    why = None
    if mixed_precision_of(args) == "fp16":
        why = "`fp16=True` scales losses, and streamed gradients leave before they are unscaled. Use `bf16=True`"
    elif sharding_of(args):
        why = f"`{sharding_of(args)}` places the weights itself. Drop it"
    elif args.world_size > 1:
        why = f"there are {args.world_size} processes, and streaming is for one. Launch one process, or use `fsdp`"
    elif args.torch_compile:
        why = "`torch_compile=True` would compile placeholders. Drop it"
    elif args.bf16_full_eval or args.fp16_full_eval:
        why = "`bf16_full_eval` and `fp16_full_eval` cast the whole model. Drop them"
    if why is not None:
        raise ValueError(f"`memory={args.memory}` cannot be used here: {why}, or set `memory=off`.")
    optim = str(getattr(args.optim, "value", args.optim))
    if optim not in STATES_PER_WEIGHT:
        raise refuse(
            f"`optim={optim}` is not known to step each parameter by itself, which streamed layers need.",
            _shape(model, device_map),
            f"Nearest plan that works: `optim=adamw_torch_fused`; also one of {', '.join(STATES_PER_WEIGHT)}.",
        )
    if any(type(module).__name__ == "Linear8bitLt" for module in model.modules()):
        raise refuse(
            "The base is quantised by bitsandbytes to int8, whose layers keep their weights on the device.",
            _shape(model, device_map),
            "Nearest plan that works: load it unquantised and set `base_precision=int8`; or load it in 4 bits.",
        )
    trains_quantised = getattr(model, "is_quantized", False) and not hasattr(model, "peft_config")
    if trains_quantised:
        raise refuse(
            "The model is quantised and has no adapters: its weights cannot be trained.",
            _shape(model, device_map),
            "Nearest that works: add LoRA adapters with peft; or load it unquantised and set `optimizer_states=8bit`.",
        )


STATES_PER_WEIGHT = {
    "adamw_torch": 2,
    "adamw_torch_fused": 2,
    "adafactor": 0,
    "sgd": 0,
    "adagrad": 1,
    "rmsprop": 1,
    "muon": 2,
}
"""
Optimizers that can be stepped unit by unit, and the values they keep per weight (Adafactor's are far fewer; Muon's are
AdamW's, but one for hidden matrices).
"""


def memory_plugins(trainer) -> list[PhasePlugin]:
    """The parts that follow the phases, as the options ask for them; for models that are not streamed."""
    options, plugins = trainer.hybrid_args, []
    if trainer.streaming is not None:
        return plugins
    if options.checkpoint_phases is not None or options.offload_activations:
        from hf_hybrid.phase_memory.activations import ActivationCheckpointing

        phases = (options.checkpoint_phases or "warmup,full,correct").replace(" ", "").split(",")
        plugins.append(ActivationCheckpointing(phases, offload=options.offload_activations))
    if options.weight_precision is not None:
        from hf_hybrid.phase_memory.precision import precision_plugins

        autocast = {"bf16": "bf16", "fp16": "fp16"}.get(trainer.accelerator.mixed_precision)
        plugins += precision_plugins(options.weight_precision, trainer.model, autocast=autocast)
    if options.predict_states != "stay":
        from hf_hybrid.phase_memory.states import OptimizerStatePlacement

        plugins.append(OptimizerStatePlacement(options.predict_states))
    return plugins


def _layers(model: torch.nn.Module, device_map: dict | None) -> list[tuple[str, torch.nn.Module]]:
    layers = find_layers(model)
    if device_map is None:
        return layers
    streamed = layers_on_host(layers, device_map)
    if not streamed:
        raise ValueError(
            f"`device_map` keeps no decoder layer on `cpu` or `disk` (the layers are `{layers[0][0]}` to "
            f"`{layers[-1][0]}`): nothing would be streamed. Put some there, or leave `device_map` out."
        )
    return streamed


def _shape(model: torch.nn.Module, device_map: dict | None, **matrices) -> ModelShape:
    return ModelShape.of(model, [name for name, _ in _layers(model, device_map)], **matrices)


def make_plan(trainer, device_map: dict | None) -> Plan:
    """
    What of the trainer's model is streamed, within its budgets.

    Raises:
        PlanError: If nothing fits; with the bytes and the nearest plan that works.
    """
    args, options, model = trainer.args, trainer.hybrid_args, trainer.model
    hidden, muon = split_parameters(model)[0].values(), args.optim == "muon"
    direction = direction_class(getattr(trainer, "custom_direction", None) or DIRECTIONS[options.direction])
    orthogonalises = muon or issubclass(direction, Orthogonal)
    shape = _shape(model, device_map, muon=hidden if muon else (), leaps=hidden if orthogonalises else ())
    on_gpu = args.device.type == "cuda"
    vram, ram = (
        None if gib is None else int(gib * 2**30) for gib in (options.vram_budget_gib, options.host_budget_gib)
    )
    held = int(shape.total.bytes((shape.trainable_bytes, shape.element_bytes)))  # lies on the host already
    chunks = options.chunked_loss == "on" or (options.chunked_loss == "auto" and shape.vocab >= BIG_VOCABULARY)
    setup = Setup(
        sequence_length=sequence_length(trainer),
        batch_size=args.per_device_train_batch_size,
        gradient_accumulation_steps=args.gradient_accumulation_steps,
        vram=device_memory(args.device) if vram is None and on_gpu else vram,
        ram=host_memory() + held if ram is None else ram,
        accelerator="cuda" if on_gpu else "cpu",
        memory="stream" if device_map is not None else options.memory,
        autocast=args.bf16,
        # Called gradient checkpointing before transformers 5.23.
        activation_checkpointing=getattr(args, "activation_checkpointing", False) or args.gradient_checkpointing,
        offload_activations=options.offload_activations,
        chunked_loss=chunks and ChunkedCausalLoss.unsupported_reason(model) is None,
        optimizer_states=options.optimizer_states,
        states_per_weight=STATES_PER_WEIGHT[str(getattr(args.optim, "value", args.optim))],
        base_precision=options.base_precision,
        resident_layers=options.resident_layers,
        prefetch_layers=options.prefetch_layers,
        stream_embeddings=options.stream_embeddings,
        accumulation_walk=options.accumulation_walk,
        enable_predict=options.enable_predict,
        values_per_weight=direction.values_per_weight,
        buffers_device=options.buffers_device,
    )
    return Estimator(shape, Tracer.of(model)).plan(setup)


def sequence_length(trainer) -> int:
    """Longest of the first training sequences; where they cannot be looked at, 1024 or what the model takes at most."""
    data = trainer.train_dataset
    try:
        return max(len(data[index]["input_ids"]) for index in range(min(len(data), 16)))
    except (TypeError, KeyError, IndexError, ValueError):
        config = getattr(trainer.model, "config", None)
        return min(getattr(config, "max_position_embeddings", None) or 1024, 1024)


def set_up_memory(trainer, device_map: dict | None) -> StreamedTraining | None:
    """Decide what is streamed, and build the engine; `None` if the model is trained as it is."""
    options, model = trainer.hybrid_args, trainer.model
    if device_map is None:
        device_map = _map_with_host_layers(model)
    if any(hasattr(module, "_hf_hook") for module in model.modules()):
        remove_hook_from_submodules(model)  # accelerate's hooks of an offloaded model train nothing
        model.tie_weights()  # they come back as one copy each
    if trainer.optimizer is not None:
        try:
            check_separable(trainer.optimizer)
        except UnsupportedOptimizerError as error:
            nearest = "Nearest plan that works: no `optimizers`, and `optim=adamw_torch_fused`."
            raise refuse(str(error), _shape(model, device_map), nearest) from None
    plan = make_plan(trainer, device_map)
    logger.info("Memory plan: %s", plan.describe())
    if plan.mode == "resident":
        return None
    streamer = LayerStreamer(
        model,
        _layers(model, device_map),
        embeddings_and_head(model) if plan.stream_embeddings else (),
        device=trainer.args.device,
        ahead=plan.setup.prefetch_layers,
        kept=plan.resident_layers,
        dtype_of=_working_dtypes(model, trainer.args.bf16),
        int8=plan.setup.base_precision == "int8",
    )
    obstacle = _obstacle_to_walking(model)
    window = Window(streamer, options.accumulation_walk, park=options.offload_activations, obstacle=obstacle)
    return StreamedTraining(model, streamer, window, plan)


def _map_with_host_layers(model: torch.nn.Module) -> dict | None:
    """The map that a model was loaded with, if it keeps layers on the host."""
    device_map = getattr(model, "hf_device_map", None)
    return device_map if device_map is not None and layers_on_host(find_layers(model), device_map) else None


def _obstacle_to_walking(model: torch.nn.Module) -> str | None:
    config = getattr(model, "config", None)
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    if getattr(config, "output_router_logits", False):
        # They are read by hooks inside the layers, past the layers' outputs, and have to carry gradients.
        return "`output_router_logits=True` takes router logits out of the layers for the loss."
    return None


def _working_dtypes(model: torch.nn.Module, bf16: bool) -> Callable[[torch.nn.Parameter], torch.dtype]:
    """Under bf16 autocast a linear layer rounds its fp32 weights anyway: they travel rounded, at half the bytes."""
    linear = {
        id(parameter)
        for module in model.modules()
        if isinstance(module, torch.nn.Linear)
        for parameter in module.parameters(recurse=False)
        if bf16 and parameter.dtype == torch.float32
    }
    tied = {id(p) for m in model.modules() if isinstance(m, torch.nn.Embedding) for p in m.parameters(recurse=False)}
    return lambda parameter: torch.bfloat16 if id(parameter) in linear - tied else parameter.dtype
