"""The model card: metadata that the Hub accepts, and sections that say what the run knows and nothing else."""

from __future__ import annotations

import json
import math
from datetime import datetime, timezone
from typing import Any

from huggingface_hub.utils import yaml_dump

from hf_hybrid import __version__
from hf_hybrid.report.facts import DataFacts, RunFacts
from hf_hybrid.report.limits import limits
from hf_hybrid.report.markdown import block, bullets, code, join, one_line, table, text
from hf_hybrid.report.metadata import metadata, unique
from hf_hybrid.report.provenance import clean, command, hardware, tracker_links, versions
from hf_hybrid.report.summary import format_bytes, format_number, format_seconds

_HELD = {"states": "optimizer states", "drift": "prediction"}
_CLASSES = {"text-generation": "AutoModelForCausalLM", "text-classification": "AutoModelForSequenceClassification"}

# As in CITATION.cff, which is not part of the installed package.
_SOFTWARE = {
    "title": "hf_hybrid: predicted, verified weight leaps and streamed training for transformers.Trainer",
    "author": "The hf_hybrid contributors",
    "license": "Apache-2.0",
    "version": __version__,
}
_MUON = {
    "Muon: An optimizer for hidden layers in neural networks": "https://kellerjordan.github.io/posts/muon/",
    "Muon is Scalable for LLM Training": "https://arxiv.org/abs/2502.16982",
}
_ADEMAMIX = {"The AdEMAMix Optimizer: Better, Faster, Older": "https://arxiv.org/abs/2409.03137"}
_OF_DIRECTIONS = {"orthogonal": _MUON, "gradient_memory": _ADEMAMIX}


def render(facts: RunFacts, given: dict[str, Any], baseline: dict[str, Any] | None = None) -> str:
    """
    The whole card.

    Args:
        facts: Of the run.
        given: As for [`metadata`].
        baseline: What another run reached: `name`, `eval_loss`, `backward_passes`, `seconds`, `note`.
    """
    fields, compared = metadata(facts, given), compare(facts, baseline)
    sections = [
        f"# {text(facts.name)}",
        introduction(facts, given),
        _section("## Results", *results(facts), compared),
        _section("## Usage", usage(facts)),
        _section("## Training", *training(facts, given)),
        _section("## Limits and intended use", bullets(map(text, limits(facts, "license" in fields, bool(compared))))),
        _section("## Citation", *citations(facts)),
        _signature(),
    ]
    front = yaml_dump(fields, sort_keys=False).strip()
    return f"---\n{front}\n---\n\n" + "\n\n".join(filter(None, sections)) + "\n"


def _section(heading: str, *parts: str) -> str:
    """Nothing to say, no heading."""
    found = [part for part in parts if part]
    return "\n\n".join([heading, *found]) if found else ""


def introduction(facts: RunFacts, given: dict[str, Any]) -> str:
    """What the model is, what it began with, what it was trained on, with what."""
    model = facts.model
    parameters = f"{format_number(model.parameters)} parameters"
    if model.adapter:
        what = f"A {text(model.adapter)} adapter for {code(model.class_name)} ({parameters} with it)"
    else:
        what = f"A {code(model.class_name)} with {parameters}"
    if model.base:
        began = f", {'on' if model.adapter else 'fine-tuned from'} {_hub_link(model.base)}"
    elif model.base_is_local:
        began = ", fine-tuned from weights that lay in a local folder"
    elif model.config_of:
        began = f", built with the configuration of {_hub_link(model.config_of)} and without its weights"
    else:
        began = ", trained from random weights" if not model.adapter else ", on a base that was built from its config"
    if 0 < model.trainable < model.parameters:
        share = 100 * model.trainable / model.parameters
        began += f"; {format_number(model.trainable)} of them ({share:.2g} %) were trained"
    method = f" by {text(facts.method['name'])}" if "name" in facts.method else ""
    trained = f"It was trained{method} with {code(facts.trainer)} (`hf_hybrid`)"
    about = _names_of_data(facts, given)
    return f"{what}{began}. {trained}{' on ' + about if about else ''}."


def _hub_link(name: str, kind: str = "") -> str:
    return f"[{text(name)}](https://huggingface.co/{kind}{name})"


def _names_of_data(facts: RunFacts, given: dict[str, Any]) -> str:
    ids = given.get("datasets") or unique([facts.train.hub_id])
    names = given.get("dataset_names")
    if names and names != ids:
        return join([text(name) for name in names])
    return join([_hub_link(name, "datasets/") for name in ids])


def results(facts: RunFacts) -> list[str]:
    """The evaluation: of what, on what, when."""
    found, parts = facts.evaluation, []
    if found is not None:
        metrics = {**found.metrics, **({} if found.perplexity is None else {"perplexity": found.perplexity})}
        rows = [(text(key.replace("_", " ")), format_number(value)) for key, value in metrics.items()]
        parts.append(table(("metric", "value"), rows))
        sets = ", ".join(filter(None, (_described(data, name) for name, data in facts.evaluated.items())))
        where = f" on {sets}" if sets else ""
        whose = "" if found.of_final_weights else ": **not of the weights published here**, which are of a later step"
        about = f"Evaluated{where} at step {found.step:,}{whose}."
        if found.perplexity is not None:
            about += " Perplexity is the exponential of the loss."
        parts.append(about)
    return parts


def _described(data: DataFacts, name: str = "") -> str:
    parts = [f"{data.sequences:,} sequences" if data.sequences is not None else ""]
    if data.hub_id:
        origin = _hub_link(data.hub_id, "datasets/")
        config = f" (configuration {code(data.config)})" if data.config and data.config != "default" else ""
        parts.append(f"from {origin}{config}" + (f", split {code(data.split)}" if data.split else ""))
    described = " ".join(filter(None, parts))
    return f"{code(name)}: {described}" if name and described else described or code(name)


def compare(facts: RunFacts, baseline: dict[str, Any] | None) -> str:
    """This run beside a baseline: only what both have."""
    if not baseline:
        return ""
    final = facts.evaluation is not None and facts.evaluation.of_final_weights
    own = {
        "eval_loss": facts.evaluation.metrics.get("loss") if final else None,
        "backward_passes": facts.summary.get("backward_passes") or None,
        "seconds": facts.seconds,
    }
    shown = {"eval_loss": ("evaluation loss", "{:.4f}".format), "backward_passes": ("backward passes", format_number)}
    shown["seconds"] = ("wall time of training", format_seconds)
    rows = [
        (label, show(own[key]), show(baseline[key]))
        for key, (label, show) in shown.items()
        if own[key] is not None and baseline.get(key) is not None
    ]
    if not rows:
        return ""
    note = f" ({text(baseline['note'])})" if baseline.get("note") else ""
    caption = f"Against {text(baseline['name'])}, one run each{note}:"
    return f"{caption}\n\n{table(('', 'this model', text(baseline['name'])), rows)}"


def usage(facts: RunFacts) -> str:
    """Code that loads the model as it was saved; nothing for classes that only their author can import."""
    model, place = facts.model, one_line(clean(facts.location))
    if not model.in_transformers:
        return ""
    where = json.dumps(place)
    if model.adapter:
        return _adapter_usage(facts, where)
    class_name = _CLASSES.get(model.task or "", model.class_name)
    lines = [f"model = {class_name}.from_pretrained({where})"]
    names = [class_name]
    if model.has_tokenizer:
        names.append("AutoTokenizer")
        lines.append(f"tokenizer = AutoTokenizer.from_pretrained({where})")
    return block("\n".join([f"from transformers import {', '.join(names)}", "", *lines, *_generation(facts)]), "python")


def _adapter_usage(facts: RunFacts, where: str) -> str:
    model = facts.model
    names = [] if model.base else [_CLASSES.get(model.task or "", model.class_name)]
    names += ["AutoTokenizer"] if model.has_tokenizer else []
    lines = [f"from transformers import {', '.join(names)}"] if names else []
    if model.base and model.task == "text-generation":
        lines += ["from peft import AutoPeftModelForCausalLM", ""]
        lines.append(f"model = AutoPeftModelForCausalLM.from_pretrained({where})  # fetches the base model too")
        before = ""
    elif model.base:
        lines += ["from peft import AutoPeftModel", "", f"model = AutoPeftModel.from_pretrained({where})"]
        before = ""
    else:
        lines += ["from peft import PeftModel", ""]
        lines.append(f'base = {names[0]}.from_pretrained("path/to/the/base")')
        lines.append(f"model = PeftModel.from_pretrained(base, {where})")
        before = "The base model is not on the Hub: the adapter is of use only with the weights that it was trained on."
    if model.has_tokenizer:
        lines.append(f"tokenizer = AutoTokenizer.from_pretrained({where})")
    code_block = block("\n".join([*lines, *_generation(facts)]), "python")
    return f"{before}\n\n{code_block}" if before else code_block


def _generation(facts: RunFacts) -> list[str]:
    if facts.model.task != "text-generation" or not facts.model.has_tokenizer:
        return []
    if facts.model.is_chat:
        messages = '[{"role": "user", "content": "What is a gradient?"}]'
        lines = [
            f"messages = {messages}",
            'inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", '
            "return_dict=True)",
        ]
    else:
        lines = ['inputs = tokenizer("The", return_tensors="pt", return_token_type_ids=False)']
    return ["", *lines, "print(tokenizer.decode(model.generate(**inputs, max_new_tokens=40)[0]))"]


# Training.


def training(facts: RunFacts, given: dict[str, Any]) -> list[str]:
    """How the model came to be: data, settings, phases, memory, hardware, command, versions."""
    secrets = facts.secrets
    settings = [(code(key), code(clean(value, secrets))) for key, value in facts.settings.items()]
    made = {**hardware(facts.device, facts.processes, facts.devices), **_time(facts)}
    started = command(secrets)
    more = [*(["peft"] if facts.model.adapter else []), *(["trl"] if facts.method else [])]
    packages = versions(*more)
    links = [f"[{name}](<{one_line(link)}>)" for name, link in tracker_links().items()]
    return [
        _section("### Data", _data(facts)),
        _section("### Settings", table(("option", "value"), settings)),
        _section("### Phases", *phases(facts)),
        _section("### Course of the training", _history(facts), join(links)),
        _section("### Memory", *memory(facts)),
        _section("### Hardware and time", table(("", ""), [(key, text(value)) for key, value in made.items()])),
        _section("### Command", block(started, "bash") if started else ""),
        _section("### Versions", bullets(f"{name} {text(version)}" for name, version in packages.items())),
    ]


def _data(facts: RunFacts) -> str:
    lines = [f"Training: {_described(facts.train)}."] if _described(facts.train) else []
    if facts.held_out and facts.summary.get("leaps"):
        lines.append(
            f"{facts.held_out:,} more sequences were held out to verify leaps on, and so had a say in the training."
        )
    return " ".join(lines)


def phases(facts: RunFacts) -> list[str]:
    """Steps and seconds by phase, what became of the leaps, and the options behind them."""
    summary = facts.summary
    steps, seconds = summary.get("steps_by_phase") or {}, summary.get("seconds_by_phase") or {}
    if not sum(steps.values()):
        return []
    rows = [
        (name.capitalize(), format_number(count), format_seconds(seconds.get(name) if count else None))
        for name, count in steps.items()
    ]
    about = [f"Direction of leaps: {code(summary['direction'])}."] if "direction" in summary else []
    done, avoided = summary["backward_passes"], summary["backward_passes_avoided"]
    about.append(f"Backward passes: {done:,} done, {avoided:,} avoided.")
    if summary["leaps"]:
        verdicts = sorted(summary["leaps_by_verdict"].items())
        kinds = ", ".join(f"{count:,} {verdict.replace('_', ' ')}" for verdict, count in verdicts)
        about.append(f"Leaps: {len(summary['leaps']):,} ({kinds}).")
    if summary["forward_only_passes"]:
        about.append(f"Forward passes that verified leaps: {summary['forward_only_passes']:,}.")
    scale = summary.get("learning_rate_scale", 1.0)
    if not math.isclose(scale, 1.0):
        about.append(f"The learning rate was multiplied by {scale:.3g} in the end (learning-rate rescue).")
    tail = summary.get("tail_average")
    if tail:
        kept = "took their place" if tail["kept"] else "was not better and was dropped"
        about.append(f"The mean of the weights over the last {tail['steps']:,} real steps {kept}.")
    options = [(code(key), code(clean(value, facts.secrets))) for key, value in facts.hybrid_options.items()]
    parts = [table(("phase", "steps", "time"), rows), " ".join(about)]
    if options:
        parts += ["Options of hybrid training that differ from their defaults:", table(("option", "value"), options)]
    return parts


def _history(facts: RunFacts) -> str:
    def number(value: float | None) -> str:
        return "–" if value is None else f"{value:.4f}"

    rows = [
        (format_number(row["step"]), number(row["epoch"]), number(row["loss"]), number(row["eval_loss"]))
        for row in facts.history
    ]
    return table(("step", "epoch", "training loss", "evaluation loss"), rows)


def memory(facts: RunFacts) -> list[str]:
    """Measured peaks by phase where a profiler ran, else the bytes held when training ended, by category."""
    if facts.profile is not None:
        return [*_profiled(facts.profile), _out_of_memory(facts)]
    held = (facts.summary.get("memory") or {}).get("held") or {}
    places = [place for place in ("device", "host") if held.get("total", {}).get(place)]
    rows = [
        (text(_HELD.get(name, name)), *(format_bytes(found[place]) for place in places))
        for name, found in held.items()
        if any(found[place] for place in places)
    ]
    if not rows:
        return []
    about = "Bytes held between steps at the end of training, counted from the tensors. Activations and temporary "
    about += "memory are not among them."
    if len(places) > 1 and facts.device == "cpu":
        about += " The device is the CPU, both are RAM."
    return [about, table(("", *places), rows), _out_of_memory(facts)]


def _out_of_memory(facts: RunFacts) -> str:
    events = facts.summary.get("out_of_memory") or []
    times = "once" if len(events) == 1 else f"{len(events)} times"
    return f"Memory ran out {times} and the run recovered." if events else ""


def _profiled(profile: dict[str, Any]) -> list[str]:
    on_device = any("peak_allocated" in found for found in profile["phases"].values())
    name = "peak_allocated" if on_device else "peak_rss"
    rows = []
    for phase, found in profile["phases"].items():
        if name in found:
            peaks = [format_bytes(found[name][key]) for key in ("mean", "max")]
            rows.append((text(phase.capitalize()), format_number(found["records"]), *peaks))
    if not rows:
        return []
    what = "torch's allocator on the device" if on_device else "the process, resident memory with all libraries"
    about = f"Peaks of single steps, measured ({what})."
    return [about, table(("phase", "steps measured", "mean of peaks", "highest"), rows)]


def _time(facts: RunFacts) -> dict[str, str]:
    in_steps = sum((facts.summary.get("seconds_by_phase") or {}).values())
    found = {}
    if facts.seconds is not None and in_steps <= 1.05 * facts.seconds:
        found["Wall time of training"] = format_seconds(facts.seconds)
    elif in_steps:  # of all starts of a resumed run, or of one that goes on
        found["Time in steps, over all starts"] = format_seconds(in_steps)
    return found


def citations(facts: RunFacts) -> list[str]:
    """Of the trainer's method, where it names a paper; of this software; of what optimizer and leaps rest on."""
    method, parts = facts.method, []
    if {"title", "paper"} <= method.keys():
        page = f"https://huggingface.co/papers/{method['paper']}"
        parts.append(f"{text(method['name'])}: [{text(method['title'])}]({page})")
        parts.append(block(method["citation"], "bibtex") if "citation" in method else "")
    fields = ",\n".join(f"  {name:<7} = {{{{{value}}}}}" for name, value in _SOFTWARE.items())
    parts += ["`hf_hybrid`, which it was trained with:", block(f"@software{{hf_hybrid,\n{fields}\n}}", "bibtex")]
    papers = dict(_MUON) if facts.settings.get("optim") == "muon" else {}
    if facts.summary.get("leaps"):
        papers |= _OF_DIRECTIONS.get(facts.summary["direction"], {})
    if papers:
        links = bullets(f"[{text(title)}]({link})" for title, link in papers.items())
        parts.append(f"The methods that its optimizer or its leaps rest on:\n\n{links}")
    return parts


def _signature() -> str:
    today = datetime.now(timezone.utc).strftime("%Y-%m-%d")
    return f"*Written by `hf_hybrid` {versions().get('hf_hybrid', '')} on {today} from what the run recorded.*"
