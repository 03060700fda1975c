"""
The reward functions of `hf-hybrid grpo`: those of `trl/rewards.py` by name, and a user's by an import path.

A new one is a function there, and an entry in [`OWN`].
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from hf_hybrid.cli.options import OptionError, RewardOptions, required
from hf_hybrid.trl.rewards import FormatReward, exact_match, last_number, numeric_answer

Reward = Callable[..., list[float | None]]

OWN: dict[str, Reward] = {"exact_match": exact_match, "numeric_answer": numeric_answer}
"""Rewards by name, which compare with the column `answer`."""
NAMES = (*OWN, "format")


def check_name(name: str, pattern: str | None) -> None:
    """Refuse what can be no reward function, without importing it. Raises [`OptionError`]."""
    place, colon, function = name.rpartition(":")
    if name == "format":
        if pattern is None:
            raise OptionError("`--reward format` needs `--reward_pattern`, a regular expression of whole completions.")
        try:
            FormatReward(pattern)
        except ValueError as error:
            raise OptionError(str(error)) from None
    if name in NAMES:
        return
    if not colon or not function.isidentifier():
        raise OptionError(
            f"`--reward {name}` is none of {', '.join(NAMES)}, and no import path. Write `module:function` or "
            "`file.py:function`."
        )
    if place.endswith(".py") and not Path(place).is_file():
        raise OptionError(f"`--reward {name}`: there is no file `{place}`.")


def load(name: str, pattern: str | None) -> Reward:
    """Return the reward function that a name stands for. Raises [`OptionError`] with what there is."""
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
        raise OptionError(f"`--reward {name}`: `{place}` cannot be imported ({reason}).") from error
    reward = getattr(module, function, None)
    if not callable(reward):
        there = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        raise OptionError(f"`--reward {name}`: `{place}` has {', '.join(there) or 'no functions'}, not `{function}`.")
    return reward


def load_all(options: RewardOptions, weights: Sequence[float] | None, rows: Any) -> tuple[list[Reward], str]:
    """
    Return the reward functions that the options name, and their names and weights in words.

    Args:
        options (`RewardOptions`): Of the command.
        weights (`Sequence[float]`, *optional*): TRL's option.
        rows: To train on.

    Raises:
        OptionError: If a function does not exist, or needs what the data lacks.
    """
    names, pattern = required("reward", options.reward, "hf-hybrid grpo"), options.reward_pattern
    if weights is not None and len(weights) != len(names):
        raise OptionError(f"`--reward_weights` has {len(weights)} numbers, and `--reward` {len(names)}.")
    functions = [load(name, pattern) for name in names]
    first = next(iter(rows))
    comparing = [name for name in names if name in OWN]
    if comparing and "answer" not in first:
        raise OptionError(
            f"`--reward {comparing[0]}` compares with a column `answer`, and the data has {', '.join(first)}. "
            "`--columns answer=OLD` renames one."
        )
    if "numeric_answer" in comparing and first["answer"] is not None and last_number(str(first["answer"])) is None:
        raise OptionError(
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
