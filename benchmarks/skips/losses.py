"""
Head and cross-entropy without all logits: ours, torch's and TRL's. A quarter of an hour.

    python -m benchmarks.skips.losses

Each arm gets the hidden states of the labelled slots of a batch, and computes summed loss and gradients.

- `all_logits`: `torch.nn.functional.linear` and `cross_entropy` in float32, as models do it.
- `ours`: `linear_cross_entropy` of hf_hybrid/streaming/loss.py, 512 tokens at a time.
- `torch`, `torch_512`: `torch.nn.functional.linear_cross_entropy` with its own chunks, and with 512 tokens at a time.
  It has no cap.
- `trl`: the head of TRL's trainers (`trl.kernels.ChunkedLogProbFunction`). On a GPU its tiles are kernels of Triton.

*Seconds* are medians of three rounds in turn, of the processor, on one thread. *Peak* is that of the allocator above
the inputs. *Errors* are relative, to the same in float64. A last case has so many tokens that sums are long.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from trl.kernels import ChunkedLogProbFunction

from benchmarks.results import Results, Row, command_line, provenance
from hf_hybrid.streaming.loss import linear_cross_entropy

KEY = ("vocabulary", "dtype", "labelled", "head", "softcap", "arm")
CASES = [
    (49_152, 576, tokens, dtype, head, None)
    for dtype in ("float32", "bfloat16") for tokens in (1024, 102) for head in ("trained", "frozen")
] + [
    (128_256, 576, tokens, dtype, head, None)
    for dtype in ("float32", "bfloat16") for tokens, head in ((1024, "trained"), (1024, "frozen"), (102, "trained"))
] + [
    (49_152, 576, 1024, "float32", "trained", 30.0), (49_152, 576, 1024, "bfloat16", "trained", 30.0),
    (4_096, 256, 16_384, "bfloat16", "trained", None),
]  # fmt: skip
"""Vocabulary, width, labelled slots, precision, head, cap."""

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]


def all_logits(hidden: Tensor, weight: Tensor, targets: Tensor, cap: float | None) -> Tensor:
    logits = F.linear(hidden, weight)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    logits = logits if cap is None else cap * torch.tanh(logits / cap)
    return F.cross_entropy(logits, targets, reduction="sum")


def torch_loss(rows: int | None) -> Loss:
    options = torch.nn.LinearCrossEntropyOptions(batch_chunk_size=rows)
    return lambda hidden, weight, targets: F.linear_cross_entropy(
        hidden, weight, targets, reduction="sum", options=options
    )


def arms(vocabulary: int, cap: float | None) -> dict[str, Loss]:
    made: dict[str, Loss] = {
        "all_logits": lambda *inputs: all_logits(*inputs, cap),
        "ours": lambda *inputs: linear_cross_entropy(*inputs, softcap=cap),
        "trl": lambda hidden, weight, targets: (
            -ChunkedLogProbFunction.apply(hidden, weight, None, targets, 1.0, 32_768, cap, 1.0, ("log_probs",))[0].sum()
        ),
    }
    if cap is None:
        made["torch_512"] = torch_loss(512)
    if cap is None and vocabulary < 100_000:  # with more words it computes 4 tokens at a time, and takes minutes
        made["torch"] = torch_loss(None)
    return made


def peak(compute: Callable[[], object]) -> int:
    """Return the most bytes that the allocator gave at a time. Custom operators hide theirs from dispatch modes."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        compute()
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    held = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        most = max(most, held)
    return most


def exact(hidden: Tensor, weight: Tensor, targets: Tensor, cap: float | None) -> tuple[float, Tensor, Tensor]:
    """Return loss and gradients in float64."""
    hidden, weight = (value.double().requires_grad_() for value in (hidden, weight))
    total = 0.0
    for start in range(0, len(targets), 128):
        rows = slice(start, start + 128)
        loss = all_logits(hidden[rows], weight, targets[rows], cap)
        loss.backward()
        total += loss.item()
    assert hidden.grad is not None and weight.grad is not None
    return total, hidden.grad, weight.grad


def error(found: Tensor | None, expected: Tensor) -> float | None:
    return None if found is None else ((found.double() - expected).norm() / expected.norm()).item()


def measure(vocabulary: int, width: int, tokens: int, dtype: str, head: str, cap: float | None) -> dict[str, Row]:
    """Return what was measured of each arm."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(tokens, width, generator=generator)
    weight = torch.randn(vocabulary, width, generator=generator) / width**0.5
    targets = torch.randint(vocabulary, (tokens,), generator=generator)
    hidden, weight = (value.to(getattr(torch, dtype)).requires_grad_() for value in (hidden, weight))
    weight.requires_grad_(head == "trained")
    loss, hidden_grad, weight_grad = exact(hidden.detach(), weight.detach(), targets, cap)
    losses, rows, seconds = arms(vocabulary, cap), {}, {}

    def compute(arm: str) -> Tensor:
        hidden.grad = weight.grad = None
        found = losses[arm](hidden, weight, targets)
        found.backward()
        return found

    for arm in losses:
        found = compute(arm)
        rows[arm] = {
            "loss_error": abs(found.item() - loss) / loss,
            "hidden_error": error(hidden.grad, hidden_grad),
            "weight_error": error(weight.grad, weight_grad),
        }
        hidden.grad = weight.grad = None
        rows[arm]["peak_bytes"] = peak(lambda arm=arm: compute(arm))
    for _ in range(3):
        for arm in losses:
            begun = time.process_time()
            compute(arm)
            seconds.setdefault(arm, []).append(time.process_time() - begun)
    return {arm: {**row, "seconds": statistics.median(seconds[arm])} for arm, row in rows.items()}


def main() -> None:
    args = command_line(__doc__, Path(__file__).parent).parse_args()
    results = Results(args.results, "losses", KEY)
    torch.set_num_threads(1)
    for case in CASES:
        vocabulary, _, tokens, dtype, head, cap = case
        where = {"vocabulary": vocabulary, "dtype": dtype, "labelled": tokens, "head": head, "softcap": cap}
        print(where)
        for arm, row in measure(*case).items():
            results.add({**provenance(1), **where, "arm": arm, **row})
            print(f"  {arm:10} {row['seconds']:.2f} s, {row['peak_bytes'] / 2**20:.0f} MiB, {row}", flush=True)


if __name__ == "__main__":
    main()
