"""Keeps worker processes busy with runs, for benchmarks of many hours that are stopped and go on."""

from __future__ import annotations

import math
import multiprocessing
import time
import traceback
from collections.abc import Callable, Hashable
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait


def pool(workers: int) -> ProcessPoolExecutor:
    """Processes that begin without the memory of this one."""
    return ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn"))


def keep_busy(
    make: Callable[[Hashable], dict],
    wanted: Callable[[], list],
    add: Callable[[Hashable, dict], None],
    *,
    workers: int,
    minutes: float = math.inf,
) -> None:
    """
    Make the runs that are wanted until there are none, or the time is up. A run that fails is told and left out.

    Args:
        make (`Callable`): Makes a run in a worker, and returns what was measured.
        wanted (`Callable`): The runs that are not there yet, the first to be made first. It is asked anew whenever a
            worker is free, because a finished run may change what is wanted next.
        add (`Callable`): Gets a run and what was measured. It is called in this process, which alone writes results.
        workers (`int`): Processes.
        minutes (`float`): No run begins after that many.
    """
    until, under_way, failed = time.monotonic() + 60 * minutes, {}, set()
    with pool(workers) as processes:
        while True:
            free = [run for run in wanted() if run not in failed and run not in under_way.values()]
            for run in free[: workers - len(under_way)] if time.monotonic() < until else ():
                under_way[processes.submit(make, run)] = run
            if not under_way:
                return
            for future in wait(under_way, return_when=FIRST_COMPLETED).done:
                run = under_way.pop(future)
                if future.exception() is not None:
                    failed.add(run)
                    print(f"{run} failed:", *traceback.format_exception(future.exception()), flush=True)
                else:
                    add(run, future.result())
