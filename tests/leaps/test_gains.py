"""`GainPlanner` of `hf_hybrid/leaps/trust.py`: how far leaps go, by schedule."""

import pytest

from hf_hybrid.leaps.trust import GainPlanner


def test_the_schedule_grows_with_the_run_or_is_constant():
    assert [GainPlanner(4.0, 2.0, 0.2).gain(p) for p in (0.0, 0.5, 1.0)] == [0.0, 1.0, 4.0]
    assert [GainPlanner(3.0, 0.0, 0.2).gain(p) for p in (0.0, 0.5, 1.0)] == [3.0, 3.0, 3.0]


def test_worth_is_in_proportion_to_the_gain_and_never_more_than_at_the_peak():
    planner = GainPlanner(4.0, 2.0, 0.2)
    assert planner.worth_of(4.0, 5) == pytest.approx(1.0)
    assert planner.worth_of(2.0, 5) == pytest.approx(0.5)
    assert planner.worth_of(40.0, 5) == pytest.approx(1.0)
    assert planner.worth_of(-1.0, 5) == 0.0
    assert GainPlanner(0.0, 2.0, 0.2).worth_of(1.0, 5) == 0.0
