"""
A whole GRPO run, part by part: CPU seconds of TRL's trainer and of `HybridGRPOTrainer` side by side. One thread.

    python -m benchmarks.skips.rewards                      # a Llama of 3.2M parameters, half an hour
    python -m benchmarks.skips.rewards --model smollm2 --generations 8 --iterations 1 --rewards binary --prompts 2
    python -m benchmarks.skips.rewards --report

Completions of SmolLM2 end with a line, those of `--model smollm2-sentences` with a sentence too. All prompts of
`--model smollm2-system` begin with the same 300 tokens, as after a system prompt. SmolLM2 needs
`python -m benchmarks.speedup.pretrained` first.

The parts of a step are generation, rewards, log-probabilities before the update, those of the reference, and the update
(the rest of `training_step`). Half of the prompts are so easy that all of their completions get the same reward: 1, or
0.7 where rewards are graded. The others get 0 or 1 by the completion's characters, or tenths. Both trainers start from
the same weights and seeds, draw the same completions, and train in turn, so that a machine whose speed drifts does it
to both. With several iterations, each generation batch is trained on as often. SmolLM2 is trained with LoRA, the small
one too if `--beta` is not zero: the reference is the model without adapters then.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, set_seed
from trl import GRPOTrainer

from benchmarks.results import Results, command_line, provenance
from benchmarks.skips.grpo import ARMS, CHARACTERS, make_tokenizer
from benchmarks.speedup.pretrained import FOLDER
from benchmarks.texts import language_reference
from benchmarks.timing import put_around

PARTS = ("generation", "rewards", "log-probabilities", "reference", "update")
EASY = {"binary": 1.0, "graded": 0.7}
KEPT = (
    "rows", "rows_skipped", "log_probs_skipped", "rows_decoded", "rows_decoded_saved", "prompt_tokens_shared",
    "tokens_shared", "every_row_because", "plain_rollouts_because",
)  # fmt: skip

# The whole run.


class Clock:
    """CPU seconds of the parts of a training. A part that runs inside of another counts for itself alone."""

    def __init__(self, trainer: GRPOTrainer):
        self.seconds = dict.fromkeys(PARTS, 0.0)
        self._under_way: list[str] = []
        self._since = time.process_time()
        self.completions: list[list[int]] = []
        self._around(trainer, "training_step", lambda *_: "update")
        self._around(trainer, "_generate_single_turn", lambda *_: "generation")
        self._around(trainer, "_calculate_rewards", lambda *_: "rewards")
        self._around(trainer, "_get_per_token_logps_and_entropies", functools.partial(self._pass, trainer))

    @staticmethod
    def _pass(trainer: GRPOTrainer, model: Any) -> str:
        if torch.is_grad_enabled():
            return "update"
        adapters = getattr(trainer.accelerator.unwrap_model(model), "_adapters_disabled", False)
        return "reference" if model is trainer.ref_model or adapters else "log-probabilities"

    def _around(self, trainer: GRPOTrainer, name: str, part_of: Any) -> None:
        def wrap(method):
            def timed(trainer, *args, **kwargs):
                self._switch()
                self._under_way.append(part_of(args[0]))
                try:
                    found = method(trainer, *args, **kwargs)
                finally:
                    self._switch()
                    self._under_way.pop()
                if name == "_generate_single_turn":
                    self.completions += found[0]
                return found

            return timed

        put_around(trainer, name, wrap)

    def _switch(self) -> None:
        now = time.process_time()
        if self._under_way:
            self.seconds[self._under_way[-1]] += now - self._since
        self._since = now


LINE = "\u010a"
"""The end of a line, in the alphabet of byte-level tokenizers."""


def small(args: argparse.Namespace) -> tuple[Any, Any, list[str]]:
    """A random Llama of 3.2M parameters over characters, its tokenizer, and prompts."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(CHARACTERS), hidden_size=256, intermediate_size=704, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=4, eos_token_id=1, pad_token_id=0, bos_token_id=None, tie_word_embeddings=True,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    model.generation_config.eos_token_id = [1, 2, 3, 4, 5]  # one token of twenty ends a completion
    texts = [text.replace("\n", " ") for text in language_reference() if len(text) > args.length]
    return model, make_tokenizer(), [text[: args.length] for text in texts[:200]]


def smollm2(args: argparse.Namespace, ends: tuple[str, ...] = (LINE,), system: int = 0) -> tuple[Any, Any, list[str]]:
    """
    SmolLM2-135M, whose completions end with the first token that has one of `ends` in it. All prompts begin with the
    same `system` tokens.
    """
    tokenizer = AutoTokenizer.from_pretrained(FOLDER)
    model = AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32)
    last = [number for text, number in tokenizer.get_vocab().items() if any(end in text for end in ends)]
    model.generation_config.eos_token_id = [tokenizer.eos_token_id, *last]
    ids = tokenizer(" ".join(" ".join(language_reference()[:400]).split()))["input_ids"]
    begins = range(system, system + 200 * args.length, args.length)
    return model, tokenizer, [tokenizer.decode(ids[:system] + ids[begin : begin + args.length]) for begin in begins]


MODELS = {
    "small": small,
    "smollm2": smollm2,
    "smollm2-sentences": functools.partial(smollm2, ends=(LINE, ".")),
    "smollm2-system": functools.partial(smollm2, system=300),
}


def reward(kind: str):
    """Easy prompts always get the same; at the others it depends on the characters."""

    def rewards(completions, easy, **_) -> list[float]:
        levels = 1 if kind == "binary" else 10
        graded = [sum(map(ord, text)) % (levels + 1) / levels for text in completions]
        return [EASY[kind] if e else found for e, found in zip(easy, graded)]

    return rewards


def whole_run(arm: str, args: argparse.Namespace, kind: str, iterations: int, generations: int) -> tuple[Clock, Any]:
    trainer_class, config_class = ARMS[arm]
    set_seed(0)
    model, tokenizer, texts = MODELS[args.model](args)
    data = Dataset.from_dict({"prompt": texts, "easy": [index % 2 == 0 for index in range(len(texts))]})
    adapters = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    with tempfile.TemporaryDirectory() as folder:
        config = config_class(
            folder, max_steps=args.steps * iterations, num_iterations=iterations, num_generations=generations,
            per_device_train_batch_size=args.prompts * generations // args.accumulation,
            gradient_accumulation_steps=args.accumulation, max_completion_length=args.tokens, learning_rate=1e-2,
            optim="sgd", beta=args.beta, shuffle_dataset=False, bf16=False, use_cpu=True, report_to="none",
            save_strategy="no", logging_steps=args.steps, disable_tqdm=True, dataloader_pin_memory=False,
            gradient_checkpointing=False,
        )  # fmt: skip
        trainer = trainer_class(
            model, reward(kind), config, train_dataset=data, processing_class=tokenizer,
            peft_config=None if args.model == "small" and args.beta == 0 else adapters,
        )  # fmt: skip
        clock = Clock(trainer)
        trainer.train()
    return clock, trainer


def compare(args: argparse.Namespace, results: Results, kind: str, iterations: int, generations: int) -> None:
    """Train with both trainers in turn, so many rounds, and keep what was measured."""
    seconds: dict[str, dict[str, list[float]]] = {arm: {part: [] for part in PARTS} for arm in ARMS}
    for number in range(args.rounds):
        made = {}
        for arm in sorted(ARMS, reverse=bool(number % 2)):
            made[arm] = whole_run(arm, args, kind, iterations, generations)
            for part, spent in made[arm][0].seconds.items():
                seconds[arm][part].append(spent)
    (theirs, trl), (ours, hybrid) = made["trl"], made["hybrid"]
    pairs = zip(trl.model.parameters(), hybrid.model.parameters(), strict=True)
    whole = {arm: [sum(round_) for round_ in zip(*parts.values())] for arm, parts in seconds.items()}

    def ratio(found: dict[str, list[float]]) -> float:
        return statistics.median(a / b for a, b in zip(found["trl"], found["hybrid"]))

    options = {name: getattr(args, name) for name in OPTIONS}
    row = results.add({
        **provenance(1), **options, "rewards": kind, "iterations": iterations, "generations": generations,
        "seconds": seconds, "ratio": ratio(whole),
        "generation_ratio": ratio({arm: parts["generation"] for arm, parts in seconds.items()}),
        "completions_equal": theirs.completions == ours.completions,
        "mean_length": statistics.mean(map(len, ours.completions)),
        "largest_difference": max((a - b).abs().max().item() for a, b in pairs),
        **{name: hybrid.hybrid_summary()[name] for name in KEPT},
    })  # fmt: skip
    print(line_of(row), flush=True)


OPTIONS = ("model", "prompts", "length", "tokens", "steps", "accumulation", "beta")
KEY = (*OPTIONS, "rewards", "iterations", "generations")
COLUMNS = (
    "model", "rewards", "iterations", "completions", "prompt", "rows left out", *PARTS, "generation, ratio",
    "whole, ratio",
)  # fmt: skip


def line_of(row: dict) -> str:
    """A line of the table in docs/grpo.md: medians of CPU seconds, TRL / ours."""
    cells = [row["model"], row["rewards"], row["iterations"], f"{row['prompts']} x {row['generations']}"]
    cells += [row["length"], f"{row['rows_skipped'] / row['rows']:.0%}"]
    for part in PARTS:
        theirs, ours = (statistics.median(row["seconds"][arm][part]) for arm in ("trl", "hybrid"))
        cells.append(f"{theirs:.2f} / {ours:.2f}" if theirs > 0.005 else "")
    cells += [f"{row['generation_ratio']:.2f}", f"{row['ratio']:.2f}"]
    return f"| {' | '.join(map(str, cells))} |"


def main() -> None:
    parser = command_line(__doc__, Path(__file__).parent)
    parser.add_argument("--model", choices=MODELS, default="small", help="What is trained.")
    parser.add_argument("--prompts", type=int, default=4, help="Prompts of a generation batch.")
    parser.add_argument("--length", type=int, default=64, help="Tokens of a prompt.")
    parser.add_argument("--tokens", type=int, help="Most tokens of a completion: 64, with SmolLM2 24.")
    parser.add_argument("--steps", type=int, default=2, help="Generation batches of a run.")
    parser.add_argument("--accumulation", type=int, default=2, help="Micro-batches of a step.")
    parser.add_argument("--beta", type=float, default=0.0, help="Weight of the distance from the reference.")
    parser.add_argument("--rewards", nargs="+", choices=EASY, default=list(EASY), help="Kinds of rewards.")
    parser.add_argument("--iterations", nargs="+", type=int, default=[1, 2, 3], help="Steps per generation batch.")
    parser.add_argument("--generations", nargs="+", type=int, default=[4, 8, 16], help="Completions of a prompt.")
    parser.add_argument("--rounds", type=int, default=3, help="Pairs of runs.")
    parser.add_argument("--report", action="store_true", help="Print the table of what the file has.")
    args = parser.parse_args()
    torch.set_num_threads(1)
    args.tokens = args.tokens or (64 if args.model == "small" else 24)
    results = Results(args.results, "whole_run", KEY)
    print(f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}")
    if args.report:
        print("\n".join(map(line_of, results.rows())))
        return
    for kind, iterations, generations in itertools.product(args.rewards, args.iterations, args.generations):
        compare(args, results, kind, iterations, generations)


if __name__ == "__main__":
    main()
