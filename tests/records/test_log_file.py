"""`hybrid_log.jsonl`: what a run writes as it goes, and what of it holds after kills, resumes and new beginnings."""

import json
from pathlib import Path

import pytest
import torch
from conftest import ByteText
from rig.trainers import train
from transformers import TrainerCallback

from hf_hybrid.records.log import LOG_NAME, LogFile, load_log
from hf_hybrid.report.findings import findings
from hf_hybrid.report.run_folder import load_run


def steps_of(folder):
    """Of the lines after the first."""
    return [line["step"] for line in load_log(folder).lines if "begun" not in line]


def log_of(folder, *, begun=0):
    log = LogFile(folder, writes=True)
    log.begin(begun, 20)
    return log


def test_lines_that_a_resumed_run_makes_again_are_superseded(tmp_path):
    log = log_of(tmp_path)
    for step in (10, 20, 30):
        log.add({"step": step, "loss": 1.0})
    log_of(tmp_path, begun=20).add({"step": 25, "loss": 2.0})
    assert steps_of(tmp_path) == [10, 20, 25]
    assert len((tmp_path / LOG_NAME).read_text().splitlines()) == 6, "nothing is rewritten"


def test_a_new_run_supersedes_an_old_one(tmp_path):
    log_of(tmp_path).add({"step": 0, "eval_loss": 1.0})
    log_of(tmp_path).add({"step": 10, "loss": 2.0})
    assert steps_of(tmp_path) == [10]


def test_only_the_first_process_writes_and_only_in_a_training(tmp_path):
    other = LogFile(tmp_path, writes=False)
    other.begin(0, 20)
    LogFile(tmp_path, writes=True).add({"step": 0, "eval_loss": 1.0})
    assert not (tmp_path / LOG_NAME).exists()


def test_half_a_line_costs_no_other_line(tmp_path):
    log_of(tmp_path).add({"step": 10, "loss": 1.0})
    path = tmp_path / LOG_NAME
    path.write_bytes(path.read_bytes() + b'{"step": 20, "lo')
    log_of(tmp_path, begun=10).add({"step": 20, "loss": float("nan")})
    notes = []
    assert [line.get("loss") for line in load_log(tmp_path, notes).lines] == [None, 1.0, None, None]
    assert "1 of 5 lines" in notes[0]


def test_a_file_that_cannot_be_written_ends_no_training(tmp_path, caplog):
    (tmp_path / LOG_NAME).mkdir()
    log = log_of(tmp_path)
    log.add({"step": 10, "loss": 1.0})
    assert caplog.text.count("cannot be written") == 1


def test_a_link_in_a_shared_folder_is_not_followed(tmp_path):
    target = tmp_path / "of_another_user"
    target.write_text("precious")
    (tmp_path / LOG_NAME).symlink_to(target)
    log_of(tmp_path).add({"step": 10, "loss": 1.0})
    assert target.read_text() == "precious"


def test_what_json_cannot_hold_becomes_null(tmp_path):
    log_of(tmp_path).add({"step": 1, "host": {"rss": float("nan"), "pinned": torch.tensor(2.5), "peak": float("inf")}})
    line = json.loads((tmp_path / LOG_NAME).read_text().splitlines()[-1], parse_constant=pytest.fail)
    assert line["host"] == {"rss": None, "pinned": 2.5, "peak": None}


class Stop(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 27:
            raise KeyboardInterrupt


def trained(folder, **options):
    return train(folder, **{"samples": 160, "save_strategy": "steps", "save_steps": 20, "logging_steps": 4, **options})


def lines_of(folder):
    """The log without what the clock says."""
    lines = [line for line in load_log(folder).lines if "begun" not in line and "train_runtime" not in line]
    return sorted(json.dumps({**line, "seconds": None}, sort_keys=True) for line in lines)


def test_a_run_that_was_killed_and_resumed_has_the_log_of_one_that_was_not(tmp_path):
    whole = trained(tmp_path / "whole", max_steps=36)
    with pytest.raises(KeyboardInterrupt):
        trained(tmp_path / "killed", max_steps=36, callbacks=[Stop()])
    before = load_run(tmp_path / "killed")
    assert before.last_step > 20 and before.series("loss")[-1][0] == 24, "the log goes farther than the checkpoint"
    trained(tmp_path / "killed", max_steps=36, resume=str(tmp_path / "killed" / "checkpoint-20"))
    assert lines_of(tmp_path / "killed") == lines_of(tmp_path / "whole")
    run, summary = load_run(tmp_path / "killed"), whole.hybrid_summary()
    assert run.leaps == summary["leaps"] and findings(run)["leaps"]["by_verdict"] == summary["leaps_by_verdict"]


class Names(TrainerCallback):
    """The entries of the output folder at every log."""

    def __init__(self):
        self.seen = []

    def on_log(self, args, state, control, **kwargs):
        self.seen.append(sorted(path.name for path in Path(args.output_dir).iterdir()))


def test_a_run_without_leaps_keeps_its_log_and_leaves_only_its_checkpoints(tmp_path):
    names = Names()
    trainer = trained(tmp_path, max_steps=44, enable_predict=False, save_only_model=True, callbacks=[names])
    assert all(LOG_NAME in seen for seen in names.seen), "on disk from the first step on"
    checkpoints = ["checkpoint-20", "checkpoint-40", "checkpoint-44"]
    assert sorted(path.name for path in tmp_path.iterdir()) == checkpoints
    assert (tmp_path / "checkpoint-44" / LOG_NAME).is_file()
    trainer.evaluate(ByteText(16))
    assert sorted(path.name for path in tmp_path.iterdir()) == checkpoints
    history = [entry["step"] for entry in trainer.state.log_history]
    assert steps_of(tmp_path) == steps_of(tmp_path / "checkpoint-44") == history
    assert findings(load_run(tmp_path))["headline"]["final_loss"]["held_out_step"] == 44


def test_a_run_without_leaps_that_was_killed_goes_on_with_its_log(tmp_path):
    trained(tmp_path / "whole", max_steps=36, enable_predict=False)
    with pytest.raises(KeyboardInterrupt):
        trained(tmp_path / "killed", max_steps=36, callbacks=[Stop()], enable_predict=False)
    assert load_run(tmp_path / "killed").series("loss")[-1][0] == 24, "the log goes farther than the checkpoint"
    trained(tmp_path / "killed", max_steps=36, resume=True, enable_predict=False)
    assert lines_of(tmp_path / "killed") == lines_of(tmp_path / "whole")
    trained(tmp_path / "killed", max_steps=44, resume=True, enable_predict=False)
    assert steps_of(tmp_path / "killed")[:9] == list(range(4, 37, 4)), "a longer run goes on with it too"
    assert [path.parent.name for path in tmp_path.glob(f"killed/*/{LOG_NAME}")] == ["checkpoint-44"]


def test_without_a_checkpoint_the_log_stays_in_the_output_folder(tmp_path):
    trainer = trained(tmp_path, max_steps=8, enable_predict=False, save_strategy="no")
    assert [path.name for path in tmp_path.iterdir()] == [LOG_NAME]
    trainer.evaluate(ByteText(16))
    loss = findings(load_run(tmp_path))["headline"]["final_loss"]
    assert loss["training_step"] == loss["held_out_step"] == 8 and 0 < loss["held_out"] < 10
