"""`hf-hybrid train`: checks the options, then trains in this process, or on several that accelerate launches."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from hf_hybrid.cli.options import (
    PROGRAM,
    LaunchOptions,
    OptionError,
    check_required,
    help_all,
    help_text,
    parse_values,
    set_environment,
)

SCRIPT = "hf_hybrid.scripts.train"
CONFIGS = Path(__file__).parent.parent / "scripts" / "accelerate_configs"


def add_parser(subparsers) -> argparse.ArgumentParser:
    """Register the subcommand; light, so that `--help` is instant."""
    parser = subparsers.add_parser(
        "train",
        help="train a model on texts or conversations, on one process or several",
        add_help=False,
        # No option begins with this: everything is left to the parser that knows TrainingArguments.
        prefix_chars="\0",
    )
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    parser.set_defaults(run=run)
    return parser


def run(args: argparse.Namespace) -> int:
    """
    Train, or print help.

    Returns:
        `int`: 0; 2 for options that cannot work; 130 after Ctrl-C; else what the processes ended with.
    """
    arguments = args.arguments
    if not arguments or {"-h", "--help"} & set(arguments):
        sys.stdout.write(help_text())
        return 0
    if {"--help_all", "--help-all"} & set(arguments):
        sys.stdout.write(help_all())
        return 0
    try:
        return _train(arguments)
    except OptionError as error:
        sys.stderr.write(f"{PROGRAM}: error: {error}\n")
        return 2
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


def _train(arguments: Sequence[str]) -> int:
    set_environment(arguments)
    # Started by a launcher already: what it says about processes holds.
    launched = "LOCAL_RANK" in os.environ
    if not launched:
        options = parse_values(arguments)
        check_required(options.model, options.dataset)
        if options.accelerate_config or _processes(options) > 1:
            return launch(arguments, options)
        _use_one_device()
    from hf_hybrid.scripts.train import main

    return main(arguments)


def _processes(options: argparse.Namespace) -> int:
    """As many as there are GPUs, unless the options say otherwise."""
    if options.num_processes is not None:
        LaunchOptions(num_processes=options.num_processes)  # checks it
        return options.num_processes
    if options.cpu or options.use_cpu or options.memory != "off":
        return 1
    import torch

    return max(torch.cuda.device_count(), 1)


def _use_one_device() -> None:
    """One process computes on one GPU: with more in sight `Trainer` would spread each batch over all (DataParallel)."""
    import torch

    if torch.cuda.device_count() > 1:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0]
        os.environ["CUDA_VISIBLE_DEVICES"] = visible or "0"


def launch(arguments: Sequence[str], options: argparse.Namespace) -> int:
    """
    Run the training script on several processes of this machine, through `accelerate launch`.

    Args:
        arguments (`Sequence[str]`): Of the command line, passed on as they are.
        options (`argparse.Namespace`): The same, parsed.

    Returns:
        `int`: Exit status of the process that failed first, as a shell gives it; 0 if none did.

    Raises:
        OptionError: If `accelerate_config` is neither a name nor a file.
    """
    from accelerate.commands.launch import launch_command, launch_command_parser

    command = launch_arguments(arguments, options)
    with _computing_on_cpu(options.cpu or options.use_cpu):
        return _exit_status(lambda: launch_command(launch_command_parser().parse_args(command)))


@contextlib.contextmanager
def _computing_on_cpu(on_cpu: bool) -> Iterator[None]:
    """Processes that start meanwhile use gloo; accelerate's own `--cpu` would start one process, whatever is asked."""
    name = "ACCELERATE_USE_CPU"
    before = os.environ.get(name)
    if on_cpu:
        os.environ[name] = "true"
    try:
        yield
    finally:
        os.environ.pop(name, None)
        if before is not None:
            os.environ[name] = before


def launch_arguments(arguments: Sequence[str], options: argparse.Namespace) -> list[str]:
    """
    Arguments of `accelerate launch`.

    Raises:
        OptionError: If `accelerate_config` is neither a name nor a file.
    """
    name = options.accelerate_config or "ddp"
    on_cpu = options.cpu or options.use_cpu
    if on_cpu and name not in ("ddp", "ddp_cpu") and not Path(name).is_file():
        raise OptionError(f"`--accelerate_config {name}` needs GPUs. On the CPU leave it out (DDP over gloo).")
    packaged = CONFIGS / f"{'ddp_cpu' if on_cpu and name == 'ddp' else name}.yaml"
    command = ["--config_file", str(packaged if packaged.is_file() else name)]
    if packaged.is_file():
        # Port 0: a free one, so that two runs on a machine do not meet.
        command += ["--num_processes", str(_processes(options)), "--main_process_port", "0"]
    elif not Path(name).is_file():
        names = ", ".join(sorted(path.stem for path in CONFIGS.glob("*.yaml")))
        raise OptionError(f"`--accelerate_config {name}` is neither a file nor one of {names}.")
    elif options.num_processes is not None:
        command += ["--num_processes", str(options.num_processes)]
    return [*command, "--module", SCRIPT, *arguments]


def _exit_status(run) -> int:
    from subprocess import CalledProcessError

    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    try:
        run()
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        sys.stderr.write(f"{PROGRAM}: process {rank} ended with exit status {failure.exitcode}.\n")
        return _as_shell(failure.exitcode)
    except CalledProcessError as error:
        return _as_shell(error.returncode)
    except SignalException as error:
        return 128 + error.sigval
    return 0


def _as_shell(status: int) -> int:
    return 128 - status if status < 0 else status
