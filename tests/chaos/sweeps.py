"""
`hf-hybrid sweep` that is killed, whose trials are killed, or whose folder is damaged, and then started again.

A process in the place of `hf-hybrid train` writes what a training leaves (rig/stand_in_training.py). Whatever happens,
each trial is counted once and has its loss, the best is the best, and its model is there. Or the sweep is refused with
one sentence, and no file of it has changed.
"""

from __future__ import annotations

import json
import math
import random
import shutil
import signal
import sys
from pathlib import Path

import yaml

from chaos import Case, Result, damages
from chaos.children import Ended, Moment, run
from hf_hybrid.cli.main import main

RATES = (1e-3, 1.5e-3, 3e-3)
TRAINING = Path(__file__).parents[1] / "rig" / "stand_in_training.py"
DAMAGED = ("outcome.json", "eval_results.json", "trial.yaml", "hybrid_log.jsonl")


def prepare(folder: Path) -> None:
    """Make a sweep that is finished."""
    folder.mkdir(parents=True)
    _write(folder)
    ended = _sweep(folder)
    if ended.value != 0:
        raise RuntimeError(f"The sweep to be damaged did not end: {(folder / 'log').read_text()}")


def sweep(case: Case) -> Result:
    """Kill or damage a sweep, or kill its trials, and start it again."""
    kind, chance, folder = case.kind, case.chance, case.folder
    done = [kind]
    if kind == "damaged":
        shutil.copytree(case.prepared / "out-sweep", folder / "out-sweep")
        done = [_damage(path, chance) for path in _chosen(folder / "out-sweep", chance)]
    _write(folder)
    before = _names(folder / "out-sweep")
    while kind == "killed" and case.interruptions < 2:
        moment = Moment(seconds=chance.uniform(0.1, 2.0))
        _sweep(folder, moment=moment, number=chance.choice([signal.SIGKILL, signal.SIGTERM]))
        case.interruptions += 1
    ended = _sweep(folder, killed=0.4 if kind == "trials killed" else 0.0)
    outcome, detail = _judge(folder, ended, before)
    return case.result(outcome, f"{'; '.join(done)}. {detail}")


def _write(folder: Path) -> None:
    values = {"model": "m", "dataset": "d.txt", "max_steps": 10, "use_cpu": True, "report_to": "none"}
    (folder / "run.yaml").write_text(yaml.safe_dump({**values, "output_dir": str(folder / "out")}))


def _sweep(folder: Path, killed: float = 0.0, **interruption) -> Ended:
    return run(_start, folder, killed, log=folder / "log", patience=90.0, **interruption)


def _start(folder: Path, killed: float) -> int:
    """In a forked process."""
    import os

    from hf_hybrid.cli import trials

    trials.PROCESS, trials.POLL_SECONDS = (sys.executable, "-S", str(TRAINING)), 0.02
    trials.KILLS = 20
    os.environ.update(KILLED=str(killed), STEP_SECONDS="0.01")
    rates = ",".join(map(str, RATES))
    words = ["--learning_rate", rates, "--trials", str(len(RATES)), "--threshold", "0"]
    return main(["sweep", "--config", str(folder / "run.yaml"), *words, "--output", str(folder / "out-sweep")])


def _chosen(folder: Path, chance: random.Random) -> list[Path]:
    files = sorted(path for name in DAMAGED for path in folder.glob(f"trial-*/{name}"))
    return chance.sample(files, k=chance.choice((1, 2)))


def _damage(path: Path, chance: random.Random) -> str:
    kinds = ("deleted", "emptied", "truncated", "one bit flipped", "zeros from some byte on", "bytes appended")
    kind = chance.choice(kinds)
    damages.DAMAGES[kind](path, chance, path)
    return f"`{path.parent.name}/{path.name}` {kind}"


def _names(folder: Path) -> set[str]:
    kept = (path for path in folder.rglob("*") if not path.name.endswith(".lock"))
    return {str(path.relative_to(folder)) for path in kept}


def _judge(folder: Path, ended: Ended, before: set[str]) -> tuple[str, str]:
    """Compare what the sweep came to with the losses that its trainings have."""
    out, said = folder / "out-sweep", (folder / "log").read_text(errors="replace")
    if ended.how != "returned" or "Traceback" in said:
        return ("hang" if ended.how == "hang" else "traceback"), f"{ended.value}\n{ended.trace}\n{said[-3000:]}"
    if missing := before - _names(out):
        return "deleted", f"{sorted(missing)} are gone. {said[-1000:]}"
    if ended.value != 0:
        refused = said.splitlines()[-1].startswith("hf-hybrid sweep: error: ")
        return ("refused" if ended.value == 2 and refused else "not ended"), said[-2000:]
    outcomes = [json.loads(path.read_text()) for path in out.glob("trial-*/outcome.json")]
    losses = {outcome["parameters"].get("learning_rate"): outcome["eval_loss"] for outcome in outcomes}
    expected = {rate: 2 + math.log10(rate / 1.5e-3) ** 2 for rate in RATES}
    if losses != expected or len(outcomes) != len(RATES):
        return "other losses", f"{losses}\n{said[-2000:]}"
    best = yaml.safe_load((out / "best.yaml").read_text())["learning_rate"]
    weights = {path.read_text() for path in out.glob("trial-*/model.safetensors")}
    if best != 1.5e-3 or weights != {f"weights of {best}"}:
        return "another best", json.dumps([best, sorted(weights)])
    return "same losses", ""
