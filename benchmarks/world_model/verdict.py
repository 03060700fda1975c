"""
The verdict on the world model, on fresh runs: who forecasts the final loss best, and whose leaps end lower.

    python -m benchmarks.world_model.verdict               # 20 runs with each planner; five minutes of CPU
    python -m benchmarks.world_model.verdict --runs 2      # a try

A run trains a tiny Llama from scratch on the source of Python's standard library; rate, schedule, length and batch
follow from its index. With `planner="dynamics"` the RSSM that the package ships observes the run, and forecasts its
final loss at 10, 20 and 50 % of the steps, beside the last losses (`persistence`), past curves, laws, and both, which
is what the package logs. A score is the CRPS in nats, of a point its absolute error. `over_schedule` is the final
held-out loss over that of the same run with `planner="schedule"`, minus 1, with its standard error over runs.
"""

from __future__ import annotations

import copy
import json
import math
import random
import statistics
import tempfile
from pathlib import Path

import numpy as np
import torch
from datasets import Dataset
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.results import Results, command_line, provenance
from benchmarks.texts import standard_library
from hf_hybrid import HybridConfig, HybridTrainer, Part
from hf_hybrid.experimental.dynamics import FREEDOM
from hf_hybrid.forecast.final_loss import (
    PRIOR,
    final_steps,
    forecast_final_loss,
    forecast_of_laws,
    forecast_of_past_curves,
    looks,
    observed,
)
from hf_hybrid.forecast.run_forecast import schedule_of
from hf_hybrid.leaps.leap import Leaps

SHARES = (0.1, 0.2, 0.5)
PLANNERS = ("schedule", "dynamics")
DRAWS = 2000
LENGTH, HELD_OUT = 64, 256


class AsksTheWorldModel(Part):
    """Asks the planner of a run for the final loss, as samples, once a share of the steps is done."""

    def begin(self, run) -> None:
        self.run, self.samples = run, {}

    def decide(self, step) -> None:
        share = next((share for share in SHARES if step.index + 1 == round(share * self.run.max_steps)), None)
        planner = next(part for part in self.run.parts if isinstance(part, Leaps)).gains
        if share is None or not planner.choices:
            return
        now, stretch = planner.choices[-1]["progress"], planner.stretch_share
        ends = [min(now + (k + 1) * stretch, 1.0) for k in range(math.ceil((1 - now) / stretch - 1e-6))]
        actions = [[planner.gain(end), 0.0, end, planner.rate_at(end)] for end in ends]
        dynamics = copy.deepcopy(planner.dynamics)  # its forecasts calibrate it
        ahead = dynamics.forecast(actions)
        drawn = ahead.mean[-1] + ahead.scale[-1] * np.random.default_rng(0).standard_t(FREEDOM, DRAWS)
        self.samples[share] = np.exp(dynamics.history.log_losses[-1] + drawn)


def crps(samples: np.ndarray, came: float) -> float:
    """How far samples of a forecast are from what came, less half of how far they are from each other."""
    ordered, count = np.sort(samples), len(samples)
    spread = (ordered * (2 * np.arange(count) - count + 1)).sum() / count**2
    return float(np.abs(samples - came).mean() - spread)


def drawn(parts) -> np.ndarray:
    """Samples of a mixture of Gaussians: weights, means and deviations."""
    weights, means, deviations = map(np.asarray, parts)
    rng = np.random.default_rng(0)
    chosen = rng.choice(len(weights), DRAWS, p=weights / weights.sum())
    return rng.normal(means[chosen], deviations[chosen])


def rows_of(index: int, steps: int, batch: int) -> tuple[Dataset, Dataset]:
    text = "\n".join(source for _, source in standard_library()).encode()
    blocks = np.frombuffer(text, np.uint8)[: len(text) // LENGTH * LENGTH].reshape(-1, LENGTH).astype(np.int64)
    rows = blocks[np.random.default_rng(index).permutation(len(blocks))[: HELD_OUT + steps * batch]]
    held_out, train = ({"input_ids": part.tolist(), "labels": part.tolist()} for part in np.split(rows, [HELD_OUT]))
    return Dataset.from_dict(train), Dataset.from_dict(held_out)


def train(index: int, planner: str) -> tuple[float, dict[float, dict[str, float]]]:
    """Train, and return the held-out loss at the end, and with the world model what [`scores_of`] returns."""
    rng = random.Random(index)
    steps, batch = rng.choice((200, 300, 400)), rng.choice((4, 8))
    schedule, rate = rng.choice(("linear", "cosine", "constant")), 6e-3 * 10 ** rng.uniform(-1.0, 0.3)
    torch.manual_seed(index)
    sizes = {"hidden_size": 48, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=256, max_position_embeddings=LENGTH, **sizes))
    data, held_out = rows_of(index, steps, batch)
    asks = AsksTheWorldModel() if planner == "dynamics" else None
    with tempfile.TemporaryDirectory() as folder:
        config = HybridConfig(
            folder, max_steps=steps, per_device_train_batch_size=batch, learning_rate=rate, lr_scheduler_type=schedule,
            planner=planner, direction="orthogonal", auto_lr="off", logging_steps=1, seed=index, use_cpu=True,
            save_strategy="no", report_to="none", disable_tqdm=True,
        )  # fmt: skip
        parts = [] if asks is None else [asks]
        trainer = HybridTrainer(model, config, train_dataset=data, eval_dataset=held_out, parts=parts)
        trainer.train()
        return trainer.evaluate()["eval_loss"], {} if asks is None else scores_of(trainer, asks)


def scores_of(trainer: HybridTrainer, asks: AsksTheWorldModel) -> dict[float, dict[str, float]]:
    """The CRPS of all forecasts of one run, by the share of it that they have seen."""
    steps, found = trainer.state.max_steps, {}
    logs = [(entry["step"], entry["loss"]) for entry in trainer.state.log_history if "loss" in entry]
    came = statistics.fmean(loss for step, loss in logs if step > steps - final_steps(steps))
    rates = schedule_of(trainer.lr_scheduler, steps)
    for share, samples in asks.samples.items():
        known = list(zip(*((step, loss) for step, loss in logs if step <= share * steps)))
        seen, both = observed(*known, rates, steps), forecast_final_loss(*known, rates, steps)
        past = forecast_of_past_curves("training", seen.share, looks(seen), seen.level)
        found[share] = {
            "persistence": abs(seen.level - came),
            "past curves": crps(drawn(past), came),
            "laws": crps(drawn(forecast_of_laws(seen, PRIOR)), came),
            "both": crps(drawn((both.weights, both.means, both.deviations)), came),
            "world model": crps(samples, came),
        }
    return found


def main() -> None:
    parser = command_line(__doc__, Path(__file__).resolve().parent)
    parser.add_argument("--runs", type=int, default=20, help="Fresh runs, each with every planner.")
    args = parser.parse_args()
    torch.set_num_threads(1)
    runs = [{planner: train(index, planner) for planner in PLANNERS} for index in range(args.runs)]
    row = {"runs": args.runs, "crps": {}, "over_schedule": {}}
    for share in SHARES:
        some = [scores[share] for scores in (run["dynamics"][1] for run in runs) if share in scores]
        row["crps"][f"{share:.0%}"] = {name: round(statistics.fmean(s[name] for s in some), 4) for name in some[0]}
    for planner in PLANNERS[1:]:
        values = [run[planner][0] / run["schedule"][0] - 1 for run in runs]
        error = statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else math.nan
        row["over_schedule"][planner] = [round(statistics.fmean(values), 4), round(error, 4)]
    print(json.dumps(Results(args.results, "verdict", ()).add({**row, **provenance(1)}), indent=1))


if __name__ == "__main__":
    main()
