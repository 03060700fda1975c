"""Row-wise int8: how frozen weights are stored and transported, at one byte per weight."""

from __future__ import annotations

import torch

Tensor = torch.Tensor

_CHUNK = 2**20
"""Elements held in fp32 at a time while rows are quantised."""


@torch.no_grad()
def quantize_rows(weight: Tensor) -> tuple[Tensor, Tensor]:
    """
    Round every row (along the last dimension) to 255 even steps between plus and minus its largest magnitude.

    An element is off by at most half a step, `absmax(row) / 254`. Zeros stay zeros; a row that holds NaN or an infinity
    comes back as NaN, so that a broken weight cannot pass for a good one.

    Returns:
        `tuple`: int8 codes of the same shape, and the steps as fp32 scales of shape `[..., 1]`.

    Raises:
        ValueError: If `weight` is not floating-point or has fewer than two dimensions.
    """
    if weight.ndim < 2 or not weight.is_floating_point():
        raise ValueError(
            f"`weight` must be a floating-point matrix or a stack of them, got `{weight.dtype}` of shape "
            f"`{tuple(weight.shape)}`. Leave vectors (norms, biases) as they are: they are small."
        )
    codes = torch.empty(weight.shape, dtype=torch.int8, device=weight.device)
    scales = torch.empty((*weight.shape[:-1], 1), dtype=torch.float32, device=weight.device)
    rows = max(1, _CHUNK // max(weight.shape[-1], 1))
    parts = (tensor.flatten(0, -2).split(rows) for tensor in (weight.detach(), codes, scales))
    for part, code, scale in zip(*parts):
        part = part.float()
        # The smallest normal number keeps rows of zeros from dividing by zero; NaN passes through.
        scale.copy_(part.abs().amax(dim=1, keepdim=True).div_(127).clamp_(min=torch.finfo(torch.float32).tiny))
        code.copy_((part / scale).round_())
    return codes, scales


@torch.no_grad()
def dequantize_rows(codes: Tensor, scales: Tensor, out: Tensor) -> Tensor:
    """
    Write what [`quantize_rows`] stored into `out`, multiplied in fp32 and rounded once to the dtype of `out`.

    `out` is preallocated, in the shape of `codes` and on their device, of any floating-point dtype.

    Raises:
        ValueError: If the shapes do not belong together.
    """
    if out.shape != codes.shape or scales.shape != (*codes.shape[:-1], 1):
        raise ValueError(
            f"`codes` of shape `{tuple(codes.shape)}` need `out` of the same shape and `scales` of one column, got "
            f"`{tuple(out.shape)}` and `{tuple(scales.shape)}`. Pass the pair as `quantize_rows` gave it."
        )
    return torch.mul(codes, scales, out=out.detach())
