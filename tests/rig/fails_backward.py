"""A kernel that works forward and fails backward, with the words of inductor on an RTX 5090."""

import torch


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        raise RuntimeError("No valid triton configs. OutOfMemoryError: out of resource: Hardware limit:101376")
