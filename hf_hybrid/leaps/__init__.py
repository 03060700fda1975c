"""Leaps of the weights: when, how far, along which direction, and how they are probed and undone."""
