"""
Profile the memory of a small run by phase with MemoryProfilerCallback (half a minute on two idle CPU cores).

    python examples/05_profile_memory.py
    python examples/05_profile_memory.py --memory stream
    python examples/05_profile_memory.py --enable_predict False --optim sgd

Nothing is downloaded. The model is built from a config, and the text comes with Python. Every option of HybridConfig is
a flag. The files of the run are in `out/profile/profile`. docs/profiling.md describes them, and
`hf-hybrid report out/profile` draws them.
"""

from __future__ import annotations

from pydoc_data import topics

from hf_hybrid.cli.console import quiet_imports

with quiet_imports():
    import torch
    from torch.utils.data import TensorDataset
    from transformers import HfArgumentParser, LlamaConfig, LlamaForCausalLM, set_seed

    from hf_hybrid import HybridConfig, HybridTrainer, MemoryProfilerCallback


def byte_blocks(length: int) -> TensorDataset:
    """Cut English text into blocks of bytes."""
    text = "".join(topics.topics[name] for name in sorted(topics.topics)).encode()
    blocks = torch.frombuffer(bytearray(text), dtype=torch.uint8)[: len(text) // length * length]
    return TensorDataset(blocks.view(-1, length).long())


def collate(rows: list[tuple[torch.Tensor]]) -> dict[str, torch.Tensor]:
    ids = torch.stack([row for (row,) in rows])
    return {"input_ids": ids, "labels": ids}


def main() -> None:
    parser = HfArgumentParser(HybridConfig)
    parser.set_defaults(
        output_dir="out/profile",
        max_steps=60,
        warmup_phase_steps=10,
        full_phase_steps=8,
        leap_worth=0.5,
        learning_rate=5e-4,
        logging_steps=10,
        save_strategy="no",
        report_to="none",
        dataloader_pin_memory=False,
    )
    (args,) = parser.parse_args_into_dataclasses()
    set_seed(args.seed)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=256,
            hidden_size=256,
            intermediate_size=1024,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=4,
            max_position_embeddings=128,
        )
    )
    profiler = MemoryProfilerCallback()
    trainer = HybridTrainer(model, args, train_dataset=byte_blocks(64), data_collator=collate, callbacks=[profiler])
    trainer.train()
    summary = profiler.summary()
    for phase, readings in summary["phases"].items():
        peak = readings["peak_rss"]
        print(f"{phase:<8} {readings['records']:>3} records, peak {peak['mean'] / 2**20:.0f} MiB on average")
    print(f"The profiler took {summary['own_seconds'] / summary['seconds']:.2%} of the training time.")


if __name__ == "__main__":
    main()
