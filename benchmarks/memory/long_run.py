"""
What grows over a long run: memory, checkpoints, the time of a save, the report. A quarter of an hour on an idle core.

    python -m benchmarks.memory.long_run

A bigram model of 545 weights makes 200,000 steps with leaps and everything at its default except the learning rate. At
step 2,000 and at the last one it is saved nine times: `save_seconds` and `save_cpu_seconds` are medians. `files` has
the bytes of each file of a checkpoint. Trainer's own history of the log, one entry per `logging_steps`, lies in
`trainer_state.json` and grows with every trainer: `without_history` has the times without it. At the end a report is
made.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path

import psutil
import torch
from torch import nn
from transformers import TrainerCallback

from benchmarks.results import Results, command_line, provenance
from hf_hybrid import HybridConfig, HybridTrainer
from hf_hybrid.report.page import write_report

FIRST, SAVES, LETTERS = 2000, 9, 32


class Bigram(nn.Module):
    """Predicts a letter from the one before."""

    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(LETTERS, 8), nn.Linear(8, LETTERS)

    def forward(self, input_ids, labels):
        logits = self.head(self.embedding(input_ids[:, :-1]))
        return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten()), "logits": logits}


class Rows(torch.utils.data.Dataset):
    """Sequences of eight letters that follow each other more or less."""

    def __init__(self, count: int):
        generator = torch.Generator().manual_seed(0)
        steps = torch.randint(3, (count, 8), generator=generator)
        self.rows = (torch.randint(LETTERS, (count, 1), generator=generator) + steps.cumsum(1)) % LETTERS

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


class Watch(TrainerCallback):
    """Measures at the first and at the last step."""

    def __init__(self, last: int):
        self.last, self.found, self.trainer = last, {}, None

    def on_step_end(self, args, state, control, **kwargs):
        control.should_save = state.global_step in (FIRST, self.last)

    def on_save(self, args, state, control, **kwargs):
        folder, history = Path(args.output_dir, f"checkpoint-{state.global_step}"), state.log_history
        state.log_history = []
        without = self._save()
        state.log_history = history
        self.found[state.global_step] = {
            "rss": psutil.Process().memory_info().rss,
            **self._save(),
            "without_history": without,
            "files": {path.name: path.stat().st_size for path in sorted(folder.iterdir())},
        }

    def _save(self) -> dict[str, float]:
        wall, cpu = [], []
        for _ in range(SAVES):
            started, used = time.perf_counter(), time.process_time()
            self.trainer._save_checkpoint(self.trainer.model, None)
            wall.append(time.perf_counter() - started)
            cpu.append(time.process_time() - used)
        return {"save_seconds": statistics.median(wall), "save_cpu_seconds": statistics.median(cpu)}


def measure(steps: int, folder: Path) -> dict:
    """Train, and return what was measured."""
    watch = Watch(steps)
    config = HybridConfig(
        str(folder), max_steps=steps, learning_rate=1e-2, per_device_train_batch_size=1, save_strategy="no",
        report_to=[], disable_tqdm=True,
    )  # fmt: skip
    torch.manual_seed(0)
    watch.trainer = HybridTrainer(Bigram(), config, train_dataset=Rows(4096), callbacks=[watch])
    seconds = watch.trainer.train().metrics["train_runtime"]
    started, used = time.perf_counter(), time.process_time()
    files = write_report(folder)
    report = {
        "seconds": time.perf_counter() - started,
        "cpu_seconds": time.process_time() - used,
        "bytes": sum(file.stat().st_size for file in files),
    }
    summary = watch.trainer.hybrid_summary()
    return {
        "leaps": summary["leaps_made"],
        "train_seconds": seconds,
        "at": watch.found,
        "report": report,
        "log_bytes": (folder / "hybrid_log.jsonl").stat().st_size,
    }


def main() -> None:
    parser = command_line(__doc__, Path(__file__).parent)
    parser.add_argument("--steps", type=int, default=200_000)
    args = parser.parse_args()
    torch.set_num_threads(1)
    results = Results(args.results, "long_run", ("steps",))
    with tempfile.TemporaryDirectory() as folder:
        found = measure(args.steps, Path(folder))
    row = results.add({"steps": args.steps, **found, **provenance(threads=1)})
    for name in ("at", "report"):
        print(name, row[name])


if __name__ == "__main__":
    main()
