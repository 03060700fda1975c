"""Experiments are reached by their options, each in a run that resumes, and whoever sets none loads none."""

import sys

import pytest
from conftest import assert_same_weights, losses, weights
from rig import trainers

from hf_hybrid import Part

OPTIONS = {
    "dynamics": ({"planner": "dynamics"}, "planner_observer"),
    "int8": ({"weight_precision": "predict=int8", "probe_budget": 1.0}, "phase_memory"),
    "bf16": ({"weight_precision": "full=bf16", "bf16": True}, "phase_memory"),
    "host": ({"predict_states": "host"}, "phase_memory"),
}


class Seen(Part):
    """Notes where the classes of a run's parts are from."""

    def begin(self, run):
        self.modules = {part.name: type(part).__module__ for part in run.parts}


def train(folder, *, resume=None, **options):
    seen = Seen()
    values = {"max_steps": 36, "save_strategy": "steps", "save_steps": 22, "model_seed": 0, **options}
    return trainers.train(folder, parts=[seen], resume=resume, **values), seen


@pytest.fixture
def unloaded(monkeypatch):
    """Which experiments are loaded from here on."""
    loaded = lambda: {name for name in sys.modules if name.startswith("hf_hybrid.experimental")}  # noqa: E731
    for name in loaded():
        monkeypatch.delitem(sys.modules, name)
    return loaded


@pytest.mark.parametrize("option", OPTIONS)
def test_an_option_adds_its_part_and_resumes_to_the_last_bit(option, tmp_path):
    options, part = OPTIONS[option]
    whole, seen = train(tmp_path, **options)
    assert seen.modules[part].startswith("hf_hybrid.experimental.")
    assert whole.hybrid_summary()["predicted_steps"] > 0 and losses(whole)[-1] < losses(whole)[0]
    resumed, _ = train(tmp_path / "resumed", resume=str(tmp_path / "checkpoint-22"), **options)
    assert_same_weights(weights(resumed.model), weights(whole.model))
    told = [trainer.hybrid_summary() for trainer in (whole, resumed)]
    for name in ("planner", "leaps"):
        assert told[0].get(name) == told[1].get(name), name
    assert bool(told[0]["planner"]) == (option == "dynamics")


def test_a_run_that_asks_for_none_loads_none(unloaded, tmp_path):
    trainer, _ = train(tmp_path)
    assert trainer.hybrid_summary()["leaps"] and not unloaded()


def test_a_word_that_cannot_be_read_is_refused_with_the_config(tmp_path):
    with pytest.raises(ValueError, match="`predict=int8_bitsandbits` must be a precision .*int8_bitsandbytes"):
        train(tmp_path, weight_precision="predict=int8_bitsandbits")
