"""
GRPO of a genuinely pretrained model: the reward before and after, and the CPU seconds, TRL's trainer beside ours.

    python -m benchmarks.skips.rewards          # `python -m benchmarks.speedup.pretrained` first; 15 minutes, one thread

SmolLM2-135M with LoRA says what functions of Python's standard library do. A completion has the reward 1 if it is one
finished sentence: the model ends it itself, within the length, with a full stop. All others have 0, so that groups whose
completions are all alike have no advantage. The reward before and after is that of greedy completions for functions of
modules that no run trains on. Both trainers draw completions from the same seed.
"""

from __future__ import annotations

import statistics
import tempfile
from pathlib import Path

import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, set_seed

from benchmarks.results import Results, command_line, provenance
from benchmarks.skips.grpo import ARMS
from benchmarks.speedup.pretrained import FOLDER, DocstringsAndSmolLM2
from benchmarks.timing import Stopwatch

LENGTH, PROMPTS, COMPLETIONS, TEST = 24, 2, 4, 32
"""Tokens of a completion, prompts of a step, completions of a prompt, held-out functions."""


class FinishedSentence:
    """The reward of TRL's `reward_funcs`."""

    __name__ = "finished_sentence"

    def __init__(self, end: int):
        self.end = end

    def __call__(self, completions: list[str], completion_ids: list[list[int]], **_) -> list[float]:
        return [
            float(ids[-1] == self.end and text.strip()[-1:] == ".") for text, ids in zip(completions, completion_ids)
        ]


@torch.no_grad()
def held_out_reward(model, tokenizer, prompts: list[str], reward: FinishedSentence) -> float:
    """Mean reward of greedy completions."""
    model.eval()
    given = tokenizer(prompts, return_tensors="pt", padding=True, padding_side="left")
    ids = model.generate(**given, max_new_tokens=LENGTH, do_sample=False, pad_token_id=tokenizer.pad_token_id)
    rows = [row.tolist() for row in ids[:, given["input_ids"].shape[1] :]]
    rows = [row[: row.index(reward.end) + 1] if reward.end in row else row for row in rows]
    return statistics.mean(reward(tokenizer.batch_decode(rows, skip_special_tokens=True), rows))


def train(arm: str, steps: int, rate: float, seed: int) -> dict:
    """Train once; return the rewards, the seconds, and what was left out."""
    trainer_class, config_class = ARMS[arm]
    sources = DocstringsAndSmolLM2()
    learned, held_out = ([row["prompt"] for row in rows] for rows in sources._rows())
    reward = FinishedSentence(sources.tokenizer.eos_token_id)
    set_seed(seed)
    model = AutoModelForCausalLM.from_pretrained(FOLDER, dtype="float32")
    adapters = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    with tempfile.TemporaryDirectory() as folder:
        args = config_class(
            folder, max_steps=steps, per_device_train_batch_size=PROMPTS * COMPLETIONS, num_generations=COMPLETIONS,
            max_completion_length=LENGTH, learning_rate=rate, seed=seed, bf16=True, use_cpu=True, report_to="none",
            save_strategy="no", logging_steps=1, disable_tqdm=True, dataloader_pin_memory=False,
            gradient_checkpointing=False,
        )  # fmt: skip
        trainer = trainer_class(
            model, reward, args, train_dataset=Dataset.from_dict({"prompt": learned}), peft_config=adapters,
            processing_class=sources.tokenizer,
        )  # fmt: skip
        before = held_out_reward(trainer.model, sources.tokenizer, held_out[:TEST], reward)
        whole, generation = Stopwatch(), Stopwatch()
        trainer.training_step = whole.around(trainer.training_step)
        trainer._generate_and_score_completions = generation.around(trainer._generate_and_score_completions)
        trainer.train()
    after = held_out_reward(trainer.model, sources.tokenizer, held_out[:TEST], reward)
    sampled = [line["reward"] for line in trainer.state.log_history if "reward" in line]
    found = {
        "reward_before": before, "reward_after": after, "sampled_rewards": sampled,
        "generation_seconds": generation.seconds, "update_seconds": whole.seconds - generation.seconds,
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
