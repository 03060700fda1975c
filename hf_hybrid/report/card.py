"""
The model card: facts of a run, read off its trainer as plain values and filled into `card_template.md`.

The template holds all words and their order; this file says where each value comes from. Three rules:

- What is not known is left out. A card has no empty section, no `None` and no "More information needed".
- Names, paths and messages come from anywhere, so the template escapes every value that is not [`Markdown`] already.
- A card is published. Commands and options are shown without secrets and without the user's home (provenance.py).
"""

from __future__ import annotations

import functools
import json
import logging
import math
import os
import re
import urllib.parse
from collections.abc import Iterable, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import jinja2
import torch
from huggingface_hub import EvalResult, ModelCardData, is_offline_mode
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id, yaml_dump
from transformers.modelcard import METRIC_TAGS, TASK_MAPPING
from transformers.utils import hf_api

from hf_hybrid.arguments import hybrid_values
from hf_hybrid.config import config_values
from hf_hybrid.leaps.directions import DIRECTIONS, Direction, Orthogonal
from hf_hybrid.leaps.directions.base import direction_class
from hf_hybrid.optimizers import optimizer_name
from hf_hybrid.report.provenance import clean, command, hardware, tracker_links, versions
from hf_hybrid.report.summary import format_bytes, format_number, format_seconds

logger = logging.getLogger(__name__)

# Markdown.

_SPECIAL = re.compile(r"([\\`*_{}\[\]<>#|~$!&])")
_CONTROL = re.compile(r"[\x00-\x1f\x7f\u0085\u2028\u2029]+")


class Markdown(str):
    """Text that is Markdown already. Everything else is escaped when the template writes it."""


def one_line(value: object) -> str:
    """A value as text without line breaks and control characters."""
    return _CONTROL.sub(" ", str(value)).strip()


def text(value: object) -> str:
    """A value as plain text: nothing in it is read as Markdown or HTML."""
    return value if isinstance(value, Markdown) else Markdown(_SPECIAL.sub(r"\\\1", one_line(value)))


def code(value: object) -> Markdown:
    """A value as inline code, also inside a table."""
    content = one_line(value)
    if not content:
        return Markdown()
    ticks = "`" * (max(map(len, re.findall("`+", content)), default=0) + 1)
    space = " " if content.startswith("`") or content.endswith("`") else ""
    return Markdown(f"{ticks}{space}{content}{space}{ticks}".replace("|", "\\|"))


def block(content: str, language: str = "") -> Markdown:
    """A fenced block whose fence the content cannot close."""
    fence = "`" * max(3, max(map(len, re.findall("`+", content)), default=0) + 1)
    return Markdown(f"{fence}{language}\n{content.rstrip()}\n{fence}")


def link(name: str, address: str | None = None) -> Markdown:
    """A link; without an address, to the repository of this name on the Hub."""
    address = urllib.parse.quote(address or f"https://huggingface.co/{name}", safe=":/?&=#%+,;@~._-")
    return Markdown(f"[{text(name)}]({address})")


def listed(items: Sequence[object]) -> Markdown:
    """`a`, `a and b`, `a, b and c`."""
    items = [text(item) for item in items]
    return Markdown(" and ".join(filter(None, [", ".join(items[:-1]), *items[-1:]])))


def table(rows: Iterable[Sequence[object]], *headers: str) -> Markdown:
    """A table whose columns after the first are aligned to the right; nothing without rows."""
    lines = [f"| {' | '.join(map(text, row))} |" for row in rows]
    rule = "|" + "|".join(["---", *["---:"] * (len(headers) - 1)]) + "|"
    return Markdown("\n".join([f"| {' | '.join(map(text, headers))} |", rule, *lines]) if lines else "")


def options_table(options: dict[str, object]) -> Markdown:
    """Names and values of options as code."""
    return table(((code(name), code(value)) for name, value in options.items()), "option", "value")


def render(facts: dict[str, Any]) -> str:
    """The whole card from [`card_facts`], of which `metadata` becomes the YAML block at the top."""
    environment = jinja2.Environment(
        trim_blocks=True, lstrip_blocks=True, finalize=text, undefined=jinja2.StrictUndefined
    )
    shown = {"text": text, "code": code, "block": block, "link": link, "listed": listed, "table": table}
    environment.filters |= {**shown, "options": options_table, "raw": Markdown, "number": format_number}
    template = (Path(__file__).parent / "card_template.md").read_text(encoding="utf-8")
    metadata = Markdown(yaml_dump(facts["metadata"], sort_keys=False).strip())
    page = environment.from_string(template).render({**facts, "metadata": metadata})
    return re.sub(r"\n{3,}", "\n\n", page).strip() + "\n"


def card_facts(
    trainer,
    given: dict[str, Any],
    baseline: dict[str, Any] | None = None,
    *,
    name: str | None = None,
    finetuned_from: str | None = None,
    tasks: str | list[str] | None = None,
) -> dict[str, Any]:
    """
    Everything that the card says about the run of a `HybridTrainer` so far, by the names that the template uses.

    `given` and the other arguments are those of [`PublishingMixin.create_model_card`], checked.
    """
    args, log, summary = trainer.args, trainer.state.log_history, trainer.hybrid_summary()
    model = model_facts(trainer, finetuned_from, tasks)
    data = data_facts(trainer.train_dataset)
    sets = trainer.eval_dataset
    sets = sets if isinstance(sets, dict) else {} if sets is None else {"": sets}
    evaluated = {key: data_facts(dataset) for key, dataset in sets.items()}
    found = evaluation_of(trainer, model["task"])
    metrics = found["metrics"] if found else {}
    ids = given["datasets"] or unique([data["hub_id"], *(dataset["hub_id"] for dataset in evaluated.values())])
    own_ids = given["datasets"] or unique([data["hub_id"]])
    if given["license"] is None and model["base"]:
        given = {**given, **license_of(model["base"])}
    own = {
        "eval_loss": metrics.get("loss") if found and found["of_final_weights"] else None,
        "backward_passes": summary.get("backward_passes") or None,
        "seconds": next((entry["train_runtime"] for entry in reversed(log) if "train_runtime" in entry), None),
    }
    secrets = tuple(filter(None, (args.hub_token,)))
    changed, hybrid = config_values(args), hybrid_values(trainer.hybrid_args)
    settings = settings_of(args)
    settings |= {key: value for key, value in changed.items() if key not in {**settings, **hybrid} and _is_telling(key)}
    probes, scale = getattr(trainer, "probe_dataset", None), summary.get("learning_rate_scale", 1.0)
    facts = {
        "name": name or Path(args.output_dir).absolute().name or model["base"] or model["class_name"],
        "model": model,
        "trainer": type(trainer).__name__,
        "method": _method_of(trainer),
        "trained_on": given["dataset_names"] or [_link_to_data(i) for i in own_ids],
        "train": described(data),
        "held_out": len(probes) if hasattr(probes, "__len__") and summary.get("leaps") else None,
        "evaluation": found,
        "only_losses": all(key.endswith(("loss", "perplexity")) for key in metrics),
        "results": [(key.replace("_", " "), format_number(value)) for key, value in metrics.items()],
        "evaluated": [described(dataset, key) for key, dataset in evaluated.items() if described(dataset, key)],
        "baseline": baseline,
        "comparison": comparison(own, baseline),
        "usage": usage(model, getattr(trainer, "hub_model_id", None) or args.hub_model_id or args.output_dir),
        "settings": {key: clean(value, secrets) for key, value in settings.items()},
        "hybrid_options": {key: clean(value, secrets) for key, value in changed.items() if key in hybrid},
        "summary": summary,
        "phases": [(name.capitalize(), *cells) for name, *cells in summary.phase_rows()],
        "direction": summary.get("direction"),
        "leaps": [(VERDICTS.get(key, key), n) for key, n in (summary.get("leaps_by_verdict") or {}).items() if n],
        "learning_rate_scale": None if math.isclose(scale, 1.0) else f"{scale:.3g}",
        "history": history_of(log),
        "trackers": tracker_links(),
        "memory": memory_of(trainer, summary),
        "hardware": {**hardware(args.device.type, args.world_size, max(args.world_size, args.n_gpu)),
                     **_time(own["seconds"], summary)},
        "command": command(secrets),
        "versions": versions("peft" if model["adapter"] else "", "trl" if hasattr(trainer, "_name") else ""),
        "papers": papers_of(trainer, summary),
        "steps": trainer.state.global_step,
        "planned_steps": trainer.state.max_steps,
        "seconds": own["seconds"],
        "today": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
    }  # fmt: skip
    metadata = metadata_of(facts, given, ids, evaluated)
    return {**facts, "metadata": metadata, "license": metadata.get("license")}


def unique(values: Iterable[str | None]) -> list[str]:
    """The values that are not empty, each once, in order."""
    return list(dict.fromkeys(value for value in values if value))


# The model, and code that loads it.


def is_repo_id(name: object) -> bool:
    """Whether a name can be that of a repository on the Hub."""
    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return isinstance(name, str)


def model_facts(trainer, finetuned_from: str | None, tasks: str | list[str] | None) -> dict[str, Any]:
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
    on_hub = bool(name) and is_repo_id(name) and not os.path.exists(name)
    # `from_pretrained` leaves this mark; a model built from another's configuration has only the other's name.
    loaded = finetuned_from is not None or hasattr(inner, "_weight_conversions")
    tokenizer = trainer.processing_class or getattr(trainer.data_collator, "tokenizer", None)
    class_name, parameters = type(inner).__name__, list(model.parameters())
    return {
        "class_name": class_name,
        "in_transformers": type(inner).__module__.startswith("transformers."),
        "task": tasks[0] if isinstance(tasks, (list, tuple)) else tasks or _task_of(class_name),
        "parameters": count_parameters(parameters),
        "trainable": count_parameters(parameter for parameter in parameters if parameter.requires_grad),
        "base": name if on_hub and loaded else None,
        "base_is_local": bool(name) and not on_hub and loaded,
        "config_of": name if on_hub and not loaded else None,
        "adapter": None if peft is None else str(getattr(peft.peft_type, "value", peft.peft_type)),
        "has_tokenizer": tokenizer is not None,
        "is_chat": bool(getattr(tokenizer, "chat_template", None)),
    }


def count_parameters(parameters: Iterable) -> int:
    """Weights of a model. Those that bitsandbytes packed in 4 bits count as the weights that they stand for."""
    shapes = (getattr(getattr(parameter, "quant_state", None), "shape", parameter.shape) for parameter in parameters)
    return sum(math.prod(shape) for shape in shapes)


def _task_of(class_name: str) -> str | None:
    for task, classes in TASK_MAPPING.items():
        if class_name in [
            name for value in classes.values() for name in ([value] if isinstance(value, str) else value)
        ]:
            return task
    return None


@functools.lru_cache(maxsize=32)
def license_of(base: str) -> dict[str, str]:
    """`license`, `license_name` and `license_link` as a model on the Hub states them; nothing when offline."""
    if is_offline_mode():
        return {}
    try:
        info = hf_api().model_info(base, timeout=10)
    except Exception as error:  # a card without a licence is better than no card
        logger.info("The licence of `%s` could not be looked up: %s", base, error)
        return {}
    stated = info.card_data.to_dict() if info.card_data is not None else {}
    keys = ("license", "license_name", "license_link")
    tagged = [tag.removeprefix("license:") for tag in info.tags or [] if tag.startswith("license:")]
    found = {key: stated[key] for key in keys if isinstance(stated.get(key), str)}
    return found or ({"license": tagged[0]} if tagged else {})


def usage(model: dict[str, Any], location: str) -> str:
    """Python code that loads the model as it was saved; none for classes that only their author can import."""
    if not model["in_transformers"]:
        return ""
    is_language_model = model["task"] == "text-generation"
    auto = {"text-generation": "AutoModelForCausalLM", "text-classification": "AutoModelForSequenceClassification"}
    auto_class, where = auto.get(model["task"], model["class_name"]), json.dumps(one_line(clean(location)))
    from_peft, lines = [], [f"model = {auto_class}.from_pretrained({where})"]
    names = [auto_class] + ["AutoTokenizer"] * model["has_tokenizer"]
    if model["adapter"] and model["base"]:
        from_peft = ["AutoPeftModelForCausalLM" if is_language_model else "AutoPeftModel"]
        lines = [f"model = {from_peft[0]}.from_pretrained({where})  # fetches the base model too"]
        names.remove(auto_class)
    elif model["adapter"]:
        from_peft = ["PeftModel"]
        lines = [f'base = {auto_class}.from_pretrained("path/to/the/base")']
        lines.append(f"model = PeftModel.from_pretrained(base, {where})")
    if model["has_tokenizer"]:
        lines.append(f"tokenizer = AutoTokenizer.from_pretrained({where})")
    imports = [("transformers", names), ("peft", from_peft)]
    lines = [*(f"from {package} import {', '.join(n)}" for package, n in imports if n), "", *lines]
    if is_language_model and model["has_tokenizer"]:
        inputs = ['inputs = tokenizer("The", return_tensors="pt", return_token_type_ids=False)']
        if model["is_chat"]:
            options = 'add_generation_prompt=True, return_tensors="pt", return_dict=True'
            inputs = ['messages = [{"role": "user", "content": "What is a gradient?"}]']
            inputs.append(f"inputs = tokenizer.apply_chat_template(messages, {options})")
        lines += ["", *inputs, "print(tokenizer.decode(model.generate(**inputs, max_new_tokens=40)[0]))"]
    return "\n".join(lines)


# The data.


def data_facts(dataset) -> dict[str, Any]:
    """
    Of a data set: `sequences` and, where `datasets` fetched it from the Hub, `hub_id`, `config` and `split`.

    A `Subset` is looked through to the set that it selects from, which may be a `Subset` itself.
    """
    sequences = len(dataset) if hasattr(dataset, "__len__") else None
    while isinstance(dataset, torch.utils.data.Subset):
        dataset = dataset.dataset
    facts = {"sequences": sequences, "hub_id": None, "config": None, "split": None}
    files = getattr(dataset, "cache_files", None)
    folders = Path(files[0]["filename"]).parts if files else ()
    owner, _, name = next((part for part in folders if "___" in part), "").partition("___")
    hub_id = _downloaded_as(owner, name) if name else None
    if hub_id is None:
        return facts
    split = re.match(r"\w+", str(getattr(dataset, "split", None) or ""))
    config = getattr(dataset, "config_name", None)
    return {**facts, "hub_id": hub_id, "config": config, "split": split.group() if split else None}


def _downloaded_as(owner: str, name: str) -> str | None:
    """`datasets` stores a set under its name in snake case; the download cache knows the real spelling."""
    from huggingface_hub.constants import HF_HUB_CACHE

    def plain(spelling: str) -> str:
        return spelling.replace("_", "").lower()

    for folder in sorted(Path(HF_HUB_CACHE).glob(f"datasets--{owner}--*")):
        spelling = folder.name.removeprefix(f"datasets--{owner}--")
        if plain(spelling) == plain(name):
            return f"{owner}/{spelling}"
    # Without underscores snake case changed nothing: lower case without separators, or the Hub's own spelling of it.
    return f"{owner}/{name}" if "_" not in name and is_repo_id(f"{owner}/{name}") else None


def _link_to_data(hub_id: str) -> Markdown:
    return link(hub_id, f"https://huggingface.co/datasets/{hub_id}")


def described(data: dict[str, Any], name: str = "") -> Markdown:
    """A data set in words: its name within the run, its length and where it came from."""
    parts = [] if data["sequences"] is None else [f"{data['sequences']:,} sequences"]
    if data["hub_id"]:
        config = f" (configuration {code(data['config'])})" if data["config"] not in (None, "", "default") else ""
        split = f", split {code(data['split'])}" if data["split"] else ""
        parts.append(f"from {_link_to_data(data['hub_id'])}{config}{split}")
    return Markdown(": ".join(filter(None, [code(name), " ".join(parts)])))


# The evaluation.

_SPEED = ("runtime", "samples_per_second", "steps_per_second", "model_preparation_time", "num_tokens")


def evaluation_of(trainer, task: str | None) -> dict[str, Any] | None:
    """
    The last evaluation in the log, without those of untrained weights: `step`, `metrics` (with `perplexity` for
    language models) and whether it is `of_final_weights`.

    Weights are final where the evaluation came after the training, or belongs to the checkpoint that was loaded as the
    best. An evaluation within the training is of the last weights only if no step followed it.
    """
    state, log = trainer.state, trainer.state.log_history
    trained = max((index for index, entry in enumerate(log) if "train_runtime" in entry), default=-1)
    best = getattr(state, "best_global_step", None) if trainer.args.load_best_model_at_end else None
    is_evaluation = [any(key.startswith("eval_") for key in entry) and entry.get("step", 0) > 0 for entry in log]
    evaluations = [(index, entry) for index, entry in enumerate(log) if is_evaluation[index]]
    if not evaluations:
        return None
    after = [entry for index, entry in evaluations if index > trained >= 0]
    of_best = [entry for _, entry in evaluations if best and entry["step"] == best]
    # Several evaluation sets are logged one after the other; a set that is evaluated again replaces its values.
    chosen: dict[str, Any] = {}
    for entry in after or of_best or [evaluations[-1][1]]:
        chosen |= entry
    metrics = {key.removeprefix("eval_"): value for key, value in chosen.items() if _is_metric(key, value)}
    loss, is_final = metrics.get("loss"), bool(after or of_best or chosen["step"] == state.global_step)
    if perplexity := math.exp(loss) if loss is not None and loss < 50 and is_language_loss(trainer, task) else None:
        metrics["perplexity"] = perplexity
    return {"step": chosen["step"], "metrics": metrics, "of_final_weights": is_final}


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


def comparison(own: dict[str, float | None], baseline: dict[str, Any] | None) -> list[tuple[str, str, str]]:
    """Rows of this run beside a baseline: only what both have."""
    kinds = (
        ("eval_loss", "evaluation loss", "{:.4f}".format),
        ("backward_passes", "backward passes", format_number),
        ("seconds", "wall time of training", format_seconds),
    )
    known = [kind for kind in kinds if own[kind[0]] is not None and (baseline or {}).get(kind[0]) is not None]
    return [(label, show(own[key]), show(baseline[key])) for key, label, show in known]


def history_of(log: list[dict], most: int = 20) -> list[tuple[str, ...]]:
    """Rows of the evaluations during the training, with the training loss logged last; evenly thinned to `most`."""
    rows, loss = [], None

    def shown(value: float | None) -> str:
        return "–" if value is None else f"{value:.4f}"

    for entry in log:
        if "train_runtime" in entry:
            break
        loss = entry.get("loss", loss)
        if "eval_loss" in entry:
            values = (entry.get("epoch"), loss, entry["eval_loss"])
            rows.append((format_number(entry.get("step")), *map(shown, values)))
    if len(rows) <= most:
        return rows
    return [rows[round(index * (len(rows) - 1) / (most - 1))] for index in range(most)]


# How it was trained.

VERDICTS = {
    "unprobed": "kept without a test",
    "kept": "kept after a test",
    "shrunk": "halved after a test",
    "rejected": "undone after a test",
    "rolled_back": "undone later, because training went wrong",
}
"""What became of a leap, in words."""


def settings_of(args) -> dict[str, Any]:
    """The options that decide a training, in the order in which people ask for them."""
    optim = optimizer_name(args)
    length = {"max_steps": args.max_steps} if args.max_steps > 0 else {"num_train_epochs": args.num_train_epochs}
    # DataParallel splits a batch over the devices of one process.
    devices = args.world_size * max(1, args.n_gpu)
    found = {
        **length,
        "learning_rate": args.learning_rate,
        "lr_scheduler_type": str(getattr(args.lr_scheduler_type, "value", args.lr_scheduler_type)),
        "warmup_steps": args.warmup_steps,
        "per_device_train_batch_size": args.per_device_train_batch_size,
        "gradient_accumulation_steps": args.gradient_accumulation_steps,
        "sequences per step": args.per_device_train_batch_size * args.gradient_accumulation_steps * devices,
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


def _is_telling(option: str) -> bool:
    # Where files go and what is shown meanwhile says nothing about the model.
    silent = ("output_dir", "logging_dir", "run_name", "resume_from_checkpoint", "disable_tqdm", "report_to")
    return option not in silent and "hub" not in option


def memory_of(trainer, summary: dict) -> dict[str, Any] | None:
    """Measured peaks by phase where a profiler ran, else the bytes held when training ended, by category."""
    for callback in trainer.callback_handler.callbacks:
        profile = getattr(callback, "summary", None)
        profile = profile() if callable(profile) else None
        if isinstance(profile, dict) and profile.get("phases"):
            return _profiled(profile["phases"])
    held = (summary.get("memory") or {}).get("held") or {}
    places = [place for place in ("device", "host") if held.get("total", {}).get(place)]
    names = {"states": "optimizer states", "drift": "prediction"}
    rows = [
        (names.get(category, category), *(format_bytes(found[place]) for place in places))
        for category, found in held.items()
        if any(found[place] for place in places)
    ]
    both = " Device and host are both RAM here." if len(places) > 1 and trainer.args.device.type == "cpu" else ""
    about = (
        "Bytes held between steps at the end of training, counted from the tensors. Activations and temporary memory "
    )
    return {"about": f"{about}are not included.{both}", "headers": ("", *places), "rows": rows} if rows else None


def _profiled(phases: dict[str, dict]) -> dict[str, Any]:
    on_device = any("peak_allocated" in found for found in phases.values())
    name = "peak_allocated" if on_device else "peak_rss"
    whose = "torch's allocator on the device" if on_device else "resident memory of the process with all libraries"
    rows = [
        (phase.capitalize(), found["records"], *(format_bytes(found[name][key]) for key in ("mean", "max")))
        for phase, found in phases.items()
        if name in found
    ]
    headers = ("phase", "steps measured", "mean of peaks", "highest")
    return {"about": f"Measured peaks of single steps ({whose}).", "headers": headers, "rows": rows}


def _method_of(trainer) -> dict[str, str | None]:
    """TRL's trainers name their method and its paper."""
    paper = getattr(trainer, "_paper", None) or {}
    keys = {"title": "title", "paper": "id", "citation": "citation"}
    return {"name": getattr(trainer, "_name", None), **{name: paper.get(key) for name, key in keys.items()}}


def _time(seconds: float | None, summary: dict) -> dict[str, str]:
    in_steps = sum((summary.get("seconds_by_phase") or {}).values())
    if seconds is not None and in_steps <= 1.05 * seconds:
        return {"Wall time of training": format_seconds(seconds)}
    # The run was resumed, or goes on: `train_runtime` covers one start, or is not there yet.
    return {"Time in steps, over all starts": format_seconds(in_steps)} if in_steps else {}


def papers_of(trainer, summary: dict) -> list[tuple[str, str]]:
    """Title and address of the papers behind the optimizer and the leaps of the run."""
    custom = getattr(trainer, "custom_direction", None)
    found = list(Orthogonal.papers) if optimizer_name(trainer.args) == "muon" else []
    direction = direction_class(custom or DIRECTIONS.get(summary.get("direction"), Direction))
    return unique(found + list(direction.papers if summary.get("leaps") else ()))


# Metadata.


def metadata_of(facts: dict[str, Any], given: dict[str, Any], ids: list[str], evaluated: dict[str, dict]) -> dict:
    """The YAML block as the Hub accepts it; an evaluation of other weights than the published ones is not a result."""
    model, found, name = facts["model"], facts["evaluation"], one_line(facts["name"])
    metrics = found["metrics"] if found and found["of_final_weights"] else {}
    results = [_result(key, value, model["task"], given, evaluated) for key, value in metrics.items()]
    tags = ["generated_from_trainer", *given["tags"]]
    if model["adapter"]:
        tags += [model["adapter"].lower(), *["transformers"] * model["in_transformers"]]
        tags += [f"base_model:adapter:{model['base']}"] * bool(model["base"])
    data = ModelCardData(
        library_name="peft" if model["adapter"] else "transformers",
        **{key: given.get(key) for key in ("language", "license", "license_name", "license_link")},
        base_model=model["base"],
        base_model_relation=("adapter" if model["adapter"] else "finetune") if model["base"] else None,
        pipeline_tag=model["task"],
        tags=unique(one_line(tag) for tag in tags),
        datasets=ids or None,
        metrics=unique(r.metric_type for r in results if r.metric_type in (*METRIC_TAGS, "perplexity")) or None,
        model_name=name,
        eval_results=results or None,
    )
    # With results, `ModelCardData` keeps the name only inside of the model index.
    return {**data.to_dict(), "model_name": name}


def _result(key: str, value: float, task: str | None, given: dict[str, Any], evaluated: dict[str, dict]) -> EvalResult:
    # With several evaluation sets a metric is logged as `NAME_metric`.
    name = max((name for name in evaluated if name and key.startswith(f"{name}_")), key=len, default="")
    metric, data = key.removeprefix(f"{name}_") if name else key, evaluated.get(name) or data_facts(None)
    ids, names, args = given["datasets"], given["dataset_names"], given["dataset_args"]
    return EvalResult(
        task_type=task or "other",
        # Results of the same type share an entry, so evaluation sets without an id have their name instead.
        dataset_type=one_line(ids[0] if ids else data["hub_id"] or name or "unknown"),
        dataset_name=one_line(name or (names[0] if names else None) or data["hub_id"] or "evaluation set of the run"),
        dataset_config=data["config"],
        dataset_split=data["split"],
        dataset_args={"config": one_line(args[0])} if args else None,
        metric_type=one_line(metric),
        metric_name=one_line(metric.replace("_", " ").capitalize()),
        metric_value=value,
    )
