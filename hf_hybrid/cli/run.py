"""
What every process of `hf-hybrid train` runs: load model and data, train, evaluate, save, write the card, push.

A launcher of your own starts it too: `torchrun --nproc_per_node 8 -m hf_hybrid.cli.run --config run.yaml`.
"""

from __future__ import annotations

import difflib
import logging
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from hf_hybrid.cli.options import (
    PROGRAM,
    AdapterOptions,
    CommandLine,
    DataOptions,
    ModelOptions,
    OptionError,
    TrainOptions,
)

logger = logging.getLogger(__name__)


def main(arguments: Sequence[str] | None = None) -> int:
    """Train in this process. Returns the exit status, as [`train`]."""
    try:
        line = CommandLine(sys.argv[1:] if arguments is None else arguments)
        line.set_environment()
    except OptionError as error:
        return _complain(error)
    return train(line)


def train(line: CommandLine) -> int:
    """
    Train as the command line says.

    Returns:
        `int`: 0, or 2 after a message if the options cannot work. What fails later raises.
    """
    try:
        line.check_required()
        options = line.options()
        trainer = prepare(options)
    except (ValueError, ImportError) as error:  # HybridConfig and HybridTrainer refuse with these
        logger.debug("The error in full:", exc_info=True)
        return _complain(error)
    result = trainer.train(resume_from_checkpoint=_resume(trainer.args.resume_from_checkpoint))
    trainer.log_metrics("train", result.metrics)
    trainer.save_metrics("train", result.metrics)
    trainer.save_state()
    trainer.save_model()
    if trainer.eval_dataset is not None:
        metrics = trainer.evaluate()
        trainer.log_metrics("eval", metrics)
        trainer.save_metrics("eval", metrics)
    card = _card_values(options)
    if trainer.args.push_to_hub:
        trainer.push_to_hub(**card)
    elif trainer.is_world_process_zero():
        trainer.create_model_card(**card)
    # A process that leaves while another still talks to it makes the launcher report a failure.
    trainer.accelerator.wait_for_everyone()
    trainer.accelerator.end_training()
    return 0


def prepare(options: TrainOptions):
    """
    Load model and data. Of several processes the first downloads and tokenises for all.

    Returns:
        `HybridTrainer`: Ready to train.
    """
    from transformers import set_seed

    from hf_hybrid.trainer import HybridTrainer

    args = options.config
    set_seed(args.seed)
    with args.main_process_first(desc="loading the model's files"):
        tokenizer = load_tokenizer(options.model)
        on_host = args.memory != "off"
        model = load_model(options.model, options.adapters, len(tokenizer), bf16=args.bf16, on_host=on_host)
    with args.main_process_first(desc="tokenising"):
        train_set, eval_set = training_data(options.data, tokenizer, args.data_seed or args.seed)
    return HybridTrainer(model, args, train_dataset=train_set, eval_dataset=eval_set, processing_class=tokenizer)


def _complain(error: Exception) -> int:
    """Print the error, once for all processes; returns the exit status of a wrong use."""
    if int(os.environ.get("RANK", 0)) == 0:
        sys.stderr.write(f"{PROGRAM}: error: {error}\n")
    return 2


def _resume(value: str | None) -> str | bool | None:
    """`true` for the last checkpoint, `false` for none, else a folder."""
    if value is None or value.lower() in ("false", "none", ""):
        return None
    return True if value.lower() == "true" else value


def _card_values(options: TrainOptions) -> dict:
    """What only the command line knows for the model card: names on the Hub, no local paths."""
    values = {"tasks": "text-generation"}
    if not Path(options.data.dataset).exists():
        values["dataset_tags"] = options.data.dataset
    if not Path(options.model.model).exists():
        values["finetuned_from"] = options.model.model
    return values


# The model: from the Hub, a folder or a config; with or without adapters.


def load_tokenizer(options: ModelOptions) -> Any:
    """
    The tokenizer that `options` name, else the model's.

    Raises:
        OptionError: If it cannot be loaded.
    """
    from transformers import AutoTokenizer

    path = Path(options.model)
    name = options.tokenizer or (str(path.parent) if path.suffix == ".json" else options.model)
    revision = "main" if options.tokenizer else options.model_revision or "main"
    try:
        return AutoTokenizer.from_pretrained(name, revision=revision, trust_remote_code=options.trust_remote_code)
    except (OSError, ValueError) as error:
        raise OptionError(
            f"No tokenizer can be loaded from `{name}`: {str(error).strip()} Name one with `--tokenizer`."
        ) from error


def load_model(
    options: ModelOptions, adapters: AdapterOptions, vocabulary: int, *, bf16: bool = False, on_host: bool = False
) -> Any:
    """
    The model that `options` name, ready to train. The caller has set the seed that random weights are drawn with.

    Args:
        options (`ModelOptions`): Where the model is.
        adapters (`AdapterOptions`): Adapters to add.
        vocabulary (`int`): Tokens of the tokenizer.
        bf16 (`bool`, *optional*, defaults to `False`): Whether training computes in bf16. A 4-bit base then does too.
        on_host (`bool`, *optional*, defaults to `False`): Whether a 4-bit base is packed in host memory, from where
            its layers are streamed, and not on the GPU.

    Raises:
        OptionError: If the model cannot be loaded, or does not go with the tokenizer.
        ImportError: If adapters need a package that is not installed; with the command that installs it.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    common = {"trust_remote_code": options.trust_remote_code}
    revision = options.model_revision or "main"
    try:
        config = AutoConfig.from_pretrained(options.model, revision=revision, **common)
    except (OSError, ValueError) as error:
        raise OptionError(
            f"`--model {options.model}` cannot be loaded: {str(error).strip()} It must be a folder, a config.json, or "
            "an id on the Hub, which needs the network (HF_HUB_OFFLINE=1 forbids it) unless it is cached."
        ) from error
    embedded = config.get_text_config().vocab_size
    if embedded is not None and vocabulary > embedded:
        raise OptionError(
            f"The tokenizer has {vocabulary} tokens, and the model `{options.model}` embeds {embedded}. Set "
            "`--tokenizer` to the one that belongs to the model."
        )
    if options.attn_implementation is not None:
        common["attn_implementation"] = options.attn_implementation
    with_adapters = adapters.peft != "none"
    if _is_config_alone(options):
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
        model = AutoModelForCausalLM.from_pretrained(options.model, config=config, revision=revision, **common)
    except OSError as error:
        raise OptionError(f"`--model {options.model}` cannot be loaded: {str(error).strip()}") from error
    return _add_adapters(model, adapters) if with_adapters else model


def _is_config_alone(options: ModelOptions) -> bool:
    """Whether the weights are drawn at random: a config file, a folder without weights, or `from_scratch`."""
    path = Path(options.model)
    without_weights = path.is_dir() and not any(any(path.glob(f"*.{kind}")) for kind in ("safetensors", "bin"))
    return options.from_scratch or path.suffix == ".json" or without_weights


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


def _add_adapters(model: Any, options: AdapterOptions) -> Any:
    try:
        from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
    except ImportError:
        raise ImportError(f'`--peft {options.peft}` needs peft. Install it: pip install "hf-hybrid[peft]"') from None
    if options.peft == "qlora":
        # Activation checkpointing is an option of TrainingArguments and stays one.
        model = prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
    adapters = LoraConfig(
        task_type="CAUSAL_LM",
        r=options.lora_r,
        lora_alpha=options.lora_alpha,
        lora_dropout=options.lora_dropout,
        target_modules=options.lora_target_modules or "all-linear",
    )
    return get_peft_model(model, adapters)


# The data: from a file, a folder or the Hub to sequences of equal length.

_FORMATS = {
    ".txt": "text",
    ".text": "text",
    ".md": "text",
    ".json": "json",
    ".jsonl": "json",
    ".csv": "csv",
    ".parquet": "parquet",
}


def training_data(options: DataOptions, tokenizer: Any, seed: int) -> tuple[Any, Any]:
    """
    Load the data that `options` name, tokenise it and cut it into sequences.

    Args:
        options (`DataOptions`): Where the data is, and how long the sequences are.
        tokenizer (`PreTrainedTokenizerBase`): The model's.
        seed (`int`): Draws the sequences to evaluate on.

    Returns:
        Two `datasets.Dataset` of sequences with `input_ids` and `labels`: to train on, and to evaluate on (`None` with
        `eval_share=0` and no `eval_dataset`).

    Raises:
        OptionError: If the data cannot be found, has neither texts nor conversations, or is too short.
    """
    blocks = _blocks(options.dataset, options.dataset_split, options, tokenizer)
    if options.eval_dataset is not None:
        return blocks, _blocks(options.eval_dataset, options.eval_split, options, tokenizer)
    if not options.eval_share:
        return blocks, None
    if len(blocks) < 2:
        raise OptionError(
            f"`{options.dataset}` makes one sequence of {options.sequence_length} tokens, and `eval_share` takes one. "
            "Set `eval_share=0` or a shorter `sequence_length`."
        )
    held = min(max(round(options.eval_share * len(blocks)), 1), len(blocks) - 1)
    split = blocks.train_test_split(held, seed=seed)
    return split["train"], split["test"]


def _load_texts(name: str, split: str, config: str | None):
    from datasets import load_dataset, load_from_disk

    path = Path(name)
    kind = _FORMATS.get(path.suffix.lower())
    if kind is not None and not path.is_file():
        raise OptionError(f"`--dataset {name}`: there is no such file.")
    if kind is not None:
        # By paragraph: as one document, a whole book would be tokenised in one piece.
        by = {"sample_by": "paragraph"} if kind == "text" else {}
        return load_dataset(kind, data_files=str(path), split="train", **by)
    if (path / "state.json").is_file():
        return load_from_disk(str(path))
    try:
        return load_dataset(name, config, split=split)
    except (OSError, ValueError) as error:
        raise OptionError(
            f"`--dataset {name}` cannot be loaded: {str(error).strip()} It must be a file ({', '.join(_FORMATS)}), a "
            "folder, or an id on the Hub, which needs the network (HF_HUB_OFFLINE=1 forbids it) unless it is cached."
        ) from error


def _blocks(name: str, split: str, options: DataOptions, tokenizer):
    texts = _load_texts(name, split, options.dataset_config if name == options.dataset else None)
    encode = _encoder(texts.column_names, options, tokenizer)
    length = options.sequence_length

    def cut(rows):
        ids = [token for document in encode(rows) for token in document]
        pieces = [ids[start : start + length] for start in range(0, len(ids) - length + 1, length)]
        return {"input_ids": pieces, "labels": [list(piece) for piece in pieces]}

    blocks = texts.map(cut, batched=True, remove_columns=texts.column_names, desc="Tokenising")
    if len(blocks) == 0:
        raise OptionError(f"`{name}` holds fewer than {length} tokens. Set a shorter `sequence_length`.")
    return blocks


def _encoder(columns: list[str], options: DataOptions, tokenizer) -> Callable[[Any], list[list[int]]]:
    """The function from a batch of rows to tokens, one list per document."""
    if options.messages_column in columns:
        if not getattr(tokenizer, "chat_template", None):
            raise OptionError(
                f"The column `{options.messages_column}` holds conversations, and the tokenizer has no chat template. "
                "Set `--tokenizer` to one that has (that of an instruct model), or `--text_column`."
            )

        def encode_conversations(rows):
            conversations = rows[options.messages_column]
            texts = [tokenizer.apply_chat_template(messages, tokenize=False) for messages in conversations]
            return tokenizer(texts, add_special_tokens=False)["input_ids"]

        return encode_conversations
    if options.text_column not in columns:
        near = difflib.get_close_matches(options.text_column, columns, n=1)
        raise OptionError(
            f"`--text_column {options.text_column}` is not in the data set, which has {', '.join(columns)}."
            + (f" Did you mean `--text_column {near[0]}`?" if near else "")
        )
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    if not end:
        logger.warning("The tokenizer has no end-of-text token: documents are joined without one.")

    def encode_texts(rows):
        return [ids + end for ids in tokenizer(rows[options.text_column])["input_ids"]]

    return encode_texts


if __name__ == "__main__":
    sys.exit(main())
