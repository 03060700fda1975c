"""
`hf-hybrid env`: versions, hardware and settings for a bug report. It shows no user, folder or token.

`accelerate env` shows more of accelerate's configuration, and the environment of torch.
"""

from __future__ import annotations

import argparse
import os
import platform

from hf_hybrid.cli.console import write_out

PACKAGES = ("huggingface_hub", "trl", "peft", "bitsandbytes", "torchao", "gguf", "matplotlib", "optuna", "deepspeed")
"""Beside those that every run depends on; what is not installed is not shown."""
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
    """The report as a Markdown list."""
    from hf_hybrid.hub.provenance import versions

    facts = versions(*PACKAGES) | {"Platform": platform.platform()}
    try:
        facts |= _hardware()
    except Exception as error:  # a report on a broken machine must not break
        facts["Hardware"] = f"unknown ({type(error).__name__})"
    facts |= {name: os.environ[name] for name in VARIABLES if name in os.environ}
    return "".join(f"- {name}: {fact}\n" for name, fact in facts.items())


def _hardware() -> dict[str, str]:
    import torch

    from hf_hybrid.hub.provenance import hardware

    kind = torch.accelerator.current_accelerator(check_available=True)
    known = hardware("cpu" if kind is None else kind.type, 1, torch.accelerator.device_count())
    return {**known, "CUDA of torch": torch.version.cuda or torch.version.hip or "none"}
