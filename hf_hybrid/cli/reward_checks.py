"""Reward functions of a user: tried before the model is loaded, and checked at each call, so that an error is named."""

from __future__ import annotations

import inspect
import math
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hf_hybrid.cli.options import OptionError
from hf_hybrid.trl.rewards import Reward


class RewardError(OptionError):
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
            last = traceback.extract_tb(error.__traceback__)[-1]
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


def checked(names: Sequence[str], rewards: Sequence[Reward], row: Mapping[str, Any]) -> list[Reward]:
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
