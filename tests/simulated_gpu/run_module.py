"""
Runs modules with the simulated device, each in a process that is forked from one that has imported the libraries.

    python tests/simulated_gpu/run_module.py FOLDER

makes the program `FOLDER/python`. While this process lives, `FOLDER/python -m MODULE ARGUMENT...` is what
`python -m MODULE ARGUMENT...` is on a machine with the device. The module finds the device as it would find a real one,
and its `sys.executable` is that program. So the command of a benchmark is tested as it stands, with the processes that
it starts. Most of them run for less time than their imports would take.

The program hands its arguments, environment, folder and standard streams to this process over a socket, waits, and ends
with the status that comes back. Where the device cannot be simulated, this process says why and ends with the status
`UNAVAILABLE`.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import runpy
import signal
import socket
import sys
import traceback
from pathlib import Path

UNAVAILABLE = 77
"""The status that test programs use for "skipped"."""
CLIENT = """#!{python} -SE
import json, os, socket, sys
asked = json.dumps([sys.argv[1:], dict(os.environ), os.getcwd()]).encode()
os.chdir({folder!r})  # the whole path may be too long for an address
with socket.socket(socket.AF_UNIX) as server:
    server.connect("socket")
    socket.send_fds(server, [len(asked).to_bytes(4, "big")], [0, 1, 2])
    server.sendall(asked)
    status = server.recv(1)
sys.exit(status[0] if status else 1)
"""


def main() -> None:
    folder = Path(sys.argv[1]).absolute()
    os.environ.pop("CUDA_VISIBLE_DEVICES", None)
    os.environ.update(OMP_NUM_THREADS="1")
    sys.path[0] = str(Path(__file__).resolve().parents[1])
    gc.disable()  # collections would look through what is imported, again and again
    try:
        from simulated_gpu import device

        with contextlib.suppress(ImportError):
            import bitsandbytes  # noqa: F401 - it would load its library for CUDA, had torch the device already
        device.install()
    except RuntimeError as error:  # `device.Unavailable`, which could not be imported
        sys.stderr.write(f"{error}\n")
        sys.exit(UNAVAILABLE)
    import hf_hybrid.trainer  # noqa: F401

    gc.collect()
    gc.freeze()  # and those in the processes do not
    gc.enable()
    os.chdir(folder)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("socket")
        server.listen()
        made = folder / "made"
        made.write_text(CLIENT.format(python=sys.executable, folder=str(folder)))
        made.chmod(0o700)
        python = made.rename(folder / "python")
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for those that answer
        while True:
            client, _ = server.accept()
            if os.fork() == 0:
                server.close()
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                _answer(client, str(python))
            client.close()


def _answer(client: socket.socket, python: str) -> None:
    """Run what one client asks for, and send it the status; does not return."""
    size, streams, *_ = socket.recv_fds(client, 4, 3)
    asked = client.makefile("rb").read(int.from_bytes(size, "big"))
    child = os.fork()
    if child == 0:
        client.close()
        status = 1
        try:
            _run(*json.loads(asked), streams, python)
            status = 0
        except SystemExit as ended:
            status = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
            if status and not isinstance(ended.code, int):
                sys.stderr.write(f"{ended.code}\n")
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)
    _, status = os.waitpid(child, 0)
    client.sendall(bytes([os.waitstatus_to_exitcode(status) & 255]))
    os._exit(0)


def _run(arguments: list[str], environment: dict[str, str], folder: str, streams: list[int], python: str) -> None:
    """`python -m MODULE ARGUMENT...`"""
    option, module, *rest = arguments
    assert option == "-m", arguments
    for target, stream in enumerate(streams):
        os.dup2(stream, target)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    os.environ.pop("CUDA_VISIBLE_DEVICES", None)
    sys.path[0] = ""  # as after `python -m`
    sys.path[1:1] = environment.get("PYTHONPATH", "").split(os.pathsep)
    sys.executable, sys.argv = python, [module, *rest]
    import torch
    from huggingface_hub import constants

    constants.HF_HOME = environment.get("HF_HOME", constants.HF_HOME)  # read when it was imported
    torch.set_num_threads(1)
    if "TORCH_CUDA_SANITIZER" in environment:  # torch would have asked for a GPU before there was one
        import torch.cuda._sanitizer

        torch.cuda._sanitizer.enable_cuda_sanitizer()
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
