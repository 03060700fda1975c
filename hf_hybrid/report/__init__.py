"""What a run says of itself: progress, summary, memory profile, report pages and plots, and the model card."""
