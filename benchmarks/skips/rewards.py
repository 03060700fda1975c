"""
GRPO of a genuinely pretrained model: the reward before and after, and the CPU seconds, TRL's trainer beside ours.

    python -m benchmarks.skips.rewards          # after `python -m benchmarks.speedup.pretrained`; one thread

SmolLM2-135M with LoRA says what functions of Python's standard library do. A completion has the reward 1 if its first
line is a sentence of three words or more that ends with a full stop, and else 0. The pretrained model mostly starts a
new line, a list or a program. Groups whose completions are all alike have no advantage. The reward before and after is
that of greedy completions for functions of modules that no run trains on. Both trainers draw completions from the same
seed.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, set_seed

from benchmarks.results import Results, command_line, provenance
from benchmarks.skips.grpo import ARMS, UpdateClock
from benchmarks.speedup.pretrained import FOLDER, DocstringsAndSmolLM2, one_sentence
from benchmarks.speedup.tasks import COMPLETION, COMPLETIONS

PROMPTS, TEST = 2, 32
"""Prompts of a step, held-out functions."""


def train(arm: str, steps: int, rate: float, seed: int) -> dict:
    """Train once; return the rewards, the seconds, and what was left out."""
    trainer_class, config_class = ARMS[arm]
    sources = DocstringsAndSmolLM2()
    learned, held_out = ([row["prompt"] for row in rows] for rows in sources._rows())
    set_seed(seed)
    model = AutoModelForCausalLM.from_pretrained(FOLDER, dtype="float32")
    adapters = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    with tempfile.TemporaryDirectory() as folder:
        args = config_class(
            folder, max_steps=steps, per_device_train_batch_size=PROMPTS * COMPLETIONS, num_generations=COMPLETIONS,
            max_completion_length=COMPLETION, learning_rate=rate, seed=seed, bf16=True, use_cpu=True, report_to="none",
            save_strategy="no", logging_steps=1, disable_tqdm=True, dataloader_pin_memory=False,
            gradient_checkpointing=False,
        )  # fmt: skip
        trainer = trainer_class(
            model, one_sentence, args, train_dataset=Dataset.from_dict({"prompt": learned}), peft_config=adapters,
            processing_class=sources.tokenizer,
        )  # fmt: skip
        before = sources.reward(trainer.model, held_out[:TEST], sample=False)
        clock = UpdateClock(trainer)
        trainer.train()
    after = sources.reward(trainer.model, held_out[:TEST], sample=False)
    sampled = [line["reward"] for line in trainer.state.log_history if "reward" in line]
    found = {
        "reward_before": before, "reward_after": after, "sampled_rewards": sampled,
        "generation_seconds": clock.generation, "update_seconds": clock.update,
    }  # fmt: skip
    kept = ("rows", "rows_skipped", "tokens", "tokens_shared", "backward_passes_avoided_exactly")
    summary = trainer.hybrid_summary() if arm == "hybrid" else {}
    return found | {name: summary[name] for name in kept if name in summary}


def main() -> None:
    parser = command_line(__doc__, Path(__file__).parent)
    parser.add_argument("--steps", type=int, default=30, help="Steps of a run.")
    parser.add_argument("--rate", type=float, default=2e-4, help="Learning rate.")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0], help="One pair of runs each.")
    args = parser.parse_args()
    torch.set_num_threads(1)
    results = Results(args.results, "rewards", ("arm", "steps", "rate", "seed"))
    for seed in args.seeds:
        for arm in ARMS:
            found = train(arm, args.steps, args.rate, seed)
            results.add({**provenance(1), "arm": arm, "steps": args.steps, "rate": args.rate, "seed": seed, **found})
            print(arm, {name: value for name, value in found.items() if name != "sampled_rewards"})


if __name__ == "__main__":
    main()
