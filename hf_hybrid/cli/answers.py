"""
Rows of `hf-hybrid sft` to tokens and labels, before the model is loaded.

The tokens are those that TRL's `SFTTrainer` would make (a test compares them), and so are the labels of texts and of
prompts with completions. What differs is which tokens of a chat are learned: the turns of the assistant, with any chat
template. TRL needs a template that marks these turns by `{% generation %}`. Most templates do not. Here

1. a template with marks is used as it is;
2. for a template that TRL knows, TRL's copy with marks is used, as TRL does;
3. else the turns are found by rendering. Let P be the text of the messages before an answer, with the beginning of an
   answer (`add_generation_prompt`), and Q the text with that answer. If Q is the beginning of the whole conversation,
   then what stands between the end of P and the end of Q is the answer, and the tokens that overlap it are learned;
4. a template that renders an answer otherwise once other messages follow (reasoning that is left out of earlier turns)
   is the exception: Q is not the beginning of the whole. Such a conversation is divided into one row per answer, each
   rendered as the model would see it when it answers. Rows of one conversation begin alike, so `share_rows` computes
   that part once.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hf_hybrid.cli.data import Rows
from hf_hybrid.cli.formats import messages_of
from hf_hybrid.cli.options import OptionError
from hf_hybrid.rows.tree import IGNORED

PLAIN_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}"
    "{{ 'Assistant: ' }}{% generation %}{{ message['content'] + eos_token }}{% endgeneration %}{{ '\\n' }}"
    "{% else %}{{ message['role'].capitalize() + ': ' + message['content'] + '\\n\\n' }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ 'Assistant: ' }}{% endif %}"
)
"""`--chat_template_path plain`: for a base model without a template. It needs no tokens of its own."""


@dataclass(frozen=True)
class Learned:
    """
    What a training set holds, in numbers.

    Attributes:
        tokens, learned (`int`): Tokens of all rows, and those that are learned.
        cut, lost (`int`): Rows that `max_length` cuts, and of these the ones left without anything to learn.
        longest (`int`): Tokens of the longest row.
        divided (`int`): Conversations that became one row per answer.
    """

    tokens: int
    learned: int
    cut: int
    lost: int
    longest: int
    divided: int


def set_template(tokenizer: Any, config: Any) -> None:
    """
    Give a tokenizer the end-of-text token and the chat template that the options name, as TRL does.

    Raises:
        OptionError: If the token or the file does not exist.
    """
    if getattr(config, "eos_token", None) is not None:
        if config.eos_token not in tokenizer.get_vocab():
            raise OptionError(f"`--eos_token {config.eos_token}` is not in the vocabulary of the tokenizer.")
        tokenizer.eos_token = config.eos_token
    path = getattr(config, "chat_template_path", None)
    if path is None:
        return
    if path == "plain":
        if tokenizer.eos_token is None:
            raise OptionError("`--chat_template_path plain` ends answers by an end-of-text token, and there is none.")
        tokenizer.chat_template = PLAIN_TEMPLATE
    elif os.path.isfile(path):
        with open(path, encoding="utf-8") as file:
            tokenizer.chat_template = file.read()
    else:
        raise OptionError(
            f"`--chat_template_path {path}` is neither a file nor `plain`. To copy the template and the tokens of "
            "another model, call `trl.clone_chat_template` once and save the result."
        )
    config.chat_template_path = None  # done


def needs_template(rows: Rows, tokenizer: Any, option: str, config: Any) -> None:
    """Refuse conversations where the tokenizer has no chat template. Raises [`OptionError`]."""
    if rows.format.chats and not tokenizer.chat_template:
        ways = " to that of an instruct model, or save a `chat_template.jinja` beside it."
        if hasattr(config, "chat_template_path"):
            ways = " to that of an instruct model, `--chat_template_path` to a .jinja file, or `--chat_template_path "
            ways += "plain` for `User: ... Assistant: ...`."
        raise OptionError(
            f"`--{option} {rows.name}` holds {rows.format.title}, and the tokenizer has no chat template. Set "
            f"`--tokenizer`{ways}"
        )


class Answers:
    """
    Turns rows into tokens and labels.

    Args:
        tokenizer: With the chat template.
        answers_only (`bool`): Whether only the assistant's turns of chats are learned.
        completions_only (`bool`): Whether only the completions of prompts are learned.

    Attributes:
        way (`str`): How the answers of chats are found: `marks`, `TRL's template` or `rendering`.
    """

    def __init__(self, tokenizer: Any, *, answers_only: bool, completions_only: bool):
        self.tokenizer, self.answers_only, self.completions_only = tokenizer, answers_only, completions_only
        self.way, self.template = "rendering", None
        if answers_only and tokenizer.chat_template:
            self.way, self.template = _way(tokenizer)

    def tokenise(self, rows: Rows, option: str, processes: int | None = None) -> Any:
        """
        Return a data set or stream with `input_ids`, `labels`, and for each row `length`, `learned` and `divided`.

        Raises:
            OptionError: If the chat template cannot format a row.
        """
        encode = self._encoder(rows.format.name)

        def of_batch(batch: dict[str, list], numbers: list[int]) -> dict[str, list]:
            made: dict[str, list] = {name: [] for name in ("input_ids", "labels", "length", "learned", "divided")}
            for place, number in enumerate(numbers):
                row = {name: values[place] for name, values in batch.items()}
                try:
                    pieces = encode(row)
                except Exception as error:  # whatever a template does with a conversation that it was not made for
                    raise OptionError(
                        f"`--{option} {rows.name}`, row {number + 1}: the chat template cannot format it: "
                        f"{' '.join(str(error).split())} Correct or remove the row."
                    ) from error
                for ids, mask in pieces:
                    made["input_ids"].append(ids)
                    made["labels"].append([i if learn else IGNORED for i, learn in zip(ids, mask, strict=True)])
                    made["length"].append(len(ids))
                    made["learned"].append(sum(mask))
                    made["divided"].append(len(pieces) > 1)
            return made

        options: dict[str, Any] = {"batched": True, "with_indices": True, "batch_size": 100}
        if rows.of is not None:
            options |= {"num_proc": processes, "desc": "Tokenising"}
        return rows.data.map(of_batch, remove_columns=list(rows.data.column_names or next(iter(rows.data))), **options)

    def _encoder(self, kind: str) -> Callable[[dict[str, Any]], list[tuple[list[int], list[bool]]]]:
        if kind == "text":
            return self._text
        return self._chat if kind in ("messages", "sharegpt") else self._completion

    def _text(self, row: dict[str, Any]) -> list[tuple[list[int], list[bool]]]:
        ids = self.tokenizer(text=self._ended(row["text"]))["input_ids"]
        return [(ids, [True] * len(ids))]

    def _ended(self, text: str) -> str:
        end = self.tokenizer.eos_token or ""
        return text if text.endswith(end) else text + end

    def _completion(self, row: dict[str, Any]) -> list[tuple[list[int], list[bool]]]:
        prompt, completion = row["prompt"], row["completion"]
        if isinstance(prompt, list):
            prompt, completion = messages_of(row, "prompt"), messages_of(row, "completion")
            before = self._ids(self._render(prompt, row, start=True))
            ids = self._ids(self._render(prompt + completion, row))
        else:
            before = self.tokenizer(text=prompt)["input_ids"]
            ids = self.tokenizer(text=prompt + self._ended(completion))["input_ids"]
        start = _common(before, ids) if self.completions_only else 0
        return [(ids, [place >= start for place in range(len(ids))])]

    def _chat(self, row: dict[str, Any]) -> list[tuple[list[int], list[bool]]]:
        messages = messages_of(row, "messages")
        if not self.answers_only:
            ids = self._ids(self._render(messages, row))
            return [(ids, [True] * len(ids))]
        if self.way != "rendering":
            made = self.tokenizer.apply_chat_template(
                messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True, **self._also(row)
            )
            return [(made["input_ids"], [bool(bit) for bit in made["assistant_masks"]])]
        whole, spans = self._render(messages, row), []
        for place, message in enumerate(messages):
            if message["role"] == "assistant":
                before = self._render(messages[:place], row, start=True) if place else ""
                spans.append((before, self._render(messages[: place + 1], row)))
        if all(whole.startswith(after) for _, after in spans):
            return [self._marked(whole, [(_common(before, after), len(after)) for before, after in spans])]
        return [self._marked(after, [(_common(before, after), len(after))]) for before, after in spans]

    def _marked(self, text: str, spans: list[tuple[int, int]]) -> tuple[list[int], list[bool]]:
        made = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        return made["input_ids"], [
            any(first < end and start < last for first, last in spans) for start, end in made["offset_mapping"]
        ]

    def _render(self, messages: list[dict], row: dict[str, Any], *, start: bool = False) -> str:
        return self.tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=start, **self._also(row)
        )

    def _also(self, row: dict[str, Any]) -> dict[str, Any]:
        tools = row.get("tools")
        tools = json.loads(tools) if isinstance(tools, str) else tools
        return {"chat_template": self.template, "tools": tools, **(row.get("chat_template_kwargs") or {})}

    def _ids(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]


def _way(tokenizer: Any) -> tuple[str, str | None]:
    """How answers are found, and the template for it."""
    from trl.chat_template_utils import (
        get_training_chat_template,
        has_generation_markers,
        is_chat_template_stop_token_trained,
    )

    if has_generation_markers(tokenizer.chat_template):
        return ("marks", None) if is_chat_template_stop_token_trained(tokenizer) else ("rendering", None)
    try:
        return "TRL's template", get_training_chat_template(tokenizer)
    except ValueError:  # TRL does not know the template
        if not tokenizer.is_fast:
            raise OptionError(
                "The tokenizer does not say which letters its tokens stand for, which finding the answers needs. Set "
                "`--assistant_only_loss false` to learn whole conversations."
            ) from None
        return "rendering", None


def _common(first: Any, second: Any) -> int:
    """Length of the common prefix of two sequences."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((place for place, (one, other) in pairs if one != other), min(len(first), len(second)))


def measured(data: Any, max_length: int | None, keep_end: bool) -> Learned:
    """
    Return the numbers of a tokenised training set.

    Args:
        data: As [`Answers.tokenise`] returns it, no stream.
        max_length (`int`, *optional*): TRL's option.
        keep_end (`bool`): Whether the beginning of long rows is cut, not their end.
    """
    lengths, learned = data["length"][:], data["learned"][:]
    long = [place for place, length in enumerate(lengths) if max_length is not None and length > max_length]
    kept = slice(-max_length, None) if keep_end and max_length is not None else slice(None, max_length)
    lost = sum(all(label == IGNORED for label in data[place]["labels"][kept]) for place in long)
    divided = sum(data["divided"][:])
    return Learned(sum(lengths), sum(learned), len(long), lost, max(lengths, default=0), divided)
