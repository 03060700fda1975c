"""`hf-hybrid COMMAND ...`: finds the command and runs it; what is heavy is imported by the command that needs it."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

from hf_hybrid import __version__

COMMANDS = {
    "train": ("hf_hybrid.cli.train", "train a model on texts or conversations, on one process or several"),
    "plan": ("hf_hybrid.cli.plan", "what training a model would hold, and which way to train it fits"),
    "report": ("hf_hybrid.cli.report", "make a report from a finished or killed run; compare two runs"),
    "env": ("hf_hybrid.cli.env", "versions and hardware, ready to paste into a bug report"),
}
"""By name: the module with `add_parser(subparsers)`, which sets `run`; and a summary for `hf-hybrid --help`."""


def build_parser(command: str | None) -> argparse.ArgumentParser:
    """
    The parser; only the module of the command that was given is imported.

    Args:
        command (`str`, *optional*): The first word after `hf-hybrid`.
    """
    description = "Training with predicted steps, and of models that do not fit."
    parser = argparse.ArgumentParser(prog="hf-hybrid", description=description)
    parser.add_argument("--version", action="version", version=f"hf_hybrid {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, (module, summary) in COMMANDS.items():
        if name == command:
            importlib.import_module(module).add_parser(commands)
        else:
            commands.add_parser(name, help=summary)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """
    Run a command.

    Args:
        arguments (`Sequence[str]`, *optional*): Instead of those of the process.

    Returns:
        `int`: 0, or 1 where the command did not do what it was asked to; wrong options exit with 2.
    """
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    command = next((word for word in arguments if not word.startswith("-")), None)
    args = build_parser(command).parse_args(arguments)
    return args.run(args)
