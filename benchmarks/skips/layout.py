"""
How long the host lays out a window as trees, while a GPU waits: 64 rows of up to 2,000 tokens. Seconds.

    python -m benchmarks.skips.layout

The rows lie in 8 micro-batches. `nothing` shares nothing; in `system` all rows begin with the same 1,000 tokens; in
`agent` four of them have 500 more in common. The time, the least of ten, is that of everything from the batches on the
host to the tensors that go to the device.
"""

from __future__ import annotations

import time
from pathlib import Path

import torch

from benchmarks.results import Results, command_line, provenance
from hf_hybrid.rows.attention import Layout
from hf_hybrid.rows.sharing import FlatRow
from hf_hybrid.rows.tree import IGNORED, Rows, divide, on_host, padded

ROWS, LENGTH, MICRO_BATCHES, MOST = 64, 2000, 8, 16_000


def window(kind: str) -> list[Rows]:
    """Return tokens, masks and labels of the micro-batches. The second half of each row is learned."""
    draw = torch.Generator().manual_seed(0)

    def tokens(count: int) -> torch.Tensor:
        return torch.randint(30_000, (count,), generator=draw)

    system, tasks, batches = tokens(1000), [tokens(500) for _ in range(ROWS // 4)], []
    for first in range(0, ROWS, ROWS // MICRO_BATCHES):
        ids = torch.zeros(ROWS // MICRO_BATCHES, LENGTH, dtype=torch.long)
        mask, labels = torch.zeros_like(ids), torch.full_like(ids, IGNORED)
        for row in range(len(ids)):
            length = int(torch.randint(1600, LENGTH + 1, (1,), generator=draw))
            own = tokens(length)
            if kind != "nothing":
                own[:1000] = system
            if kind == "agent":
                own[1000:1500] = tasks[(first + row) // 4]
            ids[row, :length], mask[row, :length] = own, 1
            labels[row, length // 2 : length] = own[length // 2 :]
        batches.append((ids, mask, labels))
    return batches


def lay_out(batches: list[Rows]) -> None:
    copies = on_host(batches)
    rows = [row for number, batch in enumerate(copies) for row in batch.rows(number) or []]
    for tree in divide(rows, MOST):
        batch, tree = padded(tree, copies)
        torch.stack(batch)
        flat = FlatRow.of(tree, batch, torch.device("cpu"), repeat=True)
        _ = Layout(flat.segments, torch.device("cpu")).gathered


def main() -> None:
    args = command_line(__doc__, Path(__file__).parent).parse_args()
    results = Results(args.results, "layout", ("kind",))
    torch.set_num_threads(1)
    print("| 64 rows of 1,600 to 2,000 tokens that share | ms |\n|---|---|")
    for kind in ("nothing", "system", "agent"):
        batches, taken = window(kind), []
        for _ in range(10):
            begun = time.perf_counter()
            lay_out(batches)
            taken.append(1e3 * (time.perf_counter() - begun))
        results.add({**provenance(1), "kind": kind, "milliseconds": min(taken)})
        print(f"| {kind} | {min(taken):.1f} |")


if __name__ == "__main__":
    main()
