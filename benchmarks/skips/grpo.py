"""
CPU seconds of GRPO's update phase, TRL's trainer and `HybridGRPOTrainer` side by side. Ten minutes; one thread.

    python -m benchmarks.skips.grpo

A Llama of 3.2M parameters answers ten prompts with four completions each per step. A share of the prompts is so easy
that every completion gets the same reward, so that their rows have no advantage. Both trainers start from the same
weights and seeds and train in turn. The update phase is all of `training_step` but the generation of completions and
their rewards. Every round is a pair, so that a machine whose speed drifts does it to both. Beside the seconds stand the
largest difference between the weights at the end (SGD) and the share of the rows that were left out.
"""

from __future__ import annotations

import statistics
import tempfile
from pathlib import Path

import torch
from datasets import Dataset
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer

from benchmarks.results import Results, command_line, provenance
from benchmarks.texts import language_reference
from benchmarks.timing import Stopwatch, put_around
from hf_hybrid import HybridGRPOConfig, HybridGRPOTrainer

ARMS = {"trl": (GRPOTrainer, GRPOConfig), "hybrid": (HybridGRPOTrainer, HybridGRPOConfig)}
SHARES = (0.0, 0.5, 0.7)
CHARACTERS = ["<pad>", "<eos>", *map(chr, range(32, 127))]


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token per character."""
    tokenizer = Tokenizer(models.WordLevel({text: i for i, text in enumerate(CHARACTERS)}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")


def prompts(share: float, count: int = 200) -> Dataset:
    """Begins of passages of Python's documentation; of each ten in a row, `share` are easy."""
    texts = language_reference()
    rows = [f"{'+' if i % 10 < round(10 * share) else '-'}{texts[i % len(texts)][:40]}" for i in range(count)]
    return Dataset.from_dict({"prompt": [row.replace("\n", " ") for row in rows]})


def reward(prompts, completions, **_) -> list[float]:
    """Easy prompts are always right; at the others it depends on the characters."""
    return [1.0 if p[0] == "+" else sum(map(ord, c)) % 7 / 7 for p, c in zip(prompts, completions)]


class UpdateClock:
    """CPU seconds of `training_step`: generating completions with their rewards, and the update."""

    def __init__(self, trainer: GRPOTrainer):
        self._step, self._generation = Stopwatch(), Stopwatch()
        put_around(trainer, "training_step", self._step.around)
        put_around(trainer, "_generate_and_score_completions", self._generation.around)

    @property
    def generation(self) -> float:
        return self._generation.seconds

    @property
    def update(self) -> float:
        return self._step.seconds - self._generation.seconds


def trainer_of(arm: str, share: float, steps: int, tokens: int, folder: Path | str, **options) -> GRPOTrainer:
    """A trainer of ten prompts per step and process."""
    trainer_class, config_class = ARMS[arm]
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(CHARACTERS), hidden_size=256, intermediate_size=704, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=4, eos_token_id=1, pad_token_id=0, bos_token_id=None, tie_word_embeddings=True,
    )  # fmt: skip
    options = {"share_rows": "off", **options} if arm == "hybrid" else options
    args = config_class(
        str(folder), max_steps=steps, per_device_train_batch_size=8, gradient_accumulation_steps=5, num_generations=4,
        max_completion_length=tokens, learning_rate=1e-2, optim="sgd", shuffle_dataset=False, bf16=False,
        use_cpu=True, report_to="none", save_strategy="no", logging_steps=steps, disable_tqdm=True,
        dataloader_pin_memory=False, **options,
    )  # fmt: skip
    model, data = LlamaForCausalLM(config), prompts(share)
    return trainer_class(model, reward, args, train_dataset=data, processing_class=make_tokenizer())


def train(arm: str, share: float, steps: int, tokens: int) -> tuple[float, dict[str, torch.Tensor], dict]:
    """Return the CPU seconds of the update phase, the weights at the end, and what was left out."""
    with tempfile.TemporaryDirectory() as folder:
        trainer = trainer_of(arm, share, steps, tokens, folder)
        clock = UpdateClock(trainer)
        trainer.train()
        found = trainer.hybrid_summary() if arm == "hybrid" else {}
    weights = {name: parameter.detach().clone() for name, parameter in trainer.model.named_parameters()}
    return clock.update, weights, found


def main() -> None:
    parser = command_line(__doc__, Path(__file__).parent)
    parser.add_argument("--steps", type=int, default=2, help="Steps of a run.")
    parser.add_argument("--rounds", type=int, default=3, help="Pairs of runs per share.")
    parser.add_argument("--tokens", type=int, default=64, help="Length of a completion.")
    args = parser.parse_args()
    torch.set_num_threads(1)
    results = Results(args.results, "grpo", ("share", "steps", "tokens"))
    train("trl", 0.0, 1, args.tokens)  # warms caches and the allocator
    for share in SHARES:
        seconds: dict[str, list[float]] = {arm: [] for arm in ARMS}
        for number in range(args.rounds):
            made = {}
            for arm in sorted(ARMS, reverse=bool(number % 2)):
                made[arm] = train(arm, share, args.steps, args.tokens)
                seconds[arm].append(made[arm][0])
        (_, theirs, _), (_, ours, found) = made["trl"], made["hybrid"]
        row = results.add(
            {
                **provenance(1),
                "share": share,
                "steps": args.steps,
                "tokens": args.tokens,
                "rows": found["rows"],
                "rows_skipped": found["rows_skipped"],
                "backward_passes": args.steps * 5,
                "backward_passes_avoided": found["backward_passes_avoided_exactly"],
                "seconds": seconds,
                "ratio": statistics.median(a / b for a, b in zip(seconds["trl"], seconds["hybrid"])),
                "largest_difference": max((theirs[name] - ours[name]).abs().max().item() for name in theirs),
            }
        )
        print({name: row[name] for name in ("share", "rows", "rows_skipped", "seconds", "ratio", "largest_difference")})


if __name__ == "__main__":
    main()
