"""
Counts the kernels of some passes on the simulated device, and the operations that the host computes meanwhile.

    python -m simulated_gpu.kernels MODULE    # with tests/ in PYTHONPATH

`MODULE.passes(device)` returns functions by name, which are called in their order. The last line that is printed is the
JSON object `{name: [kernels and copies, operations of the host]}`.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable

from simulated_gpu import device as sim
from simulated_gpu.clock import CARDS, HOSTS, Clock


class Counts(Clock):
    """A clock on which a launch takes a second, and which counts what the host computes."""

    def __init__(self):
        super().__init__(CARDS["rtx4090"], HOSTS["desktop"], launch=1.0)
        self.operations = 0

    def work(self, what: str, size: float) -> None:
        self.operations += 1


def count(passes: dict[str, Callable[[], object]]) -> dict[str, tuple[int, int]]:
    """Kernels and copies that each pass launches, and operations of the host, as the clock counts them."""
    counted = {}
    for name, function in passes.items():
        clock = sim.clock = Counts()
        with sim.HostMode():
            function()
        sim.clock = None
        counted[name] = round(clock.busy["launches"]), clock.operations
    return counted


def main() -> None:
    module = importlib.import_module(sys.argv[1])  # before the device is there: packages look for kernels of CUDA
    sim.install()
    sys.stdout.write(json.dumps(count(module.passes("cuda"))) + "\n")


if __name__ == "__main__":
    main()
