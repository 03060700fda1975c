"""
Provenance of a run: its command, hardware, versions and experiment trackers.

All of it is published with the card, so records/redaction.py removes secrets and paths of the machine first.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import re
import shlex
import shutil
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

import psutil

import hf_hybrid
from hf_hybrid.records.redaction import REMOVED, clean, is_secret_name, redact
from hf_hybrid.records.summary import format_bytes

_CONTROL = re.compile(r"[\x00-\x1f\x7f\u0085\u2028\u2029]+")


def one_line(value: object) -> str:
    """A value as text without line breaks and control characters."""
    return _CONTROL.sub(" ", str(value)).strip()


def unique(values: Iterable) -> list:
    """The values that are not empty, each once, in order."""
    return list(dict.fromkeys(filter(None, values)))


def listed(value: str | Iterable | None) -> list:
    """A list of what may be one text, several, or `None`."""
    return [] if value is None else [value] if isinstance(value, str) else list(value)


_OWN_MODULES = {"hf_hybrid": "hf-hybrid", "hf_hybrid.cli.trial": "hf-hybrid train"}
"""What to type instead of `python -m` with a module of ours; `hf-hybrid train` starts its processes with the first."""


def command(secrets: Iterable[str | None] = (), argv: Sequence[str] | None = None) -> str | None:
    """
    Return the command that repeats this process (or `argv`), without secrets; `None` in notebooks and at a prompt.
    Installed commands (`hf-hybrid`, `trl`) stand by their names; scripts and modules are run by `python`.
    """
    script, *arguments = sys.argv if argv is None else argv
    if script in ("", "-", "-c") or "ipykernel" in script or "colab_kernel" in script:
        return None
    path, started = Path(script), getattr(sys, "orig_argv", [])[1:] if argv is None else []
    started = started[: len(started) - len(arguments)]  # what the interpreter was given: its options, and what to run
    if len(started) > 1 and started[-2] == "-m":
        parts = _OWN_MODULES.get(started[-1], f"python -m {started[-1]}").split()
    elif path.suffix in ("", ".exe") and script in (
        shutil.which(path.name),
        str(Path(sys.executable).parent / path.name),
    ):
        parts = [path.name.removesuffix(".exe")]
    else:
        parts = ["python", clean(script)]
    for before, argument in zip(["", *arguments], arguments):
        name, equals, _ = argument.partition("=")
        if equals and is_secret_name(name):
            parts.append(f"{name}={REMOVED}")
        elif before.startswith("-") and "=" not in before and is_secret_name(before) and not argument.startswith("--"):
            parts.append(REMOVED)
        else:
            parts.append(clean(argument, secrets))
    # A quoted `~` would not be the home folder.
    homes = (part.startswith("~/") and len(part) > 2 for part in parts)
    quoted = (f"~/{shlex.quote(part[2:])}" if home else shlex.quote(part) for part, home in zip(parts, homes))
    return one_line(" ".join(quoted))


def hardware(device: str, processes: int, devices: int) -> dict[str, str]:
    """Describe the hardware. `device` is the kind of the devices, `devices` their number over all processes."""
    import torch  # here, because `hf-hybrid env` asks this file for versions also where torch is broken

    from hf_hybrid.machine import describe_device

    parts = {"CPU": cpu(), "RAM": format_bytes(psutil.virtual_memory().total)}
    if known := describe_device(torch.device(device)):
        parts = {"Accelerator": f"{devices} x {known['name']}, {format_bytes(known['total_memory'])} each", **parts}
    elif device != "cpu":
        parts = {"Accelerator": f"{devices} x {device}", **parts}
    return {**parts, **({"Processes": str(processes)} if processes > 1 else {})}


def cpu() -> str:
    """Name and logical cores of the CPU."""
    cpuinfo = Path("/proc/cpuinfo")  # of Linux, where `platform` does not know the name
    names = re.findall(r"(?im)^model name\s*:\s*(.+)$", cpuinfo.read_text()) if cpuinfo.is_file() else []
    name = names[0].strip() if names else platform.processor() or platform.machine()
    return f"{name}, {os.cpu_count()} logical cores"


def versions(*more: str) -> dict[str, str]:
    """Versions of Python and of the packages that a run depends on, if they are installed."""
    # Of itself the package knows it also where it is not installed, as in a checkout on `PYTHONPATH`.
    known = {"Python": platform.python_version(), "hf_hybrid": hf_hybrid.__version__}
    packages = ("transformers", "torch", "accelerate", "datasets", "tokenizers", "safetensors", *more)
    for package in filter(None, packages):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            known[package] = importlib.metadata.version(package)
    return known


def tracker_links() -> dict[str, str]:
    """Address of the run on Weights & Biases, if that is in use."""
    address = getattr(getattr(sys.modules.get("wandb"), "run", None), "url", None)
    return {"Weights & Biases": redact(address)} if address else {}
