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
which the chat template is applied. A new format is a function that returns a [`Format`], and an entry in [`FORMATS`].
"""

from __future__ import annotations

import difflib
import functools
import itertools
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from hf_hybrid.cli.loading import refusing
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
PROMPTS = ("prompt", *QUESTIONS, "input", "conversations", "conversation", "messages")
"""Columns that hold the prompt of a pair, the first that is there; none if `chosen` begins with the prompt."""
ANSWERS = ("answer", "solution", "ground_truth", "target", "final_answer")
"""Columns that are taken for the reference answer of a prompt, the first that is there."""

ALPACA = (
    "Below is an instruction that describes a task{}. Write a response that appropriately completes the request.\n\n"
)
"""The prompt of Alpaca, for tokenizers without a chat template."""
JSON = "(json)"
"""The column with the rows of a JSON file, each as text."""
SWITCHES = ("weight", "train")
"""Keys of a message that say whether it is learned: OpenAI's and Axolotl's."""
_OF_TEMPLATES = ("tools", "chat_template_kwargs")
"""Columns that the chat template reads beside the messages."""


class FormatError(ValueError):
    """A row has not the format of the first one."""


class Format(NamedTuple):
    """How rows of a form become rows of TRL. `convert` raises `FormatError` for a row of another form."""

    title: str  # for people, with the columns
    convert: Callable[[Row], dict[str, Any]]
    chats: bool  # whether the chat template is applied
    kept: tuple[str, ...] = ()  # columns that go with the row as they are


class Source(NamedTuple):
    """The rows of one data set in TRL's form (a `Dataset` or an `IterableDataset`), and how messages name it."""

    where: str
    format: Format
    columns: list[str]
    rows: Any
    unread: Sequence[str] = ()  # columns whose values are left out


class _Watched(dict):
    """A row of these columns that knows which of them nobody has read yet."""

    def __init__(self, row: Row, columns: Sequence[str]):
        super().__init__(row)
        self.unread = dict.fromkeys(columns)

    def get(self, key: Any, default: Any = None, /) -> Any:
        self.unread.pop(key, None)
        return super().get(key, default)


# Parts of rows.


def read_row(row: Any) -> dict[str, Any]:
    """Return the values of a row as it was loaded. Raises [`FormatError`] if it is no JSON object."""
    if JSON not in row:
        return row
    try:
        values = json.loads(row[JSON])
    except ValueError as error:
        raise FormatError(f"it is no JSON ({error})") from None
    values = {"text": values} if isinstance(values, str) else values
    if not isinstance(values, dict):
        raise FormatError(f"it is `{values!r:.80}`, no JSON object")
    return values


def is_chat(value: Any) -> bool:
    """Whether a value is messages, or one, whose roles stand under `role`, or in ShareGPT's form under `from`."""
    messages = _listed(value)
    return bool(messages) and all(isinstance(m, Mapping) and {"role", "from"} & m.keys() for m in messages)


def _listed(value: Any) -> list[Any]:
    """Messages as a list: LLaMA-Factory's pairs have one alone."""
    return value if isinstance(value, list) else [value] if isinstance(value, Mapping) else []


def messages_of(row: Row, column: str) -> list[dict[str, Any]]:
    """Return the messages of a column with `role` and `content`. Raises [`FormatError`] if they are none."""
    value: Any = row.get(column)
    if not is_chat(value):
        raise FormatError(f"`{column}` is `{value!r:.80}`, not a list of messages with `role` and `content`")
    return [_message(message, column) for message in _listed(value)]


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
    if key not in values:
        if "tool_calls" in values:
            return {"role": role, **values}
        key = "value" if sharegpt else "content"
        raise FormatError(f"`{column}` has a message of `{name}` without `{key}`")
    content = values.pop(key)
    # A list is one of parts, which are texts or `{"type": "text", "text": ...}`.
    parts = content if isinstance(content, list) else [{"text": content}]
    parts = [part if isinstance(part, Mapping) else {"text": part} for part in parts]
    for part in parts:
        if part.get("type", "text") != "text":
            raise FormatError(f"`{column}` has a message with a part of `{part['type']}`, and only text is trained on")
    what = f"the content of a message of `{name}` in `{column}`"
    return {"role": role, "content": "".join(_as_text(part.get("text"), what) for part in parts), **values}


def _as_text(value: Any, what: str) -> str:
    """A text; a number or a truth value as JSON writes it."""
    if isinstance(value, (bool, int, float)) and value == value:
        return json.dumps(value)
    if not isinstance(value, str):
        shown = json.dumps(value, default=str) if isinstance(value, (dict, list)) else repr(value)
        raise FormatError(f"{what} is `{shown:.80}`, not a text")
    return value


def _text(row: Row, column: str, *, may_be_empty: bool = False) -> str:
    text = _as_text(row.get(column), f"`{column}`")
    if not text and not may_be_empty:
        raise FormatError(f"`{column}` is `''`, not a text")
    return text


def _text_if_any(row: Row, column: str) -> str:
    return "" if row.get(column) is None else _text(row, column, may_be_empty=True)


def _sides(row: Row, *columns: str) -> dict[str, Any]:
    """A prompt, completion, chosen or rejected: texts, or messages."""
    sides = {c: messages_of(row, c) if _listed(row.get(c)) else _text(row, c) for c in columns}
    chats = {name for name, side in sides.items() if isinstance(side, list)}
    if chats and len(chats) < len(sides):
        raise FormatError(f"`{min(chats)}` holds messages and `{min(sides.keys() - chats)}` holds text")
    return sides


def _question(row: Row, column: str, chats: bool) -> list[dict[str, Any]] | str:
    """What the user asks, as messages or as text. Alpaca's `input` belongs to its `instruction`."""
    text, more = _text(row, column), _text_if_any(row, "input") if column == "instruction" else ""
    if chats:
        return [{"role": "user", "content": f"{text}\n\n{more}" if more else text}]
    if column != "instruction":
        return text
    start = ALPACA.format(", paired with an input that provides further context" if more else "")
    middle = f"### Input:\n{more}\n\n" if more else ""
    return f"{start}### Instruction:\n{text}\n\n{middle}### Response:\n"


# The formats.

Recogniser = Callable[[str, set[str], Row, bool], "Format | None"]
"""Takes the first column that the format needs, all columns, the first row, and whether there is a chat template."""


def _chats(column: str, columns: set[str], first: Row, template: bool, *, answered: bool = True) -> Format | None:
    value: Any = first.get(column)
    if not is_chat(value) and column != "messages":
        return None
    sharegpt = is_chat(value) and "from" in _listed(value)[0]
    title = f"ShareGPT (`{column}` with `from` and `value`)" if sharegpt else f"chats (`{column}`)"

    def convert(row: Row) -> dict[str, Any]:
        messages = messages_of(row, column)
        roles = {message["role"]: None for message in messages}
        if answered and "assistant" not in roles:
            others = ", ".join(f"`{role}`" for role in roles)
            raise FormatError(
                f"`{column}` has no message of `assistant`, only of {others}, so there is no answer to learn"
            )
        return {"messages": messages}

    return Format(title, convert, True, _OF_TEMPLATES)


def _texts(column: str, columns: set[str], first: Row, template: bool, *, may_be_empty: bool = False) -> Format:
    convert = lambda row: {"text": _text(row, "text", may_be_empty=may_be_empty)}  # noqa: E731
    return Format("plain text (`text`)", convert, False)


def _completions(column: str, columns: set[str], first: Row, template: bool) -> Format:
    chats = is_chat(first.get("completion"))
    title = f"prompt and completion ({'messages' if chats else 'text'})"
    return Format(title, lambda row: _sides(row, "prompt", "completion"), chats, _OF_TEMPLATES)


def _alpaca(column: str, columns: set[str], first: Row, template: bool) -> Format:
    def convert(row: Row) -> dict[str, Any]:
        question, answer = _question(row, "instruction", template), _text(row, "output")
        return {"prompt": question, "completion": [{"role": "assistant", "content": answer}] if template else answer}

    how = "through the chat template" if template else "with Alpaca's prompt, as there is no chat template"
    return Format(f"Alpaca (instruction, output; {how})", convert, template)


def _pairs(column: str, columns: set[str], first: Row, template: bool) -> Format:
    asked, chosen = next((name for name in PROMPTS if name in columns), None), _listed(first.get("chosen"))
    answers_are_chats = is_chat(chosen)
    if answers_are_chats and not is_chat(first.get("prompt")):
        role = str(chosen[0].get("role", chosen[0].get("from"))).lower()
        # As in UltraFeedback, chosen and rejected may begin with the prompt, which also stands alone.
        asked = asked if SHAREGPT_ROLES.get(role) == "assistant" else None
    prompt_is_chat = asked is not None and is_chat(first.get(asked))
    chats = answers_are_chats or prompt_is_chat or (template and asked not in (None, "prompt"))

    def convert(row: Row) -> dict[str, Any]:
        read = messages_of if answers_are_chats else _text
        sides: dict[str, Any] = {name: read(row, name) for name in ("chosen", "rejected")}
        if sides["chosen"] == sides["rejected"]:
            raise FormatError("`chosen` and `rejected` are the same")
        if chats and not answers_are_chats:
            sides = {name: [{"role": "assistant", "content": text}] for name, text in sides.items()}
        if asked is not None:
            prompt: Any = messages_of(row, asked) if prompt_is_chat else _question(row, asked, chats)
            sides["prompt"] = prompt
            if prompt_is_chat and asked != "prompt" and prompt[-1]["role"] == "assistant":
                raise FormatError(f"`{asked}` ends with an answer, so that it is no prompt of `chosen` and `rejected`")
        return sides

    where = {None: ", prompt inside", "prompt": " with prompt"}.get(asked, f" with `{asked}`")
    return Format(f"preference pairs{where} ({'messages' if chats else 'text'})", convert, chats, _OF_TEMPLATES)


def _prompts(column: str, columns: set[str], first: Row, template: bool) -> Format:
    """Prompts, chats or questions with reference answers, and all other columns, which reward functions get."""
    answer = next((name for name in ANSWERS if name in columns), None)

    def convert(row: Row) -> dict[str, Any]:
        values = prompt_of(row)
        if answer is not None:
            values["answer"] = None if row.get(answer) == "" else row.get(answer)  # an empty field of a table
        return values

    def prompt_of(row: Row) -> dict[str, Any]:
        if column == "prompt":
            return _sides(row, "prompt")
        if column != "messages":
            return {"prompt": _question(row, column, template)}
        *before, last = messages_of(row, "messages")
        if last["role"] != "assistant":
            return {"prompt": [*before, last]}
        if not before:
            raise FormatError("`messages` has no message before the answer")
        return {"prompt": before, "answer": last.get("content", "")}

    chats = {"prompt": is_chat(first.get("prompt")), "messages": True}.get(column, template)
    titles = {"prompt": f"prompts ({'messages' if chats else 'text'})", "messages": "chats (`messages`)"}
    without = "; their last answer is the reference" if column == "messages" else ", no answers"
    title = titles.get(column, f"`{column}`") + (f" with `{answer}`" if answer else without)
    return Format(title, convert, chats, tuple(sorted(columns - {"prompt", "messages"})))


FORMATS: dict[str, dict[str, Recogniser]] = {
    "train": {
        "`messages` (chats)": functools.partial(_chats, answered=False),
        "`text`": functools.partial(_texts, may_be_empty=True),
    },
    "sft": {
        "`messages` (chats)": _chats,
        "`conversations` (ShareGPT)": _chats,
        "`conversation`": _chats,
        "`prompt` and `completion`": _completions,
        "`instruction` and `output` (Alpaca)": _alpaca,
        "`text`": _texts,
    },
    "dpo": {"`chosen` and `rejected`, with or without a prompt": _pairs},
    "grpo": {f"`{name}`": _prompts for name in ("prompt", "messages", *QUESTIONS)},
}
"""Of each command, in the order in which they are tried, by the columns (in backticks) that they need."""


def recognise(
    command: str, columns: Iterable[str], first: Row, template: bool = True, where: str = "The data set"
) -> Format:
    """
    Return the format of a data set (`where`) by its columns and its first row. Without a chat template of the tokenizer
    (`template`), Alpaca's rows and questions become text.
    """
    columns = list(columns)

    def match(command: str) -> Format | None:
        for title, recogniser in FORMATS[command].items():
            needed = re.findall("`(.+?)`", title)
            if set(needed) <= set(columns) and (matching := recogniser(needed[0], set(columns), first, template)):
                return matching
        return None

    if (row_format := match(command)) is not None:
        return row_format
    has = ", ".join(f"`{name}`" for name in columns) or "no columns"
    *others, last = FORMATS[command]
    takes = f"{', '.join(others)} or {last}" if others else last
    if command == "dpo" and len(lacking := {"chosen", "rejected"}.difference(columns)) == 1:
        raise OptionError(f"{where}: it has {has}, and no `{lacking.pop()}`. `--columns NEW=OLD` renames one.")
    likely = next((other for other in ("sft", "dpo", "grpo") if match(other)), None)
    hint = f" That is what `hf-hybrid {likely}` takes." if likely else " `--columns NEW=OLD` renames one."
    raise OptionError(f"{where}: it has {has}, and `hf-hybrid {command}` takes {takes}.{hint}")


def convert_rows(
    where: str, rows: Any, command: str, renamed: dict[str, str], system: str | None, template: bool
) -> Source:
    """
    Return a data set in TRL's form, of which messages say `where` it is. Columns get new names by the old ones
    (`renamed`), chats without a system message get `system`, and `template`: the tokenizer has a chat template.
    """

    def with_number(convert: Callable[[Any], dict[str, Any]], row: Any, number: int) -> dict[str, Any]:
        try:
            return convert(row)
        except FormatError as error:
            raise OptionError(f"{where}, row {number + 1}: {error}. Correct or remove the row.") from None

    def rename(row: Any) -> dict[str, Any]:
        return {renamed.get(name, name): value for name, value in read_row(row).items()}

    def convert(row: Any) -> dict[str, Any]:
        values = {**{name: row.get(name) for name in kept}, **row_format.convert(row)}
        if row_format.chats:
            values = with_system(values, _text_if_any(row, "system"))
        return with_system(values, system)

    stored = rows.column_names or list(next(iter(rows), {}))  # of a stream that does not know them
    # A row of JSON need not have the columns of the first.
    heads = itertools.islice(rows, 1000 if JSON in stored else 1)
    heads = [with_number(read_row, row, number) for number, row in enumerate(heads)]
    if not heads:
        raise OptionError(f"{where} holds no rows.")
    columns = list(dict.fromkeys(itertools.chain.from_iterable(heads)))
    _check_names(where, columns, renamed)
    columns = [renamed.get(name, name) for name in columns]
    if command != "train" and (pictures := {"image", "images"}.intersection(columns)):
        raise OptionError(
            f"{where} has pictures in `{min(pictures)}`, and `hf-hybrid {command}` trains models of text. To train on "
            "the text alone, remove the column."
        )
    row_format = recognise(command, columns, rename(heads[0]), template, where)
    if row_format.chats and not template:
        more = ", or set `--chat_template_path` to a .jinja file or `plain` (`User: ... Assistant: ...`)"
        raise OptionError(
            f"{where} holds {row_format.title}, and the tokenizer has no chat template. Set `--tokenizer` to that of "
            f"an instruct model, or save a `chat_template.jinja` beside it{more if command == 'sft' else ''}."
        )
    kept = [name for name in row_format.kept if name in columns]
    first = _Watched(rename(heads[0]), columns)
    columns = list(with_number(convert, first, 0))
    options: dict[str, Any] = {"desc": "Reading rows"} if hasattr(rows, "__len__") else {}
    each = functools.partial(with_number, lambda row: convert(rename(row)))
    with refusing(f"{where}: its rows do not fit into one table", "Give each column values of one kind."):
        converted = rows.map(each, with_indices=True, remove_columns=stored, **options)
        return Source(where, row_format, columns, converted, tuple(first.unread))


def _check_names(where: str, columns: Sequence[str], renamed: dict[str, str]) -> None:
    """Refuse new names of columns that are not there, and new names that are."""
    for old, new in renamed.items():
        if old not in columns:
            near = difflib.get_close_matches(old, columns, n=1)
            hint = f" Did you mean `{near[0]}`?" if near else ""
            has = ", ".join(f"`{column}`" for column in columns)
            raise OptionError(f"`--columns {new}={old}`: {where} has {has}.{hint}")
        if new in columns and new not in renamed:
            raise OptionError(f"`--columns {new}=...`: {where} has a column `{new}` already.")


def with_system(row: dict[str, Any], system: str | None) -> dict[str, Any]:
    """Put a system message, if there is one, in front of the conversations of a converted row that have none."""
    names = ["prompt"] if "prompt" in row else ["messages", "chosen", "rejected"]
    chats = {name: row[name] for name in names if system and isinstance(row.get(name), list)}
    message = {"role": "system", "content": system}
    return {**row, **{name: [message, *chat] for name, chat in chats.items() if chat[0]["role"] != "system"}}
