"""`hf-hybrid report`: a report on a run, which may still be going on."""

from __future__ import annotations

import argparse

from hf_hybrid.cli.console import write_out


def add_options(parser: argparse.ArgumentParser) -> None:
    """Describe the command and its options."""
    parser.description = (
        "Write a report on the output folder of a run, whether the run finished, was killed or is still going: "
        "report.html (one file, opens offline), report.json and a PNG for each plot. Nothing is downloaded and no "
        "model is loaded."
    )
    add = parser.add_argument
    add("folder", help="output_dir of a HybridTrainer or Trainer run")
    add("-o", "--output", help="folder for the report (default: FOLDER/report)")


def run(args: argparse.Namespace) -> int:
    """Write the report and print where it is. Returns 0."""
    from hf_hybrid.report.page import write_report

    page, *others = write_report(args.folder, args.output)
    write_out(f"{page}\nand in the same folder: {', '.join(file.name for file in others)}\n")
    return 0
