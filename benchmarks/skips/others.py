"""
CPU seconds of a step of TRL's trainers with losses of their own, plain and with the mixin, on SmolLM2-135M.

    python -m benchmarks.speedup.pretrained         # once: fetches the model
    python -m benchmarks.skips.others               # twenty minutes; one thread

A step has four pairs of Python's language reference (KTO: four chosen and four rejected completions) with prompts of
64, 96, 160 and 192 tokens; chosen completions have half of that, rejected ones a quarter. fp32, all weights, SGD, all
other options TRL's. Rows have the seconds of each step but the first, which compares.
"""

from __future__ import annotations

import statistics
import tempfile
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    set_seed,
)
from trl import KTOConfig, KTOTrainer, RewardConfig, RewardTrainer
from trl.experimental.orpo import ORPOConfig, ORPOTrainer

from benchmarks.results import Results, command_line, provenance
from benchmarks.skips.prompts import passages
from benchmarks.speedup.pretrained import FOLDER
from benchmarks.timing import StepClock
from hf_hybrid.trainer import HybridTrainerMixin

LENGTHS = [64, 96, 160, 192]
TRAINERS: dict[str, tuple[type, type, type]] = {
    "reward": (RewardTrainer, RewardConfig, AutoModelForSequenceClassification),
    "orpo": (ORPOTrainer, ORPOConfig, AutoModelForCausalLM),
    "kto": (KTOTrainer, KTOConfig, AutoModelForCausalLM),
}


def rows_of(name: str, tokenizer: Any, count: int) -> list[dict]:
    rows = []
    for prompt, (chosen, rejected) in passages(tokenizer, 2, LENGTHS * count):
        texts = map(tokenizer.decode, (prompt, chosen, rejected[: len(rejected) // 2]))
        rows.append(dict(zip(("prompt", "chosen", "rejected"), texts, strict=True)))
    if name != "kto":
        return rows
    sides = ("chosen", "rejected")
    return [{"prompt": row["prompt"], "completion": row[s], "label": s == "chosen"} for row in rows for s in sides]


def train(name: str, hybrid: bool, steps: int) -> tuple[list[float], list[float], dict]:
    """Return the seconds of steps, their losses, and what was saved."""
    trainer_class, config_class, model_class = TRAINERS[name]
    set_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(FOLDER)
    more = {"num_labels": 1, "pad_token_id": tokenizer.pad_token_id} if name == "reward" else {}
    models = [model_class.from_pretrained(FOLDER, dtype=torch.float32, **more) for _ in range(1 + (name == "kto"))]
    watch, made = StepClock(), type("Hybrid", (HybridTrainerMixin, trainer_class), {}) if hybrid else trainer_class
    with tempfile.TemporaryDirectory() as folder:
        args = config_class(
            folder, max_steps=steps + 1, per_device_train_batch_size=8 if name == "kto" else 4, optim="sgd",
            learning_rate=1e-4, report_to="none", use_cpu=True, save_strategy="no", logging_steps=1, bf16=False,
            disable_tqdm=True, gradient_checkpointing=False, dataloader_pin_memory=False,
        )  # fmt: skip
        trainer = made(
            model=models[0],
            args=args,
            train_dataset=Dataset.from_list(rows_of(name, tokenizer, steps + 1)),
            processing_class=tokenizer,
            callbacks=[watch],
            **({"ref_model": models[1]} if name == "kto" else {}),
        )
        trainer.train()
    summary = trainer.hybrid_summary() if hybrid else {}
    counts = {key: summary[key] for key in ("tokens", "tokens_padding", "tokens_shared") if key in summary}
    return watch.steps, [line["loss"] for line in trainer.state.log_history if "loss" in line], counts


def main() -> None:
    parser = command_line(__doc__, Path(__file__).parent)
    parser.add_argument("--trainers", nargs="+", choices=TRAINERS, default=list(TRAINERS))
    parser.add_argument("--steps", type=int, default=3, help="Steps that are timed.")
    args = parser.parse_args()
    torch.set_num_threads(1)
    results = Results(args.results, "others", ("trainer",))
    for name in args.trainers:
        (trl, losses, _), (ours, losses_of_ours, counts) = (train(name, hybrid, args.steps) for hybrid in (False, True))
        row = {"seconds": {"trl": trl, "hybrid": ours}, "ratio": statistics.median(trl) / statistics.median(ours)}
        apart = max(abs(a - b) for a, b in zip(losses, losses_of_ours, strict=True))
        results.add({**provenance(1), "trainer": name, **row, "largest_difference_of_losses": apart, **counts})
        print(f"{name}: {row['ratio']:.2f}, {trl}, {ours}, losses {apart:.1e} apart, {counts}", flush=True)


if __name__ == "__main__":
    main()
