"""Where the seconds of a run with leaps go: what leaps and probes took."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from hf_hybrid.phases import PhasePlugin, PluginContext


class LeapClock(PhasePlugin):
    """
    Counts seconds in leaps and in probes, from the start of a run; a resumed run counts anew, as `train_runtime` does.

    Around a leap the device is waited for: its work is only queued by then, and would be counted as that of the next
    step. A probe ends when its losses are on the host.

    Args:
        device (`torch.device`): That of the run.
    """

    name = "leap_clock"

    def __init__(self, device: torch.device):
        self.device = device
        self.leap_seconds = 0.0
        """Forming leaps, writing them into the weights and taking back those that were refused; without probes."""
        self.probe_seconds = 0.0
        """Forward passes over held-out sequences, those of the tail average too."""

    @contextmanager
    def leap(self) -> Iterator[None]:
        """Around the making of a leap."""
        self._wait()
        started, probed = time.perf_counter(), self.probe_seconds
        try:
            yield
        finally:
            self._wait()
            self.leap_seconds += time.perf_counter() - started - (self.probe_seconds - probed)

    def _wait(self) -> None:
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)

    def probe_losses(self, evaluate: Callable[[Any], list[float]]) -> Callable[[Any], list[float]]:
        def timed(batch: Any) -> list[float]:
            started = time.perf_counter()
            try:
                return evaluate(batch)
            finally:
                self.probe_seconds += time.perf_counter() - started

        return timed

    def on_train_begin(self, context: PluginContext) -> None:
        self.leap_seconds = self.probe_seconds = 0.0
