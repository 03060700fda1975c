"""Where the weights will be: signals, directions, leaps, their verification and the watch over them."""
