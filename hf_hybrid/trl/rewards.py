"""
Reward functions for GRPO and RLOO, which `hf-hybrid grpo --reward` takes by their names.

A reward function of TRL gets `completions` and the columns of the data set as lists, and returns a number for each
completion; `None` where it has no opinion.
"""

from __future__ import annotations

import re
import string
from collections.abc import Sequence
from decimal import Decimal, InvalidOperation
from typing import Any

_NUMBER = re.compile(r"[-+]?(?:\d{1,3}(?:,\d{3})+|\d+)?(?:\.\d+)?(?:[eE][-+]?\d+)?(?:\s*/\s*\d+)?")
_BOXED = re.compile(r"\\boxed\{([^{}]*)\}")


def text_of(completion: Any) -> str:
    """Return the text of a completion, which TRL gives as a text or as messages."""
    if isinstance(completion, str):
        return completion
    return "".join(str(message.get("content") or "") for message in completion)


def normalised(text: str) -> str:
    """Return a text in lower case, without punctuation, articles and repeated spaces (as SQuAD compares answers)."""
    text = "".join(letter for letter in text.lower() if letter not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text).split())


def last_number(text: str) -> Decimal | None:
    r"""
    Return the number that a text answers with, `None` if there is none.

    It is the one behind the last `####`, or in the last `\boxed{}`, or else the last one of the text. Commas between
    thousands are read, and fractions like `3/4`.
    """
    marked = text.rsplit("####", 1)[1] if "####" in text else (_BOXED.findall(text) or [text])[-1]
    numbers = [match for match in _NUMBER.findall(marked) if any(letter.isdigit() for letter in match)]
    if not numbers:
        return None
    numerator, _, denominator = numbers[-1].replace(",", "").partition("/")
    try:
        return Decimal(numerator) / Decimal(denominator) if denominator else Decimal(numerator)
    except (InvalidOperation, ZeroDivisionError):
        return None


def exact_match(completions: Sequence[Any], answer: Sequence[Any], **columns: Any) -> list[float | None]:
    """Give 1 where the completion is the answer, apart from case, punctuation and articles, and 0 elsewhere."""
    return [
        None if right is None else float(normalised(text_of(completion)) == normalised(str(right)))
        for completion, right in zip(completions, answer, strict=True)
    ]


def numeric_answer(completions: Sequence[Any], answer: Sequence[Any], **columns: Any) -> list[float | None]:
    """Give 1 where the completion answers with the number of the answer (see [`last_number`]), and 0 elsewhere."""
    right = [None if text is None else last_number(str(text)) for text in answer]
    numbers = [last_number(text_of(completion)) for completion in completions]
    return [
        None if wanted is None else float(number is not None and number == wanted)
        for number, wanted in zip(numbers, right, strict=True)
    ]


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
