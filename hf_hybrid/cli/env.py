"""`hf-hybrid env`: versions, hardware and settings for a bug report. It shows no user, folder or token."""

from __future__ import annotations

import argparse
import importlib.util
import os
import platform
import sys
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import hf_hybrid

REQUIRED = ("torch", "transformers", "accelerate", "datasets", "safetensors", "tokenizers", "huggingface_hub")
EXTRAS: dict[str, str | None] = {
    "peft": "peft",
    "bitsandbytes": "quantization",
    "torchao": "export",
    "gguf": "export",
    "trl": "trl",
}
EXTRAS |= {"matplotlib": "report", "optuna": "sweep", "deepspeed": None}
"""Packages that some options need, and the extra of `hf_hybrid` that installs each."""
_SETTINGS = ("distributed_type", "num_processes", "num_machines", "mixed_precision", "use_cpu")
_VARIABLES = ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "HF_HUB_OFFLINE", "PYTORCH_CUDA_ALLOC_CONF")


def add_parser(subparsers, summary: str) -> argparse.ArgumentParser:
    """Register the subcommand."""
    parser = subparsers.add_parser(
        "env",
        help=summary,
        description="Print versions, hardware and settings as Markdown for a bug report. Nothing is downloaded, and no "
        "token, user name or folder is printed.",
    )
    parser.set_defaults(run=run)
    return parser


def run(args: argparse.Namespace) -> int:
    """Print the report; returns 0."""
    sys.stdout.write(report())
    return 0


def report() -> str:
    """The report as a Markdown list. A line that fails says `unknown`."""
    facts = {"hf_hybrid": hf_hybrid.__version__, "Python": platform.python_version()}
    facts["Platform"] = _found(platform.platform)
    facts |= {name: _found(lambda name=name: metadata.version(name), "not installed") for name in REQUIRED}
    facts |= {name: _found(lambda name=name: _extra(name)) for name in EXTRAS}
    finders = {"CPU": _cpu, "RAM": _ram, "CUDA of torch": _cuda, "GPUs by torch": _torch_gpus}
    finders |= {"GPUs by the driver (NVML)": _nvml_gpus, "`accelerate config`": _accelerate_config}
    facts |= {name: _found(find) for name, find in finders.items()}
    facts |= {name: os.environ[name] for name in _VARIABLES if name in os.environ}
    return "".join(f"- {name}: {fact}\n" for name, fact in facts.items())


def _found(find: Callable[[], str], otherwise: str | None = None) -> str:
    try:
        return find()
    except Exception as error:  # a report on a broken machine must not break
        return otherwise or f"unknown ({type(error).__name__})"


def _extra(name: str) -> str:
    if importlib.util.find_spec(name) is not None:
        return _found(lambda: metadata.version(name), "installed, version unknown")
    extra = EXTRAS[name]
    how = f'pip install "hf-hybrid[{extra}]"' if extra else f"pip install {name}"
    return f"not installed ({how})"


def _cpu() -> str:
    from hf_hybrid.hub.provenance import cpu

    return cpu()


def _ram() -> str:
    from hf_hybrid.plan.accounting import host_memory

    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return f"{total:.1f} GiB, {host_memory() / 2**30:.1f} GiB available"


def _cuda() -> str:
    import torch

    return f"{torch.version.cuda or torch.version.hip or 'none'}, available: {torch.accelerator.is_available()}"


def _torch_gpus() -> str:
    import torch

    from hf_hybrid.machine import describe_device

    kind = torch.accelerator.current_accelerator(check_available=True)
    devices = [] if kind is None else [torch.device(kind.type, i) for i in range(torch.accelerator.device_count())]
    found: list[dict[str, Any]] = [{"name": device.type, **describe_device(device)} for device in devices]
    return _joined(gpu["name"] + (f", {gpu['total_memory'] / 2**30:.1f} GiB" if len(gpu) > 1 else "") for gpu in found)


def _nvml_gpus() -> str:
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return "none (no NVIDIA driver)"
    try:
        handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
        driver = _text(pynvml.nvmlSystemGetDriverVersion())
        return _joined(_nvml_gpu(pynvml, handle) for handle in handles) + f"; driver {driver}"
    finally:
        pynvml.nvmlShutdown()


def _nvml_gpu(pynvml, handle) -> str:
    memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
    name, link = _text(pynvml.nvmlDeviceGetName(handle)), ""
    try:
        generation = pynvml.nvmlDeviceGetMaxPcieLinkGeneration(handle)
        link = f", PCIe {generation} x{pynvml.nvmlDeviceGetMaxPcieLinkWidth(handle)}"
    except pynvml.NVMLError:
        pass  # virtual GPUs do not know their link
    return f"{name}, {memory.total / 2**30:.1f} GiB ({memory.free / 2**30:.1f} free){link}"


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


def _joined(found: Iterator[str]) -> str:
    return "; ".join(found) or "none"


def _accelerate_config() -> str:
    from accelerate.commands.config.config_args import default_config_file, load_config_from_file

    if not Path(default_config_file).is_file():
        return "none"
    config = load_config_from_file(None)
    values = {name: getattr(config, name, None) for name in _SETTINGS}
    return ", ".join(f"{name}={getattr(value, 'value', value)}" for name, value in values.items())
