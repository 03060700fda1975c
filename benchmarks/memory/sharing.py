"""
Two processes train a model that does not fit on their devices: FSDP2 with CPU offload, or each streams its own copy.

    python -m benchmarks.memory.sharing              # two processes on the CPU; a minute

Streaming takes one process. Here two of them stream at the same time, each its own copy and batch, and what they would
need beside that to train one model is measured alone: an all-reduce of all gradients, which lie on the host.

- `host_bytes`: weights, gradients and states that a process holds on the host.
- `device_copies`: bytes that a process copies to a device and back per step. FSDP2 copies its rows before each forward
  and backward pass, and the rows of the gradients (counted from the sizes); streaming copies all layers (as it counts).
- `sent_bytes`: what a process sends per step, counted from the sizes: (N - 1) / N of what is gathered for forward and
  backward passes and of the gradients, or twice that share of the gradients for an all-reduce.
- `cpu_seconds`, `seconds`: of a step, the median, by processor time of the process and by the clock.
"""

from __future__ import annotations

import json
import os
import statistics
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as distributed
from rig import fsdp2_on_cpu
from rig.processes import together
from transformers import LlamaConfig, LlamaForCausalLM, TrainerCallback

from benchmarks.results import Results, command_line, provenance
from hf_hybrid import HybridConfig, HybridTrainer

PROCESSES, ROWS, TOKENS = 2, 4, 128


class Clock(TrainerCallback):
    """Times each step."""

    def __init__(self):
        self.seconds, self.cpu_seconds = [], []

    def on_step_begin(self, args, state, control, **kwargs):
        self.began = time.perf_counter(), time.process_time()

    def on_step_end(self, args, state, control, **kwargs):
        self.seconds.append(time.perf_counter() - self.began[0])
        self.cpu_seconds.append(time.process_time() - self.began[1])


def train(folder: Path, steps: int, shape: dict, **options) -> tuple[HybridTrainer, dict]:
    """Train, and return what was measured."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**shape))
    rows = torch.randint(shape["vocab_size"], (4 * ROWS, TOKENS), generator=torch.Generator().manual_seed(0))
    config = HybridConfig(
        str(folder), enable_predict=False, max_steps=steps, per_device_train_batch_size=ROWS, save_strategy="no",
        report_to=[], disable_tqdm=True, use_cpu=True, logging_steps=steps, **options,
    )  # fmt: skip
    config.plan_values = {"stream_embeddings": True if config.memory == "stream" else None}
    clock = Clock()
    data = [{"input_ids": row, "labels": row} for row in rows]
    trainer = HybridTrainer(model, config, train_dataset=data, callbacks=[clock])
    trainer.train()
    times = {name: statistics.median(getattr(clock, name)[2:]) for name in ("seconds", "cpu_seconds")}
    return trainer, times


def offloaded(folder: Path, steps: int, shape: dict) -> dict:
    """FSDP2 with CPU offload, layers recomputed as streamed ones are."""
    fsdp2_on_cpu.enable()
    sharding = {"cpu_offload": True, "activation_checkpointing": True}
    trainer, found = train(folder, steps, shape, fsdp=True, fsdp_config=sharding)
    whole = 4 * sum(parameter.numel() for parameter in trainer.model.parameters())
    held = trainer.memory_summary()["held"]
    rows = whole / PROCESSES
    return {
        **found,
        "host_bytes": sum(held[name]["host"] for name in ("weights", "states")) + rows,  # gradients are gone
        "device_copies": 3 * rows,
        "sent_bytes": 3 * (PROCESSES - 1) / PROCESSES * whole,
    }


def streamed(folder: Path, steps: int, shape: dict) -> dict:
    """Each process adds up as many numbers as there are gradients with the others, and then streams its own copy."""
    distributed.init_process_group("gloo")
    gradients = [torch.ones(p.numel()) for p in LlamaForCausalLM(LlamaConfig(**shape)).parameters()]
    rank, times = distributed.get_rank(), []
    for _ in range(5):
        started = time.perf_counter(), time.process_time()
        for gradient in gradients:
            distributed.all_reduce(gradient)
        times.append((time.perf_counter() - started[0], time.process_time() - started[1]))
    reduce_seconds, reduce_cpu_seconds = (statistics.median(values) for values in zip(*times))
    whole = sum(gradient.nbytes for gradient in gradients)
    del gradients
    distributed.destroy_process_group()
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        del os.environ[name]
    trainer, found = train(folder / str(rank), steps, shape, memory="stream")
    summary = trainer.memory_summary()
    moved = summary["statistics"]["bytes_in"] + summary["statistics"]["bytes_out"]
    return {
        "seconds": found["seconds"] + reduce_seconds,
        "cpu_seconds": found["cpu_seconds"] + reduce_cpu_seconds,
        "reduce_cpu_seconds": reduce_cpu_seconds,
        "host_bytes": sum(summary["held"][name]["host"] for name in ("weights", "gradients", "states")),
        "device_copies": moved / steps,
        "sent_bytes": 2 * (PROCESSES - 1) / PROCESSES * whole,
    }


MODES = {"fsdp2_offload": offloaded, "streamed": streamed}


def measure(mode: str, steps: int, shape: dict) -> dict:
    """Return what the first of the processes found."""
    with tempfile.TemporaryDirectory(dir=".") as folder:
        file = Path(folder, "found.json")

        def work() -> None:
            first = os.environ["RANK"] == "0"
            found = MODES[mode](Path(folder), steps, shape)
            if first:
                file.write_text(json.dumps(found))

        if together(PROCESSES, work) != [0] * PROCESSES:
            raise RuntimeError(f"A process of `{mode}` failed.")
        return json.loads(file.read_text())


def main() -> None:
    parser = command_line(__doc__, Path(__file__).parent)
    parser.add_argument("--hidden", type=int, default=384)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--steps", type=int, default=6)
    args = parser.parse_args()
    torch.set_num_threads(1)
    shape = {
        "vocab_size": 4096, "hidden_size": args.hidden, "intermediate_size": 4 * args.hidden,
        "num_hidden_layers": args.layers, "num_attention_heads": 12, "max_position_embeddings": TOKENS,
    }  # fmt: skip
    parameters = sum(p.numel() for p in LlamaForCausalLM(LlamaConfig(**shape)).parameters())
    results = Results(args.results, "sharing", ("mode", "parameters"))
    for mode in MODES:
        found = measure(mode, args.steps, shape)
        row = {"mode": mode, "parameters": parameters, "processes": PROCESSES, "tokens": ROWS * TOKENS, **found}
        print(results.add({**row, **provenance(threads=1)}))


if __name__ == "__main__":
    main()
