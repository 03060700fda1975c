"""
What MemoryProfilerCallback costs, on the quickstart's model and on a larger one. About ten minutes; one thread.

    python -m benchmarks.memory.profiler

- `own`: CPU seconds spent inside the callback, clocked around its hooks, over those of the rest of the same steps.
  Nothing else that a step takes blurs it.
- `pairs`: median CPU seconds of a step with and without it, in short runs in turn, as a check on `own`: the difference
  of two noisy numbers.

Plain Trainer, AdamW, defaults of the callback. `quickstart` is the 1.1M Llama of `examples/07_from_scratch.py` with
batches of 8 x 128 tokens on the source of Python's standard library; `larger` a Llama of 47M parameters with the same
batches.
"""

from __future__ import annotations

import json
import tempfile
import time
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments, set_seed
from transformers.utils import logging

from benchmarks.results import Results, command_line, provenance
from benchmarks.speedup.tasks import QUIET, TASKS, TextAndModels
from benchmarks.timing import StepClock, Stopwatch, paired_ratio
from hf_hybrid.records.profiler import MemoryProfilerCallback

HOOKS = [name for name in dir(TrainerCallback) if name.startswith("on_")]
PAIR_STEPS = 30


class Clocked(MemoryProfilerCallback):
    """The profiler, with a stopwatch around each of its hooks."""

    def __init__(self):
        super().__init__()
        self.own = Stopwatch()
        for name in HOOKS:
            setattr(self, name, self.own.around(getattr(self, name)))


class Bench:
    """Data and models."""

    def __init__(self):
        self.sources = TextAndModels()
        self.data = self.sources.split("code")["train"]

    def model(self, name: str) -> LlamaForCausalLM:
        if name == "quickstart":
            return self.sources.model(TASKS["code"], 0)
        set_seed(0)
        sizes = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 11, "num_attention_heads": 8}
        return LlamaForCausalLM(LlamaConfig(vocab_size=len(self.sources.tokenizer), tie_word_embeddings=True, **sizes))

    def run(self, name: str, steps: int, *callbacks: TrainerCallback) -> None:
        with tempfile.TemporaryDirectory() as folder:
            args = TrainingArguments(folder, max_steps=steps, per_device_train_batch_size=8, use_cpu=True, **QUIET)
            Trainer(self.model(name), args, train_dataset=self.data, callbacks=list(callbacks)).train()


def own_share(bench: Bench, name: str, steps: int) -> dict:
    """Measure the CPU seconds within the callback over those of the rest."""
    profiler, clock = Clocked(), StepClock()
    bench.run(name, 2)  # warms caches
    start = time.process_time()
    bench.run(name, steps, profiler, clock)
    total, summary = time.process_time() - start, profiler.summary()
    phase = summary["phases"]["train"]
    rest = sum(clock.steps) / len(clock.steps) - profiler.own.seconds / steps
    return {
        "steps": steps,
        "parameters": bench.model(name).num_parameters(),
        "own_seconds_per_step": profiler.own.seconds / steps,
        "other_seconds_per_step": rest,
        "share": profiler.own.seconds / steps / rest,
        "share_of_the_whole_run": profiler.own.seconds / (total - profiler.own.seconds),
        "accounted_steps": phase["accounted"]["records"],
        "wall_share_as_told_by_the_profiler": summary["own_seconds"] / summary["seconds"],
    }


def pairs(bench: Bench, name: str, rounds: int) -> dict:
    """Median step with the callback over the one without, run in turn."""

    def train(arm: str, clock: StepClock) -> None:
        bench.run(name, PAIR_STEPS, *([MemoryProfilerCallback()] if arm == "with" else []), clock)

    return {"steps": PAIR_STEPS, **paired_ratio(train, "without", "with", rounds)}


def main() -> None:
    parser = command_line(__doc__, Path(__file__).resolve().parent)
    parser.add_argument("--rounds", type=int, default=12, help="Pairs of runs of the quickstart's model.")
    parser.add_argument("--steps", type=int, default=200, help="Of the run that is clocked; a tenth for the larger.")
    args = parser.parse_args()
    logging.disable_progress_bar()
    torch.set_num_threads(1)
    bench, results = Bench(), Results(args.results, "profiler", ("model", "what"))
    for name, steps in (("quickstart", args.steps), ("larger", max(args.steps // 10, 5))):
        row = {"model": name, "what": "own", **own_share(bench, name, steps)}
        print(json.dumps(results.add({**row, **provenance(1)})), flush=True)
    row = {"model": "quickstart", "what": "pairs", **pairs(bench, "quickstart", args.rounds)}
    print(json.dumps(results.add({**row, **provenance(1)})))


if __name__ == "__main__":
    main()
