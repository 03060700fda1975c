"""
The process of a trial of `hf-hybrid sweep`: a training, which ends when the sweep ends.

The sweep holds the other end of this process's standard input. If the sweep closes it or dies, by `kill -9` too, the
system reports the end of the input here, and the training stops. So no training outlives its sweep.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time

from hf_hybrid.cli.main import main

PATIENCE = 30.0
"""Seconds that a launcher gets to end its processes."""


def end_with_the_sweep() -> None:
    """Wait for the end of standard input, then end this process, with those that it launched."""
    while os.read(0, 1):  # not `sys.stdin`, whose lock would trouble the end of the interpreter
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(PATIENCE)
    os._exit(1)


if __name__ == "__main__":
    threading.Thread(target=end_with_the_sweep, daemon=True).start()
    sys.exit(main())
