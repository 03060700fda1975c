"""
Trains the start weights of the world model on recorded runs, and records those first that are not there yet.

    python -m benchmarks.world_model.train          # writes the weights into the package

Recording takes half an hour on two cores, training ten minutes on one. The command can be stopped at any time. The next
start keeps the runs and the parts of the training that are in `recordings/`.

The recorded runs that are not held out are split into three parts. Three models, each trained without one part, choose
the number of epochs and calibrate the scales of the forecasts; then one model is trained on all of them. It is stored
as float16, read back, and scored on the held-out runs.
"""

from __future__ import annotations

import functools
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from hf_hybrid.world_model.imagination import START_WEIGHTS
from hf_hybrid.world_model.rssm import RSSM

from benchmarks.results import Results, command_line, provenance
from benchmarks.world_model.learning import new_rssm, parameters
from benchmarks.world_model.record import RUNS, record
from benchmarks.world_model.records import (
    calibrate,
    forecast_errors,
    save_weights,
    score_records,
    train_on_records,
)
from benchmarks.world_model.storage import RECORDINGS, load_records

FOLDS = 3
"""Parts that the runs to learn from are split into."""
SETTINGS = {
    "epochs": 9,
    "batch_size": 16,
    "starts": 3,
    "horizon": 20,
    "learning_rate": 1e-3,
    "weight_decay": 1e-2,
    "corruption": 0.1,
    "seed": 0,
}


class Progress:
    """Keeps and prints the values that [`train_on_records`] reports."""

    def __init__(self, fold: int | None):
        self.fold, self.curve, self.started = fold, [], time.perf_counter()

    def __call__(self, values: dict[str, float]) -> None:
        rounded = {name: round(value, 4) for name, value in values.items()}
        self.curve.append({"fold": self.fold, **rounded, "seconds": round(time.perf_counter() - self.started, 1)})
        print(json.dumps(self.curve[-1]), flush=True)

    @property
    def best_epoch(self) -> int:
        return min(self.curve, key=lambda row: row["validation"] + row["validation_paired"])["epoch"]


def cross_validate(records: list, folder: Path) -> tuple[int, list[dict], list[dict], list[dict], float]:
    """
    One model per part left out; what each gave is kept in `folder`.

    Returns:
        Number of epochs that was best, forecasts of each part and scores on it, curves, and seconds.
    """
    key = {**SETTINGS, "runs": [record.settings["index"] for record in records]}
    found = [
        kept(folder / f"fold-{fold}.pt", key, functools.partial(leave_out, fold, records)) for fold in range(FOLDS)
    ]
    columns = {name: [one[name] for one in found] for name in found[0]}
    epochs, curves = statistics.median_low(columns["epochs"]), sum(columns["curve"], [])
    return epochs, columns["errors"], columns["scores"], curves, sum(columns["seconds"])


def leave_out(fold: int, records: list) -> dict:
    """Train without one part, and forecast it."""
    started, left_out = time.perf_counter(), records[fold::FOLDS]
    learned = [record for index, record in enumerate(records) if index % FOLDS != fold]
    model, progress = new_rssm(seed=SETTINGS["seed"]), Progress(fold)
    train_on_records(model, learned, validation=left_out, progress=progress, **SETTINGS)
    return {
        "epochs": progress.best_epoch,
        "errors": forecast_errors(model, left_out),
        "scores": {name: round(value, 4) for name, value in score_records(model, left_out).items()},
        "curve": progress.curve,
        "seconds": time.perf_counter() - started,
    }


def kept(path: Path, key: dict, make: Callable[[], dict]) -> dict:
    """What `make` gave when it was called for this `key`: in an earlier start, whose file is there, or now."""
    if path.exists():
        stored = torch.load(path, weights_only=True)
        if stored["key"] == key:
            return stored["found"]
    found, partial = make(), path.with_suffix(".partial")
    torch.save({"key": key, "found": found}, partial)
    partial.replace(path)
    return found


def train(records: list, held_out: list, path: Path, folder: Path) -> dict:
    """
    Train, write the weights as float16, read them back and score them on runs that had no part in it.

    Args:
        records (`list[RecordedRun]`), held_out (`list[RecordedRun]`): As from `load_records`.
        path (`Path`): Where the weights are written.
        folder (`Path`): Where the parts of the training are kept.
    """
    epochs, errors, scores, curves, seconds = cross_validate(records, folder)
    started = time.perf_counter()
    model, progress = new_rssm(seed=SETTINGS["seed"]), Progress(None)
    train_on_records(model, records, progress=progress, **{**SETTINGS, "epochs": epochs})
    calibrate(model, errors)
    seconds += time.perf_counter() - started
    save_weights(model, path, torch.float16)
    shipped = RSSM.load(path)
    return {
        "settings": {**SETTINGS, "folds": FOLDS, "epochs_kept": epochs},
        "runs": {"learned": len(records), "held_out": len(held_out)},
        "windows": {"learned": sum(len(r.losses) for r in records), "held_out": sum(len(r.losses) for r in held_out)},
        "branches": {"learned": sum(len(r.branches) for r in records)},
        "parameters_per_member": sum(weight.numel() for weight in parameters(model).values()) // model.members,
        "file_bytes": path.stat().st_size,
        "seconds": round(seconds, 1),
        "scale_shift": [round(value, 3) for value in shipped.scale_shift.tolist()],
        "confidence_map": [round(value, 3) for value in shipped.confidence_map.tolist()],
        "held_out": {name: round(value, 4) for name, value in score_records(shipped, held_out).items()},
        "left_out": scores,
        "curves": curves + progress.curve,
    }


def main() -> None:
    parser = command_line(__doc__, Path(__file__).resolve().parent)
    parser.add_argument("--weights", type=Path, default=START_WEIGHTS, help="Where the weights are written.")
    parser.add_argument("--threads", type=int, default=2, help="Of the training, and runs recorded at a time.")
    args = parser.parse_args()
    record(range(RUNS), args.threads, RECORDINGS)
    torch.set_num_threads(args.threads)
    found = train(*load_records(), args.weights, RECORDINGS)
    row = Results(args.results, "train", ()).add({**found, **provenance(args.threads)})
    print(json.dumps({name: row[name] for name in ("seconds", "scale_shift", "confidence_map", "held_out")}, indent=1))


if __name__ == "__main__":
    main()
