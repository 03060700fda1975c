"""Turns options and a Trainer that is ready to run into the parts of the prediction engine, which take plain values."""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path

import torch
from accelerate.optimizer import AcceleratedOptimizer

from hf_hybrid.config import leap_memory_steps, phase_lengths, rescue_is_on
from hf_hybrid.leaps.directions import DIRECTIONS, GradientMemory, Orthogonal
from hf_hybrid.leaps.directions.base import DirectionFactory, direction_class
from hf_hybrid.leaps.divergence import DivergenceMonitor
from hf_hybrid.leaps.engine import PredictionEngine
from hf_hybrid.leaps.gains import BanditGain, GainPlanner, WindowCounter
from hf_hybrid.leaps.leaps import LeapPlanner
from hf_hybrid.leaps.record import RunRecord
from hf_hybrid.leaps.rescue import LearningRateRescue
from hf_hybrid.leaps.signals import SignalObserver
from hf_hybrid.leaps.trajectory import Trajectory
from hf_hybrid.leaps.verifier import HeldOutProbe
from hf_hybrid.optimizers import split_parameters
from hf_hybrid.phases import PhaseController

WINDOW_STEPS, MOST_WINDOWS = 10, 300
"""Real steps that planners learn from at a time, and about how many such windows a run has at most."""
START_WEIGHTS = Path(__file__).parent / "world_model" / "rssm_start.safetensors"


def build_engine(trainer) -> PredictionEngine:
    """
    Build the engine for the run that `trainer` is about to start.

    Raises:
        ValueError: If the held-out set gives fewer than two sequences.
    """
    args, options, max_steps = trainer.args, trainer.hybrid_args, trainer.state.max_steps
    rescue = rescue_is_on(args, options)
    trajectory, stride = _trajectory(trainer), max(WINDOW_STEPS, max_steps // MOST_WINDOWS)
    return PredictionEngine(
        controller=PhaseController(phase_lengths(options, max_steps), options.preset_value("confidence_threshold")),
        trajectory=trajectory,
        planner=LeapPlanner(
            gains=_gain_planner(trainer, stride, trajectory),
            probe_budget=options.probe_budget,
            max_steps=max_steps,
            z=2.0,
            margin=1.0,
            extend=False,
        ),
        monitor=DivergenceMonitor(
            options.preset_value("divergence_threshold"), explosion_factor=100.0, max_bad_steps=options.max_bad_steps
        ),
        signals=SignalObserver(),
        probe=_probe(trainer),
        rescue=LearningRateRescue(max_scale=512.0, max_steps=max_steps) if rescue else None,
        tail=None,
        windows=WindowCounter(stride),
        leap_budget=options.leap_budget,
        correct_gain=options.correct_gain,
        record=RunRecord(),
        max_steps=max_steps,
        max_grad_norm=args.max_grad_norm,
        on_phase_change=lambda old, new: trainer.plugins.call("on_phase_change", old, new),
    )


def _gain_planner(trainer, stride: int, trajectory: Trajectory) -> GainPlanner:
    options, max_steps = trainer.hybrid_args, trainer.state.max_steps
    direction = trajectory.direction
    values = (options.final_gain(direction.gain), direction.gain_power, options.preset_value("leap_worth"))
    if options.planner == "dynamics":
        from hf_hybrid.world_model.dynamics import DynamicsModel
        from hf_hybrid.world_model.imagination import ImaginedGain

        if not START_WEIGHTS.is_file():
            raise ValueError(
                f"`planner` is 'dynamics', whose world model starts from weights that are not at {START_WEIGHTS}: the "
                "installation is incomplete. Install hf_hybrid anew, or set `planner='schedule'`."
            )
        dynamics = DynamicsModel(START_WEIGHTS, device=trainer.args.device, seed=trainer.args.seed)
        return ImaginedGain(
            *values, dynamics=dynamics, rate_at=scheduled_rate(trainer), window_share=stride / max_steps
        )
    return {"schedule": GainPlanner, "bandit": BanditGain}[options.planner](*values)


def scheduled_rate(trainer) -> Callable[[float], float]:
    """
    Learning rate at a progress of the run over its peak, as the scheduler will have it.

    Schedulers that are no function of the step alone are taken to fall to zero in a straight line.
    """
    max_steps = trainer.state.max_steps
    scheduler = getattr(trainer.lr_scheduler, "scheduler", trainer.lr_scheduler)
    functions = getattr(scheduler, "lr_lambdas", None)
    if not functions:
        return lambda progress: 1.0 - progress
    peak = max(functions[0](round(step * max_steps / 100)) for step in range(101))
    return lambda progress: functions[0](round(progress * max_steps)) / peak if peak > 0 else 0.0


def direction_of(trainer, matrices: Collection[str]) -> DirectionFactory:
    """
    The user's own direction, else the one that the options name.

    `gradient_memory` takes the place of `orthogonal` where nothing can be orthogonalised: no hidden matrices are
    trained, or no learning rate of the optimizer is of Adam's scale.
    """
    if trainer.custom_direction is not None:
        return trainer.custom_direction
    chosen = DIRECTIONS[trainer.hybrid_args.direction]
    suits = matrices and any(Orthogonal.suits(group) for group in trainer.optimizer.param_groups)
    return GradientMemory if chosen is Orthogonal and not suits else chosen


def _unwrapped_optimizer(trainer) -> torch.optim.Optimizer:
    """
    The optimizer inside accelerate's wrapper, and inside any of the user's.

    Raises:
        ValueError: If it, or a wrapper of the user's, keeps weights for training and others for evaluation.
    """
    optimizer = trainer.optimizer
    while True:
        switches = all(callable(getattr(optimizer, name, None)) for name in ("train", "eval"))
        if switches and not isinstance(optimizer, AcceleratedOptimizer):  # which passes both on to what it wraps
            raise ValueError(
                f"`{type(optimizer).__name__}` keeps two sets of weights, which its `train` and `eval` exchange "
                "(Schedule-Free), and a leap would move one of them without the other. Choose another optimizer, for "
                "example `optim=adamw_torch_fused`. Or set `enable_predict=False` to train exactly as "
                "`transformers.Trainer` does."
            )
        if getattr(optimizer, "optimizer", None) is None:
            return optimizer
        optimizer = optimizer.optimizer


def _trajectory(trainer) -> Trajectory:
    options, streaming = trainer.hybrid_args, trainer.streaming
    model = trainer.accelerator.unwrap_model(trainer.model)
    parameters = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    if streaming is not None:
        parameters = [(name, streaming.streamer.counterpart(parameter)) for name, parameter in parameters]
    matrices = frozenset(split_parameters(trainer.model)[0])
    direction = direction_of(trainer, matrices)
    trajectory = Trajectory(
        parameters,
        _unwrapped_optimizer(trainer),
        direction=direction,
        matrices=matrices,
        memory_steps=leap_memory_steps(options, trainer.state.max_steps, direction_class(direction).memory_steps),
        max_relative_norm=0.5,
        host=options.buffers_device == "cpu",
        store=streaming,
    )
    if streaming is not None:
        streaming.streamer.overlay = trajectory.displaced
    return trajectory


def _probe(trainer) -> HeldOutProbe:
    args, options = trainer.args, trainer.hybrid_args
    losses = trainer.sequence_losses(trainer, trainer.plugins)
    batches = losses.batches()
    processes = trainer.accelerator.num_processes
    sizes = [losses.size(batch) * processes for batch in batches]
    if processes > 1 and hasattr(trainer.probe_dataset, "__len__"):
        # Processes fill up the last batch with the first sequences, which must not count twice.
        sizes[-1] -= max(sum(sizes) - len(trainer.probe_dataset), 0)
    if sum(sizes) < 2:
        raise ValueError(
            f"`probe_dataset` gave {sum(sizes)} sequences; at least 2 are needed to verify a leap. Pass more, lower "
            "`per_device_eval_batch_size` if `dataloader_drop_last` dropped them, or set `enable_predict=False`."
        )
    per_step = trainer._train_batch_size * args.gradient_accumulation_steps * processes
    evaluate = losses
    for plugin in trainer.plugins.plugins:
        evaluate = plugin.probe_losses(evaluate)
    # Four evaluations must fit the budget of the whole run, or a short run could not afford to look twice.
    affordable = int(3 * per_step * options.probe_budget * trainer.state.max_steps / 4)
    return HeldOutProbe(
        batches,
        evaluate,
        sizes=sizes,
        sequences_per_probe=options.probe_batch_size or max(min(8, affordable), 2),
        sequences_per_step=per_step,
    )
