"""Made-up training runs whose dynamics are known: power laws, noise, drops with the learning rate, effects of leaps."""

from typing import NamedTuple

import numpy as np

SIGNAL = 20
"""The feature whose sign says whether leaps help."""
EFFECT = 0.04
"""Change of the log loss by a stretch of gain 1."""


class Continuation(NamedTuple):
    actions: np.ndarray
    losses: np.ndarray
    features: np.ndarray | None = None


class Branch(NamedTuple):
    start: int
    base: Continuation
    other: Continuation


class Run(NamedTuple):
    """As benchmarks/world_model/records.py takes it."""

    features: np.ndarray
    actions: np.ndarray
    losses: np.ndarray
    branches: list[Branch] = []


def effect_of(features):
    """Leaps help where the feature is positive."""
    return -EFFECT * np.sign(features[SIGNAL])


def make_run(seed, stretches=32, branches=3, noise=0.02, leaps=True):
    """A run whose log loss is that of a power law with a random exponent, lowered as the learning rate decays."""
    rng = np.random.default_rng(seed)
    exponent, drop, sign = rng.uniform(0.05, 0.5), rng.uniform(0.0, 0.2), rng.choice((-1.0, 1.0))
    progress = np.arange(1, stretches + 1) / stretches
    rate = np.minimum(1.0, 2 * (1 - progress)) if rng.random() < 0.5 else np.ones(stretches)
    expected = 1.0 - exponent * np.log(np.arange(1, stretches + 1)) - drop * (1 - rate)
    disturbance = noise * rng.standard_normal(stretches)

    def play(gains):
        effects = np.cumsum(np.arcsinh(gains)) * -EFFECT * sign
        actions = np.stack((gains, np.zeros(stretches), progress, rate), 1)
        return actions, np.exp(expected + disturbance + effects)

    gains = rng.uniform(0, 2) * (rng.random(stretches) < 0.5) * (rng.random() < 0.5) * leaps
    actions, losses = play(gains)
    features = make_features(rng, losses, sign, progress, rate)
    found = []
    for start in rng.integers(4, stretches - 4, size=branches):
        other = gains.copy()
        other[start:] = 0.0 if gains[start:].any() else rng.uniform(0.3, 2)
        both = (Continuation(a[start:], x[start:]) for a, x in (play(gains), play(other)))
        found.append(Branch(int(start), *both))
    return Run(features, actions, losses, found)


def make_features(rng, losses, sign, progress, rate):
    features = 0.5 * rng.standard_normal((len(losses), 64))
    features[:, 0] = np.log1p(losses)
    features[:, 1] = np.log(losses / losses[0])
    features[:, SIGNAL] = sign * rng.uniform(0.5, 1.5, len(losses))
    features[:, 41], features[:, 47] = rate, progress
    return features.clip(-5, 5)
