"""
The course of a run: which files of a folder belong to its newest run. Standard library only.

A run is a list of pairs `[id, first step]`, as in `hybrid_run.json`, `hybrid_summary.json` and the manifests of
checkpoints (saving/manifest.py). A new run has one pair. A run that goes on from a checkpoint while it has later
ones gets one more pair, because those later ones lie on a course that it has abandoned.
"""

from __future__ import annotations

from typing import TypeGuard

from hf_hybrid.records.readings import count_of


def is_on_course(run: object, step: int, newest: object) -> bool:
    """
    Whether what was written at `step` of `run` lies on the course of the `newest` run of its folder.

    Without two runs nothing tells, and the answer is yes. First steps that are no numbers are passed over.
    """
    if not (_is_run(run) and _is_run(newest)):
        return True
    ends = [count_of(pair[1]) for pair in newest[len(run) :] if isinstance(pair, list) and len(pair) == 2]
    return run == newest[: len(run)] and all(end is None or step <= end for end in ends)


def is_same_run(run: object, newest: object) -> bool:
    """Whether two courses are of one run, so that one of them may have been abandoned for the other."""
    return _is_run(run) and _is_run(newest) and run[0] == newest[0]


def _is_run(value: object) -> TypeGuard[list]:
    return isinstance(value, list) and bool(value)
