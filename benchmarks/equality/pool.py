"""A worker process for checks that may hang, run out of memory, or end their process."""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Callable

MEMORY_LIMIT = 10 * 2**30  # bytes of private memory of the worker


def _prepare_worker() -> None:
    """Silence the worker (the progress lines belong to the parent) and limit its memory."""
    import torch
    import transformers

    for stream in (1, 2):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
    if sys.platform == "linux":
        import resource  # exists on Unix only

        resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_LIMIT, MEMORY_LIMIT))
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)


class Worker:
    """One process, replaced by a new one when it does not answer in time."""

    def __init__(self, timeout: float):
        self.timeout = timeout
        # spawn: a forked child would share the state of the threads and random generators of its parent
        self.context = multiprocessing.get_context("spawn")
        self.pool = self.context.Pool(1, _prepare_worker)

    def ask(self, check: Callable[..., dict], *args) -> dict | None:
        """`check(*args)`, or `None` if there was no answer."""
        try:
            return self.pool.apply_async(check, args).get(self.timeout)
        except multiprocessing.TimeoutError:
            self.pool.terminate()
            self.pool = self.context.Pool(1, _prepare_worker)
            return None

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_) -> None:
        self.pool.terminate()
