"""Which operations of a forward pass wait for the host: such a pass cannot be captured as a graph."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from hf_hybrid.trl.completions import PlainRolloutsError

aten = torch.ops.aten
READ_ON_HOST = frozenset({
    aten._local_scalar_dense.default, aten.nonzero.default, aten.masked_select.default, aten.equal.default,
    aten._unique2.default, aten.unique_dim.default, aten.unique_consecutive.default, aten.repeat_interleave.Tensor,
    aten.bincount.default,
})  # fmt: skip
INDEXING = frozenset({aten.index.Tensor, aten.index_put.default, aten.index_put_.default})


class HostReads(TorchDispatchMode):
    """
    Inside, an operation that makes the host read a value of the device, or the device one of the host, raises
    [`PlainRolloutsError`].
    """

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        reads = func in READ_ON_HOST or self._by_mask(func, args) or self._by_group(func, args)
        if (reads := reads or self._to_host(args, result)) or self._from_host(func, args, result):
            what = "reads values on" if reads else "copies values from"
            raise PlainRolloutsError(f"a forward pass of the model {what} the host (`{func}`)")
        return result

    @staticmethod
    def _by_mask(op: Any, args: Sequence[Any]) -> bool:
        """Whether values are chosen by a mask, whose number the host has to know."""
        return op in INDEXING and not _fills(args) and any(map(_is_mask, args[1]))

    @staticmethod
    def _by_group(op: Any, args: Sequence[Any]) -> bool:
        """
        Whether the host has to know where groups of experts end. torch's own products ask it, but for those of bf16 on
        the devices for which there is a kernel (`_grouped_mm_cuda` in ATen/native/cuda/GroupedBlas.cpp).
        """
        if op is not aten._grouped_mm.default:
            return str(op) == "transformers.grouped_mm_fallback.default"
        device = args[0].device
        has_kernel = device.type == "cuda" and torch.cuda.get_device_capability(device)[0] in (9, 10)
        in_bf16 = all(factor.dtype == torch.bfloat16 for factor in args[:2])
        return device.type != "cpu" and not (has_kernel and in_bf16)

    @staticmethod
    def _to_host(args: Sequence[Any], result: Any) -> bool:
        on_device = any(isinstance(value, Tensor) and value.device.type != "cpu" for value in args)
        return on_device and isinstance(result, Tensor) and result.device.type == "cpu"

    @staticmethod
    def _from_host(op: Any, args: Sequence[Any], result: Any) -> bool:
        """Whether values come from the host. The memory that a replay would copy them from is gone by then."""
        copied: Sequence[Any] = args if op in (aten._to_copy.default, aten.copy_.default) else ()
        if op in INDEXING:
            copied = args[1] if _fills(args) else (*args[1], *args[2:])
        made = op is aten.lift_fresh.default  # by `torch.tensor(values, device=...)`
        comes = made or any(isinstance(value, Tensor) and value.device.type == "cpu" for value in copied)
        return comes and isinstance(result, Tensor) and result.device.type != "cpu"


def _is_mask(index: Tensor | None) -> bool:
    return index is not None and index.dtype in (torch.bool, torch.uint8)


def _fills(args: Sequence[Any]) -> bool:
    """Whether a number is written where a mask says so, which needs no number of places."""
    number = len(args) > 2 and args[2].numel() == 1 and args[2].device.type == "cpu"
    return number and any(map(_is_mask, args[1]))
