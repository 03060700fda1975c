"""
Copies between host and device that run beside computation.

A GPU executes what is put on a *stream* in order; streams run beside each other unless an *event* orders them. The
package computes on the current stream and copies on two more, one for each direction, because the bus carries both
directions at full speed. The host only enqueues and never waits, so every rule about memory that is still in use is
expressed with events:

- Computation waits for the arrival of its operands (`wait`, `Fetched.take`).
- A copy into device memory waits for the computation that used this memory before (`release`, `fetch`).
- A copy to the host waits for the computation that makes its source (`send`), and its source is kept alive until the
  copy is over: the allocator does not know the second stream and would give the memory to the next tensor. The host
  runs far ahead of the device, so without a limit it would allocate the gradients of many layers before the first copy
  is over. Beyond `most_leaving` bytes, computation waits for the oldest copy, and its source is freed.
- A copy back of tensors that were just sent waits for that copy (`after`), because the two directions are separate
  streams.

The driver copies asynchronously only from and to page-locked ("pinned") host memory. Locking pages is slow, so buffers
are kept and used again ([`HostBuffers`]).

On a CPU the same code runs: torch.cpu has streams and events that do nothing, and a copy is over when it returns. So
the tests can compare every streamed run with a resident one.
"""

from __future__ import annotations

import functools
import math
from collections import deque
from typing import Any

import torch
from torch import Tensor

from hf_hybrid.machine import copies_beside, host_buffer

Event = Any
"""A device's event; `None` on a CPU, where a copy that was started is over."""


class Slot:
    """Bytes of the device that hold one thing after the other, and when they may be written and read."""

    def __init__(self, buffer: Tensor, place: range = range(0)):
        self.buffer, self.place = buffer, place  # in its ring, if it is a part of one
        self.ready: Event = None  # what was loaded has arrived
        self.idle: Event = None  # what computed with it is over
        self.sent: Event = None  # what was last copied out of the slot has left


class Ring:
    """
    Device memory of `size` bytes that is given out in turn: no copy into it makes computation wait.

    The allocator knows the stream of the computation alone, and what it gives out must not be copied out of any more.
    So computation would have to wait for copies out. Here the next copy in waits for them instead, on the stream of
    the copies. `whole.idle` is the event after which nothing else uses the memory.
    """

    def __init__(self, size: int, device: torch.device):
        self.whole = Slot(torch.empty(size, dtype=torch.uint8, device=device))
        self._slots: list[Slot] = []
        """Those that were given back in the order in which their contents leave, and among them those that are lent."""
        self._lent: set[Slot] = set()

    def take(self, size: int) -> Slot | None:
        """Return `size` bytes whose contents left first, or `None` where none are free."""
        last, best, covered, least = len(self.whole.buffer) - size, None, [], len(self._slots)
        for start in sorted({0, last, *(slot.place.stop for slot in self._slots)}, reverse=True):
            here = [slot for slot in self._slots if start < slot.place.stop and slot.place.start < start + size]
            age = self._slots.index(here[-1]) if here else -1
            if start <= last and age < least and self._lent.isdisjoint(here):
                best, covered, least = range(start, start + size), here, age
        if best is None:
            return None
        slot = Slot(self.whole.buffer[best.start : best.stop], best)
        slot.idle = self.whole.idle
        for earlier in covered:
            # Of the last: the copies out of the others are over before it. Copies in keep their order too, so those
            # into the rest of such a place need not wait again.
            self._slots.remove(earlier)
            slot.sent = earlier.sent
        self._slots.append(slot)
        self._lent.add(slot)
        return slot

    def give_back(self, slot: Slot) -> None:
        """Give back a slot, whose `sent` tells when its contents have left."""
        self._lent.remove(slot)
        self._slots.remove(slot)
        self._slots.append(slot)

    def forget(self) -> None:
        """Drop what was loaded and will not be used. Copies in keep their order, so nothing has to be waited for."""
        self._slots = [slot for slot in self._slots if slot not in self._lent]
        self._lent.clear()


class Transfers:
    """
    Copies between the host and one device, which may be the host itself. They are ordered with computation without
    stopping the host.
    """

    def __init__(self, device: torch.device):
        self.beside = copies_beside(device)
        """Copies run beside computation, which takes page-locked host memory. Without streams (MPS) they block."""
        self._streams: Any = torch.get_device_module(device) if self.beside else torch.cpu
        make = functools.partial(self._streams.Stream, device=device) if self.beside else self._streams.Stream
        self.device, self._in, self._out = device, make(), make()
        self.bytes_in = self.bytes_out = 0
        self.most_leaving = math.inf
        """Bytes of sources that may be on their way to the host before computation waits for the oldest."""
        self._leaving: deque[tuple[Event, Tensor]] = deque()
        self._bytes_leaving = 0
        self._last_sent: Event = None

    def wait(self, event: Event) -> None:
        """Let later computation wait for the event, without blocking the host."""
        if event is not None:
            self._streams.current_stream(self.device).wait_event(event)

    def _copy(self, stream: Any, target: Tensor, source: Tensor) -> Event:
        with self._streams.stream(stream):
            target.copy_(source, non_blocking=self.beside)
        return stream.record_event()

    # A slot: one unit, loaded and used many times.

    def load(self, slot: Slot, packed: Tensor, *, start: int = 0, after: Event = None) -> None:
        """Start copying bytes into the slot from `start` on, once `after` has happened and the slot is not in use."""
        for event in (slot.idle, slot.sent, after):
            if event is not None:
                self._in.wait_event(event)
        self.bytes_in += packed.numel()
        slot.ready = self._copy(self._in, slot.buffer[start : start + packed.numel()], packed)

    def release(self, slot: Slot) -> None:
        """Let the next load wait for the present computation, which may still read the slot."""
        slot.idle = self._streams.current_stream(self.device).record_event()

    # Single tensors.

    def send(self, source: Tensor, target: Tensor, *, keep: bool = True) -> Event:
        """
        Start copying a device tensor into page-locked host memory; returns the event after which the copy is complete.

        With `keep` the source is kept alive until it has left, otherwise the caller does that (as of a slot). See
        [`finish_sending`]. Of several sources at most `most_leaving` bytes are kept.
        """
        self.bytes_out += target.numel() * target.element_size()
        self._out.wait_stream(self._streams.current_stream(self.device))
        sent = self._last_sent = self._copy(self._out, target, source)
        if keep and sent is not None:
            self._leaving.append((sent, source))
            self._bytes_leaving += source.nbytes
        while self._leaving and self._leaving[0][0].query():
            self._bytes_leaving -= self._leaving.popleft()[1].nbytes
        while self._bytes_leaving > self.most_leaving and len(self._leaving) > 1:
            # The host does not wait. Memory is given back in the order of computation, which now waits instead.
            self.wait(self._leaving[0][0])
            self._bytes_leaving -= self._leaving.popleft()[1].nbytes
        return sent

    def finish_sending(self) -> None:
        """Wait until everything sent has arrived on the host."""
        if self._last_sent is not None:
            # The last is over when all are: a stream keeps their order. Sources are let go of only then.
            self._last_sent.synchronize()
            self._let_go()

    def finish(self) -> None:
        """
        Wait until no copy is under way, also of copies that nobody will take. Then the host may write to the sources,
        and the targets may be freed.
        """
        if self.beside:
            self._in.wait_stream(self._out)  # so that the host waits once
            self._in.synchronize()
            self._let_go()

    def _let_go(self) -> None:
        self._last_sent, self._bytes_leaving = None, 0
        self._leaving.clear()

    def fetch(self, source: Tensor, *, after: Event = None) -> Fetched:
        """Start copying a host tensor to the device, once `after` has happened."""
        self.bytes_in += source.numel() * source.element_size()
        target = torch.empty(source.shape, dtype=source.dtype, device=self.device)
        # The memory of `target` may still be read by what was computed before. `record_stream` would spare this wait,
        # but keeps memory from reuse until the host sees that it is free, and the host runs far ahead of the device.
        self._in.wait_stream(self._streams.current_stream(self.device))
        if after is not None:
            self._in.wait_event(after)
        return Fetched(target, self._copy(self._in, target, source), self)


class Fetched:
    """A tensor on its way to the device. `arrived` is the event of its arrival."""

    def __init__(self, tensor: Tensor, arrived: Event, transfers: Transfers):
        self.tensor, self.arrived, self._transfers = tensor, arrived, transfers

    def take(self) -> Tensor:
        """Return the tensor. Later computation waits for its arrival."""
        self._transfers.wait(self.arrived)
        return self.tensor


class HostBuffers:
    """
    Host buffers that are reused, because locking pages costs more than copying into them.

    A tensor gets the smallest free buffer that holds it. If all free buffers are too small, a new one replaces one of
    them. Otherwise every sequence length would keep its own buffers.
    """

    def __init__(self, *, pin: bool):
        self.pin = pin
        self.spare: list[Tensor] = []
        self._lent: dict[int, Tensor] = {}

    def take(self, like: Tensor) -> Tensor:
        """Return a host tensor with the shape and dtype of `like`."""
        size = max(like.numel() * like.element_size(), 1)
        fitting = [index for index, buffer in enumerate(self.spare) if buffer.numel() >= size]
        if fitting:
            buffer = self.spare.pop(min(fitting, key=lambda index: self.spare[index].numel()))
        else:
            if self.spare:
                self.spare.pop()
            buffer = host_buffer(size, pin=self.pin)
        self._lent[buffer.data_ptr()] = buffer
        return buffer[: like.numel() * like.element_size()].view(like.dtype).view(like.shape)

    def take_back(self) -> None:
        """Take back all lent buffers after an error, when nobody uses them any more and no copy is under way."""
        self.spare += self._lent.values()
        self._lent.clear()

    def give_back(self, tensor: Tensor) -> None:
        """Take back a tensor of [`take`]. Computation must have been made to wait for the last copy out of it."""
        self.spare.append(self._lent.pop(tensor.data_ptr()))
