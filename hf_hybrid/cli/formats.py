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
import json
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


SWITCHES = ("weight", "train")
"""Keys of a message that say whether it is learned: OpenAI's and Axolotl's."""
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


def is_chat(value: Any, key: str | None = None) -> bool:
    """Whether a value is a list of messages, which have roles under the key `role`, in ShareGPT's form under `from`."""
    keys = {"role", "from"} if key is None else {key}
    return isinstance(value, list) and bool(value) and all(isinstance(m, Mapping) and keys & m.keys() for m in value)


def messages_of(row: Row, column: str) -> list[dict[str, Any]]:
    """Return the messages of a column with `role` and `content`. Raises [`FormatError`] if they are none."""
    value: Any = row.get(column)
    if not is_chat(value):
        raise FormatError(f"`{column}` is `{value!r:.80}`, not a list of messages with `role` and `content`")
    return [_message(message, column) for message in value]


def _message(message: Mapping[str, Any], column: str) -> dict[str, Any]:
    values = {key: part for key, part in message.items() if part is not None}
    sharegpt = "role" not in message
    name = values.pop("from", None) if sharegpt else values.pop("role", None)
    if not isinstance(name, str):
        raise FormatError(f"`{column}` has a message whose role is `{name!r:.40}`")
    role = SHAREGPT_ROLES.get(name.lower(), None if sharegpt else name)
    if role is None:
        raise FormatError(f"`from` is `{name!r:.40}` in `{column}`, which is none of {', '.join(SHAREGPT_ROLES)}")
    for switch in SWITCHES:
        if values.get(switch, 1) not in (0, 1):
            raise FormatError(f"`{column}` has a message whose `{switch}` is `{values[switch]!r:.40}`, not 0 or 1")
    key = "content" if "content" in values else "value"
    if key in values:
        return {"role": role, "content": _content(values.pop(key), column, name), **values}
    if "tool_calls" not in values:
        key = "value" if sharegpt else "content"
        raise FormatError(f"`{column}` has a message of `{name}` without `{key}`")
    return {"role": role, **values}


def _content(value: Any, column: str, role: str) -> str:
    """The text of a message, whose parts are joined."""
    parts = []
    for part in value if isinstance(value, list) else [value]:
        if isinstance(part, Mapping) and part.get("type", "text") != "text":
            raise FormatError(f"`{column}` has a message with a part of `{part['type']}`, and only text is trained on")
        text = _as_text(part.get("text") if isinstance(part, Mapping) and isinstance(value, list) else part)
        if not isinstance(text, str):
            kind = type(part).__name__
            raise FormatError(f"`{column}` has a message of `{role}` whose content is a `{kind}`, not a text")
        parts.append(text)
    return "".join(parts)


def is_learned(message: Mapping[str, Any]) -> bool:
    """Whether the answer of a message is learned: `weight: 0` and `train: false` switch that off."""
    return message["role"] == "assistant" and all(message.get(switch, 1) for switch in SWITCHES)


def _as_text(value: Any) -> Any:
    """The text of a number or a truth value, as JSON writes it; anything else as it is."""
    return json.dumps(value) if isinstance(value, (bool, int, float)) and value == value else value


def _text(row: Row, column: str, *, may_be_empty: bool = False) -> str:
    value = _as_text(row.get(column))
    if not isinstance(value, str) or not (value or may_be_empty):
        raise FormatError(f"`{column}` is `{value!r:.80}`, not a text")
    return value


def _text_if_any(row: Row, column: str) -> str:
    return "" if row.get(column) is None else _text(row, column, may_be_empty=True)


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
            title = f"ShareGPT (`{column}` with `from` and `value`)"
        elif is_chat(first.get(column)) or column == "messages":
            title = f"chats (`{column}`)"
        else:
            continue

        def convert(row: Row, column: str = column) -> dict[str, Any]:
            messages = messages_of(row, column)
            roles = {message["role"]: None for message in messages}
            if answered and "assistant" not in roles:
                others = ", ".join(f"`{role}`" for role in roles)
                raise FormatError(
                    f"`{column}` has no message of `assistant`, only of {others}, so there is no answer to learn"
                )
            return with_system({"messages": messages}, _text_if_any(row, "system"))

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

    def convert_both(row: Row) -> dict[str, Any]:
        right = row.get(answer)
        return {**convert(row), "answer": None if right == "" else right}  # an empty field of a table

    return Format(f"{title} with `{answer}`", convert_both, chats, kept)


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
    sides = {"chosen", "rejected"}
    if command == "dpo" and len(lacking := sides - set(columns)) == 1:
        raise OptionError(f"{where}: it has {has}, and no `{lacking.pop()}`. `--columns NEW=OLD` renames one.")
    likely = next((other for other in ("sft", "dpo", "grpo") if match(other)), None)
    hint = f" That is what `hf-hybrid {likely}` takes." if likely else " `--columns NEW=OLD` renames one."
    raise OptionError(f"{where}: it has {has}, and `hf-hybrid {command}` takes {takes}.{hint}")


def converted(row: Row, row_format: Format, kept: Iterable[str], system: str | None) -> dict[str, Any]:
    """
    Return a row in TRL's form, and the columns `kept` as they are; `system` is the message of chats that have none.

    Raises:
        FormatError: If the row has another form.
    """
    values = row_format.convert(row)
    return {**{column: row.get(column) for column in kept}, **with_system(values, system)}


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
