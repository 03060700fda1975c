"""
How files are written.

Every small file of the package is written here, whole or not at all, and never through a link: a link in a folder that
others write to would lead to a file that the user did not name.
"""

from __future__ import annotations

import errno
import json
import logging
import math
import os
import re
import secrets
from pathlib import Path
from typing import Any, BinaryIO

logger = logging.getLogger(__name__)


def write_json(path: Path, values: dict) -> None:
    """Replace a JSON file as [`write_text`] does. An infinity becomes a string that `float` reads, NaN becomes null."""
    write_text(path, json.dumps(plain(values, infinity_as_text=True), indent=1, allow_nan=False) + "\n")


def write_text(path: Path, text: str) -> None:
    """Replace a text file as [`write_bytes`] does."""
    write_bytes(path, text.encode("utf-8", "replace"))  # half of an emoji is no text


def write_bytes(path: Path, content: bytes) -> None:
    """
    Replace a file in one move, so that neither a reader nor a crash ever leaves half of it.

    The temporary file has a name that nobody can predict and must not exist. If the path is a link, the file takes the
    place of the link, and what the link leads to stays as it is.
    """
    temporary = path.with_name(f"_{path.name}.{secrets.token_hex(8)}")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0)
    try:
        with os.fdopen(os.open(temporary, flags, 0o666), "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def open_to_append(path: Path, *, private: bool = False) -> BinaryIO:
    """Open a file to read it and to append to it. It is made if there is none. A link is refused with `OSError`."""
    flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0)  # which Windows lacks
    return os.fdopen(os.open(path, flags, 0o600 if private else 0o666), "ab+")


def write_note(path: Path, values: dict) -> None:
    """Write JSON that training can do without: on a full or read-only disk there is a warning instead."""
    try:
        write_json(path, values)
    except OSError as error:
        logger.warning("`%s` could not be written, and training goes on without it: %s", path, error)


def plain(value: Any, *, infinity_as_text: bool = False) -> Any:
    """
    Make values valid JSON. Scalars of numpy and torch become numbers, and NaN becomes null.

    An infinity becomes null too, or a string that `float` reads: a checkpoint needs it back, a log shows numbers alone.
    """
    if isinstance(value, dict):
        return {str(key): plain(item, infinity_as_text=infinity_as_text) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item, infinity_as_text=infinity_as_text) for item in value]
    if getattr(value, "ndim", None) == 0:
        value = value.item()
    if not isinstance(value, float) or math.isfinite(value):
        return value
    return str(value) if infinity_as_text and not math.isnan(value) else None


def is_disk_full(error: BaseException | None) -> bool:
    """Whether an error says that a file could not grow. safetensors and torch say it in words."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            return True
        if re.search(r"os error (28|122|27)\b|unexpected pos \d+ vs|file write failed|iostream error", str(error)):
            return True
        error = error.__cause__ or error.__context__
    return False


BASE_NAME = "hybrid_base.json"
"""Beside adapters that were trained over a quantised base: how it was quantised. peft does not save this."""


def note_base(model: Any, folder: str | Path) -> None:
    """Write down how the base of adapters is quantised while they train; if it is not, remove an older note."""
    quantization = getattr(getattr(model, "config", None), "quantization_config", None)
    if hasattr(model, "peft_config") and quantization is not None:
        values = quantization if isinstance(quantization, dict) else quantization.to_dict()
        write_json(Path(folder, BASE_NAME), {"quantization_config": values})
    else:
        Path(folder, BASE_NAME).unlink(missing_ok=True)
