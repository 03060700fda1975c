"""
Do completions come from the model that is trained? Distances of log-probabilities, and kernels of adapters.

    python -m benchmarks.speedup.pretrained         # fetches SmolLM2, once
    python -m benchmarks.skips.sampler              # three minutes

*A run*: what two steps of GRPO log as `sampling_logp_difference`, SmolLM2-135M with LoRA: in fp32, in fp32 with bf16
autocast, and in bf16. A row has the larger of the two means, and the largest distance.

*Rounding*: LoRA of rank 16 on all linear layers of SmolLM2-135M is trained in fp32 on Python's sources. The same
adapters (fp32) then compute the tokens of other sources over the base in bf16. A row has the mean distance of
log-probabilities from those in fp32, and their largest. `merged` adds the adapters to the base and rounds the sum.

*Kernels*: operators that compute or copy in a captured pass of one token, of a Llama with two layers.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, set_seed

from benchmarks.results import Results, command_line, provenance
from benchmarks.skips.adapters import Kernels, llama
from benchmarks.speedup.pretrained import FOLDER
from benchmarks.texts import standard_library
from hf_hybrid import HybridGRPOConfig, HybridGRPOTrainer
from hf_hybrid.trl import captured
from hf_hybrid.trl.decoding import Decoding, adapters_of
from hf_hybrid.trl.rl import SAMPLER

LORA = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
ARMS = ("peft", "ours", "merged")
RATES = (5e-6, 2e-4)
LENGTH, STEPS, HELD_OUT = 128, 20, 12
"""Tokens of a sequence, sequences that are trained on, one a step, and those that are compared."""


PROMPTS = (
    "The history of the city begins with",
    "In mathematics, a group is",
    "def sort(values):",
    "She opened the door",
)
RUNS = {"float32": (torch.float32, False), "autocast": (torch.float32, True), "bfloat16": (torch.bfloat16, True)}
"""Precision of the weights, and whether training is under bf16 autocast."""


def of_a_run(dtype: torch.dtype, bf16: bool) -> dict[str, float]:
    """Return the distances that two steps log, whose rewards are the lengths of completions."""
    set_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        args = HybridGRPOConfig(
            folder, max_steps=2, num_generations=4, per_device_train_batch_size=16, max_completion_length=32,
            bf16=bf16, learning_rate=2e-4, use_cpu=True, report_to="none", logging_steps=1, save_strategy="no",
            disable_tqdm=True, gradient_checkpointing=False,
        )  # fmt: skip
        trainer = HybridGRPOTrainer(
            AutoModelForCausalLM.from_pretrained(FOLDER, dtype=dtype),
            lambda completions, **_: [float(len(text)) for text in completions],
            args,
            train_dataset=Dataset.from_dict({"prompt": PROMPTS * 2}),
            processing_class=AutoTokenizer.from_pretrained(FOLDER),
            peft_config=LORA,
        )
        trainer.train()
    found = [line for line in trainer.state.log_history if SAMPLER + "mean" in line]
    return {
        "mean_distance": max(line[SAMPLER + "mean"] for line in found),
        "largest": max(line[SAMPLER + "max"] for line in found),
    }


def sequences() -> Tensor:
    """Tokens of Python's sources, `[STEPS + HELD_OUT, LENGTH]`."""
    tokenizer, rows = AutoTokenizer.from_pretrained(FOLDER), []
    for _, text in standard_library():
        tokens = tokenizer(text[: 8 * LENGTH])["input_ids"][:LENGTH]
        rows += [tokens] if len(tokens) == LENGTH else []
        if len(rows) == STEPS + HELD_OUT:
            break
    return torch.tensor(rows)


def adapted(dtype: torch.dtype) -> Any:
    return get_peft_model(AutoModelForCausalLM.from_pretrained(FOLDER, dtype=dtype), LORA)


@torch.no_grad()
def log_probs(model: Any, ids: Tensor) -> Tensor:
    logits = torch.cat([model(row[None]).logits[:, :-1].float() for row in ids])
    return logits.log_softmax(-1).gather(2, ids[:, 1:, None])[..., 0]


def distances(rate: float, ids: Tensor) -> dict[str, Tensor]:
    """Return by arm the distances from fp32, after training with a learning rate."""
    torch.manual_seed(0)
    model = adapted(torch.float32)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=rate)
    for row in ids[:STEPS]:
        model(row[None], labels=row[None]).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    held_out, trained = ids[STEPS:], model.eval().state_dict()
    exact, found = log_probs(model, held_out), {}
    low = adapted(torch.bfloat16).eval()
    low.load_state_dict(trained)
    found["peft"] = log_probs(low, held_out)
    with _products(low).computing():
        found["ours"] = log_probs(low, held_out)
    low.merge_adapter()
    found["merged"] = log_probs(low, held_out)
    return {arm: (values - exact).abs() for arm, values in found.items()}


def _products(model: Any) -> Any:
    products = adapters_of(model)
    assert products is not None
    return products


def kernels() -> dict[str, int]:
    """Return by arm the kernels of a captured pass."""
    found: dict[str, int] = {}
    replay = captured.CapturedPass.replay
    for arm in ARMS:
        model = llama(2, 64).eval()
        model.generation_config.pad_token_id = 0
        decoding = Decoding(off=False)
        if arm == "ours":
            decoding.captured.adapters = _products(model)
        elif arm == "merged":
            model.merge_adapter()

        def counted(graph: Any, arm: str = arm) -> Tensor:
            with Kernels() as counts:
                logits = replay(graph)
            found[arm] = counts.counts.total()
            return logits

        captured.CapturedPass.replay = counted
        with decoding.completing(model, [[1, 2, 3]] * 8, counts=False):
            config = GenerationConfig(max_new_tokens=4, do_sample=True, eos_token_id=255, pad_token_id=0)
            model.generate(input_ids=torch.tensor([[1, 2, 3]] * 8), generation_config=config)
        captured.CapturedPass.replay = replay
        assert decoding.plain_because is None
    return found


def main() -> None:
    args = command_line(__doc__, Path(__file__).parent).parse_args()
    results = Results(args.results, "sampler", ("part", "arm", "rate"))
    torch.set_num_threads(1)
    print("| | mean distance | largest |\n|---|---|---|")
    for arm, (dtype, bf16) in RUNS.items():
        row = of_a_run(dtype, bf16)
        results.add({**provenance(1), "part": "run", "arm": arm, "rate": 2e-4, **row})
        print(f"| {arm} | {row['mean_distance']:.2g} | {row['largest']:.2g} |")
    captured.CAPTURING.add("cpu")  # passes are called again for each token there
    counts, ids = kernels(), sequences()
    print("| | rate | kernels of a pass | mean distance | largest |\n|---|---|---|---|---|")
    for rate in RATES:
        for arm, distance in distances(rate, ids).items():
            row = {"mean_distance": distance.mean().item(), "largest": distance.max().item()}
            results.add({**provenance(1), "part": "rounding", "arm": arm, "rate": rate, **row, "kernels": counts[arm]})
            print(f"| {arm} | {rate:g} | {counts[arm]} | {row['mean_distance']:.4f} | {row['largest']:.3f} |")


if __name__ == "__main__":
    main()
