"""`hf-hybrid report`: a report on a run, or on several side by side, once or again and again while they train."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

USUAL_SECONDS = 30


def add_parser(subparsers, summary: str) -> argparse.ArgumentParser:
    """Register the subcommand."""
    parser = subparsers.add_parser(
        "report",
        help=summary,
        description=(
            "Write a report on the output folder of a run, whether the run finished, was killed or is still going: "
            "report.html (one file, opens offline), report.json and a PNG for each plot. With several folders: a "
            "comparison of all. Nothing is downloaded and no model is loaded."
        ),
    )
    parser.add_argument("folder", help="output_dir of a HybridTrainer or Trainer run")
    parser.add_argument("others", nargs="*", metavar="other", help="output_dir of runs to compare with the first")
    parser.add_argument(
        "-o", "--output", help="folder for the report (default: FOLDER/report; of several LAST/report/comparison)"
    )
    text = "write the report again and again until the run has finished, or until Ctrl-C; the page reloads itself"
    parser.add_argument("--follow", action="store_true", help=text)
    text = f"seconds between two reports with --follow (default: {USUAL_SECONDS})"
    parser.add_argument("--every", type=int, metavar="SECONDS", help=text)
    parser.set_defaults(run=run)
    return parser


def run(args: argparse.Namespace) -> int:
    """
    Write the report and print where it is.

    Returns:
        `int`: 0, also after Ctrl-C while it waits for a run or follows it; 2 after a message if there is nothing to
        report on, or a file cannot be read or written. Without matplotlib there are no plots, and a warning is logged.
    """
    from hf_hybrid.report.page import write_comparison, write_report

    def write(refresh: int | None = None) -> list[Path]:
        if not args.others:
            return write_report(args.folder, args.output, refresh=refresh)
        return write_comparison(args.folder, *args.others, output=args.output, refresh=refresh)

    every = USUAL_SECONDS if args.every is None else args.every
    try:
        if args.every is not None and not args.follow:
            raise ValueError(f"`--every {args.every}` is for `--follow`. Add that, or leave it out.")
        if every < 1:
            raise ValueError(f"`--every` must be at least 1 second, got {every}.")
        files = _first(write, every) if args.follow else write()
        if files:
            _tell(files)
        if files and args.follow:
            _follow(write, every, files)
    except (OSError, ValueError) as error:
        sys.stderr.write(f"hf-hybrid report: {error}\n")
        return 2
    return 0


def _tell(files: list[Path]) -> None:
    sys.stdout.write(f"{files[0]}\n")
    sys.stdout.write(f"and in the same folder: {', '.join(file.name for file in files[1:])}\n")
    sys.stdout.flush()


def _first(write: Callable[..., list[Path]], every: int) -> list[Path]:
    """
    Write the first report of a run that is followed. A run that has just begun has logged nothing yet: wait for it, as
    long as its folder is there. Returns no files after Ctrl-C.
    """
    from hf_hybrid.report.run_folder import NothingYetError

    told = ""
    try:
        while True:
            try:
                return write(every)
            except NothingYetError as error:
                said = f"`{error.folder}` holds nothing to report on yet. It is read again every {every} s."
                if said != told:
                    sys.stdout.write(f"{said} Ctrl-C ends that.\n")
                    sys.stdout.flush()
                    told = said
                time.sleep(every)
    except KeyboardInterrupt:
        sys.stdout.write("\n")
        return []


def _follow(write: Callable[..., list[Path]], every: int, files: list[Path]) -> None:
    """
    Write the report anew every so many seconds, until all runs have finished and nothing changes any more: a run makes
    its last evaluation and its summary after its last step. The last page does not reload itself.
    """
    sys.stdout.write(f"It is written again every {every} s, until the run has finished. Ctrl-C ends that.\n")
    sys.stdout.flush()
    before = b""
    try:
        while not (_finished(files[1]) and files[1].read_bytes() == before):
            before = files[1].read_bytes()
            time.sleep(every)
            files = write(every)
    except KeyboardInterrupt:
        sys.stdout.write("\n")
        write()


def _finished(path: Path) -> bool:
    """Whether the JSON of a report or of a comparison says that each of its runs has finished."""
    values = json.loads(path.read_text(encoding="utf-8"))
    return all(run["finished"] for run in values.get("runs", {"": values}).values())
