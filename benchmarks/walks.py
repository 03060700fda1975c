#!/usr/bin/env python3
"""
How many files of hf_hybrid a reader enters to follow one step. The exit status is 1 if a walk is over its limit.

    python benchmarks/walks.py

A tiny Llama on the CPU. Calls into the files of the package are counted with `sys.setprofile`, from the end of one step
to the end of the next. No name inside the package is used, only public results.
"""

import os
import statistics
import sys
import tempfile

os.environ.setdefault("HF_HUB_OFFLINE", "1")
import torch
from transformers import LlamaConfig, LlamaForCausalLM, TrainerCallback

import hf_hybrid
from hf_hybrid import HybridConfig, HybridTrainer

ROOT = os.path.dirname(hf_hybrid.__file__) + os.sep
FIGURES = ("files entered", "changes of file", "depth")
LIMITS = {
    "a real step": {"files entered": 11, "changes of file": 37},
    "a step with a probed leap": {"files entered": 17, "depth": 14},
    "a step of LoRA": {"files entered": 9},
    "a step with `enable_predict=False`": {"files entered": 6},
}
torch.set_num_threads(1)


class Rows(torch.utils.data.Dataset):
    def __init__(self, count):
        self.rows = torch.randint(256, (count, 32), generator=torch.Generator().manual_seed(0))

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


class Tracer(TrainerCallback):
    """Calls into the package, cut into steps."""

    def __init__(self):
        self.steps, self.events, self.stack = {}, [], []

    def profile(self, frame, event, arg):
        name = frame.f_code.co_filename
        if not name.startswith(ROOT):
            return
        if event == "call":
            self.stack.append(frame)
            self.events.append((name[len(ROOT) :], len(self.stack), frame.f_code.co_name))
        elif event == "return" and self.stack and self.stack[-1] is frame:
            self.stack.pop()

    def on_train_begin(self, args, state, control, **kwargs):
        sys.setprofile(self.profile)

    def on_step_end(self, args, state, control, **kwargs):
        self.steps[state.global_step - 1], self.events = self.events, []

    def on_train_end(self, args, state, control, **kwargs):
        sys.setprofile(None)


def run(lora=False, **options):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=64,
        use_cache=False,
    )
    model = LlamaForCausalLM(config)
    if lora:
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"))
    tracer = Tracer()
    with tempfile.TemporaryDirectory() as out:
        args = HybridConfig(
            out,
            max_steps=60,
            per_device_train_batch_size=4,
            learning_rate=3e-3,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            use_cpu=True,
            logging_steps=1000,
            **options,
        )
        trainer = HybridTrainer(model, args, train_dataset=Rows(400), callbacks=[tracer])
        trainer.train()
    return trainer, tracer


def figures(steps) -> dict[str, float]:
    """Medians over steps, each a list of calls: file, depth and name."""

    def of_one(events):
        files = [name for name, _, _ in events]
        changes = sum(a != b for a, b in zip(files, files[1:]))
        return len(set(files)), changes, max((depth for _, depth, _ in events), default=0)

    columns = list(zip(*[of_one(events) for events in steps]))
    return dict(zip(FIGURES, [statistics.median(column) for column in columns]))


def measure() -> dict[str, dict[str, float]]:
    """The walks of LIMITS. The first steps of a run are left out."""
    trainer, tracer = run(probe_budget=0.2, leap_budget=100.0)
    leaps = trainer.hybrid_summary()["leaps"]
    probed = {leap["step"] for leap in leaps if leap["loss_before"] is not None}
    with_leap = {leap["step"] for leap in leaps}
    later = {step: events for step, events in tracer.steps.items() if step > 10}
    real = [s for s in later if s not in with_leap and any(name == "training_step" for _, _, name in later[s])]
    return {
        "a real step": figures([later[step] for step in real]),
        "a step with a probed leap": figures([tracer.steps[step] for step in probed if step in tracer.steps]),
        "a step of LoRA": figures([e for s, e in run(lora=True)[1].steps.items() if s > 10]),
        "a step with `enable_predict=False`": figures(
            [e for s, e in run(enable_predict=False)[1].steps.items() if s > 10]
        ),
    }


def main() -> int:
    found, over = measure(), []
    print("| | " + " | ".join(FIGURES) + " |\n|---|---|---|---|")
    for walk, values in found.items():
        limits = LIMITS[walk]
        print(f"| {walk} | " + " | ".join(f"{values[name]:g}" for name in FIGURES) + " |")
        over += [
            f"{walk}: {name} {values[name]:g}, at most {limits[name]}" for name in limits if values[name] > limits[name]
        ]
    print("\n".join(over))
    return 1 if over else 0


if __name__ == "__main__":
    sys.exit(main())
