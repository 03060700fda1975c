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
from collections.abc import Callable, Sequence
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any

Reward = Callable[..., list[float | None]]

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
    if name == "format":
        return FormatReward(pattern or "")
    if name in OWN:
        return OWN[name]
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
    names: Sequence[str], pattern: str | None, weights: Sequence[float] | None, rows: Any
) -> tuple[list[Reward], str]:
    """
    Return the reward functions that the names stand for, and these with their weights in words.

    Raises:
        ValueError: If a function does not exist, or needs what the rows lack.
    """
    if weights is not None and len(weights) != len(names):
        raise ValueError(f"`--reward_weights` has {len(weights)} numbers, and `--reward` {len(names)}.")
    functions = [load(name, pattern) for name in names]
    first = next(iter(rows))
    comparing = [name for name in names if name in OWN]
    if comparing and "answer" not in first:
        raise ValueError(
            f"`--reward {comparing[0]}` compares with a column `answer`, and the data has {', '.join(first)}. "
            "`--columns answer=OLD` renames one."
        )
    if "numeric_answer" in comparing and first["answer"] is not None and last_number(str(first["answer"])) is None:
        raise ValueError(
            f"`--reward numeric_answer` compares numbers, and the first `answer` is `{first['answer']!r:.60}`. Use "
            "`exact_match`."
        )
    titles = [f"format {pattern}" if name == "format" else name for name in names]
    pairs = zip(titles, weights or [1.0] * len(names), strict=True)
    return functions, ", ".join(title if weight == 1 else f"{title} (x {weight:g})" for title, weight in pairs)


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
        wanted = f"It must return a list of {len(completions)} numbers, one for each completion, or `None` for some."
        if not hasattr(rewards, "__len__") or isinstance(rewards, str):
            raise RewardError(f"`--reward {self.name}` returned `{rewards!r:.60}`. {wanted}")
        if len(rewards) != len(completions):
            raise RewardError(f"`--reward {self.name}` returned {len(rewards)} rewards. {wanted}")
        for value in rewards:
            if not _is_reward(value):
                raise RewardError(f"`--reward {self.name}` returned `{value!r:.60}` for a completion. {wanted}")
        return list(rewards)


def _is_reward(value: Any) -> bool:
    try:
        return value is None or not isinstance(value, str) and math.isfinite(float(value))
    except (TypeError, ValueError):
        return False


def checked(names: Sequence[str], rewards: Sequence[Reward], row: dict[str, Any]) -> list[Reward]:
    """
    Return the reward functions with their checks, after a call of each on two completions of a row.

    Raises:
        RewardError: If a function does not work. (TRL awaits those that are `async`: they are returned as they are.)
    """
    from transformers import TrainerState

    completions: list[Any] = ["", "The answer is 1."]
    if not isinstance(row["prompt"], str):
        completions = [[{"role": "assistant", "content": text}] for text in completions]
    columns: dict[str, Any] = {"prompts": [row["prompt"]] * 2, "completion_ids": [[0], [0]]}
    columns |= {name: [value] * 2 for name, value in row.items() if name not in ("prompt", "completion")}
    columns |= {"trainer_state": TrainerState(), "log_extra": lambda *_: None, "log_metric": lambda *_: None}
    functions: list[Reward] = []
    for name, reward in zip(names, rewards, strict=True):
        waits = inspect.iscoroutinefunction(reward) or inspect.iscoroutinefunction(reward.__call__)
        functions.append(reward if waits else CheckedReward(name, reward))
        if not waits:
            functions[-1](completions=completions, **columns)
    return functions
