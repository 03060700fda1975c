"""`hf_hybrid/experimental/dynamics.py`: it observes, imagines, calibrates itself, and resumes."""

import json
import math

import pytest
import torch
from safetensors.torch import load_file, save_file
from synthetic_runs import make_run, new_rssm

from hf_hybrid.experimental.dynamics import Calibration, DynamicsModel, LossHistory, log_loss, student_t_cdf
from hf_hybrid.experimental.rssm import HISTORY, OBSERVATION, RSSM, interpolated, power_law

pytestmark = pytest.mark.slow


def small(seed=0):
    return new_rssm(members=2, deterministic=32, hidden=32, seed=seed)


def dynamics(seed=0):
    return DynamicsModel(small(seed))


def follow(model, run, stretches, *, ahead=5):
    """Observe stretches of a run; after each, forecast what was really done next."""
    actions = torch.as_tensor(run.actions, dtype=torch.float32)
    for stretch in stretches:
        model.observe_stretch(run.features[stretch], run.actions[stretch], run.losses[stretch])
        future = actions[stretch + 1 : stretch + 1 + ahead]
        if len(future):
            model.forecast(future)
    return model


PLAIN = torch.tensor([[0.0, 0.0, 0.5, 1.0]]).repeat(5, 1)
LEAPS = PLAIN + torch.tensor([1.0, 0.1, 0.0, 0.0])


# Arithmetic.


def test_interpolation_is_straight_in_the_logarithm_of_the_horizon():
    values = interpolated(torch.tensor([0.0, 1.0, 3.0]), 25)
    assert values[[0, 4, 19, 24]].tolist() == [0.0, 1.0, 3.0, 3.0]
    assert values[9].item() == pytest.approx(2.0)  # 10 is halfway from 5 to 20


def test_student_t_agrees_with_torch():
    grid = torch.linspace(-200, 1.3, 400_001, dtype=torch.float64)
    integral = torch.trapezoid(torch.distributions.StudentT(5.0).log_prob(grid).exp(), grid)
    assert student_t_cdf(1.3) == pytest.approx(integral.item(), abs=1e-6)
    assert student_t_cdf(-1.3) == pytest.approx(1 - student_t_cdf(1.3))
    assert student_t_cdf(2.015) == pytest.approx(0.95, abs=1e-4)


def test_the_history_finds_a_power_law_and_extrapolates_it():
    losses = [5.0 * stretch**-0.3 for stretch in range(1, 61)]
    law = LossHistory()
    history = torch.tensor([law.observe(log_loss(loss)) for loss in losses[:40]])
    assert history.shape == (40, len(HISTORY)) and OBSERVATION == 64 + len(HISTORY)
    back, increments = power_law(history[-1:], 20)
    expected = torch.tensor(losses[40:]).log() - math.log(losses[39])
    torch.testing.assert_close((back + increments.cumsum(-1))[0], expected, atol=0.02, rtol=0)
    assert history[0].tolist()[:3] == [0.0, 0.0, 0.0]


def test_the_history_continues_after_saving():
    whole, first, second = LossHistory(), LossHistory(), LossHistory()
    values = [2.0, 1.7, 1.8, 1.5, 1.2]
    expected = [whole.observe(value) for value in values]
    got = [first.observe(value) for value in values[:3]]
    vars(second).update(vars(first))
    assert got + [second.observe(value) for value in values[3:]] == expected


# Observing.


def test_equal_runs_give_equal_models_and_leave_global_generators_alone():
    torch.manual_seed(0)
    before = torch.get_rng_state()
    first, second = (follow(dynamics(), make_run(0), range(12)) for _ in range(2))
    assert first.forecast(PLAIN) == second.forecast(PLAIN)
    assert len(first.history.log_losses) == len(second.history.log_losses) == 12
    assert torch.equal(torch.get_rng_state(), before)


def test_features_are_normalised_by_the_start_weights(tmp_path):
    run = make_run(0, stretches=100)
    started = small(seed=1)
    started.weights["feature_mean"].fill_(0.25)
    save_file(started.weights, tmp_path / "start.safetensors")
    model = follow(DynamicsModel(RSSM.load(tmp_path / "start.safetensors")), run, range(20))
    for name, ours in started.weights.items():
        assert torch.equal(ours, model.model.weights[name])


# Imagining.


def test_forecasts_combine_the_members_as_a_mixture():
    model = follow(dynamics(), make_run(0), range(10), ahead=0)
    head = model._imagine(PLAIN[None])
    forecast = model.forecast(PLAIN)
    mean, scale = head.mean[:, 0], head.log_scale[:, 0].exp()
    torch.testing.assert_close(torch.tensor(forecast.mean), mean.mean(0))
    samples = [torch.distributions.StudentT(5.0, mean[m, -1], scale[m, -1]) for m in range(2)]
    torch.manual_seed(0)
    drawn = torch.cat([distribution.sample((200_000,)) for distribution in samples])
    variance = torch.tensor(forecast.scale[-1] ** 2 * 5 / 3)
    torch.testing.assert_close(drawn.var(), variance, rtol=0.05, atol=0)
    # 1.4759 is the 90 % quantile of a Student-t of 5 degrees of freedom.
    assert student_t_cdf(1.4759) == pytest.approx(0.9, abs=1e-4) and student_t_cdf(0.0) == 0.5


def test_futures_are_compared_pair_by_pair():
    model = follow(dynamics(), make_run(0), range(25), ahead=0)
    with torch.no_grad():
        model.model.weights["loss_out.weight"][:, :, 1].normal_(generator=torch.Generator().manual_seed(0))
    mean, disagreement = model.compare(LEAPS, PLAIN)
    reverse, _ = model.compare(PLAIN, LEAPS)
    assert mean.shape == disagreement.shape == (5,) and mean.any()
    torch.testing.assert_close(mean, -reverse)
    many, _ = model.compare(torch.stack((LEAPS, PLAIN, 2 * LEAPS)), PLAIN)
    assert many.shape == (3, 5)
    torch.testing.assert_close(many[0], mean)
    assert not many[1].any()


def test_probability_better_follows_the_difference_and_its_doubt():
    model = follow(dynamics(), make_run(0), range(10), ahead=0)
    assert model.probability_better(LEAPS, PLAIN) == 0.5
    with torch.no_grad():
        model.model.weights["loss_out.bias"][:, 0, 1] = -0.5
    sure = model.probability_better(LEAPS, PLAIN)
    assert sure > 0.9 and model.probability_better(PLAIN, LEAPS) == pytest.approx(1 - sure)
    with torch.no_grad():
        model.model.weights["loss_out.bias"][:, 0, 1] = torch.tensor([-2.5, 1.5])
    assert 0.5 < model.probability_better(LEAPS, PLAIN) < sure
    assert model.probability_better(PLAIN, PLAIN) == 0.5


# Calibrating.


@pytest.mark.parametrize("heavy_tails", [False, True])
@pytest.mark.parametrize("wrong_by", [0.3, 4.0])
def test_scales_are_corrected_until_intervals_cover_what_they_say(heavy_tails, wrong_by):
    generator = torch.Generator().manual_seed(0)
    errors = torch.randn(3000, generator=generator)
    if heavy_tails:
        errors = errors / (torch.randn(3000, 5, generator=generator).square().mean(1)).sqrt()
    calibration, places = Calibration(), []
    for error in errors.tolist():
        places.append(student_t_cdf(error / (wrong_by * calibration.factor(5))))
        calibration.score(5, 0.02 * error, 0.02 * wrong_by)
    off = (torch.tensor(places[300:]) - 0.5).abs()
    assert off.le(0.25).float().mean().item() == pytest.approx(0.5, abs=0.05)
    assert off.le(0.45).float().mean().item() == pytest.approx(0.9, abs=0.03)


def test_intervals_of_runs_cover_what_they_say():
    runs = [make_run(seed, stretches=300, noise=0.05, leaps=False) for seed in (6, 7)]
    places = {1: [], 5: []}
    for run in runs:
        model, forecasts = dynamics(), []
        for stretch in range(300):
            follow(model, run, [stretch], ahead=0)
            if stretch < 299:
                future = torch.as_tensor(run.actions[stretch + 1 : stretch + 6], dtype=torch.float32)
                forecasts.append(model.forecast(future))
        for k, found in places.items():
            changes = [math.log(after / before) for before, after in zip(run.losses, run.losses[k:])]
            z = [(change - f.mean[k - 1]) / f.scale[k - 1] for f, change in zip(forecasts, changes)]
            found.extend([student_t_cdf(value) for value in z][-256:])
    for found in places.values():
        for probability in (0.5, 0.9):
            covered = sum(abs(place - 0.5) <= probability / 2 for place in found) / len(found)
            assert covered == pytest.approx(probability, abs=0.07)


def test_forecasts_meet_what_came_of_them():
    run = make_run(6)
    model, expected, kept = dynamics(), Calibration(), []
    for stretch in range(4):
        follow(model, run, [stretch], ahead=0)
        model.forecast(LEAPS)  # of several after one stretch the last counts
        forecast = model.forecast(PLAIN)
        kept.append((forecast.mean[0], forecast.scale[0] / model.calibration.factor(1)))
    follow(model, run, [4], ahead=0)
    for stretch, (mean, raw_scale) in enumerate(kept):
        change = math.log(run.losses[stretch + 1] / run.losses[stretch])
        expected.score(1, change - mean, raw_scale)
    assert model.calibration.factor(1) == pytest.approx(expected.factor(1)) != 1.0
    assert model.calibration.factor(5) == model.calibration.factor(20) == 1.0, "none of those stretches has come"


# Saving.


def test_a_resumed_run_continues_bit_for_bit(tmp_path):
    run = make_run(7)
    whole = follow(dynamics(), run, range(13))
    state = whole.state_dict()
    save_file(state.pop("tensors"), tmp_path / "state.safetensors")
    resumed = dynamics()
    state = json.loads(json.dumps(state))
    resumed.load_state_dict({**state, "tensors": load_file(tmp_path / "state.safetensors")})
    for model in (whole, resumed):
        follow(model, run, range(13, 31))
    ours, theirs = whole.state_dict(), resumed.state_dict()
    tensors = ours.pop("tensors"), theirs.pop("tensors")
    assert ours == theirs and tensors[0].keys() == tensors[1].keys()
    for name, tensor in tensors[0].items():
        assert torch.equal(tensor, tensors[1][name]), name
    assert whole.forecast(PLAIN) == resumed.forecast(PLAIN)


def test_a_state_before_the_first_stretch_can_be_saved():
    model, other = dynamics(), dynamics()
    other.load_state_dict(model.state_dict())
    run = make_run(0)
    assert follow(model, run, range(8)).forecast(PLAIN) == follow(other, run, range(8)).forecast(PLAIN)
