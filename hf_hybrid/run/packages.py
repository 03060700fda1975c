"""In which package a function was written: whether it is code of a user."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

LIBRARIES = ("hf_hybrid", "transformers", "trl", "peft", "accelerate", "torch")
"""Packages whose functions are no code of a user."""


def package_of(function: Any, known: Collection[str] = LIBRARIES) -> str:
    """
    Return the package in which a function was written. Of one that others wrap it is the outermost that is not `known`.
    """
    while True:
        while (inside := getattr(function, "func", None) or getattr(function, "__func__", None)) is not None:
            function = inside  # of a partial, a method
        # `functools.wraps` copies `__module__`, but no globals.
        home = getattr(function, "__globals__", {}).get("__name__") or type(function).__module__
        package, function = home.partition(".")[0], getattr(function, "__wrapped__", None)
        if function is None or package not in known:
            return package
