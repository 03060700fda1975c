"""What training a model would hold, found from its config alone."""
