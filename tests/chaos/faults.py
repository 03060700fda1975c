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

from chaos import Case, Result, kills, trainings
from chaos.children import Moment, run
from hf_hybrid.saving import manifest

DAY = 86_400


def interrupted_by_signal(case: Case) -> Result:
    """SIGINT, SIGTERM, or SIGTERM with `enable_jit_checkpoint`, which saves at the end of the step."""
    chance = case.chance
    saves = chance.random() < 0.5
    number = signal.SIGTERM if saves or chance.random() < 0.5 else signal.SIGINT
    for _ in range(kills.ATTEMPTS):
        again = case.interruptions == 0 or chance.random() < kills.AGAIN
        moment = Moment(seconds=chance.uniform(0.0, case.expected.seconds)) if again else None
        train = _train_and_save_on_sigterm if saves else trainings.train
        ended = kills.attempt(case, train, moment=moment, number=number)
        case.interruptions += ended.interrupted
        finished = ended.how == "returned" and ended.value["step"] == ended.value["max_steps"]
        if finished and case.interruptions == 0:
            shutil.rmtree(case.out)  # it ended before the signal came
        elif finished or not ended.interrupted or ended.how == "hang":
            return case.result(*kills.compare(ended, case.expected))
    return case.result("lost", f"not at its end after {kills.ATTEMPTS} attempts")


def _train_and_save_on_sigterm(mode: str, out: Path, resume: bool) -> dict:
    return trainings.train(mode, out, resume, enable_jit_checkpoint=True)


def on_a_full_disk(case: Case) -> Result:
    """A disk, or the size of a file, that ends inside a save. The error must say so, and the run resumes with space."""
    chance, disk = case.chance, case.folder / "disk"
    case.out = disk / "out"
    with _small_disk(disk) as resize:
        while case.interruptions == 0 or (chance.random() < kills.AGAIN and case.interruptions < 5):
            if resize is not None and chance.random() < 0.7:
                resize(_used(disk) + chance.randint(20_000, 200_000))
                ended = kills.attempt(case)
                resize(1 << 28)
            else:
                ended = kills.attempt(case, _Limited(chance.randint(200, 30_000)))
            if ended.how != "raised":
                if ended.how == "returned" and case.interruptions == 0:
                    shutil.rmtree(case.out)  # there was space enough
                    continue
                return case.result(*kills.compare(ended, case.expected))
            case.interruptions += 1
            if not any(word in ended.value for word in ("No space left", "File too large", "disk")):
                return case.result("not named", f"{ended.value}\n{ended.trace}")
        return case.result(*kills.compare(kills.attempt(case), case.expected))


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
    blocks = os.statvfs(disk)
    return (blocks.f_blocks - blocks.f_bfree) * blocks.f_frsize


class _Limited:
    """Trains with a limit on the size of a file, in bytes."""

    def __init__(self, size: int):
        self.size = size

    def __call__(self, *arguments) -> dict:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # an error instead of the end of the process
        resource.setrlimit(resource.RLIMIT_FSIZE, (self.size, resource.RLIM_INFINITY))
        return trainings.train(*arguments)


def with_a_clock_set_back(case: Case) -> Result:
    """Checkpoints of before are a day younger than new ones; rotation must delete the old steps all the same."""
    changes = case.expected.changes
    while case.interruptions < 3:
        moment = Moment(changes=case.chance.randint(changes // 4, changes))
        ended = kills.attempt(case, _train_keeping_two, moment=moment)
        if ended.how != "died":
            break
        case.interruptions += 1
        for path in case.out.rglob("*"):
            os.utime(path, (time.time() + DAY,) * 2)
    else:
        ended = kills.attempt(case, _train_keeping_two)
    outcome, detail = kills.compare(ended, case.expected)
    last = f"checkpoint-{case.expected.value['step']}"
    if outcome == "same bits" and not (case.out / last).is_dir():
        return case.result("lost", f"{last} was deleted; left are {sorted(path.name for path in case.out.iterdir())}")
    return case.result(outcome, detail)


def _train_keeping_two(mode: str, out: Path, resume: bool) -> dict:
    return trainings.train(mode, out, resume, save_steps=1, save_total_limit=2)


def anew_over_old_checkpoints(case: Case) -> Result:
    """A run begins anew where another was killed: it trains, and what that has saved is moved aside unchanged."""
    case.interruptions = 1
    run(trainings.train, case.kind, case.out, log=case.log, seed=1, stop_after=case.chance.randint(4, 17))
    manifest.finish_interrupted_saves(case.out)
    before = _bytes_of_checkpoints(case.out)
    begun = run(trainings.train, case.kind, case.out, log=case.log)
    if before and _bytes_of_checkpoints(case.out / f"{manifest.EARLIER}1") != before:
        return case.result("mixed", f"checkpoints of the other run were changed: {begun}")
    return case.result(*kills.compare(begun, case.expected))


def _bytes_of_checkpoints(out: Path) -> dict[str, bytes]:
    paths = [path for path in out.glob("checkpoint-*/**/*") if path.is_file()]
    return {str(path.relative_to(out)): path.read_bytes() for path in paths}


def finished_already(case: Case) -> Result:
    """Resuming a run that is at its end trains nothing, once and twice."""
    for _ in range(3):
        ended = kills.attempt(case)
        outcome, detail = kills.compare(ended, case.expected)
        if outcome != "same bits":
            return case.result(outcome, detail)
    return case.result("other steps", str(ended.value["steps"])) if ended.value["steps"] else case.result("same bits")
