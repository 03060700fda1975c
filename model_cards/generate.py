"""
Write the cards of this folder anew, from short real runs on a pretrained base: SFT and GRPO with LoRA, and an export.

    python model_cards/generate.py SmolLM2-135M-Instruct       # a folder with the model

Each card names the command that made it. Beside it stands the record that it was made from, as JSON; `--render` writes
the cards again from the records, after a change of the template. The runs take about two minutes of one CPU core. They
are far too short to be of use to anybody but a reader of cards.

The cards here are of the copy of SmolLM2-135M-Instruct that `python -m benchmarks.speedup.pretrained` writes. Its
weights were de-quantised from 4 bits, so the cards name a local folder as the base, and not the model on the Hub.
"""

from __future__ import annotations

import argparse
import inspect
import json
import math
import os
import random
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent / "tests"), str(HERE.parent)]

from huggingface_hub import ModelCard  # noqa: E402
from rig.hub_server import card_errors  # noqa: E402

from hf_hybrid.cli import console  # noqa: E402
from hf_hybrid.cli.options import TRAINING, CommandLine  # noqa: E402
from hf_hybrid.export.exporter import export_card  # noqa: E402
from hf_hybrid.files import plain  # noqa: E402
from hf_hybrid.hub.card import render  # noqa: E402
from hf_hybrid.records.summary import HybridSummary  # noqa: E402

BASE = "SmolLM2-135M-Instruct"
COMMANDS = {
    "smollm2-sft-lora": f"sft --model {BASE} --dataset functions.jsonl --peft lora --max_steps 4 "
    "--per_device_train_batch_size 2 --use_cpu --output_dir smollm2-sft-lora",
    "smollm2-grpo-lora": f"grpo --model {BASE} --dataset sums.jsonl --reward numeric_answer --peft lora --max_steps 2 "
    "--learning_rate 1e-4 --per_device_train_batch_size 4 --num_generations 4 --max_completion_length 16 --use_cpu "
    "--output_dir smollm2-grpo-lora",
    "smollm2-sft-lora-merged": "export smollm2-sft-lora --format merged --measure",
}
"""Of each card, the words behind `hf-hybrid`; an export comes after its run."""


def data() -> dict[str, list[dict[str, Any]]]:
    """Rows of the data sets by file: what functions of Python do, by their docstrings, and sums."""
    functions = [
        (f"{module.__name__}.{name}", inspect.getdoc(function).split("\n\n")[0])
        for module in (math, random, statistics)
        for name, function in sorted(vars(module).items())
        if callable(function) and not name.startswith("_") and inspect.getdoc(function)
    ]
    chats = [
        {
            "messages": [
                {"role": "system", "content": "You explain Python functions in one sentence."},
                {"role": "user", "content": f"What does {name} do?"},
                {"role": "assistant", "content": " ".join(says.split())},
            ]
        }
        for name, says in functions
        if len(says) < 150
    ]
    sums = [
        {"question": f"What is {first} + {second}?", "answer": str(first + second)}
        for first in range(2, 10)
        for second in range(2, 10)
    ]
    return {"functions.jsonl": chats, "sums.jsonl": sums}


def record_of(words: list[str]) -> dict[str, Any]:
    """Run a command in the current folder, with its card; what the card was made from."""
    sys.argv = [str(Path(sys.executable).parent / "hf-hybrid"), *words]  # the card shows it
    if words[0] == "export":
        from hf_hybrid.cli.main import main

        if main(words):
            raise SystemExit(f"`hf-hybrid {' '.join(words)}` failed.")
        return json.loads(Path(f"{words[1]}-{words[3]}", "export.json").read_text(encoding="utf-8"))
    from hf_hybrid.cli.recipe import make_trainer

    command = TRAINING[words[0]]
    command.of("Config")  # imported before the run speaks
    with console.speaking():
        trainer = make_trainer(CommandLine(words[1:], command).options())
        trainer.train()
        trainer.save_model()
        if trainer.eval_dataset is not None:
            trainer.evaluate()
        given = {"tasks": "text-generation"}  # what `hf-hybrid` passes for a model and data that are not of the Hub
        facts = trainer.model_card_facts(**given)
        trainer.create_model_card(**given)
    return plain(facts)


def card_of(name: str, records: dict[str, dict[str, Any]]) -> str:
    """The card of a record; that of an export is made of the card of its run."""
    command, source, *_ = COMMANDS[name].split()
    if command == "export":
        return export_card(ModelCard(card_of(source, records)), name, records[name], True)
    facts = records[name]
    return render({**facts, "summary": HybridSummary(facts["summary"])})


def read_records() -> dict[str, dict[str, Any]]:
    """The records of this folder by the names of their cards."""
    return {name: json.loads((HERE / f"{name}.json").read_text(encoding="utf-8")) for name in COMMANDS}


def run_all(base: Path) -> dict[str, dict[str, Any]]:
    """The records of all cards, from new runs in a folder that is deleted."""
    before = os.getcwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            Path(BASE).symlink_to(base)
            for file, rows in data().items():
                Path(file).write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
            return {name: record_of(words.split()) for name, words in COMMANDS.items()}
        finally:
            os.chdir(before)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", type=Path, help="folder with the pretrained model")
    parser.add_argument("--render", action="store_true", help="write the cards again from the records, without runs")
    options = parser.parse_args()
    if options.render == (options.model is not None):
        parser.error("name the folder of a model, or --render")
    records = read_records() if options.render else run_all(options.model.resolve())
    for name, record in records.items():
        card = card_of(name, records)
        if errors := card_errors(card):
            raise SystemExit(f"The card of `{name}` is not one that the Hub takes: {'; '.join(errors)}")
        (HERE / f"{name}.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        (HERE / f"{name}.md").write_text(card, encoding="utf-8")


if __name__ == "__main__":
    main()
