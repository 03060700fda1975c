"""
`hf-hybrid grpo` by its defaults, with LoRA on SmolLM2-135M: does it learn to calculate?

    python -m benchmarks.speedup.pretrained                     # fetches SmolLM2, once
    python -m benchmarks.skips.by_command --seeds 0 1           # a quarter of an hour for each on an idle core

The rows are questions of a chat ("What is 17 + 4?") with `answer`, the reward is `numeric_answer`. Nothing is set but
the number of steps and the length of a completion, and that the command holds no questions out. Other 96 questions are
answered greedily before and after.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.results import Results, command_line, provenance
from benchmarks.skips.arithmetic import tasks
from benchmarks.speedup.pretrained import FOLDER
from hf_hybrid.trl.rewards import numeric_answer

STEPS, TOKENS, SHOWN = 120, 48, 10
"""Steps of a run, tokens of a completion, and steps between two lines of the terminal."""


def questions() -> tuple[list[dict], list[dict]]:
    """Rows to train on and held-out rows: those of `arithmetic`, as questions."""

    def question(row: dict) -> dict:
        task = row["prompt"].splitlines()[-1].removesuffix(" =")
        return {"prompt": [{"role": "user", "content": f"What is {task}?"}], "answer": str(row["result"])}

    train, held_out = tasks()
    return [question(row) for row in train], [question(row) for row in held_out]


def reward(model, tokenizer, rows: list[dict]) -> float:
    """The mean reward of greedy answers."""
    texts = [tokenizer.apply_chat_template(row["prompt"], tokenize=False, add_generation_prompt=True) for row in rows]
    answers: list[str] = []
    for begin in range(0, len(texts), 32):
        inputs = tokenizer(texts[begin : begin + 32], return_tensors="pt", padding=True, add_special_tokens=False)
        ids = model.generate(**inputs, max_new_tokens=TOKENS, do_sample=False)
        answers += tokenizer.batch_decode(ids[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    rewards = numeric_answer(completions=answers, answer=[row["answer"] for row in rows])
    return sum(rewards) / len(rewards)


def main() -> None:
    parser = command_line(__doc__, Path(__file__).parent)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0], help="Seeds; a run for each.")
    parser.add_argument("--folder", type=Path, default=Path("out/by_command"), help="For data and runs.")
    args = parser.parse_args()
    torch.set_num_threads(1)
    results = Results(args.results, "by_command", ("seed", "steps"))
    train, held_out = questions()
    args.folder.mkdir(parents=True, exist_ok=True)
    data = args.folder / "sums.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in train), encoding="utf-8")
    tokenizer = AutoTokenizer.from_pretrained(FOLDER, padding_side="left")
    base = AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32)
    before = reward(base, tokenizer, held_out)
    for seed in args.seeds:
        out = args.folder / f"seed{seed}"
        words = ["grpo", "--model", FOLDER, "--dataset", data, "--reward", "numeric_answer", "--peft", "lora"]
        words += ["--max_steps", STEPS, "--max_completion_length", TOKENS, "--seed", seed, "--output_dir", out]
        words += ["--eval_share", 0]
        command = [sys.executable, "-m", "hf_hybrid", *map(str, words), "--logging_steps", str(SHOWN)]
        shown = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        model = AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32)
        after = reward(PeftModel.from_pretrained(model, out).merge_and_unload(), tokenizer, held_out)
        row = {
            "seed": seed, "steps": STEPS, "rows": len(train), "held_out": len(held_out), "before": before,
            "after": after, "sampled": [float(value) for value in re.findall(r"step .* reward (\S+)", shown)],
            "rate": re.search(r"rate +(\S+)", shown)[1],
        }  # fmt: skip
        print(results.add({**provenance(1), **row}), flush=True)


if __name__ == "__main__":
    main()
