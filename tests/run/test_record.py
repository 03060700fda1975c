"""`hf_hybrid/run/record.py`: a record stays small over a long run and its counts exact; speed is of training steps."""

import json
import logging
from dataclasses import asdict
from types import SimpleNamespace

import pytest
import torch

from hf_hybrid.part import Leap
from hf_hybrid.run import record as record_module
from hf_hybrid.run import run as run_module
from hf_hybrid.run.record import MOST_EVENTS, MOST_LEAPS, RunRecord, Speed
from hf_hybrid.run.run import Run


def long_record(leaps):
    record = RunRecord()
    for step in range(leaps):
        leap = Leap(step, real_steps=1, verdict=("kept", "rejected", "unprobed")[step % 3])
        record.add_leap(leap)
        if step % 100 == 0:
            leap.verdict = "rolled_back"  # Correct judges a leap that is in the record already
        record.add_event({"step": step, "reason": "risen"})
        record.add_scale(step, 2.0 if step % 2 else 1.0)
    return record


def test_counts_are_exact_although_only_the_last_entries_are_kept():
    summary = long_record(3000).summary()
    assert summary["leaps_made"] == summary["divergence_events_seen"] == 3000
    assert summary["leaps_by_verdict"] == {"rolled_back": 30, "kept": 990, "rejected": 990, "unprobed": 990}
    kept = {"leaps": MOST_LEAPS, "divergence_events": MOST_EVENTS, "learning_rate_scales": MOST_EVENTS}
    for name, most in kept.items():
        assert [entry["step"] for entry in summary[name]] == list(range(3000 - most, 3000))


def test_its_size_does_not_grow():
    sizes = [len(json.dumps(asdict(long_record(leaps)))) for leaps in (2 * MOST_LEAPS, 200 * MOST_LEAPS)]
    assert sizes[1] < 1.1 * sizes[0]


def test_it_is_restored_whole():
    record, restored = long_record(250), RunRecord()
    restored.load_state_dict(json.loads(json.dumps(asdict(record))))
    assert restored == record and restored.summary() == record.summary()


def test_a_scale_is_kept_where_it_changed():
    record = RunRecord()
    for step, scale in enumerate((1.0, 1.05, 1.2, 1.25, 1.0)):
        record.add_scale(step, scale)
    assert record.learning_rate_scales == [{"step": 2, "scale": 1.2}, {"step": 4, "scale": 1.0}]


# Speed.

ADVICE = "Raise the batch."


class Samples:
    """A driver: it hands out, reading by reading, how often it saw the device compute in how many percent."""

    def __init__(self, *readings):
        self.readings, self.reads = list(readings), 0

    def utilization(self):
        self.reads += 1
        count, percent = self.readings.pop(0) if self.readings else (0, 0)
        return [percent] * count


class Course:
    """A run without a trainer, and the clock of its test."""

    def __init__(self, monkeypatch, *readings, advice=ADVICE, **speed):
        self.now, self.driver, self.step = 0.0, Samples(*readings), 0
        clock = SimpleNamespace(perf_counter=lambda: self.now)
        monkeypatch.setattr(run_module, "time", clock)
        monkeypatch.setattr(record_module, "time", clock)
        self.run = Run(speed=Speed(self.driver, advice, **speed))

    def make_step(self, seconds, *batches, waits=0.0):
        self.now += waits  # for its batches
        self.run.begin_step(self.step, batches)
        self.now += seconds
        self.run.end_step()
        self.step += 1

    def end(self):
        self.run.amend_logs(self.step, {"train_runtime": 1.0})
        return self.run.summary()


def batch(real, padding=0):
    mask = torch.tensor([[1] * real + [0] * padding])
    return {"input_ids": torch.ones_like(mask), "attention_mask": mask}


def test_speed_is_that_of_training_steps_and_of_tokens_without_padding(monkeypatch, caplog):
    stale, warm_up, evaluation = (99, 100), (50, 1), (30, 90)
    course = Course(monkeypatch, stale, warm_up, (6, 40), evaluation, (6, 20))
    course.make_step(10, batch(30, 20), batch(20))
    course.make_step(3, {"input_ids": torch.ones(2, 15)}, waits=1)
    course.now += 1  # a log, which waits for the device
    course.run.before_export()
    course.now += 85  # an evaluation
    course.run.before_export()
    course.now += 5  # a save
    course.make_step(4, batch(20, 30))
    course.now += 1
    summary = course.end()
    assert course.run.speed.seconds == 10 + 1 + 3 + 1 + 4 + 1 and summary["tokens_per_second"] == 100 / 20
    assert summary["device_share"] == pytest.approx(0.3)
    hint = f"The host is the limit: the device computed in 30 % of the time. {ADVICE}"
    assert summary["speed_hint"] == hint and [record.getMessage() for record in caplog.records] == [hint]
    course.now += 1000
    course.run.before_export()
    assert course.run.summary() == summary, "what follows is no training"


@pytest.mark.parametrize(
    "readings, options, share",
    [
        ((12, 70), {}, 0.7),
        ((12, 95), {}, 0.95),
        ((9, 20), {}, None),  # too few to say
        ((12, 0), {}, None),  # of a driver that does not know
        ((0, 0), {}, None),
        ((12, 20), {"advice": None}, 0.2),  # streamed layers, for example
        ((12, 20), {"tokens": None}, 0.2),  # processes share batches
    ],
)
def test_there_is_a_hint_only_where_the_host_is_known_to_be_the_limit(monkeypatch, caplog, readings, options, share):
    course = Course(monkeypatch, (0, 0), (0, 0), readings, **options)
    course.make_step(1, batch(8))
    course.make_step(1, batch(8))
    summary = course.end()
    assert summary["device_share"] == share and summary["speed_hint"] is None and not caplog.records
    assert summary["tokens_per_second"] == (None if "tokens" in options else 8)


def test_batches_without_tokens_have_no_speed_and_no_hint(monkeypatch, caplog):
    caplog.set_level(logging.INFO)
    course = Course(monkeypatch, (0, 0), (0, 0), (12, 20))
    course.make_step(1, batch(8))
    course.make_step(1, [{"prompt": "a"}])  # of a trainer that generates
    course.make_step(1, batch(8))
    summary = course.end()
    assert summary["tokens_per_second"] is None is summary["speed_hint"] and not caplog.records


def test_the_driver_is_read_every_five_seconds_whatever_is_logged(monkeypatch):
    course = Course(monkeypatch)
    for _ in range(100):
        course.make_step(0.5, batch(1))
        course.run.amend_logs(course.step, {"loss": 1.0})
    assert course.driver.reads == 2 + 9, "before and after the first step, and in the 49.5 s that follow"


def test_a_run_that_ends_before_its_first_step_has_no_speed(monkeypatch):
    summary = Course(monkeypatch).end()
    assert summary["tokens_per_second"] is summary["device_share"] is None
