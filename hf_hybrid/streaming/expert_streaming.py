"""
Of a mixture's frozen experts, only those that tokens reach travel.

The experts are most of a mixture's weights, and a token is computed by a few of them. transformers keeps the experts of
a layer in one module, as 3-D parameters `[experts, ...]`, and calls it with the experts that each token has chosen. So
a layer travels without them, and the rest is decided when its router has chosen:

- The experts that are not in the slot yet are copied to their places in it, and computation waits for them.
- Those that the last pass of the layer has reached are fetched ahead, with the rest of the layer: texts of one kind
  reach much the same experts again. For the backward pass these are exactly the ones that it needs.

Places of experts that no token reaches keep what lay there before. Nothing reads them: whatever the implementation, an
expert without tokens is not computed.

To know what was chosen, the host waits for the router. So where the last pass reached nearly all ([`NEARLY_ALL`]), all
are fetched ahead and nobody asks. A pass of very few tokens, as in generation, asks nevertheless.

Adapters of experts (`target_parameters`) change nothing: what PEFT adds to an expert that no token reaches is not read
either. Experts that are trained themselves travel whole, because the optimizer steps all of them.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from hf_hybrid.compat import shards_experts
from hf_hybrid.optimizers import wraps_parameter

NEARLY_ALL = 0.9
"""Share of a layer's experts from which on all are fetched ahead. Chosen, not measured: a tenth of them is at stake."""


class Experts:
    """
    The frozen experts of one module, in the slot of their unit. `called` is that module, or its adapter, and `params`
    are the [`~hf_hybrid.streaming.units.StreamedParameter`]s of all of them.
    """

    def __init__(self, called: nn.Module, params: list[Any]):
        self.called, self.params, self.count = called, params, len(params[0].parameter)
        self.reached: set[int] = set()
        """By the last forward pass, or by the one under way."""
        self.here: set[int] = set()
        """Those that lie in the slot."""
        self.expanded: set[int] = set()
        """Of an int8 base, those that were expanded since the unit was brought in."""

    @property
    def ahead(self) -> set[int]:
        """Those to fetch before the router has chosen."""
        return self.everyone if len(self.reached) >= NEARLY_ALL * self.count else self.reached

    @property
    def everyone(self) -> set[int]:
        return set(range(self.count))

    def chosen(self, choice: Tensor) -> set[int]:
        """Return the experts that tokens have chosen: `choice` is `[tokens, k]`. The host waits for it if it must."""
        if len(self.here) == self.count <= choice.numel():
            return self.everyone
        hit = torch.zeros(self.count, dtype=torch.bool, device=choice.device).scatter_(0, choice.reshape(-1), True)
        return {expert for expert, is_hit in enumerate(hit.tolist()) if is_hit}

    def places(self, wanted: Iterable[int]) -> Iterator[tuple[int, int]]:
        """Yield where the bytes of experts lie in the packed buffer: beginnings and ends, of experts in a row."""
        for first, last in runs(wanted):
            for param in self.params:
                yield from param.places(first, last)

    def expand(self, wanted: set[int], buffer: Tensor, out: Tensor) -> None:
        """Expand experts of an int8 base from the slot's `buffer` into `out`, if they were not."""
        for first, last in runs(wanted - self.expanded):
            for param in self.params:
                if param.is_int8:
                    param.expand(buffer, out, start=param.expanded_start, rows=slice(first, last))
        self.expanded |= wanted


def runs(numbers: Iterable[int]) -> Iterator[tuple[int, int]]:
    """Yield the beginning and the end of each run of consecutive numbers."""
    for _, run in itertools.groupby(enumerate(sorted(numbers)), lambda pair: pair[1] - pair[0]):
        found = [number for _, number in run]
        yield found[0], found[-1] + 1


def frozen_experts(modules: Iterable[nn.Module]) -> Iterator[tuple[nn.Module, list[nn.Parameter]]]:
    """
    Yield the frozen 3-D parameters of each module of fused experts inside of `modules`, with the module that is called
    for them: the outermost adapter, or the module itself.
    """
    inside = [module for outer in modules for module in outer.modules()]
    adapters = {module.base_layer: module for module in inside if wraps_parameter(module)}
    for module in inside:
        if stacks := _stacks(module):
            while module in adapters:
                module = adapters[module]
            yield module, stacks


def _stacks(module: Any) -> list[nn.Parameter]:
    known = all(hasattr(module, name) for name in ("has_gate", "is_transposed", "num_experts"))  # as transformers marks
    own = list(module.parameters(recurse=False))
    if not known or shards_experts(module) or any(parameter.requires_grad for parameter in own):
        return []
    return [parameter for parameter in own if parameter.ndim == 3 and len(parameter) == module.num_experts]
