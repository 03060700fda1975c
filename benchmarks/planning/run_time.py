"""
How far the time that a run says before it begins is from the time it takes.

    HYBRID_BENCHMARK_SMOLLM2=FOLDER python -m benchmarks.planning.run_time        # half an hour on one core

Each command trains SmolLM2-135M twice, the second time at another rate and with other rows first (seed). The first run
says after three steps how long it takes, the second before its first step, from what the first kept
(hf_hybrid/cli/step_times.py).
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.results import Results, command_line, provenance
from benchmarks.texts import language_reference

RESULTS = Path(__file__).with_name("results.jsonl")
STEPS = 80
RUNS = {
    "train, streamed": "train --memory stream --sequence_length 64 --per_device_train_batch_size 1",
    "sft, LoRA, rows of all lengths": "sft --peft lora --max_length 256 --per_device_train_batch_size 2",
    "sft, LoRA, streamed int8, with evaluations": (
        "sft --peft lora --memory stream --base_precision int8 --max_length 128 --per_device_train_batch_size 2 "
        "--eval_share 0.02 --eval_strategy steps --eval_steps 20"
    ),
}
TIME = re.compile(r"^  time +(?:\S+) for [\d,]+ steps,\s+([\d.,]+)\s+s\s+each\s+\((\w+)", re.MULTILINE)


def write_data(folder: Path) -> dict[str, Path]:
    """Python's language reference: its paragraphs as text, and its sections as questions with answers."""
    sections = language_reference()
    text, chats = folder / "text.txt", folder / "chats.jsonl"
    text.write_text("\n\n".join(sections))
    with chats.open("w") as file:
        for section in sections:
            head, _, rest = section.strip().partition("\n")
            words = {"user": f"Explain {head}.", "assistant": rest[:2000] or head}
            messages = [{"role": role, "content": content} for role, content in words.items()]
            file.write(json.dumps({"messages": messages}) + "\n")
    return {"train": text, "sft": chats}


def ran(words: list[str], folder: Path, model: str, data: Path, **options: str) -> tuple[str, float]:
    """Train. Returns what the terminal says, and the seconds of a step behind the first, as they were kept."""
    command, *more = words
    given = [f"--{name}={value}" for name, value in options.items()]
    paths = ["--model", model, "--dataset", str(data), "--output_dir", str(folder / "out"), "--save_strategy=no"]
    said = subprocess.run(
        [sys.executable, "-m", "hf_hybrid", command, *paths, *more, f"--max_steps={STEPS}", "--cpu", *given],
        env={**os.environ, "HF_HOME": str(folder), "COLUMNS": "200"}, text=True, check=True, stdout=subprocess.PIPE,
    ).stdout  # fmt: skip
    (kept,) = json.loads((folder / "hf_hybrid" / "step_times.json").read_text()).values()
    return said, kept["seconds"]


def main() -> None:
    parser = command_line(__doc__ or "", RESULTS.parent)
    parser.add_argument("--runs", nargs="+", choices=RUNS, default=list(RUNS))
    args = parser.parse_args()
    model = os.environ["HYBRID_BENCHMARK_SMOLLM2"]
    results = Results(args.results, "run_time", ("run", "steps"))
    for name in args.runs:
        with tempfile.TemporaryDirectory() as made:
            folder, words = Path(made), RUNS[name].split()
            data = write_data(folder)[words[0]]
            first, kept = ran(words, folder, model, data, learning_rate="1e-4")
            second, took = ran(words, folder, model, data, learning_rate="3e-4", seed="7")
        (after_three, _), (before, source) = TIME.search(first).groups(), TIME.search(second).groups()
        assert source == "the", second
        row = {
            "run": name, "steps": STEPS, "words": RUNS[name], "said_before": float(before), "took": took,
            "error": float(before) / took - 1, "first_said_after_three": float(after_three), "first_took": kept,
            "error_after_three": float(after_three) / kept - 1, **provenance(1),
        }  # fmt: skip
        print(json.dumps(results.add(row)), flush=True)


if __name__ == "__main__":
    main()
