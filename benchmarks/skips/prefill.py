"""
CPU seconds of the prompts of a generation: all copies in one padded pass (as `generate` computes them), each prompt
once in a padded pass, and all prompts as a tree (`hf_hybrid/trl/completions.py`). Two minutes; one thread.

    python -m benchmarks.skips.prefill

The model has the shape of SmolLM2-135M and random weights, fp32; a prompt has four completions. The ways are measured
in turn. Beside the seconds stand the tokens that are computed, and how far the logits of the tree are from those of
the padded pass.
"""

from __future__ import annotations

import random
import statistics
import time
from pathlib import Path

import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, StoppingCriteriaList

from benchmarks.results import Results, command_line, provenance
from hf_hybrid.rows.facts import ModelFacts
from hf_hybrid.trl.completions import CACHE, Generation, Prompts, RowwiseProcessors, flat, padded

COPIES = 4


def cases() -> dict[str, list[list[int]]]:
    """Return the prompts of each case."""
    rng = random.Random(0)

    def tokens(length: int) -> list[int]:
        return [rng.randrange(100, 4000) for _ in range(length)]

    system, examples = tokens(120), [tokens(40) for _ in range(2)]
    return {
        "6 questions after a system prompt": [system + tokens(rng.randrange(10, 40)) for _ in range(6)],
        "6 questions, 2 sets of examples": [system + examples[n % 2] + tokens(rng.randrange(10, 30)) for n in range(6)],
        "6 lengths, nothing shared": [tokens(length) for length in (20, 45, 70, 100, 130, 150)],
    }


def measure(model, facts: ModelFacts, questions: list[list[int]], rounds: int) -> dict:
    """Return the seconds of each way."""
    rows = [question for question in questions for _ in range(COPIES)]
    width = max(map(len, rows))
    ids = torch.tensor([[0] * (width - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
    inputs = {"attention_mask": mask, "position_ids": (mask.cumsum(1) - 1).clamp(min=0), "use_cache": True}
    once, every = Prompts.of(rows), Prompts([*range(len(rows))], [*range(len(rows))], rows, [*map(len, rows)])
    inputs["logits_to_keep"] = 1

    def generation(prompts: Prompts) -> Generation:
        prepared = RowwiseProcessors(), StoppingCriteriaList(), model.generation_config
        return Generation(model, ids, *prepared, {**inputs, CACHE: DynamicCache(config=model.config)}, prompts)

    ways = {
        "copies": lambda: padded(generation(every)),
        "once": lambda: padded(generation(once)),
        "tree": lambda: flat(generation(once), once.tree(), facts),
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    found = {}
    for number in range(rounds):
        for name in sorted(ways, reverse=bool(number % 2)):
            start = time.process_time()
            found[name] = ways[name]()
            for layer in found[name].cache.layers:  # keys and values of all rows
                found[name].take(layer)
            seconds[name].append(time.process_time() - start)
    spent = {name: statistics.median(values) for name, values in seconds.items()}
    return {
        "seconds": seconds,
        "tokens": {"copies": ids.numel(), "once": len(questions) * width, "tree": found["tree"].computed},
        "of_once": spent["tree"] / spent["once"],
        "of_copies": spent["tree"] / spent["copies"],
        "largest_difference": (found["tree"].logits - found["once"].logits).abs().max().item(),
    }


def main() -> None:
    parser = command_line(__doc__, Path(__file__).parent)
    parser.add_argument("--rounds", type=int, default=3, help="Passes of each way.")
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
        num_key_value_heads=3, tie_word_embeddings=True,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    results = Results(args.results, "prefill", ("case",))
    with torch.no_grad():
        facts = ModelFacts.of(model, compiles=False)
        for case, questions in cases().items():
            row = results.add({**provenance(1), "case": case, **measure(model, facts, questions, args.rounds)})
            print({name: value for name, value in row.items() if name in ("case", "tokens", "of_once", "of_copies")})


if __name__ == "__main__":
    main()
