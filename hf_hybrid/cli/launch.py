"""
Several processes of this machine for a command that trains: how many, and how accelerate starts them.

Several GPUs need several processes. Each runs the same command (`python -m hf_hybrid train ...`), as processes of a
launcher of your own do: `torchrun --nproc_per_node 8 -m hf_hybrid train --config run.yaml`. A single process trains
where it was started: that is sooner, and Ctrl-C and debuggers reach it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Generator
from pathlib import Path
from typing import Any

import psutil

from hf_hybrid.cli.console import write_error
from hf_hybrid.cli.loading import refusing
from hf_hybrid.cli.options import CommandLine, OptionError
from hf_hybrid.cli.yaml_file import read_options

MODULE = "hf_hybrid"
CONFIGS = Path(__file__).parent / "accelerate_configs"
HANDED_ON = (signal.SIGTERM, signal.SIGUSR1)


def launch(line: CommandLine, processes: int) -> int:
    """
    Train on several processes of this machine through `accelerate launch`. Returns the exit status of the process that
    failed first, as a shell gives it; 0 if none failed.
    """
    from subprocess import CalledProcessError

    import torch
    from accelerate.commands.launch import launch_command, launch_command_parser
    from accelerate.utils import patch_environment
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    # Processes use gloo under this variable. accelerate's own `--cpu` would start one process, not several.
    on_cpu = {"ACCELERATE_USE_CPU": "true"} if line.values.use_cpu else {}
    options = launch_command_parser().parse_args(launch_arguments(line, processes))
    if not (on_cpu or options.config_file not in map(str, CONFIGS.glob("*")) or torch.accelerator.is_available()):
        # Each process would take itself for the only one, and train all of the run.
        raise OptionError(f"`--num_processes {processes}` needs GPUs, and this machine has none. Add `--cpu`.")
    options.signals_to_handle = "SIGINT,SIGHUP,SIGQUIT"  # at which torchrun ends its processes; at SIGTERM it shall not
    try:
        with patch_environment(**on_cpu), handing_on():
            launch_command(options)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        write_error(f"{line.command.program}: process {rank} ended with exit status {failure.exitcode}.\n")
        status = failure.exitcode
    except CalledProcessError as error:
        status = error.returncode
    except SignalException as error:
        status = -error.sigval
    else:
        status = 0
    return 128 - status if status < 0 else status  # as a shell


@contextlib.contextmanager
def handing_on() -> Generator[None]:
    """
    Hand SIGTERM and SIGUSR1 on to the processes that train, the children of this one.

    Schedulers often signal the first process of a job alone. torch's launcher kills its processes 30 seconds after
    SIGTERM, whether they have saved or not, and SIGUSR1 would end the launcher and leave them behind. Here both only go
    on to them. How they end is for them to say (`enable_jit_checkpoint`), and the launcher waits for it.
    """

    def hand_on(number: int, frame: Any) -> None:
        begun = False
        for child in psutil.Process().children():
            with contextlib.suppress(psutil.Error, OSError):  # it has ended
                if MODULE in child.cmdline():
                    begun = True
                    child.send_signal(number)
        if not begun:
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


def launch_arguments(line: CommandLine, processes: int) -> list[str]:
    """Return the arguments of `accelerate launch`. Raises [`OptionError`] for a config that cannot be used."""
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
        command = ["--config_file", str(packaged), "--num_processes", str(processes), "--main_process_port", "0"]
    return [*command, "--module", MODULE, line.command.name, *line.arguments]


def _check_config(name: str) -> None:
    from accelerate.commands.config.config_args import load_config_from_file

    with refusing(f"`--accelerate_config {name}` cannot be read", "Give a file that `accelerate config` wrote."):
        if Path(name).suffix != ".json":
            read_options(Path(name).read_text(encoding="utf-8"))  # which refuses what YAML would take in silence
        load_config_from_file(name)
