"""
Loss-matched speed-up of HybridTrainer, its directions and planners, controls and peers over plain Trainer.

S is the number of backward passes that plain `Trainer` (AdamW at its best learning rate) needs, with a complete
schedule of its own, for the final held-out loss of a run, over the backward passes of that run; *with probes* also
counts forward passes on held-out sequences, a third of a step per batch. Training, probe and evaluation sequences are
disjoint; all arms see the same training sequences in the same order.

    python benchmarks/acceleration.py --workers 2        # everything, for many hours; goes on where it stopped
    python benchmarks/acceleration.py --task code --arm adamw hybrid fast --minutes 60
    python benchmarks/acceleration.py --report                     # tables and plots from what is there

The budget is spent by successive halving: every arm is run on one seed at three learning rates around the best of its
family, a factor of two apart, further while the best lies at an end; the best runs on all seeds, then the second best.
Finished runs are kept, one JSON each, under `benchmarks/results/acceleration/TASK/`; the summary and the plots beside
it. The peers want `pip install -r benchmarks/requirements.txt`, the NiNo arm its published checkpoint
(`--nino_folder`).
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import multiprocessing
import os
import shutil
import time
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path

from acceleration_arms import ARMS, DEFAULT_ARMS, nino_path, train
from acceleration_report import arm_row, pace, plot_curves, plot_speedups, print_table
from acceleration_tasks import BASE_RATE, BASE_STEPS, ROOT, TASKS, TextAndModels, training_arguments

RESULTS = ROOT / "results" / "acceleration"
BASE = ROOT / "results" / "base"
MOST_RATES = 6
"""Learning rates tried per arm before the search gives up on an interior optimum."""


@dataclass(frozen=True)
class Run:
    """One training run; its name is the name of its file."""

    task: str
    arm: str
    steps: int
    rate: float
    seed: int

    @property
    def path(self) -> Path:
        return RESULTS / self.task / f"{self.arm}-{self.steps}-{self.rate:.3g}-{self.seed}.json"

    def loss(self) -> float | None:
        """Final held-out loss; infinite if the run diverged, `None` if it was not made yet."""
        if not self.path.exists():
            return None
        loss = json.loads(self.path.read_text(encoding="utf-8"))["eval_loss"]
        return math.inf if loss is None or not math.isfinite(loss) else loss


# What to run next follows from the results that are there.


def searched_rates(task: str, arm: str) -> tuple[list[float], list[Run]]:
    """
    The learning-rate search of an arm on the first seed.

    Returns:
        Rates that were run, best first, and the runs that the search needs next (none when it is over).
    """
    steps, grid = TASKS[task].steps, start_grid(task, arm)
    if grid is None:
        return [], []
    grid = list(grid)
    while True:
        runs = {rate: Run(task, arm, steps, rate, 0) for rate in grid}
        missing = [run for run in runs.values() if run.loss() is None]
        ranked = sorted((rate for rate in grid if runs[rate].loss() is not None), key=lambda rate: runs[rate].loss())
        if missing or TASKS[task].tuned is not True:
            return ranked, missing
        best = ranked[0]
        if len(grid) >= MOST_RATES or grid[0] < best < grid[-1]:
            return ranked, []
        grid = [grid[0] / 2, *grid] if best == grid[0] else [*grid, grid[-1] * 2]


def start_grid(task: str, arm: str) -> tuple[float, ...] | None:
    """Where the search begins: around the best rate of the arm's family; `None` while that is not known."""
    if TASKS[task].tuned is not True:
        return (1.0,) if ARMS[arm].rate_of == "one" else TASKS[task].grid
    family = ARMS[arm].rate_of
    if family == "one":
        return (0.5, 1.0, 2.0)
    if arm == family:
        return TASKS[task].grid
    ranked, missing = searched_rates(task, family)
    return None if missing or not ranked else (ranked[0] / 2, ranked[0], 2 * ranked[0])


def wanted_runs(tasks: list[str], arms: list[str], seeds: list[int]) -> list[Run]:
    """Runs to make next, the most telling first. More follow when these are there."""
    search, seeded, curve, second = [], [], [], []
    for task in tasks:
        for arm in arms_of(task, arms):
            ranked, missing = searched_rates(task, arm)
            search += missing
            if missing or not ranked:
                continue
            steps = TASKS[task].steps
            seeded += [Run(task, arm, steps, ranked[0], seed) for seed in seeds]
            if len(ranked) > 1:
                second += [Run(task, arm, steps, ranked[1], seed) for seed in seeds]
            if arm == "adamw":
                curve += [
                    run for budget in TASKS[task].budgets for run in plain_runs(task, budget, ranked[:2], seeds[:2])
                ]
    wanted = [run for run in [*search, *seeded, *curve, *second] if run.loss() is None]
    return list(dict.fromkeys(wanted))


def plain_runs(task: str, budget: int, rates: list[float], seeds: list[int]) -> list[Run]:
    """One point of the plain curve. The best rate may depend on the budget: both on the first seed, then more seeds."""
    first = [Run(task, "adamw", budget, rate, seeds[0]) for rate in rates]
    if any(run.loss() is None for run in first):
        return first
    best = min(first, key=Run.loss)
    return [Run(task, "adamw", budget, best.rate, seed) for seed in seeds]


def arms_of(task: str, arms: list[str]) -> list[str]:
    """Those that make sense for a task, in the order of `ARMS`."""
    return [arm for arm in ARMS if arm in arms and (TASKS[task].tuned is True or arm in DEFAULT_ARMS)]


# Running.


@functools.cache
def sources() -> TextAndModels:
    import datasets
    import torch
    from transformers.utils import logging

    datasets.disable_progress_bars()
    logging.disable_progress_bar()
    torch.set_num_threads(int(os.environ["HYBRID_BENCHMARK_THREADS"]))
    return TextAndModels(BASE)


def do(run: Run) -> None:
    """Train, and leave the result behind as a file that is there whole or not at all."""
    nino = nino_path(os.environ.get("HYBRID_BENCHMARK_NINO") or None)
    result = train(ARMS[run.arm], TASKS[run.task], sources(), steps=run.steps, rate=run.rate, seed=run.seed, nino=nino)
    if not math.isfinite(result["eval_loss"]):
        result["eval_loss"] = None
    run.path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = run.path.with_suffix(".tmp")
    unfinished.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    unfinished.replace(run.path)


def make_base(_=None) -> None:
    """The model that fine-tuning starts from."""
    from transformers import Trainer, TrainingArguments

    task = TASKS["code"]
    values = training_arguments(task, steps=BASE_STEPS, rate=BASE_RATE, seed=1234, folder=str(BASE) + ".run")
    model = sources().model(task, 1234)
    Trainer(model, TrainingArguments(**values), train_dataset=sources().split("code")["train"]).train()
    model.save_pretrained(BASE)
    shutil.rmtree(str(BASE) + ".run", ignore_errors=True)


def run_all(args) -> None:
    """Keep the workers busy with what is wanted most until nothing is, or the time is over."""
    until = time.monotonic() + 60 * args.minutes if args.minutes else math.inf
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(args.workers, mp_context=context) as pool:
        if any(not TASKS[task].scratch for task in args.task) and not BASE.is_dir():
            pool.submit(make_base).result()
        under_way, failed = {}, set()
        while True:
            wanted = [run for run in wanted_runs(args.task, args.arm, args.seeds) if run not in failed]
            free = [run for run in wanted if run not in under_way.values()]
            while free and len(under_way) < args.workers and time.monotonic() < until:
                run = free.pop(0)
                under_way[pool.submit(do, run)] = run
            if not under_way:
                return
            for future in wait(under_way, return_when=FIRST_COMPLETED).done:
                run = under_way.pop(future)
                if future.exception() is not None:
                    failed.add(run)
                    print(f"{run.path.stem:36s} failed: {future.exception()!r}", flush=True)
                    continue
                print(f"{run.task:8s} {run.path.stem:36s} {run.loss():.4f}", flush=True)


# Reporting.


def plain_losses(task: str, seeds: list[int]) -> dict[int, dict[int, float]]:
    """Plain AdamW: steps -> seed -> final loss, each the best of the learning rates that were run there."""
    found: dict[int, dict[int, float]] = {}
    for path in (RESULTS / task).glob("adamw-*.json"):
        result = json.loads(path.read_text(encoding="utf-8"))
        if result["seed"] in seeds and result["eval_loss"] is not None:
            losses = found.setdefault(result["steps"], {})
            losses[result["seed"]] = min(result["eval_loss"], losses.get(result["seed"], math.inf))
    return dict(sorted(found.items()))


def report(task: str, arms: list[str], seeds: list[int]) -> dict | None:
    """All arms of a task at their best rates; `None` while plain AdamW has no curve."""
    steps, plain = TASKS[task].steps, plain_losses(task, seeds)
    if len(plain) < 2 or steps not in plain:
        return None
    tuned = {} if TASKS[task].tuned is True else plain_losses(TASKS[task].tuned, seeds)
    table = {"task": task, "about": TASKS[task].about, "steps": steps, "plain": plain, "arms": {}, "sweeps": {}}
    for arm in arms_of(task, arms):
        rates, _ = searched_rates(task, arm)
        table["sweeps"][arm] = {f"{rate:.3g}": Run(task, arm, steps, rate, 0).loss() for rate in sorted(rates)}
        if not rates:
            continue
        runs = [Run(task, arm, steps, rate, seed) for rate in rates[:2] for seed in seeds]
        results = [json.loads(run.path.read_text(encoding="utf-8")) for run in runs if run.loss() is not None]
        best = better_rate([result for result in results if result["eval_loss"] is not None])
        row = arm_row(best, plain, steps)
        if len(tuned) > 1:
            row |= pace(row["runs"], tuned)
        table["arms"][arm] = {"rate": best[0]["rate"] if best else rates[0], "about": ARMS[arm].about, **row}
    return table


def better_rate(results: list[dict]) -> list[dict]:
    """The results at one learning rate: of those with the most seeds the one with the lowest mean loss."""
    by_rate: dict[float, list[dict]] = {}
    for result in results:
        by_rate.setdefault(result["rate"], []).append(result)
    return min(
        by_rate.values(),
        key=lambda some: (-len(some), sum(result["eval_loss"] for result in some) / len(some)),
        default=[],
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", nargs="+", choices=list(TASKS), default=list(TASKS))
    parser.add_argument("--arm", nargs="+", choices=list(ARMS), default=list(ARMS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2], help="The first is that of the rate search.")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1, help="Threads per worker.")
    parser.add_argument(
        "--minutes", type=float, default=0.0, help="Start no run after that many; 0: until all is done."
    )
    parser.add_argument("--nino_folder", default=None, help="Folder that holds the published NiNo checkpoint.")
    parser.add_argument("--report", action="store_true", help="Only report what is there.")
    args = parser.parse_args()
    RESULTS.mkdir(parents=True, exist_ok=True)
    if nino_path(args.nino_folder) is None:
        args.arm = [arm for arm in args.arm if not ARMS[arm].needs_nino or args.report]
    if not args.report:
        os.environ["HYBRID_BENCHMARK_THREADS"] = str(args.threads)
        os.environ["HYBRID_BENCHMARK_NINO"] = args.nino_folder or ""
        run_all(args)
    tables = [table for task in args.task if (table := report(task, args.arm, args.seeds))]
    for table in tables:
        print_table(table)
    if set(args.task) == set(TASKS):
        (RESULTS.parent / "acceleration.json").write_text(json.dumps(tables, indent=1) + "\n", encoding="utf-8")
        tuned = [table for table in tables if TASKS[table["task"]].tuned is True]
        plot_curves(tuned, RESULTS.parent / "acceleration_curves.png")
        plot_speedups(tuned, RESULTS.parent / "acceleration_speedups.png")


if __name__ == "__main__":
    main()
