"""The chaos suite, a little of each of its parts; `python tests/chaos/run.py` is all of it."""

import subprocess
import sys
from pathlib import Path

import pytest

FEW = {"kills": 6, "damages": 6, "signals": 2, "disk": 1, "clock": 1, "anew": 1, "finished": 2, "reports": 2}
MORE = {"kills": 140, "damages": 120, "signals": 40, "disk": 40, "clock": 20, "anew": 40, "finished": 36, "reports": 60}
FUZZED = {"constructions": 200, "command-lines": 40}


def chaos(folder, counts, *options):
    """Run the command, and fail with all that it printed."""
    counted = [word for part in {**FEW, **FUZZED} for word in (f"--{part}", str(counts.get(part, 0)))]
    command = [sys.executable, Path(__file__).parent / "run.py", *counted, "--folder", folder, *options]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert ended.returncode == 0, f"{ended.stdout[-8000:]}\n{ended.stderr[-2000:]}"


@pytest.mark.slow
def test_nothing_is_lost_differs_or_is_silent(tmp_path):
    chaos(tmp_path, FEW, "--modes", "leaps", "plain")


@pytest.mark.slow
def test_nor_in_any_other_mode(tmp_path):
    chaos(tmp_path, {**MORE, **FUZZED}, "--seed", "1")
