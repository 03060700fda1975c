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
import importlib.util
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
from dataclasses import dataclass
from pathlib import Path

os.environ.update(HF_HUB_OFFLINE="1", OMP_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from chaos import (
    Case,
    Result,
    collisions,
    damages,
    faults,
    flips,
    folders,
    fuzz,
    kills,
    power,
    ranks,
    rollouts,
    sweeps,
    trainings,
)
from chaos.children import Ended

GOOD = {
    "same bits", "same losses", "repaired", "refused", "waited", "harmless", "trained", "reported", "exported",
    "named, same bits",
}  # fmt: skip
"""Every other outcome is a fault."""


@dataclass(frozen=True)
class Part:
    """
    A part of the suite.

    Attributes:
        what (`str`): Its help.
        count (`int`): Cases by default.
        check (`Callable`): Runs a [`Case`].
        kinds (`Callable`): From the modes of the command to the kinds of its cases.
        prepare (`Callable`, *optional*): Makes what its cases begin with: of a mode, or of all.
        compares (`bool`): Whether cases are compared with a reference of their kind.
    """

    what: str
    count: int
    check: Callable[[Case], Result]
    kinds: Callable[[list[str]], list[str]] = lambda modes: modes
    prepare: Callable | None = None
    compares: bool = True


def _all_but(mode: str) -> Callable[[list[str]], list[str]]:
    return lambda modes: [other for other in modes if other != mode]


def _alone(what: str, count: int, check: Callable, kinds: list[str], prepare: Callable | None = None) -> Part:
    """A part without references."""
    return Part(what, count, check, lambda modes: kinds, prepare, compares=False)


PARTS: dict[str, Part] = {
    "kills": Part("trainings killed at a random moment or inside a save, and resumed", 1000, kills.kill),
    "power": Part("loss of power: only what was flushed to the disk survives", 200, power.loss),
    "collisions": Part("two processes that train in one folder", 200, collisions.collide, prepare=collisions.prepare),
    "damages": Part(
        "damaged or swapped files of checkpoints", 500, damages.damage,
        lambda modes: [mode for mode in damages.MODES if mode in modes], damages.prepare,
    ),
    "signals": Part(  # a launcher would tell both
        "SIGINT and SIGTERM", 120, faults.interrupted_by_signal, _all_but("two processes")
    ),
    "ranks": Part(
        "signals on ranks: SIGTERM and SIGUSR1 on two and three processes, up to a second apart", 200,
        ranks.told_to_end, lambda modes: [kind for kind, (_, _, mode) in ranks.KINDS.items() if mode in modes],
    ),
    "rollouts": Part(
        "GRPO and RLOO killed in rollouts, rewards, tools and between steps, and resumed", 100, rollouts.kill,
        lambda modes: list(rollouts.KINDS) if importlib.util.find_spec("trl") else [],
    ),
    "flips": Part(
        "a bit of weights or optimizer states that flips on one of two processes", 60, flips.flipped,
        lambda modes: [kind for kind, (_, mode) in flips.KINDS.items() if mode in modes],
    ),
    "disk": Part(  # workers send batches through files, and would hang
        "a full disk, or a limit on the size of a file", 80, faults.on_a_full_disk, _all_but("workers")
    ),
    "clock": Part("a clock set back, with save_total_limit", 40, faults.with_a_clock_set_back),
    "anew": Part("a run begun anew over the checkpoints of another", 80, faults.anew_over_old_checkpoints),
    "finished": Part("resumes of a finished run", 36, faults.finished_already),
    "reports": _alone(
        "hf-hybrid report on damaged run folders", 200, folders.report, ["hybrid", "logged", "plain"], folders.prepare
    ),
    "exports": _alone(
        "hf-hybrid export of damaged run folders", 100, folders.export, ["whole", "sharded"], folders.prepare_exports
    ),
    "sweeps": _alone(
        "hf-hybrid sweep that is killed or damaged, and started again", 90, sweeps.sweep,
        ["damaged", "killed", "trials killed"], sweeps.prepare,
    ),
    "constructions": _alone("random options through Python", 2000, fuzz.construction, ["all"]),
    "command-lines": _alone("random options through the command line", 300, fuzz.command_line, ["all"]),
}  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, part in PARTS.items():
        said = f"{part.what} (default: {part.count})"
        parser.add_argument(f"--{name}", type=int, default=part.count, metavar="N", help=said)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="only these (default: all)")
    parser.add_argument("--modes", nargs="*", help="kinds of training, see trainings.py (default: all)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=2, help="cases at a time (default: 2)")
    parser.add_argument("--case", nargs="+", metavar="NAME", help="only these")
    parser.add_argument("--folder", type=Path, help="for the files of faulty cases (default: a new folder)")
    args = parser.parse_args()
    torch.set_num_threads(1)
    names = args.case
    modes, missing = trainings.available(args.modes or list(trainings.MODES))
    if names is None:
        counts = {part: getattr(args, part.replace("-", "_")) for part in args.parts}
        names = [name for part, count in counts.items() for name in cases(part, count, modes)]
    folder = args.folder or Path(tempfile.mkdtemp(prefix="chaos-"))
    gc.collect()
    gc.freeze()  # collections in the processes do not look through what was imported
    begun = time.monotonic()
    results = run(names, args.seed, args.workers, folder)
    faulty = [result for result in results if result.outcome not in GOOD]
    for result in faulty:
        print(f"\n{result.case}: {result.outcome}\n{result.detail.strip()}")
    print(f"\n{table(results)}\n")
    for mode, why in missing.items():
        print(f"Left out: {mode}. {why}")
    minutes = (time.monotonic() - begun) / 60
    print(f"{len(results):,} cases, {len(faulty):,} faults, seed {args.seed}, {minutes:.0f} minutes; files in {folder}")
    return 1 if faulty else 0


def cases(part: str, count: int, modes: list[str]) -> list[str]:
    """Return the names of a part's cases, spread evenly over the kinds."""
    kinds = PARTS[part].kinds(modes)
    return [f"{part}/{kinds[number % len(kinds)]}/{number // len(kinds)}" for number in range(count) if kinds]


def run(names: list[str], seed: int, workers: int, folder: Path) -> list[Result]:
    """Train the references, then run the cases, each in a folder of its own that is kept if there is a fault."""
    made = folder / "references"
    made.mkdir(parents=True, exist_ok=True)
    asked = {tuple(name.split("/")[:2]) for name in names}
    kinds = sorted({kind for part, kind in asked if PARTS[part].compares})
    prepares = [[PARTS[part].prepare for part, of in asked if of == kind and PARTS[part].compares] for kind in kinds]
    with ProcessPoolExecutor(workers, multiprocessing.get_context("fork")) as pool:
        references = dict(zip(kinds, pool.map(_refer, [made] * len(kinds), kinds, prepares)))
        for part in sorted({part for part, _ in asked}):
            if PARTS[part].prepare and not PARTS[part].compares:
                PARTS[part].prepare(made / part)
        results = [result for _, result in references.values()]
        waiting = []
        for name in names:
            part, kind, _ = name.split("/")
            compares, own = PARTS[part].compares, folder / name
            expected = references[kind][0] if compares else None
            if expected is None or expected.how == "returned":
                case = Case(name, seed, own, expected, made / (kind if compares else part))
                waiting.append(pool.submit(_check, case))
        for done, future in enumerate(as_completed(waiting), 1):
            results.append(result := future.result())
            if result.outcome not in GOOD or done % 100 == 0:
                print(f"{done:,}/{len(waiting):,} {result.case}: {result.outcome}", file=sys.stderr, flush=True)
    return results


def _refer(made: Path, kind: str, prepares: list[Callable | None]) -> tuple[Ended, Result]:
    """Train the reference of a kind, and make what cases of this kind begin with."""
    folder = made / kind
    folder.mkdir()
    part = next((part for part in (ranks, rollouts, flips) if kind in part.KINDS), kills)
    reference = part.reference(kind, folder)
    for prepare in filter(None, prepares):
        if reference[0].how == "returned":
            prepare(kind, folder)
    return reference


def _check(case: Case) -> Result:
    """Run one case; its folder stays if there is a fault."""
    case.folder.mkdir(parents=True)
    try:
        result = PARTS[case.part].check(case)
    except Exception:
        result = case.result("the suite failed", traceback.format_exc())
    if result.outcome in GOOD:
        shutil.rmtree(case.folder)
    return result


def table(results: list[Result]) -> str:
    """Return the results as a table, with a line for each part, each mode that was killed, and each that has faults."""
    lines = ["| part | kind | cases | interruptions | outcomes |", "|---|---|---|---|---|"]
    by_part: dict[str, dict[str, list[Result]]] = {}
    order = ["references", *PARTS]
    for result in sorted(results, key=lambda result: (order.index(result.case.split("/")[0]), result.case)):
        part, kind, _ = result.case.split("/")
        by_part.setdefault(part, {}).setdefault(kind, []).append(result)
    for part, by_kind in by_part.items():
        lines.append(_line(part, "all", [result for results in by_kind.values() for result in results]))
        for kind, results in by_kind.items():
            faulty = any(result.outcome not in GOOD for result in results)
            if len(by_kind) > 1 and (part in ("kills", "rollouts") or faulty):
                lines.append(_line("", kind, results))
    return "\n".join(lines)


def _line(part: str, kind: str, results: list[Result]) -> str:
    outcomes = Counter(result.outcome for result in results)
    said = [f"{count:,} {outcome}" for outcome, count in outcomes.items() if outcome in GOOD]
    said = [f"**{count:,} {outcome}**" for outcome, count in outcomes.items() if outcome not in GOOD] + said
    interruptions = sum(result.interruptions for result in results)
    if asked := sum(result.asked for result in results):
        again = sum(result.asked_twice for result in results)
        said.append(f"{asked:,} calls, {again:,} once more")
    return f"| {part} | {kind} | {len(results):,} | {interruptions:,} | {', '.join(said)} |"


if __name__ == "__main__":
    sys.exit(main())
