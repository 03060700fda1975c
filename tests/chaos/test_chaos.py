"""The chaos suite, a little of it; `python tests/chaos/run.py` is all of it."""

import subprocess
import sys

import pytest

from chaos import run

pytestmark = pytest.mark.processes
PARTS = "kills damages signals ranks disk clock anew finished reports exports sweeps constructions command-lines"
FEW = {"kills": 2, "damages": 3}
MORE = {"kills": 140, "damages": 120, "signals": 40, "ranks": 16, "disk": 40, "clock": 20, "anew": 40, "finished": 36}
MORE |= {"reports": 60, "exports": 30, "sweeps": 30, "constructions": 200, "command-lines": 40}


def options(folder, counts):
    """Those of the command."""
    counted = [word for part in PARTS.split() for word in (f"--{part}", str(counts.get(part, 0)))]
    return [*counted, "--folder", str(folder)]


def test_nothing_is_lost_differs_or_is_silent(tmp_path, monkeypatch, capfd):
    """In this process, which has imported everything."""
    monkeypatch.setattr(sys, "argv", ["run.py", *options(tmp_path, FEW), "--modes", "leaps"])
    status = run.main()
    assert status == 0, capfd.readouterr().out[-8000:]


@pytest.mark.slow
def test_nor_in_any_other_mode(tmp_path):
    command = [sys.executable, run.__file__, *options(tmp_path, MORE), "--seed", "1"]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert ended.returncode == 0, f"{ended.stdout[-8000:]}\n{ended.stderr[-2000:]}"
