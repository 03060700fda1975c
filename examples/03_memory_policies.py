"""
Train the same model with its memory in different places, and compare the results (under a minute on two idle CPU
cores).

    python examples/03_memory_policies.py
    python examples/03_memory_policies.py --layers 12 --width 256 --ways resident streamed half_resident
    python examples/03_memory_policies.py --enable_predict True

Nothing is downloaded. Each way trains the same model on the same batches. The table shows the bytes held on device and
host at the end of the last step, the seconds per step, and the largest difference between the final weights and those
of the first way. On a CPU, "device" and "host" are the same memory. Bytes and equality should carry over to a GPU, but
times do not. docs/memory.md describes the options. Every other option of HybridConfig is a flag.
"""

from __future__ import annotations

import importlib.util
import runpy
import time
from dataclasses import dataclass, field, replace
from pathlib import Path

from hf_hybrid.cli.console import quiet_imports

with quiet_imports():
    import torch
    from transformers import HfArgumentParser

    from hf_hybrid import HybridConfig, HybridTrainer

compare = runpy.run_path(str(Path(__file__).with_name("02_compare_with_trainer.py")))

STREAMED = {"memory": "stream", "resident_layers": 0}
WAYS = {
    "resident": {},
    "checkpointed": {"activation_checkpointing": True},
    "streamed": STREAMED,
    "half_resident": {"memory": "stream", "resident_layers": "half"},
    "micro_batch": {**STREAMED, "accumulation_walk": "micro_batch"},
    "activations": {**STREAMED, "offload_activations": True},
    "embeddings": {**STREAMED, "stream_embeddings": True},
    "8bit": {**STREAMED, "optimizer_states": "8bit"},
}


@dataclass
class ScriptArguments:
    ways: list[str] = field(
        default_factory=lambda: [way for way in WAYS if way != "8bit" or importlib.util.find_spec("bitsandbytes")],
        metadata={"help": f"Among {', '.join(WAYS)} (8bit needs bitsandbytes)."},
    )
    layers: int = field(default=8, metadata={"help": "Decoder layers of the model."})
    width: int = field(default=128, metadata={"help": "Hidden size of the model."})

    def __post_init__(self):
        unknown = sorted(set(self.ways) - set(WAYS))
        if unknown or not self.ways:
            raise ValueError(f"`ways` must be among {', '.join(WAYS)}, got `{' '.join(unknown) or self.ways}`.")


def train(way: str, script: ScriptArguments, args: HybridConfig) -> tuple[dict[str, torch.Tensor], str]:
    """Run one way, and return its weights and its line of the table."""
    options = dict(WAYS[way])
    if options.get("resident_layers") == "half":
        options["resident_layers"] = script.layers // 2
    # No option: a plan decides it, unless it is decided here.
    plan_values = {name: options.pop(name) for name in ("stream_embeddings",) if name in options}
    train_set, _ = compare["byte_blocks"](64)
    config = replace(args, output_dir=f"{args.output_dir}/{way}", **options)
    config.plan_values = plan_values
    trainer = HybridTrainer(
        compare["small_llama"](args.seed, script.layers, script.width),
        config,
        train_dataset=train_set,
        data_collator=compare["collate"],
    )
    began = time.perf_counter()
    trainer.train()
    seconds = (time.perf_counter() - began) / args.max_steps
    held = trainer.memory_summary()["held"]["total"]
    device, host = held["device"] / 2**20, held["host"] / 2**20
    if not trainer.memory.streams:
        device, host = device + host, 0.0  # on a CPU, where the two are the same memory
    weights = {name: parameter.detach().float() for name, parameter in trainer.model.named_parameters()}
    return weights, f"{way:13s} {device:8.2f} {host:8.2f} {seconds:8.3f}"


def difference(weights: dict[str, torch.Tensor], first: dict[str, torch.Tensor]) -> str:
    if all(torch.equal(weights[name], first[name]) for name in first):
        return "none, to the last bit"
    return f"{max((weights[name] - first[name]).abs().max().item() for name in first):.1e}"


def main() -> None:
    parser = HfArgumentParser((ScriptArguments, HybridConfig))
    parser.set_defaults(
        output_dir="out/memory_policies", enable_predict=False, max_steps=6, learning_rate=1e-3,
        per_device_train_batch_size=2, gradient_accumulation_steps=4, max_grad_norm=0.5, save_strategy="no",
        report_to="none", disable_tqdm=True, logging_strategy="no", dataloader_pin_memory=False,
    )  # fmt: skip
    script, args = parser.parse_args_into_dataclasses()
    print("way           device     host  seconds  largest difference of a weight")
    print("                 MiB      MiB  per step")
    first = None
    for way in script.ways:
        weights, line = train(way, script, args)
        first = weights if first is None else first
        print(f"{line}  {difference(weights, first)}", flush=True)


if __name__ == "__main__":
    main()
