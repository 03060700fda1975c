"""How and where a run was made: its command without secrets, hardware, versions, experiment trackers."""

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

REMOVED = "REMOVED"
_SECRET_WORDS = {"token", "secret", "password", "passwd", "apikey", "credential", "credentials"}
_TOKENIZER_WORDS = {"eos", "bos", "pad", "unk", "sep", "cls", "mask", "special", "image"}
_SECRET_VALUES = re.compile(
    r"\b(?:hf_[A-Za-z0-9]{16,}|sk-[A-Za-z0-9_-]{16,}|gh[pousr]_[A-Za-z0-9]{16,}|github_pat_\w{16,}|glpat-[\w-]{16,}"
    r"|xox[abprs]-[\w-]{10,}|AKIA[A-Z0-9]{12,}|ey[\w-]{10,}\.[\w-]{10,}\.[\w-]{10,})"
)
_CREDENTIALS_IN_URL = re.compile(r"(?<=://)[^/@\s]+@")
_SECRET_IN_JSON = re.compile(r"""(["'])([\w-]+)\1(\s*:\s*)(["'])((?:(?!\4).)*)\4""")
_PACKAGES = ("hf_hybrid", "transformers", "torch", "accelerate", "datasets", "tokenizers", "safetensors")


def is_secret_name(name: str) -> bool:
    """Whether an option or variable of this name holds a secret: `hub_token` does, `pad_token` does not."""
    words = set(re.split(r"[-_.]+", name.lower()))
    if words & _SECRET_WORDS:
        return not (words & _SECRET_WORDS == {"token"} and words & _TOKENIZER_WORDS)
    return "key" in words and bool(words & {"api", "access", "private", "secret", "auth"})


def redact(value: str, secrets: Iterable[str] = ()) -> str:
    """
    A text without what looks like a secret: known tokens, formats of tokens, credentials in addresses, values under
    secret names in JSON.

    Args:
        secrets: Values to remove wherever they stand.
    """
    for secret in sorted({*secrets, *_secrets_of_environment()}, key=len, reverse=True):
        value = value.replace(secret, REMOVED)
    value = _CREDENTIALS_IN_URL.sub(f"{REMOVED}@", _SECRET_VALUES.sub(REMOVED, value))

    def hide(found: re.Match) -> str:
        quote, name, colon, second, _ = found.groups()
        return f"{quote}{name}{quote}{colon}{second}{REMOVED}{second}" if is_secret_name(name) else found.group()

    return _SECRET_IN_JSON.sub(hide, value)


def _secrets_of_environment() -> list[str]:
    return [value for name, value in os.environ.items() if is_secret_name(name) and len(value) >= 8]


def shorten_path(value: str) -> str:
    """A text whose paths are relative to the working folder, or to `~` below the user's home."""
    for folder, short in ((Path.cwd(), ""), (Path.home(), "~/")):
        prefix = str(folder).rstrip("/\\")
        if prefix:  # the root of the file system shortens nothing
            value = re.sub(rf"(?<![\w./-]){re.escape(prefix)}(?:[/\\]|(?![\w.-]))", short, value)
    return value or "."


def clean(value: Any, secrets: Iterable[str] = ()) -> str:
    """A value of an option as it may be published: without secrets and without the user's home."""
    shown = str(value)
    return shorten_path(redact(shown, secrets)) if shown else shown


def command(secrets: Iterable[str] = (), argv: Sequence[str] | None = None) -> str | None:
    """
    The command that started this process, without secrets; `None` in notebooks and at a prompt.

    Args:
        secrets: Values to remove wherever they stand.
        argv: The script and its arguments. Default: of this process.
    """
    module = _module_name() if argv is None else None
    script, *arguments = sys.argv if argv is None else argv
    if script in ("", "-", "-c") or "ipykernel" in script or "colab_kernel" in script:
        return None
    parts = ["python", *(["-m", module] if module else [clean(script)])]
    hide_next = False
    for argument in arguments:
        name, equals, value = argument.partition("=")
        secret = argument.startswith("-") and is_secret_name(name.lstrip("-"))
        if hide_next and not argument.startswith("--"):
            parts.append(REMOVED)
        elif secret and equals:
            parts.append(f"{name}={REMOVED}")
        elif equals and argument.startswith("-"):
            parts.append(f"{name}={clean(value, secrets)}")
        else:
            parts.append(clean(argument, secrets))
        hide_next = secret and not equals
    return shlex.join(parts)


def _module_name() -> str | None:
    given = getattr(sys, "orig_argv", [])[1:]
    return given[given.index("-m") + 1] if "-m" in given[:-1] and Path(sys.argv[0]).is_absolute() else None


def hardware(device: str, processes: int, devices: int) -> dict[str, str]:
    """
    What the run computed on, as far as it can be asked.

    Args:
        device: Type of torch device of this process, for example `cuda`.
        processes: Processes of the run.
        devices: Accelerators of the run; of one kind, as far as this process knows.
    """
    import psutil
    import torch

    from hf_hybrid.report.summary import format_bytes

    found = {}
    if device == "cuda":
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        found["Accelerator"] = f"{devices} x {properties.name}, {format_bytes(properties.total_memory)} each"
    elif device != "cpu":
        found["Accelerator"] = f"{devices} x {device}"
    found["CPU"] = f"{_cpu_name()}, {os.cpu_count()} logical cores"
    found["RAM"] = format_bytes(psutil.virtual_memory().total)
    if processes > 1:
        found["Processes"] = str(processes)
    return found


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.lower().startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def versions(*more: str) -> dict[str, str]:
    """Versions of Python and of the packages that a run rests on, those that are installed."""
    found = {"Python": platform.python_version()}
    for package in (*_PACKAGES, *more):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def tracker_links() -> dict[str, str]:
    """Addresses of the run in the experiment trackers that are in use: Weights & Biases, Trackio, Comet."""
    links = {}
    run = getattr(sys.modules.get("wandb"), "run", None)
    if getattr(run, "url", None):
        links["Weights & Biases"] = run.url
    if (trackio := trackio_url()) is not None:
        links["Trackio"] = trackio
    comet = sys.modules.get("comet_ml")
    experiment = comet.get_running_experiment() if comet is not None else None
    if getattr(experiment, "url", None):
        links["Comet"] = experiment.url
    return {name: redact(link) for name, link in links.items()}


def trackio_url() -> str | None:
    """Where the Space that Trackio reports to shows the current run; `None` without one."""
    variables = getattr(sys.modules.get("trackio"), "context_vars", None)
    run = variables.current_run.get() if variables is not None else None
    space = getattr(run, "_space_id", None)
    if space is None:
        return None
    query = urllib.parse.urlencode({"project": run.project, "runs": run.name, "sidebar": "collapsed"})
    return f"https://{space.replace('/', '-')}.hf.space?{query}"
