"""What else happens to a run, which then resumes: signals, a full disk, a clock set back, another run's checkpoints."""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from chaos import Result, generator, kills, trainings
from chaos.children import Ended, Moment, run
from hf_hybrid.saving import manifest

DAY = 86_400


def interrupted_by_signal(case: str, seed: int, folder: Path, expected: Ended) -> Result:
    """SIGINT, SIGTERM, or SIGTERM with `enable_jit_checkpoint`, which saves at the end of the step."""
    mode, chance = case.split("/")[1], generator(seed, case)
    out, log, sent = folder / "out", folder / "log", 0
    saves = chance.random() < 0.5
    number = signal.SIGTERM if saves or chance.random() < 0.5 else signal.SIGINT
    for _ in range(kills.ATTEMPTS):
        again = sent == 0 or chance.random() < kills.AGAIN
        moment = Moment(seconds=chance.uniform(0.0, expected.seconds)) if again else None
        train = _train_and_save_on_sigterm if saves else trainings.train
        ended = kills.attempt(mode, out, log, train, moment=moment, number=number)
        sent += ended.interrupted
        finished = ended.how == "returned" and ended.value["step"] == ended.value["max_steps"]
        if finished and sent == 0:
            shutil.rmtree(out)  # it ended before the signal came
        elif finished or not ended.interrupted or ended.how == "hang":
            return Result(case, *kills.compare(ended, expected), sent)
    return Result(case, "lost", f"not at its end after {kills.ATTEMPTS} attempts", sent)


def _train_and_save_on_sigterm(mode: str, out: Path, resume: bool) -> dict:
    return trainings.train(mode, out, resume, enable_jit_checkpoint=True)


def on_a_full_disk(case: str, seed: int, folder: Path, expected: Ended) -> Result:
    """A disk, or the size of a file, that ends inside a save. The error must say so, and the run resumes with space."""
    mode, chance = case.split("/")[1], generator(seed, case)
    log = folder / "log"
    with _small_disk(folder / "disk") as resize:
        out, failures = folder / "disk" / "out", 0
        while failures == 0 or (chance.random() < kills.AGAIN and failures < 5):
            if resize is not None and chance.random() < 0.7:
                resize(_used(folder / "disk") + chance.randint(20_000, 200_000))
                ended = kills.attempt(mode, out, log)
                resize(1 << 28)
            else:
                ended = kills.attempt(mode, out, log, _Limited(chance.randint(200, 30_000)))
            if ended.how != "raised":
                if ended.how == "returned" and failures == 0:
                    shutil.rmtree(out)  # there was space enough
                    continue
                return Result(case, *kills.compare(ended, expected), failures)
            failures += 1
            if not any(word in ended.value for word in ("No space left", "File too large", "disk")):
                return Result(case, "not named", f"{ended.value}\n{ended.trace}", failures)
        return Result(case, *kills.compare(kills.attempt(mode, out, log), expected), failures)


@contextlib.contextmanager
def _small_disk(folder: Path) -> Iterator[Callable[[int], None] | None]:
    """Mount a disk in memory and yield a function that sets its bytes; `None` where mounting is not allowed."""
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "tmpfs", str(folder)], capture_output=True).returncode == 0

    def resize(size: int) -> None:
        subprocess.run(["mount", "-o", f"remount,size={size}", str(folder)], check=True)

    try:
        yield resize if mounted else None
    finally:
        if mounted:
            subprocess.run(["umount", "-l", str(folder)], check=True)


def _used(disk: Path) -> int:
    found = os.statvfs(disk)
    return (found.f_blocks - found.f_bfree) * found.f_frsize


class _Limited:
    """Trains with a limit on the size of a file, in bytes."""

    def __init__(self, size: int):
        self.size = size

    def __call__(self, *arguments) -> dict:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # an error instead of the end of the process
        resource.setrlimit(resource.RLIMIT_FSIZE, (self.size, resource.RLIM_INFINITY))
        return trainings.train(*arguments)


def with_a_clock_set_back(case: str, seed: int, folder: Path, expected: Ended) -> Result:
    """Checkpoints of before are a day younger than new ones; rotation must delete the old steps all the same."""
    mode, chance = case.split("/")[1], generator(seed, case)
    out, log, killed = folder / "out", folder / "log", 0
    while killed < 3:
        moment = Moment(changes=chance.randint(expected.changes // 4, expected.changes))
        ended = kills.attempt(mode, out, log, _train_keeping_two, moment=moment)
        if ended.how != "died":
            break
        killed += 1
        for path in out.rglob("*"):
            os.utime(path, (time.time() + DAY,) * 2)
    else:
        ended = kills.attempt(mode, out, log, _train_keeping_two)
    outcome, detail = kills.compare(ended, expected)
    last = f"checkpoint-{expected.value['step']}"
    if outcome == "same bits" and not (out / last).is_dir():
        outcome, detail = "lost", f"{last} was deleted; left are {sorted(path.name for path in out.iterdir())}"
    return Result(case, outcome, detail, killed)


def _train_keeping_two(mode: str, out: Path, resume: bool) -> dict:
    return trainings.train(mode, out, resume, save_steps=1, save_total_limit=2)


def anew_over_old_checkpoints(case: str, seed: int, folder: Path, expected: Ended) -> Result:
    """A run begins anew where another was killed: it is refused if that has saved, and changes nothing of it."""
    mode, chance = case.split("/")[1], generator(seed, case)
    out, log = folder / "out", folder / "log"
    run(trainings.train, mode, out, log=log, seed=1, stop_after=chance.randint(4, 17))
    manifest.finish_interrupted_saves(out)
    before = _bytes_of_checkpoints(out)
    begun = run(trainings.train, mode, out, log=log)
    if not before:
        return Result(case, *kills.compare(begun, expected), 1)
    if _bytes_of_checkpoints(out) != before:
        return Result(case, "mixed", f"checkpoints of the other run were changed: {begun}", 1)
    if begun.how == "raised" and "holds checkpoints of another run" in begun.value:
        return Result(case, "refused", begun.value, 1)
    return Result(case, "not refused", f"{begun}", 1)


def _bytes_of_checkpoints(out: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in out.glob("checkpoint-*/**/*") if path.is_file()}


def finished_already(case: str, seed: int, folder: Path, expected: Ended) -> Result:
    """Resuming a run that is at its end trains nothing, once and twice."""
    mode, out, log = case.split("/")[1], folder / "out", folder / "log"
    for _ in range(3):
        ended = kills.attempt(mode, out, log)
        outcome, detail = kills.compare(ended, expected)
        if outcome != "same bits":
            return Result(case, outcome, detail)
    return Result(
        case, *(("same bits", "") if not ended.value["steps"] else ("other steps", str(ended.value["steps"])))
    )
