"""
How long the host lays out a window as trees, while a GPU waits: 64 rows of up to 2,000 tokens. Seconds.

    python -m benchmarks.skips.layout

The rows lie in 8 micro-batches. `nothing` shares nothing; in `system` all rows begin with the same 1,000 tokens; in
`agent` four of them have 500 more in common. The time, the least of 100, is that of everything from the batches on
the host to the tensors that go to the device.

Would a thread hide it? That thread and the one that launches kernels want the interpreter's lock. So a model that is
too small to compute anything takes a step, as on a GPU whose host is the limit (8 layers, forward and backward pass
twice): once with the layout before it, and once with the layout on a thread beside it. `product` is a product of
matrices in place of the layout, which needs no lock: if it is not hidden either, no core was free.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.results import Results, command_line, provenance
from hf_hybrid.rows.attention import FlatRow, tensors_of
from hf_hybrid.rows.tree import IGNORED, Rows, divide, on_host, padded

ROWS, LENGTH, MICRO_BATCHES, MOST, REPEATS = 64, 2000, 8, 16_000, 100


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
    micro_batches = [padded(tree, copies) for tree in divide(rows, MOST)]
    trees = [(tree, [batch]) for batch, tree in micro_batches]
    moved, _ = FlatRow.on(torch.device("cpu"), trees, repeats=True)
    # What goes to a GPU beside that, and its one copy.
    tensors = [tensor for _, tree in micro_batches for tensor in tensors_of(tree.segments)]
    tensors += [tensor for batch, _ in micro_batches for tensor in batch[:4]]
    tensors += [tensor for rows in moved for tensor in rows[0][:4]]
    torch.cat([tensor.flatten() for tensor in tensors])


def launches() -> Callable[[], None]:
    """Return a step that is all host: a Llama with a width of 16, for 4 tokens."""
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "num_key_value_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=16, num_hidden_layers=8, **sizes))
    tokens = torch.arange(4)[None]

    def step() -> None:
        for _ in range(2):
            model(input_ids=tokens, labels=tokens).loss.backward()
        model.zero_grad()

    return step


def milliseconds(work: Callable[[], object], step: Callable[[], None]) -> dict[str, float]:
    """Return the least times of some work: alone, before a step, and on a thread beside a step."""

    def before() -> None:
        work()
        step()

    def beside() -> None:
        thread = threading.Thread(target=work)
        thread.start()
        step()
        thread.join()

    alone = [elapsed(work) for _ in range(REPEATS)]
    in_turn = [(elapsed(before), elapsed(beside)) for _ in range(REPEATS)]
    least_before, least_beside = map(min, zip(*in_turn))
    return {"milliseconds": min(alone), "before_a_step": least_before, "beside_a_step": least_beside}


def elapsed(run: Callable[[], object]) -> float:
    """Return how many milliseconds a call takes."""
    begun = time.perf_counter()
    run()
    return 1e3 * (time.perf_counter() - begun)


def main() -> None:
    args = command_line(__doc__, Path(__file__).parent).parse_args()
    results = Results(args.results, "layout", ("kind",))
    torch.set_num_threads(1)
    matrix, step = torch.randn(600, 600), launches()
    works: dict[str, Callable[[], object]] = {"product": functools.partial(torch.mm, matrix, matrix)}
    works |= {kind: functools.partial(lay_out, window(kind)) for kind in ("nothing", "system", "agent")}
    print("| 64 rows of 1,600 to 2,000 tokens that share | ms | hidden by a thread |\n|---|---|---|")
    for kind, work in works.items():
        found = milliseconds(work, step)
        hidden = (found["before_a_step"] - found["beside_a_step"]) / found["milliseconds"]
        results.add({**provenance(1), "kind": kind, **found, "hidden": hidden})
        print(f"| {kind} | {found['milliseconds']:.1f} | {hidden:.0%} |")


if __name__ == "__main__":
    main()
