"""Row-wise int8: how frozen weights are stored and transported, at one byte per weight."""

from __future__ import annotations

import torch

Tensor = torch.Tensor


def quantize_rows(weight: Tensor) -> tuple[Tensor, Tensor]:
    """
    Round each row to 255 equal steps between plus and minus its largest magnitude.

    Args:
        weight (`torch.Tensor`): Shape `[..., columns]`, any float dtype.

    Returns:
        `tuple`: int8 codes of the same shape, and fp32 scales of shape `[..., 1]`. Decoding is off by at most half a
        step, `absmax / 254` per row.
    """
    values = weight.float()
    scales = values.abs().amax(dim=-1, keepdim=True) / 127
    codes = (values / scales.clamp(min=1e-30)).round_().clamp_(-127, 127).to(torch.int8)
    return codes, scales


def dequantize_rows(codes: Tensor, scales: Tensor, out: Tensor) -> Tensor:
    """Decode into `out` (any float dtype, shape of `codes`); rounds once, from an fp32 product."""
    return torch.mul(codes, scales, out=out) if out.dtype == torch.float32 else out.copy_(codes * scales)
