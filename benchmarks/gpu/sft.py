"""
Seconds and memory of an SFT step: `Trainer` as it is, what users have against padding, and HybridTrainer.

A step is 16 rows in 2 micro-batches, bf16 weights, LoRA of rank 16 on all linear layers (`--full`: all weights), AdamW.
Every step has rows of new lengths, in the order of the data set.

    trainer      `Trainer`, padded
    by_length    `Trainer` with `group_by_length`
    rebalanced   `Trainer` with `batch_rebalance`
    trl, trl_free, trl_packing    TRL's trainer, padded, with `padding_free`, and with `packing` (per 16 rows)
    free         `Trainer`, rows one after the other in one row, torch's `varlen_attn`: no padding
    free_liger   the same with Liger's kernels: what Unsloth, Axolotl and TRL's `padding_free` users have
    hybrid       HybridTrainer, defaults
    hybrid_liger the same with Liger's kernels
    trainer_compiled, hybrid_compiled    with `torch_compile`

The kinds of rows:

    full           one length, all of which is learned: nothing can be saved
    instructions   nothing is shared; lengths as in Alpaca
    system         a system prompt of 1,000 tokens before each question
    agent          prompt and tools of 1,500 tokens; a task is 4 actions, a row per action
"""

from __future__ import annotations

import argparse
import importlib.util
import inspect
import random
import tempfile
from typing import Any

import torch
from datasets import Dataset
from rig.sft_rows import pad, row
from transformers import AttentionInterface, Trainer, TrainingArguments
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from benchmarks.gpu.models import COMMON, DEVICE, SHAPES, Clock, build, scaled, tokenizer
from hf_hybrid import HybridConfig, HybridTrainer
from hf_hybrid.rows.costs import Costs

ROWS, MICRO_BATCH = 16, 8
Row = dict[str, list[int]]


class Tokens:
    """Stretches of random tokens, as long as suits a shape."""

    def __init__(self, shape: str, vocabulary: int):
        self.draw, self.shape, self.vocabulary = random.Random(1), shape, vocabulary

    def __call__(self, least: int, most: int | None = None) -> list[int]:
        length = scaled(self.shape, self.draw.randint(least, most or least))
        return [self.draw.randrange(2, self.vocabulary) for _ in range(length)]


def full(tokens: Tokens, count: int) -> list[Row]:
    return [row((tokens(512), True)) for _ in range(count)]


def instructions(tokens: Tokens, count: int) -> list[Row]:
    def length() -> int:
        return min(1500, max(16, int(tokens.draw.lognormvariate(5.0, 0.9))))

    return [row((tokens(30, 150), False), (tokens(length()), True)) for _ in range(count)]


def system(tokens: Tokens, count: int) -> list[Row]:
    prompt = tokens(1000)
    return [row((prompt + tokens(20, 100), False), (tokens(100, 300), True)) for _ in range(count)]


def agent(tokens: Tokens, count: int) -> list[Row]:
    prompt, rows = tokens(1500), []
    while len(rows) < count:
        past = prompt + tokens(100, 200)
        for _ in range(4):
            action = tokens(30, 80)
            rows.append(row((past, False), (action, True)))
            past = past + action + tokens(100, 400)
    return rows[:count]


KINDS = {kind.__name__: kind for kind in (full, instructions, system, agent)}


def padding_free(rows: list[Row]) -> dict[str, Any]:
    """Lay rows out one after the other, with what varlen attention asks for. Shapes: `(1, tokens)`, `(rows + 1,)`."""
    lengths = [len(row["input_ids"]) for row in rows]
    ends = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    return {
        "input_ids": torch.tensor([[token for row in rows for token in row["input_ids"]]]),
        "labels": torch.tensor([[label for row in rows for label in [-100, *row["labels"][1:]]]]),
        "position_ids": torch.tensor([[place for length in lengths for place in range(length)]]),
        "cu_seq_lens_q": ends,
        "cu_seq_lens_k": ends,
        "max_length_q": max(lengths),
        "max_length_k": max(lengths),
    }


def varlen(module, query, key, value, mask, scaling=None, dropout=0.0, cu_seq_lens_q=None, max_length_q=None, **more):
    """torch's attention over rows one after the other; on a CPU, which has none, over the one long row."""
    if cu_seq_lens_q is None or DEVICE == "cpu":
        return sdpa_attention_forward(module, query, key, value, mask, scaling=scaling, dropout=dropout, is_causal=True)
    from torch.nn.attention.varlen import varlen_attn

    query, key, value = (states[0].transpose(0, 1).to(torch.bfloat16) for states in (query, key, value))
    grouped = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}  # torch 2.12
    ends, most = cu_seq_lens_q, max_length_q
    out = varlen_attn(query, key, value, ends, ends, most, most, scale=scaling, window_size=(-1, 0), **grouped)
    return out[None], None


AttentionInterface.register("benchmark_varlen", varlen)
FREE = {"data_collator": padding_free, "attention": "benchmark_varlen"}
LIGER, COMPILED = {"use_liger_kernel": True}, {"torch_compile": True}
ARMS: dict[str, tuple[type, type, dict[str, Any], dict[str, Any]]] = {
    "trainer": (Trainer, TrainingArguments, {}, {}),
    "by_length": (Trainer, TrainingArguments, {"train_sampling_strategy": "group_by_length"}, {}),
    "rebalanced": (Trainer, TrainingArguments, {"train_sampling_strategy": "batch_rebalance"}, {}),
    "free": (Trainer, TrainingArguments, {}, FREE),
    "free_liger": (Trainer, TrainingArguments, LIGER, FREE),
    "hybrid": (HybridTrainer, HybridConfig, {}, {}),
    "hybrid_liger": (HybridTrainer, HybridConfig, LIGER, {}),
    "trainer_compiled": (Trainer, TrainingArguments, COMPILED, {}),
    "hybrid_compiled": (HybridTrainer, HybridConfig, COMPILED, {}),
}
if importlib.util.find_spec("trl"):
    from trl import SFTConfig, SFTTrainer

    PACKED = {"packing": True, "max_length": 4096, "per_device_train_batch_size": 1}
    for name, of_trl in (("trl", {}), ("trl_free", {"padding_free": True}), ("trl_packing", PACKED)):
        ARMS[name] = (SFTTrainer, SFTConfig, {"max_length": None, "gradient_checkpointing": False, **of_trl}, {})


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--full", action="store_true", help="Train all weights.")


def cases(args: argparse.Namespace) -> list[dict[str, Any]]:
    return [{"shape": args.shape, "kind": kind, "full": args.full} for kind in args.kinds]


def run(case: dict[str, Any], arm: str, args: argparse.Namespace) -> dict[str, Any]:
    """Train one arm on one kind of rows. Returns what the row of the results says."""
    trainer_class, config_class, more, how = ARMS[arm]
    clock = Clock(args.warm_up, args.steps, args.profile)
    rows = KINDS[case["kind"]](Tokens(args.shape, SHAPES[args.shape]["vocab_size"]), ROWS * clock.max_steps)
    model = build(args.shape, lora=not args.full)
    (model if args.full else model.base_model.model).config._attn_implementation = how.get("attention", "sdpa")
    with tempfile.TemporaryDirectory() as folder:
        config = config_class(
            folder,
            gradient_accumulation_steps=ROWS // MICRO_BATCH,
            max_steps=clock.max_steps,
            learning_rate=1e-5,
            optim="adamw_torch_fused",
            **{"per_device_train_batch_size": MICRO_BATCH, "train_sampling_strategy": "sequential", **COMMON, **more},
        )
        of_trl = "max_length" in more
        config.remove_unused_columns = of_trl
        trainer = trainer_class(
            model,
            config,
            train_dataset=Dataset.from_list(rows),
            data_collator=None if of_trl else how.get("data_collator", pad),
            callbacks=[clock],
            **({"processing_class": tokenizer(args.shape)} if of_trl else {}),
        )
        trainer.train()
    measured = clock.measured()
    if "packing" in more:  # so many packs per step, of so many rows
        measured["seconds"] *= MICRO_BATCH * len(trainer.train_dataset) / len(rows)
    costs, tokens = Costs.of(model), sum(len(row["input_ids"]) for row in rows) / len(rows) * ROWS
    measured |= {
        "tokens": round(tokens),
        "tokens_per_second": round(tokens / measured["seconds"]),
        "teraflops": costs.passes * costs.token * tokens / measured["seconds"] / 1e12,  # without attention and head
        "loss": trainer.state.log_history[-1]["train_loss"],
    }
    return {
        **measured,
        **saved(trainer, "tokens_padding", "tokens_shared", "micro_batches_saved", "plain_rows_because"),
    }


def saved(trainer: Trainer, *names: str) -> dict[str, Any]:
    """Counts of the summary of our trainer; of another, nothing."""
    summary = trainer.hybrid_summary() if hasattr(trainer, "hybrid_summary") else {}
    return {name: summary[name] for name in names if name in summary}
