"""
A world model of training. It forecasts the loss of the run with and without leaps, and plans leaps by these forecasts.

`rssm.py` has the networks, `learning.py` what they learn from, `forecasts.py` the arithmetic of distributions and
calibration, `dynamics.py` the model of one run, and `imagination.py` the planner that asks it.
"""
