"""
A layer of LoRA under bf16 autocast, PEFT's forward beside ours: kernels, time of the host, error. A minute.

    python -m benchmarks.skips.adapters

A small Llama with LoRA of rank 16 on all linear layers computes one micro-batch.

- *Kernels*: operators of forward and backward pass that compute or copy, over those of the model without adapters, per
  adapted layer, with the two products of the base layer.
- *Host*: median processor time of 60 micro-batches of 4 tokens in 16 layers, in turn: a CPU does little there but
  call operators.
- *Error*: mean distance of the gradients of adapters from those in fp32, relative to their norms.

What a GPU makes of it is measured by `benchmarks.gpu`.
"""

from __future__ import annotations

import statistics
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.results import Results, command_line, provenance
from hf_hybrid.part import Step
from hf_hybrid.phase_memory.adapter_products import AdapterProducts, plain_lora_layers
from hf_hybrid.run.run import Run

COUNTED = 14
"""Adapted layers of the model whose kernels are counted."""
VIEWS = {
    "_reshape_alias", "_unsafe_view", "alias", "as_strided", "detach", "empty", "empty_like", "expand", "new_empty",
    "select", "slice", "split", "split_with_sizes", "squeeze", "t", "transpose", "unsqueeze", "view",
}  # fmt: skip
"""Operators that start nothing on a device."""


class Kernels(TorchDispatchMode):
    """Counts the operators that compute or copy, in `counts`."""

    def __init__(self):
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.name().partition("::")[2].partition(".")[0]
        if name not in VIEWS:
            self.counts[name] += 1
        return func(*args, **(kwargs or {}))


def llama(layers: int, hidden: int, *, adapters: bool = True) -> Any:
    """Return a Llama in bf16, whose `B` are not zero."""
    torch.manual_seed(0)
    sizes = {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 256}
    config = LlamaConfig(num_hidden_layers=layers, hidden_size=hidden, intermediate_size=4 * hidden, **sizes)
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    if not adapters:
        return model.requires_grad_(False)
    model = get_peft_model(model, LoraConfig(r=16, lora_alpha=24, target_modules="all-linear"))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.05)
    return model


def part_for(model: Any) -> AdapterProducts:
    part = AdapterProducts(plain_lora_layers(model), torch.bfloat16)
    part.begin(Run(model=model))
    return part


def tokens(count: int) -> torch.Tensor:
    return torch.randint(256, (1, count), generator=torch.Generator().manual_seed(0))


def micro_batch(model: Any, ids: torch.Tensor, part: AdapterProducts | None = None) -> None:
    """Compute the gradients of a step with one micro-batch."""
    embedded = model.get_input_embeddings()(ids).detach().requires_grad_()  # so that the first layer is like the others
    if part is not None:
        part.begin_step(Step(0))
        part.before_forward(None)
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(inputs_embeds=embedded, labels=ids).loss
    loss.backward()
    if part is not None:
        part.after_backward(None)


def kernels_per_layer(part_of=lambda model: None) -> float:
    """Return the kernels of an adapted layer, with the two products of its base."""
    counts = []
    for adapters in (False, True):
        model = llama(2, 64, adapters=adapters)
        part = part_of(model) if adapters else None
        with Kernels() as kernels:
            micro_batch(model, tokens(64), part)
        counts.append(kernels.counts.total())
    return (counts[1] - counts[0]) / COUNTED + 2


def host_seconds(arms: dict[str, Any]) -> dict[str, float]:
    """Return the seconds of a micro-batch by arm. They compute in turn."""
    models = {arm: llama(16, 8) for arm in arms}
    parts = {arm: arms[arm](models[arm]) for arm in arms}
    taken: dict[str, list[float]] = {arm: [] for arm in arms}
    for _ in range(60):
        for arm, model in models.items():
            begun = time.process_time()
            micro_batch(model, tokens(4), parts[arm])
            taken[arm].append(time.process_time() - begun)
            model.zero_grad()
    return {arm: statistics.median(seconds) for arm, seconds in taken.items()}


def error(part_of=lambda model: None) -> float:
    model, exact = llama(2, 64), llama(2, 64).float()
    micro_batch(model, tokens(64), part_of(model))
    exact(inputs_embeds=exact.get_input_embeddings()(tokens(64)), labels=tokens(64)).loss.backward()
    pairs = [(ours.grad, want.grad) for ours, want in zip(model.parameters(), exact.parameters()) if want.requires_grad]
    return statistics.fmean(((ours - want).norm() / want.norm()).item() for ours, want in pairs)


def main() -> None:
    args = command_line(__doc__, Path(__file__).parent).parse_args()
    results = Results(args.results, "adapters", ("arm",))
    torch.set_num_threads(1)
    arms = {"peft": lambda model: None, "ours": part_for}
    host = host_seconds(arms)
    print("| | kernels a layer | host, ms a micro-batch | error |\n|---|---|---|---|")
    for arm, part in arms.items():
        row = {"kernels": kernels_per_layer(part), "host_seconds": host[arm], "error": error(part)}
        results.add({**provenance(1), "arm": arm, **row})
        print(f"| {arm} | {row['kernels']:.1f} | {1e3 * row['host_seconds']:.1f} | {row['error']:.2%} |")


if __name__ == "__main__":
    main()
