"""
Weights rounded to 16 bits so that a model keeps what it learned at small rates.

Published weights are numbers of bf16. Training in fp32 moves them, and at the rates of fine-tuning most of them by less
than half the distance to the next number. The nearest number is then where a weight started, and so the export is close
to the base: of what SmolLM2-135M learned in 40 steps at 1e-6 it keeps 6 % in bf16, and 35 % in fp16, which has steps an
eighth as long (`benchmarks/memory/rounding.py`).

Stochastic rounding takes the number below or the one above, with the probabilities that make the expectation exact. A
weight that moved by a tenth of the way to the next number gets there in one of ten cases. A layer sums many weights, so
their errors cancel, and what they learned in common stays. The price is noise: at most half a step in standard
deviation, and none for weights that did not move.

The random numbers follow from the name of the tensor. So the same run exported twice is the same, on one kind of
device, and neither the order of tensors nor the files that hold them matter.
"""

from __future__ import annotations

import math
import zlib

import torch
from torch import Tensor

CHUNK = 2**20
"""Weights that are rounded at a time, so that a large embedding needs little memory."""
HALVES = (torch.bfloat16, torch.float16)


@torch.no_grad()
def round_(target: Tensor, exact: Tensor, name: str) -> Tensor:
    """
    Round `exact` (fp32) into `target` (bf16 or fp16), up or down at random so that the expectation is exact.

    The random numbers follow from `name`. Values that the type of `target` holds, infinity and NaN are what they were.
    What is larger than its largest number is rounded to nearest: to that number, or to infinity. Returns `target`.
    """
    generator = torch.Generator(exact.device).manual_seed(zlib.crc32(name.encode()))
    target_rows, exact_rows = torch.atleast_1d(target), torch.atleast_1d(exact)
    rows = max(1, CHUNK // max(1, math.prod(exact_rows.shape[1:])))
    for part, source in zip(target_rows.split(rows), exact_rows.split(rows)):
        part.copy_(source)  # to nearest
        off = source - part.float()
        # Read as integers, the magnitudes of neighbours differ by one.
        outwards = torch.where(off.signbit() == part.signbit(), 1, -1).to(torch.int16)
        other = (part.view(torch.int16) + outwards).view(part.dtype)
        chance = off.abs() / (other.float() - part.float()).abs()
        drawn = torch.rand(chance.shape, device=exact.device, generator=generator)
        part.copy_(torch.where(drawn < chance, other, part))  # never where `chance` is NaN
    return target
