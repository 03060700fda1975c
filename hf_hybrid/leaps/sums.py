"""Sums over many tensors with a single synchronisation and without temporaries of their size."""

from __future__ import annotations

import torch

Tensor = torch.Tensor


def sum_of_squares(tensors: list[Tensor]) -> Tensor:
    """Return the sum of the squares of all elements."""
    dense = [square(t) for t in tensors if not t.is_sparse]
    return gather(dense).sum() if dense else torch.zeros(())


def dot(first: Tensor, second: Tensor) -> Tensor:
    """Inner product of two tensors of one shape."""
    return torch.dot(first.reshape(-1), second.reshape(-1))


def square(tensor: Tensor) -> Tensor:
    """Sum of the squares of the elements of one tensor, in fp32."""
    flat = tensor.float().reshape(-1)
    return torch.dot(flat, flat)  # several times faster than a norm on the CPU, and without a temporary


def gather(scalars: list[Tensor]) -> Tensor:
    """Stack scalars, which may be on several devices, into one vector."""
    # On the device of the first: one synchronisation when the result is read, not one per tensor.
    return torch.stack([scalar.to(scalars[0].device, torch.float32) for scalar in scalars])


def total(scalars: list[Tensor]) -> float:
    """Return the sum of scalars as a number; 0 if there are none."""
    return gather(scalars).sum().item() if scalars else 0.0
