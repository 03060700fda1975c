"""
Would drafts make GRPO's completions faster? Completions of real runs are drawn again, by a device that is free.

    python -m benchmarks.speedup.pretrained             # fetches SmolLM2, once
    python -m benchmarks.skips.drafts --tasks sums code     # trains, writes out/drafts, and counts; an hour
    python -m benchmarks.skips.drafts --tasks sums code --replay        # counts again

A draft is what followed the same tokens before: in the other completions of the group, as far as they are drawn, and in
all earlier completions of the same prompt. It has at most eight tokens. If the model's own draws agree with the first
`n` of them, one pass gives `n + 1` tokens, and the distribution is kept. A batch needs as many passes as its slowest
row. A pass over nine tokens of each row is taken to cost as much as one over one token.

SmolLM2-135M with LoRA trains on 24 prompts with 8 completions each, 4 prompts a step: `sums` are questions of a chat
("What is 17 + 4?"), four epochs, 48 tokens; `code` asks for a small Python function, and the reward is whether it
compiles, two epochs, 96 tokens.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer, set_seed

from benchmarks.results import Results, command_line, provenance
from benchmarks.skips.by_command import questions
from benchmarks.speedup.pretrained import FOLDER
from hf_hybrid import HybridGRPOConfig, HybridGRPOTrainer
from hf_hybrid.trl.rewards import numeric_answer

FUNCTIONS = (
    "adds two numbers", "reverses a string", "returns the largest number of a list", "counts the vowels of a string",
    "tests if a number is even", "computes a factorial", "joins words with a comma", "removes duplicates of a list",
    "returns the last element of a list", "squares every number of a list", "tests if a word is a palindrome",
    "converts Celsius to Fahrenheit", "sums the digits of a number", "returns the middle of a list",
    "repeats a string n times", "sorts a list in descending order", "counts words of a text",
    "returns the keys of a dictionary", "tests if a year is a leap year", "finds the shortest word",
    "merges two dictionaries", "multiplies all numbers of a list", "returns the first n primes",
    "capitalises every word",
)  # fmt: skip
DRAFT, MATCH = 8, 8
"""Most tokens of a draft, and of what it follows."""

Generation = tuple[list[tuple[int, ...]], list[list[int]]]
"""The prompts of a generation batch, one for each row, and the completions."""


def compiles(completions, **_) -> list[float]:
    """1 for code with a function that returns, 0.3 for other code, 0 for what does not compile."""
    rewards = []
    for ((message),) in completions:
        code = message["content"].split("```python")[-1].split("```")[0]
        try:
            compile(code, "completion", "exec")
        except (SyntaxError, ValueError):
            rewards.append(0.0)
        else:
            rewards.append(1.0 if "def " in code and "return" in code else 0.3)
    return rewards


def rows_of(task: str) -> list[dict]:
    if task == "sums":
        return questions()[0][:24]
    asked = (f"Write a Python function that {what}. Answer with code only." for what in FUNCTIONS)
    return [{"prompt": [{"role": "user", "content": text}]} for text in asked]


def sample(task: str, folder: Path) -> None:
    """Train on a task, and write each generation batch."""
    set_seed(0)
    tokens, epochs, reward = {"sums": (48, 4, numeric_answer), "code": (96, 2, compiles)}[task]
    args = HybridGRPOConfig(
        str(folder / task), num_train_epochs=epochs, num_generations=8, per_device_train_batch_size=32,
        gradient_accumulation_steps=1, max_completion_length=tokens, bf16=False, use_cpu=True, report_to="none",
        save_strategy="no", learning_rate=3e-4, disable_tqdm=True,
    )  # fmt: skip
    trainer = HybridGRPOTrainer(
        AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32),
        reward,
        args,
        train_dataset=Dataset.from_list(rows_of(task)),
        processing_class=AutoTokenizer.from_pretrained(FOLDER),
        peft_config=LoraConfig(r=16, lora_alpha=32, target_modules="all-linear"),
    )
    generate = trainer._generate_single_turn
    with (folder / f"{task}.jsonl").open("w") as file:

        def noted(prompts, *args, **kwargs):
            found = generate(prompts, *args, **kwargs)
            file.write(json.dumps({"prompts": [list(prompt) for prompt in prompts], "completions": found[0]}) + "\n")
            file.flush()
            return found

        trainer._generate_single_turn = noted
        trainer.train()


def draft(tokens: Sequence[int], sources: Sequence[list[int]]) -> list[int]:
    """Return what followed the longest end of `tokens` in one of the sources, the last time that it stood there."""
    for length in range(min(MATCH, len(tokens)), 0, -1):
        end = tokens[-length:]
        for source in sources:
            for place in range(len(source) - length - 1, -1, -1):
                if source[place : place + length] == end:
                    return source[place + length : place + length + DRAFT]
    return []


def passes(generation: Generation, earlier: dict[tuple[int, ...], list[list[int]]]) -> tuple[int, list[int]]:
    """Return the passes of a batch, and those of each row."""
    prompts, completions = generation
    starts = [list(prompt[-4:]) for prompt in prompts]
    done, of_rows, of_batch = [1] * len(prompts), [0] * len(prompts), 0  # the first token comes with the prompt
    while left := [row for row, completion in enumerate(completions) if done[row] < len(completion)]:
        of_batch, before = of_batch + 1, [*done]
        for row in left:
            of_rows[row] += 1
            group = [other for other in range(len(prompts)) if prompts[other] == prompts[row] and other != row]
            sources = [starts[other] + completions[other][: before[other]] for other in group]
            sources += [starts[row] + completion for completion in reversed(earlier[prompts[row]])]
            drawn = completions[row][done[row] :]
            proposed = draft(starts[row] + completions[row][: done[row]], sources)
            agree = next((n for n, (ours, real) in enumerate(zip(proposed, drawn)) if ours != real), None)
            done[row] += 1 + (min(len(proposed), len(drawn)) if agree is None else agree)
    return of_batch, of_rows


def epochs_of(path: Path) -> Iterator[list[Generation]]:
    """Yield the generation batches of each epoch: 24 prompts, four in each."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    batches = [([tuple(prompt) for prompt in line["prompts"]], line["completions"]) for line in lines]
    yield from (batches[begin : begin + 6] for begin in range(0, len(batches), 6))


def main() -> None:
    parser = command_line(__doc__, Path(__file__).parent)
    parser.add_argument("--tasks", nargs="+", choices=("sums", "code"), default=["sums", "code"])
    parser.add_argument("--folder", type=Path, default=Path("out/drafts"), help="For completions.")
    parser.add_argument("--replay", action="store_true", help="Read completions, do not train.")
    args = parser.parse_args()
    torch.set_num_threads(1)
    args.folder.mkdir(parents=True, exist_ok=True)
    results = Results(args.results, "drafts", ("task", "epoch"))
    print("| task | epoch | passes without drafts, over those with | tokens of a row's pass |\n|---|---|---|---|")
    for task in args.tasks:
        if not args.replay:
            sample(task, args.folder)
        earlier: dict[tuple[int, ...], list[list[int]]] = defaultdict(list)
        for epoch, batches in enumerate(epochs_of(args.folder / f"{task}.jsonl"), 1):
            plain = of_batches = tokens = of_all_rows = 0
            for prompts, completions in batches:
                of_batch, of_rows = passes((prompts, completions), earlier)
                plain += max(map(len, completions)) - 1
                tokens += sum(map(len, completions)) - len(completions)
                of_batches, of_all_rows = of_batches + of_batch, of_all_rows + sum(of_rows)
                for prompt, completion in zip(prompts, completions):
                    earlier[prompt].append(completion)
            row = {"ratio": plain / of_batches, "tokens_per_pass": tokens / of_all_rows}
            results.add({**provenance(1), "task": task, "epoch": epoch, **row})
            print(f"| {task} | {epoch} | {row['ratio']:.2f} | {row['tokens_per_pass']:.2f} |")


if __name__ == "__main__":
    main()
