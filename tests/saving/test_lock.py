"""One training per folder: who comes second waits, or is told who is there."""

import errno
import functools
import json
import multiprocessing
import os
import signal
import socket
import sys
import time

import pytest
from rig import trainers
from rig.run_folders import plain_run
from transformers import TrainerCallback

from hf_hybrid import files
from hf_hybrid.files import write_text
from hf_hybrid.report.page import write_report
from hf_hybrid.saving.lock import HOLDER_NAME, LOCK_NAME, FolderInUseError, FolderLock
from hf_hybrid.saving.manifest import CheckpointError


def hold(folder, ready, seconds):
    """Of another process: train in the folder for a while."""
    lock = FolderLock()
    lock.take(folder)
    lock.note(7)
    ready.set()
    time.sleep(seconds)
    lock.release()


@pytest.fixture
def held(tmp_path):
    """Returns a function that starts a process which holds the lock of the folder, and returns it."""
    started = []

    def start(seconds):
        context = multiprocessing.get_context("fork")
        ready = context.Event()
        process = context.Process(target=hold, args=(tmp_path, ready, seconds))
        process.start()
        started.append(process)
        assert ready.wait(30)
        return process

    yield start
    for process in started:
        process.kill()
        process.join()


def build(folder, callbacks=None, **options):
    return trainers.build(folder, model_seed=0, samples=8, callbacks=callbacks, max_steps=3, **options)


@pytest.mark.processes
def test_the_second_is_told_who_is_there(tmp_path, held):
    other = held(60)
    trainer = build(tmp_path)
    trainer.saver.lock.wait = 0.2
    with pytest.raises(
        FolderInUseError, match=rf"process {other.pid} on `.*`, which was at step 7 .*another `output_dir`"
    ):
        trainer.train()
    assert issubclass(FolderInUseError, CheckpointError)
    assert json.loads((tmp_path / HOLDER_NAME).read_text())["process"] == other.pid


@pytest.mark.processes
@pytest.mark.parametrize("kind", ["pipe", "deep"])
def test_a_note_that_says_nothing_leaves_out_who_is_there(tmp_path, held, kind):
    held(60)
    (tmp_path / HOLDER_NAME).unlink()
    os.mkfifo(tmp_path / HOLDER_NAME) if kind == "pipe" else (tmp_path / HOLDER_NAME).write_text("[" * 100_000)
    with pytest.raises(FolderInUseError, match="another process, and it has not ended"):
        FolderLock(wait=0).take(tmp_path)


@pytest.mark.processes
def test_a_requeued_job_waits_for_the_dying_one(tmp_path, held, caplog):
    held(1.0)
    trainer = build(tmp_path)
    trainer.train()
    assert trainer.state.global_step == 3
    assert "Waiting up to 60 seconds for it to end" in caplog.text


@pytest.mark.processes
def test_the_lock_of_a_killed_process_is_gone(tmp_path, held):
    process = held(60)
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    lock = FolderLock(wait=0)
    lock.take(tmp_path)
    assert json.loads((tmp_path / HOLDER_NAME).read_text())["process"] == os.getpid()
    lock.release()
    assert not list(tmp_path.iterdir())


class Looks(TrainerCallback):
    """Looks into the folder in a step, and ends the training with an error if it is told to."""

    def __init__(self, fails=False):
        self.fails, self.seen = fails, set()

    def on_step_end(self, args, state, control, **kwargs):
        self.seen |= set(os.listdir(args.output_dir))
        if self.fails:
            raise RuntimeError("in the middle")


def test_it_is_given_back_at_the_end_and_after_an_error(tmp_path):
    looks = Looks(fails=True)
    trainer = build(tmp_path, callbacks=[looks])
    with pytest.raises(RuntimeError, match="in the middle"):
        trainer.train()
    assert {LOCK_NAME, HOLDER_NAME} <= looks.seen and not {LOCK_NAME, HOLDER_NAME} & set(os.listdir(tmp_path))
    with pytest.raises(CheckpointError):
        trainer.train(resume_from_checkpoint=str(tmp_path / "nothing"))
    looks.fails = False
    trainer.train()
    build(tmp_path).train()  # another trainer of the same process
    assert not {LOCK_NAME, HOLDER_NAME} & set(os.listdir(tmp_path))


@pytest.mark.processes
def test_whoever_waits_gets_the_lock_of_the_file_that_is_there(tmp_path, held):
    """The file is deleted as it is given back: a lock of a deleted file keeps nobody out."""
    held(0.5)
    lock = FolderLock(wait=20)
    lock.take(tmp_path)
    assert (tmp_path / LOCK_NAME).exists()
    with pytest.raises(FolderInUseError):
        FolderLock(wait=0).take(tmp_path)
    lock.release()


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOLCK])
def test_a_file_system_without_locks_is_said_and_locks_nobody_out(tmp_path, monkeypatch, caplog, number):
    """Not either when the process was killed and the job goes on elsewhere."""
    import fcntl

    def refuses(*args):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", refuses)
    hosts = iter(("one", "another"))
    for _ in range(2):
        monkeypatch.setattr(socket, "gethostname", functools.partial(next, hosts))
        caplog.clear()
        FolderLock(wait=0).take(tmp_path)  # and it is not released
        assert "cannot be locked" in caplog.text
    assert not (tmp_path / HOLDER_NAME).exists()


READ_ONLY = [errno.EROFS, errno.EACCES, errno.EPERM]


@pytest.mark.parametrize("number", READ_ONLY)
def test_a_folder_that_cannot_be_written_ends_a_run_that_saves_before_its_first_step(tmp_path, monkeypatch, number):
    def refuses(path, flags, *args, opened=os.open, **kwargs):
        if flags & (os.O_CREAT | getattr(os, "O_TMPFILE", 0)) and str(path).startswith(str(tmp_path)):
            raise OSError(number, os.strerror(number), str(path))
        return opened(path, flags, *args, **kwargs)

    monkeypatch.setattr(os, "open", refuses)
    for options in ({}, {"save_strategy": "no", "enable_jit_checkpoint": True}):
        trainer = build(tmp_path, **{"save_strategy": "steps", "enable_predict": False, **options})
        with pytest.raises(CheckpointError, match=r"cannot be written \(.+\): `.+` belongs to `.+` and has mode \d+"):
            trainer.train()
        assert trainer.state.global_step == 0
    trainer = build(tmp_path, save_strategy="no", enable_predict=False)
    trainer.train()
    assert trainer.state.global_step == 3


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EACCES], ids=["no locks", "a lock of another user"])
def test_a_folder_that_cannot_be_locked_is_trained_in_all_the_same(tmp_path, monkeypatch, caplog, number):
    import filelock

    def refuses(*args, **kwargs):
        raise OSError(number, os.strerror(number))  # of its subclass for this number

    monkeypatch.setattr(filelock.FileLock, "acquire", refuses)
    trainer = build(tmp_path)
    trainer.train()
    assert trainer.state.global_step == 3 and "cannot be locked" in caplog.text
    assert LOCK_NAME not in os.listdir(tmp_path)


@pytest.mark.parametrize("kind", ["file", "dangling link", "link to a file"])
def test_an_output_that_is_no_folder_is_refused_before_anything_is_made(tmp_path, kind):
    place = tmp_path / "out"
    place.symlink_to("nowhere") if kind == "dangling link" else (tmp_path / "notes").write_text("notes")
    if kind != "dangling link":
        place.symlink_to("notes") if kind == "link to a file" else (tmp_path / "notes").rename(place)
    what = "a link to `nowhere`, which is not there" if kind == "dangling link" else "a file"
    with pytest.raises(ValueError, match=rf"`output_dir=.*out` is {what}\. .*another `output_dir`"):
        build(place)


@pytest.mark.processes
@pytest.mark.parametrize("name", ["README.md", HOLDER_NAME, "hybrid_config.json", "report/report.html"])
def test_files_that_a_kill_left_half_written_are_deleted(tmp_path, monkeypatch, name):
    def killed():
        files.os.replace = lambda *paths: os._exit(9)
        write_text(tmp_path / name, "{")

    (tmp_path / name).parent.mkdir(exist_ok=True)
    process = multiprocessing.get_context("fork").Process(target=killed)
    process.start()
    process.join()
    (tmp_path / "_README.md.0f0f0f0f0f0f0f0f").touch()  # a file of the user's
    plain_run(tmp_path)
    assert len([path for path in tmp_path.rglob("_hybrid_tmp-*") if path.is_file()]) == 1
    lock = FolderLock()
    lock.take(tmp_path)
    lock.release()
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # plots take most of the time
    write_report(tmp_path)
    assert not list(tmp_path.rglob("_hybrid_tmp-*")) and (tmp_path / "_README.md.0f0f0f0f0f0f0f0f").exists()
