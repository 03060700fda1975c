"""`hf_hybrid/experimental/bandit.py`: multiples of the schedule, chosen by what they earned."""

import json
import random

import pytest

from hf_hybrid.experimental.bandit import BanditGain
from hf_hybrid.experimental.observer import Stretch
from hf_hybrid.leaps.trust import GainPlanner

pytestmark = pytest.mark.slow


def stretch(loss, **changes):
    values = {"features": [0.0] * 64, "loss": loss, "gain": 0.0, "horizon": 0.0, "progress": 0.5, "rate": 0.5}
    return Stretch(**{**values, **changes})


def play(bandit, best, rounds, seed=0):
    """A world in which the loss falls faster the nearer the arm is to `best`; returns the arms chosen."""
    noise, loss, arms = random.Random(seed), 10.0, []
    for _ in range(rounds):
        arms.append(bandit.ARMS[bandit.arm])
        loss *= 1.0 - 0.01 * (2.0 - abs(bandit.ARMS[bandit.arm] - best)) + noise.gauss(0, 0.002)
        bandit.observe(stretch(loss))
    return arms


@pytest.mark.parametrize("best", [0.0, 1.0, 2.0])
def test_the_bandit_finds_the_gain_that_pays(best):
    last = play(BanditGain(4.0, 2.0, 0.2), best, 400)[-100:]
    assert sum(arm == best for arm in last) > 70


def test_the_bandit_plays_multiples_of_the_schedule():
    bandit, schedule = BanditGain(4.0, 2.0, 0.2), GainPlanner(4.0, 2.0, 0.2)
    assert bandit.gain(0.5) == schedule.gain(0.5), "until it knows better"
    played = set()
    for loss in (3.0, 2.0, 2.5, 1.0, 1.5):
        bandit.observe(stretch(loss))
        played.add(bandit.gain(0.5) / schedule.gain(0.5))
    assert len(played) > 1 and played <= set(BanditGain.ARMS)


def test_the_bandit_goes_on_where_it_was_saved():
    first = BanditGain(4.0, 2.0, 0.2)
    play(first, 2.0, 30)
    second = BanditGain(4.0, 2.0, 0.2)
    state = first.state_dict()
    tensors = state.pop("tensors")
    second.load_state_dict({**json.loads(json.dumps(state)), "tensors": tensors})
    assert second.gain(0.5) == first.gain(0.5)
    assert play(first, 2.0, 30, seed=1) == play(second, 2.0, 30, seed=1)


def test_a_loss_of_zero_or_less_teaches_the_bandit_nothing():
    bandit = BanditGain(4.0, 2.0, 0.2)
    for loss in (0.0, -1.0, 0.0):
        bandit.observe(stretch(loss))
    assert (bandit.response == 0).all()
