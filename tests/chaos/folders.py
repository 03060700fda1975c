"""
`hf-hybrid report` and `hf-hybrid export` on run folders that were damaged, or in which somebody put links.

There is a report or an export, or one sentence. There is never a traceback or a hang, and a file that a link leads to
is never changed.
"""

from __future__ import annotations

import copy
import json
import os
import random
import shutil
from pathlib import Path
from typing import Any

import datasets
import torch
from rig import run_folders
from transformers import AutoConfig, AutoModelForCausalLM

from chaos import Case, Result, damages, fuzz
from chaos.children import Ended, run
from hf_hybrid.cli.data import NOTE_NAME, Reader
from hf_hybrid.cli.main import main
from hf_hybrid.cli.options import TextDataOptions

PATIENCE = 60.0


def prepare(folder: Path) -> None:
    """Make the folders that are damaged in copies: of hybrid runs with a profile or a log, and of plain Trainer."""
    folder.mkdir(parents=True)
    run_folders.hybrid_run(folder / "hybrid")
    run_folders.log(folder / "logged", run_folders.hybrid_run(folder / "logged"))
    run_folders.profile(folder / "hybrid", [run_folders.step_record(step, "full") for step in range(1, 101)])
    run_folders.plain_run(folder / "plain")


def report(case: Case) -> Result:
    """Damage some files of a run folder and report on it."""
    chance, out = case.chance, case.out
    shutil.copytree(case.prepared / case.kind, out)
    files = sorted(path for path in out.rglob("*") if path.is_file())
    chosen = chance.sample(files, k=min(len(files), chance.randint(1, 3)))
    done = [f"{path.relative_to(out)}: {_damage(path, chance)}" for path in chosen]
    precious = case.folder / "precious"
    precious.write_text("of another user")
    for name in chance.sample(WRITTEN, k=chance.choice([0, 0, 1, 3])):
        (out / "report").mkdir(exist_ok=True)
        (out / "report" / name).symlink_to(precious)
        done.append(f"report/{name} is a link")
    ended = run(main, ["report", str(out)], log=case.log, patience=PATIENCE)
    if precious.read_text() != "of another user":
        return case.result("written through a link", "; ".join(done))
    if fault := _fault(case, ended, done):
        return fault
    if ended.value == 0:
        return case.result("reported" if (out / "report" / "report.html").is_file() else "silent", "; ".join(done))
    return case.result("refused" if case.said().strip() else "silent", "; ".join(done))


def _fault(case: Case, ended: Ended, done: list[str]) -> Result | None:
    """What is wrong whatever was damaged: a hang or a traceback."""
    if ended.how == "hang":
        return case.result("hang", "; ".join(done))
    if ended.how != "returned" or "Traceback" in case.said():
        detail = "; ".join(done)
        return case.result("traceback", f"{detail}\n{ended.value}\n{ended.trace}\n{case.said()[-3000:]}")
    return None


WRITTEN = ("report.html", "report.json", "loss.png")


def prepare_exports(folder: Path) -> None:
    """Make the folders of finished runs, with the weights in one file and in several."""
    for name, size in (("whole", "1GB"), ("sharded", "20KB")):
        out = folder / name
        fuzz.make_model(out, {})
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(out))
        model.save_pretrained(out, max_shard_size=size)
        (out / "text.txt").write_text("\n\n".join(f"{number}. {'To be or not to be. ' * 8}" for number in range(9)))
        data = TextDataOptions(dataset=[str(out / "text.txt")], sequence_length=32, eval_share=0.2)
        (out / NOTE_NAME).write_text(json.dumps(Reader("train", data, seed=3).to_dict()))
        (out / "README.md").write_text("---\ntags: [a]\nlicense: mit\n---\n\n# run\n\n*Written by `hf_hybrid`*\n")


def export(case: Case) -> Result:
    """Damage some files of a run and export it."""
    chance, out, output = case.chance, case.out, case.folder / "exported"
    shutil.copytree(case.prepared / case.kind, out)
    files = sorted(path for path in out.iterdir() if path.is_file())
    chosen = chance.sample(files, k=chance.randint(1, 2))
    done = [f"{path.name}: {_damage(path, chance)}" for path in chosen]
    words = ["export", str(out), "--format", "merged", "--output", str(output)]
    ended = run(_in_folder, case.folder, words, log=case.log, patience=2 * PATIENCE)
    if fault := _fault(case, ended, done):
        return fault
    left = {path.name for path in case.folder.iterdir()} - {"out", "log", "cache"}
    detail = f"{'; '.join(done)}; left: {left}"
    if ended.value == 0:
        whole = all((output / name).is_file() for name in ("config.json", "export.json", "README.md"))
        return case.result("exported" if whole and left == {"exported"} else "not whole", detail)
    refused = "hf-hybrid export: error: " in case.said() and not left
    return case.result("refused" if refused else "left something", f"{detail}\n{case.said()[-1000:]}")


def _in_folder(folder: Path, words: list[str]) -> int:
    os.chdir(folder)
    datasets.config.HF_DATASETS_CACHE = folder / "cache"
    return main(words)


BYTES = ("emptied", "truncated", "one bit flipped", "zeros from some byte on")
VALUES: list[Any] = [
    None, True, False, 0, -1, 1e12, -1e300, 10**30, float("nan"), float("inf"), "", "text", "1e5", "\0", "<script>",
    "é" * 5000, [], {}, [[]], [None], {"": None}, [1, "2", None], {"step": {}}, [{"step": "x"}],
]  # fmt: skip


def _damage(path: Path, chance: random.Random) -> str:
    """Change some values of a JSON file, or its bytes; return in words what was done."""
    if path.suffix not in (".json", ".jsonl") or chance.random() < 0.25:
        kind = chance.choice(BYTES)
        damages.DAMAGES[kind](path, chance, path)
        return kind
    if chance.random() < 0.1:
        path.write_text(chance.choice(["[" * 100_000, '{"a":' * 5000 + "1" + "}" * 5000, "null", "[]", "1", '"text"']))
        return "replaced as a whole"
    lines = path.suffix == ".jsonl"
    values = [json.loads(line) for line in path.read_text().splitlines()] if lines else json.loads(path.read_text())
    changed = [_change(values, chance) for _ in range(chance.randint(1, 4))]
    path.write_text("".join(json.dumps(value) + "\n" for value in values) if lines else json.dumps(values))
    return ", ".join(changed)


def _change(values: Any, chance: random.Random) -> str:
    """Replace or remove one value somewhere inside, or give a mapping one more."""
    place, keys = values, []
    while True:
        if not isinstance(place, (dict, list)) or not place:
            return "nothing"
        key = chance.choice(list(place)) if isinstance(place, dict) else chance.randrange(len(place))
        keys.append(str(key))
        if not isinstance(place[key], (dict, list)) or not place[key] or chance.random() < 0.3:
            break
        place = place[key]
    if chance.random() < 0.2:
        del place[key]
        return f"{'.'.join(keys)} removed"
    place[key] = copy.deepcopy(chance.choice(VALUES))  # a later change may go into it
    return f"{'.'.join(keys)} = {place[key]!r:.40}"
