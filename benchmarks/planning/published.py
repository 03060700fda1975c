"""
Published steps beside what `hf_hybrid.cli.cards.py` predicts for them: how far estimates from data sheets can be off.

    python -m benchmarks.planning.published

**Other programs.** Each row is a training of all weights that its authors timed on one GPU. Its prediction is made of

- matrix products: 6 operations per weight and token, 8 where layers are recomputed, and causal attention;
- all other kernels: the bytes that eager PyTorch moves (`MOVED` in hf_hybrid/cli/times.py), times `FUSED` for programs
  whose kernels are fused;
- the update on the host where the program begins it after the backward pass: 28 bytes per weight and the gradients.

Two rows were fitted, and are marked so: the share of the products that GeForce cards reach, and `FUSED`. The share of
an H100 lies between its row and a loop of products. The host is taken to be `desktop`; the authors do not say.

**This package.** Rows of docs/memory.md (one H100, 16 cores whose memory copied 87 GB/s) beside `hf-hybrid plan --gpu`.
The streamed ones were measured before updates passed through host memory once and norms were computed on the device.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from transformers import LlamaConfig

from benchmarks.results import Results, command_line, provenance
from hf_hybrid.cli.cards import CARDS, HOSTS, REACHED, Host
from hf_hybrid.cli.planner import Planner
from hf_hybrid.cli.times import MOVED, step_time
from hf_hybrid.cli.ways import Way

FUSED = 0.08
"""Bytes of fused kernels beside those of eager PyTorch."""


@dataclass(frozen=True)
class Model:
    """Sizes of a published model."""

    hidden: int
    ffn: int
    layers: int
    heads: int
    kv_heads: int
    vocab: int
    tied: bool = False

    @property
    def layer(self) -> int:
        """Weights of a layer's matrices."""
        keys = self.hidden * self.kv_heads // self.heads
        return 2 * self.hidden * (self.hidden + keys) + 3 * self.hidden * self.ffn

    @property
    def weights(self) -> int:
        """All of them."""
        return self.layers * self.layer + self.hidden * self.vocab * (1 if self.tied else 2)


QWEN = {
    "0.5B": Model(896, 4864, 24, 14, 2, 151936, True),
    "1.5B": Model(1536, 8960, 28, 12, 2, 151936, True),
    "7B": Model(3584, 18944, 28, 28, 4, 152064),
    "14B": Model(5120, 13824, 48, 40, 8, 152064),
}
LLAMA = Model(4096, 14336, 32, 32, 8, 128256)


@dataclass(frozen=True)
class Published:
    """One row: who, what, on which card, tokens of a step and of a sequence, and tokens per second."""

    program: str
    name: str
    model: Model
    card: str
    tokens: int
    measured: float
    sequence: int = 1024
    recomputed: bool = True
    waits_for_update: bool = False
    fitted: str = ""

    def predicted(self) -> float:
        """Tokens per second."""
        model, card, host = self.model, CARDS[self.card], HOSTS["desktop"]
        passes = 4 if self.recomputed else 3
        attended = 2 * self.sequence * model.hidden * model.layers * (passes - 2 + 2.5)
        operations = 2 * passes * model.layers * model.layer + 6 * model.hidden * model.vocab + attended
        of_layer, of_logit = MOVED["same"]
        moved = of_layer * passes * model.layers * model.layer / model.hidden + of_logit * model.vocab
        seconds = self.tokens * (operations / card.products + FUSED * moved / card.memory)
        if self.waits_for_update:
            seconds += model.weights * (28 + 2) / host.memory
        return self.tokens / seconds


LLMQ, FACTORY = "LLMQ (arXiv 2512.15306, benchmarks/ of its repository)", "LLaMA-Factory with DeepSpeed, there"
ZERO = "DeepSpeed ZeRO-3 offload with Liger (bench/ of SlideFormer's repository)"
HALF = 512 * 1024
ROWS = (
    Published(LLMQ, "Qwen2.5 7B", QWEN["7B"], "rtx4090", HALF, 2777, fitted="products of GeForce"),
    Published(LLMQ, "Qwen2.5 1.5B", QWEN["1.5B"], "rtx4090", HALF, 14070, recomputed=False, fitted="FUSED"),
    Published(LLMQ, "Qwen2.5 0.5B", QWEN["0.5B"], "rtx4090", HALF, 39842, recomputed=False),
    Published(LLMQ, "Qwen2.5 14B", QWEN["14B"], "rtx4090", HALF, 1349),
    Published(LLMQ, "Qwen2.5 7B", QWEN["7B"], "rtx5060ti", HALF, 889),
    Published(LLMQ, "Qwen2.5 7B", QWEN["7B"], "h100", HALF, 13863, recomputed=False, fitted="products of an H100"),
    Published(FACTORY, "Qwen2.5 7B, ZeRO-3 offload", QWEN["7B"], "rtx4090", HALF, 2523, waits_for_update=True),
    Published(FACTORY, "Qwen2.5 14B, ZeRO-3 offload", QWEN["14B"], "rtx4090", 520 * 1024, 1135, waits_for_update=True),
    Published(ZERO, "Llama 3.1 8B", LLAMA, "rtx4090", 8 * 1024, 913.6, waits_for_update=True),
    Published(ZERO, "Llama 3.1 8B", LLAMA, "rtx4090", 16 * 1024, 1372.9, waits_for_update=True),
    Published(ZERO, "Llama 3.1 8B", LLAMA, "rtx4090", 32 * 1024, 1790.9, waits_for_update=True),
)
MEASURED_HOST = Host("measured", 87e9 / REACHED["host"], 32 * 2**20, "docs/memory.md")
OURS = (  # memory, states, micro-batches of 2,048 tokens, seconds per step
    ("off", "exact", 1, 0.350),
    ("off", "exact", 8, 2.578),
    ("off", "8bit", 1, 0.726),
    ("off", "8bit", 8, 2.903),
    ("stream", "exact", 1, 5.432),
    ("stream", "exact", 8, 8.069),
    ("stream", "8bit", 1, 3.894),
    ("stream", "8bit", 8, 6.909),
)


def of_this_package(memory: str, states: str, count: int) -> float:
    """Seconds that the planner estimates for a row of docs/memory.md."""
    config = LlamaConfig(
        vocab_size=LLAMA.vocab, hidden_size=LLAMA.hidden, intermediate_size=LLAMA.ffn, num_hidden_layers=LLAMA.layers,
        num_attention_heads=LLAMA.heads, num_key_value_heads=LLAMA.kv_heads, max_position_embeddings=2048,
        tie_word_embeddings=False,
    )  # fmt: skip
    planner = Planner(
        config, sequence_length=2048, gradient_accumulation_steps=count, memory=memory, enable_predict=False,
        optimizer_states=states, accelerator="cuda",
    )  # fmt: skip
    # Two layers were resident, which at that time were updated by the host like all others.
    streamed = {"stream_embeddings": True, "resident_layers": 0, "offload_activations": True}
    setup = replace(planner.setup, autocast=True, **(streamed if memory == "stream" else {}))
    time = step_time(planner.plan(Way("measured", setup, "all", "bfloat16")), CARDS["h100"], MEASURED_HOST)
    if time is None:
        raise RuntimeError("A plan of one process has a time.")
    return time.seconds


KEY = ("memory", "states", "tokens")
"""Fields that tell the recorded steps of this package apart."""


def main() -> None:
    """Print the published trainings, and record the steps of this package for docs/evaluation/streaming_time.md."""
    args = command_line(__doc__, Path(__file__).parent).parse_args()
    results = Results(args.results, "own-steps", KEY)
    for row in ROWS:
        found = f"{row.measured:,.0f} tokens/s, predicted {row.predicted():,.0f}"
        print(f"{row.name}, {row.card}, {row.tokens:,} tokens: {found}")
    for memory, states, count, measured in OURS:
        estimated = of_this_package(memory, states, count)
        run = {"memory": memory, "states": states, "tokens": 2048 * count, "measured": measured}
        results.add({**run, "estimated": round(estimated, 4), **provenance()})
        print(f"{memory}, {states}, {2048 * count:,} tokens: {measured:.2f} s, estimated {estimated:.2f} s")


if __name__ == "__main__":
    main()
