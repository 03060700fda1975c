"""Streamed training against plain Trainer, bit for bit, on every causal language model architecture.

What: builds each model type registered for `AutoModelForCausalLM` with a tiny random configuration and trains it 20
steps twice: with plain `transformers.Trainer`, and with `HybridTrainer(memory="stream", enable_predict=False)`. Both
with AdamW, clipping, 4 micro-batches per step, weight-decay groups and a cosine schedule, in fp32 on the CPU. Losses,
gradient norms and final weights must be equal to the last bit.

Types without a list of decoder layers must be refused with the error that says what was looked for.

How to run (CPU only, nothing is downloaded):

    python benchmarks/streamed_architectures.py                       # all types, results in benchmarks/results
    python benchmarks/streamed_architectures.py --only llama gpt2     # some types
"""

import argparse
import json
import multiprocessing
import os
import sys
import tempfile
import time
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ["CUDA_VISIBLE_DEVICES"] = ""

import torch
from architectures import _prepare_worker, _samples, build_model, causal_lm_types, report_versions
from transformers import Trainer, TrainingArguments
from transformers.trainer_callback import PrinterCallback

STEPS, MICRO_BATCHES = 20, 4
WALKS = ("micro_batch", "layer")


def arguments(folder: str) -> dict:
    """What both trainers are given."""
    return {
        "output_dir": folder,
        "max_steps": STEPS,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": MICRO_BATCHES,
        "learning_rate": 1e-3,
        "weight_decay": 0.1,
        "max_grad_norm": 0.5,
        "lr_scheduler_type": "cosine",
        "warmup_steps": 3,
        "logging_steps": 1,
        "logging_nan_inf_filter": False,
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
        "use_cpu": True,
    }


def train(trainer: Trainer) -> dict:
    """Losses and gradient norms of every step, and the weights at the end."""
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    rows = [(e["loss"], e["grad_norm"]) for e in trainer.state.log_history if "loss" in e]
    return {"steps": rows, "weights": {n: p.detach().clone() for n, p in trainer.model.named_parameters()}}


def difference(first: dict, second: dict) -> str:
    """How two runs differ; empty for not at all."""
    for step, (a, b) in enumerate(zip(first["steps"], second["steps"]), start=1):
        if a != b:
            return f"step {step}: loss and gradient norm {a} against {b}"
    wrong = [n for n, w in first["weights"].items() if not torch.equal(w, second["weights"][n])]
    if wrong:
        largest = max((first["weights"][n] - second["weights"][n]).abs().max().item() for n in wrong)
        return f"{len(wrong)} of {len(first['weights'])} parameters differ by at most {largest:.1e}"
    return ""


def check(model_type: str, walk: str) -> dict:
    """One row of the table."""
    from hf_hybrid import HybridConfig, HybridTrainer
    from hf_hybrid.streaming.layers import NoLayerListError

    row = {"model_type": model_type, "walk": walk, "outcome": "", "detail": "", "units": 0, "loads": 0}
    try:
        with tempfile.TemporaryDirectory() as folder:
            model, data = build_model(model_type), _samples()
            plain = train(Trainer(model, TrainingArguments(**arguments(folder)), train_dataset=data))
    except Exception as error:
        return {**row, "outcome": "plain fails", "detail": f"{type(error).__name__}: {error}"[:200]}
    try:
        with tempfile.TemporaryDirectory() as folder:
            options = {"memory": "stream", "enable_predict": False, "accumulation_walk": walk}
            config = HybridConfig(**arguments(folder), **options)
            trainer = HybridTrainer(build_model(model_type), config, train_dataset=data)
            streamed = train(trainer)
            statistics = trainer.memory_summary()["statistics"]
        row["units"], row["loads"] = statistics["streamed_units"], statistics["loads"]
        row["detail"] = difference(plain, streamed)
        row["outcome"] = "differs" if row["detail"] else "equal"
    except NoLayerListError as error:
        row["outcome"], row["detail"] = "no layer list", str(error)
    except Exception as error:
        row["outcome"], row["detail"] = "fails", f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]
    return row


def main() -> int:
    """Command line entry point; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", metavar="TYPE")
    parser.add_argument("--walk", choices=WALKS, default="micro_batch")
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/streamed_architectures.json"))
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds for one model type")
    options = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    pool, rows = context.Pool(1, _prepare_worker), []
    types = options.only or causal_lm_types()
    for model_type in types:
        try:
            row = pool.apply_async(check, (model_type, options.walk)).get(options.timeout)
        except multiprocessing.TimeoutError:
            pool.terminate()
            pool = context.Pool(1, _prepare_worker)
            row = {"model_type": model_type, "walk": options.walk, "outcome": "fails", "detail": "no answer in time"}
        rows.append(row)
        print(f"[{len(rows)}/{len(types)}] {model_type:<28} {row['outcome']:<14} {row['detail']}", flush=True)
    pool.terminate()
    outcomes = [row["outcome"] for row in rows]
    counts = {outcome: outcomes.count(outcome) for outcome in sorted(set(outcomes))}
    result = {
        **report_versions(),
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "counts": counts,
        "rows": rows,
    }
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(result, indent=1) + "\n")
    print("\n" + ", ".join(f"{count} {outcome}" for outcome, count in counts.items()))
    return int("differs" in counts or "fails" in counts)


if __name__ == "__main__":
    sys.exit(main())
