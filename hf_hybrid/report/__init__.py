"""Where the memory of a run went: the profiler that writes it down, and reports made from what it wrote."""
