"""
Seconds and memory of a step in which all weights train and layers are streamed, beside the resident model.

Sequences of 2,048 tokens, bf16 weights. `--budget` GiB of the device are for the streamed arms.

    resident        `Trainer` with recomputation and 8-bit AdamW of bitsandbytes
    resident_exact  the same with exact states in bf16
    stream_8bit     streamed layers, 8-bit states
    stream          streamed layers, exact states on the host

and both streamed ones with `_in_backward`: nothing is clipped, and layers are updated inside the backward pass.
"""

from __future__ import annotations

import argparse
import tempfile
from typing import Any

import torch
from transformers import Trainer, TrainingArguments

from benchmarks.gpu.models import DEVICE, SHAPES, Clock, build, scaled
from hf_hybrid import HybridConfig, HybridTrainer

IN_BACKWARD = {"max_grad_norm": 0.0, "out_of_memory": "raise"}
ARMS: dict[str, tuple[type, type, dict[str, Any]]] = {
    "resident": (Trainer, TrainingArguments, {"gradient_checkpointing": True, "optim": "adamw_bnb_8bit"}),
    "resident_exact": (Trainer, TrainingArguments, {"gradient_checkpointing": True, "optim": "adamw_torch_fused"}),
    "stream_8bit": (HybridTrainer, HybridConfig, {"memory": "stream", "optimizer_states": "8bit"}),
    "stream": (HybridTrainer, HybridConfig, {"memory": "stream"}),
    "stream_8bit_in_backward": (
        HybridTrainer,
        HybridConfig,
        {"memory": "stream", "optimizer_states": "8bit", **IN_BACKWARD},
    ),
    "stream_in_backward": (HybridTrainer, HybridConfig, {"memory": "stream", **IN_BACKWARD}),
}


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tokens", type=int, nargs="+", default=[2048, 16384], help="Of a step.")
    parser.add_argument("--length", type=int, default=2048, help="Of a sequence.")
    parser.add_argument("--budget", type=float, default=8.0, help="GiB of the device.")


def cases(args: argparse.Namespace) -> list[dict[str, Any]]:
    return [{"shape": args.shape, "kind": scaled(args.shape, tokens), "budget": args.budget} for tokens in args.tokens]


class Sequences(torch.utils.data.Dataset):
    """Random tokens."""

    def __init__(self, vocabulary: int, length: int):
        self.vocabulary, self.length = vocabulary, length

    def __len__(self):
        return 4096

    def __getitem__(self, index):
        tokens = torch.randint(self.vocabulary, (self.length,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": tokens, "labels": tokens}


def run(case: dict[str, Any], arm: str, args: argparse.Namespace) -> dict[str, Any]:
    """Train one arm. Returns what the row of the results says."""
    trainer_class, config_class, more = ARMS[arm]
    streamed = more.get("memory") == "stream"
    model = build(args.shape, lora=False)  # on the device, where 8B random numbers take no time
    if streamed:
        model.to("cpu")
        if DEVICE == "cuda":
            torch.cuda.empty_cache()
        more = {**more, "vram_budget_gib": args.budget, "offload_activations": True, "enable_predict": False}
    clock, length = Clock(1, args.steps, args.profile), scaled(args.shape, args.length)
    with tempfile.TemporaryDirectory() as folder:
        config = config_class(
            folder,
            max_steps=clock.max_steps,
            per_device_train_batch_size=1,
            gradient_accumulation_steps=max(1, case["kind"] // length),
            learning_rate=1e-5,
            save_strategy="no",
            logging_strategy="no",
            report_to="none",
            disable_tqdm=True,
            remove_unused_columns=False,
            dataloader_num_workers=2,
            use_cpu=DEVICE == "cpu",
            **more,
        )
        data = Sequences(SHAPES[args.shape]["vocab_size"], length)
        trainer = trainer_class(model, config, train_dataset=data, callbacks=[clock])
        trainer.train()
    return clock.measured()
