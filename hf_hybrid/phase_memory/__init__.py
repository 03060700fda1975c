"""Plugins that change memory by phase: activations, weight precision, int8 probe weights, optimizer states."""
