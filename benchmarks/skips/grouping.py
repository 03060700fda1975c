"""
Does it pay to keep rows that begin alike in one step? Then they are computed once, but steps see less variety.

    python -m benchmarks.speedup.pretrained      # once: fetches SmolLM2-135M
    python -m benchmarks.skips.grouping          # ten runs, 25 minutes
    python -m benchmarks.skips.grouping --report

SmolLM2-135M with LoRA (rank 16, all linear layers, AdamW) learns to say what a method does, from the docstring of its
class, the names of all methods and its source; the classes are those of the standard library. 40 steps of 4 rows under
bf16 autocast. In the arm `shuffled` the 160 rows are in any order, in `grouped` a step has four methods of one class.
Held out are the methods of classes in other modules. The learning rate is swept with seed 0; the best one of each arm
has three seeds. A seed draws the order of the rows and the adapters.
"""

from __future__ import annotations

import ast
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from rig.sft_rows import pad
from transformers import AutoModelForCausalLM, AutoTokenizer, set_seed

from benchmarks.results import Results, command_line, provenance
from benchmarks.speedup.pretrained import FOLDER
from benchmarks.texts import syntax_trees
from hf_hybrid import HybridConfig, HybridTrainer

RATES, SEEDS = (5e-4, 1e-3, 2e-3), (0, 1, 2)
GROUPS, SIBLINGS, LONGEST = 40, 4, 192
ARMS = ("shuffled", "grouped")


def families() -> tuple[list[list[dict]], list[list[dict]]]:
    """Return the methods of each class, as rows, to train on and held out: every fourth module is."""
    tokenizer = AutoTokenizer.from_pretrained(FOLDER)
    parts: tuple[list[list[dict]], list[list[dict]]] = ([], [])
    for place, (_, tree) in enumerate(syntax_trees()):
        for node in ast.walk(tree):
            if not (isinstance(node, ast.ClassDef) and (about := ast.get_docstring(node))):
                continue
            methods = [m for m in node.body if isinstance(m, ast.FunctionDef)]
            names = ", ".join(method.name for method in methods)
            common = f"class {node.name}:\n{about[:200]}\n\nMethods: {names}\n\n"
            rows = []
            for method in methods:
                if len(method.body) < 2 or not (text := ast.get_docstring(method)):
                    continue
                method.body = method.body[1:]
                ids = tokenizer(f"{common}{ast.unparse(method)}\n\nWhat it does:")["input_ids"]
                answer = tokenizer(f" {' '.join(text.split())[:300]}")["input_ids"] + [tokenizer.eos_token_id]
                if len(ids) + len(answer) <= LONGEST:
                    rows.append({"input_ids": ids + answer, "labels": [-100] * len(ids) + answer})
            if len(rows) >= SIBLINGS:
                parts[place % 4 == 3].append(rows[:SIBLINGS])
    for part in parts:
        random.Random(0).shuffle(part)
    return parts


def run(arm: str, rate: float, seed: int) -> dict[str, Any]:
    """Train once, and return the held-out loss and the seconds."""
    train, held_out = families()
    groups = train[:GROUPS]
    random.Random(seed).shuffle(groups)
    rows = [row for group in groups for row in group]
    if arm == "shuffled":
        random.Random(seed).shuffle(rows)
    set_seed(seed)
    model = get_peft_model(
        AutoModelForCausalLM.from_pretrained(FOLDER, dtype="float32"),
        LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM"),
    )
    with tempfile.TemporaryDirectory() as folder:
        config = HybridConfig(
            folder, num_train_epochs=1, per_device_train_batch_size=SIBLINGS, per_device_eval_batch_size=8, bf16=True,
            learning_rate=rate, warmup_steps=4, lr_scheduler_type="cosine", seed=seed, save_strategy="no",
            report_to="none", disable_tqdm=True, use_cpu=True, dataloader_pin_memory=False, logging_strategy="no",
            train_sampling_strategy="sequential", auto_lr="off", forecast=False,
        )  # fmt: skip
        test = Dataset.from_list([row for group in held_out for row in group])
        trainer = HybridTrainer(
            model, config, train_dataset=Dataset.from_list(rows), eval_dataset=test, data_collator=pad
        )
        began = time.process_time()
        trainer.train()
        seconds = time.process_time() - began
        loss = trainer.evaluate()["eval_loss"]
    summary = trainer.hybrid_summary()
    shared = summary["tokens_shared"] / summary["tokens"]
    return {"eval_loss": loss, "cpu_seconds": seconds, "steps": trainer.state.global_step, "shared": shared}


def report(results: Results) -> None:
    """Print a table."""
    print(
        "| rows of a step | learning rate | held-out loss by seed | mean | CPU seconds | shared |\n"
        "|---|---|---|---|---|---|"
    )
    for arm in ARMS:
        for rate in RATES:
            rows = [row for seed in SEEDS if (row := results.get(arm=arm, rate=rate, seed=seed)) is not None]
            if rows:
                losses, seconds = [row["eval_loss"] for row in rows], [row["cpu_seconds"] for row in rows]
                shown = ", ".join(f"{loss:.3f}" for loss in losses)
                print(
                    f"| {arm} | {rate:g} | {shown} | {statistics.mean(losses):.3f} | {statistics.median(seconds):.0f} "
                    f"| {statistics.mean(row['shared'] for row in rows):.0%} |"
                )


def main() -> None:
    parser = command_line(__doc__, Path(__file__).parent)
    parser.add_argument("--report", action="store_true", help="Print the table of what is there.")
    args = parser.parse_args()
    torch.set_num_threads(1)
    results = Results(args.results, "grouping", ("arm", "rate", "seed"))
    if args.report:
        return report(results)

    def measure(arm: str, rate: float, seed: int) -> float:
        row = results.get(arm=arm, rate=rate, seed=seed)
        if row is None:
            row = results.add({**provenance(1), "arm": arm, "rate": rate, "seed": seed, **run(arm, rate, seed)})
            print(arm, rate, seed, row["eval_loss"], round(row["cpu_seconds"]), f"{row['shared']:.0%}", flush=True)
        return row["eval_loss"]

    best = {arm: min(RATES, key=lambda rate: measure(arm, rate, SEEDS[0])) for arm in ARMS}  # noqa: B023
    for seed in SEEDS[1:]:
        for arm in ARMS:
            measure(arm, best[arm], seed)


if __name__ == "__main__":
    main()
