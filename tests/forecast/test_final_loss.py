"""`hf_hybrid/forecast/final_loss.py`: where a run will end."""

import math
import time

import numpy as np
import pytest

from hf_hybrid.forecast.final_loss import FEWEST, final_steps, forecast_final_loss


def a_run(steps=400, *, schedule="linear", noise=0.05, annealing=0.1, seed=0):
    """Losses and rates of a run that follows the law, with noise."""
    share = np.arange(steps) / steps
    rates = {"linear": 1 - share, "constant": np.ones(steps), "wsd": np.minimum(1.0, (1 - share) / 0.2)}[schedule]
    summed = np.cumsum(rates)
    curve = 2.0 + 4.0 * (summed + 5.0) ** -0.5 + annealing * rates
    return curve + noise * np.random.default_rng(seed).normal(size=steps), rates


def forecast(losses, rates, done, every=1):
    ends = list(range(every, done + 1, every))
    means = [float(np.mean(losses[end - every : end])) for end in ends]
    return forecast_final_loss(ends, means, rates, len(rates))


@pytest.mark.parametrize("schedule", ["linear", "constant", "wsd"])
def test_half_of_a_run_tells_where_it_ends(schedule):
    losses, rates = a_run(schedule=schedule)
    came = losses[-final_steps(len(losses)) :].mean()
    found = forecast(losses, rates, 200)
    assert abs(found.median - came) < 0.1
    assert found.low < came < found.high


@pytest.mark.parametrize("ratio", [0.9, 1.0, 1.3])
def test_the_held_out_loss_follows_the_training_loss(ratio):
    losses, rates = a_run(noise=0.01)
    steps, clean = range(1, 201), a_run(noise=0.0)[0]
    found = forecast_final_loss(steps, losses[:200], rates, len(rates), ratio * clean[199])
    assert abs(found.median / (ratio * clean[-1]) - 1) < 0.06
    assert found.low < ratio * clean[-1] < found.high


@pytest.mark.parametrize("held_out", [0.0, -1.0, math.nan, math.inf])
def test_there_is_no_held_out_forecast_from_a_loss_that_says_nothing(held_out):
    losses, rates = a_run()
    assert forecast_final_loss(range(1, 201), losses[:200], rates, len(rates), held_out) is None
    assert forecast_final_loss([1, 2], losses[:2], rates, len(rates), 2.0) is None


def test_the_interval_shrinks_as_the_run_goes_on():
    losses, rates = a_run()
    widths = [(found := forecast(losses, rates, done)).high - found.low for done in (20, 80, 200, 360)]
    assert widths == sorted(widths, reverse=True)


def test_the_end_of_a_run_and_its_last_evaluation_are_their_forecasts():
    losses, rates = a_run()
    came = losses[-final_steps(len(losses)) :].mean()
    for held_out, expected in ((None, came), (3.5, 3.5)):
        found = forecast_final_loss(range(1, 401), losses, rates, len(rates), held_out)
        assert (found.low, found.median, found.high) == pytest.approx((expected, expected, expected))


def test_a_decaying_rate_is_known_in_advance():
    losses, rates = a_run(schedule="wsd")
    decaying = forecast(losses, rates, 200)
    staying = forecast_final_loss(range(1, 201), losses[:200], np.ones(len(rates)), len(rates))
    assert decaying.median < staying.median


def test_quantiles_agree_with_probabilities():
    found = forecast(*a_run(), 100)
    for share, loss in ((0.05, found.low), (0.5, found.median), (0.95, found.high)):
        assert found.probability_below(loss) == pytest.approx(share, abs=1e-3)


def test_neither_units_of_the_rate_nor_of_the_loss_matter():
    losses, rates = a_run()
    one, other = forecast(losses, rates, 100), forecast(10 * losses, 1e-4 * rates, 100)
    assert (other.low, other.median, other.high) == pytest.approx((10 * one.low, 10 * one.median, 10 * one.high))


def test_there_is_no_forecast_from_too_little_or_of_a_run_that_broke():
    losses, rates = a_run()
    assert forecast(losses, rates, FEWEST - 1) is None
    assert forecast(losses, rates, FEWEST) is not None
    losses[99] = math.nan
    assert forecast(losses, rates, 100) is None
    assert forecast(losses, rates, 110) is not None  # one bad batch


@pytest.mark.parametrize("level", [0.0, 1e-9, 3.0, -0.5])
def test_a_constant_loss_stays_constant(level):
    found = forecast_final_loss(range(1, 51), [level] * 50, np.linspace(1, 0, 100), 100)
    assert found.low <= found.median <= found.high
    assert abs(found.median - level) <= 0.25 * abs(level) + 1e-5


def test_a_run_of_five_steps():
    found = forecast_final_loss(range(1, 6), [3.0, 2.9, 2.9, 2.8, 2.8], [5, 4, 3, 2, 1], 5)
    assert found.median == pytest.approx(2.88)


def test_rates_of_zero_and_sparse_logs():
    losses, rates = a_run(2000)
    assert math.isfinite(forecast(losses, rates, 1000, every=200).median)
    assert math.isfinite(forecast_final_loss(range(1, 51), losses[:50], [0.0] * 2000, 2000).median)


def test_a_long_run_costs_milliseconds():
    losses, rates = a_run(200_000)
    forecast(losses, rates, 100_000, every=10)  # warm
    ends = list(range(10, 100_001, 10))
    means, began = losses[:100_000].reshape(-1, 10).mean(1), time.process_time()
    forecast_final_loss(ends, means, rates, len(rates))
    assert time.process_time() - began < 0.2


@pytest.mark.parametrize(
    ("steps", "rates", "match"),
    [
        ([1, 2], [1.0] * 5, "entries and `losses`"),
        ([1, 2, 3], [1.0] * 4, "for each of 5"),
        ([1, 3, 2], [1.0] * 5, "ascend"),
    ],
)
def test_bad_input_is_refused(steps, rates, match):
    with pytest.raises(ValueError, match=match):
        forecast_final_loss(steps, [1.0, 1.0, 1.0], rates, 5)
