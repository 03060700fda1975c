"""
int8 probes on torch's and on bitsandbytes' engine: noise and seconds, on the CPU. A minute; one thread.

    python -m benchmarks.memory.int8_engines

- `noise`: variance that int8 adds to the paired difference of a probe, over the probe's own variance
  (`hf_hybrid.phase_memory.int8.added_noise`), for each probe of a short training. Probes run in full precision and in
  int8, and the former count, so both engines see the same leaps of the same weights. The model is the 1.1M Llama of
  `examples/01_quickstart.py` on the source of Python's standard library.
- `seconds`: median forward pass of a Llama of width 512 with 4 layers, 8 x 128 tokens, in full precision (fp32) and on
  each engine, in turn. Weights are rounded before the pass, as for a probe, and this is not in it.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch

from benchmarks.memory.parts import llama
from benchmarks.results import Results, command_line, provenance
from benchmarks.speedup.tasks import QUIET, TASKS, TextAndModels
from hf_hybrid import HybridConfig, HybridTrainer
from hf_hybrid.phase_memory.int8 import Int8Predict
from hf_hybrid.run.run import Run

ENGINES = ("torch", "bitsandbytes")
SEEDS, STEPS, PASSES = (0,), 20, 3


def noises(sources: TextAndModels, engine: str, seed: int) -> list[float]:
    """Return the added noise of each probe of a training, ascending."""
    part = Int8Predict("auto", engine=engine, min_features=1)
    part.meter.LOOKS = sys.maxsize  # measure to the end, and never decide
    options = {"probe_budget": 1.0, "leap_budget": 100.0, "learning_rate": 1e-3, "warmup_steps": 5, "seed": seed}
    with tempfile.TemporaryDirectory() as folder:
        config = HybridConfig(folder, max_steps=STEPS, per_device_train_batch_size=8, use_cpu=True, **QUIET, **options)
        model, data = sources.model(TASKS["code"], seed), sources.split("code")["train"]
        HybridTrainer(model, config, train_dataset=data, parts=[part]).train()
    part.meter.close_look()
    return sorted(part.meter.noises)


def seconds() -> dict[str, float]:
    """Return the median seconds of a forward pass, by engine and in full precision."""
    model, ids = llama(512, 4), torch.randint(256, (8, 128))
    parts = {engine: Int8Predict("on", engine=engine, offload_master=False) for engine in ENGINES}
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
