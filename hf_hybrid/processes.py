"""How a run is spread over processes, by its options and by the environment that a launcher sets."""

from __future__ import annotations

import logging
import os
from typing import Any

logger = logging.getLogger(__name__)

# Set by torchrun and by the MPI launchers that accelerate and torch know.
_WORLD_SIZES = ("WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE")

# If several are asked for, the first is named.
_LAUNCHED = {
    "deepspeed": "ACCELERATE_USE_DEEPSPEED",
    "fsdp": "ACCELERATE_USE_FSDP",
    "megatron_lm": "ACCELERATE_USE_MEGATRON_LM",
    "parallelism_config": "ACCELERATE_USE_PARALLELISM_CONFIG",
}


def sharding_of(args: Any) -> str | None:
    """
    The mechanism that leaves each process a part of the weights, gradients or states; `None` with one process, or DDP.

    The options ask for it, or the environment that `accelerate launch` sets.
    """
    for name, variable in _LAUNCHED.items():
        if getattr(args, name, None) or _is_on(variable):
            return name
    return None


def mixed_precision_of(args: Any) -> str:
    """`"no"`, `"bf16"` or `"fp16"`, by the options, else by the launcher."""
    if getattr(args, "fp16", False):
        return "fp16"
    if getattr(args, "bf16", False):
        return "bf16"
    return os.environ.get("ACCELERATE_MIXED_PRECISION", "no")


def computes_on_cpu(args: Any) -> bool:
    """Whether the options or the launcher ask for the CPU."""
    return getattr(args, "use_cpu", False) or _is_on("ACCELERATE_USE_CPU")


def check_whole_parameters(model: Any) -> None:
    """Refuse leaps of a model whose parameters are sharded already, as `from_pretrained(..., tp_plan="auto")` does."""
    for name, parameter in model.named_parameters():
        if getattr(parameter, "device_mesh", None) is not None:
            raise ValueError(
                f"`{name}` is spread over processes (a `DTensor`), and leaps need whole parameters. Load the model "
                "without `tp_plan`, or set `enable_predict=False`."
            )


def warn_of_lone_process() -> None:
    """Warn if `accelerate launch` was asked for several processes and started one, as it does with `--cpu`."""
    # It then sets the address of a first process, but no number of processes.
    launched = "ACCELERATE_USE_CPU" in os.environ and "MASTER_ADDR" in os.environ
    if launched and not any(variable in os.environ for variable in _WORLD_SIZES):
        logger.warning(
            "This is the only process. `accelerate launch` starts one process, whatever `--num_processes` says, with "
            "`--cpu` and on a machine with fewer than two GPUs. To train with several on the CPU, launch with "
            "`torchrun --nproc_per_node 2 SCRIPT --use_cpu`; `hf-hybrid train --cpu --num_processes 2` starts them "
            "itself."
        )


def _is_on(variable: str) -> bool:
    return os.environ.get(variable, "false").lower() in ("1", "true", "yes")
