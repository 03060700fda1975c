"""
Which runs to make next; it follows from the results that are there.

A speed-up over a badly tuned baseline is worth nothing, and an arm at a badly chosen learning rate is treated unfairly.
So every arm has its own learning-rate search, on one seed, in factors of two. It starts at three rates around the best
one of the arm's family (plain AdamW's own search starts at the task's grid), and goes on while the best rate lies at an
end of those tried: the optimum must be interior. Then the best rate is run on all seeds, and after that the second
best, because one seed may have misled the search.

The plain curve, loss against budget, needs plain AdamW at other budgets than the task's. Each of its points is a run
with a complete schedule of its own, at both best learning rates, and the lower loss counts.

The order of what is wanted is: searches, best rates, the curve, second-best rates. Nothing is remembered but the
results, so a benchmark that was stopped goes on where it was.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass

from benchmarks.results import Results
from benchmarks.speedup.arms import ARMS, DEFAULT_ARMS
from benchmarks.speedup.tasks import TASKS

MOST_RATES = 6
"""Learning rates tried per arm before the search gives up on an interior optimum."""


@dataclass(frozen=True)
class Run:
    """One training run; its fields are the key of its line in the results."""

    task: str
    arm: str
    steps: int
    rate: float
    seed: int

    def __str__(self) -> str:
        return f"{self.task:12s} {self.arm}, {self.steps} steps, rate {self.rate:.3g}, seed {self.seed}"


KEY = tuple(Run.__dataclass_fields__)


class Search:
    """
    What was run, and what is to be run next.

    Args:
        results (`Results`): Of the benchmark `speedup`, with the key `KEY`.
    """

    def __init__(self, results: Results):
        self.results = results

    def loss(self, run: Run) -> float | None:
        """The final held-out loss: infinite if the run diverged, `None` if it was not made yet."""
        row = self.results.get(**asdict(run))
        return None if row is None else math.inf if row["eval_loss"] is None else row["eval_loss"]

    def rates(self, task: str, arm: str) -> tuple[list[float], list[Run]]:
        """
        The learning-rate search of an arm on the first seed.

        Returns:
            Rates that were run, best first, and the runs that the search needs next (none when it is over).
        """
        steps, grid = TASKS[task].steps, self._start_grid(task, arm)
        if grid is None:
            return [], []
        grid = list(grid)
        while True:
            losses = {rate: self.loss(Run(task, arm, steps, rate, 0)) for rate in grid}
            missing = [Run(task, arm, steps, rate, 0) for rate, loss in losses.items() if loss is None]
            ranked = sorted((rate for rate, loss in losses.items() if loss is not None), key=losses.get)
            if missing or TASKS[task].tuned is not True:
                return ranked, missing
            best = ranked[0]
            if len(grid) >= MOST_RATES or grid[0] < best < grid[-1]:
                return ranked, []
            grid = [grid[0] / 2, *grid] if best == grid[0] else [*grid, grid[-1] * 2]

    def _start_grid(self, task: str, arm: str) -> tuple[float, ...] | None:
        """
        The rates that the search begins with, around the best rate of the arm's family; `None` while that is not known.
        """
        family = ARMS[arm].rate_of
        if TASKS[task].tuned is not True:
            return (1.0,) if family == "one" else TASKS[task].grid
        if family == "one":
            return (0.5, 1.0, 2.0)
        if arm == family:
            return TASKS[task].grid
        ranked, missing = self.rates(task, family)
        return None if missing or not ranked else (ranked[0] / 2, ranked[0], 2 * ranked[0])

    def wanted(self, tasks: list[str], arms: list[str], seeds: list[int]) -> list[Run]:
        """Runs to make next, the most telling first. More follow when these are there."""
        search, seeded, curve, second = [], [], [], []
        for task in tasks:
            for arm in arms_of(task, arms):
                ranked, missing = self.rates(task, arm)
                search += missing
                if missing or not ranked:
                    continue
                steps = TASKS[task].steps
                seeded += [Run(task, arm, steps, ranked[0], seed) for seed in seeds]
                if len(ranked) > 1:
                    second += [Run(task, arm, steps, ranked[1], seed) for seed in seeds]
                if arm == "adamw":
                    for budget in TASKS[task].budgets:
                        curve += self._point_of_the_curve(task, budget, ranked[:2], seeds[:2])
        return list(dict.fromkeys(run for run in [*search, *seeded, *curve, *second] if self.loss(run) is None))

    def _point_of_the_curve(self, task: str, budget: int, rates: list[float], seeds: list[int]) -> list[Run]:
        """The best rate may depend on the budget: both rates on the first seed, then the better one on more seeds."""
        first = [Run(task, "adamw", budget, rate, seeds[0]) for rate in rates]
        if any(self.loss(run) is None for run in first):
            return first
        best = min(first, key=self.loss)
        return [Run(task, "adamw", budget, best.rate, seed) for seed in seeds]


def arms_of(task: str, arms: list[str]) -> list[str]:
    """The arms that make sense for a task, in the order of `ARMS`."""
    return [
        name
        for name, arm in ARMS.items()
        if name in arms and (TASKS[task].tuned is True or name in DEFAULT_ARMS) and (TASKS[task].lora or not arm.lora)
    ]
