"""`planner="dynamics"`: what is imagined decides, in a planner by itself and in a run."""

import json
from pathlib import Path

import pytest
import torch
from rig import trainers
from synthetic_runs import make_run, new_rssm

import hf_hybrid
from hf_hybrid.experimental import imagination
from hf_hybrid.experimental.dynamics import DynamicsModel
from hf_hybrid.experimental.imagination import ImaginedGain, Stretch
from hf_hybrid.experimental.planners import STRETCH_STEPS
from hf_hybrid.experimental.rssm import RSSM
from hf_hybrid.leaps.trust import GainPlanner

pytestmark = pytest.mark.slow

SMALL = {"members": 2, "deterministic": 32, "hidden": 32}
STRETCHES = 20


def planner(effect=0.0, members_agree=True, peak=2.0):
    """One whose world model believes that leaps change the log loss by `effect` per stretch of gain 1."""
    model = new_rssm(**SMALL)
    with torch.no_grad():
        bias = torch.full((2,), effect / model._DRIFT) if members_agree else torch.tensor([5.0, -5.0]) * effect
        model.weights["loss_out.bias"][:, 0, 1] = bias
    dynamics = DynamicsModel(model)
    return ImaginedGain(
        peak, 0.0, 0.2, dynamics=dynamics, rate_at=lambda progress: 1.0 - progress, stretch_share=1 / STRETCHES
    )


def follow(gains, stretches, seed=0):
    run = make_run(seed, stretches=STRETCHES, leaps=False)
    for k in stretches:
        progress = (k + 1) / STRETCHES
        gains.observe(Stretch(run.features[k].tolist(), float(run.losses[k]), 0.0, 0.0, progress, 1.0 - progress))
    return gains


@pytest.mark.parametrize(("effect", "expected"), [(-0.02, 2.0), (0.02, 0.0), (0.0, 1.0)])
def test_leaps_go_as_far_as_they_are_imagined_to_help(effect, expected):
    gains = follow(planner(effect), range(8))
    assert gains.multiple == expected
    assert gains.gain(0.5) == pytest.approx(expected * GainPlanner(2.0, 0.0, 0.2).gain(0.5))


def test_the_schedule_holds_until_there_is_something_to_go_by():
    gains = follow(planner(effect=0.02), range(ImaginedGain.OBSERVE_FIRST - 1))
    assert gains.multiple == 1.0


def test_members_that_disagree_change_nothing():
    assert follow(planner(0.5, members_agree=False), range(8)).multiple == 1.0


def test_confidence_falls_where_leaps_are_imagined_to_hurt():
    assert follow(planner(-0.02), range(8)).confidence == 1.0
    assert follow(planner(0.02), range(8)).confidence < 0.5


def test_a_planner_that_was_saved_goes_on_bit_for_bit():
    expected = follow(planner(-0.02), range(10))
    first = follow(planner(-0.02), range(5))
    resumed = planner(-0.02)
    state = first.state_dict()
    tensors = state["dynamics"].pop("tensors")
    state = json.loads(json.dumps(state))
    state["dynamics"]["tensors"] = tensors
    resumed.load_state_dict(state)
    follow(resumed, range(5, 10))
    assert resumed.choices == expected.choices and len(resumed.choices) == 10
    for name, tensor in expected.dynamics.state_dict()["tensors"].items():
        assert torch.equal(resumed.dynamics.state_dict()["tensors"][name], tensor), name


def test_the_last_stretch_plans_nothing():
    assert len(follow(planner(), range(STRETCHES)).choices) == STRETCHES - 1


# Start weights.


def test_start_weights_are_part_of_the_package():
    assert imagination.START_WEIGHTS.stat().st_size < 5_000_000
    model = RSSM.load(imagination.START_WEIGHTS)
    assert all(weight.dtype == torch.float32 for weight in model.weights.values())
    assert model.weights["linear"].any() and model.weights["feature_scale"].min() > 0
    root = Path(hf_hybrid.__file__).parent
    tomllib = pytest.importorskip("tomllib")
    declared = tomllib.loads((root.parent / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    packed = {path for pattern in declared["hf_hybrid"] for path in root.glob(pattern)}
    assert imagination.START_WEIGHTS in packed


# In a run; that it resumes is a test of test_reached.py.


def test_a_run_tells_what_was_chosen(tmp_path):
    trainer = trainers.train(tmp_path, max_steps=90, planner="dynamics")
    summary = trainer.hybrid_summary()
    choices, stretches = summary["planner"]["choices"], summary["real_steps"] // STRETCH_STEPS
    assert stretches - 1 <= len(choices) <= stretches
    assert all(choice["multiple"] in ImaginedGain.MULTIPLES for choice in choices)
    json.dumps(summary)
