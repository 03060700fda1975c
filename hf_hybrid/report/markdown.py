"""Markdown from strings that nobody vouches for: names, paths and messages. Standard library only."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

_SPECIAL = re.compile(r"([\\`*_{}\[\]<>#|~$!&])")
_CONTROL = re.compile(r"[\x00-\x1f\x7f\u0085\u2028\u2029]+")


def one_line(value: object) -> str:
    """A value as text without line breaks and control characters."""
    return _CONTROL.sub(" ", str(value)).strip()


def text(value: object) -> str:
    """A value as plain text: nothing in it is read as Markdown or HTML."""
    return _SPECIAL.sub(r"\\\1", one_line(value))


def code(value: object) -> str:
    """A value as inline code, also inside a table."""
    content = one_line(value)
    if not content:
        return ""
    ticks = "`" * (max(map(len, re.findall("`+", content)), default=0) + 1)
    space = " " if content.startswith("`") or content.endswith("`") else ""
    return f"{ticks}{space}{content}{space}{ticks}".replace("|", "\\|")


def block(content: str, language: str = "") -> str:
    """A fenced block whose fence the content cannot close."""
    fence = "`" * max(3, max(map(len, re.findall("`+", content)), default=0) + 1)
    return f"{fence}{language}\n{content.rstrip()}\n{fence}"


def table(headers: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """
    A table of cells that are Markdown already; columns after the first are aligned to the right.

    Without rows there is no table: an empty string.
    """
    lines = [f"| {' | '.join(row)} |" for row in rows]
    if not lines:
        return ""
    rule = "|" + "|".join(["---", *["---:"] * (len(headers) - 1)]) + "|"
    return "\n".join([f"| {' | '.join(headers)} |", rule, *lines])


def bullets(items: Iterable[str]) -> str:
    """A list of items that are Markdown already."""
    return "\n".join(f"- {item}" for item in items)


def join(items: Sequence[str]) -> str:
    """`a`, `a and b`, `a, b and c`."""
    return " and ".join(filter(None, [", ".join(items[:-1]), *items[-1:]]))
