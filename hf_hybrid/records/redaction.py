"""
Texts without secrets and without folders of the machine, for files that people share. Standard library only.

Cards, options, summaries, profiles and reports are published or mailed. [`redact`] removes secrets, [`clean`] removes
paths too, and [`shareable`] cleans every text in plain values. What cannot be recognised as a secret stays, for example
a password behind an option named `--note`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

_SECRET_WORDS = {
    "token", "secret", "passphrase", "credential", "credentials", "pass", "pat", "webhook", "connection", "dsn",
}  # fmt: skip
_SECRET_ENDINGS = ("password", "passwd", "pwd", "key")
"""Of a word: `PGPASSWORD`, `WANDB_KEY`."""
_TOKENIZER_WORDS = {"eos", "bos", "pad", "unk", "sep", "cls", "mask", "special", "image"}
_ATTENTION_WORDS = {"value", "values", "query", "head", "heads", "dim", "public"}
"""Beside `key` they say that it opens nothing: `num_key_value_heads`, `public_key`."""
_HARMLESS = {"key", "pwd", "oldpwd"}
"""Names as a whole: a key of anything, and the folder of a shell."""
_SECRET_VALUES = re.compile(
    r"\b(?:hf_[A-Za-z0-9]{16,}|sk-[A-Za-z0-9_-]{16,}|r8_[A-Za-z0-9]{16,}|nvapi-[\w-]{16,}|AIza[\w-]{30,}|gh[pousr]_[A-Za-z0-9]{16,}|github_pat_\w{16,}|glpat-[\w-]{16,}"
    r"|xox[abprs]-[\w-]{10,}|AKIA[A-Z0-9]{12,}|ey[\w-]{10,}\.[\w-]{10,}\.[\w-]{10,}"
    r"|(?:Account|SharedAccess)Key=[^;\s]{8,}|hooks\.slack\.com/services/[\w/]{8,})"
)
_CREDENTIALS_IN_URL = re.compile(r"(?<=://)[^/@\s]+@")
_NAMED_IN_JSON = re.compile(r"""((["'])([\w-]+)\2\s*:\s*(["']))((?:(?!\4).)*)""")
# A path from the root or from a drive, through at least one folder. Not within a word, an address, or `~/`.
_ABSOLUTE = re.compile(
    r"(?<![\w.~:/\\-])(?:[A-Za-z]:[/\\]|\\\\|/)(?:[^\s/\\'\"`,;:<>|]+[/\\])+([^\s/\\'\"`,;:<>|]+)[/\\]?"
)
REMOVED = "REMOVED"


def is_secret_name(name: str) -> bool:
    """Whether an option or variable of this name holds a secret: `hub_token` does, `pad_token` does not."""
    words = set(filter(None, re.split(r"[-_.]+", name.lower())))
    known = {word for word in words if word in _SECRET_WORDS or word.endswith(_SECRET_ENDINGS)}
    if words <= _HARMLESS or (known == {"token"} and words & _TOKENIZER_WORDS):
        return False
    return bool(known - {"key"} or ("key" in known and not words & _ATTENTION_WORDS) or {"database", "url"} <= words)


def has_secret(text: str) -> bool:
    """Whether a text has a known format of tokens in it, or credentials in an address."""
    return bool(_SECRET_VALUES.search(text) or _CREDENTIALS_IN_URL.search(text))


def redact(value: str, secrets: Iterable[str | None] = ()) -> str:
    """
    A text without `secrets`, values of environment variables with secret names, known formats of tokens, credentials
    in addresses, and values under secret names in JSON.
    """
    of_environment = (value for name, value in os.environ.items() if is_secret_name(name) and len(value) >= 8)
    for secret in sorted({*filter(None, secrets), *of_environment}, key=len, reverse=True):
        value = value.replace(secret, REMOVED)
    value = _CREDENTIALS_IN_URL.sub(f"{REMOVED}@", _SECRET_VALUES.sub(REMOVED, value))
    return _NAMED_IN_JSON.sub(lambda found: found[1] + (REMOVED if is_secret_name(found[3]) else found[5]), value)


def clean(value: Any, secrets: Iterable[str | None] = ()) -> str:
    """A value as it may be published: redacted, with paths from the working folder or `~`, and others by name alone."""
    shown = redact(str(value), secrets).replace("file:///", "/")
    for folder, short in ((Path.cwd(), ""), (Path.home(), "~/")):
        prefix = str(folder).rstrip("/\\")
        if prefix:  # the root of the file system shortens nothing
            shown = re.sub(rf"(?<![\w./-]){re.escape(prefix)}(?:[/\\]|(?![\w.-]))", short, shown)
    return _ABSOLUTE.sub(r"\1", shown) or ("." if str(value) else "")


def shareable(value: Any) -> Any:
    """Plain values with every text in them [`clean`]."""
    if isinstance(value, dict):
        return {key: shareable(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [shareable(item) for item in value]
    return clean(value) if isinstance(value, str) else value
