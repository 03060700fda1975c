#!/usr/bin/env python3
"""
How many files of hf_hybrid one step enters: a real step with everything at its default, and a step with a probed leap.

    python benchmarks/walks.py [--json]

A tiny Llama on the CPU. Calls into the files of the package are counted with `sys.setprofile`, from the end of one step
to the end of the next. No name inside the package is used, only public results.
"""

import json
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


def measure():
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=256,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=4,
            num_attention_heads=2,
            num_key_value_heads=2,
            max_position_embeddings=64,
            use_cache=False,
        )
    )
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
            probe_budget=0.2,
            leap_budget=100.0,
        )
        trainer = HybridTrainer(model, args, train_dataset=Rows(400), callbacks=[tracer])
        trainer.train()
    leaps = trainer.hybrid_summary()["leaps"]
    probed = {leap["step"] for leap in leaps if leap["loss_before"] is not None}
    with_leap = {leap["step"] for leap in leaps}
    real = [
        step
        for step in tracer.steps
        if step > 10 and step not in with_leap and any("training_step" == e[2] for e in tracer.steps[step])
    ]
    return {
        "real step": _figures([tracer.steps[s] for s in real]),
        "step with a probed leap": _figures([tracer.steps[s] for s in probed if s in tracer.steps]),
    }


def _figures(steps):
    def figures(events):
        files = [name for name, _, _ in events]
        changes = sum(a != b for a, b in zip(files, files[1:]))
        return len(set(files)), changes, len(events), max((depth for _, depth, _ in events), default=0)

    columns = list(zip(*[figures(events) for events in steps]))
    return dict(zip(("files", "file_changes", "calls", "depth"), [statistics.median(c) for c in columns])) | {
        "n": len(steps)
    }


if __name__ == "__main__":
    found = measure()
    print(
        json.dumps(found) if "--json" in sys.argv else "\n".join(f"{name}: {values}" for name, values in found.items())
    )
