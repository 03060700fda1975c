"""What is compared in benchmarks/acceleration.py: trainers, directions, planners, controls and peers."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from acceleration_tasks import BATCH, SEQUENCE, Task, TextAndModels, training_arguments

NINO = "nino_mlp.pt"
"""The published checkpoint, MIT licence, from github.com/SamsungSAILMontreal/nino; looked for in `--nino_folder`."""


@dataclass(frozen=True)
class Arm:
    """
    One way to train.

    Args:
        name (`str`), about (`str`): For tables.
        config (`dict`, *optional*): Options of `HybridConfig`; `None` for plain `Trainer`.
        arguments (`dict`): Options of `TrainingArguments` that differ from the task's.
        optimizer (`Callable`, *optional*): From trainable parameters, learning rate and steps to an optimizer.
        direction (`Callable`, *optional*): A direction of the benchmark's own.
        rate_of (`str`): Whose best learning rate the search begins at: `"adamw"`, `"muon"`, or `"one"` for 1.
        tail_average (`bool`): Evaluate the mean of the weights of the last tenth as well and keep the better by the
            probe set; plain `Trainer` only (`HybridConfig` has an option).
    """

    name: str
    about: str
    config: dict | None = None
    arguments: dict = field(default_factory=dict)
    optimizer: Callable | None = None
    direction: Callable | None = None
    rate_of: str = "adamw"
    tail_average: bool = False
    needs_nino: bool = False


def _prodigy(parameters, rate, steps):
    from prodigyopt import Prodigy

    options = {"use_bias_correction": True, "safeguard_warmup": True}
    return Prodigy(parameters, lr=rate, betas=(0.9, 0.99), weight_decay=0.1, **options)


def _ademamix(parameters, rate, steps):
    from pytorch_optimizer import AdEMAMix

    slow = 1.0 - 6.0 / steps  # the memory of gradient_memory: a sixth of the run
    options = {"alpha": 5.0, "t_alpha_beta3": steps, "weight_decay": 0.1, "weight_decouple": True}
    return AdEMAMix(parameters, lr=rate, betas=(0.9, 0.95, slow), **options)


def _random_direction(*args, **kwargs):
    from acceleration_controls import RandomDirection

    return RandomDirection(*args, **kwargs)


def _shuffled_history(*args, **kwargs):
    from acceleration_controls import ShuffledHistory

    return ShuffledHistory(*args, **kwargs)


_LINE_SEARCH = {"direction": "drift", "leap_gain": 0.25, "leap_worth": 0.0, "probe_budget": 0.1, "rollback_margin": 0.0}

_FIXED = {"direction": "gradient_memory", "planner": "fixed", "leap_gain": 4 / 3}
"""The mean gain of that direction's schedule; the default direction's schedule is constant already."""

ARMS = {
    arm.name: arm
    for arm in (
        Arm("adamw", "plain Trainer"),
        Arm("hybrid", "HybridTrainer as it comes", {}),
        Arm("muon", "plain Trainer with Muon", {"enable_predict": False, "optim": "muon"}, rate_of="muon"),
        Arm("fast", "preset fast", {"preset": "fast"}, rate_of="muon"),
        # AdamW's own momentum is too long for these short runs: a shorter one on both sides.
        Arm("beta1-0.7", "plain Trainer, adam_beta1=0.7", arguments={"adam_beta1": 0.7}),
        Arm("hybrid-beta1-0.7", "HybridTrainer, adam_beta1=0.7", {}, arguments={"adam_beta1": 0.7}),
        # Directions.
        Arm("none", "control: predicted steps do nothing", {"direction": "none"}),
        Arm("gradient_memory", "leaps along gradient memory", {"direction": "gradient_memory"}),
        Arm("drift", "leaps along the drift", {"direction": "drift"}),
        Arm("linear", "leaps along fitted lines", {"direction": "linear"}),
        Arm("snoo", "SNOO as leaps", {"direction": "snoo"}),
        Arm("rre", "reduced rank extrapolation", {"direction": "rre"}),
        Arm("nino", "the published nowcaster", {"direction": "nino"}, needs_nino=True),
        # Planners.
        Arm("planner-fixed", "gradient memory, the same gain throughout", _FIXED),
        Arm("planner-bandit", "gain by a contextual bandit", {"planner": "bandit"}),
        Arm("planner-dynamics", "gain by imagination", {"planner": "dynamics"}),
        # Controls.
        Arm("random", "control: random direction of equal norm", {}, direction=_random_direction),
        Arm("shuffled", "control: lines fitted to a shuffled history", {}, direction=_shuffled_history),
        Arm("line-search", "control: line search along the drift alone", _LINE_SEARCH),
        Arm("tail-average", "plain Trainer, tail average", tail_average=True),
        Arm("hybrid-tail", "HybridTrainer, tail average", {"tail_average": 0.1}),
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
DEFAULT_ARMS = ("adamw", "hybrid", "fast", "none", "prodigy")
"""Arms of the tasks that start from the default learning rate."""


class TailAverage:
    """A callback that averages the weights of the last tenth of the run, for the control arm of plain `Trainer`."""

    def __init__(self, steps: int):
        from transformers import TrainerCallback

        outer = self

        class Callback(TrainerCallback):
            def on_step_end(self, args, state, control, model=None, **kwargs):
                if state.global_step > 0.9 * steps:
                    outer.add(model)

        self.callback, self.mean, self.count = Callback(), None, 0

    def add(self, model) -> None:
        weights = [p.detach() for p in model.parameters() if p.requires_grad]
        self.count += 1
        if self.mean is None:
            self.mean = [w.clone() for w in weights]
        for mean, weight in zip(self.mean, weights):
            mean.lerp_(weight, 1.0 / self.count)

    def keep_the_better(self, trainer, probe) -> None:
        import torch

        parameters = [p for p in trainer.model.parameters() if p.requires_grad]
        own = [p.detach().clone() for p in parameters]
        before = trainer.evaluate(probe)["eval_loss"]
        with torch.no_grad():
            for parameter, mean in zip(parameters, self.mean):
                parameter.copy_(mean)
            if trainer.evaluate(probe)["eval_loss"] >= before:
                for parameter, weight in zip(parameters, own):
                    parameter.copy_(weight)


def train(
    arm: Arm, task: Task, sources: TextAndModels, *, steps: int, rate: float, seed: int, nino: str | None = None
) -> dict:
    """Train once and evaluate; what came of it, as JSON values."""
    import torch
    import transformers
    from transformers import Trainer, TrainingArguments

    import hf_hybrid

    data, model = sources.split(task.text), sources.model(task, seed)
    common = {"train_dataset": data["train"], "eval_dataset": data["test"]}
    with tempfile.TemporaryDirectory() as folder:
        values = training_arguments(task, steps=steps, rate=rate, seed=seed, folder=folder) | arm.arguments
        if arm.optimizer is not None:
            parameters = [p for p in model.parameters() if p.requires_grad]
            common["optimizers"] = (arm.optimizer(parameters, rate, steps), None)
        tail = TailAverage(steps) if arm.tail_average else None
        if arm.config is None:
            trainer = Trainer(model, TrainingArguments(**values), **common)
            if tail is not None:
                trainer.add_callback(tail.callback)
        else:
            config = dict(arm.config) | ({"nino_checkpoint": nino} if arm.needs_nino else {})
            if task.tuned is True:
                config.setdefault("lr_rescue", "off")
            if arm.direction is not None:
                common["direction"] = arm.direction
            args = hf_hybrid.HybridConfig(**(values | config))
            trainer = hf_hybrid.HybridTrainer(model, args, probe_dataset=data["probe"], **common)
        seconds = trainer.train().metrics["train_runtime"]
        if tail is not None:
            tail.keep_the_better(trainer, data["probe"])
        loss = trainer.evaluate()["eval_loss"]
    summary = trainer.hybrid_summary() if hasattr(trainer, "hybrid_summary") else {}
    if not summary.get("steps"):
        summary = {"backward_passes": steps, "probe_cost_steps": 0.0, "leap_cost_steps": 0.0}
    summary["optimizer_cost_steps"] = summary["backward_passes"] * muon_cost_steps(trainer)
    for long in ("leaps", "learning_rate_scales", "memory"):
        summary.pop(long, None)
    return {
        "task": task.name,
        "arm": arm.name,
        "steps": steps,
        "rate": rate,
        "seed": seed,
        "eval_loss": loss,
        "seconds": seconds,
        "summary": summary,
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "device": trainer.args.device.type,
        "threads": torch.get_num_threads(),
    }


def muon_cost_steps(trainer) -> float:
    """Arithmetic of Muon's iteration over that of a step; 0 for other optimizers."""
    from hf_hybrid.leaps.directions.preconditioners import orthogonalisation_flops

    groups = trainer.optimizer.param_groups
    matrices = [p for group in groups if group.get("algorithm") == "muon" for p in group["params"]]
    weights = [(p.numel(), p.requires_grad) for p in trainer.model.parameters()]
    step = BATCH * SEQUENCE * sum(4 * count + 2 * count * trained for count, trained in weights)
    return sum(orthogonalisation_flops(p.shape) for p in matrices) / step


def nino_path(folder: str | None) -> str | None:
    """The published checkpoint, if it is there."""
    path = None if folder is None else Path(folder) / NINO
    return str(path) if path is not None and path.is_file() else None
