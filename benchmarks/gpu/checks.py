"""
What a card says of parts that are not timed beside peers.

    gpu_tests      some of `pytest -m gpu`: how many pass, and which fail. Without a GPU they are looked up alone
    flex_gemma2    two steps of a Gemma 2 of two layers with rows that share a prompt: heads of 256, capped scores
    flex_gpt_oss   the same of a gpt-oss: sinks, and experts
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, Gemma2Config, GptOssConfig, PreTrainedConfig

from benchmarks.gpu.models import COMMON, DEVICE, Clock
from benchmarks.gpu.sft import MICRO_BATCH, ROWS, Tokens, pad, saved, system
from hf_hybrid import HybridConfig, HybridTrainer
from hf_hybrid.rows.attention import Layout

TESTS = Path(__file__).parents[2] / "tests" / "simulated_gpu" / "test_on_a_gpu.py"
SCENARIOS = (
    "grpo", "grpo_long", "rows_in_one_call", "dpo", "by_layer", "eight_bit_bf16", "in_backward", "graphs",
    "graphs_eight_bit_bf16", "lora_int8",
)  # fmt: skip
VOCABULARY = 4096


def options(parser: argparse.ArgumentParser) -> None:
    pass


def cases(args: argparse.Namespace) -> list[dict[str, Any]]:
    return [{"shape": args.shape, "kind": "check"}]


def run(case: dict[str, Any], arm: str, args: argparse.Namespace) -> dict[str, Any]:
    return ARMS[arm](args)


def gpu_tests(args: argparse.Namespace) -> dict[str, Any]:
    chosen = " or ".join(f"[{name}]" for name in SCENARIOS)
    words = [sys.executable, "-m", "pytest", "-m", "gpu", "-p", "no:cacheprovider", str(TESTS), "-k", chosen]
    begin, lines = time.perf_counter(), list[str]()
    # Each test with its name: what a limit cuts is in the log.
    words += ["--collect-only", "-q"] if DEVICE == "cpu" else ["-v", "-rfE", "--tb=short"]
    with subprocess.Popen(words, cwd=TESTS.parents[2], stdout=subprocess.PIPE, text=True) as process:
        for line in process.stdout or ():
            lines.append(line.strip())
            print(line, end="", flush=True)
    failed = [line.split(" - ")[0] for line in lines if line.startswith(("FAILED ", "ERROR "))]
    return {"seconds": time.perf_counter() - begin, "said": lines[-1], "failed": failed}


SMALL = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
GEMMA2 = {
    "hidden_size": 2304, "intermediate_size": 9216, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256,
}  # fmt: skip
GPT_OSS = {
    "hidden_size": 2880, "intermediate_size": 2880, "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64,
}  # fmt: skip


def flex(config: PreTrainedConfig, args: argparse.Namespace) -> dict[str, Any]:
    """Forward, backward and a step of all weights. `flex_calls` of flex attention: only a GPU makes them."""
    torch.manual_seed(0)
    with torch.device(DEVICE):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="eager")
    clock, by_flex, calls = Clock(1, 2), Layout.by_flex, 0

    def counted(*args, **kwargs):
        nonlocal calls
        calls += 1
        return by_flex(*args, **kwargs)

    tokens = Tokens(args.shape, VOCABULARY)
    with tempfile.TemporaryDirectory() as folder, mock.patch.object(Layout, "by_flex", counted):
        options = HybridConfig(
            folder,
            per_device_train_batch_size=MICRO_BATCH,
            gradient_accumulation_steps=ROWS // MICRO_BATCH,
            max_steps=clock.max_steps,
            learning_rate=1e-5,
            remove_unused_columns=False,
            train_sampling_strategy="sequential",
            **COMMON,
        )
        rows = Dataset.from_list(system(tokens, ROWS * clock.max_steps))
        trainer = HybridTrainer(model, options, train_dataset=rows, data_collator=pad, callbacks=[clock])
        trainer.train()
    return {
        **clock.measured(),
        "flex_calls": calls,
        "loss": trainer.state.log_history[-1]["train_loss"],
        **saved(trainer, "tokens_shared", "micro_batches_saved", "plain_rows_because"),
    }


def flex_gemma2(args: argparse.Namespace) -> dict[str, Any]:
    sizes = SMALL if args.shape == "tiny" else GEMMA2
    return flex(Gemma2Config(num_hidden_layers=2, vocab_size=VOCABULARY, **sizes), args)


def flex_gpt_oss(args: argparse.Namespace) -> dict[str, Any]:
    sizes = SMALL if args.shape == "tiny" else GPT_OSS
    return flex(GptOssConfig(num_hidden_layers=2, vocab_size=VOCABULARY, num_local_experts=8, **sizes), args)


ARMS = {"gpu_tests": gpu_tests, "flex_gemma2": flex_gemma2, "flex_gpt_oss": flex_gpt_oss}
