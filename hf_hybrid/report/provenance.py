"""
How and where a run was made: its command, hardware, versions and experiment trackers.

All of it is published with the card, so secrets are removed first ([`redact`]) and paths do not name the user's home
([`clean`]). What cannot be recognised as a secret stays: a password behind an option named `--note`, for example.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import shlex
import sys
import urllib.parse
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import psutil
import torch

from hf_hybrid.machine import describe_device
from hf_hybrid.report.summary import format_bytes

_SECRET_WORDS = {"token", "secret", "password", "passwd", "apikey", "credential", "credentials"}
_TOKENIZER_WORDS = {"eos", "bos", "pad", "unk", "sep", "cls", "mask", "special", "image"}
_SECRET_VALUES = re.compile(
    r"\b(?:hf_[A-Za-z0-9]{16,}|sk-[A-Za-z0-9_-]{16,}|gh[pousr]_[A-Za-z0-9]{16,}|github_pat_\w{16,}|glpat-[\w-]{16,}"
    r"|xox[abprs]-[\w-]{10,}|AKIA[A-Z0-9]{12,}|ey[\w-]{10,}\.[\w-]{10,}\.[\w-]{10,})"
)
_CREDENTIALS_IN_URL = re.compile(r"(?<=://)[^/@\s]+@")
_SECRET_IN_JSON = re.compile(r"""(["'])([\w-]+)\1(\s*:\s*)(["'])((?:(?!\4).)*)\4""")
REMOVED = "REMOVED"


def is_secret_name(name: str) -> bool:
    """Whether an option or variable of this name holds a secret: `hub_token` does, `pad_token` does not."""
    words = set(re.split(r"[-_.]+", name.lower()))
    if words & _SECRET_WORDS:
        return not (words & _SECRET_WORDS == {"token"} and words & _TOKENIZER_WORDS)
    return "key" in words and bool(words & {"api", "access", "private", "secret", "auth"})


def redact(value: str, secrets: Iterable[str] = ()) -> str:
    """
    A text without `secrets`, values of environment variables with secret names, known formats of tokens, credentials
    in addresses, and values under secret names in JSON.
    """
    of_environment = (value for name, value in os.environ.items() if is_secret_name(name) and len(value) >= 8)
    for secret in sorted({*secrets, *of_environment}, key=len, reverse=True):
        value = value.replace(secret, REMOVED)
    value = _CREDENTIALS_IN_URL.sub(f"{REMOVED}@", _SECRET_VALUES.sub(REMOVED, value))

    def hide(found: re.Match) -> str:
        quote, name, colon, second, _ = found.groups()
        return f"{quote}{name}{quote}{colon}{second}{REMOVED}{second}" if is_secret_name(name) else found.group()

    return _SECRET_IN_JSON.sub(hide, value)


def clean(value: Any, secrets: Iterable[str] = ()) -> str:
    """A value as it may be published: redacted, paths relative to the working folder or to `~`."""
    shown = redact(str(value), secrets)
    for folder, short in ((Path.cwd(), ""), (Path.home(), "~/")):
        prefix = str(folder).rstrip("/\\")
        if prefix:  # the root of the file system shortens nothing
            shown = re.sub(rf"(?<![\w./-]){re.escape(prefix)}(?:[/\\]|(?![\w.-]))", short, shown)
    return shown or ("." if str(value) else "")


def command(secrets: Iterable[str] = (), argv: Sequence[str] | None = None) -> str | None:
    """The command that started this process (or `argv`), without secrets; `None` in notebooks and at a prompt."""
    script, *arguments = sys.argv if argv is None else argv
    if script in ("", "-", "-c") or "ipykernel" in script or "colab_kernel" in script:
        return None
    given = getattr(sys, "orig_argv", [])[1:]
    is_module = argv is None and "-m" in given[:-1] and Path(script).is_absolute()
    parts = ["python", *(["-m", given[given.index("-m") + 1]] if is_module else [clean(script)])]
    hide_next = False
    for argument in arguments:
        name, equals, value = argument.partition("=")
        is_option = argument.startswith("-")
        is_secret = is_option and is_secret_name(name.lstrip("-"))
        if hide_next and not argument.startswith("--"):
            parts.append(REMOVED)
        elif equals and is_option:
            parts.append(f"{name}={REMOVED if is_secret else clean(value, secrets)}")
        else:
            parts.append(clean(argument, secrets))
        hide_next = is_secret and not equals
    return shlex.join(parts)


def hardware(device: str, processes: int, devices: int) -> dict[str, str]:
    """What the run computed on; `device` is the kind of its devices, `devices` how many all its processes have."""
    found = {}
    known = describe_device(torch.device(device))
    if known:
        found["Accelerator"] = f"{devices} x {known['name']}, {format_bytes(known['total_memory'])} each"
    elif device != "cpu":
        found["Accelerator"] = f"{devices} x {device}"
    found["CPU"] = f"{_cpu_name()}, {os.cpu_count()} logical cores"
    found["RAM"] = format_bytes(psutil.virtual_memory().total)
    return {**found, **({"Processes": str(processes)} if processes > 1 else {})}


def _cpu_name() -> str:
    try:
        names = re.findall(r"(?im)^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(encoding="utf-8"))
    except OSError:
        names = []
    return names[0].strip() if names else platform.processor() or platform.machine()


def versions(*more: str) -> dict[str, str]:
    """Versions of Python and of the packages that a run depends on, if they are installed."""
    found = {"Python": platform.python_version()}
    packages = ("hf_hybrid", "transformers", "torch", "accelerate", "datasets", "tokenizers", "safetensors", *more)
    for package in filter(None, packages):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def tracker_links() -> dict[str, str]:
    """Addresses of the run in the experiment trackers that are in use: Weights & Biases, Trackio, Comet."""
    comet = sys.modules.get("comet_ml")
    found = {
        "Weights & Biases": getattr(getattr(sys.modules.get("wandb"), "run", None), "url", None),
        "Trackio": trackio_url(),
        "Comet": getattr(comet.get_running_experiment() if comet is not None else None, "url", None),
    }
    return {name: redact(address) for name, address in found.items() if address}


def trackio_url() -> str | None:
    """Where the Space that Trackio reports to shows the current run; `None` without one."""
    variables = getattr(sys.modules.get("trackio"), "context_vars", None)
    run = variables.current_run.get() if variables is not None else None
    space = getattr(run, "_space_id", None)
    if space is None:
        return None
    query = urllib.parse.urlencode({"project": run.project, "runs": run.name, "sidebar": "collapsed"})
    return f"https://{space.replace('/', '-')}.hf.space?{query}"
