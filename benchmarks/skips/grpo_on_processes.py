"""
CPU seconds of GRPO on two sharded processes on the CPU, with and without the rows that have no advantage.

    python -m benchmarks.skips.grpo_on_processes    # ten minutes; one thread each
    python -m benchmarks.skips.grpo_on_processes --sharding zero3    # pip install deepspeed; compiles for a minute

The model, prompts and rewards are those of grpo.py. Half of the prompts are so easy that their rows have no advantage.
TRL's trainer, ours that computes every row (`exact_skips="off"`) and ours train in turn, from the same weights and
seeds. Seconds are those of both processes, of all steps but the first, and those of their generation apart. Beside them
stand the largest difference between weights at the end and those of TRL's trainer (SGD), and the share of the rows that
was left out.
"""

from __future__ import annotations

import json
import os
import statistics
import tempfile
import time
from pathlib import Path

import torch
from rig import deepspeed_on_cpu, fsdp2_on_cpu
from rig.processes import together
from transformers import TrainerCallback

from benchmarks.results import Results, command_line, provenance
from benchmarks.skips.grpo import UpdateClock, trainer_of

PROCESSES, SHARE = 2, 0.5
AS_SET = {"share_rows": "auto"}  # their default
ARMS = {"trl": ("trl", {}), "every_row": ("hybrid", {**AS_SET, "exact_skips": "off"}), "hybrid": ("hybrid", AS_SET)}


class AfterFirst(TrainerCallback):
    """Notes the seconds that the process and the generation have taken at the end of each step."""

    def __init__(self, trainer):
        self.clock, self.noted = UpdateClock(trainer), []

    def on_step_end(self, args, state, control, **kwargs):
        self.noted.append((time.process_time(), self.clock.generation))

    @property
    def seconds(self) -> tuple[float, float]:
        (first, of_first), (last, of_last) = self.noted[0], self.noted[-1]
        return last - first, of_last - of_first


def measure(arm: str, folder: Path, steps: int, tokens: int, sharding: str) -> None:
    """Train in one of the processes, and write down what it measured."""
    kind, options = ARMS[arm]
    if sharding == "fsdp2":
        fsdp2_on_cpu.enable()
        options = {**options, "fsdp": True}
    elif sharding != "ddp":
        deepspeed_on_cpu.enable()
        options = {**options, "deepspeed": deepspeed_on_cpu.options(stage=int(sharding[-1]))}
    trainer = trainer_of(kind, SHARE, steps, tokens, folder / "run", **options)
    trainer.add_callback(after_first := AfterFirst(trainer))
    trainer.train()
    summary = trainer.hybrid_summary() if kind == "hybrid" else {}
    weights, rank = trainer.accelerator.get_state_dict(trainer.model_wrapped), os.environ["RANK"]
    found = dict(zip(("seconds", "generation"), after_first.seconds))
    found |= {name: summary.get(name) for name in ("rows", "rows_skipped", "rows_decoded_saved")}
    (folder / f"{rank}.json").write_text(json.dumps(found))
    if rank == "0":
        torch.save(weights, folder / "weights.pt")


def run(arm: str, *options) -> tuple[dict[str, float], dict[str, torch.Tensor]]:
    """Return the sums of what both processes measured, and the weights."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if together(PROCESSES, lambda: measure(arm, folder, *options)) != [0] * PROCESSES:
            raise RuntimeError(f"A process of `{arm}` failed.")
        both = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(PROCESSES)]
        found = {name: sum(of[name] or 0 for of in both) for name in both[0]}
        return found, torch.load(folder / "weights.pt")


def main() -> None:
    parser = command_line(__doc__, Path(__file__).parent)
    parser.add_argument("--steps", type=int, default=3, help="Steps of a run.")
    parser.add_argument("--rounds", type=int, default=3, help="Runs of each trainer.")
    parser.add_argument("--tokens", type=int, default=64, help="Length of a completion.")
    parser.add_argument("--sharding", default="fsdp2", choices=("fsdp2", "ddp", "zero2", "zero3"))
    args = parser.parse_args()
    torch.set_num_threads(1)
    results = Results(args.results, "grpo_on_processes", ("sharding", "steps", "tokens"))
    found, weights = {arm: [] for arm in ARMS}, {}
    for number in range(args.rounds):
        for arm in sorted(ARMS, reverse=bool(number % 2)):
            of_run, weights[arm] = run(arm, args.steps, args.tokens, args.sharding)
            found[arm].append(of_run)
            print(arm, of_run, flush=True)
    ours, theirs = found["hybrid"], weights["trl"]
    row = {
        **provenance(1),
        "sharding": args.sharding,
        "steps": args.steps,
        "tokens": args.tokens,
        "rows": ours[0]["rows"],
        "rows_skipped": ours[0]["rows_skipped"],
        "seconds": {arm: [of["seconds"] for of in runs] for arm, runs in found.items()},
        "generation": {arm: [of["generation"] for of in runs] for arm, runs in found.items()},
        "share": {
            arm: statistics.median(our["seconds"] / of["seconds"] for our, of in zip(ours, runs))
            for arm, runs in found.items()
            if arm != "hybrid"
        },
        "largest_difference": {
            arm: max((theirs[name] - weights[arm][name]).abs().max().item() for name in theirs)
            for arm in ("every_row", "hybrid")
        },
    }
    print(results.add(row))


if __name__ == "__main__":
    main()
