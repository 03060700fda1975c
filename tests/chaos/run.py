"""
The chaos suite in one command, with a table at the end; the exit status is 1 if anything is lost, differs or is silent.

    python tests/chaos/run.py                                          # everything; more than an hour on two cores
    python tests/chaos/run.py --modes leaps plain                      # with two kinds of training
    python tests/chaos/run.py --case kills/leaps/17                    # one case again

Every training runs in a process that is forked from one that has imported everything.
"""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import os
import shutil
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

os.environ.update(HF_HUB_OFFLINE="1", OMP_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from chaos import Result, collisions, damages, faults, flips, folders, fuzz, kills, power, ranks, sweeps, trainings
from chaos.children import Ended

GOOD = {
    "same bits",
    "same losses",
    "repaired",
    "refused",
    "waited",
    "harmless",
    "trained",
    "reported",
    "exported",
    "named, same bits",
}
"""Every other outcome is a fault."""
PARTS: dict[str, tuple[str, int]] = {
    "kills": ("trainings killed at a random moment or inside a save, and resumed", 1000),
    "power": ("loss of power: only what was flushed to the disk survives", 200),
    "collisions": ("two processes that train in one folder", 200),
    "damages": ("damaged or swapped files of checkpoints", 500),
    "signals": ("SIGINT and SIGTERM", 120),
    "ranks": ("signals on ranks: SIGTERM and SIGUSR1 on two and three processes, up to a second apart", 200),
    "flips": ("a bit of weights or optimizer states that flips on one of two processes", 60),
    "disk": ("a full disk, or a limit on the size of a file", 80),
    "clock": ("a clock set back, with save_total_limit", 40),
    "anew": ("a run begun anew over the checkpoints of another", 80),
    "finished": ("resumes of a finished run", 36),
    "reports": ("hf-hybrid report on damaged run folders", 200),
    "exports": ("hf-hybrid export of damaged run folders", 100),
    "sweeps": ("hf-hybrid sweep that is killed or damaged, and started again", 90),
    "constructions": ("random options through Python", 2000),
    "command-lines": ("random options through the command line", 300),
}
"""What each does, and how often by default."""
INTERRUPTED: dict[str, Callable[[str, int, Path, Ended], Result]] = {
    "kills": kills.kill,
    "power": power.loss,
    "signals": faults.interrupted_by_signal,
    "disk": faults.on_a_full_disk,
    "clock": faults.with_a_clock_set_back,
    "anew": faults.anew_over_old_checkpoints,
    "finished": faults.finished_already,
}
"""Parts whose cases compare with an uninterrupted run."""
PREPARED: dict[str, Callable[[Path], None]] = {
    "reports": folders.prepare,
    "exports": folders.prepare_exports,
    "sweeps": sweeps.prepare,
}
DAMAGED: dict[str, Callable[[str, int, Path, Path], Result]] = {
    "reports": folders.report,
    "exports": folders.export,
    "sweeps": sweeps.sweep,
}
"""Parts whose cases begin with a copy of a folder that was prepared."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for part, (what, count) in PARTS.items():
        parser.add_argument(f"--{part}", type=int, default=count, metavar="N", help=f"{what} (default: {count})")
    parser.add_argument("--modes", nargs="*", help="kinds of training, see trainings.py (default: all)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=2, help="cases at a time (default: 2)")
    parser.add_argument("--case", help="only this one")
    parser.add_argument("--folder", type=Path, help="for the files of faulty cases (default: a new folder)")
    args = parser.parse_args()
    torch.set_num_threads(1)
    names = [args.case] if args.case else None
    modes, missing = trainings.available(args.modes or list(trainings.MODES))
    if names is None:
        names = [name for part in PARTS for name in cases(part, getattr(args, part.replace("-", "_")), modes)]
    folder = args.folder or Path(tempfile.mkdtemp(prefix="chaos-"))
    gc.collect()
    gc.freeze()  # collections in the processes do not look through what was imported
    begun = time.monotonic()
    found = run(names, args.seed, args.workers, folder)
    faulty = [result for result in found if result.outcome not in GOOD]
    for result in faulty:
        print(f"\n{result.case}: {result.outcome}\n{result.detail.strip()}")
    print(f"\n{table(found)}\n")
    for mode, why in missing.items():
        print(f"Left out: {mode}. {why}")
    minutes = (time.monotonic() - begun) / 60
    print(f"{len(found):,} cases, {len(faulty):,} faults, seed {args.seed}, {minutes:.0f} minutes; files in {folder}")
    return 1 if faulty else 0


def cases(part: str, count: int, modes: list[str]) -> list[str]:
    """Return the names of a part's cases, spread evenly over the modes."""
    kinds = {
        "damages": [mode for mode in damages.MODES if mode in modes],
        "signals": [mode for mode in modes if mode != "two processes"],  # a launcher would tell both
        "ranks": [kind for kind, (_, _, mode) in ranks.KINDS.items() if mode in modes],
        "flips": [kind for kind, (_, mode) in flips.KINDS.items() if mode in modes],
        "disk": [mode for mode in modes if mode != "workers"],  # which send batches through files, and would hang
        "reports": ["hybrid", "logged", "plain"],
        "exports": ["whole", "sharded"],
        "sweeps": ["damaged", "killed", "trials killed"],
        "constructions": ["all"],
        "command-lines": ["all"],
    }.get(part, modes)
    return [f"{part}/{kinds[number % len(kinds)]}/{number // len(kinds)}" for number in range(count) if kinds]


def run(names: list[str], seed: int, workers: int, folder: Path) -> list[Result]:
    """Train the references, then run the cases, each in a folder of its own that is kept if there is a fault."""
    folder.mkdir(parents=True, exist_ok=True)
    compared = (*INTERRUPTED, "collisions", "damages", "ranks", "flips")
    modes = sorted({name.split("/")[1] for name in names if name.split("/")[0] in compared})
    damaged, collided = (
        {name.split("/")[1] for name in names if name.startswith(part)} for part in ("damages/", "collisions/")
    )
    with ProcessPoolExecutor(workers, multiprocessing.get_context("fork")) as pool:
        needs = [[mode in some for mode in modes] for some in (damaged, collided)]
        prepared = pool.map(_prepare, [folder] * len(modes), modes, *needs)
        references = dict(zip(modes, prepared))
        for part, prepare in PREPARED.items():
            if any(name.startswith(f"{part}/") for name in names):
                prepare(folder / "references" / part)
        found = [result for _, result in references.values()]
        untrained = {mode for mode, (ended, _) in references.items() if ended.how != "returned"}
        waiting = [
            pool.submit(_check, name, seed, folder, references.get(name.split("/")[1], (None,))[0])
            for name in names
            if name.split("/")[1] not in untrained
        ]
        for done, future in enumerate(as_completed(waiting), 1):
            found.append(future.result())
            if found[-1].outcome not in GOOD or done % 100 == 0:
                print(f"{done:,}/{len(waiting):,} {found[-1].case}: {found[-1].outcome}", file=sys.stderr, flush=True)
    return found


def _prepare(folder: Path, mode: str, damaged: bool, collided: bool) -> tuple[Ended, Result]:
    made = folder / "references" / mode
    made.mkdir(parents=True)
    part = next((part for part in (ranks, flips) if mode in part.KINDS), kills)
    reference = part.reference(mode, made)
    if damaged and reference[0].how == "returned":
        damages.prepare(mode, made)
    if collided and reference[0].how == "returned":
        collisions.prepare(mode, made)
    return reference


def _check(case: str, seed: int, folder: Path, expected: Ended | None) -> Result:
    """Run one case; its folder stays if there is a fault."""
    part, kind, number = case.split("/")
    own = folder / part / kind / number
    own.mkdir(parents=True)
    try:
        if part == "damages":
            result = damages.damage(case, seed, own, expected, folder / "references" / kind)
        elif part == "collisions":
            result = collisions.collide(case, seed, own, expected, folder / "references" / kind)
        elif part in DAMAGED:
            result = DAMAGED[part](case, seed, own, folder / "references" / part)
        elif part == "ranks":
            result = ranks.told_to_end(case, seed, own, expected)
        elif part == "flips":
            result = flips.flipped(case, seed, own, expected)
        elif part in INTERRUPTED:
            result = INTERRUPTED[part](case, seed, own, expected)
        else:
            result = (fuzz.construction if part == "constructions" else fuzz.command_line)(case, seed, own)
    except Exception:
        result = Result(case, "the suite failed", traceback.format_exc())
    if result.outcome in GOOD:
        shutil.rmtree(own)
    return result


def table(found: list[Result]) -> str:
    """Return the results as a table, with a line for each part, each mode that was killed, and each that has faults."""
    lines = ["| part | kind | cases | interruptions | outcomes |", "|---|---|---|---|---|"]
    by_part: dict[str, dict[str, list[Result]]] = {}
    order = ["references", *PARTS]
    for result in sorted(found, key=lambda result: (order.index(result.case.split("/")[0]), result.case)):
        part, kind, _ = result.case.split("/")
        by_part.setdefault(part, {}).setdefault(kind, []).append(result)
    for part, by_kind in by_part.items():
        lines.append(_line(part, "all", [result for results in by_kind.values() for result in results]))
        for kind, results in by_kind.items():
            if len(by_kind) > 1 and (part == "kills" or any(result.outcome not in GOOD for result in results)):
                lines.append(_line("", kind, results))
    return "\n".join(lines)


def _line(part: str, kind: str, results: list[Result]) -> str:
    outcomes = Counter(result.outcome for result in results)
    said = [f"{count:,} {outcome}" for outcome, count in outcomes.items() if outcome in GOOD]
    said = [f"**{count:,} {outcome}**" for outcome, count in outcomes.items() if outcome not in GOOD] + said
    interruptions = sum(result.interruptions for result in results)
    return f"| {part} | {kind} | {len(results):,} | {interruptions:,} | {', '.join(said)} |"


if __name__ == "__main__":
    sys.exit(main())
