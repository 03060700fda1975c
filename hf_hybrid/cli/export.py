"""`hf-hybrid export`: a run as a merged or a low-bit model, with a table of what that costs."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

from hf_hybrid.records.readings import as_dict, read_json

BATCH = 4


def add_parser(subparsers, summary: str) -> argparse.ArgumentParser:
    """Register the subcommand."""
    parser = subparsers.add_parser(
        "export",
        help=summary,
        description=(
            "Write the model of a run, or of one of its checkpoints, in 16 bits (`merged`) or in a low-bit format, "
            "with tokenizer, generation config and model card, and measure held-out loss, bytes and speed beside the "
            "original. Adapters are merged. Nothing is written over."
        ),
    )

    def add(name: str, **options) -> None:
        names = dict.fromkeys((name, name.replace("_", "-")))  # as `train` takes them
        parser.add_argument(*names, **options)

    text = "merged (16 bit), int8, int4, nf4, bitnet, gguf-f16, gguf-q8_0, gguf-q5_1, gguf-q4_m, gguf-q4_1 or gguf-q4_0"
    add("folder", help="output_dir of a run, or a checkpoint in it")
    add("--format", required=True, help=text)
    add("--output", help="folder to write, which must not exist (default: FOLDER-FORMAT)")
    text = "auto, float32, bfloat16 or float16: weights that are not quantised (default: auto, as they are saved; "
    text += "with merged bfloat16, or float16 if they are saved so)"
    add("--dtype", default="auto", help=text)
    add("--max_shard_size", default="5GB", help="largest file of weights (default: 5GB); a GGUF file is not split")
    text = "texts to measure the loss on, as `train` takes them (default: those that the run held out)"
    add("--eval_dataset", help=text)
    add("--eval_split", help="split of --eval_dataset (default: as the run, else train)")
    add("--text_column", help="column of --eval_dataset with the texts (default: as the run, else text)")
    add("--messages_column", help="column with conversations (default: as the run, else messages)")
    add("--sequence_length", type=int, help="tokens per sequence (default: as the run, else 512)")
    add("--eval_sequences", type=int, default=256, help="at most so many sequences are evaluated (default: 256)")
    add("--json", action="store_true", help="print JSON instead of a table")
    parser.set_defaults(run=run)
    return parser


def run(args: argparse.Namespace) -> int:
    """Export and print the table. Returns 0; 2 after a message if the run, the format or the data cannot be used."""
    from hf_hybrid.cli import screen

    with screen.quiet_imports():
        from hf_hybrid.export import exporter, source

    folder = Path(args.folder)
    output = Path(args.output or f"{folder.resolve()}-{args.format}")
    try:
        with screen.quiet_dependencies():
            exporter.check_output(output)
            source.check_source(folder)
            source.read_config(folder)
            batches = held_out_batches(args, folder)
            options: dict[str, Any] = {"dtype": args.dtype, "max_shard_size": args.max_shard_size}
            result = exporter.export(folder, output, args.format, batches=batches, **options)
    except (ValueError, ImportError, OSError) as error:
        sys.stderr.write(f"hf-hybrid export: error: {error}\n")
        return 2
    width = screen.terminal_width()
    sys.stdout.write(json.dumps(result, indent=1) + "\n" if args.json else exporter.as_text(result, width))
    whole = output.resolve()
    written = whole.relative_to(Path.cwd()) if whole.is_relative_to(Path.cwd()) else whole
    sys.stderr.write(f"Written: {written}\n")
    if (output / "chat_template.jinja").is_file():
        sys.stderr.write(f"To try it: hf-hybrid chat {screen.folder_name(written)}\n")
    return 0


def held_out_batches(args: argparse.Namespace, folder: Path) -> list[dict[str, Any]] | None:
    """
    Batches of the held-out text: of `--eval_dataset`, or of what the run noted; `None` if there is neither.

    Raises:
        OptionError: If the data cannot be read.
    """
    from hf_hybrid.cli.fine_tune import DataNote, held_out_rows
    from hf_hybrid.cli.options import DataOptions, OptionError
    from hf_hybrid.cli.run import DATA_NAME, evaluation_data
    from hf_hybrid.cli.tasks import FineTuningData
    from hf_hybrid.export.source import read_tokenizer

    if args.eval_sequences < 1:
        raise OptionError(f"`--eval_sequences {args.eval_sequences}` must be 1 or more.")
    noted = next((path for path in (folder / DATA_NAME, folder.resolve().parent / DATA_NAME) if path.is_file()), None)
    values = {} if noted is None else _read_note(noted)
    of_texts = any(getattr(args, name) is not None for name in ("text_column", "messages_column", "sequence_length"))
    if "command" in values and of_texts:  # other texts than the run's, cut into sequences
        values, noted = {}, None
    if "command" in values:
        of_note = {field.name for field in dataclasses.fields(DataNote)}
        note = DataNote(**{name: values.pop(name) for name in of_note})
        data = FineTuningData(**values)
        if args.eval_dataset is not None:
            data = dataclasses.replace(data, eval_dataset=[args.eval_dataset], eval_split=None)
        if args.eval_split is not None:
            data = dataclasses.replace(data, eval_split=args.eval_split)
        tokenizer = read_tokenizer(folder)
        rows = [] if tokenizer is None else held_out_rows(note, data, tokenizer, args.eval_sequences)
        return [_padded(rows[start : start + BATCH]) for start in range(0, len(rows), BATCH)] or None
    seed = values.pop("seed", 0)
    own = ("eval_dataset", "eval_split", "text_column", "messages_column", "sequence_length")
    options = DataOptions(**values | {name: getattr(args, name) for name in own if getattr(args, name) is not None})
    if options.eval_dataset is None and (noted is None or not options.eval_share):
        return None
    tokenizer = read_tokenizer(folder)
    if tokenizer is None:
        raise OptionError(f"`{folder}` has no tokenizer, which the texts need. Save it there.")
    rows = evaluation_data(options, tokenizer, seed)
    rows = rows.select(range(min(args.eval_sequences, len(rows)))).with_format("torch")
    return [rows[start : start + BATCH] for start in range(0, len(rows), BATCH)]


def _padded(rows: list[dict[str, list[int]]]) -> dict[str, Any]:
    """Rows as a batch, padded at their ends, of [rows, tokens of the longest]."""
    import torch

    from hf_hybrid.rows.tree import IGNORED

    longest = max(len(row["input_ids"]) for row in rows)
    filled = {"input_ids": 0, "labels": IGNORED}
    batch = {
        name: torch.tensor([row[name] + [fill] * (longest - len(row[name])) for row in rows])
        for name, fill in filled.items()
    }
    lengths = torch.tensor([[len(row["input_ids"])] for row in rows])
    return {**batch, "attention_mask": (torch.arange(longest) < lengths).long()}


def _read_note(path: Path) -> dict[str, Any]:
    """
    Return the options of the data that a run noted, and its `seed`.

    Raises:
        OptionError: If the file is damaged, or holds something else.
    """
    from hf_hybrid.cli.fine_tune import DataNote
    from hf_hybrid.cli.options import DataOptions, OptionError
    from hf_hybrid.cli.tasks import FINE_TUNING, FineTuningData

    found = read_json(path, [])
    tuned = "command" in as_dict(found)
    of_note = get_type_hints(DataNote) if tuned else {"seed": int}
    hints = {**get_type_hints(FineTuningData if tuned else DataOptions), **of_note}
    wrong = "it is damaged" if not isinstance(found, dict) else None
    for name, value in as_dict(found).items():
        if name not in hints:
            wrong = f"`{name}` is no option of the data"
        elif not _is_of(hints[name], value) or (name == "command" and value not in FINE_TUNING):
            wrong = f"`{name}` cannot be `{value!r:.80}`"
    if tuned and (missing := of_note.keys() - as_dict(found).keys()):
        wrong = f"it lacks `{min(missing)}`"
    if wrong is not None:
        raise OptionError(
            f"`{path}` does not say what the run was evaluated on: {wrong}. Delete the file, and name texts with "
            "`--eval_dataset` if a loss is wanted."
        )
    return as_dict(found)


def _is_of(hint: Any, value: Any) -> bool:
    """Whether a value of JSON is of a type: plain, a list, or one of several."""
    if parts := [] if get_origin(hint) is list else get_args(hint):
        return any(_is_of(part, value) for part in parts)
    if get_origin(hint) is list:
        return isinstance(value, list) and all(_is_of(get_args(hint)[0], entry) for entry in value)
    if isinstance(value, bool):
        return hint is bool
    return isinstance(value, (int, float) if hint is float else hint)
