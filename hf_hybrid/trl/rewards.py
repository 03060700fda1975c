"""
Reward functions for GRPO and RLOO: some of our own, and what `hf-hybrid grpo --reward` takes by name or import path.

A reward function of TRL gets `completions` and the columns of the data set as lists, and returns a number for each
completion; `None` where it has no opinion. A new one is a function here, and an entry in [`OWN`].
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import math
import re
import string
import sys
import unicodedata
from collections.abc import Callable, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any

Reward = Callable[..., list[float | None]]

_INTEGER = r"(?:\d{1,3}(?P<comma>[,'\u2019\u00a0\u2009\u202f ])\d{3}(?:(?P=comma)\d{3})*(?!\d)|\d+)"
_POINTS = r"\d{1,3}(?:\.\d{3})+,\d+|\d{1,3}(?:\.\d{3}){2,}"  # 1.000,50 and 1.000.000
_NUMBER = re.compile(
    rf"(?P<sign>(?<![\w)\]}}])[-+])?(?:(?P<whole>\d+) +(?=\d+/\d))?"
    rf"(?P<number>{_POINTS}|(?:{_INTEGER}(?:\.\d+)?|(?<![\w.])\.\d+)(?:[eE][-+]?\d+)?)(?: ?/ ?(?P<denominator>\d+))?"
)
_RELATIONS = "approx|sim|equiv|le|ge|leq|geq|to|in|colon|quad|qquad|implies|rightarrow|Rightarrow|left|displaystyle"
_BEFORE = re.compile(
    # An exponent, an index or an argument; an operand and an operator; a name; a time, a version, a date.
    rf"(?:[\^_\u221a]|\\(?!(?:{_RELATIONS})\b)[a-zA-Z]+)\s*[{{(]*\s*$"
    r"|[\w)\]}](\s*)[+*\u00d7\u00b7\u00f7/]\1$|\d(\s*)x\2$|[A-Za-z_]$|[\]}]\s*\{\s*$|\d[.:/]$|\d-\d+-$"
)
"""What stands before a number that is only a part of what a text answers with."""
_BEHIND = re.compile(
    r"\s*(?:\^|[\u2070-\u209f\u00b2\u00b3\u00b9\u00bc-\u00be\u2150-\u215e\u221a\u03c0]|[xyz]\b"
    r"|\\(?:pi|sqrt|[dtc]?frac|times|cdot|div)|[*\u00d7\u00b7\u00f7/]\s*[\w\\(])"
)
"""The same behind a number."""
_LATEX = [(re.compile(pattern), text) for pattern, text in (
    (r"\{,\}|,\\!", ","),
    (r"\^\s*(?:\{\s*)?\\circ\s*\}?|\\?[$%\u20ac\u00a3]", ""),
    (r"\\(?:text|math|mbox|operatorname)\w*\s*\{([^{}]*)\}", r" \1 "),
    (r"\\[,;:! ]|\\[()\[\]]|~", " "),
    (r"(?<=\d)\s*(?=\\[dtc]?frac)", " "),
    (r"\\[dtc]?frac\s*(?:\{\s*(\d+)\s*\}|(\d))\s*(?:\{\s*(\d+)\s*\}|(\d))", r"\1\2/\3\4"),
)]  # fmt: skip


def text_of(completion: Any) -> str:
    """Return the text of a completion, which TRL gives as a text or as messages."""
    if isinstance(completion, str):
        return completion
    contents = [message.get("content") or "" for message in completion]
    parts = [[content] if isinstance(content, str) else content for content in contents]
    return "".join(p if isinstance(p, str) else p.get("text") or f"<{p['type']}>" for part in parts for p in part)


def normalised(text: str) -> str:
    """
    Return a text in lower case, without punctuation, articles and repeated spaces (as SQuAD compares answers).

    Signs of numbers and punctuation inside of them stay, apart from commas between thousands. A text that has nothing
    else stays as it is.
    """
    text = unicodedata.normalize("NFC", text.casefold()).replace("\u2212", "-")
    text = re.sub(r"(?<=\d),(?=\d{3}\b)|[$\u20ac\u00a3]", "", text)
    kept = {place.start() for place in re.finditer(r"(?<=\d)[^\w\s](?=\d)|(?<!\w)[-+](?=\.?\d)|(?<!\w)\.(?=\d)", text)}
    words = "".join(
        letter
        for place, letter in enumerate(text)
        if place in kept or letter not in string.punctuation and unicodedata.category(letter)[0] != "P"
    )
    without_articles = re.sub(r"\b(a|an|the)\b", " ", words)
    return " ".join((without_articles if without_articles.strip() else words if words.strip() else text).split())


def last_number(text: str) -> Decimal | None:
    r"""
    Return the number that a text answers with, `None` if there is none.

    It is the last number behind the last `####`, and there in the last `\boxed{}` if there is one. Separators of
    thousands, fractions (`3/4`, `2 1/2`, `\frac{3}{4}`), signs and exponents like `1e3` are read; of a range the end. A
    number that is a part of something else (a power, a root, a sum, a date, a name) is none.
    """
    marked = text.rsplit("####", 1)[-1].replace("\u2212", "-")
    if (start := marked.rfind(r"\boxed{")) >= 0:
        marked = _in_braces(marked[start + len(r"\boxed{") :])
    for pattern, plain in _LATEX:
        marked = pattern.sub(plain, marked)
    number = None
    for number in _NUMBER.finditer(marked):  # noqa: B007
        pass
    if number is None:
        return None
    before, behind = marked[max(number.start() - 40, 0) : number.start()], marked[number.end() : number.end() + 40]
    if _BEFORE.search(before) or _BEHIND.match(behind):
        return None
    digits = number["number"]
    if re.fullmatch(_POINTS, digits):
        digits = digits.replace(".", "").replace(",", ".")
    try:
        value = Decimal(re.sub(r"[^\d.eE+-]", "", digits))
        if number["denominator"]:
            value = value / Decimal(number["denominator"]) + Decimal(number["whole"] or 0)
    except ArithmeticError:  # a denominator of 0, an exponent out of range
        return None
    return value.copy_negate() if number["sign"] == "-" else value


def _in_braces(text: str) -> str:
    """What stands before the brace that closes one before the text; nothing if none does."""
    depth = 1
    for brace in re.finditer(r"[{}]", text):
        depth += 1 if brace[0] == "{" else -1
        if not depth:
            return text[: brace.start()]
    return ""


def exact_match(completions: Sequence[Any], answer: Sequence[Any], **columns: Any) -> list[float | None]:
    """Give 1 where the completion is the answer, apart from case, punctuation and articles, and 0 elsewhere."""
    return _compared(normalised, completions, answer)


def numeric_answer(completions: Sequence[Any], answer: Sequence[Any], **columns: Any) -> list[float | None]:
    """Give 1 where the completion answers with the number of the answer (see [`last_number`]), and 0 elsewhere."""
    return _compared(last_number, completions, answer)


def _compared(read: Callable[[str], Any], completions: Sequence[Any], answers: Sequence[Any]) -> list[float | None]:
    """Compare what `read` returns for completions and answers. Where an answer has nothing, there is no opinion."""
    wanted = [None if answer is None else read(str(answer)) for answer in answers]
    values = [read(text_of(completion)) for completion in completions]
    return [None if right is None else float(value == right) for value, right in zip(values, wanted, strict=True)]


class FormatReward:
    """Give 1 where the whole completion matches a regular expression, in which a dot is also a line break, else 0."""

    def __init__(self, pattern: str):
        try:
            self.pattern = re.compile(pattern, re.DOTALL)
        except re.error as error:
            raise ValueError(f"`--reward_pattern {pattern}` is no regular expression: {error}.") from None
        self.__name__ = "format"  # the name in TRL's log

    def __call__(self, completions: Sequence[Any], **columns: Any) -> list[float | None]:
        return [float(self.pattern.fullmatch(text_of(c).strip()) is not None) for c in completions]


OWN: dict[str, Reward] = {"exact_match": exact_match, "numeric_answer": numeric_answer}
"""Rewards by name, which compare with the column `answer`."""
NAMES = (*OWN, "format")


def check_name(name: str, pattern: str | None) -> None:
    """Refuse what can be no reward function, without importing it. Raises `ValueError`."""
    place, colon, function = name.rpartition(":")
    if name == "format":
        if pattern is None:
            raise ValueError("`--reward format` needs `--reward_pattern`, a regular expression of whole completions.")
        FormatReward(pattern)
    if name in NAMES:
        return
    if not colon or not function.isidentifier():
        raise ValueError(
            f"`--reward {name}` is none of {', '.join(NAMES)}, and no import path. Write `module:function` or "
            "`file.py:function`."
        )
    if place.endswith(".py") and not Path(place).is_file():
        raise ValueError(f"`--reward {name}`: there is no file `{place}`.")


def load(name: str, pattern: str | None) -> Reward:
    """Return the reward function that a name stands for. Raises `ValueError` with what there is."""
    check_name(name, pattern)
    if name in NAMES:
        return OWN.get(name) or FormatReward(pattern or "")
    place, _, function = name.rpartition(":")
    try:
        module = _from_file(Path(place)) if place.endswith(".py") else _from_path(place)
    except Exception as error:  # whatever a user's module raises
        reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise ValueError(f"`--reward {name}`: `{place}` cannot be imported ({reason}).") from error
    reward = getattr(module, function, None)
    if not callable(reward):
        there = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        raise ValueError(f"`--reward {name}`: `{place}` has {', '.join(there) or 'no functions'}, not `{function}`.")
    return reward


def load_all(
    names: Sequence[str], pattern: str | None, weights: Sequence[float] | None, row: dict[str, Any]
) -> tuple[list[Reward], str]:
    """
    Return the reward functions that the names stand for, with their checks, and the names with weights in words.

    Each function was called on two completions of a row. (TRL awaits those that are `async`: they are not checked.)

    Raises:
        ValueError: If a function does not exist, needs what the row lacks, or does not work ([`RewardError`]).
    """
    if weights is not None and len(weights) != len(names):
        raise ValueError(f"`--reward_weights` has {len(weights)} numbers, and `--reward` {len(names)}.")
    functions = [load(name, pattern) for name in names]
    own = [name for name in names if name in OWN]
    if own and "answer" not in row:
        raise ValueError(
            f"`--reward {own[0]}` compares with a column `answer`, and the data has {', '.join(row)}. "
            "`--columns answer=OLD` renames one."
        )
    if "numeric_answer" in own and row["answer"] is not None and last_number(str(row["answer"])) is None:
        raise ValueError(
            f"`--reward numeric_answer` compares numbers, and the first `answer` is `{row['answer']!r:.60}`. Use "
            "`exact_match`."
        )
    for place, (name, reward) in enumerate(zip(names, functions, strict=True)):
        if not (inspect.iscoroutinefunction(reward) or inspect.iscoroutinefunction(reward.__call__)):
            functions[place] = CheckedReward(name, reward)
            functions[place](**_arguments(row))
    titles = [f"format {pattern}" if name == "format" else name for name in names]
    pairs = zip(titles, weights or [1.0] * len(names), strict=True)
    return functions, ", ".join(title if weight == 1 else f"{title} (x {weight:g})" for title, weight in pairs)


def _arguments(row: dict[str, Any]) -> dict[str, Any]:
    """What TRL passes to a reward function, for two completions of a row."""
    from transformers import TrainerState

    completions: list[Any] = ["", "The answer is 1."]
    if not isinstance(row["prompt"], str):
        completions = [[{"role": "assistant", "content": text}] for text in completions]
    columns = {name: [value] * 2 for name, value in row.items() if name not in ("prompt", "completion")}
    return {
        "completions": completions, "prompts": [row["prompt"]] * 2, "completion_ids": [[0], [0]], **columns,
        "trainer_state": TrainerState(), "log_extra": lambda *_: None, "log_metric": lambda *_: None,
    }  # fmt: skip


def _from_path(name: str) -> Any:
    sys.path.insert(0, "")  # the folder in which the command was started
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove("")


def _from_file(path: Path) -> Any:
    spec: Any = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(path.stem, module)  # so that processes can pickle what it holds
    spec.loader.exec_module(module)
    return module


# Checks.


class RewardError(ValueError):
    """A reward function raised an error, or returned what are no rewards."""


class CheckedReward:
    """A reward function, and its name in `--reward`. What goes wrong in it is a [`RewardError`]."""

    def __init__(self, name: str, reward: Reward):
        self.name, self.reward = name, reward
        self.__name__ = getattr(reward, "__name__", name)  # in TRL's log

    def __call__(self, completions: Sequence[Any], **columns: Any) -> list[float | None]:
        try:
            rewards = self.reward(completions=completions, **columns)
        except Exception as error:  # whatever a user's function raises
            last = inspect.trace()[-1]
            reason = f"{type(error).__name__}: {' '.join(str(error).split())}".removesuffix(": ")
            raise RewardError(
                f"`--reward {self.name}` raised `{reason:.200}` in line {last.lineno} of `{Path(last.filename).name}`. "
                f"It gets by name: completions, {', '.join(columns)}."
            ) from error
        if not hasattr(rewards, "__len__") or isinstance(rewards, str):
            what = f"`{rewards!r:.60}`"
        elif len(rewards) != len(completions):
            what = f"{len(rewards)} rewards"
        else:
            wrong = [value for value in rewards if not _is_reward(value)]
            if not wrong:
                return list(rewards)
            what = f"`{wrong[0]!r:.60}` for a completion"
        raise RewardError(
            f"`--reward {self.name}` returned {what}. It must return a list of {len(completions)} numbers, one for "
            "each completion, or `None` for some."
        )


def _is_reward(value: Any) -> bool:
    try:
        return value is None or not isinstance(value, str) and math.isfinite(float(value))
    except (TypeError, ValueError):
        return False
