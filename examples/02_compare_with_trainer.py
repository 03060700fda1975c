"""
Compare HybridTrainer, its frozen control, Muon and plain Trainer fairly (about a minute on two idle CPU cores).

    python examples/02_compare_with_trainer.py
    python examples/02_compare_with_trainer.py --arms trainer hybrid --learning_rates 1e-3 2e-3 4e-3 --seeds 0 1 2

Nothing is downloaded. A Llama of 160,000 parameters learns the bytes of Python's documentation. To compare on your own
task, put your model and data into `small_llama` and `byte_blocks`. Search learning rates until the best one is not at
the edge of the list. If the rate of the baseline is not searched, every method looks fast.

The arms:

    trainer   plain Trainer
    hybrid    HybridTrainer with default options
    frozen    the same, with leaps that go nowhere: the control
    muon      HybridTrainer with optim="muon" and without leaps

Every arm makes `max_steps` steps; hybrid and frozen skip some of them. "fewer" is plain Trainer with as many steps as
the best hybrid run had backward passes, and its own schedule over them. benchmarks/speedup/leaps.md has measurements.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from pathlib import Path
from pydoc_data import topics

from hf_hybrid.cli.console import quiet_imports

with quiet_imports():
    import torch
    from torch.utils.data import Subset, TensorDataset
    from transformers import HfArgumentParser, LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed

    from hf_hybrid import HybridConfig, HybridTrainer

ARMS = {
    "trainer": None,
    "hybrid": {},
    "frozen": {"direction": "none"},
    "muon": {"optim": "muon", "enable_predict": False},
}


@dataclass
class ScriptArguments:
    arms: list[str] = field(default_factory=lambda: list(ARMS), metadata={"help": f"Among {', '.join(ARMS)}."})
    learning_rates: list[float] = field(
        default_factory=lambda: [3e-3, 6e-3], metadata={"help": "Tried for every arm. The best one counts."}
    )
    seeds: list[int] = field(default_factory=lambda: [0], metadata={"help": "Runs per arm and learning rate."})
    max_steps: int = field(default=120, metadata={"help": "Optimizer steps per run, as Trainer counts them."})
    output_dir: str = field(default="out/compare", metadata={"help": "Gets comparison.json."})

    def __post_init__(self):
        unknown = sorted(set(self.arms) - set(ARMS))
        if unknown or not self.arms:
            raise ValueError(f"`arms` must be among {', '.join(ARMS)}, got `{' '.join(unknown) or self.arms}`.")


def byte_blocks(length: int) -> tuple[TensorDataset, TensorDataset]:
    """Cut English text into blocks of bytes; return a training set and an evaluation set."""
    text = "".join(topics.topics[name] for name in sorted(topics.topics)).encode()
    blocks = torch.frombuffer(bytearray(text), dtype=torch.uint8)[: len(text) // length * length]
    blocks = blocks.view(-1, length).long()
    order = torch.randperm(len(blocks), generator=torch.Generator().manual_seed(0))
    return TensorDataset(blocks[order[256:]]), TensorDataset(blocks[order[:256]])


def collate(rows: list[tuple[torch.Tensor]]) -> dict[str, torch.Tensor]:
    ids = torch.stack([row for (row,) in rows])
    return {"input_ids": ids, "labels": ids}


def small_llama(seed: int, layers: int = 3, width: int = 64) -> LlamaForCausalLM:
    """A Llama with random weights that reads bytes."""
    set_seed(seed)
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4}
    sizes = {"hidden_size": width, "intermediate_size": 3 * width, "num_hidden_layers": layers, **heads}
    return LlamaForCausalLM(LlamaConfig(vocab_size=256, max_position_embeddings=256, tie_word_embeddings=True, **sizes))


def run(arm: str, rate: float, seed: int, steps: int, folder: str) -> dict:
    """Make one run. Everything except the arm is equal."""
    blocks, evaluation = byte_blocks(64)
    # All arms have the same training set and batches. Another order alone changes the loss of such a short run by 0.3.
    probes, train_set = Subset(blocks, range(64)), Subset(blocks, range(64, len(blocks)))
    options = ARMS["trainer" if arm == "fewer" else arm]
    values = {
        "output_dir": f"{folder}/run", "max_steps": steps, "learning_rate": rate, "seed": seed, "warmup_steps": 0.05,
        "per_device_train_batch_size": 16, "per_device_eval_batch_size": 64, "adam_beta2": 0.95, "weight_decay": 0.1,
        "save_strategy": "no", "report_to": "none", "disable_tqdm": True, "logging_strategy": "no",
        "dataloader_pin_memory": False,
    }  # fmt: skip
    data = {"train_dataset": train_set, "eval_dataset": evaluation, "data_collator": collate}
    if options is None:
        trainer = Trainer(small_llama(seed), TrainingArguments(**values), **data)
    else:
        trainer = HybridTrainer(small_llama(seed), HybridConfig(**values, **options), probe_dataset=probes, **data)
    began = time.perf_counter()
    trainer.train()
    seconds = time.perf_counter() - began
    skipped = trainer.hybrid_summary()["backward_passes_avoided"] if options is not None else 0
    loss = trainer.evaluate()["eval_loss"]
    return {
        "arm": arm, "learning_rate": rate, "seed": seed, "eval_loss": loss, "backward_passes": steps - skipped,
        "seconds": round(seconds, 2),
    }  # fmt: skip


def mean(runs: list[dict], key: str) -> float:
    return sum(run[key] for run in runs) / len(runs)


def best_rate(runs: list[dict], arm: str) -> list[dict]:
    """The runs of an arm at the learning rate with the lowest mean loss."""
    rates = {run["learning_rate"] for run in runs if run["arm"] == arm}
    groups = [[run for run in runs if (run["arm"], run["learning_rate"]) == (arm, rate)] for rate in rates]
    return min(groups, key=lambda group: mean(group, "eval_loss"))


def report(runs: list[dict], rates: list[float]) -> str:
    lines = [f"{'arm':10s} best rate  evaluation loss (by seed)      backward passes  seconds"]
    for arm in dict.fromkeys(run["arm"] for run in runs):
        group = best_rate(runs, arm)
        losses = f"{mean(group, 'eval_loss'):.4f} ({', '.join(format(run['eval_loss'], '.3f') for run in group)})"
        passes, seconds = mean(group, "backward_passes"), mean(group, "seconds")
        lines.append(f"{arm:10s} {group[0]['learning_rate']:<9g}  {losses:29s}  {passes:15.0f}  {seconds:7.1f}")
        at_edge = len(rates) < 3 or group[0]["learning_rate"] in (min(rates), max(rates))
        if at_edge and arm != "fewer":
            lines.append(f"{'':10s} the best rate is at the edge of the list: try more rates")
    if len({run["seed"] for run in runs}) < 3:
        lines.append("With fewer than three seeds, small differences are chance. Add: --seeds 0 1 2")
    lines.append("These numbers are for one small model and text. Yours will differ.")
    return "\n".join(lines)


def main() -> None:
    (script,) = HfArgumentParser(ScriptArguments).parse_args_into_dataclasses()
    runs = []
    for arm in script.arms:
        for rate in script.learning_rates:
            for seed in script.seeds:
                runs.append(run(arm, rate, seed, script.max_steps, script.output_dir))
                last = runs[-1]
                print(f"{arm}, learning rate {rate:g}, seed {seed}: loss {last['eval_loss']:.4f}", flush=True)
    if {"trainer", "hybrid"} <= set(script.arms):
        passes = round(mean(best_rate(runs, "hybrid"), "backward_passes"))
        rate = best_rate(runs, "trainer")[0]["learning_rate"]
        runs += [run("fewer", rate, seed, passes, script.output_dir) for seed in script.seeds]
    file = Path(script.output_dir) / "comparison.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps({"max_steps": script.max_steps, "runs": runs}, indent=1) + "\n", encoding="utf-8")
    print(f"\n{report(runs, script.learning_rates)}\n{file}")


if __name__ == "__main__":
    main()
