"""
Rows to tokens and labels: one row of SFT each, or for `train` all texts in blocks of one length.

The tokens of SFT are those that TRL's `SFTTrainer` would make (a test compares them), and so are the labels of texts
and of prompts with completions. What differs is which tokens of a chat are learned: the turns of the assistant, with
any chat template. TRL needs a template that marks these turns by `{% generation %}`. Most templates do not. Here

1. a template with marks is used as it is;
2. for a template that TRL knows, TRL's copy with marks is used, as TRL does;
3. else, and where a turn is switched off (`weight: 0`), the turns are found by rendering. Let P be the text of the
   messages before an answer, with the beginning of an answer (`add_generation_prompt`), and Q the text with that
   answer. If Q is the beginning of the whole conversation, then what stands between the end of P and the end of Q is
   the answer. Before a first message, which no beginning stands for, P is what does not depend on its content;
4. a template that renders an answer otherwise once other messages follow (reasoning that is left out of earlier turns)
   is the exception: Q is not the beginning of the whole. Such a conversation is divided into one row per answer, each
   rendered as the model would see it when it answers. Rows of one conversation begin alike, so `share_rows` computes
   that part once.

Either way answers are stretches of text, and the tokens that overlap one are learned. (transformers looks for the token
at the first and last letter of a marked stretch, and finds none where the tokenizer drops whitespace, and the wrong one
where a letter has several tokens.)
"""

from __future__ import annotations

import collections
import contextlib
import itertools
import json
import logging
import re
import shlex
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from hf_hybrid.cli.formats import SWITCHES, messages_of
from hf_hybrid.cli.loading import check_positions, refusing
from hf_hybrid.cli.options import OptionError
from hf_hybrid.compat import trl_error

logger = logging.getLogger(__name__)


SHOWN_LINES = 12
"""Lines of a row that are shown at its beginning, and at its end."""
Piece = tuple[list[int], list[bool]]
"""The tokens of a row, and which of them are learned."""


class Answers:
    """
    Turns rows into tokens and labels: of chats the assistant's turns (`answers_only`) or all, and of prompts with
    completions the completions (`completions_only`) or all. How the answers of chats are found stands in `way`.
    """

    def __init__(self, tokenizer: Any, answers_only: bool, completions_only: bool):
        self.tokenizer, self.answers_only, self.completions_only = tokenizer, answers_only, completions_only
        self.way, self.template = "rendering", None
        if answers_only and tokenizer.chat_template:
            self.way, self.template = _way(tokenizer)

    def learned(self, source: Any) -> str:
        """Return what of the rows is learned, in words."""
        columns = source.columns
        if "input_ids" in columns:
            return "the tokens that `labels` marks"
        if "messages" in columns:
            return f"assistant turns, found by {self.way}" if self.answers_only else "whole conversations"
        if "text" in columns:
            return "all tokens of texts"
        return "completions" if self.completions_only else "prompts and completions"

    def tokenise(self, source: Any, processes: int | None = None) -> Any:
        """Return a data set or stream with `input_ids` and `labels`. A row that has no form raises [`OptionError`]."""
        from hf_hybrid.rows.tree import IGNORED  # imports torch

        columns, where = source.columns, source.where  # what is mapped is pickled, and shall not hold the rows
        ways = {"messages": self.chat, "text": self._text, "input_ids": self._given}
        encode = next((way for column, way in ways.items() if column in columns), self._completion)

        def of_batch(batch: dict[str, list], numbers: list[int]) -> dict[str, list]:
            pieces = list(_encoded(encode, batch, numbers, where))
            labels = [[i if learn else IGNORED for i, learn in zip(ids, mask, strict=True)] for ids, mask in pieces]
            return {"input_ids": [ids for ids, _ in pieces], "labels": labels}

        return _mapped(source, of_batch, 100, processes)

    def blocks(self, source: Any, length: int) -> Any:
        """
        Join documents, with end-of-text tokens between, and cut them into rows of `length` tokens, all of them learned.
        Conversations are formatted by the chat template. The rest of each 1,000 documents is left out.
        """
        tokenizer, where = self.tokenizer, source.where
        end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
        if not end and "text" in source.columns:
            logger.warning("The tokenizer has no end-of-text token, so documents are joined without one.")

        def of_batch(batch: dict[str, list], numbers: list[int]) -> dict[str, list]:
            if "text" in batch:
                # Some tokenizers end each text themselves.
                documents = [ids if ids[-1:] == end else ids + end for ids in tokenizer(batch["text"])["input_ids"]]
            else:
                documents = [ids for ids, _ in _encoded(self.chat, batch, numbers, where)]
            ids = [token for document in documents for token in document]
            pieces = [ids[start : start + length] for start in range(0, len(ids) - length + 1, length)]
            return {"input_ids": pieces, "labels": [list(piece) for piece in pieces]}

        rows = _mapped(source, of_batch)
        if hasattr(rows, "__len__") and not len(rows):
            raise OptionError(f"{where} holds fewer than {length} tokens. Set a shorter `--sequence_length`.")
        return rows

    def _text(self, row: dict[str, Any]) -> list[Piece]:
        ids = self.tokenizer(text=self._ended(row["text"]))["input_ids"]
        return [(ids, [True] * len(ids))]

    def _given(self, row: dict[str, Any]) -> list[Piece]:
        if (most := max(row["input_ids"], default=0)) >= len(self.tokenizer):
            raise OptionError(
                f"`input_ids` has the token {most:,}, and the tokenizer has {len(self.tokenizer):,} tokens. Set "
                "`--tokenizer` to the one that made them."
            )
        return [(row["input_ids"], [label >= 0 for label in row["labels"]])]

    def _ended(self, text: str) -> str:
        end = self.tokenizer.eos_token or ""
        return text if text.endswith(end) else text + end

    def prompt(self, row: dict[str, Any]) -> list[int]:
        """Return the tokens of a prompt; of a chat with the beginning of an answer."""
        if isinstance(row["prompt"], list):
            return self._ids(self._render(messages_of(row, "prompt"), row, start=True))
        return self.tokenizer(text=row["prompt"])["input_ids"]

    def _completion(self, row: dict[str, Any]) -> list[Piece]:
        if isinstance(row["prompt"], list):
            ids = self._ids(self._render(messages_of(row, "prompt") + messages_of(row, "completion"), row))
        else:
            ids = self.tokenizer(text=row["prompt"] + self._ended(row["completion"]))["input_ids"]
        start = _common(self.prompt(row), ids) if self.completions_only else 0
        return [(ids, [place >= start for place in range(len(ids))])]

    def chat(self, row: dict[str, Any]) -> list[Piece]:
        """Return a conversation, or one piece for each of its answers."""
        messages = messages_of(row, "messages")
        if not self.answers_only:
            ids = self._ids(self._render(messages, row))
            return [(ids, [True] * len(ids))]
        text, spans = self._render(messages, row), []
        answers = [place for place, message in enumerate(messages) if message["role"] == "assistant"]
        # `weight: 0` and `train: false` switch learning off. A call that the template hides is no empty answer.
        learned = [place for place in answers if all(messages[place].get(switch, 1) for switch in SWITCHES)]
        learned = [place for place in learned if not self.hides_call(messages[: place + 1], row)]
        if self.way != "rendering" and learned == answers:
            return [self._marked(text, self._marks(messages, row))]
        for place in learned:
            if place:
                before = self._render(messages[:place], row, start=True)
            else:  # what does not depend on the content of a first message
                one, other = (self._render([{**messages[0], "content": text}], row) for text in ("A", "B"))
                before = one[: _common(one, other)]
            spans.append((before, self._render(messages[: place + 1], row)))
        if all(text.startswith(after) for _, after in spans):
            return [self._marked(text, [(_common(before, after), len(after)) for before, after in spans])]
        return [self._marked(after, [(_common(before, after), len(after))]) for before, after in spans]

    def _marks(self, messages: list[dict], row: dict[str, Any]) -> list[tuple[int, int]]:
        """The stretches of the rendered text that the template marks."""
        from transformers.utils.chat_template_utils import render_jinja_template

        arguments = {**self.tokenizer.special_tokens_map, **template_arguments(row)}
        template = self.tokenizer.get_chat_template(self.template, arguments["tools"])
        # The annotation of what it returns is not what it returns.
        rendered: Any = render_jinja_template(
            [messages], chat_template=template, return_assistant_tokens_mask=True, **arguments
        )
        return rendered[1][0]

    def _marked(self, text: str, spans: list[tuple[int, int]]) -> Piece:
        encoded = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        return encoded["input_ids"], [
            any(first < end and start < last for first, last in spans) for start, end in encoded["offset_mapping"]
        ]

    def _render(self, messages: list[dict], row: dict[str, Any], *, start: bool = False) -> str:
        options = {"add_generation_prompt": start, "chat_template": self.template, **template_arguments(row)}
        try:
            return self.tokenizer.apply_chat_template(messages, tokenize=False, **options)
        except TypeError:  # some templates take the arguments of a call as text
            calls = [_with_text_arguments(message) for message in messages]
            return self.tokenizer.apply_chat_template(calls, tokenize=False, **options)

    def hides(self, key: str, messages: list[dict], row: dict[str, Any]) -> bool:
        """Whether the template renders a conversation as it does without a key of its messages or its row."""
        bare = [{name: value for name, value in message.items() if name != key} for message in messages]
        return self._render(messages, row) == self._render(bare, {**row, key: None})

    def hides_call(self, messages: list[dict], row: dict[str, Any]) -> bool:
        """Whether the last of the messages is nothing but calls of tools, which the template does not show."""
        last = messages[-1]
        return bool(last.get("tool_calls")) and not last["content"] and self.hides("tool_calls", messages, row)

    def _ids(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]


def _with_text_arguments(message: dict[str, Any]) -> dict[str, Any]:
    functions = [call["function"] for call in message.get("tool_calls") or ()]
    calls = [{"function": {**f, "arguments": json.dumps(f.get("arguments"))}} for f in functions]
    return {**message, "tool_calls": calls} if calls else message


def _way(tokenizer: Any) -> tuple[str, str | None]:
    """How answers are found, and the template for it."""
    try:
        from trl.chat_template_utils import (
            get_training_chat_template,
            has_generation_markers,
            is_chat_template_stop_token_trained,
        )
    except ImportError as error:
        raise trl_error(error) from error
    if not tokenizer.is_fast:
        raise OptionError(
            "The tokenizer does not say which letters its tokens stand for, which finding the answers needs. Set "
            "`--assistant_only_loss false` to learn whole conversations."
        )
    if has_generation_markers(tokenizer.chat_template):
        return ("marks", None) if is_chat_template_stop_token_trained(tokenizer) else ("rendering", None)
    try:
        return "TRL's template", get_training_chat_template(tokenizer)
    except ValueError:  # TRL does not know the template
        return "rendering", None


def _common(first: Any, second: Any) -> int:
    """Length of the common prefix of two sequences."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((place for place, (one, other) in pairs if one != other), min(len(first), len(second)))


def template_arguments(row: dict[str, Any]) -> dict[str, Any]:
    """Return what the chat template reads beside the messages of a row."""
    tools, more = (row.get(name) or None for name in ("tools", "chat_template_kwargs"))
    tools, more = (json.loads(value) if isinstance(value, str) else value for value in (tools, more))
    return {"tools": tools, **(more or {})}


def _encoded(
    encode: Callable[[dict[str, Any]], list[Piece]], batch: dict[str, list], numbers: list[int], where: str
) -> Iterator[Piece]:
    """Encode the rows of a batch one by one. An error names the row."""
    for number, values in zip(numbers, zip(*batch.values(), strict=True), strict=True):
        with refusing(f"{where}, row {number + 1}: the chat template cannot format it", "Correct or remove the row."):
            yield from encode(dict(zip(batch, values, strict=True)))


def by_answer(source: Any) -> Any:
    """
    Return chats with images as prompts with completions, a row for each answer that is learned. Rows of a chat begin
    alike, so that with `share_rows` what they have in common is computed once.
    """

    def of_batch(batch: dict[str, list], numbers: list[int]) -> dict[str, list]:
        found: dict[str, list] = {"prompt": [], "completion": [], "images": []}
        for chat, images in zip(batch["messages"], batch["images"], strict=True):
            for place, message in enumerate(chat):
                switched_on = all(message.get(switch) in (None, 1) for switch in SWITCHES)
                if place and message["role"] == "assistant" and switched_on:
                    seen = [part for asked in chat[:place] for part in asked["content"] if part["type"] == "image"]
                    found["prompt"].append(chat[:place])
                    found["completion"].append([message])
                    found["images"].append(images[: len(seen)])
        return found

    return _mapped(source, of_batch, 100)


def _mapped(
    source: Any, of_batch: Callable[..., dict[str, list]], size: int = 1000, processes: int | None = None
) -> Any:
    options = {"desc": "Tokenising", "num_proc": processes} if hasattr(source.rows, "__len__") else {}
    options |= {"batched": True, "batch_size": size, "with_indices": True, "remove_columns": source.columns}
    with refusing(f"The tokenizer cannot tokenise {source.where}", "Save it again."):
        return source.rows.map(of_batch, **options)


# What is said about rows before they are trained on.


Report = Callable[[str, str], None]
"""Is told a fact: its name and a text."""


def silent(name: str, text: str) -> None:
    """Tell nobody."""


def report_hidden(source: Any, answers: Answers, report: Report) -> None:
    """Say what messages and rows have that the chat template does not show. Refuse answers that are nothing else."""
    known = {"role", "content", "tool_call_id", "messages", "prompt", "completion", "chosen", "rejected", *SWITCHES}
    kinds = str(source.rows.features or "Json")  # of a stream
    if "Json" not in kinds and known.issuperset(re.findall(r"'(\w+)':", kinds)):
        return
    found, shown, lost = collections.Counter(), set(), 0
    for number, row in enumerate(source.rows if hasattr(source.rows, "__len__") else source.rows.take(64), 1):
        sides = {name: messages_of(row, name) for name in known & row.keys() if isinstance(row[name], list)}
        prompt = sides.pop("prompt", [])
        chats = {name: [*prompt, *messages] for name, messages in sides.items()} or {"prompt": prompt}
        chat = next(iter(chats.values()))
        keys = {key for message in chat for key, value in message.items() if value} - known
        keys |= {"tools"} if template_arguments(row)["tools"] else set()
        found.update(keys)
        with contextlib.suppress(Exception):  # tokenising says what the template refuses, and in which row
            shown |= {key for key in keys - shown if found[key] <= 8 and not answers.hides(key, chat, row)}
            if "messages" not in chats and any(answers.hides_call(chat, row) for chat in chats.values()):
                lost = lost or number
    if lost:
        raise OptionError(
            f"{source.where}, row {lost}: the answer is a call of a tool, which the chat template does not show. "
            "Choose the tokenizer of a model that calls tools (`--tokenizer`), or remove such rows."
        )
    if hidden := sorted(found.keys() - shown):
        said = ", ".join(f"`{key}` ({found[key]:,} rows)" for key in hidden)
        calls = "; turns that are nothing but calls are not learned" * ("tool_calls" in hidden and "messages" in chats)
        report("not shown", f"{said}: the chat template has no place for them{calls}")


def report_images(rows: Any, command: str, whole: bool, report: Report) -> None:
    """Say how many images rows have, and of SFT what is learned: `whole` chats, or answers alone."""
    if hasattr(rows, "__len__"):
        if not len(rows):
            raise OptionError("No row has an answer behind what is asked.")
        sizes = _sizes(rows, "images")
        if command == "grpo" and not all(sizes):
            raise OptionError("Some prompts have images and others none, and TRL samples no completions of both.")
        report("images", f"{sum(sizes):,} in {len(sizes):,} rows")
    if command == "sft":
        report("loss on", "whole conversations" if whole and "messages" in rows.column_names else "answers alone")


def show_rows(rows: Any, count: int, tokenizer: Any, reader: Any, report: Report) -> None:
    """Tell the first rows as the model sees them, cut as it gets them: lines behind `>` are learned."""
    processor, tokenizer = tokenizer, getattr(tokenizer, "tokenizer", tokenizer)
    answers, length = Answers(tokenizer, False, False), reader.max_length
    for number, row in enumerate(itertools.islice(rows, count), 1):
        asked, names = row.get("prompt_ids", []), ("chosen", "rejected", "completion")
        sides = {name: row[f"{name}_ids"] for name in names if f"{name}_ids" in row}
        pieces = {name: (asked + ids, [False] * len(asked) + [True] * len(ids)) for name, ids in sides.items()}
        if "input_ids" in row:
            pieces = {"": (row["input_ids"], [label >= 0 for label in row["labels"]])}
        elif "images" in row:
            pieces, length = _with_places(row, processor, names), None
        elif not pieces:
            pieces = {"": (answers.prompt(row), itertools.repeat(False))}
        for side, piece in pieces.items():
            whole = list(zip(*piece, strict=False))
            kept = whole[-length:] if length and reader.keep_end else whole[:length]
            cut = f", cut from {len(whole):,}" if len(kept) < len(whole) else ""
            learned = sum(learn for _, learn in kept)
            images = len(row.get("images", ()))
            seen = f" and {images} image{'s' * (images > 1)}" * bool(images)
            report(f"row {number}", f"{side}{': ' * bool(side)}{len(kept):,} tokens{seen}{cut}, {learned:,} learned")
            lines = [
                ("|>"[learn], line)
                for learn, part in itertools.groupby(kept, key=lambda pair: pair[1])
                for line in tokenizer.decode([token for token, _ in part]).removesuffix("\n").split("\n")
            ]
            if len(lines) > 2 * SHOWN_LINES:
                left = (":", f"({len(lines) - 2 * SHOWN_LINES:,} more lines)")
                lines = [*lines[:SHOWN_LINES], left, *lines[-SHOWN_LINES:]]
            for mark, line in lines:
                report(mark, line)


def _with_places(row: dict[str, Any], processor: Any, names: Sequence[str]) -> dict[str, Piece]:
    """The sides of a row with images, an image as the one place that the chat template writes for it."""

    def ids(messages: list[dict], *, start: bool = False) -> list[int]:
        text = processor.apply_chat_template(messages, tokenize=False, add_generation_prompt=start)
        return processor.tokenizer(text, add_special_tokens=False)["input_ids"]

    if "messages" in row:
        return {"": (found := ids(row["messages"]), [True] * len(found))}
    asked = ids(row["prompt"], start=True)
    sides = {name: ids(row["prompt"] + row[name]) for name in names if name in row} or {"": asked}
    starts = {name: _common(asked, side) for name, side in sides.items()}
    return {name: (side, [n >= starts[name] for n in range(len(side))]) for name, side in sides.items()}


def report_learned(rows: Any, eval_rows: Any, reader: Any, learned: str, report: Report, config: Any = None) -> None:
    """
    Say how many tokens of the rows from [`Answers.tokenise`] SFT learns, in which words, and how many rows are cut.
    Refuse rows of which nothing is learned, or which are longer than the positions that the model (`config`) learned.
    """
    length, longest = reader.max_length, 0
    for what, part in (("row", rows), ("evaluation row", eval_rows)):
        if part is None:
            continue
        streamed = not hasattr(part, "__len__")
        counts = list(_counts(part.take(64) if streamed else part, length or 2**40, reader.keep_end))
        sizes = [size for size, _, _ in counts]
        longest = max([longest, *([length or 0] if streamed else sizes)])
        if part is rows and not streamed:
            tokens = sum(count for _, count, _ in counts)
            learned += f": {tokens:,} of {sum(sizes):,} tokens ({tokens / sum(sizes):.0%})"
            if not tokens:
                raise OptionError(
                    "No row has a token to learn. If the chat template hides the answers, set `--assistant_only_loss "
                    "false`."
                )
        elif part is rows and length is not None:
            report("max_length", f"rows of more than {length:,} tokens are cut; how many is not known in a stream")
        if part is rows:
            report("loss on", learned)
        if part is rows and reader.packing:
            how = "rows are glued and cut" if reader.packing == "wrapped" else "whole rows share a sequence"
            long = "" if streamed else f"; longer rows: {sum(size > length for size in sizes):,}"
            report("packed", f"{how} of {length:,} tokens{long}")
        if length is not None and reader.packing in (None, "bfd"):  # the others glue or divide rows
            lost = sum(size > length and not count for size, _, count in counts)
            _report_cut(what, sizes, lost, len(sizes), length, silent if streamed else report)
    if config is not None:
        check_positions(config, min(longest, length or longest), "Set a lower `--max_length`.")


def _counts(rows: Any, length: int, keep_end: bool) -> Iterator[tuple[int, int, int]]:
    """Yield of each row the numbers of tokens, of those learned, and of those that are learned once it is cut."""
    import numpy

    for table in rows.with_format("arrow").iter(1000):
        labels = table["labels"].combine_chunks()
        sizes = labels.value_lengths().to_numpy()
        ends = numpy.cumsum(sizes)
        starts = first = ends - sizes
        last = numpy.minimum(ends, starts + length)
        if keep_end:
            first, last = numpy.maximum(starts, ends - length), ends
        learned = numpy.append(0, numpy.cumsum(labels.flatten().to_numpy() >= 0))
        counts = (sizes, learned[ends] - learned[starts], learned[last] - learned[first])
        yield from zip(*(count.tolist() for count in counts), strict=True)


def _sizes(rows: Any, column: str) -> list[int]:
    """The numbers of tokens of rows."""
    tables = rows.with_format("arrow").iter(1000)
    return [size for table in tables for size in table[column].combine_chunks().value_lengths().to_pylist()]


def _report_cut(what: str, sizes: list[int], lost: int, total: int, length: int, report: Report) -> None:
    """Say how many rows `max_length` cuts or leaves out. Raises [`OptionError`] if it leaves out all."""
    if total and lost == total:
        raise OptionError(f"`--max_length {length}` cuts every {what} before its answer begins. Raise it.")
    if cut := sum(size > length for size in sizes) + total - len(sizes):
        text = f"{cut:,} of {total:,} {what}s cut at --max_length {length:,} (the longest has {max(sizes):,} tokens)"
        report("cut", text + (f"; {lost:,} of them keep no answer and are left out" if lost else ""))


def report_pairs(trainer: Any, before: Sequence[Any], config: Any, report: Report) -> None:
    """Say how many preference pairs TRL cuts or leaves out, of those that there were `before`, and refuse as above."""
    length, longest = trainer.args.max_length, 0
    names, after = ("pair", "evaluation pair"), (trainer.train_dataset, trainer.eval_dataset)
    for what, pairs, rows in zip(names, before, after, strict=True):
        if "prompt_ids" not in (getattr(rows, "column_names", None) or ()) or not hasattr(rows, "__len__"):
            continue
        parts = [_sizes(rows, name) for name in ("prompt_ids", "chosen_ids", "rejected_ids")]
        sizes = [prompt + max(sides) for prompt, *sides in zip(*parts, strict=True)]
        if length is not None:
            _report_cut(what, sizes, len(pairs) - len(rows), len(pairs), length, report)
        longest = max([longest, *sizes])
        if what == "pair":
            tokens = sum(map(sum, [parts[0], *parts]))  # each side has the prompt
            report("tokens", f"{tokens:,} in {len(rows):,} pairs, the longest row {max(sizes):,}")
    check_positions(config, min(longest, length or longest), "Set a lower `--max_length`.")


def check_prompts(rows: Any, tokenizer: Any, config: Any, answer: int) -> None:
    """Refuse prompts of GRPO that, with an answer of so many tokens, are longer than the positions of a model."""
    answers = Answers(tokenizer, answers_only=False, completions_only=False)
    longest = max(len(answers.prompt(row)) for row in rows) + answer
    check_positions(config, longest, "Leave out long prompts, or set a lower `--max_completion_length`.")


_MARK = re.compile(r"<[|\uff5c][^<>|\uff5c\s]{1,40}[|\uff5c]>|<(?:start|end)_of_turn>")


def warn_of_traps(rows: Any, tokenizer: Any, model: Any) -> None:
    """
    Warn of what a model trained by SFT does not recover from: answers without a token at which it ends what it
    generates, and marks of the chat template that are no tokens.
    """
    sample = list(itertools.islice(rows, 8))
    if marks := set(_MARK.findall(tokenizer.decode(sample[0]["input_ids"]))) - tokenizer.get_vocab().keys():
        logger.warning(
            "`%s` in the rows: no token of the vocabulary, but learned in pieces. Add them by `--add_tokens %s`, or "
            "choose the tokenizer that belongs to the chat template.",
            "`, `".join(sorted(marks)), shlex.join(sorted(marks)),
        )  # fmt: skip
    ends: set[Any] = {tokenizer.eos_token_id}
    for config in (model.config.get_text_config(), model.generation_config):
        end = getattr(config, "eos_token_id", None)  # what cannot generate has no config for it
        ends.update(end if isinstance(end, list) else [end])
    ends.discard(None)
    tails = [[label for label in row["labels"] if label >= 0][-8:] for row in sample]
    if any(tails) and not any(ends & set(tail[-4:]) for tail in tails):
        tail = next(filter(None, tails))
        names, added = tokenizer.convert_ids_to_tokens, tokenizer.get_added_vocab()
        mark = next((name for name in reversed(names(tail)) if name in added), None)
        how = f"Set `--eos_token '{mark}'`" if mark else "End answers by `{{ eos_token }}` in the chat template"
        logger.warning(
            "Learned rows end in %r, and generation ends at `%s`: the model will not stop after its answer. %s.",
            tokenizer.decode(tail), "`, `".join(map(str, names(sorted(ends)))), how,
        )  # fmt: skip
