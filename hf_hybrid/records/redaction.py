"""
Texts without secrets and without folders of the machine, for files that people share. Standard library only.

Cards, options, summaries, profiles and reports are published or mailed. [`redact`] removes secrets, [`clean`] removes
paths too, and [`shareable`] cleans every text in plain values. A secret is known by its name (`api_key=...`, `token:
...`, a key of a mapping), by where it stands (the query of an address, unless each name in it is known to be harmless)
or by its format. What none of them tells stays, for example a password behind an option named `--note`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

_SECRET_WORDS = {
    "token", "secret", "passphrase", "credential", "credentials", "pass", "pat", "webhook", "connection", "dsn", "auth",
    "authorization", "bearer", "cookie", "jwt", "sas", "sig", "signature",
}  # fmt: skip
_SECRET_ENDINGS = ("password", "passwd", "pwd", "key")
"""Of a word: `PGPASSWORD`, `WANDB_KEY`."""
_TOKENIZER_WORDS = {
    "eos", "bos", "pad", "unk", "sep", "cls", "mask", "special", "image", "trainable", "type", "accuracy", "count",
    "id", "healing",
}  # fmt: skip
_ATTENTION_WORDS = {"value", "values", "query", "head", "heads", "dim", "public", "error"}
"""Beside `key` they say that it opens nothing: `num_key_value_heads`, `public_key`."""
_HARMLESS = {"key", "pwd", "oldpwd"}
"""Names as a whole: a key of anything, and the folder of a shell."""
_SECRET_VALUES = re.compile(
    r"(?<![\w-])(?:hf_[A-Za-z0-9]{16,}|sk-[A-Za-z0-9_-]{16,}|r8_[A-Za-z0-9]{16,}|nvapi-[\w-]{16,}|AIza[\w-]{30,}|gh[pousr]_[A-Za-z0-9]{16,}|github_pat_\w{16,}|glpat-[\w-]{16,}"
    r"|xox[abprs]-[\w-]{10,}|A[KS]IA[A-Z0-9]{12,}|ey[\w-]{10,}\.[\w-]{10,}\.[\w-]{10,}|gsk_\w{16,}|ya29\.[\w-]{10,}|npm_[A-Za-z0-9]{16,}|pypi-[\w-]{16,}"
    r"|dckr_pat_[\w-]{16,}|SG\.[\w-]{10,}\.[\w-]{10,}|pplx-\w{16,}|[rs]k_(?:live|test)_\w{10,}|(?i:bearer)\s+(?=\S*\d)[\w.~+/=-]{8,}"
    r"|(?:Account|SharedAccess)Key=[^;\s]{8,}|hooks\.slack\.com/services/[\w/]{8,})"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)",
    re.DOTALL,
)
_CREDENTIALS_IN_URL = re.compile(r"(?<=://)[^/@\s]+@")
_ADDRESS = re.compile(r"""((?<![\w+.-])[A-Za-z][\w+.-]*+://[^\s?#"'`<>\\]*)(\?[^\s#"'`<>\\]*)?(\#[^\s"'`<>\\]*)?""")
_HARMLESS_IN_QUERIES = {"revision", "ref", "branch", "version", "split", "config", "format", "page", "lang", "download"}
# `name=value`, `name: value`, also in JSON and in JSON as text; `--name value`.
_NAME = re.compile(
    r"""(?<![\w.-])(?P<dash>--?)?(?P<name>[A-Za-z_][\w.-]*+)(?:\\*["']?\s*(?:=>|[=:])\s*|(?(dash)\s+(?!-)|(?!)))"""
)
_VALUE = re.compile(
    r"""(?P<quote>\\*["'])(?P<text>.*?)(?:(?<!\\)(?P=quote)|$)|(?:(?:Bearer|Basic|Token)\s+)?[^\s"'`<>{(\[][^\s"'`<>]*""",
    re.MULTILINE,
)
_HARMLESS_VALUES = re.compile(r"(?i)true|false|none|null|removed|-?\d*\.\d+(e-?\d+)?|")
_COUNTS = re.compile(r"[\d\s,\[\]]+")
# A path from the root or from a drive, through at least one folder. Not within a word, an address, or `~/`.
_ABSOLUTE = re.compile(
    r"(?<![\w.~:/\\-])(?:[A-Za-z]:[/\\]|\\\\|/)(?:[^\s/\\'\"`,;:<>|]+[/\\])+([^\s/\\'\"`,;:<>|]+)[/\\]?"
)
REMOVED = "REMOVED"


def is_secret_name(name: str) -> bool:
    """Whether an option or variable of this name holds a secret: `hub_token` does, `pad_token` does not."""
    words = set(filter(None, re.split(r"[-_.]+|(?<=[a-z0-9])(?=[A-Z])", name)))
    words = {word.lower() for word in words}
    known = {word for word in words if word in _SECRET_WORDS or word.endswith(_SECRET_ENDINGS)}
    if words <= _HARMLESS or (known == {"token"} and words & _TOKENIZER_WORDS):
        return False
    return bool(known - {"key"} or ("key" in known and not words & _ATTENTION_WORDS) or {"database", "url"} <= words)


def _is_secret(name: str, value: str) -> bool:
    """Whether the text of a name is a secret. Beside `token` a number is a count."""
    value = value.rstrip(",;.)]}")
    is_count = "token" in name.lower() and _COUNTS.fullmatch(value)
    return is_secret_name(name) and not is_count and not _HARMLESS_VALUES.fullmatch(value)


def has_secret(text: str) -> bool:
    """Whether a text has a secret in it, as far as its format, a name before it or its place in an address tells."""
    return _without_secrets(text) != text


def redact(value: str, secrets: Iterable[str | None] = ()) -> str:
    """
    A text without `secrets`, values of environment variables with secret names, known formats of tokens, credentials
    and queries of addresses, and values under secret names.
    """
    of_environment = (value for name, value in os.environ.items() if is_secret_name(name) and len(value) >= 8)
    for secret in sorted({*filter(None, secrets), *of_environment}, key=len, reverse=True):
        value = value.replace(secret, REMOVED)
    return _without_secrets(value)


def _without_secrets(text: str) -> str:
    text = _ADDRESS.sub(_plain_address, _CREDENTIALS_IN_URL.sub(f"{REMOVED}@", text))
    text, parts, end = _SECRET_VALUES.sub(REMOVED, text), [], 0
    for name in _NAME.finditer(text):
        value = _VALUE.match(text, name.end()) if name.start() >= end and is_secret_name(name["name"]) else None
        if value is not None and _is_secret(name["name"], value[0] if value["quote"] is None else value["text"]):
            quote = value["quote"] or ""
            parts += [text[end : value.start()], quote, REMOVED, quote]
            end = value.end()
    return "".join(parts) + text[end:]


def _plain_address(found: re.Match) -> str:
    """An address without its query, unless all names in it are known to be harmless, and without a fragment of such."""
    address, query, fragment = found.groups("")
    if not {pair.partition("=")[0].lower() for pair in re.split("[&;]", query[1:])} <= {*_HARMLESS_IN_QUERIES, ""}:
        query = f"?{REMOVED}"
    return address + query + (f"#{REMOVED}" if "=" in fragment else fragment)


def clean(value: Any, secrets: Iterable[str | None] = ()) -> str:
    """A value as it may be published: redacted, with paths from the working folder or `~`, and others by name alone."""
    shown = redact(str(value), secrets).replace("file:///", "/")
    for folder, short in ((Path.cwd(), ""), (Path.home(), "~/")):
        prefix = str(folder).rstrip("/\\")
        if prefix:  # the root of the file system shortens nothing
            shown = re.sub(rf"(?<![\w./-]){re.escape(prefix)}(?:[/\\]|(?![\w.-]))", short, shown)
    return _ABSOLUTE.sub(r"\1", shown) or ("." if str(value) else "")


def shareable(value: Any, name: str = "") -> Any:
    """Plain values with every text in them [`clean`], and without those that stand under a secret `name`."""
    if isinstance(value, dict):
        return {key: shareable(item, name if is_secret_name(name) else str(key)) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [shareable(item, name) for item in value]
    if not isinstance(value, str):
        return value
    return REMOVED if _is_secret(name, value) else clean(value)
