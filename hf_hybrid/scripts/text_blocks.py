"""From a file, a folder or a data set on the Hub to sequences of equal length."""

from __future__ import annotations

import difflib
import logging
from pathlib import Path
from typing import Any

from hf_hybrid.cli.options import DataOptions, OptionError

logger = logging.getLogger(__name__)

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
    Load, tokenise and cut what `options` name.

    Args:
        options (`DataOptions`): Where the data is, and how long the sequences are.
        tokenizer (`PreTrainedTokenizerBase`): Of the model.
        seed (`int`): Of the draw of the sequences that are evaluated on.

    Returns:
        Two `datasets.Dataset` of blocks with `input_ids` and `labels`: to train on, and to evaluate on (`None` with
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
            f"`{options.dataset}` gives one block of {options.sequence_length} tokens, and `eval_share` takes one. Set "
            "`eval_share=0` or a shorter `sequence_length`."
        )
    held = min(max(round(options.eval_share * len(blocks)), 1), len(blocks) - 1)
    split = blocks.train_test_split(held, seed=seed)
    return split["train"], split["test"]


def load_texts(name: str, split: str, config: str | None = None):
    """
    A data set from a file, a folder or the Hub.

    Raises:
        OptionError: If there is no such file, or the Hub cannot be reached.
    """
    from datasets import load_dataset, load_from_disk

    path = Path(name)
    kind = _FORMATS.get(path.suffix.lower())
    if kind is not None and not path.is_file():
        raise OptionError(f"`--dataset {name}`: there is no such file.")
    if kind is not None:
        # Paragraphs: a whole book as one document would be tokenised in one piece.
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
    texts = load_texts(name, split, options.dataset_config if name == options.dataset else None)
    encode = _encoder(texts.column_names, options, tokenizer)
    length = options.sequence_length

    def cut(rows):
        ids = [token for document in encode(rows) for token in document]
        pieces = [ids[start : start + length] for start in range(0, len(ids) - length + 1, length)]
        return {"input_ids": pieces, "labels": [list(piece) for piece in pieces]}

    blocks = texts.map(cut, batched=True, remove_columns=texts.column_names, desc="Tokenising")
    if len(blocks) == 0:
        raise OptionError(
            f"`{name}` holds fewer than {length} tokens, not one block of `sequence_length`. Set a shorter one."
        )
    return blocks


def _encoder(columns: list[str], options: DataOptions, tokenizer):
    """What turns a batch of rows into lists of tokens, one a document."""
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
        logger.warning("The tokenizer has no end-of-text token: documents follow each other without one.")

    def encode_texts(rows):
        return [ids + end for ids in tokenizer(rows[options.text_column])["input_ids"]]

    return encode_texts
