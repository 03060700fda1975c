"""
How much of a streamed step is not recomputed, because graphs fit that layers keep, and what other divisions would save.

    python -m benchmarks.planning.kept_graphs             # a minute, no GPU

A walk by layer has all micro-batches of a step in flight, so a layer that is not recomputed keeps as many graphs. They
take what other layers that stay on the device leave free. Presets are those of 16, 24 and 80 GiB that have to be
streamed, with 1 and 8 micro-batches of 2,048 tokens. Bytes are the plan's.

    resident    layers that stay on the device, of all, by the plan
    kept        layers that are not recomputed (of one that keeps some of its graphs, that share), and the share of a
                step's operations that this saves
    fastest     of all numbers of resident layers, each with the graphs that fit then, the one with the least floor of a
                step (the longest of products and copies) at the rates of one H200: layers that stay, layers that are
                not recomputed, and what it saves of the floor of the plan
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
from hf_hybrid.plan.estimate import Estimator, Plan
from hf_hybrid.plan.planner import Planner
from hf_hybrid.plan.setups import Setup

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
    ("8b", "LoRA", INT8), ("14b", "LoRA", EXACT), ("14b", "LoRA", INT8), ("32b", "LoRA", EXACT), ("32b", "LoRA", INT8),
    ("50b", "LoRA", INT8), ("30b-a3b", "LoRA", EXACT),
]  # fmt: skip


def divisions(estimator: Estimator, setup: Setup, active: float) -> dict[str, Any] | None:
    """
    Try all numbers of resident layers. Of the weights of layers a token reaches the share `active`. `None` if a run
    need not be streamed, or does not fit.
    """
    plain = replace(setup, memory="off", activation_checkpointing=True, base_precision="same")
    planned, shape = estimator.best(setup), estimator.shape
    if estimator.resident(plain).fits or not planned.fits:
        return None
    count = len(shape.layers)
    layers = sum(layer.weights for layer in shape.layers) * active
    products, trained = layers + shape.head.weights, active * sum(layer.trainable for layer in shape.layers)
    trained += shape.head.trainable
    tokens = setup.tokens * setup.gradient_accumulation_steps
    # Forward, inputs' gradients and weights' gradients; and the recomputation of the layers.
    operations, recomputation = tokens * (4 * products + 2 * trained + 2 * layers), tokens * 2 * layers

    def kept(plan: Plan) -> float:
        return plan.kept_graphs / plan.setup.micro_batches_in_flight

    def saved(plan: Plan) -> float:
        return kept(plan) / count * recomputation

    def floor(plan: Plan) -> float:
        traffic = step_traffic(plan)
        copies = (traffic[way] / H200[way] for way in ("h2d", "d2h"))
        return max((operations - saved(plan)) / H200["flops"], *copies)

    placed = replace(planned.setup, kept_graphs=None, stream_embeddings=planned.stream_embeddings)
    plans = [estimator.best(replace(placed, resident_layers=stay)) for stay in range(planned.resident_layers + 1)]
    best = min(plans, key=floor)
    return {
        "layers": count,
        "resident": planned.resident_layers,
        "kept": kept(planned),
        "saved": saved(planned) / operations,
        "fastest": [best.resident_layers, kept(best)],
        "gain": 1 - floor(best) / floor(planned),
    }


def main() -> None:
    parser = command_line(__doc__, HERE)
    parser.add_argument("--gib", type=int, nargs="+", default=[16, 24, 80], help="Of the device.")
    args = parser.parse_args()
    results = Results(args.results, "kept_graphs", ("model", "trains", "gib", "x"))
    print("model    trains     GiB  x   resident    kept: saved   fastest (kept)   gain")
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
                f"{found['kept']:8.1f} {found['saved']:6.1%} {found['fastest'][0]:8} ({found['fastest'][1]:4.1f}) "
                f"{found['gain']:8.1%}",
                flush=True,
            )


if __name__ == "__main__":
    main()
