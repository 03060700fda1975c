"""Bits that change in memory, behind torch's back."""

import numpy
import torch


def flip(tensor: torch.Tensor, place: int, bit: int) -> None:
    """Change one bit of a byte of a tensor on the CPU, as a fault of the memory does: torch counts no write."""
    cells = tensor.detach().reshape(-1).view(torch.uint8).numpy()
    cells[place % len(cells)] ^= numpy.uint8(1 << bit)
