"""
Seconds of whole GRPO rounds by part: TRL's trainer and HybridGRPOTrainer.

A round is 8 prompts of 256 tokens with 8 completions each, LoRA of rank 16 on all linear layers, 4 micro-batches. Half
of the prompts are easy: their completions earn the same reward, so they have no advantage. The weights are random. Two
ids end a completion. A bias on their logits gives completions a mean length of `--mean` tokens, where they are not cut
at `--tokens`. The bias is `sequence_bias` of the generation config, which all arms sample with.

With `--turns N` a completion has so many turns of at most `--tokens`, between which a `rollout_func` adds `ANSWER`
tokens that a tool might answer. A turn goes on from the keys and values of those before in our arms.

    trl              `GRPOTrainer`; none of the arms uses vLLM
    trl_static       with `cache_implementation="static"`
    trl_continuous   with continuous batching of transformers
    hybrid           HybridGRPOTrainer, defaults: captured completions
    hybrid_eager     with `rollouts="off"`: completions as in TRL
    hybrid_peft      defaults, but adapters compute with PEFT's products, in completions and in the update. There is no
                     option for this: the arm's process hides adapters from what replaces these products
"""

from __future__ import annotations

import argparse
import contextlib
import math
import random
import statistics
import tempfile
import time
from functools import partial
from typing import Any
from unittest import mock

from datasets import Dataset
from transformers import TrainerCallback, set_seed
from trl import GRPOConfig, GRPOTrainer

from benchmarks.gpu.models import (
    ADAPTERS,
    COMMON,
    DEVICE,
    SHAPES,
    Kernels,
    build,
    forget_peak,
    memory,
    scaled,
    synchronize,
    tokenizer,
)
from benchmarks.gpu.sft import saved
from benchmarks.timing import put_around
from hf_hybrid import HybridGRPOConfig, HybridGRPOTrainer

PROMPTS, COMPLETIONS, MICRO_BATCHES = 8, 8, 4
EASY = 0.5
ENDS = (1, 2)
"""Ids that end a completion. `Trainer` warns of others than the tokenizer's, 1."""
CONTINUOUS: dict[str, Any] = {"use_transformers_continuous_batching": True}
if DEVICE == "cpu":  # where it would take half of the host's memory
    CONTINUOUS["transformers_continuous_batching_config"] = {"max_memory_percent": 0.01, "max_batch_tokens": 256}
ARMS: dict[str, tuple[type, type, dict[str, Any]]] = {
    "trl": (GRPOTrainer, GRPOConfig, {}),
    "trl_static": (GRPOTrainer, GRPOConfig, {"cache_implementation": "static"}),
    "trl_continuous": (GRPOTrainer, GRPOConfig, CONTINUOUS),
    "hybrid": (HybridGRPOTrainer, HybridGRPOConfig, {}),
    "hybrid_eager": (HybridGRPOTrainer, HybridGRPOConfig, {"rollouts": "off"}),
    "hybrid_peft": (HybridGRPOTrainer, HybridGRPOConfig, {}),
}
ANSWER = 64
COUNTS = (
    "rows", "rows_skipped", "rows_decoded_saved", "prompt_tokens_computed", "prompt_tokens_shared",
    "bytes_between_turns", "tokens_shared", "every_row_because", "plain_rollouts_because", "plain_rows_because",
)  # fmt: skip


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--length", type=int, default=256, help="Tokens of a prompt.")
    parser.add_argument("--tokens", type=int, default=128, help="Most tokens of a completion.")
    parser.add_argument("--turns", type=int, default=1, help="Turns of a completion.")
    parser.add_argument("--mean", type=int, default=150, help="Mean length of a completion that is not cut.")


def cases(args: argparse.Namespace) -> list[dict[str, Any]]:
    length, tokens = scaled(args.shape, args.length), scaled(args.shape, args.tokens)
    kind = f"{length} + {tokens}" + (f" x {args.turns}" if args.turns > 1 else "")
    return [{"shape": args.shape, "kind": kind, "length": length, "tokens": tokens}]


def talk(prompts: list[str], trainer: Any, turns: int, answer: int) -> dict[str, Any]:
    """A `rollout_func`: conversations of so many turns, and as many tokens of an answer between two of them."""
    first = trainer._tokenize_prompts(prompts)[0]
    rows, masks = [*first], [list[int]() for _ in first]
    for turn in range(turns):
        for number, completion in enumerate(trainer._generate_single_turn(rows, None, {}, 1)[0]):
            told = [3 + (7 * number + place) % 90 for place in range(answer)] if turn + 1 < turns else []
            rows[number] = rows[number] + completion + told
            masks[number] += [1] * len(completion) + [0] * len(told)
    completions = [row[len(prompt) :] for row, prompt in zip(rows, first)]
    return {"prompt_ids": first, "completion_ids": completions, "logprobs": None, "env_mask": masks}


def bias(vocabulary: int, mean: float) -> float:
    """What to add to the logits of the ids that end a completion, so that its mean length is that."""
    return math.log((vocabulary - len(ENDS)) / (len(ENDS) * (mean - 1)))


class Parts(TrainerCallback):
    """
    Wall seconds of generation and update by round. The device is waited for around each. With `profiled`, the kernels
    of the last round are counted.
    """

    def __init__(self, trainer: GRPOTrainer, profiled: bool):
        self.generation, self.update, self.lengths = [0.0], [0.0], list[int]()
        self.counted, self.profiled = Kernels(), profiled
        self._around(trainer, "_generate_single_turn", self.generation)
        self._around(trainer, "training_step", self.update)

    def _around(self, trainer: GRPOTrainer, method: str, part: list[float]) -> None:
        """Time a method of the trainer. Generation runs inside of `training_step`, and is subtracted there."""

        def wrap(call):
            def timed(*args, **kwargs):
                synchronize()
                begin, inner = time.perf_counter(), self.generation[-1]
                result = call(*args, **kwargs)
                synchronize()
                part[-1] += time.perf_counter() - begin
                if part is self.generation:
                    self.lengths += [len(completion) for completion in result[0]]
                else:
                    part[-1] -= self.generation[-1] - inner
                return result

            return timed

        put_around(trainer, method, wrap)

    def on_step_begin(self, args, state, control, **kwargs):
        if self.profiled and state.global_step == args.max_steps - 1:
            self.counted.begin()

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 1:
            forget_peak()
        if self.profiled and state.global_step == args.max_steps:
            self.counted.end()
        self.generation.append(0.0)
        self.update.append(0.0)


def reward(completions, easy, **columns) -> list[float]:
    """1 for the completions of an easy prompt, and the parity of the length for others."""
    return [1.0 if is_easy else float(len(text) % 2) for text, is_easy in zip(completions, easy)]


def run(case: dict[str, Any], arm: str, args: argparse.Namespace) -> dict[str, Any]:
    """Train one arm. Returns what the row of the results says, in seconds per round."""
    trainer_class, config_class, more = ARMS[arm]
    set_seed(0)
    draw, vocabulary = random.Random(0), SHAPES[args.shape]["vocab_size"]
    model = build(args.shape, lora=False)
    model.generation_config.eos_token_id = list(ENDS)
    favoured = bias(vocabulary, scaled(args.shape, args.mean))
    rounds = 1 + args.steps + args.profile
    lines = range(PROMPTS * rounds)
    prompts = [" ".join(f"w{draw.randrange(1 + max(ENDS), vocabulary)}" for _ in range(case["length"])) for _ in lines]
    rows = {"prompt": prompts, "easy": [number % 10 < 10 * EASY for number in lines]}
    hidden = mock.patch("hf_hybrid.phase_memory.adapter_products.plain_lora_layers", lambda model: [])
    with tempfile.TemporaryDirectory() as folder, hidden if arm == "hybrid_peft" else contextlib.nullcontext():
        config = config_class(
            folder,
            max_steps=rounds,
            num_generations=COMPLETIONS,
            per_device_train_batch_size=PROMPTS * COMPLETIONS // MICRO_BATCHES,
            gradient_accumulation_steps=MICRO_BATCHES,
            max_completion_length=case["tokens"],
            generation_kwargs={"sequence_bias": [[[end], favoured] for end in ENDS]},
            learning_rate=1e-6,
            shuffle_dataset=False,
            gradient_checkpointing=False,
            **COMMON,
            **more,
        )
        trainer = trainer_class(
            model,
            reward,
            config,
            train_dataset=Dataset.from_dict(rows),
            processing_class=tokenizer(args.shape),
            peft_config=ADAPTERS,
            rollout_func=partial(talk, turns=args.turns, answer=scaled(args.shape, ANSWER)) if args.turns > 1 else None,
        )
        parts = Parts(trainer, args.profile)
        trainer.add_callback(parts)
        trainer.train()
    timed = slice(1, 1 + args.steps)
    generation, update = parts.generation[timed], parts.update[timed]
    return {
        "seconds": statistics.mean(generation) + statistics.mean(update),
        "generation_seconds": statistics.mean(generation),
        "update_seconds": statistics.mean(update),
        "steps": [round(sum(both), 4) for both in zip(generation, update)],
        "generation_steps": [round(value, 4) for value in generation],
        "mean_length": statistics.mean(parts.lengths),
        "vllm": False,
        **memory(),
        **parts.counted.measured(),
        **saved(trainer, *COUNTS),
    }
