"""Runs that the RSSM follows: losses by step and by stretch agree, files keep them, and some cases are left out."""

from dataclasses import replace

import numpy as np
import pytest

from benchmarks.world_model.curves import small_settings
from benchmarks.world_model.final_loss import actions_to_come, followed_case
from benchmarks.world_model.followed import keep, load_followed, tiny_run
from benchmarks.world_model.small_run import Policy


@pytest.fixture(scope="module")
def leaping():
    """A run of 60 steps or so that skips some."""
    settings = small_settings("short", 109)
    policy = Policy(every=4, gain=0.2, power=0, worth=0.3, first=0, last=settings.steps)
    return tiny_run("short", 109, replace(settings, base=policy, direction="gradient_memory"))


def test_a_stretch_is_the_mean_of_its_real_steps(leaping):
    assert np.isnan(leaping.losses).any()
    begins = [0, *leaping.ends[:-1]]
    for begin, end, mean in zip(begins, leaping.ends, leaping.stretch_losses):
        assert np.nanmean(leaping.losses[begin:end]) == pytest.approx(mean, rel=1e-5)
    assert len(leaping.rates) == len(leaping.losses) and leaping.features.shape == (len(leaping.ends), 64)


def test_files_keep_runs(leaping, tmp_path):
    keep(leaping, tmp_path)
    (found,) = load_followed(tmp_path)
    assert found.about == leaping.about and not found.learned
    np.testing.assert_array_equal(found.features, leaping.features)
    np.testing.assert_allclose(found.losses, leaping.losses, rtol=1e-6)
    with pytest.raises(FileNotFoundError, match="benchmarks.world_model.followed`"):
        load_followed(tmp_path / "empty")


def test_a_case_has_the_real_steps_up_to_its_share(leaping):
    case, half = followed_case(leaping, 0.5), len(leaping.losses) // 2
    real = np.isfinite(leaping.losses[:half])
    assert case.steps.tolist() == (np.flatnonzero(real) + 1).tolist()
    np.testing.assert_allclose(case.losses, leaping.losses[:half][real])
    assert case.came == pytest.approx(np.nanmean(leaping.losses[-5:]))


def test_no_case_where_a_forecaster_cannot_begin_or_the_run_broke_off(leaping):
    assert followed_case(leaping, 0.1) is None  # no stretch yet
    assert followed_case(replace(leaping, about={**leaping.about, "diverged": True}), 0.5) is None


def test_leaps_are_expected_to_go_on(leaping):
    ahead = actions_to_come(leaping, 2)
    assert ahead[:, :2] == pytest.approx(np.tile(leaping.actions[:2, :2].mean(0), (len(ahead), 1)))
    assert (
        (np.diff(ahead[:, 2]) > 0).all() and leaping.ends[1] / len(leaping.losses) < ahead[0, 2] and ahead[-1, 2] <= 1
    )
