"""`hf-hybrid COMMAND ...`: find the command and run it. Only the module of that command is imported."""

from __future__ import annotations

import argparse
import importlib
import logging
import sys
from collections.abc import Sequence

from hf_hybrid import __version__
from hf_hybrid.cli.console import write_error
from hf_hybrid.cli.options import TRAINING

logger = logging.getLogger(__name__)

RECIPE = "hf_hybrid.cli.recipe"
COMMANDS = {
    **{name: (RECIPE, command.summary) for name, command in TRAINING.items()},
    "data": (RECIPE, "See the rows of a file as a model sees them, and what training on them would save."),
    "chat": ("hf_hybrid.cli.chat", "Talk to a model that was trained or exported."),
    "sweep": ("hf_hybrid.cli.sweep", "Find the best learning rate, or other options, with few steps."),
    "plan": ("hf_hybrid.cli.plan", "Compare the memory of the ways to train a model, and see which fit."),
    "convert": ("hf_hybrid.cli.convert", "Write a YAML file of Axolotl, LLaMA-Factory or TRL with our names."),
    "export": ("hf_hybrid.cli.export", "Write a run as a merged or a low-bit model."),
    "report": ("hf_hybrid.cli.report", "Write a report on a run."),
    "env": ("hf_hybrid.cli.env", "Versions and hardware, ready to paste into a bug report."),
}
"""
By name: a module, and the summary for `hf-hybrid --help`. A module has `add_options(parser)` and `run(args)`.
[`RECIPE`] gets every word instead: its options are known to the parser of TrainingArguments alone.
"""


class Parser(argparse.ArgumentParser):
    """Takes `--batch-size` for `--batch_size`, as the commands that train do."""

    def add_argument(self, *names, **options):
        return super().add_argument(*dict.fromkeys((*names, *(name.replace("_", "-") for name in names))), **options)


def build_parser(command: str | None) -> argparse.ArgumentParser:
    """The parser for the command that was given; only the module of this command is imported."""
    description = "Fine-tune and train language models, with less work for the same update; and models that do not fit."
    parser = Parser(prog="hf-hybrid", description=description)
    parser.add_argument("--version", action="version", version=f"hf_hybrid {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, (module, summary) in COMMANDS.items():
        own = commands.add_parser(name, help=summary)
        if name == command and module != RECIPE:
            implementation = importlib.import_module(module)
            implementation.add_options(own)
            own.set_defaults(run=implementation.run)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """
    Run the command that the words after `hf-hybrid` name. Returns the exit status: 0; 1 if the command could not do its
    work; 2 after a message for what it cannot use.
    """
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if arguments and COMMANDS.get(arguments[0], ("",))[0] == RECIPE:
        return importlib.import_module(RECIPE).run(arguments[0], arguments[1:])
    command = next((word for word in arguments if not word.startswith("-")), None)
    args, unknown = build_parser(command).parse_known_args(arguments)
    if unknown:
        program = f"hf-hybrid {args.command}"
        write_error(f"{program}: error: `{unknown[0]}` is no option. `{program} --help` lists all.\n")
        return 2
    try:
        return args.run(args)
    except (ValueError, ImportError, OSError) as error:
        logger.debug("The error in full:", exc_info=True)
        write_error(f"hf-hybrid {args.command}: error: {error}\n")
        return 2
