"""`hf_hybrid/world_model/dynamics.py`: interpolation, Student's t, and the history of losses."""

import math

import pytest
import torch

from hf_hybrid.world_model.dynamics import LossHistory, log_loss, student_t_cdf
from hf_hybrid.world_model.rssm import HISTORY, OBSERVATION, interpolated, power_law


def test_interpolation_is_straight_in_the_logarithm_of_the_horizon():
    values = interpolated(torch.tensor([0.0, 1.0, 3.0]), 25)
    assert values[[0, 4, 19, 24]].tolist() == [0.0, 1.0, 3.0, 3.0]
    assert values[9].item() == pytest.approx(2.0)  # 10 is halfway from 5 to 20


def test_student_t_agrees_with_torch():
    grid = torch.linspace(-200, 1.3, 400_001, dtype=torch.float64)
    integral = torch.trapezoid(torch.distributions.StudentT(5.0).log_prob(grid).exp(), grid)
    assert student_t_cdf(1.3) == pytest.approx(integral.item(), abs=1e-6)
    assert student_t_cdf(-1.3) == pytest.approx(1 - student_t_cdf(1.3))
    assert student_t_cdf(2.015) == pytest.approx(0.95, abs=1e-4)


def test_the_history_finds_a_power_law_and_extrapolates_it():
    losses = [5.0 * stretch**-0.3 for stretch in range(1, 61)]
    law = LossHistory()
    history = torch.tensor([law.observe(log_loss(loss)) for loss in losses[:40]])
    assert history.shape == (40, len(HISTORY)) and OBSERVATION == 64 + len(HISTORY)
    back, increments = power_law(history[-1:], 20)
    expected = torch.tensor(losses[40:]).log() - math.log(losses[39])
    torch.testing.assert_close((back + increments.cumsum(-1))[0], expected, atol=0.02, rtol=0)
    assert history[0].tolist()[:3] == [0.0, 0.0, 0.0]


def test_the_history_continues_after_saving():
    whole, first, second = LossHistory(), LossHistory(), LossHistory()
    values = [2.0, 1.7, 1.8, 1.5, 1.2]
    expected = [whole.observe(value) for value in values]
    got = [first.observe(value) for value in values[:3]]
    vars(second).update(vars(first))
    assert got + [second.observe(value) for value in values[3:]] == expected
