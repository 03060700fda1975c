"""
What single memory techniques save, counted in bytes of storages on the CPU. A minute; nothing is downloaded.

    python -m benchmarks.memory.parts

- `activations`: bytes saved for the backward pass of a Llama's backbone: all, checkpointed, checkpointed with the
  inputs of the layers on the host; the same for a forward without gradients;
- `int8_probes`: stored bytes of the quantised modules against bf16; needs no bitsandbytes.

These are exact counts, the same on every machine; what a GPU's allocator adds is not in them.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ["CUDA_VISIBLE_DEVICES"] = ""

import torch
from rig.live_bytes import saved_for_backward
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.results import Results, command_line, provenance
from hf_hybrid.experimental.precision import layer_linears
from hf_hybrid.phase_memory.activations import BoundaryOffload


def llama(hidden: int, layers: int) -> LlamaForCausalLM:
    """A small Llama."""
    torch.manual_seed(0)
    sizes = {"hidden_size": hidden, "intermediate_size": 11 * hidden // 4, "num_hidden_layers": layers}
    return LlamaForCausalLM(LlamaConfig(vocab_size=256, num_attention_heads=4, num_key_value_heads=4, **sizes))


def activations(hidden: int = 128, layers: int = 8, rows: int = 2, tokens: int = 128) -> dict:
    """Count the bytes that the backbone, from embeddings to the last norm, saves for the backward pass."""
    model = llama(hidden, layers).train()
    ids = torch.randint(256, (rows, tokens))

    def forward():
        return model.model(input_ids=ids, use_cache=False).last_hidden_state

    found = {"all": saved_for_backward(model, forward)}
    with torch.no_grad():
        found["forward_only"] = saved_for_backward(model, forward)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    found["checkpointed"] = saved_for_backward(model, forward)
    with BoundaryOffload(model, min_bytes=1):
        forward().sum().backward()  # the host buffers are made
        found["checkpointed_and_offloaded"] = saved_for_backward(model, forward)
    saved = {name: 1 - count / found["all"] for name, count in found.items()}
    setting = {"hidden": hidden, "layers": layers, "rows": rows, "tokens": tokens}
    return {**setting, "saved_for_backward_bytes": found, "saved": saved}


def int8(hidden: int = 256) -> dict:
    """Count the stored bytes of int8 probes."""
    model = llama(hidden, 4)
    matrices = {id(module.weight): module.weight for module in layer_linears(model)}.values()
    stored = sum(weight.numel() + 4 * weight.shape[0] for weight in matrices)
    bf16 = sum(2 * weight.numel() for weight in matrices)
    return {"hidden": hidden, "modules": len(layer_linears(model)), "stored_bytes": stored, "bf16_bytes": bf16,
            "share": stored / bf16}  # fmt: skip


def main() -> None:
    args = command_line(__doc__, Path(__file__).resolve().parent).parse_args()
    torch.set_num_threads(1)
    results = Results(args.results, "parts", ("part", "dtype"))
    parts = [{"part": "activations", "dtype": None, **activations()}, {"part": "int8_probes", "dtype": None, **int8()}]
    for part in parts:
        print(json.dumps(results.add({**part, **provenance(1)}), indent=1))


if __name__ == "__main__":
    main()
