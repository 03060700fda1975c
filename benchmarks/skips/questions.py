"""
What it costs to ask in each step what code of a user has changed of trainer and model, in milliseconds on one thread.

    python -m benchmarks.skips.questions

The model has the shape of SmolLM2-135M and random weights; all weights are trained, or LoRA on all its linear layers.
Medians of 200 repetitions. Nothing that is asked lies on a device.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.results import Results, command_line, provenance
from hf_hybrid import HybridConfig, HybridTrainer
from hf_hybrid.rows.facts import Marks
from hf_hybrid.streaming.layers import base_model

SHAPE = {
    "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
    "num_attention_heads": 9, "num_key_value_heads": 3, "tie_word_embeddings": True,
}  # fmt: skip
REPETITIONS = 200


def milliseconds(ask: Callable[[], object]) -> float:
    """Return the median time of a call, after a first one."""
    ask()
    found = []
    for _ in range(REPETITIONS):
        began = time.perf_counter()
        ask()
        found.append(1000 * (time.perf_counter() - began))
    return statistics.median(found)


def main() -> None:
    args = command_line(__doc__, Path(__file__).parent).parse_args()
    torch.set_num_threads(1)
    results = Results(args.results, "questions", ("trains",))
    for trains in ("all weights", "adapters"):
        model = LlamaForCausalLM(LlamaConfig(**SHAPE))
        if trains == "adapters":
            model = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", target_modules="all-linear"))
        with tempfile.TemporaryDirectory() as folder:
            config = HybridConfig(folder, use_cpu=True, report_to="none")
            trainer = HybridTrainer(model, config, train_dataset=[{"input_ids": [1, 2], "labels": [1, 2]}])
        base = base_model(model)
        row = {
            "of_model": round(milliseconds(lambda model=model, base=base: Marks.of(model, base)), 3),
            "of_trainer": round(milliseconds(trainer._who_acts), 3),
            "modules": sum(1 for _ in model.modules()),
        }
        print(trains, results.add({**provenance(1), "trains": trains, **row}), flush=True)


if __name__ == "__main__":
    main()
