"""
An update of AdamW on the host: whole tensors one pass after the other, or part by part.

    python -m benchmarks.memory.host_update          # 45 million weights on one thread; a minute

`whole` scales the gradient, steps the optimizer and rounds the weights to bf16, each over all weights. `parts` is
`hf_hybrid.streaming.optimizer.step_in_parts`, with several sizes of a part. `documented` does the same with the
documented function of torch in place of the one beneath it. The arms take turns, and each figure is the median of the
processor time of an update. Weights, moments and rounded weights of all arms must end equal to the bit.
"""

from __future__ import annotations

import statistics
import time
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import torch
from torch.optim.adamw import adamw

from benchmarks.results import Results, command_line, provenance
from hf_hybrid import machine
from hf_hybrid.streaming import optimizer as streamed

WEIGHTS = 45_000_000
KEY = ("arm", "part", "scaled", "weights")


def documented(weights, gradients, means, squares, _, steps, **options) -> None:
    """The documented function, called as the one beneath it is; it counts the step itself."""
    adamw(weights, gradients, means, squares, [], [step - 1 for step in steps], fused=True, **options)


class Arm:
    """Weights with their own optimizer, and one way to update them."""

    def __init__(self, name: str, part: int, start: torch.Tensor):
        self.name, self.part = name, part
        self.weights, self.rounded = torch.nn.Parameter(start.clone()), start.bfloat16()
        self.optimizer = torch.optim.AdamW([self.weights], lr=1e-4, fused=True)
        self.milliseconds: list[float] = []

    def update(self, gradient: torch.Tensor, scale: torch.Tensor | None) -> None:
        self.weights.grad = gradient.clone()
        state = self.optimizer.state[self.weights]
        step = self._in_parts if state and self.name != "whole" else self._whole  # the first one makes the states
        started = time.process_time()
        with torch.no_grad():
            step(scale)
        self.milliseconds.append(1e3 * (time.process_time() - started))

    def _whole(self, scale: torch.Tensor | None) -> None:
        if scale is not None:
            self.weights.grad.mul_(scale)
        self.optimizer.step()
        self.rounded.copy_(self.weights)

    def _in_parts(self, scale: torch.Tensor | None) -> None:
        state, group = self.optimizer.state[self.weights], self.optimizer.param_groups[0]
        step = documented if self.name == "documented" else torch._fused_adamw_
        functions = SimpleNamespace(mul=torch.mul, _fused_adamw_=step)  # what `step_in_parts` calls of torch
        with mock.patch.object(machine, "PART", self.part), mock.patch.object(streamed, "torch", functions):
            streamed.step_in_parts(self.weights, state, group, scale, self.rounded)


def measure(arms: list[Arm], updates: int, scale: torch.Tensor | None) -> None:
    """Update all arms in turn, with the same gradients."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(updates + 1):
        gradient = torch.randn(WEIGHTS, generator=generator) * 1e-3
        for arm in arms:
            arm.update(gradient, scale)


def main() -> None:
    """Measure with and without a scale, append the results and print them."""
    parser = command_line(__doc__, Path(__file__).parent)
    parser.add_argument("--updates", type=int, default=13)
    args = parser.parse_args()
    torch.set_num_threads(1)
    results = Results(args.results, "host_update", KEY)
    start = torch.randn(WEIGHTS, generator=torch.Generator().manual_seed(0)) * 0.02
    sizes = [("whole", 0), *(("parts", 1 << exponent) for exponent in (18, 19, 20)), ("documented", machine.PART)]
    for scale in (None, torch.tensor(0.37)):
        arms = [Arm(name, part, start) for name, part in sizes]
        measure(arms, args.updates, scale)
        for arm in arms:
            if not (torch.equal(arm.weights, arms[0].weights) and torch.equal(arm.rounded, arms[0].rounded)):
                raise RuntimeError(f"`{arm.name}` has other weights.")
            key = {"arm": arm.name, "part": arm.part, "scaled": scale is not None, "weights": WEIGHTS}
            found = {"milliseconds": statistics.median(arm.milliseconds[1:]), "least": min(arm.milliseconds[1:])}
            results.add({**key, **found, "updates": args.updates, **provenance(1)})
            scaled = "scaled" if scale is not None else ""
            print(f"{arm.name:10s} {arm.part:8,d} {scaled:6s} {found['milliseconds']:.1f} ms")


if __name__ == "__main__":
    main()
