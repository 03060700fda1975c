"""
CPU seconds of fine-tuning steps in which every token is computed once, beside what Trainer and TRL have. One thread.

    python -m benchmarks.speedup.pretrained      # once: fetches SmolLM2-135M
    python -m benchmarks.skips.rows              # a fifth of its layers and words, ten minutes
    python -m benchmarks.skips.rows --model smollm2 --kind system instructions --arm trainer by_length trl hybrid
    python -m benchmarks.skips.rows --order kept --kind unrolled answers agent --arm trainer trl hybrid
    python -m benchmarks.skips.rows --model mixture --kind agent --arm trainer hybrid       # and `--model states`
    python -m benchmarks.skips.rows --memory     # bytes of a step's tensors
    python -m benchmarks.skips.rows --equality --model smollm2 [--full]     # gradients of a window in fp32
    python -m benchmarks.skips.rows --compiled --model smollm2 --kind agent instructions --steps 6

A step is what `train()` does between the ends of two steps: fetching and laying out 8 rows in 2 micro-batches, forward
and backward pass under bf16 autocast, clipping and AdamW. Activations are not checkpointed. The first step, in which
rows are compared, counts apart. Arms of one kind train on the same rows in the same order, one arm after the other, and
a ratio is the median over the steps. TRL's `packing` puts other numbers of rows into a step: its seconds are per 8
rows. Rows are shuffled, or with `--order kept` trained on as they are: those of one conversation then stand together.
The texts are Python's language reference.

The kinds of rows:

    system         a system prompt of 300 tokens before each question
    unrolled       conversations of 4 turns, one row per answer
    answers        four answers to each question
    instructions   nothing shared; lengths as in Alpaca
    agent          prompt and tools of 350 tokens, tasks, two trajectories of each, a row per action
    trajectories   agents' conversations with 3 % of the tokens learned, a row per answer, shuffled apart
    full           rows of one length, all of which is learned: nothing can be saved
"""

from __future__ import annotations

import random
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from rig.live_bytes import LiveBytes
from rig.sft_rows import pad, row
from torch._dynamo.utils import counters
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    Qwen3_5TextConfig,
    Qwen3MoeConfig,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)
from trl import SFTConfig, SFTTrainer

from benchmarks.results import Results, command_line, provenance
from benchmarks.speedup.pretrained import FOLDER
from benchmarks.texts import language_reference
from hf_hybrid import HybridConfig, HybridSFTConfig, HybridSFTTrainer, HybridTrainer

ROWS = 8
"""Rows of a step, in two micro-batches."""
WORDS = 9830
"""Vocabulary of the model of a fifth."""
Row = dict[str, list[int]]

# Rows.


class Text:
    """Passages of the language reference, from places that a seed chooses."""

    def __init__(self, words: int | None):
        ids = AutoTokenizer.from_pretrained(FOLDER)(" ".join(language_reference()))["input_ids"]
        self.ids, self.draw = [i % words for i in ids] if words else ids, random.Random(0)

    def __call__(self, least: int, most: int | None = None) -> list[int]:
        length = self.draw.randint(least, most or least)
        begin = self.draw.randrange(len(self.ids) - length)
        return self.ids[begin : begin + length]


def system(text: Text, count: int) -> list[Row]:
    prompt = text(300)
    return [row((prompt + text(15, 60), False), (text(20, 90), True)) for _ in range(count)]


def unrolled(text: Text, count: int) -> list[Row]:
    rows = []
    while len(rows) < count:
        past = text(40)
        for _ in range(4):
            past, answer = past + text(15, 45), text(40, 90)
            rows.append(row((past, False), (answer, True)))
            past = past + answer
    return rows


def answers(text: Text, count: int) -> list[Row]:
    rows = []
    while len(rows) < count:
        question = text(100, 160)
        rows += [row((question, False), (text(40, 100), True)) for _ in range(4)]
    return rows


def instructions(text: Text, count: int) -> list[Row]:
    def length() -> int:
        return min(300, max(10, int(text.draw.lognormvariate(4.1, 0.8))))

    return [row((text(25, 90), False), (text(length()), True)) for _ in range(count)]


def agent(text: Text, count: int) -> list[Row]:
    prompt, rows = text(350), []
    while len(rows) < count:
        task = prompt + text(40, 80)
        for _ in range(2):
            past = task
            for _ in range(2):
                action = text(20, 50)
                rows.append(row((past, False), (action, True)))
                past = past + action + text(30, 80)
    return rows


def trajectories(text: Text, count: int) -> list[Row]:
    prompt, rows = text(400), []
    while len(rows) < count:
        past = prompt
        for _ in range(6):
            past, action = past + text(40, 200), text(10, 40)
            rows.append(row((past, False), (action, True)))
            past = past + action
    text.draw.shuffle(rows)
    return rows[:count]


def full(text: Text, count: int) -> list[Row]:
    return [row((text(256), True)) for _ in range(count)]


KINDS: dict[str, Callable[[Text, int], list[Row]]] = {
    kind.__name__: kind for kind in (system, unrolled, answers, instructions, agent, trajectories, full)
}

# Models and arms.


OTHERS: dict[str, tuple[type, dict[str, Any]]] = {
    "mixture": (
        Qwen3MoeConfig,
        {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 768, "output_router_logits": True},
    ),
    "states": (
        Qwen3_5TextConfig,
        {
            "layer_types": ["linear_attention", "linear_attention", "full_attention"] * 2,
            "linear_num_key_heads": 9, "linear_num_value_heads": 9, "linear_key_head_dim": 64,
            "linear_value_head_dim": 64,
        },
    ),
}  # fmt: skip


def build(name: str, lora: bool) -> Any:
    """
    Return SmolLM2-135M, or a fifth of its layers and words with random weights; all weights or adapters train. In its
    proportions there are a mixture of experts, with its router's loss, and a model whose layers have a state.
    """
    torch.manual_seed(0)
    if name == "smollm2":
        model = AutoModelForCausalLM.from_pretrained(FOLDER, dtype="float32")
    else:
        config: Any = AutoConfig.from_pretrained(FOLDER, num_hidden_layers=6, vocab_size=WORDS)
        if name in OTHERS:
            names = (
                "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
                "num_key_value_heads", "tie_word_embeddings", "bos_token_id", "eos_token_id", "pad_token_id",
            )  # fmt: skip
            kind, options = OTHERS[name]
            config = kind(**{name: getattr(config, name) for name in names}, head_dim=64, **options)
        model = AutoModelForCausalLM.from_config(config)
    adapters = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    return get_peft_model(model, adapters) if lora else model


OURS = {"share_rows": "on", "enable_predict": False}
PADDED = {"data_collator": pad}
PACKING = {"packing": True, "max_length": 1024, "per_device_train_batch_size": 1}
ARMS: dict[str, tuple[type, type, dict, dict]] = {
    "trainer": (Trainer, TrainingArguments, {}, PADDED),
    "by_length": (Trainer, TrainingArguments, {"train_sampling_strategy": "group_by_length"}, PADDED),
    "trl": (SFTTrainer, SFTConfig, {"max_length": None}, {}),
    "trl_packing": (SFTTrainer, SFTConfig, PACKING, {}),
    "trl_padding_free": (SFTTrainer, SFTConfig, {"padding_free": True, "max_length": None}, {}),
    "hybrid": (HybridTrainer, HybridConfig, OURS, PADDED),
    "hybrid_sft": (HybridSFTTrainer, HybridSFTConfig, {"max_length": None, **OURS}, {}),
    "hybrid_packing": (HybridSFTTrainer, HybridSFTConfig, {**PACKING, **OURS}, {}),
}
COMPILED = ("trainer", "trainer_compiled", "hybrid", "hybrid_compiled")
ARMS |= {f"{arm}_compiled": (*ARMS[arm][:2], {**ARMS[arm][2], "torch_compile": True}, PADDED) for arm in COMPILED[::2]}


class Seconds(TrainerCallback):
    """CPU seconds from the end of one step to the end of the next, which hold all that a step does."""

    def __init__(self):
        self.found: list[float] = []

    def on_train_begin(self, *args, **kwargs):
        self.last = time.process_time()

    def on_step_end(self, *args, **kwargs):
        now = time.process_time()
        self.found.append(now - self.last)
        self.last = now


def train(
    arm: str,
    model: Any,
    rows: list[Row],
    folder: str,
    callback: TrainerCallback,
    steps: int,
    order: str = "shuffled",
    **more: Any,
) -> Any:
    """Train a model on rows, once, and return the trainer."""
    trainer_class, config_class, options, extra = ARMS[arm]
    options = {
        "per_device_train_batch_size": ROWS // 2, "gradient_accumulation_steps": 2, "max_steps": steps, "bf16": True,
        "learning_rate": 1e-6, "save_strategy": "no", "report_to": "none", "disable_tqdm": True, "use_cpu": True,
        "dataloader_pin_memory": False, "logging_strategy": "no", "activation_checkpointing": False, **options, **more,
    }  # fmt: skip
    if order == "kept":
        options["train_sampling_strategy"] = "sequential"
    tokenizer = {"processing_class": AutoTokenizer.from_pretrained(FOLDER)} if "max_length" in options else {}
    trainer = trainer_class(
        model, config_class(folder, **options), train_dataset=Dataset.from_list(rows), callbacks=[callback],
        **extra, **tokenizer,
    )  # fmt: skip
    trainer.train()
    return trainer


def measure(arm: str, model: str, lora: bool, kind: str, steps: int, order: str) -> dict[str, Any]:
    """Return the seconds of each step of an arm."""
    rows = KINDS[kind](Text(None if model == "smollm2" else WORDS), ROWS * (steps + 1))
    seconds = Seconds()
    with tempfile.TemporaryDirectory() as folder:
        trainer = train(arm, build(model, lora), rows, folder, seconds, steps + 1, order)
    found: dict[str, Any] = {"first": seconds.found[0], "seconds": seconds.found[1:]}
    if trainer.args.torch_compile:
        found["compilations"] = counters["stats"]["unique_graphs"]
    if "packing" in arm:  # so many packs per step, of so many rows
        per_row = len(rows) / len(trainer.train_dataset)
        found["seconds"] = [second * ROWS / (2 * per_row) for second in found["seconds"]]
    if hasattr(trainer, "hybrid_summary"):
        names = ("tokens", "tokens_padding", "tokens_shared", "micro_batches_saved", "plain_rows_because")
        found |= {name: trainer.hybrid_summary().get(name) for name in names}
    return found


class PeakOfStep(TrainerCallback):
    """Bytes of all tensors that a step makes, at their peak."""

    def __init__(self):
        self.found: list[int] = []

    def on_step_begin(self, args, state, control, **kwargs):
        self.live = LiveBytes()
        self.live.__enter__()

    def on_step_end(self, *args, **kwargs):
        self.live.__exit__(None, None, None)
        self.found.append(self.live.peak)


def memory(model: str, lora: bool, kind: str) -> dict[str, int]:
    """Return the peak of the second step, in which nothing is compared, by arm."""
    rows, peaks = KINDS[kind](Text(None if model == "smollm2" else WORDS), ROWS * 2), {}
    for arm in ("trainer", "hybrid"):
        peak = PeakOfStep()
        with tempfile.TemporaryDirectory() as folder:
            train(arm, build(model, lora), rows, folder, peak, 2)
        peaks[arm] = peak.found[-1]
    return peaks


class Gradients(TrainerCallback):
    """Keeps the gradients of the last window."""

    def on_pre_optimizer_step(self, args, state, control, model, **kwargs):
        self.found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def difference(model: str, lora: bool, kind: str) -> float:
    """
    Return the largest difference of a parameter's gradient between `Trainer`'s window and ours in fp32, relative to the
    gradient's norm. What is zero up to rounding is left out.
    """
    rows, found = KINDS[kind](Text(None if model == "smollm2" else WORDS), ROWS), []
    for arm in ("trainer", "hybrid"):
        made, gradients = build(model, lora), Gradients()
        for name, parameter in made.named_parameters():
            if "lora_B" in name:  # zero at first, so that A would get no gradient
                torch.nn.init.normal_(parameter, std=0.02)
        with tempfile.TemporaryDirectory() as folder:
            train(arm, made, rows, folder, gradients, 1, bf16=False, max_grad_norm=0.0)
        found.append(gradients.found)
    theirs, ours = found
    least = 1e-6 * max(gradient.norm() for gradient in theirs.values())
    return max(((theirs[n] - ours[n]).norm() / theirs[n].norm()).item() for n in theirs if theirs[n].norm() > least)


def ratio(first: dict, second: dict) -> float:
    """Return the median over the steps of how often the second fits into the first."""
    return statistics.median(a / b for a, b in zip(first["seconds"], second["seconds"]))


def main() -> None:
    parser = command_line(__doc__, Path(__file__).parent)
    parser.add_argument("--model", choices=["fifth", "smollm2", *OTHERS], default="fifth")
    parser.add_argument("--full", action="store_true", help="Train all weights, not adapters.")
    parser.add_argument("--kind", nargs="+", choices=list(KINDS), default=list(KINDS))
    parser.add_argument("--arm", nargs="+", choices=list(ARMS))
    parser.add_argument("--order", choices=["shuffled", "kept"], default="shuffled", help="Of the rows.")
    parser.add_argument("--steps", type=int, default=3, help="Steps that are measured.")
    parser.add_argument("--memory", action="store_true", help="Measure bytes instead of seconds.")
    parser.add_argument("--equality", action="store_true", help="Compare gradients instead of measuring seconds.")
    parser.add_argument("--compiled", action="store_true", help="Measure `torch_compile` and what it is beside.")
    args = parser.parse_args()
    torch.set_num_threads(1)
    name = "rows_compiled" if args.compiled else "rows"
    arms = args.arm or [arm for arm in ARMS if (arm in COMPILED if args.compiled else "compiled" not in arm)]
    if args.model == "states" and args.arm is None:
        # Packed rows of these layers need kernels for a GPU: transformers refuses them without.
        arms = [arm for arm in arms if arm not in ("trl_packing", "trl_padding_free")]
    results = Results(args.results, name, ("model", "trains", "order", "kind", "arm"))
    found = {"model": args.model, "trains": "all weights" if args.full else "adapters", "order": args.order}
    for kind in args.kind:
        if args.memory:
            peaks = memory(args.model, not args.full, kind)
            kept = Results(args.results, "rows_memory", ("model", "trains", "kind"))
            print(
                kept.add({**provenance(1), **found, "kind": kind, "peak_bytes": peaks})["peak_bytes"], kind, flush=True
            )
            continue
        if args.equality:
            kept = Results(args.results, "rows_equality", ("model", "trains", "kind"))
            value = difference(args.model, not args.full, kind)
            print(
                kind, kept.add({**provenance(1), **found, "kind": kind, "difference": value})["difference"], flush=True
            )
            continue
        for arm in arms:
            torch._dynamo.reset()
            counters.clear()
            measured = measure(arm, args.model, not args.full, kind, args.steps, args.order)
            results.add({**provenance(1), **found, "kind": kind, "arm": arm, **measured})
            print(kind, arm, [round(second, 2) for second in measured["seconds"]], flush=True)


if __name__ == "__main__":
    main()
