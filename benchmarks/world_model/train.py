"""
Trains the start weights of the world model on the recorded runs. Ten minutes on one core.

    python -m benchmarks.world_model.train          # writes the weights into the package

The recorded runs that are not held out are split into three parts. Three models, each trained without one part, choose
the number of epochs and calibrate the scales of the forecasts; then one model is trained on all of them. It is stored
as float16, read back, and scored on the held-out runs.
"""

from __future__ import annotations

import json
import statistics
import time
from pathlib import Path

import torch

from benchmarks.results import Results, command_line, provenance
from benchmarks.world_model.records import (
    calibrate,
    forecast_errors,
    save_weights,
    score_records,
    train_on_records,
)
from benchmarks.world_model.storage import load_records
from hf_hybrid.setup import START_WEIGHTS
from hf_hybrid.world_model.rssm import RSSM, load_weights

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


def cross_validate(records: list) -> tuple[int, list[dict], list[dict], list[dict]]:
    """
    One model per part left out.

    Returns:
        Number of epochs that was best, forecasts of each part and scores on it, and curves.
    """
    epochs, errors, scores, curves = [], [], [], []
    for fold in range(FOLDS):
        left_out = records[fold::FOLDS]
        learned = [record for index, record in enumerate(records) if index % FOLDS != fold]
        model, progress = RSSM(seed=SETTINGS["seed"]), Progress(fold)
        train_on_records(model, learned, validation=left_out, progress=progress, **SETTINGS)
        epochs.append(progress.best_epoch)
        errors.append(forecast_errors(model, left_out))
        scores.append({name: round(value, 4) for name, value in score_records(model, left_out).items()})
        curves += progress.curve
    return statistics.median_low(epochs), errors, scores, curves


def train(records: list, held_out: list, path: Path) -> dict:
    """
    Train, write the weights as float16, read them back and score them on runs that had no part in it.

    Args:
        records (`list[RecordedRun]`), held_out (`list[RecordedRun]`): As from `load_records`.
        path (`Path`): Where the weights are written.
    """
    started = time.perf_counter()
    epochs, errors, scores, curves = cross_validate(records)
    model, progress = RSSM(seed=SETTINGS["seed"]), Progress(None)
    train_on_records(model, records, progress=progress, **{**SETTINGS, "epochs": epochs})
    calibrate(model, errors)
    seconds = time.perf_counter() - started
    save_weights(model, path, torch.float16)
    shipped = RSSM(seed=1)
    load_weights(shipped, path)
    return {
        "settings": {**SETTINGS, "folds": FOLDS, "epochs_kept": epochs},
        "runs": {"learned": len(records), "held_out": len(held_out)},
        "windows": {"learned": sum(len(r.losses) for r in records), "held_out": sum(len(r.losses) for r in held_out)},
        "branches": {"learned": sum(len(r.branches) for r in records)},
        "parameters_per_member": sum(p.numel() for p in model.parameters()) // model.members,
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
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    row = Results(args.results, "train", ()).add({**train(*load_records(), args.weights), **provenance(args.threads)})
    print(json.dumps({name: row[name] for name in ("seconds", "scale_shift", "confidence_map", "held_out")}, indent=1))


if __name__ == "__main__":
    main()
