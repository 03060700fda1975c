"""Optimizer states that are elsewhere in Predict: exact where that is promised, whole in every checkpoint."""

import json

import pytest
import torch
from conftest import assert_same_weights, weights
from rig import trainers
from torch import nn

from hf_hybrid.experimental import precision
from hf_hybrid.experimental.precision import PhaseMemory
from hf_hybrid.part import Phase
from hf_hybrid.run.run import Run
from hf_hybrid.streaming.low_bit import AdamW8bit

pytestmark = pytest.mark.slow

torch.set_num_threads(1)
STEPS = 40
SIZE = 64 * 80


@pytest.fixture
def device(monkeypatch):
    """Let the CPU pass for a device: tensors are then really copied out and back."""
    monkeypatch.setattr(precision, "in_host_memory", lambda tensor: False)


def trained(folder, *plugins, resume=None, **overrides):
    values = {"max_steps": STEPS, "max_predict_steps": 4, "leap_worth": 6.0, **overrides}
    trainer = trainers.train(folder, parts=plugins, resume=resume, **values)
    assert trainer.hybrid_summary()["predicted_steps"] > 2
    return trainer


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return weights(trained(tmp_path_factory.mktemp("plain")).model)


class Scene:
    """A plugin around an optimizer over one matrix and one vector that was stepped twice."""

    def __init__(self, placement, make=torch.optim.AdamW, **options):
        if make is AdamW8bit:
            pytest.importorskip("bitsandbytes")
        torch.manual_seed(0)
        self.parameters = [nn.Parameter(torch.randn(64, 80)), nn.Parameter(torch.randn(80))]
        self.optimizer = make(self.parameters, lr=1e-2, **options)
        self.plugin = PhaseMemory(predict_states=placement)
        self.plugin.begin(Run(model=nn.Module(), optimizer=self.optimizer, max_steps=10))
        for _ in range(2):
            self.step()

    def step(self):
        for parameter in self.parameters:
            parameter.grad = torch.randn_like(parameter)
        self.optimizer.step()

    @property
    def state(self):
        return self.optimizer.state[self.parameters[0]]

    def copy(self):
        return {key: value.clone() for key, value in self.state.items()}

    def enter(self):
        self.plugin.on_phase_change(Phase.FULL, Phase.PREDICT)

    def resident_bytes(self):
        """Bytes of all states by place."""
        found = {"device": 0, "host": 0}
        away = {(id(state), key) for state, key, _ in self.plugin._away}
        for state in self.optimizer.state.values():
            for key, value in state.items():
                found["host" if (id(state), key) in away else "device"] += value.nbytes
        return found

    def leave(self):
        self.plugin.on_phase_change(Phase.PREDICT, Phase.CORRECT)
        self.plugin.after_backward(Phase.CORRECT)


# By itself.


def test_moved_states_are_readable_and_come_back_to_the_last_bit(device):
    scene = Scene("host")
    before, tensors = scene.copy(), dict(scene.state)
    total = 8 * (SIZE + 80)
    assert scene.resident_bytes() == {"device": total + 8, "host": 0}
    for _ in range(2):
        scene.enter()
        assert scene.state["exp_avg"] is not tensors["exp_avg"] and scene.state["step"] is tensors["step"]
        assert all(torch.equal(scene.state[key], before[key]) for key in before)
        assert scene.resident_bytes() == {"device": 8, "host": total}
        scene.leave()
        assert all(torch.equal(scene.state[key], before[key]) for key in before)
        assert scene.resident_bytes() == {"device": total + 8, "host": 0}


@pytest.mark.parametrize("placement", ["stay", "host"])
def test_what_is_in_host_memory_stays_there(placement):
    scene = Scene(placement)
    tensors = dict(scene.state)
    scene.enter()
    assert all(scene.state[key] is tensors[key] for key in tensors)


def test_eight_bit_states_of_any_optimizer_are_moved_as_they_are(device):
    scene = Scene("host", AdamW8bit)
    before = scene.copy()
    scene.enter()
    scene.leave()
    assert all(torch.equal(scene.state[key], before[key]) for key in before)
    assert scene.state["exp_avg_8bit"].dtype == torch.uint8


def test_states_are_back_before_an_export(device):
    scene = Scene("host")
    before = scene.copy()
    scene.enter()
    away = scene.state["exp_avg"]
    scene.plugin.before_export()
    assert scene.state["exp_avg"] is not away and scene.resident_bytes()["host"] == 0
    assert torch.equal(scene.state["exp_avg"], before["exp_avg"])


# In a run.


@pytest.mark.parametrize("placement", ["stay", "host"])
def test_a_run_is_the_same_to_the_last_bit(placement, plain, device, tmp_path):
    class Counting(PhaseMemory):
        moved = 0

        def _send_states(self, states):
            super()._send_states(states)
            self.moved += len(self._away)

    plugin = Counting(predict_states=placement)
    trainer = trained(tmp_path, plugin)
    assert_same_weights(weights(trainer.model), plain)
    assert (plugin.moved > 0) == (placement != "stay")


def test_checkpoints_of_predict_hold_whole_states_and_resume_exactly(device, tmp_path):
    saving = {"save_strategy": "steps", "save_steps": 1}
    whole = trained(tmp_path, PhaseMemory(predict_states="host"), **saving)
    folder = _last_in_predict(tmp_path)
    saved = torch.load(folder / "optimizer.pt", weights_only=True)["state"]
    shapes = [parameter.shape for group in whole.optimizer.param_groups for parameter in group["params"]]
    assert [saved[index]["exp_avg_sq"].shape for index in range(len(shapes))] == shapes
    assert all(type(saved[index]["exp_avg"]) is torch.Tensor for index in range(len(shapes)))
    resumed = trained(tmp_path / "resumed", PhaseMemory(predict_states="host"), resume=str(folder))
    assert_same_weights(weights(resumed.model), weights(whole.model))
    # Saving does not change the run.
    assert_same_weights(
        weights(trained(tmp_path / "unsaved", PhaseMemory(predict_states="host")).model), weights(whole.model)
    )


def _last_in_predict(folder):
    """The newest checkpoint, not of the very end, that was saved after a predicted step whose Predict goes on."""
    found = []
    for checkpoint in folder.glob("checkpoint-*"):
        parts = json.loads((checkpoint / "hybrid_state.json").read_text())["parts"]
        controller = parts["leaps"]["controller"]
        inside = controller["phase"] == parts["run"]["announced"] == "predict" and not controller["leap_due"]
        step = int(checkpoint.name.split("-")[1])
        if inside and step < STEPS - 5:
            found.append((step, checkpoint))
    assert found, "no Predict of two steps in this run"
    return max(found)[1]
