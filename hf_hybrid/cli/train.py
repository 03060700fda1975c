"""
`hf-hybrid train | sft | dpo | grpo`: check the options, then train in this process, or on several that accelerate
launches.

Several GPUs need several processes. A single process trains right here: it starts sooner, and Ctrl-C and debuggers
reach it. In both cases `cli/run.py` does the work.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
import threading
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any

import psutil

from hf_hybrid.cli.options import TRAIN, CommandLine, LaunchOptions, OptionError, complain, help_all, help_text
from hf_hybrid.cli.screen import quiet_imports
from hf_hybrid.cli.tasks import FINE_TUNING
from hf_hybrid.cli.yaml_file import read_options
from hf_hybrid.report.samples import read_prompts

MODULE = "hf_hybrid.cli.run"
CONFIGS = Path(__file__).parent / "accelerate_configs"
HANDED_ON = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGUSR1") if hasattr(signal, name))
OF_LAUNCHER = ("SIGINT", "SIGHUP", "SIGQUIT")
"""Signals at which torch's launcher ends its processes. Its default has SIGTERM too."""


def add_parser(subparsers, summary: str, name: str = TRAIN.name) -> argparse.ArgumentParser:
    """Register a subcommand. Its options are left to the parser that knows TrainingArguments."""
    # No option begins with this prefix, so that argparse hands every word on.
    parser = subparsers.add_parser(name, help=summary, add_help=False, prefix_chars="\0")
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    parser.set_defaults(run=run, training=FINE_TUNING.get(name, TRAIN))
    return parser


def run(args: argparse.Namespace) -> int:
    """
    Train, or print help.

    Returns 0; 2 for options that cannot work; 1 for a training that diverged or ran out of memory; 130 after Ctrl-C;
    else the exit status of the process that failed.
    """
    arguments, command = args.arguments, args.training
    if not arguments or {"-h", "--help"} & set(arguments):
        sys.stdout.write(help_text(command))
        return 0
    if {"--help_all", "--help-all"} & set(arguments):
        with quiet_imports():
            sys.stdout.write(help_all(command))
        return 0
    try:
        line = CommandLine(arguments, command)
        line.set_environment()
        check_early(line)
        with quiet_imports():
            line.values  # noqa: B018  # imports what knows all options
        # A launcher of the user's that started this process has decided on the number of processes.
        if "LOCAL_RANK" not in os.environ:
            line.check_required()
            if line.values.accelerate_config or processes(line.values) > 1:
                return launch(line)
            from hf_hybrid.machine import use_one_gpu

            use_one_gpu()
        from hf_hybrid.cli.run import train

        return train(line)
    except (OptionError, ImportError) as error:  # an ImportError: of TRL, with how to install it
        return complain(error, command.program)
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


def check_early(line: CommandLine) -> None:
    """Refuse what can be seen to be missing without torch, whose import takes seconds. Raises [`OptionError`]."""
    _check_samples(line)
    if line.command is not TRAIN:
        from hf_hybrid.cli.fine_tune import check_early as check

        check(line)
        return
    from hf_hybrid.cli.data import check_path
    from hf_hybrid.cli.fine_tune import check_model

    given = line.glimpse("model", "dataset", "eval_dataset")
    for name in given["model"] or []:
        check_model(name)
    for option in ("dataset", "eval_dataset"):
        for name in given[option] or []:
            check_path(option, name)


def _check_samples(line: CommandLine) -> None:
    for name in line.glimpse("sample_prompts")["sample_prompts"] or []:
        try:
            read_prompts(name)
        except ValueError as error:
            raise OptionError(str(error)) from None


def processes(values: argparse.Namespace) -> int:
    """Number of processes: one for each GPU, unless the options say otherwise."""
    if values.num_processes is not None:
        LaunchOptions(num_processes=values.num_processes)  # checks it
        return values.num_processes
    if values.use_cpu or values.memory != "off":
        return 1
    import torch

    return max(torch.accelerator.device_count(), 1)


def launch(line: CommandLine, module: str | None = None, words: Sequence[str] | None = None) -> int:
    """
    Train on several processes of this machine through `accelerate launch`. Each runs `module` with `words`, by default
    [`MODULE`] with those of the command line.

    Returns:
        `int`: Exit status of the process that failed first, as a shell gives it; 0 if none failed.
    """
    from subprocess import CalledProcessError

    from accelerate.commands.launch import launch_command, launch_command_parser
    from accelerate.utils import patch_environment
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    # Processes use gloo under this variable. accelerate's own `--cpu` would start one process, not several.
    on_cpu = {"ACCELERATE_USE_CPU": "true"} if line.values.use_cpu else {}
    module = module or MODULE
    options = launch_command_parser().parse_args(launch_arguments(line, module, words))
    options.signals_to_handle = ",".join(OF_LAUNCHER)  # of torchrun, which accelerate calls
    try:
        with patch_environment(**on_cpu), handing_on(module):
            launch_command(options)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        sys.stderr.write(f"{line.command.program}: process {rank} ended with exit status {failure.exitcode}.\n")
        return _as_shell(failure.exitcode)
    except CalledProcessError as error:
        return _as_shell(error.returncode)
    except SignalException as error:
        return 128 + error.sigval
    return 0


@contextlib.contextmanager
def handing_on(module: str) -> Generator[None]:
    """
    Hand SIGTERM and SIGUSR1 on to the processes that run `module`, the children of this one.

    Schedulers often signal the first process of a job alone. torch's launcher kills its processes 30 seconds after
    SIGTERM, whether they have saved or not, and SIGUSR1 would end the launcher and leave them behind. Here both only go
    on to them. How they end is for them to say (`enable_jit_checkpoint`), and the launcher waits for it.
    """

    def hand_on(number: int, frame: Any) -> None:
        workers = [child for child in psutil.Process().children() if module in _words_of(child)]
        for worker in workers:
            with contextlib.suppress(psutil.NoSuchProcess):
                worker.send_signal(number)
        if not workers:  # they do not run yet
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    before = {}
    if threading.current_thread() is threading.main_thread():  # the only one that may
        before = {number: signal.signal(number, hand_on) for number in HANDED_ON}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _words_of(process: Any) -> list[str]:
    try:
        return process.cmdline()
    except (psutil.Error, OSError):  # it has ended
        return []


def launch_arguments(line: CommandLine, module: str = MODULE, words: Sequence[str] | None = None) -> list[str]:
    """The arguments of `accelerate launch`. Raises [`OptionError`] for an `accelerate_config` that cannot be used."""
    values = line.values
    name = values.accelerate_config or "ddp"
    packaged = CONFIGS / f"{'ddp_cpu' if values.use_cpu and name == 'ddp' else name}.yaml"
    if not packaged.is_file():
        if not Path(name).is_file():
            names = ", ".join(sorted(path.stem for path in CONFIGS.glob("*.yaml")))
            raise OptionError(f"`--accelerate_config {name}` is neither a file nor one of {names}.")
        _check_config(name)
        command = ["--config_file", name]
        if values.num_processes is not None:
            command += ["--num_processes", str(values.num_processes)]
    else:
        if values.use_cpu and packaged.stem != "ddp_cpu":
            raise OptionError(f"`--accelerate_config {name}` needs GPUs. On the CPU leave it out (DDP over gloo).")
        # Port 0 is a free one, so that two runs on one machine do not meet.
        command = ["--config_file", str(packaged), "--num_processes", str(processes(values))]
        command += ["--main_process_port", "0"]
    if words is None:
        words = [*([] if line.command is TRAIN else [line.command.name]), *line.arguments]
    return [*command, "--module", module, *words]


def _check_config(name: str) -> None:
    from accelerate.commands.config.config_args import load_config_from_file

    try:
        if Path(name).suffix != ".json":
            read_options(Path(name).read_text(encoding="utf-8"))  # which refuses what YAML would take in silence
        load_config_from_file(name)
    except Exception as error:  # whatever a broken file leads to
        raise OptionError(
            f"`--accelerate_config {name}` cannot be read: {error} Give a file that `accelerate config` wrote."
        ) from error


def _as_shell(status: int) -> int:
    return 128 - status if status < 0 else status
