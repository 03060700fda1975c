"""The run that is exported: its folder is checked, and its adapters are merged into a plain model."""

from __future__ import annotations

import json
from pathlib import Path, PureWindowsPath
from typing import Any

from safetensors import SafetensorError, safe_open
from transformers import AutoConfig, AutoTokenizer, PreTrainedConfig

from hf_hybrid.export import merged
from hf_hybrid.export.bitnet import trains_bitnet
from hf_hybrid.export.formats import ExportError, device
from hf_hybrid.saving import manifest

ADAPTER_CONFIG = "adapter_config.json"


def check_source(folder: Path) -> None:
    """Refuse a folder that lacks weights of a model or of adapters, in safetensors, or whose files are damaged."""
    if not folder.is_dir():
        raise ExportError(f"`{folder}` is no folder. Give the `output_dir` of a run, or one of its checkpoints.")
    try:
        saved = manifest.read_manifest(folder)
        wrong = [] if saved is None else manifest.damages(folder, saved)
    except manifest.CheckpointError as error:
        wrong = [str(error)]
    if wrong:
        raise ExportError(f"The checkpoint `{folder}` is damaged: {'; '.join(wrong)}. Export another one.")
    is_adapter = (folder / ADAPTER_CONFIG).is_file()
    stem = "adapter_model" if is_adapter else "model"
    if not is_adapter and not (folder / "config.json").is_file():
        raise ExportError(
            f"`{folder}` holds no model: it has neither `config.json` nor `{ADAPTER_CONFIG}`. {_hint(folder)}"
        )
    index = folder / f"{stem}.safetensors.index.json"
    try:
        names = shard_names(index) if index.is_file() else None
    except ValueError as error:
        raise ExportError(f"`{index}` {error}. {_hint(folder)}") from None
    for name in names or [f"{stem}.safetensors"]:
        if not (folder / name).is_file():
            raise ExportError(f"`{folder}` is not whole: `{name}` is missing. {_hint(folder)}")
        try:
            with safe_open(folder / name, framework="pt") as file:
                file.keys()
        except (SafetensorError, OSError) as error:
            raise ExportError(f"`{folder / name}` is damaged: {error}. {_hint(folder)}") from None


def shard_names(index: Path) -> list[str]:
    """
    Return the files that the index of a model in several files names, each once, in order.

    A `ValueError` with a phrase says that the index is damaged, or names a file outside of its folder.
    """
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (OSError, ValueError, KeyError, AttributeError, TypeError, RecursionError):
        names = []
    if not names or not all(isinstance(name, str) for name in names):
        raise ValueError("is damaged: it names no files of weights")
    for name in names:
        path = PureWindowsPath(name)  # which knows both kinds of separators
        if path.anchor or ".." in path.parts:
            raise ValueError(f"names `{name}`, which lies outside of its folder")
    return names


def _hint(folder: Path) -> str:
    last = manifest.last_checkpoint(folder)
    if last is None:
        return "Train again, or save the model with `trainer.save_model()`."
    return (
        "If the run was interrupted, finish it with the same command, or export its last checkpoint: "
        f"`hf-hybrid export {last}`."
    )


def _origin(folder: Path) -> tuple[str, dict[str, Any]]:
    """What `from_pretrained` takes to read the model in a folder, or the base of the adapters there."""
    if not (folder / ADAPTER_CONFIG).is_file():
        return str(folder), {"trust_remote_code": False}
    try:
        from peft import PeftConfig
    except ImportError:
        raise ExportError('Adapters need peft. Install it: pip install "hf-hybrid[peft]"') from None
    adapters = PeftConfig.from_pretrained(str(folder))
    if not adapters.base_model_name_or_path:
        raise ExportError(
            f"The adapters in `{folder}` do not say what their base is, because it was not loaded with "
            f"`from_pretrained`. Save the base, set `base_model_name_or_path` in their `{ADAPTER_CONFIG}` to its "
            "folder, and export again."
        )
    return adapters.base_model_name_or_path, {"revision": adapters.revision, "trust_remote_code": False}


def read_config(folder: Path) -> PreTrainedConfig:
    """Return the config of the model in a folder, or of the base of its adapters; the base alone may be quantised."""
    try:
        name, options = _origin(folder)
        config = AutoConfig.from_pretrained(name, **options)
        quantised = getattr(config, "quantization_config", None) is not None and not trains_bitnet(config)
        method = dict(config.quantization_config).get("quant_method") if quantised else None
    except ExportError:
        raise
    except Exception as error:  # whatever a broken file leads to
        reason = f"cannot be read: {_sentence(error)} {_hint(folder)}"
        if "trust_remote_code" in str(error):
            reason = (
                "brings code of its own (`auto_map`), and an export runs none. Only models that transformers has "
                "itself can be exported."
            )
        raise ExportError(f"The config of the model in `{folder}` {reason}") from error
    if quantised and name == str(folder):
        raise ExportError(
            f"The model of `{folder}` is quantised already (`{method}`). Export the run it was made from."
        )
    return config


def read_tokenizer(folder: Path) -> Any:
    """Return the tokenizer in a folder, or that of the base of its adapters; `None` if there is none."""
    if (folder / "tokenizer_config.json").is_file():
        try:
            return AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        except Exception as error:  # whatever a broken file leads to
            reason = f"cannot be read: {_sentence(error)} Save it again."
            raise ExportError(f"The tokenizer in `{folder}` {reason}") from error
    name, options = _origin(folder)
    try:
        return None if name == str(folder) else AutoTokenizer.from_pretrained(name, **options)
    except Exception:  # the base has none, or one that brings code of its own
        return None


def _sentence(error: BaseException) -> str:
    """What an error says, in one line."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if text.endswith(".") else f"{text}."


def plain_folder(folder: Path, work: Path, *, as_trained: bool) -> Path:
    """
    Return a folder with a plain model: the run's own, or for adapters one in `work`, merged into their base.

    With `as_trained` they are merged into the quantised base that training had, if it had one.
    """
    if not (folder / ADAPTER_CONFIG).is_file():
        return folder
    try:
        name, options = _origin(folder)
        model = merged.merge(folder, merged.load_base(folder, name, device(), as_trained, **options))
    except Exception as error:  # whatever a broken file leads to
        raise ExportError(f"The adapters in `{folder}` cannot be put on their base: {error}") from error
    model.save_pretrained(work / "plain")
    return work / "plain"
