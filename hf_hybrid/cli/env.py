"""
`hf-hybrid env`: versions, hardware and settings for a bug report. It shows no user, folder or token.

`accelerate env` shows more of accelerate's configuration, and the environment of torch.
"""

from __future__ import annotations

import argparse
import os
import platform
from importlib import metadata

import hf_hybrid
from hf_hybrid.cli.console import write_out

PACKAGES = (
    "torch", "transformers", "accelerate", "datasets", "safetensors", "tokenizers", "huggingface_hub", "trl", "peft",
    "bitsandbytes", "torchao", "gguf", "matplotlib", "optuna", "deepspeed",
)  # fmt: skip
VARIABLES = ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "HF_HUB_OFFLINE", "PYTORCH_CUDA_ALLOC_CONF")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Describe the command and its options."""
    parser.description = (
        "Print versions and hardware as Markdown for a bug report, without token, user name or folder. Add the output "
        "of `accelerate env` if you use it."
    )


def run(args: argparse.Namespace) -> int:
    """Print the report; returns 0."""
    write_out(report())
    return 0


def report() -> str:
    """The report as a Markdown list. A line that fails says `unknown`."""
    from hf_hybrid.hub.provenance import cpu

    facts = {"hf_hybrid": hf_hybrid.__version__, "Python": platform.python_version(), "Platform": platform.platform()}
    versions = {distribution.name.replace("-", "_"): distribution.version for distribution in metadata.distributions()}
    facts |= {name: versions.get(name, "not installed") for name in PACKAGES}
    for name, find in {"CPU": cpu, "RAM": _ram, "GPUs": _gpus}.items():
        try:
            facts[name] = find()
        except Exception as error:  # a report on a broken machine must not break
            facts[name] = f"unknown ({type(error).__name__})"
    facts |= {name: os.environ[name] for name in VARIABLES if name in os.environ}
    return "".join(f"- {name}: {fact}\n" for name, fact in facts.items())


def _ram() -> str:
    import psutil

    total, available = psutil.virtual_memory()[:2]
    return f"{total / 2**30:.1f} GiB, {available / 2**30:.1f} GiB available"


def _gpus() -> str:
    import torch

    from hf_hybrid.machine import describe_device

    kind = torch.accelerator.current_accelerator(check_available=True)
    devices = [torch.device(kind.type, index) for index in range(torch.accelerator.device_count())] if kind else []
    gpus = [(device.type, describe_device(device)) for device in devices]
    names = [f"{gpu['name']}, {gpu['total_memory'] / 2**30:.1f} GiB" if gpu else name for name, gpu in gpus]
    return f"{'; '.join(names) or 'none'} (CUDA of torch: {torch.version.cuda or torch.version.hip or 'none'})"
