"""
Loss-matched speed-up of HybridTrainer, its directions and planners, controls and peers over plain Trainer.

    python -m benchmarks.speedup.run --workers 2        # everything, for many hours; goes on where it stopped
    python -m benchmarks.speedup.run --task code --arm adamw hybrid fast --minutes 60
    python -m benchmarks.speedup.run --task smol-full --arm adamw hybrid --rate 1e-4 --workers 1    # these runs alone
    python -m benchmarks.speedup.run --report           # tables and plots from what is there
    python -m benchmarks.speedup.run --gpu --task smol-lora-long --arm adamw --rate 1e-3 --workers 8

S is the number of backward passes that plain `Trainer` (AdamW at its best learning rate) needs, with a complete
schedule of its own, for the final held-out loss of a run, over the backward passes of that run; *all costs* also counts
forward passes of probes, a third of a step per batch, and the arithmetic of leaps. Training, probe and
evaluation sequences are disjoint; all arms see the same training sequences in the same order.

With `--gpu` runs compute on the GPU, which the workers share. Their lines are those of `speedup_gpu`, a benchmark of
their own, as losses of the two machines are not to be mixed.

Tasks of preferences (`dpo*`) and those that start from SmolLM2 (`smol-*`) run only if they are named; pretrained.py
says how to get it. The peers want `pip install -r benchmarks/requirements.txt`.
"""

from __future__ import annotations

import functools
import itertools
import math
import os
import shutil
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from benchmarks.results import Results, command_line, provenance
from benchmarks.speedup.arms import ARMS, train
from benchmarks.speedup.report import plot_curves, plot_speedups, print_table, table_of
from benchmarks.speedup.search import KEY, Run, Search
from benchmarks.speedup.tasks import BASE, BASE_RATE, BASE_STEPS, TASKS, Task, TextAndModels, training_arguments
from benchmarks.workers import keep_busy, pool

HERE = Path(__file__).resolve().parent


# What happens in a worker, which lives for many runs.


def sources_of(task: Task):
    return _sources(task.pretrained)


@functools.cache
def _sources(pretrained: bool):
    import datasets
    import torch
    from transformers.utils import logging

    datasets.disable_progress_bars()
    logging.disable_progress_bar()
    torch.set_num_threads(int(os.environ["HYBRID_BENCHMARK_THREADS"]))
    if not pretrained:
        return TextAndModels()
    from benchmarks.speedup.pretrained import DocstringsAndSmolLM2

    return DocstringsAndSmolLM2()


def make(run: Run) -> dict:
    task = TASKS[run.task]
    return train(ARMS[run.arm], task, sources_of(task), steps=run.steps, rate=run.rate, seed=run.seed)


def make_base() -> None:
    """Train the model that fine-tuning starts from."""
    from transformers import Trainer, TrainingArguments

    task = TASKS["code"]
    values = training_arguments(task, steps=BASE_STEPS, rate=BASE_RATE, seed=1234, folder=f"{BASE}.run")
    sources = sources_of(task)
    model = sources.model(task, 1234)
    Trainer(model, TrainingArguments(**values), train_dataset=sources.split("code")["train"]).train()
    model.save_pretrained(BASE)
    shutil.rmtree(f"{BASE}.run", ignore_errors=True)


# What happens in the process that was started.


def results_of(args) -> Results:
    """The results of the kind of machine that is asked for."""
    return Results(args.results, "speedup_gpu" if args.gpu else "speedup", KEY)


def run_all(args, wanted_now: Callable[[], list[Run]], search: Search) -> None:
    """Make what is wanted, until it is there or the time is up."""
    device = "cuda" if args.gpu else "cpu"
    os.environ |= {"HYBRID_BENCHMARK_DEVICE": device, "HYBRID_BENCHMARK_THREADS": str(args.threads)}
    if any(not (TASKS[task].scratch or TASKS[task].pretrained) for task in args.task) and not BASE.is_dir():
        with pool(1) as process:
            process.submit(make_base).result()

    def add(run: Run, found: dict) -> None:
        search.results.add({**asdict(run), **found, **provenance(args.threads, device)})
        print(f"{run}: {search.loss(run):.4f}", flush=True)

    def missing() -> list[Run]:
        return [run for run in wanted_now() if search.loss(run) is None]

    keep_busy(make, missing, add, workers=args.workers, minutes=args.minutes)


def named(args, arms: list[str]) -> list[Run]:
    """The runs that `--rate` names, the first seed of every arm before the second."""
    runs = itertools.product(args.task, args.seeds, arms, args.rate)
    return [Run(task, arm, args.steps or TASKS[task].steps, rate, seed) for task, seed, arm, rate in runs]


def main() -> None:
    parser = command_line(__doc__, HERE)
    own = [name for name, task in TASKS.items() if not (task.pretrained or task.preference)]
    parser.add_argument(
        "--task", nargs="+", choices=list(TASKS), default=own, help="By default all but `smol-*` and `dpo*`."
    )
    parser.add_argument("--arm", nargs="+", help=f"Of {', '.join(ARMS)}; all by default.")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2], help="The first is that of the rate search.")
    parser.add_argument("--rate", nargs="+", type=float, default=[], help="These learning rates, without a search.")
    parser.add_argument("--steps", type=int, default=0, help="Length of those runs; the task's by default.")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1, help="Threads per worker.")
    parser.add_argument("--gpu", action="store_true", help="Compute on the GPU, which the workers share.")
    parser.add_argument("--minutes", type=float, default=math.inf, help="Start no run after that many.")
    parser.add_argument("--report", action="store_true", help="Only report what is there.")
    args = parser.parse_args()
    results = results_of(args)
    if not args.report:
        if args.arm and not set(args.arm) <= set(ARMS):
            parser.error(f"`--arm` takes {', '.join(ARMS)}, got `{' '.join(args.arm)}`.")
        arms = args.arm or list(ARMS)
        search = Search(results)
        run_all(args, lambda: named(args, arms) or search.wanted(args.task, arms, args.seeds), search)
    tables = [table for task in args.task if (table := table_of(results, task, args.arm, args.seeds))]
    for table in tables:
        print_table(table)
    if args.task == own and not args.arm:
        tuned = [table for table in tables if TASKS[table["task"]].tuned is True]
        plot_curves(tuned, args.results.parent / "curves.png")
        plot_speedups(tuned, args.results.parent / "speedups.png")


if __name__ == "__main__":
    main()
