"""
CPU seconds of SFT steps with as few recomputed layers as fit, beside TRL's default, which recomputes all. One thread.

    python -m benchmarks.speedup.pretrained      # once: fetches SmolLM2-135M
    export MALLOC_MMAP_MAX_=0 MALLOC_TRIM_THRESHOLD_=100000000000
    python -m benchmarks.memory.recomputation    # adapters and all weights, fifteen minutes

A step is a micro-batch of 4 rows of 256 tokens under bf16 autocast. Budgets lie so far between what the plan says of
all layers recomputed and of none. With these variables the process keeps memory that was freed, as a GPU's allocator
does; without them a step on a CPU spends what it saves on pages that it gets anew. `loss` is that of the last step: it
is the same in every arm of one kind, to the bit. In `streamed` arms so many of the 30 layers keep their graphs.
"""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoTokenizer

from benchmarks.results import Results, command_line, provenance
from benchmarks.skips.rows import Seconds, Text, build, full
from benchmarks.speedup.pretrained import FOLDER
from hf_hybrid import HybridSFTConfig, HybridSFTTrainer
from hf_hybrid.build import estimator_for
from hf_hybrid.plan.setups import MARGIN

ROWS, TOKENS = 4, 256
SHARES = (0.25, 0.5, 0.75)
STREAMED = {f"streamed {graphs}": graphs for graphs in (0, 6, 15, 30)}
ARMS = ("all", *(f"auto {share:.0%}" for share in SHARES), "auto", "none", *STREAMED)


def measure(arm: str, lora: bool, steps: int, needs: dict[str, int]) -> dict[str, Any]:
    """Train with an arm's checkpointing, and return the seconds of each step and the planned bytes."""
    rows, seconds = full(Text(None), ROWS * (steps + 1)), Seconds()
    asked: dict[str, Any] = {"activation_checkpointing": {"all": True, "none": False}.get(arm, "auto")}
    if arm.startswith("auto "):
        share = float(arm[5:-1]) / 100
        needed = needs["all"] + share * (needs["none"] - needs["all"])
        asked["vram_budget_gib"] = (1 + MARGIN) * needed / 2**30
    if arm in STREAMED:
        asked["memory"] = "stream"
    with tempfile.TemporaryDirectory() as folder:
        config = HybridSFTConfig(
            folder, max_steps=steps + 1, per_device_train_batch_size=ROWS, bf16=True, learning_rate=1e-5,
            save_strategy="no", report_to="none", disable_tqdm=True, use_cpu=True, dataloader_pin_memory=False,
            logging_steps=1, max_length=None, share_rows="off", enable_predict=False, **asked,
        )  # fmt: skip
        if arm in STREAMED:
            config.plan_values = {"kept_graphs": STREAMED[arm]}
        trainer = HybridSFTTrainer(
            build("smollm2", lora), config, train_dataset=Dataset.from_list(rows), callbacks=[seconds],
            processing_class=AutoTokenizer.from_pretrained(FOLDER),
        )  # fmt: skip
        if not needs:
            needs |= planned(trainer)
            return measure(arm, lora, steps, needs)
        trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    layers = 30 - STREAMED[arm] if arm in STREAMED else {"all": 30, "none": 0}.get(arm)
    layers = trainer.hybrid_summary().get("recomputed_layers", layers)
    return {"seconds": seconds.found[1:], "loss": losses[-1], "recomputed_layers": layers, "needs": dict(needs)}


def planned(trainer: HybridSFTTrainer) -> dict[str, int]:
    """Return the planned bytes of the trainer's step with all layers recomputed, and with none."""
    estimator, setup = estimator_for(trainer, None)
    estimator.tracer.may_recompute_some()
    setups = {name: replace(setup, memory="off", activation_checkpointing=name == "all") for name in ("all", "none")}
    return {name: estimator.resident(asked).peak_device_bytes for name, asked in setups.items()}


def main() -> None:
    parser = command_line(__doc__, Path(__file__).parent)
    parser.add_argument("--arm", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--trains", nargs="+", choices=["adapters", "all weights"], default=["adapters", "all weights"])
    parser.add_argument("--steps", type=int, default=3, help="Steps that are measured.")
    args = parser.parse_args()
    torch.set_num_threads(1)
    results = Results(args.results, "recomputation", ("trains", "arm"))
    for trains in args.trains:
        needs: dict[str, int] = {}
        for arm in args.arm:
            measured = measure(arm, trains == "adapters", args.steps, needs)
            results.add({**provenance(1), "trains": trains, "arm": arm, **measured})
            print(trains, arm, measured, flush=True)


if __name__ == "__main__":
    main()
