"""`hf_hybrid/checkpoints/manifest.py`: checkpoints that are whole or refused, which one a resume takes or deletes."""

import contextlib
import itertools
import json
import os
import resource
import shutil
from pathlib import Path

import pytest
import torch
from conftest import ByteText, assert_same_weights, hybrid_config, tiny_model, weights
from transformers import Trainer, TrainerCallback, TrainingArguments

from hf_hybrid import HybridTrainer
from hf_hybrid.checkpoints import manifest
from hf_hybrid.checkpoints.manifest import MANIFEST_NAME, RUN_NAME, CheckpointError, is_sealed, last_checkpoint
from hf_hybrid.records.log import LOG_NAME

OPTIONS = {"max_steps": 6, "per_device_train_batch_size": 2, "save_strategy": "steps", "save_steps": 2}


def build(folder, callbacks=None, **overrides):
    torch.manual_seed(0)
    config = hybrid_config(folder, **{"enable_predict": False, **OPTIONS, **overrides})
    return HybridTrainer(tiny_model(attention_dropout=0.1), config, train_dataset=ByteText(30), callbacks=callbacks)


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
    start = manifest.find(resume, folder, tiny_model())
    return Path(start.folder).name, " ".join(start.warnings)


def delete(path: Path) -> None:
    path.unlink()


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def swap(path: Path) -> None:
    other = path.parent.parent / "checkpoint-4" / path.name
    shutil.copy(other, path)


FILES = ("model.safetensors", "optimizer.pt", "scheduler.pt", "rng_state.pth", "trainer_state.json", "config.json")


@pytest.mark.parametrize(
    "name, damage",
    [(name, damage) for name in FILES for damage in (delete, truncate, flip)] + [(name, swap) for name in FILES[:-1]],
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
    (folder / "checkpoint-6" / MANIFEST_NAME).unlink()
    trainer = build(folder)
    trainer.train(resume_from_checkpoint=True)
    assert f"checkpoint-6` is passed over: it has no `{MANIFEST_NAME}`" in caplog.text
    assert_same_weights(weights(trainer.model), finished[1])
    assert is_sealed(folder / "checkpoint-6") and not list(folder.glob("_*"))


def test_nothing_to_resume_from_is_said_with_every_folder_passed_over(tmp_path, folder):
    with pytest.raises(CheckpointError, match=r"No valid checkpoint found in output directory \(.*\). Start anew"):
        build(tmp_path / "empty").train(resume_from_checkpoint=True)
    for step in (2, 4, 6):
        (folder / f"checkpoint-{step}" / MANIFEST_NAME).unlink()
    manifest.write_run(folder, manifest.new_run(tiny_model()).run)
    with pytest.raises(CheckpointError, match="Passed over: `checkpoint-6`: .*`checkpoint-4`: .*`checkpoint-2`: "):
        found(folder)
    with pytest.raises(CheckpointError, match="there is no such folder"):
        found(folder, folder / "checkpoint-7")


@pytest.mark.parametrize("cut", ["known run", "unknown run", "in the last file of an unknown run"])
def test_a_run_that_was_cut_short_in_its_first_save_begins_anew(finished, folder, caplog, cut):
    for gone in ("checkpoint-4", "checkpoint-6"):
        shutil.rmtree(folder / gone)
    first = folder / "checkpoint-2"
    (first / MANIFEST_NAME).unlink()
    (first / "trainer_state.json").unlink()
    if cut == "known run":
        manifest.write_run(folder, [["of the run", 0]])
    if cut == "in the last file of an unknown run":
        shutil.rmtree(first)
        with contextlib.suppress(KeyboardInterrupt), manifest.replacing(first):
            (first / "trainer_state.json").touch()  # opened, and not yet written
            raise KeyboardInterrupt  # which leaves the folder as a kill does
    trainer = build(folder)
    trainer.train(resume_from_checkpoint=True)
    assert "checkpoint-2` is the first save of a run, and was cut short" in caplog.text
    assert_same_weights(weights(trainer.model), finished[1])


def test_checkpoints_of_plain_trainer_resume_with_a_warning(tmp_path):
    args = TrainingArguments(tmp_path, report_to=[], **OPTIONS)
    Trainer(tiny_model(), args, train_dataset=ByteText(30)).train()
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


def test_a_replaced_checkpoint_is_there_until_its_successor_is_whole(folder):
    """And no file of the old one becomes part of the new one."""
    checkpoint = folder / "checkpoint-6"
    (checkpoint / "old.bin").write_text("of an earlier save")
    for _ in range(2):
        save = manifest.replacing(checkpoint)
        save.__enter__()
        checkpoint.mkdir(exist_ok=True)
        (checkpoint / "model.safetensors").write_text("half of it")  # killed here, and once more
    assert found(folder)[0] == "checkpoint-6" and (checkpoint / "old.bin").is_file()
    with manifest.replacing(checkpoint):
        checkpoint.mkdir(exist_ok=True)
        manifest.seal(checkpoint, 6, manifest.new_run(tiny_model()), in_step=False)
    assert not list(folder.glob("_*")) and os.listdir(checkpoint) == [MANIFEST_NAME]


def test_a_kill_at_any_moment_of_a_replacement_leaves_a_folder_to_resume_from(folder, tmp_path, monkeypatch):
    """A job that is restarted looks for `checkpoint-*`, and would begin anew if it saw none."""
    (folder / "checkpoint-6" / "old.bin").write_text("of an earlier save")
    for path in folder.glob("checkpoint-*"):
        if path.name != "checkpoint-6":
            shutil.rmtree(path)

    class Killed(BaseException):
        pass

    def kill_after(original, left):
        def call(*args, **kwargs):
            original(*args, **kwargs)
            left[0] -= 1
            if left[0] == 0:
                raise Killed

        return call

    for moment in itertools.count(1):
        out, left = tmp_path / str(moment), [moment]
        shutil.copytree(folder, out)
        checkpoint, killed = out / "checkpoint-6", False
        with monkeypatch.context() as patched:
            for name in ("link", "mkdir", "rename", "replace", "rmdir", "unlink"):
                patched.setattr(os, name, kill_after(getattr(os, name), left))
            try:
                manifest.replacing(checkpoint).__enter__()
            except Killed:
                killed = True
        (checkpoint / "model.safetensors").write_text("half of it") if not killed else None
        assert checkpoint.is_dir()
        assert found(out)[0] == "checkpoint-6" and (checkpoint / "old.bin").is_file()
        assert not list(out.glob("_*"))
        if not killed:
            break
    assert moment > 10


def test_weights_that_the_user_saved_anew_are_taken(folder):
    """As shards, for example. They are not what was checked, and a warning says so."""
    checkpoint = folder / "checkpoint-6"
    model = type(tiny_model()).from_pretrained(checkpoint)
    (checkpoint / "model.safetensors").unlink()
    model.save_pretrained(checkpoint, max_shard_size="20KB")
    restore = build(folder, max_steps=6)
    restore.train(resume_from_checkpoint=str(checkpoint))
    assert_same_weights(weights(restore.model), weights(model))
    assert "(`model.safetensors`), so they are not checked" in found(folder, checkpoint)[1]


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
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


def test_a_full_disk_is_told_as_one_and_leaves_whole_checkpoints(tmp_path, size_limit, finished):
    trainer = build(tmp_path, callbacks=[FullDisk("on_step_end", 50_000)])
    with pytest.raises(OSError, match=r"disk is full, .*`.*checkpoint-4` could not be.*MiB are free.*checkpoint-2`"):
        trainer.train()
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert [path.name for path in tmp_path.glob("*checkpoint-*")] == ["checkpoint-2"]
    resumed = build(tmp_path)
    resumed.train(resume_from_checkpoint=True)
    assert_same_weights(weights(resumed.model), finished[1])


def test_a_full_disk_at_the_end_does_not_fail_a_finished_run(tmp_path, size_limit, caplog):
    trainer = build(tmp_path, enable_predict=True, save_strategy="no", callbacks=[FullDisk("on_train_end", 10)])
    trainer.train()
    assert trainer.state.global_step == 6 and trainer.hybrid_summary()["steps"] == 6
    assert "hybrid_summary.json` could not be written, and training goes on without it" in caplog.text


# Runs in one folder.


def test_a_run_begun_anew_does_not_continue_the_old_one(folder):
    build(folder, max_steps=3).train()  # saves step 2, and 3 at its end
    taken, said = found(folder)
    assert taken == "checkpoint-3"
    assert "checkpoint-6` is passed over: it is of an earlier run" in said and "checkpoint-4`" in said
    assert found(folder, folder / "checkpoint-6")[0] == "checkpoint-6"  # who names it gets it


def test_a_run_that_saved_nothing_yet_does_not_continue_the_old_one(folder):
    manifest.write_run(folder, manifest.new_run(tiny_model()).run)
    with pytest.raises(CheckpointError, match="`checkpoint-6`: it is of an earlier run"):
        found(folder)


def test_an_abandoned_course_of_a_run_is_not_continued(folder):
    """Resumed from step 2 while there are 4 and 6: the run saves 3, and a resume goes on from there."""
    build(folder, max_steps=3).train(resume_from_checkpoint=str(folder / "checkpoint-2"))
    taken, said = found(folder)
    assert taken == "checkpoint-3" and "checkpoint-6` is passed over: it is of an earlier run" in said
    shutil.rmtree(folder / "checkpoint-3")
    assert found(folder)[0] == "checkpoint-2"


def test_a_damaged_run_file_is_named(folder):
    (folder / RUN_NAME).write_text("{")
    with pytest.raises(CheckpointError, match=f"{RUN_NAME}` is damaged"):
        found(folder)


def test_rotation_goes_by_run_and_step_and_not_by_the_clock(folder):
    for step, age in ((2, 0), (4, 10_000), (6, 20_000)):
        os.utime(folder / f"checkpoint-{step}", (age, age))
    build(folder, max_steps=4, save_total_limit=2, save_steps=1).train()  # the run before had step 6
    assert sorted(path.name for path in folder.glob("checkpoint-*")) == ["checkpoint-3", "checkpoint-4"]
    assert last_checkpoint(folder) == str(folder / "checkpoint-4")
    args = torch.load(folder / "checkpoint-4" / "training_args.bin", weights_only=False)
    assert args.save_total_limit == 2


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
