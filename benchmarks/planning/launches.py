"""
What the host spends on a kernel: processor time of eager PyTorch, divided by the kernels that it launches.

    python -m benchmarks.planning.launches        # one core, five minutes

A GPU waits where the host needs longer to launch a kernel than the device needs to run it. Down to the kernel itself
the host does the same for every device: modules in Python, autocast, the dispatcher, the graph that autograd builds,
its engine, and the memory of the result. So its time is measured on a CPU, with tensors so small that their arithmetic
is nothing (layers of Llama 2, 1 x 4 tokens, bf16 autocast, one thread). The kernels of the same passes are counted on
the simulated device (tests/simulated_gpu/kernels.py).

**The driver's part of a launch is not in it.** In its place is the work of the CPU's kernel. Products in bf16 are what
a CPU is slow at: one took 16 us at width 64 and 3 us at width 16. So the narrow rows have the least of a CPU's kernels,
and the wide ones show how much they can add.

Arms:

- the passes of one layer, in a loop;
- a step of fused AdamW on the device;
- a whole step of a streamed `HybridTrainer`, with eight layers and four micro-batches. It has all that happens beside
  kernels, too: batches, callbacks, hooks, and the update on the host;
- the update of a weight on the host in 16 parts. Operations of the host are counted in place of kernels.

Attention is that of torch without a fused kernel, which the simulated device has, too. A busy machine makes processor
time longer, so each row has the tenth percentile beside the median.
"""

from __future__ import annotations

import functools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

from benchmarks.results import Results, command_line, provenance
from benchmarks.timing import StepClock
from hf_hybrid import HybridConfig, HybridTrainer, machine
from hf_hybrid.streaming.optimizer import step_in_parts

ROOT = Path(__file__).resolve().parents[2]
WIDTHS, TOKENS, LAYERS, MICRO_BATCHES = (16, 64), 4, 8, 4
PARTS, PART = 16, 64
"""Of the weight that the host updates, and numbers in each."""
REPEATED, STEPS = 30, 10
"""Passes and steps of a round."""
STREAMED = "a streamed step"
KEY = ("arm", "width")

Pass = Callable[[], Any]


def llama(width: int, layers: int) -> LlamaConfig:
    """The structure of Llama 2 7B."""
    return LlamaConfig(
        vocab_size=64,
        hidden_size=width,
        intermediate_size=width * 11008 // 4096,
        num_hidden_layers=layers,
        num_attention_heads=4,
        max_position_embeddings=TOKENS,
        use_cache=False,
        attn_implementation="sdpa",
    )


def layer_passes(device: str, width: int) -> dict[str, Pass]:
    """Passes of one layer, and a step of its optimizer, to be called in this order."""
    config = llama(width, 1)
    layer = LlamaDecoderLayer(config, 0).to(device)
    optimizer = torch.optim.AdamW(layer.parameters(), lr=1e-4, fused=True)
    inputs = torch.randn(1, TOKENS, width).to(device).requires_grad_()
    gradient = torch.randn(1, TOKENS, width).to(device)
    positions = torch.arange(TOKENS)[None].to(device)
    rotations = LlamaRotaryEmbedding(config).to(device)(inputs.detach(), positions)
    made: list[torch.Tensor] = []

    def forward() -> None:
        with torch.autocast(device, dtype=torch.bfloat16):
            made[:] = [layer(inputs, position_ids=positions, position_embeddings=rotations)]

    def backward() -> None:
        made[0].backward(gradient)

    def forget() -> None:
        made.clear()
        inputs.grad = None
        optimizer.zero_grad()

    forward()
    backward()
    optimizer.step()  # makes its states
    forget()
    return {
        "forward": torch.no_grad()(forward),
        "forward, with gradients": forward,
        "backward": backward,
        "update on the device": optimizer.step,
        "forget": forget,
    }


def host_update() -> Pass:
    """An update of a weight on the host, in parts."""
    weight = torch.nn.Parameter(torch.randn(PARTS * PART))
    weight.grad = torch.randn(PARTS * PART)
    optimizer = torch.optim.AdamW([weight], lr=1e-4, fused=True)
    optimizer.step()
    state, group, scale = optimizer.state[weight], optimizer.param_groups[0], torch.tensor(0.5)
    rounded = weight.detach().bfloat16()
    return mock.patch.object(machine, "PART", PART)(lambda: step_in_parts(weight, state, group, scale, rounded))


def train(device: str, width: int, steps: int) -> list[float]:
    """Train with streamed layers; seconds of processor time of each step but the first."""
    model = LlamaForCausalLM(llama(width, LAYERS))
    data = [{"input_ids": row, "labels": row} for row in torch.randint(0, 64, (steps * MICRO_BATCHES, TOKENS))]
    values = {
        "max_steps": steps, "per_device_train_batch_size": 1, "gradient_accumulation_steps": MICRO_BATCHES,
        "bf16": True, "optim": "adamw_torch_fused", "logging_steps": 10 * steps, "save_strategy": "no",
        "report_to": "none", "disable_tqdm": True, "dataloader_pin_memory": False, "use_cpu": device == "cpu",
    }  # fmt: skip
    clock = StepClock()
    with tempfile.TemporaryDirectory() as folder:
        config = HybridConfig(folder, enable_predict=False, memory="stream", resident_layers=0, **values)
        trainer = HybridTrainer(model, config, train_dataset=data, callbacks=[clock])
        trainer.train()
    return clock.steps


def alike(function: Callable) -> Callable:
    """With the attention that has the same kernels on a CPU and on the simulated device."""
    return sdpa_kernel(SDPBackend.MATH)(function)


def passes(device: str) -> dict[str, Pass]:
    """What is counted, for tests/simulated_gpu/kernels.py."""
    found = {**layer_passes(device, WIDTHS[0]), "update on the host": host_update()}
    for steps in (1, 2):
        found[f"{STREAMED} {steps}"] = functools.partial(train, device, WIDTHS[0], steps)
    return {name: alike(function) for name, function in found.items()}


def counted() -> dict[str, int]:
    """Kernels of each arm on the simulated device, or operations of the host where there are none."""
    folders = [str(ROOT), str(ROOT / "tests"), *filter(None, [os.environ.get("PYTHONPATH")])]
    done = subprocess.run(
        [sys.executable, "-m", "simulated_gpu.kernels", "benchmarks.planning.launches"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(folders)},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    of_device = json.loads(done.stdout.splitlines()[-1])
    found = {name: kernels or operations for name, (kernels, operations) in of_device.items()}
    found[STREAMED] = found.pop(f"{STREAMED} 2") - found.pop(f"{STREAMED} 1")
    del found["forget"]
    return found


def measured(width: int, rounds: int) -> dict[str, list[float]]:
    """Seconds of processor time of each arm, again and again, in turn: a machine's speed drifts."""
    found = defaultdict(list)
    everything = {**layer_passes("cpu", width), "update on the host": host_update()}
    for _ in range(rounds):
        for again in range(2 * REPEATED):
            for name, function in everything.items():
                started = time.process_time()
                function()
                if again >= REPEATED:
                    found[name].append(time.process_time() - started)
        found[STREAMED].extend(train("cpu", width, 2 + STEPS)[1:])
    return found


def main() -> None:
    """Count, measure, append the results and print them."""
    parser = command_line(__doc__, Path(__file__).parent)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(1)
    results, kernels = Results(args.results, "launches", KEY), counted()
    for width in WIDTHS:
        seconds = alike(measured)(width, args.rounds)
        for arm, count in kernels.items():
            tenth, *_, half, _, _, _, _ = (round(1e6 * s / count, 2) for s in statistics.quantiles(seconds[arm], n=10))
            each = {"kernels": count, "microseconds": half, "tenth": tenth, "n": len(seconds[arm])}
            results.add({"arm": arm, "width": width, **each, **provenance(1)})
            print(f"{arm:24s} width {width:3d} {count:5d} kernels, {half} us each (tenth percentile {tenth})")


if __name__ == "__main__":
    main()
