"""
Runs scenarios, each in a process of its own.

    python -m simulated_gpu.runner FOLDER NAME...
    python -m simulated_gpu.runner --real FOLDER NAME...

writes `FOLDER/NAME.device.pt` and `FOLDER/NAME.cpu.pt`, what the scenario's function returned on the simulated device
and on the CPU (see scenarios.py), with what the simulator found. An error is written in their place as text. Where
there is no device, `FOLDER/unavailable` says why.

Processes are forked from one that has imported everything. With `--real`, on a GPU of this machine and without the
simulator, each training on the GPU has a fresh process instead: CUDA cannot be used after a fork by a process that has
used it, and bitsandbytes uses it when it is imported.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib
import os
import signal
import sys
import time
import traceback
from pathlib import Path

HERE = Path(__file__).resolve().parent
SECONDS = {False: 150, True: 900}
"""After which a simulated or a real scenario is killed: something waits that nobody wakes."""
ROOMS = (
    "rows.exchange", "rows.windows", "forecast.final_loss",
    "forecast.run_forecast", "trl.rl", "experimental.precision",
)  # fmt: skip
"""What trainings load when an option asks for it, and their process imports before it forks them."""
MOST_ON_A_GPU = 12
"""Processes that share a real GPU. Each of them has its own CUDA context, half a gigabyte."""
HIDDEN = "HIDDEN_FROM_TESTS_"
"""Before the names of variables that the tests hide from the processes without a GPU (see conftest.py)."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--place", help="Only there.")
    parser.add_argument("--mutate", help="A wait to take out, see mutate.py.")
    parser.add_argument("--real", action="store_true", help="On this machine's GPU.")
    parser.add_argument("--alone", action="store_true", help="With --real: one scenario at one place, in this process.")
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    os.environ.update(HF_HUB_OFFLINE="1", OMP_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false")
    sys.path[0] = str(HERE.parent)  # not this folder: its kernels.py would hide the package of that name
    if args.alone:
        _run_on_gpu(args.folder, args.names[0], args.place)
    gc.disable()  # collections would look through what is imported, again and again
    try:
        device = None if args.real else _simulated(args.mutate)
    except ImportError:
        raise
    except RuntimeError as error:  # `device.Unavailable`, which could not be imported
        (args.folder / "unavailable").write_text(str(error))
        return
    for_gpu = _hide_gpu() if args.real else {}
    from rig import strict, traces

    from simulated_gpu import scenarios

    strict.be_strict()

    if not args.real:  # a plan for the simulated device; that for a real one is made anew each time
        (args.folder / "traces").mkdir(exist_ok=True)
        traces.remember(args.folder / "traces")

    for room in ROOMS:  # which each process would load by itself otherwise
        with contextlib.suppress(ImportError):  # TRL may be missing
            importlib.import_module(f"hf_hybrid.{room}")
    if args.real:
        from simulated_gpu.real import RealDevice

        device, args.workers = RealDevice(), min(args.workers, MOST_ON_A_GPU)
    gc.collect()
    gc.freeze()  # and those in the processes do not
    gc.enable()
    jobs = [
        (name, place)
        for name in args.names or scenarios.SCENARIOS
        for place in ([args.place] if args.place else scenarios.places(name))
    ]
    running: dict[int, tuple[str, str, float]] = {}
    while jobs or running:
        if (args.folder / "unavailable").exists():
            jobs.clear()
        while jobs and len(running) < args.workers:
            name, place = jobs.pop(0)
            if args.real and place != "cpu":
                command = [sys.executable, "-m", "simulated_gpu.runner", "--real", "--alone", "--place", place]
                pid = os.posix_spawn(sys.executable, [*command, str(args.folder), name], {**os.environ, **for_gpu})
            else:
                pid = os.fork()
            if pid == 0:
                _run(scenarios, device, name, place, args.folder)
            running[pid] = name, place, time.monotonic()
        pid, _ = os.waitpid(-1, os.WNOHANG) if running else (0, 0)
        if pid in running:
            name, place, _ = running.pop(pid)
            result = args.folder / f"{name}.{place}.pt"
            if not result.exists() and not result.with_suffix(".error").exists():
                _write(result.with_suffix(".error"), f"The process ended without a result. {_log(result)}")
        for other, (_, _, begun) in running.items():
            if time.monotonic() - begun > SECONDS[args.real]:
                os.kill(other, signal.SIGKILL)
        time.sleep(0.01)


def _simulated(mutation: str | None):
    """The simulated device. Lines of the package are marked, so that tests know which were entered."""
    os.environ.pop("CUDA_VISIBLE_DEVICES", None)
    os.environ["TORCHDYNAMO_DISABLE"] = "1"  # bitsandbytes would compile, in each process, what it has for no device
    from simulated_gpu import marks

    marks.mark(mutation)
    from simulated_gpu import device

    return device


def _hide_gpu() -> dict[str, str]:
    """
    Hide the GPUs from this process, and return the variables that show a process one of them.

    Trainer would spread each batch over all that it sees. torch's CUDA sanitizer asks for a GPU at the first operation.
    """
    shown = {name.removeprefix(HIDDEN): value for name, value in os.environ.items() if name.startswith(HIDDEN)}
    for name in ("CUDA_VISIBLE_DEVICES", "TORCH_CUDA_SANITIZER"):
        value = os.environ.pop(name, None)
        if value is not None:
            shown.setdefault(name, value)
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    return {**shown, "CUDA_VISIBLE_DEVICES": shown.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0]}


def _run_on_gpu(folder: Path, name: str, place: str) -> None:
    """In a process of its own, which sees one GPU; does not return."""
    import torch

    if not torch.cuda.is_available():
        _write(folder / "unavailable", "torch sees no CUDA device.")
        os._exit(0)
    torch.set_float32_matmul_precision("highest")  # not in TF32, which has 10 bits
    from simulated_gpu import scenarios
    from simulated_gpu.real import RealDevice

    _run(scenarios, RealDevice(), name, place, folder)


def _log(result: Path) -> str:
    log = result.with_suffix(".log")
    return log.read_text()[-3000:] if log.exists() else ""


def _write(path: Path, text: str) -> None:
    made = path.with_name(f"{path.name}.{os.getpid()}")
    made.write_text(text)
    made.replace(path)


def _run(scenarios, device, name: str, place: str, folder: Path) -> None:
    """In the process of the scenario; does not return."""
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
