"""
`kill -9` and resume: the weights of a training that was never interrupted, bit for bit, and its steps.

Half of the kills come at a random instant. The others are aimed: they come when the run has changed so many files, and
some milliseconds later, so that most of them meet a save, a rotation or the first file of the run. A run that was
killed is resumed with `resume_from_checkpoint=True` and killed again, until chance lets it end.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from pathlib import Path

from chaos import Case, Result, trainings
from chaos.children import Ended, Moment, run

AGAIN = 0.3
"""How likely a resumed run is killed again."""
ATTEMPTS = 40
INSIDE_A_SAVE = 0.5


def reference(mode: str, folder: Path) -> tuple[Ended, Result]:
    """Train twice without an interruption, and compare: what is not deterministic cannot be compared later."""
    case = f"references/{mode}/0"
    first, second = (
        run(trainings.train, mode, folder / name / "out", log=folder / f"{name}.log", watched=folder / name)
        for name in ("first", "second")
    )
    for ended in (first, second):
        if ended.how != "returned":
            return first, Result(case, "cannot train", f"{ended.how}: {ended.value}")
    same = first.value["weights"] == second.value["weights"]
    return first, Result(case, "same bits" if same else "other bits", "two uninterrupted runs")


def kill(case: Case) -> Result:
    """Kill and resume one training."""
    for _ in range(ATTEMPTS):
        again = case.interruptions == 0 or case.chance.random() < AGAIN
        ended = attempt(case, moment=moment(case.chance, case.expected) if again else None)
        case.interruptions += ended.how == "died" and ended.interrupted
        if ended.how == "died" and ended.interrupted:
            continue
        if case.interruptions > 0 or ended.how != "returned":
            return case.result(*compare(ended, case.expected))
        shutil.rmtree(case.out)  # it ended before it could be killed
    return case.result("lost", f"not at its end after {ATTEMPTS} attempts")


def attempt(case: Case, train: Callable = trainings.train, **values) -> Ended:
    """Train, or go on where there is a checkpoint, whole or not, as a restarted job does."""
    out, resume = case.out, trainings.has_checkpoint(case.out)
    return run(train, case.kind, out, resume, log=case.log, watched=out.parent, **values)


def moment(chance: random.Random, expected: Ended) -> Moment:
    """Return when to interrupt a training that takes as long as the reference."""
    if chance.random() < INSIDE_A_SAVE:
        delay = 0.0 if chance.random() < 0.3 else chance.expovariate(1 / 0.003)
        return Moment(changes=chance.randint(1, expected.changes), seconds=delay)
    return Moment(seconds=chance.uniform(0.0, expected.seconds))


def compare(ended: Ended, expected: Ended) -> tuple[str, str]:
    """Return the outcome of the last of several attempts, and what is wrong with it."""
    if ended.how != "returned":
        return ("hang" if ended.how == "hang" else "lost"), f"{ended.how}: {ended.value}\n{ended.trace}"
    made, wanted = ended.value, expected.value
    left = list(range(made["first"], wanted["step"] + 1)) if made["first"] is not None else []
    if made["steps"] != left:
        return "other steps", f"made were {made['steps']}, left to make were {left}"
    if made["counts"] != wanted["counts"]:
        return "other steps", f"{made['counts']} instead of {wanted['counts']}"
    if made["weights"] != wanted["weights"]:
        return "other bits", f"resumed at step {made['first'] - 1}"
    return "same bits", ""
