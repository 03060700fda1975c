"""
What sealing costs a save: how much longer it takes because its files are hashed. Two minutes.

    python -m benchmarks.memory.saves                # 337 million parameters with AdamW's states, 3.8 GiB a save
    python -m benchmarks.memory.saves --hidden 32 --layers 2 --saves 40

Files are hashed while they are flushed to the disk. `waits` are the seconds from the end of the last flush to the end
of the last hash: so much longer does a save take because of hashing. `seconds` are of the whole save,
`hash_cpu_seconds` of the processor in all threads. Size and time grow linearly.
"""

from __future__ import annotations

import os
import shutil
import statistics
import tempfile
import time
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.results import Results, command_line, provenance
from hf_hybrid import HybridConfig, HybridTrainer
from hf_hybrid.saving import manifest


def trainer_of(hidden: int, layers: int, folder: Path) -> HybridTrainer:
    """A trainer that has made one step, so that the optimizer has its states."""
    shape = {"hidden_size": hidden, "intermediate_size": 4 * hidden, "num_hidden_layers": layers}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=256, num_attention_heads=8, **shape))
    config = HybridConfig(
        str(folder), enable_predict=False, max_steps=1, per_device_train_batch_size=1, save_strategy="no",
        report_to=[], disable_tqdm=True,
    )  # fmt: skip
    trainer = HybridTrainer(model, config, train_dataset=[{"input_ids": torch.arange(8), "labels": torch.arange(8)}])
    trainer.train()
    return trainer


def measure(trainer: HybridTrainer, saves: int) -> dict:
    """Save again and again, and return what was measured of each save."""
    ends, used = {"_flush": [], "_digest_of_block": []}, []

    def watched(name):
        work = getattr(manifest, name)

        def watching(path, *args):
            started = time.thread_time()
            found = work(path, *args)
            if path.is_file():
                ends[name].append(time.perf_counter())
            used.append(time.thread_time() - started if args else 0.0)
            return found

        return watching

    for name in ends:
        setattr(manifest, name, watched(name))
    rows = {"seconds": [], "waits": [], "hash_cpu_seconds": []}
    folder = Path(trainer.args.output_dir, "checkpoint-1")
    for _ in range(saves + 1):
        shutil.rmtree(folder, ignore_errors=True)
        os.sync()
        used.clear()
        for moments in ends.values():
            moments.clear()
        started = time.perf_counter()
        trainer._save_checkpoint(trainer.model, None)
        rows["seconds"].append(time.perf_counter() - started)
        rows["waits"].append(max(0.0, max(ends["_digest_of_block"]) - max(ends["_flush"])))
        rows["hash_cpu_seconds"].append(sum(used))
    size = sum(path.stat().st_size for path in folder.iterdir())
    rows = {name: values[1:] for name, values in rows.items()}  # the first one warms up
    return {"bytes": size, **rows, "share": sum(rows["waits"]) / sum(rows["seconds"])}


def main() -> None:
    parser = command_line(__doc__, Path(__file__).parent)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--layers", type=int, default=5)
    parser.add_argument("--saves", type=int, default=9)
    args = parser.parse_args()
    torch.set_num_threads(1)
    results = Results(args.results, "saves", ("parameters",))
    with tempfile.TemporaryDirectory(dir=".") as folder:
        trainer = trainer_of(args.hidden, args.layers, Path(folder))
        found = measure(trainer, args.saves)
    parameters = sum(parameter.numel() for parameter in trainer.model.parameters())
    row = results.add({"parameters": parameters, **found, **provenance(threads=1)})
    print(f"{parameters:,} parameters, {row['bytes'] / 2**30:.2f} GiB, share {row['share']:.4f}")
    for name in ("seconds", "waits", "hash_cpu_seconds"):
        print(name, round(statistics.median(row[name]), 4), [round(value, 4) for value in row[name]])


if __name__ == "__main__":
    main()
