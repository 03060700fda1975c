"""
How long a save stops training: plain Trainer, and HybridTrainer with saves at once and behind the step. Five minutes.

    python -m benchmarks.memory.stopped                  # Llamas of 27 and 135 million parameters, AdamW, fp32

A run makes 17 steps and saves after every fourth, with `save_total_limit=2`. `seconds` are those that a save takes from
the end of its step until training goes on, the `first` save apart, in which copies get their memory; the last save of a
run has no step to hide behind and is left out. `step_seconds` is the median of a step without a save, and
`steps_beside` that of the first step after each save, which runs beside the thread. The arms train in turn, three
times. Steps are as short as can be (one row of 32 tokens), which is the hardest case: a thread has little to hide
behind.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments, set_seed

from benchmarks.results import Results, command_line, provenance
from hf_hybrid import HybridConfig, HybridTrainer

SIZES = {
    "27M": {"vocab_size": 8192, "hidden_size": 512, "intermediate_size": 1376, "num_hidden_layers": 6},
    "135M": {"vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30},
}
OFF: dict[str, Any] = {"enable_predict": False}
LEAPS: dict[str, Any] = {"direction": "orthogonal"}
ARMS: dict[str, tuple[type, type, dict[str, Any]]] = {
    "trainer": (Trainer, TrainingArguments, {}),
    "off, at once": (HybridTrainer, HybridConfig, {**OFF, "async_save": False}),
    "off, behind": (HybridTrainer, HybridConfig, OFF),
    "leaps, at once": (HybridTrainer, HybridConfig, {**LEAPS, "async_save": False}),
    "leaps, behind": (HybridTrainer, HybridConfig, LEAPS),
}
STEPS, EVERY = 17, 4


class Clock(TrainerCallback):
    """Notes when steps begin and end."""

    def __init__(self):
        self.began: list[float] = []
        self.ended: list[float] = []

    def on_step_begin(self, *args, **kwargs):
        self.began.append(time.perf_counter())

    def on_step_end(self, *args, **kwargs):
        self.ended.append(time.perf_counter())


def measure(arm: str, size: str) -> dict[str, Any]:
    """Train once."""
    trainer_class, config_class, options = ARMS[arm]
    set_seed(0)
    model = LlamaForCausalLM(LlamaConfig(num_attention_heads=8, num_key_value_heads=8, **SIZES[size]))
    rows = torch.randint(0, 8192, (STEPS, 32)).tolist()
    data, clock = Dataset.from_list([{"input_ids": row, "labels": row} for row in rows]), Clock()
    with tempfile.TemporaryDirectory(dir=".") as folder:
        config = config_class(
            folder, max_steps=STEPS, save_steps=EVERY, save_total_limit=2, per_device_train_batch_size=1, use_cpu=True,
            report_to="none", disable_tqdm=True, logging_strategy="no", dataloader_pin_memory=False, **options,
        )  # fmt: skip
        trainer_class(model, config, train_dataset=data, callbacks=[clock]).train()
    os.sync()
    steps = [end - begin for begin, end in zip(clock.began, clock.ended)]
    waits = [begin - end for end, begin in zip(clock.ended, clock.began[1:])]
    saves = waits[EVERY - 1 :: EVERY]
    return {
        "first": saves[0],
        "seconds": saves[1:],
        "step_seconds": statistics.median(steps[2:EVERY]),
        "steps_beside": statistics.median(steps[EVERY::EVERY][1:]),
    }


def main() -> None:
    parser = command_line(__doc__, Path(__file__).parent)
    parser.add_argument("--size", nargs="+", choices=list(SIZES), default=list(SIZES))
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    torch.set_num_threads(1)
    results = Results(args.results, "stopped", ("size", "arm", "round"))
    for size in args.size:
        for number in range(args.rounds):
            for arm in ARMS:
                found = measure(arm, size)
                results.add({**provenance(1), "size": size, "arm": arm, "round": number, **found})
                print(size, arm, [round(second, 3) for second in found["seconds"]], flush=True)


if __name__ == "__main__":
    main()
