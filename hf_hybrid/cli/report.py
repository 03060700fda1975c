"""`hf-hybrid report`: a report on a run, once or again and again while it trains."""

from __future__ import annotations

import argparse
import functools
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

from hf_hybrid.arguments import check_range
from hf_hybrid.cli.console import write_out

USUAL_SECONDS = 30


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
    text = "write the report again and again until the run has finished, or until Ctrl-C; the page reloads itself"
    add("--follow", action="store_true", help=text)
    text = f"seconds between two reports with --follow (default: {USUAL_SECONDS})"
    add("--every", type=int, metavar="SECONDS", help=text)


def run(args: argparse.Namespace) -> int:
    """Write the report and print where it is. Returns 0, also after Ctrl-C with `--follow`."""
    from hf_hybrid.report.page import write_report

    write = functools.partial(write_report, args.folder, args.output)
    if args.every is not None and not args.follow:
        raise ValueError(f"`--every {args.every}` is for `--follow`. Add that, or leave it out.")
    check_range("--every", args.every, {"at_least": 1})
    if args.follow:
        _follow(write, args.every or USUAL_SECONDS)
    else:
        _print_files(write())
    return 0


def _print_files(files: list[Path]) -> None:
    others = ", ".join(file.name for file in files[1:])
    write_out(f"{files[0]}\nand in the same folder: {others}\n")


def _follow(write: Callable[..., list[Path]], every: int) -> None:
    """
    Write the report every so many seconds, until the run has finished and nothing changes any more: it makes its
    last evaluation and its summary after its last step. The last page does not reload itself. A run that has just begun
    has logged nothing yet: wait for it, as long as its folder is there.
    """
    from hf_hybrid.report.run_folder import NothingYetError

    before, message = "", ""
    try:
        while True:
            try:
                files = write(refresh=every)
            except NothingYetError as error:
                previous, message = message, f"`{error.folder}` holds nothing to report on yet."
                if message != previous:
                    write_out(f"{message} It is read again every {every} s. Ctrl-C ends that.\n")
            else:
                values = files[1].read_text(encoding="utf-8")
                if not before:
                    _print_files(files)
                    write_out(f"Written again every {every} s, until the run has finished. Ctrl-C ends that.\n")
                if values == before and json.loads(values)["finished"]:
                    return
                before = values
            sys.stdout.flush()
            time.sleep(every)
    except KeyboardInterrupt:
        write_out("\n")
        if before:
            write()
