"""
Would streamed runs gain if layers that stay on the device kept their activations, and were not recomputed?

    python -m benchmarks.planning.kept_activations             # half a minute, no GPU

A walk by layer has all micro-batches of a step in flight, so a layer keeps the activations of all of them. They take
room in which other layers could stay on the device and would not travel. Presets are those of 16, 24 and 80 GiB that
have to be streamed, with 1 and 8 micro-batches of 2,048 tokens. Bytes are the plan's.

    resident    layers that stay on the device, of all: today's plan, in which none keeps activations
    left over   layers that could keep theirs in what such a plan leaves free, and the share of a step's operations that
                this saves
    most        the same, if layers that stay are given up for it
    fastest     of all divisions of the memory the one with the least floor of a step (the longest of products and
                copies) at the rates of one H200: layers that stay, those of them that keep, and what it saves of the
                floor of today's plan
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

from transformers import LlamaConfig, PreTrainedConfig, Qwen2Config, Qwen3MoeConfig

from benchmarks.gpu.models import SHAPES
from benchmarks.memory.floors import step_traffic
from benchmarks.results import Results, command_line, provenance
from hf_hybrid.plan.estimate import Estimator
from hf_hybrid.plan.planner import Planner
from hf_hybrid.plan.setups import Setup
from hf_hybrid.plan.trace import activations

HERE = Path(__file__).resolve().parent
GIB, TOKENS = 2**30, 2048
H200 = {"h2d": 53e9, "d2h": 53e9, "flops": 434e12}
"""Bytes and operations per second; those of a step of 8B in which kernels ran 2.42 s of 16,384 tokens."""
EXACT, LOW, INT8 = {}, {"optimizer_states": "8bit"}, {"base_precision": "int8"}
ACTIVE = {"30b-a3b": 3.3 / 30.5}
"""Share of the weights that a token reaches."""
MODELS: dict[str, PreTrainedConfig] = {
    "8b": LlamaConfig(max_position_embeddings=16384, **SHAPES["8b"]),
    "14b": Qwen2Config(hidden_size=5120, intermediate_size=13824, num_hidden_layers=48, num_attention_heads=40,
                       num_key_value_heads=8, vocab_size=152064, max_position_embeddings=16384),
    "32b": Qwen2Config(hidden_size=5120, intermediate_size=27648, num_hidden_layers=64, num_attention_heads=40,
                       num_key_value_heads=8, vocab_size=152064, max_position_embeddings=16384),
    "50b": LlamaConfig(hidden_size=8192, intermediate_size=22016, num_hidden_layers=70, num_attention_heads=64,
                       num_key_value_heads=8, vocab_size=64000, max_position_embeddings=16384),
    "30b-a3b": Qwen3MoeConfig(max_position_embeddings=16384, **SHAPES["30b-a3b"]),
}  # fmt: skip
PRESETS = [
    ("8b", "full", EXACT), ("8b", "full", LOW), ("14b", "full", EXACT), ("14b", "full", LOW), ("8b", "LoRA", EXACT),
    ("14b", "LoRA", EXACT), ("32b", "LoRA", EXACT), ("50b", "LoRA", INT8), ("30b-a3b", "LoRA", EXACT),
]  # fmt: skip


def divisions(estimator: Estimator, setup: Setup, active: float) -> dict[str, Any] | None:
    """
    Try all divisions of the device. Of the weights of layers a token reaches the share `active`. `None` if a run need
    not be streamed.
    """
    plain = replace(setup, memory="off", activation_checkpointing=True, base_precision="same")
    today, shape = estimator.best(setup), estimator.shape
    if estimator.resident(plain).fits or not today.fits:
        return None
    count = len(shape.layers)
    # What autograd saves of a layer beyond its input, on average.
    tracer = estimator.tracer
    if tracer is None:
        raise RuntimeError("No step of this model can be traced.")
    saved = tracer._read(setup, 0, activations).boundary - tracer.activations(setup).boundary
    keeps = saved * setup.micro_batches_in_flight
    if setup.base_precision == "int8":  # its weights are expanded into memory that all layers share
        keeps += 2 * max(layer.frozen for layer in shape.layers)
    layers = sum(layer.weights for layer in shape.layers) * active
    products, trained = layers + shape.head.weights, active * sum(layer.trainable for layer in shape.layers)
    trained += shape.head.trainable
    tokens = setup.tokens * setup.gradient_accumulation_steps
    operations, recompute = tokens * (6 * products + 2 * trained), tokens * 2 * layers / count
    floors: dict[tuple[int, int], float] = {}
    for resident in range(count + 1):
        plan = estimator.streamed(today.setup, resident, today.stream_embeddings)
        room = (today.setup.device_budget or 0) - plan.peak_device_bytes
        traffic = step_traffic(plan)
        copies = max(traffic[way] / H200[way] for way in ("h2d", "d2h"))
        for kept in range(resident + 1):
            if kept * keeps <= room:
                computing = (operations - kept * recompute) / H200["flops"]
                floors[resident, kept] = max(computing, copies)
    best, now = min(floors, key=floors.__getitem__), floors[today.resident_layers, 0]
    left, most = (max(kept for stay, kept in floors if stay >= least) for least in (today.resident_layers, 0))
    return {
        "layers": count,
        "resident": today.resident_layers,
        "gib_of_a_layer": keeps / GIB,
        "left_over": left,
        "left_over_operations": left * recompute / operations,
        "most": most,
        "most_operations": most * recompute / operations,
        "fastest": best,
        "gain": 1 - floors[best] / now,
    }


def main() -> None:
    parser = command_line(__doc__, HERE)
    parser.add_argument("--gib", type=int, nargs="+", default=[16, 24, 80], help="Of the device.")
    args = parser.parse_args()
    results = Results(args.results, "kept_activations", ("model", "trains", "gib", "x"))
    print("model    trains     GiB  x   resident  left over   most        fastest (keep)  gain")
    for model, kind, options in PRESETS:
        planner = Planner(MODELS[model], sequence_length=TOKENS)
        estimator = planner._estimator("bfloat16", kind)
        for gib, micro_batches in itertools.product(args.gib, (1, 8)):
            setup = replace(
                planner.setup, memory="stream", vram=gib * GIB, accelerator="cuda", enable_predict=False,
                values_per_weight=None, chunked_loss=True, gradient_accumulation_steps=micro_batches, **options,
            )  # fmt: skip
            found = divisions(estimator, setup, ACTIVE.get(model, 1.0))
            if found is None:
                continue
            how = " ".join([kind, *map(str, options.values())])
            results.add({**provenance(), "model": model, "trains": how, "gib": gib, "x": micro_batches, **found})
            print(
                f"{model:8} {how:10} {gib:3} {micro_batches:2} {found['resident']:6} of {found['layers']}"
                f"{found['left_over']:5} {found['left_over_operations']:5.1%} {found['most']:5} "
                f"{found['most_operations']:5.1%} {found['fastest'][0]:6} ({found['fastest'][1]:2}) "
                f"{found['gain']:7.1%}",
                flush=True,
            )


if __name__ == "__main__":
    main()
