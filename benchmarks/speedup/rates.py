"""
Adapters whose learning rate was left at a default: how good is the rule that takes its place?

    python -m benchmarks.speedup.rates --task lora dpo --workers 2            # half an hour on two cores
    python -m benchmarks.speedup.rates --gpu --workers 12                     # SmolLM2 on a GPU
    python -m benchmarks.speedup.rates --gpu --report                         # the tables of what is there

For each task there are, with the same seeds: `hybrid` from the default rate, and plain AdamW at rates in factors of
two, so that the best constant of the task is known with an interior optimum. `smol-lora-r8` and `smol-lora-r64` have
other adapters, and `smol-c-lora` other text: no default was ever tuned on them. The tables also have two arms that are
gone, `search` and `rule` (arms.py). The search went because the rule ended within 1 % of it, or below, where
fine-tuning is supervised.

Losses of preferences are those of a few pairs that are ranked wrong: one in a hundred of them is less than what two
seeds differ by. So there the difference is also shown with its standard error over the seeds, and as a share of log 2,
the loss before training.
"""

from __future__ import annotations

import math
import statistics
from pathlib import Path

from benchmarks.results import Results, command_line
from benchmarks.speedup.run import results_of, run_all
from benchmarks.speedup.search import Run, Search
from benchmarks.speedup.tasks import TASKS

SWEEPS = {
    "lora": (1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2, 3.2e-2),
    "dpo": (5e-4, 1e-3, 2e-3, 4e-3, 8e-3),
    "smol-lora-long": (2.5e-4, 5e-4, 1e-3, 2e-3, 4e-3),
    "smol-c-lora": (2.5e-4, 5e-4, 1e-3, 2e-3, 4e-3),
    "smol-dpo-long": (1.25e-4, 2.5e-4, 5e-4, 1e-3, 2e-3),
    "smol-lora-r8": (5e-4, 1e-3, 2e-3, 4e-3, 8e-3),
    "smol-lora-r64": (5e-4, 1e-3, 2e-3, 4e-3, 8e-3),
}
"""Learning rates of plain AdamW by task."""
ONE_SEED = ("smol-lora-r8", "smol-lora-r64")
"""Tasks of which the sweep is run with the first seed alone."""
DEFAULTS = {task.tuned: name for name, task in TASKS.items() if task.tuned in SWEEPS}
"""The task that starts from the default rate, by the one with a tuned baseline."""
ARMS = ("search", "rule", "hybrid")
"""Those of the tables; the first two are no longer run."""


def wanted(tasks: list[str], seeds: list[int], steps: int) -> list[Run]:
    """All runs, the most telling first: those from default rates, then the sweeps, by seed."""

    def run(task: str, arm: str, rate: float, seed: int) -> Run:
        return Run(task, arm, steps or TASKS[task].steps, rate, seed)

    starts = [DEFAULTS[task] for task in tasks]
    first = [run(task, "hybrid", TASKS[task].grid[0], seed) for seed in seeds for task in starts]
    sweep = [
        run(task, "adamw", rate, seed)
        for seed in seeds
        for task in tasks
        for rate in SWEEPS[task]
        if seed == seeds[0] or task not in ONE_SEED
    ]
    return [*first, *sweep]


def losses(results: Results, steps: int, **fields) -> dict[int, float]:
    """Final losses by seed; infinite where a run diverged."""
    rows = [row for row in results.rows(**fields) if row["steps"] == (steps or TASKS[fields["task"]].steps)]
    return {row["seed"]: math.inf if row["eval_loss"] is None else row["eval_loss"] for row in rows}


def report(results: Results, task: str, steps: int) -> None:
    """Print the losses of a task, and what the rule loses to the search."""
    print(f"\n{task}: {TASKS[task].about}")
    print(f"{'arm':10s} {'rate':>26s}  {'mean':>7s}  losses by seed")
    for rate in SWEEPS[task]:
        _line("adamw", f"{rate:.3g}", losses(results, steps, task=task, arm="adamw", rate=rate))
    found = {}
    for arm in ARMS:
        found[arm] = losses(results, steps, task=DEFAULTS[task], arm=arm)
        rows = sorted(results.rows(task=DEFAULTS[task], arm=arm), key=lambda row: row["seed"])
        rates = [row.get("rate_used") or row["rate"] * row["summary"].get("learning_rate_scale", 1.0) for row in rows]
        _line(arm, " / ".join(f"{rate:.2g}" for rate in dict.fromkeys(rates)), found[arm])
    search, rule = found["search"], found["hybrid"] or found["rule"]
    shared = sorted(set(rule) & set(search))
    if not shared:
        return
    over = [rule[seed] - search[seed] for seed in shared]
    mean, level = statistics.mean(over), statistics.mean(search[seed] for seed in shared)
    error = statistics.stdev(over) / math.sqrt(len(over)) if len(over) > 1 else math.nan
    told = f"the rule over the search: {mean:+.4f} +- {error:.4f} ({100 * mean / level:+.2f} %)"
    print(told + (f", {100 * mean / math.log(2):+.2f} % of log 2" if TASKS[task].preference else ""))


def _line(arm: str, rate: str, by_seed: dict[int, float]) -> None:
    if by_seed:
        told = " / ".join(f"{by_seed[seed]:.4f}" for seed in sorted(by_seed))
        print(f"{arm:10s} {rate:>26s}  {statistics.mean(by_seed.values()):7.4f}  {told}")


def main() -> None:
    parser = command_line(__doc__, Path(__file__).resolve().parent)
    parser.add_argument("--task", nargs="+", choices=list(SWEEPS), default=[t for t in SWEEPS if TASKS[t].pretrained])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=0, help="Length of the runs; the task's by default.")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1, help="Threads per worker.")
    parser.add_argument("--gpu", action="store_true", help="Compute on the GPU, which the workers share.")
    parser.add_argument("--minutes", type=float, default=math.inf, help="Start no run after that many.")
    parser.add_argument("--report", action="store_true", help="Only report what is there.")
    args = parser.parse_args()
    results = results_of(args)
    if not args.report:
        runs = wanted(args.task, args.seeds, args.steps)
        there = sum(results.get(**vars(run)) is not None for run in runs)
        print(f"{len(runs)} runs, {there} of them there", flush=True)
        run_all(args, lambda: runs, Search(results))
    for task in args.task:
        report(results, task, args.steps)


if __name__ == "__main__":
    main()
