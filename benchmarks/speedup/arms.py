"""
What is compared: trainers, directions, planners, controls and peers.

`results.jsonl` also has runs of arms that are no longer here, because the options that they tried are gone:
`planner-fixed` (the mean gain of the schedule throughout), `line-search` (a line search along the drift alone),
`tail-average` and `hybrid-tail` (the mean of the weights of the last tenth of a run, if the probe set prefers it),
`search` (the learning rate of adapters was searched during the run) and `rule` (it was set to that of `adapter_rate`,
which `rate_used` has, before `hybrid` did so). In the first four leaps were verified on 64 held-out sequences, except
where `"benchmark": "probes"` compares the two. And because they lost to `drift`: `linear`, `snoo`, `rre` and `nino`
(published predictors of weights) and `shuffled` (a control: lines through a shuffled history). `pair-steps` and its
control `pair-adam` stepped on the products of LoRA's pairs, which gained nothing.
"""

from __future__ import annotations

import importlib
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from benchmarks.speedup.tasks import Task, training_arguments


@dataclass(frozen=True)
class Arm:
    """
    One way to train.

    Args:
        name (`str`), about (`str`): For tables.
        config (`dict`, *optional*): Options of `HybridConfig`; `None` for plain `Trainer`.
        arguments (`dict`): Options of `TrainingArguments` that differ from the task's.
        optimizer (`Callable`, *optional*): From trainable parameters, learning rate and steps to an optimizer.
        direction (`Callable`, *optional*): Returns a direction that is not part of the package.
        rate_of (`str`): Where the search for the learning rate begins: at the best of `"adamw"`, or with `"one"` at 1.
        lora (`bool`): Whether it makes sense only for tasks that train adapters.
        probe_set (`bool`): Verify leaps on 64 held-out sequences in place of the next training batches.
    """

    name: str
    about: str
    config: dict | None = None
    arguments: dict = field(default_factory=dict)
    optimizer: Callable | None = None
    direction: Callable | None = None
    rate_of: str = "adamw"
    lora: bool = False
    probe_set: bool = False


def _prodigy(parameters, rate, steps):
    from prodigyopt import Prodigy

    options = {"use_bias_correction": True, "safeguard_warmup": True}
    return Prodigy(parameters, lr=rate, betas=(0.9, 0.99), weight_decay=0.1, **options)


def _ademamix(parameters, rate, steps):
    from pytorch_optimizer import AdEMAMix

    slow = 1.0 - 6.0 / steps  # the memory of gradient_memory: a sixth of the run
    options = {"alpha": 5.0, "t_alpha_beta3": steps, "weight_decay": 0.1, "weight_decouple": True}
    return AdEMAMix(parameters, lr=rate, betas=(0.9, 0.95, slow), **options)


def _direction(module: str, name: str) -> Callable:
    """Imports a direction when a run needs it: the process that schedules runs does without torch."""
    return lambda: getattr(importlib.import_module(f"benchmarks.speedup.{module}"), name)


ARMS = {
    arm.name: arm
    for arm in (
        Arm("adamw", "plain Trainer"),
        Arm("hybrid", "HybridTrainer as it comes", {}),
        Arm("held_out", "HybridTrainer with a `probe_dataset`", {}, probe_set=True),
        Arm("muon", "plain Trainer with Muon", {"enable_predict": False, "optim": "muon"}),
        Arm("fast", "preset fast", {"preset": "fast"}),
        Arm("fast-muon", "the same with Muon for adapters too", {"preset": "fast", "muon_momentum": 0.85}, lora=True),
        # AdamW's own momentum is too long for these short runs: a shorter one on both sides.
        Arm("beta1-0.7", "plain Trainer, adam_beta1=0.7", arguments={"adam_beta1": 0.7}),
        Arm("hybrid-beta1-0.7", "HybridTrainer, adam_beta1=0.7", {}, arguments={"adam_beta1": 0.7}),
        # Directions.
        Arm("none", "control: predicted steps do nothing", {"direction": "none"}),
        Arm("orthogonal", "leaps along orthogonalised gradients", {"direction": "orthogonal"}),
        Arm(
            "orthogonal-often",
            "the same as often as with large batches, whatever their arithmetic costs",
            {"direction": "orthogonal", "leap_budget": 100.0},
        ),
        Arm("gradient_memory", "leaps along gradient memory", {"direction": "gradient_memory"}),
        Arm("drift", "leaps along the drift", {}, direction=_direction("drift", "Drift")),
        # The planner.
        Arm("planner-dynamics", "gain by imagination", {"planner": "dynamics"}),
        # Controls.
        Arm(
            "random", "control: random direction of equal norm", {}, direction=_direction("controls", "RandomDirection")
        ),
        # Peers.
        Arm("prodigy", "Prodigy", optimizer=_prodigy, rate_of="one"),
        Arm(
            "schedule-free",
            "Schedule-Free AdamW",
            arguments={"optim": "schedule_free_adamw", "lr_scheduler_type": "constant_with_warmup"},
        ),
        Arm("ademamix", "AdEMAMix", optimizer=_ademamix),
    )
}
KEPT = (
    *("rows", "rows_skipped", "tokens", "tokens_shared", "backward_passes_avoided_exactly"),
    *("steps", "real_steps", "predicted_steps", "leaps_by_verdict", "steps_by_phase", "seconds_by_phase"),
    *("backward_passes", "forward_only_passes", "backward_passes_avoided", "roll_backs"),
    *("probe_cost_steps", "leap_cost_steps", "optimizer_cost_steps", "divergence_events_seen", "divergence_events"),
    *("direction", "learning_rate_scale"),
)
"""Of a run's summary; the rest of it is long, and no table needs it."""
DEFAULT_ARMS = ("adamw", "hybrid", "fast", "none", "prodigy")
"""Arms of the tasks that start from the default learning rate."""


def train(arm: Arm, task: Task, sources, *, steps: int, rate: float, seed: int) -> dict:
    """
    Train once and evaluate. Returns the final loss, the seconds, and what was computed; for tasks that start from a
    pretrained model also what a token of other text costs before and after, the accuracy of preferences, or
    the reward.

    `sources` is a `TextAndModels`, or a `DocstringsAndSmolLM2` for pretrained tasks.
    """
    hybrid = arm.config is not None
    data, model = sources.split(task.text), sources.model(task, seed)
    kind, config_kind, common = sources.trainer(task, hybrid)
    common |= {"train_dataset": data["train"], "eval_dataset": data["test"]}
    found = {"other_loss_before": sources.other_loss(model)} if task.pretrained else {}
    with tempfile.TemporaryDirectory() as folder:
        values = training_arguments(task, steps=steps, rate=rate, seed=seed, folder=folder) | arm.arguments
        if arm.optimizer is not None:
            parameters = [p for p in model.parameters() if p.requires_grad]
            common["optimizers"] = (arm.optimizer(parameters, rate, steps), None)
        if hybrid:
            values |= arm.config
            values.setdefault("auto_lr", "off" if task.tuned is True else "on")
            if arm.direction is not None:
                common["direction"] = arm.direction()
            common["probe_dataset"] = data["probe"] if arm.probe_set else None
        trainer = kind(model, args=config_kind(**values), **common)
        started = time.process_time()
        seconds = trainer.train().metrics["train_runtime"]
        found |= {"seconds": seconds, "cpu_seconds": time.process_time() - started}
        if task.reward:
            found["reward"] = sources.reward(trainer.model, data["test"]["prompt"][:], sample=True)
            found["sampled_rewards"] = [line["reward"] for line in trainer.state.log_history if "reward" in line]
            measured = {"eval_loss": 1.0 - found["reward"]}
        else:
            measured = trainer.evaluate()
    if task.pretrained:
        found["other_loss"] = sources.other_loss(trainer.model)
    if task.preference:
        found["accuracy"] = measured["eval_rewards/accuracies"]
    summary = trainer.hybrid_summary() if hybrid else {}
    if not summary.get("steps"):
        summary |= {"backward_passes": steps, "probe_cost_steps": 0.0, "leap_cost_steps": 0.0}
    summary["optimizer_cost_steps"] = summary["backward_passes"] * muon_cost_steps(trainer, task)
    return {"eval_loss": measured["eval_loss"], **found, "summary": {k: summary[k] for k in KEPT if k in summary}}


def muon_cost_steps(trainer, task: Task) -> float:
    """Arithmetic of Muon's iteration over that of a step; 0 for other optimizers."""
    from hf_hybrid.optimizers import orthogonalisation_flops

    groups = trainer.optimizer.param_groups
    matrices = [p for group in groups if group.get("algorithm") == "muon" for p in group["params"]]
    weights = [(p.numel(), p.requires_grad) for p in trainer.model.parameters()]
    step = task.batch * task.sequence * sum(4 * count + 2 * count * trained for count, trained in weights)
    return sum(orthogonalisation_flops(p.shape) for p in matrices) / step
