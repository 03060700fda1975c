"""Learning from recorded runs: what is in a batch, what is fitted and calibrated, and what the model has learned."""

import copy
import math
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hf_hybrid.world_model.dynamics import student_t_cdf
from hf_hybrid.world_model.rssm import FEATURES, RSSM, State

from benchmarks.world_model import train
from benchmarks.world_model.learning import history_of, new_rssm, parameters
from benchmarks.world_model.records import (
    TOLERANCE,
    Record,
    calibrate,
    forecast_errors,
    make_batch,
    paired_rssm_loss,
    platt_scaled,
    save_weights,
    score_records,
    sequences_of,
    student_t_quantile,
    train_on_records,
)
from benchmarks.world_model.storage import load_records

TESTS = Path(__file__).resolve().parents[2] / "tests"
sys.path[:0] = [str(TESTS), str(TESTS / "world_model")]

from rig.synthetic_runs import SIGNAL, make_run  # noqa: E402
from test_rssm import SMALL, an_observation, generator  # noqa: E402


@pytest.fixture(scope="module")
def trained():
    model = new_rssm(**SMALL)
    runs = [make_run(seed, stretches=20) for seed in range(128)]
    train_on_records(model, runs, epochs=10, learning_rate=1e-2, starts=4, horizon=5)
    return model


def test_weights_round_trip(tmp_path):
    model = new_rssm(**SMALL)
    model.weights["feature_mean"].fill_(0.5)
    save_weights(model, tmp_path / "start.safetensors")
    other = RSSM.load(tmp_path / "start.safetensors")
    for name, ours in model.weights.items():
        assert torch.equal(ours, other.weights[name])


def test_quantiles_invert_the_distribution_function():
    assert student_t_quantile(0.95) == pytest.approx(2.015, abs=1e-3)
    assert student_t_cdf(student_t_quantile(0.3)) == pytest.approx(0.3)
    with pytest.raises(ValueError, match="`probability`"):
        student_t_quantile(1.0)


def test_gradient_reaches_every_parameter():
    model = new_rssm(**SMALL)
    sequences = [sequences_of(make_run(seed))[0] for seed in range(2)]
    shares = torch.linspace(0, 1, 3).repeat(len(sequences), 1)
    batch = make_batch(sequences, torch.ones(model.members, len(sequences)), 5, shares)
    trained = parameters(model)
    paired_rssm_loss(model, batch, generator())["total"].backward()
    for name, parameter in trained.items():
        assert parameter.grad is not None and parameter.grad.flatten(1).abs().sum(1).gt(0).all(), name


def test_branches_with_features_are_sequences_of_their_own():
    run = make_run(0, stretches=20, branches=1)
    branch = run.branches[0]
    other = type(branch.other)(branch.other.actions, branch.other.losses, run.features[branch.start :])
    record = Record(run.features, run.actions, run.losses, [type(branch)(branch.start, branch.base, other)])
    whole, continued = sequences_of(record)
    assert torch.equal(whole.actions[: branch.start], continued.actions[: branch.start])
    expected = torch.as_tensor(branch.other.losses).log().float()
    torch.testing.assert_close(continued.log_losses[branch.start :], expected)
    assert whole.pairs[0][0] == branch.start - 1 and not continued.pairs


def test_training_is_reproducible():
    results = []
    for _ in range(2):
        model, told = new_rssm(**SMALL), []
        train_on_records(
            model, [make_run(s, stretches=10) for s in range(4)], epochs=2, horizon=3, progress=told.append
        )
        results.append((told, [p.detach().clone() for p in model.weights.values()]))
    assert results[0][0] == results[1][0] and [entry["epoch"] for entry in results[0][0]] == [1, 2]
    assert all(torch.equal(a, b) for a, b in zip(results[0][1], results[1][1]))


def test_nothing_to_learn_from_is_an_error():
    with pytest.raises(ValueError, match="`records`"):
        train_on_records(new_rssm(**SMALL), [Record(torch.zeros(1, 64), torch.zeros(1, 4), torch.ones(1))])


def test_the_linear_part_is_a_regression_on_what_is_known():
    model, runs = new_rssm(**SMALL), []
    with torch.no_grad():  # nothing else to say than half the power law
        for name in ("loss_out", "start_out"):
            model.weights[f"{name}.weight"].zero_()
    rng = np.random.default_rng(0)
    for seed in range(40):
        run = make_run(seed, stretches=16, branches=0, leaps=False, noise=0.0)
        features = run.features.copy()
        features[:, 7] = rng.standard_normal(16)
        steps = np.concatenate(([0.0], 0.05 * features[:-1, 7] - 0.1))  # what feature 7 says comes next
        runs.append(Record(features, run.actions, np.exp(np.cumsum(steps))))
    train_on_records(model, runs[:32], epochs=0, horizon=5)
    assert model.weights["linear"].any() and not model.weights["linear"][..., 15:].any()  # no run is that long
    scores = score_records(model, runs[32:], horizon=5)
    assert scores["error_1"] < 0.15 * scores["law_1"] and scores["error_5"] < scores["law_5"]
    many = model.forecast(State(*(part for part in model.initial(1))), an_observation(), torch.ones(1, 30, 4)).mean
    assert many.shape == (2, 1, 30) and many.isfinite().all()


def test_the_epoch_is_kept_that_forecasts_other_runs_best():
    runs, others = [make_run(seed, stretches=12) for seed in range(6)], [make_run(50, stretches=12)]
    seen, states = [], []
    model = new_rssm(**SMALL)

    def progress(values):
        seen.append(values["validation"] + values["validation_paired"])
        states.append({name: value.detach().clone() for name, value in model.weights.items()})

    options = {"epochs": 4, "horizon": 3, "starts": 2, "learning_rate": 0.05, "corruption": 0.2}
    train_on_records(model, runs, validation=others, progress=progress, **options)
    best = states[seen.index(min(seen))]
    kept = {name: value for name, value in model.weights.items() if name not in ("scale_shift", "confidence_map")}
    assert all(torch.equal(value, best[name]) for name, value in kept.items())


@pytest.mark.parametrize("wrong_by", [-0.5, 0.8])
def test_scales_are_calibrated_on_runs_that_were_not_learned(trained, wrong_by):
    model = copy.deepcopy(trained)
    runs = [make_run(100 + seed, stretches=20, leaps=False) for seed in range(12)]
    calibrate(model, [forecast_errors(model, runs)])
    right = model.weights["scale_shift"].clone()
    with torch.no_grad():
        model.weights["loss_out.bias"][:, 0, 2:] += wrong_by
    calibrate(model, [forecast_errors(model, runs)])
    torch.testing.assert_close(model.weights["scale_shift"][:2], right[:2] - wrong_by, atol=0.06, rtol=0)


def test_the_confidence_is_mapped_to_how_often_it_was_right():
    model, count, rng = new_rssm(**SMALL), 4000, np.random.default_rng(0)
    mean = torch.tensor(rng.uniform(-0.1, 0.1, (count, 20)), dtype=torch.float32)
    error = torch.tensor(-0.02 + 0.02 * rng.standard_t(5, (count, 20)), dtype=torch.float32)  # losses fall further
    ones = torch.ones(count, 20)
    table = {"mean": mean, "error": error, "log_scale": math.log(0.02) * ones, "spread": 0 * ones, "valid": ones}
    calibrate(model, [table])
    scale = 0.02 * model.weights["scale_shift"][1].exp().item()
    below = [student_t_cdf((math.log1p(TOLERANCE) - value) / scale) for value in mean[:, 4].tolist()]
    mapped = torch.tensor([platt_scaled(p, *model.weights["confidence_map"].tolist()) for p in below])
    happened = ((mean + error)[:, 4] <= math.log1p(TOLERANCE)).float()
    for low, high in ((0.1, 0.4), (0.4, 0.7), (0.7, 0.95)):
        inside = (mapped > low) & (mapped < high)
        assert happened[inside].mean().item() == pytest.approx(mapped[inside].mean().item(), abs=0.07)
    assert happened.mean().item() == pytest.approx(mapped.mean().item(), abs=0.01)
    assert abs(torch.tensor(below).mean() - happened.mean()) > 0.05


def test_training_goes_on_where_it_was_stopped(tmp_path, monkeypatch):
    runs = [SimpleNamespace(**make_run(seed, stretches=20)._asdict(), settings={"index": seed}) for seed in range(6)]
    monkeypatch.setattr(train, "new_rssm", lambda seed: new_rssm(**SMALL, seed=seed))
    monkeypatch.setitem(train.SETTINGS, "epochs", 1)
    calls = []

    def stopped_at(*which):
        def train_or_stop(*args, **options):
            calls.append(args)
            if len(calls) in which:
                raise KeyboardInterrupt
            train_on_records(*args, **options)

        return train_or_stop

    monkeypatch.setattr(train, "train_on_records", stopped_at(2))
    with pytest.raises(KeyboardInterrupt):
        train.cross_validate(runs, tmp_path)
    resumed = train.cross_validate(runs, tmp_path)
    assert len(calls) == 2 + train.FOLDS - 1
    (tmp_path / "whole").mkdir()
    whole = train.cross_validate(runs, tmp_path / "whole")
    assert resumed[0] == whole[0] and resumed[2] == whole[2]
    for ours, theirs in zip(resumed[1], whole[1]):
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    monkeypatch.setitem(train.SETTINGS, "seed", 1)  # other settings: nothing that is there counts
    train.cross_validate(runs, tmp_path)
    assert len(calls) == 1 + 3 * train.FOLDS


# What it has learned.


def test_forecasts_beat_persistence_and_the_power_law_on_new_runs(trained):
    scores = score_records(trained, [make_run(1000 + seed, stretches=20) for seed in range(16)], horizon=5)
    for k in (1, 5):
        assert scores[f"nll_{k}"] < scores[f"persistence_nll_{k}"] - 0.3
        assert scores[f"nll_{k}"] < scores[f"law_nll_{k}"] - 0.2
        assert scores[f"error_{k}"] < scores[f"persistence_{k}"]


def test_it_learns_from_branches_when_leaps_help_and_when_they_hurt(trained):
    scores = score_records(trained, [make_run(2000 + seed, stretches=20) for seed in range(16)], horizon=5)
    assert scores["pairs"] == 48 and scores["sign_5"] > 0.85 and scores["correlation_5"] > 0.7
    run, imagined = make_run(4000, stretches=12), []
    plain = torch.tensor([[[0.0, 0.0, 0.9, 1.0]]]).repeat(1, 5, 1)
    for sign in (1.0, -1.0):
        run.features[:, SIGNAL] = sign
        seen = sequences_of(Record(run.features, run.actions, run.losses))[0]
        state = trained.initial(1)
        with torch.no_grad():
            for stretch in range(10):
                state = trained.observe(state, seen.observations[stretch, None], seen.actions[stretch, None])
            leaps = plain + torch.tensor([1.0, 0.0, 0.0, 0.0])
            means = [trained.forecast(state, seen.observations[9, None], a).mean.mean(0) for a in (leaps, plain)]
        imagined.append((means[0] - means[1])[0, -1].item())
    assert imagined[0] < 0 < imagined[1]


def test_members_disagree_more_far_from_what_they_learned(trained):
    run = make_run(3000, stretches=20)
    near = torch.cat((torch.as_tensor(run.features, dtype=torch.float32), history_of(run.losses)), -1)[5:]
    far = near.clone()
    far[:, :FEATURES] = 5 * torch.randn(far[:, :FEATURES].shape, generator=generator()).sign()
    actions = torch.as_tensor(run.actions, dtype=torch.float32)[5:]
    disagreements = []
    for observations in (near, far):
        with torch.no_grad():
            state = trained.observe(trained.initial(len(near)), observations, actions)
            future = actions[:, None].repeat(1, 5, 1)
            disagreements.append(trained.forecast(state, observations, future).mean.std(0).mean())
    assert disagreements[1] > 2 * disagreements[0]


def test_without_recordings_the_error_says_how_to_make_them(tmp_path):
    with pytest.raises(FileNotFoundError, match="benchmarks.world_model.record`"):
        load_records(tmp_path)
