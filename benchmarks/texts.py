"""Texts that every Python ships with, in the order in which all benchmarks read them."""

from __future__ import annotations

import ast
import sysconfig
import warnings
from collections.abc import Iterator
from pathlib import Path
from pydoc_data import topics

LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "encodings", "pydoc_data"}


def standard_library() -> Iterator[tuple[str, str]]:
    """Yield path and source of each module of the standard library, as examples/07_from_scratch.py reads them."""
    root = Path(sysconfig.get_path("stdlib"))
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root)
        if not LEFT_OUT & set(name.parts):
            yield str(name), path.read_text(encoding="utf-8", errors="ignore")


def syntax_trees() -> Iterator[tuple[str, ast.Module]]:
    """Yield path and syntax tree of each module of the standard library."""
    for name, source in standard_library():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of old escapes in the sources
            yield name, ast.parse(source)


def language_reference() -> list[str]:
    """The sections of Python's language reference, by name."""
    return [topics.topics[name] for name in sorted(topics.topics)]
