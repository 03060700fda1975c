"""`hf_hybrid/leaps/leap.py`: one leap from the decision to the verdict, on a problem of one weight."""

import json
import math

import pytest
import torch

from hf_hybrid.experimental.observer import Confidence
from hf_hybrid.leaps.directions import Direction
from hf_hybrid.leaps.leap import Leaps, PhaseController, PhaseLengths
from hf_hybrid.leaps.probe import HeldOutBatches, Losses, Probe, ProbeBatch
from hf_hybrid.leaps.trajectory import Trajectory
from hf_hybrid.leaps.trust import GainPlanner, Trust
from hf_hybrid.part import Level, Phase
from hf_hybrid.run.monitor import DivergenceMonitor
from hf_hybrid.run.run import Run
from hf_hybrid.run.weights import TrainedWeights


class Upwards(Direction):
    """Moves the weight by one for a gain of one and a learning rate of one."""

    def displacement(self, index, out):
        return out.fill_(1.0)


def leap_run(named, *, direction, gain=1.0, worth=0.0, probe=None, trust=None, rate=1.0, max_predict=3, **options):
    """A run of leaps and monitor alone; its parts are its attributes."""
    optimizer = torch.optim.SGD([parameter for _, parameter in named], lr=rate)
    weights = TrainedWeights(named, optimizer)
    monitor = DivergenceMonitor(1e9)
    leaps = Leaps(
        controller=PhaseController(PhaseLengths(1, 2, 2, max_predict)),
        trajectory=Trajectory(weights, direction=direction, memory_steps=2, max_relative_norm=math.inf),
        gains=GainPlanner(gain, 0.0, worth),
        trust=trust or Trust(probe_budget=1.0, max_steps=1000),
        monitor=monitor,
        probe=probe,
        leap_budget=1.0,
        cost_of_step=lambda tokens: 1.0,
    )
    run = Run([monitor, leaps], warmup=1, weights=weights, optimizer=optimizer, max_steps=1000, **options)
    run.begin()
    run.leaps, run.monitor = leaps, monitor
    return run


class World:
    """A loss that is a parabola in one weight, seen through held-out sequences with their own offsets."""

    def __init__(self, minimum, curvature=1.0, wobble=0.0, **options):
        self.minimum, self.curvature, self.wobble = minimum, curvature, wobble
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.probe = Probe(
            HeldOutBatches([ProbeBatch(n, 4, 1 / 6) for n in (0, 1)], wanted=8), self.losses, price=1 / 3
        )
        self.run = leap_run([("weight", self.weight)], direction=Upwards, probe=self.probe, **options)
        self.leaps = self.run.leaps

    def losses(self, batch):
        at = self.weight.item()
        height = self.curvature * (at - self.minimum) ** 2
        return Losses([batch + i + height + self.wobble * at * (-1) ** i for i in range(4)])

    def leap(self, step=10):
        """A leap is due before `step`, after one real step that moved nothing; returns it."""
        self.leaps.trajectory.observe_step([1.0])
        self.leaps.controller.phase, self.leaps.controller.leap_due = Phase.PREDICT, True
        self.run.begin_step(step, learning_rate=1.0)
        return self.run.record.leaps[-1]


def proven(world):
    """The first losses of a run, from which those after a leap are forecast."""
    world.run.monitor.losses.extend([5.0 + 0.1 * (-1) ** step for step in range(32)])
    return world


def leaps(world, count):
    """The leaps of `count` blocks of two real steps, each judged at the end of Correct; `None` where none was made."""
    made, run, parts = [], world.run, world.leaps
    for step in range(10, 10 + 2 * count, 2):
        made_before = run.record.leaps_made
        parts.trajectory.observe_step([1.0])
        if parts._may_leap(step):
            parts.controller.phase, parts.controller.leap_due = Phase.PREDICT, True
            run.begin_step(step, learning_rate=1.0)
        made.append(run.record.leaps[-1] if run.record.leaps_made > made_before else None)
        if parts.trajectory.open is not None:
            parts.trajectory.open.losses.append(5.0)
            parts._judge(parts.trajectory.open)
    return made


def test_a_leap_that_pays_is_kept():
    world = World(minimum=1.2)
    leap = world.leap()
    assert (leap.verdict, leap.gain, world.weight.item()) == ("kept", 1.0, 1.0)
    assert leap.loss_before - leap.loss_after == pytest.approx(leap.decrease)
    assert world.leaps.trajectory.open is leap and world.run.phase is Phase.CORRECT


def test_sequences_without_labels_cannot_tell_and_cost_what_they_cost():
    """No leap is made where there has to be a probe. Else every leap would be probed, as if it were the first."""
    for losses, verdict, made in ((0, "rejected", 0), (32, "unprobed", 1)):
        world = World(minimum=1.2)
        world.leaps.monitor.losses.extend([1.0] * losses)
        world.probe.evaluate = lambda batch: Losses([0.0] * 4)
        leap = world.leap()
        assert (leap.verdict, leap.gain, leap.loss_before) == (verdict, float(made), None)
        assert world.leaps.trust.probes_made == made
        assert leap.probe_cost_steps == world.run.record.probe_cost_steps > 0


def test_a_leap_that_goes_too_far_is_shortened():
    world = World(minimum=0.4)
    leap = world.leap()
    assert (leap.verdict, leap.gain, world.weight.item()) == ("shrunk", 0.25, 0.25)


def test_a_leap_that_goes_much_too_far_is_shortened_until_it_lowers_the_loss():
    world = World(minimum=0.1)
    leap = world.leap()
    assert (leap.verdict, leap.gain, world.weight.item()) == ("shrunk", 0.0625, 0.0625)
    assert leap.loss_after < leap.loss_before and world.run.record.forward_only_passes == 2 * 4


def test_a_leap_that_only_hurts_is_undone_and_written_down_as_it_was_asked_for():
    world = World(minimum=-1.0)
    leap = world.leap()
    assert (leap.verdict, leap.gain, world.weight.item()) == ("rejected", 1.0, 0.0)
    assert leap.loss_after - leap.loss_before == pytest.approx(3.0)
    assert world.leaps.trajectory.open is None and world.run.phase is Phase.FULL
    assert world.run.record.forward_only_passes == 2 * 5, "before, at the leap, at a quarter, a sixteenth, a 64th of it"


def test_a_loss_that_is_not_finite_counts_as_worse():
    world = World(minimum=1.0)
    world.probe.evaluate = lambda batch: Losses([math.nan if world.weight.item() else 1.0] * 4)
    assert world.leap().verdict == "rejected" and world.weight.item() == 0.0


def test_noise_is_tolerated():
    """Slightly worse, but within two standard errors: a leap stays."""
    assert World(minimum=0.45, wobble=1.0).leap().verdict == "kept"


class Pairs(World):
    """The same loss, of preference pairs that are ranked right until the weight has passed `wrong_from`."""

    def __init__(self, minimum, wrong_from, **options):
        super().__init__(minimum, **options)
        self.wrong_from = wrong_from

    def losses(self, batch):
        right = [1.0, 1.0, 1.0, float(self.weight.item() < self.wrong_from)]
        return Losses(super().losses(batch).values, right)


def test_a_leap_that_lowers_the_loss_and_costs_accuracy_is_halved_until_it_costs_none():
    world = Pairs(minimum=1.2, wrong_from=0.3)
    leap = world.leap()
    assert (leap.verdict, leap.gain, world.weight.item()) == ("shrunk", 0.25, 0.25)
    assert (leap.worse_in, leap.accuracy_before, leap.accuracy_after) == ("accuracy", 1.0, 1.0)


def test_a_leap_that_lowers_the_loss_and_costs_accuracy_is_undone():
    world = Pairs(minimum=1.2, wrong_from=0.01)
    leap = world.leap()
    assert leap.loss_after < leap.loss_before, "by its loss alone it would stay"
    assert (leap.verdict, world.weight.item(), world.leaps.trajectory.open) == ("rejected", 0.0, None)
    found = json.loads(json.dumps(world.run.summary()["leaps"][-1]))
    assert (found["worse_in"], found["accuracy_before"], found["accuracy_after"]) == ("accuracy", 1.0, 0.75)


def test_a_leap_that_costs_no_accuracy_is_judged_by_its_loss():
    assert Pairs(minimum=1.2, wrong_from=2.0).leap().verdict == "kept"
    refused = Pairs(minimum=-1.0, wrong_from=2.0).leap()
    assert (refused.verdict, refused.worse_in) == ("rejected", "loss")
    assert World(minimum=1.2).leap().accuracy_after is None


@pytest.mark.parametrize("error", [RuntimeError, MemoryError, KeyboardInterrupt])
def test_whatever_is_raised_while_a_leap_is_tried_puts_the_weights_back(error):
    world = World(minimum=1.2)

    def fail(batch):
        if world.weight.item() != 0.0:
            raise error
        return Losses([1.0] * 4)

    world.probe.evaluate = fail
    with pytest.raises(error):
        world.leap()
    assert world.weight.item() == 0.0 and world.leaps.trajectory.open is None and not world.run.record.leaps


def test_a_leap_that_is_survived_counts_as_rejected():
    def survive(error, otherwise):
        assert isinstance(error, MemoryError)
        told.append(otherwise)

    def fail(batch):
        if world.weight.item() != 0.0:
            raise MemoryError
        return Losses([1.0] * 4)

    told = []
    world = World(minimum=1.2, survive=survive)
    world.probe.evaluate = fail
    world.leaps.trajectory.observe_step([1.0])
    world.leaps.controller.phase, world.leaps.controller.leap_due = Phase.PREDICT, True
    assert world.run.begin_step(10, learning_rate=1.0).phase is Phase.FULL
    assert told == ["leap undone"] and world.weight.item() == 0.0
    assert world.leaps.trust.rejections_in_a_row == 1 and world.leaps.credit == 0.0


def test_credit_adds_up_to_whole_steps():
    horizons = []
    world = proven(World(minimum=1e3, worth=0.5, trust=Trust(probe_budget=0.0, max_steps=1000)))
    world.leap(8)  # the first is probed, and pays for that
    world.leaps.trajectory.accept()
    world.leaps.credit = 0.0
    for step in range(10, 26, 2):
        horizons.append(world.leap(step).horizon)
        world.leaps.trajectory.accept()
    assert sum(horizons) == 4 and max(horizons) == 1


# What holds the next leap back.


def test_no_leap_goes_unprobed_before_losses_can_be_forecast():
    world = World(minimum=1e3, trust=Trust(probe_budget=0.01, max_steps=1000))
    early = leaps(world, 12)
    assert [leap.verdict for leap in early] == ["kept"] * 12 and all(leap.forecast is None for leap in early)
    later = leaps(proven(world), 12)
    assert {leap.verdict for leap in later} == {"unprobed"} and all(leap.forecast is not None for leap in later)


def test_a_shortened_leap_shortens_the_next_which_is_probed():
    world = proven(World(minimum=0.1))
    first, second, third = leaps(world, 3)
    assert (first.verdict, first.gain) == ("shrunk", 1 / 16)
    assert second.gain <= first.gain and second.loss_before is not None, "it begins at the accepted length"
    assert max(second.gain, third.gain) <= 2 * first.gain


def test_a_length_that_a_probe_accepted_is_leapt_unprobed_and_only_a_probe_tries_more():
    trust = Trust(probe_budget=0.01, max_steps=1000)
    trust.leap_was_probed(16.0, 4.0, cost=1.0)
    assert trust.on_probation and trust.longest(probed=True) == 4.0
    trust.leap_was_probed(4.0, 4.0, cost=0.5)
    assert not trust.on_probation and not trust.wants_more(4.0) and trust.wants_more(6.0)
    assert trust.longest(probed=False) == 4.0 and trust.longest(probed=True) == 8.0
    trust.leap_was_probed(8.0, 8.0, cost=0.5)
    assert trust.longest(probed=False) == 8.0 and trust.refused_cost == 1.0


def test_a_length_that_was_refused_is_asked_for_again_after_more_and_more_leaps():
    trust, waited = Trust(probe_budget=0.01, max_steps=1000), []
    for _ in range(3):
        trust.leap_was_probed(8.0, 4.0, cost=0.1)
        trust.leap_was_probed(4.0, 4.0, cost=0.1)
        kept = 0
        while trust.longest(probed=True) < 8.0:
            trust.leap_was_kept(probed=False)
            kept += 1
        waited.append(kept)
    assert waited == [4, 8, 16]


def test_a_long_leap_that_was_refused_does_not_shorten_short_ones():
    """The first leap follows Warmup and is longer than the others."""
    trust = Trust(probe_budget=0.01, max_steps=1000)
    trust.leap_was_probed(36.0, 9.0, cost=1.0)
    trust.leap_was_probed(6.0, 6.0, cost=0.5)
    assert not trust.on_probation and trust.longest(probed=False) == 9.0 and not trust.wants_more(6.0)


def test_a_roll_back_shortens_later_leaps_until_a_probe_accepts_more():
    trust = Trust(probe_budget=0.01, max_steps=1000)
    trust.leap_was_rolled_back(8.0)
    assert trust.on_probation and trust.longest(probed=True) == 4.0 and trust.blocks_to_skip == 1
    trust.leap_was_probed(4.0, 4.0, cost=0.5)
    for _ in range(4):
        trust.leap_was_kept(probed=False)
    assert trust.longest(probed=False) == 4.0 and trust.longest(probed=True) == 8.0


def test_a_run_in_which_every_leap_hurts_stops_leaping_within_two_hundredths_of_its_steps():
    for max_steps in (100, 400, 2000):
        world = proven(World(minimum=-1.0, trust=Trust(probe_budget=0.01, max_steps=max_steps)))
        tried = [leap for leap in leaps(world, max_steps // 2) if leap is not None]
        assert {leap.verdict for leap in tried} == {"rejected"} and world.weight.item() == 0.0
        one = tried[0].probe_cost_steps
        assert world.probe.cost_steps <= 0.02 * max_steps + one, f"{max_steps} steps"


def test_leaps_that_are_kept_pay_for_required_probes_out_of_their_worth():
    world = World(minimum=1e3, worth=2.0, trust=Trust(probe_budget=0.01, max_steps=1000))
    (leap,) = leaps(world, 1)
    assert leap.worth == pytest.approx(2.0 - leap.probe_cost_steps) and leap.probe_cost_steps > 0


def test_rejections_back_off_exponentially_and_are_forgotten():
    world, skipped = World(minimum=1e3), []
    world.run.monitor.losses.extend([1.0] * 32)
    trust, world.leaps.probe = world.leaps.trust, None
    world.leaps.trajectory.observe_step([1.0])
    for _ in range(4):
        trust.leap_was_rejected()
        blocks = 0
        while not world.leaps._may_leap(10):
            blocks += 1
        skipped.append(blocks)
    assert skipped == [1, 2, 4, 8]
    confidence, fresh = Confidence(), Confidence().value(1.0)
    confidence.rejected += 4.0
    assert confidence.value(1.0) < fresh
    for _ in range(500):
        confidence.observe_step(Level.NORMAL)
    assert confidence.value(1.0) == pytest.approx(fresh, abs=0.01)
    assert confidence.value(0.5) == pytest.approx(fresh / 2, abs=0.01), "the planner's belief counts"


def test_a_level_shortens_leaps_and_recovers_with_those_that_are_kept():
    world = World(minimum=1e3)
    world.leaps.trust.shorten()
    assert world.leap().gain == 0.5
    world.leaps.trajectory.accept()
    world.leaps.trust.leap_was_kept(probed=True)
    assert world.leap(20).gain == pytest.approx(0.55)
    for _ in range(20):
        world.leaps.trust.shorten()
    assert world.leaps.trust.level == 1 / 64
    for _ in range(100):
        world.leaps.trust.leap_was_kept(probed=False)
    assert world.leaps.trust.level == 1.0
