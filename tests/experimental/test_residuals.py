"""`hf_hybrid/experimental/residuals.py`: what real steps after a leap say of it, by kind of parameter."""

import json
from copy import deepcopy

import pytest
import torch
from conftest import ByteText, hybrid_config, tiny_model

from hf_hybrid import HybridTrainer
from hf_hybrid.experimental.residuals import LeapResiduals, group_of, secant_minimum
from hf_hybrid.run.weights import TrainedWeights

pytestmark = pytest.mark.slow


def test_groups_are_kinds_of_parameters():
    assert group_of("model.layers.11.mlp.up_proj.weight") == "model.layers.*.mlp.up_proj.weight"
    assert group_of("model.layers.1.experts.3.w1.weight") == "model.layers.*.experts.*.w1.weight"
    assert group_of("lm_head.weight") == "lm_head.weight"


def parameters(*sizes, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.nn.Parameter(torch.randn(size, generator=generator)) for size in sizes]


def comparison(names, params):
    residuals = LeapResiduals()
    residuals.watch(TrainedWeights(zip(names, params), torch.optim.SGD(params, lr=1.0)))
    return residuals


def watch(params, names, leap, steps, gradients, rate=0.1, leap_rate=0.2):
    """One leap and the real steps after it; `leap`, `steps` and `gradients` hold a tensor per parameter."""
    residuals = comparison(names, params)
    before = [p.detach().clone() for p in params]
    with torch.no_grad():
        for p, d in zip(params, leap):
            p.add_(d)
    residuals.leap_made(leap_rate, before, [None] * len(params))
    for p, g in zip(params, gradients):
        p.grad = g
    residuals.observe_gradients()
    with torch.no_grad():
        for p, d in zip(params, steps):
            p.add_(d)
    return residuals.judge(rate)[1]


def test_cosine_and_norm_ratio_are_those_of_the_whole_displacement():
    params, names = parameters(30, 50), ["layers.0.w", "layers.1.w"]
    leap = [torch.randn(30), torch.randn(50)]
    steps = [0.5 * leap[0] + 0.2 * torch.randn(30), 0.5 * leap[1] + 0.2 * torch.randn(50)]
    whole, done = torch.cat(leap), torch.cat(steps)
    found = watch(params, names, leap, steps, [torch.zeros(30), torch.zeros(50)])["layers.*.w"]
    assert found.cosine == pytest.approx(float(torch.cosine_similarity(whole, done, dim=0)), abs=1e-4)
    # Per unit of learning rate: steps at 0.1 moved as far as they would at 0.2 with half the length.
    assert found.norm_ratio == pytest.approx(float(done.norm() / 0.1 / (whole.norm() / 0.2)), rel=1e-3)


def test_large_parameters_are_estimated_well():
    params = parameters(400_000)
    leap = [torch.randn(400_000)]
    steps = [0.3 * leap[0] + torch.randn(400_000)]
    found = watch(params, ["w"], leap, steps, [leap[0] * 2.0])["w"]
    assert found.cosine == pytest.approx(float(torch.cosine_similarity(leap[0], steps[0], dim=0)), abs=0.05)
    assert found.slope_after == pytest.approx(2.0 * float(leap[0].square().sum()), rel=0.1)


def parabola(leap, start=-1.0):
    """Loss w^2 / 2 from `start`, where the gradient is w, with a leap of `leap`; the whole residual."""
    params = [torch.nn.Parameter(torch.tensor([start]))]
    residuals = comparison(["w"], params)
    before = [params[0].detach().clone()]
    with torch.no_grad():
        params[0].add_(leap)
    residuals.leap_made(1.0, before, [torch.tensor([start])])
    params[0].grad = params[0].detach().clone()
    residuals.observe_gradients()
    with torch.no_grad():
        params[0].add_(-0.1)
    return residuals.judge(1.0)


def test_slopes_tell_where_the_minimum_is():
    whole, groups = parabola(1.6)
    assert groups == {"w": whole} and whole.cosine == pytest.approx(-1.0)
    assert secant_minimum(whole.slope_before, whole.slope_after) == pytest.approx(1 / 1.6)


def test_slopes_that_do_not_turn_have_no_minimum():
    assert secant_minimum(-1.0, -2.0) is None and secant_minimum(1.0, 2.0) is None
    assert secant_minimum(-1.0, -0.5) == pytest.approx(2.0)


def test_gains_follow_the_leaps_that_went_too_far_or_not_far_enough():
    assert LeapResiduals().factor("w") == 1.0
    for leap, least, most in ((1.25, 0.75, 0.85), (8.0, 0.5, 0.5), (0.8, 1.0, 1.5)):
        correction = comparison(["w"], parameters(1))
        for _ in range(5):
            correction.learn(parabola(leap)[1])
        assert least <= correction.factor("w") <= most, leap
    other = comparison(["w"], parameters(1))
    other.load_state_dict(json.loads(json.dumps(correction.state_dict())))
    assert other.factor("w") == correction.factor("w")


def test_gradients_that_are_written_over_later_were_taken_in():
    params = parameters(6)
    residuals = comparison(["w"], params)
    residuals.leap_made(1.0, [p.detach() - 1 for p in params], [None])
    params[0].grad = torch.ones(6)
    residuals.observe_gradients()
    params[0].grad.zero_()
    with torch.no_grad():
        params[0].add_(1.0)
    assert residuals.judge(1.0)[0].slope_after == pytest.approx(6.0)


def test_nothing_is_told_without_a_real_step():
    params = parameters(4)
    residuals = comparison(["w"], params)
    assert residuals.judge(0.1) == (None, {})
    residuals.leap_made(0.1, [p.detach() - 1 for p in params], [None])
    assert residuals.judge(0.1) == (None, {}) and not residuals.start


def test_it_goes_on_where_it_was_saved():
    params, names = parameters(10, 20), ["a", "b"]
    first = comparison(names, params)
    first.leap_made(0.3, [p.detach() - 1 for p in params], [torch.randn_like(p) for p in params])
    for p in params:
        p.grad = torch.full_like(p, 2.0)
    first.observe_gradients()
    second = comparison(names, params)
    second.load_state_dict(deepcopy(first.state_dict()))
    with torch.no_grad():
        for p in params:
            p.add_(-0.1 * p)
    for residuals in (first, second):
        residuals.observe_gradients()
    assert first.judge(0.2) == second.judge(0.2)


def test_a_run_without_leaps_has_nothing_to_compare(tmp_path):
    config = hybrid_config(tmp_path, max_steps=2, enable_predict=False, save_strategy="steps", save_steps=1)
    trainer = HybridTrainer(tiny_model(), config, train_dataset=ByteText(20), parts=[LeapResiduals(correct_gain=True)])
    trainer.train()
    assert trainer.hybrid_summary()["displacement_residuals"] == {}
