"""
int8 probes on torch's and on bitsandbytes' engine: noise and seconds, on the CPU. A minute; one thread.

    python -m benchmarks.memory.int8_engines

- `noise`: variance that int8 adds to the paired difference of a probe, over the probe's own variance ([`added_noise`]),
  for each probe of a short training. Probes run in full precision and in int8, and the former count, so both engines
  see the same leaps of the same weights. The model is the 1.1M Llama of
  `examples/07_from_scratch.py` on the source of Python's standard library.
- `seconds`: median forward pass of a Llama of width 512 with 4 layers, 8 x 128 tokens, in full precision (fp32) and on
  each engine, in turn. Weights are rounded before the pass, as for a probe, and this is not in it.
"""

from __future__ import annotations

import json
import math
import statistics
import tempfile
import time
from pathlib import Path

import torch

from benchmarks.memory.parts import llama
from benchmarks.results import Results, command_line, provenance
from benchmarks.speedup.tasks import QUIET, TASKS, TextAndModels
from hf_hybrid import HybridConfig, HybridTrainer
from hf_hybrid.experimental.precision import PhaseMemory
from hf_hybrid.part import Phase
from hf_hybrid.run.run import Run

ENGINES = {"torch": "int8", "bitsandbytes": "int8_bitsandbytes"}
SEEDS, STEPS, PASSES = (0,), 20, 3


def added_noise(full_before: list, full_after: list, int8_before: list, int8_after: list) -> float:
    """
    Return the variance that int8 adds to a paired probe, over the probe's own: 0.1 means ten per cent more.

    Rounding shifts the differences of all sequences alike, so its square counts beside the error of its mean.
    """
    full = [before - after for before, after in zip(full_before, full_after)]
    error = [before - after - difference for before, after, difference in zip(int8_before, int8_after, full)]
    of_mean = 1 / len(full)
    square = statistics.fmean(error) ** 2 + of_mean * statistics.variance(error)
    return square / (of_mean * statistics.variance(full))


class Measuring(PhaseMemory):
    """Evaluates each batch of a probe in full precision, which counts, and in int8, and compares them."""

    def __init__(self, engine: str):
        super().__init__(f"predict={ENGINES[engine]}")
        self.int8, self.pairs, self.noises = False, {}, []

    def probe_losses(self, evaluate):
        def losses(batch):
            result = evaluate(batch)
            self.int8 = True
            try:
                self.pairs.setdefault(id(batch), []).append((result.values, evaluate(batch).values))
            finally:
                self.int8 = False
            return result

        return losses

    def before_forward(self, phase):
        super().before_forward(phase)
        if phase is not Phase.PREDICT:
            self.close_look()

    def close_look(self):
        """Compare what was evaluated since the last real step: each batch before a leap and after it."""
        pairs = [seen[:2] for seen in self.pairs.values() if len(seen) > 1]
        self.pairs = {}
        losses = [[loss for pair in pairs for loss in pair[when][which]] for which in (0, 1) for when in (0, 1)]
        if len(losses[0]) > 1 and losses[0] != losses[1] and all(map(math.isfinite, losses[0] + losses[1])):
            self.noises.append(added_noise(*losses))


def noises(sources: TextAndModels, engine: str, seed: int) -> list[float]:
    """Return the added noise of each probe of a training, ascending."""
    part = Measuring(engine)
    options = {"probe_budget": 1.0, "leap_budget": 100.0, "learning_rate": 1e-3, "warmup_steps": 5, "seed": seed}
    with tempfile.TemporaryDirectory() as folder:
        config = HybridConfig(folder, max_steps=STEPS, per_device_train_batch_size=8, use_cpu=True, **QUIET, **options)
        model, data = sources.model(TASKS["code"], seed), sources.split("code")["train"]
        HybridTrainer(model, config, train_dataset=data, parts=[part]).train()
    part.close_look()
    return sorted(part.noises)


def seconds() -> dict[str, float]:
    """Return the median seconds of a forward pass, by engine and in full precision."""
    model, ids = llama(512, 4), torch.randint(256, (8, 128))
    parts = {engine: PhaseMemory(f"predict={word}") for engine, word in ENGINES.items()}
    for part in parts.values():
        part.begin(Run(model=model, max_steps=1))
    found: dict[str, list[float]] = {name: [] for name in ("fp32", *ENGINES)}
    for _ in range(PASSES):
        for name, values in found.items():
            if name in parts:
                parts[name].before_probe()
            began = time.perf_counter()
            with torch.no_grad():
                model(input_ids=ids, use_cache=False)
            values.append(time.perf_counter() - began)
            if name in parts:
                parts[name].after_probe()
    return {name: statistics.median(values) for name, values in found.items()}


def main() -> None:
    args = command_line(__doc__, Path(__file__).resolve().parent).parse_args()
    torch.set_num_threads(1)
    results, sources, clocked = Results(args.results, "int8_engines", ("engine",)), TextAndModels(), seconds()
    for engine in ENGINES:
        found = sorted(noise for seed in SEEDS for noise in noises(sources, engine, seed))
        noise = {"probes": len(found), "median": statistics.median(found), "largest": found[-1],
                 "above_a_tenth": sum(value >= 0.1 for value in found)}  # fmt: skip
        row = {"engine": engine, "noise": noise, "seconds": clocked[engine], "seconds_fp32": clocked["fp32"]}
        print(json.dumps(results.add({**row, "steps": STEPS, "seeds": SEEDS, **provenance(1)}), indent=1))


if __name__ == "__main__":
    main()
