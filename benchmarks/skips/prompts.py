"""
CPU seconds of an update with prompts that are computed once, on SmolLM2-135M. A quarter of an hour; one thread.

    python -m benchmarks.speedup.pretrained      # once: fetches the model
    python -m benchmarks.skips.prompts

An update is loss and backward pass of one micro-batch, fp32, all weights. DPO has a pass of the reference model too.
The texts are Python's language reference, prompts twice as long as completions. TRL's rows (`share_rows="off"`, equal
to TRL's trainer to the last bit) and shared ones are computed in turn by the same trainer. Beside the seconds stands
the largest relative difference of a parameter's gradient.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from datasets import Dataset
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.results import Results, command_line, provenance
from benchmarks.speedup.pretrained import FOLDER
from benchmarks.texts import language_reference
from hf_hybrid import HybridDPOConfig, HybridDPOTrainer, HybridGRPOConfig, HybridGRPOTrainer

PROMPT = 128
CASES = {
    "pairs": (2, [PROMPT] * 4),
    "pairs of different lengths": (2, [64, 96, 160, 192]),
    "groups of 4": (4, [PROMPT] * 2),
}
"""Completions per prompt, and the lengths of the prompts."""
COMMON = {
    "report_to": "none", "use_cpu": True, "bf16": False, "disable_tqdm": True, "dataloader_pin_memory": False,
    "save_strategy": "no",
}  # fmt: skip


def passages(tokenizer, count: int, prompts: list[int]) -> list[tuple[list[int], list[list[int]]]]:
    """Return prompts and for each `count` completions of half its length, as token ids."""
    ids = tokenizer(" ".join(language_reference()))["input_ids"]
    found, place = [], 0
    for length in prompts:
        cuts = [place, place + length]
        cuts += [cuts[-1] + length // 2 * (number + 1) for number in range(count)]
        prompt, *completions = (ids[begin:end] for begin, end in zip(cuts, cuts[1:]))
        found.append((prompt, completions))
        place = cuts[-1]
    return found


def preference_update(folder: str, texts, tokenizer) -> tuple[HybridDPOTrainer, Callable[[], Tensor]]:
    """Return a trainer and the loss of a micro-batch of pairs."""
    rows = [{"prompt_ids": p, "chosen_ids": chosen, "rejected_ids": rejected} for p, (chosen, rejected) in texts]
    args = HybridDPOConfig(folder, max_length=None, enable_predict=False, **COMMON)
    models = [AutoModelForCausalLM.from_pretrained(FOLDER, dtype="float32") for _ in range(2)]
    data = Dataset.from_dict({"prompt": ["none"], "chosen": ["none"], "rejected": ["none"]})
    trainer = HybridDPOTrainer(*models, args, train_dataset=data, processing_class=tokenizer)
    batch = trainer.data_collator(rows)
    return trainer, lambda: trainer.compute_loss(trainer.model, batch)


def reward_update(folder: str, texts, tokenizer) -> tuple[HybridGRPOTrainer, Callable[[], Tensor]]:
    """Return a trainer and the loss of a micro-batch of groups, whose advantages are random."""
    count = len(texts[0][1])
    args = HybridGRPOConfig(folder, num_generations=count, per_device_train_batch_size=count, **COMMON)
    model = AutoModelForCausalLM.from_pretrained(FOLDER, dtype="float32")
    data = Dataset.from_dict({"prompt": ["none"]})
    trainer = HybridGRPOTrainer(
        model, lambda completions, **_: [], args, train_dataset=data, processing_class=tokenizer
    )
    prompts = torch.tensor([prompt for prompt, completions in texts for _ in completions])
    completions = torch.tensor([completion for _, completions in texts for completion in completions])
    batch = {
        "prompt_ids": prompts, "prompt_mask": torch.ones_like(prompts), "completion_ids": completions,
        "completion_mask": torch.ones_like(completions), "num_items_in_batch": torch.tensor(completions.numel()),
        "advantages": torch.randn(len(prompts), generator=torch.Generator().manual_seed(0)),
    }  # fmt: skip
    trainer.current_gradient_accumulation_steps = 1
    return trainer, lambda: trainer.compute_loss(trainer.model, batch)


def measure(case: str, rounds: int) -> dict:
    """Return the seconds of both, in turn, and how far the gradients are apart."""
    count, prompts = CASES[case]
    tokenizer = AutoTokenizer.from_pretrained(FOLDER)
    make = preference_update if count == 2 else reward_update
    seconds: dict[str, list[float]] = {"trl": [], "shared": []}
    gradients: dict[str, list[Tensor]] = {}
    with tempfile.TemporaryDirectory() as folder:
        trainer, loss = make(folder, passages(tokenizer, count, prompts), tokenizer)
        trainer.model.train()
        for number in range(rounds + 1):  # the first warms caches and compares
            for arm in sorted(seconds, reverse=bool(number % 2)):
                trainer.model.zero_grad()
                trainer.rows.off = arm == "trl"
                start = time.process_time()
                loss().backward()
                if number:
                    seconds[arm].append(time.process_time() - start)
                else:
                    gradients[arm] = [p.grad.clone() for p in trainer.model.parameters() if p.grad is not None]
    pairs = zip(gradients["trl"], gradients["shared"], strict=True)
    counts = trainer.rows.counts
    return {
        "prompts": prompts,
        "completions": count,
        "shared_part": counts["tokens_shared"] / counts["tokens"],
        "seconds": seconds,
        "ratio": statistics.median(a / b for a, b in zip(seconds["trl"], seconds["shared"])),
        "largest_difference": max(((a - b).norm() / a.norm()).item() for a, b in pairs),
    }


def main() -> None:
    parser = command_line(__doc__, Path(__file__).parent)
    parser.add_argument("--rounds", type=int, default=3, help="Pairs of updates per case.")
    parser.add_argument("--case", nargs="+", choices=list(CASES), default=list(CASES))
    args = parser.parse_args()
    torch.set_num_threads(1)
    results = Results(args.results, "prompts", ("case",))
    for case in args.case:
        row = results.add({**provenance(1), "case": case, **measure(case, args.rounds)})
        print(
            {name: row[name] for name in ("case", "shared_part", "seconds", "ratio", "largest_difference")}, flush=True
        )


if __name__ == "__main__":
    main()
