"""
The formats of rows that `hf-hybrid sft | dpo | grpo` take, and how each becomes what TRL takes.

A format is recognised by the columns of the data set and the form of its first row, and the command names it to the
user. A row that does not have the form of the first one is refused with its number. TRL takes

| command | columns |
|---|---|
| sft | `messages`; `prompt`, `completion`; `text` |
| dpo | `chosen`, `rejected`, and `prompt` if it stands in a column of its own |
| grpo | `prompt`, and what the reward functions read |

where a prompt, completion, chosen or rejected is a text, or a list of messages `{"role": ..., "content": ...}`, to
which the chat template is applied.

The module imports only the standard library, so that a file can be refused before torch is imported.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

Row = Mapping[str, Any]

SHAREGPT_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "model": "assistant",
    "assistant": "assistant",
    "system": "system",
    "tool": "tool",
    "observation": "tool",
    "function_response": "tool",
    "function_call": "assistant",
}
PROMPTS = ("question", "problem", "query", "instruction")
"""Columns that are taken for the user's question where there is no `prompt`."""
ANSWERS = ("answer", "solution", "ground_truth", "target", "final_answer")
"""Columns that are taken for the reference answer of a prompt, the first that is there."""

ALPACA = "Below is an instruction that describes a task. Write a response that appropriately completes the request."
ALPACA_WITH_INPUT = (
    "Below is an instruction that describes a task, paired with an input that provides further context. Write a "
    "response that appropriately completes the request."
)
"""The prompts of Alpaca, for tokenizers without a chat template."""


_OF_TEMPLATES = ("tools", "chat_template_kwargs")
"""Columns that the chat template reads beside the messages."""


class FormatError(ValueError):
    """Rows have none of the known formats, or a row has not the format of the first one."""


class Format(NamedTuple):
    """
    A format of rows.

    Attributes:
        name (`str`): As `--format` takes it.
        title (`str`): For people, with the columns.
        columns (`tuple[str, ...]`): That it reads.
        convert (`Callable`): From a row to the columns that TRL takes. Raises `FormatError` for a row of another form.
        chats (`bool`): Whether the chat template is applied.
        kept (`tuple[str, ...]`): Columns that go with the row as they are.
    """

    name: str
    title: str
    columns: tuple[str, ...]
    convert: Callable[[Row], dict[str, Any]]
    chats: bool
    kept: tuple[str, ...] = ()


# Parts of rows.


def is_chat(value: Any) -> bool:
    """Whether a value is a list of messages with roles."""
    return isinstance(value, list) and bool(value) and all(isinstance(m, Mapping) and "role" in m for m in value)


def _is_sharegpt(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(m, Mapping) and "from" in m for m in value)


def messages_of(row: Row, column: str) -> list[dict[str, Any]]:
    """Return the messages of a column. Raises [`FormatError`] if they are none."""
    value: Any = row.get(column)
    if not is_chat(value):
        raise FormatError(f"`{column}` is `{value!r:.80}`, not a list of messages with `role` and `content`")
    messages = [{key: given for key, given in message.items() if given is not None} for message in value]
    for message in messages:
        if not isinstance(message.get("role"), str):
            raise FormatError(f"`{column}` has a message whose role is `{message.get('role')!r:.40}`")
        if "content" not in message and "tool_calls" not in message:
            raise FormatError(f"`{column}` has a message of `{message['role']}` without `content`")
    return messages


def _answered(messages: list[dict[str, Any]], column: str) -> list[dict[str, Any]]:
    if not any(message["role"] == "assistant" for message in messages):
        raise FormatError(f"`{column}` has no message of `assistant`, so there is no answer to learn")
    return messages


def _from_sharegpt(row: Row, column: str) -> list[dict[str, Any]]:
    value: Any = row.get(column)
    messages: list[dict[str, Any]] = []
    if not _is_sharegpt(value):
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
    if value is None and may_be_empty:
        return ""
    if isinstance(value, (int, float)) and not isinstance(value, bool):  # a column of a table without any letter
        return str(value)
    if not isinstance(value, str) or not (value or may_be_empty):
        raise FormatError(f"`{column}` is `{value!r:.80}`, not a text")
    return value


def _user(text: str, system: str = "") -> list[dict[str, str]]:
    before = [{"role": "system", "content": system}] if system else []
    return [*before, {"role": "user", "content": text}]


def _side(row: Row, column: str) -> Any:
    """A prompt, completion, chosen or rejected: a text, or messages."""
    return messages_of(row, column) if isinstance(row.get(column), list) else _text(row, column)


def _same_kind(sides: dict[str, Any]) -> dict[str, Any]:
    chats = {name for name, side in sides.items() if isinstance(side, list)}
    if chats and len(chats) < len(sides):
        raise FormatError(f"`{min(chats)}` holds messages and `{min(sides.keys() - chats)}` holds text")
    return sides


# The formats of each command, in the order in which they are tried.


def _alpaca(chat: bool) -> Callable[[Row], dict[str, Any]]:
    def convert(row: Row) -> dict[str, Any]:
        instruction, given = _text(row, "instruction"), _text(row, "input", may_be_empty=True)
        answer = _text(row, "output")
        if chat:
            asked = f"{instruction}\n\n{given}" if given else instruction
            system = _text(row, "system", may_be_empty=True)
            return {"prompt": _user(asked, system), "completion": [{"role": "assistant", "content": answer}]}
        start = f"{ALPACA_WITH_INPUT}\n\n" if given else f"{ALPACA}\n\n"
        middle = f"### Input:\n{given}\n\n" if given else ""
        return {"prompt": f"{start}### Instruction:\n{instruction}\n\n{middle}### Response:\n", "completion": answer}

    return convert


def _chats(column: str, first: Row) -> Format | None:
    """The format of a column with conversations."""
    if _is_sharegpt(first.get(column)):
        title = f"ShareGPT (`{column}` with `from` and `value`)"
        name, read = "sharegpt", _from_sharegpt
    elif is_chat(first.get(column)) or column == "messages":
        name, title, read = "messages", f"chats (`{column}`)", messages_of
    else:
        return None

    def convert(row: Row) -> dict[str, Any]:
        return {"messages": _answered(read(row, column), column)}

    return Format(name, title, (column,), convert, True, _OF_TEMPLATES)


def _recognise_sft(columns: set[str], first: Row, template: bool) -> Format | None:
    found = (_chats(name, first) for name in ("messages", "conversations", "conversation") if name in columns)
    chats = next((format for format in found if format is not None), None)
    if chats is not None:
        return chats
    if {"prompt", "completion"} <= columns:
        chats = is_chat(first.get("completion"))
        title = f"prompt and completion ({'messages' if chats else 'text'})"
        names = ("prompt", "completion")
        return Format(
            "prompt-completion", title, names, lambda row: _same_kind({n: _side(row, n) for n in names}), chats,
            _OF_TEMPLATES,
        )  # fmt: skip
    if {"instruction", "output"} <= columns:
        names = ("instruction", *({"input", "system"} & columns), "output")
        how = "through the chat template" if template else "with Alpaca's prompt, as there is no chat template"
        return Format("alpaca", f"Alpaca (instruction, output; {how})", names, _alpaca(template), template)
    if "text" in columns:
        return Format("text", "plain text (`text`)", ("text",), lambda row: {"text": _text(row, "text")}, False)
    return None


def _recognise_dpo(columns: set[str], first: Row, template: bool) -> Format | None:
    if not {"chosen", "rejected"} <= columns:
        return None
    chats = is_chat(first.get("chosen"))
    kind = "messages" if chats else "text"
    if "prompt" in columns:
        given: tuple[str, ...] = ("prompt", "chosen", "rejected")
        title = f"preference pairs with prompt ({kind})"
        if chats and isinstance(first.get("prompt"), str):  # as UltraFeedback: chosen and rejected begin with it
            given, title = ("chosen", "rejected"), f"preference pairs, prompt inside ({kind})"
    else:
        given, title = ("chosen", "rejected"), f"preference pairs, prompt inside ({kind})"

    def convert(row: Row) -> dict[str, Any]:
        sides = _same_kind({name: _side(row, name) for name in given})
        if sides["chosen"] == sides["rejected"]:
            raise FormatError("`chosen` and `rejected` are the same")
        return sides

    return Format("preference", title, given, convert, chats, _OF_TEMPLATES)


def _recognise_grpo(columns: set[str], first: Row, template: bool) -> Format | None:
    answer = next((name for name in ANSWERS if name in columns), None)
    kept = tuple(sorted(columns - {"prompt", "messages"}))
    with_answer = f" with `{answer}`" if answer else ", no answers"
    if "prompt" in columns:
        chats = is_chat(first.get("prompt"))
        return Format(
            "prompt", f"prompts ({'messages' if chats else 'text'}){with_answer}", ("prompt",),
            lambda row: {"prompt": _side(row, "prompt"), **_reference(row, answer)}, chats, kept,
        )  # fmt: skip
    if "messages" in columns:

        def from_chat(row: Row) -> dict[str, Any]:
            messages = messages_of(row, "messages")
            last = messages[-1]
            if last["role"] != "assistant":
                return {"prompt": messages, **_reference(row, answer)}
            if len(messages) == 1:
                raise FormatError("`messages` has no message before the answer")
            return {"prompt": messages[:-1], "answer": last.get("content", ""), **_reference(row, answer)}

        title = "chats (`messages`; their last answer is the reference)" if answer is None else f"chats{with_answer}"
        return Format("messages", title, ("messages",), from_chat, True, kept)
    asked = next((name for name in PROMPTS if name in columns), None)
    if asked is None:
        return None

    def from_question(row: Row) -> dict[str, Any]:
        text = _text(row, asked)
        return {"prompt": _user(text) if template else text, **_reference(row, answer)}

    return Format("question", f"`{asked}`{with_answer}", (asked,), from_question, template, kept)


def _reference(row: Row, answer: str | None) -> dict[str, Any]:
    return {} if answer is None else {"answer": row.get(answer)}


_RECOGNISE = {"sft": _recognise_sft, "dpo": _recognise_dpo, "grpo": _recognise_grpo}
TAKEN = {
    "sft": "`messages` (chats), `conversations` (ShareGPT), `prompt` and `completion`, `instruction` and `output` "
    "(Alpaca), or `text`",
    "dpo": "`chosen` and `rejected`, with or without `prompt`",
    "grpo": f"`prompt`, `messages` or one of {', '.join(f'`{name}`' for name in PROMPTS)}",
}
"""What a command takes, in words."""


def recognise(command: str, columns: Iterable[str], first: Row, template: bool = True) -> Format:
    """
    Return the format of a data set.

    Args:
        command (`str`): `sft`, `dpo` or `grpo`.
        columns (`Iterable[str]`): Of the data set.
        first (`Mapping`): Its first row.
        template (`bool`): Whether the tokenizer has a chat template. Without one, Alpaca's rows and questions are text.

    Raises:
        FormatError: If the columns are of no format that the command takes.
    """
    columns = list(columns)
    found = _RECOGNISE[command](set(columns), first, template)
    if found is not None:
        return found
    has = ", ".join(f"`{name}`" for name in columns) or "no columns"
    likely = next((other for other in _RECOGNISE if _RECOGNISE[other](set(columns), first, template)), None)
    hint = f" That is what `hf-hybrid {likely}` takes." if likely else " `--columns prompt=question` renames one."
    raise FormatError(f"it has {has}, and `hf-hybrid {command}` takes {TAKEN[command]}.{hint}")


def with_system(row: dict[str, Any], system: str) -> dict[str, Any]:
    """Put a system message in front of the conversation of a converted row that has none."""
    for name in ("messages", "prompt"):
        messages = row.get(name)
        if isinstance(messages, list) and messages[0]["role"] != "system":
            return {**row, name: [{"role": "system", "content": system}, *messages]}
    if "prompt" not in row and isinstance(row.get("chosen"), list):
        return {**row, **{n: with_system({"prompt": row[n]}, system)["prompt"] for n in ("chosen", "rejected")}}
    return row
