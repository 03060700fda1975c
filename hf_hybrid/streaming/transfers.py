"""Copies between host and device: on side streams where the device is a GPU, plain where it is the host itself."""

from __future__ import annotations

import weakref
from collections import deque
from typing import Any

import torch

Tensor = torch.Tensor


PAGE = 4096
SMALL = 32 * 2**20
"""Bytes below which torch's pinned allocator is used: it rounds up to powers of two, which costs little there."""


def host_buffer(size: int, *, pin: bool) -> Tensor:
    """
    `size` bytes of host memory, page-locked if asked for.

    Large buffers are registered with the driver, whole pages of their own: torch's allocator would lose up to half.
    """
    if not pin or size < SMALL:
        return torch.empty(size, dtype=torch.uint8, pin_memory=pin)
    whole = torch.empty(size + 2 * PAGE, dtype=torch.uint8)
    start = -whole.data_ptr() % PAGE
    driver, address = torch.cuda.cudart(), whole.data_ptr() + start
    torch.cuda.check_error(driver.cudaHostRegister(address, -(-size // PAGE) * PAGE, 0))
    unlock = weakref.finalize(whole.untyped_storage(), driver.cudaHostUnregister, address)
    unlock.atexit = False  # the driver may be gone by then, and the pages go with the process
    return whole[start : start + size]


def is_big(value: Any) -> bool:
    """Whether an entry of an optimizer's state is worth moving: a tensor, and not a step counter."""
    return torch.is_tensor(value) and value.numel() > 1


class Slot:
    """A device buffer that holds one unit at a time."""

    def __init__(self, size: int, device: torch.device):
        self.buffer = torch.empty(size, dtype=torch.uint8, device=device)
        self.ready: torch.cuda.Event | None = None
        self.idle: torch.cuda.Event | None = None
        self.sent: torch.cuda.Event | None = None
        """When what was last copied out of it has left."""


class Transfers:
    """
    Orders copies and computation without stopping the host.

    Copies in and copies out have a stream each. A slot is overwritten only after the computation that read it
    (`release`), and read only after its copy has arrived (`await_arrival`).
    """

    def __init__(self, device: torch.device):
        self.device = device
        self.on_gpu = device.type == "cuda"
        self.bytes_in = self.bytes_out = 0
        self._leaving: deque[tuple[torch.cuda.Event, Tensor]] = deque()
        if self.on_gpu:
            self._in, self._out = torch.cuda.Stream(device), torch.cuda.Stream(device)

    def load(self, slot: Slot, packed: Tensor, *, after: torch.cuda.Event | None = None) -> None:
        """Start copying `packed` into the slot, once `after` has happened."""
        self.bytes_in += packed.numel()
        target = slot.buffer[: packed.numel()]
        if not self.on_gpu:
            target.copy_(packed)
            return
        with torch.cuda.stream(self._in):
            for event in (slot.idle, slot.sent, after):
                if event is not None:
                    self._in.wait_event(event)
            target.copy_(packed, non_blocking=True)
            slot.ready = torch.cuda.Event()
            slot.ready.record(self._in)

    def await_arrival(self, slot: Slot) -> None:
        """What is computed from here on sees the loaded bytes."""
        if self.on_gpu and slot.ready is not None:
            torch.cuda.current_stream(self.device).wait_event(slot.ready)

    def release(self, slot: Slot) -> None:
        """What was computed so far may still read the slot; what is loaded from here on may not overtake it."""
        if self.on_gpu:
            slot.idle = torch.cuda.Event()
            slot.idle.record(torch.cuda.current_stream(self.device))

    def send(self, source: Tensor, target: Tensor) -> torch.cuda.Event | None:
        """Start copying a device tensor into host memory; complete after the event, and after [`finish_sending`]."""
        self.bytes_out += target.numel() * target.element_size()
        if not self.on_gpu:
            target.copy_(source)
            return None
        self._out.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._out):
            target.copy_(source, non_blocking=True)
            sent = torch.cuda.Event()
            sent.record(self._out)
        # The source must outlive the copy: kept here until it is known to be over.
        self._leaving.append((sent, source))
        while self._leaving and self._leaving[0][0].query():
            self._leaving.popleft()
        return sent

    def finish_sending(self) -> None:
        """Return when everything sent has arrived on the host."""
        while self._leaving:
            self._leaving.popleft()[0].synchronize()

    def fetch(self, source: Tensor) -> Fetched:
        """Start copying a host tensor to the device."""
        self.bytes_in += source.numel() * source.element_size()
        target = torch.empty(source.shape, dtype=source.dtype, device=self.device)
        if not self.on_gpu:
            return Fetched(target.copy_(source), None)
        # The memory of `target` may still be read by what was computed before.
        self._in.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._in):
            target.copy_(source, non_blocking=True)
            arrived = torch.cuda.Event()
            arrived.record(self._in)
        return Fetched(target, arrived)


class Fetched:
    """A tensor on its way to the device."""

    def __init__(self, tensor: Tensor, arrived: torch.cuda.Event | None):
        self._tensor, self._arrived = tensor, arrived

    def take(self) -> Tensor:
        """The tensor, for what is computed from here on."""
        if self._arrived is not None:
            torch.cuda.current_stream(self._tensor.device).wait_event(self._arrived)
        return self._tensor


class HostBuffers:
    """Host buffers that are used again: locking pages costs more than copying into them."""

    def __init__(self, *, pin: bool):
        self.pin, self.nbytes = pin, 0
        self._spare: dict[int, list[Tensor]] = {}

    def take(self, like: Tensor) -> Tensor:
        """A host tensor of the shape and dtype of `like`."""
        size = like.numel() * like.element_size()
        spare = self._spare.get(size)
        if not spare:
            self.nbytes += size
            spare = [host_buffer(size, pin=self.pin)]
        return spare.pop().view(like.dtype).view(like.shape)

    @property
    def spare(self) -> list[Tensor]:
        """The buffers that are free now."""
        return [buffer for buffers in self._spare.values() for buffer in buffers]

    def give_back(self, tensor: Tensor) -> None:
        """What [`take`] gave is free again."""
        flat = tensor.reshape(-1).view(torch.uint8)
        self._spare.setdefault(flat.numel(), []).append(flat)
