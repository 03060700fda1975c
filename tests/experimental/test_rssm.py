"""`hf_hybrid/experimental/rssm.py`: the model, its ensemble, and its start weights."""

import math

import pytest
import torch
from safetensors.torch import save_file
from synthetic_runs import new_rssm

from hf_hybrid.experimental.rssm import FEATURES, RSSM, UNIFORM, State

pytestmark = pytest.mark.slow

SMALL = {"members": 2, "deterministic": 32, "hidden": 32}


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def an_observation(count=1, seed=0):
    features = torch.randn(count, FEATURES, generator=generator(seed))
    return torch.cat((features, torch.tensor([[-0.01, 0.005, 0.2, 10.0, 0.01]]).repeat(count, 1)), -1)


def test_standard_size():
    model = new_rssm()
    assert sum(weight.numel() for weight in model.weights.values()) / model.members < 400_000
    assert (model.members, model.deterministic) == (3, 256)
    state = model.observe(model.initial(5), an_observation(5), torch.zeros(5, 4))
    assert state.deterministic.shape == (3, 5, 256) and state.stochastic.shape == (3, 5, 32)
    imagined = model.imagine(state, torch.zeros(5, 7, 4))
    assert imagined.deterministic.shape == (3, 5, 7, 256) and imagined.stochastic.shape == (3, 5, 7, 32)
    head = model.forecast(state, an_observation(5), torch.zeros(5, 7, 4))
    assert head.mean.shape == head.log_scale.shape == (3, 5, 7)


def test_a_map_is_one_linear_map_per_member():
    model = new_rssm(**SMALL)
    weight, bias = model.weights["prior_out.weight"], model.weights["prior_out.bias"]
    bias.normal_(generator=generator(1))
    x = torch.randn(2, 4, 32, generator=generator(2))
    expected = [torch.nn.functional.linear(x[m], weight[m].T, bias[m, 0]) for m in range(2)]
    torch.testing.assert_close(model.project("prior_out", x), torch.stack(expected))


def test_a_stretch_is_a_gated_recurrent_unit_step():
    model = new_rssm(**SMALL)
    state = State(torch.randn(2, 1, 32, generator=generator()), torch.rand(2, 1, 32, generator=generator(1)))
    action = torch.tensor([[2.0, 0.5, 0.3, 0.9]])
    inputs = torch.tensor([math.asinh(2.0), math.asinh(0.5), 0.3, 0.9])
    with torch.no_grad():
        got = model.imagine(state, action[:, None]).deterministic[:, 0, 0]
        for member in range(2):
            old = state.deterministic[member, 0]
            gates = torch.cat((old, state.stochastic[member, 0])) @ model.weights["gates.weight"][member]
            gates = gates + inputs @ model.weights["gates_action.weight"][member]
            gates = gates + model.weights["gates_action.bias"][member, 0]
            reset, update, candidate = gates.view(3, 32)
            update = torch.sigmoid(update - 1)
            expected = update * torch.tanh(torch.sigmoid(reset) * candidate) + (1 - update) * old
            torch.testing.assert_close(got[member], expected)


def test_prior_and_posterior_are_distributions_without_dead_classes():
    model = new_rssm(**SMALL)
    hidden = 10 * torch.randn(2, 6, 32, generator=generator())
    for probabilities in (model.prior(hidden), model.posterior(hidden, model.embed(100 * an_observation(6)))):
        assert probabilities.shape == (2, 6, 4, 8)
        torch.testing.assert_close(probabilities.sum(-1), torch.ones(2, 6, 4))
        assert probabilities.min() >= UNIFORM / 8 * 0.999


def test_imagination_is_deterministic_and_leaves_global_generators_alone():
    torch.manual_seed(0)
    before = torch.get_rng_state()
    model = new_rssm(**SMALL)
    actions = torch.rand(1, 6, 4, generator=generator())
    state = model.observe(model.initial(1), an_observation(), torch.zeros(1, 4))
    first, second = model.imagine(state, actions), model.imagine(state, actions)
    assert torch.equal(first.stochastic, second.stochastic)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_leap_of_which_nothing_is_known_is_worth_nothing():
    model = new_rssm(**SMALL)
    plain = torch.tensor([[[0.0, 0.0, 0.5, 1.0]]]).repeat(1, 8, 1)
    leaps = plain + torch.tensor([3.0, 0.4, 0.0, 0.0])
    state = model.observe(model.initial(1), an_observation(), plain[:, 0])
    heads = [model.forecast(state, an_observation(), actions) for actions in (plain, leaps)]
    assert torch.equal(heads[0].mean, heads[1].mean) and torch.equal(heads[0].log_scale, heads[1].log_scale)


def test_members_are_different_and_independent():
    model = new_rssm(**SMALL)
    actions = torch.rand(1, 6, 4, generator=generator())
    before = model.forecast(model.initial(1), an_observation(), actions).mean
    assert not torch.allclose(before[0], before[1])
    for weight in model.weights.values():
        if weight.shape[0] == 2:
            weight[1] += 1.0
    after = model.forecast(model.initial(1), an_observation(), actions).mean
    assert torch.equal(before[0], after[0]) and not torch.equal(before[1], after[1])


def test_uncertainty_grows_with_the_horizon():
    model = new_rssm(**SMALL)
    head = model.forecast(model.initial(1), an_observation(), torch.zeros(1, 20, 4))
    assert (head.log_scale[..., -1] > head.log_scale[..., 0]).all()


def test_start_weights_are_read(tmp_path):
    model = new_rssm(**SMALL)
    model.weights["feature_mean"].fill_(0.5)
    save_file({name: tensor.half() for name, tensor in model.weights.items()}, tmp_path / "half.safetensors")
    other = RSSM.load(tmp_path / "half.safetensors")
    assert other.weights.keys() == model.weights.keys()
    for name, ours in model.weights.items():
        theirs = other.weights[name]
        assert theirs.dtype == torch.float32
        torch.testing.assert_close(theirs, ours, rtol=1e-3, atol=1e-6)


def test_the_error_of_a_difference_grows_with_what_is_done_differently():
    model = new_rssm(**SMALL)
    plain = torch.zeros(1, 4, 4)
    little, much = plain.clone(), plain.clone()
    little[..., 0], much[..., 0] = 0.5, 5.0
    nothing, some, most = (model.pair_log_scale(first, plain) for first in (plain, little, much))
    assert (nothing < some).all() and (some < most).all() and (some.diff(dim=-1) > 0).all()
    torch.testing.assert_close(model.pair_log_scale(plain, much), most)
