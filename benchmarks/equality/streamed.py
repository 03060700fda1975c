"""
Streamed training against plain Trainer, bit for bit, on every causal language model architecture.

    python -m benchmarks.equality.streamed                      # all types, within an hour; goes on where it stopped
    python -m benchmarks.equality.streamed --walk layer         # windows layer by layer instead
    python -m benchmarks.equality.streamed --walk in_backward   # so, and each layer updated inside the backward pass
    python -m benchmarks.equality.streamed --walk experts       # by layer, and frozen experts travel by their use
    python -m benchmarks.equality.streamed --walk graphs        # by layer, and the last passes keep their graphs
    python -m benchmarks.equality.streamed --walk micro_batch_graphs
    python -m benchmarks.equality.streamed --only llama gpt2    # some types, also where they are there

Each model type registered for `AutoModelForCausalLM`, and three models of images and text, are built with a tiny random
configuration and trained 20 steps twice: with plain `transformers.Trainer`, and with `HybridTrainer(memory="stream",
enable_predict=False)`. Both with AdamW, clipping, 4 micro-batches per step, weight-decay groups and a cosine schedule,
in fp32 on the CPU. Losses, gradient norms and final weights must be equal to the last bit. Types without a list of
decoder layers must be refused with the error that says what was looked for. Nothing is downloaded.

For windows layer by layer, both trainers get models without dropout, noise and tied embeddings: this walk draws random
numbers in another order, and adds the gradients of embeddings and head in another order. It is asked for by `auto`, as
users have it, so a type whose layers cannot be walked falls back to micro-batches; `outcome` says so. Updates inside
the backward pass need runs without clipping. For `experts` fused experts are frozen in both trainers, and types without
any are left out. With `graphs` five passes keep theirs: all through the last layer and one through the layer before,
or in a walk by micro-batch all through these layers.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

os.environ["CUDA_VISIBLE_DEVICES"] = ""

import torch
from rig import with_eyes
from rig.tiny_architectures import VOCAB, causal_lm_types, samples, tiny_config
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel, Trainer, TrainingArguments
from transformers.trainer_callback import PrinterCallback

from benchmarks.equality.pool import Worker
from benchmarks.results import Results, Row, command_line, provenance
from hf_hybrid import HybridConfig, HybridTrainer
from hf_hybrid.streaming.layers import NoLayerListError
from hf_hybrid.streaming.walk import CannotWalkError

STEPS, MICRO_BATCHES = 20, 4
ASKED = {"micro_batch": "micro_batch", "layer": "auto", "in_backward": "auto", "experts": "auto", "graphs": "auto"}
ASKED["micro_batch_graphs"] = "micro_batch"
"""By walk the value of `accumulation_walk`."""


def arguments(folder: str, walk: str) -> dict:
    """The arguments of both trainers."""
    return {
        "output_dir": folder,
        "max_steps": STEPS,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": MICRO_BATCHES,
        "learning_rate": 1e-3,
        "weight_decay": 0.1,
        "max_grad_norm": 0.0 if walk == "in_backward" else 0.5,
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
    """Train. Returns the loss and the gradient norm of every step, and the weights at the end."""
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    rows = [(e["loss"], e["grad_norm"]) for e in trainer.state.log_history if "loss" in e]
    return {"steps": rows, "weights": {n: p.detach().clone() for n, p in trainer.model.named_parameters()}}


def difference(first: dict, second: dict) -> str:
    """The first difference of two runs in words; an empty string if there is none."""
    for step, (a, b) in enumerate(zip(first["steps"], second["steps"]), start=1):
        if a != b:
            return f"step {step}: loss and gradient norm {a} against {b}"
    wrong = [n for n, w in first["weights"].items() if not torch.equal(w, second["weights"][n])]
    if wrong:
        largest = max((first["weights"][n] - second["weights"][n]).abs().max().item() for n in wrong)
        return f"{len(wrong)} of {len(first['weights'])} parameters differ by at most {largest:.1e}"
    return ""


def build(model_type: str, walk: str) -> PreTrainedModel:
    """A randomly initialised tiny model. For a walk by layer nothing in it is drawn, and embeddings are not tied."""
    of_images = model_type in with_eyes.KINDS
    config = with_eyes.config(model_type, vocab_size=VOCAB) if of_images else tiny_config(model_type)
    family: Any = AutoModelForImageTextToText if of_images else AutoModelForCausalLM
    torch.manual_seed(0)
    if ASKED[walk] == "micro_batch":
        return family.from_config(config, dtype=torch.float32)
    for part in (config, config.get_text_config()):
        part.tie_word_embeddings = False
    model = family.from_config(config, dtype=torch.float32)
    for holder in (*model.modules(), config):  # BigBird makes modules from its config while it trains
        for name, value in vars(holder).items():
            if isinstance(value, float) and any(word in name for word in ("dropout", "layerdrop", "jitter")):
                setattr(holder, name, 0.0)
        if isinstance(holder, torch.nn.Dropout):
            holder.p = 0.0
    for experts in fused_experts(model) if walk == "experts" else ():
        experts.requires_grad_(False)
    return model


def fused_experts(model: PreTrainedModel) -> list[torch.nn.Module]:
    """The modules that hold the experts of a layer."""
    return [module for module in model.modules() if hasattr(module, "num_experts") and hasattr(module, "has_gate")]


def check(model_type: str, walk: str) -> Row:
    """Train a type in both ways, and return the row."""
    row = {"model_type": model_type, "walk": walk, "outcome": "", "detail": "", "units": 0, "loads": 0}
    try:
        with tempfile.TemporaryDirectory() as folder:
            model, data = build(model_type, walk), samples()
            if walk == "experts" and not fused_experts(model):
                return {**row, "outcome": "no fused experts"}
            plain = train(Trainer(model, TrainingArguments(**arguments(folder, walk)), train_dataset=data))
    except Exception as error:
        return {**row, "outcome": "plain fails", "detail": f"{type(error).__name__}: {error}"[:200]}
    try:
        with tempfile.TemporaryDirectory() as folder:
            options = {"memory": "stream", "enable_predict": False}
            if walk == "in_backward":
                options["out_of_memory"] = "raise"
            config = HybridConfig(**arguments(folder, walk), **options, accumulation_walk=ASKED[walk])
            config.plan_values = {"kept_graphs": 5} if "graphs" in walk else {}
            trainer = HybridTrainer(build(model_type, walk), config, train_dataset=data)
            if walk == "experts" and not any(unit.storage.experts for unit in trainer.memory.streamer.units):
                return {**row, "outcome": "experts travel whole"}
            streamed = train(trainer)
            statistics = trainer.memory_summary()["statistics"]
        row["units"], row["loads"] = statistics["streamed_units"], statistics["loads"]
        row["detail"] = difference(plain, streamed)
        walked = ASKED[walk] == "micro_batch" or trainer.memory.window.by_layer
        row["outcome"] = "differs" if row["detail"] else "equal" if walked else "equal, falls back"
    except NoLayerListError as error:
        row["outcome"], row["detail"] = "no layer list", str(error)
    except CannotWalkError as error:  # found after a layer was updated
        row["outcome"], row["detail"] = "asks for the other walk", str(error)
    except Exception as error:
        row["outcome"], row["detail"] = "fails", f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]
    return row


def main() -> int:
    parser = command_line(__doc__, Path(__file__).resolve().parent)
    parser.add_argument("--only", nargs="+", metavar="TYPE", help="Check these model types only.")
    parser.add_argument("--walk", choices=ASKED, default="micro_batch", help="How a window of micro-batches is walked.")
    parser.add_argument("--timeout", type=float, default=120.0, help="Seconds for one model type.")
    options = parser.parse_args()
    results, rows = Results(options.results, "streamed", ("model_type", "walk")), []
    types = [*causal_lm_types(), *with_eyes.KINDS]
    with Worker(options.timeout) as worker:
        for model_type in options.only or types:
            key = {"model_type": model_type, "walk": options.walk}
            row = None if options.only else results.get(**key)
            if row is None:
                row = worker.ask(check, model_type, options.walk)
                row = row or {**key, "outcome": "fails", "detail": "no answer in time"}
                row = results.add({**row, **provenance(1)})
            rows.append(row)
            label = f"[{len(rows)}/{len(options.only or types)}] {model_type:<28}"
            print(f"{label} {row['outcome']:<18} {row['detail']}", flush=True)
    counts = Counter(row["outcome"] for row in rows)
    print("\n" + ", ".join(f"{count} {outcome}" for outcome, count in sorted(counts.items())))
    return int("differs" in counts or "fails" in counts)


if __name__ == "__main__":
    sys.exit(main())
