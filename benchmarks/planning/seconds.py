"""
How far `hf-hybrid plan --measure` is from a step of the whole model: both are run here, one after the other.

    python -m benchmarks.planning.seconds                                # what a CPU trains in half an hour
    python -m benchmarks.planning.seconds --shape 8b --tokens 2048 16384 --vram 8GiB       # on a GPU

The measured step is extrapolated from a few layers (hf_hybrid/cli/measure.py); the other one is a training of all
layers with the same options. On a CPU "device" and "host" are the same memory, so that nothing overlaps: there the
rows show that time is linear in the number of layers, and nothing about copies.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from peft import get_peft_model
from transformers import LlamaConfig

from benchmarks.gpu.models import SHAPES
from benchmarks.results import Results, command_line, provenance
from hf_hybrid.cli.measure import Run, measure, train_layers
from hf_hybrid.plan.models import lora_config
from hf_hybrid.plan.planner import Planner
from hf_hybrid.plan.trace import Excerpt
from hf_hybrid.plan.ways import WayPlan

RESULTS = Path(__file__).with_name("results.jsonl")
CPU = {"small": {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 24, "num_attention_heads": 4,
                 "num_key_value_heads": 2, "vocab_size": 8192}}  # fmt: skip
WAYS = {
    "streamed": "full, streamed",
    "streamed, 8-bit": "full, streamed, bf16 weights, 8-bit states",
    "checkpointing": "full, bf16 weights, chunked loss, checkpointing",
    "LoRA, streamed": "LoRA, streamed",
    "LoRA, streamed int8": "LoRA, streamed int8 base",
}
"""Ways that are measured, and their titles in `hf-hybrid plan`."""


def measured(planner: Planner, plan: WayPlan) -> dict[str, Any]:
    """Extrapolate a step of a plan, then train the whole model."""

    def prepare(model: Any) -> Any:
        return model if plan.way.kind == "full" else get_peft_model(model, lora_config())

    expected = measure(planner, plan, prepare)
    layers, streamed = len(plan.shape.layers), plan.mode == "streamed"
    listed = Excerpt.of(planner.full_model(plan.way.weights)).listed
    whole = Run(layers, plan.resident_layers if streamed else layers - plan.recomputed_layers, plan.kept_graphs)
    step, held, planned = train_layers(planner, plan, listed, whole, prepare)
    return {
        "layers_trained": expected.trained, "resident_layers": plan.resident_layers if streamed else None,
        "kept_graphs": plan.kept_graphs,
        "expected": asdict(expected.step), "measured": asdict(step),
        "error": expected.step.seconds / step.seconds - 1, "device_bytes": held, "planned_bytes": planned,
    }  # fmt: skip


def main() -> None:
    parser = command_line(__doc__ or "", RESULTS.parent)
    parser.add_argument("--shape", default="small", choices=(*CPU, *SHAPES))
    parser.add_argument("--tokens", type=int, nargs="+", default=[2048], help="of a step")
    parser.add_argument("--length", type=int, default=256, help="of a sequence")
    parser.add_argument("--vram", help="budget of the device")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    results = Results(args.results, "measured", ("device", "shape", "tokens", "length", "vram", "way"))
    for tokens in args.tokens:
        planner = Planner(
            LlamaConfig(**{**SHAPES, **CPU}[args.shape], max_position_embeddings=16384),
            sequence_length=args.length, gradient_accumulation_steps=tokens // args.length, vram=args.vram,
            accelerator=device,
        )  # fmt: skip
        plans = {plan.way.title: plan for plan in planner.plans("bfloat16", ("full", "LoRA"))}
        for way in args.ways:
            case = {
                "device": device,
                "shape": args.shape,
                "tokens": tokens,
                "length": args.length,
                "vram": args.vram,
                "way": way,
            }
            row = {**case, **measured(planner, plans[WAYS[way]]), **provenance(torch.get_num_threads(), device)}
            print(json.dumps(results.add(row)), flush=True)


if __name__ == "__main__":
    main()
