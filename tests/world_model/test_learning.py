"""`hf_hybrid/world_model/learning.py`: padding changes nothing, weights of members count, free nats are free."""

import torch
from rig.synthetic_runs import batch_of, make_run

from hf_hybrid.world_model.learning import FREE_NATS, kl_loss, rssm_loss
from hf_hybrid.world_model.rssm import RSSM

SMALL = {"members": 2, "deterministic": 32, "hidden": 32}


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def test_padding_changes_nothing():
    model = RSSM(**SMALL)
    short, long = make_run(0, stretches=12), make_run(1, stretches=30)
    alone, beside = batch_of(model, [short]), batch_of(model, [short, long])
    beside.weights[:, 1] = 0.0
    model.sample = lambda probabilities, generator: probabilities.flatten(-2)
    padded, _ = rssm_loss(model, beside, generator())
    for name, value in rssm_loss(model, alone, generator())[0].items():
        torch.testing.assert_close(padded[name], value, msg=name)


def test_a_member_learns_in_proportion_to_its_weights():
    model = RSSM(**SMALL)
    batch = batch_of(model, [make_run(0), make_run(1)])
    batch.weights[1] = 0.0
    rssm_loss(model, batch, generator())[0]["total"].backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is None or not parameter.grad[1].any(), name


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
