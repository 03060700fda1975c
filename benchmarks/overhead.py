"""
What hybrid training costs when it gains nothing: CPU seconds against plain Trainer, side by side in one process.

    python benchmarks/overhead.py            # about ten minutes on two CPU cores
    python benchmarks/overhead.py --rounds 2 --steps 60

Arms, in turn in every round, each with a fresh model of the quickstart: `plain` Trainer; `disabled`
(`enable_predict=False`); `rejected` (every leap is turned uphill and refused by its probe: what is left is the price of
memory, signals and probes); `hybrid` (default options; a step that is predicted costs nothing). Quoted are medians over
the rounds of the ratio to the plain run of the same round. Also the bytes of the slow buffers, exact.

Writes `benchmarks/results/overhead.json`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

import acceleration
import torch
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.utils import logging

import hf_hybrid
from hf_hybrid.prediction.trajectory import Trajectory

RESULTS = Path(__file__).resolve().parent / "results"
ARMS = ("plain", "disabled", "rejected", "hybrid")


class Clock(TrainerCallback):
    """
    CPU seconds of this process from the end of the first step, which pays for lazy initialisation, to that of the last.

    With one thread they are the seconds of the run without those that other programs took from it.
    """

    def on_step_end(self, args, state, control, **kwargs):
        now = time.process_time()
        if state.global_step == 1:
            self.start = now
        self.seconds = now - self.start


class Uphill:
    """Turns every leap against its direction while it is entered."""

    def __enter__(self):
        self.original = Trajectory.leap
        Trajectory.leap = lambda trajectory, gain: self.original(trajectory, -1e6 * max(gain, 1e-6))

    def __exit__(self, *_):
        Trajectory.leap = self.original


def run(arm: str, worker: acceleration.Worker, steps: int, folder: str) -> tuple[float, dict]:
    data = worker.split("code")
    clock = Clock()
    values = {
        "output_dir": folder, "max_steps": steps, "learning_rate": 2e-3, "per_device_train_batch_size": 8,
        "save_strategy": "no", "report_to": "none", "disable_tqdm": True, "logging_steps": 10**9,
        "dataloader_pin_memory": False,
    }  # fmt: skip
    model = worker.model(acceleration.Run("code", arm, steps, 2e-3, 0))
    if arm == "plain":
        trainer = Trainer(model, TrainingArguments(**values), train_dataset=data["train"], callbacks=[clock])
        trainer.train()
        return clock.seconds, {}
    config = hf_hybrid.HybridConfig(**values, enable_predict=arm != "disabled")
    trainer = hf_hybrid.HybridTrainer(
        model, config, train_dataset=data["train"], probe_dataset=data["probe"], callbacks=[clock]
    )
    if arm == "rejected":
        with Uphill():
            trainer.train()
    else:
        trainer.train()
    return clock.seconds, trainer.hybrid_summary()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    logging.disable_progress_bar()
    worker = acceleration.Worker(args.threads)
    seconds: dict[str, list[float]] = {arm: [] for arm in ARMS}
    summaries = {}
    with tempfile.TemporaryDirectory() as folder:
        run("plain", worker, 20, folder)  # warm up caches and allocator
        for number in range(args.rounds):
            # Turn the order from round to round: a machine that slows down must not favour one arm.
            for arm in ARMS[number % len(ARMS) :] + ARMS[: number % len(ARMS)]:
                taken, summaries[arm] = run(arm, worker, args.steps, folder)
                seconds[arm].append(taken)
            ratios = {arm: seconds[arm][-1] / seconds["plain"][-1] for arm in ARMS[1:]}
            print(
                f"round {number + 1}: " + "  ".join(f"{arm} {ratio:.3f}" for arm, ratio in ratios.items()), flush=True
            )
    result = {
        "steps": args.steps,
        "rounds": args.rounds,
        "threads": args.threads,
        "torch": torch.__version__,
        "seconds_per_plain_step": statistics.median(seconds["plain"]) / (args.steps - 1),
        "seconds": seconds,
        "ratio_to_plain": {},
    }
    for arm in ARMS[1:]:
        ratios = sorted(a / b for a, b in zip(seconds[arm], seconds["plain"]))
        result["ratio_to_plain"][arm] = {
            "median": statistics.median(ratios),
            "least": ratios[0],
            "most": ratios[-1],
            "of_totals": sum(seconds[arm]) / sum(seconds["plain"]),
        }
        print(f"{arm:9s} {result['ratio_to_plain'][arm]}")
    rejected = summaries["rejected"]
    result["rejected"] = {key: rejected[key] for key in ("leaps_by_verdict", "probe_cost_steps", "roll_backs")}
    result["hybrid"] = {key: summaries["hybrid"][key] for key in ("steps_by_phase", "leaps_by_verdict")}
    result["buffer_bytes"] = summaries["hybrid"]["buffer_bytes"]
    print(json.dumps({key: result[key] for key in ("rejected", "hybrid", "buffer_bytes")}))
    (RESULTS / "overhead.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
