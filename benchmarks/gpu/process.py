"""
Work in a process of its own, with a limit: whatever becomes of it, other work finds nothing changed.

What Liger patches in a module of transformers stays patched for the rest of a process. After a capture that failed, an
illegal address or a hang, a process may not be able to use its device any more. So each arm has a process of its own.

These are forked from this process, which has imported all they need: the imports of torch, transformers and TRL take
longer than a dozen steps. A process that is forked from one that uses CUDA cannot use it, because a CUDA context knows
one process alone. So this process never asks the device. A first process of its own asks ([`card`]), when nothing but
torch is imported here. Some packages, bitsandbytes for example, ask torch about the device while they are imported.
Inside [`answered`] they get the answers of that first process. If something initialises CUDA here all the same,
[`way_to_begin`] says so, and each process imports everything anew.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from argparse import Namespace
from collections.abc import Callable, Generator
from multiprocessing.connection import Connection
from typing import Any
from unittest import mock

import psutil
import torch

LAUNCHES = 500
"""Kernels that are launched without a wait. A device queues about 1,000, and then the host waits."""
LAST_WORDS = 3.0
"""Seconds before the limit at which a process writes where it is."""


def outcome(work: Callable[[], dict[str, Any]], limit: float, way: str = "fork") -> dict[str, Any]:
    """
    Return what `work` returns in a process of its own, or what became of that process, as `error`.

    Args:
        work (`Callable`): What is done there. With `way="spawn"` it must be picklable.
        limit (`float`): Seconds after which the process and all that it started are killed.
        way (`str`, defaults to `"fork"`): How the process begins.
    """
    context = multiprocessing.get_context(way)
    here, there = context.Pipe(duplex=False)
    process: Any = context.Process(target=_answer, args=(there, work, limit))
    process.start()
    there.close()
    end, answer = time.monotonic() + limit, None
    try:
        # A process that it started may hold the other end of the pipe open: the pipe alone does not tell the end.
        while not here.poll(0.05) and process.exitcode is None and time.monotonic() < end:
            pass
        if here.poll():
            with contextlib.suppress(EOFError):
                answer = here.recv()
        elif process.exitcode is None:
            answer = {"error": f"stopped at its limit of {limit:.0f} s"}
    finally:
        _kill(process)
        process.join()
        here.close()
    return answer or {"error": _ending(process.exitcode)}


def _answer(there: Connection, work: Callable[[], dict[str, Any]], limit: float) -> None:
    os.setsid()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    faulthandler.enable(sys.__stderr__)
    last_words = min(max(0.1, limit - LAST_WORDS), threading.TIMEOUT_MAX)
    faulthandler.dump_traceback_later(last_words, file=sys.__stderr__)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            answer = work()
    except BaseException as error:
        traceback.print_exc(limit=-4)
        answer = {"error": f"{type(error).__name__}: {str(error)[:300]}"}
    sys.stderr.flush()
    there.send(answer)
    os._exit(0)


def _kill(process: Any) -> None:
    """Kill a process, its group, and what it started in groups of their own."""
    if process.exitcode is None:
        started = psutil.Process(process.pid).children(recursive=True)
        process.kill()
        for child in started:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _ending(code: int) -> str:
    return f"ended by {signal.Signals(-code).name}" if code < 0 else f"ended with status {code} and no result"


def measured(use: str, case: dict[str, Any], arm: str, args: Namespace) -> dict[str, Any]:
    """What one arm of a module of this folder measures."""
    return importlib.import_module(f"benchmarks.gpu.{use}").run(case, arm, args)


# What is known of the device.


def card() -> dict[str, Any]:
    """
    Return `device`, the name of the CUDA device or `None`, and what else the package says of it: its number, its
    capability, its GiB, and the kernels that the host launches in a second, one after the other from Python.
    """
    if not torch.cuda.is_available():
        return {"device": None}
    number = torch.zeros((), device="cuda")

    def seconds() -> float:
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(LAUNCHES):
            number.add_(1)
        return time.perf_counter() - begin

    return {
        "device": torch.cuda.get_device_name(),
        "devices": torch.cuda.device_count(),
        "capability": torch.cuda.get_device_capability(),
        "memory_gib": torch.cuda.mem_get_info()[1] / 2**30,
        "launches_per_second": round(LAUNCHES / min(seconds() for _ in range(5))),
    }


@contextlib.contextmanager
def answered(card: dict[str, Any]) -> Generator[None]:
    """Inside, torch says of the device what [`card`] said, and does not ask it."""
    if card["device"] is None:
        yield
        return
    answers = {"is_available": True, "device_count": card["devices"], "get_device_capability": card["capability"]}
    with mock.patch.multiple(torch.cuda, **{name: lambda *_, it=it: it for name, it in answers.items()}):
        yield


def way_to_begin() -> str:
    """Return how processes can begin that use the device: `"fork"`, or `"spawn"` if this one uses CUDA."""
    child = os.fork()
    if child == 0:
        os._exit(torch.cuda._is_in_bad_fork())
    return "spawn" if os.waitpid(child, 0)[1] else "fork"
