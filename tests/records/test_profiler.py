"""MemoryProfilerCallback on real runs: nothing changes, what it writes adds up, and nothing of it is lost."""

import ctypes
import json
import multiprocessing
import os
import shutil
import signal
import sys
from pathlib import Path

import pytest
import torch
from conftest import ByteText, assert_same_weights, losses, weights
from rig import trainers
from transformers import Trainer, TrainerCallback, TrainingArguments

from hf_hybrid.records.log import load_log
from hf_hybrid.records.profiler import MemoryProfilerCallback

MIB = 2**20


def plain(folder, *callbacks, **values):
    values = {"max_steps": 6, "eval_dataset": ByteText(16, 400), "callbacks": list(callbacks), **values}
    return trainers.build(folder, Trainer, TrainingArguments, **values)


def all_lines(folder) -> list[dict]:
    return [json.loads(line) for line in (Path(folder) / "profile" / "steps.jsonl").read_text().splitlines()]


def lines(folder) -> list[dict]:
    """Those that hold, without the ones that say where a training begins."""
    return [line for line in load_log(Path(folder) / "profile", name="steps.jsonl").lines if "begun" not in line]


def held_total(record) -> int:
    return sum(sum(places.values()) for places in record["held"].values())


def forked(function) -> int:
    """The exit status of a fork of this process that calls it."""
    process = multiprocessing.get_context("fork").Process(target=function)
    process.start()
    process.join()
    return process.exitcode


# As an option.


def test_an_option_profiles_the_run(tmp_path):
    options = {"max_steps": 4, "enable_predict": False, "samples": 64}
    silent = trainers.build(tmp_path / "a", **options)
    profiled = trainers.build(tmp_path / "b", **options, profile_memory=True)
    (tmp_path / "home").mkdir()
    (tmp_path / "b").mkdir(exist_ok=True)
    (tmp_path / "b" / "profile").symlink_to(tmp_path / "home")
    silent.train()
    profiled.train()
    assert losses(silent) == losses(profiled)
    assert not any((tmp_path / "home").iterdir())  # nothing is written through a link
    profiled.train()  # a second run has one profiler too
    assert not (tmp_path / "a" / "profile").exists()
    assert [record["step"] for record in lines(tmp_path / "b")] == [1, 2, 3, 4]
    (profiler,) = (call for call in profiled.callback_handler.callbacks if isinstance(call, MemoryProfilerCallback))
    assert profiler.account_every is None


def test_a_profiler_that_is_given_stays_the_only_one(tmp_path):
    given = MemoryProfilerCallback(account_every=3)
    options = {"max_steps": 2, "enable_predict": False, "profile_memory": True}
    trainer = trainers.train(tmp_path, callbacks=[given], **options)
    assert [c for c in trainer.callback_handler.callbacks if isinstance(c, MemoryProfilerCallback)] == [given]


# Nothing changes.


@pytest.mark.parametrize("accumulation", [1, 3])
def test_losses_and_weights_are_bit_equal_with_and_without(tmp_path, accumulation):
    values = {"gradient_accumulation_steps": accumulation, "eval_strategy": "steps", "eval_steps": 3, "save_steps": 4}
    values["save_strategy"] = "steps"
    without = plain(tmp_path / "a", **values)
    watched = plain(tmp_path / "b", MemoryProfilerCallback(account_every=1), **values)
    without.train()
    watched.train()
    assert losses(watched) == losses(without) and len(losses(without)) == 6
    evaluated = [[e["eval_loss"] for e in t.state.log_history if "eval_loss" in e] for t in (watched, without)]
    assert evaluated[0] == evaluated[1]
    assert_same_weights(weights(watched.model), weights(without.model))


def test_hybrid_losses_are_bit_equal_with_and_without(tmp_path):
    runs = []
    for name, callbacks in (("without", []), ("watched", [MemoryProfilerCallback(account_every=1)])):
        trainer = trainers.build(tmp_path / name, callbacks=callbacks)
        for callback in callbacks:
            callback.attach(trainer)
        trainer.train()
        runs.append(trainer)
    assert losses(runs[0]) == losses(runs[1])
    assert_same_weights(*(weights(trainer.model) for trainer in runs))


# It adds up.


def test_records_of_a_plain_run(tmp_path):
    profiler = MemoryProfilerCallback(account_every=2)
    trainer = plain(tmp_path, profiler, eval_strategy="steps", eval_steps=3)
    trainer.train()
    records = lines(tmp_path)
    assert [(r["step"], r["phase"]) for r in records] == [
        (1, "train"), (2, "train"), (3, "train"), (3, "evaluate"), (4, "train"), (5, "train"), (6, "train"),
        (6, "evaluate"),
    ]  # fmt: skip
    assert sum(r["step_seconds"] for r in records) == pytest.approx(records[-1]["seconds"])
    for record in records:
        assert record["device"] is None and record["nvml"] is None
        assert record["host"]["peak_rss"] >= record["host"]["rss"] > 50 * MIB and record["host"]["pinned"] == 0
    counted = [r for r in records if r["held"] is not None]
    assert [r["step"] for r in counted] == [2, 4, 6], "from the second step on, every second"
    count = sum(p.numel() for p in trainer.model.parameters())
    scalars = 4 * len(list(trainer.model.parameters()))  # AdamW's step counters
    baseline = all_lines(tmp_path)[0]["baseline_rss"]
    for record in counted:
        held = {category: places["host"] for category, places in record["held"].items()}
        assert held["weights"] == held["gradients"] == 4 * count and held["states"] == 8 * count + scalars
        assert held["activations"] == held["drift"] == 0, "a CPU cannot tell activations from anything else"
        assert record["measured"] == record["host"]["peak_rss"] - baseline
        assert held_total(record) + record["unexplained"] == record["measured"]


class Ballast(TrainerCallback):
    """Memory that belongs to nothing that is counted."""

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == 4:
            self.tensor = torch.ones(48 * MIB // 4)


@pytest.mark.processes
@pytest.mark.skipif(sys.platform != "linux", reason="asks glibc to give memory back")
def test_what_nobody_counts_is_shown_as_unexplained(tmp_path):
    def train():
        ctypes.CDLL(None).malloc_trim(0)  # what earlier tests left to the allocator would take the ballast in
        plain(tmp_path, MemoryProfilerCallback(account_every=1), Ballast(), max_steps=8).train()

    assert forked(train) == 0
    unexplained = {r["step"]: r["unexplained"] for r in lines(tmp_path) if r["held"] is not None}
    for step in (6, 7, 8):
        assert unexplained[step] - unexplained[4] == pytest.approx(48 * MIB, rel=0.2)


def test_the_sum_of_a_hybrid_run_has_all_phases_and_adds_up(tmp_path):
    profiler = MemoryProfilerCallback()
    options = {"eval_strategy": "steps", "eval_steps": 15, "eval_dataset": ByteText(16, 400)}
    trainer = trainers.train(tmp_path, callbacks=[profiler], **options)
    phases = profiler.summary()["phases"]
    steps = trainer.hybrid_summary()["steps_by_phase"]
    assert {name: phases[name]["records"] for name in steps} == steps and min(steps.values()) > 0
    assert phases["evaluate"]["records"] == 2
    for name in steps:
        found = phases[name]["accounted"]
        assert found["records"] >= 1
        total = sum(sum(places.values()) for places in found["held"].values())
        assert total + found["unexplained"] == pytest.approx(found["measured"])
        spread = phases[name]["peak_rss"]
        assert spread["min"] <= spread["mean"] <= spread["max"]
    weight_bytes = sum(p.nbytes for p in trainer.model.parameters())
    assert phases["predict"]["accounted"]["held"]["gradients"] == {"device": 0, "host": 0}
    # The gradient memory, and from the first leap on the snapshot of before it.
    assert phases["correct"]["accounted"]["held"]["drift"]["host"] >= 2 * weight_bytes


def test_streamed_layers_are_counted_where_they_would_lie(tmp_path):
    profiler = MemoryProfilerCallback(account_every=1)
    trainer = trainers.train(tmp_path, callbacks=[profiler], enable_predict=False, memory="stream", max_steps=4)
    held = lines(tmp_path)[-1]["held"]
    layers = sum(p.nbytes for p in trainer.model.model.layers.parameters())
    embeddings = sum(p.nbytes for p in trainer.model.parameters()) - layers
    for kind in ("gradients", "weights"):
        assert layers <= held[kind]["host"] < layers + 4096, f"{kind} are packed, with padding"
    assert held["gradients"]["device"] == embeddings
    assert held["states"]["host"] >= 2 * layers and 2 * layers > held["states"]["device"] >= 2 * embeddings
    at_the_end = trainer.memory_summary()["held"]
    assert held["weights"] == at_the_end["weights"] and held["states"] == at_the_end["states"]


# The log.


class Ear(TrainerCallback):
    """What a tracker would see."""

    def __init__(self):
        self.heard = []

    def on_log(self, args, state, control, logs=None, **kwargs):
        self.heard.append(dict(logs))


def test_keys_reach_the_log_history_and_later_callbacks(tmp_path):
    before, after = Ear(), Ear()
    trainer = plain(tmp_path, before, MemoryProfilerCallback(), after)
    trainer.train()
    keys = {"memory/rss_gib", "memory/peak_rss_gib"}
    trained = [logs for logs in after.heard if "loss" in logs]
    assert len(trained) == 6 and all(keys <= logs.keys() for logs in trained)
    for logs, entry, record in zip(trained, trainer.state.log_history, lines(tmp_path)):
        assert entry["memory/rss_gib"] == logs["memory/rss_gib"] == record["host"]["rss"] / 2**30
        assert entry["memory/peak_rss_gib"] == record["host"]["peak_rss"] / 2**30
    assert not any(keys & logs.keys() for logs in before.heard), "callbacks before it are too early"
    assert not keys & trainer.state.log_history[-1].keys(), "the last entry is not of a step"


def test_attached_it_comes_before_trackers(tmp_path):
    tracker, profiler = Ear(), MemoryProfilerCallback()
    trainer = plain(tmp_path, tracker, profiler)
    assert profiler.attach(trainer) is profiler
    assert trainer.callback_handler.callbacks.count(profiler) == 1
    trainer.train()
    assert all("memory/rss_gib" in logs for logs in tracker.heard if "loss" in logs)


def test_peaks_in_the_log_are_those_since_the_last_time(tmp_path):
    trainer = plain(tmp_path, MemoryProfilerCallback(), logging_steps=3)
    trainer.train()
    records = lines(tmp_path)
    found = [e["memory/peak_rss_gib"] * 2**30 for e in trainer.state.log_history if "loss" in e]
    assert found == [max(r["host"]["peak_rss"] for r in part) for part in (records[:3], records[3:])]


# Nothing is lost.


def test_epochs_saves_and_resuming_append(tmp_path):
    values = {"max_steps": -1, "num_train_epochs": 2, "save_strategy": "steps", "save_steps": 4}
    first = MemoryProfilerCallback(account_every=1)
    trainer = plain(tmp_path, first, samples=20, **values)
    trainer.train()
    assert [r["step"] for r in lines(tmp_path)] == list(range(1, 11)), "two epochs of five batches"
    assert first.summary()["phases"]["save"]["records"] == 3
    with (tmp_path / "profile" / "steps.jsonl").open("a") as file:
        file.write('{"step": 11, "pha')  # as a kill may leave it
    again = MemoryProfilerCallback()
    shutil.rmtree(tmp_path / "checkpoint-10")
    plain(tmp_path, again, samples=20, **values).train(resume_from_checkpoint=str(tmp_path / "checkpoint-8"))
    text = (tmp_path / "profile" / "steps.jsonl").read_text().splitlines()
    assert text.pop(11) == '{"step": 11, "pha'
    records = [json.loads(line) for line in text]
    assert [r["step"] for r in records] == [0, *range(1, 11), 8, 9, 10]
    assert [r["step"] for r in records if "begun" in r] == [0, 8]
    assert records[12]["seconds"] < records[10]["seconds"], "the clock starts again"
    assert again.summary()["phases"]["train"]["records"] == 10, "the whole run, each step once"


def test_a_new_run_supersedes_the_one_before(tmp_path):
    plain(tmp_path, MemoryProfilerCallback(), max_steps=3).train()
    profiler = MemoryProfilerCallback()
    trainer = plain(tmp_path, profiler, max_steps=2)
    trainer.train()
    assert [record["step"] for record in all_lines(tmp_path)] == [0, 1, 2, 3, 0, 1, 2]
    assert [record["step"] for record in lines(tmp_path)] == [1, 2]
    assert profiler.summary()["phases"]["train"]["records"] == 2
    trainer.train()  # with the same object
    assert profiler.summary()["phases"]["train"]["records"] == 2


class Kill(TrainerCallback):
    """`kill -9` of the process."""

    def on_log(self, args, state, control, **kwargs):
        if state.global_step == 7:
            os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.processes
def test_a_killed_run_keeps_every_step(tmp_path):
    ended = forked(lambda: plain(tmp_path, MemoryProfilerCallback(), Kill(), max_steps=30).train())
    assert ended == -signal.SIGKILL
    assert [r["step"] for r in lines(tmp_path)] == list(range(1, 8))
    assert all_lines(tmp_path)[0]["max_steps"] == 30


# Bad input.


@pytest.mark.parametrize("steps", [0, 2.5, True])
def test_bad_arguments_are_refused(steps):
    with pytest.raises(ValueError, match=f"`account_every`.*`{steps}`"):
        MemoryProfilerCallback(account_every=steps)


def test_before_and_after_a_training_it_does_nothing(tmp_path):
    profiler = MemoryProfilerCallback()
    trainer = plain(tmp_path, profiler, max_steps=2)
    trainer.evaluate()
    assert not (tmp_path / "profile").exists() and profiler.summary()["peak"] is None
    trainer.train()
    trainer.evaluate()
    assert len(lines(tmp_path)) == 2
