"""Leaps of the weights: signals, directions, planners of the gain, probes, divergence monitor, learning-rate rescue."""
