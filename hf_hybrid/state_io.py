"""Hybrid state in a checkpoint: one safetensors file, one JSON file, no pickle."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from transformers.trainer_utils import get_last_checkpoint

TENSORS_NAME = "hybrid_state.safetensors"
VALUES_NAME = "hybrid_state.json"
TRAINER_STATE_NAME = "trainer_state.json"
SCHEMA_VERSION = 1


def save_hybrid_state(folder: str | Path, tensors: dict, values: dict[str, Any]) -> None:
    """Write both files; the JSON last, so that its presence means that the state is whole."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    host = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    save_file(host, folder / TENSORS_NAME)
    write_json(folder / VALUES_NAME, {"schema_version": SCHEMA_VERSION, **values})


def load_hybrid_state(folder: str | Path) -> tuple[dict, dict[str, Any]] | None:
    """
    Read what [`save_hybrid_state`] wrote; `None` if the checkpoint holds no hybrid state.

    Raises:
        ValueError: If it was written by another version, or does not say by which.
    """
    folder = Path(folder)
    if not (folder / VALUES_NAME).is_file() or not (folder / TENSORS_NAME).is_file():
        return None
    values = json.loads((folder / VALUES_NAME).read_text(encoding="utf-8"))
    version = values.pop("schema_version", None)
    if version != SCHEMA_VERSION:
        found = "missing" if version is None else f"`{version}`"
        raise ValueError(
            f"`{folder / VALUES_NAME}` was written by another version of hf_hybrid: its `schema_version` is {found}, "
            f"and this one reads `{SCHEMA_VERSION}`. Resume with that version, or delete the file: weights and "
            "optimizer are restored then, and phases start anew."
        )
    return load_file(folder / TENSORS_NAME), values


def write_json(path: Path, values: dict) -> None:
    """Replace the file in one move: a reader, or a crash, never meets half of it."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(json.dumps(_plain(values), indent=1, allow_nan=False) + "\n", encoding="utf-8")
    os.replace(temporary, path)


def _plain(value):
    """Non-finite numbers are not JSON: an infinity becomes a string that `float` reads, a NaN becomes null."""
    if isinstance(value, float) and not math.isfinite(value):
        return None if math.isnan(value) else str(value)
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value


def is_complete(checkpoint: str | Path) -> bool:
    """Whether a checkpoint was written to its end: `trainer_state.json`, which is written last, can be read."""
    try:
        json.loads((Path(checkpoint) / TRAINER_STATE_NAME).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return True


def last_complete_checkpoint(output_dir: str | Path) -> tuple[str | None, list[str]]:
    """The newest checkpoint that is whole, and the newer ones that are not (a run was killed while writing them)."""
    newest = get_last_checkpoint(str(output_dir)) if Path(output_dir).is_dir() else None
    if newest is None or is_complete(newest):
        return newest, []
    prefix = newest.rpartition("-")[0]
    numbers = [folder.name.rpartition("-")[2] for folder in Path(output_dir).glob("checkpoint-*")]
    steps = sorted((int(number) for number in numbers if number.isdigit()), reverse=True)
    broken = []
    for step in steps:
        if is_complete(f"{prefix}-{step}"):
            return f"{prefix}-{step}", broken
        broken.append(f"{prefix}-{step}")
    return None, broken
