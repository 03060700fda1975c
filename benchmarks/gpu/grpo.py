"""
Seconds of whole GRPO rounds by part: TRL's trainer and HybridGRPOTrainer.

A round is 8 prompts of 256 tokens with 8 completions each, LoRA of rank 16 on all linear layers, 4 micro-batches. Half
of the prompts are easy: their completions earn the same reward, so they have no advantage. The weights are random; the
ids that end a completion are as many as give a mean length of `--mean` tokens, or `--tokens` where that comes first.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import time
from typing import Any

import torch
from datasets import Dataset
from transformers import TrainerCallback, set_seed
from trl import GRPOConfig, GRPOTrainer

from benchmarks.gpu.models import ADAPTERS, COMMON, DEVICE, SHAPES, build, peak_gib, synchronize, tokenizer
from benchmarks.gpu.sft import saved
from hf_hybrid import HybridGRPOConfig, HybridGRPOTrainer

PROMPTS, COMPLETIONS, MICRO_BATCHES = 8, 8, 4
EASY = 0.5
ARMS = {"trl": (GRPOTrainer, GRPOConfig), "hybrid": (HybridGRPOTrainer, HybridGRPOConfig)}
COUNTS = (
    "rows", "rows_skipped", "rows_decoded_saved", "prompt_tokens_shared", "tokens_shared",
    "every_row_because", "plain_rollouts_because", "plain_rows_because",
)  # fmt: skip


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--length", type=int, default=256, help="Tokens of a prompt.")
    parser.add_argument("--tokens", type=int, default=128, help="Most tokens of a completion.")
    parser.add_argument("--mean", type=float, default=150.0, help="Mean length of a completion that is not cut.")


def cases(args: argparse.Namespace) -> list[dict[str, Any]]:
    return [{"shape": args.shape, "kind": f"{args.length} + {args.tokens}"}]


class Parts(TrainerCallback):
    """Wall seconds of generation and update, after the first round. The device is waited for around each."""

    def __init__(self, trainer: GRPOTrainer):
        self.seconds, self.lengths, self._inner = {"generation": 0.0, "update": 0.0}, [], 0.0
        self._around(trainer, "_generate_single_turn", "generation")
        self._around(trainer, "training_step", "update")

    def _around(self, trainer: GRPOTrainer, method: str, part: str) -> None:
        """Time a method of the trainer. Generation runs inside of `training_step`, and is subtracted there."""
        call = getattr(trainer, method)

        def timed(*args, **kwargs):
            synchronize()
            begin, inner = time.perf_counter(), self.seconds["generation"]
            result = call(*args, **kwargs)
            synchronize()
            self.seconds[part] += time.perf_counter() - begin - (self.seconds["generation"] - inner)
            if part == "generation":
                self.lengths += [len(completion) for completion in result[0]]
            return result

        setattr(trainer, method, timed)

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 1:
            self.seconds.update(generation=0.0, update=0.0)
            if DEVICE == "cuda":
                torch.cuda.reset_peak_memory_stats()


def reward(completions, easy, **columns) -> list[float]:
    """1 for the completions of an easy prompt, and the parity of the length for others."""
    return [1.0 if is_easy else float(len(text) % 2) for text, is_easy in zip(completions, easy)]


def run(case: dict[str, Any], arm: str, args: argparse.Namespace) -> dict[str, Any]:
    """Train one arm. Returns what the row of the results says, in seconds per round."""
    trainer_class, config_class = ARMS[arm]
    set_seed(0)
    draw, vocabulary = random.Random(0), SHAPES[args.shape]["vocab_size"]
    model = build(args.shape, lora=False)
    ends = max(1, int(vocabulary / args.mean))
    model.generation_config.eos_token_id = list(range(1, 1 + ends))
    rounds = PROMPTS * (args.steps + 1)
    prompts = [" ".join(f"w{draw.randrange(2 + ends, vocabulary)}" for _ in range(args.length)) for _ in range(rounds)]
    rows = {"prompt": prompts, "easy": [number % 10 < 10 * EASY for number in range(rounds)]}
    with tempfile.TemporaryDirectory() as folder:
        config = config_class(
            folder,
            max_steps=args.steps + 1,
            num_generations=COMPLETIONS,
            per_device_train_batch_size=PROMPTS * COMPLETIONS // MICRO_BATCHES,
            gradient_accumulation_steps=MICRO_BATCHES,
            max_completion_length=args.tokens,
            learning_rate=1e-6,
            shuffle_dataset=False,
            gradient_checkpointing=False,
            **COMMON,
        )
        trainer = trainer_class(
            model,
            reward,
            config,
            train_dataset=Dataset.from_dict(rows),
            processing_class=tokenizer(args.shape),
            peft_config=ADAPTERS,
        )
        parts = Parts(trainer)
        trainer.add_callback(parts)
        trainer.train()
    seconds = {part: value / args.steps for part, value in parts.seconds.items()}
    return {
        "seconds": sum(seconds.values()),
        **{f"{part}_seconds": value for part, value in seconds.items()},
        "mean_length": statistics.mean(parts.lengths),
        "peak_gib": peak_gib(),
        **saved(trainer, *COUNTS),
    }
