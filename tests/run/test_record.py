"""`hf_hybrid/run/record.py`: a record stays small over a long run, and its counts stay exact."""

import json
from dataclasses import asdict

from hf_hybrid.run.record import MOST_EVENTS, MOST_LEAPS, Leap, RunRecord


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
