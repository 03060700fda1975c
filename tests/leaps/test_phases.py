"""`PhaseController` in `hf_hybrid/leaps/leap.py`: the order of phases."""

import json

import pytest

from hf_hybrid.leaps.leap import PhaseController, PhaseLengths
from hf_hybrid.part import Phase

LEGAL_TRANSITIONS = {
    Phase.WARMUP: {Phase.FULL},
    Phase.FULL: {Phase.PREDICT},
    Phase.PREDICT: {Phase.CORRECT, Phase.FULL},
    Phase.CORRECT: {Phase.PREDICT, Phase.FULL},
}
LENGTHS = PhaseLengths(warmup=2, full=3, correct=2, max_predict=4)


class TwoInARow(PhaseController):
    """After two leaps in a row a Full block is due."""

    MAX_CONSECUTIVE_LEAPS = 2


def walk(controller, steps, *, horizon=2, leap_allowed=True):
    """Phases of the next `steps` steps; every leap is kept with the given horizon."""
    phases = []
    for _ in range(steps):
        if controller.leap_due:
            controller.leap_kept(horizon)
        phases.append(controller.phase)
        controller.finish_step(leap_allowed=leap_allowed)
    return phases


def names(phases):
    return "".join(phase.value[0] for phase in phases)


@pytest.mark.parametrize("kind, options, expected", [
    (TwoInARow, {}, "wwfffppccppccfffp"),
    (TwoInARow, {"horizon": 0}, "wwfffccccfff"),  # a leap that is worth less than a step goes straight to Correct
    (PhaseController, {"leap_allowed": False}, "ww" + 18 * "f"),  # as while leaps back off
    (PhaseController, {"horizon": 99}, "wwfffppppc"),  # it is capped
])  # fmt: skip
def test_the_order_of_phases(kind, options, expected):
    assert names(walk(kind(LENGTHS), len(expected), **options)) == expected


def test_rejected_leap_returns_to_full():
    controller = PhaseController(LENGTHS)
    walk(controller, 5)
    assert controller.leap_due and controller.phase is Phase.PREDICT
    controller.force_full()
    assert controller.phase is Phase.FULL and not controller.leap_due and controller.remaining == 3


def test_force_full_does_not_cut_warmup_short():
    controller = PhaseController(LENGTHS)
    controller.force_full(10)
    assert names(walk(controller, 3)) == "wwf"


def test_without_warmup_the_run_starts_in_full():
    lengths = PhaseLengths(warmup=0, full=1, correct=1, max_predict=1)
    assert names(walk(PhaseController(lengths), 4, horizon=1)) == "fpcp"


def test_state_survives_json_at_every_step():
    reference = walk(PhaseController(LENGTHS), 40)
    controller, phases = PhaseController(LENGTHS), []
    for _ in range(40):
        state = json.loads(json.dumps(controller.state_dict()))
        controller = PhaseController(LENGTHS)
        controller.load_state_dict(state)
        phases += walk(controller, 1)
    assert phases == reference


def test_only_legal_transitions_happen():
    phases = walk(PhaseController(LENGTHS), 100)
    assert all(b is a or b in LEGAL_TRANSITIONS[a] for a, b in zip(phases, phases[1:]))
    assert set(phases) == set(Phase)
