"""
GRPO with an environment whose methods are tools: conversations of up to eight turns, in TRL's trainer and in ours.

    python -m benchmarks.speedup.pretrained       # once: fetches SmolLM2-135M
    python -m benchmarks.skips.turns              # SmolLM2 and four small architectures; half an hour
    python -m benchmarks.skips.turns --models smollm2 --completions 8

All prompts have a system prompt and the descriptions of tools, 550 tokens of SmolLM2. The small models of 4M weights
read characters. What the model writes decides by its tokens whether it calls no tool, one or two, and one that may
fail; the environment keeps a total, from which it answers and gives the reward. A turn ends with a line or a sentence
(small models: with one token of twelve), and a conversation with a turn without a call, after seven calls, or at 500
tokens.

Both trainers train in turn on the same prompts, two steps of two with four completions each (SmolLM2: one of one),
fp32, SGD, one thread. `generation` are the CPU seconds of all turns. Compared are completions, masks of tools, rewards,
and the weights at the end.
"""

from __future__ import annotations

import statistics
import tempfile
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, set_seed
from trl import GRPOTrainer

from benchmarks.results import Results, command_line, provenance
from benchmarks.skips.agents import SYSTEM
from benchmarks.skips.grpo import ARMS, make_tokenizer
from benchmarks.skips.rewards import LINE, Clock
from benchmarks.speedup.pretrained import FOLDER

SIZES = {
    "hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 6, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 2048, "tie_word_embeddings": True,
}  # fmt: skip
SMALL: dict[str, dict[str, Any]] = {
    "llama": {},
    "gemma3_text": {"sliding_window": 128, "layer_types": ["sliding_attention", "full_attention"] * 3},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 3},
    "qwen3_5_text": {
        "layer_types": ["linear_attention", "full_attention"] * 3, "linear_num_value_heads": 4,
        "linear_num_key_heads": 2, "linear_key_head_dim": 32, "linear_value_head_dim": 32,
    },
}  # fmt: skip
MODELS = ("smollm2", *(f"small-{name}" for name in SMALL))
MOST, CALLS = 500, 7
TEMPLATE = (
    "{% if tools %}<|im_start|>system\n"
    + SYSTEM.partition(" The tools")[0]
    + "\n{% for t in tools %}{{ t | tojson }}\n"
    "{% endfor %}<|im_end|>\n{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% if m.tool_calls %}{{ m.tool_calls | tojson }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


class Ledger:
    """An environment that keeps a total."""

    def reset(self, **columns) -> None:
        self.total = 0

    def add(self, number: int) -> str:
        """
        Add a number to the total.

        Args:
            number: The number.

        Returns:
            The new total, as a sentence.
        """
        self.total += number
        return f"The total is {self.total} now."

    def divide(self, by: int) -> str:
        """
        Divide the total by a number.

        Args:
            by: The number, which must not be zero.

        Returns:
            The new total, as a sentence.
        """
        self.total //= by
        return f"The total was divided by {by}, and is {self.total} now."

    def get_reward(self) -> float:
        return self.total % 10 / 10


def agents_tokenizer(name: str) -> Any:
    """Return a tokenizer that reads calls out of the numbers of tokens."""
    tokenizer = AutoTokenizer.from_pretrained(FOLDER) if name == "smollm2" else make_tokenizer()

    def parse_response(self, ids, prefix=None, tools=None) -> dict:
        number = sum(ids)
        calls = [("add", {"number": number % 100}), ("divide", {"by": number % 3})]
        calls = calls[: 0 if number % 9 == 0 else 1 + (number % 4 == 0)]
        calls = [{"type": "function", "function": {"name": name, "arguments": given}} for name, given in calls]
        message = {"role": "assistant", "content": self.decode(ids, skip_special_tokens=True)}
        return {**message, **({"tool_calls": calls} if calls else {})}

    kind = type(tokenizer)
    tokenizer.__class__ = type(kind.__name__, (kind,), {"parse_response": parse_response})
    tokenizer.response_template = {"by": "parse_response"}
    tokenizer.chat_template = TEMPLATE if name == "smollm2" else TEMPLATE.replace("\n", "|")
    return tokenizer


def prompts_of(name: str) -> int:
    """Return how many prompts a step has, and how many steps a run."""
    return 1 if name == "smollm2" else 2


def build(name: str, tokenizer: Any) -> Any:
    if name == "smollm2":
        model = AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32)
        ends = [number for text, number in tokenizer.get_vocab().items() if LINE in text or "." in text]
    else:
        kind = name.removeprefix("small-")
        values = {"vocab_size": len(tokenizer), "pad_token_id": 0, "eos_token_id": 1, **SIZES, **SMALL[kind]}
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **values), dtype=torch.float32)
        ends = [*range(3, len(tokenizer), 12)]
    model.generation_config.eos_token_id = [tokenizer.eos_token_id, *ends]
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    return model


def train(arm: str, name: str, completions: int) -> tuple[Clock, Any, list]:
    """Train. Return the clock, the trainer, and all that the generations gave."""
    trainer_class, config_class = ARMS[arm]
    set_seed(0)
    tokenizer, count = agents_tokenizer(name), prompts_of(name)
    model = build(name, tokenizer)
    questions = [f"Begin with {7 * row} and count to {90 + 11 * row}." for row in range(count * count)]
    data = Dataset.from_dict({"prompt": [[{"role": "user", "content": question}] for question in questions]})
    with tempfile.TemporaryDirectory() as folder:
        args = config_class(
            folder, max_steps=count, num_generations=completions, per_device_train_batch_size=count * 2,
            gradient_accumulation_steps=completions // 2,
            max_completion_length=MOST, max_tool_calling_iterations=CALLS, learning_rate=1e-3, optim="sgd",
            shuffle_dataset=False, bf16=False, use_cpu=True, report_to="none", save_strategy="no", logging_steps=1,
            disable_tqdm=True, dataloader_pin_memory=False, gradient_checkpointing=False,
        )  # fmt: skip
        trainer = trainer_class(
            model, [], args, train_dataset=data, processing_class=tokenizer, environment_factory=Ledger
        )
        clock, batches, generate = Clock(trainer), [], GRPOTrainer._calculate_rewards

        def rewarded(self, inputs, prompts, completions, completion_ids):
            rewards = generate(self, inputs, prompts, completions, completion_ids)
            batches.append((completions, completion_ids, rewards.tolist()))
            return rewards

        GRPOTrainer._calculate_rewards = rewarded
        try:
            trainer.train()
        finally:
            GRPOTrainer._calculate_rewards = generate
    masks = [batch["tool_mask"].tolist() for batch in trainer._buffered_inputs]
    return clock, trainer, [batches, masks]


def compare(name: str, completions: int, rounds: int) -> dict[str, Any]:
    seconds: dict[str, list[float]] = {arm: [] for arm in ARMS}
    found: dict[str, Any] = {}
    for number in range(rounds):
        made = {}
        for arm in sorted(ARMS, reverse=bool(number % 2)):
            made[arm] = train(arm, name, completions)
            seconds[arm].append(made[arm][0].seconds["generation"])
        theirs, ours = ([p.detach() for p in made[arm][1].model.parameters()] for arm in ("trl", "hybrid"))
        summary = made["hybrid"][1].hybrid_summary()
        computed, kept = summary["prompt_tokens_computed"], summary["prompt_tokens_shared"]
        found = {
            "equal": found.get("equal", True) and made["trl"][2] == made["hybrid"][2],
            "largest_difference": max((one - other).abs().max().item() for one, other in zip(theirs, ours)),
            "turns": summary["turns"] / (prompts_of(name) ** 2 * completions),
            "tool_calls": summary["tool_calls"], "tool_errors": summary["tool_errors"], "prefilled": computed,
            "prefilled_share": computed / (computed + kept),
            "bytes_between_turns": summary["bytes_between_turns"],
            "plain_rollouts_because": summary["plain_rollouts_because"],
        }  # fmt: skip
    ratio = statistics.median(ours / theirs for ours, theirs in zip(seconds["hybrid"], seconds["trl"]))
    return {**found, "generation": seconds, "share_of_seconds": ratio}


def main() -> None:
    parser = command_line(__doc__, Path(__file__).parent)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS, help="What is trained.")
    parser.add_argument("--completions", type=int, default=4, help="Of a prompt.")
    parser.add_argument("--rounds", type=int, default=3, help="Runs of each trainer.")
    args = parser.parse_args()
    torch.set_num_threads(1)
    results = Results(args.results, "turns", ("model", "completions"))
    for name in args.models:
        found = compare(name, args.completions, args.rounds)
        row = results.add({**provenance(1), "model": name, "completions": args.completions, **found})
        print({key: value for key, value in row.items() if key not in provenance(1)}, flush=True)


if __name__ == "__main__":
    main()
