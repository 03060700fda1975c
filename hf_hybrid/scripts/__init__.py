"""Scripts that the command line launches, on one process or on several."""
