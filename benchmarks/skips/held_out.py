"""
What share of the CPU seconds of a run by rewards the prompts take that `hf-hybrid grpo` holds out. Minutes; one thread.

    python -m benchmarks.skips.held_out

The Llama of 3.2M parameters of `grpo.py`, 200 prompts, completions of 48 tokens, all other options but the batch
at their defaults: a prompt has 8 completions. 32 prompts are completed before the training and after it.
"""

from __future__ import annotations

import contextlib
import io
import json
import tempfile
import time
from pathlib import Path

import torch
from transformers import Trainer

from benchmarks.results import Results, command_line, provenance
from benchmarks.skips.grpo import prompts, trainer_of
from benchmarks.timing import Stopwatch
from hf_hybrid.cli.main import main as command

RUNS = ((25, 8), (100, 8), (25, 64))
"""Steps of a run, and completions of a step."""
REWARD = "def reward(completions, **_):\n    return [sum(map(ord, text)) % 7 / 7 for text in completions]\n"


def seconds(steps: int, rows: int) -> tuple[float, float]:
    """Return the CPU seconds of a run from the beginning of its training, and those of its evaluations."""
    watch, evaluate, begun = Stopwatch(), Trainer.evaluate, []
    Trainer.evaluate = watch.around(evaluate)
    train = Trainer.train
    Trainer.train = lambda self, *args, **kwargs: begun.append(time.process_time()) or train(self, *args, **kwargs)
    try:
        with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
            trainer = trainer_of("hybrid", 0.0, 1, 4, folder)
            trainer.model.save_pretrained(folder)
            trainer.processing_class.save_pretrained(folder)
            texts = prompts(0.0)["prompt"]
            (Path(folder) / "rows.jsonl").write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
            (Path(folder) / "mine.py").write_text(REWARD)
            words = ["--model", folder, "--dataset", f"{folder}/rows.jsonl", "--reward", f"{folder}/mine.py:reward"]
            words += ["--max_steps", steps, "--per_device_train_batch_size", rows, "--max_completion_length", 48]
            words += ["--use_cpu", "--report_to", "none", "--output_dir", f"{folder}/out"]
            assert command(["grpo", *map(str, words)]) == 0
            return time.process_time() - begun[0], watch.seconds
    finally:
        Trainer.evaluate, Trainer.train = evaluate, train


def main() -> None:
    parser = command_line(__doc__, Path(__file__).parent)
    args = parser.parse_args()
    torch.set_num_threads(1)
    results = Results(args.results, "held_out", ("steps", "rows"))
    for steps, rows in RUNS:
        run, held_out = seconds(steps, rows)
        row = {"steps": steps, "rows": rows, "seconds": run, "held_out": held_out, "share": held_out / run}
        print(results.add({**provenance(1), **row}), flush=True)


if __name__ == "__main__":
    main()
