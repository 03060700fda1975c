"""What every run has, with leaps or without: its list of parts, the monitor, the learning rate, weights, forecast."""
