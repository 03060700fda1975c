"""
A world model of training, which forecasts the loss with and without leaps and plans leaps by these forecasts; and the
forecast of the final loss, the bandit, the signals that planners learn from, and the residuals of leaps.
"""
