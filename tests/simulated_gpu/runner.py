"""
Runs scenarios, each in a process of its own, which is forked from one that has imported everything.

    python tests/simulated_gpu/runner.py FOLDER NAME...

writes `FOLDER/NAME.device.pt` and `FOLDER/NAME.cpu.pt`, what the scenario's function returned on the simulated device
and on the CPU (see scenarios.py), with what the simulator found. An error is written in their place as text. Where the
device cannot be simulated, `FOLDER/unavailable` says why.
"""

from __future__ import annotations

import argparse
import gc
import os
import signal
import sys
import time
import traceback
from pathlib import Path

HERE = Path(__file__).resolve().parent
SECONDS = 150
"""After which a scenario is killed: something waits that nobody wakes."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--place", help="Only there.")
    parser.add_argument("--mutate", help="A wait to take out, see mutate.py.")
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    os.environ.update(HF_HUB_OFFLINE="1", OMP_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false")
    os.environ.pop("CUDA_VISIBLE_DEVICES", None)
    sys.path[:0] = [str(HERE.parent)]
    from simulated_gpu import marks

    try:
        marks.mark(args.mutate)
        from simulated_gpu import device
    except ImportError:
        raise
    except RuntimeError as error:  # `device.Unavailable`, which could not be imported
        (args.folder / "unavailable").write_text(str(error))
        return
    from simulated_gpu import scenarios

    gc.collect()
    gc.freeze()  # collections in the processes do not look through what was imported
    jobs = [
        (name, place)
        for name in args.names or scenarios.SCENARIOS
        for place in ([args.place] if args.place else scenarios.places(name))
    ]
    running: dict[int, tuple[str, str, float]] = {}
    while jobs or running:
        while jobs and len(running) < args.workers:
            name, place = jobs.pop(0)
            pid = os.fork()
            if pid == 0:
                _run(scenarios, device, name, place, args.folder)
            running[pid] = name, place, time.monotonic()
        pid, _ = os.waitpid(-1, os.WNOHANG)
        if pid in running:
            name, place, _ = running.pop(pid)
            result = args.folder / f"{name}.{place}.pt"
            if not result.exists() and not result.with_suffix(".error").exists():
                _write(result.with_suffix(".error"), f"The process ended without a result. {_log(result)}")
        for other, (_, _, begun) in running.items():
            if time.monotonic() - begun > SECONDS:
                os.kill(other, signal.SIGKILL)
        time.sleep(0.01)


def _log(result: Path) -> str:
    log = result.with_suffix(".log")
    return log.read_text()[-3000:] if log.exists() else ""


def _write(path: Path, text: str) -> None:
    made = path.with_suffix(".tmp")
    made.write_text(text)
    made.replace(path)


def _run(scenarios, device, name: str, place: str, folder: Path) -> None:
    """In the forked process; does not return."""
    result = folder / f"{name}.{place}.pt"
    try:
        log = os.open(result.with_suffix(".log"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(log, 1)
        os.dup2(log, 2)
        found = scenarios.run(name, place, device, folder / f"{name}.{place}.files")
        made = result.with_suffix(".made")
        import torch

        torch.save(found, made)
        made.replace(result)
    except BaseException:
        sys.stdout.flush()
        sys.stderr.flush()
        _write(result.with_suffix(".error"), f"{_log(result)}\n{traceback.format_exc()}")
    finally:
        os._exit(0)


if __name__ == "__main__":
    main()
