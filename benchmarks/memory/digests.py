"""
What digests cost a step and a save: seconds in the hooks that make them, beside those of the step and of the save.

    python -m benchmarks.memory.digests              # 27.7 million parameters with AdamW's states; a minute

`step_seconds` and `step_hooks` are of steps of 4 x 128 tokens, `save_seconds` and `save_hooks` of whole saves of one
process, which are written at once (`async_save=False`): behind the steps a save would seem shorter than it is.
`hashing` are saves that hash weights and states in memory too, as each of several processes does: `hashing_hooks` is
how long the save waits for it, `hashing_cpu_seconds` what the thread takes.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.results import Results, command_line, provenance
from hf_hybrid import HybridConfig, HybridTrainer
from hf_hybrid.saving import drift


class Timed(drift.Digests):
    """Adds up the seconds in its hooks."""

    def __init__(self, trainer, *, hashes: bool):
        super().__init__(trainer)
        self.hashes, self.in_steps, self.in_saves = hashes, [], []

    def _time(self, to: list[float], hook, *args) -> None:
        started = time.perf_counter()
        hook(*args)
        to.append(time.perf_counter() - started)

    def begin_step(self, step) -> None:
        self._time(self.in_steps, super().begin_step, step)

    def decide(self, step) -> None:
        self._time(self.in_steps, super().decide, step)

    def before_save(self) -> None:
        self._time(self.in_saves, self._begin_to_hash if self.hashes else super().before_save)

    def before_seal(self, step: int) -> None:
        self._time(self.in_saves, super().before_seal, step)

    def after_seal(self, step: int, files: dict) -> None:
        self._time(self.in_saves, super().after_seal, step, files)


def measure(folder: Path, saves: int, *, hashes: bool) -> dict[str, list[float]]:
    """Train with a save after each step, and return seconds by step and by save."""
    shape = {"hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 6, "vocab_size": 8192}
    model = LlamaForCausalLM(LlamaConfig(num_attention_heads=8, num_key_value_heads=8, **shape))
    rows = torch.randint(8192, (256, 128), generator=torch.Generator().manual_seed(0))
    config = HybridConfig(
        str(folder), enable_predict=False, max_steps=saves + 1, per_device_train_batch_size=4, save_steps=1,
        save_total_limit=1, report_to=[], disable_tqdm=True, logging_steps=1000, use_cpu=True, digest_steps=0,
        async_save=False,
    )  # fmt: skip
    trainer = HybridTrainer(model, config, train_dataset=[{"input_ids": row, "labels": row} for row in rows])
    timed, save, seconds = Timed(trainer, hashes=hashes), trainer._save_checkpoint, []
    trainer.parts.append(timed)

    def saving(*args) -> None:
        timed._time(seconds, save, *args)

    trainer._save_checkpoint = saving
    started = time.perf_counter()
    trainer.train()
    count = saves + 1
    hooks = [sum(timed.in_saves[3 * n : 3 * n + 3]) for n in range(1, count)]  # the first one warms up
    steps = [sum(timed.in_steps[2 * n : 2 * n + 2]) for n in range(1, count)]
    in_step = (time.perf_counter() - started - sum(seconds)) / count
    return {"saves": seconds[1:], "save_hooks": hooks, "step_hooks": steps, "step": [in_step]}


def main() -> None:
    parser = command_line(__doc__, Path(__file__).parent)
    parser.add_argument("--saves", type=int, default=9)
    args = parser.parse_args()
    torch.set_num_threads(1)
    results, used = Results(args.results, "digests", ("parameters",)), []
    on_host = drift.hash_on_host

    def watched(tensor):
        started = time.thread_time()
        found = on_host(tensor)
        used.append(time.thread_time() - started)
        return found

    with tempfile.TemporaryDirectory(dir=".") as folder:
        one = measure(Path(folder, "one"), args.saves, hashes=False)
        drift.hash_on_host = watched
        several = measure(Path(folder, "several"), args.saves, hashes=True)
        drift.hash_on_host = on_host
    row = {
        "parameters": 27_700_000,
        "step_seconds": one["step"][0],
        "step_hooks": one["step_hooks"],
        "save_seconds": one["saves"],
        "save_hooks": one["save_hooks"],
        "hashing_save_seconds": several["saves"],
        "hashing_hooks": several["save_hooks"],
        "hashing_cpu_seconds": sum(used) / (args.saves + 1),
    }
    results.add({**row, **provenance(threads=1)})
    median = statistics.median
    print(f"step {row['step_seconds']:.3f} s, of it digests {median(row['step_hooks']) / row['step_seconds']:.5f}")
    print(f"save {median(one['saves']):.3f} s, of it digests {median(one['save_hooks']) / median(one['saves']):.5f}")
    waits, whole = median(several["save_hooks"]), median(several["saves"])
    print(f"save {whole:.3f} s with hashing, of it {waits / whole:.4f}; thread {row['hashing_cpu_seconds']:.3f} s")


if __name__ == "__main__":
    main()
