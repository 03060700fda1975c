"""
Build a model without data from a Hub id, a folder or a config file; if asked, with adapters, a packed base, or ternary
layers.
"""

from __future__ import annotations

import copy
import json
import math
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from huggingface_hub import constants
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_MASKED_LM_MAPPING
from transformers.pytorch_utils import Conv1D

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
    elif kind not in MODEL_FOR_CAUSAL_LM_MAPPING:
        why = "transformers has no causal language model for it"
    if why is not None:
        raise ValueError(
            f"`model`: `{name}` ({config.model_type}) cannot be planned: {why}. Plans are for decoder-only language "
            "models that `AutoModelForCausalLM` builds."
        )
    check_depth(config)
    return copy.deepcopy(config)


def check_depth(config: PreTrainedConfig) -> None:
    """Refuse a number of layers that would take minutes and more to build."""
    layers = getattr(config.get_text_config(), "num_hidden_layers", None)
    if isinstance(layers, int) and layers > MOST_LAYERS:
        raise ValueError(f"`model`: `num_hidden_layers={layers}` is over {MOST_LAYERS}. Correct the config.")


def _load(model: str | Path) -> PreTrainedConfig:
    path = Path(model).expanduser()
    local = path.exists() or str(model).startswith((".", "/", "~")) or path.suffix == ".json"
    file = path / "config.json" if path.is_dir() else path
    why = f"there is no file `{file}`. Give a config file, a folder with `config.json`, or a Hub id."
    try:
        if local and "model_type" not in json.loads(file.read_text(encoding="utf-8")):
            raise ValueError(f"`{file}` has no `model_type`. Give the `config.json` of a transformers model.")
        return AutoConfig.from_pretrained(str(file if local else model))
    except json.JSONDecodeError as error:
        why = f"`{file}` is not JSON ({error}). Give the `config.json` of a model."
    except OSError as error:
        if not local:
            offline = "`HF_HUB_OFFLINE` is set, and it is not in the cache. Unset it to download `config.json`"
            reason = offline if constants.HF_HUB_OFFLINE else f"{_first_line(error)} Check the name and the network"
            why = f"the config of `{model}` cannot be loaded: {reason}, or give a folder or a config file."
    except Exception as error:  # whatever absurd values lead to
        # transformers' checks of a config name the field in the first error, and wrap it.
        why = f"the config of `{model}` cannot be read: {_first_line(error.__cause__ or error)}"
    raise ValueError(f"`model`: {why}")


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def build(config: PreTrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """Build the model of a config with all its layers on the meta device."""
    try:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(copy.deepcopy(config), dtype=dtype)
    except Exception as error:  # whatever a model's constructor makes of absurd sizes
        reason = f"{type(error).__name__}: {_first_line(error)}"
        raise ValueError(f"`model`: no `{config.model_type}` can be built from this config ({reason}).") from None


# Adapters.


def lora_config(rank: int = 16, targets: str | list[str] = "all-linear", **more: Any) -> LoraConfig:
    """A `peft.LoraConfig` for a causal language model; `targets` names modules. Raises `ImportError` without peft."""
    if rank < 1:
        raise ValueError(f"`lora_r` must be at least 1, got {rank}. 8 to 64 is usual.")
    try:
        from peft import LoraConfig
    except ImportError as error:
        raise ImportError('Adapters need peft. Install it with `pip install "hf-hybrid[peft]"`.') from error
    more.setdefault("lora_alpha", 2 * rank)
    return LoraConfig(r=rank, target_modules=targets, task_type="CAUSAL_LM", **more)


def add_adapters(model: PreTrainedModel, config: PeftConfig) -> PeftModel:
    """Put the model of the meta device into a `peft.PeftModel` with a frozen base."""
    from peft import get_peft_model

    try:
        with torch.device("meta"), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # peft asks transformers by an older name
            return get_peft_model(model, copy.deepcopy(config)).train()
    except (TypeError, ValueError) as error:
        raise ValueError(f"`peft` cannot be put on `{type(model).__name__}`: {_first_line(error)}") from error


# A base in nf4, as bitsandbytes packs it with double quantisation (QLoRA, arXiv 2305.14314): half a byte per weight, an
# absolute maximum of each block of 64 weights as a byte, and for 256 of these one fp32 scale; beside them, for each
# matrix, tables of 16 and of 256 fp32 values and an offset. A matrix is unpacked while it multiplies.

_BLOCK, _NESTED_BLOCK, _TABLES = 64, 256, 4 * (16 + 256 + 1)


def packed_bytes(count: int) -> int:
    """Return the bytes of a matrix of `count` weights in nf4 with double quantisation."""
    blocks = math.ceil(count / _BLOCK)
    return math.ceil(count / 2) + blocks + 4 * math.ceil(blocks / _NESTED_BLOCK) + _TABLES


class _Unpacked(torch.autograd.Function):
    @staticmethod
    def forward(ctx, inputs, packed, shape, dtype):
        ctx.shape = shape
        return F.linear(inputs, torch.empty(shape, dtype=dtype))

    @staticmethod
    def backward(ctx, *grads):
        (grad,) = grads
        return grad @ torch.empty(ctx.shape, dtype=grad.dtype), None, None, None


class PackedLinear(nn.Linear):
    """What a `bitsandbytes.nn.Linear4bit` that computes in `dtype` holds and allocates, without its numbers."""

    def __init__(self, inputs: int, outputs: int, bias: nn.Parameter | None, dtype: torch.dtype):
        nn.Module.__init__(self)
        self.in_features, self.out_features, self.compute_dtype, self.bias = inputs, outputs, dtype, bias
        packed = torch.empty(packed_bytes(inputs * outputs), dtype=torch.uint8, device="meta")
        self.weight = nn.Parameter(packed, requires_grad=False)

    def forward(self, input: Tensor) -> Tensor:
        """`[..., inputs]` to `[..., outputs]`, in the type of the input."""
        shape = (self.out_features, self.in_features)
        with torch.autocast("cpu", enabled=False):
            result = _Unpacked.apply(input.to(self.compute_dtype), self.weight, shape, self.compute_dtype)
        if self.bias is not None:
            result = result + self.bias.to(self.compute_dtype)
        return result.to(input.dtype).clone()  # peft clones what comes out of a base in 4 bits


def pack_base(model: PreTrainedModel, dtype: torch.dtype = torch.bfloat16) -> PreTrainedModel:
    """Pack, in place, the linear layers that transformers would load in 4 bits: all but the head."""
    head = model.get_output_embeddings()
    for parent, name, module in _children(model):
        if module is not head and (type(module) is nn.Linear or isinstance(module, Conv1D)):
            outputs, inputs = module.weight.shape[:: -1 if isinstance(module, Conv1D) else 1]
            setattr(parent, name, PackedLinear(inputs, outputs, module.bias, dtype))
    return model


# Ternary layers, as transformers' BitNet trains them: weights and inputs are rounded anew in each forward pass, and the
# rounded ones are what the backward pass multiplies with. So a second copy of the weights lives from the forward to the
# backward pass, and each layer keeps inputs of its own, also where several layers have the same ones.


class _Rounded(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tensor):
        return torch.empty_like(tensor)

    @staticmethod
    def backward(ctx, *grads):
        return grads[0].clone()


class TernaryLinear(nn.Linear):
    """What an `AutoBitLinear` of transformers holds and allocates while it trains, without its numbers."""

    def __init__(self, weight: Tensor, bias: nn.Parameter | None):
        nn.Module.__init__(self)
        (self.out_features, self.in_features), self.weight, self.bias = weight.shape, weight, bias

    def forward(self, input: Tensor) -> Tensor:
        """`[..., inputs]` to `[..., outputs]`."""
        weight = _Rounded.apply(self.weight)
        return F.linear(_Rounded.apply(input), weight, self.bias)


def make_ternary(model: PreTrainedModel) -> PreTrainedModel:
    """Replace, in place, the linear layers that train with ternary weights: all but the head."""
    head = model.get_output_embeddings()
    for parent, name, module in _children(model):
        if module is not head and type(module) is nn.Linear:
            setattr(parent, name, TernaryLinear(module.weight, module.bias))
    return model


def stand_in_for_low_bit(model: nn.Module) -> nn.Module:
    """Replace, in place, layers that need the numbers: those that bitsandbytes has packed, and ternary ones."""
    for parent, name, module in _children(model):
        kind = type(module).__name__
        if not isinstance(module, nn.Linear):  # peft's `Linear4bit` is not, and has the packed one inside
            continue
        if kind == "Linear4bit":
            dtype = vars(module)["compute_dtype"] or torch.bfloat16
            setattr(parent, name, PackedLinear(module.in_features, module.out_features, module.bias, dtype))
        elif kind == "AutoBitLinear":
            setattr(parent, name, TernaryLinear(module.weight, module.bias))
    return model


def _children(model: nn.Module) -> list[tuple[nn.Module, str, nn.Module]]:
    return [(parent, name, child) for parent in model.modules() for name, child in parent.named_children()]
