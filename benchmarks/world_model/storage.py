"""
How recorded runs are stored: shards of many runs, each a few arrays and a header in JSON.

A shard holds the stretches of all its runs and branches one after the other; the header says how many belong to which.
Features lie in [-5, 5] and are stored in 8 bits, which is far finer than they are noisy. The shards are in
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
AFTER = (10, 50, 200)
"""
Steps after the start of a branch at which the held-out loss is measured. It is measured at the end of the run too.
"""
HELD_OUT_EVERY = 5
RUNS_PER_SHARD = 64
FEATURE_STEP = 5.0 / 127


@dataclass(frozen=True, kw_only=True)
class MeasuredContinuation(Continuation):
    """
    With the steps done at the end of each stretch, and held-out losses `[4]` at `AFTER` and at the end (NaN: not
    reached).
    """

    steps: np.ndarray
    held_out: np.ndarray


@dataclass(frozen=True, kw_only=True)
class RecordedRun(Record):
    """
    A run of `W` stretches, as arrays, with up to three branches: as it went on, and another way.

    Args:
        settings (`dict`): What made it (`Settings`), with `diverged` and, per branch, course and `diverged`.
        steps (`np.ndarray`): int32 `[W]`, steps done at the end of each stretch.
    """

    settings: dict
    steps: np.ndarray


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
    held_out = [loss for b in branches for loss in (*b.base_held_out, *b.held_out)]
    return {
        "headers": np.frombuffer(json.dumps([header]).encode(), dtype=np.uint8),
        "features": np.rint(features / FEATURE_STEP).astype(np.int8),
        "actions": np.array([row for w in everything for row in w.actions], dtype=np.float32).reshape(-1, 4),
        "losses": np.array([loss for w in everything for loss in w.losses], dtype=np.float32),
        "steps": np.array([step for w in everything for step in w.steps], dtype=np.int32),
        "held_out": np.array(held_out, dtype=np.float32).reshape(-1, 2, len(AFTER) + 1),
    }


def write(path: Path, arrays: dict[str, np.ndarray]) -> None:
    """Write a file in one move, so that it is whole or absent. The same arrays give the same bytes."""
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **arrays)
    partial = path.with_suffix(".partial")
    partial.write_bytes(buffer.getvalue())
    partial.replace(path)


def headers_of(arrays) -> list[dict]:
    return json.loads(bytes(arrays["headers"]).decode())


def runs_in(path: Path) -> list[RecordedRun]:
    """Read all runs of a file, single or packed."""
    with np.load(path) as file:
        arrays = {name: file[name] for name in file.files}
    features = arrays["features"].astype(np.float32) * np.float32(FEATURE_STEP)
    columns = {**{name: arrays[name] for name in ("actions", "losses", "steps")}, "features": features}
    held_out = iter(arrays["held_out"])
    row, runs = 0, []
    for header in headers_of(arrays):
        parts = []
        for count in (header["windows"], *[b["windows"] for b in header["branches"]]):
            parts.append({name: column[row : row + count] for name, column in columns.items()})
            row += count
        branches = []
        for branch, part in zip(header["branches"], parts[1:]):
            base, other = next(held_out)
            rest = {name: column[branch["start"] :] for name, column in parts[0].items()}
            futures = (MeasuredContinuation(**rest, held_out=base), MeasuredContinuation(**part, held_out=other))
            branches.append(Branch(branch["start"], *futures))
        runs.append(RecordedRun(settings=header, branches=branches, **parts[0]))
    return runs


def load_records(folder: Path = RECORDINGS) -> tuple[list[RecordedRun], list[RecordedRun]]:
    """
    Read all runs. Returns those to learn from and those held out (every fifth), in the order of their indices.

    Raises:
        FileNotFoundError: If there is none.
    """
    runs = sorted((run for path in folder.glob("*.npz") for run in runs_in(path)), key=lambda r: r.settings["index"])
    if not runs:
        raise FileNotFoundError(
            f"No recorded run is in `{folder}`: the repository has none. Run `python -m benchmarks.world_model.record`."
        )
    held_out = [run for run in runs if run.settings["index"] % HELD_OUT_EVERY == HELD_OUT_EVERY - 1]
    return [run for run in runs if run.settings["index"] % HELD_OUT_EVERY != HELD_OUT_EVERY - 1], held_out


def recorded_indices(folder: Path) -> set[int]:
    return {header["index"] for path in folder.glob("*.npz") for header in headers_of(np.load(path))}


def pack(folder: Path) -> list[Path]:
    """Put all files into shards of `RUNS_PER_SHARD` runs."""
    stored = []
    paths = sorted(folder.glob("*.npz"))
    for path in paths:
        with np.load(path) as file:
            stored += split_by_run({name: file[name] for name in file.files})
    stored.sort(key=lambda arrays: headers_of(arrays)[0]["index"])
    shards = {}
    for first in range(0, len(stored), RUNS_PER_SHARD):
        some = stored[first : first + RUNS_PER_SHARD]
        arrays = {name: np.concatenate([one[name] for one in some]) for name in some[0] if name != "headers"}
        headers = json.dumps([headers_of(one)[0] for one in some]).encode()
        arrays["headers"] = np.frombuffer(headers, dtype=np.uint8)
        shards[folder / f"runs-{first // RUNS_PER_SHARD:02d}.npz"] = arrays
    for path, arrays in shards.items():
        write(path, arrays)
    for path in set(paths) - set(shards):
        path.unlink()
    return list(shards)


def split_by_run(arrays: dict[str, np.ndarray]) -> list[dict[str, np.ndarray]]:
    """Take a file apart: the arrays of every run in it."""
    row, branch, runs = 0, 0, []
    for header in headers_of(arrays):
        rows = slice(row, row + header["windows"] + sum(b["windows"] for b in header["branches"]))
        branches = slice(branch, branch + len(header["branches"]))
        row, branch = rows.stop, branches.stop
        one = {name: arrays[name][rows] for name in ("features", "actions", "losses", "steps")}
        one["headers"] = np.frombuffer(json.dumps([header]).encode(), dtype=np.uint8)
        runs.append({**one, "held_out": arrays["held_out"][branches]})
    return runs
