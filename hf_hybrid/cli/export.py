"""`hf-hybrid export`: a run as a merged or a low-bit model, with a table of what that costs."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import shlex
import sys
import textwrap
from pathlib import Path
from typing import Any

from hf_hybrid.arguments import check_range
from hf_hybrid.compat import trl_error
from hf_hybrid.records.readings import as_dict, read_json


def add_options(parser: argparse.ArgumentParser) -> None:
    """Describe the command and its options."""
    parser.description = (
        "Write the model of a run, or of one of its checkpoints, in 16 bits (`merged`) or in a low-bit format, "
        "with tokenizer, generation config and model card. Adapters are merged. Nothing is written over."
    )
    add = parser.add_argument
    text = "merged (16 bit), int8, nf4, bitnet, gguf-f16, gguf-q8_0, gguf-q5_1, gguf-q4_m, gguf-q4_1 or gguf-q4_0"
    add("folder", help="output_dir of a run, or a checkpoint in it")
    add("--format", required=True, help=text)
    add("--output", help="folder to write, which must not exist (default: FOLDER-FORMAT)")
    text = "auto, float32, bfloat16 or float16: weights that are not quantised (default: auto, as they are saved; "
    text += "with merged bfloat16, or float16 if they are saved so)"
    add("--dtype", default="auto", help=text)
    add("--max_shard_size", default="5GB", help="largest file of weights (default: 5GB); a GGUF file is not split")
    add("--measure", action="store_true", help="then measure the held-out loss of the original and of the export")
    add("--eval_dataset", help="data to measure on (default: what the run held out); asks for --measure")
    add("--eval_split", help="split of --eval_dataset (default: as the run, else train)")
    add("--columns", nargs="+", help="other names of columns of --eval_dataset, as NEW=OLD: text=body")
    add("--sequence_length", type=int, help="cut --eval_dataset into so many tokens (default: as the run, else 512)")
    add("--eval_sequences", type=int, default=256, help="at most so many sequences are evaluated (default: 256)")
    add("--push", metavar="NAME", help="push the export to this repository on the Hub")


def run(args: argparse.Namespace) -> int:
    """Export, say so, and measure if asked. Returns 0."""
    from hf_hybrid.cli import console

    with console.quiet_imports():
        from tqdm import tqdm

        from hf_hybrid.cli.loading import make_repository
        from hf_hybrid.export import exporter, source
        from hf_hybrid.export.modelfile import MODELFILE_NAME, NOT_WRITTEN

    folder = Path(args.folder)
    output = Path(args.output or f"{folder.resolve()}-{args.format}")
    absolute = output.resolve()
    shown = absolute.relative_to(Path.cwd()) if absolute.is_relative_to(Path.cwd()) else absolute
    batches: list[dict[str, Any]] = []

    def say_written() -> None:
        console.write_error(f"Written: {shown}\n")
        if batches:
            console.write_error("Measuring the loss of the original and of the export. Ctrl-C is safe now.\n")

    def bar(name: str, batches: list) -> Any:
        return tqdm(batches, name, leave=False, disable=not sys.stderr.isatty(), ncols=console.terminal_width())

    try:
        with console.quiet_dependencies():
            exporter.check_output(output)
            if args.push:
                make_repository(args.push, f"--push {args.push}", str(shown), {})
            source.check_source(folder)
            source.read_config(folder)
            if args.measure or args.eval_dataset is not None:
                batches = held_out_batches(args, folder)
            console.write_error(f"Writing {args.format} ...\n")
            result = exporter.export(
                folder, output, args.format, batches=batches, dtype=args.dtype, max_shard_size=args.max_shard_size,
                when_written=say_written, progress=bar,
            )  # fmt: skip
    except KeyboardInterrupt:
        if not (output / exporter.RESULT_NAME).is_file():
            raise
        console.write_error(f"\nStopped: `{shown}` is whole, and its loss was not measured.\n")
        return 0
    console.write_out(exporter.as_text(result, console.terminal_width()))
    if args.push:
        from huggingface_hub import upload_folder

        console.write_error(f"Pushed: {upload_folder(repo_id=args.push, folder_path=output)}\n")
    if (output / "chat_template.jinja").is_file():
        console.write_error(f"To try it: hf-hybrid chat {shlex.quote(str(shown))}\n")
    if (output / MODELFILE_NAME).is_file():
        console.write_error(
            "To serve it:\n" + "".join(f"  {line}\n" for line in exporter.serving(str(shown), folder.name))
        )
        if NOT_WRITTEN in (output / MODELFILE_NAME).read_text(encoding="utf-8"):
            console.write_error(f"{textwrap.fill(NOT_WRITTEN, console.terminal_width())}\n")
    return 0


def held_out_batches(args: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """Batches of held-out rows, of `--eval_dataset` or of what the run noted, or an `OptionError` that says why not."""
    import torch

    from hf_hybrid.cli.data import NOTE_NAME, Reader
    from hf_hybrid.cli.options import OptionError, TextDataOptions
    from hf_hybrid.export.source import read_tokenizer

    check_range("--eval_sequences", args.eval_sequences, {"at_least": 1})
    path = next((path for path in (folder / NOTE_NAME, folder.resolve().parent / NOTE_NAME) if path.is_file()), None)
    reader = None if path is None else read_note(path)
    if reader is None or reader.command != "train" and args.sequence_length is not None:
        reader = Reader("train", TextDataOptions(eval_share=0), 0)
    options = {name: getattr(args, name) for name in ("eval_split", "columns", "sequence_length")}
    options = {name: value for name, value in options.items() if value is not None}
    if args.eval_dataset is not None:
        options |= {"eval_dataset": [args.eval_dataset], "eval_share": None}
        options.setdefault("eval_split", None)
    reader = dataclasses.replace(reader, data=dataclasses.replace(reader.data, **options))
    # No answers, or not all are good ones.
    if reader.rows in ("grpo", "kto") or reader.command == "reward" or not reader.evaluates:
        raise OptionError("`--measure`: the run held out no texts with answers. Name some with `--eval_dataset`.")
    tokenizer = read_tokenizer(folder)
    if tokenizer is None:
        raise OptionError(f"`{folder}` has no tokenizer, which the texts need. Save it there.")
    rows = held_out_rows(reader, tokenizer, args.eval_sequences)
    # Row by row, so that nothing is padded.
    return [{name: torch.tensor([row[name]]) for name in ("input_ids", "labels")} for row in rows]


def held_out_rows(reader: Any, tokenizer: Any, most: int) -> list[dict[str, list[int]]]:
    """Return at most so many rows that a run did not train on, tokenised; of preference pairs the chosen side."""
    rows = list(itertools.islice(reader.eval_set(tokenizer), most))
    if reader.rows == "dpo":
        rows = _chosen(rows, reader, tokenizer)
    length = reader.max_length  # or `None`
    kept = slice(-length, None) if length and reader.keep_end else slice(length)
    cut = [{name: row[name][kept] for name in ("input_ids", "labels")} for row in rows]
    return [row for row in cut if any(label >= 0 for label in row["labels"][1:])]


def _chosen(pairs: list[dict[str, Any]], reader: Any, tokenizer: Any) -> list[dict[str, Any]]:
    """The chosen sides of preference pairs as prompts with completions, in tokens."""
    from datasets import Dataset

    try:
        from trl.data_utils import maybe_extract_prompt
    except ImportError as error:
        raise trl_error(error) from error
    from hf_hybrid.cli.data import Source
    from hf_hybrid.cli.formats import recognise
    from hf_hybrid.cli.tokens import Answers

    sides = [{"prompt": pair["prompt"], "completion": pair["chosen"]} for pair in map(maybe_extract_prompt, pairs)]
    chosen = recognise("sft", list(sides[0]), sides[0])
    source = Source("The chosen answers", chosen, list(sides[0]), Dataset.from_list(sides))
    return list(Answers(tokenizer, True, True).tokenise(source))


def read_note(path: Path) -> Any:
    """Return the `Reader` of a run, or raise an `OptionError` if the file is damaged or of another version."""
    from hf_hybrid.cli.data import Reader
    from hf_hybrid.cli.options import TRAINING, OptionError

    values = as_dict(read_json(path, []))
    try:
        options = TRAINING[values["command"]].data
        data = {known.name: values.pop(known.name) for known in dataclasses.fields(options) if known.name in values}
        return Reader(data=options(**data), **values)
    except (KeyError, TypeError) as error:
        raise OptionError(
            f"`{path}` does not say what the run was evaluated on: it is damaged ({error}). Delete the file, and name "
            "texts with `--eval_dataset` if a loss is wanted."
        ) from None
