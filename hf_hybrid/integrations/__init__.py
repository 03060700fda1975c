"""Hybrid trainers for other libraries. Each module needs its library and is imported on first use."""
