"""Parts that change memory by phase: activations, precision and int8 probes, optimizer states."""
