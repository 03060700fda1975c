"""
In how many of the recipes that people run are prefixes shared, and is the update the same?

    python -m benchmarks.recipes.coverage                # every combination of settings, about ten minutes
    python -m benchmarks.recipes.coverage --use sft dpo
    python -m benchmarks.recipes.coverage --report       # the table of what is there

`recipes.jsonl` has the settings of 602 public examples, one a line, as the projects' own files have them: Axolotl
`examples/` (250, commit 067b021, July 2026), LLaMA-Factory `examples/` (55, ff6d4d1, August), TRL `examples/scripts/`
(43, f2cd577, July), Unsloth's notebooks `nb/` (254, bdda2ef, August; Kaggle twins left out). What a recipe does not
write has its tool's default. Settings of scripts and notebooks were found by patterns, so single rows can be wrong.

Each combination of use, adapters, dropout, packed rows, recomputation and compilation trains a tiny Llama three steps
with TRL's trainer and with ours, by SGD on a CPU, on rows that begin with the same 48 words. It counts as shared if
more than a tenth of the tokens are shared and weights end within 1e-5 of TRL's. Under dropout no weights can be
compared: there the rate is 0, and 100 steps with the first window give the mean gradient, whose distance from TRL's is
given in standard errors of that distance; it must be below 1.5. Completions that are sampled under dropout are not
compared. Attention, kernels, 4 bits, optimizers and sharding are not those of the recipes.
"""

from __future__ import annotations

import copy
import dataclasses
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import torch
import trl
import trl.experimental.cpo as cpo
import trl.experimental.kto as kto
import trl.experimental.orpo as orpo
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification, PreTrainedTokenizerFast
from transformers.trainer_callback import PrinterCallback, TrainerCallback

import hf_hybrid
from benchmarks.results import Results, command_line, lines, provenance
from hf_hybrid import HybridTrainerMixin

FOLDER = Path(__file__).parent
WORDS, DRAWS, MOST = 200, 100, 1e-5


class Combination(NamedTuple):
    """Settings that decide what may be shared."""

    use: str
    adapters: bool
    dropout: float
    packed: bool
    recomputed: bool
    compiled: bool

    @classmethod
    def of(cls, recipe: dict[str, Any]) -> Combination:
        adapters = recipe["adapter"] not in ("none", "full", "freeze")
        return cls(
            recipe["use"], adapters, recipe["dropout"] * adapters, recipe["packed"], recipe["recompute"],
            recipe["compile"],
        )  # fmt: skip


def tokenizer() -> PreTrainedTokenizerFast:
    words = {"<pad>": 0, "</s>": 1, "<unk>": 2, **{f"w{number}": number for number in range(3, WORDS)}}
    core = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<pad>", eos_token="</s>", unk_token="<unk>")


def text(count: int, seed: int) -> str:
    ids = torch.randint(3, WORDS, (count,), generator=torch.Generator().manual_seed(seed))
    return " ".join(f"w{number}" for number in ids.tolist())


def rows(use: str) -> Dataset:
    """Rows of the form that a use has, which begin alike."""
    prompts = [f"{text(48, 0)} {text(4, 100 + number)}" for number in range(32)]
    answers = [" " + text(6 + 3 * (number % 5), number) for number in range(64)]
    if use in ("sft", "pretrain"):
        return Dataset.from_list([{"prompt": p, "completion": a} for p, a in zip(prompts, answers)])
    if use in ("grpo", "gdpo", "rloo"):
        return Dataset.from_list([{"prompt": prompt} for prompt in prompts])
    if use == "kto":
        rows = [{"prompt": p, "completion": a, "label": n % 2 == 0} for n, (p, a) in enumerate(zip(prompts, answers))]
        return Dataset.from_list(rows)
    pairs = zip(prompts, answers, answers[32:])
    return Dataset.from_list([{"prompt": prompt, "chosen": one, "rejected": other} for prompt, one, other in pairs])


def reward(completions: list[str], **_: Any) -> list[float]:
    return [float(len(completion) % 3) for completion in completions]


USES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "sft": (trl.SFTTrainer, trl.SFTConfig, {"max_length": 256}),
    "pretrain": (trl.SFTTrainer, trl.SFTConfig, {"max_length": 256}),
    "dpo": (trl.DPOTrainer, trl.DPOConfig, {}),
    "grpo": (trl.GRPOTrainer, trl.GRPOConfig, {"num_generations": 2, "max_completion_length": 6, "beta": 0.0}),
    "gdpo": (trl.GRPOTrainer, trl.GRPOConfig, {"num_generations": 2, "max_completion_length": 6, "beta": 0.0}),
    "rloo": (trl.RLOOTrainer, trl.RLOOConfig, {"num_generations": 2, "max_completion_length": 6}),
    "reward": (trl.RewardTrainer, trl.RewardConfig, {}),
    "kto": (kto.KTOTrainer, kto.KTOConfig, {}),
    "orpo": (orpo.ORPOTrainer, orpo.ORPOConfig, {}),
    "cpo": (cpo.CPOTrainer, cpo.CPOConfig, {}),
}
"""Trainer and config of a use, and options. The other uses of the recipes do not run here."""
WITH_FUNCTIONS = ("grpo", "gdpo", "rloo")


class Gradients(TrainerCallback):
    """Adds up gradients, and their squares."""

    def __init__(self) -> None:
        self.sums: Any = 0.0
        self.squares: Any = 0.0

    def on_pre_optimizer_step(self, args, state, control, model, **kwargs):
        flat = torch.cat([weight.grad.double().flatten() for weight in model.parameters() if weight.grad is not None])
        self.sums, self.squares = self.sums + flat, self.squares + flat.square()


def train(combination: Combination, ours: bool, folder: str, *, draws: bool) -> tuple[Any, Gradients]:
    """Train a tiny model. With `draws` nothing moves, and every step has the first window."""
    trainer_class, config_class, more = USES[combination.use]
    if ours:
        trainer_class = getattr(hf_hybrid, f"Hybrid{trainer_class.__name__}", None) or type(
            f"Hybrid{trainer_class.__name__}", (HybridTrainerMixin, trainer_class), {}
        )
        config_class = getattr(hf_hybrid, f"Hybrid{config_class.__name__}", config_class)
    packs = combination.packed and combination.use in ("sft", "pretrain")
    options = {
        "per_device_train_batch_size": 1 if packs else 4, "gradient_accumulation_steps": 2, "optim": "sgd",
        "max_steps": DRAWS if draws else 3, "learning_rate": 0.0 if draws else 1e-2, "max_grad_norm": 0.0,
        "use_cpu": True, "bf16": False, "report_to": "none", "disable_tqdm": True, "save_strategy": "no",
        "logging_strategy": "no", "torch_compile": combination.compiled, **({"packing": True} if packs else {}), **more,
    }  # fmt: skip
    if combination.recomputed:
        options["gradient_checkpointing"] = True
    fields = {field.name for field in dataclasses.fields(config_class)}
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    ids = {"vocab_size": WORDS, "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None, "num_labels": 1}
    kind: Any = LlamaForSequenceClassification if combination.use == "reward" else LlamaForCausalLM
    torch.manual_seed(0)
    model = kind(LlamaConfig(**sizes, **ids, num_key_value_heads=2))
    refers = combination.use in ("dpo", "kto") and not combination.adapters
    adapters = LoraConfig(
        r=4, lora_dropout=combination.dropout, target_modules="all-linear", init_lora_weights=False,
        task_type="SEQ_CLS" if combination.use == "reward" else "CAUSAL_LM",
    )  # fmt: skip
    given = rows(combination.use)
    if draws:
        given = given.select([number % 8 for number in range(8 * DRAWS)])
        options["train_sampling_strategy"] = "sequential"
    callback = Gradients()
    trainer = trainer_class(
        model=model,
        args=config_class(folder, **{name: value for name, value in options.items() if name in fields}),
        train_dataset=given,
        processing_class=tokenizer(),
        peft_config=adapters if combination.adapters else None,
        callbacks=[callback],
        **({"reward_funcs": reward} if combination.use in WITH_FUNCTIONS else {}),
        **({"ref_model": copy.deepcopy(model)} if refers else {}),
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    return trainer, callback


def weights(trainer: Any) -> torch.Tensor:
    return torch.cat([weight.detach().flatten() for weight in trainer.model.parameters() if weight.requires_grad])


def measure(combination: Combination) -> dict[str, Any]:
    """Return what is shared, and how far the update is from TRL's."""
    # TRL turns dropout off for preferences and rewards. Completions that are drawn under dropout are others.
    draws = combination.dropout > 0 and combination.use in ("sft", "pretrain")
    with tempfile.TemporaryDirectory() as folder:
        _, of_theirs = theirs = train(combination, False, f"{folder}/theirs", draws=draws)
        trainer, of_ours = train(combination, True, f"{folder}/ours", draws=draws)
        summary = trainer.hybrid_summary()
        if draws:
            means = [of.sums / DRAWS for of in (of_theirs, of_ours)]
            variances = [(of.squares / DRAWS - m.square()).sum() for of, m in zip((of_theirs, of_ours), means)]
            error = (sum(variances) / (DRAWS - 1)).sqrt()
            apart = {"errors_apart": ((means[0] - means[1]).norm() / error).item()}
        elif combination.dropout > 0 and combination.use in WITH_FUNCTIONS:
            apart = {}
        else:
            apart = {"apart": (weights(theirs[0]) - weights(trainer)).abs().max().item()}
    names = ("tokens", "tokens_shared", "plain_rows_because")
    return {**{name: summary.get(name) for name in names}, **apart}


def is_shared(run: dict[str, Any]) -> bool:
    """Whether a run shared prefixes, and its update was the same."""
    same = run.get("apart", 0.0) <= MOST and run.get("errors_apart", 0.0) < 1.5
    return same and (run["tokens_shared"] or 0) > 0.1 * (run["tokens"] or 1)


def report(results: Results) -> None:
    """Print each combination with the number of its recipes, and how many of all share."""
    recipes = list(lines(FOLDER / "recipes.jsonl"))
    counts, shared = Counter(Combination.of(r) for r in recipes if not r["images"]), set()
    print("| recipes | use | adapters | dropout | packed | recomputed | compiled | shared | apart | why not |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    for combination, count in counts.most_common():
        run, settings = results.get(**combination._asdict()), [str(value) for value in combination]
        if run is None:
            print(f"| {count} | {' | '.join(settings)} | | | not run |")
            continue
        if is_shared(run):
            shared.add(combination)
        apart = f"{run['apart']:.0e}" if "apart" in run else f"{run.get('errors_apart', 0):.2f} errors"
        part = (run["tokens_shared"] or 0) / (run["tokens"] or 1)
        print(f"| {count} | {' | '.join(settings)} | {part:.0%} | {apart} | {run['plain_rows_because'] or ''} |")
    of_all, on = Counter(r["source"] for r in recipes), Counter()
    for recipe in recipes:
        on[recipe["source"]] += not recipe["images"] and Combination.of(recipe) in shared
    print(f"\n{on.total()} of {len(recipes)} recipes share: ", end="")
    print(", ".join(f"{source} {on[source]} of {count}" for source, count in of_all.items()))


def main() -> None:
    parser = command_line(__doc__, FOLDER)
    parser.add_argument("--use", nargs="+", choices=list(USES), default=list(USES))
    parser.add_argument("--report", action="store_true", help="Print the table of what is there.")
    args = parser.parse_args()
    torch.set_num_threads(1)
    results = Results(args.results, "recipes", Combination._fields)
    if args.report:
        return report(results)
    recipes = lines(FOLDER / "recipes.jsonl")
    for combination in sorted({Combination.of(recipe) for recipe in recipes if not recipe["images"]}):
        if combination.use in args.use:
            found = results.add({**provenance(1), **combination._asdict(), **measure(combination)})
            print(
                *combination, {name: found.get(name) for name in ("tokens_shared", "apart", "errors_apart")}, flush=True
            )


if __name__ == "__main__":
    main()
