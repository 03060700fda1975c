"""
Where benchmarks keep what they measured: one `results.jsonl` in each folder.

A line is one JSON object, the result of one run: which benchmark of the folder made it, the fields that tell the run
from others (its key), how it came about (command, date, hardware, versions), and the measured numbers. Lines are only
ever appended, so that an interrupted benchmark loses nothing, parallel workers need no lock, and a repeated measurement
leaves the earlier one in the file. Whoever reads takes the last line of a key.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import math
import platform
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

Row = dict[str, Any]
PACKAGES = (
    "torch", "transformers", "accelerate", "trl", "peft", "liger_kernel", "bitsandbytes", "torchao", "gguf",
    "hf_hybrid",
)  # fmt: skip


class Results:
    """
    The runs of one benchmark, those that are in the file and those that are added.

    Args:
        path (`Path`): The file; it need not exist.
        benchmark (`str`): Name of the benchmark. Several share the file of a folder.
        key (`tuple[str, ...]`): Fields that tell the benchmark's runs apart.
    """

    def __init__(self, path: Path, benchmark: str, key: tuple[str, ...]):
        self.path, self.benchmark, self.key = Path(path), benchmark, key
        self.found: dict[tuple, Row] = {}
        self.reload()

    def reload(self) -> None:
        """Take in the lines that other processes have appended."""
        for row in lines(self.path):
            if row["benchmark"] == self.benchmark and "about" not in row:
                self.found[self._key_of(row)] = row

    def get(self, **fields) -> Row | None:
        """The run with this key, or `None`."""
        return self.found.get(self._key_of(fields))

    def rows(self, **fields) -> list[Row]:
        """The runs with these values of some fields, one per key."""
        return [row for row in self.found.values() if all(row.get(name) == value for name, value in fields.items())]

    def add(self, row: Row) -> Row:
        """Append a run, and return it as it reads in the file: numbers that are not finite are `null` there."""
        row = finite({"benchmark": self.benchmark, **row})
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")  # one write, in append mode: lines of parallel workers do not mix
        self.found[self._key_of(row)] = row
        return row

    def _key_of(self, row: Row) -> tuple:
        # A learning rate that was doubled and halved again is the same learning rate.
        return tuple(float(f"{row[f]:.3g}") if isinstance(row[f], float) else row[f] for f in self.key)


def lines(path: Path) -> Iterator[Row]:
    """All lines of a file, the oldest first."""
    if path.exists():
        for line in path.read_text(encoding="utf-8").splitlines():
            yield json.loads(line)


def finite(value: Any) -> Any:
    """`value` with `None` in the place of numbers that are not finite, for which JSON has no name."""
    if isinstance(value, dict):
        return {str(name): finite(part) for name, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def provenance(threads: int | None = None, device: str = "cpu") -> Row:
    """Where a run of this process comes from: `command`, `date`, `hardware` and `versions`."""
    versions = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            pass
    hardware = f"{platform.machine()} CPU"
    if device == "cuda":
        import torch

        hardware += f", {torch.cuda.get_device_name()}"
    if threads is not None:
        hardware += f", {threads} thread{'s' * (threads != 1)}"
    date = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    return {"command": command(), "date": date, "hardware": hardware, "versions": versions}


def command() -> str:
    """The command that started this process."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    program = f"-m {spec.name.removesuffix('.__main__')}" if spec else sys.argv[0]
    return " ".join(["python", program, *sys.argv[1:]])


def command_line(doc: str, folder: Path) -> argparse.ArgumentParser:
    """A parser whose help is the module's docstring, with the option `--results`."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--results",
        type=Path,
        default=folder / "results.jsonl",
        help="File to read from and to append to, instead of the `results.jsonl` beside the script.",
    )
    return parser
