"""What is known of a run when its card is written: model, data, evaluation, options. Read off a Trainer."""

from __future__ import annotations

import functools
import logging
import math
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from huggingface_hub import is_offline_mode
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id
from transformers.modelcard import TASK_MAPPING
from transformers.utils import hf_api

logger = logging.getLogger(__name__)

LICENSE_FIELDS = ("license", "license_name", "license_link")
_SPEED = ("runtime", "samples_per_second", "steps_per_second", "model_preparation_time", "num_tokens")


def is_repo_id(name: object) -> bool:
    """Whether a name can be that of a repository on the Hub."""
    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return isinstance(name, str)


@dataclass
class ModelFacts:
    """The model that was trained."""

    class_name: str
    in_transformers: bool
    task: str | None
    parameters: int
    trainable: int
    dtype: str
    base: str | None = None
    """The id on the Hub of the model whose weights training began with."""
    base_is_local: bool = False
    """Training began with weights of a folder, whose name means nothing to others."""
    config_of: str | None = None
    """The id on the Hub of the model whose configuration it has, and whose weights it did not load."""
    adapter: str | None = None
    """PEFT's name of the method, for example `LORA`."""
    has_tokenizer: bool = False
    is_chat: bool = False


@dataclass
class DataFacts:
    """One data set as the trainer got it."""

    sequences: int | None = None
    hub_id: str | None = None
    config: str | None = None
    split: str | None = None


@dataclass
class Evaluation:
    """The last evaluation that says something about the weights that the card is about."""

    step: int
    metrics: dict[str, float]
    of_final_weights: bool
    perplexity: float | None = None


@dataclass
class RunFacts:
    """Everything that a card says, as plain values."""

    name: str
    location: str
    """What `from_pretrained` takes: the repository, or the folder."""
    model: ModelFacts
    train: DataFacts
    evaluated: dict[str, DataFacts]
    """Evaluation sets by name; a single one is named `""`."""
    evaluation: Evaluation | None
    history: list[dict]
    steps: int
    planned_steps: int
    seconds: float | None
    settings: dict[str, Any]
    hybrid_options: dict[str, Any]
    summary: dict[str, Any]
    profile: dict[str, Any] | None
    held_out: int | None
    device: str
    processes: int
    devices: int
    method: dict[str, str] = field(default_factory=dict)
    """Of the trainer's own method, where it names one: `name`, `title`, `paper`, `citation`."""
    trainer: str = "HybridTrainer"
    secrets: tuple[str, ...] = ()


# The model.


def model_facts(trainer, finetuned_from: str | None, tasks: str | list[str] | None) -> ModelFacts:
    """Of the model that `trainer` trains; `finetuned_from` and `tasks` win over what is found."""
    model = trainer.accelerator.unwrap_model(trainer.model)
    peft = getattr(model, "active_peft_config", None) if hasattr(model, "peft_config") else None
    inner = model.get_base_model() if peft is not None else model
    name = finetuned_from or getattr(peft, "base_model_name_or_path", None)
    name = name or getattr(getattr(inner, "config", None), "_name_or_path", None)
    on_hub = bool(name) and is_repo_id(name) and not os.path.exists(name)
    # `from_pretrained` leaves a mark; a model built from the configuration of another has only that one's name.
    loaded = finetuned_from is not None or hasattr(inner, "_weight_conversions")
    tokenizer = trainer.processing_class or getattr(trainer.data_collator, "tokenizer", None)
    parameters = list(model.parameters())
    class_name = type(inner).__name__
    return ModelFacts(
        class_name=class_name,
        in_transformers=type(inner).__module__.startswith("transformers."),
        task=tasks[0] if isinstance(tasks, (list, tuple)) else tasks or _task_of(class_name),
        parameters=count_parameters(parameters),
        trainable=count_parameters(parameter for parameter in parameters if parameter.requires_grad),
        dtype=str(getattr(inner, "dtype", "")).removeprefix("torch."),
        base=name if on_hub and loaded else None,
        base_is_local=bool(name) and not on_hub and loaded,
        config_of=name if on_hub and not loaded else None,
        adapter=None if peft is None else str(getattr(peft.peft_type, "value", peft.peft_type)),
        has_tokenizer=tokenizer is not None,
        is_chat=bool(getattr(tokenizer, "chat_template", None)),
    )


def count_parameters(parameters: Iterable) -> int:
    """Weights of a model; packed ones, in 4 bits by bitsandbytes, as what they stand for."""
    shapes = (getattr(getattr(parameter, "quant_state", None), "shape", parameter.shape) for parameter in parameters)
    return sum(math.prod(shape) for shape in shapes)


def _task_of(class_name: str) -> str | None:
    for task, classes in TASK_MAPPING.items():
        names = [name for value in classes.values() for name in ([value] if isinstance(value, str) else value)]
        if class_name in names:
            return task
    return None


@functools.lru_cache(maxsize=32)
def license_of(base: str) -> dict[str, str]:
    """`license`, `license_name` and `license_link` of a model on the Hub, those that it states; nothing offline."""
    if is_offline_mode():
        return {}
    try:
        info = hf_api().model_info(base, timeout=10)
    except Exception as error:  # a card without a licence is better than no card
        logger.info("The licence of `%s` could not be looked up: %s", base, error)
        return {}
    stated = info.card_data.to_dict() if info.card_data is not None else {}
    found = {
        key: stated[key] for key in ("license", "license_name", "license_link") if isinstance(stated.get(key), str)
    }
    tagged = [tag.removeprefix("license:") for tag in info.tags or [] if tag.startswith("license:")]
    return found or ({"license": tagged[0]} if tagged else {})


# The data.


def data_facts(dataset) -> DataFacts:
    """Length and, where a data set of `datasets` came from the Hub, its id, configuration and split."""
    while type(dataset).__name__ == "Subset" and hasattr(dataset, "dataset") and not hasattr(dataset, "cache_files"):
        dataset, length = dataset.dataset, len(dataset)
        return DataFacts(length, *_origin(dataset))
    return DataFacts(len(dataset) if hasattr(dataset, "__len__") else None, *_origin(dataset))


def _origin(dataset) -> tuple[str | None, str | None, str | None]:
    files = getattr(dataset, "cache_files", None)
    folders = Path(files[0]["filename"]).parts if files else ()
    owned = next((part for part in folders if "___" in part), None)
    if owned is None:
        return None, None, None
    owner, _, name = owned.partition("___")
    found = _downloaded_as(owner, name)
    if found is None:
        return None, None, None
    split = re.match(r"\w+", str(getattr(dataset, "split", None) or ""))
    return found, getattr(dataset, "config_name", None), split.group() if split else None


def _downloaded_as(owner: str, name: str) -> str | None:
    """`datasets` keeps a set under its name in snake case; the download cache knows how it is really spelt."""
    from huggingface_hub.constants import HF_HUB_CACHE

    def plain(spelling: str) -> str:
        return spelling.replace("_", "").lower()

    for folder in sorted(Path(HF_HUB_CACHE).glob(f"datasets--{owner}--*")):
        spelling = folder.name.removeprefix(f"datasets--{owner}--")
        if plain(spelling) == plain(name):
            return f"{owner}/{spelling}"
    # Nothing that snake case would have changed: lower case without separators, or the Hub's own spelling of it.
    return f"{owner}/{name}" if "_" not in name and is_repo_id(f"{owner}/{name}") else None


# The evaluation.


def evaluation_of(trainer, task: str | None) -> Evaluation | None:
    """
    The last evaluation in the log, without those of untrained weights.

    Weights are final where the evaluation came after the training, or belongs to the checkpoint that was loaded as the
    best; an evaluation within the training is of its last weights only if nothing was changed after it.
    """
    state, log = trainer.state, trainer.state.log_history
    trained = max((index for index, entry in enumerate(log) if "train_runtime" in entry), default=-1)
    best = getattr(state, "best_global_step", None) if trainer.args.load_best_model_at_end else None
    evaluations = [(index, entry) for index, entry in enumerate(log) if _is_evaluation(entry) and entry["step"] > 0]
    if not evaluations:
        return None
    after = [entry for index, entry in evaluations if index > trained >= 0]
    of_best = [entry for _, entry in evaluations if best and entry["step"] == best]
    chosen = _merge(after) or _merge(of_best) or _merge([evaluations[-1][1]])
    last = chosen["step"] == state.global_step
    metrics = {key.removeprefix("eval_"): value for key, value in chosen.items() if _is_metric(key, value)}
    loss = metrics.get("loss")
    perplexity = math.exp(loss) if loss is not None and loss < 50 and is_language_loss(trainer, task) else None
    return Evaluation(chosen["step"], metrics, bool(after or of_best or last), perplexity)


def _is_evaluation(entry: dict) -> bool:
    return any(key.startswith("eval_") for key in entry) and "step" in entry


def _merge(entries: list[dict]) -> dict:
    """Several evaluation sets are logged one after the other; what is evaluated again replaces what was."""
    merged: dict = {}
    for entry in entries:
        merged.update(entry)
    return merged


def _is_metric(key: str, value: object) -> bool:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    return key.startswith("eval_") and is_number and not key.endswith(_SPEED)


def is_language_loss(trainer, task: str | None) -> bool:
    """Whether an evaluation's loss is the mean negative log-likelihood of tokens, whose exponential is perplexity."""
    args, config = trainer.args, getattr(trainer.model, "config", None)
    if trainer.compute_loss_func is not None or args.label_smoothing_factor:
        return False
    if getattr(trainer, "_name", "SFT") != "SFT" or getattr(args, "loss_type", "nll") not in ("nll", "chunked_nll"):
        return False  # another method of TRL's, or another loss
    return task == "text-generation" and not getattr(config, "output_router_logits", False)


def history_of(log: list[dict], most: int = 20) -> list[dict]:
    """Evaluations during the training, each with the training loss logged last; evenly thinned to `most` rows."""
    rows, loss = [], None
    for entry in log:
        if "train_runtime" in entry:
            break
        loss = entry.get("loss", loss)
        if "eval_loss" in entry:
            keys = ("step", "epoch", "eval_loss")
            rows.append({**{key: entry.get(key) for key in keys}, "loss": loss})
    if len(rows) <= most:
        return rows
    return [rows[round(index * (len(rows) - 1) / (most - 1))] for index in range(most)]


# What was set.


def settings_of(args, batch_size: int) -> dict[str, Any]:
    """What decides about a training, in the order in which people ask for it. `batch_size`: sequences per step."""
    optim = str(getattr(args.optim, "value", args.optim))
    length = {"max_steps": args.max_steps} if args.max_steps > 0 else {"num_train_epochs": args.num_train_epochs}
    found = {
        **length,
        "learning_rate": args.learning_rate,
        "lr_scheduler_type": str(getattr(args.lr_scheduler_type, "value", args.lr_scheduler_type)),
        "warmup_steps": args.warmup_steps,
        "per_device_train_batch_size": args.per_device_train_batch_size,
        "gradient_accumulation_steps": args.gradient_accumulation_steps,
        "sequences per step": batch_size,
        "optim": optim,
        "weight_decay": args.weight_decay,
        "max_grad_norm": args.max_grad_norm,
        "seed": args.seed,
    }
    if "adam" in optim or optim == "muon":
        found["betas, epsilon"] = f"{args.adam_beta1}, {args.adam_beta2}, {args.adam_epsilon}"
    if args.bf16 or args.fp16:
        found["mixed precision"] = "bf16" if args.bf16 else "fp16"
    return found


# All of it.


def run_facts(
    trainer,
    *,
    name: str | None = None,
    finetuned_from: str | None = None,
    tasks: str | list[str] | None = None,
    hybrid_options: dict[str, Any],
    other_options: dict[str, Any],
) -> RunFacts:
    """
    Everything that a card says about the run of a `HybridTrainer`, so far.

    Args:
        name: Of the model. Default: of the output folder.
        finetuned_from: The model on the Hub that training began with. Default: what the model was loaded from.
        tasks: The Hub's name of what the model does. Default: from its class.
        hybrid_options: Those of `HybridArguments` that differ from their defaults.
        other_options: Those of `TrainingArguments`.
    """
    args, state = trainer.args, trainer.state
    model = model_facts(trainer, finetuned_from, tasks)
    folder = Path(args.output_dir)
    evaluated = trainer.eval_dataset
    named = evaluated if isinstance(evaluated, dict) else {} if evaluated is None else {"": evaluated}
    batch = args.per_device_train_batch_size * args.gradient_accumulation_steps * args.world_size
    if args.n_gpu > 1:  # DataParallel splits a batch over the devices of one process
        batch *= args.n_gpu
    settings = settings_of(args, batch)
    others = {
        key: value for key, value in other_options.items() if key not in settings and not _is_beside_the_point(key)
    }
    probe = getattr(trainer, "probe_dataset", None)
    return RunFacts(
        name=name or folder.absolute().name or model.base or model.class_name,
        location=getattr(trainer, "hub_model_id", None) or args.hub_model_id or str(folder),
        model=model,
        train=data_facts(trainer.train_dataset),
        evaluated={key: data_facts(dataset) for key, dataset in named.items()},
        evaluation=evaluation_of(trainer, model.task),
        history=history_of(state.log_history),
        steps=state.global_step,
        planned_steps=state.max_steps,
        seconds=_seconds(state.log_history),
        settings={**settings, **others},
        hybrid_options=hybrid_options,
        summary=trainer.hybrid_summary(),
        profile=_profile_of(trainer),
        held_out=len(probe) if hasattr(probe, "__len__") else None,
        device=args.device.type,
        processes=args.world_size,
        devices=max(args.world_size, args.n_gpu),
        method=_method_of(trainer),
        trainer=type(trainer).__name__,
        secrets=tuple(filter(None, (args.hub_token,))),
    )


def _is_beside_the_point(option: str) -> bool:
    # Where files lie, where they are sent to and what is shown meanwhile says nothing about the model.
    silent = ("output_dir", "logging_dir", "run_name", "resume_from_checkpoint", "disable_tqdm", "report_to")
    return option in silent or "hub" in option


def _seconds(log: list[dict]) -> float | None:
    return next((entry["train_runtime"] for entry in reversed(log) if "train_runtime" in entry), None)


def _profile_of(trainer) -> dict | None:
    """What a profiler among the callbacks measured: one whose `summary()` has `phases`."""
    for callback in trainer.callback_handler.callbacks:
        summary = getattr(callback, "summary", None)
        found = summary() if callable(summary) else None
        if isinstance(found, dict) and found.get("phases"):
            return found
    return None


def _method_of(trainer) -> dict[str, str]:
    """TRL's trainers say what they do and which paper it is from."""
    paper = getattr(trainer, "_paper", None) or {}
    names = {"name": getattr(trainer, "_name", None), "title": paper.get("title"), "paper": paper.get("id")}
    return {key: value for key, value in {**names, "citation": paper.get("citation")}.items() if value}
