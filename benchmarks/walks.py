#!/usr/bin/env python3
"""
How many files of hf_hybrid a reader enters to follow a journey, and which files import each other in a circle.

    python benchmarks/walks.py

Tiny models on the CPU; it needs TRL and PEFT. Calls of functions of the package are counted with `sys.setprofile`. The
exit status is 1 if a number is over its limit.

- A step reaches from the end of one optimizer step to the end of the next: a save is counted with the step after it.
  The numbers are medians over the steps after the tenth. What other threads do is not counted.
- `a command to its trainer` reaches from `main` to the constructor of the trainer, without what the arguments of the
  training check of themselves. Each number is that of the command with the longest way: `train`, `sft`, `dpo` or
  `grpo`. `options to parts` reaches from the call of `build_run` to its return. Both take each function once, where it
  is first called. A stay is a row of functions of one file.
- Circles are groups of files that import each other (`tests/rig/circles.py`).
"""

import io
import json
import os
import statistics
import sys
import tempfile
from contextlib import redirect_stdout
from pathlib import Path

os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    PreTrainedTokenizerFast,
    PrinterCallback,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)
from transformers.utils.logging import disable_progress_bar
from trl import RewardConfig, RewardTrainer

import hf_hybrid
from hf_hybrid import HybridConfig, HybridGRPOConfig, HybridGRPOTrainer, HybridTrainer
from hf_hybrid.cli.main import main as command
from hf_hybrid.trainer import HybridTrainerMixin

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from rig.circles import circles

LIMITS = {
    "a real step": {"files": 9, "changes": 35, "depth": 8, "calls": 175},
    "a step with a probed leap": {"files": 14, "depth": 15, "calls": 1520},
    "a step of LoRA": {"files": 6, "changes": 30, "depth": 9, "calls": 80},
    "a step with `enable_predict=False`": {"files": 3, "changes": 12, "depth": 6, "calls": 34},
    "a step of shared rows": {"files": 11, "changes": 105, "depth": 11, "calls": 374},
    "a step of a reward model": {"files": 13, "changes": 223, "depth": 16, "calls": 1090},
    "a step of GRPO": {"files": 11, "changes": 64, "depth": 15, "calls": 149},
    "a streamed step": {"files": 12, "changes": 251, "depth": 15, "calls": 667},
    "a streamed window of four micro-batches": {"files": 15, "changes": 385, "depth": 12, "calls": 1296},
    "a plain save": {"files": 5, "changes": 40, "depth": 9, "calls": 89},
    "a save with leaps": {"files": 14, "changes": 77, "depth": 12, "calls": 408},
    "options to parts": {"files": 15, "stays": 34},
    "a command to its trainer": {"files": 12, "stays": 28},
    "circles of files": {"circles": 0},
}
"""What a number is at most. A change that shortens a journey lowers its limits here."""
GOALS = {
    "a real step": {"files": 9},
    "a step with a probed leap": {"files": 15},
    "a step of LoRA": {"files": 7},
    "a step with `enable_predict=False`": {"files": 5},
    "a step of shared rows": {"files": 10},
    "a step of GRPO": {"files": 9, "calls": 150},
    "a streamed step": {"files": 10},
    "a plain save": {"files": 9, "calls": 400},
    "a save with leaps": {"files": 14},
    "a command to its trainer": {"files": 12, "stays": 30},
    "circles of files": {"circles": 0},
}
FIGURES = ("files", "changes", "depth", "calls", "stays", "circles")
"""Files that are entered; changes of file from one call to the next; calls inside one another; calls; see above."""

ROOT = os.path.dirname(hf_hybrid.__file__) + os.sep
STEPS = 40
torch.set_num_threads(1)
disable_progress_bar()

# Calls of the package.


class Calls:
    """The calls of functions of the package while it is open: file, depth, name and the line of the definition."""

    def __init__(self):
        self.events, self.stack = [], []

    def __enter__(self):
        sys.setprofile(self.profile)
        return self

    def __exit__(self, *error):
        sys.setprofile(None)

    def profile(self, frame, event, arg):
        code = frame.f_code
        if not code.co_filename.startswith(ROOT):
            return
        if event == "call":
            self.stack.append(frame)
            if code.co_flags & 2:  # neither a class nor a module
                self.events.append((code.co_filename[len(ROOT) :], len(self.stack), code.co_name, code.co_firstlineno))
        elif event == "return" and self.stack and self.stack[-1] is frame:
            self.stack.pop()


class Steps(TrainerCallback, Calls):
    """The calls of a run by step, the steps after which it saved, and what `build_run` calls."""

    def __init__(self):
        super().__init__()
        self.by_step, self.saves, self.of_build_run = {}, set(), []

    def on_train_begin(self, args, state, control, **kwargs):
        self.of_build_run, self.events = self.events, []
        self.stack.clear()  # the depth of a step does not count what calls it

    def on_step_end(self, args, state, control, **kwargs):
        self.by_step[state.global_step - 1], self.events = self.events, []
        if control.should_save:  # an `on_save` here would make saves synchronous
            self.saves.add(state.global_step)

    def later(self) -> list:
        return [events for step, events in self.by_step.items() if step > 10]


def of_steps(steps) -> dict[str, float]:
    """Medians over steps, each a list of calls."""
    columns = {
        "files": [len({name for name, *_ in events}) for events in steps],
        "changes": [changes([name for name, *_ in events]) for events in steps],
        "depth": [max(depth for _, depth, *_ in events) for events in steps],
        "calls": [len(events) for events in steps],
    }
    return {name: statistics.median(values) for name, values in columns.items()}


def of_first_visits(events) -> dict[str, float]:
    """Files and stays of functions, each where it is first called."""
    visits = dict.fromkeys((name, line) for name, _, function, line in events if not function.startswith("<"))
    return {"files": len({name for name, _ in visits}), "stays": changes([name for name, _ in visits]) + 1}


def changes(files: list[str]) -> int:
    return sum(first != second for first, second in zip(files, files[1:]))


# Runs.


class Rows(torch.utils.data.Dataset):
    """Random tokens, of which the first `shared` are the same in every row."""

    def __init__(self, shared=0):
        self.rows = torch.randint(256, (400, 32), generator=torch.Generator().manual_seed(0))
        self.rows[:, :shared] = self.rows[0, :shared]

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


def llama(vocabulary=256, **options):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=256,
        **options,
    )
    return LlamaForCausalLM(config)


def arguments(folder, **options):
    """Arguments of every run."""
    common = {"max_steps": STEPS, "per_device_train_batch_size": 4, "use_cpu": True, "save_strategy": "no"}
    common |= {"report_to": "none", "disable_tqdm": True, "logging_steps": 1000, "learning_rate": 3e-3}
    return {"output_dir": folder, **common, **options}


def trained(trainer) -> Steps:
    """Train, and return the calls."""
    steps = Steps()
    trainer.add_callback(steps)
    trainer.remove_callback(PrinterCallback)
    with steps:
        trainer.train()
    return steps


def run(shared=0, lora=False, **options):
    """Train a Llama. Returns the trainer and the calls."""
    model = llama(use_cache=False)
    if lora:
        model = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"))
    with tempfile.TemporaryDirectory() as folder:
        trainer = HybridTrainer(model, HybridConfig(**arguments(folder, **options)), train_dataset=Rows(shared))
        return trainer, trained(trainer)


def tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte of ASCII."""
    own = Tokenizer(models.WordLevel({chr(byte): byte for byte in range(128)}, unk_token="\0"))
    own.pre_tokenizer, own.decoder = pre_tokenizers.Split(Regex("."), "isolated"), decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=own,
        pad_token="\0",
        eos_token="\1",
        chat_template="{% for m in messages %}{{ m['role'] + ':' + m['content'] + eos_token }}{% endfor %}",
    )


def run_grpo() -> Steps:
    """Train by a reward that half of the prompts give to every completion."""

    def reward(prompts, completions, **columns):
        return [float(prompt.startswith("easy") or len(text) % 3) for prompt, text in zip(prompts, completions)]

    prompts = Dataset.from_dict({"prompt": [f"{('easy', 'hard')[i % 2]} {i:02}" for i in range(64)]})
    with tempfile.TemporaryDirectory() as folder:
        options = {"gradient_accumulation_steps": 2, "num_generations": 4, "max_completion_length": 6, "bf16": False}
        args = HybridGRPOConfig(**arguments(folder, **options))
        model = llama(128, pad_token_id=0, eos_token_id=1, bos_token_id=None)
        trainer = HybridGRPOTrainer(model, reward, args, train_dataset=prompts, processing_class=tokenizer())
        return trained(trainer)


def run_reward() -> Steps:
    """Train a reward model: micro-batches of pairs, whose loss reads states."""

    class HybridRewardTrainer(HybridTrainerMixin, RewardTrainer):
        blocks_of_rows = 2

    pairs = [{"prompt": f"Say {i} please: ", "chosen": "one " * (i % 5 + 1), "rejected": "two"} for i in range(200)]
    config = llama(128, pad_token_id=0, eos_token_id=1, bos_token_id=None).config
    config.num_labels = 1
    with tempfile.TemporaryDirectory() as folder:
        args = RewardConfig(**arguments(folder, bf16=False, gradient_accumulation_steps=2))
        model, rows = LlamaForSequenceClassification(config), Dataset.from_list(pairs)
        return trained(HybridRewardTrainer(model, args, train_dataset=rows, processing_class=tokenizer()))


ROWS = {
    "train": {"text": "a text of some words"},
    "sft": {"messages": [{"role": "user", "content": "Say one"}, {"role": "assistant", "content": "one"}]},
    "dpo": {"prompt": "Say one: ", "chosen": "one", "rejected": "two"},
    "grpo": {"prompt": "What is 1 + 1?", "answer": "2"},
}
OPTIONS = {
    "train": ["--sequence_length", "16"],
    "grpo": ["--reward", "numeric_answer", "--num_generations", "2", "--max_completion_length", "4"],
}


class Arrived(BaseException):
    """A command has come to the constructor of its trainer."""


class CallsToTrainer(Calls):
    """Calls until the constructor of a trainer, where it ends the program, but those that the options' checks make."""

    checking = None

    def profile(self, frame, event, arg):
        name, owner = frame.f_code.co_name, frame.f_locals.get("self")
        if event == "call" and name == "__init__" and isinstance(owner, Trainer):
            sys.setprofile(None)
            raise Arrived
        if self.checking is None:
            super().profile(frame, event, arg)
            if event == "call" and name == "__post_init__" and isinstance(owner, TrainingArguments):
                self.checking = frame
        elif event == "return" and frame is self.checking:
            self.checking = None
            super().profile(frame, event, arg)


def run_command(name: str, folder: Path) -> list:
    """Calls of `hf-hybrid NAME` until the constructor of the trainer."""
    data = folder / f"{name}.jsonl"
    data.write_text("\n".join(json.dumps(ROWS[name]) for _ in range(40)))
    words = [name, "--model", str(folder), "--dataset", str(data), "--output_dir", str(folder / name)]
    words += ["--max_steps", "1", "--use_cpu", "true", "--report_to", "none", *OPTIONS.get(name, [])]
    try:
        with redirect_stdout(io.StringIO()), CallsToTrainer() as calls:
            status = command(words)
    except Arrived:
        return calls.events
    raise RuntimeError(f"`hf-hybrid {name}` ended with {status} before it had a trainer")


def of_commands() -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        llama(128, pad_token_id=0, eos_token_id=1, bos_token_id=None).save_pretrained(folder)
        tokenizer().save_pretrained(folder)
        ways = [of_first_visits(run_command(name, Path(folder))) for name in ROWS]
    return {figure: max(way[figure] for way in ways) for figure in ways[0]}


def measure() -> dict[str, dict[str, float]]:
    """The numbers of every journey."""
    leaping = {"probe_budget": 0.2, "leap_budget": 100.0}
    trainer, with_leaps = run(**leaping)
    probed = {leap["step"] for leap in trainer.hybrid_summary()["leaps"] if leap["loss_before"] is not None}
    save = {"save_strategy": "steps", "save_steps": 5}
    saving, saving_leaps = run(enable_predict=False, **save)[1], run(**leaping, **save)
    return {
        "a real step": of_steps(real_steps(trainer, with_leaps)),
        "a step with a probed leap": of_steps([with_leaps.by_step[s] for s in probed if s in with_leaps.by_step]),
        "a step of LoRA": of_steps(run(lora=True)[1].later()),
        "a step with `enable_predict=False`": of_steps(run(enable_predict=False)[1].later()),
        "a step of shared rows": of_steps(run(shared=20, leap_gain=0)[1].later()),
        "a step of a reward model": of_steps(run_reward().later()),
        "a step of GRPO": of_steps(run_grpo().later()),
        "a streamed step": of_steps(run(memory="stream", leap_gain=0)[1].later()),
        "a streamed window of four micro-batches": of_steps(
            run(memory="stream", leap_gain=0, gradient_accumulation_steps=4)[1].later()
        ),
        "a plain save": of_steps([events for step, events in saving.by_step.items() if step in saving.saves]),
        "a save with leaps": of_steps(real_steps(*saving_leaps, among=saving_leaps[1].saves)),
        "options to parts": of_first_visits(below(with_leaps.of_build_run, "build_run")),
        "a command to its trainer": of_commands(),
        "circles of files": {"circles": len(circles())},
    }


def real_steps(trainer, steps: Steps, among: set[int] | None = None) -> list:
    """Calls of later steps that trained and did not leap."""
    leaps = {leap["step"] for leap in trainer.hybrid_summary()["leaps"]}
    later = [s for s in steps.by_step if s > 10 and s not in leaps and (among is None or s in among)]
    return [steps.by_step[s] for s in later if any(name == "training_step" for _, _, name, _ in steps.by_step[s])]


def below(events, name: str) -> list:
    """The call of a function and those that it makes."""
    start = next(index for index, event in enumerate(events) if event[2] == name)
    end = next((i for i in range(start + 1, len(events)) if events[i][1] <= events[start][1]), len(events))
    return events[start:end]


def main() -> int:
    measured, over = measure(), []
    print("In brackets the limit, behind the arrow the goal.\n")
    print("| | " + " | ".join(FIGURES) + " |\n" + "|---" * (len(FIGURES) + 1) + "|")
    for walk, values in measured.items():
        limits, goals, cells = LIMITS.get(walk, {}), GOALS.get(walk, {}), []
        for name in FIGURES:
            limit = f" ({limits[name]})" if name in limits else ""
            goal = f" -> {goals[name]}" if name in goals else ""
            cells.append(f"{values[name]:g}{limit}{goal}" if name in values else "")
            if name in limits and values[name] > limits[name]:
                over.append(f"{walk}: {name} {values[name]:g}, at most {limits[name]}")
        print(f"| {walk} | " + " | ".join(cells) + " |")
    print("\n".join(["", *(" - ".join(group) for group in circles()), *over]))
    return 1 if over else 0


if __name__ == "__main__":
    sys.exit(main())
