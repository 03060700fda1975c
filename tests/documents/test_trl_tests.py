"""`python -m benchmarks.equality.trl_tests`: which TRL it tests, and with which trainers."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("trl")
pytestmark = [pytest.mark.slow, pytest.mark.processes]

ROOT = Path(__file__).parents[2]
TESTS = """
from importlib.metadata import version

import trl

from hf_hybrid.trainer import HybridTrainerMixin


def test_of_the_installed_version():
    assert trl.__version__ == version("trl")


def test_with_ours():
    assert issubclass(trl.{name}Trainer, HybridTrainerMixin)


def test_with_theirs():
    assert not issubclass(trl.{name}Trainer, HybridTrainerMixin)
"""


def test_a_clone_lends_its_tests_alone(tmp_path):
    for folder in ("trl", "tests"):
        (tmp_path / folder).mkdir()
    (tmp_path / "trl" / "__init__.py").write_text("raise RuntimeError('the clone')")
    (tmp_path / "tests" / "__init__.py").touch()
    for name in ("GRPO", "Reward", "KTO"):
        (tmp_path / "tests" / f"test_{name.lower()}_trainer.py").write_text(TESTS.replace("{name}", name))
    command = [sys.executable, "-m", "benchmarks.equality.trl_tests", str(tmp_path), "grpo", "reward", "kto"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1, done.stderr
    assert "TRL's: 6 of 9 pass" in done.stdout and "ours: 6 of 9 pass" in done.stdout
    lost = re.findall(r"^lost: (\S+): ", done.stdout, re.M)
    assert lost == [f"test_{name}_trainer.test_with_theirs" for name in ("grpo", "kto", "reward")]
