"""`RunLog` of `hf_hybrid/records/log.py`: what a profiled run writes, by process, and when the disk is full."""

import json

import pytest
import torch

from hf_hybrid.records.log import RunLog


def lines(folder, name="steps.jsonl"):
    return [json.loads(line) for line in (folder / "profile" / name).read_text().splitlines()]


def test_other_processes_write_their_own_files_only(tmp_path):
    first, second = RunLog(tmp_path / "profile"), RunLog(tmp_path / "profile", rank=1)
    for log in (first, second):
        log.write("run.json", {"processes": 2})
        log.add_step({"step": 1, "rank": log.rank})
        log.write("summary.json", {})
    second.write_out_of_memory(4, {})
    assert sorted(path.name for path in (tmp_path / "profile").iterdir()) == [
        "oom-4-rank1", "run.json", "steps-rank1.jsonl", "steps.jsonl", "summary.json",
    ]  # fmt: skip
    assert lines(tmp_path, "steps-rank1.jsonl") == [{"step": 1, "rank": 1}] == list(second.records())
    again = RunLog(tmp_path / "profile", rank=1, resumed=True)
    again.add_step({"step": 2})
    anew = [line["step"] for line in lines(tmp_path, "steps-rank1.jsonl")]
    other = RunLog(tmp_path / "profile", rank=1)
    other.add_step({"step": 5})
    assert anew == [1, 2] and lines(tmp_path, "steps-rank1.jsonl") == [{"step": 5}]


def test_what_json_cannot_hold_becomes_null(tmp_path):
    log = RunLog(tmp_path / "profile")
    log.add_step({"step": 1, "host": {"rss": float("nan"), "pinned": torch.tensor(2.5), "peak": float("inf")}})
    text = (tmp_path / "profile" / "steps.jsonl").read_text()
    assert json.loads(text, parse_constant=pytest.fail)["host"] == {"rss": None, "pinned": 2.5, "peak": None}


def test_files_written_whole_do_not_end_it_either(tmp_path, caplog):
    log = RunLog(tmp_path / "profile")
    (tmp_path / "profile" / "oom-1").write_text("in the way")
    assert not log.write_out_of_memory(1, {})
    log.write("summary.json", {})
    log.write("run.json", {})
    assert caplog.text.count("cannot be written") == 1, "after the first, nothing is tried"
    assert [path.name for path in (tmp_path / "profile").iterdir()] == ["oom-1"]


def test_half_a_line_costs_no_other_line_and_a_link_is_not_followed(tmp_path, caplog):
    log = RunLog(tmp_path / "profile")
    log.add_step({"step": 1})
    with (tmp_path / "profile" / "steps.jsonl").open("a") as file:
        file.write('{"step": 2, "dev')  # as a full disk leaves it, also in the middle of a run
    log.add_step({"step": 3})
    assert [line["step"] for line in log.records()] == [1, 3]
    resumed = RunLog(tmp_path / "profile", resumed=True)
    resumed.add_step({"step": 2})
    resumed.add_step({"step": 3})
    assert [line.get("resumed") for line in log.records()] == [None, None, True, None]
    target = tmp_path / "of_another_user"
    (tmp_path / "profile" / "steps-rank1.jsonl").symlink_to(target)
    RunLog(tmp_path / "profile", rank=1, resumed=True).add_step({"step": 3})
    assert not target.exists() and "steps-rank1.jsonl` cannot be written" in caplog.text
