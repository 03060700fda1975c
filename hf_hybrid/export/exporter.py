"""
Export a run as a merged or a low-bit model, measure what that costs, and write both down.

The order of work. Everything that can be refused is refused first: an output that exists, a folder that is not whole, a
format that cannot be written. Adapters are merged. The format is written, with tokenizer and generation config. The
files are then loaded again, as a user will load them, and it is that model whose loss, bytes and speed are
measured beside those of the original. `export.json` and the card get the numbers. All of this happens in a folder
beside the output, which takes its name as the last step, so that an output is whole or is not there.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import textwrap
from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import ModelCard
from huggingface_hub.constants import REPOCARD_NAME
from huggingface_hub.utils import yaml_dump
from safetensors import SafetensorError

from hf_hybrid.export import measure
from hf_hybrid.export.formats import (
    FORMATS,
    GGUF_NAME,
    MERGED,
    ExportError,
    caveat,
    check_format,
    device,
    kept_dtype,
    load,
    write,
)
from hf_hybrid.export.rounding import HALVES
from hf_hybrid.export.source import check_source, plain_folder, read_config, read_tokenizer
from hf_hybrid.files import is_disk_full, write_json, write_text
from hf_hybrid.hub import provenance
from hf_hybrid.records.redaction import shareable
from hf_hybrid.records.summary import format_bytes, format_number

logger = logging.getLogger(__name__)

RESULT_NAME = "export.json"
SHARD = "5GB"
DTYPES = ("auto", "float32", "bfloat16", "float16")
_WRITTEN_BY = "*Written by `hf_hybrid`"
"""In every card of this package, and in no other."""


def export(
    source: str | os.PathLike,
    output: str | os.PathLike,
    format: str,
    *,
    batches: Iterable[Mapping[str, Any]] | None = None,
    dtype: str = "auto",
    max_shard_size: str = SHARD,
    card: str | os.PathLike | None = None,
) -> dict[str, Any]:
    """
    Export a saved model, or adapters with their base, and measure the export beside the original.

    Args:
        source (`str` or `PathLike`): Folder of a run or of a checkpoint, with safetensors. It is only read.
        output (`str` or `PathLike`): Folder to write, which must not exist or be empty.
        format (`str`): Of `FORMATS`, for example `merged`, `int8` or `gguf-q8_0`.
        batches (*optional*):
            Held-out batches with `labels`, as the model's `forward` takes them. They are read twice. Without them no
            loss is measured.
        dtype (`str`, *optional*):
            Of the weights that are not quantised. `auto`: as they are saved; in `merged` float16 if they are saved
            so, else bfloat16.
        max_shard_size (`str`, *optional*): Of a file of weights. A GGUF file is not split.
        card (`str` or `PathLike`, *optional*): Model card of the run, if this package wrote it. Default: in `source`.

    Returns:
        `dict`: What `export.json` holds: `format`, `dtype` and `rounding` of the weights that are not quantised
        (`stochastic` or `nearest`), `caveat` (what to know before the model is used, or `None`), `original` and
        `exported` (each with `loss`, `perplexity`, `disk_bytes`, `memory_bytes` and `tokens_per_second`),
        `loss_change` (relative), `sequences` and `tokens` that the loss is of, and where it was measured.

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
    kept = kept_dtype(format, dtype, own)
    check_format(format, config, tokenizer, kept)
    warning = caveat(format, config)
    if warning is not None:
        logger.warning(warning)
    with _workshop(output) as work:
        plain, exported = plain_folder(source, work, as_trained=format == MERGED), work / "model"
        write(format, plain, exported, tokenizer, own, kept, max_shard_size)
        result = {"format": format, "dtype": str(kept).removeprefix("torch."), "caveat": warning}
        stochastic = format == MERGED and kept in HALVES and own in (torch.float32, kept)
        result["rounding"] = "stochastic" if stochastic else "nearest"
        result |= _measured(plain, own, exported, kept, list(batches or ()))
        result |= {"command": provenance.command(), "hardware": provenance.hardware(device().type, 1, 1)}
        result["versions"] = provenance.versions(FORMATS[format].package or "")
        result = shareable(result)
        write_json(exported / RESULT_NAME, result)
        run_card = _card_of_run(Path(card or source / REPOCARD_NAME))
        write_text(exported / REPOCARD_NAME, export_card(run_card, output.name, result, tokenizer))
        os.replace(exported, output)
    return result


def check_output(output: Path) -> None:
    """
    Refuse to write over anything.

    Raises:
        ExportError: If there is something under the name already, a link to an empty folder too.
    """
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


def _measured(plain: Path, own: torch.dtype, exported: Path, kept: torch.dtype, batches: list) -> dict[str, Any]:
    models, folders = [load(plain, own), load(exported, kept)], (plain, exported)
    losses = [measure.held_out(model, batches) for model in models] if batches else []
    original, quantised = (
        {
            **{name: losses[index][name] if losses else None for name in ("loss", "perplexity")},
            "disk_bytes": measure.disk_bytes(folders[index]),
            "memory_bytes": measure.memory_bytes(models[index]),
            "tokens_per_second": speed,
        }
        for index, speed in enumerate(measure.generation_speeds(*models))
    )
    counts = {name: losses[0][name] if losses else 0 for name in ("sequences", "tokens")}
    change = losses[1]["loss"] / losses[0]["loss"] - 1 if losses else None
    return {"original": original, "exported": quantised, "loss_change": change, **counts, "device": device().type}


# The numbers for people: on the terminal and in the card.


def rows(result: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Return the rows of the table: title, value of the original, value of the export. Unmeasured values have none."""
    names = {
        "loss": ("eval loss", "{:.4f}".format),
        "perplexity": ("perplexity", format_number),
        "disk_bytes": ("weights on disk", format_bytes),
        "memory_bytes": ("weights in memory", format_bytes),
        "tokens_per_second": ("tokens/s", format_number),
    }
    original, exported = result["original"], result["exported"]
    lines = [
        (title, show(original[name]), show(exported[name]))
        for name, (title, show) in names.items()
        if original[name] is not None
    ]
    if result["loss_change"] is not None:
        title, before, after = lines[0]
        lines[0] = (title, before, f"{after} ({100 * result['loss_change']:+.2f} %)")
    return lines


def measured_on(result: Mapping[str, Any]) -> str:
    """Say on what data and hardware the numbers were measured."""
    on = f"Measured in one run on {result['hardware'].get('Accelerator', result['hardware']['CPU'])}"
    parts = [f"generation of {measure.GENERATED} tokens, one sequence, median of {measure.TURNS}"]
    if result["tokens"]:
        parts.insert(0, f"the loss over {result['tokens']:,} tokens in {result['sequences']:,} held-out sequences")
    no_loss = "" if result["tokens"] else " No held-out text was given, so no loss was measured."
    return f"{on}: {', and '.join(parts)}.{no_loss}"


def as_text(result: Mapping[str, Any], width: int = 80) -> str:
    """Return the table for a terminal of so many columns, and below it sentences that are wrapped to it."""
    lines = [("", "original", result["format"]), *rows(result)]
    widths = [max(map(len, column)) for column in zip(*lines)]
    shown = [f"{title:{widths[0]}}  {before:>{widths[1]}}  {after:>{widths[2]}}" for title, before, after in lines]
    said = [textwrap.fill(text, width) for text in (measured_on(result), result["caveat"]) if text is not None]
    return "\n".join([*map(str.rstrip, shown), *said]) + "\n"


def export_card(card: ModelCard | None, name: str, result: Mapping[str, Any], tokenizer: Any) -> str:
    """
    Return the card of an export.

    Args:
        card (`ModelCard`, *optional*): Of the run. Its results and usage give way to those of the export.
        name (`str`): Title, if the run has no card.
        result (`dict`): As [`export`] returns it.
        tokenizer (*optional*): That was exported.
    """
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
    kept = [section for section in sections if not section.startswith(("## Results", "## Usage"))]
    own = [_section(result, tokenizer), _serving(name, result["format"], tokenizer)]
    body = re.sub(r"\n{3,}", "\n\n", "\n".join([head, *filter(None, own), *kept]))
    return f"---\n{yaml_dump(metadata, sort_keys=False).strip()}\n---\n\n{body.strip()}\n"


def _card_of_run(path: Path) -> ModelCard | None:
    """The card of the run, if this package wrote it and nobody broke it since."""
    try:
        text = path.read_text(encoding="utf-8") if path.is_file() else ""
        return ModelCard(text) if _WRITTEN_BY in text else None
    except Exception as error:  # whatever broken metadata lead to
        logger.warning("`%s` cannot be read, and the export gets a short card: %s", path, " ".join(str(error).split()))
        return None


def _section(result: Mapping[str, Any], tokenizer: Any) -> str:
    of_gguf = f', gguf_file="{GGUF_NAME}"' if FORMATS[result["format"]].package == "gguf" else ""
    package = FORMATS[result["format"]].package
    merged = result["format"] == MERGED
    stochastically = ", rounded stochastically" if result.get("rounding") == "stochastic" else ""
    lines = [
        "## Merged export" if merged else "## Low-bit export",
        "",
        f"The weights are those of the run below in the format `{result['format']}`, "
        f"{FORMATS[result['format']].about}. "
        f"{'They are' if merged else 'What is not quantised is'} in {result['dtype']}{stochastically}.",
        "",
        *([result["caveat"], ""] if result["caveat"] is not None else []),
        f"| | original | {result['format']} |",
        "|---|---:|---:|",
        *(f"| {title} | {before} | {after} |" for title, before, after in rows(result)),
        "",
        measured_on(result),
        "",
        "## Usage",
        "",
        *([f"It needs `{package}` {result['versions'][package]} or newer.", ""] if package is not None else []),
        "```python",
        f"from transformers import AutoModelForCausalLM{', AutoTokenizer' if tokenizer is not None else ''}",
        "",
        f'model = AutoModelForCausalLM.from_pretrained("path/to/this/folder"{of_gguf})',
        *(['tokenizer = AutoTokenizer.from_pretrained("path/to/this/folder")'] if tokenizer is not None else []),
        "```",
        "",
    ]
    return "\n".join(lines)


def _serving(name: str, format: str, tokenizer: Any) -> str:
    """How servers load an export, and what of it was tried; empty for formats that none of them is known to load."""
    of_gguf = FORMATS[format].package == "gguf"
    if tokenizer is None or not (of_gguf or format == MERGED):
        return ""
    if of_gguf:
        tag = re.sub(r"[^a-z0-9._-]+", "-", name.lower()).strip("-._") or "model"
        chats = ", with the chat template that is in it" if getattr(tokenizer, "chat_template", None) else ""
        said = f"llama.cpp and Ollama take `{GGUF_NAME}`{chats}. Files of this format were run in llama.cpp itself "
        said += "when `hf_hybrid` was tested (node-llama-cpp). This file, these lines and Ollama were not tried."
        lines = [
            f"llama-server -m {GGUF_NAME}",
            f'echo "FROM ./{GGUF_NAME}" > Modelfile && ollama create {tag} -f Modelfile && ollama run {tag}',
        ]
    else:
        said = "vLLM takes this folder, if it knows the architecture. This line was not tried."
        lines = ["vllm serve path/to/this/folder"]
    return "\n".join(["## Serving", "", said, "", "```bash", *lines, "```", ""])
