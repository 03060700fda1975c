"""
What checkpoints of GRPO and RLOO keep of a user's reward functions, tools, environments and `rollout_func`, and of the
table of completions.

Python's, NumPy's and torch's global generators are in Trainer's files. Here are generators that such a function or
object has for itself (generators.py says which are found), and the state of an object whose class has `__getstate__`
and `__setstate__`: TRL makes every method of an environment a tool, but for those whose names begin with an underscore.
"""

from __future__ import annotations

import inspect
import json
import logging
from typing import Any

import torch

from hf_hybrid.run.generators import generator_state, held_by, restore_generator

logger = logging.getLogger(__name__)


class UsersState:
    """What the functions and objects that a trainer was given keep from call to call. Names of attributes are TRL's."""

    def __init__(self, trainer: Any):
        self.trainer = trainer
        self.is_any = False
        """Whether they keep anything that is found here, once a run begins."""
        self._refused = set[type]()

    def _users(self) -> dict[str, Any]:
        trainer, pools = self.trainer, getattr(self.trainer, "_environment_pool", {})
        lists = {"rewards": trainer.reward_funcs, "tools": getattr(trainer, "_standalone_tools", None) or []}
        lists |= {f"environments.{name}": pool for name, pool in pools.items()}
        users = {f"{name}.{place}": user for name, found in lists.items() for place, user in enumerate(found)}
        users["rollout_func"] = getattr(trainer, "rollout_func", None)
        return {name: user for name, user in users.items() if not isinstance(user, torch.nn.Module)}

    def begin(self) -> None:
        users = self._users()
        self.is_any = bool(held_by(users)) or any(map(_gives_state, users.values()))

    def now(self) -> dict[str, Any]:
        users = self._users()
        states = {name: state for name, user in users.items() if (state := self._state_of(user)) is not None}
        generators = {name: generator_state(generator) for name, generator in held_by(users).items()}
        sizes = {str(name): len(pool) for name, pool in getattr(self.trainer, "_environment_pool", {}).items()}
        return {"states": states, "generators": generators, "environments": sizes} if states or generators else {}

    def _state_of(self, user: Any) -> Any:
        """Return the state that an object gives, `None` if it gives none, or none that JSON takes."""
        owner = _owner(user)
        if not _gives_state(user) or type(owner) in self._refused:
            return None
        try:
            state, why = owner.__getstate__(), "JSON does not hold it"
            if repr(json.loads(json.dumps(state))) == repr(state):
                return state
        except Exception as error:  # it may be there for others
            why = repr(error)
        self._refused.add(type(owner))
        logger.warning(
            "The state of `%s` is not in checkpoints (%s): a resumed run begins with a new object. `__getstate__` has "
            "to return dictionaries with names, lists, numbers and text.",
            type(owner).__name__,
            why,
        )
        return None

    def restore(self, state: dict[str, Any]) -> None:
        for name, pool in getattr(self.trainer, "_environment_pool", {}).items():
            while len(pool) < state.get("environments", {}).get(str(name), 0):
                pool.append(self.trainer.environment_factories[name]())
        users, states, of_generators = self._users(), state.get("states", {}), state.get("generators", {})
        generators = held_by(users)
        for name in users.keys() & states.keys():
            _owner(users[name]).__setstate__(states[name])
        for name in generators.keys() & of_generators.keys():
            restore_generator(generators[name], of_generators[name])
        if lost := sorted((states.keys() - users.keys()) | (of_generators.keys() - generators.keys())):
            logger.warning("The checkpoint has states of %s, and this run has none of that name.", ", ".join(lost))


def _owner(user: Any) -> Any:
    """Return the object whose method was given, or what was."""
    return user.__self__ if inspect.ismethod(user) else user


def _gives_state(user: Any) -> bool:
    kind = type(_owner(user))
    gives = getattr(kind, "__getstate__", None) is not getattr(object, "__getstate__", None)
    return gives and hasattr(kind, "__setstate__")


# What was completed since the last entry of the log.


def table_of(trainer: Any) -> dict[str, list]:
    """Return the completions for TRL's next table, on the process that writes it; what JSON does not hold is `None`."""
    if not (trainer.log_completions and trainer.is_world_process_zero()):
        return {}
    logs = trainer._logs
    rows = {name: [*logs[name]] for name in ("prompt", "completion", "advantages")}
    rows |= {f"{of}/{name}": [*values] for of in ("rewards", "extra") for name, values in logs[of].items()}
    of_scalar = lambda value: value.item() if getattr(value, "ndim", None) == 0 else None  # noqa: E731
    return json.loads(json.dumps(rows, skipkeys=True, default=of_scalar))


def restore_table(trainer: Any, table: dict[str, list]) -> None:
    """Put back what [`table_of`] returned."""
    for name, rows in table.items():
        of, _, column = name.partition("/")
        kept = trainer._logs[of][column] if column else trainer._logs[of]
        kept.clear()
        kept.extend(rows)
