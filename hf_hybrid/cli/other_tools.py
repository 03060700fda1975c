"""
What names of other tools are here: `other_tools.yaml`, one table for `hf-hybrid convert` and for messages.

It has another name for each, what its values are, a function of `convert.py` that reads them, or why the line is left
out. [`advice`] tells it to whoever gives such a name to a command.
"""

from __future__ import annotations

import functools
from collections.abc import Container
from pathlib import Path
from typing import Any, NamedTuple


class Entry(NamedTuple):
    """What a name of another tool is here: one of our `names`, or a `reason` why it is left out."""

    names: tuple[str, ...] = ()
    function: str = ""
    values: dict[str, Any] = {}
    reason: str = ""

    def own(self, known: Container[str]) -> str | None:
        """Return our name, of those that a command has."""
        return next((name for name in self.names if name.split()[0] in known), None)


@functools.cache
def table() -> dict[str, Entry]:
    """Return what names of other tools are here."""
    import yaml

    def entry(text: Any) -> Entry:
        values = {str(value).lower(): ours for value, ours in text.items()} if isinstance(text, dict) else {}
        text = values.pop("ours", text)
        if text.startswith("- "):
            return Entry(reason=text[2:])
        name, _, function = text.removesuffix(")").partition(" (")
        return Entry(tuple(name.split("|")), function, values)

    entries = yaml.safe_load(Path(__file__).with_name("other_tools.yaml").read_text(encoding="utf-8"))
    return {name: entry(text) for name, text in entries.items()}


def advice(name: str, known: Container[str]) -> str:
    """Return a sentence on what a name of another tool is for a command with the `known` options; empty if unknown."""
    entry = table().get(name, Entry())
    if entry.reason:
        return f"Leave it out: {entry.reason}."
    own = entry.own(known) or ""
    in_yaml = "; in YAML the words behind `--columns` are a list" if own.startswith("columns") else ""
    value = entry.values.get("true")
    if not own:
        return f"It is `{entry.names[0]}` of another command." if entry.names else ""
    return f"Write `--{own}{f' {value}' if isinstance(value, str) else ''}` in its place{in_yaml}."
