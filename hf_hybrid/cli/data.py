"""
The data of `hf-hybrid sft | dpo | grpo`: found and checked by its first row, then read, converted and mixed.

[`check_sources`] looks at local files with the standard library alone, before torch is imported, so that a misspelt
file or column ends the command at once. [`read_rows`] reads every row.
"""

from __future__ import annotations

import csv
import difflib
import itertools
import json
import os
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hf_hybrid.cli import formats
from hf_hybrid.cli.options import OptionError

KINDS = {".txt": "text", ".text": "text", ".md": "text", ".jsonl": "json"}
KINDS |= {f".{kind}": kind for kind in ("json", "csv", "parquet")}
"""By the ending of a file: the loader of `datasets`."""
SAVED = ("state.json", "dataset_dict.json")
"""Of which one is in a folder that `save_to_disk` wrote."""
MOST_OF_JSON = 2**26
"""Characters of a .json file that are read to find its first row."""


@dataclass(frozen=True)
class Rows:
    """
    The rows of one data set, in TRL's form.

    Attributes:
        name (`str`): As the user gave it.
        format (`Format`): That was recognised.
        data: A `Dataset` or an `IterableDataset`.
        of (`int`, *optional*): Rows that there are; `None` while streaming.
    """

    name: str
    format: formats.Format
    data: Any
    of: int | None


# First looks, with the standard library.


def check_sources(command: str, option: str, names: Sequence[str], renamed: dict[str, str]) -> None:
    """
    Refuse local data that is not there, or whose first row has no format of the command.

    Args:
        command (`str`): `sft`, `dpo` or `grpo`.
        option (`str`): That names the data: `dataset` or `eval_dataset`.
        names (`Sequence[str]`): Files, folders or ids on the Hub; the last are not looked at.
        renamed (`dict[str, str]`): New names of columns, by the old ones.

    Raises:
        OptionError: What is wrong, and what there is.
    """
    for name in names:
        path = Path(name).expanduser()
        check_path(option, name)
        if not path.is_file():
            continue
        first = first_row(option, name)
        recognised(command, option, name, list(first), first, renamed)


def check_path(option: str, name: str) -> None:
    """Refuse the name of a file or folder that is not there. What may be an id on the Hub is not refused."""
    path = Path(name).expanduser()
    if path.exists():
        if path.is_file() and path.suffix.lower() not in KINDS:
            raise OptionError(
                f"`--{option} {name}` ends in `{path.suffix}`, and these files are read: {', '.join(KINDS)}."
            )
        return
    if path.suffix.lower() in KINDS or name.startswith((".", "/", "~")) or name.count("/") > 1:
        what = "file" if path.suffix else "file or folder"
        near = _files_like(path)
        raise OptionError(f"`--{option} {name}`: there is no such {what}.{near}")


def _files_like(path: Path) -> str:
    folder = path.parent
    while not folder.is_dir():
        folder = folder.parent
        if folder == folder.parent:
            break
    if folder != path.parent:
        return f" The folder `{path.parent}` does not exist."
    names = sorted(entry.name for entry in os.scandir(folder))
    near = difflib.get_close_matches(path.name, names, n=1, cutoff=0.6)
    if near:
        return f" Did you mean `{folder / near[0]}`?"
    data = [name for name in names if Path(name).suffix.lower() in KINDS][:5]
    return f" In `{folder}` there is {', '.join(f'`{name}`' for name in data)}." if data else ""


def first_row(option: str, name: str) -> dict[str, Any]:
    """Return the first row of a local file, read with as little as possible."""
    path = Path(name).expanduser()
    kind = KINDS[path.suffix.lower()]
    try:
        if kind == "parquet":
            first = _first_of_parquet(path)
        else:
            with path.open(encoding="utf-8", newline="" if kind == "csv" else None) as file:
                first = {"text": _first_of_text, "csv": _first_of_csv, "json": _first_of_json}[kind](file)
    except (OSError, ValueError, csv.Error) as error:  # a ValueError: of JSON, UTF-8 or Parquet
        raise OptionError(f"`--{option} {name}` cannot be read as {kind}: {_sentence(error)}") from None
    if first is None:
        raise OptionError(f"`--{option} {name}` holds no rows.")
    if not isinstance(first, dict):
        raise OptionError(f"`--{option} {name}`: its first row is `{first!r:.60}`, not an object with columns.")
    return first


def _first_of_parquet(path: Path) -> dict[str, Any] | None:
    from datasets import load_dataset  # without torch

    try:
        rows: Any = load_dataset("parquet", data_files=str(path), split="train", streaming=True)
        return next(iter(rows), None)
    except Exception as error:  # whatever a broken file leads to
        raise ValueError(_sentence(error)) from None


def _first_of_text(file: Any) -> dict[str, Any] | None:
    return next(({"text": line} for line in file if line.strip()), None)


def _first_of_csv(file: Any) -> dict[str, Any] | None:
    return next(csv.DictReader(file), None)


def _first_of_json(file: Any) -> Any:
    first = next((line for line in file if line.strip()), None)
    if first is None:
        return None
    decoder = json.JSONDecoder()
    if not first.lstrip().startswith("["):
        try:
            return decoder.decode(first)
        except ValueError:  # an object over several lines, or a broken line
            rest = first + file.read(MOST_OF_JSON)
            found, end = decoder.raw_decode(rest.lstrip())
            return found
    text = first.lstrip()[1:] + file.read(MOST_OF_JSON)
    text = text.lstrip()
    return None if text.startswith("]") else decoder.raw_decode(text)[0]


def renames(columns: Sequence[str] | None) -> dict[str, str]:
    """Return `--columns NEW=OLD` as new names by old ones. Raises [`OptionError`]."""
    found = {}
    for pair in columns or ():
        new, equals, old = pair.partition("=")
        if not (new and equals and old):
            raise OptionError(f"`--columns {pair}` is not of the form NEW=OLD, for example `prompt=question`.")
        found[old] = new
    return found


def _renamed(option: str, name: str, columns: Sequence[str], renamed: dict[str, str]) -> dict[str, str]:
    missing = [old for old in renamed if old not in columns]
    if missing:
        near = difflib.get_close_matches(missing[0], columns, n=1)
        hint = f" Did you mean `{near[0]}`?" if near else ""
        has = ", ".join(f"`{column}`" for column in columns)
        raise OptionError(f"`--columns {renamed[missing[0]]}={missing[0]}`: `{name}` has {has}.{hint}")
    taken = [new for old, new in renamed.items() if new in columns and new not in renamed]
    if taken:
        raise OptionError(f"`--columns {taken[0]}=...`: `{name}` has a column `{taken[0]}` already.")
    return renamed


def recognised(
    command: str,
    option: str,
    name: str,
    columns: Sequence[str],
    first: dict[str, Any],
    renamed: dict[str, str],
    template: bool = True,
) -> formats.Format:
    """Return the format of rows. Raises [`OptionError`] with the columns that there are, or for the first row."""
    renamed = _renamed(option, name, columns, renamed)
    first = {renamed.get(column, column): value for column, value in first.items()}
    columns = [renamed.get(column, column) for column in columns]
    try:
        found = formats.recognise(command, columns, first, template)
    except formats.FormatError as error:
        raise OptionError(f"`--{option} {name}`: {error}") from None
    try:
        found.convert(first)
    except formats.FormatError as error:
        raise OptionError(f"`--{option} {name}`, row 1: {error}. Correct or remove the row.") from None
    return found


def _sentence(error: BaseException) -> str:
    while error.__cause__ is not None:
        error = error.__cause__
    text = " ".join(str(error).split()) or type(error).__name__
    return text if text.endswith(".") else f"{text}."


# Reading.


def load(option: str, name: str, split: str, config: str | None, streaming: bool) -> Any:
    """
    Load a split of a file, a folder or a data set on the Hub.

    Raises:
        OptionError: If it cannot be loaded.
    """
    from datasets import load_dataset, load_from_disk

    check_path(option, name)
    path = Path(name).expanduser()
    try:
        if path.is_file():
            kind = KINDS[path.suffix.lower()]
            # By paragraph: as one document, a whole book would be tokenised in one piece.
            by: dict[str, Any] = {"sample_by": "paragraph"} if kind == "text" else {}
            return load_dataset(kind, data_files=str(path), split="train", streaming=streaming, **by)
        if any((path / saved).is_file() for saved in SAVED):
            saved: Any = load_from_disk(str(path))
            if isinstance(saved, dict):
                if split not in saved:
                    raise OptionError(f"`--{option} {name}` has no split `{split}`, but {', '.join(saved)}.")
                saved = saved[split]
            return saved.to_iterable_dataset() if streaming else saved
        return load_dataset(str(path) if path.exists() else name, config, split=split, streaming=streaming)
    except OptionError:
        raise
    except Exception as error:  # whatever a broken file leads to
        if path.is_file():
            kind = KINDS[path.suffix.lower()]
            raise OptionError(f"`--{option} {name}` cannot be read as {kind}: {_sentence(error)}") from error
        raise OptionError(
            f"`--{option} {name}` cannot be loaded: {_sentence(error)} It must be a file ({', '.join(KINDS)}), a "
            "folder, or an id on the Hub, which needs the network (HF_HUB_OFFLINE=1 forbids it) unless it is cached."
        ) from error


def columns_of(data: Any) -> list[str]:
    """Return the names of the columns, of the first row where a stream does not know them."""
    return list(data.column_names or next(iter(data), {}))


def read_rows(
    command: str,
    option: str,
    name: str,
    *,
    split: str,
    config: str | None,
    streaming: bool,
    limit: int | None,
    renamed: dict[str, str],
    template: bool,
    system: str | None,
) -> Rows:
    """
    Load a data set and convert its rows to TRL's form.

    Args:
        command, option, name: As [`check_sources`].
        split, config (`str`): Of a data set with several.
        streaming (`bool`): Whether rows are read while training.
        limit (`int`, *optional*): Rows that are read at most.
        renamed (`dict[str, str]`): New names of columns, by the old ones.
        template (`bool`): Whether the tokenizer has a chat template.
        system (`str`, *optional*): System message of conversations that have none.

    Raises:
        OptionError: If the data cannot be loaded, has no known format, or has a row of another form than the first.
    """
    data = load(option, name, split, config, streaming)
    if limit is not None:
        data = data.take(limit) if streaming else data.select(range(min(limit, len(data))))
    first = next(iter(data), None)
    if first is None:
        raise OptionError(f"`--{option} {name}` holds no rows.")
    columns = columns_of(data)
    found = recognised(command, option, name, columns, first, renamed, template)
    kept = [column for column in found.kept if column in {renamed.get(c, c) for c in columns}]

    def convert(row: dict[str, Any], number: int) -> dict[str, Any]:
        row = {renamed.get(column, column): value for column, value in row.items()}
        try:
            made = found.convert(row)
        except formats.FormatError as error:
            raise OptionError(f"`--{option} {name}`, row {number + 1}: {error}. Correct or remove the row.") from None
        made = formats.with_system(made, system) if system else made
        return {**{column: row[column] for column in kept}, **made}

    try:
        if streaming:
            data = data.map(convert, with_indices=True, remove_columns=columns)
        else:
            data = data.map(convert, with_indices=True, remove_columns=columns, desc="Reading rows")
    except OptionError:
        raise
    except Exception as error:  # whatever Arrow makes of rows of several kinds
        raise OptionError(
            f"`--{option} {name}`: its rows do not fit into one table: {_sentence(error)} Give each column values of "
            "one kind."
        ) from error
    return Rows(name, found, data, None if streaming else len(data))


# Mixing.


def shares(counts: Sequence[int], weights: Sequence[float]) -> list[int]:
    """
    Return how many rows of each data set a mixture takes, so that their shares are `weights` and none is repeated.

    The mixture is as large as the smallest data set, for its share, allows.
    """
    total = sum(weights)
    parts = [weight / total for weight in weights]
    most = min(count / part for count, part in zip(counts, parts, strict=True) if part > 0)
    return [min(round(part * most), count) for part, count in zip(parts, counts, strict=True)]


def check_weights(names: Sequence[str], weights: Sequence[float] | None) -> None:
    """Refuse weights that do not belong to the data sets. Raises [`OptionError`]."""
    if weights is None:
        return
    if len(weights) != len(names):
        raise OptionError(f"`--dataset_weights` has {len(weights)} numbers, and `--dataset` names {len(names)}.")
    if min(weights) < 0 or not 0 < sum(weights) < float("inf"):
        given = " ".join(f"{weight:g}" for weight in weights)
        raise OptionError(f"`--dataset_weights {given}` must be at least 0, and one greater.")


def mixed(parts: Sequence[Any], weights: Sequence[float] | None, seed: int) -> Any:
    """Join data sets of the same columns, with their shares."""
    from datasets import concatenate_datasets, interleave_datasets

    if len(parts) == 1:
        return parts[0]
    if not hasattr(parts[0], "__len__"):
        if weights is None:
            return concatenate_datasets(list(parts))
        probabilities = [weight / sum(weights) for weight in weights]
        return interleave_datasets(list(parts), probabilities=probabilities, seed=seed)
    if weights is not None:
        taken = shares([len(part) for part in parts], weights)
        draw = random.Random(seed)
        chosen = [sorted(draw.sample(range(len(part)), count)) for part, count in zip(parts, taken, strict=True)]
        parts = [part.select(rows) for part, rows in zip(parts, chosen, strict=True)]
    try:
        return concatenate_datasets(list(parts))
    except ValueError as error:
        columns = "; ".join(", ".join(part.column_names) for part in parts)
        raise OptionError(
            f"The data sets of `--dataset` do not fit into one ({columns}): {_sentence(error)} Rename columns with "
            "`--columns`, or make them of one form."
        ) from error


def held_out(data: Any, share: float, seed: int) -> tuple[Any, Any]:
    """Return the rows to train on and to evaluate on. Raises [`OptionError`] if there is one row alone."""
    if len(data) < 2:
        raise OptionError("There is one row, and `eval_share` takes one. Set `--eval_share 0`.")
    count = min(max(round(share * len(data)), 1), len(data) - 1)
    split = data.train_test_split(count, seed=seed)
    return split["train"], split["test"]


def first_of(data: Any, count: int) -> Iterator[dict[str, Any]]:
    """Yield the first rows of a data set or a stream."""
    return itertools.islice(iter(data), count)
