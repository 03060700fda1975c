"""
Held-out loss and seconds of training from scratch: AdamW, leaps, Muon and `preset="fast"`.

The text is the source of Python's library and of the installed packages, in words that are learned from it; every
twentieth file is held out. A step is 32 sequences of 1,024 tokens, the schedule a cosine with 5 % warm-up. Each arm
runs at each of `--rates` and with each of `--seeds`, which draw the weights and the order of the data: compare arms at
AdamW's best rate. A CPU runs an arm of this in ten minutes:

    python -m benchmarks.gpu scratch --shape 10m --rows 16 --length 256 --files 3000 --rates 1.2e-3 --seeds 0 1

    adamw     `Trainer`
    hybrid    HybridTrainer, defaults: AdamW with leaps
    muon      HybridTrainer, `optim="muon"`, no leaps
    fast      HybridTrainer, `preset="fast"`
"""

from __future__ import annotations

import argparse
import functools
import itertools
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import Trainer, TrainingArguments

from benchmarks.gpu.models import COMMON, DEVICE, SHAPES, Clock, build
from benchmarks.gpu.sft import saved
from benchmarks.texts import standard_library
from hf_hybrid import HybridConfig, HybridTrainer

ARMS: dict[str, tuple[type, type, dict[str, Any]]] = {
    "adamw": (Trainer, TrainingArguments, {}),
    "hybrid": (HybridTrainer, HybridConfig, {}),
    "muon": (HybridTrainer, HybridConfig, {"optim": "muon", "enable_predict": False}),
    "fast": (HybridTrainer, HybridConfig, {"preset": "fast"}),
}


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rates", nargs="+", type=float, default=[6e-4], help="Learning rates, each a case.")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0], help="Of weights and order, each a case.")
    parser.add_argument("--run_steps", type=int, default=400, help="Steps of a run.")
    parser.add_argument("--length", type=int, default=1024, help="Tokens of a sequence.")
    parser.add_argument("--rows", type=int, default=32, help="Sequences of a step.")
    parser.add_argument("--files", type=int, default=6000, help="Files that are read at most.")


def cases(args: argparse.Namespace) -> list[dict[str, Any]]:
    texts(args.files, SHAPES[args.shape]["vocab_size"])  # read once, for the processes of all arms
    runs = itertools.product(args.rates, args.seeds)
    return [{"shape": args.shape, "kind": rate, "seed": seed, "run_steps": args.run_steps} for rate, seed in runs]


@functools.cache
def texts(files: int, words: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the tokens that are trained on, and those that are held out, each in one row."""
    packages = sorted(Path(sysconfig.get_path("purelib")).rglob("*.py"))
    sources = itertools.chain(standard_library(), ((path, path.read_text(errors="ignore")) for path in packages))
    read = [text for _, text in itertools.islice(sources, files)]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    learned = trainers.BpeTrainer(vocab_size=words, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(read[:1000], learned)
    tokens: tuple[list[int], list[int]] = [], []
    for number, text in enumerate(read):
        tokens[number % 20 == 19].extend(tokenizer.encode(text).ids)
    return torch.tensor(tokens[0], dtype=torch.int32), torch.tensor(tokens[1], dtype=torch.int32)


class Blocks(torch.utils.data.Dataset):
    """Sequences of one length."""

    def __init__(self, tokens: torch.Tensor, length: int, most: int | None = None):
        self.tokens, self.length = tokens, length
        self.count = min(len(tokens) // length, most or len(tokens))

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = self.tokens[index * self.length : (index + 1) * self.length].long()
        return {"input_ids": ids, "labels": ids}


def run(case: dict[str, Any], arm: str, args: argparse.Namespace) -> dict[str, Any]:
    """Train one arm and evaluate it. Returns what the row of the results says."""
    trainer_class, config_class, more = ARMS[arm]
    trained, held_out = texts(args.files, SHAPES[args.shape]["vocab_size"])
    clock = Clock(args.warm_up, args.run_steps - args.warm_up)
    with tempfile.TemporaryDirectory() as folder:
        config = config_class(
            folder,
            max_steps=args.run_steps,
            per_device_train_batch_size=args.rows,
            per_device_eval_batch_size=args.rows,
            learning_rate=case["kind"],
            lr_scheduler_type="cosine",
            seed=case["seed"],
            warmup_steps=max(1, args.run_steps // 20),
            weight_decay=0.1,
            adam_beta2=0.95,
            dataloader_num_workers=4 if DEVICE == "cuda" else 0,
            **COMMON,
            **more,
        )
        model = build(args.shape, lora=False, seed=case["seed"]).float()
        data, rest = Blocks(trained, args.length), Blocks(held_out, args.length, 16 * args.rows)
        trainer = trainer_class(model, config, train_dataset=data, eval_dataset=rest, callbacks=[clock])
        trainer.train()
        loss = trainer.evaluate()["eval_loss"]
    passes = saved(trainer, "backward_passes").get("backward_passes") or args.run_steps  # 0: none is skipped or counted
    return {**clock.measured(), "eval_loss": loss, "backward_passes": passes, **saved(trainer, "no_leaps")}
