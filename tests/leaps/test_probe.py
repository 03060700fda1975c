"""Paired comparisons of held-out losses, and what a probe costs."""

import math

import pytest

from hf_hybrid.leaps.probe import HeldOutProbe, is_clearly_worse, paired_decrease


def test_pairing_removes_the_spread_between_sequences():
    before = [1.0, 5.0, 9.0, 3.0]
    decrease, standard_error = paired_decrease(before, [loss - 0.01 for loss in before])
    assert decrease == pytest.approx(0.01)
    assert standard_error < 1e-12


def test_standard_error_is_that_of_the_mean_difference():
    decrease, standard_error = paired_decrease([1.0, 1.0, 1.0, 1.0], [0.9, 1.1, 0.9, 1.1])
    assert decrease == pytest.approx(0.0)
    assert standard_error == pytest.approx(math.sqrt(0.04 / 3) / 2)


def test_nan_after_a_leap_is_an_infinite_rise():
    assert paired_decrease([1.0, 1.0], [math.nan, 1.0]) == (-math.inf, 0.0)


@pytest.mark.parametrize("before, after", [([1.0], [1.0]), ([1.0, 2.0], [1.0])])
def test_comparisons_that_are_not_paired_are_refused(before, after):
    with pytest.raises(ValueError, match="same two or more sequences"):
        paired_decrease(before, after)


def test_a_leap_stays_unless_it_is_clearly_worse():
    assert not is_clearly_worse(-0.015, 0.01, margin=0.0, z=2.0)
    assert is_clearly_worse(-0.025, 0.01, margin=0.0, z=2.0)
    assert not is_clearly_worse(-0.025, 0.01, margin=0.01, z=2.0)
    assert is_clearly_worse(-math.inf, 0.0, margin=1.0, z=2.0)


def test_probe_counts_and_rotates():
    seen = []
    probe = HeldOutProbe(
        "abc", lambda b: seen.append(b) or [1.0] * 4, sizes=[4, 4, 4], sequences_per_probe=8, sequences_per_step=8
    )
    probe.choose()
    assert len(probe.losses()) == len(probe.losses()) == 8
    probe.choose()
    probe.losses()
    assert "".join(seen) == "ababca"
    assert probe.forward_passes == 6
    assert probe.cost_steps == pytest.approx(3 * probe.price) == pytest.approx(1.0)
