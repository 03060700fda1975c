"""Parts that change memory by phase: recomputed activations, and what adapters cast and multiply."""
