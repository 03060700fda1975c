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
more than a tenth of the tokens are shared, and weights end within 1e-5 of TRL's and within a thousandth of their way.
Under dropout no weights can be compared: there the rate is 0, and 100 steps with the first window give the mean
gradient, whose distance from TRL's is given in standard errors of that distance; it must be below 1.5. Passes without
a gradient of a loss that nobody knows are computed as they are, and not counted. Attention, kernels, 4 bits, optimizers
and sharding are not those of the recipes.

A recipe with images is a use of its own (`sft with images`): a tiny Qwen2-VL, on rows of which eight share an image
behind the same 24 words.

Axolotl's energy-based fine-tuning (`ebft`) is GRPO with a reward from hidden states, so it runs here as TRL's GRPO with
such a reward; its strided mode is another (`ebft strided`). TRL has dropped some trainers. They run with the last TRL
that has them, beside all else as it is:

    pip install --no-deps --target older trl==1.12
    PYTHONPATH=older python -m benchmarks.recipes.coverage --use bco nashmd prm xpo
"""

from __future__ import annotations

import copy
import dataclasses
import importlib.util
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import torch
from datasets import Dataset
from peft import LoraConfig
from rig import vision
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.nn.functional import cosine_similarity
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    LlamaForTokenClassification,
    PreTrainedTokenizerFast,
)
from transformers.trainer_callback import PrinterCallback, TrainerCallback

import hf_hybrid
from benchmarks.results import Results, command_line, lines, provenance
from hf_hybrid import HybridTrainerMixin

FOLDER = Path(__file__).parent
WORDS, DRAWS, MOST = 200, 100, 1e-5
WITH_IMAGES = " with images"


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
            recipe["use"] + WITH_IMAGES * recipe["images"], adapters, recipe["dropout"] * adapters, recipe["packed"],
            recipe["recompute"], recipe["compile"],
        )  # fmt: skip


def tokenizer() -> PreTrainedTokenizerFast:
    words = {"<pad>": 0, "</s>": 1, "<unk>": 2, **{f"w{number}": number for number in range(3, WORDS)}}
    core = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made = PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<pad>", eos_token="</s>", unk_token="<unk>")
    made.chat_template = "{% for message in messages %}{{ message.content }} {% endfor %}"  # of `messages`, for GKD
    return made


def text(count: int, seed: int) -> str:
    ids = torch.randint(3, WORDS, (count,), generator=torch.Generator().manual_seed(seed))
    return " ".join(f"w{number}" for number in ids.tolist())


def rows(use: str) -> Dataset:
    """Rows of the form that a use has, which begin alike."""
    if (plain := use.removesuffix(WITH_IMAGES)) != use:
        of_use = {"sft": vision.sft_rows, "dpo": vision.pairs}.get(plain, vision.prompts)
        return of_use(32, each=8, several=plain in ("sft", "dpo"), system=24)
    prompts = [f"{text(48, 0)} {text(4, 100 + number)}" for number in range(32)]
    answers = [" " + text(6 + 3 * (number % 5), number) for number in range(64)]
    pairs = list(zip(prompts, answers, answers[32:]))
    if use in ("sft", "pretrain", "distillation"):
        made = [{"prompt": prompt, "completion": one} for prompt, one, _ in pairs]
    elif use == "gkd":
        roles = ("user", "assistant")
        made = [{"messages": [{"role": r, "content": c} for r, c in zip(roles, pair)]} for pair in pairs]
    elif use == "ebft":
        made = [{"prompt": prompt, "ground_truth": one} for prompt, one, _ in pairs]
    elif use in WITH_REWARDS:
        made = [{"prompt": prompt} for prompt in prompts]
    elif use in ("kto", "bco"):
        made = [{"prompt": p, "completion": one, "label": n % 2 == 0} for n, (p, one, _) in enumerate(pairs)]
    elif use == "prm":
        made = [{"prompt": p, "completions": [one, other], "labels": [True, False]} for p, one, other in pairs]
    else:
        made = [{"prompt": prompt, "chosen": one, "rejected": other} for prompt, one, other in pairs]
    return Dataset.from_list(made)


def reward(completions: list[str], **_: Any) -> list[float]:
    return [float(len(str(completion)) % 3) for completion in completions]


class FeatureMatching:
    """
    The reward of energy-based fine-tuning: how near the states of a completion's last token are to those of the right
    answer, less how near they are to those of the other completions of its prompt. The model is the policy as it began.
    """

    __name__ = "feature_matching"

    def __init__(self, model: Any):
        self.model = model

    @torch.no_grad()
    def features(self, texts: list[str]) -> torch.Tensor:
        ids = [torch.tensor([tokenizer()(one)["input_ids"]]) for one in texts]
        states = [self.model(one, output_hidden_states=True).hidden_states[1:] for one in ids]
        return torch.stack([torch.cat([layer[0, -1] for layer in layers]) for layers in states])

    def __call__(self, prompts: list[str], completions: list[str], ground_truth: list[str], **_: Any) -> list[float]:
        drawn = self.features([f"{prompt} {completion}" for prompt, completion in zip(prompts, completions)])
        right = self.features([prompt + answer for prompt, answer in zip(prompts, ground_truth)])
        groups = drawn.unflatten(0, (-1, 2))
        apart = cosine_similarity(groups[:, 0], groups[:, 1]).repeat_interleave(2)
        return (2 * cosine_similarity(drawn, right) - 2 * apart).tolist()


SAMPLED = {"num_generations": 2, "max_completion_length": 6}
USES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "sft": ("trl", "SFT", {"max_length": 256}),
    "pretrain": ("trl", "SFT", {"max_length": 256}),
    "dpo": ("trl", "DPO", {}),
    "grpo": ("trl", "GRPO", {**SAMPLED, "beta": 0.0}),
    "gdpo": ("trl", "GRPO", {**SAMPLED, "beta": 0.0}),
    "ebft": ("trl", "GRPO", {**SAMPLED, "beta": 0.0}),
    "rloo": ("trl", "RLOO", SAMPLED),
    "reward": ("trl", "Reward", {}),
    "kto": ("trl", "KTO", {}),
    "orpo": ("trl.experimental.orpo", "ORPO", {}),
    "cpo": ("trl.experimental.cpo", "CPO", {}),
    "distillation": ("trl", "Distillation", {"max_completion_length": 6}),
    "gkd": ("trl.experimental.gkd", "GKD", {"max_new_tokens": 6}),
    "onlinedpo": ("trl.experimental.online_dpo", "OnlineDPO", {"max_new_tokens": 6}),
    "bco": ("trl.experimental.bco", "BCO", {}),
    "nashmd": ("trl.experimental.nash_md", "NashMD", {"max_new_tokens": 6}),
    "prm": ("trl.experimental.prm", "PRM", {"step_separator": " w3"}),
    "xpo": ("trl.experimental.xpo", "XPO", {"max_new_tokens": 6}),
}
OF_IMAGES = {"sft": {"max_length": None}, "dpo": {"max_length": None}, "grpo": {}, "rloo": {}, "onlinedpo": {}}
USES |= {use + WITH_IMAGES: (*USES[use][:2], {**USES[use][2], **more}) for use, more in OF_IMAGES.items()}
"""Module, trainer and options of a use."""
NOT_RUN = {
    "ebft strided": "many short completions stand in one row, under a mask of four dimensions",
    "ppo": "TRL's had a loop of its own, without `training_step`, and made its optimizer before the trainer was there",
}
"""Uses that do not run here, and why not."""
_REWARDED = ("grpo", "gdpo", "ebft", "rloo", "onlinedpo", "nashmd", "xpo")
WITH_REWARDS = (*_REWARDED, *(use + WITH_IMAGES for use in _REWARDED))
_DRAWING = ("sft", "pretrain", "distillation", "grpo", "gdpo", "ebft", "rloo")
WITH_DROPOUT = (*_DRAWING, *(use + WITH_IMAGES for use in _DRAWING))
"""TRL turns it off for preferences, rewards and GKD."""
KINDS = {"reward": LlamaForSequenceClassification, "prm": LlamaForTokenClassification}
TASKS = {"reward": "SEQ_CLS", "prm": "TOKEN_CLS"}


class Gradients(TrainerCallback):
    """Adds up gradients, and their squares. It keeps the weights as they were."""

    def __init__(self) -> None:
        self.sums: Any = 0.0
        self.squares: Any = 0.0

    def on_train_begin(self, args, state, control, model, **kwargs):
        self.begun = weights(model)

    def on_pre_optimizer_step(self, args, state, control, model, **kwargs):
        flat = torch.cat([weight.grad.double().flatten() for weight in model.parameters() if weight.grad is not None])
        self.sums, self.squares = self.sums + flat, self.squares + flat.square()


def train(combination: Combination, ours: bool, folder: str, *, draws: bool) -> tuple[Any, Gradients]:
    """Train a tiny model. With `draws` nothing moves, and every step has the first window."""
    module, name, more = USES[use := combination.use]
    trainer_class, config_class = (getattr(importlib.import_module(module), name + of) for of in ("Trainer", "Config"))
    if ours:
        trainer_class = getattr(hf_hybrid, f"Hybrid{name}Trainer", None) or type(
            f"Hybrid{name}Trainer", (HybridTrainerMixin, trainer_class), {}
        )
        config_class = getattr(hf_hybrid, f"Hybrid{name}Config", config_class)
    packs, rate = combination.packed and use in ("sft", "pretrain"), 0.1 if use.endswith(WITH_IMAGES) else 1.0
    options = {
        "per_device_train_batch_size": 1 if packs else 4, "gradient_accumulation_steps": 2, "optim": "sgd",
        "max_steps": DRAWS if draws else 3, "learning_rate": 0.0 if draws else rate, "max_grad_norm": 0.0,
        "use_cpu": True, "bf16": False, "report_to": "none", "disable_tqdm": True, "save_strategy": "no",
        "logging_strategy": "no", "torch_compile": combination.compiled, **({"packing": True} if packs else {}), **more,
    }  # fmt: skip
    if combination.recomputed:
        options["gradient_checkpointing"] = True
    fields = {field.name for field in dataclasses.fields(config_class)}
    torch.manual_seed(0)
    model, processing = tiny(KINDS.get(use, LlamaForCausalLM)), tokenizer()
    if use.endswith(WITH_IMAGES):
        model, processing = vision.vision_model("qwen2_vl")
    adapters = LoraConfig(
        r=4, lora_dropout=combination.dropout, init_lora_weights=False, task_type=TASKS.get(use, "CAUSAL_LM"),
        target_modules=["q_proj", "v_proj"] if use == "prm" else "all-linear",
    )  # fmt: skip
    beside: dict[str, Any] = {"peft_config": adapters if combination.adapters else None}
    if use in ("dpo", f"dpo{WITH_IMAGES}", "kto", "bco", "nashmd", "xpo"):
        beside["ref_model"] = None if combination.adapters else copy.deepcopy(model)
    if use in ("distillation", "gkd"):
        beside["teacher_model"] = tiny(LlamaForCausalLM, initializer_range=0.3)
    if use in WITH_REWARDS:
        beside["reward_funcs"] = FeatureMatching(copy.deepcopy(model)) if use == "ebft" else reward
    if use in ("nashmd", "xpo"):
        beside["reward_funcs"] = tiny(LlamaForSequenceClassification)
    if use == "xpo":
        beside["reward_processing_classes"] = tokenizer()
    given = rows(use)
    if draws:
        given = given.select([number % 8 for number in range(8 * DRAWS)])
        options["train_sampling_strategy"] = "sequential"
    callback = Gradients()
    trainer = trainer_class(
        model=model,
        args=config_class(folder, **{name: value for name, value in options.items() if name in fields}),
        train_dataset=given,
        processing_class=processing,
        callbacks=[callback],
        **beside,
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    return trainer, callback


def tiny(kind: Any, **more: Any) -> Any:
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    ids = {"vocab_size": WORDS, "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None}
    labels = 1 + (kind is LlamaForTokenClassification)
    return kind(LlamaConfig(**sizes, **ids, num_labels=labels, num_key_value_heads=2, **more))


def weights(model: Any) -> torch.Tensor:
    return torch.cat([weight.detach().flatten() for weight in model.parameters() if weight.requires_grad])


def measure(combination: Combination) -> dict[str, Any]:
    """Return what is shared, and how far the update is from TRL's."""
    draws = combination.dropout > 0 and combination.use in WITH_DROPOUT
    with tempfile.TemporaryDirectory() as folder:
        _, of_theirs = theirs = train(combination, False, f"{folder}/theirs", draws=draws)
        trainer, of_ours = train(combination, True, f"{folder}/ours", draws=draws)
        summary = trainer.hybrid_summary()
        if draws:
            means = [of.sums / DRAWS for of in (of_theirs, of_ours)]
            variances = [(of.squares / DRAWS - m.square()).sum() for of, m in zip((of_theirs, of_ours), means)]
            error = (sum(variances) / (DRAWS - 1)).sqrt()
            apart = {"errors_apart": ((means[0] - means[1]).norm() / error).item()}
        else:
            ended = weights(theirs[0].model)
            distances = {"apart": weights(trainer.model), "moved": of_theirs.begun}
            apart = {name: (ended - other).abs().max().item() for name, other in distances.items()}
    names = ("tokens", "tokens_shared", "plain_rows_because")
    return {**{name: summary.get(name) for name in names}, **apart}


def is_shared(run: dict[str, Any]) -> bool:
    """Whether a run shared prefixes, and its update was the same."""
    same = run.get("apart", 0.0) <= min(MOST, 1e-3 * run.get("moved", 1.0)) and run.get("errors_apart", 0.0) < 1.5
    return same and (run["tokens_shared"] or 0) > 0.1 * (run["tokens"] or 1)


def report(results: Results) -> None:
    """Print each combination with the number of its recipes, and how many of all share."""
    recipes = list(lines(FOLDER / "recipes.jsonl"))
    counts, shared = Counter(map(Combination.of, recipes)), set()
    print("| recipes | use | adapters | dropout | packed | recomputed | compiled | shared | apart | why not |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    for combination, count in counts.most_common():
        run, settings = results.get(**combination._asdict()), [str(value) for value in combination]
        if run is None:
            print(f"| {count} | {' | '.join(settings)} | | | {NOT_RUN.get(combination.use, 'not run')} |")
            continue
        if is_shared(run):
            shared.add(combination)
        apart = f"{run['apart']:.0e}" if "apart" in run else f"{run.get('errors_apart', 0):.2f} errors"
        part = (run["tokens_shared"] or 0) / (run["tokens"] or 1)
        print(f"| {count} | {' | '.join(settings)} | {part:.0%} | {apart} | {run['plain_rows_because'] or ''} |")
    of_all, on = Counter(r["source"] for r in recipes), Counter()
    for recipe in recipes:
        on[recipe["source"]] += Combination.of(recipe) in shared
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
    there = {use for use in args.use if importlib.util.find_spec(USES[use][0])}  # not all are in each TRL
    for combination in sorted(set(map(Combination.of, recipes))):
        if combination.use in there:
            found = results.add({**provenance(1), **combination._asdict(), **measure(combination)})
            print(
                *combination, {name: found.get(name) for name in ("tokens_shared", "apart", "errors_apart")}, flush=True
            )


if __name__ == "__main__":
    main()
