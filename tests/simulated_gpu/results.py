"""Starts the runner of the scenarios, and reads what they left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from functools import cache
from pathlib import Path

import pytest
import torch

TESTS = Path(__file__).resolve().parents[1]


def python_path(*folders: Path) -> str:
    """`PYTHONPATH` with these folders first. Packages may be installed in the others."""
    return os.pathsep.join([*map(str, folders), *filter(None, [os.environ.get("PYTHONPATH")])])


class Results:
    """
    What the scenarios left, each as soon as it is there.

    Args:
        names (`list[str]`): The scenarios to run.
        folder (`Path`): Where they leave it.
        real (`bool`): Run them on this machine's GPU, and not on the simulated one.
    """

    def __init__(self, names: list[str], folder: Path, *, real: bool = False):
        self.folder = folder
        cores = os.cpu_count() or 1
        # at least two: the worker that asks for the results sleeps, and other workers may have nothing left to do
        workers = max(min(2, cores), cores // int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")))
        command = [sys.executable, "-m", "simulated_gpu.runner", "--workers", str(workers)]
        command += [*(["--real"] if real else []), str(folder), *names]
        environment = {**os.environ, "PYTHONPATH": python_path(TESTS.parent, TESTS)}
        self._log = (folder / "runner.log").open("w")
        self._process = subprocess.Popen(
            command, env=environment, stdout=self._log, stderr=self._log, start_new_session=True
        )
        self.of = cache(self._of)

    def _of(self, name: str, place: str = "device") -> dict:
        """The result of a scenario at a place."""
        result = self.folder / f"{name}.{place}.pt"
        while not result.exists():
            ended = self._process.poll() is not None  # asked first: it may end after it has written
            if (self.folder / "unavailable").exists():
                pytest.skip((self.folder / "unavailable").read_text())
            if result.with_suffix(".error").exists():
                pytest.fail(result.with_suffix(".error").read_text()[-6000:])
            if ended and not result.exists():
                pytest.fail(f"The runner ended: {(self.folder / 'runner.log').read_text()[-3000:]}")
            time.sleep(0.02)
        return torch.load(result, weights_only=False)

    def end(self) -> None:
        """Kill what still runs."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._log.close()
