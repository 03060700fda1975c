"""The rescue on made-up signals whose answer is known, and in real runs."""

import json
import math
import random

import pytest
from conftest import ByteText, config_values, tiny_model

from hf_hybrid import HybridConfig, HybridTrainer
from hf_hybrid.leaps.rescue import LearningRateRescue


def play(rescue, steps, *, edge, amplitude=0.15, noise=0.02, seed=0, loss=lambda t: 5.0 - 0.001 * t):
    """Cosine falls through zero where the log scale reaches `edge`; returns the scales on the way."""
    rng, scales = random.Random(seed), []
    for t in range(steps):
        cosine = amplitude * math.tanh(edge - rescue.log_scale) + rng.gauss(0, noise)
        rescue.observe(loss(t) + rng.gauss(0, 0.1), cosine if t else None)
        scales.append(rescue.scale)
    return scales


@pytest.mark.parametrize("steps", [50, 150, 300, 1000])
@pytest.mark.parametrize("edge", [2.0, 4.0])
def test_finds_a_scale_near_the_edge(steps, edge):
    for seed in range(5):
        scales = play(LearningRateRescue(max_steps=steps, max_scale=512), steps, edge=edge, seed=seed)
        assert edge - 1.6 < math.log(scales[-1]) < edge + 0.7


@pytest.mark.parametrize("steps", [50, 300, 3000])
def test_leaves_a_good_rate_alone(steps):
    """At the edge, and beyond it, the cosine of the first steps is not clear: nothing ever moves far."""
    for seed in range(5):
        for edge in (0.0, -1.0):
            rescue = LearningRateRescue(max_steps=steps, max_scale=512)
            assert max(play(rescue, steps, edge=edge, seed=seed)) < 2.5


def test_pure_noise_ends_at_one():
    ends = [
        play(LearningRateRescue(max_steps=300, max_scale=512), 300, edge=0, amplitude=0, noise=0.1, seed=seed)[-1]
        for seed in range(20)
    ]
    assert sorted(ends)[17] < 1.5


def test_is_bounded():
    rescue = LearningRateRescue(max_steps=300, max_scale=8)
    assert max(play(rescue, 300, edge=10)) <= 8.0 + 1e-9


def test_instability_lowers_the_scale():
    rescue = LearningRateRescue(max_steps=300, max_scale=512)
    before = play(rescue, 120, edge=4.0)[-1]
    after = play(rescue, 10, edge=4.0, loss=lambda t: 8.0)[-1]
    assert after < before


def test_back_off_is_a_quarter_at_most():
    rescue = LearningRateRescue(max_steps=300, max_scale=512)
    before = play(rescue, 120, edge=4.0)[-1]
    rescue.back_off()
    assert rescue.scale <= before / 4


def test_state_survives_json():
    a = LearningRateRescue(max_steps=100, max_scale=512)
    play(a, 20, edge=4.0)
    b = LearningRateRescue(max_steps=100, max_scale=512)
    b.load_state_dict(json.loads(json.dumps(a.state_dict())))
    assert play(a, 60, edge=4.0, seed=3) == play(b, 60, edge=4.0, seed=3)


def run(tmp_path, **overrides):
    args = HybridConfig(**config_values(tmp_path, max_steps=80, **overrides))
    trainer = HybridTrainer(tiny_model(), args, train_dataset=ByteText(800), eval_dataset=ByteText(64, offset=900))
    trainer.train()
    return trainer, trainer.evaluate()["eval_loss"]


def test_the_default_learning_rate_is_rescued(tmp_path):
    rescued, loss = run(tmp_path / "a", learning_rate=5e-5)
    _, left = run(tmp_path / "b", learning_rate=5e-5, lr_rescue="off")
    summary = rescued.hybrid_summary()
    assert summary["learning_rate_scale"] > 5
    assert summary["learning_rate_scales"][0]["scale"] < summary["learning_rate_scale"]
    assert loss < left - 0.5
    # The rate that is logged is the one that was used.
    entry = [e for e in rescued.state.log_history if "learning_rate" in e][60]
    assert entry["learning_rate"] == pytest.approx(5e-5 * (1 - 60 / 80) * entry["hybrid/learning_rate_scale"], rel=0.1)


def test_the_scheduler_never_sees_the_scale(tmp_path):
    trainer, _ = run(tmp_path, learning_rate=5e-5, lr_scheduler_type="cosine")
    assert trainer.lr_scheduler.base_lrs == [5e-5, 5e-5]
    assert all(group["lr"] <= 5e-5 for group in trainer.optimizer.param_groups)
