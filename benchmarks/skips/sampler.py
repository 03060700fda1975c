"""
Do completions come from the model that is trained? Distances of log-probabilities, and kernels of adapters.

    python -m benchmarks.speedup.pretrained         # fetches SmolLM2, once
    python -m benchmarks.skips.sampler              # ten minutes

*A run*: what two steps of GRPO log as `sampling_logp_difference`, SmolLM2-135M with LoRA: in fp32, in fp32 with bf16
autocast, and in bf16. A row has the larger of the two means, and the largest distance.

*Correction*: TRL's importance sampling correction multiplies the loss by the ratio of both probabilities, by token
(at most 3) or by sequence (0 above 3). Four groups of eight completions of 48 tokens are sampled in bf16. The gradient
that is wanted is computed in fp32 with its ratios. A row has the distance of the gradient under bf16 autocast from
that, relative to its norm, `corrected` by ratios in bf16 and `plain`.

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
from hf_hybrid.trl.groups import SAMPLER

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


def completed(model: Any) -> list[tuple[Tensor, int, Tensor]]:
    """Return tokens, tokens of the prompt, and log-probabilities of the sampler, for each group of completions."""
    tokenizer, found = AutoTokenizer.from_pretrained(FOLDER), []
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    config = GenerationConfig(max_new_tokens=48, do_sample=True, top_k=0, **ends)
    for prompt in PROMPTS:
        ids, decoding = torch.tensor(tokenizer([prompt] * 8)["input_ids"]), Decoding(off=False)
        with torch.no_grad(), decoding.completing(model, ids.tolist(), counts=False):
            tokens = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), generation_config=config)
        assert decoding.chosen is not None, decoding.plain_because
        found.append((tokens, ids.shape[1], decoding.chosen.log()))
    return found


def gradient(model: Any, groups: list[tuple[Tensor, int, Tensor]], mode: str, *, autocast: bool) -> Tensor:
    """Return the gradient of adapters under random advantages, `[weights]`, corrected by `token`, `sequence` or not."""
    model.zero_grad()
    for number, (tokens, length, of_sampler) in enumerate(groups):
        advantages = torch.randn(len(tokens), 1, generator=torch.Generator().manual_seed(number))
        advantages = (advantages - advantages.mean()) / advantages.std()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            logits = model(tokens).logits[:, length - 1 : -1].float()
        drawn = tokens[:, length:]
        found = logits.log_softmax(-1).gather(2, drawn[..., None])[..., 0]
        ends = drawn == model.config.eos_token_id
        mask = (ends.cumsum(1) - ends.long() == 0).float()
        ratio = (found.detach() - of_sampler) * mask
        if mode == "token":
            ratio = ratio.exp().clamp(max=3)
        elif mode == "sequence":
            ratio = ratio.sum(1, keepdim=True).exp()
            ratio = ratio.masked_fill(ratio > 3, 0.0)
        else:
            ratio = torch.ones_like(mask)
        (-(advantages * ratio * found * mask).sum() / mask.sum() / len(groups)).backward()
    return torch.cat([p.grad.float().flatten() for p in model.parameters() if p.requires_grad])


def corrections() -> dict[str, dict[str, float]]:
    """Return by mode how far gradients in bf16 are from the corrected one in fp32."""
    torch.manual_seed(0)
    low = adapted(torch.bfloat16).eval()
    for name, parameter in low.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.002)
    exact = adapted(torch.float32).eval()
    exact.load_state_dict(low.state_dict())
    groups, found = completed(low), dict[str, dict[str, float]]()
    plain = gradient(low, groups, "none", autocast=True)
    for mode in ("token", "sequence"):
        wanted, corrected = gradient(exact, groups, mode, autocast=False), gradient(low, groups, mode, autocast=True)
        pairs = {"plain": plain, "corrected": corrected}
        found[mode] = {name: ((one - wanted).norm() / wanted.norm()).item() for name, one in pairs.items()}
    return found


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

    class Counted:
        """In place of a graph: the pass is called for each token."""

        def __init__(self, compute: Any, *_: Any):
            self.compute = compute

        def replay(self) -> Tensor:
            with Kernels() as counts:
                logits = self.compute()
            found[arm] = counts.counts.total()
            return logits

    captured.CapturedPass = Counted
    torch.cpu.graph_pool_handle = object
    for arm in ARMS:
        model = llama(2, 64).eval()
        model.generation_config.pad_token_id = 0
        decoding = Decoding(off=False)
        if arm == "ours":
            decoding.captured.adapters = _products(model)
        elif arm == "merged":
            model.merge_adapter()
        with decoding.completing(model, [[1, 2, 3]] * 8, counts=False):
            config = GenerationConfig(max_new_tokens=4, do_sample=True, eos_token_id=255, pad_token_id=0)
            model.generate(input_ids=torch.tensor([[1, 2, 3]] * 8), generation_config=config)
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
    print("| correction by | plain | corrected |\n|---|---|---|")
    for mode, row in corrections().items():
        results.add({**provenance(1), "part": "correction", "arm": mode, "rate": 0.0, **row})
        print(f"| {mode} | {row['plain']:.3f} | {row['corrected']:.3f} |")
    captured.CAPTURING.add("cpu")
    counts, ids = kernels(), sequences()
    print("| | rate | kernels of a pass | mean distance | largest |\n|---|---|---|---|---|")
    for rate in RATES:
        for arm, distance in distances(rate, ids).items():
            row = {"mean_distance": distance.mean().item(), "largest": distance.max().item()}
            results.add({**provenance(1), "part": "rounding", "arm": arm, "rate": rate, **row, "kernels": counts[arm]})
            print(f"| {arm} | {rate:g} | {counts[arm]} | {row['mean_distance']:.4f} | {row['largest']:.3f} |")


if __name__ == "__main__":
    main()
