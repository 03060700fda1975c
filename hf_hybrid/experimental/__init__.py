"""Experiments, which lose to simpler rules in every table: their rules are in README.md. Core finds them by name."""
