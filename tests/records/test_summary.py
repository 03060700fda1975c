"""`hf_hybrid/records/summary.py`: the summary is a dictionary that displays itself, and its numbers are readable."""

import json

import pytest
from rig.pages import Page
from rig.run_folders import GIB, NASTY, leap

from hf_hybrid.records.summary import HybridSummary, format_bytes, format_number, format_seconds


def test_summary_is_a_dictionary_that_shows_itself():
    values = {
        "steps_by_phase": {"warmup": 5, "predict": 2},
        "seconds_by_phase": {"warmup": 1.5, "predict": 0.01},
        "real_steps": 5,
        "predicted_steps": 2,
        "backward_passes": 5,
        "leaps_by_verdict": {"kept": 150, "rolled_back": 50},
        "leaps_made": 200,
        "leaps": [leap(step) for step in range(100)],
        "divergence_events_seen": 30,
        "divergence_events": [{"reason": NASTY}] * 30,
        "direction": NASTY,
        "out_of_memory": [{"step": 3}],
        "learning_rate_scale": 4.0,
        "memory": {"held": {"total": {"device": 0, "host": 3 * GIB}}},
    }
    summary = HybridSummary(values)
    assert summary == values and json.loads(json.dumps(summary)) == values
    assert {**summary, "more": 1}["real_steps"] == 5
    text, page = str(summary), Page(summary._repr_html_())
    assert "warmup" in text and "1.5 s" in text and "leaps: 200 (150 kept, 50 rolled back)" in text
    assert "recovered from out of memory: 1 x" in text
    assert "divergence events: 30" in text and "3.00 GiB host" in text
    assert len(text) < 1000 and len(summary._repr_html_()) < 4000, "lists are folded"
    assert page.open == [] and "script" not in page.tags and NASTY in page.text and "200 (150 kept" in page.text


def test_images_and_turns_have_rows():
    values = {"images": 96, "images_shared": 72, "turns": 24, "tool_calls": 14, "tool_errors": 2}
    rows = [("turns", "24"), ("tool calls", "14"), ("tool errors", "2"), ("images", "96"), ("images shared", "72")]
    assert HybridSummary(values).savings_rows() == rows


def test_savings_that_did_not_work_have_a_row():
    assert "did not work" not in str(HybridSummary(failed_savings=[]))
    summary = HybridSummary(failed_savings=["no tree (KeyError: 1)", NASTY])
    assert f"savings that did not work: no tree (KeyError: 1); {NASTY}" in str(summary).splitlines()
    assert NASTY in Page(summary._repr_html_()).text


def test_summary_of_a_run_that_did_nothing():
    assert str(HybridSummary()) == "" and Page(HybridSummary()._repr_html_()).open == []
    assert str(HybridSummary(memory={"held": None})) == ""


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        (format_bytes(0), "0 B"),
        (format_bytes(1536), "1.50 KiB"),
        (format_bytes(12.4 * GIB), "12.4 GiB"),
        (format_bytes(None), "–"),
        (format_seconds(0.0421), "42.1 ms"),
        (format_seconds(61), "61.0 s"),
        (format_seconds(245), "4 min 05 s"),
        (format_seconds(8000), "2 h 13 min"),
        (format_number(1234567), "1,234,567"),
        (format_number(0.25), "0.250"),
        (format_number(-12.345), "-12.3"),
        (format_number(3e-5), "3e-05"),
        (format_number(float("inf")), "inf"),
    ],
)
def test_numbers_are_readable(shown, expected):
    assert shown == expected
