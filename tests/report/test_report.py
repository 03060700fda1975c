"""Reports: what is read of a run's folder, finished, killed, resumed or broken, and what is told of it."""

import json
import math
import sys

import pytest
from rig import trainers
from rig.run_folders import GIB, NASTY, hybrid_run, leap, log, phases, plain_run, profile, step_record, write
from transformers import TrainerCallback

from hf_hybrid.records.log import load_log
from hf_hybrid.records.profiler import MemoryProfilerCallback
from hf_hybrid.report.findings import PROFILER_HINT, findings
from hf_hybrid.report.page import write_report
from hf_hybrid.report.run_folder import load_run


@pytest.fixture
def undrawn(monkeypatch):
    """Without matplotlib, as plots take most of the time."""
    monkeypatch.setitem(sys.modules, "matplotlib", None)


def write_log(folder, lines):
    (folder / LOG).write_text("".join(json.dumps(line) + "\n" for line in lines))


def series_by_name(found):
    return {(row["panel"], row["name"]): row["points"] for row in found["series"]}


def test_a_finished_run(tmp_path):
    hybrid_run(tmp_path)
    found = findings(load_run(tmp_path))
    numbers = found["headline"]
    assert found["finished"] and found["status"] == "Finished at step 100 of 100."
    assert numbers["final_loss"]["held_out"] == pytest.approx(3.1)
    assert numbers["final_loss"]["training"] == pytest.approx(3.0)
    assert numbers["steps"] == {"total": 100, "real": 96, "predicted": 4, "planned": 100}
    assert numbers["backward_passes"]["done"] == 96 and numbers["backward_passes"]["avoided"] == 4
    assert numbers["seconds"]["value"] == pytest.approx(50.0)
    assert numbers["peak_memory"] is None and PROFILER_HINT in found["notes"]
    assert found["leaps"]["made"] == 3 and found["leaps"]["accepted"] == 2
    assert found["memory"]["held_at_the_end"]["weights"] == {"device": 0, "host": 4096}
    assert found["options"]["learning_rate"] == 1e-3


def test_savings_that_did_not_work_are_named(tmp_path, undrawn):
    hybrid_run(tmp_path)
    path = tmp_path / "hybrid_summary.json"
    summary = json.loads(path.read_text())
    for failed, expected in (([], []), ("text", []), (["no tree (KeyError: 1)", 7, NASTY], ["no tree", NASTY])):
        write(path, {**summary, "failed_savings": failed})
        page, found, *_ = write_report(tmp_path)
        named = json.loads(found.read_text())["savings"].get("savings that did not work", "")
        assert bool(named) == bool(expected) and all(part in named for part in expected)
        assert not expected or "no tree (KeyError: 1)" in page.read_text() and NASTY not in page.read_text()


def test_a_killed_run_is_told_from_its_last_checkpoint_and_what_was_profiled_after_it(tmp_path):
    leaps = hybrid_run(tmp_path, steps=80, finished=False)
    so_far = phases(leaps, 93)
    profile(tmp_path, [step_record(step, so_far[step]) for step in range(1, 94)])
    last = {"step": 90, "loss": 1.5, "learning_rate": 1e-4, "hybrid/backward_passes": 86.0, "seconds": 93.0}
    lines = [{"step": 80, "begun": True}, {**last, "hybrid/predicted_steps": 4, "hybrid/leaps": 5}]
    write_log(tmp_path, lines)
    recovery = {"policy": {}, "events": [{"step": 7, "action": "smaller micro-batches"}]}
    state = tmp_path / "checkpoint-80" / "hybrid_state.json"
    saved = json.loads(state.read_text())
    write(state, {**saved, "parts": {**saved["parts"], "out_of_memory": recovery}})
    path = tmp_path / "profile" / "steps.jsonl"
    path.write_bytes(path.read_bytes() + b'{"step": 94, "phase": "fu\xff')
    run = load_run(tmp_path)
    found = findings(run)
    assert not run.finished and "Did not finish" in found["status"] and "step 93 of 100" in found["status"]
    assert run.record_source == "checkpoint-80/hybrid_state.json"
    assert found["headline"]["final_loss"]["training"] == 1.5
    assert found["headline"]["steps"] == {"total": 93, "real": 89, "predicted": 4, "planned": 100}
    assert found["headline"]["backward_passes"] == {"done": 86.0, "avoided": None, "forward_only": None, "step": 90}
    assert found["headline"]["seconds"]["value"] == 93.0
    assert found["recoveries"] == [{"step": 7, "action": "smaller micro-batches"}]
    assert found["memory"]["by_phase"]["full"]["records"] == 75
    notes = " ".join(found["notes"])
    assert "1 of 95 lines of `steps.jsonl`" in notes and "2 of 5 leaps left no record" in notes
    assert [entry["step"] for entry in run.logs][-1] == 90


def test_half_written_checkpoints_are_passed_over(tmp_path):
    hybrid_run(tmp_path, steps=80, finished=False)
    (tmp_path / "checkpoint-80" / "trainer_state.json").write_text('{"global_step": 80, "log_hist')
    run = load_run(tmp_path)
    assert run.record_source == "checkpoint-40/hybrid_state.json" and run.last_step == 40
    assert any("`trainer_state.json` in `checkpoint-80`" in note for note in run.notes)


def test_a_summary_of_an_earlier_end_is_older_than_a_later_checkpoint(tmp_path):
    hybrid_run(tmp_path, steps=40)
    summary = (tmp_path / "hybrid_summary.json").read_text()
    hybrid_run(tmp_path, steps=80, finished=False)
    (tmp_path / "hybrid_summary.json").write_text(summary)
    run = load_run(tmp_path)
    assert run.record_source == "checkpoint-80/hybrid_state.json" and not run.finished


def test_steps_that_a_resumed_run_trained_again_count_once(tmp_path):
    plain_run(tmp_path, steps=40)
    first = [step_record(step, "train") for step in range(1, 61)]
    again = [step_record(step, "train", seconds=step - 40.0, device=False) for step in range(41, 56)]
    profile(tmp_path, [*first, {"step": 40, "begun": True, "max_steps": 100}, *again])
    run = load_run(tmp_path)
    steps = [entry for entry in run.profile.lines if "begun" not in entry]
    assert [entry["step"] for entry in steps] == list(range(1, 56))
    assert steps[40]["device"] is None and steps[39]["device"] is not None
    assert run.last_step == 55


def test_plain_trainer(tmp_path):
    plain_run(tmp_path)
    found = findings(load_run(tmp_path))
    assert found["headline"]["steps"]["real"] == 100 and found["headline"]["backward_passes"]["done"] is None
    assert found["leaps"] is None and found["phases"] == {}
    (tmp_path / "home").mkdir()
    (tmp_path / "report").symlink_to(tmp_path / "home")
    files = {path.name for path in write_report(tmp_path)}
    assert not any((tmp_path / "home").iterdir())  # nothing is written through a link
    assert files == {"loss.png", "rate.png", "report.html", "report.json"}


@pytest.mark.parametrize("content", [None, "empty", "config", "garbage"])
def test_folders_without_a_run_say_what_is_missing(tmp_path, content):
    folder = tmp_path / "out"
    expected = "is not a folder"
    if content is not None:
        folder.mkdir()
        expected = "nothing to report on"
    if content == "config":
        write(folder / "hybrid_config.json", {"learning_rate": 1e-3})
        expected = "has logged and saved nothing"
    if content == "garbage":
        write(folder / "hybrid_summary.json", [1, 2])
        write(folder / "checkpoint-x" / "trainer_state.json", {})
        write(folder / "checkpoint-5" / "trainer_state.json", {"log_history": "none", "global_step": "five"})
        (folder / "profile").mkdir()
        (folder / "profile" / "steps.jsonl").write_text("null\n[]\n{}\n")
        (folder / LOG).write_text("null\n[]\n{}\n")
    with pytest.raises(ValueError, match=expected) as error:
        load_run(folder)
    named = "3 of 3 lines of `hybrid_log.jsonl`" in str(error.value)
    assert named == (content == "garbage"), "what is broken is named"


def test_values_that_are_no_numbers_are_left_out(tmp_path, undrawn):
    hybrid_run(tmp_path, leaps=[leap(20, e=None, gain="high", loss_after=None), leap(50)])
    path = tmp_path / "checkpoint-100" / "trainer_state.json"
    state = json.loads(path.read_text())
    state["log_history"] += [{"step": 99, "loss": math.nan}, {"step": 99, "loss": "inf"}, {"loss": 1.0}, 7]
    path.write_text(json.dumps(state))
    summary = json.loads((tmp_path / "hybrid_summary.json").read_text())
    summary["leaps"] += [{"verdict": "kept"}, "leap", None]
    write(tmp_path / "hybrid_summary.json", summary)
    files = write_report(tmp_path)
    found = json.loads(files[1].read_text())
    assert found["headline"]["final_loss"]["training"] == pytest.approx(3.0)
    assert found["leaps"]["made"] == 2


DEEP = "[" * 5000 + "]" * 5000
SUMMARY, STATE, LOG = "hybrid_summary.json", "checkpoint-100/trainer_state.json", "hybrid_log.jsonl"


@pytest.mark.parametrize(
    ("name", "content"),
    [
        (SUMMARY, {"steps_by_phase": {"warmup": 1e12, "predict": 1e12}, "leaps": [leap(5, horizon=10**15)]}),
        (SUMMARY, {"steps_by_phase": 3, "divergence_events": 5, "leaps_by_verdict": {"kept": "x", "a": None}}),
        (SUMMARY, {"steps_by_phase": {"full": 10**400}, "leaps": [leap(10**400), leap(-1, verdict=[1])]}),
        (SUMMARY, DEEP),
        (STATE, {"global_step": 1e300, "max_steps": 1e30, "log_history": [{"step": 1e30, "loss": 1e308}]}),
        (STATE, {"global_step": 100, "log_history": [{"step": 3, "loss": 1e308, "hybrid/phase": 2.5}]}),
        (LOG, DEEP),
        (LOG, "\0\x01\x02" * 5000),
        (LOG, '{"step": 7, "leap": 5, "event": [1]}\n{"step": 9, "leap": {"step": "x"}}\n{"step": {}}\n7\n'),
        ("profile/steps.jsonl", '{"step": 0, "begun": 1, "device": 7}\n{"step": 1, "phase": 3}\n7\n'),
    ],
    ids=lambda value: value if isinstance(value, str) and len(value) < 40 else "",
)
def test_a_report_is_made_of_what_makes_sense(tmp_path, undrawn, name, content):
    hybrid_run(tmp_path)
    profile(tmp_path, [step_record(1, "full")])
    path = tmp_path / name
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    written = write_report(tmp_path)
    assert all(file.stat().st_size < 1e6 for file in written)
    if isinstance(content, str):
        assert f"`{path.name}`" in " ".join(json.loads(written[1].read_text())["notes"])


def test_a_log_adds_nothing_to_what_the_checkpoints_of_a_whole_run_say(tmp_path):
    leaps = hybrid_run(tmp_path)
    before = load_run(tmp_path)
    log(tmp_path, leaps)
    after = load_run(tmp_path)
    assert after.leaps == before.leaps == leaps and after.series("loss") == before.series("loss")
    assert findings(after)["leaps"] == findings(before)["leaps"] and len(after.events) == 1


def test_a_run_that_ended_and_was_resumed_with_more_steps_has_not_finished(tmp_path):
    lines = [{"step": 0, "begun": True}, {"step": 50, "loss": 2.0}, {"step": 50, "train_runtime": 3.0}]
    lines += [{"step": 50, "begun": True}, {"step": 60, "loss": 1.0}]
    write_log(tmp_path, lines)
    found = findings(load_run(tmp_path))
    assert not found["finished"] and found["headline"]["seconds"]["value"] is None


def test_a_history_with_two_losses_at_a_step_is_still_of_one_run(tmp_path):
    plain_run(tmp_path)
    path = tmp_path / "checkpoint-100" / "trainer_state.json"
    state = json.loads(path.read_text())
    state["log_history"].insert(1, {"step": 10, "loss": 7.0})
    path.write_text(json.dumps(state))
    assert load_run(tmp_path).last_step == 100


def test_trials_of_a_search_are_named_where_nothing_else_is(tmp_path):
    write(tmp_path / "run-0" / "hybrid_log.jsonl", {"step": 0, "begun": True})
    with pytest.raises(ValueError, match="trials of a search, `run-0`. Pass the folder of one"):
        load_run(tmp_path)


def test_wall_time_adds_up_over_the_starts_of_a_run(tmp_path):
    lines = [{"step": 0, "begun": True}, {"step": 9, "loss": 7.0, "seconds": 99.0}]  # an earlier run
    lines += [{"step": 0, "begun": True}, {"step": 50, "loss": 2.0, "seconds": 10.0}]  # killed, saved at step 40
    lines += [{"step": 40, "begun": True}, {"step": 50, "loss": 2.0, "seconds": 2.0}]
    lines += [{"step": 60, "train_runtime": 5.0}, {"step": 60, "eval_loss": 1.0, "seconds": 300.0}]
    write_log(tmp_path, lines)
    seconds = findings(load_run(tmp_path))["headline"]["seconds"]
    assert seconds == {"value": 15.0, "source": "log, over 2 starts"} and load_log(tmp_path).wall_time() == (15.0, 2)


def test_the_report_of_a_long_run_has_all_of_it(tmp_path, undrawn):
    leaps = [leap(step, ("kept", "rejected")[step % 2]) for step in range(0, 6_000, 3)]
    hybrid_run(tmp_path, leaps=[])
    lines = [{"step": made["step"] + 1, "leap": made} for made in leaps]
    lines += [{"step": step, "event": {"step": step, "reason": "risen"}} for step in range(6_001, 8_001)]
    lines += [{"step": step, "loss": 1.0} for step in range(8_001, 10_001)]
    write_log(tmp_path, [{"step": 0, "begun": True}, *lines])
    page, numbers = write_report(tmp_path)
    assert page.stat().st_size < 500_000, "of a table the page has the last rows"
    found = json.loads(numbers.read_text())
    assert found["leaps"]["by_verdict"] == {"kept": 1000, "rejected": 1000} and found["events_seen"] == 2000
    assert len(found["leap_records"]) == len(found["events"]) == 2000
    assert len(series_by_name(found)["loss (nats)", "training"]) == 2000


# Memory.


def test_memory_of_a_profiled_run(tmp_path):
    leaps = hybrid_run(tmp_path)
    records = [step_record(step, phase) for step, phase in phases(leaps, 100).items()]
    records[59]["device"] = {**records[59]["device"], "peak_allocated": 20 * GIB}
    records.insert(50, step_record(50, "evaluate"))
    profile(tmp_path, records)
    found = findings(load_run(tmp_path))
    memory = found["memory"]
    assert found["headline"]["peak_memory"] == {"bytes": 20 * GIB, "where": "device", "step": 60, "phase": "full"}
    full = memory["by_phase"]["full"]
    accounted, peak = full["accounted"], full["peak_allocated"]
    assert accounted["held"]["states"] == {"device": 4 * GIB, "host": GIB} and accounted["unexplained"] == 6 * GIB
    assert peak["max"] == 20 * GIB and peak["min"] == 12 * GIB
    assert peak["mean"] == pytest.approx((12 * (full["records"] - 1) + 20) * GIB / full["records"])


def test_everything_by_step_is_in_the_json(tmp_path, undrawn):
    leaps = hybrid_run(tmp_path)
    records = [step_record(step, phase) for step, phase in phases(leaps, 100).items()]
    records[1]["nvml"] = None
    records[2] |= {"nvml": None, "device": None}
    profile(tmp_path, records)
    found = json.loads(write_report(tmp_path, tmp_path / "elsewhere")[1].read_text())
    assert [path.name for path in (tmp_path / "elsewhere").iterdir() if path.suffix == ".csv"] == []
    series = series_by_name(found)
    assert series["device", "peak allocated"][:3] == [[1, 12 * GIB], [2, 12 * GIB], [4, 12 * GIB]]
    assert series["device", "whole device (NVML)"][:2] == [[1, 14 * GIB], [4, 14 * GIB]]
    assert len(series["host", "process (RSS)"]) == 100 and ("host", "pinned") not in series
    assert dict(series["loss (nats)", "training"])[10] == pytest.approx(4.8)
    assert series["learning rate", "learning rate"][0][1] > 0
    assert [record["verdict"] for record in found["leap_records"]] == ["kept", "rejected", "kept"]


# Phases.


def test_a_run_without_leaps_has_no_phases(tmp_path):
    hybrid_run(tmp_path, leaps=[])
    found = findings(load_run(tmp_path))
    assert found["phases"] == {} and found["leaps"] is None
    assert found["headline"]["steps"] == {"total": 100, "real": 100, "predicted": 0, "planned": 100}
    profile(tmp_path, [step_record(step, "warmup" if step < 10 else "full") for step in range(1, 101)])
    found = findings(load_run(tmp_path))
    assert found["phases"] == {} and found["memory"]["by_phase"].keys() == {"train"}
    assert found["memory"]["by_phase"]["train"]["records"] == 100


# Accuracy, reward and speed.


def logged(folder, lines):
    """A run of ten steps with these lines in its log, between its begin and its end."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = [{"step": 0, "begun": True, "max_steps": 10}, *lines]
    write_log(folder, lines)
    return load_run(folder)


@pytest.mark.parametrize(
    ("key", "name"),
    [("mean_token_accuracy", "Token acc"), ("rewards/accuracies", "Preference acc"), ("reward", "Reward")],
)
def test_accuracy_or_reward_is_what_the_trainer_logs(tmp_path, key, name):
    lines = [{"step": step, "loss": 1.0, key: value} for step, value in ((1, 0.2), (5, 0.9), (10, 0.6))]
    lines.append({"step": 10, f"eval_{key}": 0.7})
    found = findings(logged(tmp_path, lines))["scores"]
    training = {"first": 0.2, "last": 0.6, "step": 10, "best": 0.9, "best_step": 5}
    held_out = {"first": 0.7, "last": 0.7, "step": 10, "best": 0.7, "best_step": 10}
    assert found == {key: {"name": name, "training": training, "held_out": held_out}}


def test_a_run_that_logged_none_of_it_has_none_of_it(tmp_path):
    run = logged(tmp_path, [{"step": 10, "loss": 1.0}])
    found = findings(run)
    assert found["scores"] == {} and found["samples"] == [] and found["headline"]["tokens_per_second"] is None
    assert {row["figure"] for row in found["series"]} == {"loss"}


def test_the_speed_of_a_run_that_ended_is_that_of_its_summary(tmp_path):
    hint = "The host is the limit: the device computed in 38 % of the time. A larger `batch` helps."
    lines = [{"step": step, "loss": 1.0, "num_tokens": 100 * step, "seconds": float(step)} for step in (1, 2)]
    summary = {"tokens_per_second": 250.0, "device_share": 0.38, "speed_hint": hint, "steps_by_phase": {"full": 2}}
    found = findings(logged(tmp_path, [*lines, {"step": 2, "train_runtime": 9.0, "summary": summary}]))
    source = "without evaluation and saving; the device computed in 38 % of the time"
    assert found["headline"]["tokens_per_second"] == {"value": 250.0, "source": source}
    assert hint in found["notes"]


def test_without_a_summary_tokens_per_second_are_as_they_were_logged(tmp_path):
    plain_run(tmp_path)
    path = tmp_path / STATE
    state = json.loads(path.read_text())
    state["log_history"][-1] |= {"num_input_tokens_seen": 900, "train_tokens_per_second": 12.5}
    write(path, state)
    found = findings(load_run(tmp_path))["headline"]["tokens_per_second"]
    assert found == {"value": 12.5, "source": "logged by the trainer"}


def test_gradient_norms_are_those_that_a_logarithmic_axis_can_show(tmp_path):
    lines = [{"step": step, "loss": 1.0, "grad_norm": norm} for step, norm in ((1, 1.0), (2, 9.0), (3, 0.0), (4, 2.0))]
    found = findings(logged(tmp_path, lines))
    assert series_by_name(found)["gradient norm", "training"] == [(1, 1.0), (2, 9.0), (4, 2.0)]


# The real thing.


class Stop(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 27:
            raise KeyboardInterrupt


def test_a_real_run_that_was_cut_short(tmp_path):
    profiler = MemoryProfilerCallback(account_every=1)
    options = {"samples": 160, "save_strategy": "steps", "save_steps": 20, "probe_budget": 0.2}
    trainer = trainers.build(tmp_path, callbacks=[profiler, Stop()], **options)
    profiler.attach(trainer)
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    path = tmp_path / "profile" / "steps.jsonl"
    path.write_bytes(path.read_bytes()[:-20])  # as a kill leaves it
    files = {path.name for path in write_report(tmp_path)}
    assert {"memory.png", "loss.png", "rate.png"} <= files
    found = json.loads((tmp_path / "report" / "report.json").read_text())
    assert not found["finished"] and found["headline"]["steps"]["planned"] == 30
    assert found["headline"]["steps"]["total"] >= 25 and found["headline"]["peak_memory"]["where"] == "host"
    assert {"warmup", "full", "predict", "correct"} == found["phases"].keys() == found["memory"]["by_phase"].keys()
    assert found["memory"]["by_phase"]["warmup"]["accounted"]["held"]["weights"]["host"] > 0


def test_a_checkpoint_that_is_committed_late_takes_no_steps_away(tmp_path):
    """It is written behind the steps, so its line stands behind theirs."""
    losses = [{"step": step, "loss": 3 - step / 100, "seconds": step / 10} for step in range(1, 25)]
    late = {"step": 20, "sealed": {"model.safetensors": "0" * 32}, "seconds": 2.5}
    lines = [{"step": 0, "begun": True, "max_steps": 36}, *losses, late]
    write_log(tmp_path, lines)
    run = load_run(tmp_path)
    assert run.last_step == 24 and [step for step, _ in run.series("loss")] == list(range(1, 25))


def test_a_run_that_writes_no_summary_has_its_savings_in_the_log(tmp_path):
    """As of GRPO: with `enable_predict=False` the folder has no file of ours but the log."""
    summary = {"steps_by_phase": {"full": 0}, "rows": 48, "rows_skipped": 13, "learning_rate_scale": 1.0}
    end = {"step": 10, "train_runtime": 9.0, "summary": summary}
    found = findings(logged(tmp_path, [{"step": step, "loss": 0.0, "reward": step / 10} for step in (5, 10)] + [end]))
    assert found["savings"] == {"rows": "48", "rows skipped": "13"} and found["finished"]
    assert found["headline"]["backward_passes"]["done"] is None and found["headline"]["steps"]["total"] == 10
    assert not any("No record" in note for note in found["notes"])
