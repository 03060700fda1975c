"""
Layers that allocate what low-bit layers do, without their numbers, so that a plan can trace them on the meta device: a
base that is packed in 4 bits, and ternary layers.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

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
