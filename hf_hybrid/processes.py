"""How a run is spread over processes: what the options ask for, and what the launcher asks for by its environment."""

from __future__ import annotations

import logging
import os
from typing import Any

logger = logging.getLogger(__name__)

# Those of torchrun and of the MPI launchers that accelerate and torch read.
_WORLD_SIZES = ("WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE")

# In the order in which they are named where several are asked for.
_LAUNCHED = {
    "deepspeed": "ACCELERATE_USE_DEEPSPEED",
    "fsdp": "ACCELERATE_USE_FSDP",
    "megatron_lm": "ACCELERATE_USE_MEGATRON_LM",
    "parallelism_config": "ACCELERATE_USE_PARALLELISM_CONFIG",
}


def sharding_of(args: Any) -> str | None:
    """
    What leaves each process a part of the weights, gradients or states, if something does.

    Args:
        args (`TrainingArguments`): Its options `deepspeed`, `fsdp` and `parallelism_config` are read, and the
            environment by which `accelerate launch` says the same.

    Returns:
        `str`: `"deepspeed"`, `"fsdp"`, `"megatron_lm"` or `"parallelism_config"`; `None` with one process, or DDP.
    """
    for name, variable in _LAUNCHED.items():
        if getattr(args, name, None) or _is_on(variable):
            return name
    return None


def mixed_precision_of(args: Any) -> str:
    """`"no"`, `"bf16"` or `"fp16"`: what the options ask for, else what the launcher does."""
    if getattr(args, "fp16", False):
        return "fp16"
    if getattr(args, "bf16", False):
        return "bf16"
    return os.environ.get("ACCELERATE_MIXED_PRECISION", "no")


def check_sharding_device(args: Any) -> None:
    """
    Refuse FSDP on the CPU: accelerate knows it for accelerators only, and would train with DDP without a word.

    Raises:
        ValueError: With what to change.
    """
    on_cpu = getattr(args, "use_cpu", False) or _is_on("ACCELERATE_USE_CPU")
    if on_cpu and sharding_of(args) == "fsdp":
        raise ValueError(
            "`fsdp` shards nothing with `use_cpu=True`: accelerate has it for GPUs only and would train with DDP. Drop "
            "`fsdp` (and `--use_fsdp` of the launcher), or train on GPUs."
        )


def check_whole_parameters(model: Any) -> None:
    """
    Refuse leaps of a model whose parameters are sharded already, as by `from_pretrained(..., tp_plan="auto")`.

    Raises:
        ValueError: With the first such parameter.
    """
    for name, parameter in model.named_parameters():
        if getattr(parameter, "device_mesh", None) is not None:
            raise ValueError(
                f"`{name}` is spread over processes (a `DTensor`), and leaps need whole parameters. Load the model "
                "without `tp_plan`, or set `enable_predict=False`."
            )


def warn_of_lone_process() -> None:
    """Say it where `accelerate launch` was asked for several processes and started one, as it does with `--cpu`."""
    # It then leaves the address of a first process behind, and no number of processes.
    launched = "ACCELERATE_USE_CPU" in os.environ and "MASTER_ADDR" in os.environ
    if launched and not any(variable in os.environ for variable in _WORLD_SIZES):
        logger.warning(
            "This is the only process, and `accelerate launch` was asked for more: with `--cpu`, and on a machine with "
            "fewer than two GPUs, it starts one whatever `--num_processes` says. To train with several on the CPU, "
            "launch with `torchrun --nproc_per_node 2 SCRIPT --use_cpu`; `hf-hybrid train --cpu` starts them itself."
        )


def _is_on(variable: str) -> bool:
    return os.environ.get(variable, "false").lower() in ("1", "true", "yes")
