"""Adapters and a packed base, put on a model that has no data."""

from __future__ import annotations

import importlib.util
import math

import torch
import torch.nn.functional as F
from torch import nn
from transformers.pytorch_utils import Conv1D

Tensor = torch.Tensor

LORA_RANK, LORA_TARGETS = 16, "all-linear"
# nf4 as bitsandbytes packs it with double quantisation: an absolute maximum of a block of 64 weights is a byte, and of
# 256 of these one fp32 scale is kept; tables of 16 and 256 fp32 values and an offset for each matrix.
BLOCK, NESTED_BLOCK, TABLES = 64, 256, 4 * (16 + 256 + 1)


def adapters_installed() -> bool:
    """Whether plans with adapters can be made."""
    return importlib.util.find_spec("peft") is not None


def lora_config(rank: int = LORA_RANK, targets: str | list[str] = LORA_TARGETS):
    """
    A `peft.LoraConfig` for a causal language model.

    Args:
        rank (`int`): Of the adapters, at least 1.
        targets (`str` or `list[str]`): Names of modules, or `"all-linear"`.

    Raises:
        ImportError: If peft is not installed.
        ValueError: If the rank is below 1.
    """
    if rank < 1:
        raise ValueError(f"`lora_r` must be at least 1, got {rank}. 8 to 64 is usual.")
    try:
        from peft import LoraConfig
    except ImportError as error:
        raise ImportError('Plans with adapters need peft. Install it with `pip install "hf-hybrid[peft]"`.') from error
    return LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=targets, task_type="CAUSAL_LM")


def add_adapters(model: nn.Module, config) -> nn.Module:
    """
    The model inside a `peft.PeftModel`; the base is frozen.

    Raises:
        ValueError: If peft cannot put these adapters on this model.
    """
    from peft import get_peft_model

    try:
        return get_peft_model(model, config)
    except (TypeError, ValueError) as error:
        first = str(error).strip().split("\n")[0]
        raise ValueError(f"`peft` cannot be put on `{type(model).__name__}`: {first}") from error


def packed_bytes(count: int) -> int:
    """Bytes of a matrix of so many weights in nf4 with double quantisation."""
    blocks = math.ceil(count / BLOCK)
    return math.ceil(count / 2) + blocks + 4 * math.ceil(blocks / NESTED_BLOCK) + TABLES


class _Unpacked(torch.autograd.Function):
    """A product with a matrix that is there only while it multiplies."""

    @staticmethod
    def forward(ctx, inputs, packed, shape, dtype):
        ctx.shape = shape
        return F.linear(inputs, torch.empty(shape, dtype=dtype))

    @staticmethod
    def backward(ctx, grad):
        return grad @ torch.empty(ctx.shape, dtype=grad.dtype), None, None, None


class PackedLinear(nn.Linear):
    """
    What a `bitsandbytes.nn.Linear4bit` holds and allocates, without its numbers.

    Args:
        inputs (`int`), outputs (`int`): Features.
        bias (`nn.Parameter`, *optional*): Kept as it is.
        dtype (`torch.dtype`): In which it computes.
    """

    def __init__(self, inputs: int, outputs: int, bias: nn.Parameter | None, dtype: torch.dtype):
        nn.Module.__init__(self)
        self.in_features, self.out_features, self.compute_dtype, self.bias = inputs, outputs, dtype, bias
        packed = torch.empty(packed_bytes(inputs * outputs), dtype=torch.uint8)
        self.weight = nn.Parameter(packed, requires_grad=False)

    def forward(self, inputs: Tensor) -> Tensor:
        """`[..., inputs]` to `[..., outputs]`, in the type of the inputs."""
        shape = (self.out_features, self.in_features)
        with torch.autocast("cpu", enabled=False):
            result = _Unpacked.apply(inputs.to(self.compute_dtype), self.weight, shape, self.compute_dtype)
        if self.bias is not None:
            result = result + self.bias.to(self.compute_dtype)
        return result.to(inputs.dtype).clone()  # peft clones what comes out of a base in 4 bits


def pack_base(model: nn.Module, dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    """Pack, in place, the linear layers that transformers would load in 4 bits: all but the head."""
    head = model.get_output_embeddings()
    for parent in list(model.modules()):
        for name, module in parent.named_children():
            if module is head or not (type(module) is nn.Linear or isinstance(module, Conv1D)):
                continue
            rows, columns = module.weight.shape
            inputs, outputs = (rows, columns) if isinstance(module, Conv1D) else (columns, rows)
            setattr(parent, name, PackedLinear(inputs, outputs, module.bias, dtype))
    return model
