"""
The forms of rows that the commands take, and how each becomes what TRL takes.

A form is recognised by the columns of the data set ([`NAMES`]) and its first row, and the command names it to the user.
A row that does not have the form of the first one is refused with its number. Rows become

| command | columns |
|---|---|
| train | `messages`, or `text` |
| sft | `messages`; `prompt`, `completion`; `text`; `input_ids`, `labels` |
| dpo | `chosen`, `rejected`, and `prompt` if it stands in a column of its own |
| grpo | `prompt`, and what the reward functions read |

where a prompt, completion, chosen or rejected is a text, or a list of messages `{"role": ..., "content": ...}`, to
which the chat template is applied. With images, all of these are messages whose content is a list of parts, and
`images` has the images of the parts in their order. A new name of a column is a word in [`NAMES`]; a new form is a
function that returns a [`Format`], and an entry in [`FORMATS`].
"""

from __future__ import annotations

import ast
import base64
import contextlib
import difflib
import functools
import io
import itertools
import json
import re
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from hf_hybrid.cli.loading import reason_of
from hf_hybrid.cli.options import TRAINING, OptionError

Row = Mapping[str, Any]

_ROLES = {
    "user": "human user",
    "assistant": "gpt chatgpt bing bard model assistant function_call",
    "system": "system",
    "tool": "tool observation function_response",
}
SHAREGPT_ROLES = {name: role for role, names in _ROLES.items() for name in names.split()}
NAMES = {
    "messages": "messages conversations conversation",
    "prompt": "prompt question problem query instruction input",
    "completion": "completion output response solution answer answers canonical_solution",
    "chosen": "chosen response_j preferred_output",
    "rejected": "rejected response_k non_preferred_output",
    "answer": "answer solution ground_truth target final_answer answers",
    "text": "text",
    "more": "input context",
    "system": "system system_prompt",
    "images": "images image",
    "media": "videos audios",
    "switch": "label weight train training loss_weight",
}
"""
By the part of a row: the columns that hold it, the first that is there. `answer` is the reference for a prompt of
`grpo`, and `more` is what a question is asked about.
"""
NAMES: dict[str, tuple[str, ...]] = {part: tuple(names.split()) for part, names in NAMES.items()}
SWITCHES = NAMES["switch"][1:]
"""Keys of a message that say whether it is learned: OpenAI's, Axolotl's and LLaMA-Factory's."""

ALPACA = (
    "Below is an instruction that describes a task{}. Write a response that appropriately completes the request.\n\n"
)
"""The prompt of Alpaca, for tokenizers without a chat template."""
JSON = "(json)"
"""The column with the rows of a JSON file, each as text."""
_OF_TEMPLATES = ("tools", "chat_template_kwargs")
"""Columns that the chat template reads beside the messages."""
_OF_NOTES = re.compile(r"(^|_)(id|uu?id|name|source|category|type|split|date|url|lang|language|model|version)s?$", re.I)
"""Names of columns that are no part of what is learned."""
_FORMATTED = re.compile(r"<[|\uff5c].{1,40}?[|\uff5c]>|<start_of_turn>|\[INST\]|(?i:assistant|response|answer):\s*\Z")
"""What a prompt has that is formatted already."""
_PARTS = {"image": ("image", "path", "url"), "image_url": ("image_url",)}
"""Parts of a message that are images, and the keys that one may have its own under."""
_MARK = "\ufdd0"
"""The place of such a part in a text: Unicode has no such letter."""
_PLACE = re.compile(rf"\n?<image>\n?|{_MARK}")
_SPEAKERS = {"prompt": "user", "completion": "assistant", "chosen": "assistant", "rejected": "assistant"}


class FormatError(ValueError):
    """A row has not the form of the first one. Where the message ends with a dot it says what to do."""


class Format(NamedTuple):
    """How rows of a form become rows of TRL. `convert` raises `FormatError` for a row of another form."""

    title: str  # for people, with the columns
    convert: Callable[[Row], dict[str, Any]]
    chats: bool  # whether the chat template is applied
    columns: tuple[str, ...]  # by which it was recognised
    kept: tuple[str, ...] = ()  # columns that go with the row as they are


class Source(NamedTuple):
    """The rows of one data set in TRL's form (a `Dataset` or an `IterableDataset`), and how messages name it."""

    where: str
    format: Format
    columns: list[str]
    rows: Any
    unread: Sequence[str] = ()  # columns whose values are left out
    has_images: bool = False  # `images` has those of the parts of messages


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
    if row.get(JSON) is None:
        return row
    try:
        values = json.loads(row[JSON])
    except ValueError as error:
        raise FormatError(f"it is no JSON ({error})") from None
    if isinstance(values, str) or isinstance(values, list) and is_chat(values):
        return {"text" if isinstance(values, str) else "messages": values}
    if not isinstance(values, dict):
        raise FormatError(f"it is `{values!r:.80}`, no JSON object")
    if values.keys() >= {"role", "content"}:
        raise FormatError("it is one message, and a row is a whole conversation: a list of messages.")
    return values


def rows_of(value: Any) -> list[Any]:
    """Return the rows of a file that is one JSON value: a list, an object of columns or with one list, or a row."""
    if not isinstance(value, dict):
        return value if isinstance(value, list) and not is_chat(value) else [value]
    columns = [list(part.values()) if isinstance(part, dict) else part for part in value.values()]
    if all(isinstance(part, list) and part and isinstance(part[0], str) for part in columns):  # as pandas has them
        with contextlib.suppress(ValueError):
            return [dict(zip(value, parts, strict=True)) for parts in zip(*columns, strict=True)]
    lists = [part for part in value.values() if isinstance(part, list) and part]
    if len(lists) != 1 or not isinstance(lists[0][0], (dict, list)):
        return [value]
    is_row = any(of([*value], value, True) for forms in FORMATS.values() for of in forms.values())
    return [value] if is_row else lists[0]


def is_chat(value: Any) -> bool:
    """Whether a value is messages, or one, whose roles stand under `role`, or in ShareGPT's form under `from`."""
    messages = _listed(value)
    return bool(messages) and all(isinstance(m, Mapping) and {"role", "from"} & m.keys() for m in messages)


def _listed(value: Any) -> list[Any]:
    """Messages as a list: LLaMA-Factory's pairs have one alone, and tables have them as text, in JSON or Python."""
    if isinstance(value, str) and value.lstrip().startswith("[{"):
        for read in (json.loads, ast.literal_eval):
            with contextlib.suppress(ValueError, SyntaxError, RecursionError, MemoryError, AttributeError):
                messages = read(value)
                return messages if all({"content", "value", "tool_calls"} & m.keys() for m in messages) else []
    if isinstance(value, Mapping):
        return value["messages"] if isinstance(value.get("messages"), list) else [value]
    return value if isinstance(value, list) else []


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
    if isinstance(values.get("tool_calls"), list):
        values["tool_calls"] = [_call(call) for call in values["tool_calls"]]
    key = "content" if "content" in values else "value"
    if key not in values and "tool_calls" not in values:
        key = "value" if sharegpt else "content"
        raise FormatError(f"`{column}` has a message of `{name}` without `{key}`")
    content = values.pop(key, "")
    # A list is one of parts, which are texts or `{"type": "text", "text": ...}`, in LLaMA-Factory `"value": ...`.
    parts = content if isinstance(content, list) else [{"text": content}]
    parts = [part if isinstance(part, Mapping) else {"text": part} for part in parts]
    text, what = "", f"the content of a message of `{name}` in `{column}`"
    for part in parts:
        if (kind := part.get("type", "text")) in _PARTS:
            text += _MARK
            own = [part[key] for key in _PARTS[kind] if part.get(key)]
            values |= {"images": [*values.get("images", ()), own[0]]} if own else {}
        elif kind != "text":
            raise FormatError(f"`{column}` has a message with a part of `{kind}`, and text and images are trained on")
        else:
            text += _as_text(part.get("value") if part.get("text") is None else part["text"], what)
    return {"role": role, "content": text, **values}


def _call(call: Any) -> Any:
    """A call of a tool, its arguments as values: OpenAI has them as text, which templates would quote once more."""
    try:
        return {**call, "function": {**call["function"], "arguments": json.loads(call["function"]["arguments"])}}
    except (LookupError, TypeError, ValueError):
        return call


def _as_text(value: Any, what: str) -> str:
    """A text; a number or a truth value as JSON writes it."""
    if isinstance(value, (bool, int, float)) and value == value:
        return json.dumps(value)
    if not isinstance(value, str):
        shown = json.dumps(value, default=str) if isinstance(value, (dict, list)) else repr(value)
        raise FormatError(f"{what} is `{shown:.80}`, not a text")
    return value


def _first_answer(value: Any) -> Any:
    """The first of several answers, as SQuAD has them."""
    texts = value.get("text") if isinstance(value, Mapping) else value
    return texts[0] if isinstance(texts, list) and texts and isinstance(texts[0], str) else value


def _text(row: Row, column: str, *, may_be_empty: bool = False) -> str:
    value: Any = row.get(column)
    text = _as_text(_first_answer(value) if column in NAMES["answer"] else value, f"`{column}`")
    if not text and not may_be_empty:
        raise FormatError(f"`{column}` is `''`, not a text")
    return text


def _text_if_any(row: Row, *columns: str) -> str:
    """The text of the first of these columns that has one, or none."""
    found = (name for name in columns if row.get(name) not in (None, ""))
    return next((_text(row, name, may_be_empty=True) for name in found), "")


def _side(row: Row, column: str, chats: bool) -> list[dict[str, Any]] | str:
    """A completion, chosen or rejected: messages, or a text, which is the assistant's among `chats`."""
    if is_chat(row.get(column)):
        return messages_of(row, column)
    text = _text(row, column)
    return [{"role": "assistant", "content": text}] if chats else text


def _question(row: Row, column: str, chats: bool, alpaca: bool) -> list[dict[str, Any]] | str:
    """What the user asks, as messages or as text; `alpaca`: in Alpaca's prompt. What it is about belongs to it."""
    if is_chat(row.get(column)):
        return messages_of(row, column)
    about = [name for name in NAMES["more"] if name != column] if column != "prompt" else []
    text, more = _text(row, column), _text_if_any(row, *about)
    if alpaca and not chats and column != "prompt":
        start = ALPACA.format(", paired with an input that provides further context" if more else "")
        middle = f"### Input:\n{more}\n\n" if more else ""
        return f"{start}### Instruction:\n{text}\n\n{middle}### Response:\n"
    text = f"{text}\n\n{more}" if more else text
    turns = row.get("history") if chats and column != "prompt" else None  # LLaMA-Factory's, of questions and answers
    before = [text for turn in turns or () if isinstance(turn, list) and len(turn) == 2 for text in turn]
    roles = itertools.cycle(("user", "assistant"))
    chat = [{"role": role, "content": text} for role, text in zip(roles, [*before, text], strict=False)]
    return chat if chats else text


# Images.


def _has_images(row: Row) -> bool:
    chats = [_listed(value) for value in row.values() if is_chat(value)]
    parts = [part for chat in chats for message in chat for part in _several(message.get("content"))]
    return any(row.get(name) for name in NAMES["images"]) or any(
        isinstance(part, Mapping) and part.get("type") in _PARTS for part in parts
    )


def _several(value: Any) -> list[Any]:
    return [one for one in (value if isinstance(value, list) else [value]) if one not in (None, "")]


def _places(message: Row) -> int:
    return len(_PLACE.findall(message["content"]))


def _with_images(values: dict[str, Any], row: Row, folder: Path) -> dict[str, Any]:
    """A converted row whose messages have parts, with its images in the order of their places."""
    chats: dict[str, Any] = {
        name: [{"role": _SPEAKERS[name], "content": side}] if isinstance(side, str) else side
        for name, side in values.items()
        if name in ("messages", *_SPEAKERS)
    }
    if not chats:
        raise FormatError("where rows have images, each has messages, or a `prompt` with an answer, and it has none")
    if "chosen" in chats and "prompt" not in chats:  # what both begin with
        pairs = enumerate(zip(chats["chosen"], chats["rejected"], strict=False))
        same = next((place for place, (one, other) in pairs if one != other), 0)
        chats = {"prompt": chats["chosen"][:same], **{name: chat[same:] for name, chat in chats.items()}}
    asked = chats["messages" if "messages" in chats else "prompt"]
    given = [image for name in NAMES["images"] for image in _several(row.get(name))]
    if not any(map(_places, asked)):  # as TRL, in front of what the user says first
        first = next((message for message in asked if message["role"] == "user"), {"content": ""})
        first["content"] = _MARK * (len(given) + len(first.get("images", ()))) + first["content"]
    images, count, queue = [], sum(map(_places, asked)), iter(given)
    for message in asked:
        own = message.pop("images", [])
        images += [*own, *itertools.islice(queue, max(_places(message) - len(own), 0))]
    if len(images) != count or next(queue, None) is not None:
        total = len(images) + len([*queue]) + (len(images) == count)
        raise FormatError(f"its images are {total}, and the places for them in its messages (`<image>`) {count}")
    for name, chat in chats.items():
        for place, message in enumerate(chat):
            if message["role"] == "assistant" and _places(message):
                raise FormatError(f"`{name}` has a place for an image in an answer, and answers are text")
            texts = [[{"type": "text", "text": text}] * bool(text) for text in _PLACE.split(message["content"])]
            image = [{"type": "image", "text": None}]
            parts = [part for text in texts for part in (*image, *text)][1:]
            chat[place] = {**message, "content": parts}
    others = {name: value for name, value in values.items() if name not in NAMES["images"]}
    return {**others, **chats, "images": [_image(image, folder) for image in images]}


def _image(value: Any, folder: Path) -> dict[str, Any]:
    """An image as `datasets` stores it, whose beginning has been read."""
    try:
        from PIL import Image
    except ImportError:
        raise FormatError('images need Pillow. Install it: pip install "hf-hybrid[images]"') from None
    data = value
    if isinstance(value, Mapping):
        data = next((value[key] for key in ("bytes", "path", "url") if value.get(key)), None)
    if isinstance(data, str) and re.match("(https?|ftp|s3|gs|hf)://", data):
        raise FormatError(f"`{data:.80}` is not downloaded. Save the image beside the data, and name its file.")
    if isinstance(data, str) and data.startswith("data:"):
        data = base64.b64decode(data.partition(",")[2])
    if not isinstance(data, (str, bytes)):
        raise FormatError(f"an image is `{data!r:.40}`, neither a path nor bytes")
    path = None if isinstance(data, bytes) else str(folder / Path(data).expanduser())
    try:
        Image.open(io.BytesIO(data) if path is None else path).close()
    except FileNotFoundError:
        raise FormatError(f"there is no image `{path}`") from None
    except OSError as error:
        raise FormatError(f"an image cannot be read: {error}") from None
    return {"bytes": None if path else data, "path": path}


# The forms.

Recogniser = Callable[[Sequence[str], Row, bool], "Format | None"]
"""Takes all columns, the first row, and whether there is a chat template."""


def _named(part: str, columns: Sequence[str]) -> str | None:
    """The column that holds a part of a row."""
    return next((name for name in NAMES[part] if name in columns), None)


def _chats(
    columns: Sequence[str], first: Row, template: bool, *, answered: bool = True, shaped: bool = False
) -> Format | None:
    """Conversations, in a column of a usual name, or in the only one that is `shaped` so."""
    named = [name for name in NAMES["messages"] if name in columns and is_chat(first.get(name))]
    named = _shaped_as_chats(columns, first)[:2] if shaped else named[:1] or ["messages"] * ("messages" in columns)
    if len(named) != 1:
        return None
    column = named[0]
    value: Any = first.get(column)
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

    return Format(title, convert, True, (column,), _OF_TEMPLATES)


def _shaped_as_chats(columns: Sequence[str], first: Row) -> list[str]:
    """The columns of other names that hold messages with answers."""
    chats = {name: _listed(first.get(name)) for name in _unknown(columns) if is_chat(first.get(name))}
    roles = {name: {str(m.get("role", m.get("from"))).lower() for m in chat} for name, chat in chats.items()}
    return [name for name in chats if any(SHAREGPT_ROLES.get(role) == "assistant" for role in roles[name])]


def _texts(columns: Sequence[str], first: Row, template: bool, *, may_be_empty: bool = False) -> Format | None:
    convert = lambda row: {"text": _text(row, "text", may_be_empty=may_be_empty)}  # noqa: E731
    return Format("plain text (`text`)", convert, False, ("text",)) if "text" in columns else None


_OF_TOKENS = ("input_ids", "labels", "completion_mask", "assistant_masks", "attention_mask")


def _tokens(columns: Sequence[str], first: Row, template: bool) -> Format | None:
    """Rows that others have tokenised, as TRL and transformers take them. Padding is left out."""

    def convert(row: Row) -> dict[str, Any]:
        parts: list[Any] = [row.get(name) for name in _OF_TOKENS]
        ids, labels, *masks, real = parts
        learned: Any = ids if labels is None else labels
        try:
            for mask in filter(None, masks):
                learned = [label if one else -100 for label, one in zip(learned, mask, strict=True)]
            tokens = list(zip(ids, learned, real or [1] * len(ids), strict=True))
        except (TypeError, ValueError):
            raise FormatError("`input_ids` and what belongs to it are not lists of the same length") from None
        if any(label not in (-100, token) for token, label, _ in tokens):
            raise FormatError("`labels` has other tokens than `input_ids`")
        return {
            "input_ids": [token for token, _, one in tokens if one],
            "labels": [label for _, label, one in tokens if one],
        }

    return Format("tokens (`input_ids`)", convert, False, ("input_ids",)) if "input_ids" in columns else None


def _answered(columns: Sequence[str], first: Row, template: bool, *, sides: tuple[str, ...]) -> Format | None:
    """Prompts with one answer (`completion`), or with two (`chosen`, `rejected`), which may begin with the prompt."""
    names = [name for side in sides if (name := _named(side, columns)) is not None]
    asked = next((n for n in (*NAMES["prompt"], *NAMES["messages"]) if n in columns and n not in names), None)
    pairs, answer = len(sides) > 1, first.get(names[0]) if names else None
    if len(names) < len(sides) or not (asked or pairs):
        return None
    if pairs and is_chat(answer) and not is_chat(first.get("prompt")):
        message = _listed(answer)[0]
        # As in UltraFeedback, chosen and rejected may begin with the prompt, which also stands alone.
        own = SHAREGPT_ROLES.get(str(message.get("role", message.get("from"))).lower()) == "assistant"
        asked = asked if own else None
    messages = is_chat(answer) or is_chat(first.get(asked))
    plain = "text" if not template else _why_plain(asked, first.get(asked), answer)
    chats = messages or plain is None
    how = "messages" if messages else plain or "through the chat template"
    if not template and not chats and asked not in (None, "prompt"):
        how = "in Alpaca's prompt, as there is no chat template"

    def convert(row: Row) -> dict[str, Any]:
        values = {side: _side(row, name, chats) for side, name in zip(sides, names, strict=True)}
        if pairs and values["chosen"] == values["rejected"]:
            raise FormatError("`chosen` and `rejected` are the same")
        if asked is not None:
            prompt = _question(row, asked, chats, not template)
            if asked != "prompt" and isinstance(prompt, list) and prompt[-1]["role"] == "assistant":
                raise FormatError(f"`{asked}` ends with an answer, so that it is no prompt of `chosen` and `rejected`")
            values["prompt"] = prompt
        kinds = {name: isinstance(value, list) for name, value in values.items()}
        if len({*kinds.values()}) > 1:
            chat, text = (next(name for name, kind in kinds.items() if kind == wanted) for wanted in (True, False))
            raise FormatError(f"`{chat}` holds messages and `{text}` holds text")
        return values

    answers = " and ".join(f"`{name}`" for name in names)
    answers = f"the first of {answers}" if _first_answer(answer) is not answer else answers
    where = f" with `{asked}`" if asked else ", prompt inside"
    title = f"preference pairs ({answers}){where}, {how}" if pairs else f"`{asked}` and {answers} ({how})"
    return Format(title, convert, chats, (*names, *filter(None, [asked])), _OF_TEMPLATES)


def _why_plain(asked: str | None, prompt: Any, answer: Any) -> str | None:
    """Why a chat template is not applied to a prompt and an answer that are texts; `None` if it is."""
    if asked is None:
        return "text as it is"
    if asked == "prompt" and str(answer)[:1].isspace():
        return "text: an answer that begins with a space continues its prompt"
    return "text as it is, which is formatted already" if _FORMATTED.search(str(prompt)) else None


def _prompts(columns: Sequence[str], first: Row, template: bool) -> Format | None:
    """Prompts, chats or questions with reference answers, and all other columns, which reward functions get."""
    chats = [name for name in NAMES["messages"] if name in columns and is_chat(first.get(name))]
    column = next((n for n in ("prompt", *chats, "messages", *NAMES["prompt"]) if n in columns), None)
    answer = _named("answer", [name for name in columns if name != column])
    if column is None:
        return None

    def convert(row: Row) -> dict[str, Any]:
        values: dict[str, Any]
        if column in NAMES["messages"]:
            *prompt, last = messages_of(row, column)
            if last["role"] != "assistant":
                values = {"prompt": [*prompt, last]}
            elif prompt:
                values = {"prompt": prompt, "answer": last["content"]}
            else:
                raise FormatError(f"`{column}` has no message before the answer")
        else:
            values = {"prompt": _question(row, column, template and column != "prompt", not template)}
        if answer is not None:
            values["answer"] = None if row.get(answer) == "" else _first_answer(row.get(answer))  # "": of a table
        return values

    chats = is_chat(first.get(column)) or template and column != "prompt"
    how = "text, without the chat template, which `--columns question=prompt` takes" if template else "text"
    title = f"prompts ({'messages' if chats else how})" if column == "prompt" else f"`{column}`"
    without = ", no answers"
    if column in NAMES["messages"]:
        title, without = f"chats (`{column}`)", "; their last answer is the reference"
    title += f" with `{answer}`" if answer else without
    return Format(title, convert, chats, (column,), tuple(sorted({*columns} - {"prompt", *NAMES["messages"]})))


def _labelled(columns: Sequence[str], first: Row, template: bool) -> Format | None:
    """Answers of which a label says whether they are good."""
    form = _answered(columns, first, template, sides=("completion",)) or _chats(columns, first, template)
    if form is None or "label" not in columns:
        return None
    unlabelled = form.convert

    def convert(row: Row) -> dict[str, Any]:
        values, label = unlabelled(row), str(row.get("label")).lower()
        if label not in ("true", "false", "1", "0"):
            raise FormatError(f"`label` is `{row.get('label')!r:.40}`, not true or false")
        if "messages" in values:
            *prompt, last = values["messages"]
            if not prompt or last["role"] != "assistant":
                raise FormatError("its last message is no answer to others, which `label` could be of")
            values = {"prompt": prompt, "completion": [last]}
        return {**values, "label": label in ("true", "1")}

    return Format(f"{form.title} with `label`", convert, form.chats, ("label", *form.columns), form.kept)


FORMATS: dict[str, dict[str, Recogniser]] = {
    "train": {
        "`messages` (chats)": functools.partial(_chats, answered=False),
        "`text`": functools.partial(_texts, may_be_empty=True),
        "one column of messages": functools.partial(_chats, answered=False, shaped=True),
    },
    "sft": {
        "`messages` (chats)": _chats,
        "`prompt` and `completion`": functools.partial(_answered, sides=("completion",)),
        "`text`": _texts,
        "`input_ids`": _tokens,
        "one column of messages": functools.partial(_chats, shaped=True),
    },
    "dpo": {
        "`chosen` and `rejected`, with or without a prompt": functools.partial(_answered, sides=("chosen", "rejected"))
    },
    "grpo": {"`prompt`, `messages` or `question`": _prompts},
    "kto": {"`prompt`, `completion` and `label`": _labelled},
}
"""By what names the form of rows ([`Command.rows`]): what it takes, in the order in which that is tried."""
_PROPOSED = {"train": ("text",), "sft": ("prompt", "completion"), "dpo": ("chosen", "rejected"), "grpo": ("prompt",)}
_PROPOSED |= {"kto": ("prompt", "completion")}


def recognise(
    command: str, columns: Sequence[str], first: Row, template: bool = True, where: str = "The data set",
    wanted: Iterable[str] = (),
) -> Format:  # fmt: skip
    """
    Return the form of a data set (`where`) by its columns and its first row, one that reads the `wanted` columns if
    there is one. Without a chat template of the tokenizer (`template`), questions become text.
    """

    kind = TRAINING[command].rows

    def match(kind: str) -> Format | None:
        found = [form for of in FORMATS[kind].values() if (form := of(columns, first, template))]
        return next((form for form in found if {*wanted} & {*form.columns}), next(iter(found), None))

    def failure(kind: str) -> str | None:
        """Why the first row is not of the form of a command."""
        try:
            return None if (form := match(kind)) and form.convert(first) else "its columns have other names"
        except FormatError as error:
            return str(error)

    of_label = ("sft",) if isinstance(first.get("label"), bool) else ()  # whether an answer is good: not SFT's
    others = [other for other in FORMATS if other not in (kind, "train", "grpo", *of_label)]
    likely = next((other for other in others if failure(other) is None), None)
    advice = f" That is what `hf-hybrid {likely}` takes." if likely else ""
    if (form := match(kind)) is not None:
        if advice and (reason := failure(kind)):
            raise OptionError(f"{where}, row 1: {reason}.{advice}")
        return form
    has = ", ".join(f"`{name}`" for name in columns) or "no columns"
    *some, last = FORMATS[kind]
    takes = f"{', '.join(some)} or {last}" if some else last
    lacking = [side for side in ("chosen", "rejected") if _named(side, columns) is None]
    if kind == "dpo" and len(lacking) == 1:
        raise OptionError(f"{where}: it has {has}, and no `{lacking[0]}`. `--columns {lacking[0]}=OLD` renames one.")
    nested = any(isinstance(first.get(name), (list, dict)) for name in _unknown(columns))
    if (kind == "grpo" or not advice) and (proposed := _proposed(kind, columns, first)):
        advice = proposed
    elif not (advice or of_label or nested) and failure("grpo") is None:
        advice = " That is what `hf-hybrid grpo` takes."
    raise OptionError(f"{where}: it has {has}, and `hf-hybrid {command}` takes {takes}.{advice}")


def _unknown(columns: Sequence[str]) -> list[str]:
    return [name for name in columns if not any(name in names for names in (*NAMES.values(), _OF_TEMPLATES))]


def _proposed(kind: str, columns: Sequence[str], first: Row) -> str:
    """Which columns a command could take under which names, in a sentence; nothing if there are none."""
    if kind != "dpo" and (talks := _shaped_as_chats(columns, first)):
        return f" If `{talks[0]}` is the conversation, add `--columns messages={talks[0]}`."
    chats = kind != "train"
    texts = [n for n in _unknown(columns) if isinstance(first.get(n), str) or chats and is_chat(first.get(n))]
    texts = [name for name in texts if first[name] and not _OF_NOTES.search(name)]
    sentences = [name for name in texts if " " in str(first[name]).strip()]
    left = iter(sentences if len(sentences) >= len(_PROPOSED[kind]) else texts)
    names = {part: _named(part, columns) or next(left, None) for part in _PROPOSED[kind]}
    if None in names.values():  # one text alone
        names = {"text": texts[0]} if kind == "sft" and texts else {}
    means = {"prompt": "question", "completion": "answer"}
    said = " and ".join(f"`{name}` is the {means.get(part, part)}" for part, name in names.items())
    new = shlex.join(f"{part}={name}" for part, name in names.items() if name in texts)
    return f" If {said}, add `--columns {new}`." if new else ""


def convert_rows(
    where: str, rows: Any, command: str, renamed: dict[str, str], system: str | None, template: bool,
    folder: Path | None = None, parts: bool = False,
) -> Source:  # fmt: skip
    """
    Return a data set in TRL's form, of which messages say `where` it is. Columns get new names by the old ones
    (`renamed`), chats without a system message get `system`, and `template`: the tokenizer has a chat template. Paths
    of images begin in `folder`, which is `None` for models that take none. Messages have `parts` where other data sets
    have images, and where this one has.
    """
    kind = TRAINING[command].rows

    def with_number(convert: Callable[[Any], dict[str, Any]], row: Any, number: int) -> dict[str, Any]:
        try:
            return convert(row)
        except FormatError as error:
            advice = "" if str(error).endswith(".") else ". Correct or remove the row."
            raise OptionError(f"{where}, row {number + 1}: {error}{advice}") from None

    def rename(row: Any) -> dict[str, Any]:
        return {renamed.get(name, name): value for name, value in read_row(row).items()}

    def convert(row: Any) -> dict[str, Any]:
        _check_row(row, kind, row_format)
        values = {**{name: row.get(name) for name in kept}, **row_format.convert(row)}
        if row_format.chats:
            values = with_system(values, _text_if_any(row, *NAMES["system"]))
        values = with_system(values, system)
        if has_images and folder is not None:
            return _with_images(values, row, folder)
        found, advice = None, "Leave it out."
        for name in filter(row.get, NAMES["images"] if kind != "train" or row_format.chats else ()):
            found, advice = f"`{name}`", f"`--columns ignored={name}` reads the rows without them."
        sides = [side for side in values.values() if isinstance(side, list)] if found is None else []
        if any(_MARK in str(m.get("content")) for side in sides for m in side if isinstance(m, dict)):
            found = "its messages"
        if found:
            why = f"`hf-hybrid {command}` trains models of text" if folder is None else "the first rows have none"
            raise FormatError(f"it has images in {found}, and {why}. {advice}")
        return values

    for name, feature in (rows.features or {}).items() if folder is not None else ():
        rows = rows if (plain := _undecoded(feature)) is None else rows.cast_column(name, plain)
    stored = rows.column_names or list(next(iter(rows), {}))  # of a stream that does not know them
    # A row of JSON need not have the columns of the first.
    heads = itertools.islice(rows, 1000 if JSON in stored else 1)
    heads = [with_number(read_row, row, number) for number, row in enumerate(heads)]
    if not heads:
        raise OptionError(f"{where} holds no rows.")
    columns = list(dict.fromkeys(itertools.chain.from_iterable(heads)))
    _check_names(where, columns, renamed)
    known, wanted = set(itertools.chain.from_iterable(NAMES.values())), [*renamed.values()]
    renamed |= {name: low for name in columns if (low := name.lower()) in known.difference(columns, wanted)}
    columns = [renamed.get(name, name) for name in columns]
    with_number(lambda row: _check_row(rename(row), kind) or {}, heads[0], 0)
    row_format = recognise(command, columns, rename(heads[0]), template, where, wanted)
    if row_format.chats and not template:
        raise OptionError(
            f"{where} holds {row_format.title}, and the tokenizer has no chat template. Set `--tokenizer` to that of "
            "an instruct model, or set `--chat_template_path` to a .jinja file or `plain` (`User: ... Assistant: ...`)."
        )
    kept = [name for name in row_format.kept if name in columns]
    has_images = (
        parts
        or any(_has_images(rename(head)) for head in heads)
        or any(
            "Image(" in str(feature) and renamed.get(name, name) in NAMES["images"]
            for name, feature in (rows.features or {}).items()
        )
    )
    first = _Watched(rename(heads[0]), columns)
    columns = list(with_number(convert, first, 0))
    if lost := [name for name in wanted if name in first.unread and name in known]:
        raise OptionError(f"`--columns {lost[0]}=...`: {where} is read as {row_format.title}, without `{lost[0]}`.")
    each = functools.partial(with_number, lambda row: convert(rename(row)))
    options: dict[str, Any] = {"with_indices": True, "remove_columns": stored}
    said = tuple(first.unread), has_images and folder is not None
    if not hasattr(rows, "__len__"):
        return Source(where, row_format, columns, rows.map(each, **options), *said)
    # A table takes its form from its first rows. Where others differ, all of them decide.
    for size in (1000, len(rows)):
        try:
            converted = rows.map(each, desc="Reading rows", writer_batch_size=size, **options)
            return Source(where, row_format, columns, converted, *said)
        except OptionError:
            raise
        except Exception as error:
            reason = reason_of(error)
    raise OptionError(f"{where}: its rows do not fit into one table: {reason} Give each column values of one kind.")


def _check_row(row: dict[str, Any], kind: str, form: Format | None = None) -> None:
    """Refuse what must not be left out in silence: media, and rows that are marked as not to be learned."""
    advice = "`--columns ignored={0}` reads the rows without it.".format
    for name in NAMES["media"] if kind != "train" else ():
        if dict.get(row, name):
            raise FormatError(f"it has media in `{name}`, which no command trains on. {advice(name)}")
    columns = () if form is None else form.columns
    answers = kind == "sft" and columns not in ((), ("text",)) or any(name in NAMES["messages"] for name in columns)
    for name in NAMES["switch"] if answers and kind in ("sft", "train", "grpo") else ():
        value = dict.get(row, name, True)
        if str(value).lower() == "false" or name != "label" and value in (0, "0"):
            kto = "That is what `hf-hybrid kto` takes; " * (name == "label")
            raise FormatError(f"`{name}` is `{value}`, and its answer would be learned. {kto}{advice(name)}")


def _undecoded(feature: Any) -> Any:
    """Images of `datasets`, or lists of them, as they are stored; `None` for all else."""
    from datasets import Image, List

    inner = getattr(feature, "feature", feature)
    plain = Image(decode=False) if isinstance(inner, Image) else None
    return plain if plain is None or inner is feature else List(plain)


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
