"""
Agents' rows beside TRL: the loss under dropout that a shared prefix draws once, and the seconds of packed rows.

    python -m benchmarks.speedup.pretrained      # once: fetches SmolLM2-135M
    python -m benchmarks.skips.agents            # all three parts; twenty minutes
    python -m benchmarks.skips.agents --smollm2  # of SmolLM2 itself; hours

An agent documents the functions of Python's standard library in three actions: it lists the functions of a module,
reads the source of one, and writes its documentation. A row is an action behind a prompt with tools and all that came
before, and the action alone is learned. Trajectories of every eighth module are held out.

    losses    held-out loss after 60 steps with dropout of 0.05, three seeds: of the adapters, the order and the dropout
    seconds   the same rows, CPU seconds of a step
    packed    TRL's packing, 2 rows of 1,024 tokens a step, no dropout; TRL with either attention

LoRA of rank 16 on all linear layers, AdamW, bf16 autocast, no layer is recomputed, one thread. A step has 4 rows in 2
micro-batches. `SFTTrainer` and `HybridSFTTrainer` train in turn on the same rows in the same order. Seconds are of a
fifth of SmolLM2's layers and words, with random weights. Losses are of a stand-in for it, as no machine was free for
hours: a Llama of 3.4M weights with its own tokenizer, trained here first on Python's standard library and reference.
"""

from __future__ import annotations

import copy
import itertools
import json
import random
import tempfile
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from rig.sft_rows import pad, row
from tokenizers import ByteLevelBPETokenizer
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, get_scheduler, set_seed

from benchmarks.results import Results, command_line, provenance
from benchmarks.skips.rows import PACKING, Row, Seconds, build, train
from benchmarks.speedup.pretrained import FOLDER, documented_functions
from benchmarks.texts import language_reference, standard_library

SEEDS, STEPS, TIMED, RATE = (0, 1, 2), 60, 3, 1e-3
TRAINED, HELD_OUT = 80, 24
"""Trajectories."""
WORDS, PRETRAINED = 4096, 300
"""Of the stand-in: its vocabulary, and the steps of 8 blocks of 512 tokens that it was trained for."""
DROPPING = {"trl": ("trl", "sdpa", 0.05), "hybrid": ("hybrid_sft", "sdpa", 0.05)}
ARMS: dict[str, dict[str, tuple[str, str, float]]] = {
    "losses": DROPPING,
    "seconds": DROPPING,
    "packed": {
        "trl": ("trl_packing", "sdpa", 0.0), "trl_eager": ("trl_packing", "eager", 0.0),
        "hybrid": ("hybrid_packing", "sdpa", 0.0),
    },
}  # fmt: skip
"""Of each part: the arm of rows.py, the attention, and the dropout of adapters."""
TOOLS = {
    "list_functions": "Lists the names of all functions and methods that a module of the standard library defines, in "
    "the order in which they stand there. Argument `module`: path of the module, from the folder of the library.",
    "read_source": "Returns the source of a function, without its documentation. Argument `name`: its name, as "
    "`list_functions` gives it. The module is the one that was listed last.",
    "search": "Returns the lines of a module that match a regular expression, at most 20 of them, with their numbers. "
    "Arguments `module`: path of the module; `pattern`: the expression, in the syntax of `re`.",
    "run": "Runs an expression in an interpreter that has imported the module, and returns what it prints, at most "
    "2,000 characters. Arguments `module`: path of the module; `expression`: what is run. It has no network.",
    "document": "Writes the documentation of a function, and ends the task. Argument `text`: the first paragraph of "
    "the documentation, in one line, which says what the function does and what it returns.",
}
SYSTEM = (
    "You are an agent that documents the standard library of Python. Answer with one call of a tool and nothing else, "
    'as JSON: {"tool": its name, "arguments": its arguments by name}. Look at the source before you write. '
    f"The tools:\n{json.dumps(TOOLS, indent=1)}"
)


def trajectories(tokenizer: Any, words: int) -> tuple[list[list[Row]], list[list[Row]]]:
    """Return the rows of each trajectory, in so many words, to train on and held out."""
    modules: dict[str, list[tuple[str, str]]] = {}
    for module, source, text in documented_functions():
        modules.setdefault(module, []).append((source, text))
    found: tuple[list[list[Row]], list[list[Row]]] = ([], [])

    def turn(role: str, text: str) -> list[int]:
        return [i % words for i in tokenizer(f"<|im_start|>{role}\n{text}<|im_end|>\n")["input_ids"]]

    for place, (module, functions) in enumerate(modules.items()):
        names = [source.partition("def ")[2].partition("(")[0] for source, _ in functions]
        for name, (source, text) in zip(names, functions):
            if len(source) > 240 or len(text) > 110:
                continue
            past, rows = turn("system", SYSTEM) + turn("user", f"Document `{name}` of `{module}`."), []
            for tool, arguments, answer in (
                ("list_functions", {"module": module}, "\n".join(names[:6])),
                ("read_source", {"name": name}, source),
                ("document", {"text": text}, ""),
            ):
                action = turn("assistant", json.dumps({"tool": tool, "arguments": arguments}))
                rows.append(row((past, False), (action, True)))
                past = past + action + turn("tool", answer)
            found[place % 8 == 7].append(rows)
    for part in found:
        random.Random(0).shuffle(part)
    return found[0][:TRAINED], found[1][:HELD_OUT]


def stand_in() -> tuple[Any, Any]:
    """Return the tokenizer and the model that stand in for SmolLM2, trained here."""
    text = [source for _, source in standard_library()] + language_reference()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    made = ByteLevelBPETokenizer(add_prefix_space=False)
    made.train_from_iterator(text, vocab_size=WORDS, special_tokens=special, show_progress=False)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made._tokenizer, eos_token=special[2], pad_token=special[2])
    ids = torch.tensor([i for part in tokenizer(text)["input_ids"] for i in (*part, 0)])
    blocks = ids[: len(ids) // 512 * 512].view(-1, 512)
    set_seed(0)
    config = LlamaConfig(
        vocab_size=WORDS, hidden_size=192, intermediate_size=512, num_hidden_layers=6, num_attention_heads=3,
        num_key_value_heads=1, tie_word_embeddings=True, max_position_embeddings=2048, pad_token_id=2, eos_token_id=2,
    )  # fmt: skip
    model, order = LlamaForCausalLM(config), torch.randperm(len(blocks)).split(8)
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3, weight_decay=0.1)
    rates = get_scheduler("cosine", optimizer, 20, PRETRAINED)
    for chosen in (blocks[numbers] for numbers in order[:PRETRAINED]):
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(input_ids=chosen, labels=chosen).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        rates.step()
        optimizer.zero_grad()
    print(f"stand-in: loss {loss.item():.2f} after {PRETRAINED} steps", flush=True)
    return tokenizer, model


@torch.no_grad()
def loss_of(model: Any, rows: list[Row]) -> float:
    """Return the mean loss of the tokens of held-out actions."""
    model.eval()
    total, count = 0.0, 0
    for first in range(0, len(rows), 5):
        batch = pad(rows[first : first + 5])
        labels = int((batch["labels"][:, 1:] != -100).sum())
        with torch.autocast("cpu", torch.bfloat16):
            total, count = total + model(**batch).loss.item() * labels, count + labels
    return total / count


def run(part: str, arm: str, number: int, tokenizer: Any, base: Any) -> dict[str, Any]:
    """Train once, and return the seconds of steps, the `first` one of which compares, and losses."""
    learned, held_out = (list(itertools.chain(*p)) for p in trajectories(tokenizer, base.config.vocab_size))
    how, attention, dropout = ARMS[part][arm]
    set_seed(number if part == "losses" else 0)
    adapters = {"r": 16, "lora_alpha": 32, "target_modules": "all-linear", "lora_dropout": dropout}
    model, clock = get_peft_model(copy.deepcopy(base), LoraConfig(**adapters, task_type="CAUSAL_LM")), Seconds()
    model.set_attn_implementation(attention)
    options: dict[str, Any] = {"steps": 1 + TIMED, "learning_rate": RATE, "per_device_train_batch_size": 2}
    found: dict[str, Any] = {}
    if part == "losses":
        options |= {"steps": STEPS, "seed": number, "warmup_steps": 4, "lr_scheduler_type": "cosine"}
        found["before"] = loss_of(model, held_out)
    elif part == "packed":
        options |= PACKING
    with tempfile.TemporaryDirectory() as folder:
        trainer = train(how, model, learned, folder, clock, **options)
    if part == "losses":
        found["held_out"] = loss_of(model, held_out)
    if hasattr(trainer, "hybrid_summary"):
        names = ("tokens", "tokens_padding", "tokens_shared", "dropout_drawn_once", "plain_rows_because")
        found |= {name: trainer.hybrid_summary()[name] for name in names}
    return {**found, "first": clock.found[0], "seconds": clock.found[1:], "cpu_seconds": sum(clock.found)}


def main() -> None:
    parser = command_line(__doc__, Path(__file__).parent)
    parser.add_argument("parts", nargs="*", choices=[*ARMS, []], help="What is measured; all three by default.")
    parser.add_argument("--smollm2", action="store_true", help="Take SmolLM2 itself.")
    args = parser.parse_args()
    torch.set_num_threads(1)
    results = Results(args.results, "agents", ("part", "model", "arm", "round"))
    for part in args.parts or ARMS:
        name = "smollm2" if args.smollm2 else "stand-in" if part == "losses" else "fifth"
        if name == "stand-in":
            tokenizer, base = stand_in()
        else:
            tokenizer, base = AutoTokenizer.from_pretrained(FOLDER), build(name, lora=False)
        for number in SEEDS:  # for seconds, rounds
            for arm in sorted(ARMS[part], reverse=bool(number % 2)):
                row = {"part": part, "model": name, "arm": arm, "round": number}
                row |= run(part, arm, number, tokenizer, base)
                results.add({**provenance(1), **row})
                print(row, flush=True)


if __name__ == "__main__":
    main()
