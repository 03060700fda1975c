"""
`hf-hybrid replay`: make steps of a run that `hf-hybrid train` started again, and say where the run differs from them.

`train` writes its command into the folder of the run, so nothing has to be repeated. Runs of other scripts are replayed
by `hf_hybrid.prints.replay.replay`.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hf_hybrid.cli.options import CommandLine, OptionError

PROGRAM, MODULE = "hf-hybrid replay", "hf_hybrid.cli.replay"
COMMAND_NAME = "_hybrid_command.json"
"""In `output_dir`: how the run was started, without secrets. Files with a leading underscore are not pushed."""
OVERRIDES = {
    "report_to": "none", "push_to_hub": "false", "load_best_model_at_end": "false", "disable_tqdm": "true",
    "digest_steps": "1", "resume_from_checkpoint": "false",
}  # fmt: skip


def add_parser(subparsers, summary: str) -> argparse.ArgumentParser:
    """Register the subcommand."""
    parser = subparsers.add_parser(
        "replay",
        help=summary,
        description=(
            "Make steps of a run again, from a checkpoint, and compare them with the digests in its log. Says that "
            "they agree, or names the first step that differs, and whether the data, the memory of the machine or an "
            "operation that is not deterministic is the reason. It writes nothing into the folder of the run."
        ),
    )
    parser.add_argument("folder", help="output_dir of a run of `hf-hybrid train`")
    parser.add_argument("--from", dest="start", type=int, required=True, metavar="A", help="compare the steps behind A")
    parser.add_argument("--to", dest="end", type=int, required=True, metavar="B", help="up to step B")
    parser.add_argument("--times", type=int, default=2, help="make the steps so often at most (default: 2)")
    parser.add_argument("--result", help=argparse.SUPPRESS)
    parser.set_defaults(run=run)
    return parser


def run(args: argparse.Namespace) -> int:
    """
    Replay, and print what was found.

    Returns:
        `int`: 0 if the run made the steps right, 1 if it did not or nothing tells, 2 after a message if it cannot be
        replayed.
    """
    from hf_hybrid.cli.train import launch, processes
    from hf_hybrid.machine import use_one_gpu

    args.folder = os.path.abspath(args.folder)
    try:
        line = command_of(args.folder)
        line.set_environment()
        if "LOCAL_RANK" not in os.environ:
            if line.values.accelerate_config or processes(line.values) > 1:
                return _launch(args, line, launch)
            use_one_gpu()
        found = _replay(args)
    except (OptionError, ValueError, TypeError, ImportError) as error:
        sys.stderr.write(f"{PROGRAM}: error: {error}\n")
        return 2
    if args.result is None:
        return _tell(found)
    if int(os.environ.get("RANK", 0)) == 0:
        Path(args.result).write_text(json.dumps(found), encoding="utf-8")
    return 0


def _launch(args: argparse.Namespace, line: CommandLine, launch: Callable[..., int]) -> int:
    """Replay on as many processes as the run had. The first of them writes down what was found."""
    with tempfile.TemporaryDirectory(prefix="hf-hybrid-replay-") as folder:
        result = Path(folder, "result.json")
        words = [args.folder, "--from", args.start, "--to", args.end, "--times", args.times, "--result", result]
        status = launch(line, MODULE, list(map(str, words)))
        return status or _tell(json.loads(result.read_text(encoding="utf-8")))


def _tell(found: dict[str, Any]) -> int:
    sys.stdout.write(f"{found['text']}\n")
    return 0 if found["verdict"] == "same" else 1


def _replay(args: argparse.Namespace) -> dict[str, Any]:
    from hf_hybrid.cli.run import make_trainer
    from hf_hybrid.prints.replay import replay

    def make(output_dir: str):
        return make_trainer(command_of(args.folder, output_dir=output_dir).options())

    return replay(make, args.folder, args.start, args.end, times=args.times).to_dict()


def command_of(folder: str, **overrides: str) -> CommandLine:
    """
    Return the command that started the run in `folder`, with other values for some options. Paths in it are relative to
    the folder that it was started in, which becomes the present one.

    Raises:
        OptionError: If the folder has none.
    """
    path = Path(folder, COMMAND_NAME)
    try:
        saved = json.loads(path.read_text(encoding="utf-8"))
        own = {**OVERRIDES, **({"num_processes": saved["processes"]} if saved["processes"] > 1 else {}), **overrides}
        line = CommandLine.again(saved, [f"--{name}={value}" for name, value in own.items()])
        os.chdir(saved["folder"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise OptionError(
            f"`{path}` cannot be read ({error}), so nothing tells how the run was started. It is there if `hf-hybrid "
            "train` started the run. Replay other runs with `hf_hybrid.prints.replay.replay`."
        ) from None
    return line


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog=PROGRAM)
    add_parser(parser.add_subparsers(), "")
    arguments = parser.parse_args(["replay", *sys.argv[1:]])
    sys.exit(arguments.run(arguments))
