"""Plan the memory of a training, from the model or from its config alone."""
