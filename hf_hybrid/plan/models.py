"""Build a model without data from a Hub id, a folder or a config file, and adapters for it."""

from __future__ import annotations

import copy
import json
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from huggingface_hub import constants
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    MODEL_FOR_MASKED_LM_MAPPING,
)

if TYPE_CHECKING:
    from peft import LoraConfig, PeftConfig, PeftModel

MOST_LAYERS = 2000
"""Layers beyond which a config is refused as absurd. Building this many takes seconds."""


def read_config(model: str | Path | PreTrainedConfig | nn.Module) -> PreTrainedConfig:
    """Return the config of a decoder-only language model, from a config, model, config file, folder or Hub id."""
    name, config = type(model).__name__, getattr(model, "config", None) if isinstance(model, nn.Module) else model
    if isinstance(model, (str, Path)):
        name, config = model, _load(model)
    if not isinstance(config, PreTrainedConfig):
        raise ValueError(f"`model` of type `{name}` has no transformers config. Give its config.")
    kind, why = type(config), None
    if config.is_encoder_decoder:
        why = "it is an encoder-decoder model"
    elif kind in MODEL_FOR_MASKED_LM_MAPPING and not getattr(config, "is_decoder", False):
        why = "it is an encoder, which is trained on masked tokens"
    elif kind not in MODEL_FOR_CAUSAL_LM_MAPPING and not takes_images(config):
        why = "transformers has no causal language model for it"
    if why is not None:
        raise ValueError(
            f"`model`: `{name}` ({config.model_type}) cannot be planned: {why}. Plans are for decoder-only language "
            "models that `AutoModelForCausalLM` or `AutoModelForImageTextToText` builds."
        )
    layers = getattr(config.get_text_config(), "num_hidden_layers", None)
    if isinstance(layers, int) and layers > MOST_LAYERS:
        raise ValueError(f"`model`: `num_hidden_layers={layers}` is over {MOST_LAYERS}. Correct the config.")
    return copy.deepcopy(config)


def takes_images(config: PreTrainedConfig) -> bool:
    """Whether a model is built with its image encoder, as it has no other class."""
    return type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING and type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING


def keys_and_values(config: Any, size: int) -> int:
    """Return the bytes of a token's keys and values, of `size` each, as if each layer attended to all tokens."""
    config = config.get_text_config()
    heads = config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    return 2 * config.num_hidden_layers * (getattr(config, "num_key_value_heads", None) or heads) * width * size


def _load(model: str | Path) -> PreTrainedConfig:
    path = Path(model).expanduser()
    local = path.exists() or str(model).startswith((".", "/", "~")) or path.suffix == ".json"
    file = path / "config.json" if path.is_dir() else path
    why = f"there is no file `{file}`. Give a config file, a folder with `config.json`, or a Hub id."
    try:
        if local and "model_type" not in json.loads(file.read_text(encoding="utf-8")):
            raise ValueError(f"`{file}` has no `model_type`. Give the `config.json` of a transformers model.")
        return AutoConfig.from_pretrained(str(file if local else model), trust_remote_code=False)
    except json.JSONDecodeError as error:
        why = f"`{file}` is not JSON ({error}). Give the `config.json` of a model."
    except OSError as error:
        if not local:
            offline = "`HF_HUB_OFFLINE` is set, and it is not in the cache. Unset it to download `config.json`"
            reason = offline if constants.HF_HUB_OFFLINE else f"{_first_line(error)} Check the name and the network"
            why = f"the config of `{model}` cannot be loaded: {reason}, or give a folder or a config file."
    except Exception as error:  # whatever absurd values lead to
        if "trust_remote_code" in str(error):
            raise ValueError(
                f"`model`: the config of `{model}` brings code of its own (`auto_map`), and a plan runs none. Only "
                "models that transformers has itself can be planned."
            ) from None
        # transformers' checks of a config name the field in the first error, and wrap it.
        why = f"the config of `{model}` cannot be read: {_first_line(error.__cause__ or error)}"
    raise ValueError(f"`model`: {why}")


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def build(config: PreTrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """Build the model of a config with all its layers on the meta device."""
    loader: Any = AutoModelForImageTextToText if takes_images(config) else AutoModelForCausalLM
    try:
        with torch.device("meta"):
            return loader.from_config(copy.deepcopy(config), dtype=dtype, trust_remote_code=False)
    except Exception as error:  # whatever a model's constructor makes of absurd sizes
        reason = f"{type(error).__name__}: {_first_line(error)}"
        raise ValueError(f"`model`: no `{config.model_type}` can be built from this config ({reason}).") from None


# Adapters.


def lora_config(rank: int = 16, targets: str | list[str] | None = "all-linear", **more: Any) -> LoraConfig:
    """A `peft.LoraConfig` for a causal language model; `targets` names modules. Raises `ImportError` without peft."""
    if rank < 1:
        raise ValueError(f"`lora_r` must be at least 1, got {rank}. 8 to 64 is usual.")
    try:
        from peft import LoraConfig
    except ImportError as error:
        raise ImportError('Adapters need peft. Install it with `pip install "hf-hybrid[peft]"`.') from error
    more.setdefault("lora_alpha", 2 * rank)
    more.setdefault("task_type", "CAUSAL_LM")
    return LoraConfig(r=rank, target_modules=targets, **more)


def add_adapters(model: PreTrainedModel, config: PeftConfig) -> PeftModel:
    """Put the model of the meta device into a `peft.PeftModel` with a frozen base."""
    from peft import get_peft_model

    try:
        with torch.device("meta"), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # peft asks transformers by an older name
            return get_peft_model(model, copy.deepcopy(config)).train()
    except (TypeError, ValueError) as error:
        raise ValueError(f"`peft` cannot be put on `{type(model).__name__}`: {_first_line(error)}") from error
