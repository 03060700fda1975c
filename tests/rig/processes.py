"""
Processes that train together, forked from one that has imported everything: a launcher's would import it anew. And one
that imports everything anew.
"""

import multiprocessing
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import wait
from pathlib import Path

from accelerate.state import AcceleratorState, GradientState

ROOT = Path(__file__).parents[2]
AFTER_A_DEATH = 30
"""Seconds that the others have after one has failed, before they are killed as by a launcher."""


def together(count: int, function: Callable[[], None], timeout: float = 600) -> list[int]:
    """
    Call a function in so many processes on the CPU, which torchrun's variables make one group, and return their exit
    statuses: 0, 1 after an exception, which is on the standard error, and minus the signal that killed one.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    fork, end = multiprocessing.get_context("fork"), time.monotonic() + timeout
    processes = [fork.Process(target=_run, args=(rank, count, port, function)) for rank in range(count)]
    for process in processes:
        process.start()
    if "datasets" in sys.modules:  # the forked ones write files of the names that would be drawn here next
        sys.modules["datasets"].fingerprint.fingerprint_rng.seed()
    running = {process.sentinel: process for process in processes}
    while running:
        for sentinel in wait(list(running), max(end - time.monotonic(), 0)) or list(running):
            process = running.pop(sentinel)
            if time.monotonic() >= end:
                process.kill()
            process.join()
            if process.exitcode:
                end = min(end, time.monotonic() + AFTER_A_DEATH)
    return [process.exitcode for process in processes]


def _run(rank: int, count: int, port: int, function: Callable[[], None]) -> None:
    values = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count, "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in values.items()})
    os.environ.update(MASTER_ADDR="127.0.0.1", ACCELERATE_USE_CPU="true")
    AcceleratorState._reset_state(reset_partial_state=True)  # of trainings in the process that forked
    GradientState._reset_state()
    function()


def python(code: str, *words: str, without: set[str] = frozenset(), cwd=None, **environment: str) -> str:
    """Run code in a process that begins with nothing imported and ends `without` some modules. Returns its output."""
    code = f"import sys\n{code}\nassert not {set(without)} & set(sys.modules)"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
    command = [sys.executable, "-c", code, *words]
    done = subprocess.run(command, capture_output=True, text=True, cwd=cwd, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout
