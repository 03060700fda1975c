"""Leaps from the plan to the verdict: what is written down of each, what changes them, and that they are resumed."""

from copy import deepcopy
from functools import partial

import pytest
import torch
from conftest import ByteText, assert_same_weights, hybrid_config, tiny_model, weights
from peft import LoraConfig, get_peft_model

from hf_hybrid import HybridTrainer
from hf_hybrid.leaps.directions import DIRECTIONS
from hf_hybrid.leaps.gains import GainPlanner
from hf_hybrid.leaps.record import Leap
from hf_hybrid.leaps.trajectory import Trajectory
from hf_hybrid.optimizers import split_parameters

SEEN = {"unprobed", "kept", "shrunk"}


def lora():
    torch.manual_seed(1)
    return get_peft_model(tiny_model(), LoraConfig(target_modules=["q_proj", "up_proj"], r=4, init_lora_weights=False))


def train(folder, model=None, resume=None, callbacks=None, **options):
    options = {
        "accumulation_walk": "micro_batch",
        "probe_budget": 0.1,
        "leap_budget": 100.0,
        "logging_steps": 12,
        **options,
    }
    trainer = HybridTrainer(
        model or tiny_model(),
        hybrid_config(folder, **options),
        train_dataset=ByteText(200),
        probe_dataset=ByteText(16, offset=200),
        callbacks=callbacks,
    )
    trainer.train(resume_from_checkpoint=resume)
    return trainer


# The log.


def test_every_leap_tells_what_it_was_and_what_became_of_it(tmp_path):
    summary = train(tmp_path, max_steps=50).hybrid_summary()
    leaps = summary["leaps"]
    assert {leap["verdict"] for leap in leaps} >= {"unprobed", "kept"} and len(leaps) > 8
    for leap in leaps[:-1]:  # the last one may not have been judged
        probed = leap["verdict"] != "unprobed"
        assert leap["verdict"] in SEEN and leap["gain"] > 0 and 0 < leap["relative_norm"] <= 0.5 + 1e-6
        assert -1 <= leap["cosine"] <= 1 and leap["norm_ratio"] > 0
        assert leap["e_source"] == ("probe" if probed else "slopes") and isinstance(leap["e"], float)
        assert (leap["probe_cost_steps"] > 0) == probed == (leap["loss_after"] is not None)
    assert sum(leap["probe_cost_steps"] for leap in leaps) == pytest.approx(summary["probe_cost_steps"])
    judged = [leap for leap in leaps if leap["cosine"] is not None]
    groups = summary["displacement_residuals"]
    assert {"model.layers.*.mlp.up_proj.weight", "model.norm.weight"} <= groups.keys()
    assert all(group["leaps"] == len(judged) for group in groups.values())


def test_a_probed_leap_is_worth_its_fall_of_the_held_out_loss(tmp_path):
    leaps = train(tmp_path, max_steps=40, probe_budget=1.0).hybrid_summary()["leaps"]
    assert all((leap["e"] is None) == (leap["e_source"] is None) for leap in leaps)
    by_probe = [leap for leap in leaps if leap["e_source"] == "probe"]
    assert len(by_probe) > 2
    for leap in by_probe:
        slope = (leap["loss_before"] - leap["loss_after"]) / leap["e"]
        assert slope > 0, "in units of what a real step gained"


# Gains.


def test_a_planner_that_wants_no_leap_makes_none(tmp_path, monkeypatch):
    monkeypatch.setattr(GainPlanner, "gain", lambda self, progress: 0.0)
    without, plain = train(tmp_path), train(tmp_path, enable_predict=False)
    summary = without.hybrid_summary()
    assert summary["leaps"] == [] and summary["real_steps"] == 30
    assert_same_weights(weights(without.model), weights(plain.model))


# Resuming.


@pytest.mark.parametrize(
    "options",
    [
        {"planner": "bandit", "correct_gain": True},
        {"direction": "gradient_memory"},
        {"memory": "stream"},
    ],
    ids=["bandit and corrected gains", "gradient memory", "streamed"],
)
def test_a_run_resumes_bit_for_bit(options, tmp_path):
    options = {"max_steps": 48, "save_strategy": "steps", "save_steps": 19, **options}
    whole = train(tmp_path / "whole", **options)
    summary = whole.hybrid_summary()
    losses = [entry["loss"] for entry in whole.state.log_history if "loss" in entry]
    assert losses[-1] < losses[0] - 0.5 and len(summary["leaps"]) > 5
    for step in (19, 38):
        checkpoint = str(tmp_path / "whole" / f"checkpoint-{step}")
        resumed = train(tmp_path / "again", resume=checkpoint, **options)
        assert_same_weights(weights(resumed.model), weights(whole.model))
        for name in ("leaps", "displacement_residuals"):
            assert resumed.hybrid_summary()[name] == summary[name]


# Orthogonal leaps.


def trained(optimizer, names, gain=3.0):
    """A tiny model after six steps, and how each of the directions moves its weights from there."""
    model, moved, memories = tiny_model(), {}, {}
    for name in names:
        twin = deepcopy(model)
        matrices = split_parameters(twin)[0]
        trajectory = Trajectory(
            list(twin.named_parameters()),
            made := optimizer(twin.parameters(), lr=1e-3),
            direction=DIRECTIONS[name],
            matrices=matrices,
            memory_steps=10,
            max_relative_norm=10.0,
        )
        text = ByteText(48)
        for step in range(6):
            ids = torch.stack([text[i]["input_ids"] for i in range(8 * step, 8 * step + 8)])
            twin(input_ids=ids, labels=ids).loss.backward()
            trajectory.observe_gradients()
            made.step()
            trajectory.observe_step([1e-3])
            made.zero_grad()
        before = weights(twin)
        with trajectory.trial(Leap(6, real_steps=6)):
            trajectory.leap(gain)
            moved_to = weights(twin)
        moved[name] = {key: value - before[key] for key, value in moved_to.items()}
        memories[name] = dict(zip(trajectory.names, trajectory.direction.buffers["memory"]))
    return moved, memories, list(matrices), gain * 6e-3


def newton_schulz(matrix):
    """Muon's iteration (Jordan et al., 2024) in fp64."""
    matrix = matrix / matrix.norm()
    for _ in range(5):
        square = matrix @ matrix.T
        matrix = 3.4445 * matrix + (-4.7750 * square + 2.0315 * square @ square) @ matrix
    return matrix


def test_orthogonal_leaps_of_hidden_matrices_and_of_the_rest():
    moved, memories, matrices, way = trained(torch.optim.AdamW, ["orthogonal", "gradient_memory"])
    assert len(matrices) == 14 and way == pytest.approx(3.0 * 6e-3)
    for name, delta in moved["orthogonal"].items():
        if name not in matrices:
            assert torch.equal(delta, moved["gradient_memory"][name])
            continue
        root_mean_square = delta.square().mean().sqrt().item()
        assert root_mean_square == pytest.approx(0.2 * way, rel=0.3)
        expected = -0.2 * way * max(delta.shape) ** 0.5 * newton_schulz(memories["orthogonal"][name].double())
        assert (delta - expected).norm() < 0.03 * expected.norm()
        assert not torch.allclose(delta, moved["gradient_memory"][name], rtol=0.1)


def test_under_sgd_everything_leaps_along_the_gradient_memory():
    sgd = partial(torch.optim.SGD, momentum=0.9)
    moved, _, _, _ = trained(sgd, ["orthogonal", "gradient_memory"])
    assert_same_weights(moved["orthogonal"], moved["gradient_memory"])


@pytest.mark.parametrize("build", [tiny_model, lora])
def test_leaps_are_the_same_wherever_weights_and_buffers_are(build, tmp_path):
    resident = train(tmp_path, build())
    leaps = resident.hybrid_summary()["leaps"]
    assert len(leaps) > 3 and all(leap["relative_norm"] > 0 for leap in leaps)
    streamed, host = train(tmp_path, build(), memory="stream"), train(tmp_path, build(), buffers_device="cpu")
    assert streamed.hybrid_summary()["leaps"] == leaps
    assert_same_weights(weights(streamed.model), weights(resident.model))
    # Host buffers take in gradients one by one, with another rounding.
    assert [leap["verdict"] for leap in host.hybrid_summary()["leaps"]] == [leap["verdict"] for leap in leaps]
    expected = weights(resident.model)
    assert all(torch.allclose(weight, expected[name], atol=1e-4) for name, weight in weights(host.model).items())


def test_adapters_leap_and_their_base_stays(tmp_path):
    model = lora()
    before = weights(model)
    trained_model = train(tmp_path, model).model
    for name, weight in weights(trained_model).items():
        assert torch.equal(weight, before[name]) == ("lora_" not in name)
