"""`hf-hybrid dpo`: its options are in `cli/tasks.py`, and `cli/train.py` runs it."""

from __future__ import annotations

import argparse

from hf_hybrid.cli import train


def add_parser(subparsers, summary: str) -> argparse.ArgumentParser:
    """Register the subcommand."""
    return train.add_parser(subparsers, summary, "dpo")
