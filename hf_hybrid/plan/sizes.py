"""Bytes as people write them. Standard library only, so that the command line can use it at once."""

from __future__ import annotations

import re

_UNITS = {"": 1, "B": 1} | {
    f"{prefix}{ending}": base**power
    for power, prefix in enumerate("KMGT", 1)
    for ending, base in (("iB", 1024), ("B", 1000))
}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*")
_LARGEST = 2**50


def parse_size(text: str | int | float, name: str) -> int:
    """
    Bytes from `"24GiB"` (1024s), `"24GB"` (1000s), `"512MiB"` or a number of bytes.

    Args:
        text (`str`, `int` or `float`): What was written; case does not matter.
        name (`str`): Of the argument, for the message.

    Raises:
        ValueError: If it is not a size, not above 0, or over 1024 TiB.
    """
    match = _SIZE.fullmatch(str(text))
    unit = {known.lower(): size for known, size in _UNITS.items()}.get(match[2].lower()) if match else None
    if match is None or unit is None:
        raise ValueError(
            f"`{name}` must be a size, got `{text}`. Write `24GiB`, `24GB` (decimal) or a number of bytes."
        )
    count = int(float(match[1]) * unit)
    if not 0 < count <= _LARGEST:
        raise ValueError(f"`{name}` must be above 0 and at most 1024 TiB, got `{text}`. Write for example `24GiB`.")
    return count
