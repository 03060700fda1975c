"""The core without the optional rooms: it trains, saves and resumes, and says which option needs a room."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from test_architecture import OPTIONAL, PACKAGE


@pytest.mark.processes
def test_the_core_trains_saves_and_resumes_without_the_optional_rooms(tmp_path):
    copy = tmp_path / "hf_hybrid"
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__"))
    for room in OPTIONAL:
        shutil.rmtree(copy / room)
    script = Path(__file__).parent / "rig" / "core_alone.py"
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    command = [sys.executable, str(script), str(tmp_path)]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-1500:]
    loaded = set(done.stdout.splitlines()[-1].split()[1:])
    assert "run" in loaded and not loaded & OPTIONAL
