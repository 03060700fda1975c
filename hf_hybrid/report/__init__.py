"""Reports on a run: progress, summary, memory profile, report pages and plots, and the model card."""
