import json
import math

import pytest

from hf_hybrid.leaps.gains import GainPlanner
from hf_hybrid.leaps.leaps import LeapPlanner
from hf_hybrid.leaps.trajectory import LeapShape
from hf_hybrid.leaps.verifier import (
    HeldOutProbe,
    Paired,
    Residual,
    ResidualStore,
    accept_extended,
    keep_scheduled,
    paired_decrease,
    parabola_minimum,
)


def test_pairing_removes_the_spread_between_sequences():
    before = [1.0, 5.0, 9.0, 3.0]
    paired = paired_decrease(before, [loss - 0.01 for loss in before])
    assert paired.decrease == pytest.approx(0.01)
    assert paired.standard_error < 1e-12


def test_standard_error_is_that_of_the_mean_difference():
    paired = paired_decrease([1.0, 1.0, 1.0, 1.0], [0.9, 1.1, 0.9, 1.1])
    assert paired.decrease == pytest.approx(0.0)
    assert paired.standard_error == pytest.approx(math.sqrt(0.04 / 3) / 2)


def test_nan_after_a_leap_is_an_infinite_rise():
    assert paired_decrease([1.0, 1.0], [math.nan, 1.0]).decrease == -math.inf


@pytest.mark.parametrize("before, after", [([1.0], [1.0]), ([1.0, 2.0], [1.0])])
def test_comparisons_that_are_not_paired_are_refused(before, after):
    with pytest.raises(ValueError, match="same two or more sequences"):
        paired_decrease(before, after)


def test_scheduled_leap_stays_unless_clearly_worse():
    assert keep_scheduled(Paired(-0.015, 0.01), margin=0.0, z=2.0)
    assert not keep_scheduled(Paired(-0.025, 0.01), margin=0.0, z=2.0)
    assert keep_scheduled(Paired(-0.025, 0.01), margin=0.01, z=2.0)


def test_extended_leap_must_earn_its_price():
    enough, slope, cost = Paired(0.05, 0.01), 0.02, 1.0
    assert accept_extended(enough, slope=slope, cost=cost, z=1.0)
    assert not accept_extended(enough, slope=slope, cost=2.5, z=1.0)
    assert not accept_extended(Paired(0.0, 0.0), slope=0.0, cost=0.0, z=1.0)


def test_parabola_minimum():
    assert parabola_minimum([(x, (x - 1.5) ** 2 + 3) for x in (0.0, 1.0, 4.0)]) == pytest.approx(1.5)
    assert parabola_minimum([(x, -(x**2)) for x in (0.0, 1.0, 2.0)]) is None
    assert parabola_minimum([(0.0, 1.0), (1.0, math.inf), (2.0, 1.0)]) is None


class World:
    """A loss that is a parabola in the gain, seen through held-out sequences with their own offsets."""

    def __init__(self, minimum, curvature=1.0, wobble=0.0):
        self.minimum, self.curvature, self.wobble, self.gain = minimum, curvature, wobble, 0.0
        self.probe = HeldOutProbe([0, 1], self.losses, sizes=[4, 4], sequences_per_probe=8, sequences_per_step=8)

    def losses(self, batch):
        height = self.curvature * (self.gain - self.minimum) ** 2
        return [batch + i + height + self.wobble * self.gain * (-1) ** i for i in range(4)]

    def leap(self, gain):
        self.gain = gain
        return LeapShape(gain, gain, gain / 100, 2 * self.curvature * self.minimum * gain)


def planner(**overrides):
    gains = GainPlanner(2.0, 2.0, 0.1)
    values = {"gains": gains, "probe_budget": 0.02, "max_steps": 1000, "z": 2.0, "margin": 0.0, "extend": True}
    return LeapPlanner(**{**values, **overrides})


def test_look_keeps_a_leap_that_pays():
    world = World(minimum=1.2)
    outcome = planner().look(1.0, world.leap, world.probe, slope=0.01)
    assert (outcome.verdict, outcome.shape.gain, world.gain) == ("kept", 1.0, 1.0)
    assert outcome.loss_before - outcome.loss_after == pytest.approx(outcome.paired.decrease)


def test_look_extends_a_leap_that_wants_to_go_far():
    world = World(minimum=10.0)
    outcome = planner().look(1.0, world.leap, world.probe, slope=0.01)
    assert (outcome.verdict, outcome.shape.gain, world.gain) == ("extended", 4.0, 4.0)


def test_look_does_not_extend_when_the_gain_does_not_pay_for_the_probe():
    world = World(minimum=10.0, curvature=1e-4)
    outcome = planner().look(1.0, world.leap, world.probe, slope=1.0)
    assert (outcome.verdict, world.gain) == ("kept", 1.0)


def test_look_shrinks_to_the_minimum_of_the_parabola():
    world = World(minimum=0.2)
    outcome = planner().look(1.0, world.leap, world.probe, slope=0.01)
    assert outcome.verdict == "shrunk"
    assert world.gain == outcome.shape.gain == pytest.approx(0.2)


def test_look_rejects_what_only_hurts():
    world = World(minimum=-1.0)
    outcome = planner().look(1.0, world.leap, world.probe, slope=0.01)
    assert (outcome.verdict, outcome.shape.gain, outcome.kept) == ("rejected", 1.0, False)
    assert outcome.loss_after > outcome.loss_before


def test_look_tolerates_noise():
    # Slightly worse, but within two standard errors: a scheduled leap stays.
    world = World(minimum=0.45, wobble=1.0)
    assert planner().look(1.0, world.leap, world.probe, slope=0.01).verdict == "kept"


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


def test_residuals_lower_the_gain_only_where_it_is_significant():
    here, there = [1.0, 0.0], [0.0, 1.0]
    store = ResidualStore()
    assert store.gain_factor(10, here, z=2.0) == 1.0
    store.add(Residual(0, here, ratio=-1.0, standard_error=5.0))
    assert store.gain_factor(10, here, z=2.0) == 1.0
    for step in range(5):
        store.add(Residual(step, here, ratio=-0.6, standard_error=0.01))
        if step == 0:
            assert store.gain_factor(10, here, z=0.0) == 1.0  # two looks are no lesson
    assert store.gain_factor(10, there, z=2.0) == 1.0
    store.residuals.popleft()
    assert store.gain_factor(10, here, z=2.0) == pytest.approx(0.4, abs=0.02)
    restored = ResidualStore()
    restored.load_state_dict(json.loads(json.dumps(store.state_dict())))
    assert restored.gain_factor(10, here, z=2.0) == store.gain_factor(10, here, z=2.0)


def test_credit_adds_up_to_whole_steps():
    p = planner()
    horizons = [p.credit_for(2.0, 5, max_horizon=3)[1] for _ in range(8)]
    assert sum(horizons) == 4 and max(horizons) == 1
    assert p.credit_for(1.0, 5, max_horizon=3)[0] == pytest.approx(0.25)
    # What an extended leap gains beyond the schedule is not counted as worth.
    assert p.credit_for(50.0, 5, max_horizon=3)[0] == pytest.approx(0.5)


def test_after_two_rejections_no_leap_goes_unseen():
    p, world = planner(max_steps=100, probe_budget=0.02), World(minimum=-1.0)
    while p.plan(10, [0.0], world.probe).probe:
        p.look(1.0, world.leap, world.probe, slope=0.01)
    for blocks_to_skip in (1, 2):
        assert p.allows_leap(10, world.probe)  # one rejection may be chance: a leap may go unseen
        p.leap_was_rejected()
        assert not any(p.allows_leap(10, world.probe) for _ in range(blocks_to_skip))
    assert not p.allows_leap(10, world.probe)
    assert world.probe.cost_steps <= 0.02 * 100 + 1


def test_leaps_that_were_refused_are_asked_for_again_within_a_wider_budget():
    """Two bad leaps at the start of a short run use its budget up; without another look there would be no third."""
    p, world = planner(max_steps=200, probe_budget=0.01), World(minimum=-1.0)
    for step in (10, 12):
        if p.plan(step, [0.0], world.probe).probe:
            p.look(1.0, world.leap, world.probe, slope=0.01)
        p.leap_was_rejected()
    asked = []
    for step in range(14, 200, 2):
        if p.allows_leap(step, world.probe):
            assert p.plan(step, [0.0], world.probe).probe, "nobody would see it"
            p.look(1.0, world.leap, world.probe, slope=0.01)
            p.leap_was_rejected()
            asked.append(step)
    assert asked and asked[0] < 100
    assert 0.01 * 200 < world.probe.cost_steps <= 3 * 0.01 * 200 * 1.1 + 1


def test_rejections_back_off_exponentially_and_are_forgotten():
    p = planner()
    skipped = []
    for _ in range(4):
        p.leap_was_rejected()
        blocks = 0
        while not p.allows_leap(10, None):
            blocks += 1
        skipped.append(blocks)
    assert skipped == [1, 2, 4, 8]
    low = p.confidence
    assert low < planner().confidence
    from hf_hybrid.leaps.divergence import Level

    for _ in range(500):
        p.observe_step(Level.NORMAL)
    assert p.confidence == pytest.approx(planner().confidence, abs=0.01)
