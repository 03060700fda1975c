"""The chaos suite, a little of it; `python tests/chaos/run.py` is all of it."""

import subprocess
import sys
from pathlib import Path

import pytest

PARTS = "kills damages signals disk clock anew finished reports constructions command-lines"
FEW = {"kills": 2, "damages": 3}
MORE = {"kills": 140, "damages": 120, "signals": 40, "disk": 40, "clock": 20, "anew": 40, "finished": 36, "reports": 60}
MORE |= {"constructions": 200, "command-lines": 40}


def chaos(folder, counts, *options):
    """Run the command; returns its exit status, and all that it printed."""
    counted = [word for part in PARTS.split() for word in (f"--{part}", str(counts.get(part, 0)))]
    command = [sys.executable, Path(__file__).parent / "run.py", *counted, "--folder", folder, *options]
    ended = subprocess.run(command, capture_output=True, text=True)
    return ended.returncode, f"{ended.stdout[-8000:]}\n{ended.stderr[-2000:]}"


def test_nothing_is_lost_differs_or_is_silent(tmp_path):
    status, told = chaos(tmp_path, FEW, "--modes", "leaps")
    assert status == 0, told


@pytest.mark.slow
def test_nor_in_any_other_mode(tmp_path):
    status, told = chaos(tmp_path, MORE, "--seed", "1")
    assert status == 0, told
