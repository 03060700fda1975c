"""
How well the world model of training forecasts runs that it has not seen, and what it costs.

    python -m benchmarks.world_model.forecast                # all held-out runs of recordings/

Every held-out run is replayed causally, stretch by stretch (10 real steps), through the `DynamicsModel` that
`planner="dynamics"` uses: after each stretch it forecasts the loss 1, 5 and 20 stretches ahead, knowing what will be
done (leaps, schedule). Compared with persistence, the power law of the run so far and a ridge regression on the same 64
features, whose constant predictive scales are fitted on the training runs. Errors: bootstrap over runs.
"""

from __future__ import annotations

import json
import math
import time
from pathlib import Path

import numpy as np
import torch
from hf_hybrid.world_model.dynamics import DynamicsModel, student_t_cdf
from hf_hybrid.world_model.imagination import START_WEIGHTS, ImaginedGain
from hf_hybrid.world_model.observer import Stretch
from hf_hybrid.world_model.rssm import RSSM, SCORED
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.results import Results, command_line, provenance
from benchmarks.world_model.records import CONFIDENCE_HORIZON, TOLERANCE, platt_scaled
from benchmarks.world_model.scores import (
    FIRST,
    Predictive,
    baselines,
    calibration_error,
    reliability,
    starts_at,
    with_error,
)
from benchmarks.world_model.small_run import STRIDE
from benchmarks.world_model.storage import load_records

ARM = "start weights, fixed"
"""Name of the model's line in results.jsonl; an earlier one, `start weights, learns`, also learned during the run."""
TOKENS = (8, 128)
"""Batch and length of the step that the planner's cost is compared with."""
DRAWS = 2000


def follow(run) -> dict:
    """Follow a recorded run. Returns the forecasts that the model makes after every stretch, and imagined branches."""
    dynamics = DynamicsModel(RSSM.load(START_WEIGHTS))
    forecasts, confidences, branches = {k: [] for k in SCORED}, [], []
    losses = np.log(np.maximum(run.losses, 1e-6))
    for stretch in range(len(run.losses)):
        dynamics.observe_stretch(run.features[stretch], run.actions[stretch], float(run.losses[stretch]))
        for branch, about in zip(run.branches, run.settings["branches"]):
            if branch.start == stretch + 1 and run.settings["diverged"] is about["diverged"] is None:
                branches.append(imagined(dynamics, branch))
        ahead = min(max(SCORED), len(run.losses) - 1 - stretch)
        if ahead < 1:
            continue
        forecast = dynamics.forecast(run.actions[stretch + 1 : stretch + 1 + ahead])
        if stretch < FIRST - 1:
            continue
        for k in (k for k in SCORED if k <= ahead):
            realised = losses[stretch + k] - losses[stretch]
            forecasts[k].append((forecast.mean[k - 1], forecast.scale[k - 1], realised))
        if ahead >= CONFIDENCE_HORIZON:
            change = losses[stretch + CONFIDENCE_HORIZON] - losses[stretch]
            mean, scale = (values[CONFIDENCE_HORIZON - 1] for values in forecast)
            probability = student_t_cdf((math.log1p(TOLERANCE) - mean) / scale)
            confidence = platt_scaled(probability, *dynamics.model.weights["confidence_map"].tolist())
            confidences.append((confidence, change <= math.log1p(TOLERANCE)))
    return {"forecasts": forecasts, "confidences": confidences, "branches": [b for b in branches if b]}


def imagined(dynamics: DynamicsModel, branch) -> dict | None:
    """
    Compare a branch with the run, up to 20 stretches ahead: the difference that the model expects, and the real one.
    """
    base, other = branch.base, branch.other
    shared = min(len(base.losses), len(other.losses), max(SCORED))
    if shared < 1:
        return None
    difference, _ = dynamics.compare(other.actions[:shared], base.actions[:shared])
    came = np.log(other.losses[:shared]) - np.log(base.losses[:shared])
    first, last = slice(min(5, shared)), slice(max(shared - 5, 0), shared)
    return {
        "imagined_5": float(difference[first].mean()),
        "imagined_end": float(difference[last].mean()),
        "realised_5": float(came[first].mean()),
        "realised_end": float(came[last].mean()),
        "more_leaping": float(np.sign(other.actions[:shared, 0].sum() - base.actions[:shared, 0].sum())),
    }


def scores_of(replays: list[dict], others: dict[int, dict[str, Predictive]], held_out: list) -> dict:
    """Score forecasts by horizon: CRPS and NLL, paired differences to the baselines, and calibration."""
    found = {}
    for k in SCORED:
        rows = np.array([row for replayed in replays for row in replayed["forecasts"][k]])
        run = starts_at(held_out, k).run
        model = Predictive(False, rows[:, 0], rows[:, 1], rows[:, 2])
        found[k] = {
            "real_steps": k * STRIDE,
            "forecasts": len(rows),
            "runs": len(np.unique(run)),
            "crps": with_error(model.crps(), run),
            "nll": with_error(model.nll(), run),
            "minus": {
                name: {
                    "crps": with_error(model.crps() - other.crps(), run),
                    "nll": with_error(model.nll() - other.nll(), run),
                }
                for name, other in others[k].items()
            },
            "calibration_error": calibration_error(model.places()),
        }
    return found


def baseline_scores(others: dict[int, dict[str, Predictive]], held_out: list) -> dict:
    found = {}
    for k, by_name in others.items():
        run = starts_at(held_out, k).run
        found[k] = {
            name: {
                "crps": with_error(other.crps(), run),
                "nll": with_error(other.nll(), run),
                "calibration_error": calibration_error(other.places()),
            }
            for name, other in by_name.items()
        }
    return found


def branch_scores(replays: list[dict]) -> dict:
    """Compare imagined and real differences of the training losses of branches."""
    rows = [{"run": number, **row} for number, replayed in enumerate(replays) for row in replayed["branches"]]
    column = {name: np.array([row[name] for row in rows]) for name in rows[0]}
    targets = {
        "training_5_windows": ("imagined_5", "realised_5"),
        "training_end": ("imagined_end", "realised_end"),
    }
    scores = {
        name: agreement(column[guess], column[truth], column["more_leaping"], column["run"])
        for name, (guess, truth) in targets.items()
    }
    return {"n": len(rows), "runs": len(set(column["run"])), **scores}


def agreement(guess: np.ndarray, truth: np.ndarray, leaping: np.ndarray, run: np.ndarray) -> dict:
    """
    Correlation of guesses and truth, and how often a sign is right: of the model, and of two rules (leaps always help,
    leaps never help).
    """
    rules = {"model": np.sign(guess), "leaps_always_help": -leaping, "leaps_never_help": leaping}
    rng, found = np.random.default_rng(0), []
    members = [np.flatnonzero(run == number) for number in np.unique(run)]
    for _ in range(DRAWS):
        index = np.concatenate([members[i] for i in rng.integers(len(members), size=len(members))])
        found.append(np.corrcoef(guess[index], truth[index])[0, 1])
    low, high = np.nanquantile(found, (0.025, 0.975))
    return {
        "correlation": round(float(np.corrcoef(guess, truth)[0, 1]), 4),
        "correlation_95": [round(float(low), 4), round(float(high), 4)],
        "sign": {name: with_error((rule == np.sign(truth)).astype(float), run) for name, rule in rules.items()},
    }


def planner_cost(run) -> dict:
    """CPU milliseconds per real step of everything that the planner does, on one held-out run."""
    steps = len(run.losses) * STRIDE
    dynamics = DynamicsModel(RSSM.load(START_WEIGHTS))
    rates = run.actions[:, 3]
    planner = ImaginedGain(
        4.0,
        0.0,
        0.2,
        dynamics=dynamics,
        rate_at=lambda progress: float(rates[min(int(progress * len(rates)), len(rates) - 1)]),
        stretch_share=1.0 / len(run.losses),
    )
    seconds = []
    for features, action, loss in zip(run.features, run.actions, run.losses):
        gain, horizon, progress, rate = (float(value) for value in action)
        started = time.process_time()
        planner.observe(Stretch(features.tolist(), float(loss), gain, horizon, progress, rate))
        seconds.append(time.process_time() - started)
    return {
        "windows": len(seconds),
        "ms_per_window": round(1e3 * float(np.median(seconds)), 3),
        "ms_per_real_step": round(1e3 * sum(seconds) / steps, 4),
    }


def model_step(repeats: int = 1) -> dict:
    """CPU milliseconds of a step (forward, backward, clipping, AdamW) of a Llama of about 100M parameters."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32000,
        hidden_size=640,
        intermediate_size=1728,
        num_hidden_layers=12,
        num_attention_heads=10,
        num_key_value_heads=10,
        max_position_embeddings=512,
    )
    model = LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    rows = torch.randint(config.vocab_size, TOKENS)
    seconds = []
    for _ in range(repeats + 1):
        started = time.process_time()
        model(input_ids=rows, labels=rows, use_cache=False).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(time.process_time() - started)
    return {
        "parameters": sum(p.numel() for p in model.parameters()),
        "tokens": TOKENS[0] * TOKENS[1],
        "ms_per_step": round(1e3 * float(np.median(seconds[1:])), 1),
    }


def main() -> None:
    parser = command_line(__doc__, Path(__file__).resolve().parent)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    learned, held_out = load_records()
    runs, origin = {"training": len(learned), "held_out": len(held_out)}, provenance(args.threads)
    others = baselines(learned, held_out)
    stored = Results(args.results, "baselines", ())
    stored.add({"runs": runs, "horizons": baseline_scores(others, held_out), **origin})
    started = time.perf_counter()
    replays = [follow(run) for run in held_out]
    probability, happened = map(np.array, zip(*[row for r in replays for row in r["confidences"]]))
    row = {
        "arm": ARM,
        "runs": runs,
        "horizons": scores_of(replays, others, held_out),
        "confidence": reliability(probability, happened),
        "branches": branch_scores(replays),
        "seconds": round(time.perf_counter() - started, 1),
    }
    print(summary_line(Results(args.results, "forecast", ("arm",)).add({**row, **origin})), flush=True)
    planner, step = planner_cost(max(held_out, key=lambda run: len(run.losses))), model_step()
    share = round(planner["ms_per_real_step"] / step["ms_per_step"], 6)
    cost = Results(args.results, "cost", ()).add({"planner": planner, "model": step, "share": share, **origin})
    print(json.dumps({name: cost[name] for name in ("planner", "model", "share")}))


def summary_line(arm: dict) -> str:
    horizons = " ".join(
        f"[{k}: crps {h['crps']['mean']:.4f} nll {h['nll']['mean']:.3f} calibration error {h['calibration_error']:.3f}]"
        for k, h in arm["horizons"].items()
    )
    ends = arm["branches"]["training_end"]
    return f"{horizons} confidence {arm['confidence']['calibration_error']:.3f} branches r {ends['correlation']:.2f}"


if __name__ == "__main__":
    main()
