"""
What MemoryProfilerCallback costs, on the quickstart's model and on a larger one. About ten minutes; one thread.

    python benchmarks/profiler.py

- `own`: CPU seconds spent inside the callback, clocked around its hooks, over those of the rest of the same steps. What
  a step takes besides does not blur that.
- `pairs`: median CPU seconds of a step with and without it, in short runs in turn, as a check on `own`: the difference
  of two noisy numbers.

Plain Trainer, AdamW, defaults of the callback. `quickstart` is the 1.1M Llama of `examples/01_quickstart.py` with
batches of 8 x 128 tokens on the source of Python's standard library; `larger` a Llama of 47M parameters with the same
batches. Writes `benchmarks/results/profiler.json`.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
from datasets import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments, set_seed
from transformers.utils import logging

from hf_hybrid.report.profiler import MemoryProfilerCallback

ROOT = Path(__file__).resolve().parent
HOOKS = [name for name in dir(TrainerCallback) if name.startswith("on_")]


def quickstart():
    """The example as a module; its name is no identifier."""
    spec = importlib.util.spec_from_file_location("quickstart", ROOT.parent / "examples" / "01_quickstart.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its data classes look themselves up there
    spec.loader.exec_module(module)
    return module


class Clocked(MemoryProfilerCallback):
    """Counts the CPU seconds of every hook of its own."""

    def __init__(self):
        super().__init__()
        self.cpu_seconds = 0.0
        for name in HOOKS:
            setattr(self, name, self.clocked(getattr(self, name)))

    def clocked(self, hook):
        def timed(*args, **kwargs):
            start = time.process_time()
            try:
                return hook(*args, **kwargs)
            finally:
                self.cpu_seconds += time.process_time() - start

        return timed


class Clock(TrainerCallback):
    """CPU seconds from the end of a step to the end of the next; the first step, which initialises, is left out."""

    def __init__(self):
        self.ends: list[float] = []

    def on_step_end(self, args, state, control, **kwargs):
        self.ends.append(time.process_time())

    @property
    def steps(self) -> list[float]:
        return [b - a for a, b in zip(self.ends, self.ends[1:])]


class Bench:
    """Tokeniser, data and models."""

    def __init__(self):
        self.example = quickstart()
        texts = self.example.python_source()
        self.tokenizer = self.example.train_tokenizer(texts)
        self.data = self.example.blocks(Dataset.from_dict({"text": texts[:200]}), self.tokenizer, 128)

    def model(self, name: str) -> LlamaForCausalLM:
        set_seed(0)
        if name == "quickstart":
            return self.example.small_llama(self.tokenizer)
        sizes = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 11, "num_attention_heads": 8}
        return LlamaForCausalLM(LlamaConfig(vocab_size=len(self.tokenizer), tie_word_embeddings=True, **sizes))

    def run(self, name: str, steps: int, *callbacks: TrainerCallback) -> None:
        with tempfile.TemporaryDirectory() as folder:
            args = TrainingArguments(
                folder, max_steps=steps, per_device_train_batch_size=8, save_strategy="no", report_to="none",
                disable_tqdm=True, logging_steps=10**9, dataloader_pin_memory=False, use_cpu=True,
            )  # fmt: skip
            Trainer(self.model(name), args, train_dataset=self.data, callbacks=list(callbacks)).train()


def own_share(bench: Bench, name: str, steps: int) -> dict:
    """CPU seconds within the callback over those of the rest."""
    profiler, clock = Clocked(), Clock()
    bench.run(name, 2)  # warms caches
    start = time.process_time()
    bench.run(name, steps, profiler, clock)
    total, summary = time.process_time() - start, profiler.summary()
    phase = summary["phases"]["train"]
    rest = sum(clock.steps) / len(clock.steps) - profiler.cpu_seconds / steps
    return {
        "steps": steps,
        "parameters": bench.model(name).num_parameters(),
        "own_seconds_per_step": profiler.cpu_seconds / steps,
        "other_seconds_per_step": rest,
        "share": profiler.cpu_seconds / steps / rest,
        "share_of_the_whole_run": profiler.cpu_seconds / (total - profiler.cpu_seconds),
        "accounted_steps": phase["accounted"]["records"],
        "wall_share_as_told_by_the_profiler": summary["own_seconds"] / summary["seconds"],
    }


def pairs(bench: Bench, name: str, rounds: int, steps: int) -> dict:
    """Median step with the callback over the one without, run in turn."""
    medians: dict[str, list[float]] = {"without": [], "with": []}
    for number in range(rounds + 1):
        for arm in sorted(medians, reverse=bool(number % 2)):
            clock = Clock()
            bench.run(name, steps, *([MemoryProfilerCallback()] if arm == "with" else []), clock)
            if number:  # the first round warms caches and allocator
                medians[arm].append(statistics.median(clock.steps))
    ratios = sorted(a / b for a, b in zip(medians["with"], medians["without"]))
    return {
        "rounds": rounds,
        "steps": steps,
        "seconds_per_step": medians,
        "ratio": {"median": statistics.median(ratios), "least": ratios[0], "most": ratios[-1]},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=12, help="Pairs of runs of the quickstart's model.")
    parser.add_argument("--steps", type=int, default=200, help="Of the run that is clocked; a tenth for the larger.")
    args = parser.parse_args()
    logging.disable_progress_bar()
    torch.set_num_threads(1)
    bench = Bench()
    result = {"torch": torch.__version__, "threads": 1}
    for name, steps in (("quickstart", args.steps), ("larger", max(args.steps // 10, 5))):
        result[name] = {"own": own_share(bench, name, steps)}
        print(name, json.dumps(result[name]["own"]), flush=True)
    result["quickstart"]["pairs"] = pairs(bench, "quickstart", args.rounds, 30)
    print("pairs", result["quickstart"]["pairs"]["ratio"], flush=True)
    (ROOT / "results" / "profiler.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
