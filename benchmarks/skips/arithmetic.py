"""
GRPO of SmolLM2-135M with a verifier: it learns to calculate, and every answer is checked against the right one.

    python -m benchmarks.speedup.pretrained                 # fetches SmolLM2, once
    python -m benchmarks.skips.arithmetic --rates 5e-4 1e-3 2e-3 --arms hybrid      # which rate is best
    python -m benchmarks.skips.arithmetic --rates 1e-3 --seeds 0 1      # both trainers, forty minutes
    python docs/generate_tables.py --print grpo-arithmetic

A prompt has three worked examples and one task: a sum, a difference or a product of whole numbers. The reward of a
completion is 1 if its first line, read as a whole number, is the result that Python calculates, and else 0. The
pretrained model is right in about one of three. A step has 8 prompts with 8 completions of at most 8 tokens.

Both trainers begin with the same weights and draw from the same seed. Every few steps each answers the same held-out
tasks, which no run trains on, greedily; the clock stands still meanwhile. So the held-out reward can be read at equal
samples (the same step) and at equal CPU seconds: that of TRL's trainer is the one of its last evaluation within the
seconds that the other's whole run took.
"""

from __future__ import annotations

import itertools
import operator
import random
import tempfile
from pathlib import Path

import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback, set_seed

from benchmarks.results import Results, command_line, provenance
from benchmarks.skips.grpo import ARMS
from benchmarks.skips.rewards import KEPT, LINE, Clock
from benchmarks.speedup.pretrained import FOLDER

OPERATIONS = {"+": (operator.add, 50), "-": (operator.sub, 30), "*": (operator.mul, 12)}
"""Sign -> what Python calculates, and the largest number that it is asked for."""
SHOTS = "17 + 4 = 21\n20 - 6 = 14\n3 * 5 = 15\n"
PROMPTS, COMPLETIONS, TOKENS, HELD_OUT = 8, 8, 8, 96


def tasks() -> tuple[list[dict], list[dict]]:
    """Rows to train on and held-out rows, with `prompt` and `result`: all pairs of numbers, shuffled."""
    rows = []
    for sign, (calculate, most) in OPERATIONS.items():
        some = [pair for pair in itertools.product(range(2, most + 1), repeat=2) if sign != "-" or pair[0] >= pair[1]]
        random.Random(sign).shuffle(some)
        rows += [{"prompt": f"{SHOTS}{a} {sign} {b} =", "result": calculate(a, b)} for a, b in some[:120]]
    random.Random(0).shuffle(rows)
    return rows[HELD_OUT:], rows[:HELD_OUT]


def verified(completions: list[str], result: list[int], **_) -> list[float]:
    """The reward: is the number in the first line the result?"""

    def number(text: str) -> int | None:
        try:
            return int(text.split("\n")[0])
        except ValueError:
            return None

    return [float(number(text) == right) for text, right in zip(completions, result)]


class HeldOut(TrainerCallback):
    """Answers the held-out tasks before the first step and every few steps, and notes the seconds until then."""

    def __init__(self, rows: list[dict], tokenizer, every: int):
        self.rows, self.tokenizer, self.every = rows, tokenizer, every
        self.clock: Clock | None = None
        self.found: list[tuple[int, float, float]] = []
        """Step, CPU seconds of training until then, and reward."""

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        self.found.append((0, 0.0, self.reward(model)))

    def on_step_end(self, args, state, control, model=None, **kwargs):
        if state.global_step % self.every == 0:
            self.found.append((state.global_step, sum(self.clock.seconds.values()), self.reward(model)))

    def reward(self, model) -> float:
        was_training = model.training
        model.eval()
        rewards = []
        with torch.no_grad(), torch.random.fork_rng():
            for begin in range(0, len(self.rows), 32):
                some = self.rows[begin : begin + 32]
                given = self.tokenizer([row["prompt"] for row in some], return_tensors="pt", padding=True)
                ids = model.generate(**given, max_new_tokens=TOKENS, do_sample=False)
                texts = self.tokenizer.batch_decode(ids[:, given["input_ids"].shape[1] :], skip_special_tokens=True)
                rewards += verified(texts, [row["result"] for row in some])
        model.train(was_training)
        return sum(rewards) / len(rewards)


def train(arm: str, rate: float, seed: int, steps: int, every: int) -> dict:
    trainer_class, config_class = ARMS[arm]
    set_seed(seed)
    tokenizer = AutoTokenizer.from_pretrained(FOLDER, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32)
    ends = [number for text, number in tokenizer.get_vocab().items() if LINE in text]
    model.generation_config.eos_token_id = [tokenizer.eos_token_id, *ends]
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    rows, held_out = tasks()
    callback = HeldOut(held_out, tokenizer, every)
    with tempfile.TemporaryDirectory() as folder:
        args = config_class(
            folder, max_steps=steps, per_device_train_batch_size=PROMPTS * COMPLETIONS, num_generations=COMPLETIONS,
            max_completion_length=TOKENS, learning_rate=rate, seed=seed, bf16=False, use_cpu=True, report_to="none",
            save_strategy="no", logging_steps=10, disable_tqdm=True, dataloader_pin_memory=False,
            gradient_checkpointing=False,
        )  # fmt: skip
        trainer = trainer_class(
            model, verified, args, train_dataset=Dataset.from_list(rows), processing_class=tokenizer,
            peft_config=LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM"),
            callbacks=[callback],
        )  # fmt: skip
        callback.clock = clock = Clock(trainer)
        trainer.train()
    summary = trainer.hybrid_summary() if arm == "hybrid" else {}
    return {
        "held_out": callback.found, "seconds": clock.seconds, "last_completions": clock.completions[-8:],
        "sampled": [line["reward"] for line in trainer.state.log_history if "reward" in line],
        **{name: summary[name] for name in KEPT if name in summary},
    }  # fmt: skip


KEY = ("arm", "rate", "seed", "steps")


def main() -> None:
    parser = command_line(__doc__, Path(__file__).parent)
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS), help="Trainers.")
    parser.add_argument("--rates", nargs="+", type=float, default=[1e-3], help="Learning rates.")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0], help="Seeds; a run of each arm for each.")
    parser.add_argument("--steps", type=int, default=40, help="Steps of a run.")
    parser.add_argument("--every", type=int, default=5, help="Steps between two looks at the held-out tasks.")
    args = parser.parse_args()
    torch.set_num_threads(1)
    results = Results(args.results, "arithmetic", KEY)
    for rate, seed, arm in itertools.product(args.rates, args.seeds, args.arms):
        found = train(arm, rate, seed, args.steps, args.every)
        run = {"arm": arm, "rate": rate, "seed": seed, "steps": args.steps}
        results.add({**provenance(1), **run, "prompts": PROMPTS, "completions": COMPLETIONS, "tokens": TOKENS, **found})
        print({**run, **{name: found[name] for name in ("held_out", "seconds")}}, flush=True)


if __name__ == "__main__":
    main()
