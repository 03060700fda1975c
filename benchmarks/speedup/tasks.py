"""The tasks of the speed-up benchmark: texts, models and training settings."""

from __future__ import annotations

import functools
import importlib.util
import os
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path

from benchmarks.texts import language_reference

BASE = Path(__file__).resolve().parent / "base"
"""The model that fine-tuning starts from, made when it is first needed: plain Trainer on `code`."""
BASE_STEPS, BASE_RATE = 900, 3e-3
EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "07_from_scratch.py"
SEQUENCE, BATCH = 128, 8
PROBE, TEST = 64, 480
"""Sequences for the probes and for the final evaluation, disjoint from each other and from training."""
DEFAULT_RATE, TRL_RATE, DPO_RATE = 5e-5, 2e-5, 1e-6
"""What `Trainer` trains with if nothing is said, TRL's `SFTTrainer`, and its `DPOTrainer`."""

QUIET = {
    "save_strategy": "no", "report_to": "none", "disable_tqdm": True, "logging_steps": 10**9,
    "dataloader_pin_memory": False,
}  # fmt: skip
"""Arguments of runs that save, log and show nothing."""
TUNED = {"warmup_steps": 0.05, "adam_beta2": 0.95, "weight_decay": 0.1}
"""Options with which plain AdamW was best from scratch (docs/results.md), beside `Trainer`'s linear decay to zero."""


@dataclass(frozen=True)
class Task:
    """
    One thing to train; `steps` is the budget at which arms are compared, `budgets` those of the plain curve.

    `grid` are the learning rates that plain AdamW starts its search from; it is widened while the best lies at an end.
    `tuned` is `True`, or the name of the task that is the same one with a tuned baseline. `options` are those of
    `TrainingArguments` that all arms share. `rank` and `alpha` are those of the adapters of a `lora` task, which lie on
    all linear layers. A `pretrained` task starts from SmolLM2 (pretrained.py); a `preference`
    task trains by DPO, in pairs; a `reward` task by GRPO, where the loss that counts is 1 less the held-out reward.
    """

    name: str
    about: str
    text: str
    steps: int
    budgets: tuple[int, ...]
    grid: tuple[float, ...]
    scratch: bool = True
    lora: bool = False
    rank: int = 16
    alpha: int = 32
    tuned: bool | str = True
    options: dict = field(default_factory=lambda: TUNED)
    batch: int = BATCH
    sequence: int = SEQUENCE
    pretrained: bool = False
    preference: bool = False
    reward: bool = False


SMALL_ADAPTERS = {"rank": 8, "alpha": 16}
"""Of the tasks that train adapters of our own model."""
SMOL_SEQUENCE = 112
SMOL = {"scratch": False, "options": {"bf16": True}, "batch": 4, "sequence": SMOL_SEQUENCE, "pretrained": True}
"""
Of the tasks that start from SmolLM2: `Trainer`'s own options, but for the learning rate and bf16 autocast; as many rows
as one core computes in a few minutes.
"""
SMOL_TWO_ROWS = SMOL | {"batch": 2}
DPO_OPTIONS = {"bf16": False, "max_length": SEQUENCE, "gradient_checkpointing": False}
"""TRL's defaults but for bf16, and checkpointing of activations, which changes nothing but the time."""
COMPLETIONS, COMPLETION = 4, 24
"""Completions of a prompt in GRPO, and tokens of each."""
GRPO_OPTIONS = {
    "bf16": True,
    "gradient_checkpointing": False,
    "num_generations": COMPLETIONS,
    "max_completion_length": COMPLETION,
    "logging_steps": 1,
}

TUNED_TASKS = (
    Task("code", "from scratch on Python's source", "code", 600, (300, 600, 900, 1200, 1500), (1.5e-3, 3e-3, 6e-3)),
    Task("docs", "full fine-tuning of a `code` model to the language reference", "docs", 200,
        (100, 150, 200, 250, 300), (1e-3, 2e-3, 4e-3), scratch=False),
    Task("lora", "LoRA (rank 8, all linear layers) of the same model to the same text", "docs", 200,
        (100, 150, 200, 250, 300), (4e-3, 8e-3, 1.6e-2), scratch=False, lora=True, **SMALL_ADAPTERS),
    Task("dpo", "DPO of `lora`'s model and adapters: a line of the language reference against its words in reverse",
        "pairs", 200, (150, 170, 200), (2e-3, 4e-3, 8e-3), scratch=False, lora=True, **SMALL_ADAPTERS, preference=True,
        options=DPO_OPTIONS, batch=2),
    Task("small", "from scratch on the language reference alone, four and a half passes over it", "docs", 500,
        (250, 500, 750, 1000), (1.5e-3, 3e-3, 6e-3)),
    Task("smol-full", "full fine-tuning of SmolLM2-135M-Instruct, source to docstring", "docstrings", 40, (30, 40, 50),
        (5e-5, 1e-4, 2e-4), **SMOL),
    Task("smol-lora", "the same with LoRA (rank 16, all linear layers)", "docstrings", 40, (30, 40, 50),
        (1e-3, 2e-3, 4e-3), lora=True, **SMOL),
    Task("smol-lora-long", "`smol-lora` for 200 steps of 2 rows", "docstrings", 200, (150, 170, 200),
        (5e-4, 1e-3, 2e-3), lora=True, **SMOL_TWO_ROWS),
    Task("smol-lora-r8", "`smol-lora-long` with the adapters that PEFT makes if nothing is said: rank 8, alpha 8",
        "docstrings", 200, (200,), (1e-3, 2e-3, 4e-3), lora=True, rank=8, alpha=8, **SMOL_TWO_ROWS),
    Task("smol-lora-r64", "`smol-lora-long` with the adapters of QLoRA: rank 64, alpha 16", "docstrings", 200, (200,),
        (1e-3, 2e-3, 4e-3), lora=True, rank=64, alpha=16, **SMOL_TWO_ROWS),
    Task("smol-c-lora", "LoRA (rank 16, all linear layers) on C++ headers, of which every token is learned", "headers",
        200, (200,), (5e-4, 1e-3, 2e-3), lora=True, **SMOL_TWO_ROWS),
    Task("smol-dpo", "DPO with LoRA (rank 16, all linear layers): the docstring against that of another function",
        "pairs", 40, (30, 40, 50), (2.5e-4, 5e-4, 1e-3), lora=True, preference=True,
        **(SMOL_TWO_ROWS | {"options": DPO_OPTIONS | {"bf16": True}})),
    Task("smol-dpo-long", "`smol-dpo` for 200 steps", "pairs, more held out", 200, (170, 200), (2.5e-4, 5e-4, 1e-3),
        lora=True, preference=True, **(SMOL_TWO_ROWS | {"options": DPO_OPTIONS | {"bf16": True}})),
    Task("smol-grpo", "GRPO with LoRA (rank 16, all linear layers): the reward is 1 for one whole sentence", "prompts",
        24, (18, 24, 30), (2.5e-4, 5e-4, 1e-3), lora=True, reward=True,
        **(SMOL | {"batch": 2 * COMPLETIONS, "options": GRPO_OPTIONS})),
)  # fmt: skip


def _from_default(name: str, tuned: str, rate: float, how: str = "from its default learning rate", **changes) -> Task:
    """The task `tuned` from the learning rate that its trainer has if none is set."""
    task = next(task for task in TUNED_TASKS if task.name == tuned)
    changes = {"budgets": (task.steps,), **changes}
    return replace(task, name=name, about=f"`{tuned}` {how}", tuned=tuned, grid=(rate,), **changes)


DEFAULTS = {"how": "with every option of `Trainer` at its default", "options": {}}
TASKS = {
    task.name: task
    for task in (
        *TUNED_TASKS,
        _from_default("code-default", "code", DEFAULT_RATE, steps=300, budgets=(300, 1200, 2400), **DEFAULTS),
        _from_default("docs-default", "docs", DEFAULT_RATE, budgets=(200, 800, 1600), **DEFAULTS),
        _from_default("lora-default", "lora", DEFAULT_RATE, **DEFAULTS),
        _from_default("dpo-default", "dpo", DPO_RATE),
        _from_default("smol-lora-default", "smol-lora-long", TRL_RATE),
        _from_default("smol-lora-r8-default", "smol-lora-r8", TRL_RATE),
        _from_default("smol-lora-r64-default", "smol-lora-r64", TRL_RATE),
        _from_default("smol-c-lora-default", "smol-c-lora", TRL_RATE),
        _from_default("smol-dpo-default", "smol-dpo-long", DPO_RATE),
    )
}


@functools.cache
def quickstart():
    """The functions of examples/07_from_scratch.py: the benchmark trains what a new user sees."""
    spec = importlib.util.spec_from_file_location("quickstart", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    sys.modules["quickstart"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


class TextAndModels:
    """Loads texts, tokenizer and base model once per process."""

    def __init__(self):
        self.tokenizer = quickstart().train_tokenizer(quickstart().python_source())

    @functools.cache  # noqa: B019 - one instance lives as long as its process
    def split(self, text: str) -> dict:
        """`train`, `probe` and `test` sets, the same for every run."""
        from datasets import Dataset

        if text == "pairs":
            return _parts(Dataset.from_list(_pairs(language_reference())))
        texts = quickstart().python_source() if text == "code" else language_reference()
        rows = quickstart().blocks(Dataset.from_dict({"text": texts}), self.tokenizer, SEQUENCE)
        return _parts(rows)

    def model(self, task: Task, seed: int):
        from transformers import AutoModelForCausalLM, set_seed

        set_seed(seed)
        if task.scratch:
            return quickstart().small_llama(self.tokenizer)
        model = AutoModelForCausalLM.from_pretrained(BASE)
        if not task.lora:
            return model
        from peft import get_peft_model

        return get_peft_model(model, adapters_of(task))

    def trainer(self, task: Task, hybrid: bool) -> tuple[type, type, dict]:
        """Classes of the trainer and its arguments, and what else the trainer takes."""
        from transformers import Trainer, TrainingArguments

        import hf_hybrid

        if task.preference:
            import trl

            pair = (hf_hybrid.HybridDPOTrainer, hf_hybrid.HybridDPOConfig)
            return *(pair if hybrid else (trl.DPOTrainer, trl.DPOConfig)), {"processing_class": self.tokenizer}
        pair = (hf_hybrid.HybridTrainer, hf_hybrid.HybridConfig) if hybrid else (Trainer, TrainingArguments)
        return *pair, {}


def adapters_of(task: Task):
    from peft import LoraConfig

    return LoraConfig(r=task.rank, lora_alpha=task.alpha, target_modules="all-linear", task_type="CAUSAL_LM")


def _parts(rows) -> dict:
    whole = rows.train_test_split(min(TEST, len(rows) // 6), seed=0)
    inner = whole["train"].train_test_split(PROBE, seed=0)
    return {"train": inner["train"], "probe": inner["test"], "test": whole["test"]}


def _pairs(texts: list[str]) -> list[dict]:
    """A prompt is two lines of a text, the chosen completion the next line, the rejected one its words in reverse."""
    found = []
    for text in texts:
        lines = [line for line in text.splitlines() if len(line) > 50]
        for prompt, line in [(lines[at : at + 2], lines[at + 2]) for at in range(0, len(lines) - 2, 6)]:
            backwards = " ".join(reversed(line.split()))
            found.append({"prompt": "\n".join(prompt), "chosen": f"\n{line}", "rejected": f"\n{backwards}"})
    return found


def device() -> str:
    """Where runs compute: on the GPU only if that was asked for (`--gpu`)."""
    return os.environ.get("HYBRID_BENCHMARK_DEVICE", "cpu")


def training_arguments(task: Task, *, steps: int, rate: float, seed: int, folder: str) -> dict:
    """Keyword arguments of `TrainingArguments` or `HybridConfig`."""
    return {
        "output_dir": folder,
        "max_steps": steps,
        "learning_rate": rate,
        "seed": seed,
        "per_device_train_batch_size": task.batch,
        "per_device_eval_batch_size": 2 * task.batch,
        "use_cpu": device() == "cpu",
        **QUIET,
        **task.options,
    }
