"""
Train every causal language model architecture of the installed transformers through all phases, at tiny size.

    python -m benchmarks.equality.architectures                    # all types, within an hour; goes on where it stopped
    python -m benchmarks.equality.architectures --only llama gpt2  # some types, also where they are there

A drop-in trainer must not care about the architecture. Each model type registered for `AutoModelForCausalLM` is built
with a tiny random configuration, trained a few steps with plain `transformers.Trainer`, and then through every phase
with `HybridTrainer`. The number that matters is the share of the types that plain `Trainer` can train which
`HybridTrainer` can train too; a type that plain `Trainer` cannot train from bare `input_ids` and `labels` is listed
with its reason and is not counted. CPU only, nothing is downloaded.

The exit code is 1 when HybridTrainer trains less than 95 % of the types that plain Trainer trains.
"""

from __future__ import annotations

import math
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["CUDA_VISIBLE_DEVICES"] = ""  # tiny models on the CPU; a GPU would only add start-up time

import torch
from rig.tiny_architectures import build_model, causal_lm_types, samples
from transformers import PreTrainedModel, Trainer, TrainingArguments
from transformers.trainer_callback import PrinterCallback

from benchmarks.equality.pool import Worker
from benchmarks.results import Results, Row, command_line, provenance
from hf_hybrid import HybridConfig, HybridTrainer

PASS_SHARE = 0.95
PLAIN_STEPS, HYBRID_STEPS = 12, 24
PHASES = ("warmup", "full", "predict", "correct")


def _arguments(folder: str, steps: int) -> dict[str, Any]:
    return {
        "output_dir": folder,
        "max_steps": steps,
        "per_device_train_batch_size": 2,
        "learning_rate": 1e-3,
        "logging_steps": 1,
        "logging_nan_inf_filter": False,  # the default shows a NaN loss as a finite one, which would hide a failure
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
        "use_cpu": True,
    }


def _train(trainer: Trainer) -> list[float]:
    """Train, and return the losses. Raises if a weight or a loss is not finite, or no weight changed."""
    trainer.remove_callback(PrinterCallback)
    before = {name: value.detach().clone() for name, value in trainer.model.named_parameters()}
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    if not losses or not all(math.isfinite(loss) for loss in losses):
        raise FloatingPointError(f"losses missing or not finite: {losses[:3]}")
    after = dict(trainer.model.named_parameters())
    if not all(torch.isfinite(value).all() for value in after.values()):
        raise FloatingPointError("weights not finite")
    if all(torch.equal(value, after[name]) for name, value in before.items()):
        raise RuntimeError("no weight changed")
    return losses


def plain_trainer(model: PreTrainedModel, folder: str) -> Trainer:
    """Make the reference. A type that it cannot train does not count."""
    arguments = TrainingArguments(**_arguments(folder, PLAIN_STEPS))
    return Trainer(model=model, args=arguments, train_dataset=samples())


def hybrid_trainer(model: PreTrainedModel, folder: str) -> Trainer:
    """Make a HybridTrainer whose phases are so short that all happen within HYBRID_STEPS steps."""
    config = HybridConfig(
        **_arguments(folder, HYBRID_STEPS),
        direction="orthogonal",  # skips steps from the first leap on
        leap_budget=1e6,  # a step of so few tokens costs little beside a leap
        leap_gain=0.1,
        probe_budget=1.0,  # goes on after refused leaps, which random tokens make likely
        warmup_phase_steps=2,
        full_phase_steps=2,
        correct_phase_steps=1,
        max_predict_steps=2,
        leap_worth=4.0,  # steps granted per real step, from which the cost of a probe is taken
    )
    rows = samples()
    # Random tokens have nothing to learn but themselves.
    return HybridTrainer(model=model, args=config, train_dataset=rows, probe_dataset=rows)


def _check(model_type: str, make_trainer: Callable[[PreTrainedModel, str], Trainer]) -> Row:
    row: Row = {"parameters": None, "losses": [], "error": None, "steps_by_phase": {}}
    try:
        with tempfile.TemporaryDirectory() as folder:
            model = build_model(model_type)
            row["parameters"] = model.num_parameters()
            trainer = make_trainer(model, folder)
            row["losses"] = _train(trainer)
            if make_trainer is hybrid_trainer:  # not passed unless every phase was really reached
                summary = trainer.hybrid_summary()
                row["steps_by_phase"] = dict(summary["steps_by_phase"])
                missing = [phase for phase in PHASES if not row["steps_by_phase"].get(phase)]
                if missing or not summary["leaps"]:
                    raise RuntimeError(f"phases without a step: {missing}, leaps: {len(summary['leaps'])}")
    except Exception as error:
        row["error"] = f"{type(error).__name__}: {' '.join(str(error).split())}"[:240]  # one line
    return row


def check_plain(model_type: str) -> Row:
    """
    Train with `transformers.Trainer`; `error` is `None` if that works, `parameters` is `None` if the model could not be
    built.
    """
    return _check(model_type, plain_trainer)


def check_hybrid(model_type: str) -> Row:
    """Train through all phases with `HybridTrainer`; `error` is `None` if that works."""
    return _check(model_type, hybrid_trainer)


def check(worker: Worker, model_type: str) -> Row:
    """Train with both, and return the row: for each `"ok"`, or the reason of its failure."""
    silent = {"error": f"no answer within {worker.timeout:g} s: it hangs, or it ended its process"}
    plain, hybrid = worker.ask(check_plain, model_type) or silent, {}
    if plain["error"] is None:
        hybrid = worker.ask(check_hybrid, model_type) or silent
    return {
        "model_type": model_type,
        "parameters": plain.get("parameters"),
        "plain": plain["error"] or "ok",
        "hybrid": (hybrid["error"] or "ok") if hybrid else None,
        "steps_by_phase": hybrid.get("steps_by_phase", {}),
    }


def failure(row: Row) -> str:
    """`stage: reason`, or an empty string."""
    if row["plain"] != "ok":
        return f"{'build' if row['parameters'] is None else 'plain'}: {row['plain']}"
    return "" if row["hybrid"] == "ok" else f"hybrid: {row['hybrid']}"


def main() -> int:
    parser = command_line(__doc__, Path(__file__).resolve().parent)
    parser.add_argument("--only", nargs="+", metavar="TYPE", help="Check these model types only.")
    parser.add_argument("--timeout", type=float, default=120.0, help="Seconds for one model type.")
    options = parser.parse_args()
    results, types, rows = Results(options.results, "architectures", ("model_type",)), causal_lm_types(), []
    with Worker(options.timeout) as worker:
        for model_type in options.only or types:
            row = None if options.only else results.get(model_type=model_type)
            rows.append(row or results.add({**check(worker, model_type), **provenance(1)}))
            label = f"[{len(rows)}/{len(options.only or types)}] {model_type:<28} {rows[-1]['parameters'] or 0:>9,}"
            print(label, failure(rows[-1]) or "ok", flush=True)
    built = sum(row["parameters"] is not None for row in rows)
    plain, hybrid = (sum(row[key] == "ok" for row in rows) for key in ("plain", "hybrid"))
    share = hybrid / plain if plain else 0.0
    print(f"\n{len(rows)} types, {built} built, {plain} trained by Trainer, {hybrid} of those by HybridTrainer")
    print("\n".join(f"  {row['model_type']}: {failure(row)}" for row in rows if failure(row)))
    return int(share < PASS_SHARE)


if __name__ == "__main__":
    sys.exit(main())
