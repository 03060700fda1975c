"""
The chaos suite: whatever is done to a training, nothing is lost, nothing differs and nothing is silent.

    python tests/chaos/run.py --help

| file | what |
|---|---|
| `run.py` | the command: every part, a table, exit status 1 if there is a fault |
| `trainings.py` | the trainings that are interrupted: tiny, with every phase, one for each mode of the trainer |
| `children.py` | a forked process that can be interrupted at a chosen moment |
| `kills.py` | `kill -9` at random moments and inside saves, then resume |
| `power.py` | loss of power: a simulated disk that keeps only what was flushed, then resume |
| `collisions.py` | two processes that train in one folder |
| `rollouts.py` | GRPO and RLOO killed in rollouts, rewards, tools and between steps, then resume; calls are counted |
| `faults.py` | other interruptions: signals, a full disk, a clock set back, old checkpoints |
| `ranks.py` | signals on the processes of one training, up to a second apart |
| `flips.py` | a bit that flips on one of two processes |
| `damages.py` | damaged and swapped files of a checkpoint |
| `folders.py` | `hf-hybrid report` and `hf-hybrid export` on damaged run folders |
| `sweeps.py` | `hf-hybrid sweep` that is killed or damaged, and started again |
| `fuzz.py` | random options, through Python and the command line |
| `test_chaos.py` | a small part of it in the default tests, more in the slow ones |
| `test_fuzz.py` | a few random options in the default tests |

A case has a name, such as `kills/leaps/17`. Name and seed decide all that is random in it, so
`run.py --case kills/leaps/17 --seed 0` repeats it, up to the speed of the machine.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Result:
    """What a case came to."""

    case: str
    outcome: str
    detail: str = ""
    interruptions: int = 0
    asked: int = 0
    asked_twice: int = 0
    """Calls of rewards, tools and environments: those of a run that is left alone, and those made once more."""


class Case:
    """
    One training or folder, and what is done to it.

    Args:
        name (`str`): `PART/KIND/NUMBER`. Name and seed decide all that is random.
        seed (`int`): Of the suite.
        folder (`Path`): For its files.
        expected (`Ended`, *optional*): What the reference of its kind came to.
        prepared (`Path`, *optional*): What the part has prepared for cases of this kind.
    """

    def __init__(self, name: str, seed: int, folder: Path, expected: Any = None, prepared: Path | None = None):
        self.name, self.seed, self.folder, self.expected, self.prepared = name, seed, folder, expected, prepared
        self.part, self.kind, number = name.split("/")
        self.number, self.chance, self.interruptions = int(number), generator(seed, name), 0
        self.asked = self.asked_twice = 0
        self.out, self.log = folder / "out", folder / "log"

    def said(self) -> str:
        return self.log.read_text(errors="replace")

    def result(self, outcome: str, detail: str = "") -> Result:
        return Result(self.name, outcome, detail, self.interruptions, self.asked, self.asked_twice)


def generator(seed: int, case: str) -> random.Random:
    """All that is random in a case."""
    return random.Random(f"{seed}/{case}")
