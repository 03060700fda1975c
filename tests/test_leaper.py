"""Leaps from the plan to the verdict: what is written down of each, what changes them, and that they are resumed."""

from copy import deepcopy
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from conftest import ByteText, assert_same_weights, hybrid_config, tiny_model, weights
from peft import LoraConfig, get_peft_model

from hf_hybrid import HybridTrainer
from hf_hybrid.leaps.directions import DIRECTIONS, GradientMemory
from hf_hybrid.leaps.divergence import DivergenceMonitor
from hf_hybrid.leaps.gains import FixedGain, GainPlanner
from hf_hybrid.leaps.leaper import Leaper
from hf_hybrid.leaps.leaps import LeapPlanner
from hf_hybrid.leaps.record import RunRecord
from hf_hybrid.leaps.trajectory import Trajectory
from hf_hybrid.optimizers import split_parameters
from hf_hybrid.phases import Phase, PhaseController, PhaseLengths

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


class Valleys:
    """Two layers of one kind on steep slopes, where leaps go too far, and a plane on which they never do."""

    STEEPNESS, RATE = 6.0, 0.05

    def __init__(self, correct_gain):
        shapes = {"layers.0.steep.weight": 3, "layers.1.steep.weight": 4, "plane.weight": 5}
        self.named = [(name, torch.nn.Parameter(torch.ones(size))) for name, size in shapes.items()]
        optimizer = torch.optim.SGD([p for _, p in self.named], lr=self.RATE)
        self.trajectory = Trajectory(
            self.named, optimizer, direction=GradientMemory, memory_steps=2, max_relative_norm=100.0
        )
        self.controller = PhaseController(PhaseLengths(1, 2, 2, 1), confidence_threshold=0.0)
        planner = LeapPlanner(
            FixedGain(3.0, 0.0, 0.0), probe_budget=0.0, max_steps=1000, z=2.0, margin=1.0, extend=False
        )
        self.leaper = Leaper(
            trajectory=self.trajectory,
            planner=planner,
            probe=None,
            monitor=DivergenceMonitor(1e9, 1e9, 10),
            controller=self.controller,
            record=RunRecord(),
            max_steps=1000,
            budget=1.0,
            correct_gain=correct_gain,
        )

    def real_step(self):
        for name, parameter in self.named:
            bend = self.STEEPNESS if "steep" in name else 0.0
            parameter.grad = bend * parameter.detach() if bend else torch.ones_like(parameter)
        self.leaper.observe_gradients()
        self.trajectory.observe_gradients()
        self.trajectory.optimizer.step()
        self.trajectory.observe_step([self.RATE])

    def leap(self, step):
        """A leap after two real steps, judged by two more; how far parameters went. All start from the same place."""
        self.trajectory.reset_memory()
        for _, parameter in self.named:
            parameter.data.fill_(1.0)
        self.real_step(), self.real_step()
        self.controller.phase, self.controller.leap_pending = Phase.PREDICT, True
        before = weights(SimpleNamespace(named_parameters=lambda: self.named))
        self.leaper.leap(step, [0.0] * 64)
        moved = {name: (parameter.detach() - before[name]).mean().item() for name, parameter in self.named}
        self.real_step(), self.real_step()
        self.leaper.open.losses.append(1.0)
        self.leaper.settle()
        return moved

    def factors(self):
        return dict(zip(self.trajectory.names, self.trajectory.gain_factors))


def test_gains_are_corrected_where_leaps_go_too_far_and_nowhere_else():
    corrected, plain = Valleys(correct_gain=True), Valleys(correct_gain=False)
    first = corrected.leap(10)
    assert first == plain.leap(10), "nothing is known at the first leap"
    for step in (20, 30, 40):
        after, without = corrected.leap(step), plain.leap(step)
    factors = corrected.factors()
    assert 0.5 <= factors["layers.0.steep.weight"] == factors["layers.1.steep.weight"] < 0.9
    assert factors["plane.weight"] >= 1.0
    for name, factor in factors.items():
        assert after[name] == pytest.approx(factor * without[name], rel=1e-5)
    assert plain.trajectory.gain_factors is None


# Tail average.


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
        trajectory.leap(gain)
        moved[name] = {key: value - before[key] for key, value in weights(twin).items()}
        memories[name] = dict(zip(trajectory.names, trajectory.direction.buffers["memory"]))
    return moved, memories, list(matrices), gain * trajectory.lr_sum


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
