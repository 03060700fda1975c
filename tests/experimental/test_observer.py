"""`hf_hybrid/experimental/observer.py`: stretches hold what happened in them."""

import json

import pytest

from hf_hybrid.experimental.imagination import Stretch
from hf_hybrid.experimental.observer import StretchCounter

pytestmark = pytest.mark.slow


def test_stretches_hold_what_happened_in_their_real_steps():
    counter = StretchCounter(stride=4)
    done = []
    for loss in (4.0, 2.0, None, 2.0):
        done.append(counter.step(loss, 0.1))
    counter.gain += 3.0 * 2  # a leap of gain 3 after two real steps
    done.append(counter.step(0.0, 0.05))
    assert done == [False, False, False, False, True]
    closed = counter.close([1.0], progress=0.25, learning_rate=0.05)
    assert closed == Stretch([1.0], loss=2.0, gain=1.5, horizon=0.25, progress=0.25, rate=0.5)
    assert counter.losses == [] and counter.gain == 0.0 and counter.predicted == 0
    other = StretchCounter(stride=4)
    counter.step(1.0, 0.02)
    vars(other).update(json.loads(json.dumps(vars(counter))))
    assert vars(other) == vars(counter)
