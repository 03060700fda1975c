"""
Build the parts of a run from its options.

`build_memory` decides where weights are kept, `build_optimizer` makes the optimizer, and `build_run` the run: the list
of its parts, in order. Most parts take plain values. Those that compute windows in another way or compare runs
(recovery, shared rows, rollouts, digests, the fingerprint) take the trainer. Optional folders are imported inside
functions, when an option needs them.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import math
from collections.abc import Callable, Collection
from typing import Any

import torch
from accelerate.hooks import remove_hook_from_submodules
from accelerate.optimizer import AcceleratedOptimizer
from transformers import TrainingArguments
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.training_args import OptimizerNames

from hf_hybrid.arguments import HybridArguments
from hf_hybrid.compat import checkpointing_option
from hf_hybrid.config import was_given
from hf_hybrid.files import has_room, load_room
from hf_hybrid.leaps.directions import DIRECTIONS, GradientMemory, Orthogonal
from hf_hybrid.leaps.directions.base import DirectionFactory, direction_class
from hf_hybrid.leaps.leap import (
    FirstLoss,
    GainPlanner,
    GradientAverage,
    LeapObserver,
    Leaps,
    PhaseController,
    PhaseLengths,
    Trust,
)
from hf_hybrid.leaps.probe import MIN_SEQUENCES, HeldOutBatches, NextBatches, Probe, ProbeBatch, SequenceLosses
from hf_hybrid.leaps.trajectory import Trajectory
from hf_hybrid.machine import (
    LeapObstacleError,
    copies_beside,
    device_memory,
    mixed_precision_of,
    sharding_of,
    shards_by_fsdp2,
    workspace_bytes,
)
from hf_hybrid.optimizers import (
    MuonAdamW,
    has_adapters,
    is_adam,
    muon_groups,
    optimizer_name,
    split_parameters,
)
from hf_hybrid.part import Part
from hf_hybrid.plan.accounting import ModelShape, host_memory
from hf_hybrid.plan.estimate import Estimator, Plan, refuse
from hf_hybrid.plan.setups import MARGIN, Setup, with_context
from hf_hybrid.plan.trace import Tracer
from hf_hybrid.recovery import UnrecoveredMemoryError, first_part
from hf_hybrid.run.monitor import DivergenceMonitor
from hf_hybrid.run.rate import LearningRateRescue, RateScale, StepCosine, rate_at
from hf_hybrid.run.run import NO_LEAPS, BatchFeed, Run
from hf_hybrid.run.typing import TrainerLike
from hf_hybrid.run.weights import Gathered, Shards, TrainedWeights, canonical, shards_of
from hf_hybrid.streaming.engine import Resident, Streamed
from hf_hybrid.streaming.layers import (
    NoLayerListError,
    embeddings_and_head,
    find_layers,
    layers_on_host,
    rounded_by_autocast,
)
from hf_hybrid.streaming.loss import BIG_VOCABULARY, ChunkedCausalLoss
from hf_hybrid.streaming.optimizer import (
    STATES_PER_WEIGHT,
    LazyOptimizer,
    UnsupportedOptimizerError,
    check_separable,
)
from hf_hybrid.streaming.streamer import LayerStreamer
from hf_hybrid.streaming.walk import Window

logger = logging.getLogger(__name__)

STRETCH_STEPS, MOST_STRETCHES = 10, 300
"""Real steps that planners learn from at a time, and about how many such stretches a run has at most."""
SKIP_FROM = 50
"""
The first step that may be skipped where nobody named a direction. From scratch the loss falls so fast before that a
step is worth more than the leap that replaces it: four runs of 40 steps ended 0.2 to 0.9 % lower without skipping any
(docs/evaluation/leaps.md).
"""
MAX_RATE_SCALE = 512.0
"""Largest factor of the search on the learning rate, which raises 5e-5 to 2.5e-2."""
PROBE_SEQUENCES = 8
"""Sequences of a probe, where its budget affords as many: fewer tell too little of a leap, more cost too much."""
PRETRAINED_SHARE = 0.5
"""
A model counts as pretrained if its first training loss is below this share of the loss of a model that knows nothing,
the logarithm of its vocabulary. Where leaps harmed the share was 0.31 to 0.38, where they paid 0.62 and above
(docs/evaluation/pretrained.md); nothing in between was measured.
"""

HOST_SHARE = 0.9
"""Share of the free host memory that a step on a CPU may take before layers are recomputed. Assumed, not measured."""
SAMPLED_LENGTHS = 256
"""Sequences of the data, evenly spread, the longest of which decides how many layers are recomputed."""

# The run.


def build_run(trainer: TrainerLike) -> Run:
    """
    Build the run that `trainer` is about to start: the list of its parts, in the order in which they are called.

    The parts that every training of this trainer has (`trainer.parts`) come last. Without phases there are no others.

    Raises:
        LeapObstacleError: If leaps cannot work with the optimizer, or with how the weights are sharded.
        ValueError: If `probe_dataset` gives fewer than two sequences, or no label.
        UnrecoveredMemoryError: If buffers do not fit on the host either.
    """
    options, max_steps = trainer.hybrid_args, trainer.state.max_steps
    common: dict[str, Any] = {"model": trainer.model_wrapped, "max_steps": max_steps}
    common |= {"survive": trainer.recovery.survive, "write": trainer.log_file.add}
    if not trainer.has_phases:
        return Run(trainer.parts, optimizer=trainer.optimizer, no_leaps=trainer.obstacle, **common)
    weights, feed, no_leaps = _weights(trainer), BatchFeed(), why_no_leaps(trainer)
    monitor = DivergenceMonitor(options.preset_value("divergence_threshold"))
    rate, first = _rate(trainer, weights), pretrained_below(trainer)
    average = functools.partial(_average_parts, trainer, weights, rate)
    if no_leaps is not None:
        following = average()
    else:
        build = functools.partial(_leap_parts, trainer, weights, monitor, rate, _probe(trainer, feed))
        leaps = functools.partial(_with_room, trainer, build)
        following = [FirstLoss(first, leaps, average)] if first > 0 else leaps()
    forecast = _forecast(trainer)
    return Run(
        [monitor, *([] if rate is None else [rate]), *following, *forecast, *trainer.parts],
        warmup=phase_lengths(options, max_steps).warmup,
        optimizer=weights.optimizer,
        weights=weights,
        feed=feed,
        rate=rate,
        no_leaps=no_leaps,
        **common,
    )


def _forecast(trainer: TrainerLike) -> list[Part]:
    """Return the forecast of the final loss. It is on by default, so that a lack of its room is no error."""
    if not trainer.hybrid_args.forecast or not has_room("world_model.forecast"):
        return []
    room = load_room("world_model.forecast", "forecast=True")
    return [room.Forecast(trainer.lr_scheduler, trainer.state.log_history)]


def _weights(trainer: TrainerLike) -> TrainedWeights:
    memory, model = trainer.memory, trainer.accelerator.unwrap_model(trainer.model)
    named = [(canonical(name), memory.parameter(p)) for name, p in model.named_parameters() if p.requires_grad]
    return TrainedWeights(named, unwrapped_optimizer(trainer), Gathered(model) if trainer.is_fsdp_enabled else memory)


def _with_room(trainer: TrainerLike, build: Callable[[bool], list[Part]]) -> list[Part]:
    """
    Build parts that have buffers of the size of the weights: on the host (`build(True)`), if the plan says so or if
    they do not fit on the device.
    """
    recovery, plan_values = trainer.recovery, trainer.hybrid_args.plan_values
    on_host = trainer.memory.buffers_on_host or plan_values.get("buffers_device") == "cpu"
    try:
        return build(on_host)
    except Exception as error:
        recovery.catch(error)
    if not on_host:
        recovery.note("buffers on the host")
        try:
            return build(True)
        except Exception as error:
            recovery.catch(error)
    raise UnrecoveredMemoryError(
        f"{recovery.where()}: the buffers of leaps do not fit: {recovery.reason} Set `enable_predict=False`."
    )


def _leap_parts(
    trainer: TrainerLike,
    weights: TrainedWeights,
    monitor: DivergenceMonitor,
    rate: RateScale | None,
    probe: Probe,
    on_host: bool,
) -> list[Part]:
    """Build the parts of a run with leaps: the leaps, and whatever observes them."""
    options, max_steps = trainer.hybrid_args, trainer.state.max_steps
    matrices = frozenset(map(canonical, split_parameters(trainer.model)[0]))
    direction = direction_of(trainer, matrices)
    trajectory = Trajectory(
        weights,
        direction=direction,
        matrices=matrices,
        memory_steps=direction_class(direction).memory_steps or memory_steps(max_steps),
        host=on_host,
    )
    trainer.memory.overlay(trajectory.displaced)
    if isinstance(rate, LearningRateRescue) and rate.cosine is not None:
        rate.cosine.average = trajectory.direction
    gains, after = _planner(trainer, trajectory)
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


def _planner(trainer: TrainerLike, trajectory: Trajectory) -> tuple[GainPlanner, list[Part]]:
    """Return the planner of the gain, and the part that shows it the run, if it learns."""
    options, max_steps, direction = trainer.hybrid_args, trainer.state.max_steps, trajectory.direction
    values = (options.final_gain(direction.gain), direction.gain_power, options.preset_value("leap_worth"))
    if options.planner == "schedule":
        return GainPlanner(*values), []
    asked = f"planner={options.planner}"
    stride = max(STRETCH_STEPS, max_steps // MOST_STRETCHES)
    if options.planner == "bandit":
        planner = load_room("world_model.bandit", asked).BanditGain(*values)
    else:
        planner = load_room("world_model.imagination", asked).imagined_gain(
            values,
            device=trainer.args.device,
            seed=trainer.args.seed,
            factor_at=rate_at(trainer.lr_scheduler),
            max_steps=max_steps,
            stride=stride,
        )
    observer = load_room("world_model.observer", asked).PlannerObserver
    return planner, [observer(planner, stride=stride, max_grad_norm=trainer.args.max_grad_norm)]


def _cost_of_step(trainer: TrainerLike, tokens: int) -> tuple[float, float]:
    """
    Return the floating-point operations of a step with so many tokens on this process, as the mean over all processes,
    because every process must decide alike; and the bytes that all processes together send at most under FSDP2: the
    weights before each forward and each backward pass, and the gradients once.
    """
    accelerator, count = trainer.accelerator, torch.tensor(float(tokens))
    if accelerator.num_processes > 1:
        count = accelerator.reduce(count.to(trainer.args.device), reduction="mean")
    parameters = list(trainer.model.parameters())
    flops = count.item() * sum(4 * p.numel() + 2 * p.numel() * p.requires_grad for p in parameters)
    if not trainer.is_fsdp_enabled:
        return flops, 0.0
    low, passes = accelerator.mixed_precision == "bf16", 2 * trainer.current_gradient_accumulation_steps
    sizes = ((p.numel() * (2 if low else p.element_size()), p.requires_grad) for p in parameters)
    return flops, (accelerator.num_processes - 1) * sum(size * (passes + trained) for size, trained in sizes)


def _average_parts(trainer: TrainerLike, weights: TrainedWeights, rate: RateScale | None) -> list[Part]:
    """Build the parts of a run without leaps: an average of the gradients, if the search of the rate needs one."""
    cosine = rate.cosine if isinstance(rate, LearningRateRescue) else None
    if cosine is None or type(_made_optimizer(trainer)) in (torch.optim.Adam, torch.optim.AdamW):
        return []  # Adam's state has the direction of its last step

    def build(on_host: bool) -> list[Part]:
        direction = direction_of(trainer, frozenset(map(canonical, split_parameters(trainer.model)[0])))
        steps = direction_class(direction).memory_steps or memory_steps(trainer.state.max_steps)
        average = GradientAverage(weights, direction, memory_steps=steps, host=on_host)
        cosine.average = average.direction
        return [average]

    return _with_room(trainer, build)


def tell_of_no_leaps(trainer: TrainerLike) -> None:
    """Say why no leaps are made, if nobody chose that, and the trainer has not said it when it was built."""
    why = trainer.run.no_leaps
    if why is not None and trainer.leap_obstacle is None and trainer.hybrid_args.final_gain(1.0) > 0:
        logger.warning(NO_LEAPS, why)


def phase_lengths(options: HybridArguments, max_steps: int) -> PhaseLengths:
    """Return the phase lengths for a run of `max_steps`: as given, or else by the run's length and the preset."""

    def pick(name: str, default: int) -> int:
        given = getattr(options, name)
        return default if given is None else given

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


def rescue_is_on(args: TrainingArguments, options: HybridArguments) -> bool:
    """Whether to rescue the learning rate. `auto`: only if the user is known to have written no `learning_rate`."""
    if options.lr_rescue != "auto":
        return options.lr_rescue == "on"
    return was_given(args, "learning_rate") is False


def tell_of_kept_defaults(trainer: TrainerLike) -> None:
    """Say which defaults would be replaced if it were known that the user did not write them."""
    args, options = trainer.args, trainer.hybrid_args
    told = []
    if trainer.has_phases and options.lr_rescue == "auto" and was_given(args, "learning_rate") is None:
        told.append(f"`learning_rate={args.learning_rate:g}` (`lr_rescue=on` raises it where that helps)")
    if options.preset == "fast" and was_given(args, "optim") is None and not has_adapters(trainer.model):
        told.append(f"`optim={optimizer_name(args)}` (`preset=fast` wants `optim=muon`)")
    if told:
        logger.warning(
            "%s: kept as it is, because the arguments do not tell whether you wrote this default. Parsers write every "
            "option, and plain `TrainingArguments` take no note.",
            " and ".join(told),
        )


def _searches_rate(trainer: TrainerLike) -> bool:
    """Whether the learning rate is searched during the run. That of adapters follows from a rule."""
    return rescue_is_on(trainer.args, trainer.hybrid_args) and not _trains_adapters(trainer)


def _rate(trainer: TrainerLike, weights: TrainedWeights) -> RateScale | None:
    """Return the part that raises the learning rate."""
    if not rescue_is_on(trainer.args, trainer.hybrid_args):
        return None
    if not _trains_adapters(trainer):
        cosine = StepCosine(weights)
        return LearningRateRescue(max_scale=MAX_RATE_SCALE, max_steps=trainer.state.max_steps, cosine=cosine)
    room = "integrations.adapters"
    return load_room(room, "lr_rescue").adapter_rate_scale(trainer) if has_room(room) else None


# Whether there are leaps. They are made where they were measured to pay (docs/results.md): with an optimizer like
# AdamW, on a causal language model that knows little yet. The trainer, its loss and the optimizer decide. Only the
# question whether the model is pretrained is left to the first training loss, and only where that is the plain
# cross-entropy: DPO begins at log 2 with random weights too, IPO at 25, DFT near 0. What is not known to be like the
# measured runs makes no leaps. A direction that is named is asked for, and makes leaps everywhere.


def leaps_are_automatic(trainer: TrainerLike) -> bool:
    """Whether nobody asked for leaps: the trainer, its loss and the optimizer then decide whether there are any."""
    return trainer.custom_direction is None and trainer.hybrid_args.direction == "auto"


def why_no_leaps(trainer: TrainerLike) -> str | None:
    """Return why the run makes no leaps, as far as that is known before it begins."""
    options = trainer.hybrid_args
    if options.final_gain(1.0) == 0:
        return "`leap_gain` is 0" if options.leap_gain == 0 else f"`preset={options.preset}` makes none"
    if not leaps_are_automatic(trainer):
        return None
    if trainer.leap_obstacle is not None:
        return trainer.leap_obstacle
    if _trains_adapters(trainer):
        return "adapters are trained"
    if trainer.no_leaps_because is not None:
        return trainer.no_leaps_because
    if (name := optimizer_unlike_adam(trainer)) is not None:
        return f"the optimizer is `{name}`, and leaps were measured to pay with AdamW alone"
    unknown = unknown_loss(trainer)
    return unknown and f"{unknown}, so it does not tell how much the model knows"


def _trains_adapters(trainer: TrainerLike) -> bool:
    return has_adapters(trainer.accelerator.unwrap_model(trainer.model))


def optimizer_unlike_adam(trainer: TrainerLike) -> str | None:
    """Return the name of the optimizer if it is not known to step as AdamW does. It may not be made yet."""
    optimizer = _made_optimizer(trainer)
    if optimizer is not None:
        made, name = optimizer, type(optimizer).__name__
    elif trainer.optimizer_cls_and_kwargs is not None:
        made = trainer.optimizer_cls_and_kwargs[0]
        name = made.__name__
    else:
        made = name = optimizer_name(trainer.args)
    return None if is_adam(made) else name


def _made_optimizer(trainer: TrainerLike) -> torch.optim.Optimizer | None:
    """Return the optimizer inside the wrappers of accelerate and of streaming. Those of a user may do anything."""
    optimizer = trainer.optimizer
    while isinstance(optimizer, (AcceleratedOptimizer, LazyOptimizer)):
        optimizer = optimizer.base if isinstance(optimizer, LazyOptimizer) else optimizer.optimizer
    return optimizer


_PLAIN_LOSSES = {("transformers", "Trainer"), ("trl", "SFTTrainer"), ("axolotl", "AxolotlTrainer")}
"""Classes whose `compute_loss` is the model's own loss, unless an option says otherwise: package and name."""
_LANGUAGE_MODELS = ("ForCausalLM", "LMHeadModel", "ForMaskedLM", "ForConditionalGeneration")


def _own_losses(trainer: TrainerLike) -> list[str]:
    """Return the classes of a trainer that compute a loss of their own, not the model's."""
    owners = [owner for owner in type(trainer).__mro__ if "compute_loss" in vars(owner)]
    packages = {owner: owner.__module__.partition(".")[0] for owner in owners}
    own = [o for o in owners if packages[o] != "hf_hybrid" and (packages[o], o.__name__) not in _PLAIN_LOSSES]
    return [owner.__name__ for owner in own]


def unknown_loss(trainer: TrainerLike) -> str | None:
    """Return that the training loss may not be the cross-entropy over the vocabulary, if so."""
    args, model = trainer.args, trainer.accelerator.unwrap_model(trainer.model)
    model = model.get_base_model() if hasattr(model, "get_base_model") else model  # inside PEFT's
    unknown = _own_losses(trainer)
    computes = next(owner.__name__ for owner in type(model).__mro__ if "forward" in vars(owner))
    known = {name for names in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values() for name in _as_tuple(names)}
    if trainer.compute_loss_func is not None:
        what = "`compute_loss_func`"
    elif args.label_smoothing_factor > 0:
        what = f"`label_smoothing_factor={args.label_smoothing_factor}`"
    elif (kind := getattr(args, "loss_type", None)) not in (None, "nll", "chunked_nll"):
        what = f"`loss_type={kind}`"
    elif unknown:
        what = f"`{unknown[0]}.compute_loss`"
    elif "_loss_function" in vars(model):
        what = "the model's `loss_function`"
    elif computes not in known and not computes.endswith(_LANGUAGE_MODELS):
        what = f"`{computes}`"
    elif vocabulary_size(model) is None:
        what = "a model whose vocabulary has no known size"
    else:
        return None
    return f"the loss of {what} is not known to be the plain cross-entropy"


def _as_tuple(names: str | tuple[str, ...]) -> tuple[str, ...]:
    return (names,) if isinstance(names, str) else tuple(names)


def vocabulary_size(model: torch.nn.Module) -> int | None:
    """Return the length of a model's vocabulary, if its config has it."""
    config = getattr(model, "config", None)
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    return getattr(config, "vocab_size", None)


def pretrained_below(trainer: TrainerLike) -> float:
    """
    Return the first training loss below which the model counts as pretrained and no leaps are made; 0 if they are made
    in any case.
    """
    words = vocabulary_size(trainer.accelerator.unwrap_model(trainer.model))
    return PRETRAINED_SHARE * math.log(words) if words and leaps_are_automatic(trainer) else 0.0


def chosen_direction(trainer: TrainerLike) -> DirectionFactory:
    """Return the user's own direction, or else the direction that the options name."""
    name = trainer.hybrid_args.direction
    return trainer.custom_direction or DIRECTIONS["orthogonal" if name == "auto" else name]


def direction_of(trainer: TrainerLike, matrices: Collection[str]) -> DirectionFactory:
    """
    Return the chosen direction, if it suits the parameters and the optimizer.

    `gradient_memory` takes the place of `orthogonal` where nothing can be orthogonalised: no hidden matrices are
    trained, or no learning rate of the optimizer is of Adam's scale.
    """
    chosen = chosen_direction(trainer)
    suits = matrices and any(Orthogonal.suits(group) for group in trainer.optimizer.param_groups)
    return GradientMemory if chosen is Orthogonal and not suits else chosen


def unwrapped_optimizer(trainer: TrainerLike) -> torch.optim.Optimizer:
    """
    Return the optimizer inside accelerate's wrapper and inside all wrappers of the user.

    Raises:
        LeapObstacleError: If it, or a wrapper of the user's, keeps weights for training and others for evaluation.
    """
    optimizer = trainer.optimizer
    while True:
        switches = all(callable(getattr(optimizer, name, None)) for name in ("train", "eval"))
        if switches and not isinstance(optimizer, AcceleratedOptimizer):  # which passes both on to what it wraps
            raise LeapObstacleError(
                f"`{type(optimizer).__name__}` keeps two sets of weights, which its `train` and `eval` exchange "
                "(Schedule-Free), and a leap would move one of them without the other.",
                "Choose another optimizer, for example `optim=adamw_torch_fused`.",
            )
        if getattr(optimizer, "optimizer", None) is None:
            return optimizer
        optimizer = optimizer.optimizer


def _probe(trainer: TrainerLike, feed: BatchFeed) -> Probe:
    args, options, processes = trainer.args, trainer.hybrid_args, trainer.accelerator.num_processes
    losses = trainer.sequence_losses(trainer)
    per_step = trainer._train_batch_size * args.gradient_accumulation_steps * processes
    # Four evaluations must fit the budget of the whole run, or a short run could not probe twice.
    affordable = int(3 * per_step * options.probe_budget * trainer.state.max_steps / 4)
    wanted = trainer.probe_sequences or max(min(PROBE_SEQUENCES, affordable), MIN_SEQUENCES)
    if trainer.probe_dataset is not None:
        source = HeldOutBatches(_held_out(trainer, losses, per_step), wanted=wanted)
        wanted = max(source.wanted, max(batch.sequences for batch in source.batches))
    else:
        source = NextBatches(
            feed.peek,
            wanted=wanted,
            size=losses.size,
            cut=functools.partial(first_part, blocks=trainer.recovery.blocks),
            accumulation=args.gradient_accumulation_steps,
            processes=processes,
        )
    evaluate = losses
    for part in trainer.parts:
        evaluate = part.probe_losses(evaluate)
    return Probe(source, evaluate, price=wanted / (3.0 * per_step))


def _held_out(trainer: TrainerLike, losses: SequenceLosses, per_step: int) -> list[ProbeBatch]:
    """Return the batches of `probe_dataset`; `per_step` is the number of sequences of a step."""
    batches, processes = losses.held_out(), trainer.accelerator.num_processes
    sizes = [losses.size(batch) * processes for batch in batches]
    if processes > 1 and hasattr(trainer.probe_dataset, "__len__"):
        # Processes fill up the last batch with the first sequences, which must not count twice.
        sizes[-1] -= max(sum(sizes) - len(trainer.probe_dataset), 0)
    if sum(sizes) < MIN_SEQUENCES:
        raise ValueError(
            f"`probe_dataset` gave {sum(sizes)} sequences; at least {MIN_SEQUENCES} are needed to verify a leap. Pass "
            "more, lower `per_device_eval_batch_size` if `dataloader_drop_last` dropped them, or leave it out."
        )
    labels = [batch.get("labels") for batch in batches if hasattr(batch, "get")]
    if labels and all(torch.is_tensor(label) and not label.ne(-100).any() for label in labels):
        raise ValueError(
            "Every label of `probe_dataset` is -100, so that no loss could tell whether a leap helps. Pass sequences "
            "with labels, or leave it out: leaps are then verified on the next training batches."
        )
    return [ProbeBatch(batch, size, size / (3.0 * per_step)) for batch, size in zip(batches, sizes)]


# The optimizer.


def makes_muon(trainer: TrainerLike) -> bool:
    """Whether `optim=muon` is used and no optimizer was passed."""
    given = trainer.optimizer is not None or trainer.optimizer_cls_and_kwargs is not None
    return trainer.args.optim == "muon" and not given


def leave_adapters_to_adamw(trainer: TrainerLike) -> None:
    """
    Undo the choice of Muon by `preset="fast"` where adapters are trained, unless the user wrote an option of Muon.

    Muon ends no lower than AdamW there, and its best learning rate is not a fixed multiple of AdamW's
    (docs/evaluation/rates.md, "`fast` with adapters").
    """
    options = trainer.hybrid_args
    if options.preset != "fast" or not makes_muon(trainer) or not has_adapters(trainer.model):
        return
    if not any(was_given(trainer.args, name) for name in ("optim", "muon_momentum")):
        trainer.args.optim = OptimizerNames(optimizer_name(TrainingArguments))
        logger.warning("`preset=fast` trains adapters by AdamW: Muon gains nothing there. For Muon, set `optim=muon`.")


def build_optimizer(trainer: TrainerLike, model: torch.nn.Module) -> None:
    """Make the optimizers that Trainer cannot make: Muon, and AdamW with 8-bit states."""
    args, options = trainer.args, trainer.hybrid_args
    betas = (args.adam_beta1, args.adam_beta2)
    if options.optimizer_states == "8bit" and trainer.optimizer is None:
        from hf_hybrid.streaming.low_bit import AdamW8bit

        values = {"lr": args.learning_rate, "betas": betas, "eps": args.adam_epsilon, "seed": args.seed}
        trainer.optimizer_cls_and_kwargs = (AdamW8bit, values)
    if makes_muon(trainer):
        common = {"lr": args.learning_rate, "weight_decay": args.weight_decay}
        decay_names = trainer.get_decay_parameter_names(model)
        groups = muon_groups(model, decay_names, **common)
        momentum = options.preset_value("muon_momentum")
        trainer.optimizer = MuonAdamW(groups, **common, betas=betas, eps=args.adam_epsilon, momentum=momentum)


def share_optimizer(trainer: TrainerLike) -> None:
    """Let Muon orthogonalise matrices together with other processes where FSDP2 has spread the weights over them."""
    optimizer = getattr(trainer.optimizer, "optimizer", trainer.optimizer)  # inside accelerate's wrapper
    if trainer.is_fsdp_enabled and isinstance(optimizer, MuonAdamW):
        matrices = [p for group in optimizer.param_groups if group["algorithm"] == "muon" for p in group["params"]]
        shards = shards_of(matrices)
        if isinstance(shards, Shards) and shards.processes > 1:
            optimizer.share(shards.in_rounds)


# Where weights live.


def build_memory(trainer: TrainerLike, device_map: dict | None) -> Resident:
    """Decide where the weights live. They are streamed if they do not fit or if the options ask for it."""
    options, model = trainer.hybrid_args, trainer.model
    if device_map is None:
        device_map = _map_with_host_layers(model)
    if any(hasattr(module, "_hf_hook") for module in model.modules()):
        remove_hook_from_submodules(model)  # accelerate's hooks of an offloaded model train nothing
        model.tie_weights()  # ty: ignore[not-callable]  # they come back as one copy each
    if trainer.optimizer is not None:
        try:
            check_separable(trainer.optimizer)
        except UnsupportedOptimizerError as error:
            nearest = "Nearest plan that works: no `optimizers`, and `optim=adamw_torch_fused`."
            raise refuse(str(error), _shape(model, device_map), nearest) from None
    plan = make_plan(trainer, device_map)
    logger.info("Memory plan: %s", plan.describe())
    if plan.mode == "resident":
        return Resident(plan.buffers_on_host)
    streamer = LayerStreamer(
        model,
        _layers(model, device_map),
        embeddings_and_head(model) if plan.stream_embeddings else (),
        device=trainer.args.device,
        ahead=plan.setup.prefetch_layers,
        resident=plan.resident_layers,
        dtype_of=_working_dtypes(model, trainer.args.bf16),
        int8=plan.setup.base_precision == "int8",
    )
    obstacle = _obstacle_to_walking(model)
    window = Window(streamer, options.accumulation_walk, park=options.offload_activations, obstacle=obstacle)
    on_device = plan.setup.optimizer_states == "8bit"
    return Streamed(model, streamer, window, plan, steps_on_device=on_device, host_memory=host_memory)


def _map_with_host_layers(model: torch.nn.Module) -> dict | None:
    """Return the device map that a model was loaded with, if it keeps layers on the host."""
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
    rounded = rounded_by_autocast(model) if bf16 else ()
    return lambda parameter: torch.bfloat16 if id(parameter) in rounded else parameter.dtype


def make_plan(trainer: TrainerLike, device_map: dict | None) -> Plan:
    """
    Plan which parts of the trainer's model are streamed, within its budgets.

    Raises:
        PlanError: If nothing fits. The message has the bytes and the nearest plan that works.
    """
    estimator, setup = _estimator(trainer, device_map)
    return estimator.plan(setup)


def _estimator(trainer: TrainerLike, device_map: dict | None) -> tuple[Estimator, Setup]:
    args, options, model = trainer.args, trainer.hybrid_args, trainer.model
    hidden, muon = split_parameters(model)[0].values(), args.optim == "muon"
    direction = direction_class(chosen_direction(trainer))
    orthogonalises = muon or issubclass(direction, Orthogonal)
    shape = _shape(model, device_map, muon=hidden if muon else (), leaps=hidden if orthogonalises else ())
    on_gpu = args.device.type != "cpu"  # of any kind: all are planned by the rules of CUDA
    vram, ram = (
        None if gib is None else int(gib * 2**30) for gib in (options.vram_budget_gib, options.host_budget_gib)
    )
    remembers = why_no_leaps(trainer) is None or _searches_rate(trainer)  # which may ask for its average
    held = int(shape.total.bytes((shape.trainable_bytes, shape.element_bytes)))  # lies on the host already
    pays = options.memory != "off" and shape.vocab >= BIG_VOCABULARY
    chunks = options.chunked_loss == "on" or (options.chunked_loss == "auto" and pays)
    chunks = chunks or bool(on_gpu and trainer.more_inputs)  # TRL's kernels hold about as much
    most = len(shape.layers)  # more could not be kept or fetched, and each takes a buffer
    setup = Setup(
        sequence_length=sequence_length(trainer),
        batch_size=args.per_device_train_batch_size,
        gradient_accumulation_steps=args.gradient_accumulation_steps,
        vram=with_context(device_memory(args.device)) if vram is None and on_gpu else vram,
        ram=host_memory() + held if ram is None else ram,
        accelerator="cuda" if on_gpu else "cpu",
        workspace=workspace_bytes(args.device if on_gpu else None),
        memory="stream" if device_map is not None else options.memory,
        autocast=args.bf16,
        activation_checkpointing=_checkpointing(args),
        offload_activations=options.offload_activations,
        chunked_loss=chunks and ChunkedCausalLoss.unsupported_reason(model) is None,
        optimizer_states=options.optimizer_states,
        states_per_weight=STATES_PER_WEIGHT.get(optimizer_name(args), 2),
        base_precision=options.base_precision,
        resident_layers=None if options.resident_layers is None else min(options.resident_layers, most),
        accumulation_walk=options.accumulation_walk,
        enable_predict=trainer.has_phases,
        values_per_weight=direction.values_per_weight if remembers else None,
        **options.plan_values,
    )
    setup = dataclasses.replace(setup, prefetch_layers=min(setup.prefetch_layers, most))
    return Estimator(shape, Tracer.of(model, **trainer.more_inputs)), setup


def _checkpointing(args: TrainingArguments) -> bool | str:
    """Return whether activations are checkpointed: a truth value, or `auto`."""
    given = getattr(args, checkpointing_option())
    return given if given == "auto" else bool(given)


def fewest_recomputed_layers(trainer: TrainerLike) -> int | None:
    """Return how many layers have to be recomputed so that a step fits on its device; `None`: not known, so all."""
    args, options, model = trainer.args, trainer.hybrid_args, trainer.model
    if (why := _why_all_are_recomputed(trainer)) is not None:
        logger.info("`activation_checkpointing=auto` recomputes all layers: %s.", why)
        return None
    estimator, setup = _estimator(trainer, None)
    held = sum(t.nbytes for t in (*model.parameters(), *model.buffers()) if t.device.type == args.device.type)
    if options.vram_budget_gib is None:  # what is free, beside the model; on a CPU other processes want some of it
        free = HOST_SHARE * host_memory() if setup.vram is None else setup.vram
        setup = dataclasses.replace(setup, vram=int(free) + held)
    buckets = (args.world_size > 1) * sum(p.nbytes for p in model.parameters() if p.requires_grad)  # of DDP
    if leaps_are_automatic(trainer) and getattr(model, "name_or_path", "") and not _searches_rate(trainer):
        setup = dataclasses.replace(setup, values_per_weight=None)  # a pretrained model makes no leaps
    length = sequence_length(trainer, SAMPLED_LENGTHS)
    vram = max((setup.vram or 0) - buckets, 1)
    vram = vram if setup.accelerator == "cuda" else int(vram / (1 + MARGIN))  # there the plan leaves it
    plan = estimator.lightest(dataclasses.replace(setup, memory="off", sequence_length=length, vram=vram))
    found = torch.tensor(plan.recomputed_layers, device=args.device)
    return int(trainer.accelerator.gather(found).max())


def _why_all_are_recomputed(trainer: TrainerLike) -> str | None:
    if trainer.hybrid_args.offload_activations:
        return "`offload_activations=True` keeps what they leave on the host"
    if (sharding := sharding_of(trainer.args)) is not None:
        return f"`{sharding}` divides the weights"
    if trainer.args.n_gpu > 1:
        return "`DataParallel` divides each batch"
    try:
        find_layers(trainer.model)
    except NoLayerListError:
        return f"`{type(trainer.model).__name__}` has no list of decoder layers"
    return unknown_loss(trainer)


def sequence_length(trainer: TrainerLike, most: int = 16) -> int:
    """Return the longest of some training sequences. If they cannot be read, 1024 or the model's maximum."""
    data: Any = trainer.train_dataset
    try:
        first = range(0, len(data), max(len(data) // most, 1) if most > 16 else 1)
        return max(len(data[index]["input_ids"]) for index in first[:most])
    except (TypeError, KeyError, IndexError, ValueError):
        config = getattr(trainer.model, "config", None)
        return min(getattr(config, "max_position_embeddings", None) or 1024, 1024)


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


def check_streamable(args, model: torch.nn.Module, device_map: dict | None) -> None:
    """
    Refuse options that streaming cannot be combined with, before anything is built.

    Raises:
        ValueError: The message names the option to change, or has the model's bytes and the nearest plan that works.
    """
    why = None
    if args.device.type != "cpu" and not copies_beside(args.device):
        why = (
            f"`{args.device.type}` has no streams beside the one that computes and reads no page-locked memory, so the "
            "device would stand still while layers travel. Use a device of CUDA, ROCm or XPU, or `use_cpu=True`"
        )
    elif mixed_precision_of(args) == "fp16":
        why = "`fp16=True` scales losses, and streamed gradients leave before they are unscaled. Use `bf16=True`"
    elif sharding_of(args):
        why = f"`{sharding_of(args)}` places the weights itself. Drop it"
    elif any(getattr(parameter, "device_mesh", None) is not None for parameter in model.parameters()):
        why = "the model is spread over processes already. Load it without `tp_plan` and `distributed_config`"
    elif args.world_size > 1:
        why = (
            f"there are {args.world_size} processes, and streaming is for one: each would hold all on the host. "
            "Launch one process, or let FSDP2 spread the weights over them (`fsdp=True`, with `cpu_offload` in "
            "`fsdp_config` if they do not fit), which keeps one copy on the host"
        )
    elif args.torch_compile:
        why = "`torch_compile=True` would compile placeholders. Drop it"
    elif args.bf16_full_eval or args.fp16_full_eval:
        why = "`bf16_full_eval` and `fp16_full_eval` cast the whole model. Drop them"
    if why is not None:
        raise ValueError(f"`memory={args.memory}` cannot be used here: {why}, or set `memory=off`.")
    optim = optimizer_name(args)
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
    trains_quantised = getattr(model, "is_quantized", False) and not has_adapters(model)
    trains_quantised &= not getattr(getattr(model, "hf_quantizer", None), "is_qat_trainable", False)
    if trains_quantised:
        raise refuse(
            "The model is quantised and has no adapters: its weights cannot be trained.",
            _shape(model, device_map),
            "Nearest that works: add LoRA adapters with peft; or load it unquantised and set `optimizer_states=8bit`.",
        )


def adapter_parts(trainer: TrainerLike) -> list[Part]:
    """Return the parts that leave out casts of adapters and of the weights below them, idle under bf16 autocast."""
    room = "integrations.adapters"
    idle = trainer.hybrid_args.enable_predict and trainer.accelerator.mixed_precision == "bf16"
    if not idle or not has_adapters(trainer.model) or not has_room(room):
        return []
    return load_room(room, "bf16=True").cast_parts(trainer)


def print_parts(trainer: TrainerLike) -> list[Part]:
    """Return the part that compares a resumed run with its checkpoint, and the one that makes digests of the run."""
    if not has_room("prints.fingerprint"):
        return []
    every = trainer.hybrid_args.digest_steps
    digests = [] if every == 0 else [load_room("prints.digests", "digest_steps").Digests(trainer, every)]
    return [load_room("prints.fingerprint", "resume_from_checkpoint").Fingerprint(trainer), *digests]


def rows_part(trainer: TrainerLike) -> Part | None:
    """Return the part that computes windows as trees, if the options ask for it."""
    options, room = trainer.hybrid_args, "rows.windows"
    automatic = options.share_rows == "auto"
    if options.share_rows == "off" or (automatic and not (options.enable_predict and has_room(room))):
        return None
    return load_room(room, "share_rows=on").SharedWindows(trainer, why_plain_rows(trainer))


def why_plain_rows(trainer: TrainerLike) -> str | None:
    """Return why windows stay as Trainer makes them, as far as that is known of the trainer and its options."""
    args = trainer.args
    if trainer.compute_loss_func is not None:
        return "`compute_loss_func` reads logits of padded rows"
    if args.label_smoothing_factor:
        return f"`label_smoothing_factor={args.label_smoothing_factor}` reads logits of padded rows"
    if own := _own_losses(trainer):
        return f"`{own[0]}.compute_loss` may read more than the loss"
    if args.torch_compile:
        return "`torch_compile=True` would compile anew for each tree"
    if (sharding := sharding_of(args)) is not None and not shards_by_fsdp2(args):
        return f"`{sharding}` is not known to take windows in which processes agree on micro-batches"
    if args.n_gpu > 1:
        return "`DataParallel` divides each batch over several GPUs"
    if args.neftune_noise_alpha is not None:
        return f"`neftune_noise_alpha={args.neftune_noise_alpha}` scales its noise by the length of a padded row"
    return None


def phase_memory_parts(trainer: TrainerLike) -> list[Part]:
    """Build the parts that change memory by phase, for models that are not streamed."""
    options, parts = trainer.hybrid_args, []
    if trainer.memory.streams:
        return parts
    automatic = _checkpointing(trainer.args) == "auto" and trainer.train_dataset is not None
    if options.checkpoint_phases is not None or options.offload_activations or automatic:
        phases = (options.checkpoint_phases or "warmup,full,correct").replace(" ", "").split(",")
        asked = "offload_activations" if options.offload_activations else "activation_checkpointing=auto"
        room = load_room("phase_memory.activations", "checkpoint_phases" if options.checkpoint_phases else asked)
        layers = fewest_recomputed_layers(trainer) if automatic else None
        if layers is not None or options.checkpoint_phases is not None or options.offload_activations:
            parts.append(room.ActivationCheckpointing(phases, offload=options.offload_activations, layers=layers))
    if options.weight_precision is not None or options.predict_states != "stay":
        asked = f"weight_precision={options.weight_precision}, predict_states={options.predict_states}"
        room = load_room("phase_memory.precision", asked)
        autocast = {"bf16": "bf16", "fp16": "fp16"}.get(trainer.accelerator.mixed_precision)
        part = room.PhaseMemory(options.weight_precision or "auto", options.predict_states, autocast=autocast)
        part.check(trainer.model)
        parts.append(part)
    return parts
