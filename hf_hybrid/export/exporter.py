"""
Export a run as a merged or a low-bit model, and if asked measure the held-out loss that this costs.

The order of work. Everything that can be refused is refused first: an output that exists, a folder that is not whole, a
format that cannot be written. Adapters are merged. The format is written, with tokenizer, generation config, card and
`export.json`, in a folder beside the output, which takes its name as the last step: an output is whole or is not there.
Only then the loss is measured: of the original, and of the export as it is loaded from its files. `export.json` and the
card are written anew with both.
"""

from __future__ import annotations

import logging
import os
import re
import shlex
import shutil
import textwrap
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import ModelCard
from huggingface_hub.constants import REPOCARD_NAME
from huggingface_hub.utils import yaml_dump
from safetensors import SafetensorError

from hf_hybrid.export import measure
from hf_hybrid.export.bitnet import NOT_TRAINED, trains_bitnet
from hf_hybrid.export.formats import FORMATS, GGUF_NAME, MERGED, ExportError, check_format, device, load, write
from hf_hybrid.export.modelfile import MODELFILE_NAME
from hf_hybrid.export.rounding import HALVES
from hf_hybrid.export.source import check_source, plain_folder, read_config, read_tokenizer
from hf_hybrid.files import is_disk_full, write_json, write_text
from hf_hybrid.hub import provenance
from hf_hybrid.records.redaction import redact, shareable
from hf_hybrid.records.summary import format_bytes, format_number

logger = logging.getLogger(__name__)

RESULT_NAME = "export.json"
DTYPES = ("auto", "float32", "bfloat16", "float16")
_WRITTEN_BY = re.compile(r"^\*Written by `hf_hybrid` \d", re.MULTILINE)
"""Begins a line in every card of this package. Others may speak of it."""


def export(
    source: str | os.PathLike,
    output: str | os.PathLike,
    format: str,
    *,
    batches: Iterable[Mapping[str, Any]] | None = None,
    dtype: str = "auto",
    max_shard_size: str = "5GB",
    card: str | os.PathLike | None = None,
    when_written: Callable[[], None] | None = None,
    progress: Callable[[str, list], Iterable] = lambda name, batches: batches,
) -> dict[str, Any]:
    """
    Export a saved model, or adapters with their base.

    Args:
        source (`str` or `PathLike`): Folder of a run or of a checkpoint, with safetensors. It is only read.
        output (`str` or `PathLike`): Folder to write, which must not exist or be empty.
        format (`str`): Of `FORMATS`, for example `merged`, `int8` or `gguf-q8_0`.
        batches (*optional*):
            Held-out batches with `labels`, as the model's `forward` takes them. Without them no loss is measured.
        dtype (`str`, *optional*):
            Of the weights that are not quantised. `auto`: as they are saved; in `merged` float16 if they are saved
            so, else bfloat16.
        max_shard_size (`str`, *optional*): Of a file of weights. A GGUF file is not split.
        card (`str` or `PathLike`, *optional*): Model card of the run, if this package wrote it. Default: in `source`.
        when_written (*optional*): Called when the output is whole, before its loss is measured.
        progress (*optional*): Called with `original` or `exported` and the batches, which it returns one by one.

    Returns:
        `dict`: What `export.json` holds: `format`, `dtype` and `rounding` of the weights that are not quantised
        (`stochastic` or `nearest`), `caveat` (what to know before the model is used, or `None`), `original` and
        `exported` (each with `disk_bytes`, `loss` and `perplexity`), `loss_change` (relative), `sequences` and `tokens`
        that the loss is of, and where this was done. What was not measured is `None`.

    Raises:
        ExportError: If the run is not whole, the format cannot be written, or `output` exists. Nothing is left behind.
        ValueError: If the batches have no labels.
    """
    source, output = Path(source), Path(output)
    check_output(output)
    if dtype not in DTYPES:
        raise ExportError(f"`dtype` must be one of {', '.join(DTYPES)}, got `{dtype}`.")
    check_source(source)
    config, tokenizer = read_config(source), read_tokenizer(source)
    own = config.dtype if isinstance(config.dtype, torch.dtype) else torch.float32
    weights = own if dtype == "auto" else getattr(torch, dtype)
    if format == MERGED and dtype == "auto" and own is not torch.float16:
        weights = torch.bfloat16
    check_format(format, config, tokenizer, source)
    held_out = measure.checked(batches or ())
    warning = NOT_TRAINED if format == "bitnet" and not trains_bitnet(config) else None
    if warning is not None:
        logger.warning(warning)
    run_card = _card_of_run(Path(card or source / REPOCARD_NAME))
    stochastic = format == MERGED and weights in HALVES and own in (torch.float32, weights)
    result: dict[str, Any] = {
        "format": format,
        "dtype": str(weights).removeprefix("torch."),
        "caveat": warning,
        "rounding": "stochastic" if stochastic else "nearest",
        "command": provenance.command(),
        "hardware": provenance.hardware(device().type, 1, 1),
        "device": device().type,
        "versions": provenance.versions(FORMATS[format].package or ""),
        "loss_change": None,
        "sequences": 0,
        "tokens": 0,
    }

    def describe(folder: Path) -> None:
        shared = shareable(result)
        write_json(folder / RESULT_NAME, shared)
        write_text(folder / REPOCARD_NAME, export_card(run_card, output.name, shared, tokenizer))

    with _workshop(output) as work:
        plain, exported = plain_folder(source, work, as_trained=format == MERGED), work / "model"
        title = output.name.removesuffix(f"-{format}")
        kept = write(format, plain, exported, tokenizer, own, weights, max_shard_size, title)
        if kept:
            said = f"`format={format}` quantises linear layers. Weights of experts that lie in one tensor stay in "
            said += f"{result['dtype']}: {kept:.0%} of the model."
            logger.warning(said)
            result["caveat"] = " ".join(filter(None, (warning, said)))
        for name, folder in (("original", plain), ("exported", exported)):
            result[name] = {"disk_bytes": measure.disk_bytes(folder), "loss": None, "perplexity": None}
        describe(exported)
        os.replace(exported, output)
        if when_written is not None:
            when_written()
        if held_out:
            for name, folder, loaded in (("original", plain, own), ("exported", output, weights)):
                measured = measure.held_out(load(folder, loaded), progress(name, held_out))
                result |= {count: measured.pop(count) for count in ("sequences", "tokens")}
                result[name] |= measured
            result["loss_change"] = result["exported"]["loss"] / result["original"]["loss"] - 1
            describe(output)
    return shareable(result)


def check_output(output: Path) -> None:
    """Refuse to write over anything, a link to an empty folder too, with an [`ExportError`]."""
    if output.is_symlink():
        raise ExportError(f"`{output}` is a link, and nothing is written through one. Name the folder, or delete it.")
    if output.exists() and not (output.is_dir() and not any(output.iterdir())):
        raise ExportError(f"`{output}` exists, and nothing is written over. Name another folder, or delete this one.")


@contextmanager
def _workshop(output: Path) -> Generator[Path]:
    """A folder beside the output, on the same disk; what a killed export left in it is removed."""
    work = output.absolute().with_name(f"_{output.name}.unfinished")
    shutil.rmtree(work, ignore_errors=True)
    try:
        work.mkdir(parents=True)
        yield work
    except ValueError:
        raise
    except Exception as error:
        # safetensors, tokenizers and torch have errors of their own for a disk that is full.
        if isinstance(error, (OSError, SafetensorError)) or is_disk_full(error):
            raise ExportError(f"`{output}` cannot be written: {error}. Free space, or name another folder.") from error
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ExportError(  # whatever a broken config leads to
            f"The model cannot be exported or measured: {reason} ({type(error).__name__}). Save it again with "
            "`trainer.save_model()`, or export an earlier checkpoint."
        ) from error
    finally:
        shutil.rmtree(work, ignore_errors=True)


# The numbers for people: on the terminal and in the card.


def rows(result: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Return the rows of the table: title, value of the original, value of the export."""
    original, exported = result["original"], result["exported"]
    measures = [("loss", "eval loss", "{:.4f}".format), ("perplexity", "perplexity", format_number)]
    measures = [*measures, ("disk_bytes", "weights on disk", format_bytes)]
    lines = [
        (title, show(original[name]), show(exported[name]))
        for name, title, show in measures
        if original[name] is not None
    ]
    if result["loss_change"] is not None:
        title, before, after = lines[0]
        lines[0] = (title, before, f"{after} ({100 * result['loss_change']:+.2f} %)")
    return lines


def measured_on(result: Mapping[str, Any]) -> str:
    """Say on what data and hardware the loss was measured."""
    if not result["tokens"]:
        return "No held-out loss was measured."
    on = result["hardware"].get("Accelerator", result["hardware"]["CPU"])
    return (
        f"The loss is of {result['tokens']:,} tokens in {result['sequences']:,} held-out sequences, measured on {on}."
    )


def as_text(result: Mapping[str, Any], width: int = 80) -> str:
    """Return the table for a terminal of so many columns, and below it sentences that are wrapped to it."""
    lines = [("", "original", result["format"]), *rows(result)]
    widths = [max(map(len, column)) for column in zip(*lines)]
    shown = [f"{title:{widths[0]}}  {before:>{widths[1]}}  {after:>{widths[2]}}" for title, before, after in lines]
    said = [textwrap.fill(text, width) for text in (measured_on(result), result["caveat"]) if text is not None]
    return "\n".join([*map(str.rstrip, shown), *said]) + "\n"


def export_card(card: ModelCard | None, name: str, result: Mapping[str, Any], tokenizer: Any) -> str:
    """Return the card of an export: that of the run, whose results and usage give way, or a short one under `name`."""
    card = card or ModelCard(f"---\nlibrary_name: transformers\n---\n\n# {name}\n")
    metadata = {key: value for key, value in card.data.to_dict().items() if key not in ("model-index", "metrics")}
    tags = [tag for tag in provenance.listed(metadata.get("tags")) if isinstance(tag, str)]
    tags = [tag for tag in tags if not tag.startswith("base_model:adapter:")]
    metadata["tags"] = provenance.unique([*tags, "hf-hybrid", *["quantized"] * (result["format"] != MERGED)])
    metadata["library_name"] = "transformers"  # peft loads the card's run, but not the export
    if metadata.get("base_model_relation") == "adapter":
        metadata["base_model_relation"] = "finetune"
    head, *sections = re.split(r"^(?=## )", card.text.strip() + "\n", flags=re.M)
    merged = r"The adapter of a run is merged into these weights. The run trained a \1 adapter for "
    head = re.sub(r"^A (\S+) adapter for ", merged, head, flags=re.M)
    others = [section for section in sections if not section.startswith(("## Results", "## Usage"))]
    own = [_section(result, tokenizer), _serving(name, result["format"], tokenizer)]
    body = re.sub(r"\n{3,}", "\n\n", "\n".join([head, *own, *others]))
    return f"---\n{yaml_dump(metadata, sort_keys=False).strip()}\n---\n\n{body.strip()}\n"


def _card_of_run(path: Path) -> ModelCard | None:
    """The card of the run without secrets, which people add too, if this package wrote it and nobody broke it since."""
    try:
        text = path.read_text(encoding="utf-8") if path.is_file() else ""
        return ModelCard(redact(text)) if _WRITTEN_BY.search(text) else None
    except Exception as error:  # whatever broken metadata lead to
        logger.warning("`%s` cannot be read, and the export gets a short card: %s", path, " ".join(str(error).split()))
        return None


def _section(result: Mapping[str, Any], tokenizer: Any) -> str:
    form, merged = FORMATS[result["format"]], result["format"] == MERGED
    kept = "They are" if merged else "What is not quantised is"
    rounding = ", rounded stochastically" if result.get("rounding") == "stochastic" else ""
    table = [f"| | original | {result['format']} |", "|---|---:|---:|"]
    table += [f"| {title} | {before} | {after} |" for title, before, after in rows(result)]
    classes, gguf_file = "AutoModelForCausalLM", f', gguf_file="{GGUF_NAME}"' * (form.package == "gguf")
    code = [f'model = AutoModelForCausalLM.from_pretrained("path/to/this/folder"{gguf_file})']
    if tokenizer is not None:
        classes += ", AutoTokenizer"
        code.append('tokenizer = AutoTokenizer.from_pretrained("path/to/this/folder")')
    paragraphs = [
        "## Merged export" if merged else "## Low-bit export",
        f"The weights are those of the run below in the format `{result['format']}`, {form.about}. {kept} in "
        f"{result['dtype']}{rounding}.",
        result["caveat"],
        "\n".join(table),
        measured_on(result),
        "## Usage",
        form.package and f"It needs `{form.package}` {result['versions'][form.package]} or newer.",
        "\n".join(["```python", f"from transformers import {classes}", "", *code, "```"]),
    ]
    return "\n\n".join(filter(None, paragraphs)) + "\n"


def serving(folder: str, name: str) -> list[str]:
    """Return the commands that serve a GGUF file in a folder under a name: llama.cpp's and Ollama's."""
    tag = re.sub(r"[^a-z0-9._-]+", "-", name.lower()).strip("-._") or "model"
    model, modelfile = (shlex.quote(os.path.join(folder, file)) for file in (GGUF_NAME, MODELFILE_NAME))
    return [f"llama-server -m {model}", f"ollama create {tag} -f {modelfile} && ollama run {tag}"]


def _serving(name: str, format: str, tokenizer: Any) -> str:
    """How servers load an export, and what of it was tried; empty for formats that none of them is known to load."""
    if tokenizer is None:
        return ""
    if FORMATS[format].package == "gguf":
        chats = ", with the chat template that is in it" if getattr(tokenizer, "chat_template", None) else ""
        said = f"llama.cpp and Ollama take `{GGUF_NAME}`{chats}. Files of this format were run in llama.cpp itself "
        said += "when `hf_hybrid` was tested (node-llama-cpp). This file, these lines and Ollama were not tried."
        commands = "\n".join(serving("", name))
    elif format == MERGED:
        said = "vLLM takes this folder, if it knows the architecture. This line was not tried."
        commands = "vllm serve path/to/this/folder"
    else:
        return ""
    return f"## Serving\n\n{said}\n\n```bash\n{commands}\n```\n"
