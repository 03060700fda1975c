"""
The formats of an export: what writes each of them, what it needs, and how its folder is loaded again.

No format is quantised by code of this package. torchao (int8) and bitsandbytes (nf4) quantise the linear layers
while transformers loads a model; the `gguf` package quantises the tensors of a GGUF file (gguf.py); transformers has
the ternary layers (bitnet.py). `merged` is not quantised: it is the plain model in 16 bits. A format that the installed
libraries cannot write on this device is refused before any work, with what to install.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, PreTrainedConfig, PreTrainedModel, TorchAoConfig

from hf_hybrid.export import bitnet, gguf
from hf_hybrid.export.rounding import HALVES, round_

GGUF_NAME = "model.gguf"
MERGED = "merged"
NF4_BLOCK = 64
"""Weights that share a scale in the nf4 of bitsandbytes."""


class ExportError(ValueError):
    """A run cannot be exported; the message says why and what to do."""


class Format(NamedTuple):
    """A format of an export."""

    package: str | None  # that writes it; None: transformers itself
    about: str
    quantization: Callable[[torch.dtype], Any] | None = None  # transformers' config, by the dtype of weights that stay


def _int8(dtype: torch.dtype):
    from torchao.quantization import Int8WeightOnlyConfig

    return TorchAoConfig(Int8WeightOnlyConfig())


def _nf4(dtype: torch.dtype):
    return BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=dtype
    )


FORMATS: dict[str, Format] = {
    MERGED: Format(None, "16 bits in safetensors (transformers)"),
    "int8": Format("torchao", "8 bits, a scale for each row (torchao)", _int8),
    "nf4": Format("bitsandbytes", "4 bits, spaced as normally distributed weights (bitsandbytes)", _nf4),
    "bitnet": Format(None, "1.58 bits, -1, 0 or 1, for models trained with `--qat bitnet` (transformers)"),
    **{f"gguf-{kind}": Format("gguf", about) for kind, about in gguf.KINDS.items()},
}
"""By the name that `--format` takes."""
_INSTALLS = {
    "torchao": "hf-hybrid[torchao]", "bitsandbytes": "hf-hybrid[quantization]", "gguf": "hf-hybrid[export]"
}  # fmt: skip


def check_format(name: str, config: PreTrainedConfig, tokenizer: Any, source: Path) -> None:
    """Refuse a format that does not exist, or that cannot be written here for this model, with what to do instead."""
    if name not in FORMATS:
        kind, half = name.removeprefix("gguf-"), Path(f"{source}-gguf-f16", GGUF_NAME)
        llama_cpp = (
            f" `{name}` is written by llama.cpp's own tool: `hf-hybrid export {source} --format gguf-f16`, then "
            f"`llama-quantize {half} {half.with_stem(kind)} {kind}`."
        )
        advice = llama_cpp * name.startswith("gguf-")
        raise ExportError(f"`format` must be one of {', '.join(FORMATS)}, got `{name}`.{advice}")
    if bitnet.trains_bitnet(config) and name != "bitnet":
        raise ExportError(f"The model was trained to be ternary: export it with `format=bitnet`, got `{name}`.")
    package = FORMATS[name].package
    if package is not None and importlib.util.find_spec(package) is None:
        raise ExportError(f'`format={name}` needs {package}. Install it: pip install "{_INSTALLS[package]}"')
    if package == "gguf" and (reason := gguf.reason_not_written(config, tokenizer)) is not None:
        raise ExportError(
            f"`format={name}`: {reason} Convert the model with llama.cpp: `hf-hybrid export {source} --format merged`, "
            f"then `python convert_hf_to_gguf.py {source}-merged`."
        )


def device() -> torch.device:
    """Where models are quantised and measured: the accelerator if there is one, or else the CPU."""
    return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")


def load(folder: Path, dtype: torch.dtype, **quantization: Any) -> PreTrainedModel:
    """
    Load a model, and refuse one whose weights are not all there: transformers would draw the missing ones at random.

    The folder has safetensors or a GGUF file. `quantization_config=` quantises while the model is loaded.
    """
    in_gguf = {"gguf_file": GGUF_NAME} if (folder / GGUF_NAME).is_file() else {}
    try:
        # With `output_loading_info` it returns two things, which its annotation does not say.
        model, loading = AutoModelForCausalLM.from_pretrained(  # ty: ignore[not-iterable]
            folder,
            dtype=dtype,
            device_map={"": device()},
            output_loading_info=True,
            trust_remote_code=False,
            **in_gguf,
            **quantization,
        )
    except Exception as error:  # whatever a broken file leads to
        raise ExportError(f"`{folder}` cannot be loaded: {error}") from error
    if wrong := sorted([*loading["missing_keys"], *map(str, loading["mismatched_keys"])]):
        raise ExportError(
            f"`{folder}` lacks weights of its model, or has them in another shape: `{wrong[0]}` and {len(wrong) - 1} "
            "more. Save the model again with `trainer.save_model()`, or export an earlier checkpoint."
        )
    return model.eval()


def write(
    name: str,
    plain: Path,
    folder: Path,
    tokenizer: Any,
    own: torch.dtype,
    dtype: torch.dtype,
    max_shard_size: str,
    title: str,
) -> float:
    """
    Write a checked format of a plain model into a new folder, with tokenizer and generation config, under a `title`.

    `own` is the dtype of the weights in `plain`, `dtype` that of those that are not quantised. Return the share of the
    weights that a low-bit format leaves in `dtype` because experts have them in one tensor, which is no linear layer.
    """
    folder.mkdir()
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    quantization = FORMATS[name].quantization
    if quantization is not None:
        model = load(plain, dtype, quantization_config=quantization(dtype))
        if name == "nf4" and device().type == "cpu":
            for key, module in model.named_modules():
                if getattr(module, "in_features", 0) % NF4_BLOCK:
                    raise ExportError(
                        f"`format=nf4`: on the CPU bitsandbytes takes rows of a multiple of {NF4_BLOCK} weights, and "
                        f"`{key}` has {module.in_features}. Export on a GPU, or set `format=gguf-q4_m` for 4 bits."
                    )
        model.save_pretrained(folder, max_shard_size=max_shard_size)
        return _share_in_stacks(model)
    model = load(plain, dtype)
    if name == MERGED:
        if own is torch.float32 and dtype in HALVES:  # both in memory, as when they are measured
            exact = dict(load(plain, torch.float32).named_parameters())
            for key, parameter in model.named_parameters():
                if parameter.dtype in HALVES:  # transformers keeps some in fp32
                    round_(parameter.data, exact[key].data, key)
        for key, value in model.named_parameters():  # 65,504 is the largest number of float16
            if not value.isfinite().all():
                raise ExportError(
                    f"`{key}` has values that are not finite in `{str(dtype).removeprefix('torch.')}`. Set "
                    "`dtype=bfloat16`, which has the range of float32."
                )
        model.save_pretrained(folder, max_shard_size=max_shard_size)
        return 0.0
    if name == "bitnet":
        bitnet.write_packed(bitnet.to_bitnet(model), folder, max_shard_size)
        return _share_in_stacks(model)
    gguf.write(model, tokenizer, folder / GGUF_NAME, name.removeprefix("gguf-"), title)
    if model.generation_config is not None:
        model.generation_config.save_pretrained(folder)
    return 0.0


def _share_in_stacks(model: PreTrainedModel) -> float:
    """Return the share of the weights that lie in stacks of matrices, which no quantiser of linear layers reaches."""
    stacks = (
        p for m in model.modules() if hasattr(m, "num_experts") for p in m.parameters(recurse=False) if p.ndim == 3
    )
    return sum(stack.numel() for stack in stacks) / model.num_parameters()
