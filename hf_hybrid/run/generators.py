"""The random generators that order the data, and their states in a checkpoint."""

from __future__ import annotations

import contextlib
import functools
import inspect
import random
import sys
from collections.abc import Mapping
from typing import Any

import numpy
import torch
from torch.utils.data import IterableDataset, Sampler

from hf_hybrid.optimizers import LIBRARIES

RandomGenerator = torch.Generator | random.Random | numpy.random.Generator | numpy.random.RandomState
"""Objects that draw random numbers for somebody who does not use the global generators."""


def generator_state(generator: RandomGenerator) -> Any:
    """Return the state of a generator for a checkpoint: JSON values and tensors."""
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, random.Random):
        return with_tensors(generator.getstate())
    if isinstance(generator, numpy.random.Generator):
        return with_tensors(generator.bit_generator.state)
    return with_tensors(generator.get_state(legacy=False))


def restore_generator(generator: RandomGenerator, state: Any) -> None:
    """Set a generator to what [`generator_state`] returned."""
    if isinstance(generator, torch.Generator):
        generator.set_state(state)
    elif isinstance(generator, random.Random):
        generator.setstate(without_tensors(state))
    elif isinstance(generator, numpy.random.Generator):
        generator.bit_generator.state = without_tensors(state)
    else:
        generator.set_state(without_tensors(state))


def with_tensors(state: Any) -> Any:
    """Turn the long rows of numbers in the state of a generator into tensors."""
    if isinstance(state, dict):
        return {key: with_tensors(value) for key, value in state.items()}
    if isinstance(state, numpy.ndarray):
        return {"array": torch.from_numpy(state.copy())}
    if isinstance(state, tuple) and len(state) > 3:
        return {"tuple": torch.tensor(state)}
    return [with_tensors(value) for value in state] if isinstance(state, tuple) else state


def without_tensors(state: Any) -> Any:
    """Return what [`with_tensors`] took."""
    if isinstance(state, dict) and set(state) == {"array"}:
        return state["array"].numpy()
    if isinstance(state, dict) and set(state) == {"tuple"}:
        return tuple(state["tuple"].tolist())
    if isinstance(state, dict):
        return {key: without_tensors(value) for key, value in state.items()}
    return tuple(map(without_tensors, state)) if isinstance(state, list) else state


_LOADERS = ("base_dataloader", "dataloader", "batch_sampler", "sampler", "synchronized_generator", "generator")


def generators_of(dataloader: Any) -> dict[str, RandomGenerator]:
    """
    Return the generators that a loader, its samplers and its stream hold, each by the attributes that lead to it.

    A data set that is no stream is left out: a resume skips its first rows without reading them.
    """
    generators: dict[str, RandomGenerator] = {}
    seen: set[int] = set()

    def visit(value: Any, at: str) -> None:
        if id(value) in seen:
            return
        seen.add(id(value))
        if isinstance(value, RandomGenerator) and not isinstance(value, random.SystemRandom):
            generators[at] = value
            return
        for name, held in list(getattr(value, "__dict__", {}).items()):
            if name in _LOADERS or isinstance(held, (RandomGenerator, Sampler, IterableDataset)):
                visit(held, f"{at}.{name}" if at else name)

    visit(dataloader, "")
    return generators


MOST = 100
"""Items of a container in which generators are looked for."""


def held_by(users: Mapping[str, Any]) -> dict[str, RandomGenerator]:
    """
    Return the generators that functions and objects of a user draw from, by the way to each. They are attributes, or
    code names them, or they are in a list, tuple or dictionary of at most [`MOST`] that is. Other functions and objects
    are followed that the same module defines, or one that is not installed.
    """
    found: dict[str, RandomGenerator] = {}
    seen: set[int] = set()

    def visit(value: Any, at: str) -> None:
        if id(value) in seen or inspect.ismodule(value):
            return
        seen.add(id(value))
        if isinstance(value, RandomGenerator):
            if not isinstance(value, random.SystemRandom):
                found[at] = value
            return
        given, module, is_container = dict[str, Any](), "", isinstance(value, (list, tuple, dict))
        if is_container:
            inside = value if isinstance(value, dict) else dict(enumerate(value))
        elif inspect.isfunction(value):
            module, inside = value.__module__, _named(value)
        elif inspect.isroutine(value) or isinstance(value, functools.partial):  # a method, or another wrapper
            for name in ("__self__", "__func__", "func"):
                visit(getattr(value, name, None), at)
            inside = {**dict(enumerate(getattr(value, "args", ()))), **getattr(value, "keywords", {})}
        else:
            module, given = type(value).__module__, getattr(value, "__dict__", {})
            inside = {name: held for kind in type(value).__mro__[-2::-1] for name, held in vars(kind).items()} | given
        for name, held in list(inside.items()):
            kind = held if inspect.isfunction(held) or isinstance(held, (staticmethod, classmethod)) else type(held)
            is_given = inspect.isfunction(held) and name in given  # to an object that wraps it
            is_kind = isinstance(held, (RandomGenerator, functools.partial)) or inspect.isbuiltin(held) or is_given
            is_few = isinstance(held, (list, tuple, dict)) and not is_container and len(held) <= MOST
            of = getattr(kind, "__module__", None)
            if is_kind or is_few or inspect.ismethod(held) or of == module or _is_users(of):
                visit(held, f"{at}.{name}")

    for name, user in users.items():
        visit(user, name)
    return found


def _is_users(module: str | None) -> bool:
    """Whether a module is in no installed package."""
    if module is None or module.partition(".")[0] in (*LIBRARIES, *sys.stdlib_module_names):
        return False
    return "-packages" not in (getattr(sys.modules.get(module), "__file__", None) or "")


def _named(function: Any) -> dict[str, Any]:
    """Return the global variables that the code of a function names, also inside of it, and those of its closure."""
    codes, values = [function.__code__], {}
    for code in codes:  # more are added meanwhile
        values |= {name: function.__globals__[name] for name in code.co_names if name in function.__globals__}
        for name, module in list(values.items()):
            if inspect.ismodule(module) and _is_users(module.__name__):
                values |= {f"{name}.{of}": vars(module)[of] for of in code.co_names if of in vars(module)}
        codes += filter(inspect.iscode, code.co_consts)
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or ()):
        with contextlib.suppress(ValueError):  # nothing is in it
            values[name] = cell.cell_contents
    return values
