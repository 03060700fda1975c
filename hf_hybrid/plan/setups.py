"""Ways to train a model, from the fastest to the one that needs least, and the options that ask for them."""

from __future__ import annotations

from dataclasses import dataclass, replace

DTYPES = ("mixed", "float32", "bfloat16")


@dataclass(frozen=True)
class Setup:
    """One way to train."""

    title: str
    trains: str = "all"  # weights, or "adapters"
    weights: str = "float32"  # dtype that they are loaded in
    autocast: bool = True  # to bf16
    packed: bool = False  # the base is in nf4
    streamed: bool = False
    checkpointing: bool = False  # of activations; streamed layers always are
    chunked_loss: bool = False
    optimizer_states: str = "exact"
    base_precision: str = "same"
    offload_activations: bool = False

    @property
    def exact(self) -> bool:
        """Whether weights of the usual precision are updated by AdamW as it is."""
        return self.optimizer_states == "exact" and self.base_precision == "same" and not self.packed

    def checkpointed(self) -> Setup:
        """As a resident model, with activation checkpointing: how streamed layers compute."""
        return replace(self, streamed=False, checkpointing=True, offload_activations=False, base_precision="same")


def loaded(dtype: str, trains: str) -> tuple[str, bool]:
    """
    The dtype that weights are loaded in, and whether they compute under autocast to bf16.

    Args:
        dtype (`str`): `"mixed"`: fp32 under autocast, a frozen base in bf16; `"float32"`, `"bfloat16"`: nothing else.
        trains (`str`): `"all"` or `"adapters"`.

    Raises:
        ValueError: If the dtype is another.
    """
    if dtype not in DTYPES:
        raise ValueError(f"`dtype` must be one of {', '.join(DTYPES)}, got `{dtype}`.")
    if dtype == "mixed":
        return ("float32" if trains == "all" else "bfloat16"), True
    return dtype, False


def usual_setups(dtype: str, can_chunk: bool) -> list[Setup]:
    """
    What a table of plans compares, the fastest first.

    Args:
        dtype (`str`): As in [`loaded`].
        can_chunk (`bool`): Whether the loss of the model can be computed in chunks.
    """
    weights, autocast = loaded(dtype, "all")
    precision = {"mixed": "bf16 autocast", "float32": "fp32", "bfloat16": "bf16 weights"}[dtype]
    full = Setup(precision, weights=weights, autocast=autocast)
    chunks, chunked = {"chunked_loss": can_chunk}, ", chunked loss" * can_chunk
    found = [full]
    if can_chunk:
        found.append(replace(full, title=f"{precision}{chunked}", **chunks))
    found.append(replace(full, title=f"{precision}{chunked}, checkpointing", checkpointing=True, **chunks))
    if dtype == "mixed":
        found.append(Setup("fp32", autocast=False))
    streamed = replace(full, streamed=True, **chunks)
    low = {"optimizer_states": "8bit", **chunks}
    rounded = Setup("", weights="bfloat16", autocast=False, **low)
    found += [
        replace(streamed, title="streamed"),
        replace(streamed, title="streamed, activations on the host", offload_activations=True),
        replace(full, title=f"8-bit states{chunked}, checkpointing", checkpointing=True, **low),
        Setup(
            f"bf16 weights, 8-bit states{chunked}, checkpointing", "all", "bfloat16", False, checkpointing=True, **low
        ),
        replace(streamed, title="streamed, 8-bit states", optimizer_states="8bit"),
        replace(rounded, title="streamed bf16 weights, 8-bit states", streamed=True),
    ]
    return found + _with_adapters(dtype, chunks, chunked)


def _with_adapters(dtype: str, chunks: dict, chunked: str) -> list[Setup]:
    weights, autocast = loaded(dtype, "adapters")
    lora = Setup("LoRA", "adapters", weights, autocast)
    return [
        lora,
        replace(lora, title=f"LoRA{chunked}, checkpointing", checkpointing=True, **chunks),
        replace(lora, title="LoRA, streamed base", streamed=True, **chunks),
        replace(lora, title=f"QLoRA{chunked}, checkpointing", packed=True, checkpointing=True, **chunks),
        replace(lora, title="LoRA, streamed int8 base", streamed=True, base_precision="int8", **chunks),
    ]


def training_options(
    setup: Setup, *, batch_size: int, micro_batches: int, enable_predict: bool, limits: dict, decided: dict
) -> dict[str, object]:
    """
    Fields of `HybridConfig` that train in this way.

    Args:
        setup ([`Setup`]): The way.
        batch_size (`int`): Sequences per micro-batch.
        micro_batches (`int`): Per optimizer step.
        enable_predict (`bool`): With leaps.
        limits (`dict`): `vram_budget_gib` and `host_budget_gib`, where there are any; only for streamed layers.
        decided (`dict`): What the plan decided for streamed layers: `resident_layers`, `stream_embeddings`.
    """
    options: dict[str, object] = {
        "output_dir": "out",
        "per_device_train_batch_size": batch_size,
        "gradient_accumulation_steps": micro_batches,
        "bf16": setup.autocast,
        "enable_predict": enable_predict,
        "optim": "adamw_torch_fused",
        "optimizer_states": setup.optimizer_states,
        "memory": "stream" if setup.streamed else "off",
        "chunked_loss": "on" if setup.chunked_loss else "off",
    }
    if setup.streamed:
        options |= {"offload_activations": setup.offload_activations, "base_precision": setup.base_precision}
        options |= {**limits, **decided}
    else:
        options[checkpointing_option()] = setup.checkpointing
    return options


def checkpointing_option() -> str:
    """The name that this version of transformers gives activation checkpointing."""
    from transformers import PreTrainedModel

    # Renamed in 5.23, there and in TrainingArguments, which takes a second longer to import.
    new = hasattr(PreTrainedModel, "activation_checkpointing_enable")
    return "activation_checkpointing" if new else "gradient_checkpointing"
