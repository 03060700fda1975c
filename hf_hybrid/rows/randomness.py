"""
Which random numbers a forward pass draws, found by drawing them.

Dropout is a module in some models, a function in others, and a hook or a line of a custom layer elsewhere. A rate of
zero draws nothing. So nobody looks for rates here. A forward pass of two rows runs, and each operation that moves a
random generator is seen by torch's dispatcher. What is drawn decides which work may be left out:

| drawn | examples | what may be left out |
|---|---|---|
| nothing | rates of zero | everything: results are the same up to rounding |
| by token | dropout, noise, jitter of a router | the same: numbers of other tokens are independent |
| by batch | layer drop, stochastic depth, dropout of channels | nothing: one number belongs to several tokens |

"By token" keeps the distribution of each row's loss, not its bits: a prefix that rows share draws its numbers once.

Some models draw one number per layer to decide whether it is left out, also where the rate is zero (OPT). Then the
number has no influence. That is found by fixing it to both ends of its range and comparing the outputs.

What a forward pass counts is found in the same way ([`changed_buffer`]): running means of a normalisation, or how many
tokens each expert got, from which a callback balances them. Such a number depends on every token, padding included.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hf_hybrid.run.run import RandomStates, as_before

Drawn = Literal["nothing", "by token", "by batch"]

ROWS, LENGTH = 2, 5
"""Shape of the tokens of the pass. Models have no other dimension of five, and rarely one of ten."""


def drawn_numbers(model: torch.nn.Module, device: torch.device) -> Drawn:
    """
    Return which random numbers a forward pass draws, in the mode (training or not) that the model is in.

    The model takes `input_ids` and `attention_mask`, and returns logits or hidden states first. Generators and buffers
    are as they were afterwards.
    """
    tokens = torch.arange(ROWS * LENGTH, device=device).view(ROWS, LENGTH)
    before, watch = RandomStates.now(device), _Watch(device)
    with as_before(model, device):
        with watch:
            low = _computed(model, tokens)
        if not watch.drawn and before.same_as(RandomStates.now(device)):
            return "nothing"
        if not watch.drawn or "others" in watch.drawn:  # `not drawn`: by Python or NumPy, of which no shape is known
            return "by batch"
        if "single" not in watch.drawn:
            return "by token"
        before.restore()
        with _Watch(device, value=1.0):
            high = _computed(model, tokens)
        if not torch.equal(low, high):
            return "by batch"
        return "by token" if "by token" in watch.drawn else "nothing"


def drawn_in_training(model: torch.nn.Module, device: torch.device) -> Drawn:
    """Return which random numbers a forward pass in training draws, see [`drawn_numbers`]."""
    with as_before(model, device):
        return drawn_numbers(model.train(), device)


def changed_buffer(model: torch.nn.Module, device: torch.device) -> str | None:
    """Return the name of a buffer that a forward pass in training changes, or `None`."""
    tokens = torch.arange(ROWS * LENGTH, device=device).view(ROWS, LENGTH)
    with as_before(model, device):
        before = {name: buffer.clone() for name, buffer in model.named_buffers()}
        _computed(model.train(), tokens)
        after = dict(model.named_buffers())
        return next((name for name, buffer in before.items() if not torch.equal(buffer, after[name])), None)


def _computed(model: Callable[..., Any], tokens: torch.Tensor) -> torch.Tensor:
    output = model(input_ids=tokens, attention_mask=torch.ones_like(tokens))
    return next(leaf for leaf in tree_leaves(output) if torch.is_tensor(leaf))


class _Watch(TorchDispatchMode):
    """
    Notes what operations draw: `"single"` numbers, in whose place it puts `value`; numbers `"by token"`; or `"others"`.
    """

    def __init__(self, device: torch.device, value: float = 0.0):
        super().__init__()
        self.device, self.value, self.drawn = device, value, set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **kwargs)
        before = RandomStates.now(self.device)
        result = func(*args, **kwargs)
        if before.same_as(RandomStates.now(self.device)):  # fused attention has the tag at a rate of zero too
            return result
        numbers = next(leaf for leaf in tree_leaves(result) if torch.is_tensor(leaf))
        if numbers.numel() == 1:
            self.drawn.add("single")
            return numbers.fill_(self.value)
        self.drawn.add("by token" if _has_tokens(numbers.shape) else "others")
        return result


def _has_tokens(shape: torch.Size) -> bool:
    """Whether a tensor has a number for each token: `[rows (* heads), length, ...]`, `[length, rows]` or `[tokens]`."""
    first = shape[0]
    return (
        first % (ROWS * LENGTH) == 0
        or (first % ROWS == 0 and LENGTH in shape[1:])
        or (first == LENGTH and ROWS in shape[1:2])
    )
