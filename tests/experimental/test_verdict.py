"""`python -m benchmarks.world_model.verdict`: it scores as it says, and every forecast of a run is scored."""

import json
import math
import sys

import numpy as np
import pytest

from benchmarks.world_model import verdict

pytestmark = pytest.mark.slow


def test_the_score_is_that_of_a_gaussian_in_closed_form():
    for came in (0.0, 1.0, -2.5):
        density, below = math.exp(-(came**2) / 2) / math.sqrt(2 * math.pi), 0.5 * (1 + math.erf(came / math.sqrt(2)))
        expected = came * (2 * below - 1) + 2 * density - 1 / math.sqrt(math.pi)
        samples = np.random.default_rng(1).normal(size=20_000)
        assert verdict.crps(samples, came) == pytest.approx(expected, abs=0.02)
    assert verdict.crps(np.full(10, 2.0), 1.5) == pytest.approx(0.5)


def test_one_run_has_every_score(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["verdict", "--runs", "1", "--results", str(tmp_path / "results.jsonl")])
    verdict.main()
    (row,) = map(json.loads, (tmp_path / "results.jsonl").read_text().splitlines())
    assert list(row["crps"]) == ["10%", "20%", "50%"] and list(row["over_schedule"]) == ["dynamics"]
    for scores in row["crps"].values():
        assert list(scores) == ["persistence", "past curves", "laws", "both", "world model"]
        assert all(0 < score < 5 for score in scores.values())
