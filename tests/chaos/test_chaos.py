"""The chaos suite, a little of it; `python tests/chaos/run.py` is all of it."""

import functools
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
from conftest import mostly_slow
from saving.test_manifest import renames_no_folders

from chaos import children, power, run
from hf_hybrid import files
from hf_hybrid.saving import manifest
from hf_hybrid.saving.lock import FolderLock

pytestmark = pytest.mark.processes
FEW = {"kills": 2, "damages": 3, "power": 1, "collisions": 1, "rollouts": 2}
MORE = {"kills": 140, "damages": 120, "signals": 40, "disk": 40, "clock": 20, "anew": 40, "finished": 36, "reports": 60}
MORE |= {"flips": 12, "power": 70, "collisions": 70, "ranks": 16, "exports": 30, "sweeps": 30, "constructions": 200}
MORE |= {"command-lines": 40, "rollouts": 38}


def options(folder, counts):
    """Those of the command."""
    counted = [word for part in run.PARTS for word in (f"--{part}", str(counts.get(part, 0)))]
    return [*counted, "--folder", str(folder)]


def test_nothing_is_lost_differs_or_is_silent(tmp_path, monkeypatch, capfd):
    """In this process, which has imported everything."""
    monkeypatch.setattr(sys, "argv", ["run.py", *options(tmp_path, FEW), "--modes", "leaps"])
    status = run.main()
    assert status == 0, capfd.readouterr().out[-8000:]


@pytest.mark.slow
def test_nor_in_any_other_mode(tmp_path):
    command = [sys.executable, run.__file__, *options(tmp_path, MORE), "--seed", "1"]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert ended.returncode == 0, f"{ended.stdout[-8000:]}\n{ended.stderr[-2000:]}"


def without_flushes_of(folder, what):
    """Return `manifest._flush` that leaves some out."""
    flush = manifest._flush
    left_out = {
        "files": lambda path: path.is_file(),
        "folders": lambda path: path.is_dir(),
        "a checkpoint's entries": lambda path: path.name.startswith("checkpoint-"),
        "the name of a checkpoint": lambda path: path == folder / "machine" / "out",
        "the name of a new output folder": lambda path: path == folder / "machine",
        "what is copied": lambda path: path.parent == folder / "machine" / "out" / "checkpoint-3",
        "what is committed": lambda path: path.name == manifest.SAVING_NAME,
    }[what]
    return lambda path: None if left_out(path) else flush(path)


FLUSHES = ["files", "folders", "a checkpoint's entries", "the name of a checkpoint", "the name of a new output folder"]


@pytest.mark.parametrize("left_out", mostly_slow([None, *FLUSHES, "the manifest"], [None, "files", FLUSHES[3]]))
def test_what_was_saved_survives_a_loss_of_power_only_with_every_flush(tmp_path, monkeypatch, left_out):
    """Of the saves after steps 3, 6 and 9 two have come to their end when the third one waits for the second."""
    if left_out == "the manifest":
        monkeypatch.setattr(files, "os", SimpleNamespace(replace=os.replace, fsync=lambda handle: None))
    elif left_out is not None:
        monkeypatch.setattr(manifest, "_flush", without_flushes_of(tmp_path, left_out))
    out, record = tmp_path / "machine" / "out", tmp_path / "durable"
    out.parent.mkdir()
    log = tmp_path / "log"
    ended = children.run(power.train, "leaps", out, False, record, log=log, stop_after=10)
    assert ended.how == "died" and power.saved_step(record) >= 6, f"{ended}\n{log.read_text()}"
    power.lose(out.parent, record, None)
    assert (power.newest_step(out) >= power.saved_step(record)) == (left_out is None)


@pytest.mark.parametrize("left_out", [None, "what is copied"])
def test_a_checkpoint_that_is_copied_to_its_place_survives_only_with_its_flush(tmp_path, monkeypatch, left_out):
    monkeypatch.setattr(os, "replace", functools.partial(renames_no_folders, replace=os.replace))
    assert committed(tmp_path, monkeypatch, left_out, times=1) == ([3] if left_out is None else [])


@pytest.mark.parametrize("left_out", [None, "what is committed", FLUSHES[3]])
def test_a_checkpoint_that_is_saved_once_more_survives_only_with_its_flushes(tmp_path, monkeypatch, left_out):
    """The power is lost between the deletion of the old one and the name of the new one."""
    assert committed(tmp_path, monkeypatch, left_out, times=2) == ([3] if left_out is None else [])


def committed(folder, monkeypatch, left_out, *, times):
    """Return the steps of the whole checkpoints after a loss of power."""
    if left_out is not None:
        monkeypatch.setattr(manifest, "_flush", without_flushes_of(folder, left_out))
    out, record = folder / "machine" / "out", folder / "durable"
    out.mkdir(parents=True)
    ended = children.run(power.commit, out, record, times, log=folder / "log")
    assert ended.how == ("returned" if times == 1 else "died"), ended
    power.lose(out.parent, record, None if times == 1 else power.Worst())
    manifest.finish_interrupted_saves(out)
    return power.whole(out)


@pytest.mark.slow
@pytest.mark.parametrize("left_out", ["files", "folders"])
def test_the_part_reports_a_flush_that_is_left_out(tmp_path, monkeypatch, capfd, left_out):
    monkeypatch.setattr(manifest, "_flush", without_flushes_of(tmp_path, left_out))
    monkeypatch.setattr(sys, "argv", ["run.py", *options(tmp_path, {"power": 8}), "--modes", "plain"])
    assert run.main() == 1
    assert "not durable" in capfd.readouterr().out


@pytest.mark.slow
def test_the_part_reports_trainings_that_take_no_lock(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(FolderLock, "take", lambda self, folder: None)
    command = ["run.py", *options(tmp_path, {"collisions": 10}), "--modes", "every step, last two kept"]
    monkeypatch.setattr(sys, "argv", command)
    assert run.main() == 1, capfd.readouterr().out
