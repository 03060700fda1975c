"""
Train GPT-2 small (124M parameters, random weights) through all phases, and check the run (about a minute on two idle
CPU cores, with 4 GiB of memory).

    python examples/11_gpt2_small.py
    python examples/11_gpt2_small.py --memory stream --max_steps 8

Nothing is downloaded. The text is Python's documentation. The defaults make a dozen steps of 64 tokens, which shows
that everything works at this size. It says nothing about speed. On a GPU, with your own corpus:

    python examples/11_gpt2_small.py --text_file corpus.txt --block_size 1024 --per_device_train_batch_size 16 \\
        --gradient_accumulation_steps 4 --max_steps 2000 --bf16 True --direction orthogonal --leap_worth 0.2 \\
        --compare_with_trainer True

The script writes `validation.json` and ends with status 1 if a check fails. By default leaps go along
`gradient_memory`. With 64 tokens per step, orthogonalising matrices of this size would cost more than the steps
themselves (docs/from_scratch.md). This run was never made on a GPU.
"""

from __future__ import annotations

import json
import math
import runpy
from dataclasses import dataclass, field
from pathlib import Path
from pydoc_data import topics
from typing import Optional

from hf_hybrid.cli.console import quiet_imports

with quiet_imports():
    from datasets import Dataset
    from transformers import GPT2Config, GPT2LMHeadModel, HfArgumentParser, set_seed

    from hf_hybrid import HybridConfig, HybridTrainer

from_scratch = runpy.run_path(str(Path(__file__).with_name("07_from_scratch.py")))

PARAMETERS = 124_439_808


@dataclass
class ScriptArguments:
    text_file: Optional[str] = field(default=None, metadata={"help": "Text to train on. Default: Python's docs."})
    block_size: int = field(default=64, metadata={"help": "Tokens per training sequence."})
    n_layer: int = field(default=12, metadata={"help": "Layers; GPT-2 small has 12."})
    n_embd: int = field(default=768, metadata={"help": "Width, a multiple of 64; GPT-2 small has 768."})
    compare_with_trainer: bool = field(
        default=False, metadata={"help": "Also run plain Trainer for as many backward passes."}
    )


def gpt2(script: ScriptArguments, tokenizer, seed: int) -> GPT2LMHeadModel:
    """Build GPT-2 with random weights. Its vocabulary is larger than the vocabulary of this script's tokenizer."""
    set_seed(seed)
    sizes = {"n_layer": script.n_layer, "n_embd": script.n_embd, "n_head": max(script.n_embd // 64, 1)}
    end = {"bos_token_id": tokenizer.eos_token_id, "eos_token_id": tokenizer.eos_token_id}
    return GPT2LMHeadModel(GPT2Config(**sizes, **end, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0))


def load_blocks(script: ScriptArguments, seed: int):
    """Make the tokenizer, the training set and a few sequences for evaluation."""
    texts = [Path(script.text_file).read_text()] if script.text_file else list(topics.topics.values())
    tokenizer = from_scratch["train_tokenizer"](texts, vocab_size=8192)
    data = from_scratch["blocks"](Dataset.from_dict({"text": texts}), tokenizer, script.block_size)
    split = data.train_test_split(0.05, seed=seed)
    return tokenizer, split["train"], split["test"].select(range(min(len(split["test"]), 8)))


def validate(summary: dict, before: float, after: float, steps: int) -> dict[str, bool]:
    """Check facts that must hold for every run of this script."""
    phases = summary["steps_by_phase"]
    return {
        "every phase was reached": all(phases[name] > 0 for name in ("warmup", "full", "predict", "correct")),
        "every step is accounted for": sum(phases.values()) == steps,
        "leaps were made": len(summary["leaps"]) > 0,
        "backward passes were avoided": summary["backward_passes_avoided"] > 0,
        "losses are finite": math.isfinite(before) and math.isfinite(after),
        "the held-out loss fell": after < before,
    }


def main() -> None:
    parser = HfArgumentParser((ScriptArguments, HybridConfig))
    parser.set_defaults(
        output_dir="out/gpt2_small", max_steps=12, learning_rate=6e-4, per_device_train_batch_size=1,
        per_device_eval_batch_size=4, warmup_phase_steps=2, full_phase_steps=2, correct_phase_steps=1,
        leap_worth=6.0, probe_budget=0.5,
        direction="gradient_memory", leap_gain=1.0,
        divergence_threshold=20.0, logging_steps=1, save_strategy="no", report_to="none", dataloader_pin_memory=False,
    )  # fmt: skip
    script, args = parser.parse_args_into_dataclasses()
    tokenizer, train_set, evaluation = load_blocks(script, args.seed)
    model = gpt2(script, tokenizer, args.seed)
    count = model.num_parameters()
    data = {"train_dataset": train_set, "eval_dataset": evaluation}

    trainer = HybridTrainer(model, args, processing_class=tokenizer, **data)
    trainer.probe_sequences = 2  # eight would cost more than the few steps of this run
    before = trainer.evaluate()["eval_loss"]
    result = trainer.train()
    after = trainer.evaluate()["eval_loss"]
    summary = trainer.hybrid_summary()
    checks = validate(summary, before, after, args.max_steps)
    if (script.n_layer, script.n_embd) == (12, 768):
        checks["it is GPT-2 small"] = count == PARAMETERS
    held = {name: place["device"] + place["host"] for name, place in summary["memory"]["held"].items()}
    found = {
        "parameters": count, "steps_by_phase": summary["steps_by_phase"],
        "backward_passes": summary["backward_passes"], "eval_loss": {"before": before, "after": after},
        "seconds": result.metrics["train_runtime"], "held_bytes": held, "checks": checks,
    }  # fmt: skip
    if script.compare_with_trainer:
        del trainer, model
        again = gpt2(script, tokenizer, args.seed)
        plain = from_scratch["plain_trainer"](again, args, summary["real_steps"], **data)
        plain.train()
        found["eval_loss"]["Trainer"] = plain.evaluate()["eval_loss"]
    file = Path(args.output_dir) / "validation.json"
    file.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")

    print(f"\nparameters       {count:,}")
    print(f"steps by phase   {'  '.join(f'{name} {steps}' for name, steps in found['steps_by_phase'].items())}")
    print(f"evaluation loss  {'  '.join(f'{name} {loss:.4f}' for name, loss in found['eval_loss'].items())}")
    print(f"held             {'  '.join(f'{name} {size / 2**20:.0f} MiB' for name, size in held.items() if size)}")
    for name, holds in checks.items():
        print(f"{'ok  ' if holds else 'NOT '} {name}")
    print(file)
    raise SystemExit(0 if all(checks.values()) else 1)


if __name__ == "__main__":
    main()
