"""
What each low-bit format costs: held-out loss and bytes of a model and of its exports.

    python -m benchmarks.export.formats --model quickstart
    python -m benchmarks.export.formats --model smollm2     # after `python -m benchmarks.speedup.pretrained`
    python -m benchmarks.export.formats --model reordered

`quickstart` is the model of examples/07_from_scratch.py after its 300 steps, measured on the sources that it held out.
`smollm2` is SmolLM2-135M-Instruct, measured on Python's language reference. Its weights come from a GGUF file in the
format q4_1 (see benchmarks/speedup/pretrained.py), so that `gguf-q4_1` finds them on its own grid and changes nothing:
that line says nothing about other models. Some steps of fine-tuning would hardly change that: two values of the grid
are about 0.05 apart, a thousand times what AdamW moves a weight by in a step at 5e-5. So `reordered` is the same model
with its channels in another order. It computes the same function with the same weights, but a block of 32 neighbours
then has weights from 32 blocks of the file, whose grids differ, as in a model that was never quantised.

Each format is exported and measured beside the original by `hf_hybrid.export`. Then a fresh process loads the export
and generates tokens, and the model that was quantised in memory generates its own.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.results import Results, command_line, provenance
from benchmarks.speedup.tasks import quickstart
from benchmarks.texts import language_reference

HERE = Path(__file__).resolve().parent
FORMATS = ("gguf-q4_m", "gguf-q5_1", "nf4", "gguf-q4_0", "gguf-q4_1", "int8", "gguf-q8_0")
STEPS, THREADS = 300, 1
SEQUENCES = {"quickstart": (64, 128), "smollm2": (8, 256), "reordered": (8, 256)}
"""Sequences to measure on, and their length."""
TOKENS = 12
FRESH = """
import json, sys, torch
from transformers import AutoModelForCausalLM
folder, file, prompt, tokens = sys.argv[1], json.loads(sys.argv[2]), json.loads(sys.argv[3]), int(sys.argv[4])
model = AutoModelForCausalLM.from_pretrained(folder, **file)
print(json.dumps(model.generate(torch.tensor(prompt), max_new_tokens=tokens, do_sample=False).tolist()))
"""


def quickstart_run(folder: Path, ternary: bool = False) -> tuple[list[dict], dict[str, int]]:
    """Train the quickstart's model into `folder`. Returns held-out batches, and the steps by phase."""
    from datasets import Dataset
    from transformers import set_seed

    from hf_hybrid import HybridConfig, HybridTrainer
    from hf_hybrid.export.bitnet import to_bitnet

    example = quickstart()
    texts = Dataset.from_dict({"text": example.python_source()})
    tokenizer = example.train_tokenizer(texts["text"])
    count, length = SEQUENCES["quickstart"]
    split = example.blocks(texts, tokenizer, length).train_test_split(0.05, seed=42)
    args = HybridConfig(str(folder), max_steps=STEPS, save_strategy="no", report_to="none", use_cpu=True)
    set_seed(args.seed)
    model = example.small_llama(tokenizer)
    model = to_bitnet(model) if ternary else model
    trainer = HybridTrainer(model, args, train_dataset=split["train"], processing_class=tokenizer)
    trainer.train()
    trainer.save_model()
    return batches(split["test"].select(range(count))["input_ids"]), trainer.hybrid_summary()["steps_by_phase"]


def reorder(folder: Path, to: Path) -> Path:
    """Write a Llama whose hidden channels, inner channels, and channels of each head's values are in another order."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, random = AutoModelForCausalLM.from_pretrained(folder), torch.Generator().manual_seed(0)
    heads, groups = model.config.num_attention_heads, model.config.num_key_value_heads
    wide = model.config.hidden_size // heads

    def order(count: int) -> torch.Tensor:
        return torch.randperm(count, generator=random)

    def take(weight: torch.Tensor, rows: torch.Tensor | None = None, columns: torch.Tensor | None = None) -> None:
        found = weight.data if rows is None else weight.data[rows]
        weight.data = (found if columns is None else found[:, columns]).contiguous()

    hidden = order(model.config.hidden_size)
    take(model.model.embed_tokens.weight, columns=hidden)
    take(model.model.norm.weight, rows=hidden)
    model.tie_weights()
    for layer in model.model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        inner, within = order(model.config.intermediate_size), [order(wide) for _ in range(groups)]
        values = torch.cat([wide * group + channels for group, channels in enumerate(within)])
        mixed = torch.cat([wide * head + within[head * groups // heads] for head in range(heads)])
        for norm in (layer.input_layernorm, layer.post_attention_layernorm):
            take(norm.weight, rows=hidden)
        for linear in (attention.q_proj, attention.k_proj):
            take(linear.weight, columns=hidden)
        take(attention.v_proj.weight, rows=values, columns=hidden)
        take(attention.o_proj.weight, rows=hidden, columns=mixed)
        for linear in (mlp.gate_proj, mlp.up_proj):
            take(linear.weight, rows=inner, columns=hidden)
        take(mlp.down_proj.weight, rows=hidden, columns=inner)
    model.save_pretrained(to)
    AutoTokenizer.from_pretrained(folder).save_pretrained(to)
    return to


def reference_batches(folder: Path) -> list[dict]:
    """Batches of Python's language reference, spread over the whole of it."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer("\n\n".join(language_reference()))["input_ids"]
    count, length = SEQUENCES["smollm2"]  # and of `reordered`
    starts = range(0, len(ids) - length, len(ids) // count)
    return batches([ids[start : start + length] for start in starts][:count])


def batches(rows: list[list[int]]) -> list[dict]:
    """Batches of four, with labels."""
    import torch

    parts = torch.tensor(rows).split(4)
    return [{"input_ids": part, "labels": part} for part in parts]


def tokens_in_memory(source: Path, exported: Path, name: str, prompt: list) -> list:
    """Return what the model generates that is quantised in memory; of a GGUF file, what this process reads."""
    import torch

    from hf_hybrid.export import formats

    quantization = formats.FORMATS[name].quantization
    more = {} if quantization is None else {"quantization_config": quantization(torch.float32)}
    model = formats.load(exported if quantization is None else source, torch.float32, **more)
    return model.generate(torch.tensor(prompt), max_new_tokens=TOKENS, do_sample=False).tolist()


def tokens_of_a_fresh_process(exported: Path, name: str, prompt: list) -> list:
    """Return what another process generates from the files."""
    file = {"gguf_file": "model.gguf"} if name.startswith("gguf") else {}
    command = [sys.executable, "-c", FRESH, str(exported), json.dumps(file), json.dumps(prompt), str(TOKENS)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = command_line(__doc__, HERE)
    parser.add_argument("--model", choices=sorted(SEQUENCES), required=True, help="What is exported.")
    args = parser.parse_args()

    import torch
    import transformers

    from benchmarks.speedup.pretrained import FOLDER
    from hf_hybrid.export import exporter

    torch.set_num_threads(THREADS)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    results = Results(args.results, "formats", ("model", "format"))
    missing = [name for name in FORMATS if results.get(model=args.model, format=name) is None]
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "run")
        if args.model == "quickstart":
            held_out = quickstart_run(source)[0]
        else:
            source = FOLDER if args.model == "smollm2" else reorder(FOLDER, source)
            held_out = reference_batches(source)
        prompt = held_out[0]["input_ids"][:1, :16].tolist()
        for name in missing:
            exported = Path(folder, name)
            found = exporter.export(source, exported, name, batches=held_out)
            tokens = tokens_in_memory(source, exported, name, prompt)
            same = tokens == tokens_of_a_fresh_process(exported, name, prompt)
            keys = ("original", "exported", "loss_change", "sequences", "tokens", "dtype")
            row = {"model": args.model, "format": name, **{key: found[key] for key in keys}, "same_tokens": same}
            results.add({**row, **provenance(THREADS)})
            print(exporter.as_text(found), f"the same tokens in a fresh process: {same}\n", flush=True)


if __name__ == "__main__":
    main()
