"""
Runs a module with the simulated device, in this process and in those that it starts with `sys.executable -m MODULE`.

    python tests/simulated_gpu/run_module.py -m MODULE ARGUMENT...

The module finds the device as it would find a real one, and so the command of a benchmark is tested as it stands. Where
the device cannot be simulated, the process says why and ends with the status `UNAVAILABLE`.
"""

from __future__ import annotations

import contextlib
import os
import runpy
import sys
import tempfile
from pathlib import Path

UNAVAILABLE = 77
"""The status that test programs use for "skipped"."""


def main() -> None:
    _, option, module, *arguments = sys.argv
    assert option == "-m", __doc__
    os.environ.pop("CUDA_VISIBLE_DEVICES", None)
    sys.path[0] = str(Path(__file__).resolve().parents[1])
    # torch would ask for a GPU at the first operation, before there is one.
    sanitizer = os.environ.pop("TORCH_CUDA_SANITIZER", None)
    try:
        from simulated_gpu import device

        with contextlib.suppress(ImportError):
            import bitsandbytes  # noqa: F401 - it would load its library for CUDA, had torch the device already
        device.install()
    except RuntimeError as error:  # `device.Unavailable`, which could not be imported
        sys.stderr.write(f"{error}\n")
        sys.exit(UNAVAILABLE)
    import torch

    torch.set_num_threads(1)
    if sanitizer is not None:
        import torch.cuda._sanitizer

        os.environ["TORCH_CUDA_SANITIZER"] = sanitizer  # for the processes that this one starts
        torch.cuda._sanitizer.enable_cuda_sanitizer()
    with tempfile.TemporaryDirectory() as folder:
        python = Path(folder) / "python"
        python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{__file__}" "$@"\n')
        python.chmod(0o700)
        sys.executable, sys.argv = str(python), [module, *arguments]
        sys.path[0] = ""  # as after `python -m`
        runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
