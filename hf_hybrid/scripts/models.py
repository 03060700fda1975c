"""The model that is trained: from the Hub, from a folder, from a config; with adapters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hf_hybrid.cli.options import AdapterOptions, ModelOptions, OptionError


def load_tokenizer(options: ModelOptions) -> Any:
    """
    The tokenizer that `options` name, or that of the model.

    Raises:
        OptionError: If there is none.
    """
    from transformers import AutoTokenizer

    path = Path(options.model)
    name = options.tokenizer or (str(path.parent) if path.suffix == ".json" else options.model)
    revision = None if options.tokenizer else options.model_revision
    try:
        return AutoTokenizer.from_pretrained(
            name, revision=revision or "main", trust_remote_code=options.trust_remote_code
        )
    except (OSError, ValueError) as error:
        raise OptionError(
            f"No tokenizer can be loaded from `{name}`: {str(error).strip()} Name one with `--tokenizer`."
        ) from error


def load_model(
    options: ModelOptions, adapters: AdapterOptions, vocabulary: int, *, bf16: bool = False, on_host: bool = False
) -> Any:
    """
    The model that `options` name, ready to train; the caller has set the seed that random weights are drawn with.

    Args:
        options (`ModelOptions`): Where it is.
        adapters (`AdapterOptions`): What is trained of it.
        vocabulary (`int`): Tokens of the tokenizer.
        bf16 (`bool`, *optional*, defaults to `False`): Whether training computes in bf16, as a 4-bit base then does.
        on_host (`bool`, *optional*, defaults to `False`): Whether a 4-bit base is packed in host memory, from where
            its layers are streamed, and not on the GPU.

    Raises:
        OptionError: If it cannot be loaded, or does not go with the tokenizer.
        ImportError: If the adapters need a package that is not installed; says how to install it.
    """
    import torch
    from transformers import AutoModelForCausalLM

    common = {"trust_remote_code": options.trust_remote_code}
    if options.attn_implementation is not None:
        common["attn_implementation"] = options.attn_implementation
    config = _load_config(options)
    embedded = config.get_text_config().vocab_size
    if embedded is not None and vocabulary > embedded:
        raise OptionError(
            f"The tokenizer has {vocabulary} tokens and the model `{options.model}` embeds {embedded}. Set "
            "`--tokenizer` to the one that belongs to it."
        )
    with_adapters = adapters.peft != "none"
    if is_config_alone(options):
        if with_adapters:
            raise OptionError(f"`--peft {adapters.peft}` adapts trained weights, and `{options.model}` has none.")
        dtype = torch.float32 if options.dtype == "auto" else getattr(torch, options.dtype)
        return AutoModelForCausalLM.from_config(config, dtype=dtype, **common)
    if options.dtype == "auto":
        common["dtype"] = "auto" if with_adapters else torch.float32
    else:
        common["dtype"] = getattr(torch, options.dtype)
    if adapters.peft == "qlora":
        common |= _four_bit(bf16, on_host)
    try:
        model = AutoModelForCausalLM.from_pretrained(
            options.model, config=config, revision=options.model_revision or "main", **common
        )
    except OSError as error:
        raise OptionError(f"`--model {options.model}` cannot be loaded: {str(error).strip()}") from error
    return add_adapters(model, adapters) if with_adapters else model


def is_config_alone(options: ModelOptions) -> bool:
    """Whether the weights are random: a config file, a folder without weights, or because the user says so."""
    path = Path(options.model)
    without_weights = path.is_dir() and not any(any(path.glob(f"*.{kind}")) for kind in ("safetensors", "bin"))
    return options.from_scratch or path.suffix == ".json" or without_weights


def _load_config(options: ModelOptions):
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(
            options.model,
            revision=options.model_revision or "main",
            trust_remote_code=options.trust_remote_code,
        )
    except (OSError, ValueError) as error:
        raise OptionError(
            f"`--model {options.model}` cannot be loaded: {str(error).strip()} It must be a folder, a config.json, or "
            "an id on the Hub, which needs the network (HF_HUB_OFFLINE=1 forbids it) unless it is cached."
        ) from error


def _four_bit(bf16: bool, on_host: bool) -> dict[str, Any]:
    import torch
    from accelerate import PartialState
    from transformers import BitsAndBytesConfig

    try:
        import bitsandbytes  # noqa: F401
    except ImportError:
        raise ImportError(
            '`--peft qlora` needs bitsandbytes. Install it: pip install "hf-hybrid[peft,quantization]"'
        ) from None
    quantization = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16 if bf16 else torch.float32,
    )
    return {"quantization_config": quantization, "device_map": {"": "cpu" if on_host else PartialState().device}}


def add_adapters(model: Any, options: AdapterOptions) -> Any:
    """
    Low-rank adapters on the linear layers; everything else is frozen.

    Raises:
        ImportError: If peft is not installed.
    """
    try:
        from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
    except ImportError:
        raise ImportError(f'`--peft {options.peft}` needs peft. Install it: pip install "hf-hybrid[peft]"') from None
    if options.peft == "qlora":
        # Activation checkpointing is an option of TrainingArguments and stays one.
        model = prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
    return get_peft_model(
        model,
        LoraConfig(
            task_type="CAUSAL_LM",
            r=options.lora_r,
            lora_alpha=options.lora_alpha,
            lora_dropout=options.lora_dropout,
            target_modules=options.lora_target_modules or "all-linear",
        ),
    )
