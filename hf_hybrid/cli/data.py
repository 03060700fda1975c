"""
The data of every command: one reader from files, folders and ids on the Hub to rows in TRL's form, or to tokens.

A [`Reader`] says which data a run reads and what of a row is learned, and reads them: each data set is loaded
([`load`]), its rows are converted (`formats`), and turned into tokens if the command trains on tokens (`tokens`); data
sets are mixed, and rows to evaluate on are held out. The run writes its reader into its folder, so that `hf-hybrid
export` finds the held-out rows again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import importlib
import itertools
import json
import os
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hf_hybrid.cli import tokens
from hf_hybrid.cli.formats import JSON, Source, convert_rows, rows_of
from hf_hybrid.cli.loading import reason_of, takes_images
from hf_hybrid.cli.options import DataOptions, OptionError, Options, TextDataOptions
from hf_hybrid.cli.tokens import Report

NOTE_NAME = "_hybrid_data.json"
"""In `output_dir`, for `hf-hybrid export`: a [`Reader`]. Files with a leading underscore are not pushed."""
KINDS = {".txt": "text", ".text": "text", ".md": "text", ".jsonl": "json", ".traj": "json"}
KINDS |= {f".{kind}": kind for kind in ("json", "csv", "parquet")}
"""By the ending of a file: the loader of `datasets`."""
PACKED = {".gz": "gzip", ".bz2": "bz2", ".xz": "lzma", ".zst": "zstandard"}
"""Endings that a file may have behind these, and the modules that unpack it."""
EVAL_SHARE = 0.05


# Before torch is imported.


def check_paths(option: str, names: Sequence[str]) -> None:
    """Refuse files and folders that are not there, with what there is. What may be an id on the Hub is not refused."""
    for name in names:
        path = Path(name).expanduser()
        if path.exists():
            if path.is_file() and kind_of(path) is None:
                raise OptionError(
                    f"`--{option} {name}` ends in `{path.suffix}`, and these files are read: {', '.join(KINDS)}, and "
                    f"these packed: {', '.join(PACKED)}."
                )
            _opener(path)
        elif kind_of(path) or name.startswith((".", "/", "~")) or name.count("/") > 1:
            what, folder = "file" if path.suffix else "file or folder", path.parent
            there = sorted(os.listdir(folder)) if folder.is_dir() else []
            hint = "" if folder.is_dir() else f" The folder `{folder}` does not exist."
            if data := [f"`{file}`" for file in there if kind_of(Path(file))]:
                hint = f" In `{folder}` there is {', '.join(data[:5])}."
            if near := difflib.get_close_matches(path.name, there, n=1, cutoff=0.6):
                hint = f" Did you mean `{folder / near[0]}`?"
            raise OptionError(f"`--{option} {name}`: there is no such {what}.{hint}")


def check_parts(names: Sequence[str], **choices: Sequence[str]) -> None:
    """Refuse to choose a split or a configuration where every data set is a file, or a saved one without splits."""
    paths = [Path(name).expanduser() for name in names]
    if all(path.is_file() or (path / "state.json").is_file() for path in paths):
        for option, words in choices.items():
            if words and words[0] != "train":
                raise OptionError(
                    f"`--{option} {words[0]}` chooses a part of a data set, and `{names[0]}` has none. Leave it out."
                )


def new_names(columns: Sequence[str] | None) -> dict[str, str]:
    """Return `--columns NEW=OLD` as new names by old ones. Raises [`OptionError`]."""
    names = {}
    for pair in columns or ():
        new, equals, old = pair.partition("=")
        if not (new and equals and old):
            raise OptionError(f"`--columns {pair}` is not of the form NEW=OLD, for example `prompt=question`.")
        names[old] = new
    return names


# One data set.


def kind_of(path: Path) -> str | None:
    """Return the loader of a file by its ending, packed or not."""
    return KINDS.get((path.with_suffix("") if path.suffix.lower() in PACKED else path).suffix.lower())


def _opener(path: Path) -> Any:
    """Return the module whose `open` reads a file, or refuse it with what to install."""
    module = PACKED.get(path.suffix.lower(), "io")
    try:
        return importlib.import_module(module)
    except ImportError:
        raise OptionError(f"`{path}` is unpacked by {module}. Install it: pip install {module}") from None


def load(option: str, name: str, split: str, config: str | None = None, streaming: bool = False) -> tuple[Any, str]:
    """
    Load a split of a file, a folder or a data set on the Hub, the rows of JSON files as text ([`JSON`]); and what is to
    be said of how it was read.
    """
    from datasets import load_dataset, load_from_disk

    check_paths(option, [name])
    path = Path(name).expanduser()
    kind = kind_of(path) if path.is_file() else None
    try:
        if kind is not None:
            return _load_files([path], kind, streaming)
        if any((path / name).is_file() for name in ("state.json", "dataset_dict.json")):  # of `save_to_disk`
            saved: Any = load_from_disk(str(path))
            if isinstance(saved, dict):
                if split not in saved:
                    raise OptionError(f"`--{option} {name}` has no split `{split}`, but {', '.join(saved)}.")
                saved = saved[split]
            return saved.to_iterable_dataset() if streaming else saved, ""
        files = _files_of(path, split) if path.is_dir() and config is None else []
        kinds = [kind for kind in map(kind_of, files) if kind is not None]
        if (kind := max(kinds, key=kinds.count, default=None)) in (None, "parquet"):
            return load_dataset(str(path) if path.exists() else name, config, split=split, streaming=streaming), ""
        rows, said = _load_files([file for file in files if kind_of(file) == kind], kind, streaming)
        others = [file.name for file in files if kind_of(file) != kind]
        return rows, said + f"; not read: {', '.join(others[:3])}{', ...' * (len(others) > 3)}" * bool(others)
    except OptionError:
        raise
    except Exception as error:  # whatever a broken file leads to
        message = f"cannot be loaded: {reason_of(error)} It must be a file ({', '.join(KINDS)}), a folder, or an id on "
        message += "the Hub, which needs the network (HF_HUB_OFFLINE=1 forbids it) unless it is cached."
        if kind is not None:
            message = f"cannot be read as {kind}: {reason_of(error)}"
            if isinstance(error, UnicodeDecodeError) or isinstance(error.__cause__, UnicodeDecodeError):
                message += " Save it as UTF-8."
            message = message if path.is_dir() or path.read_bytes().strip() else "holds no rows."
        raise OptionError(f"`--{option} {name}` {message}") from error


def command_of(name: str, words: dict[str, list[str]]) -> str:
    """Return the command that takes a file, or else `sft`, which says why not."""
    split, config = (next(iter(words[f"dataset_{option}"]), None) for option in ("split", "config"))
    for command in ("kto", "sft", "dpo", "grpo"):
        with contextlib.suppress(OptionError, LookupError):
            rows, _ = load("dataset", name, split or "train", config, streaming=True)
            convert_rows(name, rows, command, new_names(words["columns"]), None, True)
            return command
    return "sft"


def _files_of(folder: Path, split: str) -> list[Path]:
    """The files of a split by their names, as `datasets` finds them; none where a README.md may say it otherwise."""
    from datasets.data_files import DataFilesDict, get_data_patterns

    if (folder / "README.md").is_file():
        return []
    patterns = {str(part): names for part, names in get_data_patterns(str(folder)).items() if str(part) == split}
    return [Path(file) for files in DataFilesDict.from_patterns(patterns, str(folder)).values() for file in files]


def _load_files(paths: Sequence[Path], kind: str, streaming: bool) -> tuple[Any, str]:
    """Load files so that every text stays as it is written; `datasets` alone reads some as dates or numbers."""
    from datasets import Dataset, Features, Value, concatenate_datasets, load_dataset

    def loaded(kind: str, files: Sequence[Path], **how: Any) -> Any:
        return load_dataset(kind, data_files=[*map(str, files)], split="train", streaming=streaming, **how)

    def held(columns: dict[str, list]) -> Any:
        return Dataset.from_dict(columns).to_iterable_dataset() if streaming else Dataset.from_dict(columns)

    parts, said = [], ""
    if kind == "parquet":
        parts = [loaded(kind, paths)]
    elif kind == "csv":
        for path in paths:
            names, is_empty = _names_in(path)
            features = Features({name: Value("string") for name in names})
            if is_empty:  # which `datasets` refuses in words of its own
                parts.append(held({name: [] for name in names}))
            else:
                parts.append(loaded(kind, [path], features=features, keep_default_na=False))
    else:
        column, ways = JSON if kind == "json" else "text", {path: _way_of(path, kind) for path in paths}
        without_blank = lambda batch: {column: [text.strip("\n") for text in batch["text"] if text.strip()]}  # noqa: E731
        for by in ("paragraph", "line"):
            if files := [path for path, way in ways.items() if way == by]:
                rows = loaded("text", files, sample_by=by, encoding="utf-8-sig")
                parts.append(rows.map(without_blank, batched=True, remove_columns=["text"]))
        values = [json.dumps(row) for way in ways.values() if isinstance(way, list) for row in way]
        parts += [held({JSON: values})] if values or not parts else []
        said = "; a document in each line, as no line is blank" * (kind == "text" and "line" in ways.values())
    return concatenate_datasets(parts) if len(parts) > 1 else parts[0], said


def _names_in(path: Path) -> tuple[list[str], bool]:
    """The names of the columns of a .csv file, and whether it has no more."""
    import pandas

    head = pandas.read_csv(path, dtype=str, nrows=1, keep_default_na=False)
    if not isinstance(head.index, pandas.RangeIndex):  # pandas would take the first fields for names of rows
        raise ValueError(f"its first row has more fields than the {len(head.columns)} names above.")
    return [*map(str, head.columns)], head.empty


def _way_of(path: Path, kind: str) -> str | list[Any]:
    """How a file is divided into rows: by line or paragraph; or the rows of a JSON file that is one value."""
    read = lambda: _opener(path).open(path, "rt", encoding="utf-8-sig")  # noqa: E731
    with read() as file:
        if kind == "text":  # as one document, a whole book would be tokenised in one piece
            blank = itertools.pairwise(line == "\n" for line in itertools.dropwhile("\n".__eq__, file))
            return "paragraph" if any(before and not after for before, after in blank) else "line"
        lines = filter(str.strip, file)
        try:
            json.loads(next(lines, ""))
            if next(lines, None) is not None:
                return "line"
        except ValueError:
            pass  # a value of several lines, or a broken row
    with read() as file:
        try:
            return rows_of(json.load(file))
        except ValueError:
            return "line"  # the row will be named


# Mixing.


def shares(counts: Sequence[int], weights: Sequence[float]) -> list[int]:
    """
    Return how many rows of each data set a mixture takes, so that their shares are `weights` and none is repeated. It
    is as large as the smallest data set, for its share, allows.
    """
    parts = [weight / sum(weights) for weight in weights]
    most = min(count / part for count, part in zip(counts, parts, strict=True) if part > 0)
    return [min(round(part * most), count) for part, count in zip(parts, counts, strict=True)]


def mixed(parts: Sequence[Any], weights: Sequence[float] | None, seed: int) -> Any:
    """Join data sets of the same columns, with their shares."""
    from datasets import concatenate_datasets, interleave_datasets

    if len(parts) == 1:
        return parts[0]
    if not hasattr(parts[0], "__len__") and weights is not None:
        probabilities = [weight / sum(weights) for weight in weights]
        return interleave_datasets(list(parts), probabilities=probabilities, seed=seed)
    if weights is not None:
        draw, counts = random.Random(seed), shares(list(map(len, parts)), weights)
        parts = [p.select(sorted(draw.sample(range(len(p)), n))) for p, n in zip(parts, counts, strict=True)]
    try:
        return concatenate_datasets(list(parts))
    except ValueError as error:
        columns = "; ".join(", ".join(part.column_names) for part in parts)
        raise OptionError(
            f"The data sets of `--dataset` do not fit into one ({columns}): {reason_of(error)} Rename columns with "
            "`--columns`, or make them of one form."
        ) from error


def held_out(rows: Any, share: float, seed: int) -> tuple[Any, Any]:
    """Return the rows to train on and to evaluate on. Raises [`OptionError`] if there is one row alone."""
    if len(rows) < 2:
        raise OptionError(
            "The data make one row, and `--eval_share` takes one. Set `--eval_share 0`, or in `hf-hybrid train` a "
            "shorter `--sequence_length`."
        )
    count = min(max(round(share * len(rows)), 1), len(rows) - 1)
    split = rows.train_test_split(count, seed=seed)
    return split["train"], split["test"]


# All data of a run.


@dataclass(frozen=True)
class Reader:
    """Reads the data of a run: `data` are the options of a `command`, and `seed` draws mixtures and held-out rows."""

    command: str
    data: DataOptions
    seed: int
    answers_only: bool | None = None  # `True` refuses data without chats, `None` does not
    completions_only: bool = True
    max_length: int | None = None
    keep_end: bool = False  # of rows that are cut
    packing: str | None = None  # how, if rows are packed

    @classmethod
    def of(cls, options: Options) -> Reader:
        """Return the reader of a run."""
        args = options.config
        values = {name: getattr(args, name, None) for name in ("assistant_only_loss", "max_length", "packing")}
        return cls(
            command=options.command.name,
            data=options.data,
            seed=args.data_seed or args.seed,
            answers_only=None if "assistant_only_loss" in options.defaulted else values["assistant_only_loss"],
            completions_only=getattr(args, "completion_only_loss", None) is not False,
            max_length=values["max_length"],
            keep_end=getattr(args, "truncation_mode", "keep_start") == "keep_end",
            packing=args.packing_strategy if values["packing"] else None,
        )

    def to_dict(self) -> dict[str, Any]:
        """Return plain values. Paths are whole, so that they hold from any folder."""
        values = dataclasses.asdict(self)
        data = values.pop("data")
        for option in ("dataset", "eval_dataset"):
            paths = [(name, Path(name).expanduser()) for name in data[option] or []]
            data[option] = [str(path.resolve()) if path.exists() else name for name, path in paths] or None
        return {**data, **values}

    @property
    def eval_share(self) -> float:
        """Share of the rows to train on that is evaluated on instead."""
        if self.data.eval_dataset or self.data.eval_split:
            return 0.0
        if self.data.eval_share is None:
            return 0.0 if self.command == "grpo" or self.data.streaming else EVAL_SHARE
        return self.data.eval_share

    @property
    def evaluates(self) -> bool:
        """Whether there are rows to evaluate on."""
        return bool(self.data.eval_dataset or self.data.eval_split or self.eval_share)

    def train_and_eval(
        self, tokenizer: Any, report: Report = tokens.silent, processes: int | None = None, config: Any = None
    ) -> tuple[Any, Any]:
        """Return the rows to train on, and those to evaluate on or `None`. Raises [`OptionError`]."""
        images = config is not None and takes_images(config) and self.command not in ("train", "reward")
        data, sources = self.data, list(self.sources("dataset", tokenizer, report, images))
        if self.answers_only and not any(source.format.chats for source in sources):
            raise OptionError(
                f"`--assistant_only_loss true` needs chats, and {sources[0].where} holds {sources[0].format.title}."
            )
        parts = [self._tokenised(source, tokenizer, processes, report) for source in sources]
        if self.command == "sft" and not data.streaming:
            if more := sum(map(len, parts)) - sum(len(source.rows) for source in sources):
                of = "with images" if sources[0].has_images else "whose template renders an answer otherwise once "
                of += "others follow" * (not sources[0].has_images)
                report("divided", f"{more:,} more rows: chats {of} have one for each answer")
        if data.dataset_weights is not None:
            report("mixture", self._mixture(parts))
        train_set, eval_set = mixed(parts, data.dataset_weights, self.seed), None
        if self.eval_share:
            total = len(train_set)
            train_set, eval_set = held_out(train_set, self.eval_share, self.seed)
            report("eval", f"{len(eval_set):,} of {total:,} rows, which are not trained on")
        elif self.evaluates:
            eval_set = self.eval_set(tokenizer, report, processes, images)
        if any(source.has_images for source in sources):
            tokens.report_images(train_set, self.command, self.answers_only is False, report)
        elif isinstance(data, TextDataOptions):
            number = "" if data.streaming else f"{len(train_set):,} "
            report("loss on", f"all tokens of {number}sequences of {data.sequence_length:,}")
        elif self.command == "sft":
            answers = self._answers(tokenizer)
            learned = " and ".join(sorted({answers.learned(source) for source in sources}))
            tokens.report_learned(train_set, eval_set, self, learned, report, config)
        return train_set, eval_set

    def eval_set(
        self, tokenizer: Any, report: Report = tokens.silent, processes: int | None = None, images: bool = False
    ) -> Any:
        """Return the rows to evaluate on alone; those to train on are not read where they do not decide."""
        if self.eval_share:
            return self.train_and_eval(tokenizer, report, processes)[1]
        sources = list(self.sources("eval_dataset", tokenizer, report, images))
        return mixed([self._tokenised(source, tokenizer, processes, report) for source in sources], None, self.seed)

    def sources(self, option: str, tokenizer: Any, report: Report, images: bool = False) -> Iterator[Source]:
        """
        Yield the data sets of an option in TRL's form, with `images` if the model takes them; for `eval_dataset`
        without one a split of `dataset`.
        """
        data, trains = self.data, option == "dataset"
        split = data.dataset_split if trains else data.eval_split or "train"
        for name in (data.dataset if trains or not data.eval_dataset else data.eval_dataset) or ():
            config = data.dataset_config if name in (data.dataset or ()) else None
            rows, said = load(option, name, split, config, data.streaming)
            if trains and data.limit is not None:
                rows = rows.take(data.limit) if data.streaming else rows.select(range(min(data.limit, len(rows))))
            how = (new_names(data.columns), data.system_prompt, bool(tokenizer.chat_template))
            path = Path(name).expanduser().resolve()
            folder = (path if path.is_dir() else path.parent) if images else None
            source = convert_rows(f"`--{option} {name}`", rows, self.command, *how, folder)
            number = "" if data.streaming else f", {len(source.rows):,} rows"
            report("data" if trains else "eval", f"{name}: {source.format.title}{number}{said}")
            if source.unread:
                report("not read", "columns " + ", ".join(f"`{column}`" for column in source.unread))
            yield source

    def _tokenised(self, source: Source, tokenizer: Any, processes: int | None, report: Report) -> Any:
        """The rows of a data set as the trainer takes them."""
        if source.has_images:  # the trainer's processor tokenises them, image by image
            from datasets import Image, List

            divides = self.command == "sft" and self.answers_only is not False
            rows = tokens.by_answer(source) if divides and "messages" in source.columns else source.rows
            if not hasattr(rows, "__len__"):  # which does not know its features
                return rows.map(lambda row: {"images": [*map(Image().decode_example, row["images"])]})
            return rows.cast_column("images", List(Image()))
        if self.command not in ("train", "sft") and not source.format.chats:
            return source.rows
        answers = self._answers(tokenizer) if self.command == "sft" else tokens.Answers(tokenizer, False, False)
        if source.format.chats:
            tokens.report_hidden(source, answers, report)
        if isinstance(self.data, TextDataOptions):
            return answers.blocks(source, self.data.sequence_length)
        return answers.tokenise(source, processes) if self.command == "sft" else source.rows

    def _answers(self, tokenizer: Any) -> tokens.Answers:
        return tokens.Answers(tokenizer, self.answers_only is not False, self.completions_only)

    def _mixture(self, parts: list[Any]) -> str:
        names, weights = self.data.dataset or [], self.data.dataset_weights or []
        if self.data.streaming:
            pairs = zip(names, weights, strict=True)
            return ", ".join(f"{weight / sum(weights):.0%} {name}" for name, weight in pairs)
        counts = [len(part) for part in parts]
        taken = zip(shares(counts, weights), counts, names, strict=True)
        return ", ".join(f"{some:,} of {count:,} rows of {name}" for some, count, name in taken)
