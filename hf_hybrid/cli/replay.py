"""
`hf-hybrid replay`: make steps of a run that `hf-hybrid train` started again, and say where the run differs from them.

`train` writes its command into the folder of the run, so nothing has to be repeated. Runs of other scripts are replayed
by `hf_hybrid.saving.replay.replay`.
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
from hf_hybrid.cli.yaml_file import known_variables

PROGRAM, MODULE = "hf-hybrid replay", "hf_hybrid.cli.replay"
COMMAND_NAME = "_hybrid_command.json"
"""
In `output_dir`: how the run was started, without secrets. Files with a leading underscore are not pushed.

The folder may be somebody else's. So nothing in this file makes code run: it switches no `trust_remote_code` on, it
sets no variable but those about arithmetic, and it names no file that accelerate is configured by.
"""
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
    text = "run the code that the model brings with it; the folder of the run cannot ask for that"
    parser.add_argument("--trust_remote_code", action="store_true", help=text)
    text = "file of `accelerate config`, if the run had one; the folder of the run cannot name it"
    parser.add_argument("--accelerate_config", metavar="FILE", help=text)
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
    from accelerate.utils import patch_environment

    from hf_hybrid.cli.train import launch, processes
    from hf_hybrid.machine import use_one_gpu

    args.folder = os.path.abspath(args.folder)
    try:
        line = command_of(args)
        line.set_environment()
        # Processes that are started in the folder of the run import nothing from there.
        with patch_environment(PYTHONSAFEPATH="1"):
            if "LOCAL_RANK" not in os.environ:
                _tell_of_variables(args.folder)
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
        words += ["--trust_remote_code"] if args.trust_remote_code else []
        words += ["--accelerate_config", args.accelerate_config] if args.accelerate_config else []
        status = launch(line, MODULE, list(map(str, words)))
        return status or _tell(json.loads(result.read_text(encoding="utf-8")))


def _tell_of_variables(folder: str) -> None:
    unknown = [name for name, value in known_variables(_saved(folder)["variables"]).items() if value is None]
    if unknown:
        sys.stderr.write(
            f"{PROGRAM}: the run had these variables under `env`, whose values are not kept: {', '.join(unknown)}. Set "
            "those that it needs.\n"
        )


def _tell(found: dict[str, Any]) -> int:
    sys.stdout.write(f"{found['text']}\n")
    return 0 if found["verdict"] == "same" else 1


def _replay(args: argparse.Namespace) -> dict[str, Any]:
    from hf_hybrid.cli.run import make_trainer
    from hf_hybrid.saving.replay import replay

    def make(output_dir: str):
        return make_trainer(command_of(args, output_dir=output_dir).options())

    here = _saved(args.folder)["folder"]  # to which paths of the command are relative
    try:
        os.chdir(here)
    except (OSError, ValueError) as error:
        raise OptionError(f"The run was started in `{here}`, which cannot be entered: {error}") from None
    return replay(make, args.folder, args.start, args.end, times=args.times).to_dict()


def command_of(args: argparse.Namespace, **overrides: str) -> CommandLine:
    """
    Return the command that started the run in `args.folder`, with other values for some options.

    Raises:
        OptionError: If the folder has none, or one that a folder cannot ask for.
    """
    from hf_hybrid.cli.train import CONFIGS

    saved = _saved(args.folder)
    own = {**OVERRIDES, **({"num_processes": saved["processes"]} if saved["processes"] > 1 else {}), **overrides}
    own["trust_remote_code"] = str(args.trust_remote_code).lower()
    own |= {"accelerate_config": args.accelerate_config} if args.accelerate_config else {}
    line = CommandLine.again(saved, [f"--{name}={value}" for name, value in own.items()])
    named = line.values.accelerate_config
    if named not in (None, args.accelerate_config, *(path.stem for path in CONFIGS.glob("*.yaml"))):
        raise OptionError(
            f"The run was launched by the file `{named}`, which a folder cannot name: it could run anything. Look at "
            "the file, and name it with `--accelerate_config`."
        )
    return line


def _saved(folder: str) -> dict[str, Any]:
    path = Path(folder, COMMAND_NAME)
    try:
        saved = json.loads(path.read_text(encoding="utf-8"))
        kinds = {"arguments": list, "config": dict, "variables": dict, "processes": int, "folder": str}
        if wrong := [name for name, kind in kinds.items() if not isinstance(saved[name], kind)]:
            raise TypeError(f"`{wrong[0]}` is of another kind")
        return saved
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise OptionError(
            f"`{path}` cannot be read ({error}), so nothing tells how the run was started. It is there if `hf-hybrid "
            "train` started the run. Replay other runs with `hf_hybrid.saving.replay.replay`."
        ) from None


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog=PROGRAM)
    add_parser(parser.add_subparsers(), "")
    arguments = parser.parse_args(["replay", *sys.argv[1:]])
    sys.exit(arguments.run(arguments))
