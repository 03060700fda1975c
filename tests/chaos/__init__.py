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


@dataclass(frozen=True)
class Result:
    """What a case came to."""

    case: str
    outcome: str
    detail: str = ""
    interruptions: int = 0


def generator(seed: int, case: str) -> random.Random:
    """All that is random in a case."""
    return random.Random(f"{seed}/{case}")
