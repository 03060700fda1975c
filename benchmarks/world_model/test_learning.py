"""`learning.py`: padding changes nothing, weights of members count, free nats are free."""

import math
import sys
from pathlib import Path

import torch

from benchmarks.world_model import learning
from benchmarks.world_model.learning import (
    FREE_NATS,
    StretchBatch,
    history_of,
    kl_loss,
    new_rssm,
    parameters,
    rssm_loss,
    student_t_nll,
)

TESTS = Path(__file__).resolve().parents[2] / "tests"
sys.path[:0] = [str(TESTS), str(TESTS / "world_model")]

from rig.synthetic_runs import make_run  # noqa: E402
from test_rssm import SMALL, generator  # noqa: E402


def batch_of(model, runs, horizon=5, starts=3):
    """Whole runs, padded to the longest; the loss is imagined from some stretches of each."""
    lengths = [len(run.losses) for run in runs]
    parts = {"observations": [], "actions": [], "log_losses": []}
    for run in runs:
        features = torch.as_tensor(run.features, dtype=torch.float32)
        parts["observations"].append(torch.cat((features, history_of(run.losses)), -1))
        parts["actions"].append(torch.as_tensor(run.actions, dtype=torch.float32))
        parts["log_losses"].append(torch.as_tensor(run.losses).log().float())
    padded = {name: torch.nn.utils.rnn.pad_sequence(values, batch_first=True) for name, values in parts.items()}
    starts = torch.stack([torch.linspace(0, length - 1, starts).long() for length in lengths])
    return StretchBatch(
        **padded,
        lengths=torch.tensor(lengths),
        weights=torch.ones(model.members, len(runs)),
        starts=starts,
        observed=max(lengths),
        horizon=horizon,
    )


def test_padding_changes_nothing(monkeypatch):
    model = new_rssm(**SMALL)
    short, long = make_run(0, stretches=12), make_run(1, stretches=30)
    alone, beside = batch_of(model, [short]), batch_of(model, [short, long])
    beside.weights[:, 1] = 0.0
    monkeypatch.setattr(learning, "sample", lambda probabilities, generator: probabilities.flatten(-2))
    padded, _ = rssm_loss(model, beside, generator())
    for name, value in rssm_loss(model, alone, generator())[0].items():
        torch.testing.assert_close(padded[name], value, msg=name)


def test_a_member_learns_in_proportion_to_its_weights():
    model = new_rssm(**SMALL)
    batch = batch_of(model, [make_run(0), make_run(1)])
    batch.weights[1], trained = 0.0, parameters(model)
    rssm_loss(model, batch, generator())[0]["total"].backward()
    for name, weight in trained.items():
        assert weight.grad is None or not weight.grad[1].any(), name


def test_divergence_has_free_nats_and_pulls_mostly_the_prior():
    logits = torch.zeros(3, 4, 8, requires_grad=True)
    kl = kl_loss(logits.softmax(-1), torch.full((3, 4, 8), 1 / 8))
    kl.sum().backward()
    torch.testing.assert_close(kl.detach(), torch.full((3,), FREE_NATS))
    assert not logits.grad.any()

    logits = [(3 * torch.randn(1, 4, 8, generator=generator(seed))).requires_grad_() for seed in (1, 2)]
    posterior, prior = (torch.distributions.Categorical(logits=values) for values in logits)
    kl = kl_loss(posterior.probs, prior.probs)
    torch.testing.assert_close(kl, torch.distributions.kl_divergence(posterior, prior).sum(-1))
    ours = torch.autograd.grad(kl.sum(), logits, retain_graph=True)
    plain = torch.autograd.grad(torch.distributions.kl_divergence(posterior, prior).sum(), logits)
    torch.testing.assert_close(ours[0], 0.2 * plain[0])
    torch.testing.assert_close(ours[1], 0.8 * plain[1])


def test_samples_follow_the_distribution_and_pass_its_gradient():
    probabilities = torch.tensor([0.7, 0.2, 0.1]).repeat(4000, 1, 1).requires_grad_()
    sample = learning.sample(probabilities, generator())
    assert set(sample.detach().round(decimals=5).unique().tolist()) == {0.0, 1.0}
    torch.testing.assert_close(sample.mean(0), torch.tensor([0.7, 0.2, 0.1]), atol=0.03, rtol=0)
    sample[:, 1].sum().backward()
    assert torch.equal(probabilities.grad[:, 0], torch.tensor([0.0, 1.0, 0.0]).repeat(4000, 1))


def test_the_likelihood_agrees_with_torch():
    reference = torch.distributions.StudentT(5.0, 0.0, 0.3)
    x = torch.linspace(-4, 4, 9)
    torch.testing.assert_close(student_t_nll(x / 0.3, torch.tensor(math.log(0.3))), -reference.log_prob(x))
