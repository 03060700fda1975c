"""Importing the package brings and changes nothing of other packages, and training sends nothing."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> dict:
    folder = tmp_path_factory.mktemp("fresh")
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "TRANSFORMERS_"))}
    paths = os.pathsep.join((str(TESTS), str(TESTS.parent)))
    environment |= {"PYTHONPATH": paths, "HF_HOME": str(folder / "hf")}
    command = [sys.executable, str(TESTS / "rig" / "fresh_process.py"), str(folder)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads((folder / "found.json").read_text())


def test_import_is_light_and_everything_public_is_there(found):
    assert not found["heavy"] and not found["absent"]


def test_importing_changes_nothing(found):
    """No patching: after importing every module, all functions, classes and methods of others are those they ship."""
    assert {"hf_hybrid.trainer", "hf_hybrid.records.profiler", "hf_hybrid.hub.publishing"} <= set(found["imported"])
    assert found["compared"] > 10_000 and not found["changed"] and not found["added"] and not found["set"]


def test_nothing_is_sent(found):
    """Importing, training, saving and writing a card open no connection and look up no address, without any switch."""
    assert found["leaps"] and not found["tried"]
