"""
Rates of some cards and hosts, from data sheets: what a step is timed with where no GPU is there to measure.

Every number here is of a data sheet or a standard, and stands with its source. Kernels and copies do not reach them;
[`REACHED`] holds the shares that are assumed, with the measurement that each rests on. So every time that is computed
from this table is an estimate.
"""

from __future__ import annotations

from dataclasses import dataclass

REACHED = {"memory": 0.85, "bus": 0.80, "host": 0.67}
"""
Shares of the data sheets that work reaches. Copies over the bus of an H100 ran at 50.6 of 63 GB/s (docs/memory.md).
Streaming kernels reach 85 % of device memory and 67 % of host memory; both are assumed.
"""
LAUNCH_SECONDS = 6e-6
"""
Of the host, for each kernel that eager PyTorch launches. On one core of an AMD EPYC the passes of a Llama layer under
autocast took 6.8 us of processor time for each kernel (tenth percentile 5.8, `python -m benchmarks.planning.launches`).
The driver's part of a launch is not in it; the work of the CPU's kernel is, in its place. A whole streamed step took
14.0 us for each, with all that it does beside kernels (docs/evaluation/streaming_time.md).
"""


@dataclass(frozen=True)
class Card:
    """
    A GPU: dense bf16 products with fp32 sums, and the share of them that training reaches; products in fp32
    (operations/s); device memory, and the bus each way (bytes/s); bytes.

    GeForce cards reach 0.95: 157 of 165 T/s in the 7B training of LLMQ on an RTX 4090, whose clock is above that of the
    data sheet. An H100 reached 588 of 989 T/s there, and 776 in a loop of products alone; 0.65 lies between them. The
    share of an A100 is assumed.
    """

    name: str
    peak_products: float
    reached: float
    peak_fp32: float
    peak_memory: float
    peak_bus: float
    capacity: int
    source: str

    @property
    def products(self) -> float:
        """Operations per second that matrix products in bf16 reach."""
        return self.peak_products * self.reached

    @property
    def memory(self) -> float:
        """Bytes per second that kernels reach in device memory."""
        return self.peak_memory * REACHED["memory"]

    @property
    def bus(self) -> float:
        """Bytes per second that copies reach, each way."""
        return self.peak_bus * REACHED["bus"]


@dataclass(frozen=True)
class Host:
    """A machine: its memory (bytes/s of all channels), and the last-level cache that an update can use (bytes)."""

    name: str
    peak_memory: float
    cache: int
    source: str

    @property
    def memory(self) -> float:
        """Bytes per second that the cores reach, reading and writing."""
        return self.peak_memory * REACHED["host"]


PCIE4, PCIE5, GB = 31.5e9, 63.0e9, 2**30  # bytes/s of 16 lanes each way (PCI-SIG: 16 and 32 GT/s, 128b/130b)

ADA, AMPERE = "NVIDIA Ada GPU architecture whitepaper, appendix A", "NVIDIA Ampere GA102 whitepaper, appendix A"
BLACKWELL = "NVIDIA RTX Blackwell GPU architecture whitepaper, appendix"
CARDS = {
    card.name: card
    for card in (
        Card("rtx4090", 165.2e12, 0.95, 82.6e12, 1008e9, PCIE4, 24 * GB, ADA),
        Card("rtx5090", 209.5e12, 0.95, 104.8e12, 1792e9, PCIE5, 32 * GB, BLACKWELL),
        Card("rtx3090", 71e12, 0.95, 35.6e12, 936e9, PCIE4, 24 * GB, AMPERE),
        # 36 multiprocessors at 2.572 GHz with the 512 operations per cycle of the RTX 5090; eight lanes.
        Card("rtx5060ti", 47.4e12, 0.95, 23.7e12, 448e9, PCIE5 / 2, 16 * GB, "NVIDIA product page, RTX 5060 Ti 16 GB"),
        Card("a100", 312e12, 0.75, 19.5e12, 2039e9, PCIE4, 80 * GB, "NVIDIA A100 80GB SXM data sheet"),
        Card("h100", 989.4e12, 0.65, 66.9e12, 3350e9, PCIE5, 80 * GB, "NVIDIA H100 SXM data sheet"),
    )
}
HOSTS = {
    host.name: host
    for host in (
        Host("poor", 2 * 8 * 3200e6, 16 * 2**20, "two channels of DDR4-3200 (JEDEC JESD79-4)"),
        Host("desktop", 2 * 8 * 5600e6, 32 * 2**20, "two channels of DDR5-5600 (JEDEC JESD79-5)"),
        Host("server", 8 * 8 * 4800e6, 64 * 2**20, "eight channels of DDR5-4800 (JEDEC JESD79-5), one socket"),
        Host("rich", 12 * 8 * 4800e6, 256 * 2**20, "twelve channels of DDR5-4800 (AMD EPYC 9004 data sheet)"),
    )
}
