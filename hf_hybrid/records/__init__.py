"""What a run writes down while it goes on: log, memory profile, summary, progress."""
