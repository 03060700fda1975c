"""
The model card: facts of a run, read off its trainer as plain values and filled into `card_template.md`.

The template holds all words and their order; this file says where each value comes from, with the help of
provenance.py (how and where the model was made). Three rules:

- What is not known is left out. A card has no empty section, no `None` and no "More information needed".
- Names, paths and messages come from anywhere, so the template escapes every value that is not [`Markdown`] already.
- A card is published. Commands and options are shown without secrets and without the user's home.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import logging
import math
import os
import re
import urllib.parse
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeGuard

import jinja2
from huggingface_hub import EvalResult, ModelCardData, model_info
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id, yaml_dump
from transformers.modelcard import METRIC_TAGS, TASK_MAPPING

from hf_hybrid.arguments import hybrid_values
from hf_hybrid.config import config_values
from hf_hybrid.hub import provenance
from hf_hybrid.hub.provenance import listed, one_line, unique
from hf_hybrid.leaps.directions import DIRECTIONS, Direction, Orthogonal, direction_class
from hf_hybrid.optimizers import optimizer_name
from hf_hybrid.records.log import load_log
from hf_hybrid.records.profiler import MemoryProfilerCallback
from hf_hybrid.records.redaction import clean, shareable
from hf_hybrid.records.summary import format_bytes, format_number, format_seconds

logger = logging.getLogger(__name__)

# The template and what it writes values with.

_SPECIAL = re.compile(r"([\\`*_{}\[\]<>#|~$!&])")


class Markdown(str):
    """Text that is Markdown already. Everything else is escaped when the template writes it."""


def text(value: object) -> Markdown:
    """A value as plain text: nothing in it is read as Markdown or HTML."""
    return value if isinstance(value, Markdown) else Markdown(_SPECIAL.sub(r"\\\1", one_line(value)))


def code(value: object) -> Markdown:
    """A value as inline code, also inside a table. A backtick would end it and becomes an apostrophe."""
    content = one_line(value).replace("`", "'").replace("|", "\\|")
    return Markdown(f"`{content}`" if content else "")


def link(name: str, address: str) -> Markdown:
    """A link, whose name is plain text."""
    return Markdown(f"[{text(name)}]({urllib.parse.quote(address, safe=':/?&=#%+,;@~._-')})")


def render(facts: dict[str, Any]) -> str:
    """The whole card from [`card_facts`], of which `metadata` becomes the YAML block at the top."""
    metadata = yaml_dump(facts["metadata"], sort_keys=False).strip()
    page = _template().render({**facts, "metadata": metadata})
    return re.sub(r"\n{3,}", "\n\n", page).strip() + "\n"


@functools.cache
def _template() -> jinja2.Template:
    environment = jinja2.Environment(
        trim_blocks=True, lstrip_blocks=True, finalize=text, undefined=jinja2.StrictUndefined
    )
    environment.filters |= {
        **{"text": text, "code": code, "link": link, "raw": Markdown},
        "model_link": lambda name: link(name, f"https://huggingface.co/{name}"),
        "data_link": lambda name: link(name, f"https://huggingface.co/datasets/{name}"),
        **{"number": format_number, "bytes": format_bytes, "time": format_seconds},
        "loss": lambda loss: "–" if loss is None else f"{loss:.4f}",
    }
    return environment.from_string((Path(__file__).parent / "card_template.md").read_text(encoding="utf-8"))


# Facts.


def card_facts(trainer: Any, arguments: dict[str, Any]) -> dict[str, Any]:
    """What the card says by the names of the template; `arguments` are those of `create_model_card`."""
    args, state, summary = trainer.args, trainer.state, trainer.hybrid_summary()
    model = model_facts(trainer, arguments["finetuned_from"], arguments["tasks"])
    evaluation, data = evaluation_of(trainer, model["task"]), data_of(trainer)
    final = evaluation["metrics"] if evaluation and evaluation["of_final_weights"] else {}
    if arguments["license"] is None and model["base"]:
        arguments = {**arguments, **license_of(model["base"])}
    finished = next((entry["train_runtime"] for entry in reversed(state.log_history) if "train_runtime" in entry), None)
    logged, starts = load_log(trainer.log_file.folder).wall_time()
    known = logged is not None or not summary.get("resumed")  # `train_runtime` covers one start of a resumed run
    seconds = None if finished is None or not known else logged or finished
    secrets, hybrid, probes = [args.hub_token], hybrid_values(trainer.hybrid_args), trainer.probe_dataset
    settings = {name: clean(value, secrets) for name, value in shareable(settings_of(args)).items()}
    if model["adapter"] and (scale := summary.get("learning_rate_scale", 1.0)) != 1.0:  # one rule for the whole run
        settings["learning_rate"] = clean(float(f"{args.learning_rate * scale:.3g}"), secrets)
    summary["failed_savings"] = [clean(why, secrets) for why in summary["failed_savings"]]
    method = dict.fromkeys(("title", "id", "citation")) | getattr(trainer, "_paper", {})  # of TRL's trainers
    name = arguments["model_name"] or Path(str(args.output_dir)).absolute().name or model["base"] or model["class_name"]
    return {
        "name": name,
        "model": model,
        "trainer": type(trainer).__name__,
        "method": {**method, "name": getattr(trainer, "_name", None)},
        "arguments": arguments,
        "data": data,
        "held_out": len(probes) if hasattr(probes, "__len__") and summary["leaps"] else None,
        "evaluation": evaluation,
        "location": json.dumps(one_line(clean(trainer.hub_model_id or args.hub_model_id or args.output_dir))),
        "settings": {name: value for name, value in settings.items() if name not in hybrid},
        "hybrid_options": {name: value for name, value in settings.items() if name in hybrid},
        "adapter": {name: clean(value, secrets) for name, value in adapter_of(trainer).items()},
        "summary": summary,
        "history": history_of(state.log_history),
        "trackers": provenance.tracker_links(),
        "memory": memory_of(trainer, summary),
        **trainer.environment(),
        "seconds": seconds,
        "starts": starts,
        "finished": finished is not None,
        "command": provenance.command(secrets),
        "papers": papers_of(trainer, summary),
        "state": {"global_step": state.global_step, "max_steps": state.max_steps},
        "rewards": rewards_of(trainer),
        "today": datetime.now(UTC).strftime("%Y-%m-%d"),
        "metadata": metadata_of(one_line(name), model, arguments, final, data),
    }


_SPEED = ("runtime", "samples_per_second", "steps_per_second", "model_preparation_time", "num_tokens")


def evaluation_of(trainer: Any, task: str | None) -> dict[str, Any] | None:
    """
    The last evaluation in the log, without those of untrained weights: `step`, `metrics` (with `perplexity` for
    language models) and whether it is `of_final_weights`.

    Final weights were evaluated after the training, or at the step whose checkpoint was loaded as the best, or else at
    the last step.
    """
    state, log = trainer.state, trainer.state.log_history
    final_step = trainer.args.load_best_model_at_end and state.best_global_step or state.global_step
    trained = max((index for index, entry in enumerate(log) if "train_runtime" in entry), default=len(log))
    evaluations = [
        (i, e) for i, e in enumerate(log) if e.get("step", 0) > 0 and any(key.startswith("eval_") for key in e)
    ]
    of_final = [entry for index, entry in evaluations if index > trained or entry["step"] == final_step]
    chosen: dict[str, Any] = {}
    # Several evaluation sets are logged one after the other; a set that is evaluated again replaces its values.
    for entry in of_final or [entry for _, entry in evaluations[-1:]]:
        chosen |= entry
    measured = {key: value for key, value in chosen.items() if key.startswith("eval_") and not key.endswith(_SPEED)}
    numbers = {k: v for k, v in measured.items() if isinstance(v, (int, float)) and math.isfinite(v)}
    metrics = {key.removeprefix("eval_"): value for key, value in numbers.items()}
    only_losses = all(key.endswith("loss") for key in metrics)
    if metrics.get("loss", math.inf) < 50 and is_language_loss(trainer, task):
        metrics["perplexity"] = math.exp(metrics["loss"])
    about = {"step": chosen.get("step"), "of_final_weights": bool(of_final), "only_losses": only_losses}
    return {**about, "metrics": metrics} if chosen else None


def is_language_loss(trainer: Any, task: str | None) -> bool:
    """Whether an evaluation's loss is the mean negative log-likelihood of tokens, whose exponential is perplexity."""
    loss_type, method = getattr(trainer.args, "loss_type", "nll"), getattr(trainer, "_name", "SFT")  # of TRL's trainers
    is_plain = trainer.compute_loss_func is None and not trainer.args.label_smoothing_factor
    with_router = getattr(getattr(trainer.model, "config", None), "output_router_logits", False)
    is_likelihood = method == "SFT" and loss_type in ("nll", "chunked_nll") and is_plain and not with_router
    return task == "text-generation" and is_likelihood


def history_of(log: list[dict], most: int = 20) -> list[dict]:
    """The evaluations during the training, with the training loss logged last; evenly thinned to `most`."""
    rows, loss = [], None
    for entry in log:
        if "train_runtime" in entry:
            break
        loss = entry.get("loss", loss)
        if "eval_loss" in entry:
            rows.append({"epoch": None, **entry, "loss": loss})
    return rows[:: -max(1, math.ceil(len(rows) / most))][::-1]


def rewards_of(trainer: Any) -> dict[str, Any] | None:
    """Of TRL's trainers that learn by rewards: names of the functions, mean reward `first` and `last` in the log."""
    names = getattr(trainer, "reward_func_names", None)
    logged = [entry for entry in trainer.state.log_history if "reward" in entry]
    if not names or not logged:
        return None
    first, last = ({"step": entry["step"], "mean": entry["reward"]} for entry in (logged[0], logged[-1]))
    return {"names": list(names), "first": first, "last": last}


_SETTINGS = (
    "num_train_epochs", "max_steps", "learning_rate", "lr_scheduler_type", "warmup_steps",
    "per_device_train_batch_size", "gradient_accumulation_steps", "optim", "weight_decay", "max_grad_norm", "seed",
)  # fmt: skip
_SILENT = re.compile(r"output_dir|logging_|run_name|resume|tqdm|do_|report_to|hub|save_|dataloader_(pin|num_workers)")


def settings_of(args) -> dict[str, Any]:
    """The options that decide a training, then all others that differ from their defaults and say something of it."""
    unused = "num_train_epochs" if args.max_steps > 0 else "max_steps"
    settings = {name: getattr(args, name) for name in _SETTINGS}
    settings |= {"optim": optimizer_name(args), "lr_scheduler_type": args.lr_scheduler_type.value}
    settings["sequences per step"] = args.train_batch_size * args.gradient_accumulation_steps * args.world_size
    changed = config_values(args, written_defaults=False)
    settings |= {name: value for name, value in changed.items() if value is not None and not _SILENT.search(name)}
    return {name: value for name, value in settings.items() if name != unused}


def memory_of(trainer: Any, summary: dict) -> dict[str, Any]:
    """`peaks` of every phase where a profiler ran, on the `device` or of the process; the bytes `held` at the end."""
    profilers = [call for call in trainer.callback_handler.callbacks if isinstance(call, MemoryProfilerCallback)]
    phases = profilers[0].summary()["phases"] if profilers else {}
    on_device = any("peak_allocated" in readings for readings in phases.values())
    reading = "peak_allocated" if on_device else "peak_rss"
    peaks = [(phase, values["records"], values[reading]) for phase, values in phases.items() if reading in values]
    held, names = summary["memory"]["held"] or {}, {"states": "optimizer states", "drift": "prediction"}
    return {
        "peaks": peaks,
        "on_device": on_device,
        "held": {names.get(name, name): places for name, places in held.items() if any(places.values())},
        "on_cpu": trainer.args.device.type == "cpu",
    }


# What the model was made from.


def is_repo_id(name: object) -> TypeGuard[str]:
    """Whether a name can be that of a repository on the Hub."""
    if not isinstance(name, str):
        return False
    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return True


def is_local(name: str) -> bool:
    """Whether a name is a path on this machine and not one on the Hub."""
    return os.path.isabs(name) or name.startswith((".", "~")) or os.path.exists(name)


def model_facts(trainer: Any, finetuned_from: str | None, tasks: list[str]) -> dict[str, Any]:
    """
    What the trained model is, and what training began with: `base` is the id on the Hub of the model whose weights were
    loaded, `base_is_local` says that they came from a folder (whose name means nothing to others), and `config_of` is
    the id of a model whose configuration alone was used.
    """
    model = trainer.accelerator.unwrap_model(trainer.model)
    peft = getattr(model, "active_peft_config", None) if hasattr(model, "peft_config") else None
    inner = model.get_base_model() if peft is not None else model
    name = finetuned_from or getattr(peft, "base_model_name_or_path", None)
    name = name or getattr(getattr(inner, "config", None), "_name_or_path", None)
    on_hub = is_repo_id(name) and not os.path.exists(name)
    # `from_pretrained` leaves this mark; a model built from another's configuration has only the other's name.
    loaded = finetuned_from is not None or hasattr(inner, "_weight_conversions")
    class_name, parameters = type(inner).__name__, list(model.parameters())
    known = (
        task for task, classes in TASK_MAPPING.items() if any(class_name in listed(names) for names in classes.values())
    )
    task = tasks[0] if tasks else next(known, None)
    auto = {"text-generation": "AutoModelForCausalLM", "text-classification": "AutoModelForSequenceClassification"}
    tokenizer = trainer.processing_class or getattr(trainer.data_collator, "tokenizer", None)
    return {
        "class_name": class_name,
        "loads_with": auto.get(task, class_name) if type(inner).__module__.startswith("transformers.") else None,
        "task": task,
        "parameters": count_parameters(parameters),
        "trainable": count_parameters(parameter for parameter in parameters if parameter.requires_grad),
        "base": name if on_hub and loaded else None,
        "base_is_local": bool(name) and not on_hub and loaded,
        "config_of": name if on_hub and not loaded else None,
        "adapter": None if peft is None else str(getattr(peft.peft_type, "value", peft.peft_type)),
        "has_tokenizer": tokenizer is not None,
        "is_chat": bool(getattr(tokenizer, "chat_template", None)),
    }


_OF_LORA = ("r", "lora_alpha", "lora_dropout", "target_modules")
_OF_NO_INTEREST = ("peft_type", "auto_mapping", "base_model_name_or_path", "revision", "task_type", "inference_mode",
                   "peft_version", "runtime_config")  # fmt: skip


def adapter_of(trainer: Any) -> dict[str, Any]:
    """The settings of adapters: those that everybody asks for, and others that differ from their defaults."""
    model = trainer.accelerator.unwrap_model(trainer.model)
    config = getattr(model, "active_peft_config", None) if hasattr(model, "peft_config") else None
    if config is None:
        return {}
    shown = {name: getattr(config, name) for name in _OF_LORA if hasattr(config, name)}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if field.name not in (*_OF_NO_INTEREST, *_OF_LORA) and value not in (None, field.default, {}, []):
            shown[field.name] = getattr(value, "value", value)
    # A set has no order of its own.
    several = {name: sorted(map(str, value)) for name, value in shown.items() if isinstance(value, (set, list, tuple))}
    return {**shown, **{name: ", ".join(values) for name, values in several.items()}}


def count_parameters(parameters: Iterable) -> int:
    """Weights of a model, also of those that bitsandbytes packed in 4 bits, or of which DeepSpeed holds a part here."""
    full = (getattr(parameter, "quant_state", None) or parameter for parameter in parameters)
    return sum(math.prod(getattr(parameter, "ds_shape", parameter.shape)) for parameter in full)


@functools.lru_cache(maxsize=32)
def license_of(base: str) -> dict[str, str]:
    """`license`, `license_name` and `license_link` as a model on the Hub states them; nothing when offline."""
    try:
        stated = model_info(base, timeout=10).card_data or {}
    except Exception as error:  # a card without a licence is better than no card
        logger.info("The licence of `%s` could not be looked up: %s", base, error)
        return {}
    keys = ("license", "license_name", "license_link")
    return {key: value for key in keys if isinstance(value := stated.get(key), str)}


def data_of(trainer: Any) -> list[dict[str, Any]]:
    """The training set and the evaluation sets: `role`, `name` within the run, and number of `sequences`, if known."""
    sets = trainer.eval_dataset if isinstance(trainer.eval_dataset, dict) else {"": trainer.eval_dataset}
    roles: list[tuple[str, str, Any]] = [
        ("Training", "", trainer.train_dataset),
        *(("Evaluation", name, data) for name, data in sets.items()),
    ]
    return [
        {"role": role, "name": name, "sequences": len(data) if hasattr(data, "__len__") else None}
        for role, name, data in roles
        if data is not None
    ]


def papers_of(trainer: Any, summary: dict) -> list[tuple[str, str]]:
    """Title and address of the papers behind the optimizer and the leaps of the run."""
    direction = direction_class(trainer.custom_direction or DIRECTIONS.get(summary.get("direction"), Direction))
    of_optimizer = Orthogonal.papers if optimizer_name(trainer.args) == "muon" else ()
    return unique([*of_optimizer, *(direction.papers if summary["leaps"] else ())])


# Metadata.


def metadata_of(name: str, model: dict, arguments: dict, metrics: dict[str, float], data: list[dict]) -> dict:
    """The YAML block as the Hub accepts it. `metrics` are of the weights that are published; others are no results."""
    results = [_result(key, value, model["task"], arguments, data) for key, value in metrics.items()]
    tags = ["generated_from_trainer", *arguments["tags"]]
    if model["adapter"]:
        tags += [model["adapter"].lower(), *["transformers"] * bool(model["loads_with"])]
        tags += [f"base_model:adapter:{model['base']}"] * bool(model["base"])
    card_data = ModelCardData(
        library_name="peft" if model["adapter"] else "transformers",
        language=arguments.get("language"),
        license=arguments.get("license"),
        license_name=arguments.get("license_name"),
        license_link=arguments.get("license_link"),
        base_model=model["base"],
        base_model_relation=("adapter" if model["adapter"] else "finetune") if model["base"] else None,
        pipeline_tag=model["task"],
        tags=unique(one_line(tag) for tag in tags),
        datasets=arguments["datasets"] or None,
        metrics=unique(r.metric_type for r in results if r.metric_type in (*METRIC_TAGS, "perplexity")) or None,
        model_name=name,
        eval_results=results or None,
    )
    # With results, `ModelCardData` keeps the name only inside of the model index.
    return {**card_data.to_dict(), "model_name": name}


def _result(key: str, value: float, task: str | None, arguments: dict[str, Any], data: list[dict]) -> EvalResult:
    # With several evaluation sets a metric is logged as `NAME_metric`.
    sets = [part["name"] for part in data if part["role"] == "Evaluation"]
    name = max((name for name in sets if key.startswith(f"{name}_")), key=len, default="")
    metric = key.removeprefix(f"{name}_" if name else "")
    return EvalResult(
        task_type=task or "other",
        # Results of the same type share an entry, so evaluation sets without an id have their name instead.
        dataset_type=one_line(next(iter(arguments["datasets"]), None) or name or "unknown"),
        dataset_name=one_line(name or next(iter(arguments["dataset"]), None) or "evaluation set of the run"),
        dataset_args={"config": one_line(arguments["dataset_args"][0])} if arguments["dataset_args"] else None,
        metric_type=one_line(metric),
        metric_name=one_line(metric.replace("_", " ").capitalize()),
        metric_value=value,
    )
