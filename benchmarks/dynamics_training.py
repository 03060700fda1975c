"""Trains the start weights of the world model of training on recorded runs; `meta_train.py train` runs it."""

from __future__ import annotations

import json
import time
from pathlib import Path

import torch

from hf_hybrid.assembly import START_WEIGHTS
from hf_hybrid.prediction.rssm import RSSM, load_weights, save_weights
from hf_hybrid.prediction.rssm_records import score_records, train_on_records

REPORT = Path(__file__).resolve().parent / "results" / "meta_train.json"
VALIDATION_EVERY = 6
"""Of the runs to learn from: these choose the epoch and calibrate the scale; the held-out runs decide nothing."""
SETTINGS = {
    "epochs": 14,
    "batch_size": 16,
    "starts": 4,
    "horizon": 20,
    "learning_rate": 1e-3,
    "weight_decay": 1e-2,
    "corruption": 0.1,
    "seed": 0,
}


def train(records: list, held_out: list, threads: int, path: Path = START_WEIGHTS, report: Path = REPORT) -> None:
    """
    Train, write the weights as float16, read them back and score them on runs that had no part in it.

    Args:
        records (`list[RecordedRun]`), held_out (`list[RecordedRun]`): As from `load_records`.
        threads (`int`): Of the CPU.
        path (`Path`), report (`Path`): What is written.
    """
    torch.set_num_threads(threads)
    last = VALIDATION_EVERY - 1
    validation = records[last::VALIDATION_EVERY]
    learned = [record for index, record in enumerate(records) if index % VALIDATION_EVERY != last]
    curve, started = [], time.perf_counter()

    def progress(values: dict[str, float]) -> None:
        curve.append({**{name: round(value, 4) for name, value in values.items()}, "seconds": round(clock(), 1)})
        print(json.dumps(curve[-1]), flush=True)

    def clock() -> float:
        return time.perf_counter() - started

    model = RSSM(seed=SETTINGS["seed"])
    train_on_records(model, learned, validation=validation, progress=progress, **SETTINGS)
    seconds = clock()
    save_weights(model, path, torch.float16)
    shipped = RSSM(seed=1)
    load_weights(shipped, path)
    result = {
        "command": "python benchmarks/meta_train.py train",
        "settings": SETTINGS,
        "runs": {"learned": len(learned), "validation": len(validation), "held_out": len(held_out)},
        "windows": {"learned": sum(len(r.losses) for r in learned), "held_out": sum(len(r.losses) for r in held_out)},
        "branches": {"learned": sum(len(r.branches) for r in learned)},
        "parameters_per_member": sum(p.numel() for p in model.parameters()) // model.members,
        "file_bytes": path.stat().st_size,
        "threads": threads,
        "seconds": round(seconds, 1),
        "scale_shift": [round(value, 3) for value in shipped.scale_shift.tolist()],
        "held_out": {name: round(value, 4) for name, value in score_records(shipped, held_out).items()},
        "validation": {name: round(value, 4) for name, value in score_records(shipped, validation).items()},
        "curve": curve,
    }
    report.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result["held_out"], indent=1))
