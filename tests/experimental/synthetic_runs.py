"""
Made-up training runs whose dynamics are known: power laws, noise, drops with the learning rate, effects of leaps. And
a world model that has learned nothing yet.
"""

from typing import NamedTuple

import numpy as np
import torch

from hf_hybrid.experimental.rssm import ACTIONS, FEATURES, LINEAR, LINEAR_HORIZON, OBSERVATION, RSSM, SCORED

SIGNAL = 20
"""The feature whose sign says whether leaps help."""
EFFECT = 0.04
"""Change of the log loss by a stretch of gain 1."""


class Run(NamedTuple):
    """What a world model is shown, by stretch."""

    features: np.ndarray
    actions: np.ndarray
    losses: np.ndarray


def make_run(seed, stretches=32, noise=0.02, leaps=True):
    """A run whose log loss is that of a power law with a random exponent, lowered as the learning rate decays."""
    rng = np.random.default_rng(seed)
    exponent, drop, sign = rng.uniform(0.05, 0.5), rng.uniform(0.0, 0.2), rng.choice((-1.0, 1.0))
    progress = np.arange(1, stretches + 1) / stretches
    rate = np.minimum(1.0, 2 * (1 - progress)) if rng.random() < 0.5 else np.ones(stretches)
    expected = 1.0 - exponent * np.log(np.arange(1, stretches + 1)) - drop * (1 - rate)
    disturbance = noise * rng.standard_normal(stretches)

    gains = rng.uniform(0, 2) * (rng.random(stretches) < 0.5) * (rng.random() < 0.5) * leaps
    losses = np.exp(expected + disturbance - EFFECT * sign * np.cumsum(np.arcsinh(gains)))
    actions = np.stack((gains, np.zeros(stretches), progress, rate), 1)
    return Run(make_features(rng, losses, sign, progress, rate), actions, losses)


def make_features(rng, losses, sign, progress, rate):
    features = 0.5 * rng.standard_normal((len(losses), 64))
    features[:, 0] = np.log1p(losses)
    features[:, 1] = np.log(losses / losses[0])
    features[:, SIGNAL] = sign * rng.uniform(0.5, 1.5, len(losses))
    features[:, 41], features[:, 47] = rate, progress
    return features.clip(-5, 5)


def new_rssm(members=3, deterministic=256, hidden=96, seed=0):
    """An ensemble with random weights. What depends on leaps is exactly zero."""
    generator, weights = torch.Generator().manual_seed(seed), {}

    def linear(name, inputs, outputs, gain=1.0, bias=True):
        weights[f"{name}.weight"] = torch.randn(members, inputs, outputs, generator=generator) * (gain / inputs**0.5)
        if bias:
            weights[f"{name}.bias"] = torch.zeros(members, 1, outputs)

    stochastic = RSSM.GROUPS * RSSM.CLASSES
    latent = deterministic + stochastic
    linear("gates_action", len(ACTIONS), 3 * deterministic)
    linear("gates", latent, 3 * deterministic, bias=False)
    linear("encoder", OBSERVATION, hidden)
    for name in ("posterior", "prior"):
        linear(f"{name}_hidden", deterministic, hidden)
        linear(f"{name}_out", hidden, stochastic)
    linear("loss_hidden", latent, hidden)
    linear("loss_out", hidden, 4, gain=0.1)
    linear("loss_context", hidden, hidden)
    linear("start_hidden", latent, hidden)
    linear("start_out", hidden, 3, gain=0.1)
    weights["gates_action.weight"][:, :2] = 0.0
    weights["loss_out.weight"][:, :, 1] = 0.0
    weights["loss_out.bias"][:, 0, 2:] = torch.tensor([-3.5, -4.5])
    weights["pair_scale"] = torch.tensor([-4.0, 0.5]).repeat(members, 1)
    weights |= {"feature_mean": torch.zeros(FEATURES), "feature_scale": torch.ones(FEATURES)}
    weights |= {"linear": torch.zeros(members, LINEAR, LINEAR_HORIZON), "scale_shift": torch.zeros(len(SCORED))}
    return RSSM(weights)
