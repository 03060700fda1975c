"""
How recorded runs are stored: a file for each, of a few arrays and a header in JSON.

A file holds the stretches of the run and of its branches one after the other; the header says how many belong to which.
Features lie in [-5, 5] and are stored in 8 bits, which is far finer than they are noisy. The files are in
`recordings/`, which is not in the repository: `python -m benchmarks.world_model.record` makes them. Every fifth run is
held out from whoever learns from them.
"""

from __future__ import annotations

import io
import json
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from benchmarks.world_model.records import Branch, Continuation, Record

RECORDINGS = Path(__file__).resolve().parent / "recordings"
HELD_OUT_EVERY = 5
FEATURE_STEP = 5.0 / 127


@dataclass(frozen=True, kw_only=True)
class RecordedRun(Record):
    """
    A run of `W` stretches, as arrays, with up to three branches: as it went on, and another way.

    Args:
        settings (`dict`): What made it (`Settings`), with `diverged` (step or `None`) and, per branch, course and
            `diverged`.
    """

    settings: dict


def as_arrays(result: dict) -> dict[str, np.ndarray]:
    """Turn a run into arrays: a JSON header, and the stretches of the run and its branches one after the other."""
    branches = result["branches"]
    header = {
        **result["settings"],
        "diverged": result["diverged"],
        "windows": len(result["windows"].losses),
        "branches": [
            {"start": b.start, "windows": len(b.stretches.losses), "diverged": b.diverged, **asdict(b.course)}
            for b in branches
        ],
    }
    everything = [result["windows"], *[b.stretches for b in branches]]
    features = np.array([row for w in everything for row in w.features], dtype=np.float64).reshape(-1, 64)
    return {
        "header": np.frombuffer(json.dumps(header).encode(), dtype=np.uint8),
        "features": np.rint(features / FEATURE_STEP).astype(np.int8),
        "actions": np.array([row for w in everything for row in w.actions], dtype=np.float32).reshape(-1, 4),
        "losses": np.array([loss for w in everything for loss in w.losses], dtype=np.float32),
    }


def write(path: Path, arrays: dict[str, np.ndarray]) -> None:
    """Write a file in one move, so that it is whole or absent. The same arrays give the same bytes."""
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **arrays)
    partial = path.with_suffix(".partial")
    partial.write_bytes(buffer.getvalue())
    partial.replace(path)


def path_of(index: int, folder: Path) -> Path:
    return folder / f"run-{index:04d}.npz"


def run_in(path: Path) -> RecordedRun:
    """Read the run of a file."""
    with np.load(path) as file:
        arrays = {name: file[name] for name in file.files}
    header = json.loads(bytes(arrays["header"]).decode())
    features = arrays["features"].astype(np.float32) * np.float32(FEATURE_STEP)
    columns = {"features": features, "actions": arrays["actions"], "losses": arrays["losses"]}
    row, parts = 0, []
    for count in (header["windows"], *[b["windows"] for b in header["branches"]]):
        parts.append({name: column[row : row + count] for name, column in columns.items()})
        row += count
    branches = []
    for branch, part in zip(header["branches"], parts[1:]):
        rest = {name: column[branch["start"] :] for name, column in parts[0].items()}
        branches.append(Branch(branch["start"], Continuation(**rest), Continuation(**part)))
    return RecordedRun(settings=header, branches=branches, **parts[0])


def load_records(folder: Path = RECORDINGS) -> tuple[list[RecordedRun], list[RecordedRun]]:
    """
    Read all runs. Returns those to learn from and those held out (every fifth), in the order of their indices.

    Raises:
        FileNotFoundError: If there is none.
    """
    runs = [run_in(path) for path in sorted(folder.glob("*.npz"))]
    if not runs:
        raise FileNotFoundError(
            f"No recorded run is in `{folder}`: the repository has none. Run `python -m benchmarks.world_model.record`."
        )
    held_out = [run for run in runs if run.settings["index"] % HELD_OUT_EVERY == HELD_OUT_EVERY - 1]
    return [run for run in runs if run.settings["index"] % HELD_OUT_EVERY != HELD_OUT_EVERY - 1], held_out
