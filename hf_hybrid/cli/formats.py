"""
The formats of rows that the commands take, and how each becomes what TRL takes.

A format is recognised by the columns of the data set and the form of its first row, and the command names it to the
user. A row that does not have the form of the first one is refused with its number. Rows become

| command | columns |
|---|---|
| train | `messages`, or `text` |
| sft | `messages`; `prompt`, `completion`; `text` |
| dpo | `chosen`, `rejected`, and `prompt` if it stands in a column of its own |
| grpo | `prompt`, and what the reward functions read |

where a prompt, completion, chosen or rejected is a text, or a list of messages `{"role": ..., "content": ...}`, to
which the chat template is applied. A new format is a function from columns and a first row to a [`Format`], and an
entry in [`FORMATS`].
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from hf_hybrid.cli.options import OptionError

Row = Mapping[str, Any]

_ROLES = {
    "user": "human user",
    "assistant": "gpt chatgpt bing bard model assistant function_call",
    "system": "system",
    "tool": "tool observation function_response",
}
SHAREGPT_ROLES = {name: role for role, names in _ROLES.items() for name in names.split()}
QUESTIONS = ("question", "problem", "query", "instruction")
"""Columns that are taken for the user's question where there is no `prompt`."""
ANSWERS = ("answer", "solution", "ground_truth", "target", "final_answer")
"""Columns that are taken for the reference answer of a prompt, the first that is there."""

ALPACA = (
    "Below is an instruction that describes a task{}. Write a response that appropriately completes the request.\n\n"
)
"""The prompt of Alpaca, for tokenizers without a chat template."""


_OF_TEMPLATES = ("tools", "chat_template_kwargs")
"""Columns that the chat template reads beside the messages."""


class FormatError(ValueError):
    """A row has not the format of the first one."""


class Format(NamedTuple):
    """
    A format of rows.

    Attributes:
        title (`str`): For people, with the columns.
        convert (`Callable`): From a row to the columns that TRL takes. Raises `FormatError` for a row of another form.
        chats (`bool`): Whether the chat template is applied.
        kept (`tuple[str, ...]`): Columns that go with the row as they are.
    """

    title: str
    convert: Callable[[Row], dict[str, Any]]
    chats: bool
    kept: tuple[str, ...] = ()


# Parts of rows.


def is_chat(value: Any, key: str = "role") -> bool:
    """Whether a value is a list of messages with roles; ShareGPT has them under another key."""
    return isinstance(value, list) and bool(value) and all(isinstance(m, Mapping) and key in m for m in value)


def messages_of(row: Row, column: str) -> list[dict[str, Any]]:
    """Return the messages of a column. Raises [`FormatError`] if they are none."""
    value: Any = row.get(column)
    if not is_chat(value):
        raise FormatError(f"`{column}` is `{value!r:.80}`, not a list of messages with `role` and `content`")
    messages = [{key: part for key, part in message.items() if part is not None} for message in value]
    for message in messages:
        if not isinstance(message.get("role"), str):
            raise FormatError(f"`{column}` has a message whose role is `{message.get('role')!r:.40}`")
        if "content" not in message and "tool_calls" not in message:
            raise FormatError(f"`{column}` has a message of `{message['role']}` without `content`")
    return messages


def _from_sharegpt(row: Row, column: str) -> list[dict[str, Any]]:
    value: Any = row.get(column)
    messages: list[dict[str, Any]] = []
    if not is_chat(value, "from"):
        raise FormatError(f"`{column}` is `{value!r:.80}`, not a list of messages with `from` and `value`")
    for message in value:
        role = SHAREGPT_ROLES.get(message["from"])
        if role is None:
            names = ", ".join(SHAREGPT_ROLES)
            raise FormatError(f"`from` is `{message['from']!r:.40}` in `{column}`, which is none of {names}")
        if not isinstance(message.get("value"), str):
            raise FormatError(f"`{column}` has a message of `{message['from']}` whose `value` is no text")
        messages.append({"role": role, "content": message["value"]})
    if row.get("system") and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": row["system"]})
    return messages


def _text(row: Row, column: str, *, may_be_empty: bool = False) -> str:
    value = row.get(column)
    if isinstance(value, (int, float)) and not isinstance(value, bool):  # a column of a table without any letter
        return str(value)
    if not isinstance(value, str) or not (value or may_be_empty):
        raise FormatError(f"`{column}` is `{value!r:.80}`, not a text")
    return value


def _text_if_any(row: Row, column: str) -> str:
    return _text(row, column) if row.get(column) else ""


def _side(row: Row, column: str) -> Any:
    """A prompt, completion, chosen or rejected: a text, or messages."""
    return messages_of(row, column) if isinstance(row.get(column), list) else _text(row, column)


def _same_kind(sides: dict[str, Any]) -> dict[str, Any]:
    chats = {name for name, side in sides.items() if isinstance(side, list)}
    if chats and len(chats) < len(sides):
        raise FormatError(f"`{min(chats)}` holds messages and `{min(sides.keys() - chats)}` holds text")
    return sides


# The formats.

Recogniser = Callable[[set[str], Row, bool], "Format | None"]
"""From the columns, the first row and whether there is a chat template to the format, `None` if it is another."""


def _chats(
    columns: set[str], first: Row, template: bool, *,
    names: tuple[str, ...] = ("messages", "conversations", "conversation"), answered: bool = True,
) -> Format | None:  # fmt: skip
    for column in [name for name in names if name in columns]:
        if is_chat(first.get(column), "from"):
            title, read = f"ShareGPT (`{column}` with `from` and `value`)", _from_sharegpt
        elif is_chat(first.get(column)) or column == "messages":
            title, read = f"chats (`{column}`)", messages_of
        else:
            continue

        def convert(row: Row, column: str = column, read: Callable = read) -> dict[str, Any]:
            messages = read(row, column)
            if answered and not any(message["role"] == "assistant" for message in messages):
                raise FormatError(f"`{column}` has no message of `assistant`, so there is no answer to learn")
            return {"messages": messages}

        return Format(title, convert, True, _OF_TEMPLATES)
    return None


def _texts(columns: set[str], first: Row, template: bool, *, may_be_empty: bool = False) -> Format | None:
    if "text" not in columns:
        return None
    convert = lambda row: {"text": _text(row, "text", may_be_empty=may_be_empty)}  # noqa: E731
    return Format("plain text (`text`)", convert, False)


def _completions(columns: set[str], first: Row, template: bool) -> Format | None:
    names = ("prompt", "completion")
    if not set(names) <= columns:
        return None
    chats = is_chat(first.get("completion"))
    title = f"prompt and completion ({'messages' if chats else 'text'})"
    convert = lambda row: _same_kind({name: _side(row, name) for name in names})  # noqa: E731
    return Format(title, convert, chats, _OF_TEMPLATES)


def _alpaca(columns: set[str], first: Row, template: bool) -> Format | None:
    if not {"instruction", "output"} <= columns:
        return None

    def convert(row: Row) -> dict[str, Any]:
        instruction, more, answer = _text(row, "instruction"), _text_if_any(row, "input"), _text(row, "output")
        if template:
            question = f"{instruction}\n\n{more}" if more else instruction
            chat = with_system({"prompt": [{"role": "user", "content": question}]}, _text_if_any(row, "system"))
            return {**chat, "completion": [{"role": "assistant", "content": answer}]}
        start = ALPACA.format(", paired with an input that provides further context" if more else "")
        middle = f"### Input:\n{more}\n\n" if more else ""
        return {"prompt": f"{start}### Instruction:\n{instruction}\n\n{middle}### Response:\n", "completion": answer}

    how = "through the chat template" if template else "with Alpaca's prompt, as there is no chat template"
    return Format(f"Alpaca (instruction, output; {how})", convert, template)


def _pairs(columns: set[str], first: Row, template: bool) -> Format | None:
    if not {"chosen", "rejected"} <= columns:
        return None
    chats = is_chat(first.get("chosen"))
    # As in UltraFeedback, chosen and rejected may begin with the prompt, which also stands alone as a text.
    apart = "prompt" in columns and not (chats and isinstance(first.get("prompt"), str))
    names = ("prompt", "chosen", "rejected") if apart else ("chosen", "rejected")

    def convert(row: Row) -> dict[str, Any]:
        sides = _same_kind({name: _side(row, name) for name in names})
        if sides["chosen"] == sides["rejected"]:
            raise FormatError("`chosen` and `rejected` are the same")
        return sides

    title = f"preference pairs{' with prompt' if apart else ', prompt inside'} ({'messages' if chats else 'text'})"
    return Format(title, convert, chats, _OF_TEMPLATES)


def _prompts(columns: set[str], first: Row, template: bool) -> Format | None:
    if "prompt" not in columns:
        return None
    chats = is_chat(first.get("prompt"))
    title = f"prompts ({'messages' if chats else 'text'})"
    return _with_answers(title, lambda row: {"prompt": _side(row, "prompt")}, chats, columns)


def _answered_chats(columns: set[str], first: Row, template: bool) -> Format | None:
    if "messages" not in columns:
        return None

    def convert(row: Row) -> dict[str, Any]:
        *before, last = messages_of(row, "messages")
        if last["role"] != "assistant":
            return {"prompt": [*before, last]}
        if not before:
            raise FormatError("`messages` has no message before the answer")
        return {"prompt": before, "answer": last.get("content", "")}

    return _with_answers("chats (`messages`)", convert, True, columns, "; their last answer is the reference")


def _questions(columns: set[str], first: Row, template: bool) -> Format | None:
    column = next((name for name in QUESTIONS if name in columns), None)
    if column is None:
        return None

    def convert(row: Row) -> dict[str, Any]:
        text = _text(row, column)
        return {"prompt": [{"role": "user", "content": text}] if template else text}

    return _with_answers(f"`{column}`", convert, template, columns)


def _with_answers(
    title: str, convert: Callable[[Row], dict[str, Any]], chats: bool, columns: set[str], more: str = ", no answers"
) -> Format:  # fmt: skip
    """A format with the column of reference answers, and all others, which reward functions get as they are."""
    answer = next((name for name in ANSWERS if name in columns), None)
    kept = tuple(sorted(columns - {"prompt", "messages"}))
    if answer is None:
        return Format(title + more, convert, chats, kept)
    return Format(f"{title} with `{answer}`", lambda row: {**convert(row), "answer": row.get(answer)}, chats, kept)


FORMATS: dict[str, dict[str, Recogniser]] = {
    "train": {
        "`messages` (chats)": functools.partial(_chats, names=("messages",), answered=False),
        "`text`": functools.partial(_texts, may_be_empty=True),
    },
    "sft": {
        "`messages` (chats) or `conversations` (ShareGPT)": _chats,
        "`prompt` and `completion`": _completions,
        "`instruction` and `output` (Alpaca)": _alpaca,
        "`text`": _texts,
    },
    "dpo": {"`chosen` and `rejected`, with or without `prompt`": _pairs},
    "grpo": {
        "`prompt`": _prompts,
        "`messages`": _answered_chats,
        f"one of {', '.join(f'`{name}`' for name in QUESTIONS)}": _questions,
    },
}
"""Of each command, in the order in which they are tried, by the columns that they read."""


def recognise(
    command: str, columns: Iterable[str], first: Row, template: bool = True, where: str = "The data set"
) -> Format:
    """
    Return the format of a data set (`where`) by its columns and its first row.

    Without a chat template of the tokenizer (`template`), Alpaca's rows and questions become text.

    Raises:
        OptionError: If the columns are of no format that the command takes.
    """
    columns = list(columns)

    def match(command: str) -> Format | None:
        matches = (recogniser(set(columns), first, template) for recogniser in FORMATS[command].values())
        return next(filter(None, matches), None)

    if (row_format := match(command)) is not None:
        return row_format
    has = ", ".join(f"`{name}`" for name in columns) or "no columns"
    *others, last = FORMATS[command]
    takes = f"{', '.join(others)} or {last}" if others else last
    likely = next((other for other in ("sft", "dpo", "grpo") if match(other)), None)
    hint = f" That is what `hf-hybrid {likely}` takes." if likely else " `--columns NEW=OLD` renames one."
    raise OptionError(f"{where}: it has {has}, and `hf-hybrid {command}` takes {takes}.{hint}")


def converted(row: Row, number: int, row_format: Format, system: str | None, where: str) -> dict[str, Any]:
    """
    Return a row in TRL's form, with the columns that go with it; `system` is the message of chats that have none.

    Raises:
        OptionError: If the row has another form. It names the data set (`where`) and the number of the row.
    """
    try:
        values = row_format.convert(row)
    except FormatError as error:
        raise OptionError(f"{where}, row {number + 1}: {error}. Correct or remove the row.") from None
    kept = {column: row[column] for column in row_format.kept if column in row}
    return {**kept, **with_system(values, system)}


def with_system(row: dict[str, Any], system: str | None) -> dict[str, Any]:
    """Put a system message, if there is one, in front of the conversation of a converted row that has none."""
    if not system:
        return row
    for name in ("messages", "prompt"):
        messages = row.get(name)
        if isinstance(messages, list) and messages[0]["role"] != "system":
            return {**row, name: [{"role": "system", "content": system}, *messages]}
    if "prompt" not in row and isinstance(row.get("chosen"), list):
        return {**row, **{n: with_system({"prompt": row[n]}, system)["prompt"] for n in ("chosen", "rejected")}}
    return row
