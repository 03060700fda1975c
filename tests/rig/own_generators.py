"""A module of a user's, with generators of its own."""

import random

import numpy

OTHER, ARRAYS, INSIDE = random.Random(3), numpy.random.default_rng(4), random.Random(5)


def draw() -> float:
    return ARRAYS.random()


def drawn() -> float:
    return INSIDE.random()
