"""`hf-hybrid report`: a report on a run, or on two side by side."""

from __future__ import annotations

import argparse
import sys


def add_parser(subparsers, summary: str) -> argparse.ArgumentParser:
    """Register the subcommand."""
    parser = subparsers.add_parser(
        "report",
        help=summary,
        description=(
            "Write a report on the output folder of a run, whether the run finished, was killed or is still going: "
            "report.html (one file, opens offline), report.json, steps.csv, leaps.csv and a PNG for each plot. With "
            "two folders: a comparison of both. Nothing is downloaded and no model is loaded."
        ),
    )
    parser.add_argument("folder", help="output_dir of a HybridTrainer or Trainer run")
    parser.add_argument("other", nargs="?", help="output_dir of a run to compare with the first")
    parser.add_argument(
        "-o", "--output", help="folder for the report (default: FOLDER/report; for two runs OTHER/report/comparison)"
    )
    parser.set_defaults(run=run)
    return parser


def run(args: argparse.Namespace) -> int:
    """
    Write the report and print where it is.

    Returns:
        `int`: 0; 2 after a message if there is nothing to report on, or a file cannot be read or written. Without
        matplotlib there are no plots, and a warning is logged.
    """
    from hf_hybrid.report.page import write_comparison, write_report

    try:
        if args.other is None:
            files = write_report(args.folder, args.output)
        else:
            files = write_comparison(args.folder, args.other, args.output)
    except (OSError, ValueError) as error:
        sys.stderr.write(f"hf-hybrid report: {error}\n")
        return 2
    sys.stdout.write(f"{files[0]}\n")
    sys.stdout.write(f"and in the same folder: {', '.join(file.name for file in files[1:])}\n")
    return 0
