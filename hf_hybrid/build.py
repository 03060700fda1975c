"""
Build the parts of a run from its options.

`build_memory` decides where weights are kept, `build_optimizer` makes the optimizer, and `build_run` the run: the list
of its parts, in order. Most parts take plain values. Recovery, shared rows and rollouts compute windows in another way:
they take a view of the trainer.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any, Protocol

import torch
from accelerate.hooks import ModelHook, remove_hook_from_module
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.scheduler import AcceleratedScheduler
from transformers import TrainingArguments
from transformers.training_args import OptimizerNames

from hf_hybrid import optimizers
from hf_hybrid.arguments import HybridArguments
from hf_hybrid.config import (
    check_leap_optimizer,
    check_leaps,
    check_training_arguments,
    experiment,
    phase_options,
    was_given,
)
from hf_hybrid.leaps.automatic import FirstLoss, LeapView, leaps_are_automatic, pretrained_below, reason_no_leaps
from hf_hybrid.leaps.directions import DIRECTIONS, DirectionFactory, GradientMemory, Orthogonal, direction_class
from hf_hybrid.leaps.leap import LeapObserver, Leaps, PhaseController, PhaseLengths
from hf_hybrid.leaps.probe import (
    MIN_SEQUENCES,
    HeldOutBatches,
    NextBatches,
    Probe,
    ProbedTrainer,
    SequenceLosses,
    check_probe_set,
    held_out_batches,
)
from hf_hybrid.leaps.trajectory import Trajectory
from hf_hybrid.leaps.trust import GainPlanner, Trust
from hf_hybrid.machine import Driver, LeapObstacleError, sharding_of
from hf_hybrid.part import Part
from hf_hybrid.plan import of_trainer
from hf_hybrid.plan.accounting import host_memory
from hf_hybrid.plan.estimate import Estimator, Plan, refuse
from hf_hybrid.plan.setups import Setup
from hf_hybrid.records.log import LogFile
from hf_hybrid.records.progress import install_progress
from hf_hybrid.recovery import OutOfMemoryRecovery, RecoveringTrainer, UnrecoveredMemoryError, parts_of
from hf_hybrid.run.adapters import adapter_rate_scale
from hf_hybrid.run.monitor import DivergenceMonitor
from hf_hybrid.run.rate import LearningRateSearch, RateScale
from hf_hybrid.run.record import Speed
from hf_hybrid.run.run import NO_LEAPS, BatchFeed, Run
from hf_hybrid.run.trainer_view import classifies, own_losses, trains_adapters
from hf_hybrid.run.weights import Gathered, Shards, TrainedWeights, canonical, shards_of
from hf_hybrid.streaming.engine import Resident, Streamed
from hf_hybrid.streaming.layers import embeddings_and_head, find_layers, map_with_host_layers, working_dtypes
from hf_hybrid.streaming.optimizer import UnsupportedOptimizerError, check_separable
from hf_hybrid.streaming.streamer import LayerStreamer
from hf_hybrid.streaming.walk import Window

if TYPE_CHECKING:
    from hf_hybrid.phase_memory.fused_experts import FusedExperts

logger = logging.getLogger(__name__)


class BuiltTrainer(LeapView, ProbedTrainer, RecoveringTrainer, of_trainer.PlannedTrainer, Protocol):
    """The trainer whose parts are built."""

    recovery: OutOfMemoryRecovery
    log_file: LogFile
    rows: Any
    sequence_losses: type[SequenceLosses]
    probe_sequences: int | None

    def get_decay_parameter_names(self, model: Any) -> list[str]: ...

    def run_position(self) -> Any: ...


SKIP_FROM = 50
"""
The first step that may be skipped where nobody named a direction. From scratch the loss falls so fast before that a
step is worth more than the leap that replaces it: four runs of 40 steps ended 0.2 to 0.9 % lower without skipping any
(benchmarks/speedup/leaps.md).
"""
MAX_RATE_SCALE = 512.0
"""Largest factor of the search on the learning rate, which raises 5e-5 to 2.5e-2."""
PROBE_SEQUENCES = 8
"""Sequences of a probe, where its budget affords as many: fewer tell too little of a leap, more cost too much."""


# Leaps, as far as is known when the trainer is made.


def prepare_leaps(trainer: BuiltTrainer) -> None:
    """Refuse what leaps cannot work with, if they were asked for. Else leave them out."""
    options, direction = trainer.hybrid_args, trainer.custom_direction
    check_training_arguments(trainer.args, options)
    if direction is not None and not callable(direction):
        raise ValueError(
            f"`direction` must be a subclass of `Direction` or a callable that makes one, got `{direction!r}`. "
            "Directions of the package go by name: set the option `direction` of `HybridConfig`."
        )
    try:
        check_leaps(trainer.args)
        if not leaps_are_automatic(trainer) and options.final_gain(1.0) > 0:
            passed = trainer.optimizer_cls_and_kwargs
            check_leap_optimizer(
                trainer.optimizer or (passed[0] if passed else optimizers.optimizer_name(trainer.args))
            )
        if trainer.train_dataset is not None:  # otherwise the trainer may only evaluate
            check_trainable(trainer)
    except LeapObstacleError as error:
        leave_out_leaps(trainer, error)
    if trainer.probe_dataset is not None and trainer.leap_obstacle is None and trainer.has_phases:
        check_probe_set(trainer.probe_dataset)
    if trainer.has_phases:
        install_progress(trainer.callback_handler, trainer.run_position)


def leave_out_leaps(trainer: BuiltTrainer, error: LeapObstacleError) -> None:
    """Make no leaps, and say why, or train as plain `Trainer` does. Raise `error` if leaps or phases were asked for."""
    if not leaps_are_automatic(trainer) or phase_options(trainer.hybrid_args):
        raise error
    if error.leaps_alone:
        trainer.leap_obstacle = error.reason
        logger.warning("%s So this run makes no leaps.", error.reason)
        return
    trainer.obstacle = error.reason
    trainer.run = Run(no_leaps=error.reason)
    logger.warning(
        "%s So this run makes no leaps and trains as plain `Trainer` does: without the divergence monitor, the "
        "automatic learning rate and the forecast.",
        error.reason,
    )


def check_trainable(trainer: BuiltTrainer) -> None:
    """Refuse a model that has nothing to train, or none of whose parameters is whole on this process."""
    if not any(parameter.requires_grad for parameter in trainer.model.parameters()):
        raise ValueError(
            "`model` has no trainable parameters: every `requires_grad` is False. Unfreeze some, or add adapters "
            "(for example with peft) before creating the trainer."
        )
    for name, parameter in trainer.model.named_parameters():
        if getattr(parameter, "device_mesh", None) is not None and not trainer.is_fsdp_enabled:
            raise LeapObstacleError(
                f"`{name}` is spread over processes already (a `DTensor`), in a way that leaps do not know.",
                "Load the model without `tp_plan` and `distributed_config`. Let FSDP2 shard it (`fsdp=True`, or "
                "accelerate's `fsdp_version: 2`).",
            )


# The run.


def start_run(trainer: BuiltTrainer) -> Run:
    """Build the run that `trainer` is about to start, without leaps if they cannot work. Say what is left out."""
    optimizer = optimizers.inner_optimizer(trainer.optimizer)
    if trainer.rows is not None:
        in_order = trainer.memory.streams or sharding_of(trainer.args) is not None
        trainer.rows.comparison.in_any_order = not in_order
    if trainer.is_fsdp_enabled and isinstance(optimizer, optimizers.MuonAdamW):
        matrices = [p for group in optimizer.param_groups if group["algorithm"] == "muon" for p in group["params"]]
        shards = shards_of(matrices)
        if isinstance(shards, Shards) and shards.processes > 1:
            optimizer.share(shards.in_rounds)
    try:
        if trainer.has_phases:
            check_trainable(trainer)
        run = build_run(trainer)
    except LeapObstacleError as error:
        leave_out_leaps(trainer, error)
        run = build_run(trainer)
    _warn_of_what_is_left_out(trainer, run)
    return run


def build_run(trainer: BuiltTrainer) -> Run:
    """
    Build a run: the list of its parts, in the order in which they are called.

    The parts that every training of this trainer has (`trainer.parts`) come last. Without phases there are no others.
    Raise [`LeapObstacleError`] if leaps cannot work with the optimizer, or with how the weights are sharded.
    """
    options, max_steps = trainer.hybrid_args, trainer.state.max_steps
    common: dict[str, Any] = {"model": trainer.model_wrapped, "max_steps": max_steps}
    common |= {"survive": trainer.recovery.survive, "write": trainer.log_file.add, "speed": _speed(trainer)}
    if not trainer.has_phases:
        return Run(trainer.parts, optimizer=trainer.optimizer, no_leaps=trainer.obstacle, **common)
    weights, feed, no_leaps = _weights(trainer), BatchFeed(), reason_no_leaps(trainer)
    monitor = DivergenceMonitor(options.preset_value("divergence_threshold"))
    rate, first = _rate(trainer, weights), pretrained_below(trainer)
    asks = isinstance(trainer.lr_scheduler, AcceleratedScheduler)  # the host whether the optimizer stepped
    on_host = asks or trainer.accelerator.scaler is not None or trainer.memory.streams
    leaps: list[Part] = []
    if no_leaps is None:
        build = functools.partial(_leap_parts, trainer, weights, monitor, _probe(trainer, feed))
        build_leaps = functools.partial(_on_host_if_out_of_memory, trainer, build)
        leaps = [FirstLoss(first, build_leaps)] if first > 0 else build_leaps()
    forecast: list[Part] = []
    if options.forecast:
        from hf_hybrid.forecast.run_forecast import Forecast

        forecast = [Forecast(trainer.lr_scheduler, trainer.state.log_history)]
    return Run(
        [monitor, *([] if rate is None else [rate]), *leaps, *forecast, *trainer.parts],
        warmup=phase_lengths(options, max_steps).warmup,
        optimizer=weights.optimizer,
        weights=weights,
        feed=feed,
        rate=rate,
        decides_on_device=not on_host and optimizers.skips_on_device(trainer.optimizer),
        diverged=trainer.saver.diverged,
        no_leaps=no_leaps,
        **common,
    )


def _speed(trainer: BuiltTrainer) -> Speed:
    """Return what measures the run's speed, and what is to do where the host turns out to be the limit."""
    args, parallelism, advice = trainer.args, trainer.accelerator.parallelism_config, None
    if not trainer.memory.streams and trainer.is_world_process_zero():  # of streamed layers the bus may be the limit
        compiled = "" if args.torch_compile else " or `torch_compile=True`"
        advice = f"A larger `per_device_train_batch_size`{compiled} gives the host less to do for each token."
    driver = Driver(args.device) if args.device.type == "cuda" else None
    share_batches = parallelism is not None and parallelism.non_data_parallel_size > 1
    return Speed(driver, advice, tokens=None if share_batches else 0)


def _weights(trainer: BuiltTrainer) -> TrainedWeights:
    memory, model = trainer.memory, trainer.accelerator.unwrap_model(trainer.model)
    named = [(canonical(name), memory.parameter(p)) for name, p in model.named_parameters() if p.requires_grad]
    store = Gathered(model) if trainer.is_fsdp_enabled else memory if memory.streams else None
    for layer in optimizers.optimizer_layers(trainer.optimizer):
        switches = all(callable(getattr(layer, name, None)) for name in ("train", "eval"))
        if switches and not isinstance(layer, AcceleratedOptimizer):  # it passes both on to what it wraps
            raise LeapObstacleError(
                f"`{type(layer).__name__}` keeps two sets of weights, which its `train` and `eval` exchange "
                "(Schedule-Free), and a leap would move one of them without the other.",
                "Choose another optimizer, for example `optim=adamw_torch_fused`.",
            )
    return TrainedWeights(named, optimizers.inner_optimizer(trainer.optimizer), store)


def _on_host_if_out_of_memory(trainer: BuiltTrainer, build: Callable[[bool], list[Part]]) -> list[Part]:
    """Build parts with buffers of the weights' size: on the host, if planned so or if they do not fit on the device."""
    recovery, plan_values = trainer.recovery, trainer.hybrid_args.plan_values
    planned = trainer.memory.buffers_on_host or plan_values.get("buffers_device") == "cpu"
    for on_host in [True] if planned else [False, True]:
        try:
            return build(on_host)
        except Exception as error:
            recovery.catch(error)
        if not on_host:
            recovery.note("buffers on the host")
    raise UnrecoveredMemoryError(
        f"{recovery.where()}: the buffers of leaps do not fit: {recovery.reason} Set `enable_predict=False`."
    )


def _leap_parts(
    trainer: BuiltTrainer, weights: TrainedWeights, monitor: DivergenceMonitor, probe: Probe, on_host: bool
) -> list[Part]:
    """Build the parts of a run with leaps: the leaps, and whatever observes them."""
    options, max_steps = trainer.hybrid_args, trainer.state.max_steps
    matrices = frozenset(map(canonical, optimizers.split_parameters(trainer.model)[0]))
    direction = direction_of(trainer, matrices)
    trajectory = Trajectory(
        weights,
        direction=direction,
        matrices=matrices,
        memory_steps=direction_class(direction).memory_steps or memory_steps(max_steps),
        host=on_host,
    )
    trainer.memory.overlay(trajectory.displaced)
    gain, power = trajectory.direction.gain, trajectory.direction.gain_power
    values = (options.final_gain(gain), power, options.preset_value("leap_worth"))
    if options.planner == "schedule":
        gains, after = GainPlanner(*values), []
    else:  # and the part that shows the planner the run
        gains, after = experiment("planners").learning_planner(trainer, values)
    observers = [part for part in (*after, *trainer.parts) if isinstance(part, LeapObserver)]
    leaps = Leaps(
        controller=PhaseController(phase_lengths(options, max_steps)),
        trajectory=trajectory,
        gains=gains,
        trust=Trust(options.probe_budget, max_steps),
        monitor=monitor,
        probe=probe,
        leap_budget=options.leap_budget,
        cost_of_step=functools.partial(_cost_of_step, trainer),
        skip_from=SKIP_FROM if leaps_are_automatic(trainer) else 0,
        observers=observers,
    )
    return [leaps, *after]


def _cost_of_step(trainer: BuiltTrainer, tokens: int) -> float:
    """
    Return the floating-point operations of a step with so many tokens on this process, as the mean over all processes,
    because every process must decide alike.
    """
    accelerator, count = trainer.accelerator, torch.tensor(float(tokens))
    if accelerator.num_processes > 1:
        count = accelerator.reduce(count.to(trainer.args.device), reduction="mean")
    return count.item() * sum(p.numel() * (6 if p.requires_grad else 4) for p in trainer.model.parameters())


def phase_lengths(options: HybridArguments, max_steps: int) -> PhaseLengths:
    """Return the phase lengths for a run of `max_steps`: as given, or else by the run's length and the preset."""

    def pick(name: str, default: int) -> int:
        value = getattr(options, name)
        return default if value is None else value

    short = max(max_steps // 10, 1)  # so that short runs too go through the phases several times
    return PhaseLengths(
        warmup=pick("warmup_phase_steps", min(max(round(0.05 * max_steps), 2), 100)),
        full=pick("full_phase_steps", min(options.preset_value("full_phase_steps"), short)),
        correct=pick("correct_phase_steps", min(options.preset_value("correct_phase_steps"), short)),
        max_predict=pick("max_predict_steps", min(max(round(0.05 * max_steps), 1), 10)),
    )


def memory_steps(max_steps: int) -> int:
    """Return the length of the slow averages of a direction that has no length of its own."""
    return min(max(max_steps // 6, 5), 1000)


def chooses_rate(args: TrainingArguments, options: HybridArguments) -> bool:
    """Whether to choose the learning rate. `auto`: only if the user is known to have written no `learning_rate`."""
    if options.auto_lr != "auto":
        return options.auto_lr == "on"
    return was_given(args, "learning_rate") is False


def _warn_of_what_is_left_out(trainer: BuiltTrainer, run: Run) -> None:
    """
    Say why no leaps are made, if nobody chose that, and the trainer has not said it when it was built. Say which
    defaults would be replaced if it were known that the user did not write them.
    """
    args, options, kept, reason = trainer.args, trainer.hybrid_args, [], run.no_leaps
    is_news = trainer.has_phases and trainer.leap_obstacle is None and options.final_gain(1.0) > 0
    if reason is not None and is_news:
        logger.warning(NO_LEAPS, reason)
    if trainer.has_phases and options.auto_lr == "auto" and was_given(args, "learning_rate") is None:
        kept.append(f"`learning_rate={args.learning_rate:g}` (`auto_lr=on` raises it where that helps)")
    if options.preset == "fast" and was_given(args, "optim") is None and not optimizers.has_adapters(trainer.model):
        kept.append(f"`optim={optimizers.optimizer_name(args)}` (`preset=fast` wants `optim=muon`)")
    if kept:
        logger.warning(
            "%s: kept as it is, because the arguments do not tell whether you wrote this default. Parsers write every "
            "option, and plain `TrainingArguments` take no note.",
            " and ".join(kept),
        )


def _rate(trainer: BuiltTrainer, weights: TrainedWeights) -> RateScale | None:
    """Return the part that raises the learning rate: by a rule for adapters, else by a search under torch's Adam."""
    if not chooses_rate(trainer.args, trainer.hybrid_args):
        return None
    if trains_adapters(trainer):
        return adapter_rate_scale(trainer)
    optimizer = optimizers.users_optimizer(trainer.optimizer)
    if type(optimizer) in (torch.optim.Adam, torch.optim.AdamW):
        return LearningRateSearch(max_scale=MAX_RATE_SCALE, max_steps=trainer.state.max_steps, weights=weights)
    logger.warning(
        "The run keeps `learning_rate=%g`: a better one is searched under torch's Adam and AdamW alone, and the "
        "optimizer is `%s`.",
        trainer.args.learning_rate,
        type(optimizer).__name__,
    )
    return None


def chosen_direction(trainer: BuiltTrainer) -> DirectionFactory:
    """Return the user's own direction, or else the one that the options name."""
    name = trainer.hybrid_args.direction
    return trainer.custom_direction or DIRECTIONS["orthogonal" if name == "auto" else name]


def direction_of(trainer: BuiltTrainer, matrices: Collection[str]) -> DirectionFactory:
    """Return the chosen direction; `gradient_memory` in place of `orthogonal` if no hidden matrices are trained."""
    chosen = chosen_direction(trainer)
    return GradientMemory if chosen is Orthogonal and not matrices else chosen


def _probe(trainer: BuiltTrainer, feed: BatchFeed) -> Probe:
    args, options, processes = trainer.args, trainer.hybrid_args, trainer.accelerator.num_processes
    losses = trainer.sequence_losses(trainer)
    per_step = trainer._train_batch_size * args.gradient_accumulation_steps * processes
    # Four evaluations must fit the budget of the whole run, or a short run could not probe twice.
    affordable = int(3 * per_step * options.probe_budget * trainer.state.max_steps / 4)
    wanted = trainer.probe_sequences or max(min(PROBE_SEQUENCES, affordable), MIN_SEQUENCES)
    if trainer.probe_dataset is not None:
        source = HeldOutBatches(held_out_batches(losses, trainer.probe_dataset, per_step, processes), wanted=wanted)
        wanted = max(source.wanted, max(batch.sequences for batch in source.batches))
    else:
        source = NextBatches(
            feed.peek,
            wanted=wanted,
            size=losses.size,
            cut=functools.partial(parts_of, blocks=trainer.recovery.blocks),
            accumulation=args.gradient_accumulation_steps,
            processes=processes,
        )
    return Probe(source, functools.partial(trainer.recovery.probe, losses), price=wanted / (3.0 * per_step))


# The optimizer.


def makes_muon(trainer: BuiltTrainer) -> bool:
    """Whether `optim=muon` is used and no optimizer was passed."""
    passed = trainer.optimizer is not None or trainer.optimizer_cls_and_kwargs is not None
    return trainer.args.optim == "muon" and not passed


def check_muon(trainer: BuiltTrainer) -> None:
    """
    Undo the choice of Muon by `preset="fast"` where adapters are trained, unless the user wrote an option of Muon. It
    gains nothing there (benchmarks/speedup/rates.md, "`fast` with adapters"). Refuse it where it finds no matrix.
    """
    if not makes_muon(trainer):
        return
    chosen = any(was_given(trainer.args, name) for name in ("optim", "muon_momentum"))
    if trainer.hybrid_args.preset != "fast" or not optimizers.has_adapters(trainer.model) or chosen:
        optimizers.check_hidden_matrices(trainer.model)
    else:
        trainer.args.optim = OptimizerNames(optimizers.optimizer_name(TrainingArguments))
        logger.warning("`preset=fast` trains adapters by AdamW: Muon gains nothing there. For Muon, set `optim=muon`.")


def build_optimizer(trainer: BuiltTrainer, model: torch.nn.Module) -> None:
    """Make the optimizers that Trainer cannot make: Muon, and AdamW with 8-bit states."""
    args, options = trainer.args, trainer.hybrid_args
    betas = (args.adam_beta1, args.adam_beta2)
    if options.optimizer_states == "8bit" and trainer.optimizer is None:
        from hf_hybrid.streaming.low_bit import AdamW8bit

        values = {"lr": args.learning_rate, "betas": betas, "eps": args.adam_epsilon, "seed": args.seed}
        trainer.optimizer_cls_and_kwargs = (AdamW8bit, values)
    if makes_muon(trainer):
        common = {"lr": args.learning_rate, "weight_decay": args.weight_decay}
        groups = optimizers.muon_groups(model, trainer.get_decay_parameter_names(model), **common)
        momentum = options.preset_value("muon_momentum")
        trainer.optimizer = optimizers.MuonAdamW(
            groups, **common, betas=betas, eps=args.adam_epsilon, momentum=momentum
        )


# Where weights live.


def leap_buffers(trainer: BuiltTrainer) -> of_trainer.LeapBuffers:
    """Return what leaps hold beside the model, as far as it is known before a run begins."""
    direction, makes_leaps = direction_class(chosen_direction(trainer)), reason_no_leaps(trainer) is None
    return of_trainer.LeapBuffers(
        direction.values_per_weight if makes_leaps else None, issubclass(direction, Orthogonal)
    )


def estimator_for(trainer: BuiltTrainer, device_map: dict | None) -> tuple[Estimator, Setup]:
    """Return the estimator for a trainer's model, and the setup that its options ask for."""
    return of_trainer.estimator_of(trainer, device_map, leap_buffers(trainer))


def make_plan(trainer: BuiltTrainer, device_map: dict | None) -> Plan:
    """Plan which parts of the trainer's model are streamed, within its budgets; `PlanError` if nothing fits."""
    experts = fused_experts_part(trainer)
    with contextlib.nullcontext() if experts is None else experts.computing():  # a trace computes as a step does
        estimator, setup = estimator_for(trainer, device_map)
        return estimator.plan(setup)


def build_memory(trainer: BuiltTrainer, device_map: dict | None) -> Resident:
    """Decide where the weights live. They are streamed if they do not fit or if the options ask for it."""
    options, model = trainer.hybrid_args, trainer.model
    if device_map is None:
        device_map = map_with_host_layers(model)
    take_hooks_off(model)
    if trainer.optimizer is not None:
        try:
            check_separable(trainer.optimizer)
        except UnsupportedOptimizerError as error:
            nearest = "Nearest plan that works: no `optimizers`, and `optim=adamw_torch_fused`."
            raise refuse(str(error), of_trainer.shape_of(model, device_map), nearest) from None
    plan = make_plan(trainer, device_map)
    logger.info("Memory plan: %s", plan.describe())
    evaluated = evaluated_streamer(trainer) if plan.setup.evaluated_on_host else None
    if plan.mode == "resident":
        return Resident(plan.buffers_on_host, evaluated)
    streamer = LayerStreamer(
        model,
        of_trainer.streamed_layers(model, device_map),
        embeddings_and_head(model) if plan.stream_embeddings else (),
        device=trainer.args.device,
        ahead=plan.setup.prefetch_layers,
        resident=plan.resident_layers,
        dtype_of=working_dtypes(model, trainer.args.bf16),
        int8=plan.setup.base_precision == "int8",
        graphs=plan.kept_graphs,
        in_flight=plan.setup.micro_batches_in_flight,
    )
    of_router = "The router's loss takes logits out of the layers." if vars(trainer).get("aux_loss_enabled") else None
    park, walk = options.offload_activations, plan.setup.accumulation_walk
    window = Window(streamer, walk, park=park, evaluated=evaluated, reason=of_router)
    window.beside = plan.setup.beside > 0
    window.counter = trainer if hasattr(trainer, "_buffered_inputs") else None
    return Streamed(model, streamer, window, plan, host_memory=host_memory)


def take_hooks_off(model: Any) -> None:
    """Take accelerate's hooks off a model that it has put on a device, or on the host: they train nothing."""
    hooked = [module for module in model.modules() if hasattr(module, "_hf_hook")]
    for module in hooked:
        own, forward = vars(module), vars(module).get("forward")
        inside = own.get("_old_forward")
        remove_hook_from_module(module)
        if forward is not None and getattr(forward, "func", forward).__name__ != "new_forward":
            # Somebody (TRL) has put a function around that of accelerate since, which still asks for a hook.
            own |= {"forward": forward, "_old_forward": inside, "_hf_hook": ModelHook()}
    if hooked:
        model.tie_weights()  # they come back as one copy each


def evaluated_streamer(trainer: BuiltTrainer) -> LayerStreamer | None:
    """Return what streams the models that the trainer computes and does not train, if it has any with layers."""
    models = torch.nn.ModuleList(of_trainer.evaluated_models(trainer))
    layers = [layer for model in models for layer in find_layers(model)]
    for model in models:
        take_hooks_off(model)  # TRL loads references and teachers onto the device
        model.requires_grad_(False)
    if not layers:
        return None
    ends = [end for model in models for end in embeddings_and_head(model)]
    streamer = LayerStreamer(models, layers, ends, device=trainer.args.device)
    for model in models:
        if (head := optimizers.ask(model, "get_output_embeddings")) is not None:
            streamer.read_behind(find_layers(model)[-1][1], head)
    return streamer


def memory_parts(trainer: BuiltTrainer) -> list[Part]:
    """Return the parts that compute layers in another way, in less memory or time."""
    parts = [] if trainer.memory.streams else _phase_memory_parts(trainer)
    # Adapters with less memory, or with fewer kernels and casts under bf16 autocast.
    casts = trainer.hybrid_args.exactness == "rounding" and trainer.accelerator.mixed_precision == "bf16"
    if casts and trains_adapters(trainer):
        from hf_hybrid.phase_memory import adapter_products

        parts += adapter_products.adapter_parts(trainer)
    if (experts := fused_experts_part(trainer)) is not None:
        parts.append(experts)
    if trainer.args.torch_compile and trainer.rows is not None and trainer.rows.may_share:
        from hf_hybrid.rows.compiled import CompiledLayers

        parts.append(CompiledLayers(trainer, trainer.rows, vars(trainer).get("ref_model")))
    return parts


def fused_experts_part(trainer: BuiltTrainer) -> FusedExperts | None:
    """Return the part that multiplies adapters of fused experts, where sums may be in another order than PEFT's."""
    args, options = trainer.args, trainer.hybrid_args
    as_peft = options.share_rows == "off" or options.exactness == "bits"
    if as_peft or args.torch_compile or sharding_of(args) or not trains_adapters(trainer):
        return None
    from hf_hybrid.phase_memory.fused_experts import FusedExperts, adapted_experts

    layers = adapted_experts(trainer.accelerator.unwrap_model(trainer.model))
    return FusedExperts(layers) if layers else None


def rows_part(trainer: BuiltTrainer) -> Any:
    """Return the part that computes windows as trees, if the options ask for it."""
    options = trainer.hybrid_args
    if options.share_rows == "off" or options.exactness == "bits":
        return None
    own = own_losses(trainer)
    options_of_loss = trainer.compute_loss_func is not None or trainer.args.label_smoothing_factor
    if own or options_of_loss or classifies(trainer.accelerator.unwrap_model(trainer.model)):
        from hf_hybrid.rows import any_loss

        # `on` says that a loss that nobody knows reads no padding.
        is_known = options.share_rows == "on" or (bool(own) and own[0][:2] in any_loss.KNOWN)
        return any_loss.RowsForAnyLoss(trainer, any_loss.reason_not_shared(trainer), is_known)
    from hf_hybrid.rows.windows import BalancedWindows, SharedWindows, reason_not_shared

    kind = BalancedWindows if getattr(trainer, "aux_loss_enabled", False) else SharedWindows
    return kind(trainer, reason_not_shared(trainer))


def _phase_memory_parts(trainer: BuiltTrainer) -> list[Part]:
    """Build the parts that change memory by phase, for models that are not streamed."""
    options, parts = trainer.hybrid_args, []
    automatic = of_trainer.checkpointing(trainer.args) == "auto" and trainer.train_dataset is not None
    if options.checkpoint_phases is not None or options.offload_activations or automatic:
        phases = (options.checkpoint_phases or "warmup,full,correct").replace(" ", "").split(",")
        from hf_hybrid.phase_memory.activations import ActivationCheckpointing

        layers = None
        if automatic:
            leaps = leap_buffers(trainer)
            if leaps_are_automatic(trainer) and getattr(trainer.model, "name_or_path", ""):
                leaps = leaps._replace(values_per_weight=None)  # a pretrained model makes none
            layers = of_trainer.fewest_recomputed_layers(trainer, leaps)
        if layers is not None or options.checkpoint_phases is not None or options.offload_activations:
            parts.append(ActivationCheckpointing(phases, offload=options.offload_activations, layers=layers))
    if options.weight_precision is not None or options.predict_states != "stay":
        autocast = {"bf16": "bf16", "fp16": "fp16"}.get(trainer.accelerator.mixed_precision)
        memory = experiment("precision").PhaseMemory
        part = memory(options.weight_precision or "auto", options.predict_states, autocast=autocast)
        part.check(trainer.model)
        parts.append(part)
    return parts
