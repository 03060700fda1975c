"""`hf_hybrid/saving/manifest.py` and `start.py`: checkpoints that are whole or refused, and where a training starts."""

import contextlib
import errno
import itertools
import json
import os
import re
import resource
import shutil
import tempfile
from pathlib import Path

import pytest
import torch
from conftest import ByteText, assert_same_weights, hybrid_config, tiny_model, weights
from rig import trainers
from rig.processes import together
from rig.run_folders import change, reseal
from transformers import EarlyStoppingCallback, Trainer, TrainerCallback, TrainingArguments

from hf_hybrid.records.log import LOG_NAME
from hf_hybrid.report.findings import findings
from hf_hybrid.report.run_folder import load_run
from hf_hybrid.saving import manifest
from hf_hybrid.saving.lock import check_output
from hf_hybrid.saving.manifest import MANIFEST_NAME, SAVING_NAME, CheckpointError, is_committed, last_checkpoint
from hf_hybrid.saving.start import find
from hf_hybrid.trainer import HybridTrainerMixin

OPTIONS = {"max_steps": 6, "per_device_train_batch_size": 2, "save_strategy": "steps", "save_steps": 2}


def build(folder, callbacks=None, **overrides):
    torch.manual_seed(0)
    given = {"model": tiny_model(attention_dropout=0.1), "samples": 30, "eval_dataset": ByteText(4)}
    return trainers.build(folder, callbacks=callbacks, **given, **{"enable_predict": False, **OPTIONS, **overrides})


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The folder and the weights of a run without leaps that came to its end."""
    folder = tmp_path_factory.mktemp("finished")
    trainer = build(folder)
    trainer.train()
    return folder, weights(trainer.model)


@pytest.fixture
def folder(finished, tmp_path):
    return Path(shutil.copytree(finished[0], tmp_path / "out"))


def found(folder, resume=True):
    """The checkpoint that a resume takes, as a name, and what it says."""
    start = find(resume, folder)
    return Path(start.folder).name, " ".join(start.warnings)


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def swap(path: Path) -> None:
    shutil.copy(path.parent.parent / "checkpoint-4" / path.name, path)


FILES = ("model.safetensors", "optimizer.pt", "scheduler.pt", "rng_state.pth", "trainer_state.json", "config.json")


@pytest.mark.parametrize(
    "name, damage",
    [*itertools.product(FILES, (Path.unlink, truncate, flip)), *((name, swap) for name in FILES[:-1])],
)
def test_a_damaged_file_is_named_and_the_checkpoint_before_is_used(folder, name, damage):
    damage(folder / "checkpoint-6" / name)
    taken, said = found(folder)
    assert taken == "checkpoint-4" and f"checkpoint-6` is passed over: `{name}` " in said, said
    with pytest.raises(CheckpointError, match=f"Can't find a valid checkpoint at .*checkpoint-6`: `{name}` "):
        found(folder, folder / "checkpoint-6")


@pytest.mark.parametrize("damage", [truncate, flip])
def test_a_damaged_manifest_is_named_itself(folder, damage):
    damage(folder / "checkpoint-6" / MANIFEST_NAME)
    taken, said = found(folder)
    assert taken == "checkpoint-4" and f"`{MANIFEST_NAME}` is damaged" in said


def test_a_checkpoint_in_another_ones_place_is_passed_over(folder):
    shutil.rmtree(folder / "checkpoint-6")
    shutil.copytree(folder / "checkpoint-2", folder / "checkpoint-6")
    taken, said = found(folder)
    assert taken == "checkpoint-4" and "says that it is of step 2" in said


def test_a_resume_passes_a_save_that_was_cut_short_over_and_ends_at_the_same_weights(finished, folder, caplog):
    """Also without leaps. The cut is right before the manifest, where every file is there already."""
    (folder / SAVING_NAME).mkdir()
    os.rename(folder / "checkpoint-6", folder / SAVING_NAME / "checkpoint-6")  # where a kill leaves it
    (folder / SAVING_NAME / "checkpoint-6" / MANIFEST_NAME).unlink()
    trainer = build(folder)
    trainer.train(resume_from_checkpoint=True)
    assert trainer.saver.start.folder == str(folder / "checkpoint-4") and "passed over" not in caplog.text
    assert_same_weights(weights(trainer.model), finished[1])
    assert is_committed(folder / "checkpoint-6") and not list(folder.glob("_*"))


def test_nothing_to_resume_from_is_said_with_every_folder_passed_over(tmp_path, folder):
    with pytest.raises(CheckpointError, match=r"No valid checkpoint found in output directory \(.*\). Start anew"):
        build(tmp_path / "empty").train(resume_from_checkpoint=True)
    for step in (2, 4, 6):
        (folder / f"checkpoint-{step}" / "optimizer.pt").unlink()
    for resume in (True, "auto"):
        with pytest.raises(CheckpointError, match="Passed over: `checkpoint-6`: .*`checkpoint-4`: .*`checkpoint-2`: "):
            found(folder, resume)
    with pytest.raises(CheckpointError, match="there is no such folder"):
        found(folder, folder / "checkpoint-7")


@pytest.mark.parametrize("cut", ["in its place", "in the last file"])
def test_a_run_that_was_cut_short_in_its_first_save_begins_anew(finished, folder, caplog, cut):
    for gone in ("checkpoint-4", "checkpoint-6"):
        shutil.rmtree(folder / gone)
    first = folder / "checkpoint-2"
    (first / MANIFEST_NAME).unlink()
    (first / "trainer_state.json").unlink()
    if cut == "in the last file":
        shutil.rmtree(first)
        with contextlib.suppress(KeyboardInterrupt), manifest.saving(first):
            (manifest.temporary(first) / "trainer_state.json").touch()  # opened, and not yet written
            raise KeyboardInterrupt  # which leaves the folder as a kill does
    trainer = build(folder)
    trainer.train(resume_from_checkpoint=True)
    assert "checkpoint-2` is the first save of a run, and was cut short" in caplog.text
    assert_same_weights(weights(trainer.model), finished[1])


def test_checkpoints_of_plain_trainer_are_not_overwritten_and_resume_with_a_warning(tmp_path):
    args = TrainingArguments(tmp_path, report_to=[], **OPTIONS)
    Trainer(tiny_model(), args, train_dataset=ByteText(30)).train()
    build(tmp_path, max_steps=1).train()
    tmp_path = tmp_path / "_hybrid_earlier_1"
    (tmp_path / "checkpoint-6" / "trainer_state.json").write_text('{"epoch": 0.')
    taken, said = found(tmp_path)
    assert taken == "checkpoint-4" and "so nothing tells whether its files are whole" in said
    assert "`trainer_state.json` is damaged" in said


def test_what_trainer_would_start_anew_without_a_word_is_said(folder):
    (folder / "checkpoint-6" / MANIFEST_NAME).unlink()
    for name in ("scheduler.pt", "rng_state.pth"):
        (folder / "checkpoint-6" / name).unlink()
    taken, said = found(folder, folder / "checkpoint-6")
    assert "Optimizer and schedule are not restored, as there is no `scheduler.pt`: both start anew" in said
    assert "Random generators are not restored" in said


NEW = {"trainer_state.json", "model.safetensors", "optimizer.pt", "a", "z"}
OF_NEW = '{"global_step": 6}'


def save(checkpoint):
    """Save a checkpoint of small files, as Trainer would."""
    with manifest.saving(checkpoint):
        for name in NEW:
            (manifest.temporary(checkpoint) / name).write_text(OF_NEW)
        manifest.commit(checkpoint, 6, in_step=False)


def test_a_replaced_checkpoint_is_there_until_its_successor_is_whole(folder):
    """And no file of the old one becomes part of the new one."""
    checkpoint = folder / "checkpoint-6"
    (checkpoint / "old.bin").write_text("of an earlier save")
    for _ in range(2):
        manifest.saving(checkpoint).__enter__()
        (manifest.temporary(checkpoint) / "model.safetensors").write_text("half of it")  # killed here, and once more
    assert found(folder)[0] == "checkpoint-6" and (checkpoint / "old.bin").is_file()
    assert not list(folder.glob("_*"))
    save(checkpoint)
    assert not list(folder.glob("_*")) and set(os.listdir(checkpoint)) == {MANIFEST_NAME, *NEW}


class Killed(BaseException):
    """Ends a process where no code of it runs any more."""


def kill_after(call, left):
    """Kill after so many calls of the system, that one included."""

    def calling(*args, **kwargs):
        if left[0] <= 0:
            raise Killed  # in other threads too
        done = call(*args, **kwargs)
        left[0] -= 1
        if left[0] == 0:
            raise Killed
        return done

    return calling


def renames_no_folders(old, new, replace=os.replace):
    """As some mounted buckets."""
    if os.path.isdir(old):
        raise OSError(errno.ENOTSUP, "folders are not renamed here")
    replace(old, new)


def is_killed(monkeypatch, moment, renames, names, function, *args) -> bool:
    """Whether a process that does something is killed after so many calls of these functions of the system."""
    left = [moment]
    with monkeypatch.context() as patched:
        if not renames:
            patched.setattr(os, "replace", renames_no_folders)
        for name in names:
            patched.setattr(os, name, kill_after(getattr(os, name), left))
        try:
            function(*args)
        except Killed:
            return True
    return False


@pytest.mark.parametrize("renames", [True, False])
@pytest.mark.parametrize("replaces", [True, False])
@pytest.mark.long
def test_a_kill_at_any_moment_of_a_save_leaves_a_whole_checkpoint(folder, tmp_path, monkeypatch, replaces, renames):
    """
    The old one or the new one, and none of both is mixed. A job that is restarted looks for `checkpoint-*`, and would
    begin anew if it saw none.
    """
    old = {path.name for path in (folder / "checkpoint-6").iterdir() if path.name != LOG_NAME}
    kept = "checkpoint-6" if replaces else "checkpoint-4"
    for path in folder.glob("checkpoint-*"):
        if path.name != kept:
            shutil.rmtree(path)
    outcomes = []
    for moment in itertools.count(1):
        out = Path(shutil.copytree(folder, tmp_path / str(moment)))
        names = ("fsync", "mkdir", "open", "rename", "replace", "rmdir", "unlink")
        killed = is_killed(monkeypatch, moment, renames, names, save, out / "checkpoint-6")
        assert (out / kept).is_dir()
        if moment % 2:  # the next save ends what this one left, and otherwise the next start
            manifest.saving(out / "checkpoint-8").__enter__()
        taken, said = found(out)
        files = {path.name for path in (out / taken).iterdir() if path.name != LOG_NAME}
        if files == {MANIFEST_NAME, *NEW}:
            assert taken == "checkpoint-6" and (out / taken / "trainer_state.json").read_text() == OF_NEW
            outcomes.append("new")
        else:
            assert taken == kept and files == old
            outcomes.append("old")
        assert "passed over" not in said and not list(out.glob("_*"))
        if not killed:
            break
    assert moment > 15 and sorted(outcomes, reverse=True) == outcomes and set(outcomes) == {"old", "new"}


@pytest.mark.parametrize("renames", [True, False])
def test_a_kill_at_any_moment_of_a_rotation_leaves_nothing_behind(folder, tmp_path, monkeypatch, renames):
    """Nor does it take a checkpoint that stays, however often the job is killed."""
    kept = {path: files_in(folder / path) for path in ("checkpoint-4", "checkpoint-6")}

    def rotate(out):
        manifest.rotate(out, 2, newest=out / "checkpoint-6", best=None)

    for moment in itertools.count(1):
        out = Path(shutil.copytree(folder, tmp_path / str(moment)))
        names = ("mkdir", "open", "rename", "replace", "rmdir", "unlink")
        killed = is_killed(monkeypatch, moment, renames, names, rotate, out)
        assert found(out)[0] == "checkpoint-6"  # the next start
        if renames:
            assert not (out / "checkpoint-2").exists() or is_committed(out / "checkpoint-2")
        rotate(out)
        names = {path.name for path in out.iterdir() if path.name.startswith(("checkpoint-", "_"))}
        empty = out / "checkpoint-2"  # where folders are not renamed; buckets have no empty ones
        assert names == set(kept) or (not renames and names == {*kept, empty.name} and not list(empty.iterdir()))
        assert {name: files_in(out / name) for name in kept} == kept
        shutil.rmtree(out)
        if not killed:
            break
    assert moment > 10


def test_a_named_checkpoint_whose_save_was_killed_before_the_rename_is_taken(folder, tmp_path, monkeypatch):
    """Also by a run in another folder, which does not touch what else is saved there."""
    checkpoint, other = folder / "checkpoint-6", folder / manifest.SAVING_NAME / "checkpoint-8"
    shutil.copytree(checkpoint, manifest.temporary(checkpoint))
    other.mkdir()
    (checkpoint / MANIFEST_NAME).unlink()
    start = find(checkpoint, tmp_path / "elsewhere")
    assert start.folder == str(checkpoint) and is_committed(checkpoint) and not start.warnings and other.is_dir()


def test_a_link_beside_a_checkpoint_that_is_named_is_not_taken_for_its_save(folder, tmp_path):
    home = Path(shutil.copytree(folder, tmp_path / "home"))
    before = files_in(home)
    (folder / SAVING_NAME).symlink_to(home)
    assert Path(find(str(folder / "checkpoint-2"), tmp_path / "anew").folder) == folder / "checkpoint-2"
    assert files_in(home) == before


def test_the_best_checkpoint_has_its_name_in_every_checkpoint(tmp_path):
    """Trainer notes where it writes. Where the folder of a run was moved, the best one is found there."""

    losses = itertools.chain([5.0, 3.0], itertools.repeat(4.0))

    def train(folder, steps, resume=None):
        options = {"save_strategy": "steps", "save_steps": 2, "eval_strategy": "steps", "eval_steps": 2}
        options |= {"load_best_model_at_end": True, "metric_for_best_model": "loss", "save_total_limit": 1}
        options |= {"max_steps": steps, "samples": 30, "eval_dataset": ByteText(4)}
        trainer = trainers.build(folder, enable_predict=False, **options)
        trainer._evaluate = lambda trial, ignored: {"eval_loss": next(losses)}
        trainer.train(resume_from_checkpoint=resume)
        return trainer

    train(tmp_path / "a", 4)
    state = json.loads((tmp_path / "a" / "checkpoint-4" / "trainer_state.json").read_text())
    assert state["best_model_checkpoint"] == str(tmp_path / "a" / "checkpoint-4")
    os.rename(tmp_path / "a", tmp_path / "b")
    moved = train(tmp_path / "b", 8, resume=True)
    assert moved.state.best_model_checkpoint == str(tmp_path / "b" / "checkpoint-4")
    assert (tmp_path / "b" / "checkpoint-4").is_dir()


class AddsAFile(Trainer):
    """Of a trainer that keeps more than Trainer does, as TRL's with adaptive entropy."""

    def _save_checkpoint(self, model, trial):
        super()._save_checkpoint(model, trial)
        folder = Path(self._get_output_dir(trial=trial), f"checkpoint-{self.state.global_step}")
        (folder / "added.json").write_text("{}")


class HybridAddsAFile(HybridTrainerMixin, AddsAFile):
    pass


def test_what_another_trainer_adds_becomes_part_of_the_checkpoint(tmp_path):
    config = hybrid_config(tmp_path, enable_predict=False, **OPTIONS)
    HybridAddsAFile(tiny_model(), config, train_dataset=ByteText(30)).train()
    known = manifest.read_manifest(tmp_path / "checkpoint-6")
    assert "added.json" in known.files and not manifest.damages(tmp_path / "checkpoint-6", known)


def test_weights_that_the_user_saved_anew_are_taken_from_a_checkpoint_that_is_named(folder):
    """As shards, for example. They are not what was checked, and a warning says so."""
    checkpoint = folder / "checkpoint-6"
    model = type(tiny_model()).from_pretrained(checkpoint)
    (checkpoint / "model.safetensors").unlink()
    model.save_pretrained(checkpoint, max_shard_size="20KB")
    assert "`model.safetensors` is missing" in found(folder, True)[1]
    assert "were saved again in other files. They are not checked." in found(folder, checkpoint)[1]
    restore = build(folder, max_steps=6)
    restore.train(resume_from_checkpoint=str(checkpoint))
    assert_same_weights(weights(restore.model), weights(model))


# Files that no manifest lists.

LOADED = (
    "pytorch_model_fsdp.bin", "optimizer.bin", "hybrid_state_1.safetensors", "hybrid_state.bin", "out_of_memory.json",
    "scaler.pt", "pytorch_model.bin", "model.safetensors.index.json", "other.safetensors", "adapter_model.safetensors",
    "adapter_model.bin", "adapter_config.json", "mine/adapter_model.safetensors", "rng_state_0.pth", "rng_state_1.pth",
    "optimizer_0/__0_0.distcp", "pytorch_model_fsdp_0/.metadata", "global_step6/mp_rank_00_model_states.pt", "latest",
    "user_content.pt", "random_states_0.pkl",
)  # fmt: skip


@pytest.mark.parametrize("name", LOADED)
def test_a_file_that_would_be_loaded_and_is_not_listed_is_refused_by_name(folder, name):
    added = folder / "checkpoint-6" / name
    added.parent.mkdir(exist_ok=True)
    added.write_bytes(b"{")
    taken, said = found(folder)
    assert taken == "checkpoint-4" and f"`{name}` was not saved with it and would be loaded (delete it, " in said, said
    with pytest.raises(CheckpointError, match=f"checkpoint-6`: .*`{name}` was not saved with it"):
        found(folder, folder / "checkpoint-6")


@pytest.mark.parametrize("name", ["pytorch_model_fsdp_0", "global_step6", "optimizer_0"])
def test_so_is_a_folder_that_alone_changes_what_is_loaded(folder, name):
    (folder / "checkpoint-6" / name).mkdir()
    assert f"`{name}` was not saved with it" in found(folder)[1]


def test_files_that_nobody_loads_are_no_damage(folder):
    for name in (
        "README.md",
        "scheduler.pt~",
        ".DS_Store",
        "eval_results.json",
        "notes.pt",
        "old/model.safetensors.bak",
    ):
        (folder / "checkpoint-6" / name).parent.mkdir(exist_ok=True)
        (folder / "checkpoint-6" / name).write_text("x")
    assert found(folder) == ("checkpoint-6", "")


def test_what_a_callback_saves_beside_a_checkpoint_belongs_to_it(tmp_path):
    """Adapters, for example, as users' callbacks do in `on_save`; also if training ends there."""

    class Saves(TrainerCallback):
        def on_save(self, args, state, control, **kwargs):
            mine = Path(args.output_dir, f"checkpoint-{state.global_step}", "mine")
            mine.mkdir()
            (mine / "adapter_model.safetensors").write_text("weights")

    build(tmp_path, callbacks=[Saves()], max_steps=2).train()
    assert found(tmp_path) == ("checkpoint-2", "")
    (tmp_path / "checkpoint-2" / "mine" / "adapter_model.safetensors").write_text("others!")
    with pytest.raises(CheckpointError, match="`mine/adapter_model.safetensors` is not what was saved"):
        found(tmp_path)


# Checkpoints that may not be read, or hold other values.


def as_another_user(function, *args):
    """Return what a function returns or raises where files of this user are closed to it, as a text."""
    receives, sends = os.pipe()
    if (child := os.fork()) == 0:
        try:
            if os.getuid() == 0:
                os.setgroups([])
                os.setgid(65534)
                os.setuid(65534)
            text = str(function(*args))
        except BaseException as error:
            text = f"{type(error).__name__}: {error}"
        os.write(sends, text.encode())
        os._exit(0)
    os.waitpid(child, 0)
    os.close(sends)
    with os.fdopen(receives, encoding="utf-8") as said:
        return said.read()


@pytest.fixture
def reachable(folder):
    """The folder of a finished run, which other users may enter: `tmp_path` is closed to them."""
    with tempfile.TemporaryDirectory() as place:
        out = Path(shutil.copytree(folder, Path(place, "out")))
        for path in (out.parent, out, *out.rglob("*")):
            path.chmod(0o755 if path.is_dir() else 0o644)
        yield out
        out.chmod(0o755)


@pytest.mark.processes
@pytest.mark.parametrize("name, mode", [("model.safetensors", 0o600), (MANIFEST_NAME, 0o600), ("", 0o700)])
def test_a_checkpoint_that_may_not_be_read_is_told_with_owner_and_mode(reachable, name, mode):
    closed = reachable / "checkpoint-6" / name
    closed.chmod(mode if os.getuid() == 0 else 0)
    said = rf"`{closed.name}` may not be read: it belongs to `.+` and has mode \d+\. .*`chmod -R a\+rX .*checkpoint-6`"

    def outcome(resume):
        return as_another_user(find, resume, reachable)

    assert re.match(rf"CheckpointError: Can't find a valid checkpoint at .*{said}", outcome(reachable / "checkpoint-6"))
    for resume in ("auto", True):
        assert re.match(rf"Start\(folder='.*checkpoint-4'.*checkpoint-6` is passed over: {said}", outcome(resume))
    for step in (2, 4):
        shutil.rmtree(reachable / f"checkpoint-{step}")
    for resume in ("auto", True):
        assert re.match(rf"CheckpointError: No valid checkpoint.*{said}", outcome(resume))
    reachable.chmod(0)
    assert re.match(r"CheckpointError: `output_dir=.* may not be read", outcome("auto"))


@pytest.mark.processes
def test_what_lies_in_a_closed_folder_is_told_in_one_sentence(reachable):
    checkpoint = reachable / "checkpoint-6"
    reachable.chmod(0o700 if os.getuid() == 0 else 0)
    outcome = as_another_user(find, str(checkpoint), reachable.parent / "anew")
    above = f"a folder above `{checkpoint}` may not be entered by this user"
    assert outcome.startswith(f"CheckpointError: Can't find a valid checkpoint at `{checkpoint}`: {above}")
    outcome = as_another_user(check_output, reachable / "anew")
    assert re.match(r"ValueError: `output_dir=.*anew` cannot be used: a folder above .* another `output_dir`", outcome)


def test_values_that_trainer_cannot_go_on_from_are_named(folder):
    """Of another version of transformers."""
    checkpoint = folder / "checkpoint-6"
    change(checkpoint / "trainer_state.json", of_the_future=1)
    reseal(checkpoint)
    said = r"`trainer_state.json` holds what .* \(`of_the_future=1.*another check"
    for resume in (True, checkpoint):
        with pytest.raises(CheckpointError, match=said):
            found(folder, resume)


def test_files_of_another_kind_are_told_in_one_sentence(folder, tmp_path):
    contents = {"optimizer.pt": [1, 2], "scheduler.pt": 3, "rng_state.pth": {"python": 1}, "scaler.pt": {"scale": 1.0}}
    for name, content in {**contents, "hybrid_state.json": "[]"}.items():
        checkpoint = Path(shutil.copytree(folder, tmp_path / name)) / "checkpoint-6"
        if isinstance(content, str):
            (checkpoint / name).write_text(content)
        else:
            torch.save(content, checkpoint / name)
        (checkpoint / MANIFEST_NAME).unlink()
        with pytest.raises(CheckpointError, match="cannot go on from `.*checkpoint-6`: its files are of another"):
            build(checkpoint.parent, max_steps=8).train(resume_from_checkpoint=str(checkpoint))


DEEP = '{"a": ' + "[" * 100_000


@pytest.mark.parametrize(
    "name, content, said",
    [
        (MANIFEST_NAME, DEEP, f"`{MANIFEST_NAME}` is damaged"),
        ("trainer_state.json", DEEP, "`trainer_state.json` is damaged"),
        ("hybrid_state.json", DEEP, "hybrid_state.json` is damaged"),
        ("config.json", DEEP, "its files are of another kind"),
        ("model.safetensors", "no header, but long enough for one", r"this run \(SafetensorError"),
        ("hybrid_state.safetensors", "no header, but long enough for one", "hybrid_state.safetensors` is damaged"),
        ("trainer_state.json", None, "`trainer_state.json` is neither a file nor a folder"),
        ("optimizer.pt", None, "`optimizer.pt` is neither a file nor a folder"),
        ("global_step", 10**30, "`trainer_state.json` says that it is of step 1000000000000000000000000000000"),
        ("global_step", 1e30, "says that it is of step 1e.30"),
        ("global_step", -5, "says that it is of step -5"),
        ("stateful_callbacks", "text", "its files are of another kind"),
    ],
)
def test_files_that_no_trainer_wrote_are_told_in_one_sentence(folder, name, content, said):
    """Deep JSON, a pipe that nobody writes to, headers that are none, steps that do not exist."""
    checkpoint = folder / "checkpoint-6"
    if (checkpoint / name).exists():
        (checkpoint / name).unlink()
        os.mkfifo(checkpoint / name) if content is None else (checkpoint / name).write_text(content)
    else:
        change(checkpoint / "trainer_state.json", **{name: content})
    if name != MANIFEST_NAME:
        (checkpoint / MANIFEST_NAME).unlink()
    with pytest.raises(CheckpointError, match=said):
        build(folder, max_steps=8).train(resume_from_checkpoint=str(checkpoint))


@pytest.mark.parametrize("saved", [{}, None])
def test_a_resumed_run_saves_callbacks_that_the_checkpoint_does_not_have(folder, saved):
    """Trainer looks each of them up in what the checkpoint has of callbacks."""
    change(folder / "checkpoint-6" / "trainer_state.json", stateful_callbacks=saved)
    reseal(folder / "checkpoint-6")
    evaluates = {"eval_strategy": "steps", "eval_steps": 2, "load_best_model_at_end": True}
    trainer = build(folder, callbacks=[EarlyStoppingCallback(3)], max_steps=8, **evaluates)
    trainer.train(resume_from_checkpoint="auto")
    kept = json.loads((folder / "checkpoint-8" / "trainer_state.json").read_text())["stateful_callbacks"]
    assert kept.keys() >= {"TrainerControl", "EarlyStoppingCallback"}


# Disks that are full.


class FullDisk(TrainerCallback):
    """From an event on no file grows beyond some bytes."""

    def __init__(self, event, size):
        setattr(self, event, lambda args, state, control, **kwargs: self._fill(state.global_step, size))

    def _fill(self, step, size):
        if step >= 4:
            resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))


@pytest.fixture
def size_limit():
    """Lifts the limit: by a call before pytest writes the outcome, and otherwise at the end."""

    def lift():
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))

    yield lift
    lift()


def test_a_full_disk_is_told_as_one_and_leaves_whole_checkpoints(tmp_path, size_limit, finished):
    trainer = build(tmp_path, async_save=False, callbacks=[FullDisk("on_step_end", 50_000)])
    with pytest.raises(OSError, match=r"disk is full, .*`.*checkpoint-4` could not be.*MiB are free.*checkpoint-2`"):
        trainer.train()
    size_limit()
    assert [path.name for path in tmp_path.glob("*checkpoint-*")] == ["checkpoint-2"]
    assert not list(tmp_path.glob("_*"))
    trainer._save_checkpoint(trainer.model, None)  # now that there is space
    assert is_committed(tmp_path / "checkpoint-4")
    shutil.rmtree(tmp_path / "checkpoint-4")
    resumed = build(tmp_path)
    resumed.train(resume_from_checkpoint=True)
    assert_same_weights(weights(resumed.model), finished[1])


class Sees(TrainerCallback):
    """Notes which checkpoints there are before the first step."""

    def on_step_begin(self, args, state, control, **kwargs):
        self.names = getattr(self, "names", None) or sorted(p.name for p in Path(args.output_dir).glob("checkpoint-*"))


def test_a_resumed_run_that_keeps_fewer_checkpoints_makes_room_before_its_first_save(folder):
    """
    As the error of a full disk advises. Those of later steps are moved aside, and a run that saves none deletes none.
    """
    every, names = ["checkpoint-2", "checkpoint-4", "checkpoint-6"], []
    for resume, options in [
        ("auto", {"save_total_limit": 1, "save_strategy": "no"}),
        ("checkpoint-2", {"save_total_limit": 1, "save_steps": 9, "max_steps": 3}),
        ("auto", {"save_total_limit": 2}),
    ]:
        out, sees = Path(shutil.copytree(folder, folder.parent / str(len(names)))), Sees()
        resume = resume if resume == "auto" else str(out / resume)
        build(out, callbacks=[sees], **{"max_steps": 7, **options}).train(resume_from_checkpoint=resume)
        names.append(sees.names)
    assert names == [every, ["checkpoint-2"], ["checkpoint-4", "checkpoint-6"]]


def test_of_a_run_that_went_on_from_an_earlier_step_its_own_checkpoints_are_kept(folder):
    build(folder, save_total_limit=2, max_steps=4).train(resume_from_checkpoint=str(folder / "checkpoint-2"))
    assert sorted(path.name for path in folder.glob("checkpoint-*")) == ["checkpoint-2", "checkpoint-4"]
    assert found(folder)[0] == "checkpoint-4"


def test_the_best_checkpoint_stays_when_a_resumed_run_makes_room(folder):
    best = {"best_global_step": 2, "best_model_checkpoint": str(folder / "checkpoint-2"), "best_metric": 1.0}
    change(folder / "checkpoint-6" / "trainer_state.json", **best)
    reseal(folder / "checkpoint-6")
    sees = Sees()
    build(folder, callbacks=[sees], max_steps=7, save_total_limit=1).train(resume_from_checkpoint="auto")
    assert sees.names == ["checkpoint-2", "checkpoint-6"]


@pytest.mark.processes
def test_the_full_disk_of_another_process_is_told_as_one(tmp_path):
    def train():
        rank = int(os.environ["RANK"])
        trainer = build(tmp_path, ddp_find_unused_parameters=False, callbacks=[FullDisk("on_step_end", 100)] * rank)
        try:
            trainer.train()
        except OSError as error:
            resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
            (tmp_path.parent / f"error-{rank}").write_text(str(error))
            os._exit(1)

    assert together(2, train, timeout=60)[1] == 1
    told = (tmp_path.parent / "error-1").read_text()
    assert re.search(r"disk is full, .*`.*checkpoint-4` could not be.*MiB are free.*resume from `.*checkpoint-2`", told)


def test_a_full_disk_at_the_end_does_not_fail_a_finished_run(tmp_path, size_limit, caplog):
    trainer = build(tmp_path, enable_predict=True, save_strategy="no", callbacks=[FullDisk("on_train_end", 10)])
    trainer.train()
    size_limit()
    assert trainer.state.global_step == 6 and trainer.hybrid_summary()["steps"] == 6
    assert "hybrid_summary.json` could not be written, and training goes on without it" in caplog.text


# One run per folder.


def files_in(folder):
    """The bytes of all files below a folder. The log is not part of a checkpoint: a run takes it along."""
    names = [path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != LOG_NAME]
    return {str(path.relative_to(folder)): path.read_bytes() for path in names}


@pytest.mark.parametrize("resume", [None, "elsewhere"])
def test_a_run_that_begins_anew_moves_what_an_earlier_one_left_aside(finished, folder, caplog, resume):
    """A script that is started again trains, as with `Trainer`, and nothing of the run before is lost."""
    (folder / "model.safetensors").write_text("the model of the earlier run")
    (folder / "mine.txt").write_text("of the user")
    before = files_in(folder)
    if resume:
        resume = str(shutil.copytree(folder / "checkpoint-2", folder.parent / "2"))
    own = ["checkpoint-4", "checkpoint-6"] if resume else ["checkpoint-3", "checkpoint-6"]  # `Trainer` keeps its steps
    trainer = build(folder, save_steps=3)
    trainer.train(resume_from_checkpoint=resume)
    aside = folder / "_hybrid_earlier_1"
    assert files_in(aside) == {name: held for name, held in before.items() if name != "mine.txt"}
    said = [record.message for record in caplog.records if "earlier run" in record.message]
    assert said == [
        f"This run begins anew, so what an earlier run left in `{folder}` (up to step 6) is in `{aside}` now. "
        "Delete that if you need it no more."
    ]
    assert [path.name for path in manifest.checkpoints_of(folder)] == own
    assert_same_weights(weights(trainer.model), finished[1])
    again = build(aside, max_steps=8)  # and it can go on
    again.train(resume_from_checkpoint="auto")
    assert again.state.global_step == 8 and again.saver.start.folder == str(aside / "checkpoint-6")


def test_a_run_that_goes_on_from_an_earlier_step_moves_later_ones_aside(folder, caplog):
    before = files_in(folder / "checkpoint-6")
    build(folder, max_steps=4, save_total_limit=1).train(resume_from_checkpoint=str(folder / "checkpoint-2"))
    assert "This run goes on from `checkpoint-2`, so later checkpoints in" in caplog.text
    aside = folder / "_hybrid_earlier_1"
    assert [path.name for path in manifest.checkpoints_of(aside)] == ["checkpoint-4", "checkpoint-6"]
    assert files_in(aside / "checkpoint-6") == before
    assert found(folder, "auto") == ("checkpoint-4", "")  # what the user went on with, not what was left behind


@pytest.mark.parametrize("resume", [True, "auto"])
def test_a_shorter_run_in_the_folder_of_its_process_goes_on_with_its_own_checkpoints(tmp_path, resume):
    """As notebooks do, with the same trainer and with another."""
    build(tmp_path, max_steps=6).train()
    first = files_in(tmp_path / "checkpoint-6")
    trainer = build(tmp_path, max_steps=4, learning_rate=1e-2)
    trainer.train()
    assert last_checkpoint(tmp_path) == str(tmp_path / "checkpoint-4")
    assert findings(load_run(tmp_path))["status"] == "Finished at step 4 of 4."
    assert findings(load_run(tmp_path / "_hybrid_earlier_1"))["status"] == "Finished at step 6 of 6."
    resumed = build(tmp_path, max_steps=5, save_steps=5, learning_rate=1e-2)
    resumed.train(resume_from_checkpoint=resume)
    assert Path(resumed.saver.start.folder).name == "checkpoint-4"
    trainer.train()  # a third one
    assert found(tmp_path)[0] == "checkpoint-4"
    assert files_in(tmp_path / "_hybrid_earlier_1" / "checkpoint-6") == first
    assert (tmp_path / "_hybrid_earlier_2" / "checkpoint-5").is_dir()


def test_a_run_that_is_killed_before_its_first_save_is_not_taken_for_the_one_before(folder):
    class Kill(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build(folder, callbacks=[Kill()]).train()
    trainer = build(folder, max_steps=2)
    trainer.train(resume_from_checkpoint="auto")
    assert trainer.saver.start.folder is None and trainer.state.global_step == 2


def test_a_run_that_is_refused_moves_nothing(folder):
    before = files_in(folder)
    with pytest.raises(CheckpointError, match="its optimizer was"):
        build(folder, optim="sgd").train(resume_from_checkpoint=str(folder / "checkpoint-2"))
    with pytest.raises(ValueError, match="min_lr"):
        build(folder, lr_scheduler_type="cosine_with_min_lr").train()
    assert files_in(folder) == before


def test_a_model_that_was_read_from_the_folder_of_the_run_stays_there(folder):
    """A script that trains on what it trained finds it when it is started once more."""
    (folder / "model.safetensors").write_text("a model")
    trainer = build(folder, max_steps=2)
    trainer.model.config._name_or_path = trainer.model.name_or_path = str(folder)
    trainer.train()
    assert (folder / "model.safetensors").read_text() == "a model"
    assert (folder / "_hybrid_earlier_1" / "checkpoint-6").is_dir()


def test_the_best_checkpoint_is_not_that_of_an_earlier_run(tmp_path):
    options = {"eval_strategy": "steps", "eval_steps": 1, "load_best_model_at_end": True, "save_total_limit": None}
    build(tmp_path, **options, save_steps=1, max_steps=3).train()
    trainer = build(tmp_path, **options, save_steps=3, max_steps=6)
    losses = iter([3.0, 1.0, 2.0, 2.0, 2.0, 2.0])  # the best step is the second, which is not saved

    def evaluate(*args, **kwargs):
        metrics = {"eval_loss": next(losses)}
        trainer.control = trainer.callback_handler.on_evaluate(trainer.args, trainer.state, trainer.control, metrics)
        return metrics

    trainer.evaluate = evaluate
    trainer.train()
    assert trainer.state.best_global_step == 2 and trainer.state.best_model_checkpoint is None
    assert (tmp_path / "_hybrid_earlier_1" / "checkpoint-2").is_dir()


def test_a_run_that_saves_nothing_may_begin_beside_the_checkpoints_of_another(folder):
    before = files_in(folder / "checkpoint-6")
    trainer = build(folder, save_strategy="no", max_steps=1)
    trainer.train()
    assert trainer.state.global_step == 1 and files_in(folder / "checkpoint-6") == before


@pytest.mark.parametrize("resume", [True, "auto"])
def test_a_newer_checkpoint_of_another_trainer_is_not_overwritten(folder, resume):
    """It has no manifest. A run that passes it over would save its own in its place."""
    (folder / "checkpoint-6" / MANIFEST_NAME).unlink()
    before = files_in(folder)
    with pytest.raises(CheckpointError, match=r"checkpoint-6` has no .* another trainer wrote it, .* Name it to go on"):
        build(folder, max_steps=8).train(resume_from_checkpoint=resume)
    assert files_in(folder) == before
    assert found(folder, folder / "checkpoint-6")[0] == "checkpoint-6"


def test_rotation_goes_by_step_and_not_by_the_clock_and_leaves_links_alone(folder):
    link = folder / "checkpoint-1"
    shutil.copytree(folder / "checkpoint-2", folder.parent / "archive")
    link.symlink_to(folder.parent / "archive")
    for step, age in ((2, 0), (4, 10_000), (6, 20_000)):
        os.utime(folder / f"checkpoint-{step}", (age, age))
    archived = files_in(folder.parent / "archive")
    build(folder, max_steps=7, save_total_limit=2, save_steps=1).train(resume_from_checkpoint=True)
    assert sorted(path.name for path in folder.glob("checkpoint-*")) == ["checkpoint-1", "checkpoint-6", "checkpoint-7"]
    assert link.is_symlink() and files_in(folder.parent / "archive") == archived
    assert last_checkpoint(folder) == str(folder / "checkpoint-7")


def test_a_link_in_the_place_of_a_checkpoint_makes_way_and_what_it_leads_to_stays(folder):
    """To a damaged one, which a resume passes over and saves again."""
    archive = Path(shutil.move(folder / "checkpoint-6", folder.parent / "archive"))
    (archive / "optimizer.pt").unlink()
    (folder / "checkpoint-6").symlink_to(archive)
    before = files_in(archive)
    build(folder).train(resume_from_checkpoint=True)
    assert is_committed(folder / "checkpoint-6") and not (folder / "checkpoint-6").is_symlink()
    assert files_in(archive) == before


@pytest.mark.parametrize("resume", [None, "auto"])
@pytest.mark.parametrize("moment", ["before the start", "before a save", "before a rotation"])
def test_a_link_in_the_place_of_the_folder_of_saves_makes_way_and_what_it_leads_to_stays(
    folder, tmp_path, monkeypatch, caplog, moment, resume
):
    home = Path(shutil.copytree(folder, tmp_path / "home"))
    (home / "thesis.txt").write_text("five years of work")
    (home / "checkpoint-4" / MANIFEST_NAME).unlink()
    before, out = files_in(home), folder if resume else tmp_path / "anew"
    trainer = build(out, save_total_limit=1, max_steps=10, async_save=moment == "before the start")

    def link(*args, **kwargs):
        if not os.path.lexists(out / SAVING_NAME):
            (out / SAVING_NAME).symlink_to("../home")

    if moment == "before the start":
        out.mkdir(exist_ok=True)
        link()
    elif moment == "before a save":
        trainer.add_callback(type("Links", (TrainerCallback,), {"on_step_begin": link})())
    else:
        rotate = manifest.rotate
        monkeypatch.setattr(manifest, "rotate", lambda *args, **kwargs: (link(), rotate(*args, **kwargs)))
    trainer.train(resume_from_checkpoint=resume)
    assert files_in(home) == before and not os.path.lexists(out / SAVING_NAME)
    assert [path.name for path in manifest.checkpoints_of(out)] == ["checkpoint-10"]
    assert "was a link to `../home`" in caplog.text


@pytest.mark.parametrize("kind", ["file", "dangling link"])
@pytest.mark.parametrize("resume", [None, "auto"])
def test_what_has_the_name_of_a_checkpoint_and_is_none_is_refused(tmp_path, kind, resume):
    place = tmp_path / "checkpoint-4"
    place.symlink_to("nowhere") if kind == "dangling link" else place.write_text("notes")
    with pytest.raises(CheckpointError, match="checkpoint-4` has the name of a checkpoint and is no folder. Move it"):
        build(tmp_path).train(resume_from_checkpoint=resume)
    assert os.path.lexists(place)


def test_the_best_checkpoint_alone_is_kept(tmp_path):
    options = {"save_total_limit": 1, "load_best_model_at_end": True, "eval_strategy": "steps", "eval_steps": 1}
    trainer = build(tmp_path, max_steps=3, save_steps=1, metric_for_best_model="loss", **options)
    trainer.train()
    assert [str(path) for path in tmp_path.glob("checkpoint-*")] == [trainer.state.best_model_checkpoint]


def test_the_best_step_is_no_checkpoint_where_none_was_saved(tmp_path):
    losses = itertools.chain([5.0, 3.0], itertools.repeat(4.0))  # best at step 2
    options = {"save_steps": 3, "eval_strategy": "steps", "eval_steps": 1, "metric_for_best_model": "loss"}
    trainer = build(tmp_path, max_steps=3, **options)
    trainer._evaluate = lambda trial, ignored: {"eval_loss": next(losses)}
    trainer.train()
    assert trainer.state.best_global_step == 2 and trainer.state.best_model_checkpoint is None


# One command for the first start and for every restart.


def test_auto_begins_and_goes_on(tmp_path, finished, caplog):
    trainer = build(tmp_path, max_steps=6)
    trainer.add_callback(Stops(3))
    trainer.train(resume_from_checkpoint="auto")
    assert trainer.state.global_step == 3
    again = build(tmp_path)
    again.train(resume_from_checkpoint="auto")
    assert "checkpoint-2" in str(again.saver.start.folder)
    assert_same_weights(weights(again.model), finished[1])
    assert find("auto", tmp_path).folder.endswith("checkpoint-6")


class Stops(TrainerCallback):
    """Ends a run as a kill would, but for the process."""

    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        control.should_training_stop = state.global_step == self.step


def test_a_clock_set_back_does_not_delete_new_checkpoints(tmp_path):
    trainer = build(tmp_path, save_steps=1, save_total_limit=2, max_steps=4)
    trainer.train()
    for path in tmp_path.glob("checkpoint-*"):
        os.utime(path, (2**31, 2**31))  # written in the future
    build(tmp_path, save_steps=1, save_total_limit=2).train(resume_from_checkpoint=True)
    assert sorted(path.name for path in tmp_path.glob("checkpoint-*")) == ["checkpoint-5", "checkpoint-6"]


def test_the_manifest_has_every_file(folder):
    checkpoint = folder / "checkpoint-6"
    listed = set(json.loads((checkpoint / MANIFEST_NAME).read_text())["files"])
    # The log of a run without leaps moved there when the run ended. It grows with later evaluations.
    assert listed == set(os.listdir(checkpoint)) - {MANIFEST_NAME, LOG_NAME} and listed >= set(FILES)
