"""
Seconds and memory of a DPO step: TRL's trainer and HybridDPOTrainer.

A step is 8 pairs in 2 micro-batches, LoRA of rank 16 on all linear layers; the reference is the model without adapters.

    even    prompts of 600 tokens, answers of 300
    mixed   prompts of 150 to 600 tokens, answers of 75 to 300

    trl               `DPOTrainer`
    trl_precomputed   with `precompute_ref_log_probs`: its seconds include a step's share of what is computed before
    trl_liger         with `use_liger_kernel`
    trl_padding_free  with `padding_free`; an error where the installed TRL has switched it off
    hybrid            HybridDPOTrainer, defaults
    hybrid_streamed   all layers stream, policy and reference
    hybrid_compiled   with `torch_compile`
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from typing import Any

from datasets import Dataset
from trl import DPOConfig, DPOTrainer

from benchmarks.gpu.models import ADAPTERS, COMMON, SHAPES, Clock, build, scaled, synchronize, tokenizer
from benchmarks.gpu.sft import COMPILED, LIGER, saved
from hf_hybrid import HybridDPOConfig, HybridDPOTrainer

PAIRS, MICRO_BATCH = 8, 4
PROMPT, ANSWER = 600, 300


class Precomputed(DPOTrainer):
    """Times what is computed before the first step."""

    def _precompute_ref_logps(self, *args, **kwargs):
        synchronize()
        begin = time.perf_counter()
        dataset = super()._precompute_ref_logps(*args, **kwargs)
        synchronize()
        self.precompute_seconds = time.perf_counter() - begin
        return dataset


ARMS: dict[str, tuple[type, type, dict[str, Any]]] = {
    "trl": (DPOTrainer, DPOConfig, {}),
    "trl_precomputed": (Precomputed, DPOConfig, {"precompute_ref_log_probs": True}),
    "trl_liger": (DPOTrainer, DPOConfig, LIGER),
    "trl_padding_free": (DPOTrainer, DPOConfig, {"padding_free": True}),
    "hybrid": (HybridDPOTrainer, HybridDPOConfig, {}),
    "hybrid_streamed": (HybridDPOTrainer, HybridDPOConfig, {"memory": "stream", "resident_layers": 0}),
    "hybrid_compiled": (HybridDPOTrainer, HybridDPOConfig, COMPILED),
}


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--kinds", nargs="+", choices=("even", "mixed"), default=["even", "mixed"])


def cases(args: argparse.Namespace) -> list[dict[str, Any]]:
    return [{"shape": args.shape, "kind": kind} for kind in args.kinds]


def run(case: dict[str, Any], arm: str, args: argparse.Namespace) -> dict[str, Any]:
    """Train one arm on one kind of pairs. Returns what the row of the results says."""
    trainer_class, config_class, more = ARMS[arm]
    clock = Clock(args.warm_up, args.steps, args.profile)
    draw, vocabulary = random.Random(0), SHAPES[args.shape]["vocab_size"]

    def text(tokens: int) -> str:
        most = max(4, scaled(args.shape, tokens))
        length = draw.randint(most // 4, most) if case["kind"] == "mixed" else most
        return " ".join(f"w{draw.randrange(2, vocabulary)}" for _ in range(length))

    pairs = [
        {"prompt": text(PROMPT) + " ", "chosen": text(ANSWER), "rejected": text(ANSWER)}
        for _ in range(PAIRS * clock.max_steps)
    ]
    with tempfile.TemporaryDirectory() as folder:
        config = config_class(
            folder,
            per_device_train_batch_size=MICRO_BATCH,
            gradient_accumulation_steps=PAIRS // MICRO_BATCH,
            max_steps=clock.max_steps,
            learning_rate=1e-6,
            max_length=None,
            gradient_checkpointing=False,
            **COMMON,
            **more,
        )
        trainer = trainer_class(
            build(args.shape, lora=False),
            args=config,
            train_dataset=Dataset.from_list(pairs),
            processing_class=tokenizer(args.shape),
            peft_config=ADAPTERS,
            callbacks=[clock],
        )
        if more.get("padding_free") and not trainer.padding_free:
            raise RuntimeError("the installed TRL has `padding_free` switched off, and pads")
        trainer.train()
    measured = clock.measured()
    if isinstance(trainer, Precomputed):
        measured["precompute_seconds"] = trainer.precompute_seconds / clock.max_steps
        measured["seconds"] += measured["precompute_seconds"]
    return {**measured, **saved(trainer, "tokens", "tokens_padding", "tokens_shared", "plain_rows_because")}
