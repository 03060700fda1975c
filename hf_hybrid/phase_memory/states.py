"""
Where optimizer states are kept in Predict, in which the optimizer makes no step: in place, on the host, in 8 bits, or
nowhere.

AdamW keeps two values per trained weight, in fp32 often as much as weights and gradients together, and no code reads
them in skipped steps. [`OptimizerStatePlacement`] moves them off the device when Predict begins, after the leap, which
reads them, and moves them back when Predict is over. This pays only if something else uses the memory meanwhile:
skipped steps take no time, but the copies do.

The copies back overlap with computation. The optimizer's step reads the states only after a forward and a backward
pass, so the copies run during these; `after_backward` lets computation wait for them. Until then `optimizer.state`
holds the copies on the host, which are complete and can be read.

In 8 bits, values are coded in blocks of 256 with one scale each (Dettmers et al., 2022, arXiv 2110.02861, as in
[`hf_hybrid.streaming.low_bit`]). Second moments span twice the orders of magnitude of first moments, since they are
squares, so their square root is coded.

Before an evaluation, a save or a push the states are moved back: a checkpoint that is saved in Predict is that of a run
without this part, except for the rounding of `"8bit"` and the loss of `"drop"`.
"""

from __future__ import annotations

import math
from collections.abc import MutableMapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hf_hybrid.machine import host_tensor
from hf_hybrid.part import Part, Phase
from hf_hybrid.streaming.low_bit import BLOCK, CHUNK, bitsandbytes_functional, clear_false_zeros_, dynamic_map
from hf_hybrid.streaming.transfers import Fetched, Transfers, is_big

if TYPE_CHECKING:
    from hf_hybrid.run.run import Run

States = MutableMapping[Tensor, dict[str, Any]]


def in_host_memory(tensor: Tensor) -> bool:
    """Whether moving a tensor to the host would free nothing."""
    return tensor.device.type == "cpu"


@dataclass(frozen=True)
class QuantizedTensor:
    """
    A tensor in block-wise 8 bits.

    Of tensors without negative values (second moments) the square root is stored: it halves the orders of magnitude
    that the codes have to span, nothing comes back negative, and only zero comes back as zero, which a step divides by.
    """

    codes: Tensor
    absmax: Tensor
    rooted: bool
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: Tensor) -> QuantizedTensor:
        """Quantise; `tensor` is left as it is."""
        flat = tensor.reshape(-1)
        rooted = bool(flat.min() >= 0)
        codes = torch.empty(flat.shape, dtype=torch.uint8, device=flat.device)
        absmax = torch.empty(math.ceil(flat.numel() / BLOCK), dtype=torch.float32, device=flat.device)
        values_of_codes = dynamic_map(not rooted, flat.device)
        for start in range(0, flat.numel(), CHUNK):
            part = flat[start : start + CHUNK].float()
            part = part.sqrt() if rooted else part
            code, scale = bitsandbytes_functional().quantize_blockwise(part, code=values_of_codes, blocksize=BLOCK)
            if rooted:
                code.masked_fill_((code == 0) & (part > 0), 1).masked_fill_(part == 0, 0)
            else:
                clear_false_zeros_(code)
            codes[start : start + CHUNK] = code
            absmax[start // BLOCK :][: scale.absmax.numel()] = scale.absmax
        return cls(codes.view(tensor.shape), absmax, rooted, tensor.dtype)

    def restore(self) -> Tensor:
        """A new tensor of the old dtype."""
        result = torch.empty(self.codes.shape, dtype=self.dtype, device=self.codes.device)
        flat, codes = result.view(-1), self.codes.view(-1)
        values_of_codes = dynamic_map(not self.rooted, codes.device)
        for start in range(0, flat.numel(), CHUNK):
            part = codes[start : start + CHUNK]
            absmax = self.absmax[start // BLOCK :][: math.ceil(part.numel() / BLOCK)]
            values = bitsandbytes_functional().dequantize_blockwise(
                part, absmax=absmax, code=values_of_codes, blocksize=BLOCK
            )
            flat[start : start + CHUNK] = values.square_() if self.rooted else values
        return result


class QuantizedState(dict):
    """State of one parameter with tensors in 8 bits; a callback that reads one in Predict gets it restored."""

    def __getitem__(self, key: object) -> Any:
        value = super().__getitem__(key)
        return value.restore() if isinstance(value, QuantizedTensor) else value

    def get(self, key: object, default: Any = None, /) -> Any:
        return self[key] if key in self else default


class _Stay:
    """States stay where they are."""

    def send(self, states: States) -> None:
        """Predict begins."""

    def bring(self, states: States) -> None:
        """Predict is over, or states are about to be saved."""

    def wait(self) -> None:
        """Let computation from here on find the states at home."""


class _Host(_Stay):
    """
    Copies in host memory.

    `pinned`: in page-locked buffers that are kept for the run, and the way back overlaps with the first real step.
    """

    def __init__(self, *, pinned: bool = False):
        self.pinned = pinned
        self._home: dict[tuple[Tensor, str], torch.device] = {}
        self._transfers: dict[torch.device, Transfers] = {}
        self._buffers: dict[tuple[Tensor, str], Tensor] = {}
        self._coming: dict[tuple[Tensor, str], tuple[dict, Fetched]] = {}

    def send(self, states: States) -> None:
        for parameter, state in states.items():
            for key, tensor in list(state.items()):
                if is_big(tensor) and not in_host_memory(tensor):
                    self._home[parameter, key] = tensor.device
                    state[key] = self._to_host((parameter, key), tensor)
        for transfers in self._transfers.values():
            transfers.finish_sending()  # the memory that they leave is wanted now

    def _to_host(self, entry: tuple[Tensor, str], tensor: Tensor) -> Tensor:
        if tensor.device not in self._transfers:
            self._transfers[tensor.device] = Transfers(tensor.device)
        transfers, host = self._transfers[tensor.device], self._buffers.get(entry)
        if host is None:
            host = host_tensor(tensor.shape, tensor.dtype, pin=self.pinned and transfers.beside)
            if self.pinned:
                self._buffers[entry] = host
        transfers.send(tensor, host)
        return host

    def bring(self, states: States) -> None:
        for (parameter, key), device in self._home.items():
            if (parameter, key) not in self._coming:
                state = states[parameter]
                self._coming[parameter, key] = state, self._transfers[device].fetch(state[key])

    def wait(self) -> None:
        for (parameter, key), (state, fetched) in self._coming.items():
            state[key] = fetched.take()
            del self._home[parameter, key]
        self._coming.clear()


class _EightBit(_Stay):
    """Element-wise states in 8 bits on the device; they come back rounded."""

    def send(self, states: States) -> None:
        for parameter, state in states.items():
            states[parameter] = QuantizedState(state)
            for key, value in state.items():
                if is_big(value) and value.is_floating_point() and value.shape == parameter.shape:
                    states[parameter][key] = QuantizedTensor.of(value)

    def bring(self, states: States) -> None:
        for parameter, state in states.items():
            if isinstance(state, QuantizedState):
                states[parameter] = {key: state[key] for key in state}


class _Drop(_Stay):
    """Nothing is kept."""

    def send(self, states: States) -> None:
        states.clear()


_STRATEGIES = {"stay": _Stay, "host": _Host, "pinned": partial(_Host, pinned=True), "8bit": _EightBit, "drop": _Drop}


class OptimizerStatePlacement(Part):
    """
    Puts optimizer states elsewhere while steps are predicted, which need none.

    - `"stay"`: nothing is done.
    - `"host"`: moved to host memory; `"pinned"`: to page-locked buffers that are kept, and back beside the first real
      step. The run is the same to the last bit. States that are in host memory already stay there.
    - `"8bit"`: quantised in place, a quarter of the memory. Lossy: second moments come back within a few percent.
    - `"drop"`: deleted. The optimizer starts anew after every Predict, with Adam's bias correction and step counter,
      and a checkpoint saved in Predict holds no states.

    Raises:
        ValueError: If `placement` is none of these.
        ImportError: If `"8bit"` is asked for without bitsandbytes.
    """

    name = "optimizer_state_placement"

    def __init__(self, placement: str = "host"):
        if placement not in _STRATEGIES:
            choices = ", ".join(f"`{choice}`" for choice in _STRATEGIES)
            raise ValueError(f"`placement` must be one of {choices}, got `{placement}`.")
        if placement == "8bit":
            bitsandbytes_functional()
        self.placement = placement
        self._strategy = _STRATEGIES[placement]()
        self._optimizer: torch.optim.Optimizer | None = None

    def begin(self, run: Run) -> None:
        self.before_export()  # of a run that ended in an exception
        self._optimizer = run.optimizer
        self._strategy = _STRATEGIES[self.placement]()

    def on_phase_change(self, old: Phase, new: Phase) -> None:
        if old is Phase.PREDICT:
            self._come_home()
        if new is Phase.PREDICT and self._optimizer is not None:
            self._strategy.send(self._optimizer.state)

    def after_backward(self, phase: Phase | None) -> None:
        self._strategy.wait()

    def before_export(self) -> None:
        self._come_home()
        self._strategy.wait()

    def end(self) -> None:
        self.before_export()
        self._optimizer, self._strategy = None, _STRATEGIES[self.placement]()

    def _come_home(self) -> None:
        if self._optimizer is not None:
            self._strategy.bring(self._optimizer.state)
