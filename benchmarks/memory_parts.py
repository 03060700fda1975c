"""What single memory techniques save, counted in bytes of storages on the CPU.

What:
- the loss head: peak of live storages of forward and backward through head and cross-entropy, all logits or chunks;
- activations: bytes saved for the backward pass of a Llama's backbone: all, checkpointed, checkpointed with the inputs
  of the layers on the host; the same for a forward without gradients;
- int8 probes: stored bytes of the quantised modules against bf16.

These are exact counts, the same on every machine; what a GPU's allocator adds is not in them.

How to run (a minute, nothing is downloaded; int8 needs no bitsandbytes):

    python benchmarks/memory_parts.py          # benchmarks/results/memory_parts.json
"""

import argparse
import json
import os
import sys
import time
import weakref
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ["CUDA_VISIBLE_DEVICES"] = ""

import torch
import torch.nn.functional as F
from architectures import report_versions
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import LlamaConfig, LlamaForCausalLM

from hf_hybrid.phase_memory.activations import BoundaryOffload, saved_for_backward
from hf_hybrid.phase_memory.int8 import Int8Predict, layer_linears
from hf_hybrid.streaming.loss import linear_cross_entropy


class LiveBytes(TorchDispatchMode):
    """Bytes of the storages made while it is active and still alive, and their peak."""

    def __init__(self):
        super().__init__()
        self.sizes, self.now, self.peak = {}, 0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        output = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(output):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage()._cdata not in self.sizes:
                storage = tensor.untyped_storage()
                self.sizes[storage._cdata] = storage.nbytes()
                self.now += storage.nbytes()
                self.peak = max(self.peak, self.now)
                weakref.finalize(storage, self._remove, storage._cdata)
        return output

    def _remove(self, key):
        self.now -= self.sizes.pop(key)


def all_logits(hidden, weight, targets):
    """What a causal language model's head and loss do."""
    return F.cross_entropy(F.linear(hidden, weight).float(), targets, reduction="sum")


def loss_head(dtype: torch.dtype, tokens: int = 2048, width: int = 64, vocabulary: int = 65536) -> dict:
    """Peaks of the head."""
    peaks, seconds = {}, {}
    for name, loss in (("all_logits", all_logits), ("chunked", linear_cross_entropy)):
        torch.manual_seed(0)
        hidden = torch.randn(tokens, width, dtype=dtype, requires_grad=True)
        weight = (torch.randn(vocabulary, width, dtype=dtype) * 0.02).requires_grad_()
        targets = torch.randint(vocabulary, (tokens,))
        started = time.perf_counter()
        with LiveBytes() as live:
            loss(hidden, weight, targets).backward()
        peaks[name], seconds[name] = live.peak, time.perf_counter() - started
    setting = {"dtype": str(dtype), "tokens": tokens, "width": width, "vocabulary": vocabulary}
    return {**setting, "peak_bytes": peaks, "saved": 1 - peaks["chunked"] / peaks["all_logits"], "seconds": seconds}


def llama(hidden: int, layers: int) -> LlamaForCausalLM:
    """A small Llama."""
    torch.manual_seed(0)
    sizes = {"hidden_size": hidden, "intermediate_size": 11 * hidden // 4, "num_hidden_layers": layers}
    return LlamaForCausalLM(LlamaConfig(vocab_size=256, num_attention_heads=4, num_key_value_heads=4, **sizes))


def activations(hidden: int = 128, layers: int = 8, rows: int = 2, tokens: int = 128) -> dict:
    """Bytes saved for backward by the backbone, from embeddings to the last norm."""
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
    """Stored bytes of int8 probes."""
    from hf_hybrid.phases import PluginContext

    model = llama(hidden, 4)
    plugin = Int8Predict("on")
    plugin.on_train_begin(PluginContext(model, None, 1))
    stored, bf16 = plugin.stored_bytes()
    return {"hidden": hidden, "modules": len(layer_linears(model)), "stored_bytes": stored, "bf16_bytes": bf16,
            "share": stored / bf16}  # fmt: skip


def main() -> int:
    """Command line entry point; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/memory_parts.json"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    result = {
        **report_versions(),
        "loss_head": [loss_head(dtype) for dtype in (torch.float32, torch.bfloat16)],
        "activations": activations(),
        "int8_probes": int8(),
    }
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
